"""The command `raslik suite`, from a checkout: python experiments/suite.py --out=..."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from raslik_jax.cli import suite

if __name__ == "__main__":
    __doc__ = suite.__doc__
    suite.main()
