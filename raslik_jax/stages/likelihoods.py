"""What every model thinks of given answers: perplexity, and TOFU's own metrics."""

import pathlib
from collections.abc import Iterator

from raslik_jax import memory
from raslik_jax.data import corpora, tofu
from raslik_jax.evaluation import perplexity
from raslik_jax.evaluation.tofu_metrics import QuestionRecord
from raslik_jax.files import read_json_lines, write_json
from raslik_jax.stages.workspace import Workspace, write_rows
from raslik_jax.unlearning.objectives import BoundModel


def _perplexity_records(
    workspace: Workspace, model: BoundModel
) -> dict[str, list[dict[str, object]]]:
    """Returns the records of a model's likelihoods, by set."""
    config = workspace.config
    target, normal = workspace.evaluation_queries()
    sets = perplexity.draw_sets(
        workspace.corpus.train,
        target,
        normal,
        number=config.evaluate.perplexity_examples,
        seed=config.seed,
    )
    rows = [row for rows in sets for row in rows]
    found = workspace.likelihood_of(model, workspace.encode(rows, "answers to measure"))
    records = [
        {"id": row.example_id, "nll": float(nll), "tokens": int(tokens)}
        for row, nll, tokens in zip(rows, found.nll_N, found.tokens_N, strict=True)
    ]
    named: dict[str, list[dict[str, object]]] = {}
    for name, part in zip(perplexity.SETS, sets, strict=True):
        named[name], records = records[: len(part)], records[len(part) :]
    return named


@memory.explained("measuring likelihoods", "--batch_tokens or --decode_batch_size")
def reference_perplexity(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the likelihoods of the perplexity sets under the fine-tuned model and the backbone."""
    for name, lora in (("finetuned", workspace.finetuned), ("backbone", workspace.model.initial)):
        records = _perplexity_records(workspace, workspace.with_adapter(lora))
        write_json(folder / f"{name}.json", records)


@memory.explained("measuring likelihoods", "--batch_tokens or --decode_batch_size")
def variant_perplexity(
    workspace: Workspace, strategy: str, name: str, folder: pathlib.Path
) -> None:
    """Writes the likelihoods of the perplexity sets under one unlearned model, every epoch."""
    for epoch in workspace.epochs(strategy, name):
        model = workspace.unlearned(strategy, name, epoch)
        write_json(folder / f"epoch-{epoch}.json", _perplexity_records(workspace, model))


def make_questions(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the questions of TOFU's own evaluation, at most --tofu_questions of each set."""
    config = workspace.config
    questions = tofu.load_questions(
        corpora.data_folder(config.corpus) / "tofu",
        forget=config.corpus.tofu_forget,
        number=config.evaluate.tofu_questions,
    )
    write_rows(folder / "questions.jsonl", [question._asdict() for question in questions])


def _read_questions(workspace: Workspace) -> tuple[tofu.Question, ...]:
    rows = read_json_lines(
        workspace.root / "references" / "questions" / "questions.jsonl",
        {name: ([str] if name == "wrong_answers" else str) for name in tofu.Question._fields},
    )
    return tuple(
        tofu.Question(**{**row, "wrong_answers": tuple(row["wrong_answers"])}) for row in rows
    )


def _question_records(workspace: Workspace, model: BoundModel, what: str) -> list[QuestionRecord]:
    """Returns what a model makes of TOFU's questions."""
    questions = _read_questions(workspace)
    texts = [(q.answer, q.true_answer, *q.wrong_answers) for q in questions]
    rows = [
        tofu.as_example(question, text)
        for question, part in zip(questions, texts, strict=True)
        for text in part
    ]
    found = workspace.likelihood_of(model, workspace.encode(rows, "answers to measure"))
    lost = [row.instruction for row, n in zip(rows, found.tokens_N, strict=True) if not n]
    if lost:
        raise ValueError(
            f"{len(lost)} answers of TOFU have no token within max_len, such as that to "
            f"{lost[0]!r}: raise --max_len"
        )
    nlls: Iterator[float] = map(float, found.nll_N)
    asked = [tofu.as_example(question, question.answer) for question in questions]
    outputs = workspace.generate(model, asked, what)
    records = []
    for question, row, output in zip(questions, asked, outputs, strict=True):
        records.append(
            QuestionRecord(
                id=row.example_id,
                set_name=question.set_name,
                answer_nll=next(nlls),
                true_nll=next(nlls),
                wrong_nll=[next(nlls) for _ in question.wrong_answers],
                answer=question.answer,
                output=output,
            )
        )
    return records


@memory.explained("measuring likelihoods", "--batch_tokens or --decode_batch_size")
def reference_questions(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes what the fine-tuned model and the backbone make of TOFU's questions."""
    for name, lora in (("finetuned", workspace.finetuned), ("backbone", workspace.model.initial)):
        model = workspace.with_adapter(lora)
        write_json(
            folder / f"{name}.json", _question_records(workspace, model, f"TOFU, {name} model")
        )


@memory.explained("measuring likelihoods", "--batch_tokens or --decode_batch_size")
def variant_questions(workspace: Workspace, strategy: str, name: str, folder: pathlib.Path) -> None:
    """Writes what one unlearned model makes of TOFU's questions, after every epoch."""
    for epoch in workspace.epochs(strategy, name):
        model = workspace.unlearned(strategy, name, epoch)
        write_json(
            folder / f"epoch-{epoch}.json",
            _question_records(workspace, model, f"TOFU, {strategy} {name} epoch {epoch}"),
        )
