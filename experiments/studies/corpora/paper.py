"""The corpora of the paper, and a small one of real rows, as members of the package's datasets."""

from experiments.studies.corpora import howdy, tofu, virtual
from raslik_jax.data.corpora import DATASETS
from raslik_jax.data.corpora.record import Dataset

MEMBERS: dict[str, Dataset] = {
    "howdy_small": howdy.SMALL,
    "howdy": howdy.DATASET,
    "virtual": virtual.DATASET,
    "tofu": tofu.DATASET,
}


def register() -> None:
    """Adds --corpus.dataset=howdy and the others to the package's datasets."""
    DATASETS.update(MEMBERS)
