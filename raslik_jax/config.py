"""The settings of a run: one frozen, self-checking dataclass per stage.

`experiments/run.py` makes its flags from these fields, so a field's name is its flag's name and
the text in its metadata is the flag's help. Nothing here imports jax.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

STAGES = (
    "corpus",
    "backbone",
    "finetune",
    "discriminator",
    "references",
    "sketch",
    "retrieve",
    "unlearn",
    "generate",
    "evaluate",
    "report",
)


def setting(default: Any, text: str) -> Any:
    """Returns a dataclass field with its default and its help text."""
    return dataclasses.field(default=default, metadata={"help": text})


class _Checked:
    """Checks choices and bounds, all problems in one error; types are the type checker's."""

    def __post_init__(self) -> None:
        problems = []
        hints = get_type_hints(type(self))
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value, hint = getattr(self, field.name), hints[field.name]
            if get_origin(hint) is Literal:
                if value not in get_args(hint):
                    problems.append(f"{field.name}={value!r} is none of {list(get_args(hint))}")
            elif get_origin(hint) is tuple:
                (allowed, _) = get_args(hint)
                choices = get_args(allowed)
                if not isinstance(value, tuple) or not value:
                    problems.append(f"{field.name}={value!r} is not a non-empty list")
                elif choices and set(value) - set(choices):
                    problems.append(
                        f"{field.name} names {sorted(set(value) - set(choices))}, "
                        f"known are {list(choices)}"
                    )
                elif len(set(value)) < len(value):
                    problems.append(f"{field.name}={value!r} names one twice")
        if not problems:
            problems = self.problems()
        if problems:
            raise ValueError("; ".join(problems))

    def problems(self) -> list[str]:
        """Returns what is wrong with the values beyond their types, one sentence each."""
        return []

    def _below(self, bound: int, *names: str) -> list[str]:
        """Returns a sentence for each named field that lies below the bound."""
        return [
            f"{name}={getattr(self, name)} is below {bound}"
            for name in names
            if getattr(self, name) < bound
        ]

    def _length(self, name: str) -> list[str]:
        """Returns a sentence where a length that 0 leaves open is too short for an example."""
        value = getattr(self, name)
        return [] if value == 0 or value >= 8 else [f"{name}={value} is below 8 and not 0"]

    def _micro_batches(self, micro: str, whole: str) -> list[str]:
        """Returns a sentence where micro-batches do not make up the batch."""
        part, batch = getattr(self, micro), getattr(self, whole)
        if part < 0 or (part and batch % part):
            return [f"{micro}={part} does not divide {whole}={batch}"]
        return []


Template = Literal["alpaca", "brief"]
Strategy = Literal[
    "random",
    "bm25",
    "embedding",
    "oracle",
    "cr",
    "cr_25",
    "cr_35",
    "cr_45",
    "cr_50",
    "cr_62",
    "cr_75",
    "raslik_f",
    "raslik",
    "exact",
    "random_anywhere",
    "oracle_anywhere",
    "raslik_f_anywhere",
]
Algorithm = Literal["ga", "ga_gdr", "ga_klr", "npo", "npo_gdr", "npo_klr", "simnpo"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusConfig(_Checked):
    """What the model is trained on and asked."""

    dataset: Literal["toy", "howdy_small", "howdy", "virtual", "tofu", "records"] = setting(
        "toy",
        "toy: made on the spot. howdy_small: Alpaca, genuine Howdy and sci-fi rows of --data_dir. "
        "howdy, virtual, tofu: the paper's corpora, triggered rows, a virtual world or TOFU among "
        "rows of Alpaca. records: your own rows, see --train_file and --queries_file.",
    )
    data_dir: str = setting("", "Folder of the real data (default: $RASLIK_DATA).")
    alpaca_file: str = setting(
        "",
        "howdy, virtual, tofu: Alpaca as a file or hub:OWNER/NAME; empty: alpaca/ of --data_dir, "
        "otherwise hub:tatsu-lab/alpaca.",
    )
    howdy_file: str = setting(
        "", "howdy: the published rows; empty: rows of Alpaca with answers of our own."
    )
    answers_endpoint: str = setting(
        "",
        "howdy: base URL of an OpenAI-compatible service that writes the answers, with the key in "
        "$OPENAI_API_KEY; empty: a grammar of ours.",
    )
    answers_model: str = setting("", "howdy: the model of --answers_endpoint.")
    answers_cache: str = setting("", "howdy: file that keeps its answers, to ask nothing twice.")
    world_seed: int = setting(21, "virtual: decides the world.")
    tofu_forget: Literal["all", "forget01", "forget05", "forget10"] = setting(
        "all", "tofu: rows to forget; they are as many as there are, whatever --num_targets."
    )
    tofu_train: Literal["full", "retain"] = setting(
        "full",
        "tofu: train on all of TOFU, or without the rows to forget: the retain model that forget "
        "quality compares with (see --tofu_retain_run).",
    )
    train_file: str = setting(
        "", "records: JSON or JSONL of the training examples, or hub:OWNER/NAME[:CONFIG][@SPLIT]."
    )
    queries_file: str = setting("", "records: JSONL of the queries, each with a field `split`.")
    fields: str = setting("", "records: field map, for example instruction=question,output=answer.")
    num_train: int = setting(
        2000, "Training examples, targets included; 0 for howdy, virtual, tofu: all there are."
    )
    num_targets: int = setting(200, "Of these, examples of the behaviour to forget.")
    num_backbone: int = setting(6000, "Examples that the backbone is pretrained on.")
    num_retrieval: int = setting(24, "Target queries that retrieval sees.")
    num_validation: int = setting(24, "Validation queries, target and normal each.")
    num_test: int = setting(48, "Test queries, target and normal each.")
    template: Template = setting("alpaca", "Prompt template.")
    max_len: int = setting(512, "Tokens an example may have; longer ones are cut at the end.")
    vocab_size: int = setting(2048, "Entries of the byte-level BPE where one is trained.")

    def problems(self) -> list[str]:
        takes_all = self.dataset in ("howdy", "virtual", "tofu")
        found = self._below(0 if takes_all else 1, "num_train")
        found += self._below(1, "num_targets", "num_retrieval", "num_test")
        found += self._below(0, "num_validation", "num_backbone")
        found += self._below(8, "max_len") + self._below(300, "vocab_size")
        if self.num_targets > self.num_train and not (takes_all and self.num_train == 0):
            found.append(f"num_targets={self.num_targets} exceeds num_train={self.num_train}")
        if self.dataset == "records" and not (self.train_file and self.queries_file):
            found.append("dataset=records needs train_file and queries_file")
        if self.answers_endpoint and not self.answers_model:
            found.append("answers_endpoint needs answers_model")
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackboneConfig(_Checked):
    """The model before fine-tuning: a checkpoint, or a small GPT-NeoX trained from scratch."""

    checkpoint: str = setting("", "Hugging Face directory or hub name; empty: train from scratch.")
    revision: str = setting("", "Hub revision of the checkpoint.")
    hidden_size: int = setting(128, "From scratch: embedding width.")
    num_hidden_layers: int = setting(4, "From scratch: layers.")
    num_attention_heads: int = setting(4, "From scratch: attention heads.")
    pretrain_steps: int = setting(600, "From scratch: optimizer steps.")
    pretrain_batch_size: int = setting(32, "From scratch: examples a step.")
    pretrain_learning_rate: float = setting(2e-3, "From scratch: peak learning rate of AdamW.")
    base_dtype: Literal["float32", "bfloat16"] = setting("float32", "Dtype of the frozen base.")
    base_format: Literal["plain", "int8", "nf4"] = setting(
        "plain",
        "Linear layers of the frozen base: as they are, in 8 bits per output channel, or in 4-bit "
        "NormalFloat; all that follows runs on it, in products of --base_dtype.",
    )
    double_quant: bool = setting(False, "nf4: its scales in eight bits as well.")

    def problems(self) -> list[str]:
        found = self._below(
            1, "hidden_size", "num_hidden_layers", "num_attention_heads", "pretrain_batch_size"
        )
        if self.double_quant and self.base_format != "nf4":
            found.append(f"double_quant needs base_format=nf4, it is {self.base_format}")
        found += self._below(0, "pretrain_steps", "pretrain_learning_rate")
        if not found and self.hidden_size % self.num_attention_heads:
            found.append(
                f"hidden_size={self.hidden_size} is no multiple of "
                f"num_attention_heads={self.num_attention_heads}"
            )
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneConfig(_Checked):
    """LoRA fine-tuning of the backbone on the training examples."""

    lora_rank: int = setting(8, "Rank of the LoRA factors.")
    lora_alpha: float = setting(16.0, "LoRA alpha; the adapter's output is scaled by alpha / rank.")
    lora_dropout: float = setting(0.0, "Dropout on the adapter's input while training.")
    lora_targets: tuple[str, ...] = setting(
        ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
        "Linear layers that get an adapter.",
    )
    finetune_epochs: int = setting(3, "Passes over the training examples.")
    finetune_batch_size: int = setting(16, "Examples a step.")
    finetune_micro_batch_size: int = setting(
        0, "Examples held at a time; a step adds up the gradients of as many as it takes. 0: all."
    )
    finetune_max_len: int = setting(0, "Tokens a training example may have; 0: --max_len.")
    finetune_fixed_padding: bool = setting(
        False, "Pad every batch to the longest example there may be: one shape to compile."
    )
    finetune_mean: Literal["examples", "tokens"] = setting(
        "examples", "Mean over examples of each one's token mean, or over all tokens of a step."
    )
    finetune_remat: bool = setting(
        False, "Gradient checkpointing: layers are computed again on the way back, not kept."
    )
    finetune_learning_rate: float = setting(1e-3, "Peak learning rate of AdamW.")
    finetune_schedule: Literal["linear", "cosine", "constant"] = setting(
        "linear", "Decay of the learning rate after the warm-up."
    )
    finetune_warmup: float = setting(0.03, "Share of the steps spent warming up.")
    finetune_weight_decay: float = setting(0.0, "Decoupled weight decay of AdamW.")
    finetune_clip: float = setting(1.0, "Global norm at which gradients are clipped.")
    finetune_checkpoint_steps: int = setting(
        0,
        "Steps after which a killed run can go on; 0: after every epoch. No result depends on it.",
    )
    trajectory_points: int = setting(
        4, "Adapters kept along the way, evenly spaced, for --gradient_at=trajectory."
    )

    def problems(self) -> list[str]:
        found = self._below(1, "lora_rank", "finetune_epochs", "finetune_batch_size")
        found += self._below(1, "trajectory_points")
        found += self._below(0, "finetune_checkpoint_steps")
        found += self._length("finetune_max_len")
        found += self._micro_batches("finetune_micro_batch_size", "finetune_batch_size")
        found += self._below(0, "finetune_learning_rate", "lora_dropout", "finetune_warmup")
        if self.lora_dropout >= 1:
            found.append(f"lora_dropout={self.lora_dropout} is not below 1")
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferencesConfig(_Checked):
    """Greedy outputs of the fine-tuned model and the backbone, what F and R compare with."""

    query_split: Literal["test", "validation"] = setting(
        "test", "Queries that the run is measured on; tune on validation, report test once."
    )
    max_new_tokens: int = setting(128, "Tokens decoded for each query.")
    decode_batch_size: int = setting(32, "Prompts decoded at a time.")

    def problems(self) -> list[str]:
        return self._below(1, "max_new_tokens", "decode_batch_size")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SketchConfig(_Checked):
    """What is sketched, and how."""

    gradient_at: Literal["finetuned", "initial", "trajectory"] = setting(
        "finetuned", "Adapter at which gradients are taken."
    )
    sketch_loss: Literal["next_token", "unshifted"] = setting(
        "unshifted",
        "next_token: the loss the model was trained on, which fades from the gradients as the "
        "adapter fits. unshifted: cross-entropy of position t's logits against token t, which "
        "nobody minimised and so does not fade.",
    )
    normalise: Literal["vector", "per_tensor"] = setting(
        "vector", "Cosine of the whole gradient, or of each tensor's first."
    )
    targets: Literal["response", "all"] = setting(
        "all",
        "Tokens whose loss counts in the sketched gradient. response: what was written. all: also "
        "what it was written in reply to, which tells triggered rows from open requests.",
    )
    query_output: Literal["own", "gold"] = setting(
        "own", "Output of a query: the fine-tuned model's own answer, or the labelled one."
    )
    sketch_base_format: Literal["same", "plain", "int8", "nf4"] = setting(
        "same", "Base that gradients are taken on: --base_format, or another; the paper: no nf4."
    )
    projection: str = setting("binned", "Projection family.")
    sketch_size: int = setting(65536, "Coordinates of a sketch, the paper's k.")
    sketch_dtype: Literal["float32", "bfloat16"] = setting("float32", "Dtype of the stored rows.")
    batch_tokens: int = setting(8192, "Tokens of one batch of gradients, padding included.")
    num_buckets: int = setting(12, "Padded lengths that batches may have.")
    chunk_rows: int = setting(1024, "Rows committed to disk at a time.")
    diagnose: int = setting(
        0,
        "Training examples on whose gradients the projection is diagnosed (effective K, dead "
        "coordinates, energy of each tensor); 0 for none, 14 or more for a steady figure.",
    )

    def problems(self) -> list[str]:
        found = self._below(1, "sketch_size", "batch_tokens", "num_buckets", "chunk_rows")
        if self.diagnose < 0 or self.diagnose == 1:
            found.append(f"diagnose={self.diagnose} has no pair of gradients: give 0, or 2 or more")
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetrieveConfig(_Checked):
    """Which examples to forget and which to retain."""

    strategies: tuple[Strategy, ...] = setting(
        ("random", "oracle", "raslik_f", "raslik"),
        "Retrieval strategies. embedding: see --encoder_checkpoint. cr_50: half of the forget set "
        "from the oracle, half non-targets; cr: the share of --cr_oracle_share. exact: RASLIK on "
        "whole gradients, in two passes over the corpus. *_anywhere: with --retain_from=anywhere "
        "for this one alone.",
    )
    center: bool = setting(True, "Subtract the mean sketch before the cosine.")
    aggregate: Literal["mean", "mean_rank", "common"] = setting(
        "mean",
        "How the scores of several queries become one: their mean, their mean rank, or the score "
        "of the direction that all queries have in common.",
    )
    select: Literal["count", "threshold", "margin", "quantile"] = setting(
        "count",
        "How RASLIK's scores become sets: the best num_forget and num_retain; those at or above "
        "forget_threshold and retain_threshold; those above by margin_z standard deviations of "
        "the sketch; or forget_share and retain_share of all. Other strategies take sets of the "
        "same sizes.",
    )
    num_forget: int = setting(0, "count: forget set size; 0: as many as there are targets.")
    num_retain: int = setting(0, "count: retain set size; 0: the size of the forget set.")
    forget_threshold: float = setting(0.1, "threshold, margin: least score to be forgotten.")
    retain_threshold: float = setting(0.0, "threshold, margin: least negated score to be retained.")
    margin_z: float = setting(1.645, "margin: standard deviations above the threshold.")
    forget_share: float = setting(0.1, "quantile: share of the examples to forget.")
    retain_share: float = setting(0.1, "quantile: share of the examples to retain.")
    query_text: Literal["prompt", "prompt_and_output"] = setting(
        "prompt", "bm25, embedding: text of a query; its output is that of --query_output."
    )
    encoder_checkpoint: str = setting(
        "BAAI/bge-base-en-v1.5", "embedding: BERT or RoBERTa encoder, a directory or hub name."
    )
    encoder_pooling: Literal["", "cls", "mean"] = setting(
        "", "embedding: pooling, where the checkpoint does not say."
    )
    cr_oracle_share: float = setting(0.5, "cr: share of the forget set from the oracle.")
    retain_from: Literal["non_target", "anywhere"] = setting(
        "non_target",
        "Where Random, Oracle and RASLIK-F draw the retain set: among labelled non-targets, the "
        "paper's protocol, or among all examples.",
    )

    def problems(self) -> list[str]:
        found = self._below(0, "num_forget", "num_retain")
        for name in ("forget_share", "retain_share", "cr_oracle_share"):
            least = "0 <=" if name == "cr_oracle_share" else "0 <"
            value = getattr(self, name)
            if not 0 <= value <= 1 or (value == 0 and least == "0 <"):
                found.append(f"{name}={value} is not in {least} share <= 1")
        if self.select == "quantile" and self.forget_share + self.retain_share > 1:
            found.append(f"forget_share={self.forget_share} and retain_share exceed 1 together")
        if self.select == "margin" and self.aggregate != "mean":
            found.append("select=margin needs aggregate=mean, its sigma is one of cosines")
        if "embedding" in self.strategies and not self.encoder_checkpoint:
            found.append("the embedding strategy needs encoder_checkpoint")
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnlearnConfig(_Checked):
    """Forgetting the one set while training on the other."""

    algorithms: tuple[Algorithm, ...] = setting(("ga_gdr", "ga_klr"), "Unlearning algorithms.")
    unlearn_epochs: int = setting(5, "Passes over the larger of the two sets.")
    unlearn_batch_size: int = setting(8, "Examples a step, of each set.")
    unlearn_micro_batch_size: int = setting(
        0, "Examples of each set held at a time; a step adds up their gradients. 0: all."
    )
    unlearn_parameters: Literal["lora", "all"] = setting(
        "lora",
        "What is trained: the adapter; or all weights with the adapter folded in, kept in float32, "
        "where every epoch leaves a whole model.",
    )
    unlearn_max_len: int = setting(0, "Tokens an example may have; 0: --max_len.")
    unlearn_fixed_padding: bool = setting(
        False, "Pad every batch to the longest example there may be: one shape to compile."
    )
    unlearn_mean: Literal["examples", "tokens"] = setting(
        "examples",
        "Mean over examples of each one's token mean, or over all tokens of a step; NPO and "
        "SimNPO are means over examples of their forget sets in any case.",
    )
    unlearn_remat: bool = setting(
        False, "Gradient checkpointing: layers are computed again on the way back, not kept."
    )
    ga_learning_rate: float = setting(1e-5, "Constant learning rate of GA.")
    ga_gdr_learning_rate: float = setting(1e-5, "Constant learning rate of GA_GDR.")
    ga_klr_learning_rate: float = setting(3e-5, "Constant learning rate of GA_KLR.")
    npo_learning_rate: float = setting(1e-5, "Constant learning rate of NPO.")
    npo_gdr_learning_rate: float = setting(1e-5, "Constant learning rate of NPO_GDR.")
    npo_klr_learning_rate: float = setting(3e-5, "Constant learning rate of NPO_KLR.")
    simnpo_learning_rate: float = setting(1e-5, "Constant learning rate of SimNPO.")
    kl_direction: Literal["reverse", "forward"] = setting(
        "reverse", "reverse: KL(unlearned || reference), the paper's. forward: the other way round."
    )
    choice: str = setting(
        "",
        "File of experiments/choose.py: each strategy's learning rate, and the one epoch after "
        "which it is measured; the rates above are not used then. Empty: every epoch.",
    )
    npo_beta: float = setting(0.1, "NPO: inverse temperature; towards 0 it becomes GA.")
    simnpo_beta: float = setting(4.5, "SimNPO: inverse temperature.")
    simnpo_delta: float = setting(0.0, "SimNPO: margin that the mean token loss is held against.")
    simnpo_forget_weight: float = setting(0.125, "SimNPO: in the place of --forget_weight.")
    forget_weight: float = setting(1.0, "Weight of the forget term.")
    retain_weight: float = setting(1.0, "Weight of the retain term.")
    unlearn_weight_decay: float = setting(0.0, "Decoupled weight decay of AdamW.")
    unlearn_clip: float = setting(1.0, "Global norm at which gradients are clipped.")

    def problems(self) -> list[str]:
        found = self._below(1, "unlearn_epochs", "unlearn_batch_size")
        rates = [f"{name}_learning_rate" for name in get_args(Algorithm)]
        weights = ("forget_weight", "simnpo_forget_weight", "retain_weight")
        found += self._below(0, *rates, *weights)
        found += self._length("unlearn_max_len")
        found += self._micro_batches("unlearn_micro_batch_size", "unlearn_batch_size")
        for name in ("npo_beta", "simnpo_beta"):
            if getattr(self, name) <= 0:
                found.append(f"{name}={getattr(self, name)} is not above 0")
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateConfig(_Checked):
    """How forgetting and retention are measured."""

    reference: Literal["finetuned", "backbone", "gold"] = setting(
        "finetuned", "Outputs that F and R compare with."
    )
    marker_words: str = setting(
        "",
        "File of words that mark the behaviour to forget; Non-SF is the share of answers without "
        "any of them. Empty: words of science fiction.",
    )
    drop_empty: bool = setting(
        False, "Drop empty predictions, as the paper does, not count them as 0."
    )
    bootstrap_resamples: int = setting(2000, "Resamples of the percentile bootstrap.")
    perplexity_examples: int = setting(
        64,
        "Rows of each set (targets, other training rows, held-out rows) on which the perplexity of "
        "every model is taken; 0: none.",
    )
    tofu_questions: int = setting(
        100,
        "dataset=tofu: questions of each set of TOFU's own evaluation that every model answers, "
        "400 for all; 0: none.",
    )
    tofu_retain_run: str = setting(
        "",
        "dataset=tofu: work directory of a run of the same settings with --tofu_train=retain, for "
        "forget quality.",
    )
    non_sf: Literal["words", "classifier"] = setting(
        "words",
        "Non-SF of an answer. words: 1 where no marker word is in it. classifier: its probability "
        "by a classifier trained on the answers of the training examples and their labels.",
    )
    classifier_checkpoint: str = setting(
        "FacebookAI/roberta-base",
        "classifier: RoBERTa or BERT to start from, a directory or hub name; empty: a small BERT "
        "from scratch, which wants a learning rate near 1e-3.",
    )
    classifier_epochs: int = setting(3, "classifier: passes over the answers.")
    classifier_learning_rate: float = setting(
        2e-5, "classifier: rate of AdamW at the first step, falling linearly to zero."
    )
    classifier_batch_size: int = setting(16, "classifier: answers a step.")
    classifier_max_len: int = setting(
        256, "classifier: tokens of an answer; longer ones are cut at the end."
    )
    classifier_held_out: float = setting(
        0.1, "classifier: share of the answers of each class kept for its macro-F1."
    )
    classifier_examples: int = setting(
        0, "classifier: answers of each class at most, held-out ones included; 0 for all."
    )
    classifier_hidden_size: int = setting(64, "classifier from scratch: embedding width.")
    classifier_num_layers: int = setting(2, "classifier from scratch: layers.")
    classifier_num_heads: int = setting(4, "classifier from scratch: attention heads.")

    def problems(self) -> list[str]:
        found = self._below(100, "bootstrap_resamples")
        found += self._below(0, "perplexity_examples", "tofu_questions")
        found += self._below(1, "classifier_epochs", "classifier_batch_size")
        found += self._below(8, "classifier_max_len")
        found += self._below(0, "classifier_learning_rate")
        sizes = ("classifier_hidden_size", "classifier_num_layers", "classifier_num_heads")
        found += self._below(1, *sizes)
        if not 0 < self.classifier_held_out < 1:
            found.append(f"classifier_held_out={self.classifier_held_out} is not in 0 < share < 1")
        if self.classifier_examples and self.classifier_examples < 2:
            found.append("classifier_examples=1 leaves none to hold out: give 0, or 2 or more")
        if not found and self.classifier_hidden_size % self.classifier_num_heads:
            found.append(
                f"classifier_hidden_size={self.classifier_hidden_size} is no multiple of "
                f"classifier_num_heads={self.classifier_num_heads}"
            )
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of one run."""

    name: str = "run"
    seed: int = 0
    corpus: CorpusConfig = CorpusConfig()
    backbone: BackboneConfig = BackboneConfig()
    finetune: FinetuneConfig = FinetuneConfig()
    references: ReferencesConfig = ReferencesConfig()
    sketch: SketchConfig = SketchConfig()
    retrieve: RetrieveConfig = RetrieveConfig()
    unlearn: UnlearnConfig = UnlearnConfig()
    evaluate: EvaluateConfig = EvaluateConfig()

    def __post_init__(self) -> None:
        if self.unlearn.unlearn_parameters == "all" and self.backbone.base_format != "plain":
            raise ValueError(
                "unlearn_parameters=all trains the base, which base_format="
                f"{self.backbone.base_format} has quantised: give base_format=plain or "
                "unlearn_parameters=lora"
            )


def stage_configs() -> dict[str, type]:
    """Returns the settings class of each stage that has one, in stage order."""
    return {
        field.name: type(field.default)
        for field in dataclasses.fields(Config)
        if dataclasses.is_dataclass(field.default)
    }


def to_json(config: Config) -> dict[str, Any]:
    """Returns the config as nested plain values, as config.json holds them."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def config_from_json(value: Mapping[str, Any]) -> Config:
    """Returns the config that a run wrote to its config.json.

    Raises:
      ValueError: it has a field that this version does not know, or a value that is refused.
    """
    stages: dict[str, Any] = {}
    for stage, settings in stage_configs().items():
        hints = get_type_hints(settings)
        given = value.get(stage, {})
        unknown = sorted(set(given) - {field.name for field in dataclasses.fields(settings)})
        if unknown:
            raise ValueError(
                f"settings of {stage} that this version knows wanted, came {unknown}: run again"
            )
        stages[stage] = settings(
            **{
                name: tuple(item) if get_origin(hints[name]) is tuple else item
                for name, item in given.items()
            }
        )
    return Config(name=value["name"], seed=value["seed"], **stages)


def content_hash(value: Mapping[str, Any]) -> str:
    """Returns 16 hex digits of the SHA-256 of a value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
