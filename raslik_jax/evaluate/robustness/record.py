"""The interface of a measure of robustness and its requirements of a run."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import numpy as np
from jaxtyping import Float

from raslik_jax.base.settings import Settings
from raslik_jax.data.examples import Example
from raslik_jax.evaluate import rates
from raslik_jax.evaluate.metrics import Column, NonSf
from raslik_jax.evaluate.sentences import write
from raslik_jax.evaluate.verdict import HALF, likelihood_way

# The results of a measure for a model: an entry for each condition, with its name as "condition"
# and a value for each column of the measure.
Found = Sequence[Mapping[str, Any]]
# The results for the unlearned model, "now", and for those before: "finetuned", and "backbone" if
# there is one. "retrained" is a model of the run that was trained without the rows.
Compared = Mapping[str, Found]
# The condition under which a model is as it was left.
AS_IT_IS = "as it is"


class Reading(TypedDict):
    """How much a model shows the behavior.

    `nats` is the mean over target answers of their nats a token. `forget` is F: it compares the
    model's greedy answers to target queries with those before unlearning. `shown` is the share of
    these answers that show the behavior by its words or its judge. A value is None without target
    answers or queries, or if nothing recognizes such answers.
    """

    nats: float | None
    forget: rates.Interval | None
    shown: rates.Interval | None


READING_COLUMNS = {
    "nats": Column("Nats a token of\ntarget answers", ".2f"),
    "forget": Column("F\n(higher is back)", ".2f", ".2f"),
    "shown": Column("Shows the\nbehavior", ".2f", ".2f"),
}


class Asked(NamedTuple):
    """The inputs of a reading.

    Attributes:
      answers: rows with the answers that the model should have forgotten.
      prompts: queries that the model answers itself, by their ids.
      before: the answers with which F compares, by the ids of the queries; some prompts of the user
        may have none.
    """

    answers: Sequence[Example]
    prompts: Sequence[Example]
    before: Mapping[str, str]

    def changed(self, change: Callable[[Example], Example | None]) -> "Asked":
        """Returns the rows with a change of each; rows that ask nothing are left out."""
        answers, prompts = (
            [new for row in rows if (new := change(row)) is not None]
            for rows in (self.answers, self.prompts)
        )
        return Asked(
            answers, prompts, {row.example_id: self.before[row.example_id] for row in prompts}
        )


class Cost(NamedTuple):
    """The cost of a measure for one model.

    Attributes:
      readings: number of readings, each with answers and the likelihood of given answers.
      steps: number of training steps, each on `rows` rows.
      answers: number of further passes of answers to the same number of prompts.
    """

    readings: int
    steps: int = 0
    rows: int = 0
    answers: int = 0


class RobustnessMeasure(NamedTuple):
    """A test of whether forgotten answers return.

    Attributes:
      title: title of its table.
      measure: function from the runner of models (`run.stages.robustness.Bench`), a model and the
        settings to the results.
      tell: function from the results to a sentence or two.
      columns: columns of its table, by the keys of their values.
      note: text below its table.
      cost: function from the settings to the cost for one model.
      lacks: function from the settings and a corpus to the inputs that the corpus lacks.
      settings: its own settings with their defaults.
      returns: whether answers may return under its conditions (see `tell_return`).
    """

    title: str
    measure: Callable[[Any, Any, Any], list[dict[str, Any]]]
    tell: Callable[[Compared], str]
    columns: Mapping[str, Column]
    note: str
    cost: Callable[[Any], Cost]
    lacks: Callable[[Any, Any], str] = lambda settings, corpus: ""
    settings: Settings = Settings()
    returns: bool = False


def make_reading(
    nll_N: Float[np.ndarray, " N"],
    answers: Mapping[str, str],
    before: Mapping[str, str],
    *,
    non_sf: NonSf | None,
    seed: int,
    resamples: int,
) -> Reading:
    """Returns a reading of the nats a token of target answers and of own answers by query id."""
    forget = shown = None
    if before:
        score_Q = rates.score_pairs({name: answers[name] for name in before}, before)
        forget = rates.bootstrap(score_Q, seed=seed, resamples=resamples)
    if answers and non_sf:
        shown_Q = 1.0 - non_sf([answers[name] for name in sorted(answers)])
        shown = rates.bootstrap(shown_Q, seed=seed, resamples=resamples)
    nats = float(nll_N.mean()) if len(nll_N) else None
    return Reading(nats=nats, forget=forget, shown=shown)


def shares_gone(compared: Compared, model: str = "now") -> dict[str, float | None]:
    """Returns how far the likelihood of target answers moved toward the base's, by condition.

    It is None for a condition under which they were no likelier before unlearning than in the base.
    """
    names = (model, "finetuned", "backbone")
    nats = [{one["condition"]: one["nats"] for one in compared.get(name, ())} for name in names]
    return {
        name: likelihood_way(now, nats[1][name], nats[2].get(name))
        for name, now in nats[0].items()
        if now is not None and nats[1].get(name) is not None
    }


def returned(compared: Compared) -> dict[str, bool]:
    """Returns the conditions under which answers return, and whether they also do after retraining.

    An answer that was not gone under the first condition cannot return.
    """
    first, *others = shares_gone(compared).items() or [("", None)]
    if first[1] is None or not first[1] >= HALF:
        return {}
    again = shares_gone(compared, "retrained")
    if not (next(iter(again.values()), None) or 0) >= HALF:  # not gone, so it does not return
        again = {}
    back = [name for name, share in others if share is not None and share < HALF]
    return {name: (share := again.get(name)) is not None and share < HALF for name in back}


def describe_returns(found: Sequence[Compared]) -> str:
    """Returns in a phrase the conditions under which the behavior returns; "" for none."""
    back = {name: also for one in found for name, also in returned(one).items()}
    parts = {
        "the behavior returns": [name for name, also in back.items() if not also],
        "the behavior returns after retraining too": [name for name, also in back.items() if also],
    }
    return "; ".join(f"{text} ({', '.join(names)})" for text, names in parts.items() if names)


def tell_return(compared: Compared, *, plainly: str, by: str) -> str:
    """Returns the conditions after the first under which target answers return; "" if unknown.

    Answers are gone if their likelihood fell halfway to the base's. They return under each
    condition at which they are not gone. All models meet the same conditions. If they were no
    likelier before unlearning than in the base, nothing can return. If a retrained model gives them
    under the same condition, this is no failure of forgetting.

    Args:
      compared: entries with nats of the same conditions.
      plainly: the words for the first condition.
      by: the word before the name of a condition.
    """
    shares, back = shares_gone(compared), returned(compared)
    if next(iter(shares.values()), None) is None:
        return ""
    parts = {
        "lost": [name for name, way in shares.items() if way is not None and math.isnan(way)],
        "void": [name for name, way in shares.items() if way is None],
        "own": [name for name, also in back.items() if not also],
        "common": [name for name, also in back.items() if also],
    }
    again, words = shares_gone(compared, "retrained"), {"plainly": plainly, "by": by}
    return write("returns", shares, again, half=HALF, **parts, **words)
