"""The model before fine-tuning: a checkpoint or a small GPT-NeoX trained from scratch."""

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from raslik_jax.config import Config
from raslik_jax.data import batches
from raslik_jax.models import checkpoint, decoder, gpt_neox
from raslik_jax.run import artifacts, memory
from raslik_jax.run.programs import AbstractRun, Work
from raslik_jax.run.recipes import Recipe
from raslik_jax.run.stages.finetune import write_losses
from raslik_jax.run.workspace import Workspace
from raslik_jax.train import loop, steps


def shape_of(config: Config, *, vocab_size: int) -> gpt_neox.GPTNeoXConfig:
    """Returns the shapes of the backbone that is trained from scratch."""
    settings = config.backbone
    return gpt_neox.GPTNeoXConfig(
        vocab_size=vocab_size,
        hidden_size=settings.hidden_size,
        num_hidden_layers=settings.num_hidden_layers,
        num_attention_heads=settings.num_attention_heads,
        intermediate_size=4 * settings.hidden_size,
        # Positions are rotations, which cost no weight: the bound leaves room to answer.
        max_position_embeddings=2 * config.corpus.max_len,
    )


def pretraining(config: Config, bound: decoder.Decoder) -> loop.Algorithm:
    """Returns the algorithm that trains all weights of a backbone."""
    settings = config.backbone
    rate = loop.make_schedule(settings.learning_rate, settings.steps, kind="cosine", warmup=0.05)
    return steps.supervised(bound, loop.adamw(rate, weight_decay=0.1), whole=True)


@memory.explained("pretraining of the backbone", "--backbone.batch_size or --corpus.max_len")
def make_backbone(workspace: Workspace, folder: pathlib.Path) -> None:
    """Trains a small GPT-NeoX from scratch with all parameters on the backbone's examples."""
    config, settings = workspace.config, workspace.config.backbone
    rows = artifacts.corpus_tokens("backbone").read(workspace.root)
    encoded = workspace.cut(rows, "backbone examples").with_answers()
    if not encoded.ids:
        raise ValueError(
            "the corpus must have pretraining examples, it has none: name a --backbone.checkpoint"
        )
    model_config = shape_of(config, vocab_size=workspace.tokenizer.vocab_size)
    graphdef, _, base = decoder.create(
        model_config, None, key=jax.random.key(config.seed), dtype=jnp.float32
    )
    fitted = loop.fit(
        pretraining(config, decoder.bind(graphdef)),
        base,
        {},
        functools.partial(
            batches.epoch_batches, encoded, batch_size=settings.batch_size, seed=config.seed
        ),
        num_steps=settings.steps,
        what="pretraining of the backbone",
        rate_flag=f"--backbone.learning_rate (it is {settings.learning_rate})",
        bar="backbone",
        watch=workspace.live("backbone"),
    )
    checkpoint.save_model(folder / "model", model_config, fitted.state.params)
    write_losses("backbone", folder, fitted)


def count_pretraining(run: AbstractRun) -> Work:
    """The training of all weights of a backbone."""
    settings = run.config.backbone
    graphdef, _, base = decoder.abstract(run.model.decoder.config, None)
    algorithm = pretraining(run.config, decoder.bind(graphdef))
    bare = run.forward._replace(token=run.forward.token - 2 * run.num_params)
    how: Any = {"shapes": run.drawn(settings.batch_size, settings.steps), "model": bare}
    program = run.training("backbone", algorithm, base, {}, passes=3, **how)
    return Work(run.base_bytes, [program])


UNITS = (
    Recipe(
        "backbone",
        make_backbone,
        f"{artifacts.corpus_tokens('backbone').path} {artifacts.TOKENIZER.path}",
        "seed {text} backbone.hidden_size backbone.num_hidden_layers backbone.num_attention_heads "
        "backbone.steps backbone.batch_size backbone.learning_rate",
        is_asked=lambda config: not config.backbone.checkpoint,
        work=count_pretraining,
    ),
)
