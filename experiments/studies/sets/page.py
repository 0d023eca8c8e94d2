"""Makes the tables of docs/studies/sets.md from the stored results."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.studies.reports import markdown_table
from experiments.studies.sets import report

SMOLLM2 = report.HERE / "smollm2"
ASCENT = ("ga_gdr", "npo_klr", "ga_klr")
OBJECTIVES = ("base_klr", *ASCENT)
# Folders with strategies that were measured later, all objectives in one file.
ADDED = ("weighted", "retain", "baselines")
_COMPARED = ("coverage", "raslik")
_RESAMPLES = 2000
_TITLES = {
    "raslik": "RASLIK",
    "raslik_f_anywhere": "RASLIK, random retain set",
    "coverage": "`coverage`",
    "weighted": "`weighted`",
    "bm25": "BM25",
    "embedding": "Embedding",
    "oracle_anywhere": "Oracle",
    "random_anywhere": "Random",
}


class Reading(NamedTuple):
    """Stored results that are compared with each other.

    Attributes:
      objectives: objectives to average.
      added: folders of later strategies, joined to those of the objectives.
      split: split of the queries.
      seeds: seeds to read, or all.
      compared: strategies that are compared with others.
      folder: folder in place of those of the objectives.
      kept: whether each run has one model, which the stop rule kept.
    """

    objectives: Sequence[str]
    added: Sequence[str] = ()
    split: str = "test"
    seeds: Sequence[int] = ()
    compared: Sequence[str] = _COMPARED
    folder: str = ""
    kept: bool = False

    def runs(self) -> list[dict[str, Any]]:
        """Returns the stored runs, joined over objectives and strategies."""
        found = []
        for objective in self.objectives:
            own = self.folder or objective.replace("base_klr", "")
            for folder in (own, *self.added):
                found += report.read_results(
                    SMOLLM2 / folder, objective=objective, seeds=self.seeds
                )
        return report.join_paths([run for run in found if run["split"] == self.split])


READINGS = {
    "BASE_KLR, validation queries, seed 0": Reading(OBJECTIVES[:1], split="validation"),
    "BASE_KLR, test queries": Reading(OBJECTIVES[:1]),
    **{f"{one.upper()}, test queries": Reading((one,)) for one in ASCENT},
    **{
        f"{one.upper()}, test queries, seeds 1 and 2": Reading((one,), seeds=(1, 2))
        for one in ASCENT
    },
    **{
        f"{one.upper()}, validation queries, seed 0": Reading((one,), split="validation")
        for one in ASCENT
    },
    "objectives with ascent, validation queries, seed 0": Reading(ASCENT, split="validation"),
    "all objectives, test queries": Reading(OBJECTIVES),
    "all objectives, test queries, seeds 1 and 2": Reading(OBJECTIVES, seeds=(1, 2)),
    "`weighted`, objectives with ascent": Reading(ASCENT, ADDED[:1], compared=("weighted",)),
    "`weighted`, objectives with ascent, seeds 1 and 2": Reading(
        ASCENT, ADDED[:1], seeds=(1, 2), compared=("weighted",)
    ),
    "`weighted`, all objectives": Reading(OBJECTIVES, ADDED[:1], compared=("weighted",)),
    "`weighted`, all objectives, seeds 1 and 2": Reading(
        OBJECTIVES, ADDED[:1], seeds=(1, 2), compared=("weighted",)
    ),
    **{
        f"the retain set, Embedding and Random, {title}": Reading(
            objectives, ADDED, compared=(report.RANDOM_RETAIN, "embedding", "random_anywhere")
        )
        for title, objectives in {
            "objectives with ascent": ASCENT,
            "all objectives": OBJECTIVES,
        }.items()
    },
    "Howdy and TOFU, BASE_KLR": Reading(("base_klr",), folder="mixtures"),
    "Howdy and TOFU, NPO_KLR": Reading(("npo_klr",), folder="mixtures"),
    "five behaviors, Howdy and TOFU, BASE_KLR": Reading(("base_klr",), ("mixtures",)),
    "the step that the stop rule keeps, BASE_KLR, seed 0": Reading(
        ("base_klr",), folder="stop", kept=True
    ),
}


def reading_tables(reading: Reading) -> str:
    """Returns all tables of a reading, with captions."""
    runs = reading.runs()
    figure = "Distance of the kept model" if reading.kept else "Hypervolume"
    captions = [figure, "Difference to others, paired"]
    if all("backbone_shown" in run for run in runs):
        captions += [f"{one}, by the share that shows the behavior" for one in tuple(captions)]
        captions.append("F, share that shows the behavior, and R after every epoch")
    else:
        captions.append("F and R after every epoch")
    captions.append("Targets to forget, targets to retain, rows to forget that RASLIK has too")
    made = report.tables(runs, reading.split, reading.compared, kept=reading.kept)
    lines = report.over_behaviors(runs, reading.split, reading.compared)
    texts = [f"{title}:\n\n{table}" for title, table in zip(captions, made, strict=False)]
    return "\n\n".join([*texts, *(line.replace("\n", "\n\n") for line in lines)])


def left_table() -> str:
    """Returns how many of Howdy's 21 target prompts get science fiction after NPO_KLR, by seed."""
    runs = Reading(("npo_klr",), folder="mixtures").runs()
    howdy = report.by_behavior(runs)["howdy"]
    rows = [
        [
            _TITLES[name.split()[0]],
            *(f"{sum(run['paths'][name]['shown'][-1]):.0f}" for run in howdy),
        ]
        for name in howdy[0]["paths"]
    ]
    return markdown_table(["sets", *(f"seed {run['seed']}" for run in howdy)], rows)


def _differences(runs: Sequence[Mapping[str, Any]], forget: str) -> Mapping[str, str]:
    """Returns RASLIK less each other strategy, with its bootstrap interval."""
    mean = report.by_strategy(report.volumes(runs, forget=forget))
    drawn = report.by_strategy(report.volumes(runs, forget=forget, resamples=_RESAMPLES))
    found = {}
    for name in mean:
        low, high = np.quantile(drawn["raslik"] - drawn[name], [0.025, 0.975])
        own = float(mean["raslik"][0] - mean[name][0])
        found[name] = f"{own:+.3f} [{low:+.3f}, {high:+.3f}]"
    return found


def summary_table() -> str:
    """Returns the hypervolumes of the page, and RASLIK's less those of the others."""
    runs = Reading(OBJECTIVES, ADDED).runs()
    volume = report.volumes(runs)
    parts = [OBJECTIVES[:1], ASCENT, OBJECTIVES]
    less, less_shown = (_differences(runs, forget) for forget in ("F", "shown"))
    rows = []
    for name, title in _TITLES.items():
        cells = [f"{np.mean([volume[f'{name} {one}'] for one in part]):.3f}" for part in parts]
        if name == "raslik":
            cells += ["-"] * 4
        else:
            found, _, above = report.behavior_differences(runs, "raslik", name).rpartition(", ")
            cells += [less[name], found.partition(" ")[2], above.removesuffix(" above")]
            cells.append(less_shown[name])
        rows.append([title, *cells])
    head = ["sets", "BASE_KLR", "ascent", "all four", "RASLIK minus this", "Student's interval"]
    return markdown_table([*head, "RASLIK is above in (behaviors)", "RASLIK minus this, by behavior shown"], rows)


def ends_table() -> str:
    """Returns R and F of the last models with a random retain set, less those of RASLIK."""
    runs = Reading(OBJECTIVES, ADDED).runs()
    rows = []
    for title, figure in {
        "R": lambda forget_E, retain_E, _: retain_E[-1],
        "F": lambda forget_E, *_: forget_E[-1],
    }.items():
        mean = report.by_strategy(report.volumes(runs, figure=figure))
        drawn = report.by_strategy(report.volumes(runs, figure=figure, resamples=_RESAMPLES))
        low, high = np.quantile(drawn[report.RANDOM_RETAIN] - drawn["raslik"], [0.025, 0.975])
        own = (mean[report.RANDOM_RETAIN] - mean["raslik"])[0]
        rows.append([title, f"{own:+.3f} [{low:+.3f}, {high:+.3f}]"])
    return markdown_table(["last model", "random retain set less RASLIK"], rows)


def objectives_table() -> str:
    """Returns each objective with ascent less BASE_KLR, with RASLIK's sets."""
    runs = Reading(OBJECTIVES).runs()
    rows = []
    for objective in ASCENT:
        cells = []
        for forget in ("F", "shown"):
            mean = report.volumes(runs, forget=forget)
            drawn = report.volumes(runs, forget=forget, resamples=_RESAMPLES)
            names = f"raslik {objective}", f"raslik {OBJECTIVES[0]}"
            low, high = np.quantile(drawn[names[0]] - drawn[names[1]], [0.025, 0.975])
            own = float((mean[names[0]] - mean[names[1]])[0])
            cells.append(f"{own:+.3f} [{low:+.3f}, {high:+.3f}]")
        rows.append([objective, *cells])
    return markdown_table(["less base_klr", "by F", "by the share that shows the behavior"], rows)


def one_left_out_table() -> str:
    """Returns RASLIK less the Oracle without French of seed 0, where the Oracle's draw failed."""
    runs = Reading(OBJECTIVES).runs()
    runs = [run for run in runs if (run["name"], run["seed"]) != ("language", 0)]
    less = _differences(runs, "F")["oracle_anywhere"]
    return markdown_table(["RASLIK less the Oracle"], [[less]])


def seeds_table() -> str:
    """Returns F of the wrong fact after the last step of GA_KLR, by seed."""
    found = [run for run in Reading(("ga_klr",), ADDED[:1]).runs() if run["name"] == "wrong_fact"]
    rows = [
        [_TITLES[one], *(f"{np.mean(run['paths'][f'{one} ga_klr']['F'][-1]):.2f}" for run in found)]
        for one in ("raslik", "weighted")
    ]
    return markdown_table(["sets", *(f"seed {run['seed']}" for run in found)], rows)


def _toy_tables() -> dict[str, Callable[[], str]]:
    """Returns what makes the tables of the toy, by name."""

    @functools.cache
    def made(split: str) -> list[str]:
        return report.tables(report.read_results(report.HERE), split)

    def table(split: str, place: int) -> Callable[[], str]:
        return lambda: made(split)[place]

    names = {"hypervolume": 0, "difference to others, paired": 1}
    return {
        f"toy: {name}, {split} queries": table(split, place)
        for split in ("validation", "test")
        for name, place in names.items()
    }


def page_tables() -> Mapping[str, Callable[[], str]]:
    """Returns what makes the tables of the study, by name."""

    def all_of(reading: Reading) -> Callable[[], str]:
        return lambda: reading_tables(reading)

    return {
        "summary": summary_table,
        **{name: all_of(reading) for name, reading in READINGS.items()},
        "Howdy's prompts that get science fiction after NPO_KLR, of 21": left_table,
        "the last models with a random retain set": ends_table,
        "objectives with RASLIK's sets, test queries": objectives_table,
        "all objectives, test queries, without French of seed 0": one_left_out_table,
        "F of the wrong fact after 12 steps of GA_KLR": seeds_table,
        **_toy_tables(),
    }
