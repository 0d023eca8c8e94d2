"""The efficiency table on a tiny run."""

import pytest
import tiny

from experiments.bench import harness
from experiments.studies.efficiency import measure

_RUN = (
    "--corpus.dataset=toy --corpus.template=brief --corpus.num_train=60 --corpus.num_targets=8 "
    "--corpus.num_backbone=60 --corpus.num_retrieval=3 --corpus.num_validation=2 "
    "--corpus.num_test=3 --corpus.max_len=96 --corpus.vocab_size=400 --backbone.hidden_size=16 "
    "--backbone.num_hidden_layers=2 --backbone.num_attention_heads=2 --backbone.steps=4 "
    "--finetune.epochs=1 --finetune.lora_rank=2 --references.max_new_tokens=8 --sketch.size=256 "
    "--finetune.lora_targets=query_key_value,dense,dense_h_to_4h,dense_4h_to_h "
    "--sketch.num_buckets=2 --sketch.batch_tokens=512 --retrieve.strategies=raslik "
    "--stages=corpus,backbone,finetune,references,sketch"
)


def test_every_method_of_the_efficiency_table_is_measured(tmp_path):
    done = tiny.run_script("experiments/run.py", *_RUN.split(), f"--workdir={tmp_path}")
    assert done.returncode == 0, done.stderr
    how = {"methods": ("bm25", "raslik", "exact"), "repeats": 1, "exact_batches": 1}
    lines = harness.run(measure.Options(workdir=str(tmp_path), **how), measure.measure)
    methods = {line["method"]: line for line in lines["method"]}
    assert list(methods) == ["bm25", "raslik", "exact"]
    assert {line["examples"] for line in methods.values()} == {60}
    assert methods["exact"]["measured_share"] < 1
    (memory,) = lines["memory"]
    # Rank 2 on the four linear layers of two blocks of width 16.
    widths = 2 * 2 * ((16 + 48) + (16 + 16) + (16 + 64) + (64 + 16))
    assert (memory["num_params"], memory["sketch_size"]) == (widths, 256)
    assert memory["gradient_bytes"] / memory["sketch_bytes"] == widths / 256
    assert memory["index_bytes"] == 60 * 256 * 4


def test_a_run_has_to_be_named():
    with pytest.raises(ValueError, match="--workdir must be the work directory of a run"):
        list(measure.measure(measure.Options()))
