"""How members of the families are called and drawn: read from their records.

A member that has no record any more (of a stored run) goes by its own name, and one that says
nothing of its color or marker gets the next free ones.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from raslik_jax.config import kernel_name
from raslik_jax.data.corpora import DATASETS
from raslik_jax.retrieve.strategies import STRATEGIES
from raslik_jax.train.objectives import OBJECTIVES

# Colors and markers of strategies that have none of their own.
_OTHER_STYLES = (("#0072B2", "<"), ("#B59F00", ">"), ("#8C4A2F", "p"), ("#5B3A8E", "h"))


def strategy_name(strategy: str) -> str:
    """Returns the printed name of a strategy: RASLIK-F for raslik_f."""
    return STRATEGIES[strategy].title if strategy in STRATEGIES else strategy


def strategy_order() -> tuple[str, ...]:
    """Returns the strategies in the order in which tables list them."""
    return tuple(STRATEGIES)


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


def dataset_name(dataset: str) -> str:
    """Returns what people call a dataset; the paper's are called as it prints them."""
    return DATASETS[dataset].title if dataset in DATASETS else dataset or "data not recorded"


def kernel_notes(settings: Mapping[str, Any], strategies: Iterable[str]) -> list[str]:
    """Returns the kernel of the strategies that have one, where it is not the paper's.

    Args:
      settings: that the numbers were measured with.
      strategies: in the table.
    """
    names = [
        strategy_name(name)
        for name in dict.fromkeys(strategies)
        if name in STRATEGIES and STRATEGIES[name].is_by_gradients
    ]
    kernel = kernel_name(settings)
    if not names or not kernel:
        return []
    return [f"Kernel of {', '.join(names)}, not the paper's: {kernel}."]


def strategy_printed_as(method: str) -> str:
    """Returns the strategy of a method as the paper prints it: the longest title it begins with."""
    printed = _letters(method)
    known = [name for name, s in STRATEGIES.items() if printed.startswith(_letters(s.title))]
    return max(known, key=lambda name: len(STRATEGIES[name].title), default=method)


def _letters(text: str) -> str:
    return "".join(c for c in text.lower() if c.isalnum())


def highlighted(strategies: Iterable[str]) -> str:
    """Returns the strategy that a report is about: the paper's own; empty where it was not run."""
    named = (name for name in strategies if name in STRATEGIES and STRATEGIES[name].is_subject)
    return next(named, "")


def uses_retain(algorithm: str) -> bool:
    """Returns whether an algorithm trains on the retain set."""
    return algorithm not in OBJECTIVES or OBJECTIVES[algorithm].retain is not None


def options_of(algorithm: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of unlearning that have a part in what an algorithm does.

    Without those that say which, how long and at what rate.

    Args:
      algorithm: its name.
      settings: of the unlearning of a run.
    """
    said = ("algorithms", "choice", "epochs", "learning_rate")
    options = {k: v for k, v in (settings | settings.get(algorithm, {})).items() if k not in said}
    return {key: value for key, value in options.items() if not isinstance(value, Mapping)}
