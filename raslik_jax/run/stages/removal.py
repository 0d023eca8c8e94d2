"""From the rows to forget to what a small step away from them does to the traced answers."""

import functools
import pathlib
from collections.abc import Collection, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from raslik_jax import files, meshes
from raslik_jax.axes import Tree
from raslik_jax.data import batches
from raslik_jax.data.examples import Example
from raslik_jax.data.ordering import shuffled
from raslik_jax.data.tokens.encoding import Encoded
from raslik_jax.files import write_json
from raslik_jax.report.removal import Removal, removal_sentence
from raslik_jax.run import memory
from raslik_jax.run.stages import retrieve
from raslik_jax.run.workspace import Workspace
from raslik_jax.train import away

# The length of the step in lengths of the adapter (docs/notes/retrieve.md).
SHARE = 0.01
# Draws of as many other rows that the same step is taken away from.
DRAWS = 3


@memory.explained("the step away from rows", "--unlearn.micro_batch_size or --sketch.batch_tokens")
def make_removal(workspace: Workspace, strategy: str, folder: pathlib.Path) -> None:
    """Writes what a step away from rows to forget does to the traced answers, and from others."""
    ids = [row.example_id for row in workspace.corpus.train]
    place = {name: position for position, name in enumerate(ids)}
    path = workspace.root / "retrieve" / strategy / "forget.jsonl"
    forget = [place[row["id"]] for row in files.read_json_lines(path, {"id": str})]
    score_N = None
    # Scores of an earlier run may lie there too.
    if retrieve.EVIDENCE in retrieve.needs_of(workspace.config):
        scores = workspace.root / "retrieve" / retrieve.EVIDENCE / "influence.npy"
        score_N = files.read_array(scores, (len(ids),))
    found = compare(workspace, workspace.retrieval_queries(), forget, score_N)
    write_json(folder / "removal.json", [one._asdict() for one in found])
    print(f"    {removal_sentence(found) or 'too few rows for a step away from them'}")


def compare(
    workspace: Workspace,
    asked: Sequence[Example],
    forget: Collection[int],
    score_N: Float[np.ndarray, " N"] | None,
    *,
    number: int = 0,
) -> list[Removal]:
    """Returns what a step away from some rows to forget does, then from draws of as many others.

    Positions and scores are those of the training examples; `number` is of rows, 0 for
    --retrieve.step_rows. Rows without an answer or with a score of minus infinity are in no group.
    Empty where there is nothing to forget, or fewer others.
    """
    rows = workspace.cut(workspace.train_rows, "training examples")
    is_able_N = rows.num_targets_N > 0
    if score_N is not None:
        is_able_N &= score_N > -np.inf
    able, own = {*np.flatnonzero(is_able_N).tolist()}, {*forget}
    number = number or workspace.config.retrieve.step_rows
    groups = [_draw(workspace, own & able, "step away", number)]
    groups += [
        _draw(workspace, able - own, f"step away from others {n}", len(groups[0]))
        for n in range(DRAWS)
    ]
    if not len(groups[0]) == len(groups[-1]) > 0:
        return []
    scores = [None if score_N is None else float(score_N[group].mean()) for group in groups]
    changes = _changes(workspace, rows, groups, workspace.encode(asked, "queries"))
    return [
        Removal(len(groups[0]), score, *change)
        for score, change in zip(scores, changes, strict=True)
    ]


def _draw(
    workspace: Workspace, rows: Collection[int], label: str, number: int
) -> Int[np.ndarray, " M"]:
    drawn = shuffled(sorted(rows), seed=workspace.config.seed, label=label)[:number]
    return np.array(sorted(drawn), np.int64)


def _changes(
    workspace: Workspace,
    rows: Encoded,
    groups: Sequence[Int[np.ndarray, " M"]],
    answers: Encoded,
) -> Iterator[tuple[float, float]]:
    """Yields the change of the answers' mean loss by a step of each group, predicted and real."""
    lora, count = workspace.finetuned, len(answers.ids)
    asked = batches.plan_rows(answers, np.arange(count))
    plans = [asked, *(batches.plan_rows(rows, group) for group in groups)]
    # One shape for rows and answers: it is compiled once.
    shape = {name: max(getattr(p, name) for p in plans) for name in ("length", "num_targets")}

    def loss(at: Tree) -> float:
        return float(workspace.likelihood_of(workspace.with_adapter(at), answers).nll_N.mean())

    toward, before = _gradient(workspace, answers, asked._replace(**shape)), loss(lora)
    step = jax.jit(functools.partial(away.step_along, share=SHARE))
    for plan in plans[1:]:
        gradient = _gradient(workspace, rows, plan._replace(**shape))
        moved, predicted = step(lora, gradient, toward)
        yield float(predicted) / count, loss(moved) - before


def _gradient(workspace: Workspace, encoded: Encoded, plan: batches.BatchPlan) -> Tree:
    """Returns the gradient of the summed losses of a plan's rows, in batches of unlearning."""
    settings, model = workspace.config.unlearn, workspace.model
    gradient, total = away.loss_gradient(model.decoder_for(remat=settings.remat)), None
    for line in batches.in_lines(plan.rows, settings.micro_batch_size or settings.batch_size):
        batch = meshes.place_rows(batches.make_batch(encoded, plan._replace(rows=line)))
        found = gradient(workspace.finetuned, model.base, batch)
        total = found if total is None else jax.tree.map(jnp.add, total, found)
    return total
