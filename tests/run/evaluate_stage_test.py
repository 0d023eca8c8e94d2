"""What the stage that measures takes of a run's files, against sums written out in NumPy."""

import json
import shutil

import numpy as np
import pytest
import tiny

from raslik_jax.run.stages import evaluate
from raslik_jax.run.workspace import StoredCorpus, Workspace


class _Relabeled(StoredCorpus):
    """The corpus of a run whose rows all have another label."""

    def __init__(self, folder, label):
        super().__init__(folder)
        self._rows = tuple(row._replace(is_target=label) for row in super()._read("train"))

    def _read(self, name):
        return self._rows if name == "train" else super()._read(name)


def _perplexity(records):
    tokens = np.array([record["tokens"] for record in records])
    nats = np.array([record["nll"] for record in records])
    return np.exp((nats * tokens).sum() / tokens.sum())


@pytest.mark.parametrize("label", [None, False])
def test_rows_without_a_label_that_are_forgotten_need_not_stay_likely(label, tmp_path):
    root = shutil.copytree(tiny.finished_run(), tmp_path / "run")
    stored = json.loads((root / "references/perplexity/finetuned.json").read_text())
    retain = stored["sets"]["retain"]
    with open(root / "retrieve/random/forget.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"id": retain[1]["id"], "instruction": "x", "output": "y"}) + "\n")
    workspace = Workspace(root, tiny.tiny_config())
    workspace.corpus = _Relabeled(root / "corpus", label)
    lost = evaluate._rows_to_lose(workspace)
    assert (retain[1]["id"] in lost) == (label is None)
    evaluate.evaluate(workspace, tmp_path)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    for name in ("finetuned", "backbone"):
        records = json.loads((root / f"references/perplexity/{name}.json").read_text())
        kept = [one for one in records["sets"]["retain"] if one["id"] not in lost]
        assert 0 < len(kept) and (len(kept) < len(retain)) == (label is None)
        found = metrics[name]["perplexity"]["retain"]["mean"]
        np.testing.assert_allclose(found, _perplexity(kept), rtol=1e-9)
