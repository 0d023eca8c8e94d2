"""The computation of a run before it has weights or data: its programs and their calls.

Lengths of rows are those of Alpaca's 52,002 in Pythia's tokens for any corpus. Other tokenizers
differ by some percent.
"""

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from raslik_jax.base.axes import Tree
from raslik_jax.config import Config, FinetuneConfig, UnlearnConfig
from raslik_jax.data import batches
from raslik_jax.data.alpaca_lengths import load_alpaca_lengths
from raslik_jax.data.examples import Corpus
from raslik_jax.data.tokens.encoding import Encoded
from raslik_jax.models import decoder, quantize, sharding
from raslik_jax.parallel import meshes
from raslik_jax.retrieve import sets
from raslik_jax.run import artifacts, cost
from raslik_jax.run.workspace import StoredCorpus, Workspace, lora_config_of, queries_to_answer
from raslik_jax.sketch import head, projections
from raslik_jax.train import loop

# Batches drawn to see which shapes a training meets.
_DRAWS = 512


class Sizes(NamedTuple):
    """Numbers of training examples, of targets among them, and of rows in the two sets."""

    train: int
    targets: int
    forget: int
    retain: int


class Shape(NamedTuple):
    """Rows of a batch, tokens of a row, and rows of the head for a row's targets."""

    rows: int
    length: int
    targets: int

    @property
    def slots(self) -> tuple[int, int]:
        """The order of shapes: tokens of the batch, then rows of the head."""
        return self.rows * self.length, self.targets

    @property
    def batch(self) -> batches.Batch:
        """A batch of this shape without values."""
        size = (self.rows, self.length)
        return batches.Batch(
            jax.ShapeDtypeStruct(size, jnp.int32),
            jax.ShapeDtypeStruct(size, jnp.bool_),
            self.targets,
            jax.ShapeDtypeStruct((self.rows,), jnp.int32),
        )


# The number of calls of a step by the shape of their batches.
Shapes = Mapping[Shape, int | float]


class Program(NamedTuple):
    """A step of the run with its batches: step(*fixed, batch, **static).

    Programs of one name are compiled once for a shape.

    Attributes:
      batch: function from a shape to the last argument.
      trips: number of steps of loops whose length is known at run time only; 0 for loops over
        chunks of the head.
      passes: number of passes of each token, `new_tokens` included, through `num_weights` weights:
        forward, backward, and again if recomputed.
    """

    name: str
    step: Callable[..., Any]
    fixed: tuple[Any, ...]
    shapes: Shapes
    mesh: jax.sharding.Mesh | None
    num_weights: int
    batch: Callable[[Shape], Any] = lambda shape: shape.batch
    static: Mapping[str, Any] = {}
    trips: int = 0
    passes: float = 1
    new_tokens: int = 0

    @property
    def largest(self) -> Shape:
        """The shape that takes the most memory."""
        return max(self.shapes, key=lambda shape: shape.slots)

    @property
    def mean(self) -> Shape:
        """The mean shape of a call, over all rows, tokens and targets of the calls."""
        calls_S, shape_S3 = (
            np.array([*self.shapes.values()], float),
            np.array([*self.shapes], float),
        )
        rows_S = calls_S * shape_S3[:, 0]
        length, targets = (rows_S @ shape_S3[:, 1:] / rows_S.sum()).round().astype(int).tolist()
        return Shape(round(rows_S.sum() / calls_S.sum()), length, targets)

    def trace(self, shape: Shape) -> jax.stages.Traced:
        """Returns the step traced at a shape with rows for every device."""
        rows = meshes.round_up(shape.rows, self.mesh.size if self.mesh else 1)
        batch = self.batch(shape._replace(rows=rows))
        return cost.trace(self.step, *self.fixed, batch, mesh=self.mesh, **self.static)

    def cost_of(self, shape: Shape) -> cost.Cost:
        """Returns the cost of one call on one device; the step is traced for it."""
        devices = self.mesh.size if self.mesh else 1
        slots = max(meshes.round_up(shape.rows, devices) // devices * shape.targets, 1)
        with meshes.traced_for(platform_of(self.mesh)):
            chunks = -(-slots // min(head.tile_shape()[0], slots))
        return cost.count(self.trace(shape).jaxpr, trips=self.trips or chunks)

    def total(self, mean: cost.Cost) -> cost.Cost:
        """Returns the cost of all calls from the cost of one call of the mean shape."""
        share = sum(n * s.rows for s, n in self.shapes.items()) / self.mean.rows
        return cost.Cost(share * mean.operations, share * mean.bytes_moved)

    def rule(self) -> cost.Cost:
        """Returns the rough cost of all calls without tracing: 2 a weight, token and pass."""
        tokens = sum(n * s.rows * (s.length + self.new_tokens) for s, n in self.shapes.items())
        return cost.Cost(2.0 * self.num_weights * self.passes * tokens, 0.0)


def platform_of(mesh: jax.sharding.Mesh | None) -> str:
    """Returns the platform of a mesh as lowering calls it; empty for the default device's."""
    platform = mesh.devices.flat[0].platform if mesh else ""
    return {"gpu": "cuda"}.get(platform, platform)


class Work(NamedTuple):
    """A unit's files on disk, the programs that it calls and its other work."""

    disk_bytes: int | float
    programs: Sequence[Program] = ()
    operations: int | float = 0
    bytes_moved: int | float = 0


class AbstractRun:
    """A run in the abstract: shapes in place of weights, Alpaca's lengths in place of rows.

    Args:
      shapes: shapes of its model.
      corpus: corpus of a finished unit or of a user's files; None if the settings give its size.
      rows: training examples whose lengths replace Alpaca's.
      mesh: mesh of the devices to compile for; None for the default device.
      layout: value of `--mesh.base`.
      memory: memory of a device in bytes; 0 for unknown.

    Attributes:
      plain: the frozen weights before they are quantized.
      layout: a row of the table of sizes if weights are split.
      num_params: P, parameters of an adapter.
      num_answered: number of retrieval queries that the fine-tuned model answers.
      num_measured: number of queries that measure the run.
    """

    def __init__(
        self,
        config: Config,
        workspace: Workspace,
        shapes: decoder.ModelConfig,
        *,
        corpus: StoredCorpus | Corpus | None = None,
        rows: Encoded | None = None,
        mesh: jax.sharding.Mesh | None = None,
        layout: str = "replicated",
        memory: int = 0,
    ):
        self.config, self.mesh, self.corpus = config, mesh, corpus
        lora_config, sketching = lora_config_of(config, shapes), config.sketch
        _, lora, self.plain = decoder.abstract(shapes, lora_config, config.backbone.dtypes)
        parts = sharding.choose_parts(layout, self.plain, devices=self.num_devices, memory=memory)
        self.workspace = workspace.abstract(shapes, lora_config, parts=parts)
        self.model = self.workspace.model
        self.layout = sharding.row_of(self.model.base, parts)
        self.num_weights = decoder.count_parameters(self.plain)
        self.base_bytes = quantize.num_bytes(self.model.base)
        self.num_params = projections.count_params(lora)
        self.sketch_size = min(sketching.size, self.num_params)
        self.row_bytes = self.sketch_size * jnp.dtype(sketching.dtype).itemsize
        if rows:
            rows = rows.cut(config.corpus.max_len)
            self.length_N, self.response_N = rows.lengths_N, rows.num_targets_N
        else:
            self.length_N, self.response_N = load_alpaca_lengths(max_len=config.corpus.max_len)
        self.count_rows()

    def count_rows(self) -> None:
        """Counts the rows of the existing corpus and sets, or those that the settings ask for."""
        config, corpus, output = self.config, self.corpus, self.config.sketch.query_output
        split = config.references.query_split
        kinds = {"retrieval": "retrieval", f"{split}_target": split, f"{split}_normal": split}
        if corpus:
            train, targets = len(corpus.train), sum(bool(row.is_target) for row in corpus.train)
            self.queries = {name: len(corpus.queries[name]) for name in kinds}
            self.num_answered = len(queries_to_answer(corpus.queries["retrieval"], output))
        else:
            train, targets = config.corpus.count()
            self.queries = {n: getattr(config.corpus, f"num_{kind}") for n, kind in kinds.items()}
            self.num_answered = self.queries["retrieval"] if output == "own" else 0
        # Without labels the rule finds the number: a twentieth is no more than a guess.
        forget = config.retrieve.num_forget or targets or -(-train // 20)
        retain = config.retrieve.num_retain or forget
        if sizes := artifacts.SIZES.current(self.workspace.root):
            forget, retain = sizes["num_forget"], sizes["num_retain"]
        self.sizes = Sizes(train, targets, forget, retain)
        self.num_measured = sum(self.queries.values()) - self.queries["retrieval"]
        if config.retrieve.held_out:
            most, least = sets.held_out_sizes(config.retrieve.held_out, forget, train)
            self.num_measured = most + max(most, least)

    @property
    def num_devices(self) -> int:
        """The devices that share the rows of a batch."""
        return self.mesh.size if self.mesh else 1

    @property
    def index_bytes(self) -> int:
        """N x K x dtype, rows alone."""
        return self.sizes.train * self.row_bytes

    @property
    def widest_kernel(self) -> tuple[int, int]:
        """Inputs and outputs of the model's widest kernel."""
        layers = self.plain["layers"].values()
        shapes = [leaves["kernel"].shape[-2:] for leaves in layers if "kernel" in leaves]
        return max(shapes, key=math.prod)

    def program(
        self, name: str, step: Callable[..., Any], *fixed: Any, shapes: Shapes, **options: Any
    ) -> Program:
        """Returns a step as a program of the run; its weights are the model's where not given."""
        options = {"num_weights": self.num_weights, **options}
        return Program(name, step, fixed, shapes, self.mesh, **options)

    def training(
        self, name: str, algorithm: loop.Algorithm, params: Tree, frozen: Any, **options: Any
    ) -> Program:
        """Returns the step of an algorithm as a program of the run."""
        state = jax.eval_shape(algorithm.init, params)
        return self.program(name, jax.jit(algorithm.step), state, frozen, **options)

    def drawn(
        self,
        batch: int,
        steps: int | float,
        *,
        max_len: int = 0,
        is_fixed: bool = False,
        is_answer: bool = False,
    ) -> Shapes:
        """Returns the number of a training's batches by shape, estimated from drawn batches.

        With `is_fixed` all have the longest row's shape. With `is_answer` rows are answers only.
        """
        max_len = max_len or self.config.corpus.max_len
        if is_fixed:
            return {Shape(batch, max_len, max_len): steps}
        length_N = np.minimum(self.length_N, max_len)
        response_N = np.maximum(self.response_N - (self.length_N - length_N), 0)
        if is_answer:
            length_N = response_N = np.minimum(self.response_N, max_len)
        rows_DB = np.random.default_rng(0).integers(0, len(length_N), (_DRAWS, batch))
        found: collections.Counter[Shape] = collections.Counter()
        longest_D2 = np.stack([length_N[rows_DB].max(1), response_N[rows_DB].max(1)], axis=1)
        for longest, answer in longest_D2.tolist():
            length = batches.next_rung(longest)
            found[Shape(batch, length, length // 2 if answer <= length // 2 else length)] += 1
        return {shape: count * steps / _DRAWS for shape, count in found.items()}

    def epochs_of(self, settings: FinetuneConfig | UnlearnConfig, rows: int) -> Shapes:
        """Returns the number of batches by shape of fine-tuning or unlearning on some rows."""
        size, epochs = settings.batch_size, settings.epochs
        steps = batches.num_steps_of(rows, batch_size=size, num_epochs=epochs)
        is_fixed = settings.fixed_padding
        return self.drawn(size, steps, max_len=settings.max_len, is_fixed=is_fixed)

    def planned(
        self,
        count: int,
        *,
        num_buckets: int,
        targets: str = "response",
        program_tokens: int = 0,
    ) -> Shapes:
        """Returns the number of batches by shape if rows as long as Alpaca's are planned."""
        if not count:
            return {}
        place_N = np.random.default_rng(0).integers(0, len(self.length_N), count)
        length_N, response_N = self.length_N[place_N], self.response_N[place_N]
        plans = batches.plan_batches(
            length_N,
            np.maximum(response_N if targets == "response" else length_N - 1, 1),
            ids=[f"{row:09d}" for row in range(count)],
            num_buckets=num_buckets,
            batch_tokens=self.config.sketch.batch_tokens,
            program_tokens=program_tokens,
        )
        return collections.Counter(Shape(p.rows.size, p.length, p.num_targets) for p in plans)

    def prompts(self, count: int, rows: int) -> Shapes:
        """Returns the number of batches by shape for prompts as long as Alpaca's, by length."""
        prompt_N = np.sort(self.length_N - self.response_N)
        spread = np.linspace(0, len(prompt_N) - 1, count).round().astype(np.int64)
        ends = [min(start + rows, count) - 1 for start in range(0, count, rows)]
        lengths = [batches.next_rung(int(longest)) for longest in prompt_N[spread[ends]]]
        return collections.Counter(Shape(rows, length, length) for length in lengths)
