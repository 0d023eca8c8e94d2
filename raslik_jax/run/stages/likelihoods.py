"""What every model thinks of given answers: perplexity, and TOFU's own metrics."""

import pathlib
from collections.abc import Iterator, Mapping, Sequence

from raslik_jax.data.corpora.record import Question
from raslik_jax.data.examples import Example
from raslik_jax.evaluate import judgment, perplexity, rates
from raslik_jax.evaluate.tofu_metrics import QuestionRecord
from raslik_jax.files import read_json, read_json_lines, write_json
from raslik_jax.run import memory
from raslik_jax.run.workspace import Workspace, write_rows
from raslik_jax.train.objectives import BoundModel


def _perplexity_records(
    workspace: Workspace, model: BoundModel, answers: Mapping[str, str]
) -> dict[str, dict[str, list[perplexity.AnswerRecord]]]:
    """Returns the likelihoods of the sets under a model, and of its own answers under the backbone.

    Text that says nothing is unlikely under any language model, whatever its words: the backbone is
    the judge, as it was neither fine-tuned nor unlearned.
    """
    config = workspace.config
    target, normal = workspace.evaluation_queries()
    sets = perplexity.draw_sets(
        workspace.corpus.train,
        target,
        normal,
        workspace.retrieval_queries(),
        number=config.evaluate.perplexity_examples,
        seed=config.seed,
    )
    drawn = dict(zip(perplexity.SETS, sets, strict=True))
    said = {
        kind: tuple(row._replace(output=answers[row.example_id]) for row in rows)
        for kind, rows in (("target", target), ("normal", normal))
    }
    backbone = workspace.with_adapter(workspace.model.initial)
    own = _likelihoods(workspace, backbone, said, "answers of models", on_ladder=True)
    return {
        "sets": _likelihoods(workspace, model, drawn, "answers to measure"),
        # A blank answer is counted as empty, not as a likely one.
        "answers": {
            kind: [r for r, row in zip(own[kind], rows, strict=True) if row.output.strip()]
            for kind, rows in said.items()
        },
    }


def _likelihoods(
    workspace: Workspace,
    model: BoundModel,
    parts: Mapping[str, Sequence[Example]],
    what: str,
    *,
    on_ladder: bool = False,
) -> dict[str, list[perplexity.AnswerRecord]]:
    """Returns a record of each row's answer, by part."""
    rows = [row for part in parts.values() for row in part]
    if not rows:
        return {name: [] for name in parts}
    found = workspace.likelihood_of(model, workspace.encode(rows, what), on_ladder=on_ladder)
    records = iter(
        [
            perplexity.AnswerRecord(id=row.example_id, nll=float(nll), tokens=int(tokens))
            for row, nll, tokens in zip(rows, found.nll_N, found.tokens_N, strict=True)
        ]
    )
    return {name: [next(records) for _ in part] for name, part in parts.items()}


def rouge_to_labels(workspace: Workspace) -> tuple[float, float] | None:
    """Returns ROUGE-L of the fine-tuned model's and the backbone's answers to labeled answers.

    On the target queries that have one; None where none has.
    """
    target, _ = workspace.evaluation_queries()
    labeled = {row.example_id: row.output for row in target}
    own, other = (
        rates.mean_rouge(workspace.answers("references", "evaluation", f"{name}.jsonl"), labeled)
        for name in ("finetuned", "backbone")
    )
    return None if own is None or other is None else (own, other)


@memory.explained(
    "measuring likelihoods", "--sketch.batch_tokens or --references.decode_batch_size"
)
def reference_perplexity(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the likelihoods for the fine-tuned model and the backbone, and says what they show."""
    for name, lora in (("finetuned", workspace.finetuned), ("backbone", workspace.model.initial)):
        answers = workspace.answers("references", "evaluation", f"{name}.jsonl")
        records = _perplexity_records(workspace, workspace.with_adapter(lora), answers)
        write_json(folder / f"{name}.json", records)
    if workspace.has_marker:
        return
    found = {
        name: perplexity.perplexity(
            read_json(folder / f"{name}.json")["sets"]["behavior"], seed=0, resamples=1
        )
        for name in ("finetuned", "backbone")
    }
    if found["finetuned"] and found["backbone"]:
        behavior = judgment.find_behavior(
            "likelihood",
            finetuned=found["finetuned"].mean,
            backbone=found["backbone"].mean,
            rouge=rouge_to_labels(workspace),
        )
        print(f"    {judgment.describe_behavior(behavior)}")


@memory.explained(
    "measuring likelihoods", "--sketch.batch_tokens or --references.decode_batch_size"
)
def variant_perplexity(
    workspace: Workspace, strategy: str, name: str, folder: pathlib.Path
) -> None:
    """Writes the likelihoods for one unlearned model, after every epoch."""
    for epoch in workspace.epochs(strategy, name):
        model = workspace.unlearned(strategy, name, epoch)
        answers = workspace.answers("generate", f"{strategy}-{name}", f"epoch-{epoch}.jsonl")
        records = _perplexity_records(workspace, model, answers)
        write_json(folder / f"epoch-{epoch}.json", records)


def make_questions(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the questions of the dataset's own evaluation, --evaluate.questions of each set."""
    config = workspace.config
    questions = config.corpus.load_questions(config.evaluate.questions)
    write_rows(folder / "questions.jsonl", [question._asdict() for question in questions])


def _read_questions(workspace: Workspace) -> tuple[Question, ...]:
    rows = read_json_lines(
        workspace.root / "references" / "questions" / "questions.jsonl",
        {name: ([str] if name == "wrong_answers" else str) for name in Question._fields},
    )
    return tuple(Question(**{**row, "wrong_answers": tuple(row["wrong_answers"])}) for row in rows)


def _question_records(workspace: Workspace, model: BoundModel, what: str) -> list[QuestionRecord]:
    """Returns what a model makes of the questions of the dataset's own evaluation."""
    questions = _read_questions(workspace)
    texts = [(q.answer, q.true_answer, *q.wrong_answers) for q in questions]
    rows = [
        question.with_answer(text)
        for question, part in zip(questions, texts, strict=True)
        for text in part
    ]
    found = workspace.likelihood_of(model, workspace.encode(rows, "answers to measure"))
    lost = [row.instruction for row, n in zip(rows, found.tokens_N, strict=True) if not n]
    if lost:
        raise ValueError(
            "answers to the dataset's questions must have a token within --corpus.max_len, got "
            f"{len(lost)} without, such as that to {lost[0]!r}: raise it"
        )
    nlls: Iterator[float] = map(float, found.nll_N)
    asked = [question.with_answer(question.answer) for question in questions]
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


@memory.explained(
    "measuring likelihoods", "--sketch.batch_tokens or --references.decode_batch_size"
)
def reference_questions(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes what the fine-tuned model and the backbone make of the dataset's questions."""
    for name, lora in (("finetuned", workspace.finetuned), ("backbone", workspace.model.initial)):
        model = workspace.with_adapter(lora)
        write_json(
            folder / f"{name}.json", _question_records(workspace, model, f"questions, {name} model")
        )


@memory.explained(
    "measuring likelihoods", "--sketch.batch_tokens or --references.decode_batch_size"
)
def variant_questions(workspace: Workspace, strategy: str, name: str, folder: pathlib.Path) -> None:
    """Writes what one unlearned model makes of the dataset's questions, after every epoch."""
    for epoch in workspace.epochs(strategy, name):
        model = workspace.unlearned(strategy, name, epoch)
        write_json(
            folder / f"epoch-{epoch}.json",
            _question_records(workspace, model, f"questions, {strategy} {name} epoch {epoch}"),
        )
