"""From a trace to a judgment of its scores by retraining without rows."""

import dataclasses
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from raslik_jax.base.messages import shown
from raslik_jax.base.settings import setting
from raslik_jax.config import config_from_json
from raslik_jax.data.words import refused
from raslik_jax.incident import configuring, making
from raslik_jax.incident.configuring import ALGORITHM, RecipeOptions, read_settings
from raslik_jax.parallel import processes
from raslik_jax.report import results, tables
from raslik_jax.run import artifacts

_LEAST_SUBSETS = 8  # a bootstrap of fewer gives intervals that are too narrow
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidateOptions(RecipeOptions, making.Options):
    """Which trace is validated and by how many retrainings.

    `settings` replace values of the recipe, by names such as `unlearn.retrain.epochs`.
    """

    run: str = setting("", "Work directory of a trace of an adapter.")
    retrainings: int = setting(
        32,
        "Number of all retrainings. Those that --seeds does not take are on random subsets, "
        "for LDS.",
        low=1,
    )
    seeds: int = setting(
        3,
        "Seeds for QLD. Each takes three kinds of training: on all rows, without the top rows of "
        "each ranking, and without as many random rows; 0: no QLD.",
        zero_or=2,
    )
    top: str = setting("1%", "Rows that QLD removes: a share such as 1%, or a number.")
    share: float = setting(0.5, "Share of the rows that a subset of LDS keeps.", above=0, below=1)
    group: int = setting(1, "Neighboring rows that a subset keeps or removes together.", low=1)
    scores: tuple[str, ...] = setting(
        (),
        "Files with scores of another tool: .npy in the order of the rows, or JSONL with id and "
        "score. A list of numbers for a row has one for each query.",
    )
    keep: bool = setting(False, "Keep the adapter of every retraining.")

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        match = _SHARE.fullmatch(self.top)
        is_share = match is not None and 0 < float(match[1]) < 100
        if not is_share and not (self.top.isdecimal() and int(self.top) > 0):
            yield str(refused("top_share", got=shown(self.top)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidateResult(making.Result):
    """QLD and LDS of the rankings of a run. It prints itself as a table.

    Attributes:
      found: the numbers that the work directory stores.
    """

    found: Mapping[str, Any] = dataclasses.field(repr=False)


def validate(options: ValidateOptions | None = None, **named: Any) -> ValidateResult:
    """Trains the adapter of a trace again without rows and judges the scores of these rows.

    QLD is a difference of two losses of the traced answers: after retraining without the rows of
    the highest scores, minus after retraining without the same number of random rows. LDS is a
    correlation over retrainings on random subsets: the sum of the scores of the remaining rows with
    the likelihood of the answers. Both are computed for each ranking of the run and for BM25 with
    answers. Files in `scores` add rankings.

    Raises:
      ValueError: if the run has no adapter, no recipe is known or `retrainings` are too few.

    Example:
      print(raslik_jax.validate(run="runs/incident", retrainings=32))
    """
    options = making.options_of(options or ValidateOptions(), named)
    if not options.run:
        raise ValueError("--run must be given: give --run=WORKDIR")
    root = pathlib.Path(options.run)
    recorded = processes.from_first(lambda: artifacts.CONFIG.read(root))
    config = config_from_json(configuring.with_own_query(recorded, root))
    own = f"unlearn.{ALGORITHM}."
    if foreign := [name for name in options.settings if not name.startswith(own)]:
        raise refused("foreign_setting", own=own, got=shown(foreign[0]))
    settings = read_settings(config, options, options.settings, root=root)
    recipe = making.changed(config, {**settings, "unlearn.algorithms": (ALGORITHM,)})
    making.require_found(root, artifacts.read_finding(root))
    from raslik_jax.run import plan  # it takes jax with it
    from raslik_jax.run.stages import scores
    from raslik_jax.run.stages import validate as stage

    needs = sorted(f"retrieve/{need}" for need in scores.needs_of(config))
    workspace = plan.open_run(root, "corpus", "finetune", *needs, config=config)
    rankings = stage.rank(workspace)
    rows, queries = workspace.corpus.train, workspace.retrieval_queries()
    for path in options.scores:
        name = re.sub(r"\W+", "_", pathlib.Path(path).stem)
        if name in {*rankings, stage.NOTHING, stage.SUBSET}:
            raise refused("scores_named", name=name, taken=", ".join(rankings))
        rankings[name] = stage.read_ranking(path, rows, len(queries))
    each = 1 + len({*rankings} | {stage.RANDOM})
    subsets = options.retrainings - options.seeds * each
    if subsets < 0 or 0 < subsets < _LEAST_SUBSETS:
        numbers = {"each": each, "seeds": options.seeds, "got": options.retrainings}
        least = options.seeds * each
        raise refused("retrainings", least=least, more=least + _LEAST_SUBSETS, **numbers)
    share = _SHARE.fullmatch(options.top)
    design = stage.Design(
        settings=recipe.unlearn[ALGORITHM],
        rankings=rankings,
        top=float(share[1]) / 100 if share else int(options.top),
        subsets=subsets,
        keeps=options.keep,
        **{name: getattr(options, name) for name in ("seeds", "share", "group")},
    )
    planned = stage.Validation(workspace, design)
    if processes.is_first():
        print(_announced(planned), flush=True)
    how: Any = {"mesh": options.mesh, "update": True, "is_measured": False}
    making.make(config, root, stages=("validate",), more=planned.recipes(), **how)
    found = artifacts.VALIDATION.read(root)
    if artifacts.PAGE.current(root):
        try:
            plan.open_run(root, "evaluate", config=config)
        except ValueError:  # as of a moved run, whose measurements name the place of the answer
            print("the page does not show this table: run again the command that made the page")
        else:
            making.make(config, root, stages=("report",), mesh=options.mesh, update=True)
    text = f"\n{tables.render_terminal(results.validation_table(found))}"
    text = text if processes.is_first() else ""
    return ValidateResult(workdir=root, found=found, text=text)


def _announced(planned: Any) -> str:
    """Returns a sentence on the number of retrainings."""
    design = planned.design
    lines = [f"{len(planned.trainings):,} retrainings on {planned.count:,} rows"]
    if design.seeds:
        _, *names = planned.qld
        removed = f"{planned.top:,} rows are removed by each of {', '.join(names)}"
        lines.append(f"  QLD: {design.seeds} seeds; nothing is removed, then {removed}")
    if planned.lds:
        kept = f"{design.share:.0%} of the rows"
        kept += f", in groups of {design.group} neighbors" if design.group > 1 else ""
        lines.append(f"  LDS: {len(planned.lds):,} random subsets of {kept}")
    return "\n".join(lines)
