"""What the stage that measures takes of a run's files, against sums written out in NumPy."""

import json
import shutil

import numpy as np
import pytest
import tiny

from raslik_jax.base.files import read_json_lines
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


def test_the_share_of_the_fine_tuning_is_that_of_the_files_of_the_run():
    root = tiny.finished_run()
    metrics = json.loads((root / "evaluate/metrics.json").read_text())
    ids = [row["id"] for row in read_json_lines(root / "corpus/test_normal.jsonl")]

    def read(stem):
        records = json.loads((root / f"{stem}-normal.json").read_text())
        texts = {row["id"]: row["output"] for row in read_json_lines(root / f"{stem}.jsonl")}
        assert [one["id"] for one in records] == ids and len(ids) == 5
        assert [one["words"] for one in records] == [len(texts[name].split()) for name in ids]
        return records

    base, before = (read(f"references/evaluation/{name}") for name in ("backbone", "finetuned"))
    # Another unit has the backbone's likelihood of the fine-tuned model's answers, too.
    stored = json.loads((root / "references/perplexity/finetuned.json").read_text())
    known = {one["id"]: one for one in stored["answers"]["normal"]}
    assert known
    for one in base:
        if one["id"] in known:
            other = known[one["id"]]
            np.testing.assert_allclose(one["nats"], other["nll"] * other["tokens"], rtol=1e-5)
    shares = []
    for entry in metrics["methods"]:
        now = read(f"generate/{entry['strategy']}-{entry['algorithm']}/epoch-{entry['epoch']}")
        assert entry["others"]["ended"] == np.mean([one["ended"] for one in now])
        for name in ("nats", "words", "ended"):
            sums = [sum(one[name] for one in records) for records in (base, now, before)]
            if found := entry.get("left", {}).get(name):
                np.testing.assert_allclose(
                    found["mean"], (sums[0] - sums[1]) / (sums[0] - sums[2]), rtol=1e-6
                )
                shares.append(name)
    assert "nats" in shares
