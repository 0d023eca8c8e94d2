"""The variance of the update direction with exact and with sketched selection.

  python experiments/studies/theorem/measure.py --out=runs/variance            # planted gradients
  python experiments/studies/theorem/measure.py --runs=runs/seed-0 --out=runs/quality   # of a run

The paper says that selecting by sketched scores lowers the variance of Delta (Eq. 1) under small
fluctuations of the query, by an amount that falls with K, and its error with it; and that the
chance of being selected has a slope in the exact score of order 1 / sqrt(K). Both are measured
here, whichever way they fall, and the boundary statistics of the appendix. Gradients of a run are
those of the study of retrieval quality in the same --out (made if they are not there, with the
same flags). Leaves variance.json, variance.md and figures in --out.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

import numpy as np
from absl import logging

from experiments.studies import gradients
from experiments.studies.theorem import report, variance
from raslik_jax.cli import command
from raslik_jax.files import read_json, write_json
from raslik_jax.run.exact_gradients import parse_pass, project_rows
from raslik_jax.settings import setting
from raslik_jax.sketch import projections
from raslik_jax.sketch.families import PROJECTIONS

_CHUNK = 64
KINDS = ("isotropic", "gradient noise", "other query")
# What one kernel, exact or a sketch, makes of the products: with rows [E, N], among them [E, E].
Products = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(gradients.Options):
    """Options of the study; without --runs gradients are planted."""

    out: str = setting("runs/variance", "Where results go, and where gradients are.")
    gradients: str = setting(
        "", "Pass that retrieval goes by, ADAPTER/LOSS/TOKENS (default: the run's own)."
    )
    update: str = setting(
        "", "Pass whose gradients make Delta (default: the same, as the paper has it)."
    )
    center: Literal["run", "yes", "no"] = setting(
        "run", "Centered cosine; run: as the run has it, and yes for planted gradients."
    )
    family: str = setting("binned", "Projection family.", family=PROJECTIONS)
    projection_seeds: int = setting(8, "Sketches of each K.", low=2)
    fluctuations: int = setting(12, "Fluctuations of each kind.", low=2)
    fluctuation_sizes: tuple[float, ...] = setting((0.1, 0.3, 1.0), "|xi| / |q|.", above=0)
    gamma: float = setting(0.01, "Half the width of the thresholds' neighborhoods.", above=0)
    synthetic_seeds: int = setting(3, "Planted corpora, where there is no run.", low=1)
    synthetic_params: int = setting(131072, "P of planted gradients.", low=16)
    synthetic_rows: int = setting(1000, "Rows of a planted corpus, a tenth targets.", low=20)

    def centers(self, default: bool) -> bool:
        """Returns whether scores are centered."""
        return default if self.center == "run" else self.center == "yes"


class Material(NamedTuple):
    """The gradients of one corpus.

    Attributes:
      name: of the run.
      vectors_MP: training rows first, then queries; perhaps on disk.
      queries: positions of the queries.
      is_target_N: labels of the training rows.
      update_NN: inner products of the gradients that Delta is made of.
      center: whether scores are centered.
    """

    name: str
    vectors_MP: np.ndarray
    queries: np.ndarray
    is_target_N: np.ndarray
    update_NN: np.ndarray
    center: bool


def planted_material(options: Options, seed: int) -> Material:
    """Returns a synthetic corpus."""
    planted = variance.plant_gradients(
        seed,
        num_rows=options.synthetic_rows,
        num_targets=options.synthetic_rows // 10,
        num_queries=16,
        num_params=options.synthetic_params,
    )
    rows_NP = planted.gradient_NP
    return Material(
        f"planted-{seed}",
        np.concatenate([rows_NP, planted.query_QP]),
        np.arange(len(rows_NP), len(rows_NP) + len(planted.query_QP)),
        planted.is_target_N,
        (rows_NP @ rows_NP.T).astype(np.float64),
        options.centers(True),
    )


def run_material(options: Options, root: pathlib.Path) -> Material:
    """Returns the gradients of a run, made if they are not there."""
    folder = pathlib.Path(options.out) / root.name
    workspace, rows, maker = gradients.open_gradients(options, root, folder, needs_own=False)
    config = workspace.config
    what = parse_pass(options.gradients or gradients.own_pass(config))
    update = parse_pass(options.update) if options.update else what
    grams = maker.grams(update, keep=update == what)
    norm_N = grams.norm_M[: rows.num_train].astype(np.float64)
    cosine_NN = grams.vector_MM[: rows.num_train, : rows.num_train].astype(np.float64)
    return Material(
        root.name,
        maker.vectors(what),
        rows.queries(config.sketch.query_output),
        np.array([bool(row.is_target) for row in workspace.corpus.train]),
        cosine_NN * norm_N[:, None] * norm_N[None, :],
        options.centers(config.retrieve.center),
    )


class Directions(NamedTuple):
    """The query and its fluctuations, and their products with the rows.

    Attributes:
      vectors_EP: the unit query, then the fluctuations of each kind, of unit length on average.
      row_EN: their products with the unit (centered) rows.
      gram_EE: their products with each other.
    """

    vectors_EP: np.ndarray
    row_EN: np.ndarray
    gram_EE: np.ndarray


def _unit(rows_CP: np.ndarray) -> np.ndarray:
    length_C1 = np.linalg.norm(rows_CP, axis=1, keepdims=True)
    return np.divide(rows_CP, length_C1, out=np.zeros_like(rows_CP), where=length_C1 > 0)


def _chunks(material: Material) -> Iterator[tuple[slice, np.ndarray]]:
    for start in range(0, len(material.is_target_N), _CHUNK):
        span = slice(start, min(start + _CHUNK, len(material.is_target_N)))
        yield span, _unit(np.asarray(material.vectors_MP[span], np.float32))


def draw_directions(material: Material, draws: int, generator: np.random.Generator) -> Directions:
    """Returns the query, the mean direction of the queries, and how it fluctuates."""
    num_rows, num_params = len(material.is_target_N), material.vectors_MP.shape[1]
    mean_P = np.zeros(num_params, np.float64)
    if material.center:
        for _, unit_CP in _chunks(material):
            mean_P += unit_CP.sum(axis=0, dtype=np.float64)
        mean_P /= num_rows
    mean_P = mean_P.astype(np.float32)
    query_QP = _unit(np.asarray(material.vectors_MP[material.queries], np.float32))
    query_QP = _unit(query_QP - mean_P)
    query_P = _unit(query_QP.mean(axis=0, keepdims=True))[0]
    moves = {
        "isotropic": generator.standard_normal((draws, num_params), np.float32),
        "gradient noise": np.zeros((draws, num_params), np.float32),
        "other query": query_QP[generator.integers(len(query_QP), size=draws)] - query_P,
    }
    share_FN = generator.standard_normal((draws, num_rows), np.float32)
    for span, unit_CP in _chunks(material):
        moves["gradient noise"] += share_FN[:, span] @ _unit(unit_CP - mean_P)
    parts = [query_P[None]]
    for kind in KINDS:
        rms = np.sqrt(np.mean(np.sum(moves[kind] ** 2, axis=1)))
        parts.append(moves[kind] / np.float32(max(rms, 1e-30)))
    vectors_EP = np.concatenate(parts)
    row_EN = np.zeros((len(vectors_EP), num_rows))
    for span, unit_CP in _chunks(material):
        row_EN[:, span] = vectors_EP @ _unit(unit_CP - mean_P).T
    return Directions(vectors_EP, row_EN, (vectors_EP @ vectors_EP.T).astype(np.float64))


def sketch_products(
    options: Options, material: Material, directions: Directions, size: int, seed: int
) -> Products:
    """Returns what one sketch makes of the products."""
    num_rows = len(material.is_target_N)
    projection = projections.init_projection(
        seed, options.family, material.vectors_MP.shape[1], size
    )
    row_NK = _unit(project_rows(material.vectors_MP[:num_rows], projection))
    if material.center:
        row_NK = _unit(row_NK - row_NK.mean(axis=0))
    vector_EK = project_rows(directions.vectors_EP, projection)
    return (
        (vector_EK @ row_NK.T).astype(np.float64),
        (vector_EK @ vector_EK.T).astype(np.float64),
    )


def moved_scores(products: Products, kind: str, size: float) -> np.ndarray:
    """Returns the scores under each fluctuation of a kind, [F, N]."""
    row_EN, gram_EE = products
    draws = (len(row_EN) - 1) // len(KINDS)
    start = 1 + KINDS.index(kind) * draws
    span = slice(start, start + draws)
    return variance.perturbed_cosines(
        row_EN[0],
        row_EN[span],
        float(gram_EE[0, 0]),
        gram_EE[0, span],
        np.diag(gram_EE)[span],
        size=size,
    )


# what is measured -----------------------------------------------------------------------------


def measure(options: Options, material: Material) -> dict[str, Any]:
    """Returns the records of one corpus."""
    generator = np.random.default_rng(0)
    directions = draw_directions(material, options.fluctuations, generator)
    num_targets = int(material.is_target_N.sum())
    exact_N = directions.row_EN[0] / np.sqrt(directions.gram_EE[0, 0])
    thresholds = variance.place_thresholds(exact_N, num_targets, num_targets)
    sketched: dict[int, list[Products]] = {}
    for size in options.sketch_sizes:
        if size > material.vectors_MP.shape[1]:
            continue
        sketched[size] = [
            sketch_products(options, material, directions, size, 7 + 1000 * seed)
            for seed in range(options.projection_seeds)
        ]
        print(f"  K = {size}: {options.projection_seeds} sketches", flush=True)
    exact = directions.row_EN, directions.gram_EE
    moves = options.fluctuation_sizes
    spreads = spread_records(material, exact, sketched, moves, thresholds, generator)
    slopes = slope_records(exact, sketched, min(moves), thresholds)
    boundary = []
    for scale, score_N in (("cosine", exact_N), ("[-1, 1]", variance.scale_scores(exact_N))):
        at = variance.place_thresholds(score_N, num_targets, num_targets)
        found = variance.measure_boundary(score_N, at, gamma=options.gamma)
        boundary.append(
            {"run": material.name, "scale": scale, **at._asdict(), "items": len(score_N)}
            | {f"boundary_{name}": value for name, value in found._asdict().items()}
        )
    return {
        "spreads": [{"run": material.name} | record for record in spreads],
        "slopes": [{"run": material.name} | record for record in slopes],
        "boundary": boundary,
        "scores": exact_N.tolist(),
        "thresholds": list(thresholds),
    }


def spread_records(
    material: Material,
    exact: Products,
    sketched: Mapping[int, Sequence[Products]],
    move_sizes: Sequence[float],
    thresholds: variance.Thresholds,
    generator: np.random.Generator,
) -> Iterator[dict[str, Any]]:
    """Yields the variances and the error of Delta, for each way of selecting."""
    is_target_N, update_NN = material.is_target_N, material.update_NN
    count, num_rows = int(is_target_N.sum()), len(is_target_N)
    kernels: dict[str, Sequence[Products]] = {"exact": [exact]}
    kernels |= {str(size): products for size, products in sketched.items()}
    exact_1N = exact[0][:1] / np.sqrt(exact[1][0, 0])
    best_forget_1N, best_retain_1N = variance.sets_by_count(exact_1N, count, count)
    others_1N = ~is_target_N[None]
    # Of a random retain set the mean is an estimate of the mean of all others.
    target_of = {
        "antipodal": best_retain_1N,
        "random": others_1N,
        "none": np.zeros_like(best_forget_1N),
    }
    moves = [("none", 0.0)] + [(kind, size) for kind in KINDS for size in move_sizes]
    for kind, size in moves:
        for kernel, products in kernels.items():
            if kind == "none" and len(products) == 1:
                continue  # nothing moves
            scores = [
                moved_scores(pair, kind if size else KINDS[0], size)[: None if size else 1]
                for pair in products
            ]
            shape = len(scores), len(scores[0]), num_rows
            score_DN = np.concatenate(scores)
            sets_of = {
                "threshold": (score_DN >= thresholds.forget, score_DN <= thresholds.retain),
                "count": variance.sets_by_count(score_DN, count, count),
            }
            for rule, (is_forget_DN, is_retain_DN) in sets_of.items():
                taken_D = is_forget_DN.sum(axis=1)
                found_D = (is_forget_DN & is_target_N).sum(axis=1)
                for retain, target_1N in target_of.items():
                    chosen_DN = {
                        "antipodal": is_retain_DN,
                        "random": variance.random_sets(
                            generator, others_1N & ~is_forget_DN, min(count, num_rows // 4)
                        ),
                        "none": np.zeros_like(is_retain_DN),
                    }[retain]
                    weight_DN = variance.weights_of_sets(is_forget_DN, chosen_DN)
                    target_N = variance.weights_of_sets(best_forget_1N, target_1N)[0]
                    spread = variance.measure_spread(weight_DN.reshape(shape), update_NN, target_N)
                    unit = float(target_N @ update_NN @ target_N)
                    yield {
                        "fluctuation": kind,
                        "moved": size,
                        "kernel": kernel,
                        "rule": rule,
                        "retain": retain,
                        "precision": float(np.mean(found_D / np.maximum(taken_D, 1))),
                        "empty_sets": float(np.mean(taken_D == 0)),
                        "forget_items": float(taken_D.mean()),
                        **{
                            name: None if value is None else value / unit
                            for name, value in spread._asdict().items()
                        },
                    }


def slope_records(
    exact: Products,
    sketched: Mapping[int, Sequence[Products]],
    move_size: float,
    thresholds: variance.Thresholds,
) -> Iterator[dict[str, Any]]:
    """Yields the noise of a score near the thresholds and the slope of selection, for each K.

    Rows under all fluctuations of one size go in, so that many scores are near.
    """

    def all_scores(products: Products) -> np.ndarray:
        return np.concatenate([moved_scores(products, kind, move_size).ravel() for kind in KINDS])

    exact_D = all_scores(exact)
    for size, pairs in sketched.items():
        sketched_SD = np.stack([all_scores(pair) for pair in pairs])
        for name, threshold, sign in (
            ("forget", thresholds.forget, 1.0),
            ("retain", thresholds.retain, -1.0),
        ):
            nearest = np.argsort(np.abs(exact_D - threshold))[:200]
            sigma = float(np.sqrt(np.mean((sketched_SD - exact_D)[:, nearest] ** 2)))
            slope = variance.membership_slope(
                sign * exact_D, sign * sketched_SD, sign * threshold, window=0.5 * sigma
            )
            yield {
                "size": size,
                "end": name,
                "sigma": sigma,
                "slope": slope,
                "by_noise": 1 / (sigma * np.sqrt(2 * np.pi)),
            }


def main(options: Options) -> None:
    command.require("matplotlib")
    logging.set_verbosity(logging.WARNING)
    out = pathlib.Path(options.out)
    names = [pathlib.Path(run).name for run in options.runs] or [
        f"planted-{seed}" for seed in range(options.synthetic_seeds)
    ]
    for number, name in enumerate(names):
        if options.report_only:
            continue
        print(name, flush=True)
        if options.runs:
            material = run_material(options, pathlib.Path(options.runs[number]))
        else:
            material = planted_material(options, number)
        (out / name).mkdir(parents=True, exist_ok=True)
        write_json(out / name / "variance_draws.json", measure(options, material))
    found = [read_json(out / name / "variance_draws.json") for name in names]
    report.write_report(found, out, gamma=options.gamma)
    print((out / "variance.md").read_text())


if __name__ == "__main__":
    command.start(main, Options())
