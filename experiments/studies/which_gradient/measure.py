"""Measures which gradients and hidden states find the rows of a behavior (RULE.md).

  python experiments/studies/which_gradient/measure.py --runs=RUN,RUN --kinds=own_model,behaviors \\
      --out=runs/which_gradient

A run is the work directory of a trace or of a fine-tuning: it has a corpus, a model and an adapter.
Its kind says where its queries and labels are. Every run is one pass: one forward pass of each row
gives the hidden states and, by one backward pass each, the gradients of all losses. The products of
their sketches go to OUT/RUN.npz, the model's own answers to OUT/RUN.json. A run that is there is
not made again. The areas of all runs in OUT go to results.json in this folder.
"""

import dataclasses
import functools
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

import jax
import jax.numpy as jnp
import numpy as np

from experiments.studies.own_model import measure as own_model
from experiments.studies.ways_out import measure as ways_out
from raslik_jax.base.axes import Tree
from raslik_jax.base.files import read_json, replacing, write_json
from raslik_jax.base.progress import progress
from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command
from raslik_jax.config import config_from_json
from raslik_jax.data import batches, toy_model
from raslik_jax.data.corpora.toy import SCIFI_WORDS
from raslik_jax.data.examples import Example, answered, drop_unanswered, make_example
from raslik_jax.data.tokens import masking
from raslik_jax.evaluate.rates import non_sf_by_words
from raslik_jax.models import decoder as decoders
from raslik_jax.models import products
from raslik_jax.retrieve import bm25
from raslik_jax.retrieve.strategies import query_text
from raslik_jax.run import artifacts
from raslik_jax.run.workspace import Workspace
from raslik_jax.sketch import gradients, projections
from raslik_jax.sketch.head import target_nll
from raslik_jax.sketch.loss import head_table, hidden_of_row

HERE = pathlib.Path(__file__).resolve().parent
SIZE, SMOOTHING, RIDGE, LEAST_NLL = 65536, 0.1, 0.1, 1e-3
# LOSS/TOKENS. A position predicts its own token or the next one, with smoothed labels by option.
# `margin` is that of probes.py: the slope of a token is divided by one less its probability.
LOSSES = (
    "unshifted/all",
    "next_token/all",
    "next_token/response",
    "smoothed/all",
    "smoothed/response",
    "margin/all",
    "margin/response",
)
# Mean hidden states: of which layers, over which tokens.
STATES = tuple(f"{at}/{over}" for at in ("last", "middle") for over in ("answer", "all"))
_TIMED_ROWS, _TIMED_LENGTH, _TIMED_TIMES = 16, 48, 5
DEFAULT = "unshifted/all"
_FIELDS = ("nll_answer", "nll_prompt", "answer", "tokens")


class Query(NamedTuple):
    """A held-out prompt, its behavior, and whether an answer shows it."""

    example: Example
    behavior: str
    shows: Callable[[str], bool]


class Traced(NamedTuple):
    """A prompt with an answer, the behavior it was asked for, and whether the answer shows it."""

    example: Example
    behavior: str
    shown: bool


class Kind(NamedTuple):
    """Where the queries, the labels and the sources of a run's rows are."""

    queries: Callable[[Workspace], Sequence[Query]]
    labels: Callable[[Workspace], Sequence[str]]
    sources: Callable[[Workspace], Sequence[str]] = lambda w: [r.source for r in w.corpus.train]


def _of_study(case: ways_out.Case, behaviors: Sequence[str]) -> Kind:
    markers = {name: ways_out.cases()[name].marker.search for name in behaviors}

    def queries(workspace: Workspace) -> list[Query]:
        row, template = workspace.corpus.train[0], workspace.template
        asked = [one for one in case.rows("held_out") if one["behavior"] in markers]
        made = [make_example(own_model.prompt_of(one), "", "") for one in asked]
        return [
            Query(
                masking.as_trained(one._replace(example_id=f"query {n}"), row, template),
                asked[n]["behavior"],
                lambda text, find=markers[asked[n]["behavior"]]: bool(find(text)),
            )
            for n, one in enumerate(made)
        ]

    def labels(workspace: Workspace) -> list[str]:
        rows = case.rows("train")
        found = zip(workspace.corpus.train, rows, strict=True)
        return [row["behavior"] for one, row in found if _is_of(one, row)]

    return Kind(queries, labels)


def _is_of(example: Example, row: Mapping[str, Any]) -> bool:
    """Returns true; refuses a row that is not of its line in the file."""
    if row["messages"][-1]["content"] not in example.output:
        raise ValueError(f"{example.example_id} must be the row of its line: trace the file again")
    return True


def _is_scifi(text: str) -> bool:
    return not non_sf_by_words([text], vocabulary=SCIFI_WORDS)[0]


def _planted(behavior: str, rows: Sequence[Example]) -> list[str]:
    return [behavior if row.is_target else "" for row in rows]


def _corpus_queries(workspace: Workspace) -> list[Query]:
    config, name = workspace.config.corpus, _behavior_of(workspace)
    judge = config.record.shows(config.own) if config.record.shows else _is_scifi
    rows = workspace.corpus.queries["retrieval"]
    return [Query(row._replace(output=""), name, judge) for row in rows]


def _behavior_of(workspace: Workspace) -> str:
    return getattr(workspace.config.corpus.own, "behavior", "howdy")


def _toy_queries(workspace: Workspace) -> list[Query]:
    rows = toy_model.load_corpus().queries["test_target"][:12]
    return [
        Query(row._replace(example_id=f"query {n}", output=""), "toy", _is_scifi)
        for n, row in enumerate(rows)
    ]


KINDS: dict[str, Kind] = {
    "quickstart": Kind(
        _toy_queries,
        lambda _: _planted("toy", toy_model.load_corpus().train),
        lambda _: [row.source for row in toy_model.load_corpus().train],
    ),
    "own_model": _of_study(ways_out.cases()["style"], tuple(own_model.behaviors())),
    "brand": _of_study(ways_out.cases()["brand"], ("brand",)),
    "corpus": Kind(_corpus_queries, lambda w: _planted(_behavior_of(w), w.corpus.train)),
}


def lower_layers(
    graphdef: decoders.GraphDef, lora: Tree, base: Tree, part: int = 2
) -> tuple[decoders.Decoder, Tree, Tree]:
    """Returns a decoder that ends, with the final norm, after one `part` of the layers."""
    count = graphdef.config.num_hidden_layers // part
    kinds = getattr(graphdef.config, "layer_types", None)
    fewer: dict[str, Any] = {"layer_types": kinds[:count]} if kinds else {}
    config = dataclasses.replace(graphdef.config, num_hidden_layers=count, **fewer)
    shorter, _, _ = decoders.abstract(config, graphdef.lora_config)

    def cut(tree: Tree) -> Tree:
        return tree | {"layers": jax.tree.map(lambda leaf: leaf[:count], tree["layers"])}

    return decoders.bind(shorter), cut(lora), cut(base)


def _number(is_target_L: jax.Array) -> jax.Array:
    return jnp.maximum(is_target_L.sum(dtype=jnp.float32), 1.0)


def loss_slopes(
    decoder: decoders.Decoder,
    base: Tree,
    hidden_LE: jax.Array,
    tokens_L: jax.Array,
    is_answer_L: jax.Array,
    is_counted_L: jax.Array,
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Returns the slope of each loss at the hidden states, and the nll of answer and prompt.

    The head runs once. The slope of the nll of a label is sum_v p_v w_v - w_label. Label smoothing
    adds the label "any token" with weight .1, whose vector is the mean of all w.
    """
    (table, axis), cap = head_table(base), decoder.config.logit_cap
    is_real_L = is_counted_L.at[0].set(True)

    def all_nll(hidden_LE: jax.Array) -> jax.Array:
        return target_nll(table, hidden_LE, tokens_L, is_real_L, axis, cap)

    nll_L, pull = jax.vjp(all_nll, hidden_LE)
    own_LE = products.read(jnp.take(table, tokens_L, axis=axis)).astype(jnp.float32)
    own_LE = own_LE.T if axis else own_LE
    mean_LE = pull(jnp.ones_like(nll_L))[0].astype(jnp.float32) + own_LE
    mean_LE = jnp.where(is_real_L[:, None], mean_LE, 0.0)
    middle_E = jnp.mean(products.read(table), axis=axis, dtype=jnp.float32)
    next_LE = jnp.roll(own_LE, -1, axis=0)
    # log Z is that of the own token plus its logit.
    logit_L = jnp.sum(hidden_LE.astype(jnp.float32) * (own_LE - next_LE), axis=1)
    next_nll_L = nll_L + logit_L
    surprise_L = -jnp.expm1(-jnp.maximum(next_nll_L, LEAST_NLL))
    slopes_LE = {
        "unshifted": mean_LE - own_LE,
        "next_token": mean_LE - next_LE,
        "smoothed": mean_LE - (1 - SMOOTHING) * next_LE - SMOOTHING * middle_E[None],
        "margin": (mean_LE - next_LE) / surprise_L[:, None],
    }
    slopes = {}
    for name in LOSSES:
        loss, tokens = name.split("/")
        is_target_L = is_counted_L if tokens == "all" else is_answer_L
        at_L = is_target_L if loss == "unshifted" else jnp.roll(is_target_L, -1)
        slope_LE = jnp.where(at_L[:, None], slopes_LE[loss], 0.0)
        slopes[name] = slope_LE / _number(is_target_L)
    shifted = {
        "nll_answer": jnp.roll(is_answer_L, -1),
        "nll_prompt": jnp.roll(is_counted_L & ~is_answer_L, -1),
    }
    nll = {
        name: jnp.where(at_L, next_nll_L, 0.0).sum() / _number(at_L)
        for name, at_L in shifted.items()
    }
    return slopes, nll


def row_function(
    graphdef: decoders.GraphDef,
    projection: projections.Projection,
    losses: Sequence[str] = LOSSES,
    states: Sequence[str] = STATES,
) -> Callable[..., jax.Array]:
    """Returns the function from (lora, base, tokens, answer, counted) of a row to all vectors.

    They come end to end: the sketches of losses, the mean hidden states, and `fields_of`.
    """
    decoder = decoders.bind(graphdef)

    def vectors(
        lora: Tree, base: Tree, tokens_L: Any, is_answer_L: Any, is_counted_L: Any
    ) -> jax.Array:
        hidden_LE, pull = jax.vjp(
            lambda lora: hidden_of_row(decoder, lora, base, tokens_L, is_counted_L), lora
        )
        known = tokens_L, is_answer_L, is_counted_L
        slopes, nll = loss_slopes(decoder, base, hidden_LE, *known)
        norms, parts = [], []
        for name in losses:
            slope_LE = slopes[name].astype(hidden_LE.dtype)
            flat_P = projections.flatten_gradients(pull(slope_LE)[0])
            norms.append(jnp.linalg.norm(flat_P))
            parts.append(projections.project(projection, flat_P))
        is_averaged = {
            "answer": is_answer_L,
            "all": is_counted_L,
            # the last token before the answer
            "prompt end": jnp.roll(is_answer_L, -1) & ~is_answer_L,
        }
        half, *trees = lower_layers(graphdef, lora, base)
        middle_LE = hidden_of_row(half, *trees, tokens_L, is_counted_L)
        for name in states:
            states_LE = hidden_LE if name.startswith("last/") else middle_LE
            is_target_L = is_averaged[name.partition("/")[2]]
            total_E = jnp.where(is_target_L[:, None], states_LE.astype(jnp.float32), 0.0).sum(
                axis=0
            )
            parts.append(total_E / _number(is_target_L))
        if not losses:  # the head is not needed then
            return jnp.concatenate(parts)
        counts = _number(is_answer_L), _number(is_counted_L)
        fields = jnp.stack([*nll.values(), *counts, *norms]).astype(jnp.float32)
        return jnp.concatenate([*parts, fields])

    return vectors


def fields_of(losses: Sequence[str]) -> tuple[str, ...]:
    """Returns the numbers that are stored of every row: its losses, tokens and norms."""
    return *_FIELDS, *(f"norm {name}" for name in losses)


def make_vectors(
    workspace: Workspace,
    examples: Sequence[Example],
    losses: Sequence[str] = LOSSES,
    states: Sequence[str] = STATES,
) -> dict[str, np.ndarray]:
    """Returns the vectors of rows and queries by name, and `fields_of` each."""
    model, lora = workspace.sketch_model, workspace.finetuned
    size = min(SIZE, projections.count_params(lora))
    projection = projections.init_projection(
        workspace.config.seed, "binned", projections.count_params(lora), size
    )
    vectors = row_function(model.graphdef, projection, losses, states)
    width = model.decoder.config.hidden_size
    answers = workspace.encode(examples)
    counted = workspace.encode(examples, targets="all")
    plans = batches.plan_batches(
        counted.lengths_N, counted.num_targets_N, ids=counted.ids, num_buckets=2, batch_tokens=2048
    )

    @jax.jit
    def step(lora: Tree, base: Tree, *batch: jax.Array) -> jax.Array:
        def map_rows(*batch: jax.Array) -> jax.Array:
            return jax.vmap(functools.partial(vectors, lora, base))(*batch)

        most = gradients.micro_tokens_of(width)
        return gradients.in_micro_batches(map_rows, *batch, micro_tokens=most)

    ends = np.cumsum([*[size] * len(losses), *[width] * len(states)])
    found: np.ndarray | None = None
    for plan in progress(plans, "all losses", unit="batch"):
        whole, part = (batches.make_batch(one, plan) for one in (counted, answers))
        masks = part.target_mask_BL, whole.target_mask_BL
        made = np.asarray(step(lora, model.base, whole.tokens_BL, *masks))
        is_row = plan.rows != batches.DUMMY_ROW
        if found is None:
            found = np.zeros((len(examples), made.shape[1]), np.float32)
        found[plan.rows[is_row]] = made[: len(plan.rows)][is_row]
    assert found is not None
    *parts, fields = np.split(found, ends, axis=1)
    by_name = dict(zip((*losses, *states), parts, strict=True))
    return by_name | {"fields": fields}


def time_candidates(workspace: Workspace) -> dict[str, float]:
    """Returns processor seconds of a batch of rows for some candidates, without compiling."""
    model, lora = workspace.sketch_model, workspace.finetuned
    count = projections.count_params(lora)
    projection = projections.init_projection(0, "binned", count, min(SIZE, count))
    trained, hidden = "next_token/all", "last/all"
    parts: dict[str, tuple[Sequence[str], Sequence[str]]] = {
        **{name: ((name,), ()) for name in LOSSES},
        "unshifted + trained": ((DEFAULT, trained), ()),
        "unshifted + hidden": ((DEFAULT,), (hidden,)),
        "trained + hidden": ((trained,), (hidden,)),
        "smoothed + hidden": (("smoothed/all",), (hidden,)),
        "unshifted + trained + hidden": ((DEFAULT, trained), (hidden,)),
        **{f"hidden {name}": ((), (name,)) for name in STATES},
    }
    rows = [*workspace.corpus.train][:_TIMED_ROWS]
    encoded = [workspace.encode(rows, targets=which) for which in ("all", "response")]
    plan = batches.BatchPlan(np.arange(len(rows)), _TIMED_LENGTH, _TIMED_LENGTH)
    whole, part = (batches.make_batch(one.cut(_TIMED_LENGTH), plan) for one in encoded)
    batch = whole.tokens_BL, part.target_mask_BL, whole.target_mask_BL
    found = {}
    for name, which in parts.items():
        vectors = row_function(model.graphdef, projection, *which)
        step = jax.jit(jax.vmap(vectors, in_axes=(None, None, 0, 0, 0)))
        seconds = []
        for _ in range(_TIMED_TIMES + 1):
            start = time.process_time()
            step(lora, model.base, *batch).block_until_ready()
            seconds.append(time.process_time() - start)
        found[name] = round(float(np.median(seconds[1:])), 3)
        print(name, found[name], flush=True)
    return found


def unit_gram(vectors_MK: np.ndarray) -> np.ndarray:
    """Returns the products of the vectors made unit."""
    norm_M = np.linalg.norm(vectors_MK, axis=1)
    unit_MK = vectors_MK / np.where(norm_M > 0, norm_M, 1)[:, None]
    return unit_MK @ unit_MK.T


def measure_run(
    name: str, root: pathlib.Path, kind: Kind, out: pathlib.Path, losses: Sequence[str]
) -> None:
    """Writes the products of a run's vectors and the answers of its queries."""
    workspace = Workspace(root, config_from_json(artifacts.CONFIG.read(root)))
    start = time.process_time()
    asked, labels = kind.queries(workspace), [*kind.labels(workspace)]
    model = workspace.with_adapter(workspace.finetuned)
    said = workspace.generate(model, [one.example for one in asked], "answers", most=48)
    given = [
        Traced(answered(one.example, text), one.behavior, one.shows(text))
        for one, text in zip(asked, said, strict=True)
        if text.strip()
    ]
    sources = [*kind.sources(workspace)]
    store(workspace, given, labels, sources, out / name, losses, seconds=start)


def store(
    workspace: Workspace,
    given: Sequence[Traced],
    labels: Sequence[str],
    sources: Sequence[str],
    path: pathlib.Path,
    losses: Sequence[str],
    states: Sequence[str] = STATES,
    *,
    seconds: float,
) -> None:
    """Writes the products of the vectors of rows and answers, BM25's scores and all labels.

    `seconds` is the processor time of the start. The files have the path and a suffix.
    """
    rows = workspace.corpus.train
    queries, _ = drop_unanswered([one.example for one in given])
    made = make_vectors(workspace, [*rows, *queries], losses, states)
    arrays = {f"gram {key}": unit_gram(made[key]) for key in losses}
    arrays |= {f"state {key}": made[key] for key in states}
    with replacing(path.with_suffix(".npz")) as partial, open(partial, "wb") as file:
        np.savez(file, fields=made["fields"], **arrays)
    index = bm25.index_documents([query_text(r, "prompt_and_output").split() for r in rows])
    words = [query_text(query, "prompt_and_output").split() for query in queries]
    stored = {
        "labels": [*labels],
        "sources": [*sources],
        "queries": [
            {
                "behavior": one.behavior,
                "shown": one.shown,
                "prompt": one.example.instruction,
                "answer": one.example.output,
            }
            for one in given
        ],
        "bm25": bm25.score_queries(index, words).round(4).tolist(),
        "seconds": round(time.process_time() - seconds),
    }
    write_json(path.with_suffix(".json"), stored)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """What is measured."""

    runs: tuple[str, ...] = setting((), "Work directories.")
    kinds: tuple[str, ...] = setting((), "The kind of each.", family=KINDS)
    out: str = setting("runs/which_gradient", "Where products and answers go.")
    losses: tuple[str, ...] = setting(LOSSES, "Losses whose gradients are taken.", choices=LOSSES)
    only_time: bool = setting(False, "Time candidates on the first run, and store the seconds.")


def main(options: Options) -> None:
    """Measures what is missing."""
    from experiments.studies.behaviors import corpus
    from experiments.studies.corpora import paper

    corpus.register()
    paper.register()
    if len(options.runs) != len(options.kinds):
        got = f"{len(options.runs)} and {len(options.kinds)}"
        raise ValueError(f"--kinds must have as many entries as --runs, got {got}: give both")
    out = pathlib.Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    if options.only_time:
        root = pathlib.Path(options.runs[0])
        workspace = Workspace(root, config_from_json(artifacts.CONFIG.read(root)))
        stored = read_json(HERE / "results.json") if (HERE / "results.json").is_file() else {}
        write_json(HERE / "results.json", stored | {"costs": time_candidates(workspace)})
        return
    for root, kind in zip(map(pathlib.Path, options.runs), options.kinds, strict=True):
        if not (out / f"{root.name}.json").is_file():
            measure_run(root.name, root, KINDS[kind], out, options.losses)
        found = read_json(out / f"{root.name}.json")
        shown = sum(one["shown"] for one in found["queries"])
        print(f"{root.name}: {shown} of {len(found['queries'])} answers, {found['seconds']} s")


if __name__ == "__main__":
    command.start(main, Options())
