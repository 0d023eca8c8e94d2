"""The paper's efficiency tables from a run: seconds of one query by every method, and memory.

  python experiments/run.py --flagfile=experiments/flags/efficiency_olmo2_7b.flags
  python experiments/efficiency.py --workdir=runs/howdy_olmo2_7b

One retrieval query is scored over all training examples, as the run would: "query" is what it takes
to turn the query into words, a vector, a sketch or a gradient; "score" is scoring all examples;
"prepare" is what is done once for all queries (words of the corpus, its vectors or sketches) where
it is measured here. Every program is compiled before it is timed; medians of --repeats.

The unsketched kernel makes the gradient of every example anew. It is timed on --exact_batches
batches of the commonest shape and scaled to the tokens of all: the only figure here that is not
measured whole. --exact_batches=0 leaves it out.

With --json each line of stdout is one object. Its key "stage" says which:

setup: device, cpus, jax, workdir, repeats.
method (one for each): method, examples, prepare_seconds (null: in the run, not here),
  query_seconds, score_seconds, seconds (query and score), scaled (measured on a share of the
  examples), measured_share.
memory: num_params, sketch_size, gradient_bytes (float32), sketch_bytes (in the index's dtype),
  ratio (of the coordinates), index_bytes, examples.
"""

import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from raslik_jax.cli import command  # noqa: E402

METHODS = ("embedding", "bm25", "raslik", "exact")

_WORKDIR = flags.DEFINE_string("workdir", "", "Work directory of a run that has its index.")
_METHODS = command.define_list("methods", METHODS, f"Any of {', '.join(METHODS)}.", METHODS)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Measurements, of which the median counts.", 1)
_EXACT_BATCHES = flags.DEFINE_integer(
    "exact_batches", 4, "Batches of gradients that stand for all in the unsketched kernel.", 0
)
_JSON = flags.DEFINE_boolean("json", False, "Print a JSON line per method, no table.")


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Returns the last result of a call and its median seconds, after one call that compiles.

    The calls end with arrays on the host.
    """
    result, seconds = call(), []
    for _ in range(_REPEATS.value):
        start = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - start)
    return result, statistics.median(seconds)


def _row(method: str, examples: int, prepare: float | None, query: float, score: float) -> Any:
    return {
        "stage": "method",
        "method": method,
        "examples": examples,
        "prepare_seconds": prepare,
        "query_seconds": query,
        "score_seconds": score,
        "seconds": query + score,
        "scaled": False,
        "measured_share": 1.0,
    }


def measure(workdir: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of the module's docstring.

    Raises:
      ValueError: no run there, or its index or vectors are missing.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from raslik_jax.data import batches, tokenization
    from raslik_jax.files import read_array
    from raslik_jax.index import search
    from raslik_jax.index.store import SketchStore
    from raslik_jax.models import checkpoint, encoder
    from raslik_jax.retrieve import bm25, strategies
    from raslik_jax.retrieve.embeddings import embed_texts
    from raslik_jax.run.plan import open_run
    from raslik_jax.run.stages import retrieving
    from raslik_jax.sketch import projections

    workspace = open_run(workdir, "corpus", "finetune", "references/retrieval")
    config = workspace.config
    rows, query = workspace.corpus.train, workspace.retrieval_queries()[0]
    yield {
        "stage": "setup",
        "device": jax.devices()[0].device_kind,
        "cpus": os.cpu_count(),
        "jax": jax.__version__,
        "workdir": str(workdir),
        "repeats": _REPEATS.value,
    }
    if "embedding" in _METHODS.value:
        path = checkpoint.resolve_folder(config.retrieve.encoder_checkpoint)
        loaded = checkpoint.load_encoder(
            path, dtype=jnp.float32, pooling=config.retrieve.encoder_pooling or None
        )
        bound = encoder.bind_encoder(loaded.config)
        encode = tokenization.load_sentence_tokenizer(path, max_len=loaded.config.max_length)
        vectors = workdir / "retrieve" / "embeddings" / "examples.npy"
        if not vectors.is_file():
            raise ValueError(
                f"sentence vectors wanted, {vectors} is not there: run the retrieve stage with "
                "embedding among --retrieve.strategies"
            )
        example_NE = read_array(vectors)
        text = strategies.query_text(query, config.retrieve.query_text)
        query_QE, asked = timed(lambda: embed_texts(bound, loaded.weights, encode([text])))
        _, scored = timed(lambda: query_QE @ example_NE.T)
        yield _row("embedding", len(rows), None, asked, scored)
    if "bm25" in _METHODS.value:
        documents = [f"{row.instruction} {row.input} {row.output}".split() for row in rows]
        start = time.perf_counter()
        words = bm25.index_documents(documents)
        prepared = time.perf_counter() - start
        asked_words = strategies.query_text(query, config.retrieve.query_text).split()
        _, scored = timed(lambda: bm25.score_queries(words, [asked_words]))
        yield _row("bm25", len(rows), prepared, 0.0, scored)

    store = SketchStore.open(workdir / "sketch" / "index")
    num_params = int(store.identity["projection"]["num_params"])
    adapters = retrieving.sketched_adapters(workspace)
    encoded_query = workspace.encode([query], targets=config.sketch.targets)
    plan = batches.plan_rows(encoded_query, np.array([0]))
    if "raslik" in _METHODS.value:
        projection = projections.init_projection(
            config.seed, config.sketch.projection, num_params, store.size
        )
        sketch = retrieving.sketch_function(workspace, projection, adapters)
        query_QK, asked = timed(lambda: np.asarray(sketch(encoded_query, plan).unit_BK))
        _, scored = timed(
            lambda: np.asarray(
                search.score_store(store, query_QK, center=config.retrieve.center).forget_N
            )
        )
        yield _row("raslik", len(rows), None, asked, scored)
    if "exact" in _METHODS.value and _EXACT_BATCHES.value:
        # As many coordinates as parameters: a signed permutation of the gradient itself.
        whole = projections.init_projection(config.seed, "binned", num_params, num_params)
        gradient = retrieving.sketch_function(workspace, whole, adapters)
        query_QP, asked = timed(lambda: np.asarray(gradient(encoded_query, plan).unit_BK))
        encoded = workspace.encode(rows, targets=config.sketch.targets)
        plans = batches.plan_batches(
            encoded.lengths_N,
            encoded.num_targets_N,
            ids=encoded.ids,
            num_buckets=config.sketch.num_buckets,
            batch_tokens=config.sketch.batch_tokens,
        )
        shapes = [(part.rows.size, part.length, part.num_targets) for part in plans]
        common = max(set(shapes), key=shapes.count)
        sample = [part for part, shape in zip(plans, shapes, strict=True) if shape == common][
            : _EXACT_BATCHES.value
        ]
        score = jax.jit(lambda unit_BP, query_QP: unit_BP @ query_QP.T)
        query_on_device = jnp.asarray(query_QP)

        def scores() -> list[np.ndarray]:
            return [
                np.asarray(score(gradient(encoded, part).unit_BK, query_on_device))
                for part in sample
            ]

        _, seconds = timed(scores)
        share = sum(part.rows.size * part.length for part in sample) / sum(
            part.rows.size * part.length for part in plans
        )
        yield _row("exact", len(rows), None, asked, seconds / share) | {
            "scaled": share < 1,
            "measured_share": share,
        }
    row_bytes = store.size * np.dtype(np.float32).itemsize
    if config.sketch.dtype == "bfloat16":
        row_bytes //= 2
    yield {
        "stage": "memory",
        "num_params": num_params,
        "sketch_size": store.size,
        "gradient_bytes": 4 * num_params,
        "sketch_bytes": row_bytes,
        "ratio": num_params / store.size,
        "index_bytes": row_bytes * store.num_rows,
        "examples": store.num_rows,
    }


def tables_of(found: Sequence[dict[str, Any]]) -> str:
    """Returns both tables as text."""
    from raslik_jax.report.tables import Column, Table, render_terminal

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.4g}"

    titles = ("Method", "Prepare", "Query", "Score", "Query and score, s")
    keys = ("prepare_seconds", "query_seconds", "score_seconds", "seconds")
    rows = tuple(
        (
            entry["method"] + (" (scaled)" if entry["scaled"] else ""),
            *(number(entry[key]) for key in keys),
        )
        for entry in found
        if entry["stage"] == "method"
    )
    setup = next(entry for entry in found if entry["stage"] == "setup")
    memory = next(entry for entry in found if entry["stage"] == "memory")
    note = f"Seconds of one query over {memory['examples']:,} examples, on {setup['device']}."
    times = Table(tuple(Column(title, "right") for title in titles), rows, (note,))
    sizes = Table(
        tuple(
            Column(title, "right")
            for title in ("Full dim", "Sketch dim", "Full MiB", "Sketch MiB", "Ratio", "Index GB")
        ),
        (
            (
                f"{memory['num_params']:,}",
                f"{memory['sketch_size']:,}",
                f"{memory['gradient_bytes'] / 2**20:.4g}",
                f"{memory['sketch_bytes'] / 2**20:.4g}",
                f"{memory['ratio']:.4g}",
                f"{memory['index_bytes'] / 1e9:.3g}",
            ),
        ),
    )
    return f"{render_terminal(times)}\n\n{render_terminal(sizes)}"


def main() -> None:
    if not _WORKDIR.value:
        raise ValueError("--workdir must be the work directory of a run, got none")
    found = []
    for entry in measure(pathlib.Path(_WORKDIR.value)):
        found.append(entry)
        if _JSON.value:
            print(json.dumps(entry), flush=True)
    if not _JSON.value:
        print(tables_of(found))


if __name__ == "__main__":
    command.start(main)
