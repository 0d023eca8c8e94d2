"""Measures how well words alone find the five behaviors of --corpus.dataset=behaviors.

  python experiments/studies/behaviors/measure.py --data_dir=FOLDER

BM25 ranks the 2,000 training rows of every behavior by the mean score over the retrieval queries,
with and without the answers of the queries. The command prints the area under the precision-recall
curve. It also prints how often the judges see the behavior in targets and in other rows. It writes
results.json to this folder. No model is needed (docs/studies/behaviors.md).
"""

import dataclasses
import itertools
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from experiments.studies.behaviors.corpus import BEHAVIORS, register
from raslik_jax.base.files import write_json
from raslik_jax.base.settings import Settings, replaced, setting
from raslik_jax.cli import command
from raslik_jax.data.corpora import CorpusConfig
from raslik_jax.data.examples import Corpus, Example

HERE = pathlib.Path(__file__).resolve().parent
ROWS, RATES, SEEDS = 2000, (0.02, 0.08), (0, 1, 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """The folder of Alpaca and the file of the results."""

    data_dir: str = setting("", "Folder of the real data (default: $RASLIK_DATA).")
    out: str = setting(str(HERE / "results.json"), "File of the results.")


def measure(corpus: Corpus, behavior: str) -> dict[str, Any]:
    """Returns BM25's auPRC and the shares of answers that the judge says show the behavior."""
    from raslik_jax.evaluate.ranking import auprc
    from raslik_jax.retrieve import bm25
    from raslik_jax.retrieve.strategies import query_text

    rows, queries = corpus.train, corpus.queries["retrieval"]
    index = bm25.index_documents([query_text(row, "prompt_and_output").split() for row in rows])
    is_target_N = np.array([bool(row.is_target) for row in rows])
    shows = BEHAVIORS[behavior].shows

    def share(kind: Sequence[Example]) -> float:
        return float(np.mean([shows(row.output) for row in kind]))

    found: dict[str, Any] = {
        "auprc": {
            text: auprc(
                bm25.score_queries(index, [query_text(q, text).split() for q in queries]).mean(0),
                is_target_N,
            )
            for text in ("prompt", "prompt_and_output")
        }
    }
    found["judged"] = {
        "targets": share([row for row in rows if row.is_target]),
        "hard negatives": share([row for row in rows if row.source == "behaviors:beside"]),
        "other rows": share([row for row in rows if not row.source.startswith("behaviors")]),
    }
    return found


def make_corpus(behavior: str, rate: float, seed: int, data_dir: str) -> Corpus:
    """Returns the corpus of a behavior with this share of targets."""
    sizes = {"num_train": ROWS, "num_targets": round(rate * ROWS), "num_backbone": 0}
    chosen = {"dataset": "behaviors", "behaviors.behavior": behavior, "data_dir": data_dir}
    return replaced(CorpusConfig(), chosen | sizes).load(seed=seed)


def main(options: Options) -> None:
    """Measures all corpora, prints a line for each and writes the results."""
    register()
    results = []
    for behavior, rate, seed in itertools.product(BEHAVIORS, RATES, SEEDS):
        found = measure(make_corpus(behavior, rate, seed, options.data_dir), behavior)
        results.append({"behavior": behavior, "rate": rate, "seed": seed, **found})
        print(behavior, rate, seed, found)
    write_json(pathlib.Path(options.out), {"rows": ROWS, "measured": results})


if __name__ == "__main__":
    command.start(main, Options())
