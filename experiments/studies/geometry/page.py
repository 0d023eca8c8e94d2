"""Makes the figure and the tables of docs/studies/geometry.md again, from the stored results.

  python experiments/studies/geometry/page.py --out=docs

The command writes geometry.png. `--store=FILE` copies a results.npz to this folder first.
`make tables` writes the tables.
"""

import dataclasses
import pathlib
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from experiments.studies.geometry.measure import HERE, KINDS, PREDICTORS, RATES, RETAIN, STEPS
from experiments.studies.reports import markdown_table
from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command

RESULTS = HERE / "results.npz"
_RESAMPLES = 400
# What the figure shows: what an index could say, and what a run up to there could.
_SHOWN = {
    "sets, start": ("#D55E00", "o"),
    "sets, curved": ("#E69F00", "v"),
    "sets, path": ("#009E73", "D"),
    "way, start": ("#CC79A7", "P"),
    "way, curved": ("#56B4E9", "s"),
    "way, path": ("#0072B2", "^"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """Where the figure goes, and what is stored."""

    out: str = setting("docs", "Folder of the figure.")
    store: str = setting("", "A results.npz to store first.")


class Path(NamedTuple):
    """A path of unlearning: its settings, and its arrays [steps, rows] by quantity."""

    seed: int
    retain: str
    objective: str
    rate: float
    found: dict[str, Float[np.ndarray, "S M"]]


def read_paths(path: pathlib.Path = RESULTS) -> list[Path]:
    """Returns the stored paths."""
    found: dict[str, dict[str, np.ndarray]] = {}
    with np.load(path, allow_pickle=False) as stored:
        for name in stored:
            key, quantity = name.split("/")
            found.setdefault(key, {})[quantity] = stored[name].astype(np.float64)
    split = ((key.split(" "), arrays) for key, arrays in found.items())
    return [
        Path(int(seed), retain, objective, float(rate), part)
        for (seed, retain, objective, rate), part in split
    ]


def of_rates(paths: Sequence[Path], place: int) -> list[Path]:
    """Returns the paths with antipodal retain sets at the lower (0) or higher (1) rates."""
    kept = (one for one in paths if one.retain == RETAIN[0])
    return [one for one in kept if np.isclose(one.rate, RATES[one.objective][place])]


def correlation(one: Float[np.ndarray, "... M"], other: Float[np.ndarray, "... M"]) -> np.ndarray:
    """Returns Pearson's correlation over the last axis; 0 where one does not vary."""
    one, other = (part - part.mean(axis=-1, keepdims=True) for part in (one, other))
    spread = np.sqrt((one**2).sum(axis=-1) * (other**2).sum(axis=-1))
    return (one * other).sum(axis=-1) / np.where(spread > 0, spread, 1.0)


def slope(
    predicted: Float[np.ndarray, "... M"], measured: Float[np.ndarray, "... M"]
) -> np.ndarray:
    """Returns the factor that takes predictions nearest to what was measured, by least squares."""
    square = (predicted**2).sum(axis=-1)
    return (predicted * measured).sum(axis=-1) / np.where(square > 0, square, 1.0)


def judge(
    paths: Sequence[Path], statistic: Any, predictor: str, step: int, kind: str
) -> tuple[float, float, float]:
    """Returns the mean of a statistic over paths and its 95 % bootstrap interval.

    A draw has seeds with replacement and rows of each seed. All paths of a seed have the same rows.
    """
    place, count = STEPS.index(step), paths[0].found["measured"].shape[1] // len(KINDS)
    rows = slice(KINDS.index(kind) * count, (KINDS.index(kind) + 1) * count)
    seeds = sorted({one.seed for one in paths})
    pairs = {
        seed: np.array(
            [
                (one.found[predictor][place, rows], one.found["measured"][place, rows])
                for one in paths
                if one.seed == seed
            ]
        )
        for seed in seeds
    }
    generator = np.random.default_rng(0)
    drawn_DS = generator.choice(seeds, size=(_RESAMPLES, len(seeds)))
    total_D = np.zeros(_RESAMPLES)
    size_D = np.zeros(_RESAMPLES)
    for drawn_D in drawn_DS.T:
        for seed, part in pairs.items():
            part = part[..., generator.integers(count, size=(_RESAMPLES, count))]
            is_drawn_D = drawn_D == seed
            total_D += is_drawn_D * statistic(part[:, 0], part[:, 1]).sum(axis=0)
            size_D += is_drawn_D * len(part)
    whole = np.concatenate([statistic(part[:, 0], part[:, 1]) for part in pairs.values()])
    low, high = np.quantile(total_D / size_D, [0.025, 0.975])
    return float(whole.mean()), float(low), float(high)


def _known(paths: Sequence[Path], predictor: str, step: int) -> bool:
    return bool(np.isfinite(paths[0].found[predictor][STEPS.index(step)]).all())


def _cell(found: tuple[float, float, float]) -> str:
    return "{:.2f} [{:.2f}, {:.2f}]".format(*found)


def predictor_table(paths: Sequence[Path], statistic: Any, kind: str) -> str:
    """Returns a statistic of every predictor for a kind of rows, after each number of steps."""
    rows = []
    for predictor in PREDICTORS:
        cells = [
            _cell(judge(paths, statistic, predictor, step, kind))
            if _known(paths, predictor, step)
            else "-"
            for step in STEPS
        ]
        rows.append([predictor, *cells])
    return markdown_table(["predictor", *(f"{step} steps" for step in STEPS)], rows)


def objective_table(paths: Sequence[Path], step: int, predictors: Sequence[str]) -> str:
    """Returns the correlation after a step by objective, and the mean change that was measured."""
    rows = []
    for objective in RATES:
        own = [one for one in paths if one.objective == objective]
        for kind in KINDS if own else ():
            count = own[0].found["measured"].shape[1] // len(KINDS)
            part = slice(KINDS.index(kind) * count, (KINDS.index(kind) + 1) * count)
            mean = np.mean([one.found["measured"][STEPS.index(step), part] for one in own])
            cells = [_cell(judge(own, correlation, name, step, kind)) for name in predictors]
            rows.append([f"{objective}, {kind}", f"{mean:.3f}", *cells])
    return markdown_table([f"objective, rows, {step} steps", "nats", *predictors], rows)


def draw_correlations(paths: Sequence[Path], stem: pathlib.Path) -> None:
    """Draws the correlations over steps, a panel for each kind of rows."""
    from experiments.studies import curves
    from raslik_jax.report import drawing

    @drawing.styled
    def draw() -> Any:
        figure, panels = curves.make_axes((10, 3.4), len(KINDS), sharey=True)
        for axes, kind in zip(panels, KINDS, strict=True):
            for number, (name, (color, marker)) in enumerate(_SHOWN.items()):
                found = [judge(paths, correlation, name, step, kind) for step in STEPS]
                at = np.array(STEPS) * 1.06 ** (number - len(_SHOWN) / 2)
                mean, low, high = np.array(found).T
                axes.plot(at, mean, color=color, marker=marker, label=name, markersize=5)
                axes.vlines(at, low, high, color=color, linewidth=1)
            axes.set_xscale("log", base=4)
            axes.set_xticks(STEPS, [str(step) for step in STEPS])
            axes.axhline(0, color="0.6", linewidth=0.8)
            axes.set_title(kind)
            axes.set_xlabel("steps of unlearning")
        panels[0].set_ylabel("correlation over rows")
        panels[0].legend(loc="lower left", fontsize=8)
        return figure

    drawing.save_figure(draw(), stem)


# Predictors of the summary, as the page names them.
_SUMMARY = {
    "gradient at the start": "sets, start",
    "gradient and curvature at the start": "sets, curved",
    "gradient after 16 steps": "sets, late",
    "gradients at five points of the path": "sets, path",
    "trial of 16 steps, without a gradient": "trial",
}


def summary_table(paths: Sequence[Path]) -> str:
    """Returns the correlations of the page: five predictors, three kinds of rows, both rates."""
    low, high = of_rates(paths, 0), of_rates(paths, 1)
    columns: dict[str, tuple[Sequence[Path], int, str]] = {
        "queries, 16 steps": (low, 16, KINDS[0]),
        **{f"{kind}, 64 steps": (low, 64, kind) for kind in KINDS},
        f"{KINDS[0]}, 64 steps, higher rates": (high, 64, KINDS[0]),
    }
    rows = [
        [
            title,
            *(
                _cell(judge(part, correlation, name, step, kind))
                if _known(part, name, step)
                else "-"
                for part, step, kind in columns.values()
            ),
        ]
        for title, name in _SUMMARY.items()
    ]
    return markdown_table(["prediction", *columns], rows)


def page_tables() -> Mapping[str, Callable[[], str]]:
    """Returns what makes the tables of the study, by name."""
    paths = read_paths()
    low, high = of_rates(paths, 0), of_rates(paths, 1)
    drawn = [one for one in paths if one.retain == RETAIN[1]]
    shown = ("sets, start", "sets, late", "sets, path", "trial", "way, path")

    def predictors(part: Sequence[Path], statistic: Any, kind: str) -> Callable[[], str]:
        return lambda: predictor_table(part, statistic, kind)

    def objectives(part: Sequence[Path]) -> Callable[[], str]:
        return lambda: objective_table(part, STEPS[-1], shown)

    return {
        "summary": lambda: summary_table(paths),
        **{f"correlation, {kind}": predictors(low, correlation, kind) for kind in KINDS},
        "slope of measured on predicted, queries": predictors(low, slope, KINDS[0]),
        "by objective": objectives(low),
        "correlation, queries, higher rates": predictors(high, correlation, KINDS[0]),
        "slope, queries, higher rates": predictors(high, slope, KINDS[0]),
        "by objective, higher rates": objectives(high),
        "by objective, random retain sets": objectives(drawn),
    }


def main(options: Options) -> None:
    """Stores what is named, and writes the figure."""
    if options.store:
        shutil.copyfile(options.store, RESULTS)
    command.require("matplotlib")
    draw_correlations(of_rates(read_paths(), 0), pathlib.Path(options.out) / "geometry")
    (pathlib.Path(options.out) / "geometry.svg").unlink()


if __name__ == "__main__":
    command.start(main, Options())
