"""The steps of a run before it has weights or data, and the batches that they will be called with.

Lengths of rows are those of Alpaca's 52,002 in Pythia's tokens, whatever the corpus; other
tokenizers differ by some percent.
"""

import collections
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from raslik_jax.axes import Tree
from raslik_jax.config import Config
from raslik_jax.data import batches
from raslik_jax.data.alpaca_lengths import load_alpaca_lengths
from raslik_jax.data.examples import Corpus
from raslik_jax.evaluate import classifier, likelihood
from raslik_jax.files import read_json
from raslik_jax.models import decode, decoder, encoder, quantize
from raslik_jax.run import checking, cost, plan
from raslik_jax.run.stages import backbone, discriminator, finetune, sketch
from raslik_jax.run.units import Plan
from raslik_jax.run.workspace import (
    Model,
    StoredCorpus,
    Workspace,
    lora_config_of,
    queries_to_answer,
)
from raslik_jax.sketch import head, projections
from raslik_jax.train import loop, steps
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


class Program(NamedTuple):
    """A step of the run, and the batches that it is called with.

    Attributes:
      name: units of one name share what is compiled.
      trace: the step traced with batches of a shape.
      shapes: number of batches of each shape.
      trips: of loops whose length is known at run time only; 0 for those over chunks of the head.
      known: costs of one call, of programs of the same name.
    """

    name: str
    trace: Callable[[Shape], jax.stages.Traced]
    shapes: Mapping[Shape, int | float]
    trips: int
    known: dict[Shape, cost.Cost]

    @property
    def largest(self) -> Shape:
        """The shape that takes the most memory."""
        return max(self.shapes, key=lambda shape: (shape.rows * shape.length, shape.targets))

    def cost_of(self, shape: Shape) -> cost.Cost:
        """Returns the cost of one call."""
        if shape not in self.known:
            slots = max(shape.rows * shape.targets, 1)
            chunks = -(-slots // min(head.tile_shape()[0], slots))
            self.known[shape] = cost.count(self.trace(shape).jaxpr, trips=self.trips or chunks)
        return self.known[shape]

    def peak(self) -> float:
        """Returns the memory of the largest call, in bytes."""
        return self.cost_of(self.largest).device_bytes

    def total(self) -> tuple[float, float]:
        """Returns the operations and bytes of all calls.

        Of many shapes a few are traced: all cost a sum of the same terms, of the weights, the
        layers, the attention and the head.
        """
        shapes = sorted(self.shapes, key=lambda shape: (shape.length, shape.targets, shape.rows))
        b, length, targets = np.array(shapes, float).T
        term_ST = np.stack([b, b * length, b * length**2, b * targets, b**0], axis=1)
        if len(set(b)) == 1:  # then the weights are read as often as there are batches
            term_ST = term_ST[:, :-1]
        spread = np.linspace(0, len(shapes) - 1, min(term_ST.shape[1], len(shapes)))
        places = spread.round().astype(int)
        cost_S2 = np.array([self.cost_of(shapes[place])[:2] for place in places])
        if len(places) < len(shapes):
            term_ST /= np.maximum(term_ST.max(axis=0), 1)
            cost_S2 = term_ST @ np.linalg.lstsq(term_ST[places], cost_S2, rcond=1e-9)[0]
        operations, moved = np.array([self.shapes[shape] for shape in shapes]) @ cost_S2
        return float(operations), float(moved)


class AbstractRun:
    """A run as it would be: shapes in place of weights, Alpaca's lengths in place of rows."""

    def __init__(self, config: Config, workspace: Workspace):
        self.config, self.workspace = config, workspace
        self._known: dict[str, dict[Shape, cost.Cost]] = collections.defaultdict(dict)
        self.name, model_config = checking.model_of(config)
        settings, sketching, lora_config = config.backbone, config.sketch, lora_config_of(config)
        graphdef, lora, self.plain = decoder.abstract(
            model_config, lora_config, jnp.dtype(settings.dtype)
        )

        def model(form: str) -> Model:
            base, double = self.plain, settings.double_quant and form == "nf4"
            pack = functools.partial(quantize.quantize_base, format=form, double_quant=double)
            base = base if form == "plain" else jax.eval_shape(pack, base)
            return Model(decoder.bind(graphdef), base, lora, lora_config, graphdef)

        self.model = workspace.model = workspace.sketch_model = model(settings.format)
        if sketching.base_format != "same":
            workspace.sketch_model = model(sketching.base_format)
        self.base_bytes = quantize.num_bytes(self.model.base)
        self.length_N, self.response_N = load_alpaca_lengths(max_len=config.corpus.max_len)
        self.corpus = found = _find_corpus(config, workspace)
        self.sizes = _count_rows(config, found)
        split = config.references.query_split
        self.queries = {
            name: len(found.queries[name]) if found else getattr(config.corpus, f"num_{kind}")
            for name, kind in (
                ("retrieval", "retrieval"),
                (f"{split}_target", split),
                (f"{split}_normal", split),
            )
        }
        self.num_measured = sum(self.queries.values()) - self.queries["retrieval"]
        is_own = sketching.query_output == "own"
        self.num_answered = self.queries["retrieval"] if is_own else 0
        if found:
            asked = queries_to_answer(found.queries["retrieval"], sketching.query_output)
            self.num_answered = len(asked)
        is_path = sketching.gradient_at == "trajectory"
        self.num_adapters = config.finetune.trajectory_points if is_path else 1
        self.num_params = projections.count_params(lora)
        self.num_flat = self.num_adapters * self.num_params
        self.sketch_size = min(sketching.size, self.num_flat)
        self.row_bytes = self.sketch_size * jnp.dtype(sketching.dtype).itemsize

    def program(
        self,
        name: str,
        step: Callable[..., Any],
        arguments: Callable[[Shape], tuple[Any, ...]],
        shapes: Mapping[Shape, int | float],
        *,
        trips: int = 0,
        **static: Any,
    ) -> Program:
        """Returns a program of the run from a step and what it is called with."""

        def trace(shape: Shape) -> jax.stages.Traced:
            return cost.trace(step, *arguments(shape), **static)

        return Program(name, trace, shapes, trips, self._known[name])

    def training(
        self,
        name: str,
        algorithm: loop.Algorithm,
        params: Tree,
        frozen: Any,
        shapes: Mapping[Shape, int | float],
        batch: Callable[[Shape], Any] = lambda shape: shape.batch,
    ) -> Program:
        """Returns the step of an algorithm as a program of the run."""
        state = jax.eval_shape(algorithm.init, params)
        step = jax.jit(algorithm.step)
        return self.program(name, step, lambda shape: (state, frozen, batch(shape)), shapes)

    def drawn(
        self,
        batch: int,
        steps: int | float,
        *,
        max_len: int = 0,
        fixed: bool = False,
        answers: bool = False,
    ) -> Mapping[Shape, int | float]:
        """Returns how often a training meets which shape, by some batches that are drawn."""
        max_len = max_len or self.config.corpus.max_len
        if fixed:
            return {Shape(batch, max_len, max_len): steps}
        length_N, response_N = load_alpaca_lengths(max_len=max_len)
        if answers:  # alone
            length_N = np.minimum(self.response_N, max_len)
            response_N = length_N
        rows_DB = np.random.default_rng(0).integers(0, len(length_N), (_DRAWS, batch))
        found: collections.Counter[Shape] = collections.Counter()
        longest_D2 = np.stack([length_N[rows_DB].max(1), response_N[rows_DB].max(1)], axis=1)
        for longest, answer in longest_D2.tolist():
            length = batches.next_rung(longest)
            found[Shape(batch, length, length // 2 if answer <= length // 2 else length)] += 1
        return {shape: count * steps / _DRAWS for shape, count in found.items()}

    def planned(
        self, count: int, *, num_buckets: int, batch_tokens: int, targets: str = "response"
    ) -> Mapping[Shape, int | float]:
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
            batch_tokens=batch_tokens,
        )
        return collections.Counter(Shape(p.rows.size, p.length, p.num_targets) for p in plans)

    def neighbors(self, length_N: np.ndarray, count: int, rows: int) -> Mapping[Shape, int]:
        """Returns the shapes of so many rows in batches of neighbors in length."""
        spread = np.linspace(0, len(length_N) - 1, count).round().astype(np.int64)
        length_Q = np.sort(length_N)[spread]
        longest = [int(length_Q[at : at + rows].max()) for at in range(0, count, rows)]
        lengths = map(batches.next_rung, longest)
        return collections.Counter(Shape(rows, length, length) for length in lengths)

    def pretraining(self) -> Program:
        """The step of a backbone's training."""
        settings = self.config.backbone
        graphdef, _, base = decoder.abstract(self.model.decoder.config, None)
        algorithm = backbone.pretraining(self.config, decoder.bind(graphdef))
        shapes = self.drawn(settings.batch_size, settings.steps)
        return self.training("backbone", algorithm, base, {}, shapes)

    def finetuning(self) -> Program:
        """The step of fine-tuning."""
        settings, model = self.config.finetune, self.model
        shapes = self.drawn(
            settings.batch_size,
            settings.epochs * -(-self.sizes.train // settings.batch_size),
            max_len=settings.max_len,
            fixed=settings.fixed_padding,
        )
        algorithm = finetune.finetuning(self.workspace, num_steps=1)
        return self.training("finetune", algorithm, model.initial, model.base, shapes)

    def unlearning(self, name: str) -> Program:
        """The step of an objective, on an adapter or on all weights."""
        settings, model = self.config.unlearn, self.model
        params: Tree = model.initial
        if settings.parameters == "all":
            params = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), model.base
            )
        reads_retain = OBJECTIVES[name].retain is not None
        rows = max(self.sizes.forget, self.sizes.retain)
        return self.training(
            f"unlearn/{name}",
            self.workspace.unlearning(name, 1e-5),
            params,
            steps.Frozen(base=model.base, reference=model.initial),
            self.drawn(
                settings.batch_size,
                settings.epochs * -(-rows // settings.batch_size),
                max_len=settings.max_len,
                fixed=settings.fixed_padding,
            ),
            lambda shape: (shape.batch, shape.batch if reads_retain else None),
        )

    def decoding(self, prompts: int) -> Program:
        """Greedy answers to prompts as long as Alpaca's."""
        settings, model = self.config.references, self.model
        rows = min(settings.decode_batch_size, 1 << max(prompts - 1, 0).bit_length())
        real, integer = (jax.ShapeDtypeStruct((), dtype) for dtype in (jnp.float32, jnp.int32))
        ends, key = jax.ShapeDtypeStruct((8,), jnp.int32), jax.random.key(0)
        return self.program(
            "decode",
            decode._generate_batch,
            lambda shape: (
                *(model.initial, model.base, shape.batch),
                *(ends, integer, key, real, real),
            ),
            self.neighbors(self.length_N - self.response_N, prompts, rows),
            trips=settings.max_new_tokens - 1,
            decoder=model.decoder,
            max_new_tokens=settings.max_new_tokens,
            sampled=False,
            nucleus=False,
        )

    def likelihoods(self, rows: int) -> Program:
        """The likelihood of given answers."""
        model, tokens = self.model, self.config.sketch.batch_tokens
        return self.program(
            "likelihood",
            likelihood.likelihood_step(model.decoder),
            lambda shape: (model.initial, model.base, shape.batch),
            self.planned(rows, num_buckets=2, batch_tokens=tokens),
        )

    def sketching(self, rows: int, *, size: int = 0) -> Program:
        """Sketches of rows; of the exact kernel, which are signed permutations, where sized."""
        settings, base = self.config.sketch, self.workspace.sketch_model.base
        family, size = ("binned", size) if size else (settings.projection, self.sketch_size)
        projection = _projection_shapes(family, self.num_flat, size)
        adapters = (self.model.initial,) * self.num_adapters
        return self.program(
            f"sketch {family} {size}",
            sketch.sketch_step(self.workspace),
            lambda shape: (projection, adapters, base, shape.batch),
            self.planned(
                rows,
                num_buckets=settings.num_buckets,
                batch_tokens=settings.batch_tokens,
                targets=settings.targets,
            ),
        )

    def classifier(self) -> tuple[encoder.Encoder, Tree]:
        """Returns the classifier's functions and the shapes of its weights."""
        own = discriminator.small_encoder(self.config, vocab_size=self.config.corpus.vocab_size)
        path = self.config.evaluate["classifier"].checkpoint
        config = _encoder_config(path) if path else own
        return _encoder_shapes(dataclasses.replace(config, num_labels=2))

    def classifying(self) -> Program:
        """The step of the classifier's training, all weights."""
        settings, sizes = self.config.evaluate["classifier"], self.sizes
        bound, weights = self.classifier()
        limit, batch = settings.examples or sizes.train, settings.batch_size
        labeled = min(limit, sizes.targets) + min(limit, sizes.train - sizes.targets)
        texts = settings.epochs * labeled * (1 - settings.held_out)
        return self.training(
            "discriminator",
            classifier.classifying(bound, loop.adamw(1e-5), dropout_key=jax.random.key(0)),
            weights,
            jax.ShapeDtypeStruct((labeled,), jnp.int32),
            self.drawn(batch, texts / batch, max_len=settings.max_len, answers=True),
        )

    def embedding(self, rows: int) -> Program:
        """Sentence vectors of prompts."""
        bound, weights = _encoder_shapes(
            _encoder_config(self.config.retrieve["embedding"].checkpoint)
        )
        embed = jax.vmap(bound.embed, in_axes=(None, 0, 0))
        return self.program(
            "embedding",
            jax.jit(lambda weights, rows: embed(weights, rows.tokens_BL, rows.target_mask_BL)),
            lambda shape: (weights, shape.batch),
            self.neighbors(self.length_N - self.response_N, rows, min(rows, 64)),
        )


@functools.cache
def _projection_shapes(family: str, num_params: int, size: int) -> Any:
    return jax.eval_shape(lambda: projections.init_projection(0, family, num_params, size))


def _encoder_config(name: str) -> encoder.EncoderConfig:
    path, config = pathlib.Path(name) / "config.json", _BASE_ENCODER
    if name and path.is_file():
        fields = read_json(path, {"model_type": str})
        config = encoder.ENCODERS[fields["model_type"]].from_hf(fields)
    return dataclasses.replace(config, pooling="cls")


def _encoder_shapes(config: encoder.EncoderConfig) -> tuple[encoder.Encoder, Tree]:
    key = jax.random.key(0)
    weights = jax.eval_shape(lambda: encoder.init_encoder(config, key=key, dtype=jnp.float32))
    return encoder.bind_encoder(config), weights


def _find_corpus(config: Config, workspace: Workspace) -> StoredCorpus | Corpus | None:
    """Returns the corpus of a finished unit, or of a user's own files; None of any other."""
    units = plan.plan_units(config, workspace)[:1]
    if Plan(workspace.root, units).survey().done:
        return StoredCorpus(workspace.root / "corpus")
    # What is not made in a size asked for is as large as its files.
    return None if config.corpus.record.reads else config.corpus.load(seed=config.seed)


def _count_rows(config: Config, found: StoredCorpus | Corpus | None) -> Sizes:
    """Returns the rows of a run: of its corpus, or from its settings alone."""
    if found:
        train, targets = len(found.train), sum(bool(row.is_target) for row in found.train)
    else:
        train, targets = config.corpus.count()
    forget = config.retrieve.num_forget or targets
    return Sizes(train, targets, forget, config.retrieve.num_retain or forget)
