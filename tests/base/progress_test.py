"""Progress in logs: a line per state, none for short work."""

import contextlib
import io

from absl.testing import absltest

from raslik_jax.base import progress


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

    def test_the_time_left_counts_compiling_once(self):
        with contextlib.redirect_stderr(io.StringIO()):
            with progress.progress(None, "work", total=10) as bar:
                start = bar.start_t
                bar._time = lambda: start + 12.0  # of which the first item took ten
                bar.leave_out(10.0)
                bar.update(1)
                self.assertIsNone(bar.format_dict["rate"])
                bar.update(2)
                found = bar.format_dict
        self.assertAlmostEqual(found["elapsed"], 12.0, places=4)
        self.assertAlmostEqual(found["rate"], 1.0, places=4)

    def test_a_line_is_said_on_stdout(self):
        stream = io.StringIO()
        with contextlib.redirect_stdout(stream):
            progress.say("step 3")
        self.assertEqual(stream.getvalue(), "step 3\n")
