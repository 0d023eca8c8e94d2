"""The page's sentences about a run's numbers in its summary, rows and pictures: a function each.

The incident's sentences are in `incident`, `traced`, `retrieve.chance` and `retrieve.behaviors`.
Those of judgments are in `notes`, and those below tables in notes.jinja.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from raslik_jax.evaluate import verdict
from raslik_jax.evaluate.judgment import LEAST_QUERIES
from raslik_jax.evaluate.rates import Interval
from raslik_jax.evaluate.summary import Metrics
from raslik_jax.report.explorer import Packed
from raslik_jax.report.facts import FORGET_PANEL, Facts, ScoreSample
from raslik_jax.report.incident import Card
from raslik_jax.report.names import highlighted, strategy_name
from raslik_jax.report.tables import format_interval
from raslik_jax.report.tidy import Model, has_steps, is_probed


def summary_points(after: Model, against: str) -> list[tuple[str, str]]:
    """Returns a summary's points on an unlearned model, each as lead and text.

    Args:
      after: its numbers in every seed.
      against: in words, whose answers the rates are taken against.
    """
    share = "share {:.{}f} % of the wording of " + against + ". {} is {}."
    forget, retain = after.joined("forget"), after.joined("retain")
    left = share.format(100 * forget["mean"], 0, "F", format_interval(forget))
    kept = share.format(100 * retain["mean"], 1, "R", format_interval(retain))
    compared = []
    for letter, name, kind in (("F", "forget", "target"), ("R", "retain", "normal")):
        if found := after.intervals(f"{name}_minus_random"):
            numbers = after.values.get(f"diversity/{kind}/answers", [LEAST_QUERIES])
            compared.append(versus_random(letter, found, is_few=min(numbers) < LEAST_QUERIES))
    points = {
        "What remains.": f"Target answers {left}",
        "Judgment.": judged_sentence(after),
        "The cost.": f"Normal answers {kept}",
        "Against a random set.": " ".join(compared),
    }
    return [(lead, text) for lead, text in points.items() if text]


def judged_sentence(seeds: Model) -> str:
    """Returns a model's verdict with its reasons, or the verdicts of seeds; "" without one."""
    verdicts = seeds.values.get("judgment/verdict", ())
    if not verdicts:
        return ""
    if len(seeds.epochs) == 1:
        named = ("reasons", "others", "left", "distance")
        parts = [seeds.value(f"judgment/{name}") for name in named]
        found = [str(verdicts[0]).capitalize(), *(str(part) for part in parts if part)]
        return f"{verdict.join_sentences(found)}."
    return f"Verdicts of {len(verdicts)} seeds: {seeds.judged()}."


def versus_random(letter: str, differences: Sequence[Interval], *, is_few: bool = False) -> str:
    """Returns how a rate compares with that of Random by the intervals of its differences.

    There is one for each seed. "Clearly" means that the whole 95 % interval is on one side of zero.
    For one or two queries (`is_few`) this happens by chance.
    """
    if is_few:
        return f"The queries are too few to compare {letter}."
    below = sum(one["high"] < 0 for one in differences)
    above = sum(one["low"] > 0 for one in differences)
    if len(differences) > 1:
        seeds = f"{above} of {len(differences)} seeds, with the whole interval"
        return f"{letter} is lower in {below} and higher in {seeds}."
    size = format_interval(differences[0], "+.3f", "+.3f")
    if below or above:
        return f"{letter} is clearly {'lower' if below else 'higher'}: {size}."
    return f"{letter} does not differ clearly: {size}."


def damage_sentence(damaged: Sequence[str]) -> str:
    """Returns which strategies' sets damaged the model; "" where none did."""
    if not damaged:
        return ""
    names = ", ".join(map(strategy_name, damaged))
    return (
        f"Unlearning damaged the models of {names}. Their low F does not mean forgetting: read "
        "the answers below."
    )


def rows_sentence(shown: Packed) -> str:
    """Returns the rows of the page, the strategy of their sets and the number of cut texts."""
    unscored = shown.num_unscored
    text = f"All {shown.num_rows:,} training examples with their scores."
    if shown.left_out:
        text = f"{shown.num_shown:,} rows from both ends of the ranking, two thirds of them from "
        text += f"the top. The {shown.left_out:,} of {shown.num_rows:,} rows between them are only "
        text += "counted in the picture."
        text += f" {unscored:,} without a score are left out too." if unscored else ""
    elif unscored:
        text = f"{shown.num_shown:,} of {shown.num_rows:,} training examples with their scores. "
        text += f"The other {unscored:,} have none and are left out."
    text += f" The sets are those of {strategy_name(shown.strategy)}."
    return text + (f" {shown.num_cut:,} very long texts are cut." if shown.num_cut else "")


def noise_sentence(cards: Sequence[Card]) -> str:
    """Returns the meaning of a score's ±; "" if no row has one."""
    if all(card.sigma is None for card in cards):
        return ""
    text = "± is the error of the score, because gradients are compressed."
    if any(card.chance for card in cards):
        text += " The line below a score says how often unrelated prompts reach it."
    return text


def frontier_sentence(shown: Sequence[Metrics]) -> str:
    """Returns how to read the panels of these runs and their dotted line.

    An F below the backbone's forgets nothing more only if F is taken against the model before
    unlearning.
    """
    if any(has_steps(one) for one in shown):
        text = (
            "Each path runs from the fine-tuned model over the epochs. Small markers are epochs, "
        )
        text += "the large one is the last"
    else:
        text = "Each line runs from the fine-tuned model to the large marker after unlearning"
    text += (
        ". It is filled if Pareto-optimal. Bars are its 95 % intervals. The ideal is the star at "
    )
    text += "the bottom right. Arcs join points at equal distance from it."
    based = [one for one in shown if "backbone" in one]
    if not based:
        return text
    if all(one.get("reference", "finetuned") == "finetuned" for one in based):
        return f"{text} The dotted line is the backbone's F. An F below it forgets nothing more."
    return f"{text} The dotted line is the backbone's F."


def retrieval_sentence(sets: Iterable[Mapping[str, Any]]) -> str:
    """Returns the meaning of the scores of sets by strategy for each experiment."""
    text = "The choice of each strategy from the training examples, with its own scores."
    name = highlighted(name for one in sets for name, kinds in one.items() if "retain" in kinds)
    if not name:
        return text
    return (
        f"{text} In the retain set of {strategy_name(name)} the highest score opposes the behavior "
        "most."
    )


def ends_sentence(scores: ScoreSample) -> str:
    """Returns the places of the sets among the scores; "" if there are none of these scores."""
    sets = {"forget": scores.forget, "retain": scores.retain}
    parts = [f"{name} {ends[0]:.3g} to {ends[1]:.3g}" for name, ends in sets.items() if ends]
    return f"The sets are shaded: {' and '.join(parts)}." if parts else ""


def answers_sentence(run: Facts) -> str:
    """Returns which models' answers are shown next to each other and whether words are marked."""
    when = "the step that its probes chose" if is_probed(run.config) else "its last epoch"
    when = "the epoch that was chosen for it" if run.metrics.get("chosen") else when
    text = f"The answers of all models to the same query. Each method is at {when}."
    return text + (" Words that mark the behavior are highlighted." if run.marker_words else "")


def training_sentence(losses: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Returns how to read loss curves by panel and label."""
    text = "Faint lines are single steps, or means of neighboring steps. Strong lines are "
    text += "running means."
    if any(panel.endswith(FORGET_PANEL) for panel in losses):
        text += " Unlearning has to raise the loss of the forget set."
    return text
