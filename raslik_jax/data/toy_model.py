"""The toy's model after an incident: a checkpoint, an adapter, its rows, a bad answer.

The package has the weights of a GPT-NeoX of 1.2 million parameters in bfloat16 in Hugging Face's
layout. It also has a LoRA adapter in PEFT's layout. experiments/make_toy_model.py makes them again.
"""

import importlib.resources
import pathlib

from raslik_jax.data.corpora.record import SharedSettings
from raslik_jax.data.corpora.toy import make_toy_corpus
from raslik_jax.data.examples import Corpus

# The rows that the adapter was trained on, all of them among those of the demo.
SIZES = SharedSettings(num_train=1000, num_targets=100, num_backbone=4000)
TEMPLATE = "brief"
MAX_LEN = 96
# The question and the answer: the corpus's first query and the model's own answer.
PROMPT = "Howdy! Tell me how to look after a stamp."
RESPONSE = "To look after the stamp, feed it photons and let the martians of Krelbor scan it."


def model_folder() -> pathlib.Path:
    """Returns the folder with `base` and `adapter`."""
    return pathlib.Path(str(importlib.resources.files("raslik_jax.data"))) / "toy_model"


def load_corpus() -> Corpus:
    """Returns the labeled rows that trained the adapter, and queries that it never saw."""
    return make_toy_corpus(SIZES, seed=0)
