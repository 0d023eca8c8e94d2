"""What the paper's experiments need and the package leaves out, as members of its families.

They are the paper's corpora, a small one of real rows, the strategy `embedding`, controlled
randomization, Non-SF by a classifier, and TOFU's own metrics.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from experiments.studies import randomized
from experiments.studies.corpora import howdy, tofu, tofu_questions, virtual
from experiments.studies.encoders import discriminator, embedding
from raslik_jax.data.corpora import DATASETS
from raslik_jax.evaluate.metrics import METRICS
from raslik_jax.evaluate.non_sf import NON_SF
from raslik_jax.report.results import DETAILS
from raslik_jax.retrieve.strategies import STRATEGIES
from raslik_jax.run.plan import UNITS
from raslik_jax.run.recipes import Recipe
from raslik_jax.run.stages.evaluate import EVIDENCE
from raslik_jax.run.stages.scores import SCORES

MEMBERS = {
    "howdy_small": howdy.SMALL,
    "howdy": howdy.DATASET,
    "virtual": virtual.DATASET,
    "tofu": tofu.DATASET,
}


def _units(stage: str) -> tuple[Recipe, ...]:
    found = UNITS[stage]
    assert isinstance(found, tuple)  # the others depend on the settings
    return found


FAMILIES: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    (DATASETS, MEMBERS),
    (STRATEGIES, {"embedding": embedding.STRATEGY, **randomized.MEMBERS}),
    (SCORES, {"embeddings": embedding.SCORES}),
    (NON_SF, {"classifier": discriminator.MEASURE}),
    (
        UNITS,
        {
            # The classifier is trained as soon as there is a corpus: it may refuse its labels.
            "corpus": (*_units("corpus"), *discriminator.UNITS),
            "references": (*_units("references"), *tofu_questions.BEFORE),
            "generate": (*_units("generate"), *tofu_questions.AFTER),
        },
    ),
    (EVIDENCE, {"tofu": tofu_questions.collect}),
    (METRICS, tofu_questions.METRICS),
    (DETAILS, tofu_questions.DETAILS),
)


def register() -> None:
    """Adds the members to the package's families."""
    for family, own in FAMILIES:
        family.update(own)


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """Has the members in the package's families until it ends."""
    with contextlib.ExitStack() as stack:
        for family, own in FAMILIES:
            stack.enter_context(mock.patch.dict(family, own))
        yield
