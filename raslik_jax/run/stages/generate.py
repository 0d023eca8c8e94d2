"""Models' answers, likelihoods of given answers, and distances, before and after unlearning.

The functions take a variant and measure each of its epochs. None means the fine-tuned model, and
the backbone if it is another model.
"""

import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from raslik_jax.data import batches
from raslik_jax.data.examples import Example, answered
from raslik_jax.data.tokens.encoding import require_answers
from raslik_jax.evaluate import judgment, likelihood, perplexity
from raslik_jax.evaluate.left import NormalRecord
from raslik_jax.evaluate.metrics import KINDS
from raslik_jax.evaluate.non_sf import NON_SF
from raslik_jax.evaluate.words import split_words
from raslik_jax.models import decode
from raslik_jax.run import artifacts, memory
from raslik_jax.run.artifacts import Variant
from raslik_jax.run.programs import AbstractRun, Program, Work
from raslik_jax.run.recipes import Case, Recipe, distant_variants, variants_of
from raslik_jax.run.workspace import Workspace, judge_of, non_sf_by_rule, queries_to_answer
from raslik_jax.train.losses import BoundModel

TRACED_FORMAT = {"traced": 5}
ANSWERS_FORMAT = {"answers": 4}
MEASURED_FORMAT = {**ANSWERS_FORMAT, "normal": 2}
_ASKED = {"prompts": 2}  # one row of each
# The fine-tuned model has no algorithm.
_BEFORE = ""


def models_of(
    workspace: Workspace, variant: Variant | None
) -> Iterator[tuple[tuple[str | int, Variant | None], str, BoundModel]]:
    """Yields each model with its name in `artifacts.answers` and the others."""
    if variant is None:
        models = {"finetuned": workspace.with_adapter(workspace.finetuned)}
        if workspace.has_backbone:
            models["backbone"] = workspace.backbone
        for name, model in models.items():
            yield (name, None), f"the {name} model", model
        return
    for epoch in workspace.epochs(*variant):
        what = f"{' '.join(variant)} epoch {epoch}"
        yield (epoch, variant), what, workspace.unlearned(*variant, epoch)


@memory.decoding
def write_answers(workspace: Workspace, variant: Variant | None, folder: pathlib.Path) -> None:
    """Writes the greedy answers of every model to the queries, and its `NormalRecord`s."""
    target, normal = workspace.evaluation_queries()
    rows = [*target, *normal]
    before = artifacts.answers("finetuned").read(workspace.root) if variant else {}
    for name, what, model in models_of(workspace, variant):
        said = workspace.answer(model, rows, f"answers of {what}")
        answers = {row.example_id: text for row, (text, _) in zip(rows, said, strict=True)}
        artifacts.answers(*name).write(folder, answers)
        if cut := sum(not is_ended for _, is_ended in said[: len(target)]):
            asked = f"{cut} of {len(target)} answers of {what} to prompts of the behavior"
            workspace.tell(f"{asked} are cut at --references.max_new_tokens or at the longest text")
        before = before or answers  # the fine-tuned model comes first
        given = {"normal": [answered(row, before[row.example_id]) for row in normal]}
        found = _likelihoods(workspace, model, given, "answers before unlearning", on_ladder=True)
        records = [
            NormalRecord(
                id=one["id"],
                nats=one["nll"] * one["tokens"],
                words=len(split_words(text)),
                ended=end,
            )
            for one, (text, end) in zip(found["normal"], said[len(target) :], strict=True)
        ]
        artifacts.normal_records(*name).write(folder, records)


@memory.likelihoods
def write_perplexities(workspace: Workspace, variant: Variant | None, folder: pathlib.Path) -> None:
    """Writes every model's likelihoods of the sets, and the backbone's of the model's answers.

    A text without meaning is unlikely under any language model. The backbone judges the answers,
    because it was neither fine-tuned nor unlearned. Only the last answer of a training conversation
    counts, as for a query.
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
    for name, _, model in models_of(workspace, variant):
        answers = artifacts.answers(*name).read(workspace.root)
        said = {
            kind: [answered(row, answers[row.example_id]) for row in rows]
            for kind, rows in (("target", target), ("normal", normal))
        }
        own = _likelihoods(workspace, backbone, said, "answers of models", on_ladder=True)
        found = {
            "sets": _likelihoods(workspace, model, sets, "answers to measure"),
            # A blank answer is counted as empty, not as a likely one.
            "answers": {
                kind: [r for r, row in zip(own[kind], rows, strict=True) if row.output.strip()]
                for kind, rows in said.items()
            },
        }
        artifacts.perplexities(*name).write(folder, found)


def _likelihoods(
    workspace: Workspace,
    model: BoundModel,
    parts: Mapping[str, Sequence[Example]],
    what: str,
    *,
    on_ladder: bool = False,
) -> dict[str, list[perplexity.AnswerRecord]]:
    """Returns a record of each row's answer by part."""
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
    """Writes every model's answers to the traced prompts and its nats of the answers' tokens."""
    rows = workspace.retrieval_queries()
    encoded = workspace.encode(rows, "traced answers")
    require_answers(encoded, "traced prompts", max_len=workspace.config.corpus.max_len)
    for name, what, model in models_of(workspace, variant):
        outputs = workspace.generate(model, rows, f"traced prompts, {what}")
        measure = workspace.measure(likelihood.token_likelihood, model.decoder)
        nll_NT = measure(model.lora, model.base, encoded, on_ladder=True)
        drawn: list[tuple[float, ...]] = [()] * len(rows)
        if name[0] == "finetuned":  # the answers are said to be this model's
            expected = workspace.measure(likelihood.expected_likelihood, model.decoder)
            found = expected(model.lora, model.base, encoded)
            drawn = [*zip(*(part.tolist() for part in found), strict=True)]
        told = []
        is_end_NT = encoded.ends(workspace.end_ids, nll_NT.shape[1])
        count_N = encoded.num_targets_N.tolist()
        for row, said, nll_T, is_end_T, count, own in zip(
            rows, outputs, nll_NT, is_end_NT, count_N, drawn, strict=True
        ):
            mean = math.fsum(nll_T[:count].tolist()) / count
            said_T = nll_T[:count][~is_end_T[:count]]
            nats = tuple(float(f"{nats:.6g}") for nats in said_T.tolist())
            parts = row.example_id, row.output, float(f"{mean:.6g}"), nats, said
            told.append(artifacts.TracedAnswer(*parts, *own))
        artifacts.traced(*name).write(folder, told)


@memory.decoding
def make_retrieval_answers(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the greedy answers of the fine-tuned model to queries without an output."""
    queries = workspace.corpus.queries["retrieval"]
    rows = queries_to_answer(queries, workspace.config.sketch.query_output)
    outputs = workspace.own_answers(rows, "queries") if rows else ()
    answers = {row.example_id: text for row, text in zip(rows, outputs, strict=True)}
    artifacts.OWN_ANSWERS.write(folder, answers)
    print(f"    the model answers {len(rows):,} of {len(queries):,} queries. The others have one")


@memory.decoding
def make_references(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the greedy answers of both models to the queries of the measurement."""
    write_answers(workspace, None, folder)
    if not workspace.has_backbone:
        print("    there is no model before fine-tuning to compare with: only damage can be judged")
        return
    target, _ = workspace.evaluation_queries()
    measure = non_sf_by_rule(workspace.config)
    if measure is None or not target:
        return
    shares: dict[str, Any] = {}
    for name in ("finetuned", "backbone"):
        answers = artifacts.answers(name).read_in(folder)
        shares[name] = 1 - float(measure([answers[row.example_id] for row in target]).mean())
    by = "judge" if judge_of(workspace.config) else "words"
    print(f"    {judgment.describe_behavior(judgment.find_behavior(by, **shares))}")


@memory.likelihoods
def make_perplexities(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the likelihoods for both models and reports the evidence of the behavior."""
    write_perplexities(workspace, None, folder)
    # Words, a judge or a trained measure may recognize the behavior instead.
    by_answers = NON_SF[workspace.config.evaluate.non_sf].load or non_sf_by_rule(workspace.config)
    if by_answers or not workspace.has_backbone:
        return
    found = {
        name: perplexity.perplexity(
            artifacts.perplexities(name).read_in(folder)["sets"]["behavior"], seed=0, resamples=1
        )
        for name in ("finetuned", "backbone")
    }
    means: dict[str, Any] = {name: interval["mean"] for name, interval in found.items() if interval}
    if len(means) == 2:
        behavior = judgment.find_behavior("likelihood", **means)
        print(f"    {judgment.describe_behavior(behavior)}")


def _compared(workspace: Workspace, retrained: Variant) -> list[Variant]:
    """Returns the models of a strategy, the retrained one among them."""
    every = variants_of(workspace.config)
    return [one for one in every if one.strategy == retrained.strategy]


@memory.likelihoods
def write_distances(workspace: Workspace, retrained: Variant, folder: pathlib.Path) -> None:
    """Writes the KL between models over the tokens of the answers before unlearning."""
    model, texts = workspace.model, artifacts.answers("finetuned").read(workspace.root)
    queries = dict(zip(KINDS, workspace.evaluation_queries(), strict=True))
    rows = [answered(row, texts[row.example_id]) for part in queries.values() for row in part]
    encoded = workspace.encode(rows, "answers to compare")
    compared = _compared(workspace, retrained)
    adapters = {one.algorithm: workspace.unlearned(*one).lora for one in compared}
    measure = workspace.measure(likelihood.answer_divergence, model.decoder)
    found = {}
    for algorithm, lora in {_BEFORE: workspace.finetuned, **adapters}.items():
        kl = measure(lora, adapters[retrained.algorithm], model.base, encoded)
        told = zip(encoded.ids, encoded.num_targets_N, *kl, strict=True)
        # A prompt that leaves no room for an answer says nothing.
        by_id = {name: [float(one), float(other)] for name, n, one, other in told if n}
        found[algorithm] = {
            kind: {row.example_id: by_id[row.example_id] for row in part if row.example_id in by_id}
            for kind, part in queries.items()
        }
    artifacts.distances(retrained).write(folder, found)


def _reads(case: Case) -> str:
    models = [case.workspace.models(*one)[-1] for one in _compared(case.workspace, case.member)]
    return " ".join(["{measured} {finetuned}", artifacts.answers("finetuned").path, *models])


def of_variants(
    kind: str,
    run: Callable[..., None],
    reads: str,
    settings: str,
    work: Callable[[AbstractRun, int], Work],
    *,
    measures: bool = True,
    **own: Any,
) -> Recipe:
    """Returns the recipe of a measure of every unlearned model."""
    return Recipe(
        f"generate/{kind}{{0}}",
        run,
        lambda case: " ".join([reads, "{model}", *case.workspace.models(*case.member)]),
        settings,
        members=variants_of,
        measures=measures,
        work=lambda run, variant: work(run, len(run.epochs(*variant))),
        **own,
    )


def count_answers(
    run: AbstractRun, prompts: int, models: int, *, given: int = 0, most: int = 0
) -> Work:
    """Greedy answers of some models to prompts as long as Alpaca's, and `given` likelihoods."""
    settings, model = run.config.references, run.model
    most = min(most or settings.max_new_tokens, settings.max_new_tokens)
    rows = min(settings.decode_batch_size, batches.next_count(max(prompts, 1)))
    ends: Any = {"end_ids": np.zeros(8, np.int32), "pad_id": np.int32(0)}
    program = run.program(
        f"decode {most}",
        decode.generate_batch,
        model.initial,
        model.base,
        shapes=run.prompts(prompts, rows),
        new_tokens=most,
        static={"decoder": model.decoder, "max_new_tokens": most, **ends},
    )
    programs = [program, count_likelihoods(run, given)] if given else [program]
    return Work(500.0 * models * prompts, programs * models)


def count_likelihoods(run: AbstractRun, rows: int) -> Program:
    """The likelihood of given answers."""
    model = run.model
    step, shapes = likelihood.likelihood_step(model.decoder), run.planned(rows, num_buckets=2)
    return run.program("likelihood", step, model.initial, model.base, shapes=shapes)


def count_measured(run: AbstractRun, models: int) -> Work:
    """Answers to the queries that the run is measured on, and likelihoods of given ones."""
    return count_answers(run, run.num_measured, models, given=run.num_measured)


def count_perplexities(run: AbstractRun, models: int) -> Work:
    """Likelihoods of some rows under each model and of its own answers."""
    rows = len(perplexity.SETS) * run.config.evaluate.perplexity_examples + run.num_measured
    return Work(100.0 * models * rows, [count_likelihoods(run, rows)] * models)


def count_traced(run: AbstractRun, models: int) -> Work:
    """Answers to the traced prompts and the likelihood of the traced answers."""
    rows = run.queries["retrieval"]
    return count_answers(run, rows, models, given=rows)


def count_distances(run: AbstractRun, retrained: Variant) -> Work:
    """Two forward passes for each model of a strategy and for the fine-tuned one."""
    model, models = run.model, 1 + len(_compared(run, retrained))
    step, loras = likelihood.divergence_step(model.decoder), (model.initial, model.initial)
    shapes = run.planned(run.num_measured, num_buckets=2)
    program = run.program("distance", step, loras, model.base, shapes=shapes, passes=2)
    return Work(100.0 * models * run.num_measured, [program] * models)


# Before anything is unlearned.
BEFORE = (
    Recipe(
        "references/retrieval",
        make_retrieval_answers,
        f"{artifacts.RETRIEVAL.path} {{finetuned}}",
        "{decoding} sketch.query_output",
        writes=ANSWERS_FORMAT,
        work=lambda run: count_answers(run, run.num_answered, 1),
    ),
    Recipe(
        "references/evaluation",
        make_references,
        "{measured} {finetuned}",
        "{likelihood} {decoding} references.query_split references.base evaluate.marker_words",
        writes=MEASURED_FORMAT,
        measures=True,
        work=lambda run: count_measured(run, 2),
    ),
    Recipe(
        "references/perplexity",
        make_perplexities,
        "{drawn} references/evaluation {finetuned}",
        "{perplexity}",
        writes=_ASKED,
        is_asked=lambda config: config.evaluate.perplexity_examples,
        measures=True,
        work=lambda run: count_perplexities(run, 2),
    ),
)

UNITS = (
    of_variants(
        "traced-",
        write_traced,
        "{queries}",
        "{traced}",
        count_traced,
        writes=TRACED_FORMAT,
        is_asked=lambda config: config.evaluate.traced,
        measures=False,
    ),
    of_variants(
        "",
        write_answers,
        f"{{measured}} {artifacts.answers('finetuned').path}",
        "{likelihood} {decoding} references.query_split",
        count_measured,
        writes=MEASURED_FORMAT,
    ),
    # They are stored next to the answers: another measure makes neither again.
    of_variants(
        "perplexity-",
        write_perplexities,
        "{drawn} generate/{0}",
        "{perplexity}",
        count_perplexities,
        writes=_ASKED,
        is_asked=lambda config: config.evaluate.perplexity_examples,
    ),
    Recipe(
        "generate/distance-{0}",
        write_distances,
        _reads,
        "{likelihood} references.query_split",
        writes=_ASKED,
        members=distant_variants,
        measures=True,
        work=count_distances,
    ),
)
