"""The families of random projection, listed without loading jax.

To add one, add a record to PROJECTIONS. `projections` defines and runs them.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Int

from raslik_jax.base import lazy
from raslik_jax.base.lazy import Array, jnp
from raslik_jax.base.settings import Settings

if TYPE_CHECKING:
    from raslik_jax.sketch import hashing, kernels
else:
    hashing = lazy.Module("raslik_jax.sketch.hashing")
    kernels = lazy.Module("raslik_jax.sketch.kernels")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProjectionSpec:
    """The fields that decide a projection; the same fields give the same projection anywhere.

    Attributes:
      family: a name in PROJECTIONS.
      num_params: P, the length of a flat gradient.
      size: K, the length of a sketch.
      operand: dtype in which a gradient enters the product of dense_rademacher: "float32", or
        "bfloat16" (rounds each coordinate to 8 bits of mantissa, for tensor cores).
    """

    family: str
    num_params: int
    size: int
    seed: int
    operand: str = "float32"

    def __post_init__(self) -> None:
        family, p, k = PROJECTIONS.get(self.family), self.num_params, self.size
        operands = family.operands if family else ()
        for is_right, problem in (
            (family, f"family must be one of {sorted(PROJECTIONS)}, got {self.family!r}"),
            (1 <= p < 2**31, f"P must be 1 to 2**31 - 1, got num_params={p}: lower the LoRA rank"),
            (1 <= k <= p, f"K must be 1 to P, got size={k} with num_params={p}: choose another"),
            (0 <= self.seed < 2**63, f"seed must be in [0, 2**63), got seed={self.seed}"),
            (
                self.operand in operands,
                f"operand must be {' or '.join(operands)} for {self.family}, got {self.operand!r}",
            ),
        ):
            if not is_right:
                raise ValueError(f"a projection's {problem}")


def meet_at_random(num_params: int, size: int) -> float:
    """Returns p = 1 / K, which the variance of dense sums has."""
    return 1.0 / size


class ProjectionFamily(NamedTuple):
    """A family of projections.

    Attributes:
      init: makes the table of a `ProjectionSpec`, () if nothing is precomputed.
      apply: maps spec, table and gradients_BP to sketch_BK, linearly.
      collision: from P and K, the probability that two coordinates meet in one of the sketch.
      bins: the bin of every coordinate; None for families that sum over all coordinates.
      operands: dtypes in which a gradient may enter its product.
      by_xla: `apply` without a Pallas kernel, which has no transpose; None if there is none.
    """

    title: str
    init: Callable[[Any], Any]
    apply: Callable[[Any, Any, Array], Array]
    collision: Callable[[int, int], float] = meet_at_random
    bins: Callable[[Any], Int[np.ndarray, " P"]] | None = None
    operands: tuple[str, ...] = ("float32",)
    by_xla: Callable[[Any, Any, Array], Array] | None = None
    settings: Settings = Settings()


def binned_table(spec: ProjectionSpec) -> np.ndarray:
    """Returns int32 [M, K]: column j holds the M = ceil(P / K) signed members of bin j.

    The members are a permutation of the whole vector that is dealt to the bins in turn. Every bin
    has M members, or M - 1 and a zero of padding. An entry e >= 0 means +g[e] and e < 0 means
    -g[~e]. An index of P is the padding.

    Neither the order of members nor the numbering of bins changes an inner product. Members ascend
    down a column and columns ascend in their first member. Each row of the table then reads one
    band of the gradient in order.
    """
    slots = -(-spec.num_params // spec.size)
    member = np.full(slots * spec.size, spec.num_params, np.int32)
    member[: spec.num_params] = hashing.hashed_order(spec.num_params, spec.seed)
    member_KM = np.sort(member.reshape(slots, spec.size).T, axis=1)
    member_MK = np.ascontiguousarray(member_KM[np.argsort(member_KM[:, 0])].T)
    keys = hashing.stream_keys(spec.seed, hashing.SIGN_STREAM)
    sign_MK = hashing.counter_hash(member_MK.astype(np.uint32), keys) >> np.uint32(31)
    return np.where(sign_MK == 1, ~member_MK, member_MK)


def _apply_dense(spec: ProjectionSpec, table: tuple, gradients_BP: Array) -> Array:
    return _dense(kernels.dense_sums, spec, gradients_BP)


def _apply_dense_by_xla(spec: ProjectionSpec, table: tuple, gradients_BP: Array) -> Array:
    return _dense(kernels.dense_sums_xla, spec, gradients_BP)


def _dense(sums: Callable[..., Array], spec: ProjectionSpec, gradients_BP: Array) -> Array:
    streams = hashing.ROW_STREAM, hashing.COLUMN_STREAM
    keys = tuple(hashing.stream_keys(spec.seed, stream) for stream in streams)
    sums_BK = sums(gradients_BP, size=spec.size, keys=keys, operand=spec.operand)
    return sums_BK * np.float32(spec.size**-0.5)


def _bin_of_binned(spec: ProjectionSpec) -> Int[np.ndarray, " P"]:
    table_MK = binned_table(spec)
    # One more entry than coordinates: the padding's.
    bin_P = np.empty(spec.num_params + 1, np.int64)
    bin_P[table_MK ^ (table_MK >> 31)] = np.arange(spec.size)[None, :]
    return bin_P[: spec.num_params]


def meet_in_dealt_bins(num_params: int, size: int) -> float:
    """Returns p of bins of fixed length: (1 / K) (P - K) / (P - 1) if K divides P.

    Otherwise the bins have M = ceil(P / K) or M - 1 members and p counts both kinds.
    """
    slots = -(-num_params // size)
    full = num_params - (slots - 1) * size
    pairs = full * slots * (slots - 1) + (size - full) * (slots - 1) * (slots - 2)
    return pairs / (num_params * (num_params - 1)) if num_params > 1 else 0.0


PROJECTIONS: dict[str, ProjectionFamily] = {
    "binned": ProjectionFamily(
        "binned",
        lambda spec: jnp.asarray(binned_table(spec)),
        lambda spec, table_MK, gradients_BP: kernels.binned_sums(table_MK, gradients_BP),
        collision=meet_in_dealt_bins,
        bins=_bin_of_binned,
        by_xla=lambda spec, table_MK, gradients_BP: kernels.binned_sums_by_row(
            table_MK, gradients_BP
        ),
    ),
    "dense_rademacher": ProjectionFamily(
        "dense Rademacher",
        lambda spec: (),
        _apply_dense,
        operands=("float32", "bfloat16"),
        by_xla=_apply_dense_by_xla,
    ),
}
