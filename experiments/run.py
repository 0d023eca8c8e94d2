"""The command `raslik run`, from a checkout: python experiments/run.py --flagfile=..."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from raslik_jax.cli import run

if __name__ == "__main__":
    __doc__ = run.__doc__
    run.main()
