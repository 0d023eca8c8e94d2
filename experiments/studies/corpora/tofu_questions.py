"""TOFU's own evaluation in a run: questions that every model answers, and their metrics.

A run answers at most --corpus.tofu.questions of each set. --corpus.tofu.retain_run names a run that
was trained without the rows to forget: forget quality compares with it.
"""

import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

from experiments.studies.corpora import tofu, tofu_metrics
from experiments.studies.corpora.tofu import Question
from experiments.studies.corpora.tofu_metrics import QUESTION_SETS, QuestionRecord
from raslik_jax.base.files import read_json, write_json
from raslik_jax.base.messages import shown
from raslik_jax.base.settings import flat
from raslik_jax.config import Config, to_json
from raslik_jax.evaluate.metrics import Column, Metric, found_metric
from raslik_jax.report.results import measured_table
from raslik_jax.run import artifacts, memory
from raslik_jax.run.artifacts import Artifact, Variant
from raslik_jax.run.manifests import check_finished
from raslik_jax.run.programs import AbstractRun, Work
from raslik_jax.run.recipes import Case, Files, Recipe, distant_variants
from raslik_jax.run.stages import generate
from raslik_jax.run.stages.generate import models_of
from raslik_jax.run.workspace import Workspace
from raslik_jax.train.losses import BoundModel


def _load_questions(path: pathlib.Path) -> list[Question]:
    shape = {name: ([str] if name == "wrong_answers" else str) for name in Question._fields}
    rows = read_json(path, [shape])
    return [Question(**{**row, "wrong_answers": tuple(row["wrong_answers"])}) for row in rows]


def _save_questions(path: pathlib.Path, questions: Iterable[Question]) -> None:
    write_json(path, [question._asdict() for question in questions])


QUESTIONS = Artifact("references/questions", "questions.json", _load_questions, _save_questions)


def answered(model: str | int, variant: Variant | None = None) -> Artifact[Any]:
    """Returns the file of what a model makes of the questions; a model as of `answers`."""
    file = artifacts.answers(model, variant).file.replace(".jsonl", ".json")
    unit = f"generate/answered-{variant}" if variant else "references/answered"
    return Artifact(unit, file, read_json, write_json)


# The answers of the retain model to the questions.
RETAINED = Artifact("references/retained", "finetuned.json", read_json, write_json)


def _own(config: Config) -> tofu.TofuSettings:
    """Returns the settings --corpus.tofu."""
    return cast(tofu.TofuSettings, config.corpus.own)


def has_questions(config: Config) -> bool:
    """Returns whether models are asked TOFU's questions: no run that chooses settings asks them."""
    is_chosen = config.references.query_split != "validation"
    return config.corpus.dataset == "tofu" and is_chosen and _own(config).questions > 0


def has_retained(config: Config) -> bool:
    """Returns whether a run compares with a retain model."""
    return has_questions(config) and bool(_own(config).retain_run)


def make_questions(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes TOFU's questions, --corpus.tofu.questions of each set."""
    shared, own = workspace.config.corpus, _own(workspace.config)
    QUESTIONS.write(folder, tofu.load_questions(shared, own, own.questions))


@memory.likelihoods
def write_questions(workspace: Workspace, variant: Variant | None, folder: pathlib.Path) -> None:
    """Writes what every model makes of TOFU's questions."""
    questions = QUESTIONS.read(workspace.root)
    asked = [question.with_answer(question.answer) for question in questions]
    for name, what, model in models_of(workspace, variant):
        nlls = _nlls_of_answers(workspace, questions, model)
        outputs = workspace.generate(model, asked, f"questions, {what}")
        records = [
            QuestionRecord(
                id=row.example_id,
                set_name=question.set_name,
                answer_nll=next(nlls),
                true_nll=next(nlls),
                wrong_nll=[next(nlls) for _ in question.wrong_answers],
                answer=question.answer,
                output=output,
            )
            for question, row, output in zip(questions, asked, outputs, strict=True)
        ]
        answered(*name).write(folder, records)


def _nlls_of_answers(
    workspace: Workspace, questions: Sequence[Question], model: BoundModel
) -> Iterator[float]:
    """Returns the nats a token of each question's answer, its true one and the wrong ones."""
    rows = [
        question.with_answer(text)
        for question in questions
        for text in (question.answer, question.true_answer, *question.wrong_answers)
    ]
    found = workspace.likelihood_of(model, workspace.encode(rows, "answers to measure"))
    lost = [row.instruction for row, n in zip(rows, found.tokens_N, strict=True) if not n]
    if lost:
        raise ValueError(
            f"answers to questions must have a token within --corpus.max_len, got {len(lost)} "
            f"without, such as that to {lost[0]!r}: raise it"
        )
    return iter(found.nll_N.tolist())


def retain_answers(config: Config) -> pathlib.Path:
    """Returns the answers to the questions in the run of --corpus.tofu.retain_run."""
    run = pathlib.Path(_own(config).retain_run)
    check_finished(run, answered("finetuned").unit)
    made = check_finished(run, "corpus")["settings"]
    if made["corpus.dataset"] != "tofu" or made["corpus.tofu.train"] != "retain":
        raise ValueError(
            "--corpus.tofu.retain_run must be a run with --corpus.tofu.train=retain, got "
            f"{shown(str(run), 120)}"
        )
    own, base = flat(to_json(config)), "backbone.checkpoint"
    others = {base: flat(artifacts.CONFIG.read(run))[base]}
    for name, value in (others | check_finished(run, "finetune")["settings"]).items():
        if name != "seed" and value != own.get(name, value):
            raise ValueError(f"--{name} must be {value!r} as in --corpus.tofu.retain_run: set it")
    return answered("finetuned").place(run)


def copy_retained(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the answers of the retain model again."""
    RETAINED.write(folder, read_json(retain_answers(workspace.config)))


def collect(workspace: Workspace) -> Callable[[str | int, Variant | None], Mapping[str, Any]]:
    """Returns the function from a model to its part of the evidence, see `evaluate.EVIDENCE`.

    A model that was trained again without the forget set is a retain model too.
    """
    root, config = workspace.root, workspace.config
    if not has_questions(config):
        return lambda model, variant: {}
    retained = RETAINED.read(root) if has_retained(config) else ()
    again = {one.strategy: one for one in distant_variants(config)}

    def of_model(model: str | int, variant: Variant | None) -> Mapping[str, Any]:
        records = answered(model, variant).read(root)
        found: dict[str, Any] = tofu_metrics.evaluate_questions(records, retained)
        if variant and variant.strategy in again:
            other = again[variant.strategy]
            others = answered(workspace.epochs(*other)[-1], other).read(root)
            found["retrained_quality"], _ = tofu_metrics.compare_truth(records, others)
        return {"tofu": found}

    return of_model


def count_questions(run: AbstractRun, models: int) -> Work:
    """The questions: answers and the likelihood of given ones."""
    own = _own(run.config)
    # Without what is retained of TOFU where all is to be forgotten.
    asked = (len(QUESTION_SETS) - (own.forget == "all")) * own.questions
    return generate.count_answers(run, asked, models, given=7 * asked)


def _files(case: Case) -> Files:
    files = case.config.corpus.source_files()
    return {name: path for name, path in files.items() if name == "tofu"}


def _tofu(name: str, **columns: Column) -> Metric:
    return found_metric("tofu", name, **columns)


_TITLES = ("Forget set", "Retain set", "Real authors", "World facts")
METRICS = {
    "tofu/forget_quality": _tofu(
        "forget_quality",
        tofu=Column("Forget\nquality", ".3g"),
        seeds_checks=Column("TOFU, forget\nquality", ends=".3f"),
    ),
    "tofu/retrained_quality": _tofu(
        "retrained_quality", tofu=Column("Forget quality,\nby retraining", ".3g")
    ),
    "tofu/model_utility": _tofu(
        "model_utility",
        tofu=Column("Model\nutility"),
        seeds_checks=Column("TOFU, model\nutility", ends=".3f"),
    ),
    **{
        f"tofu/sets/{name}/{part}": _tofu(f"sets/{name}/{part}", tofu=Column(title))
        for name, title in zip(QUESTION_SETS, _TITLES, strict=True)
        for part in tofu_metrics.PARTS
    },
}


def notes(group: str, *, found: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the notes of the table, from the entry of a model."""
    lines = [
        "For each set: probability of the answer / ROUGE-L recall / truth ratio (closer to 1 is "
        "better, also on the forget set, where 1 means that the model cannot tell). Model utility: "
        "harmonic mean of the nine numbers of the other sets. Forget quality: p-value of a "
        "Kolmogorov-Smirnov test against a model that was never trained on the forget set."
    ]
    if "forget_quality" not in found:
        lines.append(
            "No forget quality: it needs a retain model. Give a run with --corpus.tofu.train=retain "
            "as --corpus.tofu.retain_run."
        )
    if found.get("model_utility") is None:
        lines.append("No model utility: with all of TOFU to forget there is no retain set.")
    return tuple(lines)


DETAILS = {"TOFU's own metrics": partial(measured_table, group="tofu", notes=notes)}
BEFORE = (
    Recipe(
        "references/questions",
        make_questions,
        settings="corpus.dataset corpus.tofu.forget corpus.tofu.questions",
        files=_files,
        is_asked=has_questions,
        is_alone=True,
        measures=True,
    ),
    Recipe(
        "references/answered",
        lambda workspace, folder: write_questions(workspace, None, folder),
        "references/questions {finetuned}",
        "{likelihood} {decoding} references.base",
        is_asked=has_questions,
        measures=True,
        work=lambda run: count_questions(run, 2),
    ),
    Recipe(
        "references/retained",
        copy_retained,
        files=lambda case: {"corpus.tofu.retain_run": retain_answers(case.config)},
        is_asked=has_retained,
        is_alone=True,
        measures=True,
    ),
)
AFTER = (
    generate.of_variants(
        "answered-",
        write_questions,
        "references/questions",
        "{likelihood} {decoding}",
        count_questions,
        is_asked=has_questions,
    ),
)
