"""Training a fresh adapter on all rows but those to forget: the exact answer to unlearning."""

import functools
import math
import pathlib
from typing import Any

import jax
import numpy as np
import optax

from raslik_jax.data import batches
from raslik_jax.data.examples import HELD_OUT
from raslik_jax.models import decoder
from raslik_jax.run import artifacts, memory
from raslik_jax.run.artifacts import Variant
from raslik_jax.run.programs import AbstractRun, Work
from raslik_jax.run.recipes import Case, Recipe, retrained_variants
from raslik_jax.run.workspace import Workspace
from raslik_jax.train import loop, steps
from raslik_jax.train.objectives import RetrainSettings

# The one model that is stored has the place of an epoch's.
EPOCH = 1


def optimizer(settings: RetrainSettings, num_steps: int) -> optax.GradientTransformation:
    """Returns the optimizer of a recipe, with its schedule."""
    rate = loop.make_schedule(
        settings.learning_rate,
        num_steps,
        kind=settings.schedule,
        warmup=settings.warmup,
        warmup_steps=settings.warmup_steps,
    )
    how = {"weight_decay": settings.weight_decay, "clip": settings.clip}
    if settings.optimizer == "sgd":
        return loop.sgd(rate, **how)
    betas = {name: getattr(settings, name) for name in ("beta1", "beta2", "epsilon")}
    return loop.adamw(rate, **how, **betas)


def count_steps(settings: RetrainSettings, num_rows: int) -> int:
    """Returns the steps of a recipe; a last batch that is not full is a step, as in TRL."""
    per_epoch = batches.num_steps_of(num_rows, batch_size=settings.batch_size)
    return settings.steps or math.ceil(settings.epochs * per_epoch)


def rows_left(workspace: Workspace, strategy: str) -> list[str]:
    """Returns the ids of the training rows that are neither to forget nor kept out of that set.

    Rows that were found and kept out to measure on teach the behavior too.
    """
    gone = {row.example_id for row in artifacts.set_rows(strategy, "forget").read(workspace.root)}
    if workspace.config.retrieve.held_out:
        kept_out = artifacts.measured_rows(HELD_OUT, "target").read(workspace.root)
        gone |= {row.example_id for row in kept_out}
    return [row.example_id for row in workspace.corpus.train if row.example_id not in gone]


def training(workspace: Workspace, settings: RetrainSettings, *, num_steps: int) -> loop.Algorithm:
    """Returns the algorithm that trains an adapter by a recipe."""
    model = workspace.model
    return steps.supervised(
        model.decoder_for(remat=workspace.config.unlearn.remat),
        optimizer(settings, num_steps),
        mean=settings.mean,
        micro_batch=settings.micro_batch_size,
        dropout_key=jax.random.key(settings.seed + 1) if model.lora_config.dropout else None,
    )


@memory.explained("retraining", "--unlearn.retrain.micro_batch_size or --unlearn.retrain.max_len")
def retrain(workspace: Workspace, variant: Variant, folder: pathlib.Path) -> None:
    """Trains a fresh adapter by a recipe on the rows that are left, and saves it.

    A run that was killed goes on after its last finished epoch, with the same result.
    """
    strategy, name = variant
    settings, model = workspace.config.unlearn[name], workspace.model
    assert isinstance(settings, RetrainSettings)
    max_len = settings.max_len or workspace.config.corpus.max_len
    left = workspace.train_rows.named(rows_left(workspace, strategy))
    rows = workspace.cut(left, "training examples", max_len=max_len)
    rows = (rows.cut(max_len, targets="all") if settings.targets == "all" else rows).with_answers()
    if not rows.ids:
        raise ValueError(
            "retraining must have rows that are left, all of them are to forget: give a smaller set"
        )
    per_epoch = batches.num_steps_of(len(rows.ids), batch_size=settings.batch_size)
    num_steps = count_steps(settings, len(rows.ids))
    with workspace.live(f"unlearn/{variant}") as live:
        fitted = loop.fit(
            training(workspace, settings, num_steps=num_steps),
            decoder.init_lora(model.graphdef, key=jax.random.key(settings.seed)),
            model.base,
            functools.partial(
                batches.epoch_batches,
                rows,
                batch_size=settings.batch_size,
                seed=settings.seed,
                is_fixed=workspace.config.unlearn.fixed_padding,
            ),
            num_steps=num_steps,
            what=f"retraining without {strategy}'s set",
            rate_flag=f"--unlearn.{name}.learning_rate (it is {settings.learning_rate})",
            bar=f"{strategy} {name}",
            folder=folder,
            save_every=per_epoch,
            watch=live,
        )
    workspace.save_adapter(folder / f"epoch-{EPOCH}", fitted.state.params)
    log = [{"loss": loss} for loss in fitted.losses]
    artifacts.steps(variant).write(folder, log)
    last = np.mean(fitted.losses[-20:])
    print(f"    {len(rows.ids):,} rows: loss {fitted.losses[0]:.3f} -> {last:.3f} nats a token")


def _reads(case: Case) -> str:
    reads = [artifacts.set_rows(case.member.strategy, "forget").path, "{train} {tokens} {model}"]
    if case.config.retrieve.held_out:
        reads.append(artifacts.measured_rows(HELD_OUT, "target").path)
    return " ".join(reads)


def count_retraining(run: AbstractRun, variant: Variant) -> Work:
    """Training of a fresh adapter on the remaining rows; one state is kept."""
    settings: Any = run.config.unlearn[variant.algorithm]
    rows = run.sizes.train - run.sizes.forget
    shapes = run.drawn(
        settings.batch_size,
        count_steps(settings, rows),
        max_len=settings.max_len,
        is_fixed=run.config.unlearn.fixed_padding,
    )
    model = run.model
    program = run.training(
        f"unlearn/{variant.algorithm}",
        training(run.workspace, settings, num_steps=1),
        model.initial,
        model.base,
        shapes=shapes,
        passes=2 + run.config.unlearn.remat,
    )
    return Work(4.0 * run.num_params, [program])


UNITS = (
    Recipe(
        "unlearn/{0}",
        retrain,
        _reads,
        "{text} {model} unlearn.{0.algorithm} unlearn.remat unlearn.fixed_padding",
        members=retrained_variants,
        is_resumable=True,
        work=count_retraining,
    ),
)
