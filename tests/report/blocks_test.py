"""The paper's tables from stored runs: marks, spread over seeds, and four forms."""

import csv
import io
import pathlib
import re
import tempfile

import numpy as np
import sample_metrics
import sample_run
from absl.testing import absltest, parameterized

from raslik_jax.evaluate.rates import Interval
from raslik_jax.report import blocks, facts, published, tables, tidy

_PAPER = published.read_blocks()


def _experiment(*seeds, edit=None, **changes) -> facts.Experiment:
    """Returns an experiment of runs on disk; `edit` may change the metrics of each."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            root = pathlib.Path(folder) / str(seed)
            sample_run.write_run(root, seed=seed, **changes)
            run = facts.read_facts(root)
            if edit:
                edit(run.metrics)
            found.append(run)
    (experiment,) = facts.group_runs(found)
    return experiment


def _paper_block(table: str, model: str, algorithm: str) -> blocks.Block:
    (found,) = (
        block
        for block in blocks.published_only(_PAPER)
        if block.paper.table == table and block.paper.model == model
        if block.algorithm == algorithm
    )
    return found


def _titles(block: blocks.Block) -> list[str]:
    return [column.title for column in blocks.lay_out(block).columns]


def _points(block: blocks.Block) -> dict[str, tuple[float, float]]:
    return {
        name: (block.ours[name].value("retain"), block.ours[name].value("forget"))
        for name in block.strategies
    }


def _flags(block: blocks.Block) -> dict[str, bool]:
    return {name: model.value("pareto") for name, model in block.ours.items()}


def _markdown(block: blocks.Block) -> str:
    return tables.render_markdown(blocks.lay_out(block))


def _terminal(block: blocks.Block) -> str:
    return tables.render_terminal(blocks.lay_out(block))


def _all_strategies(metrics) -> None:
    """Gives a run the six strategies of the paper's main table."""
    by_name = {"embedding": "oracle", "bm25": "random"}
    for name, source in by_name.items():
        for entry in [e for e in metrics["methods"] if e["strategy"] == source]:
            moved = {**entry, "strategy": name, "forget": {**entry["forget"]}}
            moved["forget"]["mean"] -= 0.013
            metrics["methods"].append(moved)


class PaperMarksTest(parameterized.TestCase):
    """The paper's print is the oracle: what it sets in blue, and what in gray."""

    @parameterized.parameters(
        ("2a", "OLMo-2-1124-7B", "ga_gdr", {"embedding", "raslik"}, {"oracle", "raslik"}),
        ("2a", "OLMo-2-1124-7B", "ga_klr", {"oracle", "raslik"}, {"embedding", "raslik"}),
        ("2a", "Pythia-2.8B", "ga_gdr", {"oracle", "raslik"}, {"oracle", "raslik"}),
        ("2a", "Pythia-2.8B", "ga_klr", {"embedding", "raslik"}, {"embedding", "raslik"}),
        ("3", "Pythia-2.8B", "ga_gdr", {"cr_62", "raslik"}, {"cr_35", "raslik"}),
        ("3", "Pythia-2.8B", "ga_klr", {"cr_50", "raslik"}, {"cr_62", "raslik"}),
    )
    def test_top_two_are_the_papers(self, table, model, algorithm, distance, non_sf):
        block = _paper_block(table, model, algorithm)
        grid = blocks.lay_out(block)
        for name, expected in (("D_mah", distance), ("Non-SF", non_sf)):
            column = _titles(block).index(name)
            found = {
                strategy
                for strategy, cells in zip(block.strategies, grid.rows, strict=True)
                if cells[column].tone == "best"
            }
            # Embedding's 252.630 and RASLIK's 253.884 are in blue there, against Random's gray.
            self.assertEqual(found, expected)

    def test_what_cannot_be_is_marked(self):
        block = _paper_block("2a", "OLMo-2-1124-7B", "ga_klr")
        self.assertIn("| yes‡ |", _markdown(block))
        text = _markdown(_paper_block("10", "Pythia-2.8B", "ga_klr"))
        self.assertIn("**17.69**†", text)
        self.assertIn("cannot follow from its F and R. They differ by up to 129 %", text)
        every = [_terminal(block) for block in blocks.published_only(_PAPER)]
        self.assertEqual(sum("†:" in text for text in every), 4)
        self.assertEqual(sum("‡:" in text for text in every), 2)


class OursTest(parameterized.TestCase):
    def test_a_matched_block_has_both_sides_and_all_strategies_of_either(self):
        experiment = _experiment(
            0,
            edit=_all_strategies,
            corpus__dataset="howdy",
            backbone__checkpoint="EleutherAI/pythia-2.8b",
        )
        block = blocks.make_blocks(experiment, _PAPER)[0]
        self.assertEqual(
            list(block.strategies),
            ["random", "embedding", "bm25", "oracle", "raslik_f", "raslik"],
        )
        grid = blocks.lay_out(block)
        self.assertEqual(_titles(block), ["Strategy", *["F", "R", "D_mah", "Non-SF", "Pareto"] * 2])
        self.assertEqual(
            [cell.text for cell in grid.rows[-1][6:]], ["0.084", "0.166", "38.622", "0.992", "yes"]
        )
        # D_mah by its definition, over the six methods.
        points = np.array(list(_points(block).values()))
        sigma = np.cov(points.T) * np.array([[1, 0.9], [0.9, 1]])
        offset = points[5] - [1, 0]
        self.assertAlmostEqual(
            block.ours["raslik"].value("mahalanobis/distance"),
            float(np.sqrt(offset @ np.linalg.inv(sigma) @ offset)),
        )

    def test_a_strategy_that_was_not_run_stands_with_the_papers_figures_alone(self):
        def without_marker(metrics):
            for entry in (metrics["finetuned"], *metrics["methods"]):
                entry["non_sf_target"] = entry["non_sf_normal"] = None

        experiment = _experiment(
            0,
            edit=without_marker,
            corpus__dataset="tofu",
            backbone__checkpoint="allenai/OLMo-2-1124-7B",
        )
        block = blocks.make_blocks(experiment, _PAPER)[0]
        self.assertNotIn("bm25", block.ours)
        self.assertEqual(block.paper.rows["bm25"].value("forget"), 0.83)
        self.assertIn("bm25", block.strategies)
        self.assertNotIn("Non-SF", _titles(block))

    def test_damage_is_said_and_no_candidate_for_the_frontier(self):
        def damage(metrics):
            for entry in metrics["methods"]:
                if entry["strategy"] == "raslik":
                    entry["judgment"] = {"verdict": "damaged", "reasons": ["x"], "inputs": []}

        before = blocks.make_blocks(_experiment(0), ())[0]
        block = blocks.make_blocks(_experiment(0, edit=damage), ())[0]
        self.assertIn("Judged damaged (†, ours): RASLIK.", _terminal(block))
        flags = [_flags(b) for b in (before, block)]
        self.assertTrue(flags[0]["raslik"])
        self.assertFalse(flags[1]["raslik"])
        self.assertTrue(any(flags[1].values()))

    def test_without_rates_there_is_no_block(self):
        def remove(metrics):
            for entry in (metrics["finetuned"], *metrics["methods"]):
                entry["forget"] = entry["euclidean"] = None

        self.assertEqual(blocks.make_blocks(_experiment(0, edit=remove), ()), ())

    @parameterized.parameters(
        ({}, "a word that marks the behavior;"),
        ({"by": "classifier"}, "a classifier trained here;"),
    )
    def test_says_what_non_sf_is_beside_the_papers(self, entry, words):
        def measured_by(metrics):
            metrics["non_sf"] = entry
            metrics["chosen"] = bool(entry)

        matched = {"corpus__dataset": "howdy", "backbone__checkpoint": "pythia-2.8b"}
        (block, _) = blocks.make_blocks(_experiment(0, edit=measured_by, **matched), _PAPER)
        (note,) = (note for note in blocks.lay_out(block).notes if note.startswith("Non-SF here"))
        self.assertIn(words + " the paper's is", note)
        first = blocks.lay_out(block).notes[0]
        self.assertEqual("chosen on other queries" in first, bool(entry))

    def test_the_best_two_share_places_where_equal(self):
        def non_sf(metrics):
            for entry in metrics["methods"]:
                value = 0.2 if entry["strategy"] == "random" else 1.0
                entry["non_sf_target"] = Interval(mean=value, low=value, high=value)
                entry["retain"]["mean"] = entry["forget"]["mean"]

        block = blocks.make_blocks(_experiment(0, edit=non_sf), ())[0]
        self.assertTrue(all(_flags(block).values()))
        column = _titles(block).index("Non-SF")
        best = [cells[column].tone == "best" for cells in blocks.lay_out(block).rows]
        self.assertEqual(best, [False, True, True, True])


class FormsTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        experiment = _experiment(
            0,
            name="a|b_c & 100%",
            edit=_all_strategies,
            corpus__dataset="howdy",
            backbone__checkpoint="pythia-2.8b",
        )
        self.blocks = blocks.make_blocks(experiment, _PAPER)

    def test_markdown_lines_have_all_columns(self):
        for block in (*self.blocks, *blocks.published_only(_PAPER)):
            lines = [x for x in _markdown(block).splitlines() if x[:1] == "|"]
            self.assertLen(lines, 2 + len(block.strategies))
            counts = {len(re.findall(r"(?<!\\)\|", line)) for line in lines}
            self.assertEqual(counts, {len(blocks.lay_out(block).columns) + 1})


_NAME = (
    "=cmd|' /C calc'!A0 [x](http://a.b) <script> \x1b[31m\u202e \\input{/etc/passwd} $x$ %\n# end"
)


def test_a_hostile_name_is_data_in_every_form_of_a_table():
    metrics = sample_metrics.sample_metrics()
    metrics["name"] = _NAME
    metrics["settings"] = {}
    nothing = {"answers": {}, "sets": {}, "losses": {}}
    run = facts.Facts(
        metrics=metrics,
        queries=(),
        scores=None,
        marker_words=frozenset(),
        **nothing,
    )
    made = blocks.make_blocks(facts.Experiment((run,)), ())
    terminal = _terminal(made[0])
    assert all(c == "\n" or c.isprintable() for c in terminal)
    heading = _markdown(made[0]).splitlines()[0]
    assert heading.startswith("### =cmd") and heading.endswith(", GA\\_GDR")
    assert "<script>" not in heading and "](" not in heading.replace(r"\](", "")
    text = tables.render_csv(tidy.data_table(tidy.tidy([metrics])))
    rows = list(csv.DictReader(io.StringIO(text)))
    assert {row["run"] for row in rows} == {f"'{_NAME}"}
    # Numbers stay numbers.
    assert all(float(row["mean"]) > 0 for row in rows if row["metric"] == "forget")
