"""The command `raslik index`, from a checkout: python experiments/index.py ..."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from raslik_jax.cli import index  # noqa: E402

if __name__ == "__main__":
    __doc__ = index.__doc__
    index.main()
