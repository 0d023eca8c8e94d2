"""Do scores with the curvature of the loss predict trainings without rows better?

  python experiments/studies/curvature/measure.py --model=FOLDER/smollm2 --workdir=runs/curvature

FOLDER/smollm2 is made by own_model/checkpoint.py. The adapter, the rows and the answers are those
of the study `counterfactual`, which has the stored losses after trainings on halves. rule.md says
what is compared. Results go to results.json in this folder.
"""

import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Float

from experiments.studies.counterfactual import measure as halves
from experiments.studies.counterfactual import page as judged
from raslik_jax.base.files import write_json
from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command
from raslik_jax.data import batches
from raslik_jax.data.ordering import shuffled
from raslik_jax.evaluate import ranking
from raslik_jax.evaluate.counterfactual import draw_subsets
from raslik_jax.retrieve import bm25
from raslik_jax.retrieve.strategies import query_text
from raslik_jax.run import plan
from raslik_jax.run.stages import sketch as sketch_lib
from raslik_jax.sketch.loss import find_targets, mean_over_targets

HERE = pathlib.Path(__file__).resolve().parent
# The losses by name: where a target is predicted, which tokens count, and the label smoothing.
PASSES = {
    "unshifted/all": ("unshifted", "all", 0.0),
    "trained/all": ("next_token", "all", 0.0),
    "trained/response": ("next_token", "response", 0.0),
    "smoothed/response": ("next_token", "response", 0.1),
}
DEFAULT = "unshifted/all, cosine"
DAMPINGS = (0.01, 0.1, 1.0)
# Its sum with BM25 over answers is the joint score.
JOINT = "smoothed/response, Fisher 0.1, product"
_DRAWS = 2

Kernel = Float[np.ndarray, "A B"]


def row_loss(decoder: Any, shift: str, smoothing: float) -> Callable[..., Any]:
    """Returns the function to a row's mean loss; with a key labels are drawn from the model.

    Drawn labels have random signs and the root of their number below them, so the mean of the outer
    products of their gradients is the row's Fisher information a token.
    """

    def of_row(lora: Any, base: Any, tokens: Any, mask: Any, key: Any, num_targets: int) -> Any:
        found = find_targets(
            decoder, lora, base, tokens, mask, num_targets=num_targets, loss=shift
        )  # fmt: skip
        log_p_TV = jax.nn.log_softmax(decoder.logits(lora, base, found.hidden_TE))
        label_T = found.label_T
        if key is not None:
            draw, flip = jax.random.split(key)
            label_T = jax.random.categorical(draw, jax.lax.stop_gradient(log_p_TV))
        nll_T = -jnp.take_along_axis(log_p_TV, label_T[:, None], -1)[:, 0]
        if key is not None:
            nll_T = nll_T * jax.random.rademacher(flip, label_T.shape, jnp.float32)
            count = jnp.maximum(jnp.sum(found.is_counted_T), 1)
            return jnp.sum(jnp.where(found.is_counted_T, nll_T, 0.0)) / jnp.sqrt(count)
        if smoothing:
            nll_T = (1 - smoothing) * nll_T - smoothing * jnp.mean(log_p_TV, axis=-1)
        return mean_over_targets(nll_T, found.is_counted_T)

    return of_row


def row_gradients(
    workspace: Any, lora: Any, encoded: Any, loss: Callable[..., Any], seed: int | None
) -> Float[np.ndarray, "N P"]:
    """Returns the whole gradient of each row; with a seed that of drawn labels."""
    made = batches.make_batch(encoded, batches.plan_rows(encoded, np.arange(len(encoded.ids))))
    batch = jax.tree.map(jnp.asarray, made)
    flat, tree = ravel_pytree(lora)
    keys = None if seed is None else jax.random.split(jax.random.key(seed), len(encoded.ids))

    def of_row(base: Any, tokens: Any, mask: Any, key: Any) -> Any:
        def total(flat: Any) -> Any:
            return loss(tree(flat), base, tokens, mask, key, batch.num_targets)

        return jax.grad(total)(flat)

    @jax.jit
    def of_rows(base: Any, *rows: Any) -> Any:
        return jax.lax.map(lambda row: of_row(base, *row), rows, batch_size=8)

    rows = batch.tokens_BL, batch.target_mask_BL, keys
    return np.asarray(of_rows(workspace.sketch_model.base, *rows))


def inverse_products(
    left_AS: Kernel, right_BS: Kernel, plain_AB: Kernel, moment_SS: Kernel, damping: float
) -> Kernel:
    """Returns a^T (S^T S / n + lambda)^-1 b for all pairs, by Woodbury's identity.

    S has the n rows of the curvature, and only products of rows are known: of a and of b with S,
    of a with b, and of S with itself. lambda is `damping` times the mean eigenvalue of S S^T / n.
    """
    count = len(moment_SS)
    ridge = damping * np.trace(moment_SS) / count**2
    inner = np.linalg.solve(moment_SS + count * ridge * np.eye(count), right_BS.T)
    return (plain_AB - left_AS @ inner) / ridge


def scores(
    rows_NP: Any, asked_QP: Any, curved_SP: Any | None, damping: float
) -> Mapping[str, Kernel]:
    """Returns the products of rows and queries and their cosines, in the metric of a curvature."""
    mean_P = rows_NP.mean(axis=0, dtype=np.float64).astype(np.float32)
    parts = [rows_NP - mean_P, asked_QP - mean_P]

    def dot(a: Any, b: Any) -> Kernel:
        return (a @ b.T).astype(np.float64)

    same = [np.einsum("np,np->n", part, part, dtype=np.float64) for part in parts]
    product = dot(*parts)
    if curved_SP is not None:
        moment, cross = dot(curved_SP, curved_SP), [dot(part, curved_SP) for part in parts]
        own = [dot(part, part) for part in parts]
        product = inverse_products(cross[0], cross[1], product, moment, damping)
        same = [
            np.diag(inverse_products(one, one, plain, moment, damping))
            for one, plain in zip(cross, own, strict=True)
        ]
    norms = np.sqrt(np.outer(*same))
    return {"product": product, "cosine": product / np.maximum(norms, 1e-30)}


def bm25_scores(rows: Any, asked: Any) -> Kernel:
    """Returns the BM25 scores of rows and queries, [N, Q], prompts and answers included."""
    words = [
        [query_text(one, "prompt_and_output").split() for one in part] for part in (rows, asked)
    ]
    return bm25.score_queries(bm25.index_documents(words[0]), words[1]).T


def joint(*scores: Kernel) -> Kernel:
    """Returns the sum of scores [N, Q], each over its standard deviation over the rows."""
    return sum((one / one.std(axis=0) for one in scores), np.zeros(()))


def behavior_auprc(score_NQ: Kernel, is_mine_NQ: Any, is_target: Any) -> float:
    """Returns the mean AUPRC of the rows of an answer's behavior over the answers of behaviors."""
    found = [ranking.auprc(score_NQ[:, q], is_mine_NQ[:, q]) for q in np.flatnonzero(is_target)]
    return float(np.mean(found))


def stored_halves(rows: Any, number: int) -> list[np.ndarray]:
    """Returns the rows of the stored trainings: halves of groups of 6, by behavior and prompt."""
    order = sorted(range(len(rows)), key=lambda n: (rows[n].extra["label"], query_text(rows[n])))
    groups = [order[start : start + 6] for start in range(0, len(rows), 6)]
    drawn = (shuffled(groups, seed=seed, label="half") for seed in range(number))
    return [np.sort(np.concatenate(one[: len(groups) // 2])) for one in drawn]


class Case(NamedTuple):
    """The trained adapter, its rows and answers, and the stored trainings on halves.

    Attributes:
      is_mine_NQ: whether a row is of the behavior of an answer.
      is_target: whether an answer is of a behavior.
      kept: the rows of each half.
      stored: the results of `counterfactual`.
    """

    workspace: Any
    lora: Any
    decoder: Any
    rows: Any
    asked: Any
    is_mine_NQ: Any
    is_target: list[bool]
    kept: list[np.ndarray]
    stored: Mapping[str, Any]


def open_case(options: "Options") -> Case:
    """Returns the case, whose adapter is trained and traced if it is not there."""
    own = halves.Options(
        case="smollm2", model=options.model, workdir=options.workdir, group=6, queries=15, epochs=2
    )
    is_target, _ = halves.write_rows(own), halves.trace_answers(own)
    root = pathlib.Path(options.workdir).absolute() / "traced"
    workspace = plan.open_run(root, "corpus", "finetune")
    rows, asked = workspace.corpus.train, workspace.retrieval_queries()
    stored = json.loads((HERE.parent / "counterfactual" / "smollm2.json").read_text())
    is_mine_NQ = np.array(
        [[row.extra["label"] == query.extra["label"] for query in asked] for row in rows]
    )
    kept = stored_halves(rows, len(stored["nll"]))
    counts = np.array([is_mine_NQ[half].sum(axis=0) for half in kept])
    if not np.array_equal(counts, np.array(stored["predicted"]["labels"])[: len(kept)]):
        raise ValueError("the halves must be those of the stored trainings, got others")
    lora, decoder = sketch_lib.sketched_adapter(workspace), workspace.sketch_model.decoder
    return Case(workspace, lora, decoder, rows, asked, is_mine_NQ, is_target, kept, stored)


def gradients(case: Case, of: Any, name: str, seed: int | None = None) -> Any:
    """Returns the whole gradients of rows or answers by a pass's name, [N, P]."""
    shift, targets, smoothing = PASSES[name]
    encoded = case.workspace.encode(of, "rows", targets=targets)
    loss = row_loss(case.decoder, shift, smoothing)
    return row_gradients(case.workspace, case.lora, encoded, loss, seed)


def measure(options: "Options") -> dict[str, Any]:
    """Returns the LDS of each candidate by kind of answer, its AUPRC, and seconds of the passes."""
    case = open_case(options)
    found: dict[str, Kernel] = {}
    seconds: dict[str, float] = {}
    start = time.process_time()
    drawn = [gradients(case, case.rows, "trained/response", seed) for seed in range(_DRAWS)]
    fisher_SP = np.concatenate(drawn)
    del drawn
    seconds["Fisher information"] = time.process_time() - start
    for name in PASSES:
        start = time.process_time()
        rows_NP, asked_QP = (gradients(case, one, name) for one in (case.rows, case.asked))
        seconds[name] = time.process_time() - start
        for kind, one in scores(rows_NP, asked_QP, None, 0.0).items():
            found[f"{name}, {kind}"] = one
        own_SP = rows_NP - rows_NP.mean(axis=0, dtype=np.float64).astype(np.float32)
        for metric, curved in (("Fisher", fisher_SP), ("own moment", own_SP)):
            for damping in DAMPINGS:
                for kind, one in scores(rows_NP, asked_QP, curved, damping).items():
                    found[f"{name}, {metric} {damping:g}, {kind}"] = one
    found[f"{JOINT}, with BM25"] = joint(found[JOINT], bm25_scores(case.rows, case.asked))
    return judge_scores(case, found, seconds)


def judge_scores(
    case: Case, found: Mapping[str, Kernel], seconds: Mapping[str, float]
) -> dict[str, Any]:
    """Returns the LDS of scores on the stored halves, what is reachable, and the AUPRC."""
    stored, kept = case.stored, case.kept
    sums = {
        name: np.array([score[half].sum(axis=0) for half in kept]) for name, score in found.items()
    }
    made = {"is_target": case.is_target, "nll": stored["nll"]}
    methods = sums | {"raslik, stored": np.array(stored["predicted"]["raslik"])}
    methods |= {"BM25 with answers": np.array(stored["predicted"]["BM25, prompt and answer"])}
    again, nll = np.array(stored["more"][0]), np.array(stored["nll"])
    bound = {
        kind: judged.ceiling(nll[:, is_kind], again[:, is_kind])
        for kind, is_kind in judged.kinds_of(made).items()
    }
    areas = {
        name: behavior_auprc(one, case.is_mine_NQ, case.is_target) for name, one in found.items()
    }
    more = json.loads((HERE / "halves.json").read_text())
    drawn = draw_subsets(
        len(case.rows), number=len(more["nll"]), share=0.5, group=more["group"], seed=0
    )
    other = {
        name: np.array([score[half].sum(axis=0) for half in drawn]) for name, score in found.items()
    }
    both = {name: np.concatenate([centered(sums[name]), centered(other[name])]) for name in other}
    nll_both = np.concatenate([centered(nll), centered(np.array(more["nll"]))])
    kinds = {"is_target": case.is_target}
    return _compared(made | {"predicted": methods}) | {
        "other halves": _compared(kinds | {"predicted": other, "nll": more["nll"]}),
        "both": _compared(kinds | {"predicted": both, "nll": nll_both}),
        "auprc": areas,
        "bound": bound,
        "processor_seconds": seconds,
    }


def centered(value_SQ: Kernel) -> Kernel:
    """Returns values less their mean over the halves."""
    return value_SQ - value_SQ.mean(axis=0)


def _compared(made: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the LDS of all methods by kind of answer, and that of the default less theirs."""
    both = {"lds": judged.judge(made), "less": judged.judge(made, DEFAULT)}
    return {
        part: {name: dict(kinds) for name, kinds in found.items()} for part, found in both.items()
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """Where the model and the runs are."""

    model: str = setting("", "Checkpoint that own_model/checkpoint.py made.")
    workdir: str = setting("runs/curvature", "Where the runs go.")


def main(options: Options) -> None:
    """Measures and writes results.json."""
    if not options.model:
        raise ValueError("--model must name the checkpoint that checkpoint.py made, got none")
    write_json(HERE / "results.json", measure(options))


if __name__ == "__main__":
    command.start(main, Options())
