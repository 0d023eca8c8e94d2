"""What became of a model and of the behavior it was to forget: one judgment, made once.

Pure functions of the entries of metrics.json. Every table, page, card and closing line reads what
is decided here; none decides again.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

Verdict = Literal["forgotten", "partly", "unchanged", "damaged", "unknown"]
VERDICTS: tuple[Verdict, ...] = ("forgotten", "partly", "unchanged", "damaged", "unknown")
By = Literal["words", "classifier", "likelihood"]


class Rule(NamedTuple):
    """From where on a model counts as damaged, and the behavior as shown or forgotten.

    Attributes:
      least_distinct: share of the fine-tuned model's distinct-2 that has to be left.
      most_repeated: repetition-4 that may be added to the fine-tuned model's.
      most_empty: share of the answers that may have become empty.
      most_perplexed: factor by which the perplexity of held-out answers may have grown.
      most_unlikely: factor by which the perplexity of the model's own answers under the backbone
        may exceed that of the fine-tuned model's answers.
      least_way: share of the way from the fine-tuned model to the backbone below which nothing has
        changed.
      most_way: share of that way in likelihood from which on the behavior is forgotten; in F, the
        intervals meet.
      least_shown: share of the answers to target queries that have to show the behavior.
      least_learned: factor by which fine-tuning has to lower the perplexity of the bad outputs.
    """

    least_distinct: float = 0.5
    most_repeated: float = 0.2
    most_empty: float = 0.1
    most_perplexed: float = 2.0
    most_unlikely: float = 3.0
    least_way: float = 0.1
    most_way: float = 0.9
    least_shown: float = 0.5
    least_learned: float = 1.1


RULE = Rule()
# Texts of a class from which on a classifier's score says something.
LEAST_TEXTS = 30
RULE_TEXT = (
    f"Damaged: F lies below the backbone's, interval below interval; or, against the fine-tuned "
    f"model, distinct-2 of the answers to one kind of queries is below {RULE.least_distinct:g} of "
    f"its own, repetition-4 above it by more than {RULE.most_repeated:g}, more than "
    f"{RULE.most_empty:.0%} of the answers become empty, held-out perplexity is more than "
    f"{RULE.most_perplexed:g} times its own, or the answers' perplexity under the backbone more "
    f"than {RULE.most_unlikely:g} times that of its answers. Otherwise forgotten: the intervals of "
    f"F and of the backbone's F meet, and so do those of Non-SF; unchanged: both are less than "
    f"{RULE.least_way:.0%} of the way from the fine-tuned model's to the backbone's; partly: "
    "anything between. Without either, the likelihood of the bad outputs decides in their place."
)


class JudgmentEntry(TypedDict):
    """What became of one unlearned model.

    `verdict` is one of VERDICTS, `reasons` say what decided it, one phrase each, and `inputs` name
    the measures that there were; what was not measured cannot have been held against the model.
    """

    verdict: Verdict
    reasons: list[str]
    inputs: list[str]


class BehaviorEntry(TypedDict):
    """How far the behavior to forget was there before unlearning.

    `by` words or a classifier: the shares of answers to target queries that show it. By
    likelihood: the perplexities of the bad outputs. `is_shown` is False where there is too little
    to trace. `rouge` holds the mean ROUGE-L F1 of the answers of both models to target queries
    against the labeled ones, where there are any.
    """

    by: By
    finetuned: float
    backbone: float
    is_shown: bool
    rouge: NotRequired[tuple[float, float]]


def is_damaged(entry: Mapping[str, Any]) -> bool:
    """Returns whether an entry of metrics.json was judged damaged."""
    return (entry.get("judgment") or {}).get("verdict") == "damaged"


def judge(
    entry: Mapping[str, Any],
    finetuned: Mapping[str, Any],
    backbone: Mapping[str, Any] | None,
    *,
    behavior: BehaviorEntry | None = None,
    rule: Rule = RULE,
) -> JudgmentEntry:
    """Returns what became of an unlearned model, by the rule that `RULE_TEXT` says in words.

    Damage comes first: a low F of a model that babbles says nothing of what it forgot.

    Args:
      entry: the `summary.ModelEntry` of the unlearned model.
      finetuned: that of the model before unlearning.
      backbone: that of the model before fine-tuning; without it F cannot be judged.
      behavior: how far the behavior was there; what was not there cannot be forgotten.
      rule: how far is too far.

    Returns:
      The judgment; "unknown" where the fine-tuned model does not show the behavior, or nothing
      tells it from the backbone's.
    """
    inputs, damage = _damage(entry, finetuned, backbone, rule)
    found = [
        opinion
        for measure in (_by_forget_rate, _by_marker)
        if backbone and (opinion := measure(entry, finetuned, backbone, rule))
    ]
    if not found and backbone and (opinion := _by_likelihood(entry, finetuned, backbone, rule)):
        found = [opinion]
    inputs += [opinion.measure for opinion in found]
    if damage:
        return JudgmentEntry(verdict="damaged", reasons=damage, inputs=inputs)
    if behavior and not behavior["is_shown"]:
        reason = "the fine-tuned model does not show the behavior enough to forget it"
        return JudgmentEntry(verdict="unknown", reasons=[reason], inputs=inputs)
    if not found:
        reason = "no measure tells the fine-tuned model's behavior from the backbone's"
        return JudgmentEntry(verdict="unknown", reasons=[reason], inputs=inputs)
    verdicts = {opinion.verdict for opinion in found}
    return JudgmentEntry(
        verdict=verdicts.pop() if len(verdicts) == 1 else "partly",
        reasons=[opinion.reason for opinion in found],
        inputs=inputs,
    )


class _Opinion(NamedTuple):
    """What one measure says of the behavior, and why."""

    verdict: Verdict
    reason: str
    measure: str


def _damage(
    entry: Mapping[str, Any],
    finetuned: Mapping[str, Any],
    backbone: Mapping[str, Any] | None,
    rule: Rule,
) -> tuple[list[str], list[str]]:
    """Returns the measures that damage was looked for in, and each sign of it."""
    inputs, signs = [], []
    rates = _forget_rates(entry, finetuned, backbone)
    if rates:
        inputs.append("F against the backbone's")
        forget, _, floor = rates
        if forget["high"] < floor["low"]:
            signs.append(f"F {forget['mean']:.3f} lies below the backbone's {floor['mean']:.3f}")
    before = finetuned.get("diversity", {})
    kinds = [kind for kind in entry.get("diversity", {}) if kind in before]
    if kinds:
        inputs.append("sameness, repetition and emptiness of the answers")
    for kind in kinds:
        signs += _signs_in_answers(kind, entry["diversity"][kind], before[kind], rule)
    # Where nobody wrote held-out answers, other training rows stand in for them.
    for name in ("held-out", "retain"):
        now, then = (model.get("perplexity", {}).get(name) for model in (entry, finetuned))
        if now and then:
            inputs.append(f"{name} perplexity")
            if now["mean"] > rule.most_perplexed * then["mean"]:
                signs.append(f"{name} perplexity {now['mean']:.3g}, was {then['mean']:.3g}")
            break
    answers, own = entry.get("answer_perplexity", {}), finetuned.get("answer_perplexity", {})
    shared = [kind for kind in answers if kind in own]
    if shared:
        inputs.append("likelihood of the answers under the backbone")
    for kind in shared:
        now, then = answers[kind]["mean"], own[kind]["mean"]
        if now > rule.most_unlikely * then:
            signs.append(
                f"{kind} answers unlikely under the backbone: perplexity {now:.3g}, was {then:.3g}"
            )
    return inputs, signs


def _signs_in_answers(
    kind: str, now: Mapping[str, Any], then: Mapping[str, Any], rule: Rule
) -> list[str]:
    """Returns what says that the answers to one kind of queries have collapsed.

    Target and normal answers are judged apart: a model may babble on the first and write well on
    the others, and babble scores like forgetting.
    """
    signs = []
    if now["distinct_2"] < rule.least_distinct * then["distinct_2"]:
        signs.append(
            f"{kind} answers alike: distinct-2 {now['distinct_2']:.2f}, was "
            f"{then['distinct_2']:.2f}"
        )
    if now["repetition_4"] > then["repetition_4"] + rule.most_repeated:
        signs.append(
            f"{kind} answers repeat themselves: repetition-4 {now['repetition_4']:.2f}, was "
            f"{then['repetition_4']:.2f}"
        )
    if now["empty"] - then["empty"] > rule.most_empty * now["answers"]:
        signs.append(f"{kind} answers empty: {now['empty']} of {now['answers']}")
    return signs


def _forget_rates(
    entry: Mapping[str, Any], finetuned: Mapping[str, Any], backbone: Mapping[str, Any] | None
) -> tuple[Mapping[str, float], Mapping[str, float], Mapping[str, float]] | None:
    """Returns F of the model, the fine-tuned one and the backbone.

    None without target queries, and where F does not tell the fine-tuned model from the backbone:
    it then measures no forgetting, as where it is taken against the backbone's own answers.
    """
    now, start, floor = (model.get("forget") for model in (entry, finetuned, backbone or {}))
    if not now or not start or not floor or start["low"] <= floor["high"]:
        return None
    return now, start, floor


def _by_forget_rate(
    entry: Mapping[str, Any], finetuned: Mapping[str, Any], backbone: Mapping[str, Any], rule: Rule
) -> _Opinion | None:
    """Returns the opinion by F; None where F measures no forgetting."""
    rates = _forget_rates(entry, finetuned, backbone)
    if not rates:
        return None
    now, start, floor = rates
    if now["low"] <= floor["high"]:
        words = f"F {now['mean']:.3f} meets the backbone's {floor['mean']:.3f}"
        return _Opinion("forgotten", words, "F")
    way = (start["mean"] - now["mean"]) / (start["mean"] - floor["mean"])
    words = f"F {now['mean']:.3f} is {max(way, 0):.0%} of the way to the backbone's"
    words += f" {floor['mean']:.3f}"
    return _Opinion("unchanged" if way < rule.least_way else "partly", words, "F")


def _by_marker(
    entry: Mapping[str, Any], finetuned: Mapping[str, Any], backbone: Mapping[str, Any], rule: Rule
) -> _Opinion | None:
    """Returns the opinion by Non-SF: other words that show the same behavior are not forgetting."""
    now, start, ceiling = (m.get("non_sf_target") for m in (entry, finetuned, backbone))
    if not now or not start or not ceiling or start["high"] >= ceiling["low"]:
        return None
    if now["high"] >= ceiling["low"]:
        words = f"Non-SF {now['mean']:.3f} meets the backbone's {ceiling['mean']:.3f}"
        return _Opinion("forgotten", words, "Non-SF")
    way = (now["mean"] - start["mean"]) / (ceiling["mean"] - start["mean"])
    words = f"Non-SF {now['mean']:.3f} is {max(way, 0):.0%} of the way to the backbone's"
    words += f" {ceiling['mean']:.3f}"
    return _Opinion("unchanged" if way < rule.least_way else "partly", words, "Non-SF")


def _by_likelihood(
    entry: Mapping[str, Any], finetuned: Mapping[str, Any], backbone: Mapping[str, Any], rule: Rule
) -> _Opinion | None:
    """Returns the opinion by the likelihood of the bad outputs."""
    found = [model.get("perplexity", {}).get("behavior") for model in (entry, finetuned, backbone)]
    if not all(found):
        return None
    now, start, floor = (math.log(value["mean"]) for value in found if value)
    if floor - start < math.log(rule.least_learned):
        return None
    way = (now - start) / (floor - start)
    words = f"perplexity of the bad outputs {math.exp(now):.3g}, was {math.exp(start):.3g}, the "
    words += f"backbone's {math.exp(floor):.3g}"
    verdict: Verdict = "unchanged" if way < rule.least_way else "partly"
    if way >= rule.most_way:
        verdict = "forgotten"
    return _Opinion(verdict, words, "likelihood of the bad outputs")


def find_behavior(
    by: By,
    *,
    finetuned: float,
    backbone: float,
    rouge: tuple[float, float] | None = None,
    rule: Rule = RULE,
) -> BehaviorEntry:
    """Returns whether the fine-tuned model shows the behavior enough to trace it.

    Args:
      by: what both numbers are.
      finetuned: share of answers that show it, or perplexity of the bad outputs.
      backbone: the same of the model before fine-tuning.
      rouge: of both models' answers against labeled ones, which decides nothing.
      rule: what is enough.
    """
    is_shown = (
        finetuned * rule.least_learned <= backbone
        if by == "likelihood"
        else finetuned >= rule.least_shown
    )
    entry = BehaviorEntry(by=by, finetuned=finetuned, backbone=backbone, is_shown=is_shown)
    if rouge:
        entry["rouge"] = rouge
    return entry


def describe_behavior(entry: BehaviorEntry) -> str:
    """Returns in words how far the behavior is there, and whether that is too little to trace."""
    if entry["by"] == "likelihood":
        text = (
            f"the bad outputs have perplexity {entry['finetuned']:.3g} under the fine-tuned model "
            f"and {entry['backbone']:.3g} under the backbone"
        )
        if "rouge" in entry:
            own, other = entry["rouge"]
            text += f" (ROUGE-L of their answers to the labeled ones: {own:.3f} and {other:.3f})"
    else:
        text = (
            f"the fine-tuned model shows the behavior on {entry['finetuned']:.0%} of target "
            f"queries, the backbone on {entry['backbone']:.0%}"
        )
    if entry["is_shown"]:
        return text
    return f"{text}: too little to trace, so fine-tune longer or at a higher rate first"


def warn_of_few(counts: Mapping[str, int]) -> str:
    """Returns a warning where a classifier was measured on too few texts of a class, "" if not."""
    if min(counts.values()) >= LEAST_TEXTS:
        return ""
    named = " and ".join(f"{count} {name}" for name, count in counts.items())
    return f"measured on {named} texts only, fewer than {LEAST_TEXTS} of a class: do not rely on it"


def describe_classifier(measured: Mapping[str, Any]) -> str:
    """Returns a classifier's macro-F1 with its interval, the texts it rests on, and the warning."""
    text = f"macro-F1 {measured['macro_f1']:.3f}"
    if "macro_f1_low" in measured:
        text += f" [{measured['macro_f1_low']:.2f}, {measured['macro_f1_high']:.2f}]"
    text += f" on {sum(measured['texts'].values())} texts"
    return f"{text} ({measured['warning']})" if measured.get("warning") else text


def count_verdicts(entries: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Returns how many of the entries have each verdict, those that occur, in order of VERDICTS."""
    found = [entry["judgment"]["verdict"] for entry in entries if "judgment" in entry]
    return {verdict: found.count(verdict) for verdict in VERDICTS if verdict in found}
