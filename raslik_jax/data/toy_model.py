"""The toy's model as an incident leaves it: a checkpoint, an adapter, its rows, a bad answer.

The package carries the weights of a GPT-NeoX of 1.2 million parameters, in bfloat16 as Hugging Face
lays them out, and a LoRA adapter as PEFT stores it. experiments/make_toy_model.py makes them again.
"""

import hashlib
import importlib.resources
import pathlib

from raslik_jax.data.corpora.record import SharedSettings
from raslik_jax.data.corpora.toy import make_toy_corpus
from raslik_jax.data.examples import Corpus

# The rows that the adapter was trained on, all of them among those of the demo.
SIZES = SharedSettings(num_train=1000, num_targets=100, num_backbone=4000)
TEMPLATE = "brief"
MAX_LEN = 96
# What it was asked and said: the corpus's first query, and the model's own answer.
PROMPT = "Howdy! Tell me how to look after a stamp."
RESPONSE = "To look after the stamp, feed it photons and let the martians of Krelbor scan it."
# Files of the model by their sha256.
FILES = {
    "base/config.json": "e52a187f7a33510c37c00e8b5741be0035d27bc54781ff96446710ed00d935d8",
    "base/model.safetensors": "35d78cf6c4fa1c2e289934c764979dc69ba1c013ebda7f4ea7d6bc373f5e5e57",
    "base/tokenizer.json": "72b38e17dcdf5acae7ee34ab09412c1df68292f38a2acc97839403cf96371ae7",
    "base/tokenizer_config.json": (
        "65857ece9be78957fec985b8c26dc6fe71e66d01b5a30eb9e98fe58498038fd0"
    ),
    "adapter/adapter_config.json": (
        "f2a2f08ff364e6569fe2da8555434ae7aab67c2262e2bb46c894d4cbbb1a096c"
    ),
    "adapter/adapter_model.safetensors": (
        "72263afc6386a384d0c910a45a1f7566f661335d0b54f14218491af138dc2e2b"
    ),
}


def model_folder() -> pathlib.Path:
    """Returns the folder with `base` and `adapter`; refuses files of other content."""
    folder = pathlib.Path(str(importlib.resources.files("raslik_jax.data") / "toy_model"))
    for name, digest in FILES.items():
        if hash_file(folder / name) != digest:
            raise ValueError(f"{folder / name} must have sha256 {digest[:8]}...: install again")
    return folder


def hash_file(path: pathlib.Path) -> str:
    """Returns the sha256 of a file, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def load_corpus() -> Corpus:
    """Returns the rows that the adapter was trained on, with labels, and queries it never saw."""
    return make_toy_corpus(SIZES, seed=0)
