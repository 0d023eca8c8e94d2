"""Whole gradients of a finished run, made once and kept on disk for the studies.

A pass is written ADAPTER/LOSS/TOKENS: one adapter, one loss and one choice of counted tokens. Its
rows are the training examples, the queries with the model's own answers, and the queries with the
labeled answers. Studies compute centering, normalization and sketches from these rows.
"""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np
from jaxtyping import Float, Int

from experiments.studies import exact
from experiments.studies.corpora import paper
from experiments.studies.kernels import Grams, gram_matrices
from experiments.studies.rankings import Labels
from raslik_jax.base.axes import Tree
from raslik_jax.base.files import read_json, replacing, write_json
from raslik_jax.run.manifests import check_finished, content_hash
from raslik_jax.base.messages import shown, some_of
from raslik_jax.base.progress import progress
from raslik_jax.base.settings import Settings, setting
from raslik_jax.data import batches
from raslik_jax.data.examples import QUERY_SETS, Example
from raslik_jax.data.tokens import encoding
from raslik_jax.models import checkpoint
from raslik_jax.run import artifacts
from raslik_jax.run.plan import open_run
from raslik_jax.run.workspace import Workspace
from experiments.studies import probes
from raslik_jax.sketch import gradients, projections

# In the place of a loss: mean final hidden states, no gradient.
FEATURES = "features"
# Padded lengths of a pass; each is compiled once for each loss.
_NUM_BUCKETS = 2
_LOSSES = (*probes.PROBES, FEATURES)
_PASS = rf"(finetuned|initial)/({'|'.join(_LOSSES)})/(response|all)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """Options of both studies."""

    out: str = setting("", "Where results and gradients go.")
    runs: tuple[str, ...] = setting((), "Work directories of runs that differ in their seed.")
    query_sets: tuple[str, ...] = setting(
        ("retrieval",),
        "Query sets taken together; test_target has answers of the fine-tuned model too.",
        choices=QUERY_SETS,
    )
    sketch_sizes: tuple[int, ...] = setting((256, 1024, 4096, 16384, 65536), "Ks.", low=1)
    store_dtype: Literal["float32", "bfloat16"] = setting("float32", "Of gradients on disk.")
    batch_tokens: int = setting(2048, "Tokens of a batch of gradients.", low=1)
    report_only: bool = setting(False, "Only join the results that are there.")

    def passes_named(self) -> tuple[str, ...]:
        """Returns the passes that options name."""
        return ()

    def problems(self) -> list[str]:
        names = [pathlib.Path(run).name for run in self.runs]
        found = [
            "a pass must be ADAPTER/LOSS/TOKENS, adapter finetuned or initial, "
            f"loss one of {', '.join(_LOSSES)}, tokens response or all, got {shown(name)}"
            for name in self.passes_named()
            if not re.fullmatch(_PASS, name)
        ]
        if len(set(names)) < len(names):
            found.append(f"--runs must have different names, got {shown(','.join(names))}")
        return found


def answered_queries(
    workspace: Workspace, query_sets: Sequence[str], *, needs_own: bool = True
) -> tuple[list[Example], list[Example]]:
    """Returns the queries of these sets with the model's own answers and with the labeled ones.

    Without `needs_own` a query without an answer of the model has its labeled answer in both lists.
    """
    queries = [row for name in query_sets for row in workspace.corpus.queries[name]]
    answers = {} if needs_own else {q.example_id: q.output for q in queries if q.output.strip()}
    for found in (artifacts.answers("finetuned"), artifacts.OWN_ANSWERS):
        if found.is_there(workspace.root):
            check_finished(workspace.root, found.unit)
            answers |= found.read(workspace.root)
    missing = [row.example_id for row in queries if row.example_id not in answers]
    if missing or not queries:
        raise ValueError(
            f"queries of {some_of(query_sets)} must have answers of the fine-tuned model, got "
            f"none for {len(missing)} of {len(queries)}: take retrieval and test_target of a run "
            "with --sketch.query_output=own"
        )
    own = [
        row._replace(example_id=f"own {row.example_id}", output=answers[row.example_id])
        for row in queries
    ]
    return own, [row._replace(example_id=f"gold {row.example_id}") for row in queries]


class RunGradients:
    """Makes passes of one run and keeps each in a folder.

    `vectors.bin` has the rows, batch by batch. `done.json` has the number of batches on disk, so a
    killed job continues behind them. `grams.npz` has the products of the rows. The rows are those
    of `examples`: N training examples, queries with own answers, queries with labeled answers.
    `own` has the positions of the queries with the output that the run traces. `traced` has these
    queries.
    """

    def __init__(
        self, options: Options, root: pathlib.Path, folder: pathlib.Path, *, needs_own: bool = True
    ):
        paper.register()  # a run may have one of these corpora, or this strategy
        exact.register()
        self.workspace = open_run(root, "corpus", "finetune", "references/retrieval")
        self._folder, self._batch_tokens = folder / "passes", options.batch_tokens
        self._dtype = np.dtype(getattr(ml_dtypes, options.store_dtype, options.store_dtype))
        own, gold = answered_queries(self.workspace, options.query_sets, needs_own=needs_own)
        train = self.workspace.corpus.train
        self.examples = (*train, *own, *gold)
        self.num_train = len(train)
        self.labels = Labels(
            [row.example_id for row in train], np.array([bool(row.is_target) for row in train])
        )
        self.config = self.workspace.config
        self.own = self.queries(self.config.sketch.query_output)
        self.traced = tuple(self.examples[position] for position in self.own)

    def queries(self, output: str) -> Int[np.ndarray, " Q"]:
        """Returns the positions of the queries with the output of a --sketch.query_output."""
        own, gold = np.arange(self.num_train, len(self.examples)).reshape(2, -1)
        if output == "given":
            is_given = [bool(self.examples[position].output.strip()) for position in gold]
            return np.where(is_given, gold, own)
        return gold if output == "gold" else own

    @property
    def default(self) -> str:
        """The pass of the run's own setting."""
        sketch = self.config.sketch
        return f"{sketch.gradient_at}/{sketch.loss}/{sketch.targets}"

    def folder(self, name: str) -> pathlib.Path:
        """Returns the folder of a pass."""
        return self._folder / name.replace("/", "-")

    def grams(self, name: str, *, keep: bool) -> Grams:
        """Returns the Gram matrices of a pass, from disk where they are; may `keep` its rows."""
        path, key = self.folder(name) / "grams.npz", self._key(name)
        if path.is_file():
            with np.load(path, allow_pickle=False) as stored:
                if str(stored["key"]) == key:
                    return Grams(*(stored[field] for field in Grams._fields))
        found = gram_matrices(self.vectors(name), self._edges(name))
        # float32 holds what float32 products say.
        arrays: Any = {field: part.astype(np.float32) for field, part in found._asdict().items()}
        with replacing(path) as partial, open(partial, "wb") as file:
            np.savez(file, key=np.array(key), **arrays)
        if not keep:
            self.drop(name)
        # As the next job will read them, to the bit.
        return self.grams(name, keep=keep)

    def vectors(self, name: str) -> Float[np.ndarray, "M P"]:
        """Returns the rows of a pass, read-only on disk; makes those that are missing."""
        _, loss, tokens = name.split("/")
        encoded, lora, model = self.encode(tokens), self._lora(name), self.workspace.sketch_model
        plans, folder = self._plan(encoded), self.folder(name)
        folder.mkdir(parents=True, exist_ok=True)
        path, record = folder / "vectors.bin", folder / "done.json"
        shape, state = (len(encoded.ids), self._edges(name)[-1]), {"key": self._key(name)}
        done = 0
        if path.is_file() and record.is_file():
            stored = read_json(record, {"key": str, "batches": int})
            done = stored["batches"] if stored["key"] == state["key"] else 0
        if done < len(plans):
            made: np.memmap = np.memmap(path, self._dtype, "r+" if done else "w+", shape=shape)
            function = functools.partial(_vector_function(model.decoder, loss), lora, model.base)
            left = progress(plans[done:], name, unit="batch")
            parts = batches.each_batch(function, encoded, left)
            for count, (rows, vector_BP) in enumerate(parts, start=done + 1):
                made[rows] = vector_BP.astype(self._dtype)
                made.flush()
                write_json(record, state | {"batches": count})
        return np.memmap(path, self._dtype, "r", shape=shape)

    def drop(self, name: str) -> None:
        """Deletes the rows of a pass; its Gram matrices stay."""
        for file in ("done.json", "vectors.bin"):
            (self.folder(name) / file).unlink(missing_ok=True)

    @functools.cache  # noqa: B019  one study has few runs
    def encode(self, tokens: Any) -> encoding.Encoded:
        """Returns the rows as token ids. All tokens count, or those of the response."""
        return self.workspace.encode(self.examples, targets=tokens)

    def _lora(self, name: str) -> Tree:
        adapter = name.split("/")[0]
        return self.workspace.adapter("finetune", "adapter" if adapter == "finetuned" else adapter)

    def _edges(self, name: str) -> list[int]:
        """Returns 0, and the column behind each tensor of each layer; layers are stacked."""
        if FEATURES in name.split("/"):
            return [0, self.workspace.model.decoder.config.hidden_size]
        segments = projections.gradient_manifest(self._lora(name))
        ends = [np.linspace(s.offset, s.end, s.shape[0] + 1, dtype=int)[1:] for s in segments]
        return [0, *np.concatenate(ends).tolist()]

    def _plan(self, encoded: encoding.Encoded) -> list[batches.BatchPlan]:
        """Returns the batches of a pass, in few shapes that runs of other seeds have too.

        Compiling costs more than padding here. So lengths are multiples of 32, and every batch of a
        length has equally many rows, dummies included. Any token may count. The head runs only at
        tokens that count.
        """
        plans = batches.plan_batches(
            encoded.lengths_N,
            encoded.num_targets_N,
            ids=encoded.ids,
            num_buckets=_NUM_BUCKETS,
            batch_tokens=self._batch_tokens,
            multiple=32,
        )
        found = []
        for length in dict.fromkeys(plan.length for plan in plans):
            rows = batches.sketching_order([plan for plan in plans if plan.length == length])
            size = self._batch_tokens // length
            lines = batches.in_lines(rows, size)
            found += [batches.BatchPlan(part, length, length) for part in lines]
        return found

    def _key(self, name: str) -> str:
        """Returns the hash of all that decides the rows."""
        encoded = self.encode(name.split("/")[2])
        return content_hash(
            {
                "pass": name,
                "dtype": str(self._dtype),
                "base": self._base_hash,
                "adapter": checkpoint.adapter_hash(self._lora(name)),
                "tokens": [row.tolist() for row in encoded.tokens],
                "ids": list(encoded.ids),
                "batch_tokens": self._batch_tokens,
            }
        )

    @functools.cached_property
    def _base_hash(self) -> str:
        return checkpoint.base_hash(self.workspace.sketch_model.base)


@functools.cache
def _vector_function(decoder: Any, loss: str) -> Callable[..., jax.Array]:
    """Returns the jitted function from a batch to its flat gradients or features."""

    @jax.jit
    def make(lora: Tree, base: Tree, batch: batches.Batch) -> jax.Array:
        options: Any = {"num_targets": batch.num_targets}
        probe = functools.partial(probes.probe_loss, decoder, probe=loss, **options)

        def one(*row: jax.Array) -> jax.Array:
            if loss == FEATURES:
                return probes.mean_hidden(decoder, lora, base, *row, **options)
            return gradients.flat_gradient(probe, lora, base, *row, normalize="vector")

        return jax.vmap(one)(batch.tokens_BL, batch.target_mask_BL)

    return make


def project_rows(
    vectors_MP: Float[np.ndarray, "M P"], projection: projections.Projection
) -> Float[np.ndarray, "M K"]:
    """Returns the float32 sketches of rows on disk without normalization."""
    parts = []
    for start in range(0, len(vectors_MP), 64):
        part = np.asarray(vectors_MP[start : start + 64], np.float32)
        # The last few rows are filled up, so that one shape is compiled.
        padded = np.pad(part, ((0, 64 - len(part)), (0, 0)))
        parts.append(np.asarray(_project(projection, padded))[: len(part)])
    return np.concatenate(parts)


@jax.jit
def _project(projection: projections.Projection, vectors_CP: jax.Array) -> jax.Array:
    return jax.vmap(functools.partial(projections.project, projection))(vectors_CP)
