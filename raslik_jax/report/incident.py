"""The opening of a page: the question, the model's answer then and now, and the reason.

All of it is read from a work directory. Without a traced answer the page opens with an example of
the queries.
"""

import base64
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from raslik_jax.config import config_from_json
from raslik_jax.data.examples import HELD_OUT, Example
from raslik_jax.data.words import capitalized
from raslik_jax.evaluate import judgment, reproduction, verdict
from raslik_jax.evaluate.summary import Metrics
from raslik_jax.report.names import algorithm_name, highlighted, strategy_name
from raslik_jax.report.notes import macros
from raslik_jax.report.tidy import collect_models, last_epochs
from raslik_jax.report.traced import (
    Said,
    Traced,
    doubt_sentence,
    ending_sentence,
    gone_sentence,
)
from raslik_jax.retrieve import behaviors, chance
from raslik_jax.retrieve.chance import Chance
from raslik_jax.retrieve.selectors import Cut
from raslik_jax.run import artifacts
from raslik_jax.train.objectives import OBJECTIVES

# Bytes of the files that the page holds itself, of all and of one.
_LINKED, _LINKED_FILE = 400_000, 100_000
# Rows that are shown where there are no shares of tokens, and steps of a token's color.
_CARDS, _TONES = 8, 3


class Piece(NamedTuple):
    """A token: its text, its share of the score and the step of its color from -3 to 3."""

    text: str
    share: float | None
    tone: int


class Card(NamedTuple):
    """A row behind the answer.

    `place` is its line or number in the training file, 0 if it has none. `file` names the file if
    there are several. sigma is the noise of the sketch in its score. `alike` counts the rows with
    nearly the same gradient. The pieces of the answer sum to `cosine`, the cosine with the answer
    to the prompt `query`. Without shares of tokens there are no pieces.
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
    """A file or folder of a run: its place, and a link that holds it if it is small.

    A place below the work directory is relative to it. Others are absolute.
    """

    title: str
    place: str
    link: str


class Compared(NamedTuple):
    """A row with two scores: with the bad answer and with the wished one."""

    asked: str
    said: str
    bad: float
    wished: float | None


class Incident(NamedTuple):
    """The opening of a page and the sentences behind it.

    Attributes:
      is_traced: whether an answer was traced; otherwise this is an example of the queries.
      which: sentence on the unlearned model that is shown, if there are several.
      traced: the traced answers with the results of each model.
      cards: the rows behind them, the highest score first.
      num_found: number of rows that were found, of `num_rows`.
      entry: entry of the unlearned model in metrics.json.
      ended: why unlearning ended before enough was gone, or "".
      warning: why a traced answer is weak evidence, or "".
      costs: the check of a recipe, the exact judgment and other changes.
      wished: the rows behind the wished answer, and those behind the bad one.
      chances: sentences on the chance of the scores and on the traced behaviors.
      cut: the end of the found rows among the scores.
      downloads: files and folders that the run wrote for its user.
    """

    is_traced: bool
    which: str
    traced: tuple[Traced, ...]
    cards: tuple[Card, ...]
    num_found: int
    num_rows: int
    entry: Mapping[str, Any]
    costs: tuple[str, ...]
    ended: str = ""
    warning: str = ""
    chances: tuple[str, ...] = ()
    cut: Cut | None = None
    downloads: tuple[Download, ...] = ()
    wished: tuple[tuple[Compared, ...], tuple[Compared, ...]] = ((), ())

    @property
    def outcome(self) -> tuple[str, ...]:
        """The outcome for the behavior, for a terminal."""
        return tuple(filter(None, (self.ended, *self.costs)))


def read_incident(root: pathlib.Path, metrics: Metrics) -> Incident | None:
    """Returns the traced answers of a run and the rows behind them; None without such."""
    if not metrics["methods"]:
        return None
    entry = _shown_entry(metrics)
    strategy, algorithm = entry["strategy"], entry["algorithm"]
    if not (traced := _read_traced_answers(root, strategy, algorithm)):
        return None
    rows = artifacts.TRAIN.find(root) or ()
    chances = artifacts.CHANCE.current(root, len(rows))
    cards = _cards(root, rows, strategy, chances)
    costs = [
        recipe_sentence(root, algorithm),
        verdict_sentence(entry),
        gone_sentence(traced),
        cost_sentence(metrics, strategy, algorithm),
    ]
    by_chance = chance.sentence(chances) if chances else ""
    asked = [row.id for row in artifacts.traced("finetuned").read(root)]
    apart = artifacts.BEHAVIORS.current(root, asked)
    told_chances = by_chance and f"{capitalized(by_chance)}.", apart and behaviors.sentence(apart)
    found = [artifacts.set_rows(strategy, "forget"), artifacts.measured_rows(HELD_OUT, "target")]
    return Incident(
        is_traced=True,
        which=_which_sentence(metrics, entry),
        traced=traced,
        cards=cards,
        num_found=sum(len(part.find(root) or ()) for part in found),
        num_rows=len(rows),
        entry=entry,
        ended=read_ending(root, strategy, algorithm),
        warning=doubt_sentence(traced),
        costs=tuple(filter(None, costs)),
        chances=tuple(filter(None, told_chances)),
        cut=artifacts.CUT.current(root),
        downloads=_downloads(root, strategy),
        wished=_compared(root, rows, cards),
    )


def read_outcome(root: pathlib.Path, strategy: str, algorithm: str) -> tuple[str, ...]:
    """Returns sentences on the traced answers of a run without measurements."""
    traced = _read_traced_answers(root, strategy, algorithm)
    ended = read_ending(root, strategy, algorithm)
    unknown = verdict.describe_count(verdict.Count(0, 0))
    judged = f"Judgment: {verdict.join_sentences(['unknown', unknown])}."
    checked = recipe_sentence(root, algorithm)
    return tuple(filter(None, (ended, checked, judged, gone_sentence(traced))))


def recipe_sentence(root: pathlib.Path, algorithm: str) -> str:
    """Returns whether the recipe of a retrained model is confirmed; "" if it was not checked."""
    if algorithm not in OBJECTIVES or not OBJECTIVES[algorithm].retrains:
        return ""
    own = config_from_json(artifacts.CONFIG.read(root)).unlearn[algorithm]
    found = artifacts.RECIPE.current(root) if own.check_recipe else None
    return reproduction.describe(found) if found else ""


def read_ending(root: pathlib.Path, strategy: str, algorithm: str) -> str:
    """Returns `ending_sentence` for the probes of a run."""
    return ending_sentence(
        artifacts.probes(artifacts.Variant(strategy, algorithm)).find(root) or {}
    )


def _read_traced_answers(root: pathlib.Path, strategy: str, algorithm: str) -> tuple[Traced, ...]:
    """Returns the traced answers with the results of the models; empty without a traced answer."""
    before = artifacts.traced("finetuned").current(root)
    if before is None:
        return ()
    told = {
        "before": before,
        "base": artifacts.traced("backbone").find(root),
        "now": artifacts.last_traced(root, artifacts.Variant(strategy, algorithm)),
    }
    prompts = _prompts(root)
    return tuple(
        Traced(
            prompts.get(first.id, ""),
            first.traced,
            tuple(
                Said(name, rows[n].output, rows[n].nll, rows[n].nats, rows[n].drawn)
                for name, rows in told.items()
                if rows
            ),
        )
        for n, first in enumerate(before)
    )


def example_incident(
    metrics: Metrics,
    queries: Sequence[Any],
    answers: Mapping[tuple[str, str], Mapping[str, str]],
    sets: Mapping[str, Mapping[str, Any]],
) -> Incident | None:
    """Returns a query of the behavior with a row behind it, for a run that traced no answer.

    It is the first target query with an answer, and the best row in the forget set of the strategy
    that the report is about. The arguments are fields of `facts.Facts`.
    """
    before = answers.get(("", "finetuned"), {})
    asked = [q for q in queries if q.is_target and before.get(q.example_id, "").strip()]
    if not asked or not metrics["methods"]:
        return None
    entry = _shown_entry(metrics)
    strategy, algorithm = entry["strategy"], entry["algorithm"]
    models = {"before": ("", "finetuned"), "base": ("", "backbone"), "now": (algorithm, strategy)}
    said = tuple(
        Said(name, answers[model].get(asked[0].example_id, ""), None)
        for name, model in models.items()
        if model in answers
    )
    # Scores of other strategies say nothing of what makes an answer likelier.
    forget = sets.get(strategy, {}).get("forget") if highlighted([strategy]) else None
    cards = tuple(
        Card(row["text"], row["output"], 0, row["score"], None, "", "forget", 0)
        for row in (forget.rows[:1] if forget else ())
    )
    costs = verdict_sentence(entry), cost_sentence(metrics, strategy, algorithm)
    return Incident(
        is_traced=False,
        which=_which_sentence(metrics, entry),
        traced=(Traced(asked[0].text, "", said),),
        cards=cards,
        num_found=forget.num_rows if forget else 0,
        num_rows=metrics.get("corpus", {}).get("train", 0),
        entry=entry,
        costs=tuple(filter(None, costs)),
    )


def _shown_entry(metrics: Metrics) -> Mapping[str, Any]:
    """Returns the last entry of the model that the page opens with."""
    methods = last_epochs(metrics["methods"])
    about = highlighted(entry["strategy"] for entry in methods)
    return next((e for e in methods if e["strategy"] == about), methods[0])


def _which_sentence(metrics: Metrics, entry: Mapping[str, Any]) -> str:
    """Returns a sentence on the unlearned model that a page opens with; "" if there is only one."""
    if (number := len(last_epochs(metrics["methods"]))) < 2:
        return ""
    name = f"{strategy_name(entry['strategy'])} with {algorithm_name(entry['algorithm'])}"
    return f"This is the model of {name}, one of {number} unlearned models."


def _prompts(root: pathlib.Path) -> dict[str, str]:
    """Returns the traced prompts by id."""
    return {row.example_id: asked_of(row) for row in artifacts.RETRIEVAL.find(root) or ()}


def asked_of(row: Example) -> str:
    """Returns the prompt of a row: instruction and input."""
    return f"{row.instruction}\n{row.input}".strip()


def _cards(
    root: pathlib.Path, rows: Sequence[Example], strategy: str, chances: Chance | None
) -> tuple[Card, ...]:
    """Returns the rows of the highest scores: those with known tokens, otherwise the first ones."""
    place = {row.example_id: number for number, row in enumerate(rows)}
    found = artifacts.TOKEN_SHARES.current(root)
    if not found:
        score_N = artifacts.INFLUENCE.current(root, (len(rows),))
        if score_N is None:
            return ()
        order = np.argsort(-score_N, kind="stable")[:_CARDS].tolist()
        # A row without a gradient has no effect.
        order = [n for n in order if score_N[n] > -np.inf]
        found = [{"id": rows[n].example_id, "score": float(score_N[n])} for n in order]
    sets = dict[str, str]()
    for name in ("forget", "retain"):
        chosen = artifacts.set_rows(strategy, name).find(root) or ()
        sets |= dict.fromkeys((row.example_id for row in chosen), name)
    cards, sigma_N, prompts = [], artifacts.read_sigma(root, len(rows)), _prompts(root)
    for one in found:
        number = place[one["id"]]
        row = rows[number]
        told = chance.in_words(*(part[number] for part in chances)) if chances else ""
        sigma = None if math.isnan(sigma_N[number]) else float(sigma_N[number])
        said = (row.output, row.place, one["score"], sigma, told, sets.get(one["id"], ""))
        card = Card(asked_of(row), *said, len(one.get("alike", ())), row.file)
        if "row" in one:
            card = card._replace(row=shaded(one["row"]), answer=shaded(one["answer"]))
            card = card._replace(query=prompts.get(one["query"], ""), cosine=one["cosine"])
        cards.append(card)
    return tuple(cards)


def _compared(
    root: pathlib.Path, rows: Sequence[Example], cards: Sequence[Card]
) -> tuple[tuple[Compared, ...], tuple[Compared, ...]]:
    """Returns the best rows of the bad answer and of the wished one; none without a wish."""
    found, by_id = artifacts.WISHED.find(root) or (), {row.example_id: row for row in rows}
    if not found:
        return (), ()
    bad = (Compared(card.asked, card.said, card.score, None) for card in cards)
    wished = (
        Compared(asked_of(row), row.output, one["bad"], one["score"])
        for one in found
        if (row := by_id[one["id"]])
    )
    return tuple(bad), tuple(wished)


def shaded(pieces: Sequence[Sequence[Any]]) -> tuple[Piece, ...]:
    """Returns tokens with the steps of their colors: shares in thirds of the largest, rounded."""
    most = max((abs(share) for _, share in pieces if share is not None), default=0.0) or 1.0
    return tuple(
        Piece(text, share, 0 if share is None else round(_TONES * share / most))
        for text, share in pieces
    )


def verdict_sentence(entry: Mapping[str, Any]) -> str:
    """Returns a model's verdict, its reasons and other changes; "" if it was not judged."""
    return f"Judgment: {judgment.describe(entry['judgment'])}." if "judgment" in entry else ""


def cost_sentence(metrics: Metrics, strategy: str, algorithm: str) -> str:
    """Returns a sentence on the changes for prompts without the behavior.

    It is "" if neither R nor the perplexity of held-out answers was measured.
    """
    models = {(m.strategy, m.algorithm): m for m in collect_models([metrics])}
    after, before = models[strategy, algorithm], models["finetuned", ""]
    found: str = macros().cost(metrics, before, after)
    return found


def _downloads(root: pathlib.Path, strategy: str) -> tuple[Download, ...]:
    """Returns the existing files that a run wrote for its user; a small one is in its link."""
    places = {"Rows to forget": artifacts.set_rows(strategy, "forget").path}
    places |= artifacts.EXPORTS.find(root) or {}
    room = _LINKED
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
