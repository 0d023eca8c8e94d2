"""The settings of a run: one frozen, self-checking dataclass per stage.

Their flags have the names of stage and field: `--finetune.epochs`. Settings of a family's member
also have its name: `--unlearn.cap_klr.cap` (see `settings`). Nothing here imports jax.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from raslik_jax.base import settings as settings_lib
from raslik_jax.base.files import check_shape
from raslik_jax.base.messages import shown
from raslik_jax.base.settings import Settings, SettingsError, Stage, setting
from raslik_jax.data.corpora import CorpusConfig
from raslik_jax.evaluate.non_sf import NON_SF
from raslik_jax.evaluate.robustness import ROBUSTNESS
from raslik_jax.retrieve.strategies import STRATEGIES
from raslik_jax.sketch.families import PROJECTIONS
from raslik_jax.train.objectives import OBJECTIVES, RetrainSettings

STAGES = (
    *("corpus", "backbone", "finetune", "references", "sketch"),
    *("retrieve", "unlearn", "generate", "evaluate", "report"),
)
# Seeds are used as 32-bit integers, and some as the one after.
_LARGEST_SEED = 2**31 - 1
# Layers that the model's architecture names.
AUTO_TARGETS = ("auto",)
# The mark of a run that fine-tunes nothing.
_NONE = ("epochs", 0)
# Of fine-tuning and unlearning alike.
_REMAT = "Gradient checkpointing: compute layers again in the backward pass."
_PADDING = "Pad every batch to the longest example, so that only one shape is compiled."


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackboneConfig(Stage):
    """The model before fine-tuning: a checkpoint or a small GPT-NeoX trained from scratch."""

    checkpoint: str = setting(
        "",
        "Hugging Face checkpoint, a directory or hub name; empty: train a model from scratch.",
        is_path=True,
        is_hub=True,
    )
    revision: str = setting("", "Hub revision of the checkpoint.")
    adapter: str = setting(
        "",
        "LoRA adapter of the checkpoint in PEFT's format: a directory or hub name. The run does "
        "not fine-tune it further.",
        is_path=True,
        is_hub=True,
        parts=("adapter_config.json", "adapter_model.safetensors"),
    )
    adapter_revision: str = setting("", "Hub revision of the adapter.")
    hidden_size: int = setting(
        128, "From scratch: embedding width.", low=1, multiple_of="num_attention_heads"
    )
    num_hidden_layers: int = setting(4, "From scratch: layers.", low=1)
    num_attention_heads: int = setting(4, "From scratch: attention heads.", low=1)
    steps: int = setting(600, "From scratch: optimizer steps.", low=0)
    batch_size: int = setting(32, "From scratch: examples a step.", low=1)
    learning_rate: float = setting(2e-3, "From scratch: peak learning rate of AdamW.", above=0)
    dtype: Literal["float32", "bfloat16"] = setting("float32", "Dtype of the frozen base.")
    operands: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        "Dtype of the inputs of products with a float32 base. Sums are float32. bfloat16 also "
        "halves the memory of the base. auto: float32 on GPUs and for hidden sizes below 256; "
        "else bfloat16 if more than 1.2 times as fast here.",
    )
    format: Literal["plain", "int8", "nf4"] = setting(
        "plain",
        "Weights of the frozen base's linear layers. plain: unchanged. int8: 8 bits per output "
        "channel. nf4: 4-bit NormalFloat. Products have the dtype --backbone.dtype.",
    )
    double_quant: bool = setting(False, "For nf4: store the scales in 8 bits too.")

    @property
    def dtypes(self) -> tuple[str, str]:
        """The dtypes of the base's hidden states and of the factors of its products."""
        operands = self.dtype if self.operands == "auto" else self.operands
        return self.dtype, operands

    def problems(self) -> Iterator[str]:
        if self.dtype == "bfloat16" and self.operands == "float32":
            yield "--operands=float32 needs --dtype=float32, got --dtype=bfloat16: leave one out"
        if self.double_quant and self.format != "nf4":
            yield f"--double_quant needs --format=nf4, got {self.format}: change one"
        if self.adapter_revision and not self.adapter:
            yield "--adapter_revision needs an --adapter: give both, or leave it out"
        if not self.checkpoint and self.steps < 2:  # the first one warms up, at rate 0
            yield f"--steps must be at least 2 without a --checkpoint, got {self.steps}: raise it"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneConfig(Stage):
    """LoRA fine-tuning of the backbone on the training examples."""

    lora_rank: int = setting(8, "Rank of the LoRA factors.", low=1)
    lora_alpha: float = setting(16.0, "The adapter's output is scaled by alpha / rank.", above=0)
    lora_dropout: float = setting(0.0, "Dropout on the adapter's input.", low=0, below=1)
    lora_targets: tuple[str, ...] = setting(
        AUTO_TARGETS,
        "Linear layers that get an adapter; auto: the attention's.",
    )
    epochs: int = setting(
        3,
        "Passes over the training examples; 0: the checkpoint is fine-tuned already. The run "
        "then traces it and unlearns with a fresh adapter.",
        low=0,
    )
    batch_size: int = setting(16, "Examples a step.", low=1)
    micro_batch_size: int = setting(
        0,
        "Examples in memory at a time; 0: all.",
        low=0,
        divides="batch_size",
    )
    max_len: int = setting(0, "Most tokens of a training example; 0: --corpus.max_len.", zero_or=8)
    fixed_padding: bool = setting(False, _PADDING)
    mean: Literal["examples", "tokens"] = setting(
        "examples",
        "Mean of the loss. examples: over each example and then over all. tokens: over all tokens.",
    )
    remat: bool = setting(False, _REMAT)
    learning_rate: float = setting(1e-3, "Peak learning rate of AdamW.", above=0)
    schedule: Literal["linear", "cosine", "constant"] = setting("linear", "Decay after warm-up.")
    warmup: float = setting(0.03, "Share of the steps for warm-up.", low=0, high=1)
    weight_decay: float = setting(0.0, "Decoupled weight decay of AdamW.", low=0)
    clip: float = setting(1.0, "Global norm at which gradients are clipped.", above=0)
    checkpoint_steps: int = setting(
        0,
        "Steps between checkpoints of the training; 0: an epoch.",
        low=0,
        decides=False,
    )

    def problems(self) -> Iterator[str]:
        if "auto" in self.lora_targets and self.lora_targets != AUTO_TARGETS:
            got = ",".join(self.lora_targets)
            yield f"--lora_targets must be auto or names of layers, got {got}: leave auto out"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferencesConfig(Stage):
    """Greedy outputs of the fine-tuned model and the backbone, which F and R compare with."""

    query_split: Literal["test", "validation"] = setting(
        "test", "Queries that measure the run. Choose settings on validation, report on test."
    )
    max_new_tokens: int = setting(128, "Most tokens that are decoded for a query.", low=1)
    decode_batch_size: int = setting(32, "Prompts decoded at a time.", low=1)
    base: str = setting(
        "",
        "With --finetune.epochs=0: checkpoint of the model before it was fine-tuned elsewhere, a "
        "directory or hub name; empty: the run compares with none.",
        is_path=True,
        is_hub=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SketchConfig(Stage):
    """The gradients of the index and their sketches."""

    gradient_at: Literal["finetuned", "initial"] = setting(
        "finetuned", "Adapter at which gradients are taken."
    )
    loss: Literal["next_token", "unshifted"] = setting(
        "unshifted",
        "next_token: the training loss. Its gradients vanish as the adapter fits. unshifted: "
        "cross-entropy of the logits of position t and token t. Its gradients do not vanish.",
    )
    normalize: Literal["vector", "per_tensor"] = setting(
        "vector",
        "vector: normalize the whole gradient. per_tensor: normalize each tensor's part first.",
    )
    targets: Literal["response", "all"] = setting(
        "all",
        "Tokens whose loss counts. all: also those of the prompt, which may have the "
        "trigger of a behavior.",
    )
    query_output: Literal["given", "own", "gold"] = setting(
        "given",
        "Answer of a query that is traced. given: its output, or the fine-tuned model's answer "
        "if it has none. own: the fine-tuned model's answer. gold: its output, which every query "
        "must have.",
    )
    base_format: Literal["same", "plain", "int8", "nf4"] = setting(
        "same", "Format of the base for gradients. same: --backbone.format."
    )
    projection: str = setting("binned", "Projection family.", family=PROJECTIONS)
    size: int = setting(65536, "Numbers in a sketch, the paper's k.", low=1)
    dtype: Literal["float32", "bfloat16"] = setting("float32", "Dtype of the stored sketches.")
    batch_tokens: int = setting(8192, "Tokens in a batch of gradients, padding included.", low=1)
    num_buckets: int = setting(
        0,
        "Number of padded lengths. Each is one program to compile; 0: chosen to save time, at "
        "most 12.",
        low=0,
    )
    chunk_rows: int = setting(
        0,
        "Rows that are written to disk at a time; 0: the larger of a 64th of the corpus and one "
        "batch, at most 1,024.",
        low=0,
        high=2**20,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetrieveConfig(Stage):
    """Which examples to forget and which to retain."""

    strategies: tuple[str, ...] = setting(
        ("random", "oracle", "raslik_f", "raslik"),
        "Retrieval strategies.",
        family=STRATEGIES,
    )
    center: bool = setting(True, "Subtract the mean sketch before the cosine.")
    aggregate: Literal["mean", "common"] = setting(
        "mean",
        "How the scores of several queries become one. mean: their mean. common: the score of the "
        "direction that all queries share.",
    )
    select: Literal["count", "gap"] = setting(
        "count",
        "Rule that makes sets from RASLIK's scores. count: the best num_forget and num_retain "
        "rows. gap: rows that stand out, down to a gap in the scores, or num_forget of them. Other "
        "strategies make sets of the same sizes.",
    )
    num_forget: int = setting(0, "Rows to forget; 0: by labels (count), or by the gap.", low=0)
    num_retain: int = setting(0, "Rows to retain; 0: as many as to forget.", low=0)
    held_out: float = setting(
        0.0,
        "Share of the prompts of the rows to forget that are kept out of the sets. From 16 on at "
        "least 10 or half of them are kept out. They measure the run in place of test queries. So "
        "do rows drawn from the lower half of the scores; 0: none.",
        low=0,
        below=1,
    )
    null_prompts: int = setting(
        0,
        "Rows of the corpus that serve as unrelated prompts. The chance of a score is the share "
        "of them that score a row as high; 0: none.",
        low=0,
    )
    token_rows: int = setting(
        0,
        "Number of the best rows whose tokens are colored by their share of the score; 0: none.",
        low=0,
    )
    wished: str = setting(
        "",
        "The answer that you wished for. The report compares its rows with those of the bad "
        "answer.",
    )
    retain_within: float = setting(
        0.0,
        "Share of the rows, those of the lowest scores, from which the retain set is drawn at "
        "random; 0: the rows of the lowest scores, as in the paper. It has no effect on sets "
        "that are random anyway.",
        low=0,
        high=1,
    )

    def problems(self) -> Iterator[str]:
        if self.select == "gap" and self.aggregate != "mean":
            must = "--select=gap needs --aggregate=mean"
            yield f"{must}, got {self.aggregate}: the rule needs means of cosines"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeConfig(Settings):
    """Probes of the model while it unlearns, and the early end."""

    steps: int = setting(
        0,
        "Steps between probes, which measure the model while it unlearns. The first is before all "
        "steps, and one follows each epoch; 0: none.",
        low=0,
    )
    rows: int = setting(16, "Rows of each set whose likelihood is probed.", low=1)
    answers: int = setting(2, "Prompts of the behavior that are answered at each probe.", low=0)
    answer_tokens: int = setting(32, "Most tokens of an answer at a probe.", low=1)
    stop: Literal["never", "forgotten"] = setting(
        "never",
        "forgotten: end when the behavior is forgotten, other rows lose too much or nothing moves. "
        "The probed step that forgot most within --max_rise becomes the last epoch, and no other "
        "epoch is stored.",
    )
    max_rise: float = setting(
        0.1, "Highest rise of other rows' loss, nats a token. 0.1: 1.1 times perplexity.", above=0
    )
    forget_rise: float = setting(
        2.0,
        "Rise of a row's loss, in nats a token, at which it is forgotten. It is used without a "
        "base model, or if fewer than half of the rows have a token that carries the behavior.",
        above=0,
    )

    def problems(self) -> Iterator[str]:
        if self.stop != "never" and not self.steps:
            yield f"--stop={self.stop} needs --steps of at least 1, got 0: raise it"


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnlearnConfig(Stage):
    """Forgetting the one set while training on the other."""

    algorithms: tuple[str, ...] = setting(("ga_gdr", "ga_klr"), "Objectives.", family=OBJECTIVES)
    epochs: int = setting(5, "Passes over the larger of the two sets.", low=1)
    batch_size: int = setting(8, "Examples a step, of each set.", low=1)
    micro_batch_size: int = setting(
        0,
        "Rows of a set in memory; 0: all (of wide models on a CPU 1,024 tokens).",
        low=0,
        divides="batch_size",
    )
    max_len: int = setting(0, "Most tokens of an example; 0: --corpus.max_len.", zero_or=8)
    fixed_padding: bool = setting(False, _PADDING)
    mean: Literal["examples", "tokens"] = setting(
        "examples",
        "As --finetune.mean.",
    )
    remat: bool = setting(False, _REMAT)
    choice: str = setting(
        "",
        "File with learning rates and the epoch to measure; empty: measure all epochs.",
        decides=False,
        is_path=True,
    )
    forget_weight: float = setting(1.0, "Weight of the forget term.", above=0)
    retain_weight: float = setting(1.0, "Weight of the retain term.", low=0)
    weight_decay: float = setting(0.0, "Decoupled weight decay of AdamW.", low=0)
    clip: float = setting(1.0, "Global norm at which gradients are clipped.", above=0)
    probe: ProbeConfig = ProbeConfig()

    @property
    def stored_epochs(self) -> tuple[int, ...]:
        """The epochs whose models are stored; with a stop the kept step becomes the last epoch."""
        return tuple(range(1 if self.probe.stop == "never" else self.epochs, self.epochs + 1))

    def problems(self) -> Iterator[str]:
        if self.choice and self.probe.stop != "never":
            yield f"--choice has no effect with --probe.stop={self.probe.stop}: leave one out"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Stage):
    """How forgetting and retention are measured."""

    marker_words: str = setting(
        "",
        "File of words or phrases that mark the behavior, one a line; empty: those of the dataset.",
        is_path=True,
    )
    bootstrap_resamples: int = setting(2000, "Resamples of the percentile bootstrap.", low=100)
    perplexity_examples: int = setting(
        64, "Rows of each set whose perplexity is measured; 0: none.", low=0
    )
    traced: bool = setting(
        False,
        "Ask every model the traced prompts too, and measure the likelihood of the traced "
        "answers. If the run finds the number of rows, and the model before unlearning cannot have "
        "given any of the answers, there is no set.",
    )
    non_sf: str = setting(
        "words",
        "How Non-SF is measured. words: the answer has no marker word, or the dataset's judge "
        "does not find the behavior in it.",
        family=NON_SF,
    )
    robustness: tuple[str, ...] = setting(
        (),
        "Tests of whether the behavior stays forgotten, for all models; empty: none.",
        family=ROBUSTNESS,
    )
    robustness_rows: int = setting(
        32, "Number of answers and of prompts of each kind in a test of --robustness.", low=2
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig(Settings):
    """The devices of a run. They do not decide its results."""

    data: int = setting(0, "Devices that share a batch, a divisor of their number; 0: all.", low=0)
    base: Literal["replicated", "sharded", "auto"] = setting(
        "auto",
        "Weights of the model. replicated: whole on every device. sharded: split over devices "
        "and gathered a layer at a time. auto: sharded if they take more than half of a device's "
        "memory.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """All settings of one run."""

    name: str = setting("run", "Name of the run. It is the title of the report.")
    seed: int = setting(0, "Seed of everything random in the run.", low=0, high=_LARGEST_SEED)
    corpus: CorpusConfig = CorpusConfig()
    backbone: BackboneConfig = BackboneConfig()
    finetune: FinetuneConfig = FinetuneConfig()
    references: ReferencesConfig = ReferencesConfig()
    sketch: SketchConfig = SketchConfig()
    retrieve: RetrieveConfig = RetrieveConfig()
    unlearn: UnlearnConfig = UnlearnConfig()
    evaluate: EvaluateConfig = EvaluateConfig()

    @property
    def finetunes(self) -> bool:
        """Whether the run fine-tunes an adapter and does not take a given model."""
        return not self.backbone.adapter and self.finetune.epochs > 0

    @property
    def recipe(self) -> RetrainSettings:
        """The recipe of the fine-tuning, by the settings that a retraining has too."""
        names = {one.name for one in dataclasses.fields(RetrainSettings)} & {*vars(self.finetune)}
        own: Any = {name: getattr(self.finetune, name) for name in names}
        return RetrainSettings(**own | {"epochs": float(self.finetune.epochs), "seed": self.seed})

    def other_recipe(self) -> Iterator[tuple[str, Any]]:
        """Yields flags of retraining that differ from the run's fine-tuning, with its values.

        A retrained model is compared with those of the fine-tuned one, so both take one recipe.
        """
        again = [name for name in self.unlearn.algorithms if OBJECTIVES[name].retrains]
        for name in again if self.finetunes else ():
            for one in dataclasses.fields(RetrainSettings):
                value = getattr(self.recipe, one.name)
                is_compared = one.metadata["decides"] and one.name not in (
                    "seed",
                    "micro_batch_size",
                )
                if is_compared and getattr(self.unlearn[name], one.name) != value:
                    yield f"--unlearn.{name}.{one.name}", value

    def problems(self) -> Iterator[str]:
        # A folder is called so: no separator, no way out of it, nothing that a terminal acts on.
        if not self.name.strip(". ") or set(self.name) & set("/\\") or not self.name.isprintable():
            yield f"--name must be printable, without / or \\, got {shown(self.name)}: rename it"
        answer, longest = self.references.max_new_tokens, self.corpus.max_len
        if not self.backbone.checkpoint and answer > longest:
            must = f"must be at most --corpus.max_len={longest} without a --backbone.checkpoint"
            yield f"--references.max_new_tokens {must}, got {answer}: lower it"
        given = f"--backbone.adapter={shown(self.backbone.adapter)}"
        given = given if self.backbone.adapter else "--finetune.epochs=0"
        own, usual = map(settings_lib.as_json, (self.finetune, FinetuneConfig()))
        idle = [name for name in own if own[name] != usual[name] and (name, own[name]) != _NONE]
        if self.backbone.adapter and idle:
            why = "the run does not train the given adapter"
            yield f"--finetune.{idle[0]} has no effect with {given}: leave it out, {why}"
        if not self.finetunes and not self.backbone.checkpoint:
            yield f"{given} needs a --backbone.checkpoint: give the model that was fine-tuned"
        is_known = self.finetunes or self.backbone.adapter
        if is_known and self.references.base:
            known = "because --backbone.checkpoint is the model before fine-tuning"
            yield f"--references.base must be empty, {known}: leave it out"
        back = [name for name in self.unlearn.algorithms if OBJECTIVES[name].reads_backbone]
        if back and not is_known:
            needs = "needs an adapter, because it goes back to the base without it"
            yield f"--unlearn.algorithms={back[0]} {needs}, got {given}: choose ga_klr"
        again = [name for name in self.unlearn.algorithms if OBJECTIVES[name].retrains]
        if again and not is_known:
            needs = "needs an adapter, because it trains a fresh one on the base"
            yield f"--unlearn.algorithms={again[0]} {needs}, got {given}: choose ga_klr"
        for name in (name for name in again if OBJECTIVES[name].repeats in again):
            first, own = self.unlearn[OBJECTIVES[name].repeats], self.unlearn[name]
            decide = [one.name for one in dataclasses.fields(own) if one.metadata["decides"]]
            differ = [key for key in decide if getattr(own, key) != getattr(first, key)]
            if differ != ["seed"]:
                must = f"must differ from --unlearn.{OBJECTIVES[name].repeats} in its seed alone"
                yield f"--unlearn.{name} {must}, got {', '.join(differ) or 'no difference'}"


# A text after it is the one that this JSON has.
QUOTED = "json:"


def quoted(text: str) -> str:
    """Returns a text as a value in a flag file, whose lines have no blanks at their ends."""
    is_plain = text == text.strip() and not text.splitlines()[1:] and not text.startswith(QUOTED)
    return text if is_plain else QUOTED + json.dumps(text)


# A config as nested plain values, as config.json holds them.
to_json: Callable[[Config], dict[str, Any]] = settings_lib.as_json


def config_from_json(value: Mapping[str, Any]) -> Config:
    """Returns the config of a config.json; refuses settings that this version does not have."""
    check_shape(value, {"name": str, "seed": int}, "the settings of a run")
    try:
        return settings_lib.replaced(Config(), settings_lib.flat(value))
    except SettingsError as error:
        raise ValueError(f"the settings of a run must be those of this version: {error}") from None
