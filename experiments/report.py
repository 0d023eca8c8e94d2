"""The command `raslik report`, from a checkout: python experiments/report.py --runs=..."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from raslik_jax.cli import report  # noqa: E402

if __name__ == "__main__":
    __doc__ = report.__doc__
    report.main()
