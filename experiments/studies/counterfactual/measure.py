"""Does training without rows change an answer as their scores predict? Short retrainings.

  python experiments/studies/counterfactual/measure.py --workdir=runs/counterfactual \\
      --embedding=BAAI/bge-small-en-v1.5 --halves=25
  python experiments/studies/counterfactual/measure.py --case=smollm2 --model=FOLDER/smollm2 \\
      --workdir=runs/counterfactual-smollm2 --embedding=BAAI/bge-small-en-v1.5 --group=6

An adapter is trained on all rows, answers are traced by several methods, and it is trained again on
random halves of the rows, or of groups of them. What a method predicts of a half is the sum of its
scores there; the linear datamodeling score is Spearman's correlation, over halves, of that with how
likely the answer then is (Park et al. 2023, TRAK, Section 2). FOLDER/smollm2 is made by
own_model/checkpoint.py. Results go to WORKDIR/results.json after every training, and the same
command goes on from there; the stored ones are beside this file.
"""

import dataclasses
import functools
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import stats

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from raslik_jax.base.files import read_json, write_json
from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command, setting_flags
from raslik_jax.data.ordering import shuffled

HERE = pathlib.Path(__file__).resolve().parent
_DEMO = HERE.parents[1] / "flags" / "demo.flags"
_DRAWS = range(2000)
# Settings that results hang on, beside how many there are of them.
_DECIDE = ("case", "embedding", "group", "queries", "epochs")


class Case(NamedTuple):
    """A model and its rows: the flags of a run, by the options, and what a row is labeled as.

    The labels make groups and the method of that name; no other method sees them.
    """

    flags: Callable[["Options"], Sequence[str]]
    label: Callable[[Any], Any]


def _toy(options: "Options") -> Sequence[str]:
    from raslik_jax.data import toy_model

    sizes = toy_model.SIZES
    return (
        f"--flagfile={_DEMO}",
        f"--corpus.num_train={sizes.num_train}",
        f"--corpus.num_targets={sizes.num_targets}",
        f"--backbone.checkpoint={toy_model.model_folder() / 'base'}",
    )


def _smollm2(options: "Options") -> Sequence[str]:
    if not options.model:
        raise ValueError("--model must name the checkpoint that checkpoint.py made, got none")
    return (
        f"--backbone.checkpoint={options.model}",
        "--corpus.dataset=records",
        f"--corpus.records.train_file={HERE.parent / 'own_model' / 'train.jsonl'}",
        f"--corpus.records.queries_file={HERE / 'answers.jsonl'}",
        "--corpus.max_len=64",
        "--finetune.lora_rank=4",
        "--finetune.lora_targets=q_proj,k_proj,v_proj,o_proj",
        "--finetune.learning_rate=2e-3",
        "--finetune.batch_size=8",
        "--sketch.batch_tokens=1024",  # the gigabytes that gradients take
    )


CASES = {
    "toy": Case(_toy, lambda row: row.is_target),
    "smollm2": Case(_smollm2, lambda row: row.extra["behavior"]),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """What is trained, and how often."""

    case: str = setting("toy", "Model and rows.", choices=tuple(CASES))
    model: str = setting("", "Case smollm2: the checkpoint that checkpoint.py made.")
    workdir: str = setting("runs/counterfactual", "Where the whole model and the results go.")
    embedding: str = setting("", "Sentence encoder, as --retrieve.embedding.checkpoint; '': none.")
    halves: int = setting(20, "Trainings on random halves.", low=3)
    again: int = setting(0, "First halves that are trained on again, in another order.", low=0)
    group: int = setting(1, "Rows that a half has or lacks together: neighbors by label, prompt.")
    queries: int = setting(12, "Most prompts of each kind, target and normal.", low=1)
    epochs: int = setting(3, "Epochs of every training.", low=1)


def correlations(
    predicted_SQ: Float[np.ndarray, "S Q"], nll_SQ: Float[np.ndarray, "S Q"]
) -> Float[np.ndarray, " Q"]:
    """Returns Spearman's correlation over halves of prediction and likelihood, by query."""
    pairs = zip(predicted_SQ.T, -nll_SQ.T, strict=True)
    return np.array([stats.spearmanr(one, other).statistic for one, other in pairs])


def resampled(
    predicted_SQ: Float[np.ndarray, "S Q"], nll_SQ: Float[np.ndarray, "S Q"], seed: int = 0
) -> Float[np.ndarray, " R"]:
    """Returns the mean correlation over queries, of draws with replacement of both axes.

    Draws are those of the seed, the same for all methods.
    """
    generator = np.random.default_rng(seed)
    drawn = [[generator.integers(size, size=size) for size in nll_SQ.shape] for _ in _DRAWS]
    halves_RS, queries_RQ = (np.array([draw[axis] for draw in drawn]) for axis in range(2))
    ranks = [stats.rankdata(part, axis=0) for part in (predicted_SQ, -nll_SQ)]
    one, other = (part[halves_RS[:, :, None], queries_RQ[:, None, :]] for part in ranks)
    one, other = (part - part.mean(axis=1, keepdims=True) for part in (one, other))
    spread_RQ = np.sqrt((one**2).sum(axis=1) * (other**2).sum(axis=1))
    return ((one * other).sum(axis=1) / np.maximum(spread_RQ, 1e-12)).mean(axis=1)


def interval(
    predicted_SQ: Float[np.ndarray, "S Q"],
    nll_SQ: Float[np.ndarray, "S Q"],
    minus_SQ: Float[np.ndarray, "S Q"] | None = None,
) -> tuple[float, float, float]:
    """Returns the mean correlation over queries and its 95 % bootstrap over halves and queries.

    With `minus_SQ`, of another method, the difference of the two.
    """
    mean, draws_R = correlations(predicted_SQ, nll_SQ).mean(), resampled(predicted_SQ, nll_SQ)
    if minus_SQ is not None:
        mean = mean - correlations(minus_SQ, nll_SQ).mean()
        draws_R = draws_R - resampled(minus_SQ, nll_SQ)
    low, high = np.quantile(draws_R, [0.025, 0.975])
    return float(mean), float(low), float(high)


def ceiling(nll_SQ: Float[np.ndarray, "S Q"], again_RQ: Float[np.ndarray, "R Q"]) -> float:
    """Returns the correlation that a prediction free of error would have.

    The root of the share of the variance over halves that is not of the order of training:
    1 - E[(x - x')^2] / 2 Var[x], with x' of the first R halves trained again; mean over queries.
    """
    noise_Q = ((nll_SQ[: len(again_RQ)] - again_RQ) ** 2).mean(axis=0) / 2
    return float(np.sqrt(max(0.0, 1 - np.mean(noise_Q / nll_SQ.var(axis=0, ddof=1)))))


def kinds_of(found: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns which queries are of a kind, by its name."""
    is_target_Q = np.array(found["is_target"])
    return {"all": is_target_Q | True, "target": is_target_Q, "normal": ~is_target_Q}


def judge(
    found: Mapping[str, Any], minus: str = ""
) -> dict[str, dict[str, tuple[float, float, float]]]:
    """Returns the score of every method with its interval, by the kind of the queries.

    With `minus`, how much that method's score is above those of all others.
    """
    nll_SQ = np.array(found["nll"])
    predicted = {name: np.array(p)[: len(nll_SQ)] for name, p in found["predicted"].items()}
    judged: dict[str, dict[str, tuple[float, float, float]]] = {}
    for method in (name for name in predicted if name != minus):
        for kind, is_kind_Q in kinds_of(found).items():
            pair = (minus, method) if minus else (method,)
            first, *rest = (predicted[name][:, is_kind_Q] for name in pair)
            judged.setdefault(method, {})[kind] = interval(first, nll_SQ[:, is_kind_Q], *rest)
    return judged


def draw_halves(
    labels: Sequence[Any], texts: Sequence[str], *, group: int, number: int
) -> list[np.ndarray]:
    """Returns positions of the rows of random halves of the groups, sorted.

    A group has so many neighbors of the rows in the order of label and text. All halves have as
    many groups; with one row in a group, which are drawn does not depend on the order.
    """
    rows = [*range(len(labels))]
    if group > 1:
        rows = sorted(rows, key=lambda row: (str(labels[row]), texts[row], row))
    groups = [rows[start : start + group] for start in range(0, len(rows), group)]
    return [
        np.sort(np.concatenate(shuffled(groups, seed=seed, label="half")[: len(groups) // 2]))
        for seed in range(number)
    ]


def measure(options: Options) -> Iterator[dict[str, Any]]:
    """Yields what was found so far, in the form of results.json, first what an earlier start left.

    nll and again: nats a token of the answers by half and query; predicted: of every method, by
    half and query.
    """
    from raslik_jax.retrieve import strategies

    root, label = pathlib.Path(options.workdir), CASES[options.case].label
    workspace = make_whole(options)
    train, asked = workspace.corpus.train, list_queries(workspace, options.queries)
    labels, texts = [label(row) for row in train], [strategies.query_text(row) for row in train]
    decided = {name: getattr(options, name) for name in _DECIDE}
    decided["embedding"] = pathlib.Path(options.embedding).name
    found: dict[str, Any] = {**decided, "is_target": [], "nll": [], "again": []}
    found |= {"processor_seconds": 0}
    if (root / "results.json").is_file():
        found = read_json(root / "results.json")
        if other := [name for name in _DECIDE if found[name] != decided[name]]:
            raise ValueError(f"{root} holds results of another --{other[0]}: name a new --workdir")
    scores = read_scores(root / "scores.npz", workspace, asked, label, bool(options.embedding))
    halves = draw_halves(labels, texts, group=options.group, number=options.halves)
    found["is_target"] = [is_target for _, is_target in asked]
    found["predicted"] = {
        name: [np.round(score_NQ[half].sum(axis=0), 5).tolist() for half in halves]
        for name, score_NQ in scores.items()
    }
    fit = trainer(workspace, [row for row, _ in asked], num_rows=len(train) // 2)
    for name, number, seed in (("nll", options.halves, 0), ("again", options.again, 1)):
        for half in halves[len(found[name]) : number]:
            start = time.process_time()
            found[name].append(np.round(fit(half, seed), 5).tolist())
            found["processor_seconds"] += round(time.process_time() - start)
            yield found
    yield found


def make_whole(options: Options) -> Any:
    """Returns the run of the adapter that is trained on all rows; makes it where it is not."""
    from raslik_jax.run import plan
    from raslik_jax.run.workspace import Workspace

    root = pathlib.Path(options.workdir) / "whole"
    flags = [*CASES[options.case].flags(options), "--name=counterfactual"]
    flags += [f"--finetune.epochs={options.epochs}", "--finetune.fixed_padding"]
    flags.append("--retrieve.strategies=raslik")
    if options.embedding:  # settings of a strategy hold where it is chosen
        flags[-1] += ",embedding"
        flags.append(f"--retrieve.embedding.checkpoint={options.embedding}")
    config = setting_flags.parse_config(flags)
    plan.run(config, root, stages=("corpus", "backbone", "finetune"))
    return Workspace(root, config)


def list_queries(workspace: Any, number: int) -> list[tuple[Any, bool]]:
    """Returns so many prompts of each kind with an answer, the model's own by the run's settings.

    Each with whether it is of the behavior.
    """
    from raslik_jax.data.examples import answered
    from raslik_jax.run.workspace import queries_to_answer

    asked = [
        (row, kind == "target")
        for kind in ("target", "normal")
        for row in workspace.corpus.queries[f"test_{kind}"][:number]
    ]
    rows = queries_to_answer([row for row, _ in asked], workspace.config.sketch.query_output)
    if not rows:
        return asked
    model = workspace.with_adapter(workspace.finetuned)
    texts = zip(rows, workspace.generate(model, rows, "answers"), strict=True)
    said = {row.example_id: answered(row, text) for row, text in texts}
    return [(said.get(row.example_id, row), is_target) for row, is_target in asked]


def read_scores(
    path: pathlib.Path,
    workspace: Any,
    asked: Sequence[tuple[Any, bool]],
    label: Callable[[Any], Any],
    has_embedding: bool,
) -> dict[str, Float[np.ndarray, "N Q"]]:
    """Returns every row's score with every query, by method, which are kept in a file."""
    queries = [row for row, _ in asked]
    if not path.is_file():
        found = score_rows(workspace, queries, has_embedding=has_embedding)
        rows = [label(row) for row in workspace.corpus.train]
        found["labels"] = np.array([[one == label(q) for q in queries] for one in rows], float)
        np.savez(path, **found)  # type: ignore[arg-type]
    with np.load(path) as stored:
        return {name: stored[name] for name in stored.files}


def score_rows(
    workspace: Any, queries: Sequence[Any], *, has_embedding: bool
) -> dict[str, Float[np.ndarray, "N Q"]]:
    """Returns every row's score with every query, by method."""
    from raslik_jax.data import batches
    from raslik_jax.index.combine import directions
    from raslik_jax.retrieve import bm25, strategies
    from raslik_jax.run.stages import scores
    from raslik_jax.run.stages import sketch as sketch_lib
    from raslik_jax.sketch import projections

    config, adapters = workspace.config, sketch_lib.sketched_adapters(workspace)
    size = sketch_lib.count_params(workspace, adapters)
    whole = projections.init_projection(config.seed, "binned", size, size)
    small = sketch_lib.make_projection(workspace, adapters)
    encoded = workspace.cut(
        workspace.train_rows, "training examples", targets=config.sketch.targets
    )
    found = {}
    for name, projection in (("raslik", small), ("exact kernel", whole)):
        sketch = sketch_lib.sketch_function(workspace, projection, adapters)
        plans = sketch_lib.plan_batches(workspace, encoded)
        row_NK, _ = batches.map_rows(sketch, encoded, plans)
        query_QK = sketch_lib.sketch_queries(workspace, sketch, queries)
        mean_K = np.asarray(row_NK.mean(axis=0, dtype=np.float64))
        found[name] = directions(row_NK, mean_K) @ directions(query_QK, mean_K).T
        print(f"scores of {name}", flush=True)
    rows = workspace.corpus.train
    index = bm25.index_documents([f"{r.instruction} {r.input} {r.output}".split() for r in rows])
    texts = {"BM25": "prompt", "BM25, prompt and answer": "both"}
    for name, include in texts.items():
        words = [
            f"{strategies.query_text(q)} {q.output if include == 'both' else ''}".split()
            for q in queries
        ]
        found[name] = bm25.score_queries(index, words).T
    if has_embedding:
        example_NE, query_QE = scores.sentence_vectors(workspace, queries)
        found["embeddings"] = example_NE @ query_QE.T
    return found


def trainer(
    workspace: Any, queries: Sequence[Any], *, num_rows: int
) -> Callable[[np.ndarray, int], Float[np.ndarray, " Q"]]:
    """Returns the function from some rows and a seed to the nats a token of the answers.

    All trainings have the steps that `num_rows` rows take; the seed is that of the order and of the
    adapter that is started from, added to the run's.
    """
    import jax

    from raslik_jax.data import batches
    from raslik_jax.models import decoder
    from raslik_jax.run.stages import finetune
    from raslik_jax.train import loop

    settings, model = workspace.config.finetune, workspace.model
    rows = workspace.cut(workspace.train_rows, "training examples")
    asked = workspace.encode(queries, "queries")
    per_epoch = batches.num_steps_of(num_rows, batch_size=settings.batch_size)
    num_steps = settings.epochs * per_epoch
    algorithm = finetune.finetuning(workspace, num_steps=num_steps)  # compiled once

    def fit(part: np.ndarray, seed: int) -> Float[np.ndarray, " Q"]:
        seed += workspace.config.seed
        draw = functools.partial(
            batches.epoch_batches,
            rows.take(part),
            batch_size=settings.batch_size,
            seed=seed,
            is_fixed=True,
        )
        start = decoder.init_lora(model.graphdef, key=jax.random.key(seed))
        fitted = loop.fit(algorithm, start, model.base, draw, num_steps=num_steps)
        bound = workspace.with_adapter(fitted.state.params)
        return np.asarray(workspace.likelihood_of(bound, asked).nll_N)

    return fit


def run(options: Options) -> None:
    """Measures, writes results.json after every training, and prints the scores."""
    found: dict[str, Any] = {}
    for found in measure(options):
        write_json(pathlib.Path(options.workdir) / "results.json", found)
        done = f"{len(found['nll'])} of {options.halves} halves, {len(found['again'])} again"
        print(f"{done}: {found['processor_seconds']} s of processors", flush=True)
    for title, minus in (("", ""), ("raslik above ", "raslik")):
        for method, kinds in judge(found, minus).items():
            told = (f"{k} {m:.3f} [{low:.2f}, {high:.2f}]" for k, (m, low, high) in kinds.items())
            print(f"{title}{method}: {', '.join(told)}")
    if found["again"]:
        nll_SQ, again_RQ = np.array(found["nll"]), np.array(found["again"])
        for kind, is_kind_Q in kinds_of(found).items():
            best = ceiling(nll_SQ[:, is_kind_Q], again_RQ[:, is_kind_Q])
            print(f"ceiling by the noise of training, {kind}: {best:.2f}")


if __name__ == "__main__":
    command.start(run, Options())
