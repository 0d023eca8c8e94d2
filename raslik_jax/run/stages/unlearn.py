"""Unlearning: a strategy's sets, an objective, a model after every epoch or of the best step."""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from raslik_jax.base.axes import Tree
from raslik_jax.data import batches
from raslik_jax.data.tokens import encoding
from raslik_jax.data.words import refused
from raslik_jax.evaluate import stopping
from raslik_jax.run import artifacts, memory, probing
from raslik_jax.run.artifacts import Variant
from raslik_jax.run.programs import REMAT, AbstractRun, Program, Shape, Work
from raslik_jax.run.recipes import Case, Recipe, variants_of
from raslik_jax.run.stages import generate
from raslik_jax.run.workspace import Workspace
from raslik_jax.train import loop, steps
from raslik_jax.train.objectives import OBJECTIVES, Objective


@memory.explained("unlearning", "--unlearn.micro_batch_size or --unlearn.max_len")
def unlearn(workspace: Workspace, variant: Variant, folder: pathlib.Path) -> None:
    """Unlearns one strategy's sets by one objective and saves the model of every epoch.

    With --unlearn.probe.stop it saves only the model of the step that its probes choose, as the
    last epoch. A killed run continues after its last finished epoch with the same result.
    """
    strategy, name = variant
    sets = {kind: read_set(workspace, strategy, kind) for kind in ("forget", "retain")}
    require_rows(workspace, name, [*sets.values()])
    settings = workspace.config.unlearn
    per_epoch = max(
        batches.num_steps_of(len(rows.ids), batch_size=settings.batch_size)
        for rows in sets.values()
    )
    longest = max(batches.next_rung(int(rows.lengths_N.max(initial=1))) for rows in sets.values())
    rate = workspace.learning_rate(strategy, name)
    rate_flag = f"--unlearn.{name}.learning_rate, or the rate of --unlearn.choice (it is {rate})"
    save, start = workspace.save_adapter, workspace.finetuned
    last, num_steps = folder / f"epoch-{settings.epochs}", per_epoch * settings.epochs
    after: dict[int, Callable[[Tree], bool | None]] = {
        per_epoch * epoch: functools.partial(save, folder / f"epoch-{epoch}")
        for epoch in settings.stored_epochs
    }
    prober = None
    with workspace.live(f"unlearn/{variant}") as live:
        if every := settings.probe.steps:
            prober = probing.Prober(workspace, sets, folder, live, save=save, start=start)
            ends = range(per_epoch, num_steps + 1, per_epoch)
            for step in {*range(every, num_steps, every), *ends}:
                saved = None if settings.probe.stop != "never" else after.get(step)
                after[step] = functools.partial(prober.look, step, saved)
        fitted = loop.fit(
            workspace.unlearning(name, rate, workspace.end_ids, longest),
            start,
            steps.Frozen(base=workspace.model.base, reference=start),
            functools.partial(draw_pairs, workspace, name, [*sets.values()]),
            num_steps=num_steps,
            what=f"unlearning of {strategy}'s sets by {name}",
            rate_flag=rate_flag,
            bar=f"{strategy} {name}",
            folder=folder,
            save_every=per_epoch,
            after=after,
            watch=live,
            on_divergence=prober.end_diverged if prober and prober.is_stopping else None,
        )
        if prober:
            prober.finish(last)
    log = [dict(zip(steps.Info._fields, row, strict=True)) for row in fitted.log_SF.tolist()]
    artifacts.steps(variant).write(folder, log)


def read_set(workspace: Workspace, strategy: str, kind: str) -> encoding.Encoded:
    """Returns the rows of a set that have an answer within --unlearn.max_len."""
    rows = artifacts.set_rows(strategy, kind).read(workspace.root)
    return cut_rows(workspace, [row.example_id for row in rows], kind)


def cut_rows(workspace: Workspace, ids: Sequence[str], kind: str) -> encoding.Encoded:
    """Returns training examples at --unlearn.max_len; those of a forget set must have an answer."""
    max_len = workspace.config.unlearn.max_len or workspace.config.corpus.max_len
    rows = workspace.train_rows.named(ids)
    encoded = workspace.cut(rows, f"{kind} examples", max_len=max_len)
    if kind == "forget":
        # A row that cannot be forgotten at this length is an error; a missing retain row is a line.
        encoding.require_answers(encoded, "forget examples", max_len=max_len)
    return encoded.with_answers()


def require_rows(workspace: Workspace, name: str, sets: Sequence[encoding.Encoded]) -> None:
    """Raises a ValueError if a needed set, to forget or to retain, has no answer left.

    An objective without a retain term needs no rows to retain.
    """
    needed = ("forget", "retain") if OBJECTIVES[name].retain else ("forget",)
    own, whole = workspace.config.unlearn.max_len, workspace.config.corpus.max_len
    flag = "--unlearn.max_len" if own else "--corpus.max_len"
    for kind, rows in zip(needed, sets, strict=False):
        if not rows.ids:
            raise refused("no_answer_room", kind=kind, tokens=own or whole, name=name, flag=flag)


def draw_pairs(
    workspace: Workspace, name: str, sets: Sequence[encoding.Encoded], start: int
) -> Iterator[tuple[batches.Batch, batches.Batch | None]]:
    """Returns batches of both sets; the smaller set is repeated within an epoch.

    An objective reads frozen models. Their hidden states are computed once for a row.
    """
    settings, known = workspace.config.unlearn, _known_states(workspace, name, sets)

    def drawn(of: int) -> Iterator[batches.Batch]:
        found = batches.epoch_batches(
            sets[of],
            start,
            batch_size=settings.batch_size,
            seed=workspace.config.seed + of,  # each set in an order of its own
            is_fixed=settings.fixed_padding,
        )
        most = _most_targets(sets[of])
        for batch in found:
            # One number of targets, so that fewer shapes are compiled.
            targets = min(most, batch.tokens_BL.shape[1])
            states = {one: _padded(rows, batch.row_B, targets) for one, rows in known[of].items()}
            yield dataclasses.replace(batch, num_targets=targets, known=states)

    kept = drawn(1) if OBJECTIVES[name].retain else itertools.repeat(None)
    return zip(drawn(0), kept, strict=False)


def _reads(objective: Objective) -> list[tuple[int, str]]:
    """Returns which set an objective reads under which frozen model: 0 is the forget set."""
    reads = [(int(of == "retain"), "reference") for of in objective.reads_reference]
    return reads + [(0, "backbone")] * objective.reads_backbone


def _most_targets(rows: encoding.Encoded) -> int:
    return -(-int(rows.num_targets_N.max()) // 8) * 8


def _padded(states: Sequence[np.ndarray], row_B: np.ndarray, width: int) -> np.ndarray:
    """Returns the states of some rows with zeros behind them, [B, T, E]."""
    cut = [states[row][:width] for row in row_B.tolist()]  # a dummy row is the last one
    return np.stack([np.pad(one, ((0, width - len(one)), (0, 0))) for one in cut])


def _known_states(
    workspace: Workspace, name: str, sets: Sequence[encoding.Encoded]
) -> list[dict[str, list[np.ndarray]]]:
    """Returns the states of `Batch.known` by model for each row of the sets, [targets, E] each."""
    model, joined = workspace.model, encoding.join(sets)
    shape = batches.plan_rows(joined, np.arange(len(joined.ids)))
    shape = shape._replace(num_targets=_most_targets(joined))
    known: list[dict[str, list[np.ndarray]]] = [{} for _ in sets]
    for of, frozen in _reads(OBJECTIVES[name]):
        find = steps.find_states(model.decoder)
        lora = workspace.finetuned if frozen == "reference" else workspace.backbone.lora
        rows = batches.in_lines(np.arange(len(sets[of].ids)), workspace.config.unlearn.batch_size)
        plans = [shape._replace(rows=line) for line in rows]
        of_rows, most_N = functools.partial(find, lora, model.base), sets[of].num_targets_N
        parts = {
            row: state[: most_N[row]].copy()  # a long row must not lengthen the others
            for row_B, found in batches.each_batch(of_rows, sets[of], plans)
            for row, state in zip(row_B.tolist(), found, strict=True)
        }
        known[of][frozen] = [parts[row] for row in range(len(parts))]
    return known


def _files_read(case: Case) -> str:
    sets = [artifacts.set_rows(case.member.strategy, kind).path for kind in ("forget", "retain")]
    reads = [*sets, "{tokens} {finetuned}"]
    if case.config.unlearn.probe.steps:
        names = ("validation_target", "validation_normal")
        reads += ["{train} {queries}", *(artifacts.corpus_rows(name).path for name in names)]
        reads += ["retrieve/sizes"] if case.config.retrieve.held_out else []
    return " ".join(reads)


def _settings(case: Case) -> str:
    settings = "{text} {model} unlearn unlearn.{0.algorithm}"
    if case.config.unlearn.probe.steps:  # else its settings decide nothing
        settings += " {decoding} unlearn.probe sketch.query_output sketch.batch_tokens "
        settings += "references.query_split references.base"
    return settings


def _values(case: Case) -> dict[str, Any]:
    rate = case.workspace.learning_rate(*case.member)
    values: dict[str, Any] = {f"unlearn.{case.member.algorithm}.learning_rate": rate}
    return values | ({"formats": {"probes": 4}} if case.config.unlearn.probe.steps else {})


def count_unlearning(run: AbstractRun, variant: Variant) -> Work:
    """An objective on an adapter that is kept after every epoch."""
    settings, model, name = run.config.unlearn, run.model, variant.algorithm
    reads, reads_retain = _reads(OBJECTIVES[name]), OBJECTIVES[name].retain is not None

    def batch_of(shape: Shape, of: int) -> batches.Batch:
        dtype = jax.tree.leaves(model.base["final_norm"])[0].dtype
        size = shape.rows, shape.targets, model.decoder.config.hidden_size
        known = {one: jax.ShapeDtypeStruct(size, dtype) for each, one in reads if each == of}
        return dataclasses.replace(shape.batch, known=known)

    shapes = run.epochs_of(settings, max(run.sizes.forget, run.sizes.retain))
    program = run.training(
        f"unlearn/{name}",
        run.unlearning(name, 1e-5),
        model.initial,
        steps.Frozen(base=model.base, reference=model.initial),
        shapes=shapes,
        batch=lambda shape: (batch_of(shape, 0), batch_of(shape, 1) if reads_retain else None),
        passes=(2 + REMAT * settings.remat) * (1 + reads_retain),
    )
    sizes, count = (run.sizes.forget, run.sizes.retain), batches.num_steps_of
    calls = sum(count(sizes[of], batch_size=settings.batch_size) for of, _ in reads)
    find, longest = steps.find_states(model.decoder), max(shapes, key=lambda shape: shape.slots)
    how: Any = {"shapes": {longest: calls} if calls else {}}
    how["model"] = run.forward._replace(target=0.0)  # the head is left out
    known = run.program("known states", find, model.initial, model.base, **how)
    looks: list[Program] = []
    if every := settings.probe.steps:
        rows = len(stopping.SETS) * settings.probe.rows
        looks = [generate.count_likelihoods(run, rows)]
        asked, most = settings.probe.answers, settings.probe.answer_tokens
        looks += generate.count_answers(run, asked, 1, most=most).programs if asked else ()
        epoch = max(1, (last := round(sum(shapes.values()))) // settings.epochs)
        looks *= 2 + len({*range(every, last, every), *range(epoch, last + 1, epoch)})
    return Work(len(settings.stored_epochs) * 4 * run.num_params, [program, known, *looks])


UNITS = (
    Recipe(
        "unlearn/{0}",
        unlearn,
        _files_read,
        _settings,
        values=_values,
        members=functools.partial(variants_of, retrains=False),
        is_resumable=True,
        work=count_unlearning,
    ),
)
