"""Causal attention on a CPU, row after row.

The shares of a whole batch, [B, H, L, L], are larger than a CPU's caches, and every pass over them
waits for memory. The shares of one row fit. They are not stored: the backward pass computes them
again from the logarithms of their sums (Dao et al. 2022, arXiv:2205.14135).

Letters beyond attention.py: M the queries of all heads that read one key head, R L of them.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from raslik_jax.base import machine
from raslik_jax.models.lora import KEPT

# As a logit it gives a share of exactly 0.
_FAR_BELOW = -1e30


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_by_row(
    scale: float,
    query_LHD: Float[Array, "L H D"],
    key_LGD: Float[Array, "L G D"],
    value_LGD: Float[Array, "L G D"],
) -> Float[Array, "L H D"]:
    """Returns causal attention of a whole row, softmax(scale <q, k>) of the values, in float32.

    Query head h reads key head h // (H / G). Under vmap the rows run in a loop. It has reverse-mode
    derivatives of any order and no forward-mode ones (`jax.jvp`).
    """
    return _forward(scale, query_LHD, key_LGD, value_LGD)[0]


def _forward(scale: float, *heads: Array) -> tuple[Array, tuple[Array, ...]]:
    mixed_LHD, log_sum_GM1 = _in_a_loop(_mix, scale)(*heads)
    kept = checkpoint_name(mixed_LHD, KEPT), checkpoint_name(log_sum_GM1, KEPT)
    return kept[0], (*heads, *kept)


def _backward(scale: float, residuals: tuple[Array, ...], of_mixed_LHD: Array) -> Any:
    return _in_a_loop(_mix_back, scale)(*residuals, of_mixed_LHD)


attend_by_row.defvjp(_forward, _backward)


def _mix(
    scale: float, query_LHD: Array, key_LGD: Array, value_LGD: Array
) -> tuple[Float[Array, "L H D"], Float[Array, "G M 1"]]:
    """Returns the mixed values of a row and the logarithms of the sums of its shares."""
    key_GLD, value_GLD = _by_group(key_LGD), _by_group(value_LGD)
    logits_GML = _logits(_of_groups(scale * query_LHD, key_LGD), key_GLD)
    maximum_GM1 = jnp.max(logits_GML, axis=-1, keepdims=True)
    weight_GML = jnp.exp(logits_GML - maximum_GM1)
    sum_GM1 = jnp.sum(weight_GML, axis=-1, keepdims=True)
    mixed_GMD = _product(weight_GML, value_GLD, 2, 1) / sum_GM1
    return _of_tokens(mixed_GMD, query_LHD), maximum_GM1 + jnp.log(sum_GM1)


def _mix_back(
    scale: float,
    query_LHD: Array,
    key_LGD: Array,
    value_LGD: Array,
    mixed_LHD: Array,
    log_sum_GM1: Array,
    of_mixed_LHD: Array,
) -> tuple[Float[Array, "L H D"], Float[Array, "L G D"], Float[Array, "L G D"]]:
    """Returns the gradients of a row's queries, keys and values from that of its mixed values."""
    key_GLD, value_GLD = _by_group(key_LGD), _by_group(value_LGD)
    query_GMD = _of_groups(scale * query_LHD, key_LGD)
    of_mixed_GMD = _of_groups(of_mixed_LHD, key_LGD)
    # sum_l share_l <o, v_l> = <o, sum_l share_l v_l>, which needs no sum over the shares.
    mean_LH1 = jnp.sum(of_mixed_LHD * mixed_LHD, axis=-1, keepdims=True)
    share_GML = jnp.exp(_logits(query_GMD, key_GLD) - log_sum_GM1)
    of_share_GML = _product(of_mixed_GMD, value_GLD, 2, 2)
    of_logits_GML = share_GML * (of_share_GML - _of_groups(mean_LH1, key_LGD))
    of_query_GMD = scale * _product(of_logits_GML, key_GLD, 2, 1)
    # [G, D, L] and not [G, L, D]: else XLA transposes the large factor first.
    of_key_GDL = _product(query_GMD, of_logits_GML, 1, 1)
    of_value_GDL = _product(of_mixed_GMD, share_GML, 1, 1)
    of_key_LGD, of_value_LGD = (jnp.transpose(x, (2, 0, 1)) for x in (of_key_GDL, of_value_GDL))
    return _of_tokens(of_query_GMD, query_LHD), of_key_LGD, of_value_LGD


def _logits(query_GMD: Array, key_GLD: Array) -> Float[Array, "G M L"]:
    """Returns the products of queries and keys; later keys are far below all others."""
    logits_GML, num_tokens = _product(query_GMD, key_GLD, 2, 2), key_GLD.shape[1]
    is_seen_LL = jnp.tril(jnp.ones((num_tokens, num_tokens), bool))
    is_seen_ML = jnp.tile(is_seen_LL, (query_GMD.shape[1] // num_tokens, 1))
    return jnp.where(is_seen_ML, logits_GML, _FAR_BELOW)


def _product(left: Array, right: Array, of_left: int, of_right: int) -> Array:
    """Returns products of each group's matrices, summed over these two axes in this order."""
    axes = (((of_left,), (of_right,)), ((0,), (0,)))
    return jax.lax.dot_general(left, right, axes, preferred_element_type=jnp.float32)


def _by_group(key_LGD: Array) -> Float[Array, "G L D"]:
    return jnp.swapaxes(key_LGD, 0, 1)


def _of_groups(query_LHX: Array, key_LGD: Array) -> Float[Array, "G M X"]:
    """Returns the values of query heads by the key head that they read."""
    num_tokens, groups, _ = key_LGD.shape
    by_group_LGRX = query_LHX.reshape(num_tokens, groups, -1, query_LHX.shape[-1])
    return jnp.transpose(by_group_LGRX, (1, 2, 0, 3)).reshape(groups, -1, query_LHX.shape[-1])


def _of_tokens(array_GMD: Array, query_LHD: Array) -> Float[Array, "L H D"]:
    """Returns the values of query heads in the order of tokens again."""
    num_tokens, num_heads, width = query_LHD.shape
    return jnp.swapaxes(array_GMD.reshape(num_heads, num_tokens, width), 0, 1)


@functools.cache
def _in_a_loop(function: Callable[..., Any], scale: float) -> Callable[..., Any]:
    """Returns a function of a row's arrays that vmap runs in a loop; derivatives have no loop."""
    of_row = functools.partial(function, scale)

    @jax.custom_batching.custom_vmap
    def looped(*arrays: Array) -> Any:
        return of_row(*arrays)

    @looped.def_vmap
    def _loop(num_rows: int, is_batched: list[bool], *arrays: Array) -> Any:
        size = min(_rows_of_a_step(), num_rows)
        steps = -(-num_rows // size)

        def cut(array: Array, has_rows: bool) -> Array:
            rows = array if has_rows else jnp.broadcast_to(array, (num_rows, *array.shape))
            rows = jnp.pad(rows, ((0, steps * size - num_rows), *[(0, 0)] * (rows.ndim - 1)))
            return rows.reshape(steps, size, *rows.shape[1:])

        some = tuple(map(cut, arrays, is_batched))
        found = jax.lax.map(lambda step: jax.vmap(of_row)(*step), some)
        whole = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_rows], found)
        return whole, jax.tree.map(lambda _: True, whole)

    differentiable = jax.custom_vjp(lambda *arrays: looped(*arrays))
    differentiable.defvjp(
        lambda *arrays: (looped(*arrays), arrays),
        lambda arrays, cotangents: jax.vjp(of_row, *arrays)[1](cotangents),
    )
    return differentiable


def _rows_of_a_step() -> int:
    """Returns how many rows a step of the loop takes: more than one if many cores share it."""
    return max(1, machine.usable_cpus() // 2)
