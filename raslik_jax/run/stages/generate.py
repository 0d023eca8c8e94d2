"""What models say, and what they think of given answers: every epoch's model, or those before.

Each function takes a variant, of which every epoch is measured, or None for the fine-tuned model
and, where that is another one, the backbone.
"""

import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from raslik_jax.base.files import read_json_lines, write_json
from raslik_jax.data.corpora.record import Question
from raslik_jax.data.examples import Example
from raslik_jax.data.tokens import masking
from raslik_jax.data.tokens.encoding import require_answers
from raslik_jax.evaluate import likelihood, perplexity
from raslik_jax.evaluate.tofu_metrics import QuestionRecord
from raslik_jax.run import memory
from raslik_jax.run.workspace import Workspace, read_answers, write_rows
from raslik_jax.train.losses import BoundModel

# Of what `write_traced` writes: 2 has the nats of every token.
TRACED_FORMAT = {"formats": {"traced": 2}}
# A strategy and the algorithm that unlearned its sets.
Variant = tuple[str, str]


def _models(
    workspace: Workspace, variant: Variant | None
) -> Iterator[tuple[str, str, pathlib.Path, BoundModel]]:
    """Yields each model with the stem of its files, what it is, and where its answers are."""
    if variant is None:
        folder = workspace.root / "references" / "evaluation"
        models = {"finetuned": workspace.with_adapter(workspace.finetuned)}
        if workspace.has_backbone:
            models["backbone"] = workspace.backbone
        for name, model in models.items():
            yield name, f"the {name} model", folder / f"{name}.jsonl", model
        return
    folder = workspace.root / "generate" / "-".join(variant)
    for epoch in workspace.epochs(*variant):
        path, what = folder / f"epoch-{epoch}.jsonl", f"{' '.join(variant)} epoch {epoch}"
        yield path.stem, what, path, workspace.unlearned(*variant, epoch)


@memory.decoding
def write_answers(workspace: Workspace, variant: Variant | None, folder: pathlib.Path) -> None:
    """Writes the greedy answers of every model to the queries."""
    rows = [row for part in workspace.evaluation_queries() for row in part]
    for stem, what, _, model in _models(workspace, variant):
        outputs = workspace.generate(model, rows, f"answers of {what}")
        write_outputs(folder / f"{stem}.jsonl", rows, outputs)


def write_outputs(path: pathlib.Path, rows: Sequence[Example], outputs: Sequence[str]) -> None:
    """Writes answers by the ids of their queries."""
    answers = zip(rows, outputs, strict=True)
    write_rows(path, [{"id": row.example_id, "output": text} for row, text in answers])


@memory.likelihoods
def write_perplexities(workspace: Workspace, variant: Variant | None, folder: pathlib.Path) -> None:
    """Writes how likely every model finds the sets, and the backbone its answers.

    Text that says nothing is unlikely under any language model, whatever its words: the backbone is
    the judge, as it was neither fine-tuned nor unlearned. Of a training example that is a
    conversation the last answer counts alone, as of a query.
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
    backbone = workspace.backbone
    for stem, _, path, model in _models(workspace, variant):
        answers = read_answers(path)
        said = {
            kind: [
                masking.with_answer(row, answers[row.example_id], workspace.tokenizer)
                for row in rows
            ]
            for kind, rows in (("target", target), ("normal", normal))
        }
        own = _likelihoods(workspace, backbone, said, "answers of models", on_ladder=True)
        records = {
            "sets": _likelihoods(workspace, model, sets, "answers to measure"),
            # A blank answer is counted as empty, not as a likely one.
            "answers": {
                kind: [r for r, row in zip(own[kind], rows, strict=True) if row.output.strip()]
                for kind, rows in said.items()
            },
        }
        write_json(folder / f"{stem}.json", records)


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
        perplexity.AnswerRecord(id=row.example_id, nll=float(nll), tokens=int(tokens))
        for row, nll, tokens in zip(rows, found.nll_N, found.tokens_N, strict=True)
    )
    return {name: [next(records) for _ in part] for name, part in parts.items()}


@memory.decoding
def write_traced(workspace: Workspace, variant: Variant | None, folder: pathlib.Path) -> None:
    """Writes what every model says to the traced prompts, and its nats of the answers' tokens."""
    rows = workspace.retrieval_queries()
    encoded = workspace.encode(rows, "traced answers")
    require_answers(encoded, "traced prompts", max_len=workspace.config.corpus.max_len)
    for stem, what, _, model in _models(workspace, variant):
        outputs = workspace.generate(model, rows, f"traced prompts, {what}")
        measure = workspace.measure(likelihood.token_likelihood, model.decoder)
        nll_NT, told = measure(model.lora, model.base, encoded), list[dict[str, Any]]()
        for row, said, nll_T, count in zip(
            rows, outputs, nll_NT, encoded.num_targets_N.tolist(), strict=True
        ):
            nats = [float(f"{nats:.6g}") for nats in nll_T[:count].tolist()]
            nll = math.fsum(nats) / count
            told.append(
                {"id": row.example_id, "traced": row.output, "nll": nll, "nats": nats}
                | {"output": said}
            )
        if variant is None and stem == "finetuned":  # the answers are said to be this model's
            drawn = workspace.measure(likelihood.expected_likelihood, model.decoder)
            found = drawn(model.lora, model.base, encoded)
            for one, mean, spread in zip(told, *(part.tolist() for part in found), strict=True):
                one |= {"expected": mean, "spread": spread}
        write_rows(folder / f"{stem}.jsonl", told)


@memory.likelihoods
def write_questions(workspace: Workspace, variant: Variant | None, folder: pathlib.Path) -> None:
    """Writes what every model makes of the dataset's questions."""
    path = workspace.root / "references" / "questions" / "questions.jsonl"
    shape = {name: ([str] if name == "wrong_answers" else str) for name in Question._fields}
    questions = [
        Question(**{**row, "wrong_answers": tuple(row["wrong_answers"])})
        for row in read_json_lines(path, shape)
    ]
    asked = [question.with_answer(question.answer) for question in questions]
    for stem, what, _, model in _models(workspace, variant):
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
        write_json(folder / f"{stem}.json", records)


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
