"""The command `raslik run`, from a checkout: python experiments/run.py --flagfile=..."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from raslik_jax.cli import main as cli

if __name__ == "__main__":
    sys.argv.insert(1, "run")
    sys.exit(cli.main())
