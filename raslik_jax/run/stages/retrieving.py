"""From a fine-tuned model to forget and retain sets: sketch, retrieve."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32, Int

from raslik_jax import files
from raslik_jax.axes import Tree
from raslik_jax.config import Config, RetrieveConfig
from raslik_jax.data import batches, encoding, examples, prompts, tokenization
from raslik_jax.data.examples import Example
from raslik_jax.evaluate.metrics import measure, nest
from raslik_jax.files import write_json
from raslik_jax.index import build, search
from raslik_jax.index.claims import claimed_chunks
from raslik_jax.index.quantize import rotated_size
from raslik_jax.index.store import SketchStore
from raslik_jax.messages import some_of
from raslik_jax.models import checkpoint, encoder
from raslik_jax.progress import progress
from raslik_jax.retrieve import selection as selection_lib
from raslik_jax.retrieve import strategies as strategies_lib
from raslik_jax.retrieve.embeddings import embed_texts
from raslik_jax.retrieve.selection import select_by_count
from raslik_jax.retrieve.strategies import STRATEGIES, Request
from raslik_jax.run import memory
from raslik_jax.run.workspace import (
    Workspace,
)
from raslik_jax.sketch import diagnose, gradients, projections
from raslik_jax.sketch.families import PROJECTIONS
from raslik_jax.sketch.loss import example_loss


def sketch_function(
    workspace: Workspace, projection: projections.Projection, adapters: tuple[Tree, ...]
) -> Callable[[batches.Batch], gradients.Sketches]:
    """Returns a function that sketches a batch, compiled once per shape."""
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

    return functools.partial(sketch, projection, adapters, model.base)


def _plan(config: Config, encoded: encoding.Encoded) -> tuple[batches.BatchPlan, ...]:
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
    plans = _plan(config, encoded)
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
    plans = _plan(config, encoded)
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
    left = sum(len(store.chunk_ids(chunk)) for chunk in store.missing_chunks())
    # The bar counts what this job makes; beside other jobs it ends short of the total.
    with contextlib.closing(progress(None, "sketches", total=left, unit="example")) as bar:
        made = build.fill_store(
            store,
            work.plans,
            lambda plan: work.sketch(batches.make_batch(work.encoded, plan)),
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


class QueryScores(NamedTuple):
    """What queries say of every row of an index.

    Attributes:
      forget_N: s_F in the order of the index's ids; minus infinity for rows that can be in no set.
      retain_N: s_R = -s_F, likewise.
      gram_QQ: cosines between the queries.
      mean_K: mean sketch that was subtracted, if any.
    """

    forget_N: Float32[np.ndarray, " N"]
    retain_N: Float32[np.ndarray, " N"]
    gram_QQ: Float[np.ndarray, "Q Q"]
    mean_K: Float[np.ndarray, " K"] | None


def score_queries(
    store: SketchStore,
    query_QK: Float[np.ndarray, "Q K"],
    query_ids: Sequence[str],
    *,
    center: bool,
    aggregate: search.Aggregate,
) -> QueryScores:
    """Returns the influence of several queries of one behavior on every row of an index.

    Raises:
      ValueError: the queries point apart; see `search.score_store`.
    """
    mean_K = None
    if center:
        mean_K = store.center_K if store.dtype == "sign" else store.mean_K
    gram_QQ = selection_lib.check_agreement(query_QK, query_ids, mean_K)
    scores = search.score_store(store, query_QK, center=center, aggregate=aggregate)
    return QueryScores(np.asarray(scores.forget_N), np.asarray(scores.retain_N), gram_QQ, mean_K)


def row_sigma(
    store: SketchStore,
    positions: Int[np.ndarray, " M"],
    score_M: Float[np.ndarray, " M"],
    query_QK: Float[np.ndarray, "Q K"],
    found: QueryScores,
) -> Float[np.ndarray, " M"]:
    """Returns the standard deviation of rows' mean scores: of the sketch and of the dtype."""
    if store.dtype == "sign":  # an upper bound that has the sketch's share in it
        return search.sign_error(score_M, width=rotated_size(store.size))
    spec = projections.ProjectionSpec(**store.identity["projection"])
    p = PROJECTIONS[spec.family].collision(spec.num_params, spec.size)
    rho_MQ = selection_lib.query_cosines(store.rows(positions), query_QK, found.mean_K)
    sigma_M = selection_lib.score_sigma(found.gram_QQ, rho_MQ, p)
    if store.dtype == "int8":
        sigma_M = np.hypot(sigma_M, search.int8_error(store.scales[positions]))
    return sigma_M


# Rows nearest to the thresholds whose noise stands for all.
_PILOT_ROWS = 64


def margin_sigma(
    store: SketchStore,
    query_QK: Float[np.ndarray, "Q K"],
    found: QueryScores,
    settings: RetrieveConfig,
) -> float:
    """Returns the one sigma_k of --retrieve.select=margin: of the rows near the thresholds."""
    distance_N = np.minimum(
        np.abs(found.forget_N - settings.forget_threshold),
        np.abs(found.forget_N + settings.retain_threshold),
    )
    nearest = np.sort(np.argsort(distance_N, kind="stable")[:_PILOT_ROWS])
    nearest = nearest[np.isfinite(distance_N[nearest])]
    sigma_M = row_sigma(store, nearest, found.forget_N[nearest], query_QK, found)
    return float(np.sqrt(np.mean(sigma_M**2)))


def make_scores(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the influence of the queries on every training example, both poles in one pass."""
    settings, train = workspace.config.retrieve, workspace.corpus.train
    store = SketchStore.open(workspace.root / "sketch" / "index")
    ids = [row.example_id for row in workspace.retrieval_queries()]
    query_QK = files.read_array(
        workspace.root / "retrieve" / "queries" / "queries.npy", (len(ids), store.size)
    )
    found = score_queries(
        store, query_QK, ids, center=settings.center, aggregate=settings.aggregate
    )
    if settings.select == "margin":
        sigma = margin_sigma(store, query_QK, found, settings)
        write_json(folder / "sigma.json", {"sigma": sigma})
        print(f"    sigma of the sketch near the thresholds: {sigma:.2e}")
    place = {example_id: row for row, example_id in enumerate(store.ids)}
    influence_N = found.forget_N[[place[row.example_id] for row in train]]
    np.save(folder / "influence.npy", influence_N, allow_pickle=False)
    barred = _barred_ids(train, influence_N)
    if barred:
        print(
            f"    {len(barred):,} examples have no gradient (such as no token of an answer) and "
            f"enter no set: {some_of(barred)}"
        )


def _barred_ids(rows: Sequence[Example], influence_N: Float[np.ndarray, " N"]) -> list[str]:
    pairs = zip(rows, influence_N, strict=True)
    return [row.example_id for row, score in pairs if score == -np.inf]


def make_embeddings(
    workspace: Workspace, folder: pathlib.Path, *, queries: Sequence[Example] | None = None
) -> None:
    """Writes the sentence vectors of all training examples and of the retrieval queries.

    Args:
      workspace: the run.
      folder: where `examples.npy` and `queries.npy` go.
      queries: others than the run's own.
    """
    rows = workspace.retrieval_queries() if queries is None else queries
    settings = workspace.config.retrieve
    path = checkpoint.resolve_folder(settings.encoder_checkpoint, auto="AutoModel")
    model = checkpoint.load_encoder(
        path, dtype=jnp.float32, pooling=settings.encoder_pooling or None
    )
    bound = encoder.bind_encoder(model.config)
    encode = tokenization.load_sentence_tokenizer(path, max_len=model.config.max_length)
    texts = {
        "examples": [strategies_lib.prompt_text(row) for row in workspace.corpus.train],
        "queries": [strategies_lib.query_text(row, settings.query_text) for row in rows],
    }
    for name, part in texts.items():
        vector_NE = embed_texts(bound, model.weights, encode(part), bar=f"vectors of {name}")
        np.save(folder / f"{name}.npy", vector_NE, allow_pickle=False)


@memory.explained("the exact kernel", "--sketch.batch_tokens")
def make_exact_scores(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the influence by the unsketched kernel: gradients are made anew for each use.

    A sketch of as many coordinates as the gradient has is a signed permutation of it, whose
    cosines are those of the gradients. Memory: a batch of gradients and those of the queries.
    """
    config, settings, model = workspace.config, workspace.config.retrieve, workspace.model
    adapters = sketched_adapters(workspace)
    size = len(adapters) * projections.count_params(model.initial)
    sketch = sketch_function(
        workspace, projections.init_projection(config.seed, "binned", size, size), adapters
    )
    query_QK = sketch_queries(workspace, sketch)
    encoded = workspace.cut(
        workspace.train_rows, "training examples", targets=config.sketch.targets
    )
    plans = _plan(config, encoded)
    mean_K = None
    if settings.center:
        total_K = np.zeros(size)
        for _, found in batches.each_batch(sketch, encoded, progress(plans, "mean gradient")):
            total_K += found.unit_BK.sum(axis=0, dtype=np.float64)
        mean_K = total_K / len(workspace.corpus.train)
    queries = search.center_queries(query_QK, mean_K)
    ids = [row.example_id for row in workspace.retrieval_queries()]
    selection_lib.check_agreement(query_QK, ids, mean_K)
    columns = jax.device_put(search.to_columns(queries, aggregate=settings.aggregate))

    def scores(batch: batches.Batch) -> tuple[jax.Array, jax.Array]:
        sketches = sketch(batch)
        return search.row_cosines(sketches.unit_BK, columns), sketches.norm_B

    score_NG, norm_N = batches.map_rows(scores, encoded, plans, bar="exact kernel")
    found = search.both_ends(score_NG, norm_N > 0, settings.aggregate)
    np.save(folder / "influence.npy", found.forget_N, allow_pickle=False)


def read_influence(workspace: Workspace, unit: str = "influence") -> Float[np.ndarray, " N"]:
    """Returns the influence on every training example that a unit of the retrieve stage wrote."""
    path = workspace.root / "retrieve" / unit / "influence.npy"
    return files.read_array(path, (len(workspace.corpus.train),))


def count_targets(rows: Sequence[Example], influence_N: Float[np.ndarray, " N"]) -> int:
    """Returns how many labeled targets can be in a set."""
    pairs = zip(rows, influence_N, strict=True)
    return sum(bool(row.is_target and score > -np.inf) for row, score in pairs)


def set_sizes(workspace: Workspace, influence_N: Float[np.ndarray, " N"]) -> tuple[int, int]:
    """Returns the sizes of the forget and the retain set, the same for every strategy.

    Named, or what the rule of --retrieve.select gives for RASLIK's scores: then RASLIK's sets are
    the best of that many, too.
    """
    settings, rows = workspace.config.retrieve, workspace.corpus.train
    num_targets = count_targets(rows, influence_N)
    if settings.select == "count":
        return selection_lib.set_counts(settings, num_targets)
    sigma = None
    if settings.select == "margin":
        path = workspace.root / "retrieve" / "influence" / "sigma.json"
        sigma = files.read_json(path, {"sigma": float})["sigma"]
    retain_N = np.where(influence_N == -np.inf, -np.inf, -influence_N)
    chosen = selection_lib.select_sets(
        influence_N,
        retain_N,
        [row.example_id for row in rows],
        settings,
        num_targets=num_targets,
        sigma=sigma,
    )
    return len(chosen.forget), len(chosen.retain)


def _strategy_arrays(workspace: Workspace, strategy: str) -> dict[str, Any]:
    """Returns what a strategy needs beyond texts, labels and influence."""
    folder = workspace.root / "retrieve"
    if strategy == "embedding":
        counts = {
            "examples": len(workspace.corpus.train),
            "queries": len(workspace.retrieval_queries()),
        }
        parts = [
            files.read_array(folder / "embeddings" / f"{name}.npy", (count, None))
            for name, count in counts.items()
        ]
        return {"vectors": strategies_lib.Vectors(*parts)}
    if strategy == "exact":
        return {"exact_N": read_influence(workspace, "exact_kernel")}
    return {}


def make_sets(workspace: Workspace, strategy: str, folder: pathlib.Path) -> None:
    """Writes one strategy's forget and retain sets and what the labels say of them."""
    rows = workspace.corpus.train
    influence_N = read_influence(workspace)
    num_forget, num_retain = set_sizes(workspace, influence_N)
    settings, queries = workspace.config.retrieve, workspace.retrieval_queries()
    scores = STRATEGIES[strategy](
        Request(
            examples=rows,
            influence_N=influence_N,
            seed=workspace.config.seed,
            retain_from=settings.retain_from,
            queries=queries,
            query_text=settings.query_text,
            aggregate=settings.aggregate,
            num_forget=num_forget,
            num_retain=num_retain,
            oracle_share=settings.cr_oracle_share,
            **_strategy_arrays(workspace, strategy),
        )
    )
    selection = select_by_count(
        scores.forget_N,
        scores.retain_N,
        [row.example_id for row in rows],
        num_forget=num_forget,
        num_retain=num_retain,
    )
    for name, chosen, score_N in (
        ("forget", selection.forget, scores.forget_N),
        ("retain", selection.retain, scores.retain_N),
    ):
        examples.write_examples(
            folder / f"{name}.jsonl",
            [rows[i] for i in chosen],
            extra=[
                {
                    "is_target": rows[i].is_target,
                    "source": rows[i].source,
                    "score": float(score_N[i]),
                }
                for i in chosen
            ],
        )
    labels = [row.is_target for row in rows]
    barred = _barred_ids(rows, influence_N)
    evidence: dict[str, Any] = {
        "influence_N": influence_N,
        "forget_set": selection.forget,
        "retain_set": selection.retain,
    }
    if None not in labels and any(labels):
        evidence["labels_N"] = np.asarray(labels, bool)
        # With labels of one kind alone there is nothing to tell apart.
        if strategy in strategies_lib.RANKING_STRATEGIES and not all(labels):
            evidence["ranking_N"] = scores.forget_N
    entry: dict[str, Any] = {
        **nest(measure(evidence))["retrieval"],
        "num_queries": len(queries),
        "without_gradient": {"count": len(barred), "ids": barred},
        "selection": selection_lib.summarize_selection(
            selection,
            scores.forget_N,
            scores.retain_N,
            influence_N=influence_N,
            labels=labels,
            texts=[(row.instruction, row.input, row.output) for row in rows],
        ),
    }
    if "precision" in entry:
        print(
            f"    precision {entry['precision']:.3f} (base rate {entry['base_rate']:.3f}), "
            f"{entry['targets_in_retain']} targets in the retain set"
        )
    write_json(folder / "summary.json", entry)
