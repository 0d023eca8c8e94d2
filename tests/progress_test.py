"""Progress in logs: a line per state, none for short work."""

import contextlib
import io

from absl.testing import absltest

from raslik_jax import progress


class ProgressTest(absltest.TestCase):
    def test_short_work_says_nothing_and_loses_no_item(self):
        stream = io.StringIO()
        with contextlib.redirect_stderr(stream):
            items = list(progress.progress(range(5), "work"))
        self.assertEqual(items, [0, 1, 2, 3, 4])
        self.assertEqual(stream.getvalue(), "")

    def test_every_state_is_a_line(self):
        stream = io.StringIO()
        lines = progress._Lines(stream)
        for text in ("\rwork: 1/2", "\rwork: 2/2", "\n", "\r          \r"):
            lines.write(text)
        self.assertEqual(stream.getvalue(), "work: 1/2\nwork: 2/2\n")


if __name__ == "__main__":
    absltest.main()
