"""Whole gradients of a finished run, made once and kept on disk, for experiments about them.

One pass is one adapter, one loss and one choice of counted tokens. Its rows are the training
examples, then the queries with the model's own answers, then with the labeled ones; everything
else that experiments vary (centering, normalization, queries, sketches) follows from the rows.
"""

import functools
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from raslik_jax.axes import Tree
from raslik_jax.data import batches, encoding, prompts, tokenization
from raslik_jax.data.examples import Example
from raslik_jax.files import read_json, write_json
from raslik_jax.manifests import check_finished, content_hash
from raslik_jax.messages import one_line, shown, some_of
from raslik_jax.models import checkpoint
from raslik_jax.progress import progress
from raslik_jax.retrieve.exact import Grams, Products, gram_matrices
from raslik_jax.run.workspace import Workspace
from raslik_jax.sketch import gradients, probes, projections

FEATURES = "features"
_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
# Rows whose loss of work a kill may cost.
_COMMIT_ROWS = 128


class GradientPass(NamedTuple):
    """What is differentiated where.

    Attributes:
      adapter: `finetuned`, `initial`, or `trajectory-I`.
      loss: a name in `probes.PROBES`, or `features` for mean final hidden states.
      tokens: `response` or `all`.
    """

    adapter: str
    loss: str
    tokens: str

    @property
    def name(self) -> str:
        """As it is written in flags and tables."""
        return "/".join(self)

    @property
    def folder(self) -> str:
        """Its folder's name."""
        return "-".join(self)


def parse_pass(text: str) -> GradientPass:
    """Returns the pass that `adapter/loss/tokens` names.

    Raises:
      ValueError: it names none.
    """
    parts = text.strip().split("/")
    known = (*probes.PROBES, FEATURES)
    if (
        len(parts) != 3
        or parts[1] not in known
        or parts[2] not in ("response", "all")
        or not (parts[0] in ("finetuned", "initial") or parts[0].startswith("trajectory-"))
    ):
        raise ValueError(
            "a pass must be adapter/loss/tokens, adapter finetuned, initial or trajectory-0 ..., "
            f"loss one of {', '.join(known)}, tokens response or all, got {text!r}"
        )
    return GradientPass(*parts)


class Rows(NamedTuple):
    """The rows of every pass of a run.

    Attributes:
      examples: training examples, then queries with own answers, then with labeled ones.
      num_train: N.
      num_queries: Q.
    """

    examples: tuple[Example, ...]
    num_train: int
    num_queries: int

    def queries(self, output: str) -> np.ndarray:
        """Returns the positions of the queries with the output of a --sketch.query_output."""
        own = self.num_train + np.arange(self.num_queries)
        gold = own + self.num_queries
        if output == "given":
            is_given = [bool(self.examples[position].output.strip()) for position in gold]
            return np.where(is_given, gold, own)
        return gold if output == "gold" else own


def load_rows(workspace: Workspace, query_sets: Sequence[str], *, needs_own: bool = True) -> Rows:
    """Returns the training examples and the queries of these sets, twice.

    Args:
      workspace: of a run.
      query_sets: names of the sets.
      needs_own: whether every query must have the model's own answer; otherwise one that has a
        given output stands twice with that.

    Raises:
      ValueError: a query of these sets has no answer of the fine-tuned model: only the retrieval
        queries and those of the split that the run was measured on have; or the model was made
        again since it answered.
    """
    folder = workspace.root / "references"
    answers: dict[str, str] = {}
    for path in sorted(folder.rglob("finetuned.jsonl")):
        # Answers of an adapter that has been trained again since are none of this model.
        check_finished(workspace.root, path.parent.relative_to(workspace.root).as_posix())
        answers |= workspace.answers(*path.relative_to(workspace.root).parts)
    queries = [row for name in query_sets for row in workspace.corpus.queries[name]]
    if not needs_own:
        given = {row.example_id: row.output for row in queries if row.output.strip()}
        answers = given | answers
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
    gold = [row._replace(example_id=f"gold {row.example_id}") for row in queries]
    train = workspace.corpus.train
    return Rows((*train, *own, *gold), len(train), len(queries))


def pass_adapter(workspace: Workspace, adapter: str) -> Tree:
    """Returns the adapter of a pass."""
    return workspace.adapter("finetune", "adapter" if adapter == "finetuned" else adapter)


def tensor_slices(what: GradientPass, lora: Tree, width: int) -> list[slice]:
    """Returns the columns of each tensor of each layer, in the order of a flat gradient.

    Leaves are stacked over layers along their first axis.
    """
    if what.loss == FEATURES:
        return [slice(0, width)]
    found = []
    for segment in projections.gradient_manifest(lora):
        size = (segment.end - segment.offset) // segment.shape[0]
        found += [
            slice(segment.offset + i * size, segment.offset + (i + 1) * size)
            for i in range(segment.shape[0])
        ]
    return found


def _plan(
    encoded: encoding.Encoded, *, batch_tokens: int, num_buckets: int
) -> list[batches.BatchPlan]:
    """Returns the batches of a pass, in few shapes that runs of other seeds have too.

    Compiling costs more than padding here: lengths are multiples of 32, every batch of a length
    has batch_tokens // L rows, dummies among them, and any token may count (the head runs at
    those that do, so that costs nothing).
    """
    plans = batches.plan_batches(
        encoded.lengths_N,
        encoded.num_targets_N,
        ids=encoded.ids,
        num_buckets=num_buckets,
        batch_tokens=batch_tokens,
        multiple=32,
    )
    found = []
    for length in dict.fromkeys(plan.length for plan in plans):
        rows = batches.sketching_order([plan for plan in plans if plan.length == length])
        size = batch_tokens // length
        lines = batches.in_lines(rows, size)
        found += [batches.BatchPlan(part, length, length) for part in lines]
    return found


def _plan_some(plans: Sequence[batches.BatchPlan], *, first: int) -> list[batches.BatchPlan]:
    """Returns the batches that hold rows from `first` on."""
    return [plan for plan in plans if (plan.rows >= first).any()]


def _note_damage(path: pathlib.Path, error: Exception) -> None:
    print(
        f"note: {shown(str(path), 160)} is damaged ({one_line(str(error), 80)}): it is made again",
        file=sys.stderr,
    )


def _read_arrays(path: pathlib.Path, key: str) -> dict[str, np.ndarray]:
    """Returns the arrays of a file of this key; none where there is no such file, or no whole one.

    A zip archive has a checksum of each member, so flipped bytes are noticed.
    """
    if not path.is_file():
        return {}
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        found = str(arrays.pop("key"))
    except Exception as error:  # a damaged archive fails in whatever part of a reader meets it
        _note_damage(path, error)
        return {}
    return arrays if found == key else {}


class GradientMaker:
    """Makes passes of one run and keeps them in a folder.

    Every pass has a folder of its own with `vectors.bin` (rows as they are made, batch by batch),
    `done.json` (batches that are on disk; a killed job goes on behind them) and `grams.npz`.
    """

    def __init__(
        self,
        workspace: Workspace,
        folder: pathlib.Path,
        rows: Rows,
        *,
        dtype: str = "float32",
        batch_tokens: int = 2048,
        num_buckets: int = 2,
    ):
        """Plans; nothing is computed yet.

        Args:
          workspace: the run.
          folder: where passes go.
          rows: of `load_rows`.
          dtype: of the rows on disk, `float32` or `bfloat16`.
          batch_tokens: tokens of one batch, padding included.
          num_buckets: padded lengths; each is compiled once for each loss.
        """
        if dtype not in _DTYPES:
            raise ValueError(f"a dtype must be one of {list(_DTYPES)}, got {dtype!r}")
        self.workspace, self.folder, self.rows = workspace, folder, rows
        self.dtype = dtype
        self._batching = {"batch_tokens": batch_tokens, "num_buckets": num_buckets}

    def grams(self, what: GradientPass, *, keep: bool) -> Grams:
        """Returns the Gram matrices of a pass, from disk where they are.

        Args:
          what: the pass.
          keep: also leave its vectors on disk, for `vectors`.
        """
        folder = self.folder / what.folder
        key = self._key(what)
        path = folder / "grams.npz"
        stored = _read_arrays(path, key)
        if set(stored) == set(Grams._fields):
            return Grams(**stored)
        vectors = self.vectors(what)
        lora = pass_adapter(self.workspace, what.adapter)
        found = gram_matrices(vectors, tensor_slices(what, lora, vectors.shape[1]))
        partial = path.with_name("grams.partial.npz")
        # float32 holds what float32 products say; the key guards against another pass's.
        np.savez(
            partial,
            key=np.array(key),
            **{name: array.astype(np.float32) for name, array in found._asdict().items()},
        )
        os.replace(partial, path)
        del vectors
        if not keep:
            self.drop(what)
        # As the next job will read them, to the bit.
        return self.grams(what, keep=keep)

    def vectors(self, what: GradientPass) -> np.memmap:
        """Returns the rows of a pass, [M, P], read-only; makes those that are missing."""
        folder = self.folder / what.folder
        folder.mkdir(parents=True, exist_ok=True)
        lora = pass_adapter(self.workspace, what.adapter)
        width = (
            self.workspace.model.decoder.config.hidden_size
            if what.loss == FEATURES
            else projections.count_params(lora)
        )
        shape = len(self.rows.examples), width
        path, record = folder / "vectors.bin", folder / "done.json"
        encoded = self._encode(what.tokens)
        plans = _plan(encoded, **self._batching)
        key, done = self._key(what), 0
        size = shape[0] * shape[1] * self._dtype.itemsize
        if record.is_file() and path.is_file() and path.stat().st_size == size:
            try:
                state = read_json(record, {"key": str, "batches": int})
            except ValueError as error:
                _note_damage(record, error)
            else:
                done = state["batches"] if state["key"] == key else 0
        if done < len(plans):
            mode: Any = "r+" if done else "w+"
            made = np.memmap(path, self._dtype, mode, shape=shape)
            for count in self._fill(made, plans, done, encoded, what, lora):
                write_json(record, {"key": key, "batches": count})
            del made
        return np.memmap(path, self._dtype, "r", shape=shape)

    def products(self, what: GradientPass) -> Products:
        """Returns what scores need of a pass, with no gradient of a training row kept.

        For corpora whose rows fit on no disk: gradients are made twice, once for their mean and
        once for the products with it and with the queries, whose own are held in memory. A killed
        job goes on behind the batches that are in `products.npz`.
        """
        folder = self.folder / what.folder
        folder.mkdir(parents=True, exist_ok=True)
        path, key, num_train = folder / "products.npz", self._key(what), self.rows.num_train
        encoded = self._encode(what.tokens)
        lora = pass_adapter(self.workspace, what.adapter)
        plans = _plan(encoded, **self._batching)
        state = _read_arrays(path, key)
        if "mean_square" in state:
            return Products(*(state[name] for name in Products._fields))
        query_RP = np.concatenate(
            [
                unit_BP[slots]
                for slots, _, unit_BP, _ in self._unit_batches(
                    _plan_some(plans, first=num_train), encoded, what, lora, num_train
                )
            ]
        )
        place_R = np.concatenate(
            [plan.rows[plan.rows >= num_train] for plan in _plan_some(plans, first=num_train)]
        )
        query_RP = query_RP[np.argsort(place_R)]
        width = query_RP.shape[1]
        if not state:
            state = {
                "batches": np.array(0),
                "sum_P": np.zeros(width),
                "norm_N": np.zeros(num_train, np.float32),
                "query_RN": np.zeros((len(query_RP), num_train), np.float32),
                "row_mean_N": np.zeros(num_train, np.float32),
            }

        def save() -> None:
            partial = path.with_name("products.partial.npz")
            arrays: dict[str, Any] = {"key": np.array(key), **state}
            np.savez(partial, **arrays)
            os.replace(partial, path)

        # Counted through both rounds: the first ends at len(plans), the second at twice that.
        for turn in (0, 1):
            start = int(state["batches"]) - turn * len(plans)
            if start >= len(plans):
                continue
            mean_P = state["sum_P"] / num_train
            left = progress(plans[start:], f"{what.name}, {turn + 1} of 2", unit="batch")
            made = self._unit_batches(left, encoded, what, lora, 0)
            for number, (slots, rows, unit_BP, norm_B) in enumerate(made, start=start + 1):
                is_train = rows < num_train
                unit_CP, train = unit_BP[slots][is_train], rows[is_train]
                if turn == 0:
                    state["sum_P"] += unit_CP.sum(axis=0, dtype=np.float64)
                    state["norm_N"][train] = norm_B[slots][is_train]
                    state["query_RN"][:, train] = query_RP @ unit_CP.T
                else:
                    state["row_mean_N"][train] = unit_CP @ mean_P.astype(np.float32)
                state["batches"] = np.array(number + turn * len(plans))
                if number % 16 == 0 or number == len(plans):
                    save()
        mean_P = state.pop("sum_P") / num_train
        state |= {
            "query_mean_R": query_RP @ mean_P,
            "mean_square": np.asarray(mean_P @ mean_P),
            "query_RR": query_RP @ query_RP.T,
        }
        save()
        return Products(*(state[name] for name in Products._fields))

    def _unit_batches(
        self,
        plans: Iterable[batches.BatchPlan],
        encoded: encoding.Encoded,
        what: GradientPass,
        lora: Tree,
        first: int,
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
        """Yields of each batch the slots of rows from `first` on, these rows, and all unit rows
        with their lengths."""
        model = self.workspace.sketch_model
        make = _vector_function(model.decoder, what.loss)
        for plan in plans:
            batch = batches.make_batch(encoded, plan)
            vector_BP = np.asarray(
                make(
                    lora,
                    model.base,
                    jnp.asarray(batch.tokens_BL),
                    jnp.asarray(batch.target_mask_BL),
                    num_targets=plan.num_targets,
                )
            )
            norm_B = np.linalg.norm(vector_BP, axis=1)
            slots = np.flatnonzero(plan.rows >= first)
            unit_BP = vector_BP / np.where(norm_B > 0, norm_B, 1)[:, None]
            yield slots, plan.rows[slots], unit_BP, norm_B

    def drop(self, what: GradientPass) -> None:
        """Deletes the rows of a pass; its Gram matrices stay."""
        for name in ("done.json", "vectors.bin"):
            (self.folder / what.folder / name).unlink(missing_ok=True)

    @property
    def _dtype(self) -> np.dtype:
        return _DTYPES[self.dtype]

    @functools.cache  # noqa: B019  one maker lives as long as its run
    def _encode(self, tokens: Any) -> encoding.Encoded:
        return self.workspace.encode(self.rows.examples, targets=tokens)

    def _key(self, what: GradientPass) -> str:
        """Returns the hash of all that decides the rows."""
        config = self.workspace.config
        encoded = self._encode(what.tokens)
        return content_hash(
            {
                "pass": what.name,
                "dtype": self.dtype,
                "base": self._base_hash,
                "adapter": checkpoint.adapter_hash(pass_adapter(self.workspace, what.adapter)),
                "tokenizer": tokenization.tokenizer_hash(self.workspace.tokenizer),
                "template": prompts.template_hash(config.corpus.template),
                "tokens": content_hash({"rows": [row.tolist() for row in encoded.tokens]}),
                "ids": list(encoded.ids),
                **self._batching,
            }
        )

    @functools.cached_property
    def _base_hash(self) -> str:
        return checkpoint.base_hash(self.workspace.sketch_model.base)

    def _fill(
        self,
        made: np.memmap,
        plans: Sequence[batches.BatchPlan],
        done: int,
        encoded: encoding.Encoded,
        what: GradientPass,
        lora: Tree,
    ) -> Iterator[int]:
        """Writes the batches that are missing; yields how many are on disk, now and then."""
        model = self.workspace.sketch_model
        make = _vector_function(model.decoder, what.loss)
        fresh = 0
        left = plans[done:]
        for number, plan in enumerate(progress(left, what.name, unit="batch"), start=done + 1):
            batch = batches.make_batch(encoded, plan)
            vector_BP = make(
                lora,
                model.base,
                jnp.asarray(batch.tokens_BL),
                jnp.asarray(batch.target_mask_BL),
                num_targets=plan.num_targets,
            )
            is_real_B = plan.rows != batches.DUMMY_ROW
            made[plan.rows[is_real_B]] = np.asarray(vector_BP)[is_real_B].astype(self._dtype)
            fresh += int(is_real_B.sum())
            if fresh >= _COMMIT_ROWS or number == len(plans):
                made.flush()
                yield number
                fresh = 0


@functools.cache
def _vector_function(decoder: Any, loss: str) -> Callable[..., jax.Array]:
    """Returns the jitted function from a batch to its flat gradients or features."""

    @functools.partial(jax.jit, static_argnames="num_targets")
    def make(
        lora: Tree, base: Tree, tokens_BL: jax.Array, mask_BL: jax.Array, *, num_targets: int
    ) -> jax.Array:
        if loss == FEATURES:
            return jax.vmap(
                functools.partial(probes.mean_hidden, decoder, lora, base, num_targets=num_targets)
            )(tokens_BL, mask_BL)
        example_loss = functools.partial(
            probes.probe_loss, decoder, num_targets=num_targets, probe=loss
        )

        def gradient(tokens_L: jax.Array, mask_L: jax.Array) -> jax.Array:
            return gradients.flat_gradient(
                example_loss, (lora,), base, tokens_L, mask_L, normalize="vector"
            )

        return jax.vmap(gradient)(tokens_BL, mask_BL)

    return make


def project_rows(
    vectors_MP: np.ndarray, projection: projections.Projection, *, chunk_rows: int = 64
) -> np.ndarray:
    """Returns the sketches of rows on disk, [M, K] float32, not normalized."""
    num_rows = len(vectors_MP)
    sketch_MK = np.zeros((num_rows, projection.spec.size), np.float32)
    for start in range(0, num_rows, chunk_rows):
        part = np.asarray(vectors_MP[start : start + chunk_rows], np.float32)
        # The last few rows are filled up, so that one shape is compiled.
        padded = np.pad(part, ((0, chunk_rows - len(part)), (0, 0)))
        sketch_CK = _project(projection, padded)
        sketch_MK[start : start + len(part)] = np.asarray(sketch_CK)[: len(part)]
    return sketch_MK


@jax.jit
def _project(projection: projections.Projection, vectors_CP: jax.Array) -> jax.Array:
    return jax.vmap(lambda vector_P: projections.project(projection, vector_P))(vectors_CP)
