"""The corpus of a run: examples, queries, tokenizer and the token rows that every stage reads."""

import pathlib

import numpy as np

from raslik_jax.data import encoding, examples, prompts, tokenization
from raslik_jax.messages import some_of
from raslik_jax.models import checkpoint
from raslik_jax.run.workspace import Workspace, queries_to_answer


def make_corpus(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the training examples, the queries, the tokenizer and the examples as token ids."""
    config = workspace.config
    corpus = config.corpus.load(seed=config.seed)
    queries_to_answer(corpus.queries["retrieval"], config.sketch.query_output)  # refuses early
    trained = {"backbone": corpus.backbone, "train": corpus.train}
    for name, rows in (trained | dict(corpus.queries)).items():
        labels = [{"is_target": row.is_target, "source": row.source} for row in rows]
        examples.write_examples(folder / f"{name}.jsonl", rows, extra=labels)
    tokenizer = _tokenizer(workspace, (*corpus.backbone, *corpus.train))
    tokenization.save_tokenizer(folder / "tokenizer", tokenizer)
    encoded = {
        name: encoding.encode(rows, tokenizer, template=config.corpus.template)
        for name, rows in (trained | dict(corpus.queries)).items()
    }
    for name in trained:
        encoded[name].save(folder / f"{name}.npz")
    is_target_N = np.array([row.is_target is True for row in corpus.train], bool)
    asked = {f"queries of {name}": encoded[name] for name in corpus.queries}
    asked["labeled targets"] = encoded["train"].take(np.flatnonzero(is_target_N))
    for what, whole in asked.items():
        encoding.require_answers(
            whole.cut(config.corpus.max_len), what, max_len=config.corpus.max_len
        )
    kept, own = examples.extra_keys((*corpus.train, *corpus.queries["retrieval"]))
    if kept or own:
        names = ([f"{some_of(kept)} kept for exports"] if kept else []) + (
            [f"{some_of(own)} left out, exports write their own"] if own else []
        )
        print(f"    keys of rows that are no fields: {'; '.join(names)}")
    print(
        f"    {len(corpus.train):,} training examples, {is_target_N.sum():,} of them labeled "
        "targets"
    )


def _tokenizer(workspace: Workspace, rows: tuple[examples.Example, ...]) -> tokenization.Tokenizer:
    """Returns the checkpoint's tokenizer, or one that is trained on the corpus."""
    settings, corpus = workspace.config.backbone, workspace.config.corpus
    if settings.checkpoint:
        return tokenization.load_tokenizer(
            checkpoint.resolve_folder(settings.checkpoint, revision=settings.revision or None)
        )
    texts = [prompts.render_prompt(row, corpus.template) + row.output for row in rows]
    return tokenization.train_bpe(texts, vocab_size=corpus.vocab_size)
