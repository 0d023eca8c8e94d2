"""The corpus of a run: examples, queries, tokenizer and the token rows for every stage."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from raslik_jax.data.read import formats
from raslik_jax.data.tokens import encoding, masking, prompts, tokenization
from raslik_jax.models import storage
from raslik_jax.run import artifacts
from raslik_jax.run.programs import Work
from raslik_jax.run.recipes import Case, Files, Recipe, pick
from raslik_jax.run.workspace import Workspace, queries_to_answer, read_tokenizer


def make_corpus(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the training examples, the queries, the tokenizer and the examples as token ids."""
    config = workspace.config
    settings, corpus = config.corpus, config.corpus.load(seed=config.seed)
    template = prompts.settle_template(settings.template, lambda: corpus.train)
    queries_to_answer(corpus.queries["retrieval"], config.sketch.query_output)  # refuses early
    if config.backbone.checkpoint:
        tokenizer = read_tokenizer(config)
    else:
        read = (*corpus.backbone, *corpus.train)
        form = prompts.TEMPLATES.get(template, prompts.Template())
        texts = [prompts.text_of(row, form) for row in read]
        tokenizer = tokenization.train_bpe(texts, vocab_size=settings.vocab_size)
    workspace.tell(masking.describe_rows(corpus.train, template))
    workspace.tell(masking.describe_options(corpus.train, corpus.queries["retrieval"]))
    artifacts.TOKENIZER.write(folder, tokenizer)
    artifacts.TEMPLATE.write(folder, template if template in prompts.TEMPLATES else "")
    form = prompts.find_template(template, tokenizer)
    queries = {
        name: tuple(masking.as_trained(row, corpus.train[0], form) for row in rows)
        for name, rows in corpus.queries.items()
    }
    trained = {"backbone": corpus.backbone, "train": corpus.train}
    for name, rows in (trained | queries).items():
        labels = ({"is_target": row.is_target, "source": row.source} for row in rows)
        artifacts.corpus_rows(name).write(folder, rows, extra=labels)
        workspace.tell(encoding.describe_long(rows))
        if name in trained:
            parts = encoding.encode_parts(rows, tokenizer, template=template)
            encoded = artifacts.corpus_tokens(name).write(folder, parts)
            what = "training examples"
        else:
            what = f"queries of {name}"
            encoded = encoding.encode(rows, tokenizer, template=template, only_last=True)
        workspace.tell(encoding.describe_dropped(encoded, what))
        if name in trained:
            what = "labeled targets"
            encoded = encoded.take(np.flatnonzero([row.is_target is True for row in rows]))
        encoding.require_answers(encoded, what, max_len=settings.max_len)
    workspace.tell(formats.describe_columns(corpus.train))
    if config.retrieve.held_out and (own := corpus.queries["test_target"]):
        way = "asks prompts of the training file in their place"
        workspace.tell(
            f"{len(own)} queries of test_target are not asked: --retrieve.held_out {way}"
        )
    num_targets = sum(row.is_target is True for row in corpus.train)
    print(f"    {len(corpus.train):,} training examples, {num_targets:,} of them labeled targets")


# Files of a checkpoint that its tokenizer is read from, and not its weights.
_TOKENIZER_SUFFIXES = (".json", ".txt", ".jinja", ".model")


def _files(case: Case) -> Files:
    """Returns the sources of the rows and the files of the tokenizer."""
    settings = case.config.backbone
    places = {"checkpoint": settings.checkpoint, "adapter": settings.adapter}
    folders = {kind: pathlib.Path(name) for kind, name in places.items() if os.path.isdir(name)}
    tokenizer = {
        f"{kind}/{path.name}": path
        for kind, folder in folders.items()
        for path in sorted({*folder.iterdir(), *(folder / one for one in storage.TOKENIZER_FILES)})
        # Trainers also write logs and states of their own next to an adapter.
        if (kind == "checkpoint" or path in {folder / one for one in storage.TOKENIZER_FILES})
        and (path.suffix in _TOKENIZER_SUFFIXES and path.is_file())
    }
    return case.config.corpus.source_files() | tokenizer


def _names(case: Case) -> Mapping[str, Any]:
    """Returns the names of the tokenizer's sources on the hub."""
    names = ["backbone.checkpoint", "backbone.revision"]
    if case.config.backbone.adapter:
        names += ["backbone.adapter", "backbone.adapter_revision"]
    return pick(case.config, names)[0]


UNITS = (
    Recipe(
        "corpus",
        make_corpus,
        settings="seed corpus corpus.dataset corpus.{config.corpus.dataset}",
        values=_names,
        files=_files,
        writes={"rows": 11},
        is_alone=True,
        work=lambda run: Work(500.0 * run.sizes.train),
    ),
)
