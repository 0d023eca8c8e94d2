"""Messages are short, printable and say what to do, whatever the data holds."""

import pytest
from absl.testing import parameterized

from raslik_jax.base import messages


class MessagesTest(parameterized.TestCase):
    def test_control_characters_are_shown_and_not_obeyed(self):
        self.assertEqual(
            messages.printable("a\x1b[31mred\x9b\u202eb\n\tc\ud800"),
            "a\\x1b[31mred\\x9b\\u202eb\n\tc\\ud800",
        )

    def test_a_quoted_value_is_one_short_line(self):
        self.assertEqual(messages.shown("a\nb"), "'a\\nb'")
        self.assertLen(messages.shown("x" * 10**6, 40), 40)
        self.assertEqual(messages.one_line("a \n b\r c", 0), "a b c")

    def test_of_many_names_a_few_are_shown(self):
        self.assertEqual(messages.some_of("abcdefg", 2), "'a', 'b' and 5 more")

    def test_a_long_message_keeps_its_beginning_and_what_to_do(self):
        text = messages.bounded("file.json:3 must be text, got \x1b[31m" + "x" * 9999 + ": fix it")
        self.assertLessEqual(len(text), messages.MAX_MESSAGE)
        self.assertStartsWith(text, "file.json:3 must be text, got \\x1b[31m")
        self.assertEndsWith(text, ": fix it")

    @parameterized.parameters((1, 10), (3, 10), (500, 10), (500, 4000))
    def test_problems_are_listed_as_far_as_there_is_room_and_counted(self, count, length):
        problems = [f"{number}\n{'p' * length}" for number in range(count)]
        text = messages.listed_problems(problems, "correct them")
        self.assertLessEqual(len(text), messages.MAX_MESSAGE)
        self.assertStartsWith(text, "0 ppp")
        self.assertEndsWith(text, ": correct them")
        shown = text.count("; ") - ("more" in text)
        self.assertEqual("more" in text, count > shown + 1)
        if "more" in text:
            self.assertIn(f"and {count - shown - 1} more", text)

    def test_any_value_can_be_shown(self):
        deep: list = []
        for _ in range(100_000):
            deep = [deep]
        for value in ("a\n\x1b\u202e" * 99, deep, 10**9999, b"\0" * 99, {"k": "\ud800"}):
            text = messages.shown(value)
            self.assertLessEqual(len(text), 60)
            self.assertTrue(text.isprintable(), msg=text)


def test_an_unknown_word_is_refused_with_the_known_ones():
    known = {"examples": 1, "tokens": 2}
    assert messages.chosen("mean", "tokens", known) == 2
    with pytest.raises(ValueError, match="mean must be one of examples, tokens, got 'token'"):
        messages.chosen("mean", "token", known)
