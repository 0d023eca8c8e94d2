"""Models that are trained again or rounded, against the same written out in NumPy and Optax."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from raslik_jax.base.settings import replaced
from raslik_jax.data.batches import make_batch, plan_rows
from raslik_jax.data.read.formats import read_written
from raslik_jax.data.tokens import encoding
from raslik_jax.evaluate.robustness import prompts
from raslik_jax.run.stages.robustness import Attack, Bench, write_robustness
from raslik_jax.run.workspace import Workspace
from raslik_jax.sketch.loss import example_loss

# All 12 rows are trained on.
_CHANGES = (
    "--evaluate.robustness=relearn,quantize,prompts,turns",
    "--evaluate.relearn.rows=12",
    "--evaluate.relearn.steps=3",
    "--evaluate.relearn.learning_rate=0.02",
)


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_dtype_promotion("standard"):  # Optax mixes the kinds of numbers
        yield


@pytest.fixture(scope="module")
def workspace():
    return Workspace(tiny.finished_run(), tiny.tiny_config(*_CHANGES))


def _found(workspace, name, algorithm, folder):
    write_robustness(workspace, Attack(name, "oracle", algorithm), folder)
    return json.loads((folder / "found.json").read_text())


def _merged(workspace, *parts):
    """Returns the base with an adapter folded in, by NumPy in float64."""
    base = jax.tree.map(np.asarray, workspace.model.base)
    lora = workspace.adapter(*parts)["layers"]
    scale = workspace.model.lora_config.alpha / workspace.model.lora_config.rank
    for name, factors in lora.items():
        a, b = (np.asarray(factors[key], np.float64) for key in "ab")
        kernel = base["layers"][name]["kernel"]
        base["layers"][name]["kernel"] = (kernel + scale * a @ b).astype(np.float32)
    return base


def _losses(workspace, encoded):
    """Returns the function from an adapter and a base to the loss of each row."""
    batch = make_batch(encoded, plan_rows(encoded, np.arange(len(encoded.ids))))
    decoder = workspace.model.decoder

    @jax.jit
    def losses(lora, base):
        loss = functools.partial(example_loss, decoder, lora, base, num_targets=batch.num_targets)
        return jax.vmap(loss)(jnp.asarray(batch.tokens_BL), jnp.asarray(batch.target_mask_BL))

    return losses


def _nats(workspace, lora, base, prefix=""):
    target, _ = workspace.evaluation_queries()
    rows = [row for row in (*workspace.retrieval_queries(), *target) if row.output.strip()]
    rows = [row._replace(instruction=prefix + row.instruction) for row in rows]
    return float(_losses(workspace, workspace.encode(rows))(lora, base).mean())


def test_relearning_is_adamw_on_a_fresh_adapter_of_the_merged_model(workspace, tmp_path):
    found = _found(workspace, "relearn", "ga_gdr", tmp_path)["now"]
    curve = {one["step"]: one["nats"] for one in found if one["kind"] in ("", "forgotten")}
    assert [*curve] == [0, 1, 2, 3]
    assert {one["rows"] for one in found[1:]} == {12}
    base = _merged(workspace, "unlearn", "oracle-ga_gdr", "epoch-2")
    chosen = read_written(workspace.root / "retrieve" / "oracle" / "forget.jsonl")
    rows = workspace.train_rows.named([row.example_id for row in chosen]).cut(96)
    losses, lora = _losses(workspace, rows), workspace.model.initial
    gradient = jax.jit(jax.grad(lambda lora, base: losses(lora, base).mean()))
    state = optax.ScaleByAdamState(
        jnp.zeros((), jnp.int32), *(jax.tree.map(jnp.zeros_like, lora) for _ in range(2))
    )
    for step in range(4):
        np.testing.assert_allclose(curve[step], _nats(workspace, lora, base), atol=2e-5)
        grads = gradient(lora, base)
        norm = np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda leaf, norm=norm: leaf / max(norm, 1.0), grads)
        updates, state = optax.scale_by_adam().update(grads, state)
        lora = jax.tree.map(lambda leaf, step: leaf - 0.02 * step, lora, updates)
    assert abs(curve[3] - curve[0]) > 100 * 2e-5  # beyond the tolerance
    unrelated = [one["nats"] for one in found if one["kind"] == "unrelated"]
    assert unrelated != [curve[step] for step in (1, 2, 3)]


def test_int8_is_the_merged_kernels_rounded_by_channel(workspace, tmp_path):
    found = {
        one["condition"]: one for one in _found(workspace, "quantize", "ga_gdr", tmp_path)["now"]
    }
    base = _merged(workspace, "unlearn", "oracle-ga_gdr", "epoch-2")
    lora = workspace.model.initial
    np.testing.assert_allclose(found["as it is"]["nats"], _nats(workspace, lora, base), atol=2e-5)
    for leaves in base["layers"].values():
        if "kernel" in leaves:
            scale = np.abs(leaves["kernel"]).max(axis=-2, keepdims=True) / 127
            leaves["kernel"] = np.round(leaves["kernel"] / scale) * scale
    np.testing.assert_allclose(found["int8"]["nats"], _nats(workspace, lora, base), atol=1e-4)
    assert found["nf4"]["nats"] != found["as it is"]["nats"]
    for one in found.values():
        assert 0 <= one["forget"]["low"] <= one["forget"]["mean"] <= one["forget"]["high"] <= 1
        assert one["shown"] is not None  # the toy has marker words


def test_the_models_before_are_measured_alike(workspace, tmp_path):
    found = _found(workspace, "quantize", "", tmp_path)
    assert [*found] == ["finetuned", "backbone"]
    assert found["finetuned"][0]["forget"]["mean"] == 1.0  # against its own answers
    base = jax.tree.map(np.asarray, workspace.model.base)
    expected = _nats(workspace, workspace.model.initial, base)
    np.testing.assert_allclose(found["backbone"][0]["nats"], expected, atol=2e-5)


def test_a_prefix_stands_before_the_instruction_of_every_target_row(workspace, tmp_path):
    found = {
        one["condition"]: one for one in _found(workspace, "prompts", "ga_gdr", tmp_path)["now"]
    }
    base, lora = _merged(workspace, "unlearn", "oracle-ga_gdr", "epoch-2"), workspace.model.initial
    # The longest prefixes leave no room within 96 tokens.
    assert set(found) >= {"as it is", "prefix: order"}
    nats = _nats(workspace, lora, base, prompts.PREFIXES["prefix: order"])
    np.testing.assert_allclose(found["prefix: order"]["nats"], nats, atol=2e-5)
    assert len({one["nats"] for one in found.values()}) == len(found)


def test_earlier_turns_are_text_before_a_framed_instruction(workspace, tmp_path):
    found = {one["condition"]: one for one in _found(workspace, "turns", "ga_gdr", tmp_path)["now"]}
    assert set(found) >= {"as it is", "another question before"}
    base, lora = _merged(workspace, "unlearn", "oracle-ga_gdr", "epoch-2"), workspace.model.initial
    ((asked, said),) = Bench(workspace, "oracle").exchanges("unrelated", 1)
    chosen = read_written(workspace.root / "retrieve" / "oracle" / "forget.jsonl")
    rows = {row.instruction: row for row in workspace.corpus.train}
    assert rows[asked].output == said and not rows[asked].is_target
    assert asked not in [row.instruction for row in chosen]
    nats = _nats(workspace, lora, base, f"{asked}\n{said}\n\n")
    np.testing.assert_allclose(found["another question before"]["nats"], nats, atol=2e-5)


def test_what_is_asked_twice_is_the_same_for_every_model(workspace, monkeypatch):
    bench, limits = Bench(workspace, "oracle"), workspace.config
    lengths = {
        row.example_id: len(tokens)
        for row, tokens in zip(
            bench.asked.prompts,
            encoding.encode_prompts(
                bench.asked.prompts,
                workspace.tokenizer,
                max_len=limits.corpus.max_len,
                template=workspace.template_name,
            ),
            strict=True,
        )
    }
    middle = sorted(lengths.values())[len(lengths) // 2]
    most = 2 * middle + limits.references.max_new_tokens
    config = replaced(limits, {"corpus.max_len": most})
    monkeypatch.setattr(workspace, "config", config)
    kept = bench.twice("asked again", bench.asked)
    expected = [name for name, length in lengths.items() if length < middle]
    assert [row.example_id for row in kept.prompts] == expected != [*lengths]
    assert {*kept.before} == {*expected}
