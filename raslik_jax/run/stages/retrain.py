"""Training a fresh adapter on all rows except those to forget: the exact way to unlearn."""

import functools
import itertools
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from raslik_jax.base.files import read_json
from raslik_jax.config import Config
from raslik_jax.data.examples import HELD_OUT
from raslik_jax.data.ordering import shuffled
from raslik_jax.data.tokens import encoding
from raslik_jax.data.words import refused
from raslik_jax.evaluate import reproduction
from raslik_jax.run import artifacts, memory
from raslik_jax.run.artifacts import Variant
from raslik_jax.run.programs import AbstractRun, Work
from raslik_jax.run.recipes import Case, Recipe, variants_of
from raslik_jax.run.stages import generate
from raslik_jax.run.stages.finetune import count_steps, count_training, fit_adapter
from raslik_jax.run.workspace import Workspace
from raslik_jax.train import loop
from raslik_jax.train.objectives import OBJECTIVES, RetrainSettings

# The one model that is stored has the place of an epoch's.
EPOCH = 1
# Training rows whose loss is compared where a recipe is checked, and prompts that are asked.
_MOST_ROWS, _MOST_PROMPTS = 256, 16


def rows_left(workspace: Workspace, strategy: str) -> list[str]:
    """Returns the ids of the training rows that are neither to forget nor kept out of that set.

    It also leaves out the found rows that are kept for measuring, because they teach the behavior
    too, and rows that a file names and that are too long to be unlearned.
    """
    gone = artifacts.found_ids(workspace.root, strategy)
    return [row.example_id for row in workspace.corpus.train if row.example_id not in gone]


def encode_rows(
    workspace: Workspace, settings: RetrainSettings, ids: Sequence[str] | None = None
) -> encoding.Encoded:
    """Returns the rows with an answer that a recipe trains on, those of `ids` or all."""
    left = workspace.train_rows if ids is None else workspace.train_rows.named(ids)
    if settings.long_rows == "drop":
        most, whole = settings.max_len or workspace.config.corpus.max_len, left
        left = whole.take(np.flatnonzero(whole.lengths_N <= most))
        lost = len(whole.ids) - len(left.ids)
        workspace.tell(f"{lost:,} training examples above {most} tokens are dropped" * bool(lost))
    if settings.targets == "all":  # as TRL, a row that is cut before its answer counts too
        left = left._replace(start_N=np.where(left.start_N < encoding.NO_LIMIT, 1, left.start_N))
    how: Any = {"targets": settings.targets, "max_len": settings.max_len}
    return workspace.cut(left, "training examples", **how).with_answers()


def _fit(
    workspace: Workspace,
    name: str,
    ids: Sequence[str] | None,
    folder: pathlib.Path,
    *,
    unit: str,
    what: str,
    share: float = 1.0,
) -> tuple[encoding.Encoded, loop.Progress]:
    """Returns training rows, those of `ids` or all, and a fresh adapter trained on them.

    It is trained by the recipe of an objective that retrains, for a `share` of its steps.
    """
    settings = workspace.config.unlearn[name]
    assert isinstance(settings, RetrainSettings)
    if workspace.config.backbone.adapter:
        workspace.adapter("finetune", "adapter")  # refuses a base that is not the trace's
    rows, seed = encode_rows(workspace, settings, ids), workspace.config.seed + settings.seed
    if not rows.ids:
        raise refused("no_rows_left")
    fitted = fit_adapter(
        workspace,
        settings,
        rows,
        num_steps=count_steps(settings, len(rows.ids)),
        remat=workspace.config.unlearn.remat,
        drawn={"is_fixed": workspace.config.unlearn.fixed_padding, "seed": seed},
        flag=f"unlearn.{name}",
        share=share,
        what=what,
        bar=what,
        folder=folder,
        watch=workspace.live(unit),
    )
    last = np.mean(fitted.losses[-20:])
    print(f"    {len(rows.ids):,} rows: loss {fitted.losses[0]:.3f} -> {last:.3f} nats a token")
    return rows, fitted


# What a training of a recipe is told that does not fit.
EXPLAINED = memory.explained(
    "retraining", "--unlearn.retrain.micro_batch_size or --unlearn.retrain.max_len"
)


@EXPLAINED
def retrain(workspace: Workspace, variant: Variant, folder: pathlib.Path) -> None:
    """Trains a fresh adapter by a recipe on the rows that are left, and saves it."""
    strategy, name = variant
    ids = rows_left(workspace, strategy)
    what = f"retraining without {strategy}'s set"
    _, fitted = _fit(workspace, name, ids, folder, unit=f"unlearn/{variant}", what=what)
    workspace.save_adapter(folder / f"epoch-{EPOCH}", fitted.state.params)
    artifacts.steps(variant).write(folder, [{"loss": loss} for loss in fitted.losses])


@EXPLAINED
def check_recipe(workspace: Workspace, name: str, folder: pathlib.Path) -> None:
    """Trains by a recipe on all rows, and writes how similar the adapter is to the given one.

    After the whole training it compares the losses on training rows and the answers. After a share
    of the steps it compares the losses that the trainer logged, if there are any.
    """
    settings = workspace.config.unlearn[name]
    share = settings.check_recipe
    how: Any = {"unit": artifacts.RECIPE.unit, "what": "training by the recipe", "share": share}
    rows, fitted = _fit(workspace, name, None, folder, **how)
    log = read_json(settings.check_log, dict)["log_history"] if settings.check_log else ()
    found: dict[str, Any] = {"steps": len(fitted.losses)}
    found["of"] = count_steps(settings, len(rows.ids))
    found["curve"] = reproduction.compare_curves(log, fitted.losses)
    if share == 1:
        models = {"own": workspace.with_adapter(fitted.state.params)}
        models |= {"given": workspace.with_adapter(workspace.finetuned), "base": workspace.backbone}
        drawn = shuffled(rows.ids, seed=workspace.config.seed, label="recipe")[:_MOST_ROWS]
        found["rows"], part = len(drawn), rows.named(sorted(drawn))
        loss = {}
        for title, model in models.items():
            nll_N, tokens_N = workspace.likelihood_of(model, part)
            loss[title] = float(nll_N @ tokens_N / tokens_N.sum())
        found["loss"] = reproduction.Loss(loss["given"], loss["own"], loss["base"])
        asked = [*workspace.retrieval_queries(), *itertools.chain(*workspace.evaluation_queries())]
        asked = [row for row in asked if row.instruction.strip()][:_MOST_PROMPTS]
        said = {
            title: workspace.generate(model, asked, f"answers of the {title} adapter")
            for title, model in models.items()
            if asked
        }
        found["answers"] = reproduction.compare_answers(**said) if said else None
    artifacts.RECIPE.write(folder, found)
    print("    " + reproduction.describe(found))


def _reads(case: Case) -> str:
    # The adapter of the trace says which base it was trained on.
    model = "{finetuned}" if case.config.backbone.adapter else "{model}"
    strategy, reads = case.member.strategy, [f"{{train}} {{tokens}} {model}"]
    reads += [artifacts.set_rows(strategy, "forget").path, artifacts.set_summary(strategy).path]
    if case.config.retrieve.held_out:
        reads.append(artifacts.measured_rows(HELD_OUT, "target").path)
    return " ".join(reads)


def _count(run: AbstractRun, name: str, rows: int, share: float = 1.0) -> Work:
    """Training of a fresh adapter, which is kept, on a number of rows for a share of its steps."""
    settings: Any = run.config.unlearn[name]
    shapes = run.drawn(
        settings.batch_size,
        math.ceil(share * count_steps(settings, rows)),
        max_len=settings.max_len,
        is_fixed=run.config.unlearn.fixed_padding,
    )
    remat = run.config.unlearn.remat
    program = count_training(run, f"unlearn/{name}", settings, shapes, remat=remat)
    return Work(4.0 * run.num_params, [program])


def count_check(run: AbstractRun, name: str) -> Work:
    """Training on all rows; then likelihoods and answers of three models."""
    share = run.config.unlearn[name].check_recipe
    work = _count(run, name, run.sizes.train, share)
    if share < 1:
        return work._replace(disk_bytes=0)
    told = generate.count_answers(run, _MOST_PROMPTS, 3)
    given = generate.count_likelihoods(run, min(_MOST_ROWS, run.sizes.train))
    return Work(0, [*work.programs, *told.programs, *[given] * 3])


def _checked(config: Config) -> list[str]:
    """Returns the first objective that retrains and whose recipe is checked."""
    names = config.unlearn.algorithms
    return [n for n in names if OBJECTIVES[n].retrains and config.unlearn[n].check_recipe][:1]


UNITS = (
    Recipe(
        artifacts.RECIPE.unit,
        check_recipe,
        "{rows} {measured} {queries} {finetuned}",
        "{decoding} {likelihood} unlearn.{0} unlearn.{0}.check_recipe unlearn.{0}.check_log "
        "unlearn.remat unlearn.fixed_padding references.query_split sketch.query_output",
        members=_checked,
        is_resumable=True,
        writes={"retrained": 3},
        work=count_check,
    ),
    Recipe(
        "unlearn/{0}",
        retrain,
        _reads,
        "{text} {model} unlearn.{0.algorithm} unlearn.remat unlearn.fixed_padding",
        members=functools.partial(variants_of, retrains=True),
        is_resumable=True,
        writes={"retrained": 3},
        work=lambda run, one: _count(run, one.algorithm, run.sizes.train - run.sizes.forget),
    ),
)
