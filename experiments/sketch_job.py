"""The command `raslik sketch_job`, from a checkout: python experiments/sketch_job.py ..."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from raslik_jax.cli import sketch_job  # noqa: E402

if __name__ == "__main__":
    __doc__ = sketch_job.__doc__
    sketch_job.main()
