"""The command `raslik export`, from a checkout: python experiments/export.py --run=... --out=..."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from raslik_jax.cli import export

if __name__ == "__main__":
    __doc__ = export.__doc__
    export.main()
