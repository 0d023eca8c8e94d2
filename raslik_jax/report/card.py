"""The card of an exported model: the removed behavior, the method and the measurements."""

import json
import pathlib
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup

from raslik_jax.data.corpora import describe
from raslik_jax.evaluate import judgment
from raslik_jax.evaluate.summary import MethodEntry, Metrics, Variant
from raslik_jax.report import names, results, robustness, tables
from raslik_jax.report.recipes import FIELDS
from raslik_jax.report.tidy import make_model
from raslik_jax.retrieve.strategies import STRATEGIES
from raslik_jax.train.objectives import OBJECTIVES

if TYPE_CHECKING:  # it takes jax with it
    from raslik_jax.models.lora import LoRAConfig

# Of unlearning: the card says these elsewhere.
_SAID = ("algorithms", "choice", "epochs", "learning_rate")

# vLLM's values of --max-lora-rank (vllm/config/lora.py, MaxLoRARanks); the first needs no flag.
_VLLM_RANKS = (16, 32, 64, 128, 256, 320, 512)


class Base(NamedTuple):
    """The base of a run: its folder if it has one, its name on the hub or "", and its description.

    `revision` is the branch, tag or commit of the hub's model; "" if none was named.
    """

    folder: pathlib.Path | None
    hub_name: str
    origin: str
    revision: str = ""


class CardFacts(NamedTuple):
    """The facts of a card.

    Attributes:
      config: settings of the run.
      metrics: metrics.json of the run; None if it measured nothing.
      entry: the entry of the exported model in it.
      retrieved: summary.json of its strategy's sets.
      ended: why unlearning ended before all was forgotten; "" if all was forgotten or without
        probes.
      set_hashes: first 16 hex digits of the SHA-256 of the files of both sets.
      base: the base, with the dtype of its weights and their identity in `origin`.
      lora: rank, alpha and layers of the adapter.
      adapter_origin: source of the adapter, "" if it was fine-tuned in the run.
      is_served: whether vLLM serves adapters of this architecture.
      is_merged: the weights include the adapter; otherwise it is separate.
      prompt: the template of a prompt with {instruction}; empty if the tokenizer has it.
    """

    config: Mapping[str, Any]
    metrics: Metrics | None
    entry: MethodEntry | None
    variant: Variant
    num_train: int
    num_targets: int
    learning_rate: float
    ended: str
    retrieved: Mapping[str, Any]
    set_hashes: Mapping[str, str]
    base: Base
    lora: "LoRAConfig"
    is_served: bool
    adapter_origin: str
    is_merged: bool
    prompt: str


def render_card(facts: CardFacts) -> str:
    """Returns README.md of an exported model: a header for hubs, and then the facts."""
    environment = names.make_environment(
        # Text that the template does not mark as Markdown is shown unchanged.
        finalize=lambda text: (
            text if isinstance(text, Markup) else tables.escape_markdown(str(text))
        )
    )
    config, (strategy, algorithm, _) = facts.config, facts.variant
    retrains = algorithm in OBJECTIVES and OBJECTIVES[algorithm].retrains
    own, form = config["unlearn"].get(algorithm, {}), config["backbone"].get("format", "plain")
    max_rank = max(sum(facts.lora.ranks().values(), (facts.lora.rank,)))
    unlearn, recipe = own if retrains else config["unlearn"] | own, {one.name for one in FIELDS}
    options = {
        name: value
        for name, value in unlearn.items()
        if (name in recipe if retrains else name not in _SAID) and not isinstance(value, Mapping)
    }
    return environment.get_template("card.md.jinja").render(
        **facts._asdict(),
        is_given=strategy in STRATEGIES and STRATEGIES[strategy].brings_sets,
        retrains=retrains,
        uses_retain=algorithm not in OBJECTIVES or OBJECTIVES[algorithm].retain is not None,
        dataset=describe(config["corpus"]),
        options=", ".join(f"{name}={value}" for name, value in options.items()),
        measured=_measured(facts),
        describe_judgment=judgment.describe,
        robustness=_robustness(facts),
        retrained=_retrained(facts),
        base_format="" if form == "plain" else form,
        shell_base=Markup(shlex.quote(facts.base.hub_name or "BASE")),
        shell_revision=Markup(shlex.quote(facts.base.revision)),
        vllm_rank=next((rank for rank in _VLLM_RANKS if rank >= max_rank), 0),
        vllm_default=_VLLM_RANKS[0],
        quoted_base=Markup(json.dumps(facts.base.hub_name)),
        quoted_prompt=Markup(repr(facts.prompt)),
    )


def _robustness(facts: CardFacts) -> list[tuple[str, str]]:
    """Returns the results of robustness tests of this model: titles with sentences."""
    found = facts.metrics.get("robustness", ()) if facts.metrics else ()
    own = facts.variant._asdict()
    return robustness.told(
        [one for one in found if all(one[name] == value for name, value in own.items())]
    )


def _retrained(facts: CardFacts) -> Markup:
    """Returns the table of the distances to the retrained model; empty without one."""
    is_last = "distance" in (facts.entry or {})  # it is measured at the last epoch
    table = results.retrained_table(facts.metrics) if facts.metrics and is_last else None
    return Markup(tables.render_markdown(table) if table else "")


def _measured(facts: CardFacts) -> Markup:
    """Returns the table of this model next to earlier ones; empty if nothing was measured."""
    metrics, entry = facts.metrics, facts.entry
    if metrics is None or entry is None:
        return Markup("")
    entries: dict[str, Mapping[str, Any]] = {
        "This model": entry,
        "Fine-tuned, before unlearning": metrics["finetuned"],
    }
    if "backbone" in metrics:
        entries["Base, before fine-tuning"] = metrics["backbone"]
    models = [make_model("", "", found) for found in entries.values()]
    rows = tuple(
        (field.title, *(field.show(model) or tables.NOT_KNOWN for model in models))
        for field in results.fields_of("card")
        if field.is_known(models[0])
    )
    columns = tuple(map(tables.Column, ("", *entries)))
    return Markup(tables.render_markdown(tables.Table(columns, rows)))
