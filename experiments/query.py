"""The command `raslik query`, from a checkout: python experiments/query.py ..."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from raslik_jax.cli import query  # noqa: E402

if __name__ == "__main__":
    __doc__ = query.__doc__
    query.main()
