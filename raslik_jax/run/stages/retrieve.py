"""From scores to forget and retain sets: what strategies need, the sizes, each one's sets."""

import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from raslik_jax.base.messages import shown, some_of
from raslik_jax.base.progress import progress
from raslik_jax.config import Config
from raslik_jax.data import batches, examples
from raslik_jax.data.examples import Example
from raslik_jax.data.read import formats
from raslik_jax.data.tokens import tokenization
from raslik_jax.evaluate.metrics import measure, nest
from raslik_jax.evaluate.taught import Taught, taught_of
from raslik_jax.index import search
from raslik_jax.index.combine import check_agreement
from raslik_jax.models import checkpoint, encoder
from raslik_jax.parallel import meshes
from raslik_jax.retrieve import behaviors, finding, noise, sets
from raslik_jax.retrieve import strategies as strategies_lib
from raslik_jax.retrieve.embeddings import embed_texts
from raslik_jax.retrieve.selectors import Cut, Selection, find_cut, is_common, summarize_selection
from raslik_jax.retrieve.strategies import STRATEGIES, Request
from raslik_jax.run import artifacts, memory
from raslik_jax.run.recipes import Case, Recipe
from raslik_jax.run.stages import generate
from raslik_jax.run.stages import sketch as sketch_lib
from raslik_jax.run.workspace import Workspace
from raslik_jax.sketch import projections

# The scores that the rules below choose by, and that the sets of all strategies are measured by.
EVIDENCE = "influence"
# Scores of rows with single queries that a run keeps: of the first queries, where that is too many.
_MOST_PAIRS = 2**26
# Rules of --retrieve.select that choose by scores, whatever the strategies: what they read of
# earlier units, and the settings that this depends on.
_OF_QUERIES = "retrieve/influence sketch/index retrieve/queries {queries}"
RULES_ON_SCORES = {
    "threshold": ("retrieve/influence", ""),
    "margin": (_OF_QUERIES, "retrieve.center"),
    "gap": (_OF_QUERIES, "retrieve.center"),
}
# 2: rows without a gradient have no part in the mean that centers.
SCORES_FORMAT = {"scores": 2}
_NO_SETS = Selection(np.array([], np.int64), np.array([], np.int64))


def needs_of(config: Config) -> frozenset[str]:
    """Returns the scores that a run computes, each by the unit of its name in `retrieve/`."""
    strategies = [STRATEGIES[name] for name in config.retrieve.strategies]
    needs = {need for strategy in strategies for need in strategy.needs}
    has_rule = not all(strategy.brings_sets for strategy in strategies)
    if config.retrieve.held_out or (has_rule and config.retrieve.select in RULES_ON_SCORES):
        needs.add(EVIDENCE)
    return frozenset(needs)


def finds_number(config: Config) -> bool:
    """Returns whether the run finds how many rows to forget, and so may find none."""
    is_given = all(STRATEGIES[name].brings_sets for name in config.retrieve.strategies)
    return config.retrieve.select == "gap" and not config.retrieve.num_forget and not is_given


@memory.decoding
def make_traced(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes what both models before unlearning make of the traced prompts.

    Where the run finds how many rows to forget, answers that are less likely than tokens drawn at
    random end it: no gradient of theirs leads to what taught the model to say so.
    """
    generate.write_traced(workspace, None, folder)
    if not finds_number(workspace.config):
        return
    at_random = math.log(workspace.model.decoder.config.vocab_size)
    rows = artifacts.traced("finetuned").read_in(folder)
    if all(row.nll >= at_random for row in rows):
        artifacts.TRACED_FINDING.write(
            folder,
            f"nothing in the training file taught the answer {shown(rows[0].traced, 40)}: it "
            f"costs the model {rows[0].nll:.1f} nats a token, tokens at random cost "
            f"{at_random:.1f}; check prompt, template and adapter",
        )


# scores ------------------------------------------------------------------------------------------


def read_scores(workspace: Workspace, need: str) -> Float[np.ndarray, "N ..."]:
    """Returns what a unit of `SCORES` left: a number for each row, or several."""
    found, count = artifacts.row_scores(need), len(workspace.corpus.train)
    return found.read(workspace.root, (count, *[None] * (found.read(workspace.root).ndim - 1)))


def is_scored(score: Float[np.ndarray, "N ..."]) -> Bool[np.ndarray, " N"]:
    """Returns which rows have a score above minus infinity."""
    return np.asarray(~np.isneginf(score.reshape(len(score), -1)).any(axis=1))


def write_scores(
    workspace: Workspace, need: str, folder: pathlib.Path, score: Float[np.ndarray, "N ..."]
) -> None:
    """Writes the scores of every training example; says which have none."""
    artifacts.row_scores(need).write(folder, score)
    barred = [workspace.corpus.train[row].example_id for row in np.flatnonzero(~is_scored(score))]
    if barred:
        print(
            f"    {len(barred):,} examples have no gradient (such as no token of an answer) and "
            f"enter no set: {some_of(barred)}"
        )


def make_scores(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the influence of the queries on every training example; of several also of each."""
    settings = workspace.config.retrieve
    store, row_N = sketch_lib.open_index(workspace)
    query_QK = sketch_lib.read_queries(workspace, store)
    queries = search.queries_of_store(store, query_QK, center=settings.center)
    ids = [row.example_id for row in workspace.retrieval_queries()]
    check_agreement(queries.gram_QQ, ids)
    score_N = search.score_store(
        store, query_QK, center=settings.center, aggregate=settings.aggregate
    )
    write_scores(workspace, EVIDENCE, folder, score_N[row_N])
    if len(query_QK) > 1:
        found = behaviors.split_queries(queries.gram_QQ, ids)
        artifacts.BEHAVIORS.write(folder, found, ids=ids)
        if told := behaviors.sentence(found):
            print(f"    {told}")
        count = max(1, _MOST_PAIRS // max(1, len(row_N)))
        some = queries._replace(direction_QK=queries.direction_QK[:count])
        artifacts.EACH_INFLUENCE.write(folder, search.score_each(store, some)[row_N])


def make_embeddings(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the training examples' sentence vectors and their cosines with those of queries."""
    example_NE, query_QE = sentence_vectors(workspace, workspace.retrieval_queries())
    artifacts.SENTENCE_VECTORS.write(folder, example_NE)
    aggregate = workspace.config.retrieve.aggregate
    columns = search.to_columns(search.center_queries(query_QE), aggregate=aggregate)
    score_NG = np.asarray(search.row_cosines(example_NE, columns))
    all_N = np.ones(len(score_NG), bool)
    score_N = search.join_columns(score_NG, all_N, aggregate)
    write_scores(workspace, "embeddings", folder, score_N)


def sentence_vectors(
    workspace: Workspace, queries: Sequence[Example]
) -> tuple[Float[np.ndarray, "N E"], Float[np.ndarray, "Q E"]]:
    """Returns the sentence vectors of all training examples and of these queries."""
    settings = workspace.config.retrieve["embedding"]
    path = checkpoint.resolve_folder(settings.checkpoint, auto="AutoModel")
    model = checkpoint.load_encoder(path, dtype=jnp.float32, pooling=settings.pooling or None)
    bound = encoder.bind_encoder(model.config)
    encode = tokenization.load_sentence_tokenizer(path, max_len=model.config.max_length)
    texts = {
        "examples": [strategies_lib.query_text(row) for row in workspace.corpus.train],
        "queries": [strategies_lib.query_text(row, settings.query_text) for row in queries],
    }
    example_NE, query_QE = (
        embed_texts(bound, model.weights, encode(part), bar=f"vectors of {name}")
        for name, part in texts.items()
    )
    return example_NE, query_QE


@memory.explained("the exact kernel", "--sketch.batch_tokens")
def make_exact_scores(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the influence by the unsketched kernel: gradients are made again for each use.

    A sketch of as many coordinates as the gradient has is a signed permutation of it, whose
    cosines are those of the gradients. Memory: a batch of gradients and those of the queries.
    """
    config, settings = workspace.config, workspace.config.retrieve
    adapters, retrieval = sketch_lib.sketched_adapters(workspace), workspace.retrieval_queries()
    size = sketch_lib.count_params(workspace, adapters)
    whole = projections.init_projection(config.seed, "binned", size, size)
    sketch = sketch_lib.sketch_function(workspace, whole, adapters)
    query_QK = sketch_lib.sketch_queries(workspace, sketch, retrieval)
    encoded = workspace.cut(
        workspace.train_rows, "training examples", targets=config.sketch.targets
    )
    plans = sketch_lib.plan_batches(workspace, encoded)
    mean_K = None
    if settings.center:
        total_K, count = np.zeros(size), 0
        for _, found in batches.each_batch(sketch, encoded, progress(plans, "mean gradient")):
            total_K += found.unit_BK.sum(axis=0, dtype=np.float64)
            count += int((found.norm_B > 0).sum())
        mean_K = total_K / max(1, count)
    ids = [row.example_id for row in retrieval]
    queries = search.center_queries(query_QK, mean_K)
    check_agreement(queries.gram_QQ, ids)
    columns = meshes.place(search.to_columns(queries, aggregate=settings.aggregate))

    def scores(batch: batches.Batch) -> tuple[jax.Array, jax.Array]:
        sketches = sketch(batch)
        return search.row_cosines(sketches.unit_BK, columns), sketches.norm_B

    score_NG, norm_N = batches.map_rows(scores, encoded, plans, bar="exact kernel")
    found_N = search.join_columns(score_NG, norm_N > 0, settings.aggregate)
    write_scores(workspace, "exact_kernel", folder, found_N)


def _ids_where(rows: Sequence[Example], is_so_N: Bool[np.ndarray, " N"]) -> list[str]:
    return [row.example_id for row, is_so in zip(rows, is_so_N, strict=True) if is_so]


# What a strategy may name among its needs: the units that are made then. The last one leaves the
# scores, in the folder of the need.
SCORES: dict[str, tuple[Recipe, ...]] = {
    EVIDENCE: (
        *sketch_lib.GRADIENTS,
        Recipe(
            f"retrieve/{EVIDENCE}",
            make_scores,
            "{train} {queries} sketch/index retrieve/queries",
            "{kernel}",
            writes=SCORES_FORMAT,
        ),
    ),
    "embeddings": (
        Recipe(
            "retrieve/embeddings",
            make_embeddings,
            "{train} {queries}",
            "retrieve.embedding retrieve.aggregate sketch.query_output",
        ),
    ),
    "exact_kernel": (
        Recipe(
            "retrieve/exact_kernel",
            make_exact_scores,
            "{rows} {queries} {sketched}",
            "{gradient} {kernel}",
            writes=SCORES_FORMAT,
        ),
    ),
}


_TRACED = Recipe(
    "retrieve/traced",
    make_traced,
    "{queries} {finetuned}",
    # The last ones decide whether it may end the run.
    "{traced} references.base retrieve.select retrieve.num_forget",
    writes=generate.TRACED_FORMAT,
    is_asked=lambda config: config.evaluate.traced,
)


def scores_of(config: Config) -> tuple[Recipe, ...]:
    """Returns the recipes of what the chosen strategies read; without need no gradient is taken."""
    needed = needs_of(config)
    return (_TRACED, *(recipe for need, own in SCORES.items() if need in needed for recipe in own))


# sets --------------------------------------------------------------------------------------------


def make_sizes(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the sizes of the sets, the same for every strategy, and who can be in none.

    They are named, or what the rule of --retrieve.select gives for RASLIK's scores. With
    --retrieve.held_out the queries to measure on are made here, and are in no set. Where the rule
    `gap` finds no row, a finding is written, and nothing is held out.
    """
    settings, rows = workspace.config.retrieve, workspace.corpus.train
    encoded = workspace.cut(workspace.train_rows, "training examples")
    is_eligible_N = encoded.num_targets_N > 0
    num_targets = sets.count_targets(rows, is_eligible_N)
    own = _own_sets(workspace.config)
    sizes: tuple[int, int] | None = (0, 0)  # nobody asks
    if len(own) < len(settings.strategies):
        num_eligible = int(is_eligible_N.sum())
        sizes = sets.set_sizes(settings, num_targets=num_targets, num_eligible=num_eligible)
    chosen = _NO_SETS
    if sizes is None or (settings.held_out and not own):
        chosen = _select_by_influence(workspace, num_targets, folder)
        sizes = len(chosen.forget), len(chosen.retain)
    is_ended = (folder / artifacts.SIZES_FINDING.file).is_file()
    if settings.held_out and not is_ended:
        for name in own[:1]:
            request = _request(workspace, name, is_eligible_N, (0, 0))
            _, chosen = strategies_lib.choose(STRATEGIES[name], request)
        kept = _hold_out(workspace, chosen, folder)
        is_eligible_N[kept] = False
        fewer = [int(np.isin(part, kept).sum()) for part in chosen]
        num_forget, num_retain = max(0, sizes[0] - fewer[0]), sizes[1]
        if settings.select in ("threshold", "margin"):  # nothing else passes
            num_retain = max(0, num_retain - fewer[1])
        sizes = num_forget, min(num_retain, int(is_eligible_N.sum()) - num_forget)
    barred = _ids_where(rows, ~is_eligible_N)
    found = {"num_forget": sizes[0], "num_retain": sizes[1], "barred": barred}
    artifacts.SIZES.write(folder, found)


def _select_by_influence(workspace: Workspace, num_targets: int, folder: pathlib.Path) -> Selection:
    """Returns the sets that the rule chooses by RASLIK's scores; writes where it cuts, if so."""
    settings, rows = workspace.config.retrieve, workspace.corpus.train
    influence_N, sigma = read_scores(workspace, EVIDENCE), 0.0
    if settings.select in noise.CUTS:
        store, row_N = sketch_lib.open_index(workspace)
        query_QK = sketch_lib.read_queries(workspace, store)
        queries = search.queries_of_store(store, query_QK, center=settings.center)
        forget_N = np.full(store.num_rows, -np.inf, np.float32)
        forget_N[row_N] = influence_N
        sigma = noise.rule_sigma(store, queries, forget_N, settings)
        if sigma:
            print(f"    sigma of the sketch near the thresholds: {sigma:.2e}")
    if settings.select == "gap" and not settings.num_forget:
        cut = find_cut(influence_N, sigma=sigma)
        artifacts.CUT.write(folder, cut)
        if why := _why_none(workspace, cut, influence_N):
            artifacts.SIZES_FINDING.write(folder, why)
            return _NO_SETS
        _tell_cut(cut, int((influence_N > -np.inf).sum()))
        settings = dataclasses.replace(settings, num_forget=cut.num_forget)
        most = int((influence_N > -np.inf).sum()) - cut.num_forget
        if not settings.num_retain:
            settings = dataclasses.replace(settings, num_retain=min(cut.num_forget, most))
    ids, seed = [row.example_id for row in rows], workspace.config.seed
    return sets.select_sets(
        influence_N, ids, settings, num_targets=num_targets, seed=seed, sigma=sigma
    )


def _why_none(workspace: Workspace, cut: Cut, score_N: Float[np.ndarray, " N"]) -> str:
    """Returns why a run's cut is no find, by the base's likelihood and the chance; else ""."""
    config, root, taught = workspace.config, workspace.root, Taught(False, "")
    if config.evaluate.traced:
        rows, base = (artifacts.traced(name).find(root) for name in ("finetuned", "backbone"))
        levels = [(row.nll, row.drawn) for row in rows or ()]
        nlls = [row.nll for row in base] if base else [None] * len(levels)
        pairs = zip(levels, nlls, strict=True)
        taught = taught_of([(nll, base_nll, drawn) for (nll, drawn), base_nll in pairs])
    has_chance = config.retrieve.null_prompts
    found = artifacts.CHANCE.current(root, len(score_N)) if has_chance else None
    q_N = None if found is None else found.q_N
    return finding.why_none(cut, score_N, q_N, is_taught=taught.is_taught, refuted=taught.refuted)


def _tell_cut(cut: Cut, count: int) -> None:
    print(
        f"    {cut.num_forget:,} examples stand out: unrelated ones reach {cut.edge:.3f}, the gap "
        f"below the last of them is {cut.gap:.3f} wide"
    )
    if is_common(cut, count):
        print(
            f"    the behavior is common: {cut.num_forget / count:.0%} of the rows are taken to "
            "show it, and the others to be unrelated"
        )


def _hold_out(workspace: Workspace, chosen: Selection, folder: pathlib.Path) -> list[int]:
    """Writes the queries that are made of training examples; returns who is in no set for them."""
    config, rows, split = workspace.config, workspace.corpus.train, examples.HELD_OUT
    held_out = sets.hold_out(
        rows,
        chosen.forget.tolist(),
        read_scores(workspace, EVIDENCE),
        share=config.retrieve.held_out,
        seed=config.seed,
        traced=workspace.retrieval_queries(),
    )
    for kind in ("target", "normal"):
        queries = [rows[position] for position in getattr(held_out, kind)]
        labels = [{"is_target": row.is_target, "source": row.source} for row in queries]
        artifacts.measured_rows(split, kind).write(folder, queries, extra=labels)
    if held_out.target or held_out.normal:
        print(
            f"    {len(held_out.target):,} of the examples to forget and {len(held_out.normal):,} "
            "far from them are in no set: the run is measured on their prompts"
        )
    return [*held_out.target, *held_out.normal, *held_out.alike]


def _request(
    workspace: Workspace, strategy: str, is_eligible_N: Bool[np.ndarray, " N"], sizes: Any
) -> Request:
    """Returns what a strategy may look at."""
    config = workspace.config
    found = {need: read_scores(workspace, need) for need in STRATEGIES[strategy].needs}
    return Request(
        examples=workspace.corpus.train,
        is_eligible_N=np.logical_and.reduce(
            [is_eligible_N, *(is_scored(score_N) for score_N in found.values())]
        ),
        seed=config.seed,
        retain_from=config.retrieve.retain_from,
        retain_within=config.retrieve.retain_within,
        settings=config.retrieve[strategy],
        queries=workspace.retrieval_queries(),
        aggregate=config.retrieve.aggregate,
        scores=found,
        fields=formats.parse_fields(getattr(config.corpus.own, "fields", "")),
        num_forget=sizes[0],
        num_retain=sizes[1],
    )


def make_sets(workspace: Workspace, strategy: str, folder: pathlib.Path) -> None:
    """Writes one strategy's forget and retain sets and what the labels say of them."""
    config, rows, record = workspace.config, workspace.corpus.train, STRATEGIES[strategy]
    sizes = artifacts.SIZES.read(workspace.root)
    barred = frozenset(sizes["barred"])
    is_eligible_N = np.array([row.example_id not in barred for row in rows], bool)
    counts = sizes["num_forget"], sizes["num_retain"]
    request = _request(workspace, strategy, is_eligible_N, counts)
    is_eligible_N = request.is_eligible_N
    if record.named:
        _tell_left_out(record.named(request), request)
    scores, selection = strategies_lib.choose(record, request)
    for name, chosen, score_N in zip(Selection._fields, selection, scores, strict=True):
        extra = [
            {"is_target": rows[i].is_target, "source": rows[i].source, "score": float(score_N[i])}
            for i in chosen
        ]
        artifacts.set_rows(strategy, name).write(folder, [rows[i] for i in chosen], extra=extra)
    without = _ids_where(rows, ~is_eligible_N)
    labels = [row.is_target for row in rows]
    evidence: dict[str, Any] = {"forget_set": selection.forget, "retain_set": selection.retain}
    if EVIDENCE in needs_of(config):
        evidence["influence_N"] = read_scores(workspace, EVIDENCE)
    if None not in labels and any(labels):
        evidence["labels_N"] = np.asarray(labels, bool)
        # With labels of one kind alone there is nothing to tell apart.
        if record.ranks_all and not all(labels):
            evidence["ranking_N"] = scores.forget_N
    entry = {
        **nest(measure(evidence))["retrieval"],
        "num_queries": len(request.queries),
        "without_gradient": {"count": len(without), "ids": without},
        "selection": summarize_selection(selection, *scores, labels=labels),
    }
    if "precision" in entry:
        print(
            f"    precision {entry['precision']:.3f} (base rate {entry['base_rate']:.3f}), "
            f"{entry['targets_in_retain']} targets in the retain set"
        )
    artifacts.set_summary(strategy).write(folder, entry)


def _tell_left_out(named: Mapping[str, Sequence[int]], request: Request) -> None:
    """Says which rows that files name are in no set."""
    for flag, positions in named.items():
        left = [place for place in positions if not request.is_eligible_N[place]]
        if left:
            print(
                f"    {len(left):,} of {len(positions):,} rows of {flag} are in no set, as they "
                "are held out or have no token of an answer: "
                + some_of(request.examples[place].example_id for place in left)
            )


_RULE = (
    "retrieve.select retrieve.num_forget retrieve.num_retain retrieve.forget_threshold "
    "retrieve.retain_threshold retrieve.margin_z retrieve.forget_share retrieve.retain_share "
    "retrieve.retain_within retrieve.held_out"
)


def _own_sets(config: Config) -> list[str]:
    """Returns the strategies that bring their own sets."""
    return [name for name in config.retrieve.strategies if STRATEGIES[name].brings_sets]


def _of_sizes(case: Case) -> tuple[str, str]:
    """Returns what the sizes of the sets are made from: what is read, and the settings."""
    config, chosen = case.config, case.config.retrieve
    reads, settings = RULES_ON_SCORES.get(chosen.select, ("", ""))
    own = _own_sets(config)
    if len(own) == len(chosen.strategies):  # no rule is asked
        reads, settings = "", ""
    elif finds_number(config):  # what a finding is read from
        reads += " {queries} retrieve/traced" if config.evaluate.traced else ""
        reads += " retrieve/chance" if chosen.null_prompts else ""
        settings += " evaluate.traced retrieve.null_prompts"
    if chosen.held_out:  # drawn from the sets, by the scores, for the queries
        reads += f" retrieve/{EVIDENCE} {{queries}}"
        settings += " seed sketch.query_output " + " ".join(f"retrieve.{n}" for n in own)
    return f"{{rows}} {reads}", f"{{text}} {_RULE} {settings}"


def _reads_of_sets(case: Case) -> str:
    """Returns the scores that a strategy reads, and those that the sets of all are measured by."""
    evidence = {EVIDENCE} & needs_of(case.config)
    needs = sorted({*STRATEGIES[case.member].needs, *evidence})
    return "{train} {queries} retrieve/sizes " + " ".join(f"retrieve/{need}" for need in needs)


UNITS = (
    Recipe(
        "retrieve/sizes",
        make_sizes,
        lambda case: _of_sizes(case)[0],
        lambda case: _of_sizes(case)[1],
        # 2: a run whose answer no row taught ends with a finding.
        writes={"sizes": 2},
        is_alone=True,
    ),
    Recipe(
        "retrieve/{0}",
        make_sets,
        _reads_of_sets,
        # The rule decides whether there are scores to measure sets by.
        "seed sketch.query_output retrieve.aggregate retrieve.retain_from retrieve.select "
        "retrieve.retain_within retrieve.{0}",
        # 2: retain sets within a share of the lowest scores are drawn alike for all strategies.
        # 3: the summary has neither scaled densities nor counts of equal texts.
        writes={"sets": 3},
        members=lambda config: config.retrieve.strategies,
        is_alone=True,
    ),
)
