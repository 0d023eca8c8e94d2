"""The tables of a run and of several seeds."""

import copy

import sample_metrics
from absl.testing import parameterized

from raslik_jax.evaluate import judgment
from raslik_jax.report import results, tables

_SIGNS = ("target answers empty: 9 of 48", "and more")


def _cells(table: tables.Table, name: str) -> list[str]:
    title = [column.title.replace("\n", " ") for column in table.columns].index(name)
    return [row[title] for row in table.rows if not isinstance(row, str)]


class ResultsTableTest(parameterized.TestCase):
    def test_last_epochs_in_the_order_of_the_run(self):
        metrics = sample_metrics.sample_metrics()
        table = results.results_table(metrics)
        self.assertEqual(
            _cells(table, "Model"),
            ["Fine-tuned", "Backbone", *["Random", "Oracle", "RASLIK-F", "RASLIK"] * 2],
        )
        self.assertEqual(
            [row for row in table.rows if isinstance(row, str)],
            ["GA_GDR, after epoch 5", "GA_KLR, after epoch 5"],
        )
        last = next(
            e
            for e in metrics["methods"]
            if (e["strategy"], e["algorithm"], e["epoch"]) == ("raslik", "ga_klr", 5)
        )
        row = table.rows[-1]
        self.assertEqual(row[1], tables.format_interval(last["forget"]))
        self.assertEqual(row[2], tables.format_interval(last["retain"]))
        self.assertEqual(row[3], tables.format_interval(last["non_sf_target"]))
        self.assertEqual(row[5], f"{last['euclidean']:.3f}")
        self.assertEqual(
            row[6], tables.format_interval(last["forget_minus_random"], "+.3f", "+.3f")
        )
        self.assertEqual(row[7], "yes")

    def test_all_epochs(self):
        table = results.results_table(sample_metrics.sample_metrics(), epochs="all")
        self.assertEqual(_cells(table, "Epoch"), ["-", "-", *list("12345") * 8])

    def test_methods_that_stopped_early_show_their_own_last_epoch(self):
        metrics = sample_metrics.sample_metrics()
        metrics["methods"] = [
            e for e in metrics["methods"] if e["epoch"] <= 3 or e["strategy"] != "oracle"
        ]
        table = results.results_table(metrics)
        self.assertLen(_cells(table, "Model"), 10)
        self.assertIn("GA_GDR, after epoch 3 and 5", table.rows)

    def test_chosen_epochs_stand_in_a_column(self):
        metrics = sample_metrics.sample_metrics()
        metrics["chosen"] = True
        metrics["methods"] = [
            e for e in metrics["methods"] if e["epoch"] == (2 if e["strategy"] == "oracle" else 5)
        ]
        table = results.results_table(metrics)
        self.assertIn("GA_GDR, at the chosen learning rates", table.rows)
        self.assertEqual(_cells(table, "Epoch"), ["-", "-", *["5", "2", "5", "5"] * 2])
        told = " ".join(results.distances_table(metrics).notes)
        self.assertIn("over the methods of one algorithm, so it depends", told)
        self.assertIn("takes 5 methods of one algorithm whose rates differ", told)

    def test_columns_without_any_value_are_left_out(self):
        metrics = sample_metrics.sample_metrics()
        metrics["methods"] = [e for e in metrics["methods"] if e["strategy"] == "random"]
        del metrics["backbone"]
        table = results.results_table(metrics)
        titles = [column.title for column in table.columns]
        self.assertNotIn("F minus F of Random", titles)
        self.assertNotIn("D_mah", titles)
        self.assertEqual(_cells(table, "Model")[0], "Fine-tuned")
        self.assertFalse(any("backbone" in note for note in table.notes))

    def test_a_tie_is_marked_and_explained(self):
        table = results.results_table(sample_metrics.sample_metrics())
        self.assertEqual(_cells(table, "Pareto")[:6], ["-", "-", "yes", "no ~", "no", "yes"])
        self.assertTrue(any(note.startswith("~:") for note in table.notes))

    @parameterized.parameters(
        (None, "answers of the fine-tuned model", True), ("gold", "the gold answers", False)
    )
    def test_says_what_the_rates_are_taken_against(self, reference, words, floor):
        metrics = sample_metrics.sample_metrics()
        if reference:
            metrics["reference"] = reference
        notes = results.results_table(metrics).notes
        self.assertIn(words, notes[0])
        self.assertEqual(any("forgets nothing more" in note for note in notes), floor)

    def test_empty_answers_are_reported(self):
        metrics = sample_metrics.sample_metrics()
        self.assertFalse(any("Empty" in n for n in results.results_table(metrics).notes))
        metrics["methods"][4]["empty"] = 7
        metrics["finetuned"]["empty_references"] = 2
        notes = results.results_table(metrics).notes
        self.assertIn("Empty answers, each counted as ROUGE 0: Random GA_GDR epoch 5: 7.", notes)
        self.assertIn("Empty references: 2; their pairs score 0.", notes)
        metrics["settings"] = metrics["settings"] | {"evaluate": {"drop_empty": True}}
        notes = results.results_table(metrics).notes
        self.assertIn("Empty answers, left out of F and R: Random GA_GDR epoch 5: 7.", notes)

    def test_a_distance_names_its_pool_and_its_warning(self):
        metrics = sample_metrics.sample_metrics()
        for entry in metrics["methods"]:
            entry["mahalanobis"] = {
                "distance": 12.3456,
                "condition_number": 9.0,
                "is_negative": entry["algorithm"] == "ga_klr",
            }
        table = results.results_table(metrics)
        self.assertEqual(_cells(table, "D_mah"), ["-", "-", *["12.346"] * 4, *["12.346!"] * 4])
        self.assertIn(
            "D_mah of GA_KLR, epoch 5: pool Random, Oracle, RASLIK-F, RASLIK; correlations shrunk "
            "by a tenth, condition number 9.",
            table.notes,
        )
        self.assertTrue(any(note.startswith("!:") for note in table.notes))
        distances = results.distances_table(metrics)
        self.assertEqual(_cells(distances, "D_mah"), [*["12.346"] * 4, *["12.346!"] * 4])
        self.assertEqual(set(_cells(distances, "Condition number")), {"9"})
        self.assertContainsSubset([n for n in table.notes if "D_mah" in n], distances.notes)

    def test_does_not_change_the_metrics(self):
        metrics = sample_metrics.sample_metrics()
        before = copy.deepcopy(metrics)
        for make in (
            results.results_table,
            results.checks_table,
            results.retrieval_table,
            results.distances_table,
            results.details,
        ):
            make(metrics)
        self.assertEqual(metrics, before)


class OtherTablesTest(parameterized.TestCase):
    def test_checks(self):
        table = results.checks_table(sample_metrics.sample_metrics())
        self.assertLen(table.rows, 10)
        self.assertEqual(set(_cells(table, "Distinct-2")), {"0.44 / 0.38"})
        self.assertStartsWith(
            _cells(table, "Judgment")[-1],
            "partly: 9 of 47 prompts that showed the behavior still do",
        )

    def test_damage_is_marked_wherever_the_model_stands(self):
        metrics = sample_metrics.sample_metrics()
        judged = {"verdict": "damaged", "reasons": list(_SIGNS), "inputs": ["answers"]}
        metrics["methods"][4]["judgment"] = judged
        last, checks = results.results_table(metrics), results.checks_table(metrics)
        self.assertEqual(_cells(checks, "Judgment")[2], f"damaged: {'; '.join(_SIGNS)}")
        self.assertIn("; damaged: Random GA_GDR.", " ".join(last.notes))
        for table in (last, checks):
            self.assertEqual(_cells(table, "Model")[2:4], ["Random †", "Oracle"])
        self.assertTrue(any(note.startswith("†") for note in last.notes))
        untouched = results.results_table(sample_metrics.sample_metrics())
        self.assertFalse(any(note.startswith("†") for note in untouched.notes))

    def test_metrics_of_an_older_run_have_no_perplexity_and_no_verdict(self):
        metrics = sample_metrics.sample_metrics()
        for entry in (metrics["finetuned"], metrics["backbone"], *metrics["methods"]):
            for name in ("diversity", "perplexity", "judgment"):
                entry.pop(name, None)
        self.assertIsNone(results.measured_table(metrics, "perplexity"))
        self.assertNotIn("Judgment", [c.title for c in results.checks_table(metrics).columns])

    def test_without_a_marker_there_is_no_non_sf(self):
        metrics = sample_metrics.sample_metrics()
        for entry in (metrics["finetuned"], metrics["backbone"], *metrics["methods"]):
            entry["non_sf_target"] = entry["non_sf_normal"] = None
            entry["perplexity"]["behavior"] = sample_metrics.interval_from_one(4.0)
        metrics["non_sf"] = None
        metrics["behavior"] = judgment.find_behavior("likelihood", finetuned=4.0, backbone=4.1)
        for table in (
            results.results_table(metrics),
            results.checks_table(metrics),
            results.seeds_table([metrics, metrics]),
            results.seeds_checks_table([metrics]),
        ):
            self.assertNotIn("Non-SF", " ".join(column.title for column in table.columns))
        self.assertIn("too little to trace", " ".join(results.results_table(metrics).notes))
        self.assertEqual(
            _cells(
                results.measured_table(metrics, "perplexity"), "Bad outputs (higher is forgotten)"
            )[0],
            "4.00 [3.90, 4.10]",
        )

    def test_without_test_queries_the_rates_are_absent_and_the_table_says_so(self):
        metrics = sample_metrics.sample_metrics()
        for entry in (metrics["finetuned"], metrics["backbone"], *metrics["methods"]):
            for name in ("forget", "retain", "non_sf_target", "non_sf_normal", "euclidean"):
                entry[name] = None
            for name in ("pareto", "tie", "forget_minus_random", "euclidean_min_max"):
                entry[name] = None
        table = results.results_table(metrics)
        self.assertEqual([column.title for column in table.columns], ["Model", "Judgment"])
        self.assertIn("No F and no R: the run has no target and no normal queries", table.notes[0])
        for text in (
            tables.render_terminal(table),
            tables.render_markdown(results.seeds_table([metrics, metrics])),
        ):
            self.assertNotIn("nan", text)

    def test_a_classifiers_score_stands_with_the_texts_it_rests_on(self):
        metrics = sample_metrics.sample_metrics()
        measured = {"texts": {"non-sf": 3, "sci-fi": 3}, "macro_f1": 0.889}
        metrics["non_sf"] = {"by": "classifier", "held_out": measured, "genuine": None}
        notes = " ".join(results.results_table(metrics).notes)
        self.assertIn("macro-F1 0.889 on 6 texts (measured on 3 non-sf and 3", notes)
        self.assertIn("do not rely on it", notes)

    def test_perplexity_in_few_digits(self):
        metrics = sample_metrics.sample_metrics()
        last = metrics["methods"][-1]["perplexity"]
        last["forget"] = {"mean": 123456.0, "low": 99.96, "high": 1e60}
        del last["held-out"]
        table = results.measured_table(metrics, "perplexity")
        self.assertEqual(
            table.rows[-1], ("RASLIK", "5", "1.23e+05 [100, 1.00e+60]", "1.22 [1.12, 1.32]", "-")
        )
        self.assertEqual(table.rows[0][:3], ("Fine-tuned", "-", "1.50 [1.40, 1.60]"))

    def test_distances(self):
        table = results.distances_table(sample_metrics.sample_metrics())
        self.assertEqual(_cells(table, "Euclidean, min-max"), ["0.500"] * 8)
        self.assertEqual(set(_cells(table, "D_mah")), {"-"})
        self.assertTrue(any("takes 5 methods" in note for note in table.notes))

    def test_retrieval(self):
        table = results.retrieval_table(sample_metrics.sample_metrics())
        self.assertEqual(
            table.rows[0], ("Random", "200", "0.105", "0.100", "200", "0", "12", "-", "-")
        )
        self.assertEqual(_cells(table, "AUROC"), ["-", "-", "0.991", "0.991"])

    def test_labels_of_one_kind_leave_no_auroc_and_the_table_says_why(self):
        metrics = sample_metrics.sample_metrics()
        for entry in metrics["retrieval"].values():
            entry.update(base_rate=1.0, auroc=None, auprc=None)
        table = results.retrieval_table(metrics)
        self.assertEqual(set(_cells(table, "AUROC")), {"-"})
        self.assertIn("all training examples have the same label", table.notes[1])

    def test_retrieval_without_labels(self):
        metrics = sample_metrics.sample_metrics()
        metrics["retrieval"] = {"raslik": {"num_forget": 5, "num_retain": 4}}
        self.assertEqual(
            results.retrieval_table(metrics).rows, (("RASLIK", "5", "-", "-", "4", *["-"] * 4),)
        )
        titles = [column.title for column in results.seeds_table([metrics]).columns]
        self.assertNotIn("Precision", titles)

    def test_seeds(self):
        runs = [sample_metrics.sample_metrics(seed=seed) for seed in (0, 1, 2)]
        runs[1]["methods"][-1]["forget_minus_random"]["high"] = 0.01
        runs[2]["methods"][-1]["euclidean"] = 2.0
        table = results.seeds_table(runs)
        self.assertEqual(
            [row[0] for row in table.rows if not isinstance(row, str)],
            ["Fine-tuned", "Backbone", *["Random", "Oracle", "RASLIK-F", "RASLIK"] * 2],
        )
        self.assertEqual(_cells(table, "Below Random")[2:6], ["-", "3 of 3", "3 of 3", "3 of 3"])
        self.assertEqual(_cells(table, "Below Random")[-1], "2 of 3")
        self.assertEqual(_cells(table, "Closer")[-1], "2 of 3")
        forgets = [run["methods"][-1]["forget"]["mean"] for run in runs]
        self.assertEqual(
            _cells(table, "F, forget rate")[-1],
            f"{sum(forgets) / 3:.3f} [{min(forgets):.3f}, {max(forgets):.3f}]",
        )
        self.assertEqual(_cells(table, "Precision")[-1], "0.965 [0.965, 0.965]")

    @parameterized.parameters(({0: "random"},), ({0: "raslik"},), ({0: "random", 1: "raslik"},))
    def test_a_seed_without_a_distance_leaves_no_pairs(self, lacking):
        runs = [sample_metrics.sample_metrics(seed=seed) for seed in (0, 1, 2)]
        for place, strategy in lacking.items():
            for entry in runs[place]["methods"]:
                entry["euclidean"] = None if entry["strategy"] == strategy else entry["euclidean"]
        table = results.seeds_table(runs)
        if "random" in lacking.values():
            self.assertNotIn("Closer", [column.title for column in table.columns])
        else:
            self.assertEqual(_cells(table, "Closer")[-3:], ["3 of 3", "3 of 3", "-"])

    def test_seeds_of_what_stands_behind_the_rates(self):
        runs = [sample_metrics.sample_metrics(seed=seed) for seed in (0, 1, 2)]
        for run, mean in zip(runs, (2.0, 8.0, 4.0), strict=True):
            run["methods"][-1]["perplexity"]["forget"] = sample_metrics.interval_from_one(mean)
        runs[1]["methods"][-1]["judgment"]["verdict"] = "damaged"
        del runs[0]["methods"][-1]["perplexity"]["retain"]
        table = results.seeds_checks_table(runs)
        self.assertEqual(_cells(table, "Perplexity, forget")[-1], "4.00 [2.00, 8.00]")
        self.assertEndsWith(_cells(table, "Perplexity, retain")[-1], " (2 runs)")
        self.assertEqual(_cells(table, "Judged")[-1], "2 partly, 1 damaged")
        self.assertFalse(any("TOFU" in column.title for column in table.columns))

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
            ("backbone", "2.50", "2.25", "-"),
            ("step 0", "0.50", "2.00", "0 of 15"),
            ("step 5", "2.40", "2.05", "13 of 15"),
        ]
        self.assertEqual(
            table.rows,
            ("RASLIK GA_GDR: step 5 is kept, enough is gone", *rows, "RASLIK GA_GDR", *rows),
        )
        titles = [column.title for column in table.columns]
        self.assertEqual(titles, ["Model", "forget", "kept", "forget,\ngone"])

    def test_tofu(self):
        metrics = sample_metrics.sample_metrics()
        self.assertIsNone(results.measured_table(metrics, "tofu"))
        values = {"probability": 0.5, "rouge": 0.25, "truth_ratio": 0.125}
        entry = {"sets": {"forget": values, "world_facts": values}, "model_utility": None}
        for model in (metrics["finetuned"], metrics["backbone"], *metrics["methods"]):
            model["tofu"] = dict(entry)
        table, three = results.measured_table(metrics, "tofu"), "0.500 / 0.250 / 0.125"
        self.assertEqual(table.rows[0], ("Fine-tuned", "-", three, three))
        self.assertLen([n for n in table.notes if n.startswith("No ")], 2)
        for model in (metrics["finetuned"], metrics["backbone"], *metrics["methods"]):
            model["tofu"] |= {"forget_quality": 1.234e-7, "model_utility": 0.6}
        table = results.measured_table(metrics, "tofu")
        self.assertEqual(_cells(table, "Forget quality")[-1], "1.23e-07")
        self.assertEmpty([n for n in table.notes if n.startswith("No ")])
        joined = results.seeds_checks_table([metrics])
        self.assertEqual(_cells(joined, "TOFU, model utility")[-1], "0.600 [0.600, 0.600]")

    def test_seeds_refuses_nothing_and_unlike_runs(self):
        with self.assertRaisesRegex(ValueError, "at least one run"):
            results.seeds_table([])
        runs = [sample_metrics.sample_metrics(seed=seed) for seed in (0, 7)]
        runs[1]["methods"] = runs[1]["methods"][:5]
        with self.assertRaisesRegex(ValueError, "others in 'sample' with seed 7 than"):
            results.seeds_table(runs)
