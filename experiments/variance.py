"""The variance of the update direction with exact and with sketched selection.

  python experiments/variance.py --out=runs/variance                      # planted gradients
  python experiments/variance.py --runs=runs/seed-0 --out=runs/quality    # those of a run

The paper says that selecting by sketched scores lowers the variance of Delta (Eq. 1) under small
fluctuations of the query, by an amount that falls with K, and its error with it; and that the
chance of being selected has a slope in the exact score of order 1 / sqrt(K). Both are measured
here, whichever way they fall, and the boundary statistics of the appendix. Gradients of a run are
those of retrieval_quality.py in the same --out (made if they are not there, with the same flags).
Leaves variance.json, variance.md and figures in --out.
"""

import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args

from absl import flags, logging

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import numpy as np  # noqa: E402

from raslik_jax.cli import command  # noqa: E402
from raslik_jax.config import Projection  # noqa: E402
from raslik_jax.data.examples import QUERY_SETS  # noqa: E402
from raslik_jax.evaluate import variance  # noqa: E402
from raslik_jax.evaluate.ranking import join_records  # noqa: E402
from raslik_jax.files import read_json, write_json, write_text  # noqa: E402
from raslik_jax.messages import shown  # noqa: E402
from raslik_jax.report import figures, tables  # noqa: E402

_RUNS = flags.DEFINE_list("runs", [], "Work directories; none: planted gradients.")
_OUT = flags.DEFINE_string("out", "runs/variance", "Where results go, and where gradients are.")
_GRADIENTS = flags.DEFINE_string(
    "gradients", "", "Pass that retrieval goes by, ADAPTER/LOSS/TOKENS (default: the run's own)."
)
_UPDATE = flags.DEFINE_string(
    "update", "", "Pass whose gradients make Delta (default: the same, as the paper has it)."
)
_CENTER = flags.DEFINE_boolean("center", None, "Centered cosine (default: as the run has it).")
_SIZES = command.define_list("sketch_sizes", [256, 1024, 4096, 16384, 65536], "Ks.", int)
_FAMILY = flags.DEFINE_enum("family", "binned", get_args(Projection), "Projection family.")
_SEEDS = flags.DEFINE_integer("projection_seeds", 8, "Sketches of each K.", 2)
_DRAWS = flags.DEFINE_integer("fluctuations", 12, "Fluctuations of each kind.", 2)
_MOVES = command.define_list(
    "fluctuation_sizes", [0.1, 0.3, 1.0], "|xi| / |q|, above 0.", float, low=1e-9
)
_GAMMA = flags.DEFINE_float("gamma", 0.01, "Half the width of the thresholds' neighborhoods.", 1e-9)
_SYNTHETIC = flags.DEFINE_integer(
    "synthetic_seeds", 3, "Planted corpora, where there is no run.", 1
)
_PARAMS = flags.DEFINE_integer("synthetic_params", 131072, "P of planted gradients.", 16)
_ROWS = flags.DEFINE_integer(
    "synthetic_rows", 1000, "Rows of a planted corpus, a tenth targets.", 20
)
_QUERY_SETS = command.define_list(
    "query_sets", ["retrieval"], "As in retrieval_quality.py.", QUERY_SETS
)
_STORE_DTYPE = flags.DEFINE_enum(
    "store_dtype", "float32", ["float32", "bfloat16"], "As in retrieval_quality.py."
)
_BATCH_TOKENS = flags.DEFINE_integer("batch_tokens", 2048, "As in retrieval_quality.py.", 1)
_NUM_BUCKETS = flags.DEFINE_integer("num_buckets", 2, "As in retrieval_quality.py.", 1)
_REPORT_ONLY = flags.DEFINE_boolean("report_only", False, "Only join the results that are there.")

_CHUNK = 64
_ROUNDING = 1e-6  # of |Delta|^2, with products summed in float32
KINDS = ("isotropic", "gradient noise", "other query")


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


def planted_material(seed: int) -> Material:
    """Returns a synthetic corpus."""
    planted = variance.plant_gradients(
        seed,
        num_rows=_ROWS.value,
        num_targets=_ROWS.value // 10,
        num_queries=16,
        num_params=_PARAMS.value,
    )
    rows_NP = planted.gradient_NP
    return Material(
        f"planted-{seed}",
        np.concatenate([rows_NP, planted.query_QP]),
        np.arange(len(rows_NP), len(rows_NP) + len(planted.query_QP)),
        planted.is_target_N,
        (rows_NP @ rows_NP.T).astype(np.float64),
        True if _CENTER.value is None else _CENTER.value,
    )


def run_material(root: pathlib.Path, out: pathlib.Path) -> Material:
    """Returns the gradients of a run, made if they are not there."""
    from raslik_jax.run import exact_gradients as exact_lib
    from raslik_jax.run.plan import open_run

    workspace = open_run(root, "corpus", "finetune", "references/retrieval")
    config = workspace.config
    rows = exact_lib.load_rows(workspace, _QUERY_SETS.value, needs_own=False)
    maker = exact_lib.GradientMaker(
        workspace,
        out / root.name / "passes",
        rows,
        dtype=_STORE_DTYPE.value,
        batch_tokens=_BATCH_TOKENS.value,
        num_buckets=_NUM_BUCKETS.value,
    )
    sketch = config.sketch
    what = exact_lib.parse_pass(
        _GRADIENTS.value or f"{sketch.gradient_at}/{sketch.loss}/{sketch.targets}"
    )
    update = exact_lib.parse_pass(_UPDATE.value) if _UPDATE.value else what
    grams = maker.grams(update, keep=update == what)
    norm_N = grams.norm_M[: rows.num_train].astype(np.float64)
    cosine_NN = grams.vector_MM[: rows.num_train, : rows.num_train].astype(np.float64)
    return Material(
        root.name,
        maker.vectors(what),
        rows.queries(sketch.query_output),
        np.array([bool(row.is_target) for row in workspace.corpus.train]),
        cosine_NN * norm_N[:, None] * norm_N[None, :],
        config.retrieve.center if _CENTER.value is None else _CENTER.value,
    )


# what is drawn --------------------------------------------------------------------------------


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


def draw_directions(material: Material, generator: np.random.Generator) -> Directions:
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
    draws = _DRAWS.value
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
    material: Material, directions: Directions, size: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns what one sketch makes of the products: with the rows [E, N], among them [E, E]."""
    from raslik_jax.run.exact_gradients import project_rows
    from raslik_jax.sketch import projections

    num_rows = len(material.is_target_N)
    projection = projections.init_projection(
        seed, _FAMILY.value, material.vectors_MP.shape[1], size
    )
    row_NK = _unit(project_rows(material.vectors_MP[:num_rows], projection))
    if material.center:
        row_NK = _unit(row_NK - row_NK.mean(axis=0))
    vector_EK = project_rows(directions.vectors_EP, projection)
    return (
        (vector_EK @ row_NK.T).astype(np.float64),
        (vector_EK @ vector_EK.T).astype(np.float64),
    )


def moved_scores(row_EN: np.ndarray, gram_EE: np.ndarray, kind: str, size: float) -> np.ndarray:
    """Returns the scores under each fluctuation of a kind, [F, N]."""
    start = 1 + KINDS.index(kind) * _DRAWS.value
    span = slice(start, start + _DRAWS.value)
    return variance.perturbed_cosines(
        row_EN[0],
        row_EN[span],
        float(gram_EE[0, 0]),
        gram_EE[0, span],
        np.diag(gram_EE)[span],
        size=size,
    )


# what is measured -----------------------------------------------------------------------------


def measure(material: Material) -> dict[str, Any]:
    """Returns the records of one corpus."""
    generator = np.random.default_rng(0)
    directions = draw_directions(material, generator)
    num_targets = int(material.is_target_N.sum())
    exact_N = directions.row_EN[0] / np.sqrt(directions.gram_EE[0, 0])
    thresholds = variance.place_thresholds(exact_N, num_targets, num_targets)
    sizes = [size for size in _SIZES.value if size <= material.vectors_MP.shape[1]]
    sketched: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
    for size in sizes:
        sketched[size] = [
            sketch_products(material, directions, size, 7 + 1000 * seed)
            for seed in range(_SEEDS.value)
        ]
        print(f"  K = {size}: {_SEEDS.value} sketches", flush=True)
    spreads = [
        {"run": material.name} | record
        for record in spread_records(material, directions, sketched, thresholds, generator)
    ]
    slopes = [
        {"run": material.name} | record
        for record in slope_records(directions, sketched, thresholds)
    ]
    boundary = []
    for scale, score_N in (("cosine", exact_N), ("[-1, 1]", variance.scale_scores(exact_N))):
        at = variance.place_thresholds(score_N, num_targets, num_targets)
        found = variance.measure_boundary(score_N, at, gamma=_GAMMA.value)
        boundary.append(
            {"run": material.name, "scale": scale, **at._asdict(), "items": len(score_N)}
            | {f"boundary_{name}": value for name, value in found._asdict().items()}
        )
    return {
        "spreads": spreads,
        "slopes": slopes,
        "boundary": boundary,
        "scores": exact_N.tolist(),
        "thresholds": list(thresholds),
    }


def _choose(
    score_DN: np.ndarray, rule: str, thresholds: variance.Thresholds, count: int
) -> tuple[np.ndarray, np.ndarray]:
    if rule == "count":
        return variance.sets_by_count(score_DN, count, count)
    return score_DN >= thresholds.forget, score_DN <= thresholds.retain


def spread_records(
    material: Material,
    directions: Directions,
    sketched: Mapping[int, Sequence[tuple[np.ndarray, np.ndarray]]],
    thresholds: variance.Thresholds,
    generator: np.random.Generator,
) -> Iterator[dict[str, Any]]:
    """Yields the variances and the error of Delta, for each way of selecting."""
    count, num_rows = int(material.is_target_N.sum()), len(material.is_target_N)
    kernels = {"exact": [(directions.row_EN, directions.gram_EE)]} | {
        str(size): list(pairs) for size, pairs in sketched.items()
    }
    exact_1N = directions.row_EN[:1] / np.sqrt(directions.gram_EE[0, 0])
    best_forget_1N, best_retain_1N = variance.sets_by_count(exact_1N, count, count)
    others_1N = ~material.is_target_N[None]
    none_1N = np.zeros_like(best_forget_1N)
    target_of = {
        "antipodal": best_retain_1N,
        "random": others_1N,  # what the mean of a random retain set is an estimate of
        "none": none_1N,
    }
    moves = [("none", 0.0)] + [(kind, size) for kind in KINDS for size in _MOVES.value]
    for kind, size in moves:
        for kernel, pairs in kernels.items():
            if kind == "none" and len(pairs) == 1:
                continue  # nothing moves
            scores = [
                moved_scores(row_EN, gram_EE, kind if size else KINDS[0], size)[
                    : None if size else 1
                ]
                for row_EN, gram_EE in pairs
            ]
            shape = len(scores), len(scores[0])
            score_DN = np.concatenate(scores)
            for rule in ("threshold", "count"):
                is_forget_DN, is_retain_DN = _choose(score_DN, rule, thresholds, count)
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
                    found = variance.measure_spread(
                        weight_DN.reshape(*shape, num_rows), material.update_NN, target_N
                    )
                    unit = float(target_N @ material.update_NN @ target_N)
                    yield {
                        "fluctuation": kind,
                        "moved": size,
                        "kernel": kernel,
                        "rule": rule,
                        "retain": retain,
                        "precision": float(
                            np.mean(
                                (is_forget_DN & material.is_target_N).sum(axis=1)
                                / np.maximum(is_forget_DN.sum(axis=1), 1)
                            )
                        ),
                        "empty_sets": float(np.mean(~is_forget_DN.any(axis=1))),
                        "forget_items": float(is_forget_DN.sum(axis=1).mean()),
                        **{
                            name: None if value is None else value / unit
                            for name, value in found._asdict().items()
                        },
                    }


def slope_records(
    directions: Directions,
    sketched: Mapping[int, Sequence[tuple[np.ndarray, np.ndarray]]],
    thresholds: variance.Thresholds,
) -> Iterator[dict[str, Any]]:
    """Yields the noise of a score near the thresholds and the slope of selection, for each K.

    Rows under all fluctuations of the smallest size go in, so that many scores are near.
    """
    smallest = min(_MOVES.value)

    def all_scores(row_EN: np.ndarray, gram_EE: np.ndarray) -> np.ndarray:
        parts = [moved_scores(row_EN, gram_EE, kind, smallest).ravel() for kind in KINDS]
        return np.concatenate(parts)

    exact_D = all_scores(directions.row_EN, directions.gram_EE)
    for size, pairs in sketched.items():
        sketched_SD = np.stack([all_scores(*pair) for pair in pairs])
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


# the report -----------------------------------------------------------------------------------


def _power(points: Mapping[int, float]) -> float:
    """Returns the exponent b of the least-squares fit y = a K^b."""
    if len(points) < 2:
        return float("nan")
    return float(np.polyfit(np.log(list(points)), np.log(list(points.values())), 1)[0])


def _cell(entry: Mapping[str, float] | None, digits: str = ".3g") -> str:
    if entry is None:
        return "-"
    mean, low, high = (format(entry[name], digits) for name in ("mean", "low", "high"))
    return mean if low == high else f"{mean} [{low}, {high}]"


def _table(entries: Sequence[Mapping[str, Any]], by: Sequence[str], values: Sequence[str]) -> str:
    columns = tuple(tables.Column(name.replace("_", " ")) for name in (*by, *values))
    rows = tuple(
        (*(str(entry[name]) for name in by), *(_cell(entry[name]) for name in values))
        for entry in entries
    )
    return tables.render_markdown(tables.Table(columns, rows))


def write_report(found: Sequence[Mapping[str, Any]], out: pathlib.Path) -> None:
    """Writes variance.json, variance.md and the figures."""
    setting = ["fluctuation", "moved", "rule", "retain"]
    spreads = [record for entry in found for record in entry["spreads"]]
    exact = {
        (record["run"], *(record[name] for name in setting)): record
        for record in spreads
        if record["kernel"] == "exact"
    }
    for record in spreads:
        beside = exact.get((record["run"], *(record[name] for name in setting)))
        # A fluctuation that moves no item leaves rounding, of which no ratio says anything.
        if beside is not None and min(beside["total"], beside["error"]) > _ROUNDING:
            record["total_ratio"] = record["total"] / beside["total"]
            record["fixed_sketch_ratio"] = (record["over_fluctuations"] or 0) / beside["total"]
            record["error_ratio"] = record["error"] / beside["error"]
    parts_of = ["over_fluctuations", "over_sketches", "total", "error"]
    ratios = ["fixed_sketch_ratio", "total_ratio", "error_ratio"]
    by = [*setting, "kernel"]
    joined = join_records(spreads, by=by, values=[*parts_of, *ratios, "precision", "forget_items"])
    slopes = join_records(
        [record for entry in found for record in entry["slopes"]],
        by=["end", "size"],
        values=["sigma", "slope", "by_noise"],
    )
    boundary = [record for entry in found for record in entry["boundary"]]
    powers = {
        (end, name): _power(
            {e["size"]: e[name]["mean"] for e in slopes if e["end"] == end and e[name]}
        )
        for end in ("forget", "retain")
        for name in ("slope", "sigma")
    }
    write_json(
        out / "variance.json",
        {
            "spreads": joined,
            "slopes": slopes,
            "boundary": boundary,
            "exponents": {" ".join(key): value for key, value in powers.items()},
        },
    )

    def shown(rule: str, retain: str) -> list[dict[str, Any]]:
        return [e for e in joined if e["rule"] == rule and e["retain"] == retain]

    text = [
        "Variances and errors are sums over coordinates, in units of the target's |Delta|^2; "
        "ratios are to the exact kernel's under the same fluctuation. Mean [least, largest] over "
        "corpora.",
    ]
    for rule in ("threshold", "count"):
        for retain in ("antipodal", "random", "none"):
            text.append(f"## Sets by {rule}, retain set: {retain}")
            text.append(
                _table(
                    shown(rule, retain),
                    ["fluctuation", "moved", "kernel"],
                    [*parts_of, *ratios, "precision"],
                )
            )
    text += [
        "## Slope of selection in the exact score",
        _table(slopes, ["end", "size"], ["sigma", "slope", "by_noise"]),
        "Fitted exponents of K: "
        + ", ".join(
            f"{name} at the {end} end {value:+.2f}" for (end, name), value in powers.items()
        )
        + ". The paper's claim is -0.5 for the slope.",
        "## Boundary",
        tables.render_markdown(
            tables.Table(
                tuple(tables.Column(name.replace("_", " ")) for name in boundary[0]),
                tuple(
                    tuple(v if isinstance(v, str) else format(v, ".4g") for v in entry.values())
                    for entry in boundary
                ),
            )
        ),
    ]
    write_text(out / "variance.md", "\n\n".join(text) + "\n")
    write_figures(joined, slopes, found, out)


def write_figures(
    joined: Sequence[Mapping[str, Any]],
    slopes: Sequence[Mapping[str, Any]],
    found: Sequence[Mapping[str, Any]],
    out: pathlib.Path,
) -> None:
    """Writes the figures, each as PNG and SVG."""
    panels: dict[str, dict[str, list[Any]]] = {}
    for entry in joined:
        is_shown = entry["retain"] == "antipodal" and entry["rule"] == "threshold"
        if not is_shown or entry["kernel"] == "exact" or not entry["moved"]:
            continue
        curves = panels.setdefault(f"fluctuation: {entry['fluctuation']}", {})
        label = f"|xi| = {entry['moved']:g} |q|"
        if entry["total_ratio"] is not None:
            curves.setdefault(label, []).append((float(entry["kernel"]), entry["total_ratio"]))
    figure = figures.draw_curves(
        panels, xlabel="K", ylabel="Var, sketched / Var, exact", log_x=True, log_y=True
    )
    figures.save_figure(figure, out / "variance")
    curves = {}
    for entry in slopes:
        for name, label in (("slope", "measured"), ("by_noise", "1 / (sigma sqrt(2 pi))")):
            if entry[name] is not None:
                curves.setdefault(f"{entry['end']}: {label}", []).append(
                    (float(entry["size"]), entry[name])
                )
    figure = figures.draw_curves(
        {"Slope of selection": curves},
        xlabel="K",
        ylabel="slope per unit of cosine",
        log_x=True,
        log_y=True,
    )
    figures.save_figure(figure, out / "slope")
    score_N = np.asarray(found[0]["scores"])
    forget, retain = found[0]["thresholds"]
    figure = figures.draw_boundary(
        score_N,
        forget_threshold=forget,
        retain_threshold=retain,
        gamma=_GAMMA.value,
        xlabel="cosine with the query",
    )
    figures.save_figure(figure, out / "boundary")
    scale = float(np.abs(score_N).max())
    figure = figures.draw_boundary(
        score_N / scale,
        forget_threshold=forget / scale,
        retain_threshold=retain / scale,
        gamma=_GAMMA.value,
        xlabel="score, scaled to [-1, 1]",
    )
    figures.save_figure(figure, out / "boundary_scaled")


def main() -> None:
    command.require("matplotlib")
    out = pathlib.Path(_OUT.value)
    logging.set_verbosity(logging.WARNING)
    names = [pathlib.Path(run).name for run in _RUNS.value] or [
        f"planted-{seed}" for seed in range(_SYNTHETIC.value)
    ]
    if len(set(names)) < len(names):
        raise ValueError(
            f"--runs must have different names, got {shown(','.join(names))}: each has its folder "
            "of that name in --out"
        )
    for number, name in enumerate(names):
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        if _REPORT_ONLY.value:
            continue
        print(name, flush=True)
        material = (
            run_material(pathlib.Path(_RUNS.value[number]), out)
            if _RUNS.value
            else planted_material(number)
        )
        write_json(folder / "variance_draws.json", measure(material))
    found = [read_json(out / name / "variance_draws.json") for name in names]
    write_report(found, out)
    print((out / "variance.md").read_text())


if __name__ == "__main__":
    command.start(main)
