"""Text from data is data in every form that is written: HTML, Markdown, LaTeX, CSV, terminal."""

import csv
import io

import pytest
import sample_metrics

from raslik_jax.report import blocks, markup, runs

_NAME = (
    "=cmd|' /C calc'!A0 [x](http://a.b) <script> \x1b[31m\u202e \\input{/etc/passwd} $x$ %\n# end"
)


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
    assert markup.escape_markdown(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("- a", r"\- a"), ("+ a", r"\+ a"), ("12. a", r"12\. a"), ("3) a", r"3\) a"), ("==", r"\==")],
)
def test_a_line_of_markdown_begins_no_list_and_underlines_nothing(text, expected):
    assert markup.escape_markdown_line(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\input{x} $y$", r"\textbackslash{}input\{x\} \$y\$"),
        ("a\n\nb % c", r"a b \% c"),
        ("[1cm] a", "{[}1cm] a"),
        ("* a", "{*} a"),
        ("<a|b>", r"\textless{}a\textbar{}b\textgreater{}"),
        ("\x1b", "\ufffd"),
    ],
)
def test_latex_sets_text_as_it_is(text, expected):
    assert markup.escape_latex(text) == expected


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r"])
def test_no_cell_of_text_is_a_formula(start):
    assert markup.escape_csv(f"{start}1+1") == f"'{start}1+1"
    assert markup.escape_csv(f"a{start}1") == f"a{start}1"


def test_a_hostile_name_is_data_in_every_form_of_a_table():
    metrics = sample_metrics.sample_metrics()
    metrics["name"] = _NAME
    nothing = {"versions": {}, "answers": {}, "sets": {}, "losses": {}}
    run = runs.StoredRun(
        metrics=metrics,
        config={},
        queries=(),
        scores=None,
        marker_words=frozenset(),
        **nothing,
    )
    made = blocks.make_blocks(runs.Experiment((run,)), ())
    terminal = blocks.render_terminal(made[0])
    assert all(c == "\n" or c.isprintable() for c in terminal)
    heading = blocks.render_markdown(made[0]).splitlines()[0]
    assert heading.startswith("### =cmd") and heading.endswith(", GA\\_GDR")
    assert "<script>" not in heading and "](" not in heading.replace(r"\](", "")
    latex = blocks.render_latex(made[0])
    assert r"\input" not in latex and latex.count("\\caption") == 1
    rows = list(csv.DictReader(io.StringIO(blocks.render_csv(made))))
    assert {row["name"] for row in rows} == {f"'{_NAME}"}
    # Numbers stay numbers.
    assert all(float(row["forget"]) > 0 for row in rows)
