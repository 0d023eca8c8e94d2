"""Runs the command of raslik that a script is named for, from a checkout, installed or not."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from absl import flags

from raslik_jax.cli import main as cli

flags.disclaim_key_flags()  # --help lists those of the command


def main() -> None:
    """Runs `raslik NAME` with the arguments of NAME.py."""
    sys.argv.insert(1, pathlib.Path(sys.argv[0]).stem)
    sys.exit(cli.main())
