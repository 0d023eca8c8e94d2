"""The negative log likelihood of target tokens without their logits.

At small widths the vocabulary head is most of a gradient's work. Three things make it cheap. Only
target rows are computed: vmap packs a batch into one list of its targets. The logits are never
stored: the head is read in tiles with a running maximum and sum. The frozen head has no gradient:
only the slope of the loss at the hidden states is kept.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Float, Int, Shaped

from raslik_jax.models import products
from raslik_jax.models.attention import cap_softly
from raslik_jax.parallel import meshes

# Rows and columns of one tile of logits: 2 MiB of float32, what a core's cache holds, while the
# products stay large enough to run near the matmul rate. A GPU wants fewer and larger steps.
_TILE = {"cpu": (256, 2048)}
_TILE_ELSEWHERE = (4096, 8192)
# The logit of a label is exact, so the others must be: a GPU would round float32 factors.
_EXACT = jax.lax.Precision.HIGHEST


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def target_nll(
    table: Shaped[Array, "..."],
    hidden_TE: Float[Array, "T E"],
    label_T: Int[Array, " T"],
    is_counted_T: Bool[Array, " T"],
    vocab_axis: int,
    cap: float | None,
) -> Float[Array, " T"]:
    """Returns the negative log likelihood of each counted label in nats; 0 for the others.

    nll_t = log sum_v exp(z_v) - z_label of the logits z_v = <h_t, w_v>, or c tanh(<h_t, w_v> / c)
    with a cap c. Products have the weights' dtype and are summed in float32. It is differentiable
    in the hidden states alone: slope_t = sum_v p_v d_v w_v - d_label w_label. Here d_v is 1, or 1 -
    (z_v / c)^2 with a cap. The same pass finds it by the recurrence of flash attention (Dao et al.
    2022, arXiv:2205.14135). The rows of the head are keys and values.

    The table is [E, V] or [V, E]. The hidden states are rounded to its dtype.
    """
    return _nll_and_slope(vocab_axis, cap)(table, hidden_TE, label_T, is_counted_T)[0]


def _forward(
    table: Any,
    hidden_TE: Any,
    label_T: Any,
    is_counted_T: Any,
    vocab_axis: int,
    cap: float | None,
) -> Any:
    if table.perturbed:
        raise ValueError("the head is frozen in target_nll: train it by the decoder's logits")
    values = (row.value for row in (table, hidden_TE, label_T, is_counted_T))
    nll_T, slope_TE = _nll_and_slope(vocab_axis, cap)(*values)
    return nll_T, (slope_TE, jnp.zeros((), hidden_TE.value.dtype))


def _backward(vocab_axis: int, cap: float | None, residuals: Any, cotangent_T: Any) -> Any:
    slope_TE, like_hidden = residuals
    if isinstance(cotangent_T, SymbolicZero):
        return None, None, None, None
    gradient_TE = (slope_TE * cotangent_T[:, None]).astype(like_hidden.dtype)
    return None, gradient_TE, None, None


target_nll.defvjp(_forward, _backward, symbolic_zeros=True)


@functools.cache
def _nll_and_slope(vocab_axis: int, cap: float | None) -> Any:
    """Returns the function of one head and rows that folds any vmap into the rows."""

    @jax.custom_batching.custom_vmap
    def rows(table: Any, hidden_ME: Any, label_M: Any, is_counted_M: Any) -> tuple[Any, Any]:
        logits = {"vocab_axis": vocab_axis, "cap": cap}
        return _packed(table, hidden_ME, label_M, is_counted_M, **logits)

    @rows.def_vmap
    def _fold(axis_size: int, in_batched: Any, table: Any, *row_arguments: Any) -> Any:
        if in_batched[0]:
            raise ValueError("vmap over examples, not over heads: the head is one for all")
        stacked = (
            row if is_batched else jnp.broadcast_to(row[None], (axis_size, *row.shape))
            for row, is_batched in zip(row_arguments, in_batched[1:], strict=True)
        )
        folded = rows(table, *(row.reshape(-1, *row.shape[2:]) for row in stacked))
        unfolded = jax.tree.map(lambda x: x.reshape(axis_size, -1, *x.shape[1:]), folded)
        return unfolded, (True, True)

    return rows


def _packed(
    table: Any, hidden_ME: Any, label_M: Any, is_counted_M: Any, **logits: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns nll_M and slope_ME in float32 with zeros for rows that are not counted.

    Counted rows go to the front and run in chunks. The number of chunks is found at run time.
    """
    num_rows, width = hidden_ME.shape
    chunk = min(tile_shape()[0], num_rows)
    num_slots = -(-num_rows // chunk) * chunk
    # Slot j holds row source_S[j], the counted ones first; what is left over is never read.
    order_M = counted_first(is_counted_M)
    source_S = jnp.pad(order_M, (0, num_slots - num_rows))
    dtype = jax.eval_shape(products.read, table).dtype
    hidden_SE, label_S = hidden_ME[source_S].astype(dtype), label_M[source_S]
    num_chunks = -(-jnp.sum(is_counted_M.astype(jnp.int32)) // chunk)

    def run_chunk(step: jax.Array, carry: tuple) -> tuple:
        rows = (
            jax.lax.dynamic_slice_in_dim(array, step * chunk, chunk)
            for array in (hidden_SE, label_S)
        )
        found = _online(table, *rows, **logits)
        return jax.tree.map(
            lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, step * chunk, 0),
            carry,
            found,
        )

    start = jnp.zeros(num_slots), jnp.zeros((num_slots, width))
    nll_S, slope_SE = jax.lax.fori_loop(0, num_chunks, run_chunk, start)
    slot_M = jnp.argsort(order_M)
    return (
        jnp.where(is_counted_M, nll_S[slot_M], 0.0),
        jnp.where(is_counted_M[:, None], slope_SE[slot_M], 0.0),
    )


def counted_first(is_counted_M: Bool[Array, " M"]) -> Int[Array, " M"]:
    """Returns the places of the counted rows and then of all others, each in order.

    It is a sort, which compiles faster than the sums in `jnp.nonzero`.
    """
    return jnp.argsort(~is_counted_M, stable=True)


def _online(
    table: jax.Array,
    hidden_CE: jax.Array,
    label_C: jax.Array,
    *,
    vocab_axis: int,
    cap: float | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns nll_C and slope_CE of some rows, by one pass over tiles of the head."""
    vocab_size = table.shape[vocab_axis]
    num_tiles = _num_tiles(vocab_size)
    tile = -(-vocab_size // num_tiles)
    is_exact = num_tiles * tile == vocab_size
    to_vocab = (((1,), (1 - vocab_axis,)), ((), ()))
    from_vocab = (((1,), (vocab_axis,)), ((), ()))

    def add_tile(step: jax.Array, carry: tuple) -> tuple:
        maximum_C1, sum_C1, mean_CE = carry
        # The last tile is moved back to end with the table; what it repeats is masked.
        start = jnp.minimum(step * tile, vocab_size - tile)
        weights = jax.lax.dynamic_slice_in_dim(table, start, tile, axis=vocab_axis)
        weights = products.read(weights)
        logits_CV = jax.lax.dot_general(
            hidden_CE, weights, to_vocab, _EXACT, preferred_element_type=jnp.float32
        )
        if cap is not None:
            logits_CV = cap_softly(logits_CV, cap)
        if not is_exact:
            is_new_1V = (start + jnp.arange(tile) >= step * tile)[None]
            logits_CV = jnp.where(is_new_1V, logits_CV, -jnp.inf)
        new_maximum_C1 = jnp.maximum(maximum_C1, jnp.max(logits_CV, axis=1, keepdims=True))
        decay_C1 = jnp.exp(maximum_C1 - new_maximum_C1)
        weight_CV = jnp.exp(logits_CV - new_maximum_C1)
        sum_of_tile_C1 = jnp.sum(weight_CV, axis=1, keepdims=True)
        if cap is not None:
            # The derivative of a capped logit by the logit itself; -inf marks repeated columns.
            weight_CV = weight_CV * (1 - (logits_CV / cap) ** 2)
            if not is_exact:
                weight_CV = jnp.where(is_new_1V, weight_CV, 0.0)
        weight_CV, how = weight_CV.astype(weights.dtype), (from_vocab, _EXACT, jnp.float32)
        product_CE = jax.lax.dot_general(weight_CV, weights, *how)
        return (
            new_maximum_C1,
            sum_C1 * decay_C1 + sum_of_tile_C1,
            mean_CE * decay_C1 + product_CE,
        )

    rows, width = hidden_CE.shape
    start = jnp.full((rows, 1), -jnp.inf), jnp.zeros((rows, 1)), jnp.zeros((rows, width))
    maximum_C1, sum_C1, mean_CE = jax.lax.fori_loop(0, num_tiles, add_tile, start)
    label_weights = products.read(jnp.take(table, label_C, axis=vocab_axis)).astype(jnp.float32)
    label_CE = label_weights.T if vocab_axis == 1 else label_weights
    label_logit_C = jnp.sum(hidden_CE.astype(jnp.float32) * label_CE, axis=1)
    if cap is not None:
        label_logit_C = cap_softly(label_logit_C, cap)
        label_CE = label_CE * (1 - (label_logit_C / cap) ** 2)[:, None]
    nll_C = (maximum_C1 + jnp.log(sum_C1))[:, 0] - label_logit_C
    return nll_C, mean_CE / sum_C1 - label_CE


def _num_tiles(vocab_size: int) -> int:
    """Returns the number of tiles of a head.

    On a CPU it is a divisor of the columns if this less than doubles the number. Then no column is
    repeated or masked. A mask takes a CPU one pass over all logits.
    """
    fewest = -(-vocab_size // tile_shape()[1])
    if meshes.platform() != "cpu":
        return fewest
    exact = (number for number in range(fewest, 2 * fewest) if vocab_size % number == 0)
    return next(exact, fewest)


def tile_shape() -> tuple[int, int]:
    """Returns the largest rows and columns of a tile of logits, for the default device."""
    return _TILE.get(meshes.platform(), _TILE_ELSEWHERE)
