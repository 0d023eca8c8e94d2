"""Whether fine-tuning taught an answer, by its likelihood under the model and its base.

And whether its prompt begins and ends as those of the rows do.
"""

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from raslik_jax.base.messages import shown
from raslik_jax.data.contents import Passage
from raslik_jax.data.examples import Example
from raslik_jax.evaluate.verdict import LEAST_NATS

# Texts of a file that are looked at for a beginning and an end that all have.
FRAMED = 100

# Spreads above what answers that a model draws itself cost, from which it would hardly say one: of
# 288 drawn answers none is there (docs/notes/report.md).
HARDLY = 4.0


def doubt(nll: float, base: float | None, drawn: tuple[float, float] | None = None) -> str:
    """Returns why a traced answer is weak evidence; "" if it is not.

    The answer's nats a token under the model and the base decide. There are two reasons: the model
    is unlikely to say it (`HARDLY` spreads above the mean of its own draws), or fine-tuning did not
    make it likelier by the factor of the judgment (1.1 a token).
    """
    if drawn and nll > drawn[0] + HARDLY * drawn[1]:
        own = f"its own answers have {drawn[0]:.2f} +- {drawn[1]:.2f} nats a token"
        return f"the model is unlikely to say it, as {own} (check prompt, template and adapter)"
    if base is not None and base - nll < LEAST_NATS:
        return "the base finds it as likely, so fine-tuning may not have taught it"
    return ""


class Taught(NamedTuple):
    """Whether fine-tuning taught the traced answers, by their likelihoods.

    `is_taught` says that fine-tuning certainly taught one of them: it is less likely under the
    base, and the model would say it. `refuted` says why fine-tuning taught none; "" if it may have.
    """

    is_taught: bool
    refuted: str


def taught_of(levels: Sequence[tuple[float, float | None, tuple[float, float] | None]]) -> Taught:
    """Returns the nats of the traced answers under model and base, and drawn ones, for `doubt`.

    An answer that is as likely under the base was not taught. An answer that the model hardly says
    may have been taught in other words if it is even less likely under the base.
    """
    doubts = [doubt(*level) for level in levels]
    refuted = [doubt(nll, base) for nll, base, _ in levels]
    known = [base is not None for _, base, _ in levels]
    is_taught = any(base and not why for base, why in zip(known, doubts, strict=True))
    return Taught(is_taught, refuted[0] if all(refuted) else "")


def unframed(rows: Sequence[Example], prompt: str) -> str:
    """Returns a sentence if all rows are texts with one beginning or end that a prompt lacks."""
    texts = [row.content for row in rows if isinstance(row.content, Passage)]
    common = os.path.commonprefix([one.prompt or one.completion for one in texts])
    # Up to the first words, which may be equal by chance in short ones.
    frame = common if len(common) >= 20 else re.sub(r"[\w\s]+$", "", common)
    ends = os.path.commonprefix([one.prompt[::-1] for one in texts])[::-1]
    end = "" if re.fullmatch(r"[\w\s.?!]*", ends) else re.sub(r"^[\w.?!]+", "", ends)
    if len(texts) < max(3, len(rows)):
        return ""
    is_begun = len(frame) < 4 or prompt.startswith(frame)
    lacks = [] if is_begun else [f"training rows begin with {shown(frame, 60)}"]
    lacks += [] if prompt.endswith(end) else [f"prompts of training rows end with {shown(end, 60)}"]
    said = " and ".join(lacks)
    return said and f"the {said}, the prompt does not: give it as the model read it"
