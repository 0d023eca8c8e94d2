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

from raslik_jax.data.examples import HELD_OUT, Example
from raslik_jax.data.words import capitalized
from raslik_jax.evaluate import judgment, reproduction, stopping, verdict
from raslik_jax.evaluate.summary import Metrics
from raslik_jax.evaluate.taught import doubt
from raslik_jax.report.names import algorithm_name, highlighted, strategy_name
from raslik_jax.report.notes import macros
from raslik_jax.report.rows import read_sets
from raslik_jax.report.tidy import collect_models, last_epochs
from raslik_jax.retrieve import behaviors, chance
from raslik_jax.retrieve.chance import Chance
from raslik_jax.retrieve.selectors import Cut
from raslik_jax.run import artifacts
from raslik_jax.run.artifacts import TracedAnswer
from raslik_jax.run.manifests import read_manifest
from raslik_jax.train.objectives import OBJECTIVES

# Bytes of the files that the page holds itself, of all and of one.
_LINKED, _LINKED_FILE = 400_000, 100_000
# Rows that are shown where there are no shares of tokens, and steps of a token's color.
_CARDS, _TONES = 8, 3
# A token: its text, its share of the score and the step of its color from -3 to 3.
Piece = tuple[str, float | None, int]
# The results for each traced answer by model: "before" and "now", and "base" if there is one.
Told = Mapping[str, Sequence[TracedAnswer]]


class Card(NamedTuple):
    """A row behind the answer.

    sigma is the noise of the sketch in its score. `alike` counts the rows with nearly the same
    gradient. `tokens` are the pieces of the row. Those of the answer sum to `cosine`, the cosine
    with the answer to the prompt `query`. Without shares of tokens there are no pieces.
    """

    row: Example
    score: float
    sigma: float | None = None
    chance: str = ""
    set_name: str = ""
    alike: int = 0
    tokens: tuple[Piece, ...] = ()
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


class Wished(NamedTuple):
    """A row behind the wished answer: its score, and that with the bad answer."""

    row: Example
    score: float
    bad: float


class Traced(NamedTuple):
    """A traced answer: the prompt, the answer, and what the models say: before, base and now."""

    asked: str
    answer: str
    said: Mapping[str, str]


class Incident(NamedTuple):
    """The opening of a page and the sentences behind it.

    Attributes:
      is_traced: whether an answer was traced; otherwise this is an example of the queries.
      which: sentence on the unlearned model that is shown, if there are several.
      traced: the traced answers with those of each model.
      cards: the rows behind them, the highest score first.
      num_found: number of rows that were found, of `num_rows`.
      entry: entry of the unlearned model in metrics.json.
      ended: why unlearning ended before enough was gone, or "".
      warning: why a traced answer is weak evidence, or "".
      costs: the check of a recipe, the exact judgment and other changes.
      wished: the rows behind the wished answer.
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
    wished: tuple[Wished, ...] = ()


def read_incident(root: pathlib.Path, metrics: Metrics) -> Incident | None:
    """Returns the traced answers of a run and the rows behind them; None without such."""
    if not metrics["methods"]:
        return None
    entry = _shown_entry(metrics)
    strategy, algorithm = entry["strategy"], entry["algorithm"]
    if not (told := _read_told(root, strategy, algorithm)):
        return None
    rows = artifacts.TRAIN.find(root) or ()
    chances = artifacts.CHANCE.current(root, len(rows))
    prompts = {row.example_id: asked_of(row) for row in artifacts.RETRIEVAL.find(root) or ()}
    by_chance = chance.sentence(chances) if chances else ""
    apart = artifacts.BEHAVIORS.current(root, [row.id for row in told["before"]])
    told_chances = by_chance and f"{capitalized(by_chance)}.", apart and behaviors.sentence(apart)
    found = [*read_sets(root, strategy).values()]
    by_id, of_run = {row.example_id: row for row in rows}, metrics["settings"].get("retrieve", {})
    how: Any = {"settings": metrics["settings"]}  # not those of a later command
    wished = (artifacts.WISHED.current(root, **how) if of_run.get("wished") else None) or ()
    return Incident(
        is_traced=True,
        which=_which_sentence(metrics, entry),
        traced=tuple(
            Traced(
                prompts.get(first.id, ""),
                first.traced,
                {model: answers[n].output for model, answers in told.items()},
            )
            for n, first in enumerate(told["before"])
        ),
        cards=_cards(root, rows, strategy, chances, prompts),
        num_found=found.count("forget") + found.count(f"{HELD_OUT} target"),
        num_rows=len(rows),
        entry=entry,
        ended=read_ending(root, strategy, algorithm),
        warning=doubt_sentence(told),
        costs=_costs(root, told, entry, metrics),
        chances=tuple(filter(None, told_chances)),
        cut=artifacts.CUT.current(root),
        downloads=_downloads(root, strategy, algorithm),
        wished=tuple(Wished(by_id[one["id"]], one["score"], one["bad"]) for one in wished),
    )


def read_outcome(
    root: pathlib.Path, strategy: str, algorithm: str, metrics: Metrics | None
) -> tuple[str, ...]:
    """Returns sentences on the outcome for the behavior; without metrics it is unknown."""
    entry: Mapping[str, Any] = {"strategy": strategy, "algorithm": algorithm}
    for one in last_epochs(metrics["methods"]) if metrics else ():
        entry = one if entry.items() <= one.items() else entry
    told, ended = _read_told(root, strategy, algorithm), read_ending(root, strategy, algorithm)
    return tuple(filter(None, (ended, *_costs(root, told, entry, metrics))))


def _costs(
    root: pathlib.Path, told: Told, entry: Mapping[str, Any], metrics: Metrics | None
) -> tuple[str, ...]:
    """Returns the check of a recipe, the judgment, the traced answers and other changes."""
    unknown = verdict.describe_count(verdict.Count(0, 0))
    judged, cost = f"Judgment: {verdict.join_sentences(['unknown', unknown])}.", ""
    if metrics:
        judged = verdict_sentence(entry)
        cost = cost_sentence(metrics, entry["strategy"], entry["algorithm"])
    checked = recipe_sentence(root, entry["algorithm"], metrics)
    return tuple(filter(None, (checked, judged, gone_sentence(told), cost)))


def recipe_sentence(root: pathlib.Path, algorithm: str, metrics: Metrics | None) -> str:
    """Returns whether the recipe of a retrained model is confirmed; "" if it was not checked.

    The settings are those of the measurement. A later trace leaves the model as it is.
    """
    if algorithm not in OBJECTIVES or not OBJECTIVES[algorithm].retrains:
        return ""
    settings = metrics["settings"] if metrics else artifacts.CONFIG.read(root)
    own = settings["unlearn"].get(algorithm, {})
    found = artifacts.RECIPE.current(root, settings=settings) if own.get("check_recipe") else None
    return reproduction.describe(found) if found else ""


def read_ending(root: pathlib.Path, strategy: str, algorithm: str) -> str:
    """Returns `ending_sentence` for the probes of a run."""
    return ending_sentence(
        artifacts.probes(artifacts.Variant(strategy, algorithm)).find(root) or {}
    )


def _read_told(root: pathlib.Path, strategy: str, algorithm: str) -> Told:
    """Returns the results of the models for the traced answers; empty without a traced answer."""
    before = artifacts.traced("finetuned").current(root)
    if before is None:
        return {}
    told = {
        "before": before,
        "base": artifacts.traced("backbone").find(root),
        "now": artifacts.last_traced(root, artifacts.Variant(strategy, algorithm)),
    }
    return {model: rows for model, rows in told.items() if rows}


def example_incident(
    metrics: Metrics,
    queries: Sequence[Example],
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
    said = {
        name: answers[model].get(asked[0].example_id, "")
        for name, model in models.items()
        if model in answers
    }
    # Scores of other strategies say nothing of what makes an answer likelier.
    forget = sets.get(strategy, {}).get("forget") if highlighted([strategy]) else None
    cards = tuple(
        Card(row._replace(place=0), score, set_name="forget")
        for row, score in (forget.rows[:1] if forget else ())
    )
    costs = verdict_sentence(entry), cost_sentence(metrics, strategy, algorithm)
    return Incident(
        is_traced=False,
        which=_which_sentence(metrics, entry),
        traced=(Traced(asked_of(asked[0]), "", said),),
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
    """Returns a sentence on the new model that a page opens with; "" if there is only one."""
    if (number := len(last_epochs(metrics["methods"]))) < 2:
        return ""
    name = f"{strategy_name(entry['strategy'])} with {algorithm_name(entry['algorithm'])}"
    return f"This is the model of {name}, one of {number} new models."


def asked_of(row: Example) -> str:
    """Returns the prompt of a row: instruction and input."""
    return f"{row.instruction}\n{row.input}".strip()


def _cards(
    root: pathlib.Path,
    rows: Sequence[Example],
    strategy: str,
    chances: Chance | None,
    prompts: Mapping[str, str],
) -> tuple[Card, ...]:
    """Returns the rows of the highest scores: those with known tokens, otherwise the first ones."""
    place = {row.example_id: number for number, row in enumerate(rows)}
    found = artifacts.TOKEN_SHARES.current(root)
    if not found:
        score_N = artifacts.INFLUENCE.current(root, (len(rows),))
        if score_N is None:
            return ()
        order = np.argsort(-score_N, kind="stable")[:_CARDS].tolist()
        found = [{"id": rows[n].example_id, "score": float(score_N[n])} for n in order]
    cards, sigma_N, sets = [], artifacts.read_sigma(root, len(rows)), read_sets(root, strategy)
    for one in (one for one in found if one["score"] > 0):  # others make the answer less likely
        number = place[one["id"]]
        row = rows[number]
        told = chance.in_words(*(part[number] for part in chances)) if chances else ""
        sigma = None if math.isnan(sigma_N[number]) else float(sigma_N[number])
        alike = len(one.get("alike", ()))
        card = Card(row, one["score"], sigma, told, sets.get(one["id"], ""), alike)
        if "row" in one:
            card = card._replace(tokens=shaded(one["row"]), answer=shaded(one["answer"]))
            card = card._replace(query=prompts.get(one["query"], ""), cosine=one["cosine"])
        cards.append(card)
    return tuple(cards)


def shaded(pieces: Sequence[Sequence[Any]]) -> tuple[Piece, ...]:
    """Returns tokens with the steps of their colors: shares in thirds of the largest, rounded."""
    most = max((abs(share) for _, share in pieces if share is not None), default=0.0) or 1.0
    return tuple(
        (text, share, 0 if share is None else round(_TONES * share / most))
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


def key_of(root: pathlib.Path, strategy: str, algorithm: str) -> str:
    """Returns the key of the settings and inputs of an unlearned model; "" if there is none."""
    made = read_manifest(root / f"unlearn/{strategy}-{algorithm}", any_version=True)
    return made["key"] if made else ""


def _downloads(root: pathlib.Path, strategy: str, algorithm: str) -> tuple[Download, ...]:
    """Returns the existing files that a run wrote for its user; a small one is in its link."""
    places = {"Rows to forget": artifacts.set_rows(strategy, "forget").path}
    exports, key = artifacts.EXPORTS.find(root) or {}, key_of(root, strategy, algorithm)
    if key and exports.pop("", "") == key:  # else of an earlier model
        places |= exports
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


def gone_sentence(told: Told) -> str:
    """Returns the mean likelihood of the traced answers before and now, and how many are gone.

    They are gone by the rule that ends unlearning (`verdict.Goal`). It is "" without a model after
    unlearning.
    """
    if "now" not in told:
        return ""
    levels = {model: float(np.mean([row.nll for row in rows])) for model, rows in told.items()}
    found = _progress(told) if "base" in told else None
    text: str = macros().gone(levels, found, len(told["before"]))
    return text


def ending_sentence(found: Mapping[str, Any]) -> str:
    """Returns a sentence if unlearning ended before enough was gone, with the reason; otherwise "".

    It also covers the case that no probe ended it, without --unlearn.probe.stop. `found` is the
    content of `artifacts.probes`.
    """
    if found.get("end", stopping.DONE) == stopping.DONE:
        return ""
    gone = next(probe["gone"] for probe in found["probes"] if probe["step"] == found["kept"])
    if verdict.is_enough(gone):  # and no second probe in a row
        return ""
    return (
        f"Not forgotten: unlearning ended because {stopping.SAID[found['end']]}. The model after "
        f"step {found['kept']} is kept ({verdict.describe_progress(gone)}). Expect the behavior "
        "in the same or in other words."
    )


def doubt_sentence(told: Told) -> str:
    """Returns a warning with numbers if a traced answer is weak evidence; otherwise ""."""
    bases: list[float | None] = [row.nll for row in told.get("base", ())]
    bases = bases or [None] * len(told["before"])
    for number, (row, base) in enumerate(zip(told["before"], bases, strict=True), start=1):
        if why := doubt(row.nll, base, row.drawn):
            which = "the traced answer" if len(bases) == 1 else f"traced answer {number}"
            under_base = "" if base is None else f", {base:.2f} under the base"
            level = f"{row.nll:.2f} nats a token under the model{under_base}"
            return f"Doubt about {which} ({level}): {why}."
    return ""


def _progress(told: Told) -> verdict.Progress:
    """Returns how many traced answers are gone, without those that are as likely under the base.

    Without the nats of its tokens an answer counts as one token.
    """
    found = []
    for rows in zip(*(told[model] for model in ("before", "base", "now")), strict=True):
        before, base, now = (np.array([row.nats or (row.nll,)], float) for row in rows)
        goal = verdict.make_goal(before, base, np.array([before.shape[1]]), forget_rise=1.0)
        if goal.is_natural:
            found.append(goal.progress(now))
    return verdict.Progress(
        way=sum(one["way"] for one in found) / max(len(found), 1),
        gone=sum(one["gone"] for one in found),
        of=len(found),
    )
