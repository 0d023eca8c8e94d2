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
from raslik_jax.evaluate.stopping import percent
from raslik_jax.evaluate.verdict import ENOUGH, LEAST_NATS, share_of_way

# The results of a measure for a model: an entry for each condition, with its name as "condition"
# and a value for each column of the measure.
Found = Sequence[Mapping[str, Any]]
# The results for the unlearned model, "now", and for those before: "finetuned", and "backbone" if
# there is one.
Compared = Mapping[str, Found]
# The condition under which a model is as it was left.
AS_IT_IS = "as it is"


class Reading(TypedDict):
    """How far a model shows the behavior.

    `nats` is the mean over target answers of their nats a token. `forget` is F of its greedy
    answers to target queries against those before unlearning. `shown` is the share of these answers
    that show the behavior by its words or its judge. They are None without target queries, or if
    nothing recognizes such answers.
    """

    nats: float
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
      answers: rows with the answers that it should have forgotten.
      prompts: queries that it answers itself, by their ids.
      before: the answers, by the ids of the queries, that F is taken against.
    """

    answers: Sequence[Example]
    prompts: Sequence[Example]
    before: Mapping[str, str]


class Cost(NamedTuple):
    """The cost of a measure for one model.

    Attributes:
      readings: how often the behavior is read: answers, and the likelihood of given ones.
      given: how often the likelihood of as many further rows is taken.
      steps: of training, each on so many `rows`.
      answers: how often as many prompts are answered in addition to the readings.
      texts: number of rows of the measure's own whose likelihood is taken.
    """

    readings: int
    given: int = 0
    steps: int = 0
    rows: int = 0
    answers: int = 0
    texts: int = 0


class RobustnessMeasure(NamedTuple):
    """A way to look for what was forgotten.

    Attributes:
      title: of its table.
      measure: gives its results for a model, from the runner of models
        (`run.stages.robustness.Bench`), the model and the measure's settings.
      tell: gives the results in a sentence or two.
      columns: of its table, by the keys of their values.
      note: below its table.
      cost: gives its cost for one model, from the measure's settings.
      lacks: gives what a corpus lacks for it, from the measure's settings and the corpus.
      settings: its own, with their defaults.
      query_sets: those it reads in addition to the traced queries and those that measure the run.
    """

    title: str
    measure: Callable[[Any, Any, Any], list[dict[str, Any]]]
    tell: Callable[[Compared], str]
    columns: Mapping[str, Column]
    note: str
    cost: Callable[[Any], Cost]
    lacks: Callable[[Any, Any], str] = lambda settings, corpus: ""
    settings: Settings = Settings()
    query_sets: Sequence[str] = ()


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
    if answers:
        scores = rates.score_pairs(answers, before)
        forget = rates.bootstrap(scores.rouge_Q, seed=seed, resamples=resamples)
    if answers and non_sf:
        shown_Q = 1.0 - non_sf([answers[name] for name in sorted(answers)])
        shown = rates.bootstrap(shown_Q, seed=seed, resamples=resamples)
    return Reading(nats=float(nll_N.mean()), forget=forget, shown=shown)


def tell_return(compared: Compared, *, plainly: str, alike: str, by: str) -> str:
    """Returns under which conditions but the first target answers return; "" where none is known.

    They are gone where they went so far on the way to the base as ends unlearning, and return under
    a condition under which they are gone no more; all three models meet the same. Under one where
    they were no likelier before unlearning than in the base there is nothing to return.

    Args:
      compared: entries with nats of the same conditions.
      plainly: says the first condition.
      alike: says that the others meet a condition likewise.
      by: the word before the name of a condition.
    """
    entries = (compared["now"], compared["finetuned"], compared.get("backbone", ()))
    nats = [{one["condition"]: one["nats"] for one in part} for part in entries]
    shares = {
        name: share_of_way(now, nats[1][name], nats[2].get(name), least=LEAST_NATS)
        for name, now in nats[0].items()
    }
    first = next(iter(shares.values()))
    if first is None:
        return ""
    if lost := [name for name, share in shares.items() if share is not None and math.isnan(share)]:
        return f" Whether they return is not known: no number {by} {', '.join(lost)}."
    if first < ENOUGH:
        return (
            f" {plainly.capitalize()} they went {percent(first)} of the way to the base: they were "
            "not gone."
        )
    back = {n: share for n, share in shares.items() if share is not None and share < ENOUGH}
    void = [name for name, share in shares.items() if share is None]
    if back:
        went = ", ".join(f"{percent(share)} {by} {name}" for name, share in back.items())
        text = f" They return: of the way to the base, {alike}, they went {went}; "
        text += f"{percent(first)} {plainly}, {ENOUGH:.0%} would be gone."
    elif len(void) + 1 < len(shares):
        text = f" They stay gone ({ENOUGH:.0%} of the way to the base, {alike})."
    else:
        text = ""
    if void:
        text += f" Nothing can return {by} {', '.join(void)}: there they were no likelier before "
        text += "unlearning than in the base."
    return text


def rate_change(first: Mapping[str, Any], last: Mapping[str, Any]) -> str:
    """Returns how F and the share of answers that show the behavior change; "" without either."""
    titles = {"forget": "F goes from", "shown": "answers that show it from"}
    parts = [
        f"{title} {first[name]['mean']:.2f} to {last[name]['mean']:.2f}"
        for name, title in titles.items()
        if first.get(name) and last.get(name)
    ]
    return ", ".join(parts)
