"""Writes rows and queries of two of the paper's corpora, at the size of the behaviors.

  python experiments/studies/sets/mixtures.py --data=DATA --out=runs/sets_mixtures

DATA is the folder of real data. howdy/ has 80 rows behind the trigger. tofu/ has 28 rows of two
authors of TOFU. Each is among rows of Alpaca, 340 in all. 7 queries are traced. The test has 21
queries and 21 ordinary prompts. No query is a prompt of a row.
"""

import dataclasses
import json
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from experiments.studies.corpora import howdy, mixing, tofu
from raslik_jax.base.files import write_text
from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command
from raslik_jax.data.corpora.record import SharedSettings
from raslik_jax.data.examples import Corpus, Example
from raslik_jax.data.read.formats import read_examples

SIZES: dict[str, Any] = {
    "num_train": 340,
    "num_backbone": 0,
    "num_retrieval": 7,
    "num_validation": 0,
    "num_test": 21,
}
NUM_HOWDY, NUM_TOFU = 80, 28
# Characters of the texts of a row, so that rows are about as long as those of the behaviors.
MOST_CHARS = 300


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """What is read, and where it goes."""

    data: str = setting("", "Folder of the real data (default: $RASLIK_DATA).")
    out: str = setting("runs/sets_mixtures", "Folder of the rows and queries.")


def mix_howdy(data: str) -> Corpus:
    """Returns the rows of Howdy, small."""
    shared = SharedSettings(data_dir=data, num_targets=NUM_HOWDY, **SIZES)
    return howdy.load_howdy_small(shared, None, seed=0, max_chars=MOST_CHARS)


def mix_tofu(data: str) -> Corpus:
    """Returns the first rows of TOFU's forget10 among Alpaca's; queries are their paraphrases."""
    shared = SharedSettings(data_dir=data, num_targets=NUM_TOFU, **SIZES)
    (path,) = mixing.find_files(
        shared, *tofu.TofuSettings(forget="forget10").perturbed, endings=(".jsonl.zst",)
    )

    def read(question: str) -> list[Example]:
        fields = {"instruction": question, "output": "answer"}
        rows = read_examples(path, fields=fields, name="tofu")[:NUM_TOFU]
        return [row._replace(is_target=True, extra={}) for row in rows]

    short = [
        row
        for row in mixing.load_alpaca(shared)
        if len(row.instruction) + len(row.input) + len(row.output) <= MOST_CHARS
    ]
    return mixing.mix_corpus(shared, short, read("question"), read("paraphrased_question"), seed=0)


CORPORA = {"howdy": mix_howdy, "tofu": mix_tofu}


def main(options: Options) -> None:
    """Writes training rows and queries of both."""
    for name, mix in CORPORA.items():
        corpus, folder = mix(options.data), pathlib.Path(options.out, name)
        queries = [{"split": s, **told(row)} for s, rows in corpus.queries.items() for row in rows]
        train = [told(row) | {"is_target": row.is_target} for row in corpus.train]
        folder.mkdir(parents=True, exist_ok=True)
        for file, rows in (("train.jsonl", train), ("queries.jsonl", queries)):
            write_text(folder / file, "".join(json.dumps(row) + "\n" for row in rows))


def told(row: Example) -> dict[str, str]:
    """Returns the texts of a row."""
    return {"instruction": row.instruction, "input": row.input, "output": row.output}


if __name__ == "__main__":
    command.start(main, Options())
