"""The program `raslik` with the members of the studies, from a checkout.

python experiments/studies/raslik.py run --flagfile=experiments/studies/sets/flags/toy.flags

It has three commands more: `suite` runs a grid, `choose` takes learning rates by a rule, and
`published` prints the paper's tables.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from experiments.studies import exact, objectives
from experiments.studies.behaviors import corpus
from experiments.studies.corpora import paper
from experiments.studies.own_model import sampling, side_effects
from experiments.studies.published import section
from experiments.studies.sets import strategies


def register() -> None:
    """Adds the members of all studies to the package's families."""
    corpus.register()
    exact.register()
    objectives.register()
    paper.register()
    strategies.register()
    section.register()
    sampling.register()
    side_effects.register()


if __name__ == "__main__":
    register()
    from raslik_jax.cli import main  # whose flags are those of the members there are

    main.COMMANDS |= {
        name: f"experiments.studies.suite.{name}" for name in ("choose", "suite")
    } | {"published": "experiments.studies.published.section"}
    sys.exit(main.main())
