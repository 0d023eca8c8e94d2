"""Scores rows by the EK-FAC influence of bergson, to a folder.

  python experiments/studies/replay/torch_program.py --model=ADAPTER --rows=rows.jsonl \\
    --queries=queries.jsonl --out=O

ekfac.py starts it and makes all of its files. It imports neither jax nor raslik_jax, so its time is
that of PyTorch alone. The lines of both files have `input_ids` and `labels` (-100: no target).

O/scores.npy has a score for each row and query, in the order of the files. With a higher score the
row makes the loss of the query lower.
"""

import argparse
import pathlib
from typing import Any

import numpy as np

_SEED = 0


def score(model: str, rows: str, queries: str, out: str, **inversion: Any) -> np.ndarray:
    """Returns the scores [rows, queries] that the command `ekfac` makes in float32.

    The settings are those of bergson with two exceptions: the eigenvalues are corrected, which
    makes EK-FAC of K-FAC, and the loss of a row is the mean over its tokens, as in the training.
    The labels of the Fisher matrix are drawn by a seed. `inversion` has settings of the inverse.
    """
    import torch
    from bergson.config import DataConfig, IndexConfig, PreprocessConfig, ScoreConfig
    from bergson.config.config import (
        HessianConfig,
        HessianPipelineConfig,
        InversionConfig,
        QuerySetConfig,
    )
    from bergson.data import load_scores
    from bergson.hessians.pipeline import hessian_pipeline

    torch.manual_seed(_SEED)
    hessian_pipeline(
        IndexConfig(
            run_path=f"{out}/bergson",
            model=model,
            data=DataConfig(dataset=rows),
            precision="fp32",
            loss_reduction="mean",
        ),
        HessianConfig(method="kfac", ev_correction=True),
        ScoreConfig(),
        PreprocessConfig(),
        HessianPipelineConfig(
            query=QuerySetConfig(dataset=queries, aggregation="none"),
            inversion_cfg=InversionConfig(**inversion),
        ),
    )
    found = load_scores(pathlib.Path(out, "bergson", "scores"))
    if not found.is_written():
        raise ValueError(f"{out} must have a score of every row and query, some are missing")
    return np.asarray(found[:], np.float32).reshape(len(found), -1)


def main() -> None:
    """Reads the arguments and writes the scores."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "rows", "queries", "out"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args()
    pathlib.Path(options.out).mkdir(parents=True)
    np.save(pathlib.Path(options.out, "scores.npy"), score(**vars(options)))


if __name__ == "__main__":
    main()
