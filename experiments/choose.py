"""The command `raslik choose`, from a checkout: python experiments/choose.py --runs=..."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from raslik_jax.cli import choose

if __name__ == "__main__":
    __doc__ = choose.__doc__
    choose.main()
