"""The steps of a run before it has weights or data, and how often each is called with what.

Lengths of rows are those of Alpaca's 52,002 in Pythia's tokens, whatever the corpus; other
tokenizers differ by some percent.
"""

import collections
import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from raslik_jax.base.axes import Tree
from raslik_jax.base.files import read_json
from raslik_jax.config import Config, FinetuneConfig, UnlearnConfig
from raslik_jax.data import batches
from raslik_jax.data.alpaca_lengths import load_alpaca_lengths
from raslik_jax.data.examples import Corpus
from raslik_jax.data.tokens.encoding import Encoded
from raslik_jax.evaluate import likelihood, perplexity
from raslik_jax.models import decode, decoder, encoder, quantize, sharding
from raslik_jax.parallel import meshes
from raslik_jax.retrieve import sets
from raslik_jax.run import checking, cost, plan
from raslik_jax.run.stages import backbone, discriminator, finetune, sketch
from raslik_jax.run.units import Plan
from raslik_jax.run.workspace import (
    StoredCorpus,
    Workspace,
    abstract_model,
    lora_config_of,
    queries_to_answer,
)
from raslik_jax.sketch import head, projections
from raslik_jax.train import classifier, loop, steps
from raslik_jax.train.objectives import OBJECTIVES

# Batches drawn to see which shapes a training meets.
_DRAWS = 512
# The encoder of a name that is no folder: RoBERTa base, which has BERT base's layers.
_BASE_ENCODER: encoder.EncoderConfig = encoder.RobertaConfig(
    vocab_size=50_265,
    hidden_size=768,
    num_hidden_layers=12,
    num_attention_heads=12,
    intermediate_size=3072,
    max_position_embeddings=514,
    type_vocab_size=1,
    pad_token_id=1,
)


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
    def batch(self) -> batches.Batch:
        """A batch of this shape without values."""
        size = (self.rows, self.length)
        return batches.Batch(
            jax.ShapeDtypeStruct(size, jnp.int32),
            jax.ShapeDtypeStruct(size, jnp.bool_),
            self.targets,
            jax.ShapeDtypeStruct((self.rows,), jnp.int32),
        )


# How often a step is called with batches of which shape.
Shapes = Mapping[Shape, int | float]
# What a call costs, by the name of its program.
Costs = dict[str, Callable[[Shape], cost.Cost]]


class Program(NamedTuple):
    """A step of the run, and the batches that it is called with.

    Programs of one name share what is traced and compiled; the functions take a batch's shape.
    `rule_of` says without tracing about how many operations a call takes: 2 for each weight, token
    and pass of the token through the model.
    """

    name: str
    trace: Callable[[Shape], jax.stages.Traced]
    cost_of: Callable[[Shape], cost.Cost]
    rule_of: Callable[[Shape], float]
    shapes: Shapes

    @property
    def largest(self) -> Shape:
        """The shape that takes the most memory."""
        return max(self.shapes, key=lambda shape: (shape.rows * shape.length, shape.targets))

    def peak(self) -> float:
        """Returns the memory of the largest call, in bytes."""
        return self.cost_of(self.largest).device_bytes

    def rule(self) -> float:
        """Returns about how many operations all calls take; nothing is traced."""
        return sum(calls * self.rule_of(shape) for shape, calls in self.shapes.items())

    def total(self, cost_by_shape: Mapping[Shape, Sequence[float]]) -> tuple[float, float]:
        """Returns the operations and bytes of all calls, of those of one call of every shape."""
        calls_S = np.array(list(self.shapes.values()), float)
        operations, moved = calls_S @ np.array([cost_by_shape[shape] for shape in self.shapes])
        return float(operations), float(moved)


def find_costs(programs: Sequence[Program]) -> dict[Shape, tuple[float, float]]:
    """Returns the operations and bytes of one call of every shape of programs of one name.

    Of many shapes a few are traced, which takes about a second each: all cost a sum of the same
    terms, of the weights, the layers, the attention and the head.
    """
    shapes = sorted(
        {shape for program in programs for shape in program.shapes},
        key=lambda shape: (shape.length, shape.targets, shape.rows),
    )
    b, length, targets = np.array(shapes, float).T
    term_ST = np.stack([b, b * length, b * length**2, b * targets, b**0], axis=1)
    if len(set(b)) == 1:  # then the weights are read as often as there are batches
        term_ST = term_ST[:, :-1]
    spread = np.linspace(0, len(shapes) - 1, min(term_ST.shape[1], len(shapes)))
    places = spread.round().astype(int)
    cost_of = programs[0].cost_of
    cost_S2 = np.array([cost_of(shapes[place])[:2] for place in places])
    if len(places) < len(shapes):
        term_ST /= np.maximum(term_ST.max(axis=0), 1)
        cost_S2 = term_ST @ np.linalg.lstsq(term_ST[places], cost_S2, rcond=1e-9)[0]
    return {shape: (row[0], row[1]) for shape, row in zip(shapes, cost_S2.tolist(), strict=True)}


class Work(NamedTuple):
    """What a unit leaves on disk, the programs that it calls, and what it does beside them."""

    disk_bytes: int | float
    programs: Sequence[Program] = ()
    operations: int | float = 0
    bytes_moved: int | float = 0


class AbstractRun:
    """A run as it would be: shapes in place of weights, Alpaca's lengths in place of rows.

    The lengths are those of `rows` where they are given.

    Attributes:
      plain: the frozen weights before they are quantized.
      corpus: that of a finished unit or of a user's own files; None where the settings size it.
      num_answered: retrieval queries that the fine-tuned model answers.
      num_params: of one adapter; `num_gradient` P, of what gradients are taken of; `num_flat` of
        all adapters that they are taken at.
      mesh: of devices that the steps are compiled for; None for the default device.
      layout: a row of the table of sizes where weights are split.

    Runs of the same model and settings, which differ in data alone, may share their `costs`.
    """

    def __init__(
        self,
        config: Config,
        workspace: Workspace,
        *,
        mesh: jax.sharding.Mesh | None = None,
        layout: str = "replicated",
        memory: int = 0,
        costs: Costs | None = None,
        rows: Encoded | None = None,
    ):
        self.config, self.workspace, self.mesh = config, workspace, mesh
        self._costs: Costs = {} if costs is None else costs
        settings, sketching = config.backbone, config.sketch
        self.name, model_config = checking.model_of(config)
        lora_config = lora_config_of(config, model_config)
        dtype = jnp.dtype(settings.dtype)
        _, lora, self.plain = decoder.abstract(model_config, lora_config, dtype)
        mesh_is: Any = {"devices": self.num_devices, "memory": memory}
        parts = sharding.choose_parts(layout, self.plain, **mesh_is)
        model = functools.partial(abstract_model, config, model_config, lora_config, parts=parts)
        self.model = workspace.model = model()
        is_same = sketching.base_format == "same"
        workspace.sketch_model = self.model if is_same else model(form=sketching.base_format)
        self.num_weights = decoder.count_parameters(self.plain)
        self.base_bytes = quantize.num_bytes(self.model.base)
        self.layout = sharding.row_of(self.model.base, parts)
        is_path = sketching.gradient_at == "trajectory"
        self.num_adapters = config.finetune.trajectory_points if is_path else 1
        self.num_params = projections.count_params(lora)
        self.num_gradient = sketch.count_params(workspace, (lora,))
        self.num_flat = self.num_adapters * self.num_gradient
        self.sketch_size = min(sketching.size, self.num_flat)
        self.row_bytes = self.sketch_size * jnp.dtype(sketching.dtype).itemsize
        if rows:
            rows = rows.cut(config.corpus.max_len)
            self.length_N, self.response_N = rows.lengths_N, rows.num_targets_N
        else:
            self.length_N, self.response_N = load_alpaca_lengths(max_len=config.corpus.max_len)
        # The rows of the corpus that is there, or those that the settings ask for.
        first, output = plan.plan_units(config, workspace)[:1], sketching.query_output
        corpus: StoredCorpus | Corpus | None = None
        if Plan(workspace.root, first).survey().done:
            corpus = StoredCorpus(workspace.root / "corpus")
        elif not config.corpus.record.reads:  # its files say how large it is, no settings
            corpus = config.corpus.load(seed=config.seed)
        self.corpus = corpus
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
        self.sizes = Sizes(train, targets, forget, config.retrieve.num_retain or forget)
        self.num_measured = sum(self.queries.values()) - self.queries["retrieval"]
        if config.retrieve.held_out:
            most, least = sets.held_out_sizes(config.retrieve.held_out, forget, train)
            self.num_measured = most + max(most, least)

    @property
    def num_devices(self) -> int:
        """The devices that share the rows of a batch."""
        return self.mesh.size if self.mesh else 1

    @property
    def platform(self) -> str:
        """The platform that the steps are compiled for; empty for the default device's."""
        platform = self.mesh.devices.flat[0].platform if self.mesh else ""
        return {"gpu": "cuda"}.get(platform, platform)  # as lowering calls it

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
        self,
        name: str,
        step: Callable[..., Any],
        *fixed: Any,
        shapes: Shapes,
        batch: Callable[[Shape], Any] = lambda shape: shape.batch,
        trips: int = 0,
        passes: float = 1,
        new_tokens: int = 0,
        num_weights: int = 0,
        **named: Any,
    ) -> Program:
        """Returns a program of the run from a step of (*fixed, batch, **named).

        Loops whose length is known at run time only make so many trips; 0 for those over chunks
        of the head. Every token of a row, and the `new_tokens` that it gets, make so many `passes`
        through so many weights, 0 for the model's: forward, back, once more where recomputed.
        """

        def trace(shape: Shape) -> jax.stages.Traced:
            filled = shape._replace(rows=meshes.round_up(shape.rows, self.num_devices))
            return cost.trace(step, *fixed, batch(filled), mesh=self.mesh, **named)

        @functools.cache
        def cost_of(shape: Shape) -> cost.Cost:
            rows = meshes.round_up(shape.rows, self.num_devices) // self.num_devices
            slots = max(rows * shape.targets, 1)  # of one device
            with meshes.traced_for(self.platform):
                chunks = -(-slots // min(head.tile_shape()[0], slots))
            found = cost.count(trace(shape).jaxpr, trips=trips or chunks)
            held = found.device_bytes - sharding.bytes_elsewhere(fixed, self.num_devices)
            return found._replace(device_bytes=held)

        def rule_of(shape: Shape) -> float:
            tokens = shape.rows * (shape.length + new_tokens)
            return 2.0 * (num_weights or self.num_weights) * passes * tokens

        return Program(name, trace, self._costs.setdefault(name, cost_of), rule_of, shapes)

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
        """Returns how often a training meets which shape, by some batches that are drawn.

        With `is_fixed` all are of the longest row's shape; with `is_answer` rows are answers alone.
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

    def planned(
        self,
        count: int,
        *,
        num_buckets: int,
        targets: str = "response",
        program_tokens: int = 0,
    ) -> Shapes:
        """Returns how often rows as long as Alpaca's, planned as batches, have which shape."""
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
        """Returns how often prompts as long as Alpaca's, by their length, have which shape."""
        prompt_N = np.sort(self.length_N - self.response_N)
        spread = np.linspace(0, len(prompt_N) - 1, count).round().astype(np.int64)
        ends = [min(start + rows, count) - 1 for start in range(0, count, rows)]
        lengths = [batches.next_rung(int(longest)) for longest in prompt_N[spread[ends]]]
        return collections.Counter(Shape(rows, length, length) for length in lengths)

    def epochs_of(self, settings: FinetuneConfig | UnlearnConfig, rows: int) -> Shapes:
        """Returns how often fine-tuning or unlearning on so many rows meets which shape."""
        size, epochs = settings.batch_size, settings.epochs
        return self.drawn(
            size,
            batches.num_steps_of(rows, batch_size=size, num_epochs=epochs),
            max_len=settings.max_len,
            is_fixed=settings.fixed_padding,
        )

    # what units do -------------------------------------------------------------------------------

    def pretraining(self) -> Work:
        """Training of a backbone, all weights."""
        settings = self.config.backbone
        graphdef, _, base = decoder.abstract(self.model.decoder.config, None)
        algorithm = backbone.pretraining(self.config, decoder.bind(graphdef))
        shapes = self.drawn(settings.batch_size, settings.steps)
        program = self.training("backbone", algorithm, base, {}, shapes=shapes, passes=3)
        return Work(self.base_bytes, [program])

    def finetuning(self) -> Work:
        """Training of the adapter, of which some are kept along the way."""
        settings, model = self.config.finetune, self.model
        algorithm = finetune.finetuning(self.workspace, num_steps=1)
        shapes = self.epochs_of(settings, self.sizes.train)
        passes = 2 + settings.remat
        program = self.training(
            "finetune", algorithm, model.initial, model.base, shapes=shapes, passes=passes
        )
        return Work(4.0 * (2 + settings.trajectory_points) * self.num_params, [program])

    def unlearning(self, strategy: str, name: str, shapes: Shapes | None = None) -> Work:
        """An objective on an adapter or on all weights, kept after every epoch."""
        settings, model = self.config.unlearn, self.model
        params: Tree = model.initial
        kept = 4 * self.num_params
        if settings.parameters == "all":
            kept = self.base_bytes
            params = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), model.base
            )
        objective = OBJECTIVES[name]
        reads_retain = objective.retain is not None
        forwards = len(objective.reads_reference) + objective.reads_backbone
        program = self.training(
            f"unlearn/{name}",
            self.workspace.unlearning(name, 1e-5),
            params,
            steps.Frozen(base=model.base, reference=model.initial),
            shapes=shapes or self.epochs_of(settings, max(self.sizes.forget, self.sizes.retain)),
            batch=lambda shape: (shape.batch, shape.batch if reads_retain else None),
            passes=(2 + settings.remat + (settings.parameters == "all")) * (1 + reads_retain)
            + forwards,
        )
        return Work(settings.epochs * kept, [program])

    def answering(self, prompts: int, models: int) -> Work:
        """Greedy answers of some models to prompts as long as Alpaca's."""
        settings, model = self.config.references, self.model
        rows = min(settings.decode_batch_size, 1 << max(prompts - 1, 0).bit_length())
        program = self.program(
            "decode",
            decode.generate_batch,
            model.initial,
            model.base,
            shapes=self.prompts(prompts, rows),
            trips=settings.max_new_tokens - 1,
            new_tokens=settings.max_new_tokens,
            decoder=model.decoder,
            max_new_tokens=settings.max_new_tokens,
            end_ids=np.zeros(8, np.int32),
            pad_id=np.int32(0),
        )
        return Work(500.0 * models * prompts, [program] * models)

    def likelihoods(self, rows: int) -> Program:
        """The likelihood of given answers."""
        model = self.model
        step, shapes = likelihood.likelihood_step(model.decoder), self.planned(rows, num_buckets=2)
        return self.program("likelihood", step, model.initial, model.base, shapes=shapes)

    def perplexities(self, models: int) -> Work:
        """Likelihoods of some rows under each model, and of its own answers."""
        rows = len(perplexity.SETS) * self.config.evaluate.perplexity_examples + self.num_measured
        return Work(100.0 * models * rows, [self.likelihoods(rows)] * models)

    def traced(self, models: int) -> Work:
        """Answers to the traced prompts, and the likelihood of the traced answers."""
        rows = self.queries["retrieval"]
        work = self.answering(rows, models)
        return work._replace(programs=[*work.programs, *[self.likelihoods(rows)] * models])

    def questions(self, models: int) -> Work:
        """The dataset's own questions: answers, and the likelihood of given ones."""
        asked, given = self.config.corpus.count_questions(self.config.evaluate.questions)
        work = self.answering(asked, models)
        return work._replace(programs=[*work.programs, *[self.likelihoods(given)] * models])

    def sketching(self, rows: int, disk_bytes: int | float = 0, *, is_exact: bool = False) -> Work:
        """Gradients of rows, projected; the exact kernel takes them for the mean and the scores."""
        settings, base = self.config.sketch, self.workspace.sketch_model.base
        family, size, passes = settings.projection, self.sketch_size, 1
        if is_exact:
            family, size, passes = "binned", self.num_flat, 1 + self.config.retrieve.center
        projection = jax.eval_shape(
            lambda: projections.init_projection(0, family, self.num_flat, size)
        )
        adapters = (self.model.initial,) * self.num_adapters
        of_run = functools.partial(sketch.differentiated, self.workspace)
        if sketch.chosen_weights(self.workspace):
            of_run = functools.partial(jax.eval_shape, of_run)
        points, held = of_run(adapters, base)
        with meshes.traced_for(self.platform):
            program_tokens = sketch.program_tokens(self.workspace.sketch_model.decoder.config)
        planned: Any = {"num_buckets": settings.num_buckets, "targets": settings.targets}
        program = self.program(
            f"sketch {family} {size}",
            sketch.sketch_step(self.workspace),
            projection,
            points,
            held,
            shapes=self.planned(rows, program_tokens=program_tokens, **planned),
            passes=2 * self.num_adapters,
        )
        return Work(disk_bytes, [program] * passes)

    def scoring(self, queries: int, columns: int) -> Work:
        """Cosines of the index's rows with queries, of which so many columns are kept."""
        rows, products = self.sizes.train, 2.0 * self.sketch_size * queries
        return Work(4.0 * rows * columns, [], rows * products, self.index_bytes)

    @property
    def num_null(self) -> int:
        """Rows that stand for unrelated prompts."""
        return min(self.config.retrieve.null_prompts, self.sizes.train)

    def classifying(self) -> Work:
        """Training of the classifier, all weights."""
        settings, sizes = self.config.evaluate["classifier"], self.sizes
        config = discriminator.small_encoder(self.config, vocab_size=self.config.corpus.vocab_size)
        if settings.checkpoint:
            config = _encoder_config(settings.checkpoint)
        bound, weights = _bind_shapes(dataclasses.replace(config, num_labels=2))
        limit, batch = settings.examples or sizes.train, settings.batch_size
        labeled = min(limit, sizes.targets) + min(limit, sizes.train - sizes.targets)
        texts = settings.epochs * labeled * (1 - settings.held_out)
        program = self.training(
            "discriminator",
            classifier.classifying(bound, loop.adamw(1e-5), dropout_key=jax.random.key(0)),
            weights,
            jax.ShapeDtypeStruct((labeled,), jnp.int32),
            shapes=self.drawn(batch, texts / batch, max_len=settings.max_len, is_answer=True),
            passes=3,
            num_weights=decoder.count_parameters(weights),
        )
        return Work(quantize.num_bytes(weights), [program])

    def embedding(self) -> Work:
        """Sentence vectors of the training examples' prompts."""
        rows, name = self.sizes.train, self.config.retrieve["embedding"].checkpoint
        bound, weights = _bind_shapes(_encoder_config(name))
        embed = jax.vmap(bound.embed, in_axes=(None, 0, 0))

        def of_rows(weights: Tree, rows: batches.Batch) -> jax.Array:
            return embed(weights, rows.tokens_BL, rows.target_mask_BL)

        step = jax.jit(lambda weights, rows: meshes.by_rows(of_rows, weights, rows=rows))
        shapes = self.prompts(rows, min(rows, 64))
        num_weights = decoder.count_parameters(weights)
        program = self.program("embedding", step, weights, shapes=shapes, num_weights=num_weights)
        return Work(4.0 * 768 * rows, [program])


def _encoder_config(name: str) -> encoder.EncoderConfig:
    path, config = pathlib.Path(name) / "config.json", _BASE_ENCODER
    if name and path.is_file():
        fields = read_json(path, {"model_type": str})
        config = encoder.ENCODERS[fields["model_type"]].config.from_hf(fields)
    return dataclasses.replace(config, pooling="cls")


def _bind_shapes(config: encoder.EncoderConfig) -> tuple[encoder.Encoder, Tree]:
    key = jax.random.key(0)
    make = functools.partial(encoder.init_encoder, config, key=key, dtype=jnp.float32)
    return encoder.bind_encoder(config), jax.eval_shape(make)
