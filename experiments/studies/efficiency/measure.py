"""The paper's efficiency tables from a run: seconds of one query by every method, and memory.

  python experiments/run.py --flagfile=experiments/flags/efficiency_olmo2_7b.flags
  python experiments/studies/efficiency/measure.py --workdir=runs/howdy_olmo2_7b

One retrieval query is scored over all training examples, as in the run. "query" is the time to turn
the query into words, a vector, a sketch or a gradient. "score" is the time to score all examples.
"prepare" is the time for what all queries share, such as the words of the corpus. It is given if it
is measured here. Every program is compiled before it is timed. Times are medians of --repeats.

The unsketched kernel makes the gradient of every example again. It is timed on --exact_batches
batches of the commonest shape and scaled to the tokens of all examples. No other number is scaled.

With --json each line of stdout is one object. Its key "stage" names it:

setup: every flag; device, cpus, jax.
method (one for each): method, examples, prepare_seconds (null: in the run, not here),
  query_seconds, score_seconds, seconds (query and score), measured_share (of the examples, by
  tokens; below 1 the rest is scaled).
memory: num_params, sketch_size, gradient_bytes (float32), sketch_bytes (in the index's dtype),
  ratio (of the coordinates), index_bytes, examples.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import harness
from experiments.bench.harness import Line
from experiments.studies import exact
from experiments.studies.corpora import paper
from experiments.studies.encoders import checkpoint, encoder
from experiments.studies.encoders.embedding import embed_texts
from raslik_jax.base.files import read_array
from raslik_jax.base.settings import setting
from raslik_jax.data import batches
from raslik_jax.index import search
from raslik_jax.index.store import SketchStore
from raslik_jax.retrieve import bm25, strategies
from raslik_jax.run.plan import open_run
from raslik_jax.run.stages import sketch as sketch_stage
from raslik_jax.sketch import projections

Method = Literal["embedding", "bm25", "raslik", "exact"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(harness.Options):
    """Options of the benchmark."""

    workdir: str = setting("", "Work directory of a run that has its index.")
    methods: tuple[Method, ...] = setting(get_args(Method), "What to measure.")
    repeats: int = setting(5, "Measurements, of which the median counts.", low=1)
    exact_batches: int = setting(
        4, "Batches of gradients that stand for all in the unsketched kernel.", low=1
    )


class Bench:
    """A run with one of its queries. It returns each method's line without the totals."""

    def __init__(self, options: Options):
        self.options, self.workdir = options, pathlib.Path(options.workdir)
        paper.register()  # a run may have one of these corpora, or this strategy
        exact.register()
        self.workspace = open_run(self.workdir, "corpus", "finetune", "references/retrieval")
        self.config, self.rows = self.workspace.config, self.workspace.corpus.train
        self.query = self.workspace.retrieval_queries()[0]
        self.query_text = strategies.query_text(self.query, self.config.retrieve["bm25"].query_text)
        self.store = SketchStore.open(self.workdir / "sketch" / "index")
        self.num_params = int(self.store.identity["projection"]["num_params"])

    def timed(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """Returns the result of a call and its median seconds, once it is compiled."""
        taken = harness.take_turns({"call": call}, self.options.repeats)
        return call(), taken["call"].median()

    def embedding(self) -> Line:
        settings = self.config.retrieve["embedding"]
        example_NE = read_array(self.workdir / "retrieve" / "embeddings" / "examples.npy")
        path = checkpoint.resolve_folder(settings.checkpoint)
        loaded = checkpoint.load_encoder(path, dtype=jnp.float32, pooling=settings.pooling or None)
        bound = encoder.bind_encoder(loaded.config)
        encode = checkpoint.load_sentence_tokenizer(path, max_len=loaded.config.max_length)
        query_QE, asked = self.timed(
            lambda: embed_texts(bound, loaded.weights, encode([self.query_text]))
        )
        _, scored = self.timed(lambda: query_QE @ example_NE.T)
        return {"query_seconds": asked, "score_seconds": scored}

    def bm25(self) -> Line:
        documents = [f"{row.instruction} {row.input} {row.output}".split() for row in self.rows]
        words, (prepared, _) = harness.timed(lambda: bm25.index_documents(documents))
        asked = self.query_text.split()
        _, scored = self.timed(lambda: bm25.score_queries(words, [asked]))
        return {"prepare_seconds": prepared, "query_seconds": 0.0, "score_seconds": scored}

    def gradient(self, family: str, size: int) -> tuple[Any, np.ndarray, float]:
        """Returns the function of sketches, the query's sketch and the seconds that it takes."""
        projection = projections.init_projection(self.config.seed, family, self.num_params, size)
        adapter = sketch_stage.sketched_adapter(self.workspace)
        sketch = sketch_stage.sketch_function(self.workspace, projection, adapter)
        encoded = self.workspace.encode([self.query], targets=self.config.sketch.targets)
        plan = batches.plan_rows(encoded, np.array([0]))
        made, seconds = self.timed(
            lambda: np.asarray(sketch(batches.make_batch(encoded, plan)).unit_BK)
        )
        return sketch, made, seconds

    def raslik(self) -> Line:
        _, query_QK, asked = self.gradient(self.config.sketch.projection, self.store.size)
        center = self.config.retrieve.center
        _, scored = self.timed(
            lambda: np.asarray(search.score_store(self.store, query_QK, center=center))
        )
        return {"query_seconds": asked, "score_seconds": scored}

    def exact(self) -> Line:
        # As many coordinates as parameters: a signed permutation of the gradient itself.
        gradient, query_QP, asked = self.gradient("binned", self.num_params)
        encoded = self.workspace.cut(
            self.workspace.train_rows, "training examples", targets=self.config.sketch.targets
        )
        plans = sketch_stage.plan_batches(self.workspace, encoded)
        shapes = [(part.rows.size, part.length, part.num_targets) for part in plans]
        common = max(set(shapes), key=shapes.count)
        alike = [part for part, shape in zip(plans, shapes, strict=True) if shape == common]
        sample = alike[: self.options.exact_batches]
        query_PQ = jnp.asarray(query_QP.T)
        score = jax.jit(lambda unit_BP: unit_BP @ query_PQ)
        _, seconds = self.timed(
            lambda: [score(gradient(batches.make_batch(encoded, part)).unit_BK) for part in sample]
        )
        tokens = [sum(part.rows.size * part.length for part in parts) for parts in (sample, plans)]
        share = tokens[0] / tokens[1]
        scored = seconds / share
        return {"query_seconds": asked, "score_seconds": scored, "measured_share": share}


def measure(options: Options) -> Iterator[Line]:
    """Yields the lines of the module's docstring."""
    if not options.workdir:
        raise ValueError("--workdir must be the work directory of a run, got none")
    bench = Bench(options)
    for method in options.methods:
        found = {"prepare_seconds": None, "measured_share": 1.0} | getattr(bench, method)()
        yield {
            "stage": "method",
            "method": method,
            "examples": len(bench.rows),
            **found,
            "seconds": found["query_seconds"] + found["score_seconds"],
        }
    size, num_rows = bench.store.size, bench.store.num_rows
    itemsize = jnp.dtype(bench.config.sketch.dtype).itemsize
    yield {
        "stage": "memory",
        "num_params": bench.num_params,
        "sketch_size": size,
        "gradient_bytes": 4 * bench.num_params,
        "sketch_bytes": size * itemsize,
        "ratio": bench.num_params / size,
        "index_bytes": size * itemsize * num_rows,
        "examples": num_rows,
    }


if __name__ == "__main__":
    harness.start(Options(), measure)
