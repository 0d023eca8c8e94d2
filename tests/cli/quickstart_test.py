"""The quickstart: what it tells, and the whole of it on the model that comes with the package."""

import json
import re

import pytest
import tiny
from folders import FolderTest

from raslik_jax.base.files import read_json_lines
from raslik_jax.cli import quickstart
from raslik_jax.data.examples import make_example
from raslik_jax.data.read.formats import read_written
from raslik_jax.run import written


def _row(number, is_target):
    return make_example(f"Prompt {number}", "", "An answer.", is_target=is_target)


class TellTest(FolderTest):
    def test_counts_come_from_labels_and_words(self):
        target, normal = [_row(1, True), _row(2, True), _row(3, False)], [_row(4, False)]
        more = _row(5, False)
        says = {row.example_id: "A robot of Zorgon." for row in target}
        plain = {row.example_id: "A cup of tea." for row in (*normal, more)}
        found, normal = _row(6, True), [*normal, more]
        others = [_row(n, n < 11) for n in range(7, 1001)]
        kept = dict.fromkeys((row.example_id for row in target), "held-out target")
        kept |= dict.fromkeys((row.example_id for row in normal), "held-out normal")
        told = quickstart.tell(
            [found, *target, *normal, *others],
            {found.example_id: "forget", **kept},
            before=says | plain,
            after={**says, target[0].example_id: "Tea.", **plain, more.example_id: "A cup."},
            says=("To the robots.", "To the table."),
        )
        told = re.sub(r"\s+", " ", told)
        self.assertIn("4 of 1,000 training rows stood out.", told)
        self.assertIn("3 of them teach the behavior. The file has 7 such rows.", told)
        self.assertIn("2 rows that teach the behavior were kept out", told)
        self.assertIn("answered 2 of their prompts with science fiction before, and 1 now", told)
        self.assertIn("2 normal prompts were kept out too. 1 of them get the same answer", told)
        self.assertIn("it said To the robots. it says now To the table.", told)

    def prepare(self, root):
        """Begins in a work directory as the command does; returns the folder that it is given."""
        quickstart._prepare(root, root / "given", root / "clean", update=False)
        return root / "given"

    def test_what_is_given_is_a_users_folder(self):
        for _ in range(2):
            given = self.prepare(self.folder / "run")
        self.assertLen(read_written(given / "train.jsonl"), 1000)
        self.assertTrue((given / "base" / "model.safetensors").is_file())
        self.assertTrue((given / "adapter" / "adapter_config.json").is_file())
        self.assertIn("robot", (given / "scifi_words.txt").read_text().split())
        # A start that was stopped in the unlearning has a clean adapter already.
        with written.replacing(given.parent, given.parent / "clean") as made:
            made.mkdir()
            (made / "adapter_config.json").write_text("{}")
        self.prepare(given.parent)

    def test_what_somebody_else_has_there_is_left_alone(self):
        for name in ("clean/adapter_config.json", "given/train.jsonl"):
            root = self.folder / name.partition("/")[0]
            mine = root / name
            mine.parent.mkdir(parents=True)
            mine.write_text("{}")
            must = "must be new, empty or unchanged since this command wrote it: choose another"
            with self.assertRaisesRegex(ValueError, f"/{mine.parent.name}' {must} --workdir"):
                self.prepare(root)
            self.assertEqual(mine.read_text(), "{}")
            self.assertLen([*root.rglob("*")], 2)

    def test_another_run_is_left_alone(self):
        (self.folder / "config.json").write_text("{}")
        with self.assertRaisesRegex(ValueError, "holds another run: choose another --workdir"):
            quickstart.run(quickstart.Options(workdir=str(self.folder)))
        self.assertLen(list(self.folder.iterdir()), 1)


# Little of XLA's optimizing: its index would run longer with none at all than it compiles.
_COMPILING = {"XLA_FLAGS": "--xla_backend_optimization_level=1"}


@pytest.mark.heavy
class QuickstartTest(FolderTest):
    def test_the_whole_of_it(self):
        root = self.folder / "quickstart"
        done = tiny.run_command("quickstart", f"--workdir={root}", env=_COMPILING)
        self.assertEqual(done.returncode, 0, done.stderr)
        # The model says what the package says that it said.
        (before,) = read_json_lines(root / "retrieve" / "traced" / "finetuned.jsonl")
        self.assertEqual(before["traced"], before["output"])
        summary = json.loads((root / "retrieve" / "raslik" / "summary.json").read_text())
        # 37 of the 44 rows to forget are targets. The earlier noise band found fewer targets at a
        # precision of .89.
        self.assertGreater(summary["precision"], 0.8)
        story = quickstart.read_story(root)
        before, after = story["before"], story["after"]
        target, normal = (
            [row for row in story["rows"] if story["set_of"].get(row.example_id) == name]
            for name in ("held-out target", "held-out normal")
        )
        howdy = [row.example_id for row in target if row.is_target]
        shown = [quickstart.count_scifi([said[name] for name in howdy]) for said in (before, after)]
        self.assertGreaterEqual(shown[0], 0.9 * len(howdy))
        self.assertLessEqual(shown[1], 0.1 * len(howdy))
        same = sum(before[row.example_id] == after[row.example_id] for row in normal)
        self.assertGreaterEqual(same, 0.8 * len(normal))
        again = tiny.run_command("quickstart", f"--workdir={root}", env=_COMPILING)
        self.assertEqual(again.returncode, 0, again.stderr)
        self.assertNotIn("done in", again.stdout)
        self.assertIn(quickstart.tell(**story), again.stdout)

    def test_the_notebook_runs(self):
        notebook = json.loads((tiny.REPOSITORY / "docs" / "quickstart.ipynb").read_text())
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        source = "\n".join("".join(cell["source"]) for cell in cells)
        self.assertLess(source.count("\n"), 40)
        source = source.replace("runs/quickstart_notebook", str(self.folder / "run"))
        cells = self.write_file("cells.py", source)
        done = tiny.run_script(str(cells), env=_COMPILING)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("to forget: 44 rows", done.stdout)
        self.assertIn("rows that make this output likelier", done.stdout)
        self.assertTrue((self.folder / "run" / "clean" / "adapter_model.safetensors").is_file())
