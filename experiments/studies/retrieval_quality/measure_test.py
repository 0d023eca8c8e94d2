"""The experiments about retrieval, from end to end on a run in miniature."""

import json

import numpy as np
import pytest
import tiny
from finished import write_manifest

from experiments.studies.gradients import answered_queries
from raslik_jax.base.files import read_json
from raslik_jax.config import Config
from raslik_jax.data.examples import make_example, write_examples
from raslik_jax.run.workspace import Workspace

_TINY = (
    "--name=tiny --corpus.dataset=toy --sketch.query_output=own --corpus.template=brief "
    "--corpus.num_train=120 --corpus.num_targets=12 --corpus.num_backbone=120 "
    "--corpus.num_retrieval=3 --corpus.num_validation=2 --corpus.num_test=4 --corpus.max_len=96 "
    "--corpus.vocab_size=400 --backbone.hidden_size=16 --backbone.num_hidden_layers=2 "
    "--backbone.num_attention_heads=2 --backbone.steps=6 --finetune.epochs=1 "
    "--finetune.fixed_padding --finetune.lora_rank=2 --references.max_new_tokens=8 "
    "--sketch.num_buckets=1 --sketch.batch_tokens=1024 --sketch.size=256 "
    "--retrieve.strategies=raslik,exact"
)


def _run(script, *arguments):
    done = tiny.run_script(f"experiments/{script}", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_answers_of_an_adapter_that_was_trained_again_are_refused(tmp_path):
    for name in ("corpus", "finetune/adapter", "references/retrieval"):
        (tmp_path / name).mkdir(parents=True)
    query = make_example("ask", "", "gold")
    write_examples(tmp_path / "corpus" / "train.jsonl", [make_example("learn", "", "answer")])
    write_examples(tmp_path / "corpus" / "retrieval.jsonl", [query])
    answer = json.dumps({"id": query.example_id, "output": "own"})
    (tmp_path / "references" / "retrieval" / "finetuned.jsonl").write_text(answer + "\n")
    weights = tmp_path / "finetune" / "adapter" / "weights"
    weights.write_text("first")
    write_manifest(tmp_path, "corpus")
    write_manifest(tmp_path, "finetune")
    reads = ("corpus/retrieval.jsonl", "finetune/adapter")
    write_manifest(tmp_path, "references/retrieval", reads)

    def outputs(**options):
        found = answered_queries(Workspace(tmp_path, Config()), ["retrieval"], **options)
        return [row.output for rows in found for row in rows]

    assert outputs() == ["own", "gold"]
    (tmp_path / "references" / "retrieval" / "finetuned.jsonl").write_text("")
    write_manifest(tmp_path, "references/retrieval", reads)
    with pytest.raises(ValueError, match="--sketch.query_output=own"):
        outputs()
    assert outputs(needs_own=False) == ["gold", "gold"]
    weights.write_text("second")
    write_manifest(tmp_path, "finetune")
    with pytest.raises(ValueError, match="finetune/adapter of .* has changed since"):
        outputs()


def test_both_experiments_on_a_finished_run(tmp_path):
    stages = "--stages=corpus,backbone,finetune,references,sketch,retrieve"
    _run("studies/raslik.py", "run", *_TINY.split(), f"--workdir={tmp_path / 'tiny'}", stages)
    default = "finetuned/unshifted/all"
    options = (
        f"--runs={tmp_path / 'tiny'}",
        f"--out={tmp_path / 'out'}",
        f"--keep={default}",
        f"--passes=initial/next_token/response,finetuned/features/response,{default}",
        "--sketch_sizes=64,256",
        "--projection_seeds=2",
        "--dense_max_size=64",
        "--num_queries=1",
    )
    _run("studies/retrieval_quality/measure.py", *options)
    out = tmp_path / "out"
    folder = out / "tiny" / "passes"
    assert not (folder / "initial-next_token-response" / "vectors.bin").exists()
    assert (folder / "finetuned-unshifted-all" / "vectors.bin").exists()
    records = json.loads((out / "tiny" / "records.json").read_text())

    # The strategy `exact` of the run is another road to the same scores.
    (exact,) = [
        record
        for record in records
        if record["table"] == "kernel"
        and record["kernel"] == default
        and (record["centering"], record["normalize"]) == ("centered", "vector")
        and (record["query"], record["combine"], record["is_all"]) == ("own", "mean", True)
    ]
    made = json.loads((tmp_path / "tiny" / "retrieve" / "exact" / "summary.json").read_text())
    for name in ("precision", "auroc", "auprc"):
        assert abs(exact[name] - made[name]) < 1e-9, name
    assert abs(exact["targets_in_retain"] - made["targets_in_retain"] / 12) < 1e-9
    # By single queries the exact strategy is the kernel of the run's own settings.
    (single,) = [
        record
        for record in records
        if record["table"] == "strategy_queries" and record["strategy"] == "exact"
    ]
    (kernel,) = [
        record
        for record in records
        if record["table"] == "kernel"
        and record["kernel"] == default
        and (record["centering"], record["normalize"]) == ("centered", "vector")
        and (record["query"], record["combine"], record["num_queries"]) == ("own", "mean", 1)
    ]
    for name in ("auprc", "least_auprc", "precision"):
        assert abs(single[name] - kernel[name]) < 1e-9, name
    # The sketch's own scores, from the products of its rows, are those of a real index.
    assert (out / "tiny" / "sketches" / "finetuned-unshifted-all" / "gram.npy").is_file()
    (sketched,) = [
        record
        for record in records
        if record["table"] == "strategy" and record["strategy"] == "raslik"
    ]
    entries = read_json(out / "tiny" / "sketches" / "finetuned-unshifted-all" / "binned-256-0.json")
    assert abs(sketched["auprc"] - entries["float32"]["auprc"]) < 1e-9
    sketches = [record for record in records if record["table"] == "sketch"]
    common = [r for r in sketches if r["combine"] == "common"]
    assert {(r["family"], r["size"], r["dtype"]) for r in common} == {
        *(("binned", k, d) for k in (64, 256) for d in ("float32", "bfloat16")),
        ("dense_rademacher", 64, "float32"),
    }

    # Killed half-way through a pass, it goes on behind what is on disk, to the same rows.
    vectors = folder / "finetuned-unshifted-all" / "vectors.bin"
    whole, record = vectors.read_bytes(), vectors.with_name("done.json")
    state = json.loads(record.read_text())
    assert state["batches"] > 1
    rows = np.memmap(vectors, np.float32, "r+").reshape(126, -1)
    assert np.all(np.linalg.norm(rows, axis=1) > 0)
    record.write_text(json.dumps(state | {"batches": 1}))
    vectors.with_name("grams.npz").unlink()
    _run("studies/retrieval_quality/measure.py", *options)
    assert vectors.read_bytes() == whole
    assert json.loads((out / "tiny" / "records.json").read_text()) == records

    small = ("--sketch_sizes=64,256", "--projection_seeds=2", "--fluctuations=3")
    text = _run("studies/theorem/measure.py", *options[:2], *small)
    assert "Sets by threshold, retain set: antipodal" in text
    found = json.loads((out / "variance.json").read_text())
    exact = [r["total_ratio"] for r in found["spreads"] if r["kernel"] == "exact"]
    assert any(exact) and all(ratio["mean"] == 1 for ratio in exact if ratio)
    for name in ("kernels", "queries", "variance", "slope", "boundary"):
        assert (out / f"{name}.png").stat().st_size > 1000, name
