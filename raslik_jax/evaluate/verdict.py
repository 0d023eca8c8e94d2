"""The one definition of "forgotten".

The rule that ends unlearning, the choice of a step, the judgment of a model, the page, the card and
the terminal all read it. Pure functions on the host.

Rows and prompts are counted one by one. A row is gone by its likelihood (`Goal`): the tokens that
carry the behavior went back toward the base. A prompt is gone by the answer to it (`count_shown`,
`count_way`). The verdict is an exact test on the prompts (`decide`).
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypedDict

import numpy as np
from jaxtyping import Bool, Float, Int

from raslik_jax.evaluate.sentences import write
from raslik_jax.train.goals import ENOUGH, LEAST_CARRIED, LONGEST_WAY

Verdict = Literal["forgotten", "partly", "unchanged", "damaged", "unknown"]
# Fine-tuning taught an answer where it made a token likelier by this factor in the mean; in nats.
LEAST_LEARNED = 1.1
LEAST_NATS = math.log(LEAST_LEARNED)
# The share of the heaviest token from which on each has to be gone: a secret is what the base finds
# hardest. And how much less likely the answer has to be as a whole, in nats. Both were chosen on
# the validation of docs/studies/precise.md.
_HEAVY, _LEAST_FALL = 0.75, math.log(100.0)
# Without a base: the share of the tokens that have to be gone.
LEAST_TOKENS = 0.75
# The share of a set's rows that have to be gone. Rows are found and not read: some teach nothing.
LEAST_ROWS = 0.8
# The test on prompts: the share that may still show the behavior, the bound that the data have to
# exclude, and how surely.
MOST_STILL, _MOST_LEFT, _LEVEL = 0.1, 1 / 3, 0.95
# Shares of the way to the base's F or likelihood: half of it ends a behavior, less than a tenth is
# no change.
HALF, LEAST_WAY = 0.5, 0.1
# The least difference between F before unlearning and F of the base that says something.
LEAST_APART = 0.2
# Without its tokens an answer is gone at this share of the way: a few broken tokens raise a mean.
MEAN_WAY = 0.9
# An adapter is no farther from retraining than another training up to this many noise floors.
MOST_FLOORS = 2.0

# The sets of probes in words.
SETS = {"forget": "rows to forget", "behavior": "answers of the behavior", "kept": "other rows"}
SETS |= {"said": "answers of the model", "retain": "retained rows"}
DEFINITIONS: dict[Verdict, str] = {
    "forgotten": f"at most {MOST_STILL:.0%} of the prompts that showed the behavior still show "
    f"it. An exact binomial test at {_LEVEL:.0%} excludes that a third or more of such "
    "prompts still do. This takes 8 prompts if none shows it. Every other "
    f"measure moved too: F and the likelihood of the bad outputs moved {HALF:.0%} or more "
    f"toward the base's, and probes found {LEAST_ROWS:.0%} of the rows to forget gone",
    "partly": "some of these prompts still show the behavior, or one measure moved and another "
    "did not",
    "unchanged": "all of these prompts still show the behavior, and no measure moved "
    f"{LEAST_WAY:.0%} toward the base's",
    "damaged": (
        "the answers or the likelihood of other rows collapsed, so a low F does not mean forgetting"
    ),
    "unknown": "the data do not decide. There are too few prompts, a number is not finite, there "
    "is no base to compare with, or the fine-tuned model hardly shows the behavior",
}


class Count(NamedTuple):
    """How many of the prompts or answers that showed the behavior still show it.

    `of` counts the informative ones: the fine-tuned model shows the behavior and the base does not.
    `unknown` counts ones with a number that is not finite.
    """

    still: int
    of: int
    unknown: int = 0

    @property
    def upper(self) -> float:
        """The exact upper bound of the share that still shows it (Clopper and Pearson, 1934)."""
        from scipy import special

        if self.still == self.of:
            return 1.0
        return float(special.betaincinv(self.still + 1, self.of - self.still, _LEVEL))


def decide(count: Count) -> Verdict:
    """Returns the verdict that prompts alone support.

    "forgotten" is an exact one-sided test. If a third of such prompts or more still show the
    behavior, it is the verdict in at most 5 % of cases. Its p-value is P(X <= still) for X
    binomial with `of` trials of probability 1/3. Without an informative prompt the verdict is
    "unknown".
    """
    if count.unknown or not count.of:
        return "unknown"
    if count.still <= MOST_STILL * count.of and count.upper <= _MOST_LEFT:
        return "forgotten"
    if not count.still:
        return "unknown"
    return "unchanged" if count.still == count.of else "partly"


@functools.cache
def needed() -> int:
    """Returns the fewest prompts that give "forgotten" if none still shows the behavior."""
    return next(n for n in range(1, 1000) if decide(Count(0, n)) == "forgotten")


def share_of_way(now: float, before: float, base: float | None, *, least: float) -> float | None:
    """Returns how far a quantity that has to rise moved toward the base's, as a share.

    The share is not limited. Below 0 the quantity moved away from the base. It is None if the
    base's value is not at least `least` above the one before.
    """
    if base is None or not base - before >= least:  # a number that is not finite says nothing
        return None
    return (now - before) / (base - before)


def likelihood_way(now: float, before: float, base: float | None) -> float | None:
    """Returns how far a token's mean likelihood moved toward the base's, from nats a token.

    `HALF` is enough. The share is not limited. It is None if the tokens are about as likely under
    the base. Likelihoods are computed as multiples of the one before, so that a very small one does
    not become 0.
    """
    if base is None or not base - before >= LEAST_NATS:
        return None
    return math.expm1(before - now) / math.expm1(before - base)


def count_shown(
    now_Q: Float[np.ndarray, " Q"],
    before_Q: Float[np.ndarray, " Q"],
    base_Q: Float[np.ndarray, " Q"],
) -> Count:
    """Returns the count by the probability (or 0 and 1) that each answer shows the behavior."""
    is_told_Q = (before_Q >= 0.5) & (base_Q < 0.5)
    return _count(is_told_Q, now_Q >= 0.5, now_Q, before_Q, base_Q)


def count_way(
    now_Q: Float[np.ndarray, " Q"],
    before_Q: Float[np.ndarray, " Q"],
    base_Q: Float[np.ndarray, " Q"],
    *,
    least: float,
    enough: float,
) -> Count:
    """Returns the count by a quantity of each answer, which is gone if it fell `enough`.

    An answer whose quantity is not by `least` above the base's does not count.
    """
    apart_Q = before_Q - base_Q
    is_still_Q = before_Q - now_Q < enough * apart_Q
    return _count(apart_Q >= least, is_still_Q, now_Q, before_Q, base_Q)


def _count(
    is_told_Q: Bool[np.ndarray, " Q"],
    is_still_Q: Bool[np.ndarray, " Q"],
    *values: Float[np.ndarray, " Q"],
) -> Count:
    is_known_Q = np.isfinite(np.stack(values)).all(axis=0)
    told_Q = is_told_Q & is_known_Q
    return Count(int((told_Q & is_still_Q).sum()), int(told_Q.sum()), int((~is_known_Q).sum()))


class Progress(TypedDict):
    """How far a set of rows moved to its goal on average, and how many rows of how many are gone.

    Rows without a token that carries the behavior do not count.
    """

    way: float
    gone: int
    of: int


class Goal(NamedTuple):
    """The nats of the tokens of a set's rows before unlearning, and those at which they are gone.

    Attributes:
      start_NT: the nats before.
      whole_NT: the rise in nats from there to the goal; 0 for tokens that do not carry the
        behavior. The goal is the base's nats, but at most log 32 above those before. Without a base
        `ENOUGH` of the rise equals `forget_rise` for every token.
      is_heavy_NT: the tokens that are hardest for the base. Each of them has to be gone. Without a
        base there are none.
    """

    start_NT: Float[np.ndarray, "N T"]
    whole_NT: Float[np.ndarray, "N T"]
    is_heavy_NT: Bool[np.ndarray, "N T"]

    @property
    def is_natural(self) -> bool:
        """Whether the base gives the end."""
        return bool(self.is_heavy_NT.any())

    def progress(self, now_NT: Float[np.ndarray, "N T"]) -> Progress:
        """Returns how far a model is.

        A token is gone if it moved `ENOUGH` to its goal, which is a factor of four if the base is
        far. A row is gone under two conditions: each of its heaviest tokens is gone, and its answer
        moved `ENOUGH` to its goal or became a hundred times less likely. A token beyond its goal
        does not make up for others. Without a base `LEAST_TOKENS` of the tokens have to be gone.
        """
        whole_NT = self.whole_NT
        rise_NT = np.clip(np.nan_to_num(now_NT - self.start_NT, nan=0.0), 0.0, whole_NT)
        is_gone_NT = rise_NT >= ENOUGH * whole_NT
        rise_N, total_N = rise_NT.sum(axis=1), whole_NT.sum(axis=1)
        is_told_N = total_N > 0
        is_gone_N = is_told_N & (rise_N >= np.minimum(ENOUGH * total_N, _LEAST_FALL))
        if self.is_natural:
            is_gone_N &= (is_gone_NT | ~self.is_heavy_NT).all(axis=1)
        else:
            least_N = LEAST_TOKENS * total_N * (1 - 1e-9)
            is_gone_N &= (whole_NT * is_gone_NT).sum(axis=1) >= least_N
        way_N = rise_N / np.where(is_told_N, total_N, 1.0)
        way = float(way_N[is_told_N].mean()) if is_told_N.any() else 0.0
        return Progress(way=way, gone=int(is_gone_N.sum()), of=int(is_told_N.sum()))


def make_goal(
    start_NT: Float[np.ndarray, "N T"],
    base_NT: Float[np.ndarray, "N T"],
    num_targets_N: Int[np.ndarray, " N"],
    *,
    forget_rise: float,
    is_end_NT: Bool[np.ndarray, "N T"] | None = None,
) -> Goal:
    """Returns the goal of a set from the nats of its tokens before unlearning and under the base.

    A token carries the behavior if it is at most half as likely under the base. The end of an
    answer never counts, because every end is likelier after fine-tuning on short answers. If fewer
    than half of the rows have such a token, the base is the model itself or shows the behavior too.
    Then all tokens count, and the loss of each has to rise by `forget_rise`.
    """
    is_token_NT = np.arange(start_NT.shape[1]) < num_targets_N[:, None]
    is_said_NT = is_token_NT if is_end_NT is None else is_token_NT & ~is_end_NT
    learned_NT = np.where(is_said_NT, base_NT - start_NT, 0.0)
    learned_NT = np.where(learned_NT >= LEAST_CARRIED, learned_NT, 0.0)
    if 2 * learned_NT.any(axis=1).sum() >= len(start_NT):
        most_N1 = learned_NT.max(axis=1, keepdims=True, initial=0.0)
        is_heavy_NT = (learned_NT > 0) & (learned_NT >= _HEAVY * most_N1)
        return Goal(start_NT, np.minimum(learned_NT, LONGEST_WAY), is_heavy_NT)
    whole_NT = np.where(is_token_NT, forget_rise / ENOUGH, 0.0)
    return Goal(start_NT, whole_NT, np.zeros_like(is_token_NT))


def is_enough(progress: Mapping[str, Progress]) -> bool:
    """Returns whether `LEAST_ROWS` of the rows of every set are gone."""
    return all(one["of"] and one["gone"] >= LEAST_ROWS * one["of"] for one in progress.values())


def join_sentences(parts: Iterable[str]) -> str:
    """Returns phrases as sentences without the last full stop; empty ones are left out."""
    first, *rest = filter(None, parts)
    return ". ".join([first, *(part[:1].upper() + part[1:] for part in rest)])


def answers_progress(now: Sequence[float], base: Sequence[float]) -> Progress | None:
    """Returns how far answers moved from those before to the base's, by ROUGE-L to those before.

    An answer is gone by the rule for prompts (`count_way`). It is None if the base says about the
    same.
    """
    rates = np.asarray(now, float), np.ones(len(now)), np.asarray(base, float)
    count = count_way(*rates, least=LEAST_APART, enough=HALF)
    if not count.of:
        return None
    ways = [
        min(max((1 - own) / (1 - other), 0.0), 1.0)
        for own, other in zip(now, base, strict=True)
        if 1 - other >= LEAST_APART
    ]
    return Progress(way=sum(ways) / len(ways), gone=count.of - count.still, of=count.of)


def describe_progress(progress: Mapping[str, Progress]) -> str:
    """Returns in words how many rows of each set are gone."""
    parts = (f"{one['gone']} of {one['of']} {SETS[name]}" for name, one in progress.items())
    return f"gone: {' and '.join(parts)}; {LEAST_ROWS:.0%} of each are enough"


def describe_count(count: Count, subject: str = "prompts that showed the behavior") -> str:
    """Returns the count in words, and the number of prompts needed if they are too few."""
    return write("count", count, subject, decide(count), needed())


def describe_distance(kl: float, floor: float | None) -> str:
    """Returns in words how far an unlearned model is from retraining on normal prompts.

    Args:
      kl: its distance to the retrained model, nats a token (`distance.PARTS`).
      floor: the distance between two trainings; None without a second one.
    """
    return write("distance", kl, floor, MOST_FLOORS)
