"""The computation of a run before it has weights or data: its programs and their calls.

Lengths of rows are those of Alpaca's 52,002 in Pythia's tokens for any corpus. Other tokenizers
differ by some percent. Operations are counted by a rule. Memory is XLA's analysis of a compiled
program, for which no weight is allocated.
"""

import collections
import math
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from raslik_jax.base.axes import Tree
from raslik_jax.config import Config, FinetuneConfig, UnlearnConfig
from raslik_jax.data import batches
from raslik_jax.data.alpaca_lengths import load_alpaca_lengths
from raslik_jax.data.examples import HELD_OUT
from raslik_jax.data.tokens.encoding import Encoded
from raslik_jax.data.words import refused
from raslik_jax.models import decoder, quantize, sharding
from raslik_jax.parallel import meshes
from raslik_jax.retrieve import sets
from raslik_jax.run import artifacts
from raslik_jax.run.workspace import AnyCorpus, Model, Workspace, lora_config_of, queries_to_answer
from raslik_jax.sketch import projections
from raslik_jax.train import loop

# Passes that recomputing takes: the last product of a layer is not needed again in most models.
REMAT = 0.75
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


class Forward(NamedTuple):
    """A forward pass of a model.

    Attributes:
      token, target, pair: operations of a token in the layers, of a target in the head, and of two
        tokens of a row in attention.
      weight_bytes: bytes of the weights, which every pass of a batch reads.
      cache_bytes: bytes of keys and values of a token.
    """

    token: float
    target: float = 0.0
    pair: float = 0.0
    weight_bytes: float = 0.0
    cache_bytes: float = 0.0


class Compiled(NamedTuple):
    """A compiled program: its text, XLA's bytes of memory, and the seconds of compiling."""

    text: str
    memory_bytes: int
    seconds: float


class Program(NamedTuple):
    """A step of the run with its batches: step(*fixed, batch, **static).

    Programs of one name are compiled once for a shape.

    Attributes:
      model: a forward pass of the model.
      batch: function from a shape to the last argument.
      passes: number of passes of each token: forward, backward, and again if recomputed.
      new_tokens: tokens of an answer, which pass one at a time after those of the shape.
      row_operations: operations of a row in addition to its passes.
      holds_gradients: whether it holds the gradients of all rows of a batch.
    """

    name: str
    step: Callable[..., Any]
    fixed: tuple[Any, ...]
    shapes: Shapes
    mesh: jax.sharding.Mesh | None
    model: Forward
    batch: Callable[[Shape], Any] = lambda shape: shape.batch
    static: Mapping[str, Any] = {}
    passes: float = 1
    new_tokens: int = 0
    row_operations: float = 0.0
    holds_gradients: bool = False

    @property
    def extremes(self) -> list[Shape]:
        """The shapes that may take the most memory: of most tokens, and of most rows."""
        of_rows = max(self.shapes, key=lambda shape: (shape.rows, *shape.slots))
        return [self.largest, of_rows] if self.holds_gradients else [self.largest]

    @property
    def largest(self) -> Shape:
        """The shape of most tokens."""
        return max(self.shapes, key=lambda shape: shape.slots)

    @property
    def operations(self) -> float:
        """The multiplications and additions of all calls on one device."""
        # The backward pass computes the shares of attention once more.
        pair = self.model.pair * (1.75 if self.passes > 1 else 1)
        found = 0.0
        for (rows, length, targets), calls in self.shapes.items():
            tokens, new = length + self.new_tokens, self.new_tokens
            row = self.model.token * tokens + self.model.target * (new or targets)
            row += pair * (length**2 + new * tokens)
            found += calls * self._share(rows) * (self.passes * row + self.row_operations)
        return found

    @property
    def bytes_moved(self) -> float:
        """The bytes of weights and of keys and values that all calls read on one device."""
        found = 0.0
        for (rows, length, _), calls in self.shapes.items():
            cache = self.model.cache_bytes * self._share(rows) * (length + self.new_tokens)
            found += calls * self.passes * self.model.weight_bytes
            found += calls * self.new_tokens * (self.model.weight_bytes + cache)
        return found

    def _share(self, rows: int) -> float:
        """Returns the rows of a batch that a device has."""
        devices = self.mesh.size if self.mesh else 1
        return meshes.round_up(rows, devices) / devices

    def trace(self, shape: Shape) -> jax.stages.Traced:
        """Returns the step traced at a shape with rows for every device.

        On a mesh (its devices need not exist) every device holds its parts of split leaves, its
        rows of batches and all else.
        """
        rows = meshes.round_up(shape.rows, self.mesh.size if self.mesh else 1)
        args = (*self.fixed, self.batch(shape._replace(rows=rows)))
        step: Any = self.step if hasattr(self.step, "trace") else jax.jit(self.step)
        mesh = self.mesh
        if mesh is None:
            return step.trace(*args, **self.static)

        def placed(leaf: Any, spec: jax.sharding.PartitionSpec) -> jax.ShapeDtypeStruct:
            sharding = jax.sharding.NamedSharding(mesh, spec)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        platform = meshes.traced_for(mesh.devices.flat[0].platform)
        with platform, jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return step.trace(*meshes.map_specs(placed, args), **self.static)

    def compile(self, shape: Shape) -> Compiled:
        """Returns the step compiled at a shape; shared bytes of its memory count once."""
        traced, platform, start = self.trace(shape), platform_of(self.mesh), time.monotonic()
        made = traced.lower(lowering_platforms=(platform,) if platform else None).compile()
        found, seconds = made.memory_analysis(), time.monotonic() - start
        if found is None:
            backend = jax.default_backend()
            raise refused("program_memory", backend=backend)
        held = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
        return Compiled(made.as_text() or "", int(held - found.alias_size_in_bytes), seconds)


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


class AbstractRun(Workspace):
    """A run in the abstract: shapes in place of weights, Alpaca's lengths in place of rows.

    Args:
      shapes: shapes of its model, whose files need not exist.
      known: corpus of a finished unit or of a user's files; None if the settings give its size.
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
        root: pathlib.Path,
        config: Config,
        shapes: decoder.ModelConfig,
        *,
        known: AnyCorpus | None = None,
        rows: Encoded | None = None,
        mesh: jax.sharding.Mesh | None = None,
        layout: str = "replicated",
        memory: int = 0,
    ):
        super().__init__(root, config)
        self.mesh, self.known, sketching, settings = mesh, known, config.sketch, config.backbone
        own = lora_config_of(config, shapes)
        graphdef, lora, self.plain = decoder.abstract(shapes, own, settings.dtypes)
        parts = sharding.choose_parts(layout, self.plain, devices=self.num_devices, memory=memory)

        def model(form: str) -> Model:
            base = quantize.shapes_of(self.plain, form, double_quant=settings.double_quant)
            base = sharding.split(base, parts)
            return Model(decoder.bind(graphdef), base, lambda seed=0: lora, own, graphdef)

        self.model = self.sketch_model = model(settings.format)
        if sketching.base_format != "same":
            self.sketch_model = model(sketching.base_format)
        self.layout = sharding.row_of(self.model.base, parts)
        self.num_weights = decoder.count_parameters(self.plain)
        self.base_bytes = quantize.num_bytes(self.model.base)
        self.num_params = projections.count_params(lora)
        self.sketch_size = min(sketching.size, self.num_params)
        self.row_bytes = self.sketch_size * jnp.dtype(sketching.dtype).itemsize
        # Of whole rows: a training may have a limit of its own.
        self.rows, (self.length_N, self.response_N) = rows, _sizes_of(rows)
        self.count_rows()

    def count_rows(self, *, has_sizes: bool = False) -> None:
        """Counts the rows of the existing corpus, and of sets if their sizes are up to date."""
        config, corpus, output = self.config, self.known, self.config.sketch.query_output
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
        sizes = artifacts.SIZES.read(self.root) if has_sizes else {}
        if sizes.get("num_forget"):  # 0 if all sets are given
            forget, retain = sizes["num_forget"], sizes["num_retain"]
        self.sizes = Sizes(train, targets, forget, retain)
        self.num_measured = sum(self.queries.values()) - self.queries["retrieval"]
        if config.retrieve.held_out:
            most, least = sets.held_out_sizes(config.retrieve.held_out, forget, train)
            self.num_measured = most + max(most, least)
        if config.retrieve.held_out and has_sizes:  # the sets lack these rows already
            held = (artifacts.measured_rows(HELD_OUT, kind) for kind in ("target", "normal"))
            self.num_measured = sum(len(rows.find(self.root) or ()) for rows in held)

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

    @property
    def forward(self) -> Forward:
        """A forward pass of the run's model with its adapter."""
        shapes, layers = self.model.decoder.config.text_part, self.plain["layers"].values()
        kernels = sum(leaves["kernel"].size for leaves in layers if "kernel" in leaves)
        width = shapes.num_attention_heads * shapes.head_width
        cached = 2 * shapes.num_cached_heads * shapes.head_width
        itemsize = jax.tree.leaves(self.plain["final_norm"])[0].dtype.itemsize
        return Forward(
            token=2.0 * (kernels + self.num_params),
            target=2.0 * shapes.vocab_size * shapes.hidden_size,
            pair=4.0 * width * shapes.num_hidden_layers,
            weight_bytes=quantize.num_bytes(self.plain),
            cache_bytes=float(cached * itemsize * shapes.num_hidden_layers),
        )

    def program(
        self, name: str, step: Callable[..., Any], *fixed: Any, shapes: Shapes, **options: Any
    ) -> Program:
        """Returns a step as a program of the run, of the run's model unless given another."""
        options = {"model": self.forward, **options}
        return Program(name, step, fixed, shapes, self.mesh, **options)

    def training(
        self, name: str, algorithm: loop.Algorithm, params: Tree, frozen: Any, **options: Any
    ) -> Program:
        """Returns the step of an algorithm as a program of the run."""
        state = jax.eval_shape(algorithm.init, params)
        return self.program(name, jax.jit(algorithm.step), state, frozen, **options)

    def drawn(
        self, batch: int, steps: int | float, *, max_len: int = 0, is_fixed: bool = False
    ) -> Shapes:
        """Returns the number of a training's batches by shape, estimated from drawn batches.

        With `is_fixed` all have the longest row's shape.
        """
        max_len = max_len or self.config.corpus.max_len
        if is_fixed:
            return {Shape(batch, max_len, max_len): steps}
        length_N, response_N = self._cut(max_len)
        place_N = np.random.default_rng(0).integers(0, len(length_N), _DRAWS * batch)
        found = _count_lines(length_N[place_N], response_N[place_N], batch)
        # A rare long row takes the most memory.
        longest_1 = [length_N.argmax()]
        longest = _count_lines(length_N[longest_1], response_N[longest_1], batch)
        return {one: found.get(one, 0) * steps / _DRAWS for one in {**longest, **found}}

    def _cut(self, max_len: int = 0) -> tuple[Int[np.ndarray, " N"], Int[np.ndarray, " N"]]:
        """Returns the tokens and response tokens of each row, cut at a length."""
        max_len = max_len or self.config.corpus.max_len
        return _sizes_of(self.rows and self.rows.cut(max_len), max_len)

    def epochs_of(self, settings: FinetuneConfig | UnlearnConfig, rows: int) -> Shapes:
        """Returns the number of batches by shape of fine-tuning or unlearning on some rows."""
        size, epochs = settings.batch_size, settings.epochs
        steps = batches.num_steps_of(rows, batch_size=size, num_epochs=epochs)
        is_fixed = settings.fixed_padding
        return self.drawn(size, steps, max_len=settings.max_len, is_fixed=is_fixed)

    def planned(
        self, count: int, *, num_buckets: int, targets: str = "response", program_tokens: int = 0
    ) -> Shapes:
        """Returns the number of batches by shape if rows as long as Alpaca's are planned."""
        if not count:
            return {}
        place_N = np.random.default_rng(0).integers(0, len(self.length_N), count)
        length_N, response_N = (part[place_N] for part in self._cut())
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
        prompt_N = np.sort(np.subtract(*self._cut()))
        prompt_N = prompt_N[np.linspace(0, len(prompt_N) - 1, count).round().astype(np.int64)]
        return _count_lines(prompt_N, prompt_N, rows)


def _sizes_of(rows: Encoded | None, max_len: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens and the targets of each row; without rows those of Alpaca's."""
    return (rows.lengths_N, rows.num_targets_N) if rows else load_alpaca_lengths(max_len=max_len)


def _count_lines(length_N: np.ndarray, answer_N: np.ndarray, size: int) -> Shapes:
    """Returns the number of lines of rows by shape, each for its longest row and answer."""
    found: collections.Counter[Shape] = collections.Counter()
    for start in range(0, len(length_N), size):
        line = slice(start, start + size)
        length = batches.next_rung(int(length_N[line].max()))
        is_half = answer_N[line].max() <= length // 2
        found[Shape(size, length, length // 2 if is_half else length)] += 1
    return found
