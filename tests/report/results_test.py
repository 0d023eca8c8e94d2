"""The tables of a run and of several seeds."""

import copy
import csv
import io

import sample_metrics
from absl.testing import parameterized
from snapshots import said

from raslik_jax.evaluate import judgment
from raslik_jax.report import results, tables, tidy

_SIGNS = ("target answers empty: 9 of 48", "and more")


def _cells(table: tables.Table, name: str) -> list[str]:
    title = [column.title.replace("\n", " ") for column in table.columns].index(name)
    return [row[title] for row in table.rows if not isinstance(row, str)]


def _titles(table: tables.Table) -> list[str]:
    return [column.title for column in table.columns]


def _models(metrics):
    return metrics["finetuned"], metrics["backbone"], *metrics["methods"]


def _chosen(metrics):
    metrics["chosen"] = True
    metrics["methods"] = [
        e for e in metrics["methods"] if e["epoch"] == (2 if e["strategy"] == "oracle" else 5)
    ]


def _stopped_early(metrics):
    metrics["methods"] = [
        e for e in metrics["methods"] if e["epoch"] <= 3 or e["strategy"] != "oracle"
    ]


def _random_alone(metrics):
    metrics["methods"] = [e for e in metrics["methods"] if e["strategy"] == "random"]
    del metrics["backbone"]


def _with_shares(metrics):
    for entry in metrics["methods"]:
        share = {"mean": entry["retain"]["mean"], "low": 0.3, "high": 0.99}
        entry["left"] = {"nats": share, "words": share}


def _damaged(metrics):
    judged = {"verdict": "damaged", "reasons": list(_SIGNS), "inputs": ["answers"]}
    metrics["methods"][4]["judgment"] = judged
    metrics["methods"][4]["empty"] = 7
    metrics["finetuned"]["empty_references"] = 2


def _unmarked(metrics):
    for entry in _models(metrics):
        entry["non_sf_target"] = entry["non_sf_normal"] = None
        entry["perplexity"]["behavior"] = sample_metrics.interval_from_one(4.0)
    metrics["non_sf"] = None
    metrics["behavior"] = judgment.find_behavior("likelihood", finetuned=4.0, backbone=4.1)


def _without_queries(metrics):
    for entry in _models(metrics):
        for name in ("forget", "retain", "non_sf_target", "non_sf_normal", "euclidean"):
            entry[name] = None
        for name in ("pareto", "forget_minus_random"):
            entry[name] = None


def _by_a_classifier(metrics):
    metrics["non_sf"] = {"by": "classifier", "note": "Non-SF: a mean probability."}


def _of_one_label(metrics):
    for entry in metrics["retrieval"].values():
        entry.update(base_rate=1.0, auroc=None, auprc=None)


def _older(metrics):
    for entry in _models(metrics):
        for name in ("diversity", "perplexity", "judgment"):
            entry.pop(name, None)


def _absurd(metrics):
    last = metrics["methods"][-1]["perplexity"]
    last["forget"] = {"mean": 123456.0, "low": 99.96, "high": 1e60}
    del last["held-out"]


def _unlabeled(metrics):
    metrics["retrieval"] = {"raslik": {"num_forget": 5, "num_retain": 4}}


class TablesTest(parameterized.TestCase):
    @parameterized.parameters(
        *(None, _chosen, _stopped_early, _random_alone),
        *(_damaged, _unmarked, _without_queries, _by_a_classifier),
        *(_of_one_label, _older, _absurd, _unlabeled, _with_shares),
    )
    def test_a_run_has_the_tables_that_were_recorded(self, edit):
        metrics = sample_metrics.sample_metrics()
        if edit:
            edit(metrics)
        before = copy.deepcopy(metrics)
        text = "\n\n".join(map(tables.render_terminal, results.tables_of([metrics])))
        self.assertNotIn("nan", text)
        self.assertEqual(metrics, before)
        said(text)

    def test_all_epochs(self):
        table = results.results_table(sample_metrics.sample_metrics(), epochs="all")
        self.assertEqual(_cells(table, "Epoch"), ["-", "-", *list("12345") * 8])

    def test_probes(self):
        metrics = sample_metrics.sample_metrics()
        self.assertIsNone(results.probes_table(metrics))
        self.assertNotIn("Probes while unlearning", results.details(metrics))
        probes = [
            {"step": step, "levels": {"forget": forget, "kept": kept}, "gone": {"forget": gone}}
            for step, forget, kept, gone in (
                (0, 0.5, 2.0, {"way": 0.0, "gone": 0, "of": 15}),
                (5, 2.4, 2.05, {"way": 0.9, "gone": 13, "of": 15}),
            )
        ]
        one = {"strategy": "raslik", "algorithm": "ga_gdr", "rows": {"forget": 16, "kept": 16}}
        one |= {"backbone": {"forget": 2.5, "kept": 2.25}, "probes": probes}
        metrics["probes"] = [one | {"kept": 5, "end": "forgotten"}, one]
        table = results.details(metrics)["Probes while unlearning"]
        rows = [
            ("base model", "2.50", "2.25", "-"),
            ("step 0", "0.50", "2.00", "0 of 15"),
            ("step 5", "2.40", "2.05", "13 of 15"),
        ]
        self.assertEqual(
            table.rows,
            ("RASLIK GA_GDR: step 5 is kept, enough is gone", *rows, "RASLIK GA_GDR", *rows),
        )
        self.assertEqual(
            _titles(table), ["Model", "rows to forget", "other rows", "rows to forget,\ngone"]
        )

    def test_models_are_compared_with_the_retrained_one_where_there_is_one(self):
        metrics = sample_metrics.sample_metrics(num_epochs=1)
        self.assertIsNone(results.retrained_table(metrics))
        first = metrics["methods"][0]
        parts = dict.fromkeys(("kl_from_retrained", "kl_to_retrained", "kl", "same_answers"), 0.5)
        metrics["methods"] = [
            {**first, "algorithm": name, "distance": {"normal": parts}}
            for name in ("ga_gdr", "retrain", "retrain_again")
        ]
        table = results.retrained_table(metrics)
        names = ["GA_GDR", "Retrained", "Retrained, other seed"]
        self.assertEqual(_cells(table, "Algorithm"), names)
        self.assertEqual(_cells(table, "KL from / to retrained, normal"), ["0.5 / 0.5"] * 3)
        self.assertEqual(_cells(table, "Same answers, normal"), ["50%"] * 3)
        with_floor = table.notes
        metrics["methods"].pop()
        self.assertNotEqual(results.retrained_table(metrics).notes, with_floor)


_NAME = "=cmd|' /C calc'!A0 [x](http://a.b) <script> \x1b[31m\u202e $x$ %\n# end"


def test_a_hostile_name_is_data_in_every_form_of_a_table():
    metrics = sample_metrics.sample_metrics(num_epochs=1)
    metrics["retrieval"] = {_NAME: metrics["retrieval"]["raslik"]}
    table = results.retrieval_table(metrics)
    assert all(c == "\n" or c.isprintable() for c in tables.render_terminal(table))
    (row,) = (x for x in tables.render_markdown(table).splitlines() if x.startswith("| =cmd"))
    assert "<script>" not in row and "](" not in row.replace(r"\](", "")
    metrics["name"] = _NAME
    text = tables.render_csv(tidy.data_table(tidy.tidy([metrics])))
    rows = list(csv.DictReader(io.StringIO(text)))
    assert {row["run"] for row in rows} == {f"'{_NAME}"}
    # Numbers stay numbers.
    assert all(float(row["mean"]) > 0 for row in rows if row["metric"] == "forget")


class SeedsTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.runs = [sample_metrics.sample_metrics(seed=seed) for seed in (0, 1, 2)]

    def test_means_over_seeds_and_what_holds_in_how_many(self):
        runs = self.runs
        runs[1]["methods"][-1]["forget_minus_random"]["high"] = 0.01
        runs[2]["methods"][-1]["euclidean"] = 2.0
        for run, mean in zip(runs, (2.0, 8.0, 4.0), strict=True):
            run["methods"][-1]["perplexity"]["forget"] = sample_metrics.interval_from_one(mean)
        runs[1]["methods"][-1]["judgment"]["verdict"] = "damaged"
        del runs[0]["methods"][-1]["perplexity"]["retain"]
        rates, checks = results.tables_of(runs)
        self.assertEqual(_cells(rates, "Below Random")[-1], "2 of 3")
        self.assertEqual(_cells(rates, "Closer")[-1], "2 of 3")
        means = [run["methods"][-1]["forget"]["mean"] for run in runs]
        spread = f"{sum(means) / 3:.3f} [{min(means):.3f}, {max(means):.3f}]"
        self.assertEqual(_cells(rates, "F, forget rate")[-1], spread)
        # Of a perplexity the geometric mean.
        self.assertEqual(_cells(checks, "Perplexity, forget")[-1], "4.00 [2.00, 8.00]")
        self.assertEndsWith(_cells(checks, "Perplexity, retain")[-1], " (2 runs)")
        self.assertEqual(_cells(checks, "Judged")[-1], "2 partly, 1 damaged")
        for table in (rates, checks):
            said(tables.render_markdown(table))

    @parameterized.parameters(({0: "random"},), ({0: "raslik"},), ({0: "random", 1: "raslik"},))
    def test_a_seed_without_a_distance_leaves_no_pairs(self, lacking):
        for place, strategy in lacking.items():
            for entry in self.runs[place]["methods"]:
                entry["euclidean"] = None if entry["strategy"] == strategy else entry["euclidean"]
        table = results.seeds_table(self.runs)
        if "random" in lacking.values():
            self.assertNotIn("Closer", _titles(table))
        else:
            self.assertEqual(_cells(table, "Closer")[-3:], ["3 of 3", "3 of 3", "-"])

    def test_nothing_and_unlike_runs_are_refused(self):
        with self.assertRaisesRegex(ValueError, "at least one run"):
            results.seeds_table([])
        self.runs[1]["methods"] = self.runs[1]["methods"][:5]
        with self.assertRaisesRegex(ValueError, "others in 'sample' with seed 1 than"):
            results.seeds_table(self.runs)
