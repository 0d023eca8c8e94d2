"""Adapters as trainers save them: key shapes, saved base weights, mistaken folders, patterns."""

import builtins
import contextlib
import io
import re
from unittest import mock

import jax
import ml_dtypes
import numpy as np
import safetensors.numpy
from absl.testing import parameterized
from checkpoint_cases import GOLDEN, tensors_of, write_adapter, write_model
from folders import FolderTest

from raslik_jax.base import bounded
from raslik_jax.models import adapters, checkpoint, storage

_PREFIX = "base_model.model."
_EMBED, _HEAD = "gpt_neox.embed_in.weight", "embed_out.weight"
_BASE = tensors_of(GOLDEN["gpt_neox"]["tensors"])


def _named(key, name):
    return re.sub(r"(lora_[AB])\.", rf"\1.{name}.", key)


_KEYS = {
    "compiled": lambda key: key.replace(_PREFIX, _PREFIX + "_orig_mod."),
    "compiled around": lambda key: "_orig_mod." + key,
    "layers compiled": lambda key: re.sub(r"(layers\.\d+)\.", r"\1._orig_mod.", key),
    "data parallel": lambda key: "module." + key,
    "data parallel inside": lambda key: key.replace(_PREFIX, _PREFIX + "module."),
    "no prefix": lambda key: key.removeprefix(_PREFIX),
    "prefix twice": lambda key: _PREFIX + key,
    "the adapter's name": lambda key: _named(key, "default"),
    "another name": lambda key: _named(key, "my_adapter"),
    "fsdp": lambda key: "_fsdp_wrapped_module." + key,
    "checkpointed": lambda key: re.sub(r"(layers\.\d+)\.", r"\1._checkpoint_wrapped_module.", key),
    "all": lambda key: "module._orig_mod." + _named(key, "default"),
}


class _Test(FolderTest):
    def setUp(self):
        super().setUp()
        self.base = write_model(self.folder / "base", "gpt_neox")
        self.config = checkpoint.read_config(self.base)

    def write(self, tensors=None, changes=None):
        return write_adapter(self.folder / "in", "gpt_neox", changes=changes, tensors=tensors)

    def load(self, folder):
        return adapters.load_adapter(folder, self.config, base_folder=self.base)

    def assert_same(self, folder, expected):
        for one, other in zip(
            jax.tree.leaves(self.load(folder)), jax.tree.leaves(expected), strict=True
        ):
            np.testing.assert_array_equal(one, other)


class KeyTest(_Test):
    @parameterized.parameters(*_KEYS)
    def test_the_keys_of_every_trainer_give_the_same_factors(self, name):
        folder = self.write()
        expected = self.load(folder)
        path = folder / "adapter_model.safetensors"
        tensors = {_KEYS[name](k): v for k, v in safetensors.numpy.load_file(path).items()}
        safetensors.numpy.save_file(tensors, path)
        self.assert_same(folder, expected)

    def test_two_adapters_in_one_file_are_refused_by_name(self):
        folder = self.write()
        path = folder / "adapter_model.safetensors"
        plain = safetensors.numpy.load_file(path)
        for names in (("default", "other"), ("", "other")):
            both = {_named(k, n) if n else k: v for k, v in plain.items() for n in names}
            safetensors.numpy.save_file(both, path)
            self.assert_refused(self.load, folder)

    @parameterized.parameters(1, 99)
    def test_tensors_without_values_are_refused(self, most):
        names = list(GOLDEN["gpt_neox"]["adapter_tensors"])[:most]
        folder = self.write(dict.fromkeys(names, np.zeros((0,), np.float32)))
        self.assert_refused(self.load, folder)


def _in_file(key):
    return key.replace(".base_layer", "").replace("lm_head", "embed_out")


class SavedBaseTest(_Test):
    @parameterized.parameters(
        ({_EMBED: np.float32, _HEAD: np.float32},),
        ({_EMBED: ml_dtypes.bfloat16},),
        ({"gpt_neox.layers.0.attention.dense.base_layer.weight": np.float16},),
        ({"lm_head.weight": np.float32},),  # the module's name in transformers 5
    )
    def test_unchanged_weights_of_the_base_change_nothing(self, saved):
        expected = self.load(self.write())
        tensors = {
            _PREFIX + key: _BASE[_in_file(key)].astype(dtype) for key, dtype in saved.items()
        }
        self.assert_same(self.write(tensors), expected)

    def test_a_tied_head_is_compared_with_the_embedding(self):
        changes = {"tie_word_embeddings": True}
        self.base = write_model(
            self.folder / "tied", "gpt_neox", changes=changes, tensors={_HEAD: None}
        )
        self.config = checkpoint.read_config(self.base)
        expected = self.load(self.write())
        self.assert_same(self.write({_PREFIX + _HEAD: _BASE[_EMBED]}), expected)
        folder = self.write({_PREFIX + _HEAD: _BASE[_EMBED] + 1})
        self.assert_refused(self.load, folder)

    def test_trained_or_resized_ones_are_refused_with_the_way_out(self):
        taught = _BASE[_EMBED].copy()
        taught[-1, -1] += 0.5
        longer = np.concatenate([_BASE[_EMBED], _BASE[_EMBED][:3]])
        for tensor in (taught, longer):
            folder = self.write({_PREFIX + _EMBED: tensor})
            self.assert_refused(self.load, folder)

    @parameterized.parameters(
        "gpt_neox.embed_in.lora_embedding_A",
        "gpt_neox.layers.0.attention.dense.lora_magnitude_vector.weight",
        "gpt_neox.layers.0.attention.dense.lora_B.bias",
        "embed_out.modules_to_save.default.weight",
        "gpt_neox.other.weight",
        "lm_head.lora_A.weight",
        "model.vision_tower.vision_model.encoder.layers.0.mlp.fc1.lora_A.weight",
    )
    def test_tensors_beside_the_factors_of_lora_are_refused(self, key):
        folder = self.write({_PREFIX + key: np.ones((3, 3), np.float32)})
        self.assert_refused(self.load, folder)


class EffectTest(_Test):
    @parameterized.parameters(True, False, None, "gaussian", "eva", "orthogonal", "mica")
    def test_starts_that_leave_the_base_as_it_was_are_read(self, start):
        folder = self.write(changes={"init_lora_weights": start})
        self.assertEqual(adapters.read_adapter_config(folder, self.config).rank, 3)

    @parameterized.parameters("lora_A", "lora_B", "lora_A both")
    def test_an_adapter_that_changes_nothing_is_refused(self, name):
        shapes = GOLDEN["gpt_neox"]["adapter_tensors"]
        side, *both = name.split()
        zeros = {k: np.zeros(shape, np.float32) for k, shape in shapes.items() if both or side in k}
        folder = self.write(zeros)
        self.assert_refused(adapters.check_effect, self.load(folder), folder)

    def test_a_single_layer_is_enough(self):
        shapes = GOLDEN["gpt_neox"]["adapter_tensors"]
        zeros = {k: np.zeros(shape, np.float32) for k, shape in shapes.items() if "lora_B" in k}
        zeros.pop(next(k for k in zeros if "layers.1" in k))
        folder = self.write(zeros)
        adapters.check_effect(self.load(folder), folder)


class FolderNameTest(_Test):
    def test_an_adapter_given_as_the_checkpoint_is_named_with_its_base(self):
        folder = self.write(changes={"base_model_name_or_path": "owner/llama"})
        for work in (checkpoint.read_config, checkpoint.check_weights):
            self.assert_refused(work, folder)
        (folder / "config.json").write_text((self.base / "config.json").read_text())
        self.assert_refused(checkpoint.check_weights, folder)

    def test_other_places_are_named_and_those_below_the_newest_first(self):
        run = self.folder / "run"
        for step in (50, 1000, 200):
            write_adapter(run / f"checkpoint-{step}", "gpt_neox")
            write_model(self.folder / "whole" / f"checkpoint-{step}", "gpt_neox")
        self.assert_refused(adapters.find_adapter, run)
        self.assert_refused(checkpoint.read_config, self.folder / "whole")
        write_adapter(self.folder / "deep" / "a" / "sft", "gpt_neox")
        self.assert_refused(adapters.find_adapter, self.folder / "deep")
        (self.folder / "none").mkdir()
        for place in (self.folder / "none", self.base, self.write() / "adapter_model.safetensors"):
            self.assert_refused(adapters.find_adapter, place)
        (self.folder / "none" / "model.Q4_K_M.gguf").write_bytes(b"GGUF")
        self.assert_refused(checkpoint.read_config, self.folder / "none")

    def test_a_file_that_may_not_be_read_is_not_called_corrupt(self):
        folder, own = self.write(), builtins.open

        def refuse(path, *arguments, **options):
            if str(path).endswith("adapter_model.safetensors"):
                raise PermissionError(13, "Permission denied")
            return own(path, *arguments, **options)

        self.monkeypatch.setattr(builtins, "open", refuse)
        message = self.assert_refused(self.load, folder)
        self.assertNotIn("corrupt", message)

    def test_tokenizer_files_that_peft_left_on_the_hub_are_fetched(self):
        import huggingface_hub.constants

        cache, commit = self.folder / "cache", "a" * 40
        self.monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
        root = cache / "models--owner--mine"
        folder = write_adapter(root / "snapshots" / commit, "gpt_neox")
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text(commit)
        names = ("adapter_config.json", "chat_template.jinja", "tokenizer.json", "training.log")
        siblings = [mock.Mock(rfilename=name) for name in names]
        download, asked = huggingface_hub.snapshot_download, []

        def fetch(name, **options):
            if options.get("local_files_only"):
                return download(name, **options)
            asked.append((name, options["revision"], options["allow_patterns"]))
            return str(folder)

        storage.fetch_tokenizer.cache_clear()
        with (
            mock.patch("huggingface_hub.snapshot_download", fetch),
            mock.patch("huggingface_hub.HfApi") as api,
        ):
            api.return_value.model_info.return_value = mock.Mock(siblings=siblings)
            for _ in range(2):  # asked once
                self.assertEqual(adapters.find_adapter("owner/mine"), folder)
            self.assertEqual(
                asked, [("owner/mine", commit, ["chat_template.jinja", "tokenizer.json"])]
            )
            storage.fetch_tokenizer.cache_clear()
            api.return_value.model_info.side_effect = OSError("no network")
            with contextlib.redirect_stderr(io.StringIO()) as said:
                self.assertEqual(adapters.find_adapter("owner/mine"), folder)
            self.assertIn("owner/mine", said.getvalue())
            self.assertIn("no network", said.getvalue())


# A pattern whose time doubles with each character that it fails on.
_SLOW = r"(([a-z_.0-9])*)*x"


class PatternTest(_Test):
    @parameterized.parameters(
        {"target_modules": _SLOW},
        {"exclude_modules": _SLOW},
        {"rank_pattern": {_SLOW: 2}},
        {"alpha_pattern": {_SLOW: 2}},
        {"layers_pattern": _SLOW, "layers_to_transform": [1]},
    )
    def test_a_pattern_without_an_end_is_refused_in_time(self, **changes):
        self.monkeypatch.setitem(bounded.call.__kwdefaults__, "seconds", 0.5)
        self.assert_refused(adapters.read_adapter_config, self.write(changes=changes), self.config)

    def test_groups_of_a_layer_pattern_are_not_taken_for_the_layer(self):
        changes = {"layers_pattern": "(layers|(h))", "layers_to_transform": [1]}
        folder = self.write(changes=changes)
        found = adapters.read_adapter_config(folder, self.config)
        self.assertEqual(found.ranks()["dense"], (0, 3))
