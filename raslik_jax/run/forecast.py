"""What a run will do and take, before there are weights or data: sizes and arithmetic.

Operations are counted by formula (`influence/costs`), and a time is the larger of operations over
a rate and bytes over a rate, both of which the caller gives, and that of compiling. Memory is what
XLA says of the largest programs, compiled ahead of time (`programs`), or a bound by formula.
Lengths of rows are those of Alpaca's 52,002 in Pythia's tokens, whatever the corpus; other
tokenizers differ by some percent. Reading files and work on the host (BM25, ROUGE, writing) are
left out.
"""

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from raslik_jax.axes import Tree
from raslik_jax.config import STAGES, Config
from raslik_jax.data import batches
from raslik_jax.data.alpaca_lengths import load_alpaca_lengths
from raslik_jax.files import read_json
from raslik_jax.models import decoder, quantize
from raslik_jax.report.tables import Column, Table
from raslik_jax.run import programs
from raslik_jax.run.checking import model_of
from raslik_jax.run.plan import plan_units
from raslik_jax.run.units import Plan
from raslik_jax.run.workspace import Model, Workspace, lora_config_of
from raslik_jax.sketch import costs, projections

_DRAWS = 512
# Seconds that a program takes to compile where none was compiled to know: of small models on a CPU.
_COMPILE_SECONDS = 5.0
# Float32 arrays of the size of the logits that a loss keeps at once, forward and back.
_NLL_LOGITS, _KL_LOGITS = 3, 8


class _EncoderShape(NamedTuple):
    """Width and number of layers, weights of their matrices, and those with word embeddings."""

    width: int
    layers: int
    in_layers: int
    weights: int


class Sizes(NamedTuple):
    """How many rows there are of what.

    Attributes:
      train: training examples.
      targets: of them, to be forgotten.
      forget: of the forget set.
      retain: of the retain set.
    """

    train: int
    targets: int
    forget: int
    retain: int


class Step(NamedTuple):
    """One unit of work of the run.

    Attributes:
      name: of the unit.
      is_done: its result is there and up to date.
      operations: multiplications and additions of matrix products.
      bytes_moved: read from or written to device memory, where that and not operations decides.
      device_bytes: memory of the device; 0 for work on the host.
      disk_bytes: what it leaves.
      memory: where device_bytes comes from: "XLA" of the compiled program, "bound" by formula from
        above, or "estimate".
      num_programs: that it compiles; those that an earlier unit has compiled count there.
      program: what compiles its largest one, or "".
    """

    name: str
    is_done: bool
    operations: float = 0.0
    bytes_moved: float = 0.0
    device_bytes: float = 0.0
    disk_bytes: float = 0.0
    memory: str = "bound"
    num_programs: int = 0
    program: str = ""

    def seconds(self, flops_per_second: float, bytes_per_second: float) -> float:
        """Returns the larger of the two times, at these rates, without compiling."""
        return max(self.operations / flops_per_second, self.bytes_moved / bytes_per_second)


class Forecast(NamedTuple):
    """What a run will do and take.

    Attributes:
      model: name of the checkpoint, and of the preset that its shapes come from.
      sizes: rows.
      queries: how many of which.
      num_weights: of the frozen base.
      base_bytes: it takes, as stored on the device.
      num_params: P, LoRA parameters.
      sketch_size: K.
      index_bytes: N x K x dtype, rows alone.
      gradient_bytes: one unsketched gradient, float32.
      row_bytes: one sketch, in the index's dtype.
      mean_tokens: of a training example.
      steps: units in order.
      compile_seconds: that a program takes to compile.
      width: inputs and outputs of the model's widest kernel.
      notes: what is taken for granted.
    """

    model: str
    sizes: Sizes
    queries: Mapping[str, int]
    num_weights: int
    base_bytes: int
    num_params: int
    sketch_size: int
    index_bytes: int
    gradient_bytes: int
    row_bytes: int
    mean_tokens: float
    steps: tuple[Step, ...]
    compile_seconds: float
    width: tuple[int, int]
    notes: tuple[str, ...]


def count_rows(config: Config) -> Sizes:
    """Returns the rows of a run, from its settings alone; rows of one's own are counted."""
    train, targets = config.corpus.count()
    settings = config.retrieve
    forget = settings.num_forget or targets
    return Sizes(train, targets, forget, settings.num_retain or forget)


class _Work:
    """Operations and bytes of this model on rows of Alpaca's lengths."""

    def __init__(self, config: Config):
        self.config = config
        self.name, self.model = model_of(config)
        settings = config.backbone
        _, self.lora, self.base = decoder.abstract(
            self.model, lora_config_of(config), jnp.dtype(settings.dtype)
        )
        self.shapes = costs.linear_shapes(self.base)
        self.num_weights = decoder.count_parameters(self.base)
        plain = self.base

        def stored(form: str) -> Tree:
            if form == "plain":
                return plain
            double = settings.double_quant and form == "nf4"
            return jax.eval_shape(
                lambda base: quantize.quantize_base(base, form, double_quant=double), plain
            )

        self.base = stored(settings.format)
        self.base_bytes = quantize.num_bytes(self.base)
        form = config.sketch.base_format
        self.gradient_base = self.base if form == "same" else stored(form)
        self.num_params = projections.count_params(self.lora)
        self.length_N, self.response_N = load_alpaca_lengths(max_len=config.corpus.max_len)
        self.sizes = count_rows(config)

    @property
    def head_width(self) -> int:
        return self.model.hidden_size // self.model.num_attention_heads

    def gradient(self, tokens: float, targets: float, *, remat: bool = False) -> float:
        """Operations of forward and backward pass; with remat the layers go forward twice."""
        once = costs.gradient_operations(self.shapes, tokens=tokens, targets=targets)
        again = costs.gradient_operations(self.shapes, tokens=tokens, targets=0.0) / 2
        return once + (again if remat else 0.0)

    def forward(self, tokens: float, targets: float) -> float:
        return costs.gradient_operations(self.shapes, tokens=tokens, targets=targets) / 2

    def draw_shapes(
        self, batch: int, *, max_len: int, fixed: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns tokens and target rows of a row of some training batches, pads included."""
        length_N, response_N = load_alpaca_lengths(max_len=max_len)
        if fixed:
            full_D = np.full(_DRAWS, max_len)
            return full_D, full_D
        rows_DB = np.random.default_rng(0).integers(0, len(length_N), (_DRAWS, batch))
        length_D = np.array([batches.next_rung(n) for n in length_N[rows_DB].max(1).tolist()])
        halves_D = response_N[rows_DB].max(1) <= length_D // 2
        return length_D, np.where(halves_D, length_D // 2, length_D)

    def batch_tokens(self, batch: int, *, max_len: int, fixed: bool) -> tuple[float, float]:
        """Mean tokens and target rows that a training batch computes, pads included."""
        length_D, targets_D = self.draw_shapes(batch, max_len=max_len, fixed=fixed)
        return float(batch * length_D.mean()), float(batch * targets_D.mean())

    def num_programs(
        self, batch: int, *, max_len: int, fixed: bool, steps: int, sets: int = 1
    ) -> int:
        """Shapes of batches, each of which compiles once, that so many steps meet."""
        shape_D = list(zip(*self.draw_shapes(batch, max_len=max_len, fixed=fixed), strict=True))
        other_D = shape_D[1:] + shape_D[:1] if sets == 2 else shape_D
        return len(set(list(zip(shape_D, other_D, strict=True))[:steps]))

    def largest(self, batch: int, *, max_len: int, fixed: bool) -> programs.Shape:
        """The largest batch of a training."""
        length = max_len if fixed else batches.next_rung(max_len)
        return programs.Shape(batch, length, length)

    def training_bytes(
        self,
        shape: programs.Shape,
        *,
        remat: bool,
        kept: float,
        logits: int = _NLL_LOGITS,
        sets: int = 1,
    ) -> float:
        """Base, what is kept of the trained weights, and what the backward pass keeps.

        Args:
          shape: of the largest micro-batch.
          remat: gradient checkpointing.
          kept: bytes of trained weights, their gradients and the optimizer's state.
          logits: arrays of the size of the logits.
          sets: batches that are differentiated together.
        """
        bound = self.bound(shape.batch, shape.length, remat=remat)
        scores = 4.0 * logits * shape.batch * shape.targets * self.model.vocab_size
        return self.base_bytes + kept + sets * (bound.activations + bound.head + scores)

    def bound(self, batch: int, length: int, *, remat: bool, size: int = 1) -> costs.MemoryBound:
        """The formula's bound; a size is that of sketches, which have a base of their own."""
        spec = projections.ProjectionSpec(
            family="binned", num_params=self.num_params, size=size, seed=0
        )
        table = jax.ShapeDtypeStruct((-(-spec.num_params // size), size), jnp.int32)
        return costs.memory_bound(
            self.gradient_base if size > 1 else self.base,
            (self.lora,),
            table,
            num_heads=self.model.num_attention_heads,
            batch=batch,
            micro_batch=batch,
            length=length,
            num_targets=length,
            size=size,
            remat=remat,
        )

    def decode(self, prompts: int) -> dict[str, Any]:
        """Greedy answers: the prompts once, then weights and cache once for every token."""
        settings, model = self.config.references, self.model
        batch = min(settings.decode_batch_size, max(prompts, 1))
        prompt_N = self.length_N - self.response_N
        prompt, room = float(prompt_N.mean()), self.longest_prompt
        new = settings.max_new_tokens
        groups = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
        token = 2 * model.num_hidden_layers * groups * self.head_width
        token *= jnp.dtype(self.config.backbone.dtype).itemsize
        rounds = -(-prompts // batch)
        return {
            "operations": self.forward(prompts * (prompt + new), float(prompts * new)),
            "bytes_moved": float(
                rounds * new * self.base_bytes + prompts * new * token * (prompt + new / 2)
            ),
            "device_bytes": float(self.base_bytes + batch * (room + new) * token),
            "disk_bytes": float(prompts * 500),
            "memory": "estimate",
            # Of the longest prompts and of shorter ones.
            "num_programs": min(2, rounds),
            "program": "decode",
        }

    @property
    def longest_prompt(self) -> int:
        """Tokens that a batch of the longest prompts is padded to."""
        return batches.next_rung(int((self.length_N - self.response_N).max()))

    def perplexity(self) -> dict[str, Any]:
        """The likelihood of some rows of four sets."""
        rows = 4 * self.config.evaluate.perplexity_examples
        tokens, targets = rows * self.length_N.mean(), rows * self.response_N.mean()
        # Forward alone keeps one layer at a time.
        bound = self.bound(*self.sketch_batch, remat=True)
        return {
            "operations": self.forward(float(tokens), float(targets)),
            "bytes_moved": float(self.base_bytes),
            "device_bytes": float(bound.weights + bound.activations + bound.head),
            "disk_bytes": 100.0 * rows,
            "num_programs": 2,
            "program": "perplexity",
        }

    @property
    def sketch_batch(self) -> tuple[int, int]:
        """Rows and tokens of the largest batch that --sketch.batch_tokens allows."""
        length = batches.next_rung(self.config.corpus.max_len)
        return max(1, self.config.sketch.batch_tokens // length), length

    def questions(self) -> dict[str, Any]:
        """The dataset's own questions: answers, and the likelihood of right and wrong ones."""
        asked, given = self.config.corpus.count_questions(self.config.evaluate.questions)
        answers = self.decode(asked)
        tokens, targets = given * self.length_N.mean(), given * self.response_N.mean()
        return answers | {
            "operations": answers["operations"] + self.forward(float(tokens), float(targets))
        }

    @property
    def num_sketched(self) -> int:
        """Adapters at which gradients are taken."""
        settings = self.config
        is_path = settings.sketch.gradient_at == "trajectory"
        return settings.finetune.trajectory_points if is_path else 1

    @property
    def sketch_size(self) -> int:
        return min(self.config.sketch.size, self.num_sketched * self.num_params)

    @property
    def row_bytes(self) -> int:
        return self.sketch_size * jnp.dtype(self.config.sketch.dtype).itemsize

    def sketches(self) -> dict[str, Any]:
        """Gradients of all training examples and retrieval queries, by the run's own batches."""
        settings, count = self.config.sketch, self.sizes.train
        place_N = np.random.default_rng(0).integers(0, len(self.length_N), count)
        length_N, response_N = self.length_N[place_N], self.response_N[place_N]
        targets_N = response_N if settings.targets == "response" else length_N - 1
        plans = batches.plan_batches(
            length_N,
            np.maximum(targets_N, 1),
            ids=[f"{row:09d}" for row in range(count)],
            num_buckets=settings.num_buckets,
            batch_tokens=settings.batch_tokens,
        )
        slots = sum(plan.rows.size for plan in plans)
        more = (count + self.config.corpus.num_retrieval) / count * self.num_sketched
        largest = max(plans, key=lambda plan: plan.rows.size * plan.length)
        return {
            "operations": more
            * self.gradient(
                float(sum(plan.rows.size * plan.length for plan in plans)),
                float(sum(plan.rows.size * plan.num_targets for plan in plans)),
            ),
            "bytes_moved": more * slots * 4.0 * self.num_params,
            "device_bytes": float(
                self.bound(
                    largest.rows.size, largest.length, remat=False, size=self.sketch_size
                ).total
                + (0 if self.gradient_base is self.base else self.base_bytes)
            ),
            "num_programs": len({(p.rows.size, p.length, p.num_targets) for p in plans}),
        }


def _unlearning(work: _Work, name: str) -> dict[str, Any]:
    """Steps of one algorithm: each takes a batch of both sets."""
    settings, sizes = work.config.unlearn, work.sizes
    batch = settings.batch_size
    micro = settings.micro_batch_size or batch
    steps = settings.epochs * -(-max(sizes.forget, sizes.retain) // batch)
    tokens, targets = work.batch_tokens(
        micro,
        max_len=settings.max_len or work.config.corpus.max_len,
        fixed=settings.fixed_padding,
    )
    parts = batch // micro
    gradient = parts * work.gradient(tokens, targets, remat=settings.remat)
    reference = parts * work.forward(tokens, targets)
    has_retain = name.endswith(("_gdr", "_klr")) or name == "simnpo"
    operations = gradient * (2 if has_retain else 1)
    # The reference speaks on the retain set for a KL to it, on the forget set for NPO's ratio.
    operations += reference * (name.endswith("_klr") + name.startswith("npo"))
    shapes: dict[str, Any] = {
        "max_len": settings.max_len or work.config.corpus.max_len,
        "fixed": settings.fixed_padding,
    }
    is_whole = settings.parameters == "all"
    trained = work.num_weights if is_whole else work.num_params
    return {
        "operations": steps * operations * (1.5 if is_whole else 1.0),
        # Weights and two moments go in and come out; a gradient, an update, and the reference. Of
        # all weights there are two more in the dtype of the base: those that run, and the merged.
        "device_bytes": work.training_bytes(
            work.largest(micro, **shapes),
            remat=settings.remat,
            kept=4.0 * 8 * trained + 4.0 * work.num_params + 2.0 * is_whole * work.base_bytes,
            logits=_KL_LOGITS if name.endswith("_klr") else _NLL_LOGITS,
            sets=2 if has_retain else 1,
        ),
        "disk_bytes": settings.epochs * float(work.base_bytes if is_whole else 4 * work.num_params),
        "num_programs": work.num_programs(
            batch, **shapes, steps=steps, sets=2 if has_retain else 1
        ),
        "program": f"unlearn/{name}",
    }


def _finetuning(work: _Work) -> dict[str, Any]:
    settings = work.config.finetune
    batch = settings.batch_size
    micro = settings.micro_batch_size or batch
    steps = settings.epochs * -(-work.sizes.train // batch)
    tokens, targets = work.batch_tokens(
        micro,
        max_len=settings.max_len or work.config.corpus.max_len,
        fixed=settings.fixed_padding,
    )
    kept = 2 + settings.trajectory_points
    shapes: dict[str, Any] = {
        "max_len": settings.max_len or work.config.corpus.max_len,
        "fixed": settings.fixed_padding,
    }
    return {
        "operations": steps
        * (batch // micro)
        * work.gradient(tokens, targets, remat=settings.remat),
        "device_bytes": work.training_bytes(
            work.largest(micro, **shapes),
            remat=settings.remat,
            kept=4.0 * (8 + kept) * work.num_params,
        ),
        "disk_bytes": 4.0 * work.num_params * kept,
        "num_programs": work.num_programs(batch, **shapes, steps=steps),
        "program": "finetune",
    }


def _backbone(work: _Work) -> dict[str, Any]:
    settings = work.config.backbone
    if settings.checkpoint:
        return {}
    batch = settings.batch_size
    tokens, targets = work.batch_tokens(batch, max_len=work.config.corpus.max_len, fixed=False)
    return {
        # All weights are trained: two more for every weight and token.
        "operations": settings.steps * 1.5 * work.gradient(tokens, targets),
        "device_bytes": work.training_bytes(
            work.largest(batch, max_len=work.config.corpus.max_len, fixed=False),
            remat=False,
            kept=4.0 * 8 * work.num_weights,
        ),
        "disk_bytes": float(work.base_bytes),
        "num_programs": work.num_programs(
            batch,
            max_len=work.config.corpus.max_len,
            fixed=False,
            steps=settings.steps,
        ),
        "program": "backbone",
    }


def _encoder_shape(name: str) -> _EncoderShape:
    """Returns the shape of a folder's encoder; of any other name that of BERT base and RoBERTa."""
    width, layers, inner, vocabulary = 768, 12, 3072, 50_265
    path = pathlib.Path(name) / "config.json"
    if name and path.is_file():
        found = read_json(path)
        width, layers = found["hidden_size"], found["num_hidden_layers"]
        inner, vocabulary = found["intermediate_size"], found["vocab_size"]
    return _encoder_shape_of(width, layers, inner, vocabulary)


def _encoder_shape_of(width: int, layers: int, inner: int, vocabulary: int) -> _EncoderShape:
    in_layers = layers * (4 * width**2 + 2 * width * inner)
    return _EncoderShape(width, layers, in_layers, in_layers + vocabulary * width)


def _discriminator(work: _Work) -> dict[str, Any]:
    """Training of all weights of the classifier, on answers as long as Alpaca's."""
    settings, sizes = work.config.evaluate["classifier"], work.sizes
    limit = settings.examples or sizes.train
    labeled = min(limit, sizes.targets) + min(limit, sizes.train - sizes.targets)
    texts = labeled * (1 - settings.held_out)
    if settings.checkpoint:
        shape = _encoder_shape(settings.checkpoint)
    else:
        width, layers = settings.hidden_size, settings.num_layers
        shape = _encoder_shape_of(width, layers, 4 * width, work.config.corpus.vocab_size)
    length_N = np.minimum(work.response_N, settings.max_len)
    tokens = settings.batch_size * settings.max_len
    return {
        "operations": 6.0 * shape.in_layers * settings.epochs * texts * float(length_N.mean()),
        # Weights, gradient and two moments; what a layer keeps for the way back is some 20 widths.
        "device_bytes": 16.0 * shape.weights + 80.0 * tokens * shape.layers * shape.width,
        "disk_bytes": 4.0 * shape.weights,
        "memory": "estimate",
        "num_programs": 2,
    }


def _retrieval(work: _Work, name: str) -> dict[str, Any]:
    sizes = work.sizes
    if name == "influence":
        passed = float(sizes.train * work.row_bytes)
        return {
            "operations": 2.0 * sizes.train * work.sketch_size * work.config.corpus.num_retrieval,
            "bytes_moved": passed,
            "disk_bytes": 4.0 * sizes.train,
        }
    if name == "embeddings":
        encoder = _encoder_shape(work.config.retrieve["embedding"].checkpoint)
        tokens = float((work.length_N - work.response_N).mean()) * sizes.train
        return {
            "operations": 2.0 * encoder.in_layers * tokens,
            "disk_bytes": 4.0 * encoder.width * sizes.train,
        }
    if name == "exact_kernel":
        # Gradients are made for the mean, and again for the scores.
        passes = 2 if work.config.retrieve.center else 1
        once = work.sketches()
        flat = 4.0 * work.num_sketched * work.num_params
        return {
            "operations": passes * once["operations"],
            "bytes_moved": passes * once["bytes_moved"],
            "device_bytes": once["device_bytes"] + flat * (work.config.corpus.num_retrieval + 1),
            "disk_bytes": 4.0 * sizes.train,
        }
    return {"disk_bytes": 500.0 * (sizes.forget + sizes.retain)}


def forecast(
    config: Config,
    workdir: pathlib.Path,
    *,
    stages: Sequence[str] = STAGES,
    compiles: bool = False,
) -> Forecast:
    """Returns what a run will do and take, unit by unit; needs no weights, no data, no network.

    Args:
      config: of the run.
      workdir: where finished units are looked for; nothing is written.
      stages: those that will run.
      compiles: compile the largest program of every kind that is still to run, for the default
        device, to say how much memory it takes and how long compiling does.

    Raises:
      ValueError: a checkpoint whose shapes are unknown, or adapter targets that it does not have.
    """
    work = _Work(config)
    corpus, workspace = config.corpus, Workspace(workdir, config)
    measured = 2 * getattr(corpus, f"num_{config.references.query_split}")
    units = plan_units(config, workspace)
    done = Plan(workdir, units).survey().done

    def costs_of(name: str) -> dict[str, Any]:
        stage, _, rest = name.partition("/")
        if stage == "corpus":
            return {"disk_bytes": 500.0 * work.sizes.train}
        if stage == "backbone":
            return _backbone(work)
        if stage == "finetune":
            return _finetuning(work)
        if stage == "discriminator":
            return _discriminator(work)
        if stage == "references" and rest in ("questions", "non_sf"):
            return {}
        if stage in ("references", "generate"):
            kind = rest if stage == "references" else rest.partition("-")[0]
            if kind == "retrieval":
                return work.decode(corpus.num_retrieval)
            # Before unlearning the fine-tuned model and the backbone; after it every epoch.
            models = 2
            if stage == "generate":
                strategy, _, algorithm = rest.removeprefix(f"{kind}-").rpartition("-")
                if kind not in ("perplexity", "answered"):
                    strategy, _, algorithm = rest.rpartition("-")
                models = len(workspace.epochs(strategy, algorithm))
            once = {
                "perplexity": work.perplexity,
                "answered": work.questions,
            }.get(kind, functools.partial(work.decode, measured))()
            return once | {
                key: models * once[key] for key in ("operations", "bytes_moved", "disk_bytes")
            }
        if stage == "sketch":
            index = float(work.sizes.train * work.row_bytes)
            return work.sketches() | {"disk_bytes": index}
        if stage == "retrieve":
            # The sketches of the queries are counted with those of the examples.
            return {} if rest == "queries" else _retrieval(work, rest)
        if stage == "unlearn":
            return _unlearning(work, rest.rpartition("-")[2])
        return {}

    steps = tuple(
        Step(unit.name, unit.name in done, **costs_of(unit.name))
        for unit in units
        if unit.stage in stages
    )
    seconds: list[float] = []
    if compiles:
        steps, seconds = _with_programs(steps, work, workspace)
    known: set[str] = set()
    for number, step in enumerate(steps):
        # Units of one process share what is compiled; finished ones compile nothing.
        if step.is_done or step.program in known:
            steps = (*steps[:number], step._replace(num_programs=0), *steps[number + 1 :])
        elif step.program:
            known.add(step.program)
    return Forecast(
        model=work.name,
        sizes=work.sizes,
        queries={
            "retrieval": corpus.num_retrieval,
            f"{config.references.query_split}, target and normal": measured,
        },
        num_weights=work.num_weights,
        base_bytes=work.base_bytes,
        num_params=work.num_params,
        sketch_size=work.sketch_size,
        index_bytes=work.sizes.train * work.row_bytes,
        gradient_bytes=4 * work.num_params,
        row_bytes=work.row_bytes,
        mean_tokens=float(work.length_N.mean()),
        steps=steps,
        compile_seconds=float(np.median(seconds)) if seconds else _COMPILE_SECONDS,
        width=max(work.shapes.layer, key=lambda pair: pair[0] * pair[1]),
        notes=_notes(config, is_compiled=bool(seconds)),
    )


def _with_programs(
    steps: Sequence[Step], work: _Work, workspace: Workspace
) -> tuple[tuple[Step, ...], list[float]]:
    """Returns the steps with XLA's memory of their largest programs, and seconds of compiling."""
    config = work.config
    graphdef, _, _ = decoder.abstract(
        work.model, lora_config_of(config), jnp.dtype(config.backbone.dtype)
    )
    workspace.model = Model(
        decoder.bind(graphdef), work.base, work.lora, lora_config_of(config), graphdef
    )
    finetune, unlearn = config.finetune, config.unlearn
    max_len = config.corpus.max_len
    makers: dict[str, Callable[[], programs.Program]] = {
        "backbone": lambda: programs.pretraining(
            workspace,
            work.largest(config.backbone.batch_size, max_len=max_len, fixed=False),
        ),
        "finetune": lambda: programs.finetuning(
            workspace,
            work.largest(
                finetune.batch_size,
                max_len=finetune.max_len or max_len,
                fixed=finetune.fixed_padding,
            ),
        ),
        "decode": lambda: programs.decoding(
            workspace,
            rows=config.references.decode_batch_size,
            length=work.longest_prompt,
        ),
        **{
            f"unlearn/{name}": functools.partial(
                programs.unlearning,
                workspace,
                work.largest(
                    unlearn.batch_size,
                    max_len=unlearn.max_len or max_len,
                    fixed=unlearn.fixed_padding,
                ),
                name,
            )
            for name in unlearn.algorithms
        },
    }
    wanted = {step.program for step in steps if not step.is_done} & makers.keys()
    made = {name: make() for name, make in makers.items() if name in wanted}
    found = tuple(
        step._replace(device_bytes=made[step.program].device_bytes, memory="XLA")
        if step.program in made
        else step
        for step in steps
    )
    return found, [program.seconds for program in made.values()]


def _notes(config: Config, *, is_compiled: bool) -> tuple[str, ...]:
    notes = [
        "Time: operations of matrix products and bytes of device memory over the rates, whichever "
        "takes longer, and compiling. Files and work on the host are left out.",
        "Memory of the device: a bound is by formula, from above, with float32 activations; an "
        "estimate counts weights and the cache of keys and values alone"
        + (
            f"; XLA is its analysis of the largest program, compiled for {jax.default_backend()} "
            "(another kind of device needs another amount)."
            if is_compiled
            else "."
        ),
        "Rows are taken to be as long as Alpaca's with Pythia's tokenizer.",
    ]
    if config.retrieve.select != "count":
        notes.append(
            "The rule of --retrieve.select decides the sizes of the sets; those shown are by count."
        )
    return tuple(notes)


def sizes_table(found: Forecast) -> Table:
    """Returns the table of a run's sizes."""
    sizes = found.sizes
    rows = [
        ("Model", found.model),
        ("Frozen weights", f"{found.num_weights:,}, {_bytes(found.base_bytes)} on the device"),
        ("LoRA parameters, P", f"{found.num_params:,}"),
        ("Training examples, N", f"{sizes.train:,}, of them {sizes.targets:,} targets"),
        ("Forget set, retain set", f"{sizes.forget:,} and {sizes.retain:,}"),
        ("Queries", "; ".join(f"{name}: {count}" for name, count in found.queries.items())),
        ("Sketch, K", f"{found.sketch_size:,} of {found.num_params:,} coordinates"),
        (
            "One gradient, one sketch",
            f"{_bytes(found.gradient_bytes)} and {_bytes(found.row_bytes)}, "
            f"{found.gradient_bytes / found.row_bytes:.3g} to 1",
        ),
        ("Index, N x K", _bytes(found.index_bytes)),
    ]
    return Table((Column("What"), Column("Size")), tuple(rows))


def steps_table(
    found: Forecast, *, flops_per_second: float, bytes_per_second: float, origin: str = "as given"
) -> Table:
    """Returns the table of a run's stages: what is done, what is left, and what it takes.

    Units of one stage that cost the same stand in one row.

    Args:
      found: the forecast.
      flops_per_second: operations a second that the machine is taken to do.
      bytes_per_second: bytes of memory a second that it is taken to move.
      origin: where the two rates come from.
    """
    groups: dict[tuple[Any, ...], list[Step]] = {}
    for step in found.steps:
        stage, *rest = step.name.split("/")
        costed = (step.operations, step.bytes_moved, step.device_bytes, step.memory)
        key = (stage, *costed) if rest and any(costed[:3]) else (stage, bool(rest), *costed)
        groups.setdefault(key, []).append(step)
    rows: list[tuple[str, ...]] = []
    total = left = 0.0
    for steps in groups.values():
        seconds = steps[0].seconds(flops_per_second, bytes_per_second)
        compiling = found.compile_seconds * sum(step.num_programs for step in steps)
        done = sum(step.is_done for step in steps)
        total += len(steps) * seconds + compiling
        left += (len(steps) - done) * seconds + compiling
        operations = sum(step.operations for step in steps)
        moved = sum(step.bytes_moved for step in steps)
        disk = sum(step.disk_bytes for step in steps)
        label = steps[0].name
        if len(steps) > 1:
            names = [step.name.partition("/")[2] for step in steps]
            label = f"{steps[0].name.partition('/')[0]}/{names[0]} ... {names[-1]}"
        rows.append(
            (
                label,
                f"{done} of {len(steps)}",
                f"{operations:.2e}" if operations else "-",
                _bytes(moved) if moved else "-",
                _seconds(len(steps) * seconds + compiling) if seconds or compiling else "-",
                f"{_bytes(steps[0].device_bytes)}, {steps[0].memory}"
                if steps[0].device_bytes
                else "-",
                _bytes(disk) if disk else "-",
            )
        )
    disk = sum(step.disk_bytes for step in found.steps)
    rows.append(("all", "", "", "", _seconds(total), "", _bytes(disk)))
    rows.append(("left to do", "", "", "", _seconds(left), "", ""))
    columns = (
        Column("Stage"),
        Column("Done", "right"),
        Column("Operations", "right"),
        Column("Bytes moved", "right"),
        Column("Time", "right"),
        Column("Device memory", "right"),
        Column("Disk", "right"),
    )
    count = sum(step.num_programs for step in found.steps)
    rates = (
        f"Rates: {flops_per_second:.3g} operations and {bytes_per_second:.3g} bytes a second, "
        f"{origin}; about {count} programs to compile, {found.compile_seconds:.2g} s each."
    )
    return Table(columns, tuple(rows), (rates, *found.notes))


def _bytes(count: int | float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB" if count < 1000 else f"{count:,.0f} TB"


def _seconds(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.2g} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"
