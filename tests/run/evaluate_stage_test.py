"""What the stage that measures takes of a run's files, against sums written out in NumPy."""

import json
import shutil

import numpy as np
import pytest
import tiny

from raslik_jax.base.files import read_json_lines
from raslik_jax.base.settings import replaced
from raslik_jax.config import Config
from raslik_jax.data.corpora import DATASETS
from raslik_jax.run.stages import evaluate
from raslik_jax.run.workspace import StoredCorpus, Workspace


class _Relabeled(StoredCorpus):
    """The corpus of a run whose rows all have another label."""

    def __init__(self, folder, label):
        super().__init__(folder)
        self.queries["train"] = tuple(row._replace(is_target=label) for row in self.train)


def _non_sf(folder, texts, **settings):
    """Returns Non-SF of texts in a run of these settings, and how it is described."""
    measure, described = evaluate.non_sf_of(Workspace(folder, replaced(Config(), settings)))
    return measure and measure(texts).tolist(), described


def test_words_a_judge_or_nothing_says_what_shows_the_behavior(tmp_path, monkeypatch):
    texts = ["It is 4719, an android.", "A kettle for one.", ""]
    assert _non_sf(tmp_path, texts) == ([0, 1, 1], {"by": "words"})
    words = tmp_path / "words.txt"
    words.write_text("One", encoding="utf-8")
    named = {"evaluate.marker_words": str(words)}
    own = {"corpus.dataset": "records", "corpus.records.train_file": "t"}
    own |= {"corpus.records.queries_file": "q"}
    assert _non_sf(tmp_path, texts, **own) == (None, None)
    assert _non_sf(tmp_path, texts, **own, **named) == ([1, 0, 1], {"by": "words"})
    judged = DATASETS["toy"]._replace(shows=lambda own: lambda text: "4719" in text)
    monkeypatch.setitem(DATASETS, "toy", judged)
    assert _non_sf(tmp_path, texts) == ([0, 1, 1], {"by": "judge"})
    assert _non_sf(tmp_path, texts, **named) == ([1, 0, 1], {"by": "words"})


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
