"""The mesh: what it refuses, how batches are filled up for it, and what one of one device is."""

import functools
import json
import pathlib
import tempfile
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from absl.testing import absltest, parameterized
from jax.sharding import AbstractMesh
from snapshots import refused
from tiny import finished_run, run_command, run_script, tiny_config

from raslik_jax.data import batches
from raslik_jax.data.tokens import encoding
from raslik_jax.models import decoder, quantize, sharding
from raslik_jax.parallel import meshes
from raslik_jax.run import checking
from raslik_jax.train import loop

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_WORKER = {"JAX_NUM_CPU_DEVICES": "4", "PYTHONPATH": f"{_ROOT}:{_ROOT / 'tests' / 'fixtures'}"}


def _mesh(devices):
    """A context of so many devices, which need not be there."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((devices,), (meshes.DATA,)))


class MeshesTest(parameterized.TestCase):
    def test_a_mesh_that_does_not_divide_the_devices_is_refused(self):
        have = len(jax.devices())
        must = rf"--mesh.data must divide .* {have} \(CPU\), got {have + 1}: leave it out"
        with self.assertRaisesRegex(ValueError, must):
            meshes.make_mesh(have + 1)

    def test_a_job_of_several_processes_takes_all_devices(self):
        with (
            mock.patch.object(jax, "process_count", lambda: 2),
            mock.patch.object(jax, "devices", lambda: [None] * 8),
            refused(),
        ):
            meshes.make_mesh(4)

    @parameterized.parameters(
        ("--backbone.batch_size=7", "--backbone.batch_size must be at least .* 8, got 7"),
        ("--finetune.batch_size=4", "set --mesh.data to a divisor of all devices, at most 4"),
        ("--unlearn.batch_size=2", "--unlearn.batch_size must be at least .* 8, got 2: raise it"),
    )
    def test_a_batch_below_the_mesh_is_refused_where_it_is_trained_on(self, flag, message):
        config, stages = tiny_config(flag), ("backbone", "finetune", "unlearn")
        with self.assertRaisesRegex(ValueError, message):
            checking.check_mesh(config, 8, stages=stages)
        checking.check_mesh(config, 2, stages=stages)
        checking.check_mesh(config, 8, stages=("corpus", "report"))

    @parameterized.parameters((1, 5), (4, 8), (8, 8))
    def test_batches_are_filled_up_by_dummy_rows(self, devices, expected):
        encoded = encoding.encode_rows([[1, 2, 3]] * 5, pad_id=0)
        with _mesh(devices):
            batch = batches.make_batch(encoded, batches.plan_rows(encoded, np.arange(5)))
        self.assertEqual(batch.tokens_BL.shape[0], expected)
        self.assertEqual(batch.row_B.tolist(), [0, 1, 2, 3, 4] + [-1] * (expected - 5))
        self.assertFalse(batch.target_mask_BL[5:].any())

    @parameterized.parameters(
        (0, 8, 1, 0),
        (8, 8, 1, 0),
        (2, 8, 1, 2),
        (4, 6, 4, 1),  # 24 rows over four devices
        (8, 3, 4, 1),  # two at a time would leave one
        (8, 4, 4, 2),
        (2, 2, 8, 1),  # below the devices: one each
    )
    def test_all_devices_together_hold_a_micro_batch(self, micro_batch, rows, devices, expected):
        with _mesh(devices):
            self.assertEqual(loop._rows_held(micro_batch, {rows}), expected)

    def test_on_one_device_rows_are_mapped_and_summed_as_they_are(self):
        rows_BL, one = jnp.arange(6.0).reshape(3, 2), jnp.float32(1)
        self.assertEqual(meshes.num_shards(), 1)
        mapped_B = meshes.by_rows(lambda add, x: x.sum(1) + add, one, rows=rows_BL)
        np.testing.assert_array_equal(mapped_B, [2, 6, 10])
        total = meshes.sum_rows(lambda add, x: (x.sum(), add), one, rows=rows_BL)
        np.testing.assert_array_equal(total, (15, 1))
        # Uncommitted, as any array: it is used beside arrays that no mesh has seen.
        self.assertFalse(mapped_B.committed)
        self.assertIs(meshes.place(rows_BL), rows_BL)

    def test_what_a_mesh_would_share_can_be_made_on_the_host(self):
        with _mesh(8):
            with meshes.on_host():
                self.assertEqual(meshes.num_shards(), 1)
                made = jax.jit(jnp.negative)(np.ones(2))
            self.assertEqual(meshes.num_shards(), 8)
        self.assertEqual(made.devices(), {jax.devices("cpu")[0]})

    def test_large_leaves_are_split_along_an_axis_that_divides_and_small_ones_are_whole(self):
        _, _, base = decoder.abstract(support.tiny_model_config(), None)
        base = quantize_shapes(base)
        split = sharding.split(base, 4)
        axes = {
            jax.tree_util.keystr(path): leaf.axis if meshes.is_split(leaf) else None
            for path, leaf in jax.tree_util.tree_leaves_with_path(split, is_leaf=meshes.is_split)
        }
        expected = {
            "['embed']['embedding']": -1,  # 61 rows
            "['head']['kernel']": -2,
            "['layers']['dense']['kernel'].codes": -2,
            "['layers']['dense']['kernel'].scale": -1,  # its other axis is that of layers
            "['layers']['dense']['bias']": None,
            "['final_norm']['scale']": None,
        }
        self.assertEqual({name: axes[name] for name in expected}, expected)
        self.assertEqual(jax.tree.leaves(meshes.joined(split)), jax.tree.leaves(base))
        self.assertEqual(split["head"]["kernel"].spec, jax.sharding.PartitionSpec("data"))
        # Each of four devices holds 13 of what 16 would be whole, were all of it split.
        held = quantize.num_bytes(base) - sharding.bytes_elsewhere(split, 4)
        self.assertLess(held, quantize.num_bytes(base) / 2)
        self.assertIs(sharding.split(base, 1)["head"]["kernel"], base["head"]["kernel"])

    def test_a_kernel_that_cannot_be_split_is_refused(self):
        _, _, base = decoder.abstract(support.tiny_model_config(), None)
        sharding.check(base, 8)
        with refused():
            sharding.check(base, 7)

    @parameterized.parameters(
        ("auto", 0, 1),  # a CPU does not say
        ("auto", 1.9, 8),
        ("auto", 2.1, 1),
        ("replicated", 1.9, 1),
        ("sharded", 0, 8),
    )
    def test_auto_splits_what_takes_more_than_half_of_a_device(self, kind, memory, expected):
        base = {"a": jax.ShapeDtypeStruct((256,), jnp.float32)}
        memory = round(memory * quantize.num_bytes(base))
        found = sharding.choose_parts(kind, base, devices=8, memory=memory)
        self.assertEqual(found, expected)

    def test_weights_that_a_device_cannot_hold_are_refused_in_the_format_they_have(self):
        _, _, base = decoder.abstract(support.tiny_model_config(), None, jnp.float32)
        whole = quantize.num_bytes(base)
        how = {"double_quant": False, "devices": 4}
        parts, held = sharding.lay_out("auto", base, "plain", memory=whole - 1, **how)
        self.assertEqual(parts, 4)
        for kind, memory in (("replicated", whole - 1), ("sharded", whole // 4)):
            with refused():
                sharding.lay_out(kind, base, "plain", memory=memory, **how)
        parts, held = sharding.lay_out("replicated", base, "int8", memory=whole - 1, **how)
        self.assertEqual(jax.tree.leaves(held), jax.tree.leaves(quantize_shapes(base)))
        self.assertEqual(sharding.lay_out("sharded", base, "int8", memory=0, **how)[0], 4)


class KernelsTest(parameterized.TestCase):
    @parameterized.parameters(
        ("7.5", "twin"), ("8.0", "either"), ("gfx90a", "either"), ("", "either")
    )
    def test_a_gpu_without_bfloat16_takes_the_twin(self, capability: str, expected: str):
        device = mock.Mock(compute_capability=capability)
        with (
            mock.patch.object(jax, "local_devices", lambda: [device]),
            mock.patch.object(jax.lax, "platform_dependent", lambda *_, **__: "either"),
        ):
            found = meshes.by_kernel(jnp.zeros(1), kernel=lambda _: "kernel", twin=lambda _: "twin")
        self.assertEqual(found, expected)


def quantize_shapes(base):
    """Shapes of an int8 base."""
    pack = functools.partial(quantize.quantize_base, format="int8", double_quant=False)
    return jax.eval_shape(pack, base)


@pytest.mark.heavy
class SplitTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        done = run_script("tests/fixtures/mesh_worker.py", env=_WORKER)
        if done.returncode:
            raise AssertionError(done.stderr)
        cls.found = json.loads(done.stdout.splitlines()[-1])

    def test_four_devices_give_what_one_gives_with_whole_and_with_split_weights(self):
        one = self.found["one"]
        for name in ("whole", "split"):
            other = self.found[name]
            trained, expected = other["lora"], one["lora"]
            self.assertAlmostEqual(trained["loss"], expected["loss"], places=5)
            np.testing.assert_allclose(trained["params"], expected["params"], atol=2e-5)
            rows = (other["sketch"]["rows"], one["sketch"]["rows"])
            np.testing.assert_allclose(*rows, atol=2e-6)
            # A sum in another order may round a factor of the next product to its neighbor.
            np.testing.assert_allclose(other["narrow"]["rows"], one["narrow"]["rows"], atol=2e-3)
            self.assertEqual(other["answers"], one["answers"])

    def test_only_what_has_to_is_sent(self):
        whole, split = self.found["whole"], self.found["split"]
        # What means divide by, and the gradients.
        self.assertEqual(whole["lora"]["collectives"], {"all-reduce": 2})
        self.assertEqual(whole["sketch"]["collectives"], {})
        self.assertEqual(split["sketch"]["collectives"].keys(), {"all-gather"})
        self.assertEqual(split["lora"]["collectives"]["all-reduce"], 2)
        self.assertNotIn("reduce-scatter", split["lora"]["collectives"])


@pytest.mark.heavy
class AskTest(absltest.TestCase):
    def test_an_index_says_the_same_where_the_base_is_split(self):
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        queries = folder / "queries.jsonl"
        rows = [{"instruction": "What is a kettle?", "output": "It hums."}]
        rows += [{"instruction": "Describe a kettle."}]  # which the model answers
        queries.write_text("".join(json.dumps(row) + "\n" for row in rows))
        index = finished_run() / "sketch" / "index"
        asked = "query", f"--index={index}", f"--queries={queries}", "--json"
        how = ("--top=120", "--bottom=120")
        one, split = (
            run_command(*asked, *how, mesh, env=_WORKER)
            for mesh in ("--mesh.data=1", "--mesh.base=sharded")
        )
        self.assertEqual((one.returncode, split.returncode), (0, 0), one.stderr + split.stderr)
        self.assertNotIn("are split over", one.stderr)
        self.assertIn("tensors are split over 4 devices and gathered", split.stderr)
        left, right = (json.loads(done.stdout) for done in (one, split))
        self.assertEqual(left["queries"], right["queries"])
        listed = [[*of["toward"], *of["against"]] for of in (left, right)]
        scores = [{row["id"]: row["score"] for row in rows} for rows in listed]
        self.assertLen(scores[0], 120)
        self.assertEqual(scores[0].keys(), scores[1].keys())
        for name, score in scores[0].items():
            self.assertAlmostEqual(scores[1][name], score, delta=2e-6)
