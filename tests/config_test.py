"""Settings check themselves and say everything that is wrong at once."""

import dataclasses
import math
from typing import get_args

from absl.testing import absltest, parameterized

from raslik_jax import config
from raslik_jax.retrieve.strategies import STRATEGIES
from raslik_jax.sketch.projections import FAMILIES
from raslik_jax.train.steps import ALGORITHMS


class ConfigTest(parameterized.TestCase):
    @parameterized.parameters(
        (
            config.CorpusConfig,
            {"num_train": 0},
            "--corpus.num_train must be at least 1 for --corpus.dataset=toy, got 0",
        ),
        (
            config.CorpusConfig,
            {"num_targets": 3000},
            "--corpus.num_targets must be at most --corpus.num_train=2000, got 3000",
        ),
        (
            config.CorpusConfig,
            {"dataset": "records"},
            "needs --corpus.train_file and --corpus.queries_file",
        ),
        (
            config.BackboneConfig,
            {"hidden_size": 130},
            "a multiple of --backbone.num_attention_heads=4, got 130",
        ),
        (
            config.FinetuneConfig,
            {"lora_dropout": 1.0},
            "--finetune.lora_dropout must be at least 0 and below 1, got 1.0",
        ),
        (config.FinetuneConfig, {"lora_targets": ()}, "a list of names, none of them empty"),
        (
            config.FinetuneConfig,
            {"micro_batch_size": 3},
            "micro_batch_size must divide --finetune.batch_size=16, got 3",
        ),
        (
            config.FinetuneConfig,
            {"max_len": 4},
            "--finetune.max_len must be 0 or at least 8, got 4",
        ),
        (config.UnlearnConfig, {"micro_batch_size": -2}, "must be at least 0, got -2"),
        (config.UnlearnConfig, {"npo_beta": 0.0}, "--unlearn.npo_beta must be above 0, got 0.0"),
        (
            config.BackboneConfig,
            {"double_quant": True},
            "--backbone.double_quant needs --backbone.format=nf4",
        ),
        (
            config.RetrieveConfig,
            {"forget_share": 0.0},
            "--retrieve.forget_share must be above 0 and at most 1, got 0.0",
        ),
        (
            config.RetrieveConfig,
            {"cr_oracle_share": 1.5},
            "--retrieve.cr_oracle_share must be at least 0 and at most 1, got 1.5",
        ),
        (
            config.RetrieveConfig,
            {"select": "quantile", "forget_share": 0.6, "retain_share": 0.5},
            "at most 1 together, got 0.6 and 0.5",
        ),
        (
            config.RetrieveConfig,
            {"select": "margin", "aggregate": "mean_rank"},
            "--retrieve.select=margin needs --retrieve.aggregate=mean, got mean_rank",
        ),
        (
            config.CorpusConfig,
            {"dataset": "howdy", "answers_endpoint": "http://x"},
            "needs --corpus.answers_model",
        ),
    )
    def test_a_wrong_value_is_refused_by_name(self, settings, values, message):
        with self.assertRaisesRegex(ValueError, message):
            settings(**values)

    @parameterized.parameters(
        (
            "records",
            {"num_train": 9, "num_retrieval": 2},
            "--corpus.num_train .*; --corpus.num_retrieval ",
        ),
        ("toy", {"world_seed": 3}, "--corpus.world_seed has no effect with --corpus.dataset=toy"),
        ("virtual", {"howdy_file": "x"}, "--corpus.howdy_file has no effect"),
    )
    def test_a_flag_that_the_dataset_does_not_read_is_refused(self, dataset, values, message):
        files = {"train_file": "a", "queries_file": "b"} if dataset == "records" else {}
        config.CorpusConfig(dataset=dataset, **files)
        with self.assertRaisesRegex(ValueError, message):
            config.CorpusConfig(dataset=dataset, **files, **values)

    def test_all_weights_of_a_quantized_base_are_refused(self):
        with self.assertRaisesRegex(
            ValueError, "--unlearn.parameters=all .* --backbone.format=plain, got int8"
        ):
            config.Config(
                backbone=config.BackboneConfig(format="int8"),
                unlearn=config.UnlearnConfig(parameters="all"),
            )

    def test_every_algorithm_can_be_named_and_has_a_rate(self):
        self.assertEqual(set(get_args(config.Algorithm)), set(ALGORITHMS))
        for name in ALGORITHMS:
            self.assertGreater(getattr(config.UnlearnConfig(), f"{name}_learning_rate"), 0)

    def test_every_strategy_and_projection_can_be_named(self):
        self.assertEqual(set(get_args(config.Strategy)), set(STRATEGIES))
        self.assertEqual(set(get_args(config.Projection)), set(FAMILIES))

    def test_all_problems_of_a_stage_come_together(self):
        with self.assertRaisesRegex(
            ValueError, "--corpus.num_train .* -1; --corpus.num_test .* -1"
        ):
            config.CorpusConfig(num_train=-1, num_test=-1)

    def test_every_number_has_a_range_and_nothing_outside_it_is_taken(self):
        for settings in (config.Config, *config.stage_configs().values()):
            for field in dataclasses.fields(settings):
                if type(field.default) not in (int, float):
                    continue
                limits = field.metadata["limits"]
                self.assertNotEmpty(limits, field.name)
                kind = type(field.default)
                wrong = [math.nan, math.inf, -math.inf] if kind is float else []
                for name, bound in limits.items():
                    wrong.append(kind(bound + {"at least": -1, "at most": 1}.get(name, 0)))
                for value in wrong:
                    with self.assertRaisesRegex(
                        ValueError, f"--{settings.prefix()}{field.name} must be "
                    ):
                        settings(**{field.name: value})

    def test_every_field_has_a_help_text(self):
        for settings in config.stage_configs().values():
            for field in dataclasses.fields(settings):
                self.assertNotEmpty(field.metadata["help"])

    @parameterized.parameters(
        ({"name": "run"}, "must have 'seed'"),
        ({"name": "run", "seed": 0, "corpus": []}, "corpus in .* must be an object"),
        ({"name": "run", "seed": 0, "corpus": {"new": 1}}, "those of this version, got 'new'"),
    )
    def test_a_stored_config_of_another_shape_is_refused_by_field(self, value, message):
        with self.assertRaisesRegex(ValueError, message):
            config.config_from_json(value)


if __name__ == "__main__":
    absltest.main()
