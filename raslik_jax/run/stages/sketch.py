"""From a fine-tuned model to an index of sketches, those of the queries, and a diagnosis."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from raslik_jax.axes import Tree
from raslik_jax.config import Config
from raslik_jax.data import batches, encoding, prompts, tokenization
from raslik_jax.data.examples import Example
from raslik_jax.files import write_json
from raslik_jax.index import build
from raslik_jax.index.claims import claimed_chunks
from raslik_jax.index.store import SketchStore
from raslik_jax.models import checkpoint
from raslik_jax.progress import progress
from raslik_jax.run import memory
from raslik_jax.run.workspace import (
    Workspace,
)
from raslik_jax.sketch import diagnose, gradients, projections
from raslik_jax.sketch.loss import example_loss


def sketch_step(workspace: Workspace) -> Callable[..., gradients.Sketches]:
    """Returns the jitted function of (projection, adapters, base, batch)."""
    settings, model = workspace.config.sketch, workspace.sketch_model

    @jax.jit
    def sketch(
        projection: projections.Projection,
        adapters: tuple[Tree, ...],
        base: Tree,
        batch: batches.Batch,
    ) -> gradients.Sketches:
        loss = functools.partial(
            example_loss, model.decoder, num_targets=batch.num_targets, loss=settings.loss
        )
        return gradients.sketch_gradients(
            loss,
            projection,
            adapters,
            base,
            batch.tokens_BL,
            batch.target_mask_BL,
            normalize=settings.normalize,
        )

    return sketch


def sketch_function(
    workspace: Workspace, projection: projections.Projection, adapters: tuple[Tree, ...]
) -> Callable[[batches.Batch], gradients.Sketches]:
    """Returns a function that sketches a batch, compiled once per shape."""
    base = workspace.sketch_model.base
    return functools.partial(sketch_step(workspace), projection, adapters, base)


def plan_batches(config: Config, encoded: encoding.Encoded) -> tuple[batches.BatchPlan, ...]:
    """Returns the batches that gradients of a corpus are taken in."""
    return batches.plan_batches(
        encoded.lengths_N,
        encoded.num_targets_N,
        ids=encoded.ids,
        num_buckets=config.sketch.num_buckets,
        batch_tokens=config.sketch.batch_tokens,
    )


def sketched_adapters(workspace: Workspace) -> tuple[Tree, ...]:
    """Returns the adapters at which gradients are taken, of --sketch.gradient_at."""
    folder = workspace.root / "finetune"
    names = {
        "finetuned": ["adapter"],
        "initial": ["initial"],
        "trajectory": [f"trajectory-{i}" for i in range(len(list(folder.glob("trajectory-*"))))],
    }[workspace.config.sketch.gradient_at]
    return tuple(workspace.adapter("finetune", name) for name in names)


def make_projection(workspace: Workspace, num_adapters: int) -> projections.Projection:
    """Returns the run's projection; never more coordinates than there are parameters."""
    settings = workspace.config.sketch
    num_params = num_adapters * projections.count_params(workspace.model.initial)
    return projections.init_projection(
        workspace.config.seed,
        settings.projection,
        num_params,
        min(settings.size, num_params),
    )


def sketch_queries(
    workspace: Workspace,
    sketch: Callable[[batches.Batch], gradients.Sketches],
) -> np.ndarray:
    """Returns the unit sketches of the retrieval queries, [Q, K]."""
    config, queries = workspace.config, workspace.retrieval_queries()
    encoded = workspace.encode(queries, "retrieval queries", targets=config.sketch.targets)
    encoding.require_answers(encoded, "the retrieval queries", max_len=config.corpus.max_len)
    plans = plan_batches(config, encoded)
    return batches.map_rows(lambda batch: sketch(batch).unit_BK, encoded, plans)


class IndexWork(NamedTuple):
    """An index and all that it takes to make its rows.

    Attributes:
      store: the index, complete or not.
      plans: batches of the training examples; the rows are in their order.
      sketch: makes the sketches of a batch of some encoded examples.
      encoded: the training examples.
      num_params: P.
    """

    store: SketchStore
    plans: tuple[batches.BatchPlan, ...]
    sketch: Callable[[batches.Batch], gradients.Sketches]
    encoded: encoding.Encoded
    num_params: int


def examples_hash(rows: Sequence[Example]) -> str:
    """Returns 16 hex digits of the SHA-256 of the rows' ids and texts, in their order."""
    digest = hashlib.sha256()
    for row in rows:
        texts = (row.example_id, row.instruction, row.input, row.output)
        digest.update(json.dumps(texts).encode())
    return digest.hexdigest()[:16]


def open_index(workspace: Workspace, folder: pathlib.Path) -> IndexWork:
    """Returns the index of a run, made empty if it is not there, and what fills it."""
    config, settings = workspace.config, workspace.config.sketch
    model = workspace.sketch_model
    adapters = sketched_adapters(workspace)
    projection = make_projection(workspace, len(adapters))
    num_params, size = projection.spec.num_params, projection.spec.size
    if size < settings.size:
        print(f"    sketch_size {settings.size} exceeds the {num_params} LoRA parameters")
    sketch = sketch_function(workspace, projection, adapters)

    encoded = workspace.cut(workspace.train_rows, "training examples", targets=settings.targets)
    plans = plan_batches(config, encoded)
    order = batches.sketching_order(plans)
    store = SketchStore.create(
        folder / "index",
        identity={
            "base": checkpoint.base_hash(model.base),
            "adapters": [checkpoint.adapter_hash(lora) for lora in adapters],
            "tokenizer": tokenization.tokenizer_hash(workspace.tokenizer),
            "template": prompts.template_hash(config.corpus.template),
            "max_len": config.corpus.max_len,
            "gradient_at": settings.gradient_at,
            "loss": settings.loss,
            "targets": settings.targets,
            "normalize": settings.normalize,
            "projection": dataclasses.asdict(projection.spec),
            "projection_format": projections.SKETCH_FORMAT,
            "examples": examples_hash(workspace.corpus.train),
            "batches": {"batch_tokens": settings.batch_tokens, "num_buckets": settings.num_buckets},
        },
        ids=[encoded.ids[row] for row in order],
        size=size,
        dtype=settings.dtype,
        chunk_rows=settings.chunk_rows or build.choose_chunk_rows(plans),
    )
    return IndexWork(store, plans, sketch, encoded, num_params)


def fill_index(work: IndexWork) -> int:
    """Makes the rows that are missing, with any other job that does; how many were made here."""
    store = work.store
    left = sum(len(store.ids[store.chunk_positions(chunk)]) for chunk in store.missing_chunks())
    # The bar counts what this job makes; beside other jobs it ends short of the total.
    with contextlib.closing(progress(None, "sketches", total=left, unit="example")) as bar:
        made = build.fill_store(
            store,
            work.encoded,
            work.plans,
            work.sketch,
            chunks=claimed_chunks(store, worker=f"{socket.gethostname()}-{os.getpid()}"),
            count=bar.update,
        )
    store.finish()
    return made


@memory.explained("sketching", "--sketch.batch_tokens or --sketch.size")
def make_index(workspace: Workspace, folder: pathlib.Path) -> None:
    """Sketches the gradients of every training example."""
    work = open_index(workspace, folder)
    fill_index(work)
    store = work.store
    print(f"    {store.num_rows:,} sketches of {store.size:,} coordinates, P = {work.num_params:,}")


def make_query_sketches(workspace: Workspace, folder: pathlib.Path) -> None:
    """Sketches the gradients of the retrieval queries, as the index has those of the examples."""
    adapters = sketched_adapters(workspace)
    projection = make_projection(workspace, len(adapters))
    sketch = sketch_function(workspace, projection, adapters)
    query_QK = sketch_queries(workspace, sketch)
    np.save(folder / "queries.npy", query_QK, allow_pickle=False)


def make_diagnosis(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes and prints how the projection does on gradients of some training examples."""
    settings, model = workspace.config.sketch, workspace.sketch_model
    adapters = sketched_adapters(workspace)
    projection = make_projection(workspace, len(adapters))
    encoded = workspace.cut(workspace.train_rows, "training examples", targets=settings.targets)
    last = len(encoded.ids) - 1
    rows = np.unique(np.linspace(0, last, settings.diagnose).astype(np.int64))
    plan = batches.plan_rows(encoded, rows)
    batch = batches.make_batch(encoded, plan)
    loss = functools.partial(
        example_loss, model.decoder, num_targets=plan.num_targets, loss=settings.loss
    )

    # One at a time: these flat vectors are handed out, which the sketch never does.
    @jax.jit
    def flat_gradients(
        adapters: tuple[Tree, ...], base: Tree, tokens_NL: jax.Array, mask_NL: jax.Array
    ) -> jax.Array:
        def one(row: tuple[jax.Array, jax.Array]) -> jax.Array:
            return gradients.flat_gradient(loss, adapters, base, *row, normalize=settings.normalize)

        return jax.lax.map(one, (tokens_NL, mask_NL))

    found = diagnose.diagnose(
        projection,
        flat_gradients(
            adapters,
            model.base,
            jnp.asarray(batch.tokens_BL),
            jnp.asarray(batch.target_mask_BL),
        ),
        projections.gradient_manifest(
            adapters[0]
            if len(adapters) == 1
            else {f"adapter-{i:03d}": lora for i, lora in enumerate(adapters)}
        ),
    )
    write_json(folder / "diagnosis.json", diagnose.to_json(found))
    rows_of_text = diagnose.table_rows(found)
    width = max(len(name) for name, _ in rows_of_text)
    text = "\n".join(f"{name:<{width}}  {value}" for name, value in rows_of_text)
    (folder / "table.txt").write_text(text + "\n")
    print("    " + text.replace("\n", "\n    "))
