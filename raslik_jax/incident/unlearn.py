"""From the result of a trace to a clean adapter, its card and its report."""

import contextlib
import dataclasses
import importlib.util
import pathlib
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from raslik_jax.base.messages import one_line, shown
from raslik_jax.base.settings import flat, leaves, replaced
from raslik_jax.config import STAGES, Config, config_from_json, to_json
from raslik_jax.data.read.cleaning import cleaned_name, is_folder, write_without
from raslik_jax.data.words import refused
from raslik_jax.incident import configuring, making
from raslik_jax.incident.configuring import AGAIN, PRESET, UnlearnOptions, make_config, train_file
from raslik_jax.parallel import processes
from raslik_jax.report import rows as rows_lib
from raslik_jax.report.incident import key_of, read_outcome
from raslik_jax.run import artifacts, written
from raslik_jax.run.manifests import read_manifest
from raslik_jax.train.objectives import OBJECTIVES

# Prompts kept out whose answers are shown.
_ASKED = 4
# Settings that may change no unit: those of algorithms that repeat another, and the list of all.
_IDLE = "unlearn.algorithms", *(f"unlearn.{name}." for name in AGAIN)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnlearnResult(making.Result):
    """The result of unlearning; printed, it shows the outcome for the traced prompt.

    Attributes:
      folder: the place of the clean model with its card.
    """

    folder: pathlib.Path


def unlearn(options: UnlearnOptions | None = None, **named: Any) -> UnlearnResult:
    """Unlearns the rows of a trace, measures, and writes the clean adapter with its card.

    Options are those of `UnlearnOptions`, as an object or by name. Progress is printed.

    Example:
      print(raslik_jax.unlearn(run="runs/incident", out="clean"))
    """
    options = making.options_of(options or UnlearnOptions(), named)
    if not options.run or not (options.out or options.dry_run):
        raise ValueError("--run and --out must be given: give --run=WORKDIR and --out=DIR")
    root, folder = pathlib.Path(options.run), pathlib.Path(options.out)
    from raslik_jax.run import units  # it takes jax with it

    config = make_config(options)
    again = OBJECTIVES[config.unlearn.algorithms[0]].retrains
    if again and not isinstance(options, configuring.RecipeOptions):
        raise refused("retrain_unlearn")
    processes.alone(lambda: _check_unchanged(config, root))
    plan = units.Plan(root, _units(config, root)).survey()  # a stored finding may be out of date
    making.require_found(root, next(filter(None, map(plan.finding, plan.units.values())), ""))
    if options.dry_run:
        from raslik_jax.incident import advising

        text = "\n".join(advising.lines(options))
        return UnlearnResult(workdir=root, folder=folder, text=text)
    variant = artifacts.Variant(config.retrieve.strategies[0], config.unlearn.algorithms[0])
    source = train_file(config)
    cleaned = pathlib.Path(options.cleaned_train_file or root / cleaned_name(source))
    processes.alone(lambda: _check_places(options, source, cleaned))
    processes.alone(lambda: _check_used(config, root, options.settings))
    if kept := _kept(config, options.settings):
        print(f"settings of the run, from its trace or an earlier command: {' '.join(kept)}")
    described = processes.from_first(lambda: rows_lib.describe_sets(config, variant.strategy, root))
    print(f"sets: {described}")
    making.require("matplotlib")  # the report comes last, so a missing part of it is printed first
    how: Any = {"mesh": options.mesh, "update": True}
    first: Any = {"stages": [stage for stage in STAGES if stage != "report"], **how}
    why = making.make(config, root, prepare=lambda: drop_exports(root), **first)
    making.require_found(root, why)
    from raslik_jax.incident.exporting import export_model  # it takes jax with it

    kind = "model" if options.merged else "adapter"

    def export() -> str:
        with written.locked(root, "--run"):  # against a trace of another answer meanwhile
            with written.replacing(root, folder) as made:
                export_model(root, variant, made, epoch="last", merged=options.merged)
            told, exported = _clean(config, root, variant.strategy, cleaned)
            places = {"": key_of(root, *variant[:2]), f"New {kind}": str(folder.resolve())}
            written.write_json(root, artifacts.EXPORTS.place(root), places | exported)
        return told

    told = processes.alone(export)
    making.make(config, root, stages=("report",), **how)
    found = UnlearnResult(workdir=root, folder=folder)
    if not processes.is_first():
        return found
    lines = [*_outcome_lines(root, config, variant)] if config.evaluate.traced else []
    lines += [f"\n{kind} and its card: {folder}", f"{told}", f"repeat: {making.repeating(root)}"]
    return dataclasses.replace(found, text="\n".join(lines))


def _outcome_lines(root: pathlib.Path, config: Config, variant: artifacts.Variant) -> Iterator[str]:
    """Yields lines about the outcome: traced answers, those to held-out prompts, and the rule's."""
    from raslik_jax.run.workspace import Workspace

    workspace = Workspace(root, config)
    epoch = workspace.epochs(*variant)[-1]
    way = "retraining" if OBJECTIVES[variant.algorithm].retrains else "unlearning"
    yield from (f"\nbefore {way}", *making.answer_lines(root))
    yield from (f"\nafter {way}", *making.answer_lines(root, epoch, variant))
    if config.retrieve.held_out and (asked := workspace.evaluation_queries()[0]):
        before = artifacts.answers("finetuned").read(root)
        after = artifacts.answers(epoch, variant).read(root)
        yield f"\n{len(asked)} held-out prompts of such rows, before and after"
        for row in asked[:_ASKED]:
            yield f"asked   {one_line(f'{row.instruction} {row.input}', 160)}"
            yield f"said    {one_line(before[row.example_id], 160)}"
            yield f"says    {one_line(after[row.example_id], 160)}"
    is_measured = artifacts.METRICS.current(root) is not None
    metrics = artifacts.read_metrics(root) if is_measured else None
    outcome = read_outcome(root, *variant, metrics)
    yield from ("",) if outcome else ()
    how: Any = {"subsequent_indent": " " * 8, "break_on_hyphens": False}
    yield from (textwrap.fill(sentence, 96, **how) for sentence in outcome)


def _check_places(options: UnlearnOptions, source: str, cleaned: pathlib.Path) -> None:
    """Refuses places with files that this run has not written, before it starts."""
    root, folder = pathlib.Path(options.run), pathlib.Path(options.out)
    for place, name in ((folder, "--out"), (cleaned, "--cleaned_train_file")):
        written.check_outside(place, name, root)
    written.check_folder(root, folder)
    if is_folder(source):
        written.check_folder(root, cleaned)
    else:
        written.check_file(root, cleaned, "--cleaned_train_file")
    if importlib.util.find_spec("pyarrow"):
        written.check_folder(root, (root / rows_lib.PLACE).parent)
    if options.cleaned_train_file and not is_folder(source):
        ending = pathlib.Path(cleaned_name(source)).suffix
        if cleaned.suffix != ending:
            raise refused("cleaned_ending", ending=ending, got=shown(cleaned.name))


def drop_exports(root: pathlib.Path) -> Callable[[], None]:
    """Removes the record of an earlier model's exports; returns a function that restores it."""
    path = artifacts.EXPORTS.place(root)
    restore = written.restorer(root, path)
    written.forget(root, path)
    return restore


def _units(config: Config, root: pathlib.Path) -> Sequence[Any]:
    from raslik_jax.run import plan, workspace  # they take jax with them

    return plan.plan_units(config, workspace.Workspace(root, config), is_measured=False)


def _kept(config: Config, given: Collection[str]) -> list[str]:
    """Returns the flags of unlearning that decide and are neither usual nor given."""
    usual = {one.name: one.value for one in leaves(Config())} | {**PRESET}
    used = {f"unlearn.{name}" for name in flat(to_json(config)["unlearn"])} - {*given}
    chosen = [one for one in leaves(config) if one.name in used and one.value != usual[one.name]]
    return [f"--{name}={v}" for name, v, _, of, _ in chosen if of["decides"] and not of["family"]]


def _check_used(config: Config, root: pathlib.Path, given: Mapping[str, Any]) -> None:
    """Refuses a given setting of unlearning if no unit would differ with that of the run."""
    usual = {one.name: one for one in leaves(config_from_json(artifacts.CONFIG.read(root)))}
    own = [name for name in given if name.startswith("unlearn.") and not name.startswith(_IDLE)]
    for name in (n for n in own if usual[n].metadata["decides"] and given[n] != usual[n].value):
        other = None
        with contextlib.suppress(ValueError):  # else it decides which other values are allowed
            other = _units(replaced(config, {name: usual[name].value}), root)
        if other and [u[:3] for u in other] == [u[:3] for u in _units(config, root)]:
            raise refused("idle_setting", name=name, algorithm=config.unlearn.algorithms[0])


def _check_unchanged(config: Config, root: pathlib.Path) -> None:
    """Refuses rows or a model that changed since the trace, which found other rows then."""
    from raslik_jax.run import units  # it takes jax with it

    configuring.check_hub_rows(config, root)
    run = units.Plan(root, _units(config, root))
    for name in ("corpus", "finetune"):
        old, now = read_manifest(root / name), run.units[name].files  # one may be gone, or new
        for what, path in {**dict.fromkeys(old["files"]), **now}.items() if old else ():
            if old and (not path or old["files"].get(what) != run.hashes.of_content(path)):
                raise refused("trace_changed", path=shown(str(path or what), 120))


def _clean(
    config: Config, root: pathlib.Path, strategy: str, target: pathlib.Path
) -> tuple[str, dict[str, str]]:
    """Writes the training file without the found rows, and all rows with scores.

    Returns lines with the places of both, and the places by title; those in the work directory are
    relative.
    """
    ids, train = artifacts.found_ids(root, strategy), artifacts.TRAIN.read(root)
    found = {(row.file, row.place) for row in train if row.example_id in ids}
    with written.replacing(root, target) as made:
        left = write_without(train_file(config), made, found)
        _check_unchanged(config, root)
    is_own = target.resolve().parent == root.resolve()
    exported = {"Cleaned training file": target.name if is_own else str(target.resolve())}
    lines = [f"training file without the {len(found)} rows that were found, {left} left: {target}"]
    if importlib.util.find_spec("pyarrow"):
        with written.replacing(root, (root / rows_lib.PLACE).parent) as made:
            rows_lib.write_rows(made, root, rows_lib.read_sets(root, strategy))
        lines.append(f"all rows with their scores: {root / rows_lib.PLACE}")
        exported["All rows with their scores"] = rows_lib.PLACE
    return "\n".join(lines), exported
