"""What a page opens with: what was asked, what the model said, what it says now, and why.

Read from a work directory; where no answer was traced, a run opens with one example of its queries.
"""

import base64
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from raslik_jax.base.files import check_shape, read_array, read_json, read_json_lines
from raslik_jax.base.manifests import current_file
from raslik_jax.base.messages import shown
from raslik_jax.data.examples import TEXTS
from raslik_jax.evaluate import judgment, verdict
from raslik_jax.evaluate.summary import Metrics
from raslik_jax.report.names import algorithm_name, highlighted, strategy_name
from raslik_jax.report.notes import answers_taken_against
from raslik_jax.report.records import Model, collect_models, last_epochs
from raslik_jax.report.traced import (
    Said,
    Taught,
    Traced,
    doubt_sentence,
    ending_sentence,
    gone_sentence,
    taught_of,
)
from raslik_jax.retrieve import behaviors, chance
from raslik_jax.retrieve.chance import Chance

# What `raslik unlearn` left where, by title; below the work directory or absolute.
EXPORTS = "exports.json"
# Bytes of the files that the page holds itself, of all and of one.
_LINKED, _LINKED_FILE = 400_000, 100_000
# Rows that are shown where there are no shares of tokens, and steps of a token's color.
_CARDS, _TONES = 8, 3

_TRACED_FILE = "retrieve/traced/finetuned.jsonl"
_TRACED = {"id": str, "traced": str, "nll": float, "nats": [float], "output": str}
_TRACED |= {"expected?": float, "spread?": float}
_PIECES = [list]
TOKENS = {"id": str, "score": float, "row": _PIECES, "query": str, "answer": _PIECES}
TOKENS |= {"cosine": float, "alike": [str]}
_CUT = {"num_forget": int, "middle": float, "edge": float}
TRAIN = {
    **{"id": str, "instruction?": str, "input?": str, "output": str, "place?": int},
    "place_file?": str,
    "is_target?": (bool, None),
}


class Piece(NamedTuple):
    """A token: its text, its share of the score, and the step of its color, from -3 to 3."""

    text: str
    share: float | None
    tone: int


class Card(NamedTuple):
    """A row behind the answer.

    `place` is its line or number in the training file, 0 where it has none; `file` names that file
    where there are several; sigma is the noise of
    the sketch in its score; `alike` counts the rows whose gradients are nearly the same. The pieces
    of the answer sum to `cosine`, that with the answer to the prompt `query`; without shares of
    tokens there are no pieces.
    """

    asked: str
    said: str
    place: int
    score: float
    sigma: float | None
    chance: str
    set_name: str
    alike: int
    file: str = ""
    row: tuple[Piece, ...] = ()
    answer: tuple[Piece, ...] = ()
    query: str = ""
    cosine: float = 0.0


class Download(NamedTuple):
    """What a run leaves: a file or folder, where it is, and a link that holds it if it is small.

    Below the work directory the place is told as it stands there, elsewhere in full.
    """

    title: str
    place: str
    link: str


class Cut(NamedTuple):
    """What `figures.draw_cut` shows."""

    score_N: Float[np.ndarray, " N"]
    num_forget: int
    middle: float
    edge: float


class Incident(NamedTuple):
    """What a page opens with; `is_traced` where an answer was traced, else it is an example.

    `which` says which unlearned model is shown, where there are several. The outcome is what became
    of it, `points` what else there is to say: sentences.
    """

    is_traced: bool
    which: str
    traced: tuple[Traced, ...]
    cards: tuple[Card, ...]
    outcome: tuple[str, ...]
    points: tuple[str, ...]
    warning: str
    cut: Cut | None
    downloads: tuple[Download, ...]


def read_incident(root: pathlib.Path, metrics: Metrics) -> Incident | None:
    """Returns the traced answers of a run and the rows behind them; None where none was traced."""
    if not metrics["methods"]:
        return None
    strategy, algorithm = _shown_method(metrics)
    if not (traced := _read_traced_answers(root, strategy, algorithm)):
        return None
    rows = _rows(root / "corpus" / "train.jsonl")
    chances = chance.read_chance(root, len(rows))
    cards = _cards(root, rows, strategy, chances)
    ended = ending_sentence(metrics.get("probes", ()), strategy, algorithm)
    outcome = [
        ended,
        verdict_sentence(metrics, strategy, algorithm),
        gone_sentence(traced),
        cost_sentence(metrics, strategy, algorithm),
    ]
    points = list[str]()
    if chances and (told_chance := chance.sentence(chances)):
        points.append(f"{told_chance[:1].upper()}{told_chance[1:]}.")
    asked = [row["id"] for row in read_traced(root / _TRACED_FILE)]
    apart = behaviors.read_behaviors(root, asked)
    points.append(behaviors.sentence(apart) if apart else "")
    return Incident(
        is_traced=True,
        which=_which_sentence(metrics),
        traced=traced,
        cards=cards,
        outcome=tuple(filter(None, outcome)),
        points=tuple(filter(None, points)),
        warning=doubt_sentence(traced),
        cut=read_cut(root, len(rows)),
        downloads=_downloads(root, strategy),
    )


def read_outcome(root: pathlib.Path, strategy: str, algorithm: str) -> tuple[str, ...]:
    """Returns what became of the traced answers of a run that measured nothing, in sentences."""
    traced = _read_traced_answers(root, strategy, algorithm)
    ended = read_ending(root, strategy, algorithm)
    unknown = verdict.describe_count(verdict.Count(0, 0))
    judged = f"Judgment: unknown: {unknown}."
    return tuple(filter(None, (ended, judged, gone_sentence(traced))))


def read_ending(root: pathlib.Path, strategy: str, algorithm: str) -> str:
    """Returns `ending_sentence` of what a run's probes found."""
    path = root / "unlearn" / f"{strategy}-{algorithm}" / "probes.json"
    names = {"strategy": strategy, "algorithm": algorithm}
    probes = [names | read_json(path, dict)] if path.is_file() else []
    return ending_sentence(probes, strategy, algorithm)


def _read_traced_answers(root: pathlib.Path, strategy: str, algorithm: str) -> tuple[Traced, ...]:
    """Returns the traced answers with what the models make of them; none where none was traced."""
    path = current_file(root, _TRACED_FILE)
    if path is None:
        return ()
    after = _last_epoch(root / "generate" / f"traced-{strategy}-{algorithm}")
    paths = {"before": path, "base": path.parent / "backbone.jsonl", "now": after}
    told = {name: read_traced(p) for name, p in paths.items() if p and p.is_file()}
    prompts = _prompts(root)
    return tuple(
        Traced(
            prompts.get(first["id"], ""),
            first["traced"],
            tuple(
                Said(
                    name,
                    rows[n]["output"],
                    rows[n]["nll"],
                    tuple(rows[n]["nats"]),
                    drawn_of(rows[n]),
                )
                for name, rows in told.items()
            ),
        )
        for n, first in enumerate(told["before"])
    )


def example_incident(
    metrics: Metrics,
    queries: Sequence[Any],
    answers: Mapping[tuple[str, str], Mapping[str, str]],
    sets: Mapping[str, Mapping[str, Any]],
) -> Incident | None:
    """Returns one query of the behavior with the row behind it, of a run that traced no answer.

    The query is the first target query that the model answers at all, the row the best of the
    forget set of the strategy that the run is about. The arguments are of `runs.StoredRun`.
    """
    before = answers.get(("", "finetuned"), {})
    asked = [q for q in queries if q.is_target and before.get(q.example_id, "").strip()]
    if not asked or not metrics["methods"]:
        return None
    strategy, algorithm = _shown_method(metrics)
    models = {"before": ("", "finetuned"), "base": ("", "backbone"), "now": (algorithm, strategy)}
    said = tuple(
        Said(name, answers[model].get(asked[0].example_id, ""), None)
        for name, model in models.items()
        if model in answers
    )
    # Scores of other strategies say nothing of what pulls toward an answer.
    forget = sets.get(strategy, {}).get("forget") if highlighted([strategy]) else None
    cards = tuple(
        Card(row["text"], row["output"], 0, row["score"], None, "", "forget", 0)
        for row in (forget.rows[:1] if forget else ())
    )
    judged = verdict_sentence(metrics, strategy, algorithm)
    traced = (Traced(asked[0].text, "", said),)
    outcome = tuple(filter(None, (judged, cost_sentence(metrics, strategy, algorithm))))
    which = _which_sentence(metrics)
    return Incident(False, which, traced, cards, outcome, (), "", None, ())


def _shown_method(metrics: Metrics) -> tuple[str, str]:
    """Returns strategy and algorithm that the page opens with: of the strategy it is about."""
    methods = last_epochs(metrics["methods"])
    about = highlighted(entry["strategy"] for entry in methods)
    first = next((e for e in methods if e["strategy"] == about), methods[0])
    return first["strategy"], first["algorithm"]


def _which_sentence(metrics: Metrics) -> str:
    """Returns which unlearned model a page opens with; "" where there is one."""
    strategy, algorithm = _shown_method(metrics)
    if (number := len(last_epochs(metrics["methods"]))) < 2:
        return ""
    name = f"{strategy_name(strategy)} with {algorithm_name(algorithm)}"
    return f"Of the {number} unlearned models this shows the one of {name}."


def _last_epoch(folder: pathlib.Path) -> pathlib.Path | None:
    paths = sorted(folder.glob("epoch-*.jsonl"), key=lambda path: (len(path.name), path.name))
    return paths[-1] if paths else None


def read_rows(path: pathlib.Path, shape: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of a file of `examples.write_examples`, none where it is missing.

    Those of other formats than Alpaca's get instruction, input and output of their `row_texts`.
    """
    if not path.is_file():
        return []
    rows = [
        row | dict(zip(TEXTS, row["row_texts"], strict=True)) if "row_texts" in row else row
        for row in read_json_lines(path, {"row_texts?": [str]})
    ]
    for number, row in enumerate(rows, start=1):
        check_shape(row, shape, f"{shown(str(path), 160)}:{number}")
    return rows


def _rows(path: pathlib.Path) -> list[dict[str, Any]]:
    return read_rows(path, TRAIN)


def read_traced(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns what `generate.write_traced` wrote of a model, a row for each traced answer.

    Its keys: id, traced, nats (of each token of the traced answer), nll (their mean) and output
    (the model's own answer); of the model that is traced also expected and spread, which are of
    `likelihood.Expected`.
    """
    return read_json_lines(path, _TRACED)


def drawn_of(row: Mapping[str, Any]) -> tuple[float, float] | None:
    """Returns mean and spread of a row of `read_traced`, None where it has none."""
    return (row["expected"], row["spread"]) if {"expected", "spread"} <= row.keys() else None


def read_taught(folder: pathlib.Path) -> Taught:
    """Returns what the likelihoods of the traced answers of a folder say of fine-tuning."""
    rows, beside = read_traced(folder / "finetuned.jsonl"), folder / "backbone.jsonl"
    bases = [row["nll"] for row in read_traced(beside)] if beside.is_file() else [None] * len(rows)
    pairs = zip(rows, bases, strict=True)
    return taught_of([(row["nll"], base, drawn_of(row)) for row, base in pairs])


def _prompts(root: pathlib.Path) -> dict[str, str]:
    """Returns the traced prompts by id."""
    return {row["id"]: asked_of(row) for row in _rows(root / "corpus" / "retrieval.jsonl")}


def asked_of(row: Mapping[str, Any]) -> str:
    """Returns the prompt of a row: instruction and input."""
    return f"{row.get('instruction', '')}\n{row.get('input', '')}".strip()


def _cards(
    root: pathlib.Path, rows: Sequence[Mapping[str, Any]], strategy: str, chances: Chance | None
) -> tuple[Card, ...]:
    """Returns the rows of the highest scores: those whose tokens are known, else the first ones."""
    place = {row["id"]: number for number, row in enumerate(rows)}
    path = current_file(root, "retrieve/tokens/tokens.json")
    found = read_json(path, [TOKENS]) if path else []
    if not found:
        scores = current_file(root, "retrieve/influence/influence.npy")
        if scores is None:
            return ()
        score_N = read_array(scores, (len(rows),))
        order = np.argsort(-score_N, kind="stable")[:_CARDS].tolist()
        # A row without a gradient pulls nowhere.
        order = [n for n in order if score_N[n] > -np.inf]
        found = [{"id": rows[n]["id"], "score": float(score_N[n])} for n in order]
    sets = dict[str, str]()
    for name in ("forget", "retain"):
        chosen = _rows(root / "retrieve" / strategy / f"{name}.jsonl")
        sets |= dict.fromkeys((row["id"] for row in chosen), name)
    cards, sigma_N, prompts = [], chance.read_sigma(root, len(rows)), _prompts(root)
    for one in found:
        number = place[one["id"]]
        row = rows[number]
        told = chance.in_words(*(part[number] for part in chances)) if chances else ""
        sigma = None if math.isnan(sigma_N[number]) else float(sigma_N[number])
        parts = (row["output"], row.get("place", 0), one["score"], sigma, told)
        card = Card(asked_of(row), *parts, sets.get(one["id"], ""), len(one.get("alike", ())))
        card = card._replace(file=row.get("place_file", ""))
        if "row" in one:
            card = card._replace(row=shaded(one["row"]), answer=shaded(one["answer"]))
            card = card._replace(query=prompts.get(one["query"], ""), cosine=one["cosine"])
        cards.append(card)
    return tuple(cards)


def shaded(pieces: Sequence[Sequence[Any]]) -> tuple[Piece, ...]:
    """Returns tokens with the steps of their colors: shares in thirds of the largest, rounded."""
    most = max((abs(share) for _, share in pieces if share is not None), default=0.0) or 1.0
    return tuple(
        Piece(text, share, 0 if share is None else round(_TONES * share / most))
        for text, share in pieces
    )


def verdict_sentence(metrics: Metrics, strategy: str, algorithm: str) -> str:
    """Returns what became of a model, why, and what else changed; "" where it was not judged."""
    entry = next(
        one
        for one in last_epochs(metrics["methods"])
        if (one["strategy"], one["algorithm"]) == (strategy, algorithm)
    )
    return f"Judgment: {judgment.describe(entry['judgment'])}." if "judgment" in entry else ""


def cost_sentence(metrics: Metrics, strategy: str, algorithm: str) -> str:
    """Returns what unlearning cost on prompts without the behavior, in one sentence.

    "" where neither R nor the perplexity of held-out answers was measured.
    """
    models = {(m.strategy, m.algorithm): m for m in collect_models([metrics])}
    after, before = models[strategy, algorithm], models["finetuned", ""]
    parts = []
    if "retain" in after.values:
        wording = f"{100 * after.joined('retain')['mean']:.1f} %"
        if metrics.get("reference", "finetuned") == "finetuned":
            parts.append(f"answers to other prompts keep {wording} of their wording")
        else:
            was = f"{100 * before.joined('retain')['mean']:.1f} %"
            text = f"answers to other prompts share {wording} of the wording of "
            parts.append(f"{text}{answers_taken_against(metrics)} (before unlearning {was})")
    if rise := _rise(before, after):
        parts.append(rise)
    text = f"What it cost: {' and '.join(parts)}." if parts else ""
    return text


def _rise(before: Model, after: Model) -> str:
    for name, title in (("held-out", "held-out answers"), ("retain", "other training rows")):
        values = [model.value(f"perplexity/{name}") for model in (before, after)]
        if None not in values:
            return f"the perplexity of {title} goes from {values[0]:.3g} to {values[1]:.3g}"
    return ""


def read_cut(root: pathlib.Path, number: int) -> Cut | None:
    """Returns where the rule cut the scores of so many rows; None where it did not."""
    names = "retrieve/sizes/cut.json", "retrieve/influence/influence.npy"
    cut_path, scores = (current_file(root, name) for name in names)
    if not cut_path or not scores:
        return None
    cut = read_json(cut_path, _CUT)
    return Cut(read_array(scores, (number,)), *(cut[name] for name in _CUT))


def _downloads(root: pathlib.Path, strategy: str) -> tuple[Download, ...]:
    """Returns what a run leaves for its user that is there now; what is small is in its link."""
    places = {"Rows to forget": f"retrieve/{strategy}/forget.jsonl"}
    path, room = root / EXPORTS, _LINKED
    places |= read_json(path, {str: str}) if path.is_file() else {}
    found = list[Download]()
    for title, place in places.items():
        path, link = root / place, ""
        if path.is_file() and path.stat().st_size <= min(room, _LINKED_FILE):
            # Of a kind that every browser saves and none shows.
            held = base64.b64encode(path.read_bytes()).decode()
            link, room = f"data:application/octet-stream;base64,{held}", room - len(held)
        if path.exists():
            found.append(Download(title, place, link))
    return tuple(found)
