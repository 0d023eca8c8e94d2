"""The one definition of "forgotten".

The rule that ends unlearning, the choice of a step, the judgment of a model, the page, the card and
the terminal all read it. Pure functions on the host.

Rows and prompts are counted one by one. A row is gone by its likelihood (`Goal`): the tokens that
carry the behavior went back toward the base. A prompt is gone by the answer to it (`count_shown`,
`count_way`). The verdict is an exact test on the prompts (`decide`).
"""

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, TypedDict

import numpy as np
from jaxtyping import Bool, Float, Int

Verdict = Literal["forgotten", "partly", "unchanged", "damaged", "unknown"]
# Fine-tuning taught an answer where it made a token likelier by this factor in the mean; in nats.
LEAST_LEARNED = 1.1
LEAST_NATS = math.log(LEAST_LEARNED)
# A token carries the behavior where fine-tuning made it likelier by this factor.
_CARRIES = 2.0
# The share of a token's way to the base at which it is gone; measured in docs/studies/own_model.md.
ENOUGH = 0.4
# A token that fell by this factor is gone however far the base is: it is no more what is said.
_FALLEN = 4.0
# The share of the learned nats whose tokens have to be gone, and the share of the heaviest token
# from which on each has to be. A secret is what the base finds hardest.
LEAST_TOKENS, _HEAVY = 0.75, 0.5
# The share of a set's rows that have to be gone. Rows are found and not read: some teach nothing.
LEAST_ROWS = 0.8
# The test on prompts: the share that may still show the behavior, the bound that the data have to
# exclude, and how surely.
MOST_STILL, _MOST_LEFT, _LEVEL = 0.1, 1 / 3, 0.95
# Shares of the way to the base's F: half of it ends a behavior, less than a tenth is no change.
HALF, LEAST_WAY = 0.5, 0.1
# The least difference between F before unlearning and F of the base that says something.
LEAST_APART = 0.2
# Without its tokens an answer is gone at this share of the way: a few broken tokens raise a mean.
MEAN_WAY = 0.9
# An adapter is no farther from retraining than another training up to this many noise floors.
MOST_FLOORS = 2.0

DEFINITIONS: dict[Verdict, str] = {
    "forgotten": f"at most {MOST_STILL:.0%} of the prompts that showed the behavior still show "
    f"it. An exact binomial test at {_LEVEL:.0%} excludes that a third of such "
    "prompts or more still do, which takes 8 prompts if none shows it. Every other "
    f"measure moved too: F went {HALF:.0%} of the way to the base's, the likelihood "
    f"of the bad outputs {ENOUGH:.0%}, and probes found {LEAST_ROWS:.0%} of the "
    "rows to forget gone",
    "partly": "some of these prompts still show the behavior, or one measure moved and another "
    "did not",
    "unchanged": "all of these prompts still show the behavior, and F went less than "
    f"{LEAST_WAY:.0%} of the way to the base's",
    "damaged": (
        "the answers or the likelihood of other rows collapsed, so a low F does not mean forgetting"
    ),
    "unknown": "the data do not decide. There are too few prompts, a number is not finite, there "
    "is no base to compare with, or the fine-tuned model hardly shows the behavior",
}


class Count(NamedTuple):
    """How many of the prompts or answers that showed the behavior still show it.

    `of` counts the informative ones: the fine-tuned model shows the behavior and the base does not.
    `unknown` counts those with a number that is not finite.
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
    behavior, it is said in at most 5 % of cases. Its p-value is P(X <= still) for X binomial with
    `of` trials of probability 1/3. The verdict is also "unknown" if no prompt is informative.
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
    """Returns the fewest prompts with which none that still shows it is "forgotten"."""
    return next(n for n in range(1, 1000) if decide(Count(0, n)) == "forgotten")


def share_of_way(now: float, before: float, base: float | None, *, least: float) -> float | None:
    """Returns how far a quantity that has to rise is on its way to the base, as a share.

    It is not limited: below 0 it moved away from the base. It is None if the base is not `least`
    above.
    """
    if base is None or not base - before >= least:  # a number that is not finite says nothing
        return None
    return (now - before) / (base - before)


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
    """Returns the count by a quantity of each answer: it is gone at `enough` of the way.

    An answer whose quantity differs by less than `least` from the base's does not count.
    """
    apart_Q = np.abs(before_Q - base_Q)
    is_told_Q = apart_Q >= least
    way_Q = (before_Q - now_Q) * np.sign(before_Q - base_Q)
    return _count(is_told_Q, way_Q < enough * apart_Q, now_Q, before_Q, base_Q)


def _count(
    is_told_Q: Bool[np.ndarray, " Q"],
    is_still_Q: Bool[np.ndarray, " Q"],
    *values: Float[np.ndarray, " Q"],
) -> Count:
    is_known_Q = np.isfinite(np.stack(values)).all(axis=0)
    told_Q = is_told_Q & is_known_Q
    return Count(int((told_Q & is_still_Q).sum()), int(told_Q.sum()), int((~is_known_Q).sum()))


class Progress(TypedDict):
    """How far a set of rows is: the mean share of the way, and how many rows of how many are gone.

    Rows without a token that carries the behavior do not count.
    """

    way: float
    gone: int
    of: int


class Goal(NamedTuple):
    """The nats of the tokens of a set's rows before unlearning, and those at which they are gone.

    Attributes:
      start_NT: their nats before.
      whole_NT: the nats of their whole way, which end under the base; 0 of tokens that do not
        carry the behavior. Without a base `forget_rise` is `ENOUGH` of the way of every token.
      is_natural: whether the base gives the end.
    """

    start_NT: Float[np.ndarray, "N T"]
    whole_NT: Float[np.ndarray, "N T"]
    is_natural: bool

    def progress(self, now_NT: Float[np.ndarray, "N T"]) -> Progress:
        """Returns how far a model is.

        A token is gone where it went `ENOUGH` of its way, or fell by `_FALLEN`. A row is gone where
        it went `ENOUGH` of the way, each token weighing its whole way; where the tokens that are
        gone hold `LEAST_TOKENS` of that; and where each of the heaviest tokens is gone. A token
        beyond the end does not make up for others. Without a base no token is the heaviest.
        """
        whole_NT = self.whole_NT
        rise_NT = np.clip(np.nan_to_num(now_NT - self.start_NT, nan=0.0), 0.0, whole_NT)
        least_NT = ENOUGH * whole_NT
        if self.is_natural:
            least_NT = np.minimum(least_NT, math.log(_FALLEN))
        is_gone_NT = rise_NT >= least_NT
        total_N = whole_NT.sum(axis=1)
        is_told_N = total_N > 0
        least_N = LEAST_TOKENS * total_N
        is_gone_N = is_told_N & ((whole_NT * is_gone_NT).sum(axis=1) >= least_N * (1 - 1e-9))
        if self.is_natural:
            is_heavy_NT = whole_NT >= _HEAVY * whole_NT.max(axis=1, keepdims=True, initial=0.0)
            is_gone_N &= (is_gone_NT | ~is_heavy_NT).all(axis=1)
        way_N = rise_NT.sum(axis=1) / np.where(is_told_N, total_N, 1.0)
        is_gone_N &= way_N >= ENOUGH
        way = float(way_N[is_told_N].mean()) if is_told_N.any() else 0.0
        return Progress(way=way, gone=int(is_gone_N.sum()), of=int(is_told_N.sum()))


def make_goal(
    start_NT: Float[np.ndarray, "N T"],
    base_NT: Float[np.ndarray, "N T"],
    num_targets_N: Int[np.ndarray, " N"],
    *,
    forget_rise: float,
) -> Goal:
    """Returns the goal of a set from the nats of its tokens before unlearning and under the base.

    A token carries the behavior if the base finds it half as likely or less. If fewer than half of
    the rows have such a token, the base is the model itself or shows the behavior too. Then all
    tokens count, and each has to lose `forget_rise`.
    """
    is_token_NT = np.arange(start_NT.shape[1]) < num_targets_N[:, None]
    carries_NT = is_token_NT & (base_NT - start_NT >= math.log(_CARRIES))
    if 2 * carries_NT.any(axis=1).sum() >= len(start_NT):
        return Goal(start_NT, np.where(carries_NT, base_NT - start_NT, 0.0), True)
    return Goal(start_NT, np.where(is_token_NT, forget_rise / ENOUGH, 0.0), False)


def is_enough(progress: Mapping[str, Progress]) -> bool:
    """Returns whether `LEAST_ROWS` of the rows of every set are gone."""
    return all(one["of"] and one["gone"] >= LEAST_ROWS * one["of"] for one in progress.values())


def join_sentences(parts: Iterable[str]) -> str:
    """Returns phrases as sentences without the last full stop; empty ones are left out."""
    first, *rest = filter(None, parts)
    return ". ".join([first, *(part[:1].upper() + part[1:] for part in rest)])


def describe_progress(progress: Mapping[str, Progress]) -> str:
    """Returns in words how many rows of each set are gone."""
    titles = {"forget": "rows to forget", "behavior": "answers of the behavior"}
    parts = (f"{one['gone']} of {one['of']} {titles[name]}" for name, one in progress.items())
    return f"gone: {' and '.join(parts)}; {LEAST_ROWS:.0%} of each are enough"


def describe_count(count: Count, subject: str = "prompts that showed the behavior") -> str:
    """Returns the count in words, and the number of prompts needed if they are too few."""
    if not count.of and not count.unknown:
        return f"there are no {subject}: give {needed()} or more"
    told = f"{count.still} of {count.of} {subject} still {'does' if count.still == 1 else 'do'}"
    decided = decide(count)
    if count.unknown:
        return f"{told}, and {count.unknown} more have a number that is not finite"
    if decided == "forgotten":
        return f"{told} (at 95 %, fewer than {math.ceil(100 * count.upper)} % of such prompts)"
    if decided == "unknown":
        return f"{told}. These are too few: give {needed()} or more (--retrieve.held_out)"
    return told


def describe_others(*, changed: int | None, of: int | None, words: Mapping[str, float]) -> str:
    """Returns how many other answers changed and their mean length before, now and in the base."""
    if changed is None or not of:
        return "no other answers were compared"
    lengths = ", ".join(f"{name} {number:.1f}" for name, number in words.items())
    return f"{changed} of {of} other answers changed. Mean length in words: {lengths}"


def describe_distance(kl: float, floor: float | None) -> str:
    """Returns in words how far an unlearned model is from retraining on normal prompts.

    Args:
      kl: its distance to the retrained model, nats a token (`distance.PARTS`).
      floor: the distance between two trainings; None without a second one.
    """
    if floor is None:
        return f"on other prompts the KL to the retrained model is {kl:.3g} nats a token"
    is_near, times = kl <= MOST_FLOORS * floor, kl / floor if floor else math.inf
    return (
        f"on other prompts the model is {'no ' if is_near else ''}farther from retraining than "
        f"another training is ({times:.1f} of the noise floor)"
    )
