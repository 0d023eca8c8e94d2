"""The paper's efficiency tables from a run: seconds of one query by every method, and memory.

  python experiments/run.py --flagfile=experiments/flags/efficiency_olmo2_7b.flags
  python experiments/bench/efficiency.py --workdir=runs/howdy_olmo2_7b

One retrieval query is scored over all training examples, as the run would: "query" is what it takes
to turn the query into words, a vector, a sketch or a gradient; "score" is scoring all examples;
"prepare" is what is done once for all queries (words of the corpus, its vectors or sketches) where
it is measured here. Every program is compiled before it is timed; medians of --repeats.

The unsketched kernel makes the gradient of every example again. It is timed on --exact_batches
batches of the commonest shape and scaled to the tokens of all: the only figure here that is not
measured whole. --exact_batches=0 leaves it out.

With --json each line of stdout is one object. Its key "stage" says which:

setup: every flag; device, cpus, jax.
method (one for each): method, examples, prepare_seconds (null: in the run, not here),
  query_seconds, score_seconds, seconds (query and score), scaled (measured on a share of the
  examples), measured_share.
memory: num_params, sketch_size, gradient_bytes (float32), sketch_bytes (in the index's dtype),
  ratio (of the coordinates), index_bytes, examples.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import harness
from experiments.bench.harness import Line
from raslik_jax.data import batches, tokenization
from raslik_jax.files import read_array
from raslik_jax.index import search
from raslik_jax.index.store import SketchStore
from raslik_jax.models import checkpoint, encoder
from raslik_jax.retrieve import bm25, strategies
from raslik_jax.retrieve.embeddings import embed_texts
from raslik_jax.run.plan import open_run
from raslik_jax.run.stages import sketch as sketch_stage
from raslik_jax.settings import setting
from raslik_jax.sketch import projections

Method = Literal["embedding", "bm25", "raslik", "exact"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(harness.Options):
    """Options of the benchmark."""

    workdir: str = setting("", "Work directory of a run that has its index.")
    methods: tuple[Method, ...] = setting(get_args(Method), "What to measure.")
    repeats: int = setting(5, "Measurements, of which the median counts.", low=1)
    exact_batches: int = setting(
        4, "Batches of gradients that stand for all in the unsketched kernel.", low=0
    )


class Bench:
    """A run, one of its queries, and what each method makes of it."""

    def __init__(self, options: Options):
        self.options = options
        self.workdir = pathlib.Path(options.workdir)
        self.workspace = open_run(self.workdir, "corpus", "finetune", "references/retrieval")
        self.config = self.workspace.config
        self.rows = self.workspace.corpus.train
        self.query = self.workspace.retrieval_queries()[0]
        self.query_text = strategies.query_text(self.query, self.config.retrieve["bm25"].query_text)
        self.store = SketchStore.open(self.workdir / "sketch" / "index")
        self.num_params = int(self.store.identity["projection"]["num_params"])

    def timed(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """Returns the result of a call and its median seconds, once it is compiled."""
        costs = harness.take_turns({"call": call}, self.options.repeats)
        return call(), harness.median_seconds(costs["call"])

    def line(self, method: str, query: float, score: float, **more: Any) -> Line:
        """Returns the line of a method."""
        return {
            "stage": "method",
            "method": method,
            "examples": len(self.rows),
            "prepare_seconds": None,
            "query_seconds": query,
            "score_seconds": score,
            "seconds": query + score,
            "scaled": False,
            "measured_share": 1.0,
            **more,
        }

    def embedding(self) -> Line:
        """Measures sentence vectors."""
        retrieve = self.config.retrieve
        vectors = self.workdir / "retrieve" / "embeddings" / "examples.npy"
        if not vectors.is_file():
            raise ValueError(
                f"sentence vectors must be in {vectors}, got none: run the retrieve stage with "
                "embedding among --retrieve.strategies"
            )
        path = checkpoint.resolve_folder(retrieve["embedding"].checkpoint)
        loaded = checkpoint.load_encoder(
            path, dtype=jnp.float32, pooling=retrieve["embedding"].pooling or None
        )
        bound = encoder.bind_encoder(loaded.config)
        encode = tokenization.load_sentence_tokenizer(path, max_len=loaded.config.max_length)
        example_NE = read_array(vectors)
        query_QE, asked = self.timed(
            lambda: embed_texts(bound, loaded.weights, encode([self.query_text]))
        )
        _, scored = self.timed(lambda: query_QE @ example_NE.T)
        return self.line("embedding", asked, scored)

    def bm25(self) -> Line:
        """Measures words."""
        documents = [f"{row.instruction} {row.input} {row.output}".split() for row in self.rows]
        words, prepared = harness.timed(lambda: bm25.index_documents(documents))
        asked = self.query_text.split()
        _, scored = self.timed(lambda: bm25.score_queries(words, [asked]))
        return self.line("bm25", 0.0, scored, prepare_seconds=prepared.wall)

    def gradient(self, projection: projections.Projection) -> tuple[Any, np.ndarray, float]:
        """Returns the function of sketches, the query's sketch and the seconds that it takes."""
        sketch = sketch_stage.sketch_function(
            self.workspace, projection, sketch_stage.sketched_adapters(self.workspace)
        )
        encoded = self.workspace.encode([self.query], targets=self.config.sketch.targets)
        plan = batches.plan_rows(encoded, np.array([0]))
        made, seconds = self.timed(
            lambda: np.asarray(sketch(batches.make_batch(encoded, plan)).unit_BK)
        )
        return sketch, made, seconds

    def raslik(self) -> Line:
        """Measures sketches."""
        projection = projections.init_projection(
            self.config.seed, self.config.sketch.projection, self.num_params, self.store.size
        )
        _, query_QK, asked = self.gradient(projection)
        center = self.config.retrieve.center
        _, scored = self.timed(
            lambda: np.asarray(search.score_store(self.store, query_QK, center=center))
        )
        return self.line("raslik", asked, scored)

    def exact(self) -> Line | None:
        """Measures whole gradients, unless none is to stand for all."""
        if not self.options.exact_batches:
            return None
        # As many coordinates as parameters: a signed permutation of the gradient itself.
        whole = projections.init_projection(
            self.config.seed, "binned", self.num_params, self.num_params
        )
        gradient, query_QP, asked = self.gradient(whole)
        query_on_device = jnp.asarray(query_QP)
        sketch = self.config.sketch
        encoded = self.workspace.cut(
            self.workspace.train_rows, "training examples", targets=sketch.targets
        )
        plans = batches.plan_batches(
            encoded.lengths_N,
            encoded.num_targets_N,
            ids=encoded.ids,
            num_buckets=sketch.num_buckets,
            batch_tokens=sketch.batch_tokens,
        )
        shapes = [(part.rows.size, part.length, part.num_targets) for part in plans]
        common = max(set(shapes), key=shapes.count)
        alike = [part for part, shape in zip(plans, shapes, strict=True) if shape == common]
        sample = alike[: self.options.exact_batches]
        score = jax.jit(lambda unit_BP, query_QP: unit_BP @ query_QP.T)

        def scores() -> list[np.ndarray]:
            units = (gradient(batches.make_batch(encoded, part)).unit_BK for part in sample)
            return [np.asarray(score(unit_BP, query_on_device)) for unit_BP in units]

        _, seconds = self.timed(scores)
        tokens = [sum(part.rows.size * part.length for part in parts) for parts in (sample, plans)]
        share = tokens[0] / tokens[1]
        return self.line("exact", asked, seconds / share, scaled=share < 1, measured_share=share)

    def memory(self) -> Line:
        """Returns the sizes of a gradient and of a sketch."""
        itemsize = jnp.dtype(self.config.sketch.dtype).itemsize
        size = self.store.size
        return {
            "stage": "memory",
            "num_params": self.num_params,
            "sketch_size": size,
            "gradient_bytes": 4 * self.num_params,
            "sketch_bytes": size * itemsize,
            "ratio": self.num_params / size,
            "index_bytes": size * itemsize * self.store.num_rows,
            "examples": self.store.num_rows,
        }


METHODS: dict[str, Callable[[Bench], Line | None]] = {
    "embedding": Bench.embedding,
    "bm25": Bench.bm25,
    "raslik": Bench.raslik,
    "exact": Bench.exact,
}


def measure(options: Options) -> Iterator[Line]:
    """Yields the lines of the module's docstring.

    Raises:
      ValueError: no run there, or its index or vectors are missing.
    """
    if not options.workdir:
        raise ValueError("--workdir must be the work directory of a run, got none")
    bench = Bench(options)
    for method in options.methods:
        line = METHODS[method](bench)
        if line is not None:
            yield line
    yield bench.memory()


if __name__ == "__main__":
    harness.start(Options(), measure)
