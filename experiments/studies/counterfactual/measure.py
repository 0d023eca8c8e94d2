"""Does training without rows change an answer as their scores predict? Short retrainings on a toy.

  python experiments/studies/counterfactual/measure.py --workdir=runs/counterfactual \\
      --embedding=BAAI/bge-small-en-v1.5 --halves=25

An adapter is trained on the toy's 1,000 rows, its answers to some prompts are traced by several
methods, and it is trained again on random halves of the rows. What a method predicts of a half is
the sum of its scores there; the linear datamodeling score is Spearman's correlation, over halves,
of that with how likely the answer then is (Park et al. 2023, TRAK, Section 2). Results go to
WORKDIR/results.json; the stored ones are beside this file.
"""

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy import stats

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from raslik_jax.cli import command, setting_flags
from raslik_jax.data.ordering import shuffled
from raslik_jax.files import write_json
from raslik_jax.settings import Settings, replaced, setting

HERE = pathlib.Path(__file__).resolve().parent
_DEMO = HERE.parents[1] / "flags" / "demo.flags"
_RESAMPLES = 2000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """What is trained, and how often."""

    workdir: str = setting("runs/counterfactual", "Where the whole model and the results go.")
    embedding: str = setting("", "Sentence encoder, as --retrieve.embedding.checkpoint; '': none.")
    halves: int = setting(20, "Trainings on random halves.", low=3)
    queries: int = setting(12, "Prompts of each kind, target and normal.", low=1)
    epochs: int = setting(3, "Epochs of every training.", low=1)


def correlations(
    predicted_SQ: Float[np.ndarray, "S Q"], nll_SQ: Float[np.ndarray, "S Q"]
) -> Float[np.ndarray, " Q"]:
    """Returns Spearman's correlation over halves of prediction and likelihood, by query."""
    pairs = zip(predicted_SQ.T, -nll_SQ.T, strict=True)
    return np.array([stats.spearmanr(one, other).statistic for one, other in pairs])


def interval(
    predicted_SQ: Float[np.ndarray, "S Q"], nll_SQ: Float[np.ndarray, "S Q"], seed: int = 0
) -> tuple[float, float, float]:
    """Returns the mean correlation over queries and its 95 % bootstrap over halves and queries."""
    generator, (num_halves, num_queries) = np.random.default_rng(seed), nll_SQ.shape
    ranks = [stats.rankdata(part, axis=0) for part in (predicted_SQ, -nll_SQ)]
    means = []
    for _ in range(_RESAMPLES):
        halves = generator.integers(num_halves, size=num_halves)
        queries = generator.integers(num_queries, size=num_queries)
        drawn = [part[np.ix_(halves, queries)] for part in ranks]
        one, other = (part - part.mean(axis=0) for part in drawn)
        spread = np.sqrt((one**2).sum(axis=0) * (other**2).sum(axis=0))
        means.append(np.mean((one * other).sum(axis=0) / np.maximum(spread, 1e-12)))
    low, high = np.quantile(means, [0.025, 0.975])
    return float(correlations(predicted_SQ, nll_SQ).mean()), float(low), float(high)


def judge(found: Mapping[str, Any]) -> dict[str, dict[str, tuple[float, float, float]]]:
    """Returns the score of every method with its interval, by the kind of the queries."""
    nll_SQ, is_target_Q = np.array(found["nll"]), np.array(found["is_target"])
    kinds = {"all": is_target_Q | True, "target": is_target_Q, "normal": ~is_target_Q}
    return {
        method: {
            kind: interval(np.array(predicted)[:, is_kind_Q], nll_SQ[:, is_kind_Q])
            for kind, is_kind_Q in kinds.items()
        }
        for method, predicted in found["predicted"].items()
    }


def measure(options: Options) -> Iterator[dict[str, Any]]:
    """Yields predictions of every method and likelihoods, by half and query, after every half."""
    from raslik_jax.data import toy_model
    from raslik_jax.data.rows import answered
    from raslik_jax.run import plan
    from raslik_jax.run.workspace import Workspace

    changes = {f"corpus.{n}": getattr(toy_model.SIZES, n) for n in ("num_train", "num_targets")}
    changes |= {
        "backbone.checkpoint": str(toy_model.model_folder() / "base"),
        "finetune.epochs": options.epochs,
        "finetune.fixed_padding": True,
    }
    flags = [f"--flagfile={_DEMO}", "--retrieve.strategies=raslik"]
    if options.embedding:  # settings of a strategy hold where it is chosen
        flags[1] += ",embedding"
        flags.append(f"--retrieve.embedding.checkpoint={options.embedding}")
    demo = setting_flags.parse_config(flags)
    root = pathlib.Path(options.workdir)
    config = replaced(demo, changes | {"name": "counterfactual"})
    plan.run(config, root / "whole", stages=("corpus", "backbone", "finetune"))
    workspace = Workspace(root / "whole", config)
    asked = [
        row
        for kind in ("target", "normal")
        for row in workspace.corpus.queries[f"test_{kind}"][: options.queries]
    ]
    said = workspace.generate(workspace.with_adapter(workspace.finetuned), asked, "answers")
    queries = [answered(row, text) for row, text in zip(asked, said, strict=True)]
    scores = score_rows(workspace, queries, has_embedding=bool(options.embedding))
    number = len(workspace.corpus.train)
    halves = [
        np.sort(shuffled(range(number), seed=seed, label="half")[: number // 2])
        for seed in range(options.halves)
    ]
    found: dict[str, Any] = {
        "is_target": [n < options.queries for n in range(len(queries))],
        "epochs": options.epochs,
        "nll": [],
        "predicted": {name: [] for name in scores},
    }
    for half, nll_Q in zip(halves, retrain(workspace, queries, halves), strict=True):
        found["nll"].append(np.round(nll_Q, 5).tolist())
        for name, score_NQ in scores.items():
            predicted_Q = score_NQ[half].sum(axis=0, dtype=np.float64)
            found["predicted"][name].append(np.round(predicted_Q, 5).tolist())
        yield found


def score_rows(
    workspace: Any, queries: Sequence[Any], *, has_embedding: bool
) -> dict[str, Float[np.ndarray, "N Q"]]:
    """Returns every row's score with every query, by method."""
    from raslik_jax.data import batches
    from raslik_jax.index.combine import directions
    from raslik_jax.retrieve import bm25, strategies
    from raslik_jax.run.stages import retrieve
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
        plans = sketch_lib.plan_batches(config, encoded)
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
        example_NE, query_QE = retrieve.sentence_vectors(workspace, queries)
        found["embeddings"] = example_NE @ query_QE.T
    return found


def retrain(
    workspace: Any, queries: Sequence[Any], halves: Sequence[np.ndarray]
) -> Iterator[Float[np.ndarray, " Q"]]:
    """Yields the nats a token of the answers under adapters that are trained on halves."""
    from raslik_jax.data import batches
    from raslik_jax.run.stages import finetune
    from raslik_jax.train import loop

    settings = workspace.config.finetune
    rows = workspace.cut(workspace.train_rows, "training examples")
    asked = workspace.encode(queries, "queries")
    per_epoch = batches.num_steps_of(len(halves[0]), batch_size=settings.batch_size)
    num_steps = settings.epochs * per_epoch
    algorithm = finetune.finetuning(workspace, num_steps=num_steps)  # compiled once
    for half in halves:
        draw = functools.partial(
            batches.epoch_batches,
            rows.take(half),
            batch_size=settings.batch_size,
            seed=workspace.config.seed,
            is_fixed=True,
        )
        start, base = workspace.model.initial, workspace.model.base
        fitted = loop.fit(algorithm, start, base, draw, num_steps=num_steps)
        model = workspace.with_adapter(fitted.state.params)
        yield np.asarray(workspace.likelihood_of(model, asked).nll_N)


def run(options: Options) -> None:
    """Measures, writes results.json after every half, and prints the scores."""
    found: dict[str, Any] = {}
    for found in measure(options):
        write_json(pathlib.Path(options.workdir) / "results.json", found)
        print(f"half {len(found['nll'])} of {options.halves}", flush=True)
    for method, kinds in judge(found).items():
        told = (f"{k} {m:.3f} [{low:.2f}, {high:.2f}]" for k, (m, low, high) in kinds.items())
        print(f"{method}: {', '.join(told)}")


if __name__ == "__main__":
    command.start(run, Options())
