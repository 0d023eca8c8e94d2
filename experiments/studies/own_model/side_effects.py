"""Other changes: general text and general knowledge.

Perplexity of three texts and forty questions with four answers each, written for this project
(`general.json`). The set is small and the same for every model and run. The answer to a
question is the one that is likeliest a token.
"""

import json
import pathlib
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from raslik_jax.data.contents import Passage
from raslik_jax.data.examples import Example, make_example
from raslik_jax.evaluate import perplexity, rates
from raslik_jax.evaluate.metrics import Column
from raslik_jax.evaluate.robustness import ROBUSTNESS
from raslik_jax.evaluate.robustness.record import Compared, Cost, RobustnessMeasure

QUESTIONS = "questions"
_GENERAL = json.loads(pathlib.Path(__file__).with_name("general.json").read_text("utf-8"))
COLUMNS = {
    "perplexity": Column("Perplexity", ".2f", ".2f"),
    "right": Column("Answered\nright", ".2f", ".2f"),
    "asked": Column("Of", "d"),
}


def texts() -> dict[str, tuple[Example, ...]]:
    """Returns the paragraphs of each of three texts as rows that are learned whole."""
    return {
        name: tuple(
            make_example("", "", text)._replace(content=Passage("", text)) for text in paragraphs
        )
        for name, paragraphs in _GENERAL["texts"].items()
    }


def questions() -> tuple[tuple[Example, ...], ...]:
    """Returns the questions, each as a row for every answer; the right one first."""
    return tuple(
        tuple(make_example(one["question"], "", text) for text in (one["right"], *one["wrong"]))
        for one in _GENERAL["questions"]
    )


def answered_right(
    nll_N: Float[np.ndarray, " N"], tokens_N: Int[np.ndarray, " N"], *, options: int
) -> Bool[np.ndarray, " Q"]:
    """Returns of each question whether its first option is the likeliest a token.

    A tie is not right; a question with an option of no tokens is left out.
    """
    nll_QO, tokens_QO = nll_N.reshape(-1, options), tokens_N.reshape(-1, options)
    is_right_Q = np.all(nll_QO[:, :1] < nll_QO[:, 1:], axis=1)
    return is_right_Q[np.all(tokens_QO > 0, axis=1)]


def measure(bench: Any, model: Any, settings: Any) -> list[dict[str, Any]]:
    """Returns perplexity of each text and the share of questions that are answered right."""
    groups = {**texts(), QUESTIONS: tuple(row for rows in questions() for row in rows)}
    workspace, rows = bench.workspace, [row for rows in groups.values() for row in rows]
    encoded = workspace.encode(rows, "general texts and questions")
    whole = workspace.likelihood_of(bench.fresh(model), encoded)
    ends = np.cumsum([len(rows) for rows in groups.values()])[:-1]
    parts = zip(*(np.split(part, ends) for part in whole), strict=True)
    found: list[dict[str, Any]] = []
    for name, (nll_N, tokens_N) in zip(groups, parts, strict=True):
        if name == QUESTIONS:
            right_Q = answered_right(nll_N, tokens_N, options=len(questions()[0]))
            right = None
            if len(right_Q):
                right = rates.bootstrap(right_Q.astype(np.float64), **bench.bootstrap)
            found.append(_entry(name, right=right, asked=len(right_Q)))
            continue
        records = [
            perplexity.AnswerRecord(id="", nll=float(nll), tokens=int(tokens))
            for nll, tokens in zip(nll_N, tokens_N, strict=True)
        ]
        found.append(_entry(name, perplexity=perplexity.perplexity(records, **bench.bootstrap)))
    return found


def _entry(condition: str, **values: Any) -> dict[str, Any]:
    return {"condition": condition, **dict.fromkeys(COLUMNS), **values}


def tell(compared: Compared) -> str:
    """Returns perplexities and right answers next to those of the models before."""
    by_name = {
        name: {entry["condition"]: entry for entry in part} for name, part in compared.items()
    }
    now = by_name["now"]

    def beside(condition: str, key: str, spec: str) -> str:
        titles = {"finetuned": "before unlearning", "backbone": "in the base"}
        values = {
            title: by_name[name][condition][key]
            for name, title in titles.items()
            if name in by_name
        }
        parts = (f"{title} {value['mean']:{spec}}" for title, value in values.items())
        return f" ({', '.join(parts)})"

    parts = [
        f"{name} {entry['perplexity']['mean']:.4g}{beside(name, 'perplexity', '.4g')}"
        for name, entry in now.items()
        if entry["perplexity"]
    ]
    text = f"Perplexity: {', '.join(parts)}."
    if asked := now[QUESTIONS]["asked"]:
        text += f" Of {asked} questions with four answers, a share of "
        text += f"{now[QUESTIONS]['right']['mean']:.2f} is answered right"
        text += f"{beside(QUESTIONS, 'right', '.2f')}; 0.25 is a guess."
    return text


SIDE_EFFECTS = RobustnessMeasure(
    title="What else changed",
    measure=measure,
    tell=tell,
    columns=COLUMNS,
    note="Three short texts and forty easy questions that were written for this test. They show "
    "damage and not ability.",
    cost=lambda own: Cost(1),
)


def register() -> None:
    """Adds the test to the package's."""
    ROBUSTNESS["side_effects"] = SIDE_EFFECTS
