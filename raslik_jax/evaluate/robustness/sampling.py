"""Sampling: does a drawn answer show the behavior that the greedy one does not?

The worst of n answers to a prompt, drawn at temperature 1, counts. A behavior with a probability of
one in ten appears if a user asks ten times (Patil et al. 2024, "Can Sensitive Information Be
Deleted From LLMs?", arXiv:2309.17410, attack by a budget of answers). The base draws the same
number: its hits are chance and not memory.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from raslik_jax.base.settings import Settings, setting
from raslik_jax.evaluate import rates
from raslik_jax.evaluate.judgment import LEAST_QUERIES
from raslik_jax.evaluate.robustness.record import (
    READING_COLUMNS,
    Compared,
    Cost,
    RobustnessMeasure,
)
from raslik_jax.evaluate.sentences import write

# In this order.
GREEDY, EACH, WORST = "greedy", "each sample", "worst of all samples"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingSettings(Settings):
    """How answers are drawn."""

    samples: int = setting(16, "Answers that are drawn for each prompt.", low=1)
    temperature: float = setting(1.0, "Temperature of the softmax.", above=0)
    tokens: int = setting(
        64,
        "Most new tokens of an answer, drawn or greedy. It is at most "
        "--references.max_new_tokens, the limit of the answers before unlearning.",
        low=1,
    )


class Rated(NamedTuple):
    """Answers to each prompt: F against those before unlearning, and whether they show it.

    `shown_Q` is None if nothing recognizes such answers.
    """

    forget_Q: Float[np.ndarray, " Q"]
    shown_Q: Float[np.ndarray, " Q"] | None


def measure(bench: Any, model: Any, settings: SamplingSettings) -> list[dict[str, Any]]:
    """Returns the rates of greedy answers, of each drawn one and of the worst to each prompt.

    It returns nothing without target prompts.
    """
    greedy, drawn = bench.draw(
        model,
        samples=settings.samples,
        temperature=settings.temperature,
        tokens=settings.tokens,
    )
    if not len(greedy.forget_Q):
        return []
    tokens = min(settings.tokens, bench.most_tokens)
    found: list[dict[str, Any]] = []
    for condition in (GREEDY, EACH, WORST):
        answers = [greedy] if condition == GREEDY else drawn
        entry: dict[str, Any] = {
            "condition": condition,
            "samples": len(answers),
            "prompts": len(greedy.forget_Q),
            "tokens": tokens,
            "is_cut": tokens < settings.tokens,
        }
        of_key = {
            "forget": [rated.forget_Q for rated in answers],
            "shown": [rated.shown_Q for rated in answers if rated.shown_Q is not None],
        }
        for key, parts in of_key.items():
            entry[key] = None
            if parts:
                rate_SQ = np.stack(parts)
                rate_Q = rate_SQ.max(axis=0) if condition == WORST else rate_SQ.mean(axis=0)
                entry[key] = rates.bootstrap(rate_Q, **bench.bootstrap)
        found.append(entry)
    return found


def tell(compared: Compared) -> str:
    """Returns how often drawn answers show the behavior or come near the earlier answers.

    It says "More often" if the interval of the worst is above the base's rate. With fewer prompts
    than `LEAST_QUERIES` this happens by chance.
    """
    if not compared["now"]:
        return "The run has no target prompts to draw answers for."
    by_name = {
        name: {entry["condition"]: entry for entry in part} for name, part in compared.items()
    }
    key = "shown" if by_name["now"][WORST]["shown"] else "forget"

    return write("sampling", by_name, key, (GREEDY, EACH, WORST), LEAST_QUERIES)


SAMPLING = RobustnessMeasure(
    title="Sampling",
    measure=measure,
    tell=tell,
    columns={name: READING_COLUMNS[name] for name in ("forget", "shown")},
    note="Each prompt counts with its worst sample, the one of the highest rate. All models draw "
    "with the same random numbers. Brackets: 95 % bootstrap interval over prompts.",
    cost=lambda own: Cost(0, answers=1 + own.samples),
    settings=SamplingSettings(),
)
