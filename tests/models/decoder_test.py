import functools
import json
import math
import pathlib

import compiling
import decoder_cases
import decoder_parity
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from snapshots import said
from support import random_weights, tiny_model_config

from experiments.bench.harness import LORA_PRESETS
from raslik_jax.base.axes import Tree
from raslik_jax.models import decoder, presets
from raslik_jax.models.lora import LoRAConfig

_FAMILIES = {
    "gpt_neox": "pythia",
    "llama": "grouped_tied",
    "olmo2": "grouped",
    # Windows in some of its layers.
    "qwen3": "windows_by_layer_biases",
}
# Those of the tests by gradient that are not in the default run.
_OTHERS = {
    "gemma2": "caps_alternating_windows",
    "gemma3_text": "pattern_and_stretched_global_rotation",
    "mistral": "window",
    # Not the wider tied one: its random weights magnify roundings, with plain rotations too.
    "phi3": "longrope_long",
    "qwen2": "windows_in_the_last_layer_yarn",
}
_LENGTH = 9
_GOLDEN = pathlib.Path(__file__).parents[1] / "golden"

# Compiling is most of the time here, and LLVM's optimizations most of compiling.
_jit = functools.partial(jax.jit, compiler_options=compiling.OPTIONS)


def _place(family: str, name: str) -> str:
    return decoder.ARCHITECTURES[family].key_map[f"layers/{name}"]


@functools.cache
def _model(family: str, dtype: str = "float32") -> decoder_parity.Port:
    """Returns a tiny random model of a family, both LoRA factors random."""
    case = decoder_cases.CASES[family][{**_FAMILIES, **_OTHERS}[family]]
    config = decoder.ARCHITECTURES[family].config.from_hf(case.config)
    lora_config = LoRAConfig(rank=2, alpha=4.0, dropout=0.5, targets=case.targets)
    return decoder_parity.Port(*random_weights(config, lora_config, dtype=dtype))


def _distance(ours: Tree, theirs: Tree) -> float:
    """Returns the norm of the difference of all leaves together."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return math.sqrt(sum(float(np.sum(np.square(np.subtract(a, b)))) for a, b in pairs))


def _within_a_bfloat16_unit(weight: jax.Array) -> jax.Array:
    """Returns the weight with each entry changed by less than a unit of bfloat16's 8 bits."""
    share = np.random.default_rng(0).uniform(-1, 1, weight.shape) * 2**-8
    return weight * np.float32(1 + share)


def _tokens(num_rows: int = 3, length: int = _LENGTH) -> jax.Array:
    return jax.random.randint(jax.random.key(2), (num_rows, length), 0, 29)


def _all_logits(port: decoder_parity.Port, **options):
    """Returns a jitted function of one row of tokens to its logits [L, V]."""
    bound = decoder.bind(port.graphdef, **options)

    def logits(lora, base, tokens_L, mask_L=None, positions_L=None, dropout_key=None):
        how = {"mask_L": mask_L, "positions_L": positions_L, "dropout_key": dropout_key}
        hidden_LE = bound.hidden(lora, base, tokens_L, **how)
        return bound.logits(lora, base, hidden_LE)

    return logits


def _loss(port: decoder_parity.Port, **options):
    """Returns the mean next-token loss of one row as a function of (lora, base, tokens_L)."""
    all_logits = _all_logits(port, **options)

    def loss(lora: Tree, base: Tree, tokens_L: jax.Array, dropout_key=None) -> jax.Array:
        logits_LV = all_logits(lora, base, tokens_L, dropout_key=dropout_key)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits_LV[:-1]), tokens_L[1:, None], axis=1)
        return -jnp.mean(picked)

    return loss


def _relative(ours: Tree, theirs: Tree) -> float:
    """Returns the largest relative norm of a leaf's difference."""
    # On the host: eager operations would be compiled for every shape.
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return max(
        float(np.linalg.norm(np.subtract(a, b)) / (np.linalg.norm(b) + 1e-30)) for a, b in pairs
    )


def _reach(port: decoder_parity.Port) -> np.ndarray:
    """Returns [t, s]: the size of the gradient of hidden state t by the embedding of token s."""
    bound = decoder.bind(port.graphdef)
    tokens_L = jnp.arange(_LENGTH)  # distinct, so that a row of the table is one position
    hidden_LE, pullback = jax.vjp(lambda b: bound.hidden(port.lora, b, tokens_L), port.base)

    def reach(t: jax.Array) -> jax.Array:
        width = hidden_LE.shape[1]
        cotangent_LE = jnp.zeros_like(hidden_LE).at[t].set(jnp.arange(1.0, 1.0 + width))
        table_VE = pullback(cotangent_LE)[0]["embed"]["embedding"]
        return jnp.abs(table_VE[:_LENGTH]).sum(axis=1)

    return np.asarray(_jit(jax.vmap(reach))(jnp.arange(_LENGTH)))


class TreeTest(parameterized.TestCase):
    def test_trees_are_plain_dicts_of_the_documented_names_and_shapes(self):
        config = tiny_model_config(11, hidden_size=8, num_hidden_layers=3, intermediate_size=12)
        lora_config = LoRAConfig(rank=2, alpha=4.0, targets=("query_key_value", "dense_4h_to_h"))
        _, lora, base = decoder.abstract(config, lora_config, jnp.bfloat16)
        shapes = jax.tree.map(lambda leaf: str(leaf.shape), {"base": base, "lora": lora})
        said(json.dumps(shapes, indent=1))
        self.assertEqual({leaf.dtype for leaf in jax.tree.leaves(base)}, {jnp.dtype("bfloat16")})
        self.assertEqual({leaf.dtype for leaf in jax.tree.leaves(lora)}, {jnp.dtype("float32")})

    @parameterized.parameters(
        ("olmo2-7b", "olmo2", 8_388_608),
        ("pythia-2.8b", "pythia", 20_971_520),
        ("pythia-2.8b", "pythia-qkv", 2_621_440),
    )
    def test_lora_counts_at_full_size_are_the_papers(self, model: str, lora: str, count: int):
        _, leaves, _ = decoder.abstract(presets.MODEL_PRESETS[model], LORA_PRESETS[lora])
        self.assertEqual(decoder.count_parameters(leaves), count)

    def test_base_counts_at_full_size_are_the_published(self):
        for name, count in json.loads((_GOLDEN / "parameters.json").read_text()).items():
            _, _, base = decoder.abstract(presets.MODEL_PRESETS[name], None)
            self.assertEqual(decoder.count_parameters(base), count, name)

    def test_graphdefs_are_hashable_and_binding_twice_gives_one_object(self):
        config = presets.MODEL_PRESETS["pythia-14m"]
        one, _, _ = decoder.abstract(config, LORA_PRESETS["pythia"])
        two, _, _ = decoder.abstract(config, LORA_PRESETS["pythia"], jnp.bfloat16)
        self.assertEqual(hash(one), hash(two))
        self.assertIs(decoder.bind(one), decoder.bind(two))

    def test_the_targets_of_an_architecture_are_linear_layers_of_its_attention(self):
        for family, cases in decoder_cases.CASES.items():
            architecture = decoder.ARCHITECTURES[family]
            config = architecture.config.from_hf(next(iter(cases.values())).config)
            targets = architecture.lora_targets
            _, lora, _ = decoder.abstract(config, LoRAConfig(rank=2, alpha=2.0, targets=targets))
            self.assertEqual(set(lora["layers"]), set(targets))
            for name in targets:
                self.assertIn("attention" if family == "gpt_neox" else "attn", _place(family, name))

    def test_a_target_that_does_not_exist_is_refused(self):
        with pytest.raises(ValueError, match=r"dense_4h_to_h.*got \['q_proj'\]"):
            decoder.abstract(
                presets.MODEL_PRESETS["pythia-14m"],
                LoRAConfig(rank=2, alpha=2.0, targets=("dense", "q_proj")),
            )


class StartTest(parameterized.TestCase):
    def test_weights_start_as_hugging_faces_and_the_adapter_as_pefts(self):
        sizes = {"hidden_size": 64, "intermediate_size": 64, "initializer_range": 0.02}
        config = tiny_model_config(64, **sizes)
        _, lora, base = decoder.create(config, LORA_PRESETS["pythia"], key=jax.random.key(0))
        for name, leaves in base["layers"].items():
            if "kernel" in leaves:
                kernel = np.asarray(leaves["kernel"])
                # Five standard errors of a standard deviation over that many normals.
                bound = 5 * 0.02 / math.sqrt(2 * kernel.size)
                self.assertLess(abs(kernel.std() - config.initializer_range), bound, name)
                np.testing.assert_array_equal(leaves["bias"], 0.0)
            else:
                np.testing.assert_array_equal(leaves["scale"], 1.0)
        for leaves in lora["layers"].values():
            a = np.asarray(leaves["a"])
            bound = 1 / math.sqrt(a.shape[1])
            self.assertLessEqual(np.abs(a).max(), bound)
            self.assertLess(abs(a.std() - bound / math.sqrt(3)), 5 * bound / math.sqrt(3 * a.size))
            np.testing.assert_array_equal(leaves["b"], 0.0)

    def test_a_leaf_does_not_depend_on_the_other_leaves(self):
        config = presets.MODEL_PRESETS["pythia-14m"]
        lora_configs = [
            LoRAConfig(rank=2, alpha=2.0, targets=t)
            for t in (("dense",), ("dense", "query_key_value"))
        ]
        one, two = (
            decoder.init_lora(decoder.abstract(config, c)[0], key=jax.random.key(3))
            for c in lora_configs
        )
        np.testing.assert_array_equal(one["layers"]["dense"]["a"], two["layers"]["dense"]["a"])
        a_q, a_d = (two["layers"][name]["a"] for name in ("query_key_value", "dense"))
        self.assertGreater(float(jnp.abs(a_d - a_q).max()), 0)


class BehaviorTest(parameterized.TestCase):
    # Gradients take long to compile, and the families share all code but the block.
    gradient_families = ("llama",)

    def test_hidden_states_depend_on_the_earlier_tokens_in_reach_alone(self):
        for family in self.gradient_families:
            with self.subTest(family):
                model = _model(family)
                reach_LL = _reach(model)
                # A layer with a window of w tokens reaches w - 1 back.
                windows = model.graphdef.config.layer_windows
                farthest = sum((window or _LENGTH) - 1 for window in windows)
                back_LL = np.subtract.outer(np.arange(_LENGTH), np.arange(_LENGTH))
                is_seen_LL = (back_LL >= 0) & (back_LL <= farthest)
                self.assertTrue(np.all((reach_LL > 0.0) == is_seen_LL))

    @parameterized.parameters(*_FAMILIES)
    def test_padding_at_either_end_changes_no_logits(self, family: str):
        port = _model(family)
        tokens_L = _tokens(1)[0]
        function = _jit(_all_logits(port))
        plain_LV = function(port.lora, port.base, tokens_L)
        rows, masks = [], []
        for left, right in ((0, 5), (5, 0), (2, 3)):
            # The padding holds real token ids, so that a leak shows.
            rows.append(jnp.concatenate([jnp.full(left, 7), tokens_L, jnp.full(right, 5)]))
            masks.append(jnp.asarray([False] * left + [True] * _LENGTH + [False] * right))
        batched = _jit(jax.vmap(_all_logits(port), in_axes=(None, None, 0, 0)))
        padded_BLV = batched(port.lora, port.base, jnp.stack(rows), jnp.stack(masks))
        for row, mask_L in enumerate(masks):
            np.testing.assert_allclose(padded_BLV[row][mask_L], plain_LV, atol=2e-5)
        # At the right end no mask is needed at all.
        np.testing.assert_allclose(
            function(port.lora, port.base, rows[0])[:_LENGTH], plain_LV, atol=2e-5
        )

    def test_gradients_agree_alone_batched_and_with_recomputation(self):
        for family in self.gradient_families:
            port = _model(family)
            tokens_BL = _tokens()
            per_example = _jit(jax.vmap(jax.grad(_loss(port)), in_axes=(None, None, 0)))
            batched = per_example(port.lora, port.base, tokens_BL)
            recomputed = _jit(jax.vmap(jax.grad(_loss(port, remat=True)), in_axes=(None, None, 0)))
            self.assertLess(_relative(recomputed(port.lora, port.base, tokens_BL), batched), 1e-5)
            one = _jit(jax.grad(_loss(port)))
            for row in range(2):
                alone = one(port.lora, port.base, tokens_BL[row])
                self.assertLess(
                    _relative(jax.tree.map(lambda g, row=row: np.asarray(g)[row], batched), alone),
                    1e-5,
                )

    def test_recomputation_stores_less(self):
        tokens_L = _tokens(1, 47)[0]  # no width of the model

        def stored(dtype: str, remat: bool = False) -> list[jax.Array]:
            """Returns what is kept of the tokens."""
            port = _model("gpt_neox", dtype)
            loss = _loss(port, remat=remat)
            _, pullback = jax.eval_shape(
                lambda lora: jax.vjp(lambda x: loss(x, port.base, tokens_L), lora), port.lora
            )
            return [leaf for leaf in jax.tree.leaves(pullback) if 47 in leaf.shape]

        for dtype in ("float32", "bfloat16"):
            kept, less = (decoder.count_parameters(stored(dtype, remat)) for remat in (False, True))
            self.assertLess(less, kept / 2)
            # Products, but nothing of attention.
            self.assertEmpty([leaf for leaf in stored(dtype) if leaf.shape[-2:] == (47, 47)])

    def test_the_backbone_alone_can_be_trained(self):
        port = _model("gpt_neox")
        graphdef, lora, _ = decoder.abstract(port.graphdef.config, None)
        loss = _jit(jax.value_and_grad(_loss(port._replace(graphdef=graphdef)), argnums=1))
        tokens_L = _tokens(1)[0]
        _, gradient = loss(lora, port.base, tokens_L)
        for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
            self.assertGreater(np.abs(np.asarray(leaf)).max(), 0.0, jax.tree_util.keystr(path))

    def test_dropout_acts_only_with_a_key_and_only_on_the_adapters(self):
        port = _model("llama")
        function = _jit(_all_logits(port))
        tokens_L = _tokens(1)[0]
        plain = function(port.lora, port.base, tokens_L)
        drawn = [
            function(port.lora, port.base, tokens_L, dropout_key=jax.random.key(seed))
            for seed in (5, 5, 6)
        ]
        np.testing.assert_array_equal(drawn[0], drawn[1])
        self.assertGreater(float(jnp.abs(drawn[0] - drawn[2]).max()), 1e-3)
        self.assertGreater(float(jnp.abs(drawn[0] - plain).max()), 1e-3)
        silent = jax.tree.map(jnp.zeros_like, port.lora)
        np.testing.assert_allclose(
            function(silent, port.base, tokens_L, dropout_key=jax.random.key(5)),
            function(silent, port.base, tokens_L),
            atol=1e-6,
        )

    @parameterized.parameters(*_FAMILIES)
    def test_the_cache_gives_what_the_whole_row_gives(self, family: str):
        port = _model(family)
        bound = decoder.bind(port.graphdef)
        tokens_L = _tokens(1)[0]
        whole_LE = _jit(bound.hidden)(port.lora, port.base, tokens_L)
        first, second = tokens_L[:5], tokens_L[5:]

        @_jit
        def in_two(first, second):
            head_LE, fresh = bound.prefill(port.lora, port.base, first)
            # Two more slots than needed, filled with what must not be seen.
            past = jax.tree.map(
                lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, 2), (0, 0)), constant_values=9.0), fresh
            )
            where = {"past_mask_S": jnp.arange(7) < 5, "positions_L": 5 + jnp.arange(4)}
            tail_LE, fresh = bound.extend(port.lora, port.base, second, past, **where)
            return jnp.concatenate([head_LE, tail_LE]), fresh

        both_LE, fresh = in_two(first, second)
        np.testing.assert_allclose(both_LE, whole_LE, atol=2e-5)
        config = port.graphdef.config
        groups = getattr(config, "num_key_value_heads", config.num_attention_heads)
        shape = (config.num_hidden_layers, groups, 4, config.head_width)
        self.assertEqual([leaf.shape for leaf in fresh], [shape, shape])

    def test_bfloat16_weights_keep_float32_logits_and_gradients(self):
        for family in self.gradient_families:
            port, narrow = _model(family), _model(family, "bfloat16")
            base = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float32)), narrow.base)
            near = jax.tree.map(_within_a_bfloat16_unit, base)
            loss = _jit(jax.value_and_grad(_loss(narrow)))
            (values, gradients), (exact, exact_gradients), (_, near_gradients) = (
                zip(*(loss(port.lora, weights, row) for row in _tokens()), strict=True)
                for weights in (narrow.base, base, near)
            )
            self.assertEqual(
                {leaf.dtype for leaf in jax.tree.leaves(gradients)}, {jnp.dtype("float32")}
            )
            logits_LV = jax.eval_shape(_all_logits(narrow), port.lora, narrow.base, _tokens()[0])
            self.assertEqual(logits_LV.dtype, jnp.float32)
            np.testing.assert_allclose(values, exact, rtol=0.03)
            # Activations in 8 bits change a gradient about as much as weights in 8 bits do: by 1
            # to 25 percent, as model and row have it, so that a fixed bound would be luck.
            allowed = 3 * _distance(near_gradients, exact_gradients)
            self.assertLess(_distance(gradients, exact_gradients), allowed)

    @parameterized.parameters("olmo2-7b", "llama-2-7b", "pythia-6.9b")
    def test_a_7b_model_lowers_without_memory_and_independent_of_depth(self, name: str):
        def lower(depth: int) -> str:
            config = presets.MODEL_PRESETS[name]
            config = type(config).from_hf({**config.to_hf(), "num_hidden_layers": depth})
            lora_config = LORA_PRESETS["pythia" if name.startswith("pythia") else "olmo2"]
            graphdef, lora, base = decoder.abstract(config, lora_config, jnp.bfloat16)
            loss = _loss(decoder_parity.Port(graphdef, lora, base), remat=True)
            tokens_BL = jax.ShapeDtypeStruct((8, 512), jnp.int32)
            gradient = _jit(jax.vmap(jax.grad(loss), in_axes=(None, None, 0)))
            return gradient.lower(lora, base, tokens_BL).as_text()

        before = sum(array.nbytes for array in jax.live_arrays())
        shallow, deep = lower(2), lower(32)
        self.assertLess(sum(array.nbytes for array in jax.live_arrays()) - before, 1_000_000)
        self.assertEqual(len(shallow.splitlines()), len(deep.splitlines()))


@pytest.mark.heavy
class BehaviorOfTheOtherFamiliesTest(parameterized.TestCase):
    """The tests by gradient, for the families that the default run leaves out."""

    gradient_families = ("gpt_neox", "olmo2", "qwen3", *_OTHERS)

    test_causality = BehaviorTest.test_hidden_states_depend_on_the_earlier_tokens_in_reach_alone
    test_agreement = BehaviorTest.test_gradients_agree_alone_batched_and_with_recomputation
    test_bfloat16 = BehaviorTest.test_bfloat16_weights_keep_float32_logits_and_gradients
