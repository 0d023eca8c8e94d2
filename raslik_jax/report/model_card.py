"""The card of an exported model: what was removed, from what, how, and what was measured."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from raslik_jax.data.corpora import describe
from raslik_jax.evaluate.summary import MethodEntry, Metrics, ModelEntry, Variant
from raslik_jax.report import tables
from raslik_jax.report.markup import escape_markdown

_RULES = {
    "count": "the best of each ranking, as many as wanted",
    "threshold": "all scores at or above a threshold",
    "margin": "all scores above a threshold by a margin of the sketch's noise",
    "quantile": "a share of all examples",
}


# Algorithms that only forget.
_WITHOUT_RETAIN = ("ga", "npo")


class CardFacts(NamedTuple):
    """What a card is written from.

    Attributes:
      config: settings of the run.
      metrics: metrics.json of the run; None where it measured nothing.
      entry: the entry of the exported model in it.
      variant: which model it is.
      num_train: training examples.
      num_targets: of them, labeled targets.
      learning_rate: at which it was unlearned.
      retrieved: summary.json of its strategy's sets.
      set_hashes: first 16 hex digits of the SHA-256 of the files of both sets.
      base_model: hub name of the base, or "" for one that has none.
      base_origin: what the base is, for people.
      base_format: how the base was quantized in the run, "" for not at all.
      is_merged: the weights hold the adapter; otherwise the adapter stands alone.
      prompt: the template of a prompt, with {instruction}.
    """

    config: Mapping[str, Any]
    metrics: Metrics | None
    entry: MethodEntry | None
    variant: Variant
    num_train: int
    num_targets: int
    learning_rate: float
    retrieved: Mapping[str, Any]
    set_hashes: Mapping[str, str]
    base_model: str
    base_origin: str
    base_format: str
    is_merged: bool
    prompt: str


def render_card(facts: CardFacts) -> str:
    """Returns README.md of an exported model: a header that hubs read, then the facts.

    Args:
      facts: from the stored run alone.
    """
    config = facts.config
    strategy = tables.strategy_name(facts.variant.strategy)
    algorithm = tables.algorithm_name(facts.variant.algorithm)
    what = "as a whole model" if facts.is_merged else "as a LoRA adapter"
    title = f"{config['name']}: unlearned with {strategy} and {algorithm}"
    parts = [
        _header(facts),
        f"# {escape_markdown(title)}",
        f"A language model after unlearning, {what}. It was fine-tuned, examples behind an "
        "undesired behavior were looked for among its training examples, and it was made to "
        "forget them while training on others. Written by raslik_jax from the stored run; nothing "
        "here was typed in.",
        "## What was removed, and from what",
        _bullets(_removal_lines(facts)),
        "## How",
        _bullets(_setting_lines(facts)),
        "## What was measured",
        _measured(facts),
        "## Limits",
        _bullets(_limit_lines(facts)),
        "## Use",
        _usage(facts),
    ]
    return "\n\n".join(parts) + "\n"


def _header(facts: CardFacts) -> str:
    lines = ["---"]
    if facts.base_model:
        lines.append(f"base_model: {json.dumps(facts.base_model)}")
        relation = "finetune" if facts.is_merged else "adapter"
        lines.append(f"base_model_relation: {relation}")
    lines += [
        f"library_name: {'transformers' if facts.is_merged else 'peft'}",
        "pipeline_tag: text-generation",
        "tags:",
        "- unlearning",
        "- raslik_jax",
        *([] if facts.is_merged else ["- lora"]),
        "---",
    ]
    return "\n".join(lines)


def _bullets(lines: list[str]) -> str:
    return "\n".join(f"- {escape_markdown(line)}" for line in lines)


def _removal_lines(facts: CardFacts) -> list[str]:
    config, retrieved = facts.config, facts.retrieved
    settings = config["retrieve"]
    strategy = tables.strategy_name(facts.variant.strategy)
    lines = [
        f"Dataset: {describe(config['corpus'])}; {facts.num_train:,} training examples, "
        f"{facts.num_targets:,} of them labeled as showing the behavior.",
        f"Forget set: {retrieved['num_forget']:,} of these examples (forget.jsonl, SHA-256 "
        f"{facts.set_hashes['forget']}...). Their likelihood was driven down.",
        f"Retain set: {retrieved['num_retain']:,} of these examples (retain.jsonl, SHA-256 "
        f"{facts.set_hashes['retain']}...). "
        + (
            f"{tables.algorithm_name(facts.variant.algorithm)} makes no use of it."
            if facts.variant.algorithm in _WITHOUT_RETAIN
            else "The model was held to them."
        ),
        f"Chosen by: {strategy}; {_RULES[settings['select']]} "
        f"(--retrieve.select={settings['select']}), from {retrieved['num_queries']:,} examples of "
        f"the behavior.",
    ]
    if "precision" in retrieved:
        lines.append(
            f"Precision: {retrieved['precision']:.3f} of the forget set is labeled a target "
            f"(by chance {retrieved['base_rate']:.3f}); {retrieved['targets_in_retain']} targets "
            "are in the retain set."
        )
    else:
        lines.append("Precision: not known, the training examples carry no labels.")
    return lines


def _setting_lines(facts: CardFacts) -> list[str]:
    config, name = facts.config, facts.variant.algorithm
    unlearn, finetune = config["unlearn"], config["finetune"]
    said = ("algorithms", "choice", "epochs", "learning_rate")
    options = {k: v for k, v in (unlearn | unlearn.get(name, {})).items() if k not in said}
    options = {key: value for key, value in options.items() if not isinstance(value, dict)}
    quantized = f"; quantized to {facts.base_format} in the run" if facts.base_format else ""
    return [
        f"Base: {facts.base_origin}{quantized}.",
        f"Fine-tuning: LoRA of rank {finetune['lora_rank']}, alpha {finetune['lora_alpha']:g} on "
        f"{', '.join(finetune['lora_targets'])}; {finetune['epochs']} epochs at "
        f"{finetune['learning_rate']:g}.",
        f"Unlearning: {tables.algorithm_name(name)}, after epoch {facts.variant.epoch} of "
        f"{unlearn['epochs']}, learning rate {facts.learning_rate:g}"
        + (", both chosen on validation queries" if unlearn.get("choice") else "")
        + f"; {', '.join(f'{key}={value}' for key, value in options.items())}.",
        f"Seed {config['seed']}. config.json of the run has every setting.",
    ]


def _measured(facts: CardFacts) -> str:
    metrics, entry = facts.metrics, facts.entry
    if metrics is None or entry is None:
        return "Nothing: the run was exported before it was evaluated."
    models: list[tuple[str, ModelEntry]] = [
        ("This model", entry),
        ("Fine-tuned, before unlearning", metrics["finetuned"]),
    ]
    if "backbone" in metrics:
        models.append(("Base, before fine-tuning", metrics["backbone"]))
    columns = [tables.Column("")] + [tables.Column(name) for name, _ in models]
    rows: list[tuple[str, ...]] = [
        (title, *(tables.format_interval(model[key]) for _, model in models))  # type: ignore[literal-required]
        for title, key in (
            ("F, forget rate (lower is better)", "forget"),
            ("R, retain rate (higher is better)", "retain"),
            ("Non-SF, target queries (higher is better)", "non_sf_target"),
            ("Non-SF, normal queries (higher is better)", "non_sf_normal"),
        )
        if entry.get(key) is not None
    ]
    rows += [
        (
            f"Perplexity, {name}",
            *(
                tables.format_perplexity(model.get("perplexity", {}).get(name))
                for _, model in models
            ),
        )
        for name in ("forget", "retain", "held-out")
        if "perplexity" in entry
    ]
    corpus = metrics["corpus"]
    reference = tables.REFERENCES[metrics.get("reference", "finetuned")]
    notes = [
        f"F and R: mean ROUGE-L F1 against {reference}, on {corpus['target_queries']} held-out "
        f"target and {corpus['normal_queries']} held-out normal {corpus['query_split']} queries. "
        "Non-SF: mean probability that an answer does not show the behavior. Brackets: 95 % "
        "bootstrap intervals over queries.",
    ]
    if "perplexity" in entry:
        notes.append(
            "Perplexity of labeled answers: training examples to forget, other training examples, "
            "held-out normal queries."
        )
    judged = entry.get("judgment")
    if judged:
        text = f"Judgment: {judged['verdict']}; {'; '.join(judged['reasons'])}."
        if judged["verdict"] == "damaged":
            text += " What looks like forgetting is then damage."
        notes.append(f"{text} It was judged by: {', '.join(judged['inputs']) or 'nothing'}.")
    return tables.render_markdown(tables.Table(tuple(columns), tuple(rows), tuple(notes)))


def _limit_lines(facts: CardFacts) -> list[str]:
    lines = [
        "Unlearning by gradient steps hides; it proves nothing. The behavior may come back with "
        "other prompts, sampling, further training or quantization, and none of this was tested.",
        *(
            (
                "It was measured with greedy decoding on the queries above and on nothing else: "
                "other abilities of the base may have suffered.",
                "The intervals are over queries of one run with one seed; another seed may lie "
                "outside.",
                "An F below that of the base, which never learned the behavior, is damage.",
            )
            if facts.metrics
            else ("Whether anything was forgotten, and what else was lost, is not known.",)
        ),
        "The terms of the base model and of the data apply; this card grants none.",
    ]
    if facts.base_format and facts.is_merged:
        lines.append(
            f"The measurements are of the adapter on the base in {facts.base_format}; these are "
            "the unquantized weights with the adapter folded in, which were not measured."
        )
    if not facts.is_merged:
        lines.append("Without exactly this base the adapter means nothing.")
    return lines


def _usage(facts: CardFacts) -> str:
    if facts.is_merged:
        load = 'model = AutoModelForCausalLM.from_pretrained("this folder")'
        library = "from transformers import AutoModelForCausalLM, AutoTokenizer"
    elif not facts.base_model:
        load = (
            'base = AutoModelForCausalLM.from_pretrained("folder of the base")\n'
            'model = PeftModel.from_pretrained(base, "this folder")'
        )
        library = (
            "from peft import PeftModel\n"
            "from transformers import AutoModelForCausalLM, AutoTokenizer"
        )
    else:
        load = 'model = AutoPeftModelForCausalLM.from_pretrained("this folder")'
        library = (
            "from peft import AutoPeftModelForCausalLM\nfrom transformers import AutoTokenizer"
        )
    return "\n".join(
        [
            "```python",
            library,
            "",
            load,
            'tokenizer = AutoTokenizer.from_pretrained("this folder")',
            f"prompt = {facts.prompt!r}",
            'text = prompt.format(instruction="...")',
            "```",
        ]
    )
