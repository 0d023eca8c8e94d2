"""The variance of the update direction with exact and with sketched selection.

  python experiments/studies/theorem/measure.py --out=runs/variance            # planted gradients
  python experiments/studies/theorem/measure.py --runs=runs/seed-0 --out=runs/quality   # of a run

The paper says that sketched scores lower the variance of Delta (Eq. 1) and its error, under small
fluctuations of the query and by an amount that falls with K. It also says that the chance of
selection has a slope in the exact score of order 1 / sqrt(K). The command measures both claims and
the boundary statistics of the appendix. Gradients of a run are those of the study of retrieval
quality in the same --out. They are made with the same flags if they are missing. --out gets
variance.json, variance.md and figures.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

import numpy as np
from jaxtyping import Bool, Float, Int

from experiments.studies import gradients, reports
from experiments.studies.theorem import report, variance
from raslik_jax.base.settings import setting
from raslik_jax.cli import command
from raslik_jax.sketch import projections

_CHUNK = 64
KINDS = ("isotropic", "gradient noise", "other query")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(gradients.Options):
    """Options of the study; without --runs gradients are planted."""

    out: str = setting("runs/variance", "Where results go, and where gradients are.")
    gradients: str = setting("", "Pass, ADAPTER/LOSS/TOKENS (default: the run's own).")
    projection_seeds: int = setting(8, "Sketches of each K.", low=2)
    fluctuations: int = setting(12, "Fluctuations of each kind.", low=2)
    fluctuation_sizes: tuple[float, ...] = setting((0.1, 0.3, 1.0), "|xi| / |q|.", above=0)
    synthetic_seeds: int = setting(3, "Planted corpora, where there is no run.", low=1)
    synthetic_params: int = setting(131072, "P of planted gradients.", low=16)
    synthetic_rows: int = setting(1000, "Rows of a planted corpus, a tenth targets.", low=20)

    def passes_named(self) -> tuple[str, ...]:
        return (self.gradients,) if self.gradients else ()


class Material(NamedTuple):
    """The gradients of one corpus."""

    vectors_MP: Float[np.ndarray, "M P"]  # training rows first, then queries; perhaps on disk
    queries: Int[np.ndarray, " Q"]  # their positions
    is_target_N: Bool[np.ndarray, " N"]
    gram_NN: Float[np.ndarray, "N N"]  # of the training rows, not normalized
    center: bool  # whether scores are centered

    def unit_rows(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Yields the training rows as unit vectors, a few at a time."""
        for start in range(0, len(self.is_target_N), _CHUNK):
            span = slice(start, min(start + _CHUNK, len(self.is_target_N)))
            yield span, _unit(np.asarray(self.vectors_MP[span], np.float32))


class Products(NamedTuple):
    """Inner products of the query and then of its fluctuations by kind, for one kernel."""

    row_EN: Float[np.ndarray, "E N"]  # their products with the unit (centered) rows
    gram_EE: Float[np.ndarray, "E E"]  # and with each other

    def moved_scores(self, kind: str, size: float) -> Float[np.ndarray, "F N"]:
        """Returns the scores under each fluctuation of a kind."""
        draws = (len(self.row_EN) - 1) // len(KINDS)
        start = 1 + KINDS.index(kind) * draws
        part = np.r_[0, start : start + draws]
        return variance.perturbed_cosines(
            self.row_EN[part], self.gram_EE[np.ix_(part, part)], size=size
        )


def planted_material(options: Options, seed: int) -> Material:
    """Returns a synthetic corpus."""
    count = options.synthetic_rows
    vectors_MP, is_target_N = variance.plant_gradients(seed, count, options.synthetic_params)
    gram_NN = (vectors_MP[:count] @ vectors_MP[:count].T).astype(np.float64)
    queries = np.arange(count, len(vectors_MP))
    return Material(vectors_MP, queries, is_target_N, gram_NN, True)


def run_material(options: Options, root: pathlib.Path) -> Material:
    """Returns the gradients of a run, made if they are not there."""
    folder = pathlib.Path(options.out) / root.name
    made = gradients.RunGradients(options, root, folder, needs_own=False)
    name, num_train = options.gradients or made.default, made.num_train
    grams = made.grams(name, keep=True)
    norm_N = grams.norm_M[:num_train].astype(np.float64)
    cosine_NN = grams.vector_MM[:num_train, :num_train].astype(np.float64)
    return Material(
        made.vectors(name),
        made.own,
        made.labels.is_target_N,
        cosine_NN * norm_N[:, None] * norm_N[None, :],
        made.config.retrieve.center,
    )


def _unit(rows_CP: np.ndarray) -> np.ndarray:
    length_C1 = np.linalg.norm(rows_CP, axis=1, keepdims=True)
    return np.divide(rows_CP, length_C1, out=np.zeros_like(rows_CP), where=length_C1 > 0)


def draw_directions(
    material: Material, draws: int, generator: np.random.Generator
) -> tuple[Float[np.ndarray, "E P"], Products]:
    """Returns the mean direction of the queries and how it fluctuates, with exact products.

    The unit query comes first, then the fluctuations of each kind, of unit length on average.
    """
    num_rows, num_params = len(material.is_target_N), material.vectors_MP.shape[1]
    mean_P = np.zeros(num_params, np.float64)
    if material.center:
        for _, unit_CP in material.unit_rows():
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
    for span, unit_CP in material.unit_rows():
        moves["gradient noise"] += share_FN[:, span] @ _unit(unit_CP - mean_P)
    parts = [query_P[None]]
    for kind in KINDS:
        rms = np.sqrt(np.mean(np.sum(moves[kind] ** 2, axis=1)))
        parts.append(moves[kind] / np.float32(max(rms, 1e-30)))
    vectors_EP = np.concatenate(parts)
    row_EN = np.zeros((len(vectors_EP), num_rows))
    for span, unit_CP in material.unit_rows():
        row_EN[:, span] = vectors_EP @ _unit(unit_CP - mean_P).T
    return vectors_EP, Products(row_EN, (vectors_EP @ vectors_EP.T).astype(np.float64))


def sketch_products(
    material: Material, vectors_EP: Float[np.ndarray, "E P"], size: int, seed: int
) -> Products:
    """Returns what one sketch makes of the products."""
    num_rows, num_params = len(material.is_target_N), material.vectors_MP.shape[1]
    projection = projections.init_projection(seed, "binned", num_params, size)
    row_NK = _unit(gradients.project_rows(material.vectors_MP[:num_rows], projection))
    if material.center:
        row_NK = _unit(row_NK - row_NK.mean(axis=0))
    vector_EK = gradients.project_rows(vectors_EP, projection)
    return Products(*((vector_EK @ other.T).astype(np.float64) for other in (row_NK, vector_EK)))


def measure(options: Options, name: str, material: Material) -> dict[str, Any]:
    """Returns the records of one corpus."""
    generator = np.random.default_rng(0)
    vectors_EP, exact = draw_directions(material, options.fluctuations, generator)
    num_targets = int(material.is_target_N.sum())
    exact_N = exact.row_EN[0] / np.sqrt(exact.gram_EE[0, 0])
    thresholds = variance.place_thresholds(exact_N, num_targets)
    sketched: dict[int, list[Products]] = {}
    for size in options.sketch_sizes:
        if size <= material.vectors_MP.shape[1]:
            seeds = (7 + 1000 * seed for seed in range(options.projection_seeds))
            sketched[size] = [sketch_products(material, vectors_EP, size, seed) for seed in seeds]
            print(f"  K = {size}: {options.projection_seeds} sketches", flush=True)
    sizes = options.fluctuation_sizes
    spreads = spread_records(material, exact, sketched, sizes, thresholds, generator)
    slopes = slope_records(exact, sketched, min(sizes), thresholds)
    boundary = []
    # The paper does not say how it scales to [-1, 1]; this keeps 0 at 0 and the order.
    scaled_N = exact_N / max(float(np.abs(exact_N).max()), 1e-30)
    for scale, score_N in (("cosine", exact_N), ("[-1, 1]", scaled_N)):
        at = variance.place_thresholds(score_N, num_targets)
        found = variance.measure_boundary(score_N, at, gamma=report.GAMMA)
        boundary.append(
            {"run": name, "scale": scale, **at._asdict(), "items": len(score_N)}
            | {f"boundary_{name}": value for name, value in found.items()}
        )
    return {
        "spreads": [{"run": name} | record for record in spreads],
        "slopes": [{"run": name} | record for record in slopes],
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
    is_target_N, gram_NN = material.is_target_N, material.gram_NN
    count, num_rows = int(is_target_N.sum()), len(is_target_N)
    kernels: dict[str, Sequence[Products]] = {"exact": [exact]}
    kernels |= {str(size): products for size, products in sketched.items()}
    exact_1N = exact.row_EN[:1] / np.sqrt(exact.gram_EE[0, 0])
    best_forget_1N, best_retain_1N = variance.sets_by_count(exact_1N, count, count)
    others_1N = ~is_target_N[None]
    # Of a random retain set the mean is an estimate of the mean of all others.
    nobody_1N = np.zeros_like(others_1N)
    best_of = {"antipodal": best_retain_1N, "random": others_1N, "none": nobody_1N}
    moves = [("none", 0.0)] + [(kind, size) for kind in KINDS for size in move_sizes]
    for kind, size in moves:
        for kernel, products in kernels.items():
            if not size and len(products) == 1:
                continue  # nothing moves
            scores = [
                one.moved_scores(kind if size else KINDS[0], size)[: None if size else 1]
                for one in products
            ]
            score_DN = np.concatenate(scores)
            sets_of = {
                "threshold": (score_DN >= thresholds.forget, score_DN <= thresholds.retain),
                "count": variance.sets_by_count(score_DN, count, count),
            }
            for rule, (is_forget_DN, is_retain_DN) in sets_of.items():
                taken_D = is_forget_DN.sum(axis=1)
                found_D = (is_forget_DN & is_target_N).sum(axis=1)
                strangers_D = (is_forget_DN & ~best_forget_1N).sum(axis=1)
                for retain, best_1N in best_of.items():
                    # Of those that are not forgotten, drawn again for each.
                    open_DN = others_1N & ~is_forget_DN
                    key_DN = np.where(open_DN, generator.random(open_DN.shape), -1.0)
                    random_DN, _ = variance.sets_by_count(key_DN, min(count, num_rows // 4), 0)
                    none_DN = np.zeros_like(is_retain_DN)
                    chosen = {"antipodal": is_retain_DN, "random": random_DN, "none": none_DN}
                    weight_DN = variance.weights_of_sets(is_forget_DN, chosen[retain])
                    weight_SFN = weight_DN.reshape(len(scores), -1, num_rows)
                    target_N = variance.weights_of_sets(best_forget_1N, best_1N)[0]
                    spread = variance.measure_spread(weight_SFN, gram_NN, target_N)
                    unit = float(target_N @ gram_NN @ target_N)
                    yield {
                        "fluctuation": kind,
                        "moved": size,
                        "kernel": kernel,
                        "rule": rule,
                        "retain": retain,
                        "precision": float(np.mean(found_D / np.maximum(taken_D, 1))),
                        "forget_items": float(taken_D.mean()),
                        # Rows that the exact kernel does not forget for the unmoved query.
                        "strangers": float(strangers_D.mean()),
                        **{f: v if v is None else v / unit for f, v in spread._asdict().items()},
                    }


def slope_records(
    exact: Products,
    sketched: Mapping[int, Sequence[Products]],
    move_size: float,
    thresholds: variance.Thresholds,
) -> Iterator[dict[str, Any]]:
    """Yields the noise of a score near the thresholds and the slope of selection, for each K."""

    # Rows under all fluctuations of one size go in, so that many scores are near.
    def all_scores(products: Products) -> np.ndarray:
        return np.concatenate([products.moved_scores(kind, move_size).ravel() for kind in KINDS])

    exact_D = all_scores(exact)
    for size, draws in sketched.items():
        sketched_SD = np.stack(list(map(all_scores, draws)))
        for end, threshold, sign in zip(thresholds._fields, thresholds, (1.0, -1.0), strict=True):
            nearest = np.argsort(np.abs(exact_D - threshold))[:200]
            sigma = float(np.sqrt(np.mean((sketched_SD - exact_D)[:, nearest] ** 2)))
            slope = variance.membership_slope(
                sign * exact_D, sign * sketched_SD, sign * threshold, window=0.5 * sigma
            )
            yield {
                "size": size,
                "end": end,
                "sigma": sigma,
                "slope": slope,
                "by_noise": 1 / (sigma * np.sqrt(2 * np.pi)),
            }


def main(options: Options) -> None:
    out = pathlib.Path(options.out)
    runs: dict[str, Any] = {root.name: root for root in map(pathlib.Path, options.runs)}
    runs = runs or {f"planted-{seed}": seed for seed in range(options.synthetic_seeds)}

    def measure_run(name: str) -> dict[str, Any]:
        make: Callable[..., Material] = run_material if options.runs else planted_material
        return measure(options, name, make(options, runs[name]))

    found = reports.measure_runs(options, "variance_draws.json", measure_run, runs)
    report.write_report(found, out)
    print((out / "variance.md").read_text())


if __name__ == "__main__":
    command.start(main, Options())
