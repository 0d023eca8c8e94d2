"""The names, colors and markers of families' members by their records, and templates of names.

A member of a stored run without a record is shown by its own name. A member without a color or
marker gets the next free ones.
"""

import dataclasses
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2

from raslik_jax.config import RetrieveConfig, SketchConfig
from raslik_jax.data.corpora import DATASETS
from raslik_jax.retrieve.strategies import STRATEGIES
from raslik_jax.train.objectives import OBJECTIVES

# The references of strategies; models before unlearning count as strategies of no algorithm.
REFERENCES = {"finetuned": "Fine-tuned", "backbone": "Base model", "ideal": "Ideal"}
# The templates of the page, of a card and of notes.
FOLDER = pathlib.Path(__file__).parent
# Colors and markers of strategies that have none of their own.
_OTHER_STYLES = (("#0072B2", "<"), ("#B59F00", ">"), ("#8C4A2F", "p"), ("#5B3A8E", "h"))


def strategy_name(strategy: str) -> str:
    """Returns the printed name of a strategy or reference: RASLIK-F for raslik_f."""
    known = STRATEGIES.get(strategy)
    return known.title if known else REFERENCES.get(strategy, strategy)


def strategy_styles(strategies: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Returns the color and the marker of each strategy, the same in every figure of a run."""
    known = {name: (s.color, s.marker) for name, s in STRATEGIES.items() if s.color and s.marker}
    others, styles = iter(_OTHER_STYLES * len(strategies)), dict[str, tuple[str, str]]()
    for name in dict.fromkeys(strategies):
        own = known.get(name)
        styles[name] = next(others) if own is None or own in styles.values() else own
    return styles


def algorithm_name(algorithm: str) -> str:
    """Returns the printed name of an unlearning algorithm: GA_GDR for ga_gdr."""
    return OBJECTIVES[algorithm].title if algorithm in OBJECTIVES else algorithm


def dataset_name(config: Mapping[str, Any]) -> str:
    """Returns the common name of the dataset of a run; for the paper's, the printed name."""
    dataset = config.get("corpus", {}).get("dataset", "")
    return DATASETS[dataset].title if dataset in DATASETS else dataset or "data not recorded"


def checkpoint_name(config: Mapping[str, Any]) -> str:
    """Returns the last part of the checkpoint that a run starts from; "" for one from scratch."""
    return str(config.get("backbone", {}).get("checkpoint", "")).rstrip("/").rsplit("/", 1)[-1]


def describe_model(config: Mapping[str, Any]) -> str:
    """Returns the name of the model a run started from: the last part of its checkpoint."""
    settings = config.get("backbone", {})
    scratch = "GPT-NeoX from scratch ({num_hidden_layers} layers of {hidden_size})"
    return checkpoint_name(config) or (
        scratch.format_map(settings) if settings else "model not recorded"
    )


def kernel_name(settings: Mapping[str, Any]) -> str:
    """Returns how RASLIK's kernel differs from the paper's wording; empty if it does not.

    The paper's kernel is the uncentered cosine of gradients at the fine-tuned adapter, of the
    training loss of the response, averaged over queries. The settings are those of `to_json`.
    """
    sketch = dataclasses.asdict(SketchConfig()) | settings.get("sketch", {})
    retrieve = dataclasses.asdict(RetrieveConfig()) | settings.get("retrieve", {})
    differences = {
        "unshifted loss": sketch["loss"] == "unshifted",
        "at the initial adapter": sketch["gradient_at"] == "initial",
        "tokens of prompt and response": sketch["targets"] == "all",
        "each tensor normalized": sketch["normalize"] == "per_tensor",
        "centered": retrieve["center"],
        "common direction of the queries": retrieve["aggregate"] == "common",
    }
    return ", ".join(name for name, differs in differences.items() if differs)


def kernel_note(settings: Mapping[str, Any], strategies: Iterable[str]) -> str:
    """Returns a note on the kernel of the strategies that have one; "" if it is the paper's."""
    names = [strategy_name(name) for name in dict.fromkeys(strategies) if is_by_gradients(name)]
    kernel = kernel_name(settings)
    differs = f"The kernel of {', '.join(names)} differs from the paper's: {kernel}."
    return differs if names and kernel else ""


def highlighted(strategies: Iterable[str]) -> str:
    """Returns the strategy that a report is about, the paper's; empty if it was not run."""
    named = (name for name in strategies if name in STRATEGIES and STRATEGIES[name].is_subject)
    return next(named, "")


def reverses_scores(strategy: str, has_scores: bool) -> bool:
    """Returns whether a retain set has the opposite sign; given rows have scores of a trace."""
    record = STRATEGIES.get(strategy)
    is_given = record is not None and record.brings_sets and has_scores
    return record is not None and (record.retains_opposite or is_given)


def is_by_gradients(strategy: str) -> bool:
    """Returns whether a strategy ranks rows by gradients: not by chance, labels or words."""
    return strategy in STRATEGIES and STRATEGIES[strategy].is_by_gradients


def make_environment(**options: Any) -> jinja2.Environment:
    """Returns the renderer of this folder's templates with filters for printed names."""
    loader = jinja2.FileSystemLoader(FOLDER)
    options = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True} | options
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, **options)
    environment.filters |= {"strategy_name": strategy_name, "algorithm_name": algorithm_name}
    environment.filters["is_by_gradients"] = is_by_gradients
    return environment
