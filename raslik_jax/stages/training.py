"""From settings to a fine-tuned model and its answers: corpus, backbone, finetune, references."""

import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from raslik_jax.axes import Tree
from raslik_jax.data import corpora, examples, prompts, tokenization
from raslik_jax.models import checkpoint, decoder, gpt_neox
from raslik_jax.pipeline import write_json
from raslik_jax.progress import progress
from raslik_jax.stages.workspace import Workspace, non_sf, write_rows
from raslik_jax.unlearning import finetune, objectives

# Share of target queries below which there is no behaviour to speak of.
_SHOWN_AT_LEAST = 0.5


def make_corpus(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the training examples, the queries and the tokenizer."""
    config = workspace.config
    corpus = corpora.load_corpus(config.corpus, seed=config.seed)
    for name, rows in {
        "backbone": corpus.backbone,
        "train": corpus.train,
        **corpus.queries,
    }.items():
        labels = [{"is_target": row.is_target, "source": row.source} for row in rows]
        examples.write_examples(folder / f"{name}.jsonl", rows, extra=labels)
    if config.backbone.checkpoint:
        tokenizer = tokenization.load_tokenizer(
            checkpoint.resolve_folder(
                config.backbone.checkpoint, revision=config.backbone.revision or None
            )
        )
    else:
        texts = [
            prompts.render_prompt(row, config.corpus.template) + row.output
            for row in (*corpus.backbone, *corpus.train)
        ]
        tokenizer = tokenization.train_bpe(texts, vocab_size=config.corpus.vocab_size)
    tokenization.save_tokenizer(folder / "tokenizer", tokenizer)
    targets = sum(bool(row.is_target) for row in corpus.train)
    print(f"    {len(corpus.train):,} training examples, {targets:,} of them labelled targets")


def make_backbone(workspace: Workspace, folder: pathlib.Path) -> None:
    """Trains a small GPT-NeoX from scratch, all parameters, on the backbone's examples."""
    config, settings = workspace.config, workspace.config.backbone
    if settings.checkpoint:
        print(f"    {settings.checkpoint}")
        return
    if not workspace.corpus.backbone:
        raise ValueError(
            "examples to pretrain a backbone on wanted, the corpus has none: name a --checkpoint"
        )
    model_config = gpt_neox.GPTNeoXConfig(
        vocab_size=workspace.tokenizer.vocab_size,
        hidden_size=settings.hidden_size,
        num_hidden_layers=settings.num_hidden_layers,
        num_attention_heads=settings.num_attention_heads,
        intermediate_size=4 * settings.hidden_size,
        max_position_embeddings=config.corpus.max_len + config.references.max_new_tokens,
    )
    graphdef, _, base = decoder.create(
        model_config, None, key=jax.random.key(config.seed), dtype=jnp.float32
    )
    bound = decoder.bind(graphdef)

    def loss(
        params: Tree,
        frozen: Tree,
        batch: objectives.TokenBatch,
        *,
        num_targets: int,
        dropout_key: jax.Array | None,
    ) -> jax.Array:
        del frozen, dropout_key
        return objectives.nll(bound, {}, params, batch, num_targets=num_targets)

    encoded = workspace.encode(workspace.corpus.backbone)
    num_steps, batch_size = settings.pretrain_steps, settings.pretrain_batch_size
    per_epoch = finetune.num_steps_of(
        len(workspace.corpus.backbone), batch_size=batch_size, num_epochs=1
    )
    stream = finetune.epoch_batches(
        encoded,
        batch_size=batch_size,
        seed=config.seed,
        num_epochs=-(-num_steps // per_epoch),
    )
    rate = finetune.learning_rate(
        settings.pretrain_learning_rate, num_steps, schedule="cosine", warmup=0.05
    )
    fitted = finetune.fit(
        loss,
        base,
        {},
        progress(_first(stream, num_steps), "backbone", total=num_steps),
        tx=finetune.adamw(rate, weight_decay=0.1, clip=1.0),
    )
    checkpoint.save_model(folder / "model", model_config, fitted.params)
    write_json(folder / "losses.json", list(fitted.losses))
    print(f"    loss {fitted.losses[0]:.3f} -> {fitted.losses[-20:].mean():.3f} nats a token")


def _first(stream: Iterator[Any], count: int) -> Iterator[Any]:
    for _, item in zip(range(count), stream, strict=False):
        yield item


def make_adapter(workspace: Workspace, folder: pathlib.Path) -> None:
    """Fine-tunes a LoRA adapter on the training examples, keeping some along the way."""
    config, settings, model = workspace.config, workspace.config.finetune, workspace.model

    def loss(
        params: Tree,
        frozen: Tree,
        batch: objectives.TokenBatch,
        *,
        num_targets: int,
        dropout_key: jax.Array | None,
    ) -> jax.Array:
        return objectives.nll(
            model.decoder, params, frozen, batch, num_targets=num_targets, dropout_key=dropout_key
        )

    encoded = workspace.encode(workspace.corpus.train)
    shape = {
        "batch_size": settings.finetune_batch_size,
        "num_epochs": settings.finetune_epochs,
    }
    num_steps = finetune.num_steps_of(len(workspace.corpus.train), **shape)
    points = min(settings.trajectory_points, num_steps)
    keep_after = tuple(num_steps * (point + 1) // points for point in range(points))
    rate = finetune.learning_rate(
        settings.finetune_learning_rate,
        num_steps,
        schedule=settings.finetune_schedule,
        warmup=settings.finetune_warmup,
    )
    dropout_key = jax.random.key(config.seed + 1) if settings.lora_dropout else None
    fitted = finetune.fit(
        loss,
        model.initial,
        model.base,
        progress(
            finetune.epoch_batches(encoded, seed=config.seed, **shape),
            "fine-tune",
            total=num_steps,
        ),
        tx=finetune.adamw(
            rate, weight_decay=settings.finetune_weight_decay, clip=settings.finetune_clip
        ),
        dropout_key=dropout_key,
        keep_after=keep_after,
    )
    named = {"initial": model.initial, "adapter": fitted.params}
    named |= {f"trajectory-{i}": lora for i, lora in enumerate(fitted.kept)}
    for name, lora in named.items():
        checkpoint.save_adapter(folder / name, lora, model.lora_config, model.decoder.config)
    write_json(folder / "losses.json", list(fitted.losses))
    print(f"    loss {fitted.losses[0]:.3f} -> {fitted.losses[-20:].mean():.3f} nats a token")


def make_retrieval_answers(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the greedy answers of the fine-tuned model to the queries of retrieval."""
    rows = workspace.corpus.queries["retrieval"]
    _write_answers(workspace, folder / "finetuned.jsonl", workspace.finetuned, rows)


def make_references(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the greedy answers of the fine-tuned model and of the backbone, to be measured by."""
    target, normal = workspace.evaluation_queries()
    for name, lora in (("finetuned", workspace.finetuned), ("backbone", workspace.model.initial)):
        _write_answers(workspace, folder / f"{name}.jsonl", lora, (*target, *normal))
    measure = non_sf(workspace.config)
    answers = workspace.answers("references", "evaluation", "finetuned.jsonl")
    shares = [
        1 - measure([answers[row.example_id] for row in rows]).mean() for rows in (target, normal)
    ]
    print(
        f"    the fine-tuned model shows the behaviour on {shares[0]:.0%} of target queries "
        f"and {shares[1]:.0%} of normal ones"
    )
    if shares[0] < _SHOWN_AT_LEAST:
        print(
            "    that is too little to trace: fine-tune longer or at a higher rate before reading "
            "anything into what follows"
        )


def _write_answers(
    workspace: Workspace, path: pathlib.Path, lora: Tree, rows: tuple[examples.Example, ...]
) -> None:
    outputs = workspace.generate(lora, rows, f"answers of the {path.stem} model")
    write_rows(
        path,
        [{"id": row.example_id, "output": text} for row, text in zip(rows, outputs, strict=True)],
    )
