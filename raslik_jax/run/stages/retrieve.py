"""From scores to forget and retain sets: the sizes and each strategy's sets."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from raslik_jax.base.messages import some_of
from raslik_jax.config import Config
from raslik_jax.data import examples
from raslik_jax.data.read import formats
from raslik_jax.evaluate.metrics import measure, nest
from raslik_jax.evaluate.sentences import write
from raslik_jax.evaluate.taught import Taught, taught_of
from raslik_jax.retrieve import finding, noise, sets
from raslik_jax.retrieve import strategies as strategies_lib
from raslik_jax.retrieve.selectors import Cut, Selection, find_cut, is_common, summarize_selection
from raslik_jax.retrieve.strategies import STRATEGIES, Request
from raslik_jax.run import artifacts
from raslik_jax.run.recipes import Case, Recipe
from raslik_jax.run.stages import sketch as sketch_lib
from raslik_jax.run.stages.scores import EVIDENCE, finds_number, is_scored, needs_of, read_scores
from raslik_jax.run.workspace import Workspace

_NO_SETS = Selection(np.array([], np.int64), np.array([], np.int64))


def make_sizes(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the sizes of the sets, the same for every strategy, and the rows that are in none.

    The sizes are given, or the rule of --retrieve.select finds them from RASLIK's scores. With
    --retrieve.held_out the queries that measure the run are made here. They are in no set. If the
    rule `gap` finds no row, a finding is written and nothing is held out.
    """
    settings, rows = workspace.config.retrieve, workspace.corpus.train
    is_eligible_N = workspace.cut(workspace.train_rows, "training examples").num_targets_N > 0
    num_targets = sets.count_targets(rows, is_eligible_N)
    own = _own_sets(workspace.config)
    sizes: tuple[int, int] | None = (0, 0)  # without a reader
    if len(own) < len(settings.strategies):
        num_eligible = int(is_eligible_N.sum())
        sizes = sets.set_sizes(settings, num_targets=num_targets, num_eligible=num_eligible)
    chosen = _NO_SETS
    if sizes is None or (settings.held_out and not own):
        chosen = _select_by_influence(workspace, num_targets, folder)
        sizes = len(chosen.forget), len(chosen.retain)
    if settings.held_out and not (folder / artifacts.SIZES_FINDING.file).is_file():
        ruled = chosen  # those of it that are held out are taken off the number
        for name in own[:1]:
            request = request_of(workspace, name, is_eligible_N, (0, 0))
            _, chosen = strategies_lib.choose(STRATEGIES[name], request)
        kept = _hold_out(workspace, chosen, folder)
        is_eligible_N[kept] = False
        num_forget = max(0, sizes[0] - int(np.isin(ruled.forget, kept).sum()))
        most = sets.most_retained(settings, num_forget, int(is_eligible_N.sum()))
        sizes = num_forget, min(sizes[1], most)
    barred = [row.example_id for row, ok in zip(rows, is_eligible_N, strict=True) if not ok]
    artifacts.SIZES.write(folder, dict(num_forget=sizes[0], num_retain=sizes[1], barred=barred))


def _select_by_influence(workspace: Workspace, num_targets: int, folder: pathlib.Path) -> Selection:
    """Returns the sets that the rule chooses by RASLIK's scores; writes the cut that it finds."""
    settings, rows = workspace.config.retrieve, workspace.corpus.train
    influence_N = read_scores(workspace, EVIDENCE)
    if settings.select == "gap" and not settings.num_forget:
        store, row_N, queries = sketch_lib.ask_index(workspace)
        forget_N = np.full(store.num_rows, -np.inf, np.float32)
        forget_N[row_N] = influence_N
        sigma = noise.edge_sigma(store, queries, forget_N)
        print(f"    standard deviation of the scores near the edge of the noise: {sigma:.2e}")
        cut = find_cut(influence_N, sigma=sigma)
        artifacts.CUT.write(folder, cut)
        if why := _why_none(workspace, cut, influence_N):
            artifacts.SIZES_FINDING.write(folder, why)
            return _NO_SETS
        count = int((influence_N > -np.inf).sum())
        for name in ("cut_found", "cut_common")[: 1 + is_common(cut, count)]:
            print(f"    {write(name, cut, cut.num_forget / count)}")
        settings = dataclasses.replace(settings, num_forget=cut.num_forget)
    ids, seed = [row.example_id for row in rows], workspace.config.seed
    return sets.select_sets(influence_N, ids, settings, num_targets=num_targets, seed=seed)


def _why_none(workspace: Workspace, cut: Cut, score_N: Float[np.ndarray, " N"]) -> str:
    """Returns why a run's cut is no find by the base's likelihood and the chance; else ""."""
    config, root, taught = workspace.config, workspace.root, Taught(False, "")
    if config.evaluate.traced:
        rows = artifacts.traced("finetuned").read(root)
        base = artifacts.traced("backbone").find(root) or [None] * len(rows)
        pairs = zip(rows, base, strict=True)
        taught = taught_of([(row.nll, other and other.nll, row.drawn) for row, other in pairs])
    found = artifacts.CHANCE.current(root, len(score_N)) if config.retrieve.null_prompts else None
    q_N = None if found is None else found.q_N
    return finding.why_none(cut, score_N, q_N, is_taught=taught.is_taught, refuted=taught.refuted)


def _hold_out(workspace: Workspace, chosen: Selection, folder: pathlib.Path) -> list[int]:
    """Writes queries made from training examples; returns the examples to keep out of the sets."""
    config, rows, split = workspace.config, workspace.corpus.train, examples.HELD_OUT
    # Of a long conversation the prompt of the last answer may be too long to be asked.
    long = np.flatnonzero(workspace.train_rows.lengths_N > config.corpus.max_len).tolist()
    fits = workspace.fit([rows[position] for position in long])
    held_out = sets.hold_out(
        rows,
        chosen.forget.tolist(),
        read_scores(workspace, EVIDENCE),
        share=config.retrieve.held_out,
        seed=config.seed,
        traced=workspace.retrieval_queries(),
        unasked=[position for position, fit in zip(long, fits, strict=True) if not fit],
    )
    for kind in ("target", "normal"):
        queries = [rows[position] for position in getattr(held_out, kind)]
        labels = [{"is_target": row.is_target, "source": row.source} for row in queries]
        artifacts.measured_rows(split, kind).write(folder, queries, extra=labels)
    if held_out.target or held_out.normal:
        print(
            f"    {len(held_out.target):,} of the examples to forget and "
            f"{len(held_out.normal):,} unrelated ones are kept out of the sets: their prompts "
            "measure the run"
        )
    return [*held_out.target, *held_out.normal, *held_out.alike]


def request_of(
    workspace: Workspace, strategy: str, is_eligible_N: Bool[np.ndarray, " N"], sizes: Any
) -> Request:
    """Returns the inputs of a strategy."""
    config = workspace.config
    found = {need: read_scores(workspace, need) for need in STRATEGIES[strategy].needs}
    return Request(
        examples=workspace.corpus.train,
        is_eligible_N=np.logical_and.reduce(
            [is_eligible_N, *(is_scored(score_N) for score_N in found.values())]
        ),
        seed=config.seed,
        retain_within=config.retrieve.retain_within,
        settings=config.retrieve[strategy],
        queries=workspace.retrieval_queries(),
        scores=found,
        fields=formats.parse_fields(getattr(config.corpus.own, "fields", "")),
        num_forget=sizes[0],
        num_retain=sizes[1],
    )


def make_sets(workspace: Workspace, strategy: str, folder: pathlib.Path) -> None:
    """Writes one strategy's forget and retain sets and their numbers of labeled targets."""
    config, rows, record = workspace.config, workspace.corpus.train, STRATEGIES[strategy]
    sizes = artifacts.SIZES.read(workspace.root)
    barred = frozenset(sizes["barred"])
    is_eligible_N = np.array([row.example_id not in barred for row in rows], bool)
    counts = sizes["num_forget"], sizes["num_retain"]
    request = request_of(workspace, strategy, is_eligible_N, counts)
    is_eligible_N = request.is_eligible_N
    named = record.named(request) if record.named else {}
    _tell_left_out(named, request)
    scores, selection = strategies_lib.choose(record, request)
    evidence: dict[str, Any] = {"forget_set": selection.forget, "retain_set": selection.retain}
    if EVIDENCE in needs_of(config):
        evidence["influence_N"] = score_N = read_scores(workspace, EVIDENCE)
        if record.brings_sets:  # a place in a file is no score
            scores = strategies_lib.take_poles(request, np.where(is_scored(score_N), score_N, 0))
    for name, chosen, score_N in zip(Selection._fields, selection, scores, strict=True):
        extra = [
            {"is_target": rows[i].is_target, "source": rows[i].source, "score": float(score_N[i])}
            for i in chosen
        ]
        artifacts.set_rows(strategy, name).write(folder, [rows[i] for i in chosen], extra=extra)
    labels = [row.is_target for row in rows]
    if None not in labels and any(labels):
        evidence["labels_N"] = np.asarray(labels, bool)
        # With labels of one kind alone there is nothing to tell apart.
        if record.ranks_all and not all(labels):  # rows to measure on have their place too
            every = request_of(workspace, strategy, np.ones(len(rows), bool), counts)
            evidence["ranking_N"] = record.score(every).forget_N
    entry = {
        **nest(measure(evidence))["retrieval"],
        "num_queries": len(request.queries),  # the model card has it
        "named": [rows[i].example_id for i in next(iter(named.values()), ())],  # those to forget
        "selection": summarize_selection(selection, *scores, labels=labels),
    }
    if "precision" in entry:
        print(
            f"    precision {entry['precision']:.3f} (base rate {entry['base_rate']:.3f}), "
            f"{entry['targets_in_retain']} targets in the retain set"
        )
    artifacts.set_summary(strategy).write(folder, entry)


def _tell_left_out(named: Mapping[str, Sequence[int]], request: Request) -> None:
    """Prints which rows that files name are in no set."""
    for flag, positions in named.items():
        if left := [place for place in positions if not request.is_eligible_N[place]]:
            ids = some_of(request.examples[place].example_id for place in left)
            said = f"{len(left):,} of {len(positions):,} rows of {flag} are in no set"
            print(f"    {said}, because they are held out or have no token of an answer: {ids}")


def _own_sets(config: Config) -> list[str]:
    """Returns the strategies with given sets."""
    return [name for name in config.retrieve.strategies if STRATEGIES[name].brings_sets]


def _of_sizes(case: Case) -> tuple[str, str]:
    """Returns the inputs of the sizes of the sets: files and settings."""
    config, chosen = case.config, case.config.retrieve
    reads, own = "", _own_sets(config)
    settings = "{text} retrieve.select retrieve.num_forget retrieve.num_retain "
    settings += "retrieve.retain_within retrieve.held_out "
    if finds_number(config):  # in the scores; what a finding is read from
        reads += "retrieve/influence sketch/index retrieve/queries {queries}"
        reads += " retrieve/traced" if config.evaluate.traced else ""
        reads += " retrieve/chance" if chosen.null_prompts else ""
        settings += "retrieve.center evaluate.traced retrieve.null_prompts"
    if chosen.held_out:  # drawn from the sets, by the scores, for the queries
        reads += f" retrieve/{EVIDENCE} {{queries}} {{model}}"
        settings += " seed sketch.query_output " + " ".join(f"retrieve.{n}" for n in own)
    return f"{{rows}} {reads}", settings


def _reads_of_sets(case: Case) -> str:
    """Returns the scores that a strategy reads and those that measure the sets of all."""
    needs = sorted({*STRATEGIES[case.member].needs, *({EVIDENCE} & needs_of(case.config))})
    return "{train} {queries} retrieve/sizes " + " ".join(f"retrieve/{need}" for need in needs)


UNITS = (
    Recipe(
        "retrieve/sizes",
        make_sizes,
        lambda case: _of_sizes(case)[0],
        lambda case: _of_sizes(case)[1],
        # Without a strategy that reads them the sizes are 0.
        values=lambda case: {
            "given": _own_sets(case.config) == list(case.config.retrieve.strategies)
        },
        writes={"sizes": 11},
        is_alone=True,
    ),
    Recipe(
        "retrieve/{0}",
        make_sets,
        _reads_of_sets,
        # The rule decides whether there are scores to measure sets by.
        "seed sketch.query_output retrieve.select retrieve.retain_within retrieve.{0}",
        writes={"sets": 8},
        members=lambda config: config.retrieve.strategies,
        is_alone=True,
    ),
)
