"""Settings of every test: no network, strict promotion, highest matmul precision."""

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")


def pytest_collection_modifyitems(items: list) -> None:
    """Puts the longest test first, so that processes side by side end at about the same time."""
    items.sort(key=lambda item: item.name != "test_the_smallest_cell_comes_out_again")
