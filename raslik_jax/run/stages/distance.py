"""The distance of each model of a strategy to the model retrained without the strategy's rows."""

import pathlib

from raslik_jax.data.examples import answered
from raslik_jax.evaluate import likelihood
from raslik_jax.evaluate.metrics import KINDS
from raslik_jax.run import artifacts, memory
from raslik_jax.run.artifacts import Variant
from raslik_jax.run.programs import AbstractRun, Work
from raslik_jax.run.recipes import Case, Recipe, distant_variants, variants_of
from raslik_jax.run.workspace import Workspace

# The fine-tuned model has no algorithm.
_BEFORE = ""


def _compared(workspace: Workspace, retrained: Variant) -> list[Variant]:
    """Returns the models of a strategy, the retrained one among them."""
    every = variants_of(workspace.config)
    return [one for one in every if one.strategy == retrained.strategy]


@memory.likelihoods
def write_distances(workspace: Workspace, retrained: Variant, folder: pathlib.Path) -> None:
    """Writes the KL between models over the tokens of the answers that F and R compare with."""
    name, model = workspace.config.evaluate.reference, workspace.model
    texts = None if name == "gold" else artifacts.answers(name).read(workspace.root)
    queries = dict(zip(KINDS, workspace.evaluation_queries(), strict=True))
    rows = [row for part in queries.values() for row in part]
    if texts is not None:
        rows = [answered(row, texts[row.example_id]) for row in rows]
    encoded = workspace.encode(rows, "answers to compare")
    adapters = {
        one.algorithm: workspace.unlearned(*one, workspace.epochs(*one)[-1]).lora
        for one in _compared(workspace, retrained)
    }
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
    workspace, reference = case.workspace, case.config.evaluate.reference
    models = [
        f"unlearn/{one}/epoch-{workspace.epochs(*one)[-1]}"
        for one in _compared(workspace, case.member)
    ]
    said = [] if reference == "gold" else [artifacts.answers(reference).path]
    return " ".join(["{measured} {finetuned}", *said, *models])


def count_distances(run: AbstractRun, retrained: Variant) -> Work:
    """Two forward passes for each model of a strategy and for the fine-tuned one."""
    model, models = run.model, 1 + len(_compared(run.workspace, retrained))
    step, shapes = (
        likelihood.divergence_step(model.decoder),
        run.planned(run.num_measured, num_buckets=2),
    )
    loras = (model.initial, model.initial)
    program = run.program("distance", step, loras, model.base, shapes=shapes, passes=2)
    return Work(100.0 * models * run.num_measured, [program] * models)


UNITS = (
    Recipe(
        "generate/distance-{0}",
        write_distances,
        _reads,
        "{likelihood} references.query_split evaluate.reference",
        members=distant_variants,
        measures=True,
        work=count_distances,
    ),
)
