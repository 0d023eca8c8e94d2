"""The paper's tables as the reports read them, and which runs they are set beside."""

import pathlib

from absl.testing import parameterized

from raslik_jax.report import published


def _config(dataset: str, checkpoint: str) -> dict:
    return {"corpus": {"dataset": dataset}, "backbone": {"checkpoint": checkpoint}}


class ReadTest(parameterized.TestCase):
    def test_all_blocks_with_the_four_that_do_not_follow(self):
        blocks = published.read_blocks()
        self.assertLen(blocks, 15)
        self.assertEqual(sum(len(block.rows) for block in blocks), 96)
        self.assertEqual(
            [(b.table, b.model, b.algorithm) for b in blocks if not b.follows],
            [
                ("7", "OLMo-2-1124-7B", "ga_gdr"),
                ("8", "OLMo-2-1124-7B", "ga_klr"),
                ("10", "Pythia-2.8B", "ga_klr"),
                ("11", "OLMo-2-1124-13B-Instruct", "ga_gdr"),
            ],
        )

    def test_the_two_wrong_flags(self):
        wrong = [
            (block.table, block.model, block.algorithm, row.strategy)
            for block in published.read_blocks()
            for row in block.rows.values()
            if row.value("is_wrong")
        ]
        self.assertEqual(
            wrong,
            [
                ("2a", "OLMo-2-1124-7B", "ga_gdr", "oracle"),
                ("2a", "OLMo-2-1124-7B", "ga_klr", "oracle"),
            ],
        )

    def test_figures_are_those_printed(self):
        (rows,) = (
            block.rows
            for block in published.read_blocks()
            if (block.table, block.model, block.algorithm) == ("2a", "Pythia-2.8B", "ga_klr")
        )
        metrics = ("forget", "retain", "mahalanobis/distance", "non_sf_target", "pareto")
        found = [rows["embedding"].value(metric) for metric in metrics]
        self.assertEqual(found, [0.133, 0.204, 252.630, 0.881, True])

    def test_without_the_file_there_is_nothing(self):
        self.assertEqual(published.read_blocks(pathlib.Path("/nonexistent/tables.csv")), ())


class MatchTest(parameterized.TestCase):
    @parameterized.parameters(
        ("Random Selection", "random"),
        ("OracleSampling", "oracle"),
        ("Embedding Sim.", "embedding"),
        ("RASLIK-F", "raslik_f"),
        ("RASLIK", "raslik"),
        ("CR-62", "cr_62"),
    )
    def test_methods(self, printed, expected):
        self.assertEqual(published.strategy_printed_as(printed), expected)

    @parameterized.parameters(
        ("howdy", "EleutherAI/pythia-2.8b", ("random", "raslik", "bm25"), "2a"),
        ("howdy", "models/pythia-2.8b/", ("random", "raslik", "cr_25", "cr_50"), "3"),
        ("virtual", "allenai/OLMo-2-1124-7B", ("raslik",), "2b"),
        ("tofu", "allenai/OLMo-2-1124-7B", ("raslik",), "7"),
        ("howdy", "allenai/OLMo-2-1124-13B-Instruct", ("raslik",), "11"),
        ("howdy", "EleutherAI/pythia-14m", ("raslik",), None),
        ("howdy_small", "EleutherAI/pythia-2.8b", ("raslik",), None),
        ("toy", "", ("raslik",), None),
    )
    def test_a_run_is_set_beside_its_own_block(self, dataset, checkpoint, strategies, table):
        found = published.match_block(
            published.read_blocks(),
            _config(dataset, checkpoint),
            algorithm="ga_gdr",
            strategies=strategies,
        )
        self.assertEqual(found and found.table, table)

    def test_an_empty_config_matches_nothing(self):
        blocks = published.read_blocks()
        self.assertIsNone(
            published.match_block(blocks, {}, algorithm="ga_gdr", strategies=("raslik",))
        )
