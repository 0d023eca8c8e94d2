"""The layers that all decoders share, written for one example; the caller vmaps.

NNX modules declare the parameters; the arithmetic is plain JAX. Matmuls run in the dtype of the
frozen weights, while norms, rotary angles, softmax, logits and adapters run in float32. Layers of
one kind are stacked along a leading axis and run under `jax.lax.scan`, so that compile time does
not grow with depth.

Letters beyond axes.py: G key-value heads (H is a multiple of G), F rotated pairs of a head, I and
O the input and output width of a linear layer.
"""

import functools
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from raslik_jax.models import quantize
from raslik_jax.models.hf_config import RopeParameters
from raslik_jax.models.lora import LoRAConfig, LoRAParam, adapter_output

AttentionKind = Literal["xla", "cudnn"]

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

    Parameters: "kernel" [in, out], an array or a quantized kernel (`quantize`), "bias" [out] (both
    frozen), "a" [in, rank], "b" [rank, out].
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
            self.a = LoRAParam(jnp.zeros((in_features, self.lora.rank), jnp.float32))
            self.b = LoRAParam(jnp.zeros((self.lora.rank, out_features), jnp.float32))

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
        share_LO = adapter_output(
            input_LI, self.a.get_value(), self.b.get_value(), config=self.lora, key=key
        )
        return (output_LO.astype(jnp.float32) + share_LO).astype(output_LO.dtype)


class Embedding(nnx.Module):
    """A table of token vectors, "embedding" [V, E]."""

    def __init__(self, num_rows: int, width: int, *, dtype: Any):
        self.embedding = nnx.Param(jnp.zeros((num_rows, width), dtype))

    def __call__(self, tokens_L: Int[Array, " L"]) -> Float[Array, "L E"]:
        """Returns the rows of the given tokens."""
        return jnp.asarray(self.embedding.get_value())[tokens_L]


class LayerNorm(nnx.Module):
    """Normalization to mean 0 and variance 1 over the last axis, "scale" and "bias"."""

    def __init__(self, width: int, *, epsilon: float, dtype: Any):
        self.scale = nnx.Param(jnp.ones((width,), dtype))
        self.bias = nnx.Param(jnp.zeros((width,), dtype))
        self.epsilon = epsilon

    def __call__(self, hidden_LE: Float[Array, "L E"]) -> Float[Array, "L E"]:
        """Returns the normalized array; moments in float32, output in the input's dtype."""
        wide_LE = hidden_LE.astype(jnp.float32)
        centered_LE = wide_LE - jnp.mean(wide_LE, axis=-1, keepdims=True)
        variance_L1 = jnp.mean(jnp.square(centered_LE), axis=-1, keepdims=True)
        unit_LE = centered_LE * jax.lax.rsqrt(variance_L1 + self.epsilon)
        scale_1E = self.scale.get_value().astype(jnp.float32)[None, :]
        bias_1E = self.bias.get_value().astype(jnp.float32)[None, :]
        return (unit_LE * scale_1E + bias_1E).astype(hidden_LE.dtype)


class RMSNorm(nnx.Module):
    """Division by the root mean square over the last axis, "scale" only."""

    def __init__(self, width: int, *, epsilon: float, dtype: Any):
        self.scale = nnx.Param(jnp.ones((width,), dtype))
        self.epsilon = epsilon

    def __call__(self, hidden_LE: Float[Array, "L E"]) -> Float[Array, "L E"]:
        """Returns the normalized array; moments in float32, output in the input's dtype."""
        wide_LE = hidden_LE.astype(jnp.float32)
        mean_square_L1 = jnp.mean(jnp.square(wide_LE), axis=-1, keepdims=True)
        unit_LE = wide_LE * jax.lax.rsqrt(mean_square_L1 + self.epsilon)
        scale_1E = self.scale.get_value().astype(jnp.float32)[None, :]
        return (unit_LE * scale_1E).astype(hidden_LE.dtype)


class Rotation(NamedTuple):
    """Cosine and sine of the rotary angles, float32."""

    cos_LF: Float[Array, "L F"]
    sin_LF: Float[Array, "L F"]


def rope_frequencies(rope: RopeParameters, head_dim: int) -> np.ndarray:
    """Returns the rotary frequency of each rotated pair, in radians per position.

    ``theta ** (-2 i / d)`` for i = 0 .. ceil(d / 2) - 1 with d = int(head_dim * fraction); "linear"
    divides all by `factor`; "llama3" divides long wavelengths by it, keeps short ones and
    interpolates between (Llama 3.1's schedule).

    Source: Su et al. 2021 (arXiv:2104.09864); transformers `modeling_rope_utils.py`, release 5.23.

    Raises:
      ValueError: The rotated part would be wider than the head.
    """
    width = int(head_dim * rope.partial_rotary_factor)
    exponent_F = np.arange(0, width, 2).astype(np.float32) / np.float32(width)
    if 2 * len(exponent_F) > head_dim:
        raise ValueError(
            f"rotary positions need pairs, got {head_dim=} with "
            f"partial_rotary_factor={rope.partial_rotary_factor}: use an even head width"
        )
    # Rounded where torch rounds. At position 5,000 one unit in the last place of a frequency is
    # 3e-4 radians, and the models were trained with these very numbers.
    power_F = (np.float64(rope.rope_theta) ** exponent_F.astype(np.float64)).astype(np.float32)
    frequency_F = np.float32(1.0) / power_F
    if rope.rope_type == "linear":
        return frequency_F / np.float32(rope.factor or 1.0)  # checked to be set
    if rope.rope_type == "llama3":
        factor, low, high, original = rope.llama3_fields
        wavelength_F = np.float32(2 * math.pi) / frequency_F
        smooth_F = (np.float32(original) / wavelength_F - np.float32(low)) / np.float32(high - low)
        stretched_F = frequency_F / np.float32(factor)
        between_F = (1 - smooth_F) * frequency_F / np.float32(factor) + smooth_F * frequency_F
        frequency_F = np.where(
            smooth_F <= 0, stretched_F, np.where(smooth_F >= 1, frequency_F, between_F)
        )
    return frequency_F.astype(np.float32)


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
    """What every layer of one forward pass shares.

    Attributes:
      rotation: The rotary angles of the tokens at hand.
      mask_L: Which of the tokens at hand are real; None where all are, or where only the right
        end is padded (a causal model never looks there).
      past_mask_S: Which slots of the cache may be attended to; None without a cache.
    """

    rotation: Rotation
    mask_L: Bool[Array, " L"] | None
    past_mask_S: Bool[Array, " S"] | None


def _dot_product_attention(
    query_LHD: Float[Array, "L H D"],
    key_SGD: Float[Array, "S G D"],
    value_SGD: Float[Array, "S G D"],
    mask: Bool[Array, "1 #L S"] | None,
    *,
    is_causal: bool,
    kind: AttentionKind | None,
) -> Float[Array, "L H D"]:
    """Returns JAX's own attention; its bfloat16 path mixes dtypes, which strict mode forbids."""
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(
            query_LHD, key_SGD, value_SGD, mask=mask, is_causal=is_causal, implementation=kind
        )


def attend(
    query_LHD: Float[Array, "L H D"],
    key_LGD: Float[Array, "L G D"],
    value_LGD: Float[Array, "L G D"],
    context: Context,
    past: KeyValues | None,
    *,
    kind: AttentionKind | None,
) -> Float[Array, "L H D"]:
    """Returns causal attention of the tokens at hand to the cache and to each other.

    A masked-out token contributes exactly 0 to every real token. Grouped heads are native: query
    head h reads key-value head h // (H / G).

    Args:
      query_LHD: Rotated queries.
      key_LGD: Rotated keys of the same tokens.
      value_LGD: Their values.
      context: The masks.
      past: One layer of the cache, or None.
      kind: The implementation of `jax.nn.dot_product_attention`; None lets JAX choose. "cudnn"
        (16-bit weights on a GPU) serves whole unmasked rows; all else runs on XLA.
    """
    num_tokens = query_LHD.shape[0]
    if past is None or context.past_mask_S is None:
        # cudnn takes a mask only as a [H, L, L] bias, which is what it is there to avoid. Right
        # padding needs no mask, so per-example gradients run on it; masked prompts do not.
        if context.mask_L is not None and kind == "cudnn":
            kind = None
        # XLA keeps the [H, L, L] weights in float32 anyway, and its bfloat16 products have a
        # backward pass that mixes dtypes; cudnn takes 16 bits only.
        dtype = query_LHD.dtype if kind == "cudnn" else jnp.float32
        mixed_LHD = _dot_product_attention(
            query_LHD.astype(dtype),
            key_LGD.astype(dtype),
            value_LGD.astype(dtype),
            None if context.mask_L is None else context.mask_L[None, None, :],
            is_causal=True,
            kind=kind,
        )
        return mixed_LHD.astype(query_LHD.dtype)
    fresh_mask_LL = jnp.tril(jnp.ones((num_tokens, num_tokens), bool))
    past_mask_LS = jnp.broadcast_to(
        context.past_mask_S[None, :], (num_tokens, context.past_mask_S.shape[0])
    )
    mask_LS = jnp.concatenate([past_mask_LS, fresh_mask_LL], axis=1)
    # The cache keeps the head axis first, as the batched matmuls want it; the swaps below only
    # rename axes.
    fresh = fresh_key_values(key_LGD, value_LGD)
    key_GSD = jnp.concatenate([past.key_GSD, fresh.key_GSD], axis=1)
    value_GSD = jnp.concatenate([past.value_GSD, fresh.value_GSD], axis=1)
    return _dot_product_attention(
        query_LHD,
        jnp.swapaxes(key_GSD, 0, 1),
        jnp.swapaxes(value_GSD, 0, 1),
        mask_LS[None],
        is_causal=False,
        kind=None,
    )


def fresh_key_values(key_LGD: Float[Array, "L G D"], value_LGD: Float[Array, "L G D"]) -> KeyValues:
    """Returns the keys and values of the tokens at hand in the layout of the cache."""
    return KeyValues(jnp.swapaxes(key_LGD, 0, 1), jnp.swapaxes(value_LGD, 0, 1))


def stack(module: nnx.Module, num_layers: int) -> nnx.Module:
    """Returns the module with a leading layer axis on every parameter."""
    graph, state = nnx.split(module)
    stacked = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_layers, *x.shape)), state)
    return nnx.merge(graph, stacked)


class CausalLM(nnx.Module):
    """A decoder: embedding, stacked blocks, final norm, head. Families give the block and norm.

    A family sets `block_class`, whose call is
    ``block(hidden_LE, context, past, key, kind=...) -> (hidden_LE, KeyValues of these tokens)``,
    and `norm_class` and `norm_epsilon`.
    """

    block_class: type[nnx.Module]
    norm_class: type[nnx.Module]

    def __init__(self, config: Any, lora: LoRAConfig | None, *, dtype: Any):
        self.config = config
        width = config.hidden_size
        block: Any = self.block_class
        norm: Any = self.norm_class
        self.embed = Embedding(config.vocab_size, width, dtype=dtype)
        self.layers = stack(block(config, lora, dtype=dtype), config.num_hidden_layers)
        self.final_norm = norm(width, epsilon=config.norm_epsilon, dtype=dtype)
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
    ) -> tuple[Float[Array, "L E"], KeyValues | None]:
        """Returns the final hidden states and, with `keep`, the keys and values of all layers.

        Args:
          tokens_L: Token ids.
          positions_L: Rotary position of each token.
          mask_L: Real tokens; None where all count.
          past: The cache, with a leading layer axis on both arrays.
          past_mask_S: The slots of the cache that are filled.
          dropout_key: Switches the adapters' dropout on.
          keep: Whether to return the keys and values.
          remat: Recompute each block in the backward pass instead of storing its activations.
          kind: The attention implementation.
        """
        frequency_F = rope_frequencies(self.config.rope_parameters, self.config.head_width)
        context = Context(rotation_at(frequency_F, positions_L), mask_L, past_mask_S)
        # lax.scan over the split state, not nnx.scan: NNX transforms fail inside vmap(grad).
        graph, stacked = nnx.split(self.layers)
        num_layers = self.config.num_hidden_layers
        keys = None if dropout_key is None else jax.random.split(dropout_key, num_layers)

        def run_block(hidden_LE: Any, layer: Any) -> tuple[Any, KeyValues | None]:
            state, past_layer, key = layer
            block: Any = nnx.merge(graph, state)
            hidden_LE, fresh = block(hidden_LE, context, past_layer, key, kind=kind)
            return hidden_LE, fresh if keep else None

        body = jax.checkpoint(run_block) if remat else run_block
        hidden_LE, fresh = jax.lax.scan(body, self.embed(tokens_L), (stacked, past, keys))
        return self.final_norm(hidden_LE), fresh

    def logits(self, hidden_TE: Float[Array, "T E"]) -> Float[Array, "T V"]:
        """Returns float32 logits; a tied head reads the embedding table."""
        if self.config.tie_word_embeddings:
            table, contract = self.embed.embedding.get_value(), 1
        else:
            table = self.head.kernel.get_value()
            contract = 0
        if hidden_TE.dtype == jnp.float32:
            return _contract(hidden_TE, table, contract)
        return _project(hidden_TE, table, contract)


def _contract(
    hidden_TE: Float[Array, "T E"], table: Float[Array, "rows columns"], contract: int
) -> Float[Array, "T V"]:
    """Returns the float32 product of hidden states with a head, summed over its axis `contract`."""
    return jax.lax.dot_general(
        hidden_TE, table, (((1,), (contract,)), ((), ())), preferred_element_type=jnp.float32
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _project(
    hidden_TE: Float[Array, "T E"], table: Float[Array, "rows columns"], contract: int
) -> Float[Array, "T V"]:
    """Returns `_contract`, with a backward pass in the dtype of the weights.

    It rounds the float32 cotangent first, as a framework does that casts bfloat16 logits up:
    otherwise XLA would convert the whole table to float32.
    """
    return _contract(hidden_TE, table, contract)


def _project_forward(
    hidden_TE: Float[Array, "T E"], table: Float[Array, "rows columns"], contract: int
) -> tuple[Float[Array, "T V"], tuple[Array, Array]]:
    return _contract(hidden_TE, table, contract), (hidden_TE, table)


def _project_backward(
    contract: int, residuals: tuple[Array, Array], cotangent_TV: Float[Array, "T V"]
) -> tuple[Array, Array]:
    hidden_TE, table = residuals
    narrow_TV = cotangent_TV.astype(hidden_TE.dtype)
    hidden_cotangent = jax.lax.dot_general(narrow_TV, table, (((1,), (1 - contract,)), ((), ())))
    left, right = (hidden_TE, narrow_TV) if contract == 0 else (narrow_TV, hidden_TE)
    return hidden_cotangent, jax.lax.dot_general(left, right, (((0,), (0,)), ((), ())))


_project.defvjp(_project_forward, _project_backward)
