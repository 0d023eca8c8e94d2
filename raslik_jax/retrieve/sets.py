"""From scores to forget and retain sets by the settings of a run."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from raslik_jax.data.contents import Conversation, texts_of
from raslik_jax.data.examples import Example, prompt_of
from raslik_jax.data.ordering import shuffled
from raslik_jax.data.words import refused
from raslik_jax.index.combine import opposite
from raslik_jax.retrieve.selectors import Rule, Selection, select_by_count, spread_retain

# Normal examples to measure on, where a tenth of all are as many.
_NORMAL_ROWS = 16
# Targets to measure on, where half of the forget set are as many. The verdict takes eight that show
# the behavior, and a few do not; fewer than eight are of no more use to it than their share.
_TARGETS, _LEAST_TARGETS = 10, 8


def count_targets(rows: Sequence[Example], is_eligible_N: Bool[np.ndarray, " N"]) -> int:
    """Returns how many labeled targets can be in a set."""
    return sum(bool(row.is_target and ok) for row, ok in zip(rows, is_eligible_N, strict=True))


def held_out_sizes(share: float, num_forget: int, num_train: int) -> tuple[int, int]:
    """Returns how many targets are held out at most and how many normal examples at least."""
    enough = min(_TARGETS, num_forget // 2)
    most = max(1, int(share * num_forget), enough if enough >= _LEAST_TARGETS else 0)
    return most, max(1, min(_NORMAL_ROWS, num_train // 10))


class HeldOut(NamedTuple):
    """Positions of training examples that are in no set and measure a run.

    `target` examples should show the behavior and `normal` ones should not. `alike` are other
    examples with the same prompts.
    """

    target: list[int]
    normal: list[int]
    alike: list[int]


def can_be_asked(rows: Sequence[Example]) -> bool:
    """Returns whether any row has a prompt; texts and ids without a prompt have none."""
    return any(row.instruction.strip() for row in rows)


def earlier_prompts(example: Example) -> set[tuple[str, str]]:
    """Returns the prompts of the turns of a conversation that are trained on before the last."""
    talk = example.content
    if not isinstance(talk, Conversation) or talk.is_completion:
        return set()
    parts = (talk._replace(messages=talk.messages[: turn + 1]) for turn in talk.turns[:-1])
    return {(texts_of(part)[0].strip(), "") for part in parts}


def hold_out(
    rows: Sequence[Example],
    forget: Sequence[int],
    score_N: Float[np.ndarray, " N"],
    *,
    share: float,
    seed: int,
    traced: Sequence[Example],
    unasked: Sequence[int] = (),
) -> HeldOut:
    """Returns the examples that are kept out of the sets.

    Held-out targets have a share of the prompts of the forget set: at least one, and from 16 on at
    least 10 or half of them. All rows of a drawn prompt are held out, at most that share of the set
    or half of it. Prompts of many rows stay, and so do the traced one and that of a set of one
    prompt. Normal examples are as many as the drawn prompts, at least 16 but at most a tenth of all
    examples. They are from the lower half of the scores and not labeled as targets, and each has
    another prompt, which is not in the forget set. If no row has a prompt, nothing is held out. The
    rows at the positions `unasked` are not held out. Each turn of a conversation has a prompt.
    """
    if not can_be_asked(rows):
        return HeldOut([], [], [])
    prompts = [prompt_of(row) for row in rows]
    # The traced rows stay in the forget set, and a row without a prompt cannot be asked.
    kept = {prompt_of(query) for query in traced}
    kept |= {prompts[i] for i, row in enumerate(rows) if not row.instruction.strip()}
    kept |= {prompts[i] for i in unasked} | {
        one for i in forget for one in earlier_prompts(rows[i])
    }
    groups: dict[tuple[str, str], list[int]] = {}
    for position in forget:
        groups.setdefault(prompts[position], []).append(position)
    most, least = held_out_sizes(share, len(groups), len(rows))
    room = max(held_out_sizes(share, len(forget), len(rows))[0], len(forget) // 2)
    target, count = list[int](), 0
    for prompt in shuffled([*groups], seed=seed, label="held-out targets"):
        together = len(target) + len(own := groups[prompt])
        is_small = len(own) <= room // most  # else a few prompts would take the room of all
        if prompt not in kept and is_small and count < most and together < len(forget):
            target += own
            count += 1
    number = max(count, least)
    taken, normal = {*groups, *kept}, list[int]()
    middle = np.median(score_N[score_N > -np.inf])
    lower = np.flatnonzero((score_N <= middle) & (score_N > -np.inf)).tolist()
    far = [position for position in lower if not rows[position].is_target]
    for position in shuffled(far, seed=seed, label="held-out normal rows"):
        if len(normal) < number and prompts[position] not in taken:
            normal.append(position)
            taken.add(prompts[position])
    if not (target or normal):
        raise refused("held_out", count=len(rows))
    asked = {prompts[position] for position in (*target, *normal)}
    alike = [i for i, prompt in enumerate(prompts) if asked & {prompt, *earlier_prompts(rows[i])}]
    return HeldOut(target, normal, [i for i in alike if i not in {*target, *normal}])


def most_retained(settings: Rule, num_forget: int, num_eligible: int) -> int:
    """Returns how many rows can be retained if this number is forgotten.

    The rule `gap` takes none outside --retrieve.retain_within, because they may show the behavior.
    """
    most = num_eligible - num_forget
    if settings.select == "gap" and settings.retain_within:
        return min(most, math.ceil(settings.retain_within * num_eligible))
    return most


def set_sizes(settings: Rule, *, num_targets: int, num_eligible: int) -> tuple[int, int] | None:
    """Returns the sizes of both sets; None where the gap in the scores decides.

    A num_forget of 0 means the labeled targets that can be chosen. A num_retain of 0 means
    num_forget.
    """
    if settings.select == "gap" and not settings.num_forget:
        return None
    num_forget = settings.num_forget or num_targets
    if not num_forget:
        raise refused("num_forget")
    num_retain = settings.num_retain or num_forget
    if settings.select == "gap":
        num_retain = min(num_retain, most_retained(settings, num_forget, num_eligible))
    return num_forget, num_retain


def select_sets(
    score_N: Float[np.ndarray, " N"],
    ids: Sequence[str],
    settings: Rule,
    *,
    num_targets: int,
    seed: int,
) -> Selection:
    """Returns the sets of `set_sizes`, whose number to forget is known.

    A score s_F of minus infinity bars an example from both. Ties go by id. The seed is for
    --retrieve.retain_within.
    """
    retain_N = opposite(score_N)
    if settings.retain_within:
        retain_N = spread_retain(retain_N, ids, share=settings.retain_within, seed=seed)
    eligible = int((score_N > -np.inf).sum())
    sizes = set_sizes(settings, num_targets=num_targets, num_eligible=eligible) or (0, 0)
    return select_by_count(score_N, retain_N, ids, num_forget=sizes[0], num_retain=sizes[1])
