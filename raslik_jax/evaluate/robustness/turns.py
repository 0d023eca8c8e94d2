"""Earlier turns: does the behavior return in the middle of a conversation?

The question follows some forgotten rows with their answers, an unrelated exchange, or the same
question with the answer that the model gave. Examples show the behavior to any model. The base
answers the same questions, and so does a model that was trained without the rows if the run has
one.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from raslik_jax.base.settings import Settings, setting
from raslik_jax.data.examples import Corpus, Exchange, asked_after
from raslik_jax.evaluate.robustness import prompts
from raslik_jax.evaluate.robustness.record import (
    AS_IT_IS,
    READING_COLUMNS,
    Asked,
    Cost,
    RobustnessMeasure,
)

EXAMPLES, UNRELATED, AGAIN = "examples of it before", "another question before", "asked again"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnSettings(Settings):
    """The turns before a question."""

    examples: int = setting(
        3, "Number of forgotten rows that precede a question as examples.", low=1
    )


def lacks(settings: TurnSettings, corpus: Corpus | Any) -> str:
    """Returns why no turns can precede the rows of a corpus; "" if they can."""
    if any(asked_after(row, [("a", "b")]) for row in corpus.train[:1]):
        return ""
    return "--evaluate.robustness=turns needs rows with a prompt in words, got texts: leave it out"


def after(asked: Asked, before: Mapping[str, Sequence[Exchange]], bench: Any) -> Asked:
    """Returns the rows with exchanges before each question, by the id of its row."""
    return asked.changed(lambda row: bench.after(row, before[row.example_id]))


def measure(bench: Any, model: Any, settings: TurnSettings) -> list[dict[str, Any]]:
    """Returns a model's readings for plain questions and for questions after other turns."""
    asked = bench.asked
    said = bench.said(model, [*asked.prompts, *asked.answers])
    shown = {
        EXAMPLES: bench.exchanges("forgotten", settings.examples),
        UNRELATED: bench.exchanges("unrelated", 1),
    }
    groups = {AS_IT_IS: asked}
    groups |= {
        name: after(asked, dict.fromkeys(said, given), bench)
        for name, given in shown.items()
        if given
    }
    # The same rows for each model, whatever it answers.
    again = bench.twice(AGAIN, asked)
    groups[AGAIN] = after(again, {name: [one] for name, one in said.items()}, bench)
    found = bench.read_each(model, groups)
    return [{"condition": name, **reading} for name, reading in found.items()]


TURNS = RobustnessMeasure(
    title="Earlier turns",
    measure=measure,
    tell=prompts.tell,
    columns=READING_COLUMNS,
    note="Without a chat template the earlier turns are text in front of the question. F is "
    "against the answers before unlearning to the plain prompts.",
    cost=lambda own: Cost(4, answers=2),
    lacks=lacks,
    settings=TurnSettings(),
    returns=True,
)
