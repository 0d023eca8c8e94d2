"""The units of a run in order, from the recipes of its stages."""

import contextlib
import functools
import pathlib
import shutil
from collections.abc import Callable, Sequence

from raslik_jax.base.messages import shown, some_of
from raslik_jax.config import STAGES, Config, config_from_json
from raslik_jax.run import artifacts, checking
from raslik_jax.run.recipes import Recipe
from raslik_jax.run.stages import (
    corpus,
    evaluate,
    finetune,
    generate,
    retrain,
    retrieve,
    robustness,
    scores,
    tokens,
    unlearn,
)
from raslik_jax.run.units import Plan, Unit, check_own, owner_of, run_units
from raslik_jax.run.workspace import StoredCorpus, Workspace

# By the module that declares them. A unit runs after those that it reads, else in this order.
UNITS: dict[str, tuple[Recipe, ...] | Callable[[Config], tuple[Recipe, ...]]] = {
    "corpus": corpus.UNITS,
    "finetune": finetune.UNITS,
    "references": generate.BEFORE,
    "scores": scores.scores_of,
    "tokens": tokens.UNITS,
    "sets": retrieve.UNITS,
    "unlearn": unlearn.UNITS,
    "retrain": retrain.UNITS,
    "generate": generate.UNITS,
    "robustness": robustness.UNITS,
    "evaluate": evaluate.UNITS,
}


def plan_units(
    config: Config,
    workspace: Workspace,
    *,
    is_measured: bool = True,
    more: Sequence[Recipe] = (),
) -> tuple[Unit, ...]:
    """Returns all units of a run, each after the units that it reads.

    If there are no queries to measure a run on, units that no set or model depends on are left out.
    `more` come after those of `UNITS`.
    """
    declared = [own(config) if callable(own) else own for own in UNITS.values()]
    recipes = [recipe for own in declared for recipe in own]
    units: list[Unit] = []
    for recipe in (*recipes, *more):
        if is_measured or not recipe.measures:
            units += recipe.units(workspace, [unit.name for unit in units])
    return _in_order(units)


def _in_order(units: Sequence[Unit]) -> tuple[Unit, ...]:
    """Returns units, each after the units that it reads; otherwise in their order."""
    waiting, placed = {unit.name: unit for unit in units}, list[Unit]()
    owners = {u.name: {owner_of(path, waiting) for path in u.reads} for u in units}
    while waiting:
        ready = [unit for unit in waiting.values() if not waiting.keys() & owners[unit.name]]
        if not ready:
            raise ValueError(f"units must not read each other, got {some_of([*waiting])}")
        placed.append(waiting.pop(ready[0].name))
    return tuple(placed)


def open_run(root: pathlib.Path, *needs: str, config: Config | None = None) -> Workspace:
    """Returns the work directory of a run whose results may be read.

    A needed unit must be whole. It must have been made with the settings (None: config.json) from
    the current files.
    """
    workspace = Workspace(root, config or config_from_json(artifacts.CONFIG.read(root)))
    done = Plan(root, plan_units(workspace.config, workspace)).survey().done
    lacking = [name for name in needs if name not in done]
    if lacking:
        place = shown(str(root), 120)
        raise ValueError(f"{place} must hold up-to-date {some_of(lacking)}: run it again")
    return workspace


def run(
    config: Config,
    workdir: pathlib.Path,
    *,
    stages: Sequence[str] = STAGES,
    is_measured: bool = True,
    layout: str = "replicated",
    on_start: Callable[[], None] = lambda: None,
    more: Sequence[Recipe] = (),
) -> str:
    """Runs the stages that are not up to date and shows the table at the end.

    Returns the finding with which the run ends before its sets are chosen; "" without.

    The corpus is made first, so that its problems for later stages are reported before they run.
    Without queries to measure on, or if not `is_measured`, the stages that measure are left out.
    `layout` is --mesh.base. See `run_units` for `on_start`.
    """
    workspace = Workspace(workdir, config, layout=layout)
    units = plan_units(config, workspace, is_measured=is_measured, more=more)
    done = Plan(workdir, units).survey().done
    making = [unit for unit in units if unit.stage in stages and unit.name not in done]
    checking.check_inputs(config, making=making, layout=layout)
    is_read = config.backbone.checkpoint and any("backbone.revision" in u.settings for u in making)
    shapes = checking.shapes_of(config) if is_read else None

    def make_checked_corpus(workspace: Workspace, folder: pathlib.Path) -> None:
        """Makes the corpus; one that later stages refuse does not replace an earlier one."""
        corpus.make_corpus(workspace, folder)
        whole = artifacts.TRAIN_TOKENS.read_in(folder)
        checking.check_corpus(config, StoredCorpus(folder), whole, stages=stages, shapes=shapes)

    later = stages
    if "corpus" in stages:
        first = units[0]._replace(run=functools.partial(make_checked_corpus, workspace))
        run_units(workdir, (first, *units[1:]), stages=("corpus",))
        later = [stage for stage in stages if stage != "corpus"]
    if Plan(workdir, units).check(units[0]):
        rows = workspace.corpus, workspace.train_rows
        checking.check_corpus(config, *rows, stages=later, shapes=shapes)
        if is_measured and not checking.is_measurable(config, workspace.corpus):
            split, asked = config.references.query_split, units
            lacks = f"the corpus has no {split}_target or {split}_normal"
            lacks = "no training row has a prompt" if config.retrieve.held_out else lacks
            units = plan_units(config, workspace, is_measured=False, more=more)
            names = {unit.name for unit in units}
            if any(unit.stage in later and unit.name not in names for unit in asked):
                print(f"nothing is measured: {lacks}")
    found = run_units(workdir, units, stages=later, on_start=on_start)
    for strategy in config.retrieve.strategies if found else ():
        with contextlib.suppress(ValueError):  # the user has put something there
            check_own(workdir / "retrieve" / strategy)  # the set of an earlier answer
            shutil.rmtree(workdir / "retrieve" / strategy, ignore_errors=True)
    if not found and "report" in later and units[-1].stage == "report":
        print(f"\n{artifacts.TABLE.read(workdir)}")
        print(f"report: {artifacts.PAGE.place(workdir)}")
    return found
