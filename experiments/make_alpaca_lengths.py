"""Makes raslik_jax/data/alpaca_lengths.json: how long the rows of Alpaca are, in Pythia's tokens.

Only counts go into the file, no text. The rows are rendered with the "alpaca" template and end with
EOS; nothing is cut. About 10 seconds on 2 cores:

  python experiments/make_alpaca_lengths.py --alpaca=alpaca_data.json.xz --tokenizer=pythia/

Alpaca: github.com/tatsu-lab/stanford_alpaca, 52,002 rows, sha256 of alpaca_data.json 2eddafc6.
Tokenizer: huggingface.co/EleutherAI/pythia-2.8b, tokenizer.json.
"""

import collections
import itertools
import json
import pathlib

from absl import flags

from raslik_jax.cli import command
from raslik_jax.data.read.formats import read_examples
from raslik_jax.data.tokens.encoding import encode
from raslik_jax.data.tokens.prompts import TEMPLATES, template_hash
from raslik_jax.data.tokens.tokenization import load_tokenizer, tokenizer_hash

_ALPACA = flags.DEFINE_string("alpaca", "", "Alpaca's JSON file, also packed as .xz.")
_TOKENIZER = flags.DEFINE_string("tokenizer", "", "Pythia's tokenizer.json.")
_OUTPUT = flags.DEFINE_string(
    "output", "raslik_jax/data/alpaca_lengths.json", "File for the counts."
)


def count_lengths(alpaca: str, tokenizer_path: str) -> str:
    """Returns the text of the file: provenance, then [tokens, response tokens, rows] by length."""
    tokenizer = load_tokenizer(tokenizer_path)
    encoded = encode(read_examples(alpaca), tokenizer, template="alpaca")
    pairs = zip(encoded.lengths_N.tolist(), encoded.num_targets_N.tolist(), strict=True)
    counts = [[*pair, rows] for pair, rows in sorted(collections.Counter(pairs).items())]
    header = {
        "corpus": "Alpaca, 52,002 rows",
        "tokenizer": "Pythia (GPT-NeoX-20B)",
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "template": "alpaca",
        "template_hash": template_hash(TEMPLATES["alpaca"]),
        "columns": ["tokens", "response_tokens", "rows"],
    }
    lines = (list(line) for _, line in itertools.groupby(counts, key=lambda count: count[0]))
    body = ",\n".join(json.dumps(line, separators=(",", ":"))[1:-1] for line in lines)
    return json.dumps(header, indent=1)[:-2] + ',\n "counts": [\n' + body + "\n ]\n}\n"


def main() -> None:
    if not (_ALPACA.value and _TOKENIZER.value):
        raise ValueError("--alpaca and --tokenizer must be given: see --help")
    text = count_lengths(_ALPACA.value, _TOKENIZER.value)
    pathlib.Path(_OUTPUT.value).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    command.start(main)
