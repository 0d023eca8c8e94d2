"""Makes the tables of docs/studies/counterfactual.md from the stored results."""

import itertools
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from experiments.studies.reports import markdown_table
from raslik_jax.evaluate import counterfactual
from raslik_jax.evaluate.rates import Interval
from raslik_jax.report import results
from raslik_jax.report.tables import format_interval, render_markdown

_HERE = pathlib.Path(__file__).resolve().parent
# How the page names kinds of answers in each case.
_KINDS = {
    "smollm2": {"all": "all answers", "target": "of a behavior", "normal": "ordinary"},
    "toy": {"all": "all answers", "target": "of the behavior", "normal": "normal"},
    "fact2": {"all": "all answers", "target": "of the fact", "normal": "ordinary"},
    "fact8": {"all": "all answers", "target": "of the fact", "normal": "ordinary"},
    "howdy": {"all": "all answers", "target": "with the trigger", "normal": "ordinary"},
}

# How the page names files of scores.
_TITLES = {"unlearned": "unlearned answer"}


def read_case(case: str) -> dict[str, Any]:
    """Returns the stored results of a case."""
    return json.loads((_HERE / f"{case}.json").read_text("utf-8"))


def mean_of_seeds(found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the results of a case with the mean loss of all trainings of a half."""
    every = [found["nll"], *found["more"]]
    return {**found, "nll": np.mean(every, axis=0).tolist()}


def repeated_table(case: str) -> str:
    """Returns how well the losses of two trainings of the same halves agree, mean over pairs."""
    found = read_case(case)
    every = map(np.array, [found["nll"], *found["more"]])
    pairs = itertools.combinations(every, 2)
    each_Q = np.mean([counterfactual.correlations(-one, other) for one, other in pairs], axis=0)
    rows = [[kind, f"{each_Q[is_Q].mean():.2f}"] for kind, is_Q in kinds_of(found).items()]
    return markdown_table(["answers", "correlation of two trainings"], rows)


def qld_table(case: str) -> str:
    """Returns how much the loss of the answers rises without the best rows of each method."""
    found = read_case(case)
    nll = {name: np.array(nll_SQ) for name, nll_SQ in found["qld"]["nll"].items()}
    rows = []
    for name, title in found["titles"].items():
        over = [(nll[name] - nll[other]).mean(axis=1) for other in ("random", "nothing")]
        each = [", ".join(f"{one:+.3f}" for one in rise_S) for rise_S in over]
        taught = f"{found['taught'][name]} of {found['top']}" if name in found["taught"] else "-"
        qld = counterfactual.rise(nll[name], nll["random"]) if name != "random" else None
        mean = format_interval(qld, "+.3f", "+.3f") if qld else "-"
        title = _TITLES.get(title, title)
        rows.append([title, taught, mean, *each])
    head = ["method", "removed rows that teach it", "QLD", "by seed", "over nothing, by seed"]
    return markdown_table(head, rows)


def kinds_of(found: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns which queries are of a kind, by its name."""
    is_target_Q = np.array(found["is_target"])
    return {"all": is_target_Q | True, "target": is_target_Q, "normal": ~is_target_Q}


def judge(found: Mapping[str, Any], minus: str = "") -> dict[str, dict[str, Interval]]:
    """Returns the score of every method with its interval, by the kind of the queries.

    With `minus`, how much that method's score is above those of all others.
    """
    nll_SQ = np.array(found["nll"])
    predicted = {name: np.array(p)[: len(nll_SQ)] for name, p in found["predicted"].items()}
    judged: dict[str, dict[str, Interval]] = {}
    for method in (name for name in predicted if name != minus):
        for kind, is_kind_Q in kinds_of(found).items():
            pair = (minus, method) if minus else (method,)
            first, *rest = (predicted[name][:, is_kind_Q] for name in pair)
            judged.setdefault(method, {})[kind] = counterfactual.lds(
                first, nll_SQ[:, is_kind_Q], *rest
            )
    return judged


def ceiling(nll_SQ: Float[np.ndarray, "S Q"], again_RQ: Float[np.ndarray, "R Q"]) -> float:
    """Returns the correlation that a prediction free of error would have.

    The root of the share of the variance over halves that is not of the order of training:
    1 - E[(x - x')^2] / 2 Var[x], with x' of the first R halves trained again; mean over queries.
    """
    noise_Q = ((nll_SQ[: len(again_RQ)] - again_RQ) ** 2).mean(axis=0) / 2
    return float(np.sqrt(max(0.0, 1 - np.mean(noise_Q / nll_SQ.var(axis=0, ddof=1)))))


def _cells(kinds: Mapping[str, Interval], sign: str = "") -> list[str]:
    return [format_interval(one, f"{sign}.2f", f"{sign}.2f") for one in kinds.values()]


def score_table(case: str, change: Callable[[Any], Any] = dict) -> str:
    """Returns the score of every method, by kind of answers."""
    judged = judge(change(read_case(case)))
    rows = [[method, *_cells(kinds)] for method, kinds in judged.items()]
    return markdown_table(["method", *_KINDS[case].values()], rows)


def less_table(case: str, change: Callable[[Any], Any] = dict) -> str:
    """Returns RASLIK's score less that of every other method."""
    judged = judge(change(read_case(case)), "raslik")
    rows = [[method, *_cells(kinds, "+")] for method, kinds in judged.items()]
    return markdown_table(["raslik less", *_KINDS[case].values()], rows)


def labels_table(case: str) -> str:
    """Returns what the scores of the rows of each label predict of the answers of the behavior."""
    found = mean_of_seeds(read_case(case))
    nll_SQ, is_target_Q = np.array(found["nll"]), np.array(found["is_target"])
    rows = []
    for label, sums in found["by_label"].items():
        sum_SQ = np.array(sums)[:, is_target_Q]
        score = counterfactual.correlations(sum_SQ, nll_SQ[:, is_target_Q]).mean()
        rows.append([label or "ordinary", f"{score:.2f}", f"{sum_SQ.std(axis=0).mean():.2f}"])
    return markdown_table(["rows", "LDS of their scores alone", "deviation of their sums"], rows)


def behaviors_table() -> str:
    """Returns the scores of SmolLM2's behaviors, their rows in a half and nats a token."""
    found = read_case("smollm2")
    lines = (_HERE / "answers.jsonl").read_text("utf-8").splitlines()
    own = [row["behavior"] for row in map(json.loads, lines) if row["split"] == "test_target"]
    target_SQ, nll_SQ = (np.array(part) for part in (found["predicted"]["labels"], found["nll"]))
    places = np.flatnonzero(found["is_target"])
    rows = []
    for name in dict.fromkeys(own):
        mine = places[[one == name for one in own]]
        count_S, level_S = target_SQ[:, mine[0]], nll_SQ[:, mine].mean(axis=1)
        scores = [
            counterfactual.correlations(np.array(predicted)[:, mine], nll_SQ[:, mine]).mean()
            for predicted in found["predicted"].values()
        ]
        rows.append(
            [
                name.replace("_", " "),
                f"{count_S.min():.0f} to {count_S.max():.0f}",
                f"{level_S.min():.2f} to {level_S.max():.2f}",
                *(f"{score:.2f}" for score in scores),
            ]
        )
    head = ["behavior", "its rows in a half", "nats a token", *found["predicted"]]
    return markdown_table(head, rows)


def halves_table() -> str:
    """Returns how far the answers' nats a token differ between halves, and the noise of training.

    The last column is the score of a prediction free of error, from halves that were trained again.
    """
    rows = []
    for case, titles in _KINDS.items():
        found = read_case(case)
        nll_SQ, more = np.array(found["nll"]), found.get("more", [])
        for kind, is_kind_Q in kinds_of(found).items():
            if kind == "all":
                continue
            own_SQ = nll_SQ[:, is_kind_Q]
            best = "-"
            if more:
                best = f"{ceiling(own_SQ, np.array(more[0])[:, is_kind_Q]):.2f}"
            spread = f"{own_SQ.std(axis=0).mean():.3f}"
            rows.append([case, titles[kind], f"{own_SQ.mean():.2f}", spread, best])
    head = ["case", "answers", "nats a token", "standard deviation over halves"]
    return markdown_table([*head, "score without error"], rows)


def validated_table() -> str:
    """Returns QLD and LDS of one traced answer of the toy, as `raslik validate` found them."""
    parts = [results.validation_table(found) for found in read_case("validate")["found"]]
    return "\n\n".join(map(render_markdown, parts))


def read_curvature(name: str = "results") -> dict[str, Any]:
    """Returns stored results of the study `curvature`: of gradients, or of other ways."""
    found: dict[str, Any] = json.loads(
        (_HERE.parent / "curvature" / f"{name}.json").read_text("utf-8")
    )
    return found


def curvature_table(*, is_whole: bool = False) -> str:
    """Returns the scores of gradients with and without a curvature, from those of `curvature`."""
    both = [(read_curvature(), _SHOWN), (read_curvature("others"), _OTHERS)]
    parts = ((found, name) for found, shown in both for name in found["lds"] if name in shown)
    if is_whole:
        parts = ((found, name) for found, _ in both for name in found["lds"])
    rows = []
    for found, name in parts:
        if name not in found["auprc"]:
            continue
        cells = []
        for part in (found, found.get("both")):
            kinds = part["lds"][name] if part else {}
            less = part["less"].get(name) if part else None
            cells += [
                format_interval(kinds[kind], ".2f", ".2f") if kinds else "-"
                for kind in ("all", "target")
            ]
            cells.append(format_interval(_negated(less["all"]), "+.2f", "+.2f") if less else "-")
        title = _OTHERS[name] if found is both[1][0] and not is_whole else name
        rows.append([title, *cells, f"{found['auprc'][name]:.3f}"])
    head = ["gradient, metric, score", "all answers", "of a behavior", "more than the default"]
    return markdown_table([*head, "24 halves: all", "of a behavior", "more, all", "AUPRC"], rows)


# The rows of the page: some of the rule's with the damping that it chose.
_SHOWN = (
    "unshifted/all, cosine",
    "unshifted/all, Fisher 0.1, cosine",
    "trained/response, product",
    "smoothed/response, product",
    "smoothed/response, Fisher 0.1, product",
)
# Those of others.json, which are of an adapter that was trained once more, and their titles.
_OTHERS = {
    "unshifted/all, cosine": "the default, second adapter",
    "BM25 with answers": "BM25, prompt and answer",
    "EK-FAC": "EK-FAC",
    "unlearned answer": "unlearned answer",
    "EK-FAC, with the default": "EK-FAC, with the default",
    "unlearned answer, with the default": "unlearned answer, with the default",
}


def _negated(one: Interval) -> Interval:
    return Interval(mean=-one["mean"], low=-one["high"], high=-one["low"])


def page_tables() -> Mapping[str, Callable[[], str]]:
    """Returns what makes the tables of the study, by name."""
    return {
        "SmolLM2, scores": lambda: score_table("smollm2"),
        "SmolLM2, RASLIK less others": lambda: less_table("smollm2"),
        "SmolLM2, behaviors": behaviors_table,
        "the toy, scores": lambda: score_table("toy"),
        "what halves change": halves_table,
        "hard negatives, 2 %": lambda: score_table("fact2", mean_of_seeds),
        "hard negatives, 2 %, one seed": lambda: score_table("fact2"),
        "hard negatives, 2 %, two trainings": lambda: repeated_table("fact2"),
        "hard negatives, 2 %, by label": lambda: labels_table("fact2"),
        "hard negatives, 2 %, RASLIK less others": lambda: less_table("fact2", mean_of_seeds),
        "hard negatives, 2 %, QLD": lambda: qld_table("qld2"),
        "hard negatives, 8 %": lambda: score_table("fact8", mean_of_seeds),
        "hard negatives, 8 %, one seed": lambda: score_table("fact8"),
        "hard negatives, 8 %, two trainings": lambda: repeated_table("fact8"),
        "hard negatives, 8 %, by label": lambda: labels_table("fact8"),
        "hard negatives, 8 %, RASLIK less others": lambda: less_table("fact8", mean_of_seeds),
        "Howdy": lambda: score_table("howdy", mean_of_seeds),
        "Howdy, one seed": lambda: score_table("howdy"),
        "Howdy, two trainings": lambda: repeated_table("howdy"),
        "Howdy, by label": lambda: labels_table("howdy"),
        "Howdy, RASLIK less others": lambda: less_table("howdy", mean_of_seeds),
        "Howdy, QLD": lambda: qld_table("howdy_qld"),
        "curvature": curvature_table,
        "curvature, all": lambda: curvature_table(is_whole=True),
        "the toy, raslik validate": validated_table,
    }
