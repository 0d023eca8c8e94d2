"""The files of a work directory: their places, their writers and their readers.

The stage that makes a file writes it through its record here. Every other stage, command and report
reads it through the same record. Nothing here loads jax.
"""

import errno
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
from jaxtyping import Float

from raslik_jax.base import files
from raslik_jax.base.files import Shape, read_array, read_json, read_json_lines, write_json
from raslik_jax.base.messages import shown
from raslik_jax.base.settings import flat
from raslik_jax.data.examples import HELD_OUT, Example, write_examples
from raslik_jax.data.read.formats import read_written
from raslik_jax.data.tokens import encoding, tokenization
from raslik_jax.evaluate.metrics import METRICS as RECORDS
from raslik_jax.evaluate.summary import Metrics
from raslik_jax.retrieve.behaviors import Behaviors
from raslik_jax.retrieve.chance import Chance
from raslik_jax.retrieve.selectors import Cut
from raslik_jax.run.manifests import check_finished, current_file, read_manifest

Content = TypeVar("Content")


class Artifact(NamedTuple, Generic[Content]):
    """A file or folder that a unit writes.

    Attributes:
      unit: the unit's folder below the work directory; "" for a file of no unit.
      file: its path in that folder.
      load: function that reads it from a path; further arguments are values to compare with.
      save: function that writes it to a path.
    """

    unit: str
    file: str
    load: Callable[..., Content]
    save: Callable[..., object]

    @property
    def path(self) -> str:
        """Its path below the work directory."""
        return f"{self.unit}/{self.file}".lstrip("/")

    def of(self, *names: object) -> "Artifact[Content]":
        """Returns the file of these names, which its unit and its path have in braces."""
        return self._replace(unit=self.unit.format(*names), file=self.file.format(*names))

    def place(self, root: pathlib.Path) -> pathlib.Path:
        """Returns where it is in a work directory."""
        return root / self.unit / self.file

    def is_there(self, root: pathlib.Path) -> bool:
        """Returns whether a work directory has it."""
        return self.place(root).exists()

    def read(self, root: pathlib.Path, *compared: Any) -> Content:
        """Returns its content in a work directory."""
        return self.load(self.place(root), *compared)

    def read_in(self, folder: pathlib.Path, *compared: Any) -> Content:
        """Returns its content in the folder of its unit, which may be unfinished."""
        return self.load(folder / self.file, *compared)

    def find(self, root: pathlib.Path, *compared: Any) -> Content | None:
        """Returns its content; None if it is missing."""
        return self.read(root, *compared) if self.is_there(root) else None

    def current(
        self, root: pathlib.Path, *compared: Any, settings: Mapping[str, Any] | None = None
    ) -> Content | None:
        """Returns its content; None if it is missing, of an earlier result or other `settings`."""
        path, own = current_file(root, self.path), flat(settings or {})
        made = (read_manifest(root / self.unit) or {}).get("settings", {}) if own else {}
        is_other = path is None or any(own.get(name, v) != v for name, v in made.items())
        return None if path is None or is_other else self.load(path, *compared)

    def write(self, folder: pathlib.Path, content: Any, **more: Any) -> Any:
        """Writes its content into the folder in which its unit is made; returns as `save` does."""
        return self.save(folder / self.file, content, **more)


def _load_rows(path: pathlib.Path) -> tuple[Example, ...]:
    """Returns the rows of a file of `write_examples`; there may be none."""
    return read_written(path) if path.stat().st_size else ()


def _save_array(path: pathlib.Path, array: np.ndarray) -> None:
    try:
        np.save(path, array, allow_pickle=False)
    except OSError as error:
        number = error.errno or errno.ENOSPC  # NumPy leaves it out
        raise OSError(number, os.strerror(number), str(path)) from error


def _save_lines(path: pathlib.Path, rows: Iterable[Mapping[str, Any]]) -> None:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8", newline="\n")


def _rows(unit: str, name: str) -> Artifact[tuple[Example, ...]]:
    return Artifact(unit, f"{name}.jsonl", _load_rows, write_examples)


def _array(unit: str, file: str) -> Artifact[np.ndarray]:
    return Artifact(unit, file, read_array, _save_array)


def _text(unit: str, file: str) -> Artifact[str]:
    return Artifact(unit, file, files.read_text, files.write_text)


def _json(unit: str, file: str, shape: Shape = object) -> Artifact[Any]:
    return Artifact(unit, file, lambda path: read_json(path, shape), write_json)


class Variant(NamedTuple):
    """A model that an algorithm unlearns a strategy's sets from; as text its name."""

    strategy: str
    algorithm: str

    def __str__(self) -> str:
        return f"{self.strategy}-{self.algorithm}"


def _of_models(
    before: str, after: str, file: str, load: Callable[..., Any], save: Callable[..., object]
) -> Callable[..., Artifact[Any]]:
    """Returns the function from a model to its file in a unit.

    The model is "finetuned" or "backbone", or the number of an epoch and its variant.
    """

    def of(model: str | int, variant: Variant | None = None) -> Artifact[Any]:
        stem = model if isinstance(model, str) else f"epoch-{model}"
        unit = after.format(variant) if variant else before
        return Artifact(unit, file.format(stem), load, save)

    return of


def _load_config(path: pathlib.Path, mend: str = "give the folder of a run") -> dict[str, Any]:
    found: dict[str, Any] = read_json(path, dict, mend=mend)
    if not {"corpus", "unlearn"} <= found.keys():
        place = shown(str(path), 160)
        raise ValueError(f"{place} must be of a run, it is of a model or another program: {mend}")
    return found


# The settings of the last run, as `config.to_json` gives them.
CONFIG: Artifact[Any] = Artifact(
    "",
    "config.json",
    _load_config,
    write_json,
)
VERSIONS = _json("", "versions.json")
# The answer that `raslik trace` traces.
TRACED_QUERY = _rows("", "queries")
# The places of files that `raslik unlearn` wrote, by title; below the work directory or absolute.
# "" has the key of the unlearned model that they were made of.
EXPORTS = _json("", "exports.json", {str: str})

# The training rows, the backbone's rows or a query set.
corpus_rows = _rows("corpus", "{0}").of
TRAIN, RETRIEVAL = corpus_rows("train"), corpus_rows("retrieval")
TOKENIZER = Artifact(
    "corpus", "tokenizer", tokenization.load_tokenizer, tokenization.save_tokenizer
)
# The template that all rows and queries have, by the training rows; "" for a file of one.
TEMPLATE = _text("corpus", "template.txt")
# The token ids of the training rows or of the backbone's.
corpus_tokens = Artifact("corpus", "{0}.npz", encoding.load_encoded, encoding.save_parts).of
TRAIN_TOKENS = corpus_tokens("train")


def measured_rows(split: str, kind: str) -> Artifact[tuple[Example, ...]]:
    """Returns the file of the target or normal queries of a split.

    The split "held-out" has training examples that the sets leave out.
    """
    return _rows("retrieve/sizes", kind) if split == HELD_OUT else corpus_rows(f"{split}_{kind}")


# The loss of every step of the training of a stage.
losses = _json("{0}", "losses.json").of


class Answers(dict[str, str]):
    """Answers by query id; a missing one is an error with the name of their file."""

    path: pathlib.Path

    def __missing__(self, example_id: str) -> str:
        place, name = shown(str(self.path), 160), shown(example_id)
        raise ValueError(f"{place} has no answer to {name}: move its folder away and run again")


def _load_answers(path: pathlib.Path) -> Answers:
    rows = read_json_lines(path, {"id": str, "output": str})
    found = Answers({row["id"]: row["output"] for row in rows})
    found.path = path
    return found


def _save_answers(path: pathlib.Path, answers: Mapping[str, str]) -> None:
    _save_lines(path, [{"id": name, "output": text} for name, text in answers.items()])


_ANSWERS = _load_answers, _save_answers
# The fine-tuned model's own answers to retrieval queries without an output.
OWN_ANSWERS: Artifact[Any] = Artifact("references/retrieval", "finetuned.jsonl", *_ANSWERS)
# A model's answers to the queries of the measurement, and its `left.NormalRecord`s.
_MEASURED = "references/evaluation", "generate/{}"
answers = _of_models(*_MEASURED, "{}.jsonl", *_ANSWERS)
_NORMAL = [{"id": str, "nats": float, "words": int, "ended": bool}]
normal_records = _of_models(
    *_MEASURED, "{}-normal.json", lambda path: read_json(path, _NORMAL), write_json
)
# A model's likelihoods of given answers.
perplexities = _of_models(
    "references/perplexity", "generate/perplexity-{}", "{}.json", read_json, write_json
)


class TracedAnswer(NamedTuple):
    """A model's view of a traced answer.

    `nats` has one value per token of the answer, without the ends. `nll` is the mean over all
    tokens. `output` is the model's own answer. `expected` and `spread` are None for models other
    than the traced one.
    """

    id: str
    traced: str
    nll: float
    nats: tuple[float, ...]
    output: str
    expected: float | None = None
    spread: float | None = None

    @property
    def drawn(self) -> tuple[float, float] | None:
        """Mean and spread of nats for answers that the model draws itself (`Expected`)."""
        if self.expected is None or self.spread is None:
            return None
        return self.expected, self.spread


_TRACED = {"id": str, "traced": str, "nll": float, "nats": [float], "output": str}
_TRACED |= {"expected?": float, "spread?": float}


def _load_traced(path: pathlib.Path) -> list[TracedAnswer]:
    rows = read_json_lines(path, _TRACED)
    return [TracedAnswer(**{**row, "nats": tuple(row["nats"])}) for row in rows]


def _save_traced(path: pathlib.Path, told: Iterable[TracedAnswer]) -> None:
    rows = (one._asdict().items() for one in told)
    _save_lines(path, [{name: value for name, value in row if value is not None} for row in rows])


# A model's results for the traced answers.
traced = _of_models("retrieve/traced", "generate/traced-{}", "{}.jsonl", _load_traced, _save_traced)


def last_traced(root: pathlib.Path, variant: Variant) -> list[TracedAnswer] | None:
    """Returns the results for the traced answers of a variant's last measured epoch."""
    folder = traced(0, variant).place(root).parent
    epochs = [int(path.stem.removeprefix("epoch-")) for path in folder.glob("epoch-*")]
    return traced(max(epochs), variant).current(root) if epochs else None


QUERY_SKETCHES = _array("retrieve/queries", "queries.npy")


# The scores of every training row that a strategy needs by this name.
row_scores = _array("retrieve/{0}", "influence.npy").of
INFLUENCE = row_scores("influence")
# Of several queries: the score of every row with each of the first ones.
EACH_INFLUENCE = _array("retrieve/influence", "each.npy")


def _load_behaviors(path: pathlib.Path, ids: Sequence[str]) -> Behaviors:
    """Returns the behaviors behind queries of these ids as positions."""
    found = read_json(path, {"groups": [[str]], "between": float})
    place = {name: position for position, name in enumerate(ids)}
    groups = (tuple(place[name] for name in group if name in place) for group in found["groups"])
    return Behaviors(tuple(filter(None, groups)), found["between"])


def _save_behaviors(path: pathlib.Path, found: Behaviors, *, ids: Sequence[str]) -> None:
    groups = [[ids[n] for n in group] for group in found.groups]
    write_json(path, {"groups": groups, "between": found.between})


BEHAVIORS = Artifact("retrieve/influence", "behaviors.json", _load_behaviors, _save_behaviors)
# The rows that serve as unrelated prompts, and the scores of all rows with each of these.
NULL_POSITIONS = _array("retrieve/null", "positions.npy")
NULL_SCORES = _array("retrieve/null", "scores.npy")


def _load_chance(path: pathlib.Path, number: int) -> Chance:
    return Chance(*read_array(path, (number, len(Chance._fields))).T)


CHANCE = Artifact(
    "retrieve/chance",
    "chance.npy",
    _load_chance,
    lambda path, found: _save_array(path, np.stack(found, axis=1)),
)
CHANCE_SUMMARY = _json("retrieve/chance", "summary.json")
SIGMA = _array("retrieve/chance", "sigma.npy")


def read_sigma(root: pathlib.Path, number: int) -> Float[np.ndarray, " N"]:
    """Returns the noise of the sketch in a run's scores; NaN for rows without a measurement."""
    found = SIGMA.current(root, (number,))
    return np.full(number, np.nan) if found is None else found


_SHARES = {"id": str, "score": float, "row": [list], "query": str, "answer": [list]}
_SHARES |= {"cosine": float, "alike": [str]}
TOKEN_SHARES = _json("retrieve/tokens", "tokens.json", [_SHARES])
# The rows behind the answer that one wished for: its score, and that with the bad answer.
WISHED = _json("retrieve/wished", "rows.json", [{"id": str, "score": float, "bad": float}])
# The sizes of all sets, and the ids of the rows that no set may have.
SIZES = _json(
    "retrieve/sizes", "sizes.json", {"num_forget": int, "num_retain": int, "barred": [str]}
)
_CUT = {"num_forget": int, "middle": float, "edge": float, "gap": float, "num_out": int}
# The scores at which the rule cuts, next to the resulting sizes.
CUT = Artifact(
    "retrieve/sizes",
    "cut.json",
    lambda path: Cut(**read_json(path, _CUT)),
    lambda path, cut: write_json(path, cut._asdict()),
)


# The reason why a trace finds no row. It ends the run.
finding = Artifact(
    "{0}",
    "finding.json",
    lambda path: str(read_json(path, {"finding": str})["finding"]),
    lambda path, text: write_json(path, {"finding": text}),
).of
FINDINGS = TRACED_FINDING, SIZES_FINDING = finding("retrieve/traced"), finding("retrieve/sizes")


def read_finding(root: pathlib.Path) -> str:
    """Returns the finding that ended a run; "" if none did."""
    return next(filter(None, (found.current(root) for found in FINDINGS)), "")


# A strategy's forget or retain set, best first, and its scores in the direction of the set.
set_rows = _rows("retrieve/{0}", "{1}").of
set_scores = Artifact(
    "retrieve/{0}",
    "{1}.jsonl",
    lambda path: [row["score"] for row in read_json_lines(path, {"score": float})],
    write_examples,
).of
# The numbers of labeled targets in a strategy's sets.
set_summary = _json("retrieve/{0}", "summary.json").of


# The numbers of every step of the unlearning of a variant.
steps = _json("unlearn/{0}", "steps.json").of
# How far a training by the recipe on all rows gives the adapter that was given.
_RECIPE: dict[str, Any] = {"steps": int, "of": int, "rows?": int}
_RECIPE |= dict.fromkeys(("curve?", "loss?", "answers?"), ([(float, None)], None))
RECIPE = _json("unlearn/recipe", "check.json", _RECIPE)

_LEVELS, _GONE = {str: float}, {str: {"way": float, "gone": int, "of": int}}
_PROBES = {
    "kept_before": [float],
    "probes": [{"step": int, "levels": _LEVELS, "gone": _GONE, "answers": {str: str}}],
}


# The results of the probes of a variant's unlearning.
probes = _json("unlearn/{0}", "probes.json", _PROBES).of


# The KL between each model of a strategy and its retrained variant. The keys are algorithms ("" for
# the fine-tuned model), kinds of query and query ids. A value has KL(retrained || model), then
# KL(model || retrained).
distances = _json("generate/distance-{0}", "distances.json", {str: {str: {str: [float]}}}).of


# The result of a measure and a variant, or of a strategy for the models before: "relearn-raslik".
robustness = _json("generate/robustness-{0}", "found.json", dict).of

# The nats a token of each query after a training, by id.
query_losses = _json("validate/{0}", "losses.json", {str: float}).of
_INTERVALS = {str: {"mean": float, "low": float, "high": float}}
_VALIDATED = {
    **dict.fromkeys(("rows", "top", "seeds", "subsets", "group"), int),
    **{"share": float, "titles": {str: str}, "recipe": dict, "queries": [str]},
    "predicted": {str: [[float]]},
    "qld?": {
        "nll": {str: [[float]]},
        **{"rise": _INTERVALS, "over_nothing": _INTERVALS, "noise": float},
    },
    "lds?": {"nll": [[float]], "score": _INTERVALS},
}
VALIDATION = _json("validate/results", "found.json", _VALIDATED)

_VALUE = ({"mean": float, "low": float, "high": float}, float, bool, None)


def _model_shape() -> dict[str, Any]:
    """Returns the shape of a model's entry in the metrics, by the metrics' records."""
    shape: dict[str, Any] = {}
    for name in RECORDS:
        *groups, last = name.split("/")
        inner = shape
        for group in groups:
            inner = inner.setdefault(f"{group}?", ({}, None))[0]
        inner[f"{last}?"] = _VALUE
    shape["judgment?"] = {"verdict": str, "reasons": [str], "inputs": [str]}
    return shape | dict.fromkeys(("forget", "retain", "euclidean"), _VALUE)


_METRICS = {
    "name": str,
    "seed": int,
    "settings": dict,
    "versions?": {str: str},
    "corpus": dict,
    "finetuned": _model_shape(),
    "backbone?": _model_shape(),
    "behavior?": ({"by": str, "finetuned": float, "backbone": float, "is_shown": bool}, None),
    "retrieval": {str: {"num_forget": int, "num_retain": int}},
    "robustness?": [
        {**dict.fromkeys(("measure", "strategy", "algorithm"), str), "found": {str: [dict]}}
    ],
    "methods": [{**_model_shape(), "strategy": str, "algorithm": str, "epoch": int}],
}


def _load_metrics(path: pathlib.Path) -> Metrics:
    mend = "give the folder of a run after raslik unlearn, raslik retrain or raslik run"
    return cast(Metrics, read_json(path, _METRICS, mend=mend))


METRICS: Artifact[Metrics] = Artifact("evaluate", "metrics.json", _load_metrics, write_json)


def read_metrics(root: pathlib.Path) -> Metrics:
    """Returns the metrics of a run if they belong to its current results.

    Raises:
      ValueError: if they are missing, damaged or of an older version, or if an input of the
        measurement was made again since.
    """
    # Of a run that keeps its metrics alone there is nothing that could have changed.
    if read_manifest(root / METRICS.unit, any_version=True) is not None:
        check_finished(root, METRICS.unit)
    return METRICS.read(root)


TABLE, PAGE = (_text("report", name) for name in ("table.txt", "report.html"))


def found_ids(root: pathlib.Path, strategy: str) -> set[str]:
    """Returns the ids of the found rows: to forget, held out of them, or named but too long."""
    parts = set_rows(strategy, "forget").read(root), measured_rows(HELD_OUT, "target").find(root)
    ids = {row.example_id for part in parts for row in part or ()}
    return ids | {*set_summary(strategy).read(root).get("named", ())}
