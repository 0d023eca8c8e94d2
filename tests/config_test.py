"""Settings check themselves and say everything that is wrong at once."""

import math

from absl.testing import parameterized
from snapshots import refused

from raslik_jax import config
from raslik_jax.base import settings
from raslik_jax.config import Config


def _with(**values):
    """Returns the config with other values, `stage__name` or `stage__member__name` each."""
    return settings.replaced(Config(), {k.replace("__", "."): v for k, v in values.items()})


# How far beyond its bound a value is refused, by the name of the limit; at "above", "below": on it.
_BEYOND = {"at least": -1, "0 or at least": -0.5, "at most": 1}


_FORGOTTEN = {"unlearn__probe__stop": "forgotten"}
_AGAIN = {"unlearn__algorithms": ("retrain", "retrain_again"), "unlearn__retrain__epochs": 1.0}


class ConfigTest(parameterized.TestCase):
    @parameterized.parameters(
        {"corpus__num_train": 0},
        {"corpus__num_targets": 3000},
        {"corpus__dataset": "records"},
        {"backbone__hidden_size": 130},
        {"finetune__lora_dropout": 1.0},
        {"finetune__lora_targets": ()},
        {"finetune__micro_batch_size": 3},
        {"finetune__max_len": 4},
        {"unlearn__micro_batch_size": -2},
        {"unlearn__algorithms": ["cap_klr"], "unlearn__cap_klr__cap": 0.0},
        {"unlearn__algorithms": ["ga", "gs"]},
        {"retrieve__strategies": ["raslik", "guess"]},
        {"backbone__double_quant": True},
        {"unlearn__algorithms": ["ga"], "unlearn__ga__learning_rate": 0.0},
        {"retrieve__select": "gap", "retrieve__aggregate": "common"},
        {"corpus__num_train": -1, "corpus__num_test": -1, "seed": -1, "sketch__none": 0},
        _FORGOTTEN,
        {**_FORGOTTEN, "unlearn__probe__steps": 2, "unlearn__choice": "x"},
        {**_AGAIN, "backbone__checkpoint": "x", "backbone__adapter": "y"},
        {"name": "../run"},
    )
    def test_a_wrong_value_is_refused_by_the_name_of_its_flag(self, **values):
        with refused():
            _with(**values)

    def test_a_name_may_look_like_a_flag(self):
        self.assertEqual(_with(name="--seed").name, "--seed")

    @parameterized.parameters(
        ("records", {"num_train": 9, "num_retrieval": 2}),
        ("toy", {"records__fields": "input=context"}),
    )
    def test_a_flag_that_the_dataset_does_not_read_is_refused(self, dataset, values):
        files = {"records__train_file": "a", "records__queries_file": "b"}
        files = files if dataset == "records" else {}
        named = {f"corpus__{name}": value for name, value in (files | {"dataset": dataset}).items()}
        _with(**named)
        with refused():
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
        found = _with(unlearn__algorithms=["cap_klr", "ga_klr"], unlearn__cap_klr__cap=0.3)
        self.assertEqual((found.unlearn["cap_klr"].cap, found.unlearn["cap_klr"].hold), (0.3, 30.0))
        self.assertEqual(found.unlearn["ga_klr"].learning_rate, 3e-5)
        # Set to what they are already, they are not set.
        self.assertEqual(_with(unlearn__cap_klr__cap=0.1), Config())

    def test_a_stored_config_is_read_back_with_the_settings_of_what_it_chose(self):
        stored = _with(
            unlearn__algorithms=["ga_klr"], unlearn__ga_klr__kl_direction="forward", seed=3
        )
        value = config.to_json(stored)
        self.assertEqual(
            value["unlearn"]["ga_klr"], {"learning_rate": 3e-5, "kl_direction": "forward"}
        )
        self.assertNotIn("ga_gdr", value["unlearn"])
        self.assertEqual(config.config_from_json(value), stored)

    @parameterized.parameters(
        {"name": "run"},
        {"name": "run", "seed": 0, "corpus": []},
        {"name": "run", "seed": 0, "corpus": {"new": 1}},
        {"name": "run", "seed": 0, "corpus": {"new": {"x": 1}}},
    )
    def test_a_stored_config_of_another_shape_is_refused_by_field(self, **value):
        with refused():
            config.config_from_json(value)
