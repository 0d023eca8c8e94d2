"""The command `raslik run` with the corpora of the paper, from a checkout.

python experiments/run.py --flagfile=experiments/flags/demo.flags

The page of a run that repeats a published table also has the paper's numbers.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from experiments.studies.corpora import paper
from experiments.studies.published import section
from raslik_jax.cli import main as cli

if __name__ == "__main__":
    paper.register()
    section.register()
    # The next commands that it prints are those of the program that knows these corpora.
    studies = pathlib.Path(__file__).resolve().parent / "studies" / "raslik.py"
    sys.argv[:1] = [str(studies), "run"]
    sys.exit(cli.main())
