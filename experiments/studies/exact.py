"""RASLIK on whole gradients: the strategy `exact`, what the sketch estimates.

The sketch loses nothing (docs/studies/retrieval_quality.md, counterfactual.md), and whole gradients
take as long for every question as an index takes once. So the package has the sketch alone.
"""

import pathlib

import jax
import numpy as np

from raslik_jax.base.progress import progress
from raslik_jax.data import batches
from raslik_jax.index import search
from raslik_jax.index.combine import check_agreement
from raslik_jax.parallel import meshes
from raslik_jax.retrieve.strategies import STRATEGIES, by_score
from raslik_jax.run import memory
from raslik_jax.run.programs import AbstractRun, Work
from raslik_jax.run.recipes import Recipe
from raslik_jax.run.stages import scores
from raslik_jax.run.stages import sketch as sketch_lib
from raslik_jax.run.workspace import Workspace
from raslik_jax.sketch import projections


@memory.explained("the exact kernel", "--sketch.batch_tokens")
def make_exact_scores(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the influence by the unsketched kernel: gradients are made again for each use.

    A sketch of as many coordinates as the gradient has is a signed permutation of it, whose
    cosines are those of the gradients. Memory: a batch of gradients and those of the queries.
    """
    config, settings = workspace.config, workspace.config.retrieve
    adapter, retrieval = sketch_lib.sketched_adapter(workspace), workspace.retrieval_queries()
    size = projections.count_params(adapter)
    whole = projections.init_projection(config.seed, "binned", size, size)
    sketch = sketch_lib.sketch_function(workspace, whole, adapter)
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

    def cosines(batch: batches.Batch) -> tuple[jax.Array, jax.Array]:
        sketches = sketch(batch)
        return search.row_cosines(sketches.unit_BK, columns), sketches.norm_B

    score_NG, norm_N = batches.map_rows(cosines, encoded, plans, bar="exact kernel")
    found_N = np.where(norm_N > 0, score_NG[:, 0], np.float32(-np.inf))
    scores.write_scores(workspace, "exact_kernel", folder, found_N)


def count_exact(run: AbstractRun) -> Work:
    """Whole gradients of rows, for the mean and for the scores."""
    (program,) = sketch_lib.count_sketches(run, run.sizes.train).programs
    projection = jax.eval_shape(
        lambda: projections.init_projection(0, "binned", run.num_params, run.num_params)
    )
    whole = program._replace(name="sketch whole", fixed=(projection, *program.fixed[1:]))
    return Work(4.0 * run.sizes.train, [whole] * (1 + run.config.retrieve.center))


def register() -> None:
    """Adds the strategy and its scores to the package's families."""
    scores.SCORES["exact_kernel"] = (
        Recipe(
            "retrieve/exact_kernel",
            make_exact_scores,
            "{rows} {queries} {sketched}",
            "{gradient} {kernel}",
            writes=scores.SCORES_FORMAT,
            work=count_exact,
        ),
    )
    STRATEGIES["exact"] = by_score("Exact kernel", "exact_kernel", color="#0072B2", marker="X")
