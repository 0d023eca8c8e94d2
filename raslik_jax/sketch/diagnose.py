"""Is a sketch sound on the user's own gradients? A few measured numbers.

A sketch of K coordinates should behave like K coordinates. It does not if its shuffle leaves
neighbors together (as the released reference's does). The same holds if an adapter at its start
leaves coordinates dead or if a few coordinates carry all the energy.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float

from raslik_jax.sketch import theory
from raslik_jax.sketch.families import PROJECTIONS
from raslik_jax.sketch.projections import Projection, ProjectionSpec, Segment, project

WARN_BELOW = 0.9


class Diagnosis(NamedTuple):
    """The measured numbers; `table_rows` renders them.

    Attributes:
      num_gradients: gradients that are not zero.
      effective_size: `theory.effective_size` over the projection's seed and those after it; NaN
        for a family without bins, whose signs are independent by construction.
      num_pairs: pairs of gradients that went into it and into the errors.
      live_share: share of the K coordinates that are not zero in every sketch.
      measured_error: mean over pairs of |rho_hat - rho|, rho the exact cosine and rho_hat the
        sketches', with the projection's own seed.
      expected_error: the same by theory: mean of sqrt(2 Var / pi).
      participation: median over gradients of 1 / sum u^4, u of unit length: the number of
        coordinates that share the energy. P if all are equal, 1 if one has it all.
      energy: (tensor, mean share of the squared norm), the largest first.
    """

    spec: ProjectionSpec
    num_gradients: int
    effective_size: float
    num_pairs: int
    num_keys: int
    live_share: float
    measured_error: float
    expected_error: float
    participation: float
    energy: tuple[tuple[str, float], ...]
    warning: str


def diagnose(
    projection: Projection,
    gradients_NP: Float[Array, "N P"] | Float[np.ndarray, "N P"],
    manifest: Sequence[Segment],
    *,
    num_keys: int = 4,
    max_pairs: int = 64,
) -> Diagnosis:
    """Returns how a projection does on real gradients.

    Costs O(P) on the host for each pair and seed. For a steady effective size give 12 gradients
    (66 pairs) or more, as `flatten_gradients` makes them.
    """
    spec = projection.spec
    family = PROJECTIONS[spec.family]
    if gradients_NP.shape[1] != spec.num_params:
        raise ValueError(
            f"gradients must have {spec.num_params} coordinates, got {gradients_NP.shape}: give "
            "those that the projection was made for"
        )
    # Normalized twice: in float64 for the theory, and back to float32 for the sketch.
    gradient_NP = np.asarray(gradients_NP, np.float64)
    norm_N = np.linalg.norm(gradient_NP, axis=1)
    unit_NP = gradient_NP[norm_N > 0] / norm_N[norm_N > 0, None]
    pairs = theory.independent_pairs(unit_NP, max_pairs=max_pairs)
    sketch_NK = np.asarray(_sketch_rows(projection, unit_NP.astype(np.float32)), np.float64)
    size = math.nan
    if family.bins:
        seeds = ((spec.seed + i) % 2**63 for i in range(num_keys))
        specs = [dataclasses.replace(spec, seed=seed) for seed in seeds]
        size = theory.effective_size(unit_NP, specs, pairs)
    p, length_N = family.collision(spec.num_params, spec.size), np.linalg.norm(sketch_NK, axis=1)
    measured, expected = [], []
    for i, j in pairs:
        estimate = (sketch_NK[i] @ sketch_NK[j]) / (length_N[i] * length_N[j])
        measured.append(abs(estimate - unit_NP[i] @ unit_NP[j]))
        variance = theory.cosine_variance(unit_NP[i], unit_NP[j], p)
        expected.append(math.sqrt(2 * max(variance, 0.0) / math.pi))
    warning = (
        f"the sketch of {spec.size} coordinates behaves like one of {size:.0f}: give more "
        "gradients, and if it stays, sketch with another seed or a larger K"
    )
    return Diagnosis(
        spec=spec,
        num_gradients=len(unit_NP),
        effective_size=size,
        num_pairs=len(pairs),
        num_keys=num_keys,
        live_share=float(np.mean(np.any(sketch_NK != 0, axis=0))),
        measured_error=float(np.mean(measured)),
        expected_error=float(np.mean(expected)),
        participation=float(np.median(1.0 / np.sum(unit_NP**4, axis=1))),
        energy=energy_by_tensor(unit_NP, manifest),
        warning=warning if size < WARN_BELOW * spec.size else "",
    )


def energy_by_tensor(
    unit_NP: Float[np.ndarray, "N P"], manifest: Sequence[Segment]
) -> tuple[tuple[str, float], ...]:
    """Returns each tensor's mean share of the squared norm; the largest first."""
    shares = [
        (part.path, float(np.mean(np.sum(unit_NP[:, part.offset : part.end] ** 2, axis=1))))
        for part in manifest
    ]
    return tuple(sorted(shares, key=lambda item: (-item[1], item[0])))


def table_rows(diagnosis: Diagnosis, *, max_tensors: int = 8) -> list[tuple[str, str]]:
    """Returns (name, value) rows for a small table; the last may be a warning."""
    spec, size = diagnosis.spec, diagnosis.effective_size
    rows = [
        ("projection", f"{spec.family}, seed {spec.seed}"),
        ("P, LoRA parameters", f"{spec.num_params:,}"),
        ("K, sketch size", f"{spec.size:,}"),
    ]
    if not math.isnan(size):
        text = f"{size:,.0f} = {size / spec.size:.3f} K"
        text = "no two coordinates meet" if math.isinf(size) else text
        name = f"effective K ({diagnosis.num_pairs} pairs, {diagnosis.num_keys} keys)"
        rows.append((name, text))
    rows += [
        ("live coordinates", f"{diagnosis.live_share:.1%}"),
        ("mean |cosine error|, measured", f"{diagnosis.measured_error:.2e}"),
        ("mean |cosine error|, by theory", f"{diagnosis.expected_error:.2e}"),
        ("participation 1 / sum u^4, median", f"{diagnosis.participation:,.0f}"),
    ]
    energy = [(f"energy of {path}", share) for path, share in diagnosis.energy[:max_tensors]]
    if rest := [share for _, share in diagnosis.energy[max_tensors:]]:
        energy.append((f"energy of {len(rest)} others", sum(rest)))
    rows += [(name, f"{share:.1%}") for name, share in energy]
    return [*rows, ("warning", diagnosis.warning)] if diagnosis.warning else rows


def to_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Returns a diagnosis as plain values for a JSON file; null for what does not apply."""
    size = diagnosis.effective_size
    return diagnosis._asdict() | {
        "spec": dataclasses.asdict(diagnosis.spec),
        "effective_size": size if math.isfinite(size) else None,
        "energy": dict(diagnosis.energy),
    }


@jax.jit
def _sketch_rows(projection: Projection, unit_NP: jax.Array) -> jax.Array:
    return jax.vmap(functools.partial(project, projection))(unit_NP)
