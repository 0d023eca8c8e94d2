"""Makes the tables of docs/studies/which_method.md from the stored results of four studies."""

import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from experiments.studies.counterfactual import page as counterfactual
from experiments.studies.replay import page as replay
from experiments.studies.reports import markdown_table
from experiments.studies.which_gradient import page as which_gradient
from raslik_jax.base.files import read_json
from raslik_jax.report.tables import format_interval

HERE = pathlib.Path(__file__).resolve().parent
SETS = ("grammars", "math", "backdoor")
DEFAULT = which_gradient.DEFAULT
_SUM = "unshifted + trained + hidden"
# The methods of the page by their names in the results; tables.md has all.
TITLES = {
    DEFAULT: "unshifted loss, the default",
    "next_token/all": "trained loss",
    "smoothed/all": "trained loss, smoothed",
    "dot product, trained": "trained loss, dot product, as in the paper",
    "bergson": "bergson, trained loss, cosine",
    "hidden last/answer": "hidden, last layer, answer",
    "hidden last/all": "hidden, last layer",
    "hidden middle/answer": "hidden, middle layer, answer",
    "hidden middle/all": "hidden, middle layer",
    "hidden end of prompt, not centered": "hidden, end of the prompt, as in the paper",
    _SUM: "sum of three cosines",
    "ekfac": "bergson, EK-FAC",
    "bge-small": "bge-small",
    "BM25, answers": "BM25 with answers",
}
_SHOWN = (
    DEFAULT,
    "next_token/all",
    "smoothed/all",
    "dot product, trained",
    "bergson",
    "hidden last/answer",
    "hidden middle/answer",
    "hidden end of prompt, not centered",
    _SUM,
    "bge-small",
    "BM25, answers",
)
_RECALLED = (
    DEFAULT,
    "next_token/all",
    "bergson",
    "ekfac",
    "hidden last/all",
    "hidden middle/all",
    _SUM,
    "bge-small",
    "BM25, answers",
)
# A batch of which_gradient's costs has this many rows, of 48 tokens.
_TIMED_ROWS = 16
_CONTRAST = "own_model"
_DRAWS, _SEED = 10_000, 0


def read_results() -> dict[str, Any]:
    """Returns the stored results, by set."""
    return read_json(HERE / "results.json")


def methods(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the measures of a set by method."""
    return {one["method"]: one for one in found["methods"]}


def sets_table(names: Mapping[str, str] | None = None) -> str:
    """Returns top-1 accuracy, coverage and AUPRC of methods on every set."""
    results, names = read_results(), names or {name: TITLES[name] for name in _SHOWN}
    there = [name for name in SETS if name in results]
    by_set = [methods(results[name]) for name in there]
    keys = ("top1", "coverage", "auprc")

    def row(name: str, title: str) -> list[str]:
        found = [one.get(name) for one in by_set]
        return [title, *(f"{one[key]:.3f}" if one else "-" for one in found for key in keys)]

    head = [part for one in there for part in (f"{one}: top-1", "coverage", "AUPRC")]
    measured = [name for name in names if any(name in one for one in by_set)]
    return markdown_table(["method", *head], [row(name, names[name]) for name in measured])


def _all() -> dict[str, str]:
    results = read_results()
    found = [name for one in SETS if one in results for name in methods(results[one])]
    return {name: name for name in dict.fromkeys(found)}


def recall_table() -> str:
    """Returns the means over seeds of the measures of bergson's task `recall`, by method."""
    from experiments.studies.which_method import measure  # it takes jax with it

    seeds = read_json(HERE / "recall.json").values()
    found = [{one["method"]: one for one in seed["methods"]} for seed in seeds]
    default_Q = np.concatenate([seed[DEFAULT]["reciprocal"] for seed in found])
    rows = []
    for name in _RECALLED:
        each = [seed[name] for seed in found]
        keys = ("mrr", "recall", "strict_recall", "strict_recall_50")
        cells = [f"{np.mean([one[key] for one in each]):.3f}" for key in keys]
        first_Q = np.concatenate([one["reciprocal"] for one in each])
        gain, low, high = measure.paired_interval(first_Q - default_Q)
        less = "-" if name == DEFAULT else f"{gain:+.3f} [{low:+.3f}, {high:+.3f}]"
        spent = [one["seconds"] for one in each if one["seconds"] is not None]
        rows.append([TITLES[name], *cells, less, f"{np.mean(spent):.0f}" if spent else ""])
    head = ["method", "MRR", "Recall@10", "strict Recall@10", "strict Recall@50"]
    return markdown_table([*head, "MRR less the default's", "seconds"], rows)


def gains_table() -> str:
    """Returns the AUPRC less that of the default, with intervals, and the F1, on every set."""
    results = {name: one for name, one in read_results().items() if name in SETS}
    rows = []
    for name in _all():
        found = [methods(one).get(name) for one in results.values()]
        gains = ["{:+.3f} [{:+.3f}, {:+.3f}]".format(*o["auprc_gain"]) if o else "-" for o in found]
        rows.append([name, *gains, *(f"{one['f1']:.2f}" if one else "-" for one in found)])
    head = [f"{name}: gain" for name in results], [f"{name}: F1" for name in results]
    return markdown_table(["method", *head[0], *head[1]], rows)


def better_everywhere() -> list[str]:
    """Returns the methods that meet the first two conditions of rule.md."""
    results, cells = read_results(), which_gradient.read_cells()
    sets = [methods(results[name]) for name in SETS if name in results]

    def has_gains(name: str) -> bool:
        return all(name in found and found[name]["auprc_gain"][1] > 0 for found in sets)

    def is_as_good(name: str) -> bool:
        one, base = (which_gradient.judge(cells, which, {}) for which in (name, DEFAULT))
        return one.mean >= base.mean and one.smallest >= base.smallest and one.f1 >= base.f1

    known = {name for cell in cells for name in cell.by_name}
    return [name for name in _all() if name in known and has_gains(name) and is_as_good(name)]


def seconds_of(name: str) -> float | None:
    """Returns the processor seconds of 1,000 rows of 48 tokens, as which_gradient measured them."""
    costs = read_json(which_gradient.HERE / "results.json")["costs"]
    return costs[name] / _TIMED_ROWS * 1000 if name in costs else None


def seconds_table() -> str:
    """Returns rows, tokens and processor seconds of every set."""
    rows = []
    for name, one in read_results().items():
        if name in SETS:
            known = {key: found["seconds"] for key, found in methods(one).items()}
            peers = [known.get(peer) for peer in ("bergson", "bge-small")]
            spent = [one["adapter_seconds"], one["pass_seconds"], *peers]
            said = ["-" if number is None else f"{number:.0f}" for number in spent]
            sizes = f"{one['rows']} + {one['queries']}", f"{one['tokens']:.0f}"
            rows.append([name, *sizes, f"{one['nll_answer']:.2f}", *said])
    head = ["set", "rows + queries", "tokens of a row", "nll of answers", "fine-tuning"]
    return markdown_table([*head, "all vectors", "bergson", "bge-small"], rows)


def stages_table() -> str:
    """Returns the AUPRC if the best share of the rows by hidden states is scored by gradients."""
    results = {name: one for name, one in read_results().items() if name in SETS}
    shares = list(next(iter(results.values()))["two_stages"])
    rows = [
        [
            name,
            *(f"{one['two_stages'][share]:.3f}" for share in shares),
            f"{methods(one)[DEFAULT]['auprc']:.3f}",
        ]
        for name, one in results.items()
    ]
    return markdown_table(["set", *(f"{float(share):.0%}" for share in shares), "all rows"], rows)


def screens_table() -> str:
    """Returns AUPRC and cost if a screen chooses the rows that get a gradient."""
    rows, shares = [], list[str]()
    for case, one in read_json(HERE / "stages.json").items():
        rows.append([case, "none", f"{one['all rows']:.3f}, 1"])
        for name, found in one["screens"].items():
            shares = [f"{float(share):.0%}" for share in found["auprc"]]
            pairs = zip(found["auprc"].values(), found["cost"].values(), strict=True)
            alone = f"{found['alone']:.3f}, {found['seconds'] / one['seconds']:.2f}"
            cells = (f"{area:.3f}, {cost:.2f}" for area, cost in pairs)
            rows.append([case, name, alone, *cells])
    head = ["case", "screen", "alone", *shares]
    return markdown_table(head, [row + [""] * (len(head) - len(row)) for row in rows])


def contrast_interval(found: Mapping[str, Any], name: str) -> tuple[float, float, float]:
    """Returns the gain of a query over the plain one in mean AUPRC, and its 95 % interval.

    The bootstrap draws behaviors and then queries of each.
    """
    random = np.random.default_rng(_SEED)
    groups = [
        np.subtract(found[name][one]["auprc"], found["plain"][one]["auprc"])
        for one in found["plain"]
    ]

    def draw() -> float:
        drawn = [groups[place] for place in random.integers(len(groups), size=len(groups))]
        return float(np.mean([random.choice(one, len(one)).mean() for one in drawn]))

    low, high = np.quantile([draw() for _ in range(_DRAWS)], (0.025, 0.975))
    return float(np.mean([one.mean() for one in groups])), float(low), float(high)


def contrast_table() -> str:
    """Returns the AUPRC of single queries by behavior, and the gain over the plain query."""
    found = {name: one for name, one in read_results()[_CONTRAST].items() if name in _QUERIES}
    rows = []
    for name, title in _QUERIES.items():
        areas = [np.mean(one["auprc"]) for one in found[name].values()]
        ends = contrast_interval(found, name)
        gain = "-" if name == "plain" else "{:+.3f} [{:+.3f}, {:+.3f}]".format(*ends)
        f1 = np.mean([np.mean(one["f1"]) for one in found[name].values()])
        rows.append([title, *(f"{a:.3f}" for a in (*areas, np.mean(areas))), gain, f"{f1:.2f}"])
    behaviors = [name.replace("_", " ") for name in found["plain"]]
    return markdown_table(["query", *behaviors, "mean", "gain", "F1"], rows)


_QUERIES = {
    "plain": "bad answer, the default",
    "contrast": "bad less wished",
    "contrast, unit": "the same, unit vectors",
    "trained, response": "bad answer, trained loss",
    "contrast, trained": "log-odds, trained loss",
    "contrast, trained, unit": "the same, unit vectors",
    "hidden": "bad answer, hidden states",
    "BM25, answers": "bad answer, BM25",
}


# The best score of a removal, by its name in the results of `curvature`, of 25 answers.
_BEST, _ANSWERS = "unlearned answer", 25


def answer_table() -> str:
    """Returns which method to use for which task, with its quality and cost."""
    found = which_gradient.read_cells()
    lds, *repeated = map(counterfactual.read_case, ("smollm2", "fact2", "fact8"))
    lds = counterfactual.judge(lds)
    hard, more = (counterfactual.judge(counterfactual.mean_of_seeds(one)) for one in repeated)

    def group(name: str) -> str:
        one = which_gradient.judge(found, name, {})
        return f"AUPRC {one.mean:.2f} (one answer), {one.mean_set:.2f} (several), F1 {one.f1:.2f}"

    def removal(name: str) -> str:
        own = format_interval(lds[name]["target"], ".2f", ".2f")
        return f"LDS {own}{negatives(name)}"

    def negatives(name: str) -> str:
        few, many = (one[name]["target"]["mean"] for one in (hard, more))
        return f"; hard negatives {few:.2f} (2 %), {many:.2f} (8 %)"

    def seconds(name: str) -> str:
        return f"{seconds_of(name):.0f}"

    others = counterfactual.read_curvature("others")
    best = format_interval(others["lds"][_BEST]["target"], ".2f", ".2f")
    best += negatives("unlearned")
    spent = f"{others['processor_seconds'][_BEST] / _ANSWERS:.0f} an answer, 340 rows"
    (toy,) = (cell for cell in found if cell.behavior == "toy")
    areas = [which_gradient.single(name)(toy) for name in ("next_token/all", DEFAULT)]
    trigger = "AUPRC {:.2f} if a word in the prompt triggers it (default {:.2f})".format(*areas)
    default, hidden = "`raslik trace`", "hidden states"
    ten = functools.partial(replay.correlation, "smollm2", 10)
    rows = [
        ["find a group", default, group(DEFAULT), seconds(DEFAULT)],
        ["", "`--sketch.loss=next_token`", trigger, seconds("next_token/all")],
        ["", hidden, group("hidden last/all"), seconds("hidden last/all")],
        ["", "sum of three cosines", group(_SUM), seconds(_SUM)],
        ["", "BM25 with answers", group("BM25, answers"), "0.01"],
        ["predict a removal", default, removal("raslik"), seconds(DEFAULT)],
        ["", "BM25 with answers", removal("BM25, prompt and answer"), "0.01"],
        ["", f"[{_BEST}](counterfactual.md#curvature)", f"LDS {best}", spent],
        ["", "[replay](replay.md)", f"LDS {ten('replay')}, `raslik trace` {ten('raslik')}", "256 an answer, 340 rows"],
        ["", "EK-FAC of bergson", f"LDS {ten('ekfac')}", "97 an answer, 340 rows"],
        ["", "`raslik retrain`", "the removal itself", "a training"],
        ["explain a token", "`--retrieve.token_rows`", "shares whose sum is the score", "-"],
    ]
    return markdown_table(["task", "method", "quality", "seconds for 1,000 rows"], rows)


def page_tables() -> Mapping[str, Callable[[], str]]:
    """Returns what makes the tables of the study, by name."""
    return {
        "which method": answer_table,
        "sets": sets_table,
        "recall": recall_table,
        "contrast": contrast_table,
        "two stages": stages_table,
        "screens": screens_table,
        "all methods": lambda: sets_table(_all()),
        "gains": gains_table,
        "seconds": seconds_table,
    }
