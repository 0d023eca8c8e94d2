"""One table in its forms, and text from data as data in each of them."""

import pytest
from absl.testing import parameterized
from snapshots import said

from raslik_jax.report import tables


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](http://b.c)", r"\[a\](http&#58;//b.c)"),
        ("see www.b.c or a@b.c", "see www&#46;b.c or a&#64;b.c"),
        ("![a](b)", r"!\[a\](b)"),
        ("a | b\r\n\r\n# c", r"a \| b<br>\# c"),
        ("&#35; \x1b[1m\u2066", "&amp;\\#35; \ufffd\\[1m\ufffd"),
        ("\ud800", "\ufffd"),
        ("می\u200cروم", "می\u200cروم"),
        ("-0.1 [+1, 2]", r"-0.1 \[+1, 2\]"),
    ],
)
def test_markdown_shows_text_as_it_is(text, expected):
    assert tables.escape_markdown(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("- a", r"\- a"), ("+ a", r"\+ a"), ("12. a", r"12\. a"), ("3) a", r"3\) a"), ("==", r"\==")],
)
def test_a_line_of_markdown_begins_no_list_and_underlines_nothing(text, expected):
    assert tables.escape_markdown_line(text) == expected


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r"])
def test_no_cell_of_text_is_a_formula(start):
    assert tables.escape_csv(f"{start}1+1") == f"'{start}1+1"
    assert tables.escape_csv(f"a{start}1") == f"a{start}1"


class FormatTest(parameterized.TestCase):
    @parameterized.parameters(
        ((0.3123, 0.2801, 0.3499), (), "0.312 [0.28, 0.35]"),
        ((1.0, 1.0, 1.0), (), "1.000 [1.00, 1.00]"),
        ((-0.25, -0.3, 0.01), ("+.3f", "+.3f"), "-0.250 [-0.300, +0.010]"),
        ((-0.087, -0.171, -0.0026), ("+.3f", "+.3f"), "-0.087 [-0.171, -0.003]"),
        ((0.0, -0.0004, 0.0), ("+.3f", "+.3f"), "+0.000 [+0.000, +0.000]"),
        ((0.1234, 0.1229, 0.125), (".3f", ".3f"), "0.123 [0.123, 0.125]"),
    )
    def test_interval(self, values, options, expected):
        entry = dict(zip(("mean", "low", "high"), values, strict=True))
        self.assertEqual(tables.format_interval(entry, *options), expected)

    def test_what_was_not_measured_is_a_dash(self):
        self.assertEqual(tables.format_interval(None), "-")


class RenderTest(parameterized.TestCase):
    def test_terminal_aligns_and_heads(self):
        table = tables.Table(
            (tables.Column("Name"), tables.Column("Two\nlines", "right")),
            (("a", "1"), "Block", ("longer", "22.5")),
            ("A note.",),
        )
        said(tables.render_terminal(table))

    def test_generated_text_cannot_steer_the_terminal(self):
        table = tables.Table((tables.Column("P"),), (("a\x1b[31m\u202eb\n\tc\x07",),))
        text = tables.render_terminal(table)
        self.assertTrue(all(c == "\n" or c.isprintable() for c in text))
        self.assertEqual(text.splitlines()[-1], "a\ufffd[31m\ufffdb c\ufffd")

    @parameterized.parameters(
        ("one\r\ntwo\rthree", "one\ntwo\nthree"),
        *((text, text) for text in ("co\xadop", "ไทย\u200bคำ", "\u200fשלום", "آية\u06dd")),
        ("\U0001f3f4\U000e0067\U000e007f", "\U0001f3f4\U000e0067\U000e007f"),
        ("a\u202eb\u2066c\x07", "a\ufffdb\ufffdc\ufffd"),
    )
    def test_only_what_acts_is_replaced(self, text, shown):
        self.assertEqual(tables.visible(text), shown)

    def test_markdown_shows_text_as_it_is(self):
        table = tables.Table(
            (tables.Column("A|B"), tables.Column("N", "right")),
            (("x | y\n<b>*z*</b> `q`\x1b", "1"), "GA_GDR"),
            ("~: a tie.",),
        )
        said(tables.render_markdown(table))
