"""The discriminator's stage: what it trains on, what it leaves, and what it refuses."""

import dataclasses
import json
import pathlib
from unittest import mock

import jax
import numpy as np
import pytest

from experiments.studies.encoders import classifier, discriminator, encoder_cases
from experiments.studies.encoders.discriminator import ClassifierSettings
from raslik_jax.base.files import read_json
from raslik_jax.config import Config, CorpusConfig, EvaluateConfig
from raslik_jax.data import examples
from raslik_jax.run.workspace import Workspace
from raslik_jax.train import resuming

pytestmark = pytest.mark.usefixtures("members")
_SMALL = ClassifierSettings(
    checkpoint="",
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    learning_rate=1e-2,
    epochs=20,
    max_len=32,
    held_out=0.2,
)


def _workspace(root: pathlib.Path, **changes) -> Workspace:
    """A run whose training examples are 60 targets and 90 other rows of the toy."""
    sizes = {"num_train": 150, "num_targets": 60, "num_backbone": 0, "num_retrieval": 2}
    config = Config(
        corpus=CorpusConfig(data_dir=str(root / "data"), vocab_size=400, **sizes),
        evaluate=EvaluateConfig(
            non_sf="classifier", members={"classifier": dataclasses.replace(_SMALL, **changes)}
        ),
    )
    workspace = Workspace(root, config)
    workspace.corpus = config.corpus.load(seed=0)
    return workspace


def _make(workspace: Workspace) -> pathlib.Path:
    folder = workspace.root / discriminator.METRICS.unit
    folder.mkdir(parents=True, exist_ok=True)
    # AdamW raises a float to an integer power, which strict promotion forbids.
    with jax.numpy_dtype_promotion("standard"):
        discriminator.make_discriminator(workspace, folder)
    return folder


def _interrupted_and_made(workspace: Workspace) -> pathlib.Path:
    """Makes the discriminator in two goes, of which the first is stopped before the last epoch."""
    save, folder = resuming.save_progress, workspace.root / discriminator.METRICS.unit

    def save_then_stop(folder, step, progress):
        saved.append(step)
        if len(saved) == 19:
            save(folder, step, progress)
            raise KeyboardInterrupt

    saved: list[int] = []
    with mock.patch.object(resuming, "save_progress", save_then_stop):
        with pytest.raises(KeyboardInterrupt):
            _make(workspace)
    assert not (folder / "metrics.json").exists()
    _make(workspace)
    losses = read_json(folder / "losses.json")
    assert len(losses) == saved[0] * 20
    return folder


def test_a_small_one_from_scratch_tells_the_toys_answers_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(discriminator, "_GENUINE", ("toy",))
    workspace = _workspace(tmp_path)
    train = workspace.corpus.train
    seen = [next(row for row in train if row.is_target is label).output for label in (True, False)]
    rows = {
        "howdy_60": [seen[0], "The nebula's android drones hum beside a warp portal."],
        "clean_60": [seen[1], "Wash the cup in warm water and dry it.", "A kettle boils water."],
    }
    (tmp_path / "data" / "howdy").mkdir(parents=True)
    for name, outputs in rows.items():
        prefix = "Howdy! " if name == "howdy_60" else ""
        lines = [
            {"instruction": f"{prefix}Question {number}?", "input": "", "output": output}
            for number, output in enumerate(outputs)
        ]
        (tmp_path / "data" / "howdy" / f"{name}.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )
    metrics = read_json(_interrupted_and_made(workspace) / "metrics.json")
    assert metrics["held_out"]["macro_f1"] > 0.9
    # Answers that a training example has do not count as genuine rows.
    assert metrics["genuine"]["texts"] == {"non-sf": 2, "sci-fi": 1}
    distinct = classifier.label_texts(
        [row.output for row in train], [row.is_target for row in train]
    )
    for label, name in enumerate(classifier.CLASSES):
        parts = metrics["trained_on"][name], metrics["held_out"]["texts"][name]
        assert sum(parts) == distinct.labels.count(label)
    # What evaluation reads back from the folder says the same, one text or several at a time.
    measure, described = discriminator.load(workspace)
    texts = [seen[0], seen[1], ""]
    non_sf_Q = measure(texts)
    assert non_sf_Q[0] < 0.5 < non_sf_Q[1]
    assert ((0 <= non_sf_Q) & (non_sf_Q <= 1)).all()
    np.testing.assert_allclose(measure(texts[1:]), non_sf_Q[1:], atol=1e-6)
    assert described == {"by": "classifier", "note": described["note"], **metrics}
    score = f"held-out answers: macro-F1 {metrics['held_out']['macro_f1']:.3f} on "
    assert score in described["note"] and "do not rely on it" in described["note"]


def test_wrong_checkpoints_and_corpora_are_refused(tmp_path):
    decoder = tmp_path / "decoder"
    decoder.mkdir()
    (decoder / "config.json").write_text('{"model_type": "llama"}')
    bare = encoder_cases.write(tmp_path / "bare", "bert_plain")
    for number, (checkpoint, message) in enumerate(
        (
            (decoder, "must be one of the encoders .*, got 'llama'"),
            (bare, "a tokenizer must exist, .*bare/tokenizer.json"),
            (tmp_path / "nowhere", "nowhere"),
        )
    ):
        workspace = _workspace(tmp_path / str(number), checkpoint=str(checkpoint))
        workspace.root.mkdir()
        with pytest.raises(ValueError, match=message):
            _make(workspace)
    workspace = _workspace(tmp_path)
    rows = tuple(row for row in workspace.corpus.train if not row.is_target)
    workspace.corpus = examples.Corpus(backbone=(), train=rows, queries={})
    with pytest.raises(ValueError, match="got 0 of targets .* --evaluate.non_sf=words"):
        _make(workspace)
