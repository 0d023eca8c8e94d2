"""From a fine-tuned model to an index of sketches, and those of the queries."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from raslik_jax.base.axes import Tree
from raslik_jax.base.progress import progress
from raslik_jax.data import batches
from raslik_jax.data.examples import Example, learned_part
from raslik_jax.data.tokens import encoding, prompts, tokenization
from raslik_jax.data.words import refused
from raslik_jax.index import build, search
from raslik_jax.index.format import INDEX_FORMAT
from raslik_jax.index.store import SketchStore
from raslik_jax.models import checkpoint
from raslik_jax.parallel import meshes, processes
from raslik_jax.run import artifacts, manifests, memory
from raslik_jax.run.programs import AbstractRun, Work, platform_of
from raslik_jax.run.recipes import Recipe
from raslik_jax.run.workspace import Workspace
from raslik_jax.sketch import gradients, projections, steps

# From a batch to the unit sketches and norms of its rows.
Sketch = Callable[[batches.Batch], gradients.Sketches]


def sketch_step(workspace: Workspace) -> Callable[..., gradients.Sketches]:
    """Returns the step that sketches a batch by the settings of a run."""
    settings = workspace.config.sketch
    how: Any = {"loss": settings.loss, "normalize": settings.normalize}
    return steps.sketching(workspace.sketch_model.decoder, **how)


def sketch_function(
    workspace: Workspace,
    projection: projections.Projection,
    adapter: Tree,
) -> Sketch:
    """Returns a function that sketches a batch by `sketch_step`, compiled once per shape."""
    fixed = meshes.place((projection, adapter))
    base = workspace.sketch_model.base
    return functools.partial(sketch_step(workspace), *fixed, base)


def sketched_adapter(workspace: Workspace) -> Tree:
    """Returns the adapter of --sketch.gradient_at."""
    name = {"finetuned": "adapter", "initial": "initial"}[workspace.config.sketch.gradient_at]
    return workspace.adapter("finetune", name)


def make_projection(workspace: Workspace, adapter: Tree) -> projections.Projection:
    """Returns the run's projection; never more coordinates than there are parameters."""
    settings = workspace.config.sketch
    num_params = projections.count_params(adapter)
    size = min(settings.size, num_params)
    return projections.init_projection(workspace.config.seed, settings.projection, num_params, size)


def plan_batches(workspace: Workspace, encoded: encoding.Encoded) -> tuple[batches.BatchPlan, ...]:
    """Returns the batches of gradients."""
    settings = workspace.config.sketch
    return batches.plan_batches(
        encoded.lengths_N,
        encoded.num_targets_N,
        ids=encoded.ids,
        num_buckets=settings.num_buckets,
        batch_tokens=settings.batch_tokens,
        program_tokens=steps.program_tokens(workspace.shapes),
    )


def sketch_queries(
    workspace: Workspace, sketch: Sketch, queries: Sequence[Example], *, is_asked: bool = False
) -> np.ndarray:
    """Returns the unit sketches of queries, [Q, K]; refuses a prompt without room to answer.

    Many queries have the cheapest shapes. A user's questions share a few shapes.
    """
    settings, max_len = workspace.config.sketch, workspace.config.corpus.max_len
    encoded = workspace.encode(queries, "queries", targets=settings.targets)
    encoding.require_answers(encoded, "the queries", max_len=max_len)
    if is_asked:
        size = min(len(queries), max(settings.batch_tokens // max_len, 1))
        plans = batches.plan_coarsely(encoded, batch_size=size, max_len=max_len)
    else:
        plans = plan_batches(workspace, encoded)
    return batches.map_rows(lambda batch: sketch(batch).unit_BK, encoded, plans)


def model_identity(workspace: Workspace, adapter: Tree) -> dict[str, Any]:
    """Returns the hashes of an index's inputs; an index has no rows of other inputs."""
    digest = hashlib.sha256()
    for row in workspace.corpus.train:
        digest.update(json.dumps((row.example_id, *learned_part(row))).encode())
    return {
        "base": checkpoint.base_hash(meshes.joined(workspace.sketch_model.base)),
        "dtypes": list(workspace.config.backbone.dtypes),
        "adapter": checkpoint.adapter_hash(adapter),
        "tokenizer": tokenization.tokenizer_hash(workspace.tokenizer),
        "template": prompts.template_hash(workspace.template),
        "projection_format": projections.SKETCH_FORMAT,
        "examples": digest.hexdigest()[:16],
    }


@memory.explained("sketching", "--sketch.batch_tokens or --sketch.size")
def make_index(workspace: Workspace, folder: pathlib.Path) -> None:
    """Sketches the gradients of the training examples that the index lacks."""
    settings = workspace.config.sketch
    encoded = workspace.cut(workspace.train_rows, "training examples", targets=settings.targets)
    plans, adapter = plan_batches(workspace, encoded), sketched_adapter(workspace)
    projection = make_projection(workspace, adapter)
    num_params, size = projection.spec.num_params, projection.spec.size
    if size < settings.size:
        print(
            f"    --sketch.size={settings.size} exceeds the number of parameters, so a sketch has "
            f"{num_params} numbers"
        )
    described = _describe_index(workspace, adapter, projection, encoded, plans)
    processes.alone(lambda: _create(folder, described))
    store = processes.when_visible(lambda: SketchStore.open(folder / "index"))
    left = sum(len(store.ids[store.chunk_positions(chunk)]) for chunk in store.missing_chunks())
    with contextlib.closing(progress(None, "sketches", total=left, unit="example")) as bar:
        build.fill_store(
            store,
            encoded,
            plans,
            sketch_function(workspace, projection, adapter),
            chunks=processes.from_first(lambda: list(store.missing_chunks())),
            count=bar.update,
        )
    processes.alone(store.finish)
    print(f"    {store.num_rows:,} sketches of {store.size:,} numbers ({num_params:,} parameters)")


def _describe_index(
    workspace: Workspace,
    adapter: Tree,
    projection: projections.Projection,
    encoded: encoding.Encoded,
    plans: Sequence[batches.BatchPlan],
) -> dict[str, Any]:
    """Returns the arguments of `SketchStore.create`: the index's sources and settings."""
    settings, spec = workspace.config.sketch, projection.spec
    names = ("gradient_at", "loss", "targets", "normalize")
    return {
        "identity": {
            **model_identity(workspace, adapter),
            "max_len": workspace.config.corpus.max_len,
            **{name: getattr(settings, name) for name in names},
            "projection": dataclasses.asdict(spec),
            "batches": {name: getattr(settings, name) for name in ("batch_tokens", "num_buckets")},
        },
        "ids": [encoded.ids[row] for row in batches.sketching_order(plans)],
        "size": spec.size,
        "dtype": settings.dtype,
        "chunk_rows": settings.chunk_rows or build.choose_chunk_rows(plans),
    }


def _create(folder: pathlib.Path, described: Mapping[str, Any]) -> None:
    """Makes the index of a unit or opens one that an earlier job has begun.

    It raises a ValueError if that index has other batches, as on another kind of device (see
    `steps.program_tokens`).
    """
    is_there = (folder / manifests.INDEX / manifests.MANIFEST).is_file()
    try:
        SketchStore.create(folder / "index", **described)
    except ValueError as error:
        if not is_there:
            raise
        problem = str(error).rpartition(": ")[0]
        raise refused("other_batches", problem=problem, folder=folder) from error


def open_index(workspace: Workspace) -> tuple[SketchStore, np.ndarray]:
    """Returns the index of a run and the row in it of each training example, [N]."""

    def read() -> SketchStore:
        store = SketchStore.open(workspace.root / "sketch" / "index")
        store.require_complete()
        return store

    store = processes.when_visible(read)
    return store, store.positions_of(row.example_id for row in workspace.corpus.train)


def ask_index(workspace: Workspace) -> tuple[SketchStore, np.ndarray, search.Queries]:
    """Returns what `open_index` does, and the run's retrieval queries of the index."""
    store, row_N = open_index(workspace)
    shape = len(workspace.retrieval_queries()), store.size
    query_QK = artifacts.QUERY_SKETCHES.read(workspace.root, shape)
    center = workspace.config.retrieve.center
    return store, row_N, search.queries_of_store(store, query_QK, center=center)


def sketch_of_run(workspace: Workspace) -> Sketch:
    """Returns the function that sketches a batch in the same way as the run's index."""
    adapter = sketched_adapter(workspace)
    return sketch_function(workspace, make_projection(workspace, adapter), adapter)


def make_query_sketches(workspace: Workspace, folder: pathlib.Path) -> None:
    """Sketches the gradients of the retrieval queries in the same way as the index."""
    sketch, queries = sketch_of_run(workspace), workspace.retrieval_queries()
    query_QK = sketch_queries(workspace, sketch, queries, is_asked=len(queries) <= 8)
    artifacts.QUERY_SKETCHES.write(folder, query_QK)


def count_sketches(run: AbstractRun, rows: int, disk_bytes: int | float = 0) -> Work:
    """Gradients of rows, projected."""
    settings, size, family = run.config.sketch, run.sketch_size, run.config.sketch.projection
    projection = projections.projection_shapes(family, run.num_params, size)
    with meshes.traced_for(platform_of(run.mesh)):
        most = steps.program_tokens(run.sketch_model.decoder.config)
    planned: Any = {"num_buckets": settings.num_buckets, "targets": settings.targets}
    is_dense = projections.PROJECTIONS[family].bins is None
    program = run.program(
        f"sketch {family} {size}",
        sketch_step(run),
        projection,
        run.model.initial,
        run.sketch_model.base,
        shapes=run.planned(rows, program_tokens=most, **planned),
        passes=2,
        row_operations=2.0 * run.num_params * size * is_dense,
        holds_gradients=True,
    )
    return Work(disk_bytes, [program])


_FORMATS = {"index": INDEX_FORMAT, "projection": projections.SKETCH_FORMAT}
# Of the gradients that scores are cosines of.
GRADIENTS = (
    Recipe(
        "sketch",
        make_index,
        "{rows} {sketched}",
        "{sketch} sketch.dtype sketch.chunk_rows",
        writes=_FORMATS,
        is_resumable=True,
        work=lambda run: count_sketches(run, run.sizes.train, run.index_bytes),
    ),
    Recipe(
        "retrieve/queries",
        make_query_sketches,
        "{queries} {sketched}",
        "{sketch} sketch.query_output",
        writes=_FORMATS,
        work=lambda run: count_sketches(
            run, run.queries["retrieval"], 4.0 * run.sketch_size * run.queries["retrieval"]
        ),
    ),
)
