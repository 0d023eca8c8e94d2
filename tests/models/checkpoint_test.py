"""Checkpoints and adapters: nothing lost on a round trip, everything that does not fit is named."""

import contextlib
import functools
import io
import json
import os
import pathlib
import resource
import socket
import subprocess
import sys
import time
import zlib
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import support
import tokenizers
import waiting
from absl.testing import parameterized
from checkpoint_cases import GOLDEN, NAMES, load, tensors_of, write_adapter, write_model
from folders import FolderTest

from raslik_jax.models import adapters, checkpoint, decoder, key_map, quantize, sharding, storage
from raslik_jax.models.lora import LoRAConfig


def test_what_changes_greedy_answers_and_is_not_read_is_said(tmp_path):
    assert checkpoint.describe_generation(tmp_path) == ""
    fields = {"repetition_penalty": 1.05, "no_repeat_ngram_size": 0, "temperature": 0.7}
    fields |= {"begin_suppress_tokens": [2], "forced_bos_token_id": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    said = checkpoint.describe_generation(tmp_path)
    assert said.startswith("generation_config.json has repetition_penalty 1.05")
    assert "begin_suppress_tokens [2]" in said and "forced_bos" not in said
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 1.0}')
    (tmp_path / "config.json").write_text('{"repetition_penalty": 1.1}')
    assert checkpoint.describe_generation(tmp_path) == ""
    (tmp_path / "generation_config.json").unlink()  # then transformers reads config.json
    said = checkpoint.describe_generation(tmp_path)
    assert said.startswith("config.json has repetition_penalty 1.1")


class RoundTripTest(FolderTest):
    @parameterized.parameters(*NAMES)
    def test_every_tensor_of_transformers_layout_comes_back_as_it_was(self, name):
        model = load(write_model(self.folder / "in", name))
        self.assertEqual(model.lora, {})
        checkpoint.save_model(self.folder / "out", model.graphdef.config, model.base)
        before, after = (
            safetensors.numpy.load_file(self.folder / side / "model.safetensors")
            for side in ("in", "out")
        )
        self.assertEqual(set(before), set(after))
        for key, value in before.items():
            np.testing.assert_array_equal(value, after[key], err_msg=key)
        self.assertEqual(checkpoint.read_config(self.folder / "out"), model.graphdef.config)

    def test_without_its_weights_a_model_has_the_same_identity(self):
        folder = write_model(self.folder / "in", "olmo2")
        whole, shapes = load(folder), load(folder, whole=False)
        self.assertEqual(shapes.identity, whole.identity)
        for shape, leaf in zip(*map(jax.tree.leaves, (shapes.base, whole.base)), strict=True):
            self.assertIsInstance(shape, jax.ShapeDtypeStruct)
            self.assertEqual((shape.shape, shape.dtype), (leaf.shape, leaf.dtype))

    @parameterized.product(
        stored=[np.float32, np.float16, ml_dtypes.bfloat16],
        wanted=[jnp.float32, jnp.bfloat16, jnp.float16],
    )
    def test_tensors_are_cast_once(self, stored, wanted):
        model = load(write_model(self.folder, "gpt_neox", dtype=stored), dtype=wanted)
        content = tensors_of(GOLDEN["gpt_neox"]["tensors"], stored)
        leaf = model.base["layers"]["dense"]["kernel"]
        self.assertEqual(leaf.dtype, wanted)
        expected = content["gpt_neox.layers.1.attention.dense.weight"].T.astype(wanted)
        np.testing.assert_array_equal(leaf[1], expected)

    def test_shards_hold_together_and_bfloat16_survives(self):
        model = load(write_model(self.folder / "in", "olmo2"), dtype=jnp.bfloat16)
        checkpoint.save_model(
            self.folder / "out", model.graphdef.config, model.base, shard_bytes=10_000
        )
        config = json.loads((self.folder / "out" / "config.json").read_text())
        self.assertEqual(config["dtype"], "bfloat16")
        index = json.loads((self.folder / "out" / "model.safetensors.index.json").read_text())
        files = sorted(path.name for path in (self.folder / "out").glob("*.safetensors"))
        self.assertEqual(sorted(set(index["weight_map"].values())), files)
        self.assertEqual(set(index["weight_map"]), set(GOLDEN["olmo2"]["tensors"]))
        count = sum(int(np.prod(shape)) for shape in GOLDEN["olmo2"]["tensors"].values())
        self.assertEqual(index["metadata"], {"total_parameters": count, "total_size": 2 * count})
        self.assertGreater(len(files), 3)
        for path in (self.folder / "out").glob("*.safetensors"):
            self.assertLess(path.stat().st_size, 12_000)
        again = load(self.folder / "out", dtype=jnp.bfloat16)
        jax.tree.map(np.testing.assert_array_equal, model.base, again.base)

    def test_a_variant_is_found_by_its_longer_name(self):
        folder = write_model(self.folder, "llama")
        (folder / "model.safetensors").rename(folder / "model.fp16.safetensors")
        load(folder)

    def test_a_fresh_adapter_is_drawn_from_the_key(self):
        folder = write_model(self.folder, "gpt_neox")
        settings = LoRAConfig(rank=2, alpha=4.0, targets=("dense",))
        model = load(folder, lora_config=settings, key=jax.random.key(3))
        expected = decoder.init_lora(model.graphdef, key=jax.random.key(3))
        jax.tree.map(np.testing.assert_array_equal, model.lora, expected)
        shapes = load(folder, lora_config=settings).lora
        self.assertIsInstance(shapes["layers"]["dense"]["a"], jax.ShapeDtypeStruct)

    @parameterized.parameters(("int8", False), ("nf4", False), ("nf4", True))
    def test_quantizing_while_loading_equals_quantizing_afterwards(self, format, double):
        folder = write_model(self.folder, "gpt_neox")
        streamed = load(folder, base_format=format, double_quant=double).base
        pack = functools.partial(quantize.quantize_base, format=format, double_quant=double)
        whole = jax.jit(pack)(load(folder).base)
        shapes = jax.tree.map(jnp.shape, (streamed, whole))
        self.assertEqual(*shapes)
        if not double:
            jax.tree.map(np.testing.assert_array_equal, streamed, whole)
            return
        # The mean of the scales depends on the order of its sum in the last place, so that a scale
        # may land one step of 1/127 of its spread aside.
        first, second = (support.dequantize_base(base, jnp.float32) for base in (streamed, whole))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.03), first, second)

    @parameterized.parameters((None,), ("int8",), ("nf4",))
    def test_a_process_keeps_its_own_parts_of_what_it_reads(self, base_format):
        folder = write_model(self.folder, "llama")
        whole = load(folder, base_format=base_format)

        def second_half(path, leaf, parts):
            def of_array(own, array):
                axis = sharding.axis_of((*path, *own), array.shape, parts)
                size = 0 if axis is None else array.shape[axis]
                return sharding.Held(axis, size // 2, size)

            return jax.tree_util.tree_map_with_path(of_array, leaf)

        def place(path, leaf, parts, like):
            return leaf

        with (
            mock.patch.object(sharding, "held", second_half),
            mock.patch.object(sharding, "place", place),
        ):
            part = load(folder, base_format=base_format, parts=2)
        halves = second_half((), whole.base, 2)
        is_held = lambda leaf: isinstance(leaf, sharding.Held)  # noqa: E731
        expected = jax.tree.map(lambda own, all_: own.of(all_), halves, whole.base, is_leaf=is_held)
        jax.tree.map(np.testing.assert_array_equal, part.base, expected)
        self.assertEqual(part.identity, whole.identity)
        self.assertLess(quantize.num_bytes(part.base), 0.6 * quantize.num_bytes(whole.base))

    def test_a_tied_head_may_be_repeated_and_old_buffers_are_known(self):
        content = tensors_of(GOLDEN["llama"]["tensors"])
        extra = {
            "lm_head.weight": content["model.embed_tokens.weight"],
            "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
        }
        load(write_model(self.folder / "llama", "llama", tensors=extra))
        extra = {
            "gpt_neox.layers.1.attention.bias": np.ones((1, 1, 32, 32), bool),
            "gpt_neox.layers.1.attention.masked_bias": np.array(-1e9, np.float32),
            "gpt_neox.layers.1.attention.rotary_emb.inv_freq": np.ones(1, np.float32),
        }
        load(write_model(self.folder / "neox", "gpt_neox", tensors=extra))

    def test_an_empty_directory_is_taken_and_a_full_one_or_a_link_is_not(self):
        model = load(write_model(self.folder / "in", "llama"))
        config = model.graphdef.config
        (self.folder / "out").mkdir()
        checkpoint.save_model(self.folder / "out", config, model.base)
        before = (self.folder / "out" / "model.safetensors").stat()
        (self.folder / "elsewhere").mkdir()
        (self.folder / "link").symlink_to("elsewhere")
        (self.folder / "dangling").symlink_to("nowhere")
        for name in ("out", "link", "dangling"):
            folder = self.folder / name
            self.assert_refused(checkpoint.save_model, folder, config, model.base)
            self.assertEqual(folder.is_symlink(), name != "out")
        self.assertEqual(before, (self.folder / "out" / "model.safetensors").stat())

    def test_a_failed_save_leaves_nothing(self):
        """A disk that takes no more is one sentence that names the folder, and leaves no file."""
        model = load(write_model(self.folder / "in", "llama"))
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        try:
            with self.assertRaisesRegex(OSError, "out' cannot be written .*: free space"):
                checkpoint.save_model(self.folder / "out", model.graphdef.config, model.base)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        self.assertEqual([path.name for path in self.folder.iterdir()], ["in"])

    def test_saved_weights_are_the_same_bytes_in_every_process(self):
        """The header has several entries, whose order the format's own writer leaves to chance."""
        tensors = {"b": np.ones((2, 3), np.float16), "a": np.zeros(4, ml_dtypes.bfloat16)}
        path = self.folder / "model.safetensors"
        storage.write_tensors(path, tensors, {"base identity": "0123"})
        self.assertEqual(zlib.crc32(path.read_bytes()), 0xF1233B64)
        for name, value in safetensors.numpy.load_file(path).items():
            np.testing.assert_array_equal(value, tensors[name])
            self.assertEqual(value.dtype, tensors[name].dtype)

    @parameterized.parameters(np.nan, np.inf)
    def test_weights_that_are_not_finite_are_never_saved(self, value):
        model = load(write_model(self.folder / "in", "llama"))
        base = jax.tree.map(np.array, model.base)
        base["layers"]["q_proj"]["kernel"][1, 2, 3] = value
        self.assert_refused(checkpoint.save_model, self.folder / "out", model.graphdef.config, base)
        self.assertEqual([path.name for path in self.folder.iterdir()], ["in"])

    def test_saving_weights_of_another_config_is_refused(self):
        model = load(write_model(self.folder / "in", "olmo2"))
        other = load(write_model(self.folder / "other", "llama"))
        self.assert_refused(
            checkpoint.save_model,
            self.folder / "out",
            checkpoint.read_config(
                write_model(self.folder / "wide", "olmo2", changes={"num_key_value_heads": 4})
            ),
            other.base,
        )
        packed = quantize.quantize_base(model.base, "int8", double_quant=False)
        self.assert_refused(
            checkpoint.save_model, self.folder / "out", model.graphdef.config, packed
        )
        self.assertFalse((self.folder / "out").exists())


class BadCheckpointTest(FolderTest):
    def test_all_that_does_not_fit_is_named_together(self):
        folder = write_model(
            self.folder,
            "gpt_neox",
            tensors={
                "gpt_neox.layers.1.mlp.dense_h_to_4h.bias": None,
                "gpt_neox.final_layer_norm.weight": np.ones(31, np.float32),
                "gpt_neox.layers.2.attention.dense.weight": np.ones((32, 32), np.float32),
                "gpt_neox.embed_in.weight": np.ones((48, 32), np.int64),
            },
        )
        self.assert_refused(load, folder)

    def test_a_long_list_is_cut_and_counted(self):
        folder = write_model(self.folder, "olmo2", changes={"num_hidden_layers": 9})
        self.assert_refused(load, folder)

    @parameterized.parameters(np.nan, np.inf, -np.inf)
    def test_weights_that_are_no_numbers_are_named(self, value):
        for dtype in (np.float32, ml_dtypes.bfloat16, np.float16):
            weights = np.zeros((32, 32), dtype)
            weights[3, 4] = value
            folder = write_model(
                self.folder / np.dtype(dtype).name,
                "gpt_neox",
                dtype=dtype,
                tensors={"gpt_neox.layers.1.attention.dense.weight": weights},
            )
            self.assert_refused(load, folder)

    def test_values_beyond_the_wanted_dtype_are_named(self):
        tensors = {"gpt_neox.final_layer_norm.bias": np.full(32, 1e5, np.float32)}
        folder = write_model(self.folder, "gpt_neox", tensors=tensors)
        load(folder, dtype=jnp.bfloat16)
        self.assert_refused(load, folder, dtype=jnp.float16)

    @parameterized.parameters(
        ("truncated", lambda data: data[:-5]),
        ("cut_in_the_header", lambda data: data[:300]),
        ("stub", lambda data: data[:4]),
        ("empty", lambda data: b""),
        ("long", lambda data: data + b"\0\0"),
        ("header", lambda data: data[:9] + b"#" + data[10:]),
        ("pointer", lambda data: b"version https://git-lfs.github.com/spec/v1"),
    )
    def test_a_damaged_file_is_named(self, kind, damage):
        file = write_model(self.folder, "llama") / "model.safetensors"
        file.write_bytes(damage(file.read_bytes()))
        self.assert_refused(load, self.folder)

    def _sharded(self):
        model = load(write_model(self.folder / "in", "olmo2"))
        checkpoint.save_model(
            self.folder / "out", model.graphdef.config, model.base, shard_bytes=20_000
        )
        return self.folder / "out"

    def test_shards_and_an_index_that_do_not_fit_are_named(self):
        folder = self._sharded()
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        where = index["weight_map"]
        last = max(where.values())
        kept = {key: file for key, file in where.items() if file != last}
        elsewhere = where | {min(where): "../elsewhere.safetensors"}
        maps = [json.dumps({"weight_map": found}) for found in (kept, elsewhere)]
        for content in (*maps, "{}", "{"):
            path.write_text(content)
            self.assert_refused(load, folder)
        path.write_text(json.dumps(index))
        (folder / last).unlink()
        self.assert_refused(load, folder)

    def test_a_key_in_two_shards_is_refused(self):
        folder = self._sharded()
        files = sorted(folder.glob("*.safetensors"))
        doubled = safetensors.numpy.load_file(files[0]) | safetensors.numpy.load_file(files[1])
        safetensors.numpy.save_file(doubled, files[1])
        self.assert_refused(load, folder)

    def test_pickles_are_refused_with_the_command_that_converts_them(self):
        folder = write_model(self.folder, "llama")
        (folder / "model.safetensors").unlink()
        self.assert_refused(load, folder)
        (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
        self.assert_refused(load, folder)

    def test_a_hub_model_with_pickles_only_is_refused_with_the_command_too(self):
        cached = self.folder / "cached"
        cached.mkdir()
        siblings = [mock.Mock(rfilename=name) for name in ("config.json", "pytorch_model.bin")]
        info = mock.Mock(siblings=siblings, sha="abc")
        with (
            mock.patch("huggingface_hub.snapshot_download", return_value=str(cached)) as fetch,
            mock.patch("huggingface_hub.HfApi") as api,
        ):
            api.return_value.model_info.return_value = info
            command = r"M.from_pretrained\('a/b', dtype='auto', revision='v1'\).save_pretrained"
            with self.assertRaisesRegex(ValueError, command):
                storage.resolve_folder("a/b", revision="v1")
            self.assertEqual(fetch.call_count, 1)  # in the cache: nothing was downloaded
            api.return_value.model_info.side_effect = OSError("no network")
            (cached / "pytorch_model.bin").write_bytes(b"")
            with self.assertRaisesRegex(ValueError, "import AutoModel as M"):
                storage.resolve_folder("a/b", auto="AutoModel")

    def test_a_download_that_was_killed_is_taken_up_again(self):
        cached, whole = self.folder / "cached", self.folder / "whole"
        cached.mkdir()
        index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
        (cached / "model.safetensors.index.json").write_text(json.dumps(index))
        (cached / "pytorch_model.bin.index.json").write_text("{}")
        siblings = [mock.Mock(rfilename=name) for name in index["weight_map"].values()]

        def fetch(name, *, allow_patterns, revision, local_files_only=False):
            return str(cached if local_files_only else whole)

        with (
            mock.patch("huggingface_hub.snapshot_download", fetch),
            mock.patch("huggingface_hub.HfApi") as api,
        ):
            api.return_value.model_info.return_value = mock.Mock(siblings=siblings, sha="abc")
            self.assertEqual(storage.resolve_folder("a/b"), whole)
            (cached / "model-1-of-2.safetensors").write_bytes(b"")
            self.assertEqual(storage.resolve_folder("a/b"), whole)
            api.return_value.model_info.side_effect = OSError("no network")
            with self.assertRaisesRegex(ValueError, "nor whole in the local hub cache.*no network"):
                storage.resolve_folder("a/b")
            (cached / "model-2-of-2.safetensors").write_bytes(b"")
            with contextlib.redirect_stderr(io.StringIO()) as said:
                for _ in range(2):
                    self.assertEqual(storage.resolve_folder("a/b"), cached)
                storage.resolve_folder("a/b", revision="v1")
            self.assertEqual(said.getvalue().count("a/b: commit cached of the local cache"), 1)

    def test_a_folder_without_a_config_is_refused(self):
        folder = write_model(self.folder, "llama")
        (folder / "config.json").unlink()
        self.assert_refused(load, folder)
        self.assert_refused(load, self.folder / "absent" / "deeper")

    @parameterized.parameters(
        ("config.json", {"model_type": "mamba"}),
        ("config.json", json.dumps(GOLDEN["olmo2"]["config"])),
        ("config.json", "[1]"),
        ("config.json", "{"),
        ("config.json", '{"model_type": ["llama"]}'),
        ("config.json", '{"model_type": "llama", "model_type": "olmo2"}'),
        ("config.json", "[" * 100_000),
        ("config.json", {"num_hidden_layers": 10**6}),
        ("config.json", {"head_dim": 10**400}),
        ("config.json", {"rms_norm_eps": 10**400}),
        ("config.json", {"rope_theta": "1e999"}),
        ("config.json", {"eos_token_id": [[1]]}),
        ("config.json", {"x" * 500: "\x1b[2J" * 500}),
        ("model.safetensors.index.json", '{"weight_map": ["a"]}'),
        ("model.safetensors.index.json", '{"weight_map": {"a": 1}}'),
        ("tokenizer.json", '{"model": []}'),
    )
    def test_a_file_of_another_shape_is_one_short_sentence(self, name, content):
        folder = write_model(self.folder, "llama")
        if name == "model.safetensors.index.json":
            (folder / "model.safetensors").unlink()
        if not isinstance(content, str):
            content = json.dumps(GOLDEN["llama"]["config"] | content)
        (folder / name).write_text(content)
        found = self.assert_refused(load, folder)
        self.assertLess(len(found) - len(str(folder)), 300)
        self.assertNotIn("\x1b", found)

    def test_a_pipe_is_refused_and_not_waited_for(self):
        folder = write_model(self.folder, "llama")
        for name in ("model.safetensors", "config.json"):
            (folder / name).unlink()
            os.mkfifo(folder / name)
            self.assert_refused(load, folder)

    def test_a_tied_head_that_contradicts_the_embedding_is_refused(self):
        tensors = {"lm_head.weight": np.ones((48, 32), np.float32)}
        folder = write_model(self.folder, "llama", tensors=tensors)
        self.assert_refused(load, folder)

    def test_a_tokenizer_with_more_entries_than_rows_is_refused(self):
        folder = write_model(self.folder, "llama")
        entries = {f"t{token}": token for token in range(48)}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(entries, unk_token="t0"))
        file = folder / "tokenizer.json"
        tokenizer.save(str(file))
        load(folder)
        tokenizer.add_tokens(["<pad>"])
        tokenizer.save(str(file))
        self.assert_refused(load, folder)
        # The tokenizer of Gemma 3 has a place of an image, its text models no row for it.
        (folder / "tokenizer_config.json").write_text('{"image_token": "<pad>"}')
        load(folder)


class HubTest(FolderTest):
    def setUp(self):
        import huggingface_hub.constants

        self.monkeypatch.setattr(
            huggingface_hub.constants, "HF_HUB_CACHE", str(self.folder / "cache")
        )

    def test_without_a_network_the_answer_comes_at_once(self):
        reached = mock.Mock(side_effect=OSError)
        self.monkeypatch.setattr(socket, "getaddrinfo", reached)
        self.monkeypatch.setattr(socket.socket, "connect", reached)
        self.assert_refused(load, "EleutherAI/pythia-14m", revision="step143000")
        reached.assert_not_called()

    def test_a_hub_that_does_not_answer_is_given_up(self):
        # conftest switches the hub off; here it is on and silent.
        import huggingface_hub.constants

        with socket.create_server(("127.0.0.1", 0)) as silent:
            endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
            self.monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
            self.monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
            self.monkeypatch.setattr(storage, "_HUB_SECONDS", 0.5)
            self.monkeypatch.setenv("NO_PROXY", "127.0.0.1")
            self.monkeypatch.setenv("no_proxy", "127.0.0.1")
            huggingface_hub.utils.close_session()
            start = time.monotonic()
            self.assert_refused(load, "owner/tiny")
            # Half a second and the time of imports; a download would wait for minutes.
            self.assertLess(time.monotonic() - start, waiting.SECONDS)
        huggingface_hub.utils.close_session()

    def test_a_cached_model_is_found_by_name_and_revision(self):
        root = self.folder / "cache" / "models--owner--tiny"
        (root / "refs").mkdir(parents=True)
        for commit, name in (("a" * 40, "llama"), ("b" * 40, "olmo2")):
            write_model(root / "snapshots" / commit, name)
        (root / "refs" / "main").write_text("a" * 40)
        (root / "refs" / "step1").write_text("b" * 40)
        self.assertEqual(load("owner/tiny").graphdef.config.model_type, "llama")
        self.assertEqual(load("owner/tiny", revision="step1").graphdef.config.model_type, "olmo2")
        # A directory has none.
        self.assert_refused(load, self.folder / "cache", revision="main")


class MergeTest(FolderTest):
    def test_the_merged_base_alone_computes_what_base_and_adapter_do(self):
        # The other architectures follow in the comparison with transformers.
        name = "gpt_neox"
        folder = write_model(self.folder / "model", name)
        adapter = write_adapter(self.folder / "adapter", name)
        settings = adapters.read_adapter_config(adapter, checkpoint.read_config(folder))
        model = load(folder, lora_config=settings)
        lora = adapters.load_adapter(adapter, model.graphdef.config)
        # Weights of unit size saturate everything; small ones keep the comparison sharp.
        base, lora = jax.tree.map(lambda leaf: 0.15 * leaf, (model.base, lora))
        merged = checkpoint.merge(lora, base, settings)
        tokens_L = jnp.arange(1, 9)
        with_adapter = decoder.bind(model.graphdef)
        alone = decoder.bind(load(folder).graphdef)
        expected = jax.jit(with_adapter.hidden)(lora, base, tokens_L)
        hidden = jax.jit(alone.hidden)
        plain = hidden({}, base, tokens_L)
        np.testing.assert_allclose(hidden({}, merged, tokens_L), expected, atol=1e-5)
        self.assertGreater(float(jnp.abs(plain - expected).max()), 1e-3)
        self.assertIs(merged["embed"]["embedding"], base["embed"]["embedding"])

    def test_the_sum_is_rounded_once(self):
        settings = LoRAConfig(rank=2, alpha=3.0, targets=("up",))
        generator = np.random.default_rng(0)
        kernel, a, b = (
            generator.standard_normal(shape).astype(np.float32)
            for shape in ((2, 8, 6), (2, 8, 2), (2, 2, 6))
        )
        low = jnp.asarray(kernel, jnp.bfloat16)
        merged = checkpoint.merge(
            {"layers": {"up": {"a": a, "b": b}}}, {"layers": {"up": {"kernel": low}}}, settings
        )["layers"]["up"]["kernel"]
        exact = np.asarray(low, np.float64) + 1.5 * a.astype(np.float64) @ b
        self.assertEqual(merged.dtype, jnp.bfloat16)
        # Half a unit in the last place of eight bits, and a hair for float32's own rounding.
        error = np.abs(np.asarray(merged, np.float64) - exact)
        self.assertTrue((error <= np.abs(exact) * 2.0**-8 + 1e-6).all())

    def test_a_quantized_kernel_takes_no_adapter(self):
        folder = write_model(self.folder / "model", "gpt_neox")
        adapter = write_adapter(self.folder / "adapter", "gpt_neox")
        settings = adapters.read_adapter_config(adapter, checkpoint.read_config(folder))
        model = load(folder, base_format="nf4")
        lora = adapters.load_adapter(adapter, model.graphdef.config)
        self.assert_refused(checkpoint.merge, lora, model.base, settings)


class HashTest(parameterized.TestCase):
    def test_a_hash_follows_content_and_nothing_else(self):
        tree = {"b": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3)}, "a": np.ones(2)}
        same = {"a": jnp.ones(2), "b": {"kernel": jnp.arange(6.0).reshape(2, 3)}}
        same["a"] = np.ones(2)
        self.assertEqual(checkpoint.base_hash(tree), checkpoint.base_hash(same))
        self.assertNotEqual(checkpoint.base_hash(tree), checkpoint.adapter_hash(tree))
        others = [
            {**tree, "a": np.array([1.0, np.nextafter(1.0, 2.0)])},
            {**tree, "a": np.ones(2, np.float32)},
            {**tree, "b": {"kernel": np.arange(6, dtype=np.float32).reshape(3, 2)}},
            {"c": tree["a"], "b": tree["b"]},
            {"b": tree["b"]},
            {**tree, "a": jnp.ones(2, jnp.bfloat16)},
        ]
        hashes = {checkpoint.base_hash(other) for other in (tree, *others)}
        self.assertLen(hashes, 7)

    def test_the_hash_is_the_same_in_every_run(self):
        self.assertEqual(
            checkpoint.adapter_hash({"layers": {"a": np.zeros((1, 2), np.float32)}}),
            "befe31c1bca5761b6eb9962b3c00ae98d1c1455946fc2dddf0abde05255b8ddb",
        )


_MEASURE = """
import sys, threading, time
import jax, jax.numpy as jnp
from raslik_jax.models import checkpoint, quantize

def resident():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

jnp.ones(3).block_until_ready()
before, peak, done = resident(), 0, False

def watch():
    global peak
    while not done:
        peak = max(peak, resident())
        time.sleep(0.001)

watcher = threading.Thread(target=watch)
watcher.start()
model = checkpoint.load_model(sys.argv[1], dtype=jnp.bfloat16)
jax.block_until_ready(model.base)
done = True
watcher.join()
print(peak - before, quantize.num_bytes(model.base))
"""


@pytest.mark.heavy
def test_loading_takes_little_more_memory_than_the_model(tmp_path):
    # 54 million weights: 217 MB in the file's float32, 109 MB as the bfloat16 that is wanted. A
    # loader that held the file, or each tensor twice, would need two or three times the target.
    sizes = {"hidden_size": 512, "num_hidden_layers": 16, "intermediate_size": 2048}
    config = support.tiny_model_config(4096, **sizes)
    _, _, shapes = decoder.abstract(config, None)
    base = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
    checkpoint.save_model(tmp_path / "model", config, base, shard_bytes=50 << 20)
    result = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path / "model")],
        capture_output=True,
        text=True,
        check=True,
        env={"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(pathlib.Path(__file__).parents[2])},
    )
    peak, target = map(int, result.stdout.split())
    assert target == 2 * decoder.count_parameters(shapes)
    assert peak < 1.3 * target, (peak, target)


def test_large_tensors_are_read_by_threads_to_the_same_weights(tmp_path, monkeypatch):
    config = support.tiny_model_config(64)
    _, _, shapes = decoder.abstract(config, None)
    random = np.random.default_rng(0)
    base = jax.tree.map(lambda leaf: random.standard_normal(leaf.shape, np.float32), shapes)
    checkpoint.save_model(tmp_path / "model", config, base)
    alone = checkpoint.load_model(tmp_path / "model", dtype=jnp.float32)
    monkeypatch.setattr(key_map, "_FREED_BYTES", 0)
    together = checkpoint.load_model(tmp_path / "model", dtype=jnp.float32)
    assert together.identity == alone.identity
    jax.tree.map(np.testing.assert_array_equal, together.base, base)
    jax.tree.map(np.testing.assert_array_equal, together.base, alone.base)
