"""The page's sentences about a run's numbers in its summary, rows and pictures: a function each.

The incident's sentences are in `incident`, `traced`, `retrieve.chance` and `retrieve.behaviors`.
Those of judgments are in `notes`, and those below tables in notes.jinja.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from raslik_jax.evaluate.judgment import LEAST_QUERIES
from raslik_jax.evaluate.rates import Interval
from raslik_jax.evaluate.summary import Metrics
from raslik_jax.report.explorer import Packed
from raslik_jax.report.facts import FORGET_PANEL, Facts, ScoreSample
from raslik_jax.report.incident import Card
from raslik_jax.report.names import highlighted, strategy_name
from raslik_jax.report.tables import Table, format_interval
from raslik_jax.report.tidy import Model, has_steps, is_probed


def summary_points(after: Model, seeds: Model, against: str) -> list[tuple[str, str]]:
    """Returns a summary's points on an unlearned model, each as lead and text.

    Args:
      after: its numbers, means where there are several seeds.
      seeds: the same model with the numbers of every seed.
      against: in words, whose answers the rates are taken against.
    """
    share = "share {:.{}f} % of the wording of " + against + " ({} {})."
    forget, retain = after.joined("forget"), after.joined("retain")
    left = share.format(100 * forget["mean"], 0, "F", format_interval(forget))
    kept = share.format(100 * retain["mean"], 1, "R", format_interval(retain))
    compared = []
    for letter, name, kind in (("F", "forget", "target"), ("R", "retain", "normal")):
        if found := seeds.intervals(f"{name}_minus_random"):
            numbers = seeds.values.get(f"diversity/{kind}/answers", [LEAST_QUERIES])
            compared.append(versus_random(letter, found, is_few=min(numbers) < LEAST_QUERIES))
    points = {
        "What is left.": f"Answers to target queries {left}",
        "Judgment.": judged_sentence(seeds),
        "The cost.": f"Answers to normal queries {kept}",
        "Against a random set.": " ".join(compared),
    }
    return [(lead, text) for lead, text in points.items() if text]


def judged_sentence(seeds: Model) -> str:
    """Returns a model's verdict with its reasons, or the verdicts of seeds; "" without one."""
    verdicts = seeds.values.get("judgment/verdict", ())
    if not verdicts:
        return ""
    if len(seeds.epochs) == 1:
        parts = [seeds.value(f"judgment/{name}") for name in ("reasons", "others", "distance")]
        return f"{str(verdicts[0]).capitalize()}: {'; '.join(filter(None, parts))}."
    return f"Of {len(verdicts)} seeds: {seeds.judged()}."


def versus_random(letter: str, differences: Sequence[Interval], *, is_few: bool = False) -> str:
    """Returns how a rate compares with that of Random by the intervals of its differences.

    There is one for each seed. "Clearly" means that the whole 95 % interval is on one side of zero.
    For one or two queries (`is_few`) this happens by chance.
    """
    if is_few:
        return f"{letter} cannot be told apart by so few queries."
    below = sum(one["high"] < 0 for one in differences)
    above = sum(one["low"] > 0 for one in differences)
    if len(differences) > 1:
        seeds = f"{above} of {len(differences)} seeds, by the whole interval"
        return f"{letter} is lower in {below} and higher in {seeds}."
    size = format_interval(differences[0], "+.3f", "+.3f")
    if below or above:
        return f"{letter} is clearly {'lower' if below else 'higher'}: {size}."
    return f"{letter} cannot be told apart: {size}."


def damage_sentence(damaged: Sequence[str]) -> str:
    """Returns which strategies' sets damaged the model; "" where none did."""
    if not damaged:
        return ""
    names = ", ".join(map(strategy_name, damaged))
    return (
        f"Damaged by unlearning the sets of {names}: a low F is no merit there. Read the answers "
        "below."
    )


def rows_sentence(shown: Packed) -> str:
    """Returns the rows of the page, the strategy of their sets and the number of cut texts."""
    unscored = shown.num_unscored
    text = f"All {shown.num_rows:,} training examples with their scores."
    if shown.left_out:
        text = f"The {shown.num_shown:,} rows at both ends of the ranking, two thirds of them the "
        text += f"highest; {shown.left_out:,} of {shown.num_rows:,} between them are left out, and "
        text += "counted in the picture."
        text += f" {unscored:,} without a score are left out too." if unscored else ""
    elif unscored:
        text = f"{shown.num_shown:,} of {shown.num_rows:,} training examples with their scores; "
        text += f"the other {unscored:,}, which have none, are left out."
    text += f" Sets are those of {strategy_name(shown.strategy)}."
    return text + (f" {shown.num_cut:,} very long texts are cut." if shown.num_cut else "")


def noise_sentence(cards: Sequence[Card]) -> str:
    """Returns the meaning of a score's ±; "" if no row has one."""
    if all(card.sigma is None for card in cards):
        return ""
    text = "± is the noise of the sketch: how far the score may be off because gradients were "
    text += "compressed."
    if any(card.chance for card in cards):
        text += " How often unrelated prompts reach it is another matter, and stands below it."
    return text


def frontier_sentence(shown: Sequence[Metrics]) -> str:
    """Returns how to read the panels of these runs and their dotted line.

    An F below the backbone's forgets nothing more only if F is taken against the model before
    unlearning.
    """
    if any(has_steps(one) for one in shown):
        text = (
            "Each path runs from the fine-tuned model over the epochs. Small markers are epochs; "
        )
        text += "the large one is the last"
    else:
        text = (
            "Each line runs from the fine-tuned model to the one after unlearning, a large marker"
        )
    text += ", filled if Pareto-optimal, with its 95 % intervals as bars. "
    text += "Best is the star at the bottom right; arcs join points at equal distance from it."
    based = [one for one in shown if "backbone" in one]
    if not based:
        return text
    if all(one.get("reference", "finetuned") == "finetuned" for one in based):
        return f"{text} An F below the backbone's, the dotted line, forgets nothing more."
    return f"{text} The dotted line is the backbone's F."


def tables_sentence(shown: Sequence[Table]) -> str:
    """Returns the meaning of the marks of blocks by the columns that they have; "" without any."""
    if not shown:
        return ""
    titles = {column.title for table in shown for column in table.columns}
    text = "As in the paper: methods that are not Pareto-optimal are gray"
    if marked := [name for name in ("D_mah", "Non-SF") if name in titles]:
        text += f"; among the others, the two best {' and '.join(marked)} have a blue ground"
    return f"{text}. F: forget rate, lower is better. R: retain rate, higher is better."


def retrieval_sentence(sets: Iterable[Mapping[str, Any]]) -> str:
    """Returns the meaning of the scores of sets by strategy for each experiment."""
    text = "What each strategy chose from the training examples. Scores are each strategy's own."
    name = highlighted(name for one in sets for name, kinds in one.items() if "retain" in kinds)
    if not name:
        return text
    return (
        f"{text} In the retain set of {strategy_name(name)}, the higher a score, the more an "
        "example opposes the behavior."
    )


def ends_sentence(scores: ScoreSample) -> str:
    """Returns the places of the sets among the scores; "" if there are none of these scores."""
    sets = {"forget": scores.forget, "retain": scores.retain}
    parts = [f"{name} {ends[0]:.3g} to {ends[1]:.3g}" for name, ends in sets.items() if ends]
    return f"Shaded: where the sets lie, {' and '.join(parts)}." if parts else ""


def answers_sentence(run: Facts) -> str:
    """Returns which models' answers are shown next to each other and whether words are marked."""
    when = "the step that its probes chose" if is_probed(run.config) else "its last epoch"
    when = "the epoch that was chosen for it" if run.metrics.get("chosen") else when
    text = f"The answers of all models to the same query, each method at {when}."
    return text + (" Words that mark the behavior are highlighted." if run.marker_words else "")


def training_sentence(losses: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Returns how to read loss curves by panel and label."""
    text = "Faint: every step, of long curves means of neighboring ones. Strong: the running mean "
    text += "over a twentieth of the steps."
    if any(panel.endswith(FORGET_PANEL) for panel in losses):
        text += " In unlearning the loss of the forget set is meant to rise."
    return text
