"""The work directory for the stages: results of earlier stages, read at their first use."""

import functools
import pathlib
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from raslik_jax.base.axes import Tree
from raslik_jax.base.files import read_json
from raslik_jax.base.messages import shown, some_of
from raslik_jax.config import AUTO_TARGETS, Config
from raslik_jax.data import batches, corpora, examples
from raslik_jax.data.examples import Corpus, Example, answered
from raslik_jax.data.tokens import encoding, masking, prompts, tokenization
from raslik_jax.data.words import refused
from raslik_jax.evaluate import choice, likelihood, rates
from raslik_jax.evaluate.metrics import NonSf
from raslik_jax.models import adapters, checkpoint, decode, sharding, storage
from raslik_jax.models import decoder as decoders
from raslik_jax.models.lora import LoRAConfig
from raslik_jax.parallel import meshes
from raslik_jax.run import artifacts, live, memory
from raslik_jax.train import loop, steps
from raslik_jax.train.losses import BoundModel
from raslik_jax.train.objectives import OBJECTIVES

_F = TypeVar("_F", bound=Callable[..., Any])


class Model(NamedTuple):
    """The backbone with places for an adapter.

    `draw` makes the initial adapter of a seed, by default the run's. Compiling it takes longer than
    loading a small model, and few stages need it. `identity` is that of the stored base, for any
    loaded format.
    """

    decoder: decoders.Decoder
    base: Tree
    draw: Callable[..., Tree]
    lora_config: LoRAConfig
    graphdef: decoders.GraphDef
    identity: str = ""

    @property
    def initial(self) -> Tree:
        """A fresh adapter; its B is 0, so the decoder's functions equal those of the backbone."""
        return self.draw()

    def decoder_for(self, *, remat: bool) -> decoders.Decoder:
        """Returns the pure functions, with or without gradient checkpointing."""
        return decoders.bind(self.graphdef, remat=remat)


def once(make: _F) -> _F:
    """Returns a function of an object that makes each result once and keeps it in the object."""

    @functools.wraps(make)
    def found(owner: Any, *arguments: Any, **named: Any) -> Any:
        made = vars(owner).setdefault(f"_{make.__name__}_once", {})
        key = arguments, *sorted(named.items())
        if key not in made:
            made[key] = make(owner, *arguments, **named)
        return made[key]

    return cast("_F", found)


class _Rows(dict[str, tuple[Example, ...]]):
    """The rows of a corpus by name, each read at its first use: units declare what they read."""

    def __init__(self, folder: pathlib.Path):
        super().__init__()
        self._folder = folder

    def __missing__(self, name: str) -> tuple[Example, ...]:
        rows = self[name] = artifacts.corpus_rows(name).read_in(self._folder)
        return rows


class StoredCorpus:
    """A corpus from its unit; `queries` has the other rows too."""

    def __init__(self, folder: pathlib.Path):
        self.queries = _Rows(folder)

    @property
    def backbone(self) -> tuple[Example, ...]:
        """Examples that the backbone is pretrained on."""
        return self.queries["backbone"]

    @property
    def train(self) -> tuple[Example, ...]:
        """Training examples."""
        return self.queries["train"]


AnyCorpus = StoredCorpus | Corpus


class Workspace:
    """The results of earlier stages, read from the work directory at their first use."""

    def __init__(
        self, root: pathlib.Path, config: Config, *, layout: str = "replicated", whole: bool = True
    ):
        self.root = root
        self.config = config
        self._layout = layout
        self._whole = whole  # otherwise a model has shapes in place of its weights
        self.told: set[str] = set()

    def live(self, unit: str) -> live.Live:
        """Returns the receiver of a training's numbers while it runs (see `run.live`)."""
        return live.Live(self.root, unit)

    @functools.cached_property
    def corpus(self) -> AnyCorpus:
        """The training examples and queries; each part is read at its first use."""
        return StoredCorpus(self.root / "corpus")

    @functools.cached_property
    def tokenizer(self) -> tokenization.Tokenizer:
        """The checkpoint's tokenizer or the one trained on the corpus."""
        return artifacts.TOKENIZER.read(self.root)

    @functools.cached_property
    def template(self) -> prompts.Template:
        """The template of prompts with the tokenizer's part of it."""
        return prompts.find_template(self.template_name, self.tokenizer)

    @functools.cached_property
    def template_name(self) -> str:
        """The name or file of the template by --corpus.template and the training rows."""
        if (settled := artifacts.TEMPLATE.find(self.root)) is None:
            raise refused("run_older", run=shown(str(self.root), 120))
        return settled or self.config.corpus.template

    @functools.cached_property
    def model(self) -> Model:
        """The backbone with an adapter that changes nothing yet."""
        return self._read_model(self.config.backbone.format)

    @functools.cached_property
    def sketch_model(self) -> Model:
        """The model for gradients, which may be quantized otherwise."""
        form = self.config.sketch.base_format
        if form in ("same", self.config.backbone.format):
            return self.model
        return self._read_model(form)

    @functools.cached_property
    def lora_config(self) -> LoRAConfig:
        """The settings of the run's adapter; for an adopted adapter those of the run's copy."""
        kept = self.root / "finetune" / "adapter"
        return lora_config_of(self.config, self.shapes, kept if kept.is_dir() else None)

    @property
    def shapes(self) -> decoders.ModelConfig:
        """The settings of the model from its config.json."""
        is_own = not self.config.backbone.checkpoint
        folder = self.root / "backbone" / "model" if is_own else checkpoint_folder(self.config)
        return checkpoint.read_config(folder)

    @functools.cached_property
    def parts(self) -> int:
        """The number of parts of the split weights by --mesh.base; 1: none."""
        if meshes.num_shards() == 1:
            return 1
        parts, held = memory.lay_out(self.config.backbone, self.shapes, self._layout)
        self.tell(sharding.describe(held, parts) if parts > 1 else "")
        return parts

    def _read_model(self, base_format: str) -> Model:
        settings = self.config.backbone
        source = settings.checkpoint or self.root / "backbone" / "model"
        own: Any = {"lora_config": self.lora_config, "revision": settings.revision or None}
        loaded = self._load(source, base_format, **own)
        bound = decoders.bind(loaded.graphdef)

        @functools.cache
        def draw(seed: int = self.config.seed) -> Tree:
            return meshes.place(decoders.init_lora(loaded.graphdef, key=jax.random.key(seed)))

        return Model(bound, loaded.base, draw, self.lora_config, loaded.graphdef, loaded.identity)

    def _load(self, source: str | pathlib.Path, form: str, **own: Any) -> checkpoint.LoadedModel:
        """Returns a model of a checkpoint in a format; refuses one that lacks tokens of the run."""
        settings = self.config.backbone
        loaded = checkpoint.load_model(
            source,
            dtype=settings.dtypes,
            base_format=None if form == "plain" else form,
            double_quant=settings.double_quant and form == "nf4",
            parts=self.parts,
            whole=self._whole,
            **own,
        )
        origin, size = str(artifacts.TOKENIZER.place(self.root)), self.tokenizer.vocab_size
        checkpoint.check_vocabulary(loaded.graphdef.config, size, origin=origin)
        return loaded

    def adapter(self, *parts: str) -> Tree:
        """Returns an adapter that a stage saved."""
        lora = adapters.load_adapter(
            self.root.joinpath(*parts),
            self.model.decoder.config,
            lora_config=self.model.lora_config,
            base=self.model.identity,
        )
        return meshes.place(lora)

    def save_adapter(self, folder: pathlib.Path, lora: Tree) -> None:
        """Writes an adapter; replaces one of an interrupted run."""
        shutil.rmtree(folder, ignore_errors=True)
        model = self.model
        adapters.save_adapter(
            folder, lora, model.lora_config, model.decoder.config, base=model.identity
        )

    @functools.cached_property
    def finetuned(self) -> Tree:
        """The adapter before unlearning."""
        return self.adapter("finetune", "adapter")

    @functools.cached_property
    def has_backbone(self) -> bool:
        """Whether a model before fine-tuning is known; with B = 0 the base is the same model."""
        if self.config.references.base:
            return True
        return any(bool(jnp.any(one["b"] != 0)) for one in self.finetuned["layers"].values())

    @functools.cached_property
    def backbone(self) -> BoundModel:
        """The model before fine-tuning: --references.base, or the base without the adapter."""
        name, settings = self.config.references.base, self.config.backbone
        if not name:
            # An adapter of zeros changes nothing either, and takes no program to make.
            _, shapes, _ = decoders.abstract(self.model.decoder.config, self.model.lora_config)
            zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
            return self.with_adapter(meshes.place(zeros))
        loaded = self._load(name, settings.format)
        return BoundModel(decoders.bind(loaded.graphdef), {}, loaded.base)

    @functools.cached_property
    def train_rows(self) -> encoding.Encoded:
        """The training examples as whole rows of token ids; see `cut`."""
        return artifacts.TRAIN_TOKENS.read(self.root)

    def cut(
        self,
        whole: encoding.Encoded,
        what: str,
        *,
        targets: encoding.Targets = "response",
        max_len: int = 0,
    ) -> encoding.Encoded:
        """Returns rows of at most max_len tokens (0 for --corpus.max_len); says how many are cut.

        The message calls them `what`, in the plural. For targets see `Encoded.cut`.
        """
        max_len = max_len or self.config.corpus.max_len
        self.tell(encoding.describe_cuts(whole, what, max_len=max_len))
        return whole.cut(max_len, targets=targets)

    def encode(
        self,
        rows: Sequence[Example],
        what: str = "examples",
        *,
        targets: encoding.Targets = "response",
    ) -> encoding.Encoded:
        """Returns examples as token ids with the last answer as target; else as `cut`."""
        whole = encoding.encode(rows, self.tokenizer, template=self.template_name, only_last=True)
        self.tell(encoding.describe_dropped(whole, what))
        return self.cut(whole, what, targets=targets)

    def fit(self, rows: Sequence[Example], most: int = 0) -> list[bool]:
        """Returns whether each row's last answer begins within `most` tokens (0: max_len)."""
        if not rows:
            return []
        how: Any = {"template": self.template_name, "only_last": True}
        start_N = encoding.encode(rows, self.tokenizer, **how).start_N
        found: list[bool] = (start_N < (most or self.config.corpus.max_len)).tolist()
        return found

    def tell(self, line: str) -> None:
        """Prints a line about the data on stderr once in a process."""
        if line and line not in self.told:
            self.told.add(line)
            print(f"    {line}", file=sys.stderr)

    def has_rows_of_today(self) -> bool:
        """Returns whether the source of the training rows still has them, read again."""
        both = self.config.corpus.load(seed=self.config.seed).train, self.corpus.train
        return len({examples.content_id(*map(examples.learned_part, rows)) for rows in both}) == 1

    def retrieval_queries(self) -> tuple[Example, ...]:
        """Returns the queries of retrieval, each with its traced output.

        All readers of retrieval queries call it: queries with an empty answer are left out.
        """
        queries = self.corpus.queries["retrieval"]
        unanswered = queries_to_answer(queries, self.config.sketch.query_output)
        if unanswered:
            answers = artifacts.OWN_ANSWERS.read(self.root)
            queries = tuple(
                answered(row, answers[row.example_id]) if row in unanswered else row
                for row in queries
            )
        kept, line = examples.drop_unanswered(queries)
        self.tell(line)
        return kept

    def evaluation_queries(self) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
        """Returns the target and the normal queries that measure the run.

        Rows with one prompt are asked once, because greedy answers to it are equal.
        """
        how: Any = {"max_len": self.config.corpus.max_len, "template": self.template_name}
        found = []
        for kind in ("target", "normal"):
            split, first = self.query_split, dict[tuple[int, ...], Example]()
            if split == examples.HELD_OUT:
                rows = artifacts.measured_rows(split, kind).read(self.root)
            else:
                rows = self.corpus.queries[f"{split}_{kind}"]
            prompts = encoding.encode_prompts(rows, self.tokenizer, **how)
            for prompt, row in zip(prompts, rows, strict=True):
                first.setdefault(tuple(prompt), row)
            found.append(tuple(first.values()))
        return found[0], found[1]

    @property
    def query_split(self) -> str:
        """The split of the queries that measure the run."""
        is_made = self.config.retrieve.held_out
        return examples.HELD_OUT if is_made else self.config.references.query_split

    def with_adapter(self, lora: Tree) -> BoundModel:
        """Returns the backbone with an adapter."""
        return BoundModel(self.model.decoder, lora, self.model.base)

    def unlearned(self, strategy: str, name: str, epoch: int = 0) -> BoundModel:
        """Returns the model after an epoch of unlearning, by default the last measured one."""
        epoch = epoch or self.epochs(strategy, name)[-1]
        return self.with_adapter(self.adapter("unlearn", f"{strategy}-{name}", f"epoch-{epoch}"))

    @functools.cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The ids that end an answer: EOS and those of the chat template and the checkpoint."""
        settings, own = self.config.backbone, masking.end_ids(self.tokenizer, self.template)
        if not settings.checkpoint:
            return own
        self.tell(checkpoint.describe_generation(folder := checkpoint_folder(self.config)))
        return tuple(sorted({*own, *checkpoint.read_end_ids(folder)}))

    def generate(
        self, model: BoundModel, rows: Sequence[Example], what: str, **how: Any
    ) -> list[str]:
        """Returns the texts of `answer`."""
        return [text for text, _ in self.answer(model, rows, what, **how)]

    def own_answers(self, rows: Sequence[Example], what: str, **how: Any) -> list[str]:
        """Returns the fine-tuned model's greedy answers; says how many are cut."""
        found = self.answer(self.with_adapter(self.finetuned), rows, what, **how)
        if cut := sum(not has_ended for _, has_ended in found):
            limit = self.config.references.max_new_tokens
            line = f"{cut:,} of {len(found):,} own answers are cut at {limit} tokens and traced as "
            self.tell(f"{line}if they ended there: raise --references.max_new_tokens")
        return [text for text, _ in found]

    def answer(
        self,
        model: BoundModel,
        rows: Sequence[Example],
        what: str,
        *,
        most: int = 0,
        plan: decode.Plan = batches.plan_by_length,
        drawing: decode.Drawing | None = None,
    ) -> list[tuple[str, bool]]:
        """Returns a model's answers, greedy or drawn, each with whether it ended by itself.

        `most` bounds their tokens.
        """
        limit = self.config.references.max_new_tokens
        if most > limit:
            self.tell(f"answers have {limit} tokens, not {most}: raise --references.max_new_tokens")
        tokenizer = self.tokenizer
        max_len, template = self.config.corpus.max_len, self.template_name
        asked = encoding.encode_prompts(rows, tokenizer, max_len=max_len, template=template)
        self._check_room(model.decoder.config, rows, asked)
        limit = min(most or limit, limit)
        said = decode.generate(
            *model,
            asked,
            max_new_tokens=limit,
            eos_id=self.end_ids,
            pad_id=tokenizer.pad_id,
            batch_size=self.config.references.decode_batch_size,
            bar=what,
            plan=plan,
            drawing=drawing,
        )
        texts = masking.read_answers(rows, asked, said, tokenizer, self.template)
        rooms = (decode.room(model.decoder.config, len(prompt)) for prompt in asked)
        ended = (len(ids) < min(limit, room) for ids, room in zip(said, rooms, strict=True))
        return list(zip(texts, ended, strict=True))

    def _check_room(
        self, config: decoders.ModelConfig, rows: Sequence[Example], asked: Sequence[Sequence[int]]
    ) -> None:
        """Refuses prompts that fill the model's positions; prints which answers are shorter."""
        most, limit = config.max_position_embeddings, self.config.references.max_new_tokens
        rooms = [decode.room(config, len(prompt)) for prompt in asked]
        least = min(rooms, default=limit)
        if least < 1:
            row = shown(rows[rooms.index(least)].example_id)
            raise refused("prompt_long", row=row, limit=most - 1, most=most, got=most - least)
        if short := sum(room < limit for room in rooms):
            self.tell(
                f"answers to {short:,} of {len(rows):,} prompts are cut at the model's last "
                f"position: at least {least:,} of --references.max_new_tokens={limit:,} tokens "
                "are left"
            )

    @once
    def _choice(self, strategy: str, name: str) -> choice.Choice | None:
        """Returns the choice of --unlearn.choice for a strategy and algorithm; None without it."""
        path, last = self.config.unlearn.choice, self.config.unlearn.epochs
        if not path:
            return None
        choices = choice.from_json(read_json(path), origin=path)
        if (strategy, name) not in choices:
            got = f"it has {sorted(choices)}: add one"
            raise ValueError(f"{path} must hold a choice for {strategy} and {name}, {got}")
        chosen = choices[strategy, name]
        if not 1 <= chosen.epoch <= last:
            chose = f"epoch {chosen.epoch} is chosen for {strategy} and {name}"
            raise ValueError(f"{chose}, the run has {last}: raise --unlearn.epochs")
        return chosen

    def learning_rate(self, strategy: str, name: str) -> float:
        """Returns the rate at which an algorithm unlearns a strategy's sets."""
        chosen = self._choice(strategy, name)
        return chosen.learning_rate if chosen else self.config.unlearn[name].learning_rate

    def epochs(self, strategy: str, name: str) -> tuple[int, ...]:
        """Returns the epochs after which a strategy and algorithm are measured."""
        if OBJECTIVES[name].retrains:  # one model is stored
            return (1,)
        chosen = self._choice(strategy, name)
        return (chosen.epoch,) if chosen else self.config.unlearn.stored_epochs

    def models(self, strategy: str, name: str) -> list[str]:
        """Returns the places of the models that are measured, the last one at the end."""
        return [f"unlearn/{strategy}-{name}/epoch-{n}" for n in self.epochs(strategy, name)]

    def likelihood_of(
        self, model: BoundModel, encoded: encoding.Encoded, *, on_ladder: bool = False
    ) -> likelihood.Likelihood:
        """Returns a model's likelihoods of encoded answers."""
        measure = self.measure(likelihood.answer_likelihood, model.decoder)
        return measure(model.lora, model.base, encoded, on_ladder=on_ladder)

    @once
    def measure(self, make: Callable[..., Any], decoder: decoders.Decoder) -> Callable[..., Any]:
        """Returns a function of `likelihood`, compiled once for a decoder's models."""
        return make(decoder, batch_tokens=self.config.sketch.batch_tokens)

    @once
    def unlearning(
        self, name: str, learning_rate: float, end_ids: tuple[int, ...] = (), longest: int = 0
    ) -> loop.Algorithm:
        """Returns an objective's algorithm; one for all strategies, so its step compiles once.

        `longest` is the tokens of the longest row; 0 holds all rows of a batch in memory.
        """
        settings, objective = self.config.unlearn, OBJECTIVES[name]
        tx = loop.adamw(learning_rate, weight_decay=settings.weight_decay, clip=settings.clip)
        names = ("mean", "forget_weight", "retain_weight")
        given: dict[str, Any] = {name: getattr(settings, name) for name in names}
        held = memory.rows_held(2 * longest, self.model.decoder.config.hidden_size)
        given |= {"micro_batch": settings.micro_batch_size or held, "end_ids": end_ids}
        bound = self.model.decoder_for(remat=settings.remat)
        return steps.unlearning(objective, bound, tx, steps.Options(**given), settings[name])


def queries_to_answer(queries: Sequence[Example], query_output: str) -> tuple[Example, ...]:
    """Returns the retrieval queries that the fine-tuned model answers, by --sketch.query_output."""
    if query_output == "own":
        return tuple(queries)
    unanswered = tuple(query for query in queries if not query.output.strip())
    if unanswered and query_output == "gold":
        raise refused("gold", names=some_of(query.example_id for query in unanswered))
    return unanswered


def lora_config_of(
    config: Config, shapes: decoders.ModelConfig, adopted: pathlib.Path | None = None
) -> LoRAConfig:
    """Returns a run's adapter settings: of --backbone.adapter, its copy or fine-tuning.

    Args:
      config: the run's settings.
      shapes: the settings of its model.
      adopted: the place of a copied adapter; None for --backbone.adapter itself.
    """
    if config.backbone.adapter:
        return adapters.read_adapter_config(adopted or adapter_source(config), shapes)
    names = ("rank", "alpha", "dropout", "targets")
    values = {name: getattr(config.finetune, f"lora_{name}") for name in names}
    if values["targets"] == AUTO_TARGETS:
        values["targets"] = decoders.ARCHITECTURES[shapes.model_type].lora_targets
    return LoRAConfig(**values)


def checkpoint_folder(config: Config) -> pathlib.Path:
    """Returns the folder of --backbone.checkpoint, fetched from the hub if need be."""
    settings = config.backbone
    return checkpoint.resolve_folder(settings.checkpoint, revision=settings.revision or None)


def adapter_source(config: Config) -> pathlib.Path:
    """Returns the folder of --backbone.adapter, fetched from the hub if need be."""
    settings = config.backbone
    return adapters.find_adapter(settings.adapter, revision=settings.adapter_revision or None)


def tokenizer_folders(config: Config) -> tuple[pathlib.Path, ...]:
    """Returns the folders that a run's tokenizer and chat template are read from, in order.

    The files next to --backbone.adapter come first. Missing parts come from the checkpoint.
    """
    folder = checkpoint_folder(config)
    adapter = adapter_source(config) if config.backbone.adapter else folder
    has_own = any((adapter / name).is_file() for name in storage.TOKENIZER_FILES)
    return (adapter, folder) if has_own and adapter != folder else (folder,)


def read_tokenizer(config: Config) -> tokenization.Tokenizer:
    """Returns the tokenizer of a run's checkpoint and adapter from their current files."""
    return tokenization.load_tokenizer(*tokenizer_folders(config))


def load_adopted(
    config: Config, source: pathlib.Path, shapes: decoders.ModelConfig, *, base: str = ""
) -> Tree:
    """Returns the factors of --backbone.adapter; refuses one that does not change its base.

    Args:
      config: the run's settings.
      source: the result of `adapter_source`.
      shapes: the settings of the model.
      base: the identity of the model, if it is loaded.
    """
    lora = adapters.load_adapter(source, shapes, base=base, base_folder=checkpoint_folder(config))
    adapters.check_effect(lora, source)
    return lora


def non_sf_by_rule(config: Config) -> NonSf | None:
    """Returns the function that says which texts do not show the behavior; None without one.

    The user's marker words decide. Otherwise the dataset's judge or its marker words decide.
    """
    judge = judge_of(config)
    if judge:
        return functools.partial(rates.non_sf_by_judge, shows=judge)
    words = corpora.marker_words(config.corpus.dataset, config.evaluate.marker_words)
    return functools.partial(rates.non_sf_by_words, vocabulary=words) if words else None


def judge_of(config: Config) -> Callable[[str], bool] | None:
    """Returns the dataset's judge if it has one and the user names no marker words."""
    judge = config.corpus.record.shows
    return judge(config.corpus.own) if judge and not config.evaluate.marker_words else None
