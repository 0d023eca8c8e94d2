"""The layers that all decoders share, written for one example; the caller vmaps.

NNX modules declare the parameters; the arithmetic is plain JAX. Matmuls run in the dtype of the
frozen weights, while norms, rotary angles, softmax, logits and adapters run in float32. Layers of
one kind are stacked along a leading axis and run under `jax.lax.scan`, so that compile time does
not grow with depth.

Letters beyond axes.py: G key-value heads (H is a multiple of G), F rotated pairs of a head, I and
O the input and output width of a linear layer.
"""

import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from raslik_jax.axes import Tree
from raslik_jax.models import quantize
from raslik_jax.models.hf_config import rope_frequencies
from raslik_jax.models.lora import LoRAConfig, LoRAParam, adapter_output, init_factor_a

AttentionKind = Literal["xla", "cudnn"]
Hidden = Float[Array, "L E"]
Vector = Float[Array, " E"]
Queries = Float[Array, "L H D"]
Keys = Float[Array, "L G D"]

# `gelu` is the exact function of the normal distribution; Pythia uses it, GPT-2 the tanh form.
ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


class Linear(nnx.Module):
    """A linear layer x W + b, with an adapter where the LoRA settings name it.

    Frozen parameters "kernel" [in, out], an array or a quantized kernel (`quantize`), and "bias"
    [out]; the adapter's are "a" [in, rank] and "b" [rank, out].
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        lora: LoRAConfig | None,
        dtype: Any,
    ):
        self.name = name
        self.kernel = nnx.Param(jnp.zeros((in_features, out_features), dtype))
        if bias:
            self.bias = nnx.Param(jnp.zeros((out_features,), dtype))
        self.has_bias = bias
        self.lora = lora if lora is not None and name in lora.targets else None
        if self.lora is not None:
            rank = self.lora.width(name)
            self.a = LoRAParam(jnp.zeros((in_features, rank), jnp.float32))
            self.b = LoRAParam(jnp.zeros((rank, out_features), jnp.float32))
            # Of all layers; `CausalLM.run` sets each layer's own where they differ.
            self.adapter_scale: Any = self.lora.scale

    def __call__(
        self, input_LI: Float[Array, "L I"], key: jax.Array | None = None
    ) -> Float[Array, "L O"]:
        """Returns the output in the input's dtype; `key` switches the adapter's dropout on."""
        output_LO = jnp.asarray(quantize.matmul(input_LI, self.kernel.get_value()))
        if self.has_bias:
            output_LO = output_LO + self.bias.get_value()[None, :]
        if self.lora is None:
            return output_LO
        if key is not None:
            # Layers that share an input (q, k, v) drop different entries of it, as in PEFT.
            key = jax.random.fold_in(key, zlib.crc32(self.name.encode()))
        a_IR, b_RO = self.a.get_value(), self.b.get_value()
        dropout = self.lora.dropout
        share_LO = adapter_output(
            input_LI, a_IR, b_RO, scale=self.adapter_scale, dropout=dropout, key=key
        )
        return (output_LO.astype(jnp.float32) + share_LO).astype(output_LO.dtype)


class Embedding(nnx.Module):
    """A table of token vectors, "embedding" [V, E]."""

    def __init__(self, num_rows: int, width: int, *, dtype: Any):
        self.embedding = nnx.Param(jnp.zeros((num_rows, width), dtype))

    def __call__(self, tokens_L: Int[Array, " L"]) -> Hidden:
        """Returns the rows of the given tokens."""
        return jnp.asarray(self.embedding.get_value())[tokens_L]


def normalize(
    hidden_LE: Hidden, epsilon: float, scale_E: Vector, bias_E: Vector | None = None
) -> Hidden:
    """Returns rows over their root mean square, times a scale; with a bias, centered first.

    Without a bias it is RMSNorm, with one LayerNorm. Moments are taken in float32: bfloat16 loses
    the small deviations that a norm divides by. The output has the input's dtype.
    """
    wide_LE = hidden_LE.astype(jnp.float32)
    if bias_E is not None:
        wide_LE = wide_LE - jnp.mean(wide_LE, axis=-1, keepdims=True)
    mean_square_L1 = jnp.mean(jnp.square(wide_LE), axis=-1, keepdims=True)
    unit_LE = wide_LE * jax.lax.rsqrt(mean_square_L1 + epsilon)
    output_LE = unit_LE * scale_E.astype(jnp.float32)[None, :]
    if bias_E is not None:
        output_LE = output_LE + bias_E.astype(jnp.float32)[None, :]
    return output_LE.astype(hidden_LE.dtype)


class RMSNorm(nnx.Module):
    """Division by the root mean square over the last axis, "scale" only."""

    def __init__(self, width: int, *, epsilon: float, dtype: Any):
        self.scale = nnx.Param(jnp.ones((width,), dtype))
        self.epsilon = epsilon

    def __call__(self, hidden_LE: Hidden) -> Hidden:
        """Returns the normalized rows."""
        return normalize(hidden_LE, self.epsilon, self.scale.get_value())


class LayerNorm(RMSNorm):
    """Normalization to mean 0 and variance 1 over the last axis, "scale" and "bias"."""

    def __init__(self, width: int, *, epsilon: float, dtype: Any):
        super().__init__(width, epsilon=epsilon, dtype=dtype)
        self.bias = nnx.Param(jnp.zeros((width,), dtype))

    def __call__(self, hidden_LE: Hidden) -> Hidden:
        """Returns the normalized rows."""
        return normalize(hidden_LE, self.epsilon, self.scale.get_value(), self.bias.get_value())


class Rotation(NamedTuple):
    """Cosine and sine of the rotary angles, float32."""

    cos_LF: Float[Array, "L F"]
    sin_LF: Float[Array, "L F"]


def rotation_at(frequency_F: np.ndarray, positions_L: Int[Array, " L"]) -> Rotation:
    """Returns the rotary cosines and sines at the given positions."""
    # float32 always: bfloat16 cannot tell position 257 from 256.
    angle_LF = positions_L.astype(jnp.float32)[:, None] * jnp.asarray(frequency_F)[None, :]
    return Rotation(jnp.cos(angle_LF), jnp.sin(angle_LF))


def rotate(head_LHD: Float[Array, "L H D"], rotation: Rotation) -> Float[Array, "L H D"]:
    """Returns the heads with their first 2 F coordinates rotated, and the others as they were.

    Coordinate i is paired with i + F ("rotate half", the layout of Hugging Face checkpoints), not
    with its neighbor.
    """
    num_pairs = rotation.cos_LF.shape[-1]
    cos_LHF, sin_LHF = rotation.cos_LF[:, None, :], rotation.sin_LF[:, None, :]
    wide_LHD = head_LHD.astype(jnp.float32)
    first_LHF = wide_LHD[..., :num_pairs]
    second_LHF = wide_LHD[..., num_pairs : 2 * num_pairs]
    rotated = (
        first_LHF * cos_LHF - second_LHF * sin_LHF,
        second_LHF * cos_LHF + first_LHF * sin_LHF,
        wide_LHD[..., 2 * num_pairs :],
    )
    return jnp.concatenate(rotated, axis=-1).astype(head_LHD.dtype)


class KeyValues(NamedTuple):
    """Keys and values of one example, of one layer or (with a leading axis) of all layers."""

    key_GSD: Float[Array, "*layers G S D"]
    value_GSD: Float[Array, "*layers G S D"]


class Context(NamedTuple):
    """What a layer reads beside hidden states; the last two are the layer's own.

    Attributes:
      rotation: The rotary angles of the tokens at hand.
      mask_L: Which of the tokens at hand are real; None where all are, or where only the right
        end is padded (a causal model never looks there).
      past_mask_S: Which slots of the cache may be attended to; None without a cache.
      kind: The implementation of `jax.nn.dot_product_attention`; None lets JAX choose. "cudnn"
        (16-bit weights on a GPU) serves whole unmasked rows; all else runs on XLA.
      past: The cache, or None.
      key: Switches the adapters' dropout on.
    """

    rotation: Rotation
    mask_L: Bool[Array, " L"] | None = None
    past_mask_S: Bool[Array, " S"] | None = None
    kind: AttentionKind | None = None
    past: KeyValues | None = None
    key: jax.Array | None = None


# Hidden states, and the keys and values of their tokens.
LayerOutput = tuple[Hidden, KeyValues]


def attend(query_LHD: Queries, key_LGD: Keys, value_LGD: Keys, context: Context) -> Queries:
    """Returns causal attention of the tokens at hand to the cache and to each other.

    A masked-out token contributes exactly 0 to every real token. Grouped heads are native: query
    head h reads key-value head h // (H / G). Queries and keys are rotated already.
    """
    kind, mask, is_causal, dtype = None, None, True, query_LHD.dtype
    past = context.past
    if past is None or context.past_mask_S is None:
        # cudnn takes a mask only as a [H, L, L] bias, which is what it is there to avoid. Right
        # padding needs no mask, so per-example gradients run on it; masked prompts do not.
        kind = None if context.mask_L is not None and context.kind == "cudnn" else context.kind
        # XLA keeps the [H, L, L] weights in float32 anyway, and its bfloat16 products have a
        # backward pass that mixes dtypes; cudnn takes 16 bits only.
        dtype = dtype if kind == "cudnn" else jnp.float32
        mask = None if context.mask_L is None else context.mask_L[None, None, :]
    else:
        num_tokens, num_slots = query_LHD.shape[0], context.past_mask_S.shape[0]
        fresh_mask_LL = jnp.tril(jnp.ones((num_tokens, num_tokens), bool))
        past_mask_LS = jnp.broadcast_to(context.past_mask_S[None, :], (num_tokens, num_slots))
        mask = jnp.concatenate([past_mask_LS, fresh_mask_LL], axis=1)[None]
        is_causal = False
        # The cache keeps the head axis first, as the batched matmuls want it; the swaps below only
        # rename axes.
        fresh = fresh_key_values(key_LGD, value_LGD)
        key_GSD = jnp.concatenate([past.key_GSD, fresh.key_GSD], axis=1)
        value_GSD = jnp.concatenate([past.value_GSD, fresh.value_GSD], axis=1)
        key_LGD, value_LGD = jnp.swapaxes(key_GSD, 0, 1), jnp.swapaxes(value_GSD, 0, 1)
    # JAX's own bfloat16 path mixes dtypes, which strict promotion forbids.
    with jax.numpy_dtype_promotion("standard"):
        mixed_LHD = jax.nn.dot_product_attention(
            query_LHD.astype(dtype),
            key_LGD.astype(dtype),
            value_LGD.astype(dtype),
            mask=mask,
            is_causal=is_causal,
            implementation=kind,
        )
    return mixed_LHD.astype(query_LHD.dtype)


def fresh_key_values(key_LGD: Float[Array, "L G D"], value_LGD: Float[Array, "L G D"]) -> KeyValues:
    """Returns the keys and values of the tokens at hand in the layout of the cache."""
    return KeyValues(jnp.swapaxes(key_LGD, 0, 1), jnp.swapaxes(value_LGD, 0, 1))


def mix_tokens(
    query_LHD: Queries, key_LGD: Keys, value_LGD: Keys, context: Context
) -> tuple[Float[Array, "L I"], KeyValues]:
    """Returns the heads' attention side by side, rotated here, and these keys and values."""
    query_LHD = rotate(query_LHD, context.rotation)
    key_LGD = rotate(key_LGD, context.rotation)
    mixed_LHD = attend(query_LHD, key_LGD, value_LGD, context)
    return mixed_LHD.reshape(len(mixed_LHD), -1), fresh_key_values(key_LGD, value_LGD)


class GatedBlock(nnx.Module):
    """Llama's attention with grouped heads and its gated MLP, down(silu(gate(x)) * up(x)).

    A family adds norms and, in `__call__`, where they stand. Norms that it calls q_norm and k_norm
    are applied to the projections, before they are cut into heads.
    """

    q_norm: Any = staticmethod(lambda projected_LI: projected_LI)
    k_norm: Any = q_norm

    def __init__(self, config: Any, lora: LoRAConfig | None, *, mlp_bias: bool, dtype: Any):
        width, inner, bias = config.hidden_size, config.intermediate_size, config.attention_bias
        query_width = config.num_attention_heads * config.head_width
        key_width = config.num_cached_heads * config.head_width
        linear = functools.partial(Linear, lora=lora, dtype=dtype)
        self.config = config
        self.q_proj = linear("q_proj", width, query_width, bias=bias)
        self.k_proj = linear("k_proj", width, key_width, bias=bias)
        self.v_proj = linear("v_proj", width, key_width, bias=bias)
        self.o_proj = linear("o_proj", query_width, width, bias=bias)
        self.gate_proj = linear("gate_proj", width, inner, bias=mlp_bias)
        self.up_proj = linear("up_proj", width, inner, bias=mlp_bias)
        self.down_proj = linear("down_proj", inner, width, bias=mlp_bias)

    def attention(self, hidden_LE: Hidden, context: Context) -> LayerOutput:
        """Returns the attention's output and the keys and values of these tokens."""
        query_LI = self.q_norm(self.q_proj(hidden_LE, context.key))
        key_LI = self.k_norm(self.k_proj(hidden_LE, context.key))
        value_LI = self.v_proj(hidden_LE, context.key)
        shape = (len(hidden_LE), -1, self.config.head_width)
        heads = query_LI.reshape(shape), key_LI.reshape(shape), value_LI.reshape(shape)
        mixed_LI, fresh = mix_tokens(*heads, context)
        return self.o_proj(mixed_LI, context.key), fresh

    def mlp(self, hidden_LE: Hidden, context: Context) -> Hidden:
        """Returns the gated perceptron's output."""
        gate_LI = ACTIVATIONS[self.config.hidden_act](self.gate_proj(hidden_LE, context.key))
        return self.down_proj(gate_LI * self.up_proj(hidden_LE, context.key), context.key)


class CausalLM(nnx.Module):
    """A decoder: embedding, stacked blocks, final norm, head.

    `block` is the class of a layer, whose call is ``block(hidden_LE, context) -> LayerOutput``, and
    `norm` that of the final norm.
    """

    def __init__(self, config: Any, lora: LoRAConfig | None, block: Any, norm: Any, *, dtype: Any):
        self.config, self.lora = config, lora
        width = config.hidden_size
        self.embed = Embedding(config.vocab_size, width, dtype=dtype)
        graph, state = nnx.split(block(config, lora, dtype=dtype))
        depth = config.num_hidden_layers
        # A leading layer axis on every parameter.
        stacked = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (depth, *leaf.shape)), state)
        self.layers = nnx.merge(graph, stacked)
        epsilon = getattr(config, "rms_norm_eps", None) or config.layer_norm_eps
        self.final_norm = norm(width, epsilon=epsilon, dtype=dtype)
        if not config.tie_word_embeddings:
            self.head = Linear("head", width, config.vocab_size, bias=False, lora=None, dtype=dtype)

    def run(
        self,
        tokens_L: Int[Array, " L"],
        *,
        positions_L: Int[Array, " L"],
        mask_L: Bool[Array, " L"] | None = None,
        past: KeyValues | None = None,
        past_mask_S: Bool[Array, " S"] | None = None,
        dropout_key: jax.Array | None = None,
        keep: bool = False,
        remat: bool = False,
        kind: AttentionKind | None = None,
    ) -> tuple[Hidden, KeyValues | None]:
        """Returns the final hidden states and, with `keep`, the keys and values of all layers.

        `past` is the cache, with a leading layer axis on both arrays, and `remat` recomputes each
        block in the backward pass instead of storing its activations; the others are as in
        `Context` and `decoder.Decoder`.
        """
        frequency_F = rope_frequencies(self.config.rope_parameters, self.config.head_width)
        context = Context(rotation_at(frequency_F, positions_L), mask_L, past_mask_S, kind)
        # lax.scan over the split state, not nnx.scan: NNX transforms fail inside vmap(grad).
        graph, stacked = nnx.split(self.layers)
        num_layers = self.config.num_hidden_layers
        keys = None if dropout_key is None else jax.random.split(dropout_key, num_layers)

        scales = self.lora.scales() if self.lora else {}
        scale_of = {name: jnp.array(values, jnp.float32) for name, values in scales.items()}

        def run_block(hidden_LE: Any, layer: Any) -> tuple[Any, KeyValues | None]:
            state, past_layer, key, own_scales = layer
            block: Any = nnx.merge(graph, state)
            for name, scale in own_scales.items():
                getattr(block, name).adapter_scale = scale
            hidden_LE, fresh = block(hidden_LE, context._replace(past=past_layer, key=key))
            return hidden_LE, fresh if keep else None

        body = jax.checkpoint(run_block) if remat else run_block
        each = (stacked, past, keys, scale_of)
        hidden_LE, fresh = jax.lax.scan(body, self.embed(tokens_L), each)
        return self.final_norm(hidden_LE), fresh

    def logits(self, hidden_TE: Float[Array, "T E"]) -> Float[Array, "T V"]:
        """Returns float32 logits; a tied head reads the embedding table."""
        is_tied = self.config.tie_word_embeddings
        table = (self.embed.embedding if is_tied else self.head.kernel).get_value()
        project = _contract if hidden_TE.dtype == jnp.float32 else _project
        return project(hidden_TE, table, int(is_tied))


def _contract(
    hidden_TE: Float[Array, "T E"], table: Float[Array, "rows columns"], contract: int
) -> Float[Array, "T V"]:
    """Returns the float32 product of hidden states with a head, summed over its axis `contract`."""
    return jax.lax.dot_general(
        hidden_TE, table, (((1,), (contract,)), ((), ())), preferred_element_type=jnp.float32
    )


# With bfloat16 weights the backward pass is in their dtype: it rounds the float32 cotangent first,
# as a framework does that casts bfloat16 logits up. Else XLA converts the whole table to float32.
_project = jax.custom_vjp(_contract, nondiff_argnums=(2,))


def _project_backward(contract: int, residuals: Any, cotangent_TV: Array) -> tuple[Array, Array]:
    hidden_TE, table = residuals
    narrow_TV = cotangent_TV.astype(hidden_TE.dtype)
    hidden_cotangent = jax.lax.dot_general(narrow_TV, table, (((1,), (1 - contract,)), ((), ())))
    left, right = (hidden_TE, narrow_TV) if contract == 0 else (narrow_TV, hidden_TE)
    return hidden_cotangent, jax.lax.dot_general(left, right, (((0,), (0,)), ((), ())))


_project.defvjp(
    lambda hidden, table, contract: (_contract(hidden, table, contract), (hidden, table)),
    _project_backward,
)


def init_weights(shapes: Tree, *, key: jax.Array, initializer_range: float) -> Tree:
    """Returns arrays for a tree of shapes, started as Hugging Face and PEFT start these models.

    Kernels and embeddings are normal, biases 0, norm scales 1; an adapter's A is uniform and its B
    0. A leaf depends on the key, its path and its shape only, so a part drawn alone is the part
    that is drawn with the rest.
    """

    def draw(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        names = [entry.key for entry in path]
        if names[-1] in ("scale", "bias", "b"):
            return jnp.full(leaf.shape, float(names[-1] == "scale"), leaf.dtype)
        own_key = jax.random.fold_in(key, zlib.crc32("/".join(names).encode()))
        if names[-1] == "a":
            return init_factor_a(own_key, leaf.shape)
        values = jax.random.normal(own_key, leaf.shape, jnp.float32) * initializer_range
        return values.astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)
