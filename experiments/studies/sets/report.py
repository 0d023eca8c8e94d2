"""Compares whole frontiers of strategies, from the runs of a suite of sets_toy or sets_smollm2.

  python experiments/studies/sets/report.py --runs=RUN,RUN --out=results.jsonl
  python experiments/studies/sets/report.py --results=FOLDER,FOLDER --chosen=STRATEGY,STRATEGY

The first command stores the ROUGE-L F1 of each answer of every unlearned model with the answer
before unlearning. For a behavior of own_model it also stores whether the answer shows it. The
second command prints tables of stored results. Objectives of several folders are averaged. With
--kept each run has one model. The tables then have its distance to R = 1 and F = the backbone's in
place of hypervolumes. `make tables` writes the tables of the pages (page.py).
"""

import dataclasses
import json
import pathlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from experiments.studies.own_model import measure
from raslik_jax.base.files import read_json_lines, write_text
from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command
from raslik_jax.config import to_json
from raslik_jax.report.names import kernel_name
from raslik_jax.data.corpora.toy import SCIFI_WORDS
from raslik_jax.data.examples import Example

HERE = pathlib.Path(__file__).resolve().parent
# What the rule chooses from; the last one on SmolLM2 alone.
NEW = ("action", "two_stage", "coverage", "mixed", "protect", "trial", "weighted")
AGAINST = ("raslik", "bm25", "oracle_anywhere")
PAPER = "raslik_paper"  # RASLIK with the gradient as the paper words it
RANDOM_RETAIN = "raslik_f_anywhere"  # RASLIK's rows to forget, with a random retain set
SMOLLM2 = "sets_smollm2_"  # before a behavior, the name of a run
_RESAMPLES = 2000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """What is read, and where it goes."""

    runs: tuple[str, ...] = setting((), "Work directories of one query split, a seed each.")
    out: str = setting("", "File of the results of these runs.")
    strategies: tuple[str, ...] = setting((), "Store these strategies of the runs alone.")
    results: tuple[str, ...] = setting((str(HERE),), "Folders of the stored results.")
    objective: str = setting("", "Read the paths of this objective alone.")
    seeds: tuple[int, ...] = setting((), "Read these seeds alone.")
    kept: bool = setting(False, "Compare the model that the stop rule kept.")
    chosen: tuple[str, ...] = setting(
        (), "Strategies that are compared with others on test queries; without, by the rule."
    )


def hypervolume(
    forget_E: Float[np.ndarray, "E ..."], retain_E: Float[np.ndarray, "E ..."], floor: Any
) -> Float[np.ndarray, "..."]:
    """Returns the mean over forget rates f from a floor to 1 of the best R of a model with F <= f.

    F below the floor counts as at it; R is 0 where no model is. The model before unlearning is at
    F = 1, so that it adds nothing.
    """
    forget_E = np.clip(forget_E, floor, 1.0)
    order = np.argsort(forget_E, axis=0, kind="stable")
    forget_E = np.take_along_axis(forget_E, order, axis=0)
    best_E = np.maximum.accumulate(np.take_along_axis(retain_E, order, axis=0), axis=0)
    end_E = np.concatenate([forget_E[1:], np.ones_like(forget_E[:1])])
    return ((end_E - forget_E) * best_E).sum(axis=0) / (1 - floor)


def distance(
    forget_E: Float[np.ndarray, "E ..."], retain_E: Float[np.ndarray, "E ..."], floor: Any
) -> Float[np.ndarray, "..."]:
    """Returns how far the last model is from R = 1, F = the floor; F below it counts as at it."""
    return np.hypot(np.maximum(forget_E[-1] - floor, 0), 1 - retain_E[-1])


def measure_run(root: pathlib.Path, strategies: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the scores of every query of a run, [epochs, queries] by strategy and objective.

    With strategies, only these are scored.
    """
    from raslik_jax.evaluate import rates
    from raslik_jax.run import artifacts
    from raslik_jax.run.plan import open_run

    workspace = open_run(root, "evaluate")
    config, (target, normal) = workspace.config, workspace.evaluation_queries()
    before = artifacts.answers("finetuned").read(root)
    behavior = config.name.removeprefix(SMOLLM2)
    marker = markers().get(behavior)
    strategies = strategies or config.retrieve.strategies
    names = {one: stored_name(one, to_json(config)) for one in strategies}

    def alike(answers: Mapping[str, str], rows: Sequence[Example]) -> list[float]:
        pairs = [(answers[row.example_id], before[row.example_id]) for row in rows]
        return [round(rates.rouge_l_f1(*pair), 4) for pair in pairs]

    def score(answers: Mapping[str, str]) -> dict[str, list[float]]:
        found = {"F": alike(answers, target), "R": alike(answers, normal)}
        if marker:
            found["shown"] = [float(bool(marker.search(answers[r.example_id]))) for r in target]
        return found

    paths = {}
    for strategy in strategies:
        for name in config.unlearn.algorithms:
            variant = artifacts.Variant(strategy, name)
            found = [
                score(artifacts.answers(epoch, variant).read(root))
                for epoch in workspace.epochs(strategy, name)
            ]
            scores = {kind: [one[kind] for one in found] for kind in found[0]}
            paths[f"{names[strategy]} {name}"] = scores
    backbone = score(artifacts.answers("backbone").read(root))
    split = workspace.query_split
    told: dict[str, Any] = {"seed": config.seed, "split": split, "backbone": backbone["F"]}
    if behavior != config.name:
        told |= {"name": behavior, "sets": {names[one]: read_sets(root, one) for one in strategies}}
    if marker:
        told["backbone_shown"] = backbone["shown"]
    if behavior in measure.behaviors():  # prompts of our own
        asked = {"target": target, "normal": normal}
        told["prompts"] = {kind: [row.instruction for row in rows] for kind, rows in asked.items()}
    return told | {"paths": paths}


def stored_name(strategy: str, settings: Mapping[str, Any]) -> str:
    """Returns a strategy's name in the results: RASLIK with the paper's gradient has its own."""
    return PAPER if strategy == "raslik" and not kernel_name(settings) else strategy


def markers() -> dict[str, re.Pattern[str]]:
    """Returns what shows a behavior in an answer: of Howdy a word of science fiction."""
    words = "|".join(map(re.escape, sorted(SCIFI_WORDS)))
    return {**measure.behaviors(), "howdy": re.compile(rf"\b({words})\b", re.IGNORECASE)}


def read_sets(root: pathlib.Path, strategy: str) -> dict[str, list[str]]:
    """Returns the places in the corpus of the rows in both sets, a star behind those of targets."""
    return {
        kind: [
            f"{row['place']}{'*' if row['is_target'] else ''}"
            for row in read_json_lines(root / "retrieve" / strategy / f"{kind}.jsonl", dict)
        ]
        for kind in ("forget", "retain")
    }


def volumes(
    runs: Sequence[Mapping[str, Any]],
    *,
    resamples: int = 0,
    forget: str = "F",
    figure: Callable[..., np.ndarray] = hypervolume,
) -> dict[str, Float[np.ndarray, " D"]]:
    """Returns the mean `figure` over runs by strategy and objective, or bootstrap draws of it.

    A draw has behaviors (seeds if the runs have none), seeds of a behavior, and target and normal
    queries. Seeds of a behavior share their queries. All paths have the same draws. Without
    resamples the value itself is returned. `forget` names what should fall: F, or the share of
    answers that show the behavior.
    """
    start = {"F": "backbone", "shown": "backbone_shown"}[forget]
    groups = by_behavior(runs)
    generator, count = np.random.default_rng(0), len(groups)
    picked_DG = np.tile(np.arange(count), (max(resamples, 1), 1))
    if resamples:
        picked_DG = generator.integers(count, size=(resamples, count))

    def drawn_shares(size: int) -> Float[np.ndarray, "D M"]:
        if not resamples or size == 1:
            return np.full((len(picked_DG), size), 1 / size)
        return generator.multinomial(size, np.full(size, 1 / size), len(picked_DG)) / size

    total: dict[str, np.ndarray] = {}
    for place in range(count):
        for number, group in enumerate(groups.values()):
            is_picked_D = picked_DG[:, place] == number
            sizes = len(group[0][start]), len(next(iter(group[0]["paths"].values()))["R"][0])
            weights = [drawn_shares(size) for size in sizes]
            share_DS = drawn_shares(len(group))
            for run, share_D in zip(group, share_DS.T, strict=True):
                floor_D = weights[0] @ np.asarray(run[start])
                for name, path in run["paths"].items():
                    forget_ED, retain_ED = (
                        np.asarray(path[kind]) @ weight_DQ.T
                        for kind, weight_DQ in zip((forget, "R"), weights, strict=True)
                    )
                    own_D = share_D * figure(forget_ED, retain_ED, floor_D)
                    total[name] = total.get(name, 0.0) + np.where(is_picked_D, own_D, 0.0) / count
    return total


def by_behavior(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Returns runs by behavior, one for each seed; by seed where they have no behavior."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        groups.setdefault(run.get("name", f"seed {run['seed']}"), []).append(run)
    return groups


def by_strategy(volume: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the mean over objectives."""
    names = dict.fromkeys(key.split()[0] for key in volume)
    return {
        name: np.mean([value for key, value in volume.items() if key.split()[0] == name], axis=0)
        for name in names
    }


def choose(runs: Sequence[Mapping[str, Any]]) -> str:
    """Returns the one of the new strategies that the rule of docs/studies/sets.md takes."""
    mean = by_strategy(volumes([run for run in runs if run["split"] == "validation"]))
    return max((name for name in NEW if name in mean), key=lambda name: float(mean[name][0]))


def volume_table(runs: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Returns the figure of every strategy by objective or behavior, and its mean with an interval.

    `options` are those of `volumes`.
    """
    value = volumes(runs, **options)
    drawn = by_strategy(volumes(runs, resamples=_RESAMPLES, **options))
    columns = {
        title: {key.split()[0]: found for key, found in value.items() if key.split()[1] == title}
        for title in dict.fromkeys(key.split()[1] for key in value)
    }
    if "name" in runs[0]:
        columns = {
            name: by_strategy(volumes(group, **options))
            for name, group in by_behavior(runs).items()
        }
    lines = ["| strategy | " + " | ".join([*columns, "mean"]) + " |"]
    lines.append("|---|" + "--:|" * (len(columns) + 1))
    mean = by_strategy(value)
    for name in sorted(mean, key=lambda one: -mean[one][0]):
        cells = [f"{column[name][0]:.3f}" for column in columns.values()]
        low, high = np.quantile(drawn[name], [0.025, 0.975])
        cells.append(f"{mean[name][0]:.3f} [{low:.3f}, {high:.3f}]")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def difference_table(
    runs: Sequence[Mapping[str, Any]], chosen: Sequence[str], **options: Any
) -> str:
    """Returns the paired differences of strategies and others, with their intervals."""
    mean = by_strategy(volumes(runs, **options))
    drawn = by_strategy(volumes(runs, resamples=_RESAMPLES, **options))
    lines = ["| strategy | " + " | ".join(f"less {name}" for name in AGAINST) + " |"]
    lines.append("|---|" + "--:|" * len(AGAINST))
    for name in chosen:
        cells = []
        for other in AGAINST:
            low, high = np.quantile(drawn[name] - drawn[other], [0.025, 0.975])
            cells.append(f"{float(mean[name][0] - mean[other][0]):+.3f} [{low:+.3f}, {high:+.3f}]")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def behavior_differences(runs: Sequence[Mapping[str, Any]], name: str, other: str) -> str:
    """Returns the difference of two strategies with Student's interval over means of behaviors.

    Behind it the number of behaviors in which it is above zero. A percentile interval over five
    behaviors is too narrow (`rates.coverage`); Student's takes their means for normal.
    """
    from scipy import stats

    less_B = []
    for group in by_behavior(runs).values():
        mean = by_strategy(volumes(group))
        less_B.append(float(mean[name][0] - mean[other][0]))
    own, error = float(np.mean(less_B)), float(stats.sem(less_B))
    low, high = stats.t.interval(0.95, len(less_B) - 1, own, error)
    above = f"{sum(less > 0 for less in less_B)} of {len(less_B)} above"
    return f"{own:+.3f} [{low:+.3f}, {high:+.3f}], {above}"


def course_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Returns F, the share that shows the behavior and R after every epoch: means over runs.

    The share is left out where answers have no marker.
    """
    paths = runs[0]["paths"]
    kinds = ("F", "shown", "R") if all("backbone_shown" in run for run in runs) else ("F", "R")
    epochs = range(len(next(iter(paths.values()))["F"]))
    lines = ["| strategy | " + " | ".join(f"epoch {epoch + 1}" for epoch in epochs) + " |"]
    lines.append("|---|" + "--:|" * len(epochs))
    for name in paths:
        cells = []
        for epoch in epochs:
            of_runs = [run["paths"][name] for run in runs]
            means = [np.mean([np.mean(path[kind][epoch]) for path in of_runs]) for kind in kinds]
            cells.append(", ".join(f"{mean:.2f}" for mean in means))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def sets_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Returns the targets in both sets, and how many rows to forget RASLIK has too."""
    lines = ["| strategy | " + " | ".join(run["name"] for run in runs) + " |"]
    lines.append("|---|" + "--:|" * len(runs))
    for name in runs[0]["sets"]:
        cells = []
        for run in runs:
            sets = run["sets"][name]
            counts = [sum("*" in row for row in sets[kind]) for kind in ("forget", "retain")]
            counts.append(len({*sets["forget"]} & {*run["sets"]["raslik"]["forget"]}))
            cells.append(", ".join(map(str, counts)))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def read_results(
    folder: str | pathlib.Path = HERE, *, objective: str = "", seeds: Sequence[int] = ()
) -> list[dict[str, Any]]:
    """Returns the stored results of all splits, and seeds or behaviors.

    With an objective or seeds, those of these alone.
    """
    runs = [
        json.loads(line)
        for path in sorted(pathlib.Path(folder).glob("*.jsonl"))
        for line in path.read_text("utf-8").splitlines()
    ]
    for run in runs:
        paths = run["paths"].items()
        run["paths"] = {name: path for name, path in paths if name.endswith(objective)}
    return [run for run in runs if run["paths"] and (not seeds or run["seed"] in seeds)]


def join_paths(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the results with all paths of one behavior, seed and split joined."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for run in results:
        key = run.get("name"), run["seed"], run["split"]
        earlier = found.setdefault(key, {**run, "paths": {}})
        is_same = earlier["backbone"] == run["backbone"]
        if not is_same or earlier["paths"].keys() & run["paths"].keys():
            raise ValueError(
                f"results of {key[0] or 'a run'}, seed {key[1]}, must have the same answers "
                "before unlearning and different paths, got two that do not: name other folders"
            )
        earlier["paths"] |= run["paths"]
    return list(found.values())


def tables(
    results: Sequence[Mapping[str, Any]],
    split: str,
    chosen: Sequence[str] = (),
    *,
    kept: bool = False,
) -> list[str]:
    """Returns the tables of a split, none without results."""
    runs = [run for run in results if run["split"] == split]
    if not runs:
        return []
    compared = chosen or [choose(results)]
    if split == "validation":
        names = {key.split()[0] for key in runs[0]["paths"]}
        compared = [name for name in (*NEW, RANDOM_RETAIN) if name in names]
    options: dict[str, Any] = {"figure": distance} if kept else {}
    found = [volume_table(runs, **options), difference_table(runs, compared, **options)]
    if all("backbone_shown" in run for run in runs):
        options["forget"] = "shown"
        found += [volume_table(runs, **options), difference_table(runs, compared, **options)]
    if "name" in runs[0]:
        found.append(course_table(runs))
        found += [sets_table(runs)] if split == "validation" else []
    return found


def over_behaviors(
    results: Sequence[Mapping[str, Any]], split: str, chosen: Sequence[str]
) -> list[str]:
    """Returns a line for each strategy and each that it is compared with, of several behaviors."""
    runs = [run for run in results if run["split"] == split and "name" in run]
    if len(by_behavior(runs)) < 2:
        return []
    lines = [
        f"{name} less {other}, Student's interval over behaviors: "
        f"{behavior_differences(runs, name, other)}"
        for name in chosen
        for other in AGAINST
        if name != other
    ]
    return ["\n".join(lines)] if lines else []


def main(options: Options) -> None:
    """Stores results of runs, or prints the tables of the stored ones."""
    if options.runs:
        found = [measure_run(pathlib.Path(run), options.strategies) for run in options.runs]
        write_text(options.out, "".join(json.dumps(one) + "\n" for one in found))
        return
    read: dict[str, Any] = {"objective": options.objective, "seeds": options.seeds}
    results = join_paths([run for one in options.results for run in read_results(one, **read)])
    for split in ("validation", "test"):
        names = by_behavior([run for run in results if run["split"] == split])
        if names:
            print(
                "\n\n".join(
                    [
                        f"{split}: {', '.join(names)}",
                        *tables(results, split, options.chosen, kept=options.kept),
                        *over_behaviors(results, split, options.chosen),
                        "",
                    ]
                )
            )


if __name__ == "__main__":
    command.start(main, Options())
