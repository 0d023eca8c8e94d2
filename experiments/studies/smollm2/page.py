"""Makes the tables of docs/studies/smollm2.md from the stored runs."""

import pathlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from experiments.studies.reports import markdown_table
from raslik_jax.base.files import read_json
from raslik_jax.report import results
from raslik_jax.report.names import algorithm_name, strategy_name
from raslik_jax.report.tables import Table, render_markdown
from raslik_jax.run.artifacts import read_metrics

HERE = pathlib.Path(__file__).resolve().parent
_SEEDS = ("seed-0", "seed-1")
_Metrics = Mapping[str, Any]


def _tests() -> list[_Metrics]:
    return [read_metrics(HERE / seed / "test") for seed in _SEEDS]


def summary_table() -> str:
    """Returns the distance and Non-SF of every strategy and algorithm, a number for each seed.

    A dagger marks a damaged model. The last column counts the models with the whole interval of F
    minus F of Random below zero.
    """
    tests = _tests()
    found = [{(m["strategy"], m["algorithm"]): m for m in test["methods"]} for test in tests]
    algorithms = list(dict.fromkeys(name for _, name in found[0]))
    columns = [(name, kind) for name in algorithms for kind in ("distance", "Non-SF")]
    rows = []
    for strategy in dict.fromkeys(name for name, _ in found[0]):
        sets = [test["retrieval"][strategy]["selection"]["forget"]["targets"] for test in tests]
        cells = [", ".join(map(str, sets))]
        for name, kind in columns:
            models = [one[strategy, name] for one in found]
            marks = ["†" if m["judgment"]["verdict"] == "damaged" else "" for m in models]
            values = [
                m["euclidean"] if kind == "distance" else m["non_sf_target"]["mean"] for m in models
            ]
            pairs = zip(values, marks, strict=True)
            cells.append(", ".join(f"{value:.3f}{mark}" for value, mark in pairs))
        less = [one[strategy, name]["forget_minus_random"] for one in found for name in algorithms]
        below = sum(entry["high"] < 0 for entry in less if entry)
        cells.append(f"{below} of {len(less)}" if any(less) else "-")
        rows.append([strategy_name(strategy), *cells])
    titles = [f"{algorithm_name(name)}, {kind}" for name, kind in columns]
    return markdown_table(["sets", "targets of 64", *titles, "F below Random"], rows)


def choice_table() -> str:
    """Returns the learning rate and epoch that the rule chose, and its distance on validation."""
    made = [read_json(HERE / seed / "choice.json")["choices"] for seed in _SEEDS]
    rows = []
    for chosen in zip(*made, strict=True):
        sets = strategy_name(chosen[0]["strategy"]), algorithm_name(chosen[0]["algorithm"])
        rows.append(
            [
                *sets,
                *(f"{c['learning_rate']:g}, {c['epoch']}, {c['distance']:.3f}" for c in chosen),
            ]
        )
    return markdown_table(["sets", "algorithm", *_SEEDS], rows)


def page_tables() -> Mapping[str, Callable[[], str]]:
    """Returns what makes the tables of the study, by name."""

    def shown(name: str, make: Callable[[_Metrics], Table | None]) -> str:
        return render_markdown(make(read_metrics(HERE / name)))

    made: dict[str, Callable[[], str]] = {
        "summary": summary_table,
        "learning rate, epoch and distance that the rule chose": choice_table,
        "both seeds": lambda: render_markdown(results.seeds_table(_tests())),
    }
    kinds: dict[str, Callable[[_Metrics], Table | None]] = {
        "retrieval": results.retrieval_table,
        "results": results.results_table,
        "damage": results.checks_table,
        "perplexity": partial(results.measured_table, group="perplexity"),
    }
    for seed in _SEEDS:
        for kind, make in kinds.items():
            made[f"{kind}, {seed}"] = partial(shown, f"{seed}/test", make)
    for kind in ("retrieval", "results"):
        made[f"{kind}, the smallest cell"] = partial(shown, "smallest", kinds[kind])
    return made
