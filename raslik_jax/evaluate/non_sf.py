"""The ways to decide whether an answer shows the behavior to forget, listed without jax."""

from collections.abc import Callable
from typing import Any, NamedTuple

from raslik_jax.base.settings import Settings

SHOWN = "the fine-tuned model shows the behavior on {:.1%} of target queries, the base on {:.1%}"


class NonSfMeasure(NamedTuple):
    """A way to measure Non-SF.

    Attributes:
      title: the common name.
      settings: its own settings with their defaults.
      load: for a trained measure: a function from the run's workspace to the function from texts to
        Non-SF, and the entry of metrics.json about it, with a "note" for reports. None: marker
        words or the dataset's judge decide.
      shown: text for the numbers of the fine-tuned model and of the base.
    """

    title: str
    settings: Settings = Settings()
    load: Callable[[Any], tuple[Any, dict[str, Any]]] | None = None
    shown: str = SHOWN


NON_SF: dict[str, NonSfMeasure] = {"words": NonSfMeasure("Marker words")}
