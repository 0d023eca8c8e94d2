"""The lengths of real instruction rows, for benchmarks without network and data."""

import importlib.resources
import json

import numpy as np
from jaxtyping import Int


def load_alpaca_lengths(*, max_len: int = 0) -> tuple[Int[np.ndarray, " N"], Int[np.ndarray, " N"]]:
    """Returns tokens and response tokens of each of Alpaca's 52,002 rows, shortest row first.

    They are counted with Pythia's tokenizer and the "alpaca" template, EOS included. The package
    has the counts only (experiments/make_alpaca_lengths.py makes them). Rows are cut at max_len
    tokens at their right end (0: not cut).
    """
    file = importlib.resources.files("raslik_jax.data") / "alpaca_lengths.json"
    table = np.array(json.loads(file.read_text(encoding="utf-8"))["counts"], np.int64)
    length_N, response_N = np.repeat(table[:, 0], table[:, 2]), np.repeat(table[:, 1], table[:, 2])
    cut_N = np.minimum(length_N, max_len or length_N)
    return cut_N, np.maximum(cut_N - (length_N - response_N), 0)
