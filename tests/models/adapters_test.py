"""PEFT adapters: what they compute, nothing lost on a round trip, what does not fit is named."""

import functools
import json
import math
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
import support
from absl.testing import parameterized
from checkpoint_cases import (
    ADAPTERS,
    GOLDEN,
    NAMES,
    load,
    tensors_of,
    write_adapter,
    write_model,
)
from folders import FolderTest

from raslik_jax.models import adapters, checkpoint, decoder
from raslik_jax.models.lora import LoRAConfig


def _check_written_again(folder, lora, settings, config):
    """Checks that the adapter in `in`, written to `out`, has the same tensors and settings."""
    adapters.save_adapter(folder / "out", lora, settings, config)
    before, after = (
        safetensors.numpy.load_file(folder / side / "adapter_model.safetensors")
        for side in ("in", "out")
    )
    assert set(before) == set(after)
    for key, value in before.items():
        np.testing.assert_array_equal(value, after[key], err_msg=key)
    assert adapters.read_adapter_config(folder / "out", config) == settings


class PlainAdapterTest(FolderTest):
    def setUp(self):
        super().setUp()
        self.config = checkpoint.read_config(write_model(self.folder / "neox", "gpt_neox"))

    @parameterized.parameters(*NAMES)
    def test_every_tensor_of_pefts_layout_comes_back_as_it_was(self, name):
        config = checkpoint.read_config(write_model(self.folder / "model", name))
        folder = write_adapter(self.folder / "in", name)
        settings = adapters.read_adapter_config(folder, config)
        targets = GOLDEN[name]["adapter_config"]["target_modules"]
        self.assertEqual(
            settings, LoRAConfig(rank=3, alpha=6.0, dropout=0.25, targets=tuple(targets))
        )
        lora = adapters.load_adapter(folder, config, lora_config=settings)
        _check_written_again(self.folder, lora, settings, config)
        with self.assertRaisesRegex(ValueError, "new or empty"):
            adapters.save_adapter(self.folder / "out", lora, settings, config)

    @parameterized.parameters(
        *({name: True} for name in ("use_dora", "lora_bias", "some_new_switch")),
        *({"init_lora_weights": kind} for kind in ("pissa_niter_4", "olora", "loftq")),
        *({"peft_type": kind} for kind in ("IA3", "LOHA", "PREFIX_TUNING", "PROMPT_TUNING")),
        {"bias": "all"},
        {"modules_to_save": ["embed_out"]},
        {"trainable_token_indices": [1]},
        {"layer_replication": [[0, 1]]},
        {"target_parameters": ["x"]},
        {"target_modules": ["dense", "embed_out"]},
        {"target_modules": ["dense", "embed_in"]},
        {"target_modules": ".*(dense|embed_out)"},
        {"target_modules": [["dense"]]},
        {"target_modules": ["q_proj"]},
        {"target_modules": "(dense"},
        *({"r": rank} for rank in (0, None, 2.5)),
        {"rank_pattern": {"dense": 0}},
        {"rank_pattern": {"dense(": 2}},
        {"alpha_pattern": {"dense": -1.0}},
        {"lora_alpha": [8]},
        {"lora_dropout": "x"},
        {"layers_pattern": ["layers", "(h"], "layers_to_transform": 1},
    )
    def test_an_adapter_that_computes_something_else_is_refused_by_name(self, **changes):
        folder = write_adapter(self.folder / "in", "gpt_neox", changes=changes)
        self.assert_refused(adapters.read_adapter_config, folder, self.config)

    def test_a_base_with_tied_embeddings_is_untied_before_a_merge(self):
        for is_tied in (False, True):
            how = {"tie_word_embeddings": is_tied}
            base = write_model(self.folder / f"base-{is_tied}", "gpt_neox", changes=how)
            changes = {"target_modules": ["dense", "embed_out"]}
            folder = write_adapter(self.folder / f"in-{is_tied}", "gpt_neox", changes=changes)
            with self.assertRaisesRegex(ValueError, "merge it with peft") as refusal:
                adapters.read_adapter_config(folder, checkpoint.read_config(base))
            self.assertEqual("untie the base first" in str(refusal.exception), is_tied)

    def test_an_adapter_that_does_not_fit_is_refused(self):
        llama = checkpoint.read_config(write_model(self.folder / "llama", "llama"))
        folder = write_adapter(self.folder / "adapter", "gpt_neox")
        other = LoRAConfig(rank=4, alpha=8.0, targets=("dense",))
        self.assert_refused(adapters.load_adapter, folder, self.config, lora_config=other)
        self.assert_refused(adapters.load_adapter, folder, llama)
        deeper = checkpoint.read_config(
            write_model(self.folder / "deep", "gpt_neox", changes={"num_hidden_layers": 3})
        )
        self.assert_refused(adapters.load_adapter, folder, deeper)

    def test_tensors_that_do_not_fit_their_own_config_are_named(self):
        prefix = "base_model.model.gpt_neox.layers.0.attention."
        cases = (
            ({"r": 4}, {}),
            ({"target_modules": ["dense"]}, {}),
            ({}, {prefix + "dense.lora_A.weight": None}),
            ({}, {prefix + "dense.lora_B.weight": np.full((32, 3), np.nan)}),
        )
        for number, (changes, tensors) in enumerate(cases):
            folder = write_adapter(
                self.folder / str(number), "gpt_neox", changes=changes, tensors=tensors
            )
            self.assert_refused(adapters.load_adapter, folder, self.config)
        (folder / "adapter_model.safetensors").write_bytes(b"x" * 50)
        self.assert_refused(adapters.load_adapter, folder, self.config)
        (folder / "adapter_model.safetensors").unlink()
        self.assert_refused(adapters.load_adapter, folder, self.config)

    def test_an_adapter_of_another_base_is_refused(self):
        """A base of the same shape and other weights computes something else, without an error."""
        model = load(write_model(self.folder / "model", "gpt_neox"))
        bias = {"gpt_neox.final_layer_norm.bias": np.zeros(32, np.float32)}
        other = load(write_model(self.folder / "other", "gpt_neox", tensors=bias))
        self.assertNotEqual(model.identity, other.identity)
        # The identity is of the weights as stored: not of what they are loaded as.
        narrow = load(self.folder / "model", dtype=jnp.bfloat16, base_format="int8")
        self.assertEqual(model.identity, narrow.identity)
        config, foreign = model.graphdef.config, write_adapter(self.folder / "in", "gpt_neox")
        settings = adapters.read_adapter_config(foreign, config)
        lora = adapters.load_adapter(foreign, config, base=other.identity)
        own = self.folder / "own"
        adapters.save_adapter(own, lora, settings, config, base=model.identity)
        adapters.load_adapter(own, config, base=model.identity)
        self.assert_refused(adapters.load_adapter, own, config, base=other.identity)

    def test_flipped_bits_of_saved_weights_are_found(self):
        foreign = write_adapter(self.folder / "in", "gpt_neox")
        settings = adapters.read_adapter_config(foreign, self.config)
        lora = adapters.load_adapter(foreign, self.config)
        adapters.save_adapter(self.folder / "own", lora, settings, self.config)
        file = self.folder / "own" / "adapter_model.safetensors"
        raw = bytearray(file.read_bytes())
        raw[-6] ^= 1
        file.write_bytes(raw)
        self.assert_refused(adapters.load_adapter, self.folder / "own", self.config)

    def test_a_cached_adapter_is_found_by_its_name_on_the_hub(self):
        import huggingface_hub.constants

        cache = self.folder / "cache"
        self.monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
        root, commit = cache / "models--owner--adapter", "a" * 40
        folder = write_adapter(root / "snapshots" / commit, "gpt_neox")
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text(commit)
        self.assertEqual(adapters.find_adapter("owner/adapter"), folder)
        (root / "refs" / "v2").write_text("b" * 40)
        second = write_adapter(root / "snapshots" / ("b" * 40), "gpt_neox")
        self.assertEqual(adapters.find_adapter("owner/adapter", revision="v2"), second)
        (second / "adapter_model.safetensors").unlink()
        api = mock.Mock(
            **{"return_value.model_info.return_value": mock.Mock(siblings=(), sha="v2")}
        )
        with (
            mock.patch("huggingface_hub.HfApi", api),
            mock.patch("huggingface_hub.snapshot_download", return_value=str(second)),
            self.assertRaisesRegex(
                ValueError, "must have safetensors, got none: load it with peft"
            ),
        ):
            adapters.find_adapter("owner/adapter", revision="v2")
        self.assert_refused(adapters.find_adapter, "owner/another")
        self.assert_refused(adapters.find_adapter, "no/such/one")

    def test_longer_names_of_targets_are_read(self):
        names = ["attention.query_key_value", "attention.dense", "mlp.dense_4h_to_h"]
        folder = write_adapter(self.folder, "gpt_neox", changes={"target_modules": names})
        settings = adapters.read_adapter_config(folder, self.config)
        self.assertEqual(settings.targets, ("dense", "dense_4h_to_h", "query_key_value"))


# By layer and module of Llama, what peft makes of the fields: rank and alpha.
_CASES = {name: (case["fields"], case["sizes"]) for name, case in ADAPTERS["sized"].items()}


class AdapterTest(FolderTest):
    """What peft's adapters compute, against weights that NumPy has merged."""

    def write(self, fields, sizes):
        """Returns base tensors, factors by module, and the folder of an adapter of Llama."""
        base = {k: 0.4 * v for k, v in tensors_of(GOLDEN["llama"]["tensors"]).items()}
        write_model(self.folder / "base", "llama", tensors=base)
        factors, tensors = {}, {}
        for name, (rank, _) in sizes.items():
            rows, columns = base[f"model.{name}.weight"].shape
            keys = [f"base_model.model.model.{name}.lora_{side}.weight" for side in "AB"]
            shapes = dict(zip(keys, ((rank, columns), (rows, rank)), strict=True))
            tensors |= {key: 0.4 * value for key, value in tensors_of(shapes).items()}
            factors[name] = tuple(tensors[key].astype(np.float64) for key in keys)
        changes = {"r": 3, "lora_alpha": 6.0, **fields}
        unused = dict.fromkeys(GOLDEN["llama"]["adapter_tensors"])
        folder = write_adapter(
            self.folder / "in", "llama", changes=changes, tensors=unused | tensors
        )
        return base, factors, folder

    # Its gradients, and the other ways to say the same, are compared with PEFT's in parity tests.
    @parameterized.parameters("rank-stabilized", "rank-stabilized patterns", "some layers")
    def test_it_computes_what_merged_weights_do(self, name):
        fields, sizes = _CASES[name]
        whole, factors, folder = self.write(fields, sizes)
        for module, (rank, alpha) in sizes.items():
            scale = alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank)
            a, b = factors[module]
            key = f"model.{module}.weight"
            whole[key] = (whole[key] + scale * b @ a).astype(np.float32)
        expected = load(write_model(self.folder / "whole", "llama", tensors=whole))
        settings = adapters.read_adapter_config(folder, expected.graphdef.config)
        model = load(self.folder / "base", lora_config=settings)
        lora = adapters.load_adapter(folder, model.graphdef.config, lora_config=settings)
        close = functools.partial(np.testing.assert_allclose, atol=1e-5)
        jax.tree.map(close, checkpoint.merge(lora, model.base, settings), expected.base)
        found, merged = (
            support.all_logits(decoder.bind(one.graphdef), own, one.base, jnp.arange(1, 9))
            for one, own in ((model, lora), (expected, {}))
        )
        close(found, merged, atol=2e-5)

    @parameterized.parameters(*_CASES)
    def test_it_is_written_as_it_was(self, name):
        fields, sizes = _CASES[name]
        _, factors, folder = self.write(fields, sizes)
        config = checkpoint.read_config(self.folder / "base")
        settings = adapters.read_adapter_config(folder, config)
        lora = adapters.load_adapter(folder, config)
        _check_written_again(self.folder, lora, settings, config)
        written = json.loads((self.folder / "out" / "adapter_config.json").read_text())
        # A name stands for one module alone.
        for pattern in (*written.get("rank_pattern", ()), *written.get("alpha_pattern", ())):
            self.assertIn(pattern.replace("\\", "").removeprefix("model."), sizes)

    def test_a_fresh_adapter_of_its_shape_has_nothing_beyond_a_layers_rank(self):
        _, _, folder = self.write(*_CASES["patterns"])
        config = checkpoint.read_config(self.folder / "base")
        settings = adapters.read_adapter_config(folder, config)
        graphdef, *_ = decoder.abstract(config, settings)
        fresh = decoder.init_lora(graphdef, key=jax.random.key(0))["layers"]
        self.assertEqual(fresh["v_proj"]["a"].shape[-1], 5)
        self.assertTrue((fresh["v_proj"]["a"][0, :, 3:] == 0).all())
        self.assertTrue((fresh["v_proj"]["a"][0, :, :3] != 0).all())
        self.assertTrue((fresh["v_proj"]["a"][1] != 0).all())
        beyond = {**fresh, "v_proj": {**fresh["v_proj"], "a": jnp.ones_like(fresh["v_proj"]["a"])}}
        self.assert_refused(
            adapters.save_adapter, self.folder / "out", {"layers": beyond}, settings, config
        )
