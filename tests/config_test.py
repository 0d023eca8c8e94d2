"""Settings check themselves and say everything that is wrong at once."""

import math

from absl.testing import parameterized

from raslik_jax import config
from raslik_jax.base import settings
from raslik_jax.config import Config


def _with(**values):
    """Returns the config with other values, `stage__name` or `stage__member__name` each."""
    return settings.replaced(Config(), {k.replace("__", "."): v for k, v in values.items()})


# How far beyond its bound a value is refused, by the name of the limit; at "above", "below": on it.
_BEYOND = {"at least": -1, "0 or at least": -0.5, "at most": 1}


class ConfigTest(parameterized.TestCase):
    @parameterized.parameters(
        (
            {"corpus__num_train": 0},
            "--corpus.num_train must be at least 1 with --corpus.dataset=toy, got 0",
        ),
        (
            {"corpus__num_targets": 3000},
            "--corpus.num_targets must be at most --corpus.num_train=2000, got 3000",
        ),
        (
            {"corpus__dataset": "records"},
            "--corpus.dataset=records needs --corpus.records.train_file",
        ),
        (
            {"backbone__hidden_size": 130},
            "a multiple of --backbone.num_attention_heads=4, got 130",
        ),
        (
            {"finetune__lora_dropout": 1.0},
            "--finetune.lora_dropout must be at least 0 and below 1, got 1.0",
        ),
        ({"finetune__lora_targets": ()}, "a list of names, none of them empty"),
        (
            {"finetune__micro_batch_size": 3},
            "micro_batch_size must divide --finetune.batch_size=16, got 3",
        ),
        ({"finetune__max_len": 4}, "--finetune.max_len must be 0 or at least 8, got 4"),
        ({"unlearn__micro_batch_size": -2}, "must be at least 0, got -2"),
        (
            {"unlearn__algorithms": ["npo"], "unlearn__npo__beta": 0.0},
            "--unlearn.npo.beta must be above 0, got 0.0",
        ),
        ({"unlearn__algorithms": ["ga", "gs"]}, "--unlearn.algorithms must be a list of ga, .*gs"),
        ({"backbone__double_quant": True}, "double_quant needs --backbone.format=nf4, got plain"),
        (
            {"retrieve__forget_share": 0.0},
            "--retrieve.forget_share must be above 0 and at most 1, got 0.0",
        ),
        (
            {"retrieve__strategies": ["cr"], "retrieve__cr__oracle_share": 1.5},
            "--retrieve.cr.oracle_share must be at least 0 and at most 1, got 1.5",
        ),
        (
            {
                "retrieve__select": "quantile",
                "retrieve__forget_share": 0.6,
                "retrieve__retain_share": 0.5,
            },
            "at most 1 together, got 0.6 and 0.5",
        ),
        (
            {"retrieve__select": "margin", "retrieve__aggregate": "mean_rank"},
            "--retrieve.select=margin needs --retrieve.aggregate=mean, got mean_rank",
        ),
        (
            {"backbone__format": "int8", "unlearn__parameters": "all"},
            "--unlearn.parameters=all .* --backbone.format=plain, got int8",
        ),
        (
            {"corpus__num_train": -1, "corpus__num_test": -1, "seed": -1, "sketch__none": 0},
            "--corpus.num_train .* -1; --corpus.num_test .* -1; --sketch.none is not a setting .*"
            "--seed must be at least 0 .*, got -1",
        ),
        (
            {"unlearn__probe__stop": "forgotten"},
            "forgotten needs --unlearn.probe.steps of at least 1",
        ),
        (
            {
                "unlearn__probe__stop": "forgotten",
                "unlearn__probe__steps": 2,
                "unlearn__choice": "x",
            },
            "--unlearn.choice has no effect with --unlearn.probe.stop=forgotten",
        ),
        (
            {
                "backbone__checkpoint": "x",
                "backbone__adapter": "y",
                "unlearn__algorithms": ("retrain", "retrain_again"),
                "unlearn__retrain__epochs": 1.0,
            },
            "--unlearn.retrain_again must differ from --unlearn.retrain in its seed .*, seed",
        ),
        ({"name": "../run"}, "--name must be printable, without / or"),
        ({"name": "--seed"}, None),
    )
    def test_a_wrong_value_is_refused_by_the_name_of_its_flag(self, values, message):
        if message is None:
            self.assertEqual(_with(**values).name, values["name"])
            return
        with self.assertRaisesRegex(ValueError, message):
            _with(**values)

    @parameterized.parameters(
        ("records", {"num_train": 9, "num_retrieval": 2}, "--corpus.num_train .*; --corpus.num_r"),
        (
            "toy",
            {"tofu__forget": "forget01"},
            "--corpus.tofu.forget has no effect with --corpus.dataset=toy",
        ),
        ("virtual", {"howdy__file": "x"}, "--corpus.howdy.file has no effect"),
    )
    def test_a_flag_that_the_dataset_does_not_read_is_refused(self, dataset, values, message):
        files = (
            {"records__train_file": "a", "records__queries_file": "b"}
            if dataset == "records"
            else {}
        )
        named = {f"corpus__{name}": value for name, value in (files | {"dataset": dataset}).items()}
        _with(**named)
        with self.assertRaisesRegex(ValueError, message):
            _with(**named, **{f"corpus__{name}": value for name, value in values.items()})

    def test_every_number_has_a_range_and_nothing_outside_it_is_taken(self):
        for leaf in settings.leaves(Config()):
            self.assertNotEmpty(leaf.metadata["help"], leaf.name)
            if leaf.hint not in (int, float):
                continue
            limits = leaf.metadata["limits"]
            self.assertNotEmpty(limits, leaf.name)
            wrong = [math.nan, math.inf, -math.inf] if leaf.hint is float else []
            for name, bound in limits.items():
                wrong.append(leaf.hint(bound + _BEYOND.get(name, 0)))
            for value in wrong:
                with self.assertRaisesRegex(ValueError, f"--{leaf.name} must be "):
                    settings.replaced(Config(), {leaf.name: value})

    def test_settings_of_members_are_those_of_their_record_until_they_are_set(self):
        found = _with(unlearn__algorithms=["npo", "ga_klr"], unlearn__npo__beta=0.3)
        self.assertEqual((found.unlearn["npo"].beta, found.unlearn["npo_gdr"].beta), (0.3, 0.1))
        self.assertEqual(found.unlearn["ga_klr"].learning_rate, 3e-5)
        # Set to what they are already, they are not set.
        self.assertEqual(_with(unlearn__npo__beta=0.1), Config())

    def test_a_stored_config_is_read_back_with_the_settings_of_what_it_chose(self):
        stored = _with(unlearn__algorithms=["npo"], unlearn__npo__beta=0.3, seed=3)
        value = config.to_json(stored)
        self.assertEqual(value["unlearn"]["npo"], {"learning_rate": 1e-5, "beta": 0.3})
        self.assertNotIn("ga_gdr", value["unlearn"])
        self.assertEqual(config.config_from_json(value), stored)

    @parameterized.parameters(
        ({"name": "run"}, "must have 'seed'"),
        ({"name": "run", "seed": 0, "corpus": []}, "--corpus must be an object of settings"),
        (
            {"name": "run", "seed": 0, "corpus": {"new": 1}},
            "this version: --corpus.new is not a setting",
        ),
        (
            {"name": "run", "seed": 0, "corpus": {"new": {"x": 1}}},
            "--corpus.new.x is not a setting",
        ),
    )
    def test_a_stored_config_of_another_shape_is_refused_by_field(self, value, message):
        with self.assertRaisesRegex(ValueError, message):
            config.config_from_json(value)
