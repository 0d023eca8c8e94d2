"""The exchange between tokens: rotary positions, windows, caps and the cache.

Written for one example; the caller vmaps. Window and rotation differ between the layers of a model.
They are data and not branches, because all layers run in one scan.

Letters beyond axes.py: G key-value heads (H is a multiple of G), F rotated pairs of a head, I the
width of all heads.
"""

import functools
import warnings
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from raslik_jax.models.hf_config import RopeParameters, rotary_table
from raslik_jax.models.row_attention import attend_by_row
from raslik_jax.parallel import meshes

AttentionKind = Literal["xla", "cudnn"]
Hidden = Float[Array, "L E"]
Queries = Float[Array, "L H D"]
Keys = Float[Array, "L G D"]
# As a logit it gives a share of exactly 0, and where all are masked no NaN.
_FAR_BELOW = -1e30
_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


class Rotation(NamedTuple):
    """Cosine and sine of the rotary angles in float32."""

    cos_LF: Float[Array, "*kinds L F"]
    sin_LF: Float[Array, "*kinds L F"]


def rotation_of(
    rope: RopeParameters, positions_L: Int[Array, " L"], *, head_width: int, num_positions: int
) -> Rotation:
    """Returns the cosines and sines of `rope_parameters` in a model of so many positions."""
    frequency_F, long_F, scale = rotary_table(rope, head_width, num_positions)
    chosen_F: Any = frequency_F
    if long_F is not None:
        original = rope.original_max_position_embeddings or num_positions
        is_long = jnp.max(positions_L) >= original
        chosen_F = jnp.where(is_long, long_F, frequency_F)
    rotation = rotation_at(chosen_F, positions_L)
    return rotation if scale == 1 else Rotation(*(scale * part_LF for part_LF in rotation))


def rotation_at(
    frequency_F: Float[Array | np.ndarray, " F"], positions_L: Int[Array, " L"]
) -> Rotation:
    """Returns the rotary cosines and sines at the given positions."""
    # float32 always: bfloat16 cannot tell position 257 from 256.
    angle_LF = positions_L.astype(jnp.float32)[:, None] * jnp.asarray(frequency_F)[None, :]
    return Rotation(jnp.cos(angle_LF), jnp.sin(angle_LF))


def rotate(head_LHD: Float[Array, "L H D"], rotation: Rotation) -> Float[Array, "L H D"]:
    """Returns the heads with their first 2 F coordinates rotated and the others unchanged.

    Coordinate i is paired with i + F ("rotate half", the layout of Hugging Face checkpoints) and
    not with its neighbor.
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


class LayerKinds(NamedTuple):
    """Differences between layers besides their weights, one entry for each; None if none.

    window_N: The number of tokens that the layer looks back, itself included. rotation_N: The index
    of the layer's rotation among the model's.
    """

    window_N: Int[Array, "*layers"] | None
    rotation_N: Int[Array, "*layers"] | None


class Context(NamedTuple):
    """A layer's inputs in addition to hidden states.

    Attributes:
      rotation: The rotary angles of the current tokens, for this layer.
      mask_L: Which current tokens are real; None if all are, or if only the right end is padded (a
        causal model never looks there).
      past_mask_S: Which slots of the cache may be attended to; None without a cache.
      kind: The implementation of `jax.nn.dot_product_attention`; None for the fastest. "cudnn"
        (16-bit weights on a GPU) runs whole unmasked rows without a window or a cap. XLA runs all
        other rows.
      past: The layer's cache, or None.
      key: Key of the adapters' dropout; None turns it off.
      scale: The factor on a query's product with a key; None for 1 / sqrt(head width).
      cap: The bound c of attention logits, c tanh(x / c); None for none.
      window: How many real tokens the layer looks back, the token itself included; None for all.
    """

    rotation: Rotation
    mask_L: Bool[Array, " L"] | None = None
    past_mask_S: Bool[Array, " S"] | None = None
    kind: AttentionKind | None = None
    past: KeyValues | None = None
    key: jax.Array | None = None
    scale: float | None = None
    cap: float | None = None
    window: Int[Array, ""] | None = None

    def of_layer(self, kinds: LayerKinds, **own: Any) -> "Context":
        """Returns the context of one layer from its entries of the kinds and its own fields."""
        rotation: Any = self.rotation
        if kinds.rotation_N is not None:
            rotation = jax.tree.map(lambda table_NLF: table_NLF[kinds.rotation_N], rotation)
        return self._replace(rotation=rotation, window=kinds.window_N, **own)


# Hidden states, and the keys and values of their tokens.
LayerOutput = tuple[Hidden, KeyValues]


def attend(query_LHD: Queries, key_LGD: Keys, value_LGD: Keys, context: Context) -> Queries:
    """Returns causal attention of the current tokens to the cache and to each other.

    A masked-out token contributes exactly 0 to every real token. Grouped heads are native: query
    head h reads key-value head h // (H / G). Queries and keys are rotated already.
    """
    has_past = context.past is not None and context.past_mask_S is not None
    if has_past or context.cap is not None:
        return _attend_by_parts(query_LHD, key_LGD, value_LGD, context)
    dtype = query_LHD.dtype
    # cudnn takes a mask only as a [H, L, L] bias, which is what it is there to avoid. Right
    # padding needs no mask, so per-example gradients run on it; masked prompts do not.
    is_whole = context.mask_L is None and context.window is None
    kind = context.kind if is_whole or context.kind != "cudnn" else None
    if is_whole and kind is None and dtype != jnp.float32:
        return attend_narrow(query_LHD, key_LGD, value_LGD, scale=context.scale)
    if is_whole and kind is None and meshes.platform() == "cpu":
        scale = query_LHD.shape[-1] ** -0.5 if context.scale is None else context.scale
        return attend_by_row(scale, query_LHD, key_LGD, value_LGD)
    # XLA keeps the [H, L, L] weights in float32 anyway, and its bfloat16 products have a
    # backward pass that mixes dtypes; cudnn takes 16 bits only.
    dtype = dtype if kind == "cudnn" else jnp.dtype(jnp.float32)
    mask = None if context.mask_L is None else context.mask_L[None, None, :]
    if context.window is not None:
        near = _is_near(context, context.window, query_LHD.shape[0])[None]
        mask = near if mask is None else mask & near
    heads = query_LHD.astype(dtype), key_LGD.astype(dtype), value_LGD.astype(dtype)
    # JAX's own bfloat16 path mixes dtypes, which strict promotion forbids.
    with jax.numpy_dtype_promotion("standard"):
        mixed_LHD = jax.nn.dot_product_attention(
            *heads, mask=mask, is_causal=True, implementation=kind, scale=context.scale
        )
    return mixed_LHD.astype(query_LHD.dtype)


def _attend_by_parts(
    query_LHD: Queries, key_LGD: Keys, value_LGD: Keys, context: Context
) -> Queries:
    """Returns attention to the cache, if there is one, and to the current tokens, with any cap.

    Both are parts of one softmax. Their arrays are not joined, because this would copy the cache at
    every token.
    """
    num_tokens, _, width = query_LHD.shape
    parts = [fresh_key_values(key_LGD, value_LGD)]
    seen_LS = jnp.tril(jnp.ones((num_tokens, num_tokens), bool))
    if context.mask_L is not None:
        seen_LS &= context.mask_L[None]
    if context.past is not None and context.past_mask_S is not None:
        past_LS = jnp.broadcast_to(
            context.past_mask_S[None], (num_tokens, len(context.past_mask_S))
        )
        parts, seen_LS = [context.past, *parts], jnp.concatenate([past_LS, seen_LS], axis=1)
    if context.window is not None:
        seen_LS &= _is_near(context, context.window, num_tokens)
    masks = jnp.split(seen_LS, [seen_LS.shape[1] - num_tokens], axis=1)[-len(parts) :]
    query_LGRD = _by_group(query_LHD, key_LGD)
    scale = width**-0.5 if context.scale is None else context.scale

    def logits_of(part: KeyValues, mask_LS: Array) -> Array:
        logits_GRLS = _product("lgrd,gsd->grls", query_LGRD, part.key_GSD) * scale
        return jnp.where(mask_LS[None, None], cap_softly(logits_GRLS, context.cap), _FAR_BELOW)

    logits = list(map(logits_of, parts, masks))
    maxima = [jnp.max(part_GRLS, axis=-1, keepdims=True) for part_GRLS in logits]
    highest_GRL1 = functools.reduce(jnp.maximum, maxima)
    weights = [jnp.exp(part_GRLS - highest_GRL1) for part_GRLS in logits]
    sum_GRL1 = sum(jnp.sum(part_GRLS, axis=-1, keepdims=True) for part_GRLS in weights)
    # float32 as in JAX's own attention; models with a cap are also trained here, in their dtype.
    dtype = jnp.float32 if context.cap is None else value_LGD.dtype
    shares = ((weight_GRLS / sum_GRL1).astype(dtype) for weight_GRLS in weights)
    mixed_LGRD = sum(
        _product("grls,gsd->lgrd", share_GRLS, part.value_GSD.astype(dtype))
        for share_GRLS, part in zip(shares, parts, strict=True)
    )
    return jnp.reshape(mixed_LGRD, query_LHD.shape).astype(query_LHD.dtype)


def attend_narrow(
    query_LHD: Queries, key_LGD: Keys, value_LGD: Keys, *, scale: float | None = None
) -> Queries:
    """Returns causal attention of whole rows in 16 bits by the fused kernel of JAX on a GPU.

    Products have 16 bits, forward and back. Their sums and the softmax are float32. The kernel
    never stores the [H, L, L] shares (Dao et al. 2022, arXiv:2205.14135).
    """
    factor = query_LHD.shape[-1] ** -0.5 if scale is None else scale
    return meshes.by_kernel(
        *(query_LHD, key_LGD, value_LGD),
        kernel=functools.partial(attend_by_kernel, scale=factor),
        twin=functools.partial(_attend_by_products, factor),
    )


# Rows and columns of a tile: what the kernel's forward and backward passes both divide.
_TILE = 64


def attend_by_kernel(
    query_LHD: Queries, key_LGD: Keys, value_LGD: Keys, *, scale: float, interpret: bool = False
) -> Queries:
    """Returns causal attention by `jax.experimental.pallas.ops.gpu.attention`; see there.

    It needs the same number of key heads and query heads, and whole tiles. Rows are padded at their
    right end, where a causal model never looks.
    """
    with warnings.catch_warnings():  # JAX 0.12 points to tokamax in its place
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import attention as fused  # where it is compiled

    num_tokens, num_heads = query_LHD.shape[:2]
    pad = -num_tokens % _TILE
    repeats = num_heads // key_LGD.shape[1]
    heads = (
        jnp.pad(jnp.repeat(head, count, axis=1), ((0, pad), (0, 0), (0, 0)))[None]
        for head, count in ((query_LHD, 1), (key_LGD, repeats), (value_LGD, repeats))
    )
    blocks = fused.BlockSizes(_TILE, _TILE, *([_TILE // 2] * 4))
    options = {"causal": True, "block_sizes": blocks, "interpret": interpret}
    return fused.mha(*heads, None, scale, **options)[0, :num_tokens]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_by_products(
    scale: float, query_LHD: Queries, key_SGD: Keys, value_SGD: Keys
) -> Queries:
    """Returns causal attention in XLA's products."""
    return _products_forward(scale, query_LHD, key_SGD, value_SGD)[0]


def _by_group(head_LHD: Queries, key_SGD: Keys) -> Float[Array, "L G R D"]:
    """Returns query heads by the key-value head that they read."""
    num_tokens, _, width = head_LHD.shape
    return head_LHD.reshape(num_tokens, key_SGD.shape[1], -1, width)


def _products_forward(
    scale: float, query_LHD: Queries, key_SGD: Keys, value_SGD: Keys
) -> tuple[Queries, Any]:
    logits_GRLS = scale * _product("lgrd,sgd->grls", _by_group(query_LHD, key_SGD), key_SGD)
    lower_LS = jnp.tril(jnp.ones(logits_GRLS.shape[-2:], bool))[None, None]
    logits_GRLS = jnp.where(lower_LS, logits_GRLS, _FAR_BELOW)
    share_GRLS = jax.nn.softmax(logits_GRLS, axis=-1).astype(query_LHD.dtype)
    mixed_LGRD = _product("grls,sgd->lgrd", share_GRLS, value_SGD)
    mixed_LHD = mixed_LGRD.reshape(query_LHD.shape).astype(query_LHD.dtype)
    return mixed_LHD, (query_LHD, key_SGD, value_SGD, share_GRLS)


def _products_backward(
    scale: float, residuals: Any, cotangent_LHD: Queries
) -> tuple[Queries, Keys, Keys]:
    query_LHD, key_SGD, value_SGD, share_GRLS = residuals
    dtype, query_LGRD = query_LHD.dtype, _by_group(query_LHD, key_SGD)
    cotangent_LGRD = _by_group(cotangent_LHD, key_SGD)
    of_value_SGD = _product("grls,lgrd->sgd", share_GRLS, cotangent_LGRD)
    of_share_GRLS = _product("lgrd,sgd->grls", cotangent_LGRD, value_SGD)
    wide_GRLS = share_GRLS.astype(jnp.float32)
    mean_GRL1 = jnp.sum(wide_GRLS * of_share_GRLS, axis=-1, keepdims=True)
    of_logits_GRLS = (scale * wide_GRLS * (of_share_GRLS - mean_GRL1)).astype(dtype)
    of_query_LGRD = _product("grls,sgd->lgrd", of_logits_GRLS, key_SGD)
    of_key_SGD = _product("grls,lgrd->sgd", of_logits_GRLS, query_LGRD)
    of_query_LHD = of_query_LGRD.reshape(query_LHD.shape)
    return of_query_LHD.astype(dtype), of_key_SGD.astype(dtype), of_value_SGD.astype(dtype)


_attend_by_products.defvjp(_products_forward, _products_backward)


def _is_near(context: Context, window: Int[Array, ""], num_tokens: int) -> Bool[Array, "L S"]:
    """Returns the slots in the window of each token by the number of real tokens between.

    Slots are numbered from the first of the cache to the last current token. Empty slots of the
    cache do not increase the distance.
    """
    real_S = jnp.ones(num_tokens, bool) if context.mask_L is None else context.mask_L
    if context.past is not None and context.past_mask_S is not None:
        real_S = jnp.concatenate([context.past_mask_S, real_S])
    place_S = jnp.cumsum(real_S.astype(jnp.int32))
    return place_S[-num_tokens:, None] - place_S[None, :] < window


def cap_softly(logits: Float[Array, "..."], cap: Any) -> Float[Array, "..."]:
    """Returns c tanh(x / c), which is within +-c; the logits themselves without a cap."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def fresh_key_values(key_LGD: Float[Array, "L G D"], value_LGD: Float[Array, "L G D"]) -> KeyValues:
    """Returns the keys and values of the current tokens in the layout of the cache."""
    return KeyValues(jnp.swapaxes(key_LGD, 0, 1), jnp.swapaxes(value_LGD, 0, 1))


def mix_tokens(
    query_LHD: Queries, key_LGD: Keys, value_LGD: Keys, context: Context
) -> tuple[Float[Array, "L I"], KeyValues]:
    """Returns the heads' attention next to each other, rotated here, with these keys and values."""
    query_LHD = rotate(query_LHD, context.rotation)
    key_LGD = rotate(key_LGD, context.rotation)
    mixed_LHD = attend(query_LHD, key_LGD, value_LGD, context)
    return mixed_LHD.reshape(len(mixed_LHD), -1), fresh_key_values(key_LGD, value_LGD)
