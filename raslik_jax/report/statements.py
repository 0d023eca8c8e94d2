"""What the page says of a run's numbers in its summary and above its rows: a function each.

What the incident says is in `incident`, `removal`, `retrieve.chance` and `retrieve.behaviors`, of
judgments in `notes`, below tables in notes.jinja.
"""

from collections.abc import Sequence

from raslik_jax.evaluate.metrics import IntervalEntry
from raslik_jax.report.explorer import Packed
from raslik_jax.report.names import strategy_name
from raslik_jax.report.records import Model
from raslik_jax.report.tables import format_interval


def summary_points(after: Model, seeds: Model, against: str) -> list[tuple[str, str]]:
    """Returns what a summary says of an unlearned model, each point as lead and text.

    Args:
      after: its numbers, means where there are several seeds.
      seeds: the same model with the numbers of every seed.
      against: in words, whose answers the rates are taken against.
    """
    share = "share {:.{}f} % of the wording of " + against + " ({} {})."
    forget, retain = after.joined("forget"), after.joined("retain")
    left = share.format(100 * forget["mean"], 0, "F", format_interval(forget))
    kept = share.format(100 * retain["mean"], 1, "R", format_interval(retain))
    differences = {
        letter: seeds.intervals(f"{name}_minus_random")
        for letter, name in (("F", "forget"), ("R", "retain"))
    }
    compared = [versus_random(letter, found) for letter, found in differences.items() if found]
    points = {
        "What is left.": f"Answers to target queries {left}",
        "Judgment.": judged_sentence(seeds),
        "The cost.": f"Answers to normal queries {kept}",
        "Against a random set.": " ".join(compared),
    }
    return [(lead, text) for lead, text in points.items() if text]


def judged_sentence(seeds: Model) -> str:
    """Returns a model's verdict with its reasons, or how many seeds have which; "" without one."""
    verdicts = seeds.values.get("judgment/verdict", ())
    if not verdicts:
        return ""
    if len(seeds.epochs) == 1:
        return f"{str(verdicts[0]).capitalize()}: {seeds.value('judgment/reasons')}."
    return f"Of {len(verdicts)} seeds: {seeds.judged()}."


def versus_random(letter: str, differences: Sequence[IntervalEntry]) -> str:
    """Returns how a rate compares with that of Random, by the intervals of its differences.

    One of each seed. "Clearly" is said where the whole 95 % interval is on one side of zero.
    """
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
    """Returns which rows the page has, whose sets are told, and how many texts are cut."""
    text = f"All {shown.num_rows:,} training examples with their scores."
    if shown.left_out:
        text = f"The {shown.num_shown:,} rows at both ends of the ranking, two thirds of them the "
        text += f"highest; {shown.left_out:,} of {shown.num_rows:,} between them are left out, and "
        text += "counted in the picture."
    text += f" Sets are those of {strategy_name(shown.strategy)}."
    return text + (f" {shown.num_cut:,} very long texts are cut." if shown.num_cut else "")
