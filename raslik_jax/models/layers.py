"""The layers that all decoders share, written for one example; the caller vmaps.

NNX modules declare the parameters. The arithmetic is plain JAX. Matmuls run in the dtype of the
frozen kernels. Norms, rotary angles, softmax, logits and adapters run in float32. Layers of one
kind are stacked along a leading axis and run under `jax.lax.scan`, so compile time does not grow
with depth. `attention` has the exchange between tokens. A
`dtype` is one for all weights, or `products.Dtypes`.

Letters beyond axes.py: I and O, the input and output width of a linear layer; W, the width of a
norm.
"""

import functools
import itertools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Bool, Float, Int

from raslik_jax.base.axes import Tree
from raslik_jax.models import products, quantize
from raslik_jax.models.attention import (
    AttentionKind,
    Context,
    Hidden,
    KeyValues,
    LayerKinds,
    LayerOutput,
    cap_softly,
    mix_tokens,
    rotation_of,
)
from raslik_jax.models.lora import KEPT, LoRAConfig, LoRAParam, init_factor_a, inner_product
from raslik_jax.parallel import meshes

# A norm has the width of its rows or of each head.
Vector = Float[Array, " W"]


def _gelu(x: jax.Array) -> jax.Array:
    """Returns x times the share of the normal distribution below it, as PyTorch computes it.

    A CPU computes erf in less than half the time of erfc, which `jax.nn.gelu` uses. In 16 bits 1 +
    erf would lose small shares.
    """
    if x.dtype != jnp.float32:
        return jax.nn.gelu(x, approximate=False)
    return 0.5 * x * (1 + jax.lax.erf(x * np.float32(math.sqrt(0.5))))


# `gelu` is the exact function of the normal distribution; Pythia uses it, GPT-2 the tanh form.
ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": _gelu,
    "gelu_fast": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


class Linear(nnx.Module):
    """A linear layer x W + b with an adapter if the LoRA settings name it.

    Frozen parameters are "kernel" [in, out], an array or a quantized kernel (`quantize`), and
    "bias" [out]. The adapter's are "a" [in, rank] and "b" [rank, out].
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
        stream, kernels = products.Dtypes.of(dtype)
        # What quantized kernels are multiplied in; `CausalLM.run` sets it where it is another one.
        self.operands: Any = None
        self.kernel = nnx.Param(jnp.zeros((in_features, out_features), kernels))
        if bias:
            self.bias = nnx.Param(jnp.zeros((out_features,), stream))
        self.has_bias = bias
        self.lora = lora if lora is not None and name in lora.targets else None
        if self.lora is not None:
            rank = self.lora.width(name)
            self.a = LoRAParam(jnp.zeros((in_features, rank), jnp.float32))
            self.b = LoRAParam(jnp.zeros((rank, out_features), jnp.float32))
            # Of all layers; `CausalLM.run` sets each layer's own where they differ.
            self.adapter_scale: Any = self.lora.scale

    def __call__(
        self,
        input_LI: Float[Array, "L I"],
        key: jax.Array | None = None,
        low_LR: Float[Array, "L R"] | None = None,
    ) -> Float[Array, "L O"]:
        """Returns the output in the input's dtype; `key` switches the adapter's dropout on.

        `low_LR` is the adapter's inner product where it is known (`inner_products`).
        """
        output_LO = quantize.matmul(input_LI, self.kernel.get_value(), self.operands)
        if self.has_bias:
            output_LO = output_LO + self.bias.get_value()[None, :]
        if self.lora is None:
            return checkpoint_name(output_LO, KEPT)
        if key is not None:
            # Layers that share an input (q, k, v) drop different entries of it, as in PEFT.
            key = jax.random.fold_in(key, zlib.crc32(self.name.encode()))
        a_IR, b_RO = self.a.get_value(), self.b.get_value()
        if low_LR is None:
            low_LR = inner_product(input_LI, a_IR, dropout=self.lora.dropout, key=key)
        # On the low rank: a factor on the output would be one more array on the way back.
        share_LO = (low_LR * self.adapter_scale) @ b_RO
        if output_LO.dtype != jnp.float32:
            share_LO = _rounded(share_LO)
        wide_LO = output_LO.astype(jnp.float32) + share_LO
        return checkpoint_name(wide_LO.astype(output_LO.dtype), KEPT)


@jax.custom_jvp
def _rounded(share_LO: Float[Array, "L O"]) -> Float[Array, "L O"]:
    """Returns an adapter's share of an output in 11 bits, so that a GPU moves half as much.

    The sum has 8. The barrier keeps XLA from dropping the rounding; gradients pass as they are.
    """
    return jax.lax.optimization_barrier(share_LO.astype(jnp.float16)).astype(jnp.float32)


_rounded.defjvps(lambda tangent_LO, _, __: tangent_LO)


def inner_products(
    linears: Sequence[Linear], input_LI: Float[Array, "L I"], key: jax.Array | None
) -> Sequence[Float[Array, "L R"] | None]:
    """Returns the adapters' inner products of layers with the same input; None for single ones.

    In 16 bits it is one product, because a GPU takes longer to read the input than to multiply it:
    once in the forward and twice in the backward pass. With dropout every layer has an input of its
    own.
    """
    is_alone = key is not None or input_LI.dtype == jnp.float32
    if is_alone or any(linear.lora is None for linear in linears):
        return [None] * len(linears)
    factors = [linear.a.get_value() for linear in linears]
    ends = list(itertools.accumulate(factor_IR.shape[1] for factor_IR in factors))
    return jnp.split(inner_product(input_LI, jnp.concatenate(factors, axis=1)), ends[:-1], axis=1)


class Embedding(nnx.Module):
    """A table of token vectors, "embedding" [V, E]; reads multiply them by `scale`."""

    def __init__(self, num_rows: int, width: int, *, scale: float | None, dtype: Any):
        self.embedding = nnx.Param(jnp.zeros((num_rows, width), products.Dtypes.of(dtype).kernels))
        self.scale = scale

    @property
    def dtype(self) -> Any:
        """The dtype of the table, also of a part of it."""
        table = jax.tree.leaves(self.embedding.get_value())[0]
        return jax.eval_shape(products.read, table).dtype

    def __call__(self, tokens_L: Int[Array, " L"], dtype: Any = None) -> Hidden:
        """Returns the rows of the given tokens, in the dtype of the stream or of the table."""
        table = jnp.asarray(meshes.gather(self.embedding.get_value()))
        hidden_LE = products.read(table[tokens_L]).astype(dtype or self.dtype)
        # The factor is rounded to the dtype of the stream: so the models were trained.
        return (
            hidden_LE
            if self.scale is None
            else hidden_LE * jnp.asarray(self.scale, hidden_LE.dtype)
        )


def normalize(
    hidden_LE: Hidden, epsilon: float, scale_W: Vector, bias_W: Vector | None = None
) -> Hidden:
    """Returns rows over their root mean square times a scale; with a bias, centered first.

    A row that is wider than the scale is several rows next to each other, such as the heads of a
    projection. Without a bias it is RMSNorm, and with a bias LayerNorm. Moments are computed in
    float32, because bfloat16 loses the small deviations by which a norm divides. The output has the
    input's dtype.
    """
    wide_LE = hidden_LE.astype(jnp.float32).reshape(-1, len(scale_W))
    if bias_W is not None:
        wide_LE = wide_LE - jnp.mean(wide_LE, axis=-1, keepdims=True)
    mean_square_L1 = jnp.mean(jnp.square(wide_LE), axis=-1, keepdims=True)
    unit_LE = wide_LE * checkpoint_name(jax.lax.rsqrt(mean_square_L1 + epsilon), KEPT)
    output_LE = unit_LE * scale_W.astype(jnp.float32)[None, :]
    if bias_W is not None:
        output_LE = output_LE + bias_W.astype(jnp.float32)[None, :]
    return output_LE.astype(hidden_LE.dtype).reshape(hidden_LE.shape)


class RMSNorm(nnx.Module):
    """Division by the root mean square over the last axis; "scale" only."""

    def __init__(self, width: int, *, epsilon: float, dtype: Any):
        self.scale = nnx.Param(jnp.ones((width,), products.Dtypes.of(dtype).stream))
        self.epsilon = epsilon

    def __call__(self, hidden_LE: Hidden) -> Hidden:
        """Returns the normalized rows."""
        return normalize(hidden_LE, self.epsilon, self.scale.get_value())


class OffsetRMSNorm(nnx.Module):
    """An RMSNorm whose scale is stored as its excess over 1: "offset"."""

    def __init__(self, width: int, *, epsilon: float, dtype: Any):
        self.offset = nnx.Param(jnp.zeros((width,), products.Dtypes.of(dtype).stream))
        self.epsilon = epsilon

    def __call__(self, hidden_LE: Hidden) -> Hidden:
        """Returns the normalized rows."""
        # In float32: next to 1, bfloat16 has steps of 2^-7.
        scale_W = 1.0 + self.offset.get_value().astype(jnp.float32)
        return normalize(hidden_LE, self.epsilon, scale_W)


class LayerNorm(RMSNorm):
    """Normalization to mean 0 and variance 1 over the last axis; "scale" and "bias"."""

    def __init__(self, width: int, *, epsilon: float, dtype: Any):
        super().__init__(width, epsilon=epsilon, dtype=dtype)
        self.bias = nnx.Param(jnp.zeros((width,), products.Dtypes.of(dtype).stream))

    def __call__(self, hidden_LE: Hidden) -> Hidden:
        """Returns the normalized rows."""
        return normalize(hidden_LE, self.epsilon, self.scale.get_value(), self.bias.get_value())


class GatedBlock(nnx.Module):
    """Llama's attention with grouped heads and its gated MLP, down(silu(gate(x)) * up(x)).

    Class attributes describe a family: `norms`, the names of the norms before and after attention
    and before and after the MLP, "" for none; `norm`, their class; `head_norm`, whether queries and
    keys are normalized by head ("each") or before they are cut into heads ("all"); `qkv_bias`,
    whether queries, keys and values have a bias (as the output has unless given).
    """

    norms: tuple[str, str, str, str] = ("", "", "", "")
    norm: Any = RMSNorm
    head_norm: Literal["", "each", "all"] = ""
    qkv_bias: bool | None = None
    q_norm: Any = staticmethod(lambda projected_LI: projected_LI)
    k_norm: Any = q_norm

    def __init__(self, config: Any, lora: LoRAConfig | None, *, dtype: Any):
        width, inner, bias = config.hidden_size, config.intermediate_size, config.attention_bias
        qkv_bias = bias if self.qkv_bias is None else self.qkv_bias
        mlp_bias = getattr(config, "mlp_bias", False)
        query_width = config.num_attention_heads * config.head_width
        key_width = config.num_cached_heads * config.head_width
        linear = functools.partial(Linear, lora=lora, dtype=dtype)
        self.config = config
        self.q_proj = linear("q_proj", width, query_width, bias=qkv_bias)
        self.k_proj = linear("k_proj", width, key_width, bias=qkv_bias)
        self.v_proj = linear("v_proj", width, key_width, bias=qkv_bias)
        self.o_proj = linear("o_proj", query_width, width, bias=bias)
        self.gate_proj = linear("gate_proj", width, inner, bias=mlp_bias)
        self.up_proj = linear("up_proj", width, inner, bias=mlp_bias)
        self.down_proj = linear("down_proj", inner, width, bias=mlp_bias)
        norm = functools.partial(self.norm, epsilon=config.rms_norm_eps, dtype=dtype)
        for name in filter(None, self.norms):
            setattr(self, name, norm(width))
        if self.head_norm:
            # One over all heads divides by their common mean square.
            is_each = self.head_norm == "each"
            self.q_norm = norm(config.head_width if is_each else query_width)
            self.k_norm = norm(config.head_width if is_each else key_width)

    def attention(self, hidden_LE: Hidden, context: Context) -> LayerOutput:
        """Returns the attention's output and the keys and values of these tokens."""
        linears = self.q_proj, self.k_proj, self.v_proj
        low_LRs = inner_products(linears, hidden_LE, context.key)
        query_LI, key_LI, value_LI = (
            linear(hidden_LE, context.key, low_LR)
            for linear, low_LR in zip(linears, low_LRs, strict=True)
        )
        query_LI, key_LI = self.q_norm(query_LI), self.k_norm(key_LI)
        shape = (len(hidden_LE), -1, self.config.head_width)
        heads = query_LI.reshape(shape), key_LI.reshape(shape), value_LI.reshape(shape)
        mixed_LI, fresh = mix_tokens(*heads, context)
        return self.o_proj(mixed_LI, context.key), fresh

    def mlp(self, hidden_LE: Hidden, context: Context) -> Hidden:
        """Returns the gated perceptron's output."""
        gate_LI = ACTIVATIONS[self.config.hidden_act](self.gate_proj(hidden_LE, context.key))
        return self.down_proj(gate_LI * self.up_proj(hidden_LE, context.key), context.key)

    def __call__(self, hidden_LE: Hidden, context: Context) -> LayerOutput:
        """Returns the residual stream after this layer and its keys and values."""
        before, after, before_mlp, after_mlp = (
            getattr(self, name) if name else lambda states_LE: states_LE for name in self.norms
        )
        attention_LE, fresh = self.attention(before(hidden_LE), context)
        hidden_LE = hidden_LE + after(attention_LE)
        return hidden_LE + after_mlp(self.mlp(before_mlp(hidden_LE), context)), fresh


class CausalLM(nnx.Module):
    """A decoder: embedding, stacked blocks, final norm, head.

    `block` is the class of a layer with the call ``block(hidden_LE, context) -> LayerOutput``.
    `norm` is that of the final norm.
    """

    def __init__(self, config: Any, lora: LoRAConfig | None, block: Any, norm: Any, *, dtype: Any):
        self.config, self.lora = config, lora
        width = config.hidden_size
        scale = config.embedding_scale
        self.embed = Embedding(config.vocab_size, width, scale=scale, dtype=dtype)
        graph, state = nnx.split(block(config, lora, dtype=dtype))
        depth = config.num_hidden_layers
        # A leading layer axis on every parameter.
        stacked = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (depth, *leaf.shape)), state)
        self.layers = nnx.merge(graph, stacked)
        epsilon = getattr(config, "rms_norm_eps", None) or config.layer_norm_eps
        self.final_norm = norm(width, epsilon=epsilon, dtype=dtype)
        if not config.tie_word_embeddings:
            self.head = Linear("head", width, config.vocab_size, bias=False, lora=None, dtype=dtype)

    def context(
        self,
        positions_L: Int[Array, " L"],
        mask_L: Bool[Array, " L"] | None = None,
        past_mask_S: Bool[Array, " S"] | None = None,
        kind: AttentionKind | None = None,
    ) -> tuple[Context, LayerKinds]:
        """Returns the input of all layers and the assignment of its parts (`Context.of_layer`)."""
        config = self.config
        num_keys = len(positions_L) + (0 if past_mask_S is None else len(past_mask_S))
        sizes, window_N = config.layer_windows, None
        # Rows that no window cuts run as if there were none: with fewer masks, and on cudnn.
        if any(size is not None and size < num_keys for size in sizes):
            far = [num_keys if size is None else min(size, num_keys) for size in sizes]
            window_N = jnp.asarray(far, jnp.int32)
        ropes, rotation_N = list(dict.fromkeys(config.layer_ropes)), None
        shape = {"head_width": config.head_width, "num_positions": config.max_position_embeddings}
        rotations = [rotation_of(rope, positions_L, **shape) for rope in ropes]
        rotation = rotations[0]
        if len(ropes) > 1:
            rotation = jax.tree.map(lambda *tables_LF: jnp.stack(tables_LF), *rotations)
            rotation_N = jnp.asarray([ropes.index(r) for r in config.layer_ropes], jnp.int32)
        shared = Context(rotation, mask_L, past_mask_S, kind)
        shared = shared._replace(scale=config.attention_scale, cap=config.attention_cap)
        return shared, LayerKinds(window_N, rotation_N)

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

        `past` is the cache with a leading layer axis on both arrays. `remat` recomputes each block
        in the backward pass and does not store its activations. The others are as in `Context` and
        `decoder.Decoder`.
        """
        context, kinds = self.context(positions_L, mask_L, past_mask_S, kind)
        # lax.scan over the split state, not nnx.scan: NNX transforms fail inside vmap(grad).
        graph, stacked = nnx.split(self.layers)
        num_layers = self.config.num_hidden_layers
        keys = None if dropout_key is None else jax.random.split(dropout_key, num_layers)

        scales = self.lora.scales() if self.lora else {}
        scale_of = {name: jnp.array(values, jnp.float32) for name, values in scales.items()}

        def run_block(hidden_LE: Any, layer: Any) -> tuple[Any, KeyValues | None]:
            state, past_layer, key, own_scales, kinds_here = layer
            block: Any = nnx.merge(graph, products.read(meshes.gather(state)))
            for linear in vars(block).values():
                if isinstance(linear, Linear):
                    linear.operands = self.embed.dtype
            for name, scale in own_scales.items():
                getattr(block, name).adapter_scale = scale
            own = context.of_layer(kinds_here, past=past_layer, key=key)
            hidden_LE, fresh = block(hidden_LE, own)
            return hidden_LE, fresh if keep else None

        # The backward pass computes norms, rotations, attention and activations again. A GPU
        # multiplies 16-bit matrices in less time than it takes to write and read them, and so does
        # a CPU for a small model. Gathered weights are gathered again.
        policy = None if remat else jax.checkpoint_policies.save_only_these_names(KEPT)
        body = jax.checkpoint(run_block, policy=policy, prevent_cse=remat)
        each = (stacked, past, keys, scale_of, kinds)
        # The norms have the dtype of the hidden states.
        dtype = jax.tree.leaves(nnx.state(self.final_norm))[0].dtype
        hidden_LE, fresh = jax.lax.scan(body, self.embed(tokens_L, dtype), each)
        return self.final_norm(hidden_LE), fresh

    def logits(self, hidden_TE: Float[Array, "T E"]) -> Float[Array, "T V"]:
        """Returns float32 logits, capped if the model caps; a tied head reads the embedding."""
        is_tied = self.config.tie_word_embeddings
        table = meshes.gather((self.embed.embedding if is_tied else self.head.kernel).get_value())
        table = products.read(table)
        project = products.product if hidden_TE.dtype == jnp.float32 else _project
        return cap_softly(project(hidden_TE, table, int(is_tied)), self.config.logit_cap)


# With bfloat16 weights the backward pass is in their dtype: it rounds the float32 cotangent first,
# as a framework does that casts bfloat16 logits up. Else XLA converts the whole table to float32.
# It is written as a tangent, which rows share when it is transposed: a custom backward pass would
# make the table's gradient of each row before it is summed.
_project = jax.custom_jvp(products.summed, nondiff_argnums=(2,))


def _project_tangent(contract: int, primals: Any, tangents: Any) -> tuple[Array, Array]:
    (hidden_TE, table), (hidden_tangent, table_tangent) = primals, tangents
    terms = [
        products.contract(left, right, contract)
        for left, right in ((hidden_tangent, table), (hidden_TE, table_tangent))
        if not isinstance(left, SymbolicZero) and not isinstance(right, SymbolicZero)
    ]
    logits_TV = products.summed(hidden_TE, table, contract)
    return logits_TV, sum(terms, jnp.zeros((), table.dtype)).astype(logits_TV.dtype)


_project.defjvp(_project_tangent, symbolic_zeros=True)


def init_weights(shapes: Tree, *, key: jax.Array, initializer_range: float) -> Tree:
    """Returns arrays for a tree of shapes, started as Hugging Face and PEFT start these models.

    Kernels and embeddings are normal, biases and norm offsets 0, norm scales 1. An adapter's A is
    uniform and its B is 0. A leaf depends on the key, its path and its shape only. A part drawn
    alone equals the part that is drawn with the rest.
    """

    def draw(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        names = [entry.key for entry in path]
        if names[-1] in ("scale", "offset", "bias", "b"):
            return jnp.full(leaf.shape, float(names[-1] == "scale"), leaf.dtype)
        own_key = jax.random.fold_in(key, zlib.crc32("/".join(names).encode()))
        if names[-1] == "a":
            return init_factor_a(own_key, leaf.shape)
        values = jax.random.normal(own_key, leaf.shape, jnp.float32) * initializer_range
        return products.stored(values, leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)
