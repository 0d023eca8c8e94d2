"""Does a cheap screen keep the rows that the gradient ranks first?

  python experiments/studies/which_method/stages.py --run=WORKDIR/traced --name="fact 2 %"

WORKDIR is a run of counterfactual/measure.py: its rows and answers have labels. rule.md says what
is compared. Each answer of a behavior is a query by itself. The areas and the processor seconds of
a row go to stages.json in this folder, by the name of the case.
"""

import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from experiments.studies.which_gradient import measure as passes
from experiments.studies.which_method.measure import rescored
from raslik_jax.base.files import read_json, write_json
from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command
from raslik_jax.data import batches
from raslik_jax.evaluate.ranking import auprc
from raslik_jax.index.combine import directions
from raslik_jax.retrieve import bm25
from raslik_jax.retrieve.strategies import query_text
from raslik_jax.run import plan
from raslik_jax.run.stages import sketch as sketch_lib
from raslik_jax.run.workspace import Workspace
from raslik_jax.sketch.loss import hidden_of_row

RESULTS = pathlib.Path(__file__).resolve().parent / "stages.json"
SHARES = (0.02, 0.05, 0.1, 0.15)
PARTS = (2, 4, 8)  # one of so many parts of the layers
DRAWN = 64  # random rows whose mean gradient centers the others
_TIMED, _TIMES = 32, 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """The case."""

    run: str = setting("", "Work directory `traced` of counterfactual/measure.py.")
    name: str = setting("", "Name of the case in the results.")


Rows = Float[np.ndarray, "N K"]


def seconds_of(step: Callable[[], Any]) -> float:
    """Returns the processor seconds of a call after the first, the median of some."""
    found = []
    for _ in range(_TIMES + 1):
        start = time.process_time()
        jax.block_until_ready(step())
        found.append(time.process_time() - start)
    return float(np.median(found[1:]))


def hidden_rows(workspace: Workspace, encoded: Any, part: int) -> tuple[Rows, float]:
    """Returns the mean states of rows after a part of the layers, and the seconds of a row."""
    model, lora = workspace.sketch_model, workspace.finetuned
    lower, *trees = passes.lower_layers(model.graphdef, lora, model.base, part)

    @jax.jit
    def states(trees: Any, tokens_BL: jax.Array, is_counted_BL: jax.Array) -> jax.Array:
        def of_row(tokens_L: jax.Array, is_counted_L: jax.Array) -> jax.Array:
            state_LE = hidden_of_row(lower, *trees, tokens_L, is_counted_L).astype(jnp.float32)
            total_E = jnp.where(is_counted_L[:, None], state_LE, 0.0).sum(axis=0)
            return total_E / jnp.maximum(is_counted_L.sum(), 1)

        return jax.vmap(of_row)(tokens_BL, is_counted_BL)

    found: np.ndarray | None = None
    for one in sketch_lib.plan_batches(workspace, encoded):
        batch = batches.make_batch(encoded, one)
        made = np.asarray(states(trees, batch.tokens_BL, batch.target_mask_BL))
        is_row = one.rows != batches.DUMMY_ROW
        found = np.zeros((len(encoded.ids), made.shape[1]), np.float32) if found is None else found
        found[one.rows[is_row]] = made[: len(one.rows)][is_row]
    assert found is not None
    batch = timed_batch(encoded)
    spent = seconds_of(lambda: states(trees, batch.tokens_BL, batch.target_mask_BL))
    return found, spent / _TIMED


def timed_batch(encoded: Any) -> batches.Batch:
    """Returns the first rows as one batch."""
    whole = batches.plan_rows(encoded, np.arange(len(encoded.ids)))
    return batches.make_batch(encoded, whole._replace(rows=np.arange(_TIMED)))


def gradient_rows(workspace: Workspace, rows: Any, queries: Any) -> tuple[Rows, Rows, float]:
    """Returns the sketches of rows and of queries, and the seconds of a row."""
    adapter = sketch_lib.sketched_adapter(workspace)
    projection = sketch_lib.make_projection(workspace, adapter)
    sketch = sketch_lib.sketch_function(workspace, projection, adapter)
    row_NK, _ = batches.map_rows(sketch, rows, sketch_lib.plan_batches(workspace, rows))
    batch = timed_batch(rows)
    spent = seconds_of(lambda: sketch(batch))
    return row_NK, sketch_lib.sketch_queries(workspace, sketch, queries), spent / _TIMED


def centered_cosines(row_NK: Rows, query_QK: Rows, center: Any) -> Float[np.ndarray, "Q N"]:
    """Returns the cosines of queries and rows, all less the mean unit vector of some rows."""
    mean_K = directions(row_NK[center]).mean(axis=0)
    found: np.ndarray = directions(query_QK, mean_K) @ directions(row_NK, mean_K).T
    return found


def measure(options: Options) -> dict[str, Any]:
    """Returns the area of each screen and share, and the processor seconds of a row."""
    workspace = plan.open_run(pathlib.Path(options.run), "corpus", "finetune")
    rows, queries = workspace.corpus.train, workspace.retrieval_queries()
    asked = [one for one in queries if one.extra["label"]]
    is_target_QN = np.array(
        [[row.extra["label"] == one.extra["label"] for row in rows] for one in asked]
    )
    cut = workspace.cut(workspace.train_rows, "training examples", targets="all")
    row_NK, query_QK, whole = gradient_rows(workspace, cut, asked)
    draw = np.random.default_rng(0).choice(len(rows), DRAWN, replace=False)
    fine_QN = centered_cosines(row_NK, query_QK, draw)
    screens: dict[str, tuple[np.ndarray, float]] = {}
    index = bm25.index_documents([query_text(r, "prompt_and_output").split() for r in rows])
    words = [query_text(one, "prompt_and_output").split() for one in asked]
    screens["BM25"] = bm25.score_queries(index, words), 0.0
    both = workspace.encode([*rows, *asked], targets="all")
    for part in PARTS:
        state_ME, spent = hidden_rows(workspace, both, part)
        states = state_ME[: len(rows)], state_ME[len(rows) :]
        screens[f"1/{part} of the layers"] = centered_cosines(*states, slice(None)), spent

    def area(score_QN: np.ndarray) -> float:
        pairs = zip(score_QN, is_target_QN, strict=True)
        return round(float(np.mean([auprc(*pair) for pair in pairs])), 4)

    def staged(cheap_QN: np.ndarray, share: float) -> float:
        pairs = zip(cheap_QN, fine_QN, strict=True)
        return area(np.array([rescored(*pair, share) for pair in pairs]))

    return {
        "rows": len(rows),
        "targets": int(is_target_QN[0].sum()),
        "queries": len(asked),
        "seconds": round(whole, 5),
        "all rows": area(centered_cosines(row_NK, query_QK, slice(None))),
        "center of drawn rows": area(fine_QN),
        "screens": {
            name: {
                "alone": area(cheap_QN),
                "seconds": round(spent, 5),
                "auprc": {str(share): staged(cheap_QN, share) for share in SHARES},
                "cost": {str(share): round(share + spent / whole, 3) for share in SHARES},
            }
            for name, (cheap_QN, spent) in screens.items()
        },
    }


def main(options: Options) -> None:
    """Measures and stores a case."""
    if not (options.run and options.name):
        raise ValueError("--run and --name must be given, got an empty one: see --help")
    stored: Mapping[str, Any] = read_json(RESULTS) if RESULTS.is_file() else {}
    found = measure(options)
    write_json(RESULTS, {**stored, options.name: found})
    print(found)


if __name__ == "__main__":
    command.start(main, Options())
