"""From settings to a fine-tuned model and its answers: corpus, backbone, finetune, references."""

import pathlib
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from raslik_jax.axes import Tree
from raslik_jax.data import batches, examples, prompts, tokenization
from raslik_jax.evaluate import judgment
from raslik_jax.files import write_json
from raslik_jax.messages import some_of
from raslik_jax.models import checkpoint, decoder, gpt_neox
from raslik_jax.progress import progress
from raslik_jax.run import memory, resuming
from raslik_jax.run.workspace import (
    StoredCorpus,
    Workspace,
    non_sf_by_words,
    queries_to_answer,
    read_answers,
    write_rows,
)
from raslik_jax.train import finetune, objectives


def make_corpus(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the training examples, the queries and the tokenizer."""
    config = workspace.config
    corpus = config.corpus.load(seed=config.seed)
    queries_to_answer(corpus.queries["retrieval"], config.sketch.query_output)  # refuses early
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
    named = {f"queries of {name}": rows for name, rows in corpus.queries.items()}
    for what, rows in (named | {"labeled targets": _targets(corpus)}).items():
        _require_room(
            what, rows, tokenizer, max_len=config.corpus.max_len, template=config.corpus.template
        )
    kept, own = examples.extra_keys((*corpus.train, *corpus.queries["retrieval"]))
    if kept or own:
        names = ([f"{some_of(kept)} kept for exports"] if kept else []) + (
            [f"{some_of(own)} left out, exports write their own"] if own else []
        )
        print(f"    keys of rows that are no fields: {'; '.join(names)}")
    targets = sum(bool(row.is_target) for row in corpus.train)
    print(f"    {len(corpus.train):,} training examples, {targets:,} of them labeled targets")


def _require_room(
    what: str,
    rows: Sequence[examples.Example],
    tokenizer: tokenization.Tokenizer,
    *,
    max_len: int,
    template: str,
) -> None:
    """Raises a ValueError where a prompt leaves no room for its answer."""
    encoded = batches.encode(rows, tokenizer, max_len=max_len, template=template)
    batches.require_answers(encoded, what, max_len=max_len)


def _targets(corpus: StoredCorpus | examples.Corpus) -> tuple[examples.Example, ...]:
    return tuple(row for row in corpus.train if row.is_target)


@memory.explained("pretraining of the backbone", "--backbone.batch_size or --corpus.max_len")
def make_backbone(workspace: Workspace, folder: pathlib.Path) -> None:
    """Trains a small GPT-NeoX from scratch, all parameters, on the backbone's examples."""
    config, settings = workspace.config, workspace.config.backbone
    if not workspace.corpus.backbone:
        raise ValueError(
            "examples to pretrain a backbone on wanted, the corpus has none: name a "
            "--backbone.checkpoint"
        )
    model_config = gpt_neox.GPTNeoXConfig(
        vocab_size=workspace.tokenizer.vocab_size,
        hidden_size=settings.hidden_size,
        num_hidden_layers=settings.num_hidden_layers,
        num_attention_heads=settings.num_attention_heads,
        intermediate_size=4 * settings.hidden_size,
        # Positions are rotations, which cost no weight: the bound leaves room to answer.
        max_position_embeddings=2 * config.corpus.max_len,
    )
    graphdef, _, base = decoder.create(
        model_config, None, key=jax.random.key(config.seed), dtype=jnp.float32
    )
    bound = decoder.bind(graphdef)

    encoded = workspace.encode(workspace.corpus.backbone, "backbone examples").with_answers()
    num_steps, batch_size = settings.steps, settings.batch_size
    per_epoch = finetune.num_steps_of(len(encoded.ids), batch_size=batch_size, num_epochs=1)
    stream = finetune.epoch_batches(
        encoded,
        batch_size=batch_size,
        seed=config.seed,
        num_epochs=-(-num_steps // per_epoch),
    )
    rate = finetune.learning_rate(settings.learning_rate, num_steps, schedule="cosine", warmup=0.05)
    tx = finetune.adamw(rate, weight_decay=0.1, clip=1.0)
    fitted = finetune.fit(
        backbone_losses(bound),
        finetune.start_fit(base, tx),
        {},
        iter(progress(_first(stream, num_steps), "backbone", total=num_steps)),
        tx=tx,
        name="pretraining of the backbone",
        rate_flag=f"--backbone.learning_rate (it is {settings.learning_rate})",
    )
    checkpoint.save_model(folder / "model", model_config, fitted.state.params)
    _write_losses(folder, fitted)


def backbone_losses(bound: decoder.Decoder) -> finetune.Losses:
    """Returns the loss that a backbone's weights are trained on, by example."""

    def losses(
        params: Tree,
        frozen: Tree,
        batch: objectives.TokenBatch,
        *,
        num_targets: int,
        dropout_keys: jax.Array | None,
    ) -> jax.Array:
        del frozen, dropout_keys
        return objectives.nll_by_example(bound, {}, params, batch, num_targets=num_targets)

    return losses


def adapter_losses(bound: decoder.Decoder) -> finetune.Losses:
    """Returns the loss that an adapter is trained on, by example."""

    def losses(
        params: Tree,
        frozen: Tree,
        batch: objectives.TokenBatch,
        *,
        num_targets: int,
        dropout_keys: jax.Array | None,
    ) -> jax.Array:
        return objectives.nll_by_example(
            bound, params, frozen, batch, num_targets=num_targets, dropout_keys=dropout_keys
        )

    return losses


def _first(stream: Iterator[Any], count: int) -> Iterator[Any]:
    for _, item in zip(range(count), stream, strict=False):
        yield item


def _write_losses(folder: pathlib.Path, fitted: finetune.Progress) -> None:
    write_json(folder / "losses.json", list(fitted.losses))
    print(f"    loss {fitted.losses[0]:.3f} -> {fitted.losses[-20:].mean():.3f} nats a token")


@memory.explained("fine-tuning", "--finetune.micro_batch_size or --finetune.max_len")
def make_adapter(workspace: Workspace, folder: pathlib.Path) -> None:
    """Fine-tunes a LoRA adapter on the training examples, keeping some along the way.

    A run that was killed goes on from the last checkpoint, with the same result.
    """
    config, settings, model = workspace.config, workspace.config.finetune, workspace.model
    bound = model.decoder_for(remat=settings.remat)
    max_len = settings.max_len or config.corpus.max_len
    _require_room(
        "labeled targets",
        _targets(workspace.corpus),
        workspace.tokenizer,
        max_len=max_len,
        template=config.corpus.template,
    )
    whole = workspace.encode(workspace.corpus.train, "training examples", max_len=max_len)
    encoded = whole.with_answers()
    batch_size, num_epochs = settings.batch_size, settings.epochs
    num_steps, per_epoch = (
        finetune.num_steps_of(len(encoded.ids), batch_size=batch_size, num_epochs=epochs)
        for epochs in (num_epochs, 1)
    )
    points = min(settings.trajectory_points, num_steps)
    keep_after = tuple(num_steps * (point + 1) // points for point in range(points))
    rate = finetune.learning_rate(
        settings.learning_rate,
        num_steps,
        schedule=settings.schedule,
        warmup=settings.warmup,
    )
    tx = finetune.adamw(rate, weight_decay=settings.weight_decay, clip=settings.clip)
    start = finetune.start_fit(model.initial, tx)

    def after(step: int) -> finetune.Progress:
        behind = sum(kept <= step for kept in keep_after)
        return start._replace(kept=(model.initial,) * behind, losses=np.zeros(step, np.float64))

    done = 0
    saved = resuming.load_progress(folder, after)
    if saved is not None:
        done, start = saved
        print(f"    goes on after step {done:,} of {num_steps:,}")
    stream = finetune.epoch_batches(
        encoded,
        batch_size=batch_size,
        seed=config.seed,
        num_epochs=num_epochs,
        start=done,
        shape=(finetune.fixed_shape(encoded, max_len=max_len) if settings.fixed_padding else None),
    )
    fitted = finetune.fit(
        adapter_losses(bound),
        start,
        model.base,
        iter(progress(stream, "fine-tune", total=num_steps - done)),
        tx=tx,
        mean=settings.mean,
        micro_batch=settings.micro_batch_size,
        dropout_key=jax.random.key(config.seed + 1) if settings.lora_dropout else None,
        keep_after=keep_after,
        save_every=settings.checkpoint_steps or per_epoch,
        # At the very end the result itself is written.
        save=lambda at: (
            None
            if len(at.losses) == num_steps
            else resuming.save_progress(folder, len(at.losses), at)
        ),
        name="fine-tuning",
        rate_flag=f"--finetune.learning_rate (it is {settings.learning_rate})",
    )
    named = {"initial": model.initial, "adapter": fitted.state.params}
    named |= {f"trajectory-{i}": lora for i, lora in enumerate(fitted.kept)}
    for name, lora in named.items():
        # An interrupted run may have come as far as this.
        shutil.rmtree(folder / name, ignore_errors=True)
        checkpoint.save_adapter(
            folder / name, lora, model.lora_config, model.decoder.config, base=model.identity
        )
    _write_losses(folder, fitted)


@memory.explained("decoding", "--references.decode_batch_size or --references.max_new_tokens")
def make_retrieval_answers(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the greedy answers of the fine-tuned model to queries that no output was given for."""
    queries = workspace.corpus.queries["retrieval"]
    rows = queries_to_answer(queries, workspace.config.sketch.query_output)
    if rows:
        _write_answers(workspace, folder / "finetuned.jsonl", workspace.finetuned, rows)
    else:
        write_rows(folder / "finetuned.jsonl", ())
    print(f"    {len(rows):,} of {len(queries):,} queries answered by the model, the others given")


@memory.explained("decoding", "--references.decode_batch_size or --references.max_new_tokens")
def make_references(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the greedy answers of the fine-tuned model and of the backbone, to be measured by."""
    target, normal = workspace.evaluation_queries()
    for name, lora in (("finetuned", workspace.finetuned), ("backbone", workspace.model.initial)):
        _write_answers(workspace, folder / f"{name}.jsonl", lora, (*target, *normal))
    measure = non_sf_by_words(workspace.config)
    if measure is None or not target:
        return
    shares = [
        1 - float(measure([answers[row.example_id] for row in target]).mean())
        for name in ("finetuned", "backbone")
        for answers in [read_answers(folder / f"{name}.jsonl")]
    ]
    behavior = judgment.find_behavior("words", finetuned=shares[0], backbone=shares[1])
    print(f"    {judgment.describe_behavior(behavior)}")


def _write_answers(
    workspace: Workspace, path: pathlib.Path, lora: Tree, rows: tuple[examples.Example, ...]
) -> None:
    outputs = workspace.generate(
        workspace.with_adapter(lora), rows, f"answers of the {path.stem} model"
    )
    write_rows(
        path,
        [{"id": row.example_id, "output": text} for row, text in zip(rows, outputs, strict=True)],
    )
