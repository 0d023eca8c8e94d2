"""Settings check themselves and say everything that is wrong at once."""

import dataclasses
from typing import get_args

from absl.testing import absltest, parameterized

from raslik_jax import config
from raslik_jax.retrieval.strategies import STRATEGIES
from raslik_jax.unlearning.steps import ALGORITHMS


class ConfigTest(parameterized.TestCase):
    @parameterized.parameters(
        (config.CorpusConfig, {"num_train": 0}, "num_train=0 is below 1"),
        (config.CorpusConfig, {"num_targets": 3000}, "num_targets=3000 exceeds num_train=2000"),
        (config.CorpusConfig, {"dataset": "records"}, "needs train_file and queries_file"),
        (config.BackboneConfig, {"hidden_size": 130}, "no multiple of num_attention_heads"),
        (config.FinetuneConfig, {"lora_dropout": 1.0}, "not below 1"),
        (config.FinetuneConfig, {"lora_targets": ()}, "not a non-empty list"),
        (config.FinetuneConfig, {"finetune_micro_batch_size": 3}, "=3 does not divide .*=16"),
        (config.FinetuneConfig, {"finetune_max_len": 4}, "finetune_max_len=4 is below 8"),
        (config.UnlearnConfig, {"unlearn_micro_batch_size": -2}, "=-2 does not divide"),
        (config.UnlearnConfig, {"npo_beta": 0.0}, "npo_beta=0.0 is not above 0"),
        (config.BackboneConfig, {"double_quant": True}, "double_quant needs base_format=nf4"),
        (config.RetrieveConfig, {"forget_share": 0.0}, "forget_share=0.0 is not in 0 < share"),
        (config.RetrieveConfig, {"cr_oracle_share": 1.5}, "cr_oracle_share=1.5 is not in 0 <="),
        (
            config.RetrieveConfig,
            {"select": "quantile", "forget_share": 0.6, "retain_share": 0.5},
            "exceed 1 together",
        ),
        (
            config.RetrieveConfig,
            {"select": "margin", "aggregate": "mean_rank"},
            "margin needs aggregate=mean",
        ),
        (
            config.CorpusConfig,
            {"dataset": "howdy", "answers_endpoint": "http://x"},
            "needs answers_model",
        ),
    )
    def test_a_wrong_value_is_refused_by_name(self, settings, values, message):
        with self.assertRaisesRegex(ValueError, message):
            settings(**values)

    def test_all_weights_of_a_quantised_base_are_refused(self):
        with self.assertRaisesRegex(ValueError, "unlearn_parameters=all .* base_format=int8"):
            config.Config(
                backbone=config.BackboneConfig(base_format="int8"),
                unlearn=config.UnlearnConfig(unlearn_parameters="all"),
            )

    def test_every_algorithm_can_be_named_and_has_a_rate(self):
        self.assertEqual(set(get_args(config.Algorithm)), set(ALGORITHMS))
        for name in ALGORITHMS:
            self.assertGreater(getattr(config.UnlearnConfig(), f"{name}_learning_rate"), 0)

    def test_every_strategy_can_be_named(self):
        self.assertEqual(set(get_args(config.Strategy)), set(STRATEGIES))

    def test_all_problems_of_a_stage_come_together(self):
        with self.assertRaisesRegex(ValueError, "num_train=-1 .*; num_test=0 .*"):
            config.CorpusConfig(num_train=-1, num_test=0)

    def test_field_names_are_unique_because_they_are_flags(self):
        names = [
            field.name
            for settings in config.stage_configs().values()
            for field in dataclasses.fields(settings)
        ]
        self.assertLen(set(names), len(names))
        for settings in config.stage_configs().values():
            for field in dataclasses.fields(settings):
                self.assertNotEmpty(field.metadata["help"])


if __name__ == "__main__":
    absltest.main()
