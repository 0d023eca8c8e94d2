"""The adapter before unlearning: fine-tuned on the training examples or trained elsewhere."""

import functools
import pathlib

import jax
import numpy as np

from raslik_jax.data import batches
from raslik_jax.data.tokens import encoding
from raslik_jax.run import artifacts, memory
from raslik_jax.run.programs import REMAT, AbstractRun, Work
from raslik_jax.run.recipes import Recipe
from raslik_jax.run.workspace import Workspace, adapter_source, load_adopted, lora_config_of
from raslik_jax.train import loop, steps


def finetuning(workspace: Workspace, *, num_steps: int) -> loop.Algorithm:
    """Returns the algorithm that fits an adapter to the training examples."""
    config, settings = workspace.config, workspace.config.finetune
    rate = loop.make_schedule(
        settings.learning_rate, num_steps, kind=settings.schedule, warmup=settings.warmup
    )
    return steps.supervised(
        workspace.model.decoder_for(remat=settings.remat),
        loop.adamw(rate, weight_decay=settings.weight_decay, clip=settings.clip),
        mean=settings.mean,
        micro_batch=settings.micro_batch_size,
        dropout_key=jax.random.key(config.seed + 1) if settings.lora_dropout else None,
    )


@memory.explained("fine-tuning", "--finetune.micro_batch_size or --finetune.max_len")
def make_adapter(workspace: Workspace, folder: pathlib.Path) -> None:
    """Fine-tunes a LoRA adapter on the training examples.

    A killed run continues from the last checkpoint with the same result.
    """
    settings, model = workspace.config.finetune, workspace.model
    max_len = settings.max_len or workspace.config.corpus.max_len
    rows = workspace.cut(workspace.train_rows, "training examples", max_len=max_len)
    targets = rows.take(np.flatnonzero([bool(row.is_target) for row in workspace.corpus.train]))
    encoding.require_answers(targets, "labeled targets", max_len=max_len)  # none may be lost
    encoded = rows.with_answers()
    per_epoch = batches.num_steps_of(len(encoded.ids), batch_size=settings.batch_size)
    num_steps = settings.epochs * per_epoch
    workspace.save_adapter(folder / "initial", model.initial)
    fitted = loop.fit(
        finetuning(workspace, num_steps=num_steps),
        model.initial,
        model.base,
        functools.partial(
            batches.epoch_batches,
            encoded,
            batch_size=settings.batch_size,
            seed=workspace.config.seed,
            is_fixed=settings.fixed_padding,
        ),
        num_steps=num_steps,
        what="fine-tuning",
        rate_flag=f"--finetune.learning_rate (it is {settings.learning_rate})",
        bar="fine-tune",
        folder=folder,
        save_every=settings.checkpoint_steps or per_epoch,
        watch=workspace.live("finetune"),
    )
    workspace.save_adapter(folder / "adapter", fitted.state.params)
    write_losses("finetune", folder, fitted)


@memory.explained("loading the model", "--backbone.dtype to bfloat16, or take a smaller model")
def adopt_model(workspace: Workspace, folder: pathlib.Path) -> None:
    """Takes a given model without a training step.

    It is the adapter of --backbone.adapter, or a fresh one on a checkpoint that is fine-tuned
    already. B of a fresh adapter is 0, so it changes nothing, and only B has a gradient. The
    initial adapter is written if gradients are taken at it.
    """
    config = workspace.config
    is_asked = config.sketch.gradient_at == "initial"
    if config.backbone.adapter:
        source = adapter_source(config)
        # The copy of an earlier adapter may still be at this place.
        workspace.lora_config = lora_config_of(config, workspace.shapes, source)
        model = workspace.model
        lora = load_adopted(config, source, model.decoder.config, base=model.identity)
    else:
        model = workspace.model
        lora = model.initial
    if is_asked:
        workspace.save_adapter(folder / "initial", model.initial)
    workspace.save_adapter(folder / "adapter", lora)


def write_losses(stage: str, folder: pathlib.Path, fitted: loop.Progress) -> None:
    """Writes the loss of every step and prints the first and the last ones."""
    artifacts.losses(stage).write(folder, fitted.losses)
    last = np.mean(fitted.losses[-20:])
    print(f"    loss {fitted.losses[0]:.3f} -> {last:.3f} nats a token")


def count_finetuning(run: AbstractRun) -> Work:
    """Training of the adapter, which is kept with the initial one."""
    settings, model = run.config.finetune, run.model
    program = run.training(
        "finetune",
        finetuning(run.workspace, num_steps=1),
        model.initial,
        model.base,
        shapes=run.epochs_of(settings, run.sizes.train),
        passes=2 + REMAT * settings.remat,
    )
    return Work(8.0 * run.num_params, [program])


UNITS = (
    Recipe(
        "finetune",
        make_adapter,
        "{rows} {model}",
        "{text} {model} finetune",
        is_asked=lambda config: config.finetunes,
        is_resumable=True,
        work=count_finetuning,
    ),
    Recipe(
        "finetune",
        adopt_model,
        "{model}",
        "{model} finetune.epochs",
        values=lambda case: (
            {"initial": True} if case.config.sketch.gradient_at == "initial" else {}
        ),
        is_asked=lambda config: not config.finetunes,
        work=lambda run: Work(8.0 * run.num_params),
    ),
)
