"""An adapter trained elsewhere in the place of fine-tuning."""

import json
import pathlib

import checkpoint_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from snapshots import refused

from raslik_jax.base.settings import SettingsError, replaced
from raslik_jax.config import BackboneConfig, Config, FinetuneConfig
from raslik_jax.data.tokens.tokenization import Tokenizer, save_tokenizer, train_bpe
from raslik_jax.models import checkpoint, decoder
from raslik_jax.run import checking
from raslik_jax.run.stages import finetune
from raslik_jax.run.workspace import Workspace
from raslik_jax.train import loop

_TOKENS = np.array([3, 17, 4, 4, 40, 21, 9])
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"


def _config(root: pathlib.Path, **finetune_settings) -> Config:
    backbone = BackboneConfig(checkpoint=str(root / "base"), adapter=str(root / "theirs"))
    return Config(backbone=backbone, finetune=FinetuneConfig(**finetune_settings))


def _small(tensors):
    """Weights of unit size saturate everything."""
    return {key: 0.4 * value for key, value in tensors.items()}


def _write_base(root: pathlib.Path, **options) -> pathlib.Path:
    tensors = checkpoint_cases.tensors_of(checkpoint_cases.GOLDEN["llama"]["tensors"])
    return checkpoint_cases.write_model(root / "base", "llama", tensors=_small(tensors), **options)


def _write_adapter(root: pathlib.Path, tensors=None, **changes) -> pathlib.Path:
    """The golden adapter, or one of these tensors, with changes of its config."""
    if tensors is None:
        tensors = checkpoint_cases.tensors_of(checkpoint_cases.GOLDEN["llama"]["adapter_tensors"])
    folder = checkpoint_cases.write_adapter(root / "theirs", "llama", changes=changes)
    safetensors.numpy.save_file(_small(tensors), folder / _WEIGHTS)
    return folder


def _merged_logits(root: pathlib.Path, scale_of) -> np.ndarray:
    """Logits of the base with W + scale B A for every pair of the adapter, summed by NumPy."""
    base = safetensors.numpy.load_file(root / "base" / "model.safetensors")
    factors = safetensors.numpy.load_file(root / "theirs" / _WEIGHTS)
    for key, a in factors.items():
        module, is_first, _ = key.partition(".lora_A.weight")
        if is_first:
            b = factors[f"{module}.lora_B.weight"].astype(np.float64)
            name = f"{module.removeprefix('base_model.model.')}.weight"
            base[name] = (base[name] + scale_of(module, len(a)) * b @ a).astype(np.float32)
    whole = checkpoint_cases.write_model(root / "whole", "llama", tensors=base)
    model = checkpoint_cases.load(whole)
    return _logits(decoder.bind(model.graphdef), {}, model.base)


def _logits(bound, lora, base) -> np.ndarray:
    hidden = jax.jit(bound.hidden)(lora, base, jnp.asarray(_TOKENS))
    return np.asarray(bound.logits(lora, base, hidden))


def _adopt(root: pathlib.Path, monkeypatch, config: Config | None = None) -> Workspace:
    """Runs the unit as a plan does, and returns what later stages see."""
    monkeypatch.setattr(loop, "fit", None)  # no training step
    first, later = (Workspace(root / "run", config or _config(root)) for _ in range(2))
    tokenizer = train_bpe(["a few words"], vocab_size=270)
    for workspace in (first, later):
        workspace.__dict__["tokenizer"] = tokenizer._replace(vocab_size=40)
    checking.check_model(first.config)
    finetune.adopt_model(first, root / "run" / "finetune")
    return later


def test_a_plain_adapter_is_taken_over_without_a_training_step(tmp_path, monkeypatch):
    _write_base(tmp_path)
    _write_adapter(tmp_path)
    later = _adopt(tmp_path, monkeypatch)
    model = later.model
    found = _logits(model.decoder, later.finetuned, model.base)
    np.testing.assert_allclose(found, _merged_logits(tmp_path, lambda *_: 2.0), atol=1e-5)
    plain = _logits(model.decoder, model.initial, model.base)
    assert np.abs(found - plain).max() > 1e-2
    assert later.has_backbone
    assert not (later.root / "finetune" / "initial").exists()
    # The backbone has an adapter of the same shape that changes nothing.
    backbone = later.backbone
    assert jax.tree.map(jnp.shape, backbone.lora) == jax.tree.map(jnp.shape, later.finetuned)
    np.testing.assert_array_equal(_logits(*backbone), plain)


def test_the_initial_adapter_is_written_where_gradients_are_taken_at_it(tmp_path, monkeypatch):
    _write_base(tmp_path)
    _write_adapter(tmp_path)
    config = _config(tmp_path)
    config = replaced(config, {"sketch.gradient_at": "initial"})
    later = _adopt(tmp_path, monkeypatch, config)
    initial = later.adapter("finetune", "initial")
    jax.tree.map(np.testing.assert_array_equal, initial, later.model.initial)
    ours = _logits(later.model.decoder, initial, later.model.base)
    np.testing.assert_array_equal(ours, _logits(*later.backbone))


def test_what_no_peft_adapter_is_is_refused_before_the_model_is_loaded(tmp_path, monkeypatch):
    _write_base(tmp_path)
    monkeypatch.setattr(checkpoint, "load_model", None)
    folder = _write_adapter(tmp_path)
    weights, config = (folder / name for name in (_WEIGHTS, _CONFIG))
    checking.check_model(_config(tmp_path))
    whole, text = weights.read_bytes(), config.read_text()

    def assert_refused(message: str) -> None:
        with pytest.raises(ValueError, match=message) as refusal:
            checking.check_model(_config(tmp_path))
        assert len(str(refusal.value)) <= 300 + len(str(tmp_path))
        weights.write_bytes(whole)
        config.write_text(text)

    config.write_text(json.dumps({**json.loads(text), "use_dora": True}))
    assert_refused("use_dora=True")
    tensors = safetensors.numpy.load_file(weights)
    dead = {key: value * ("lora_A" in key) for key, value in tensors.items()}
    safetensors.numpy.save_file(dead, weights)
    assert_refused("all factors B .* are zero")
    weights.rename(folder / "adapter_model.bin")
    assert_refused("must have safetensors, got pickled weights")


def test_a_tokenizer_next_to_the_adapter_is_named_or_refused_at_the_start(tmp_path, capsys):
    base, adapter = _write_base(tmp_path), _write_adapter(tmp_path)
    words = tokenizers.models.WordLevel(
        {f"w{number}": number for number in range(47)}, unk_token="w0"
    )
    backend = tokenizers.Tokenizer(words)
    backend.add_special_tokens(["<|endoftext|>"])
    tokenizer = Tokenizer(backend, 47, 47, 48)
    save_tokenizer(base, tokenizer)
    checking.check_model(_config(tmp_path))
    assert "next to the adapter" not in capsys.readouterr().err
    (adapter / "chat_template.jinja").write_text("{{ messages[0].content }}")
    checking.check_model(_config(tmp_path))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "theirs" in line]
    assert line.endswith("chat template")
    tokenizer.backend.add_special_tokens(["<more>"])
    save_tokenizer(adapter, tokenizer)
    with pytest.raises(ValueError, match="48 entries.*got 49 in .*theirs.*merge_and_unload"):
        checking.check_model(_config(tmp_path))


def test_an_adapter_in_the_checkpoints_folder_that_is_not_given_is_named(tmp_path, capsys):
    base = _write_base(tmp_path)
    checkpoint_cases.write_adapter(base, "llama")
    whole = {"backbone.checkpoint": str(base), "finetune.epochs": 0}
    checking.check_model(replaced(Config(), whole))
    assert "--adapter" in capsys.readouterr().err


def test_settings_that_an_adapter_of_elsewhere_cannot_have():
    whole = {"backbone.checkpoint": "base", "finetune.epochs": 0}
    both = {"backbone.checkpoint": "base", "backbone.adapter": "theirs"}
    base = {"references.base": "before"}
    replaced(Config(), both)
    replaced(Config(), whole | base)
    for values in (
        {"backbone.adapter": "theirs"},
        {"finetune.epochs": 0},
        both | base,
    ):
        with refused(SettingsError):
            replaced(Config(), values)


def test_a_model_that_was_given_whole_gets_an_adapter_that_changes_nothing(tmp_path, monkeypatch):
    _write_base(tmp_path)
    whole = {"backbone.checkpoint": str(tmp_path / "base"), "finetune.epochs": 0}
    config = replaced(Config(), whole)
    later = _adopt(tmp_path, monkeypatch, config)
    found = _logits(later.model.decoder, later.finetuned, later.model.base)
    alone = checkpoint_cases.load(tmp_path / "base")
    plain = _logits(decoder.bind(alone.graphdef), {}, alone.base)
    np.testing.assert_array_equal(found, plain)
    assert not later.has_backbone
    # The model before it was fine-tuned elsewhere, where it is named.
    tensors = checkpoint_cases.tensors_of(checkpoint_cases.GOLDEN["llama"]["tensors"])
    checkpoint_cases.write_model(tmp_path / "before", "llama", tensors=tensors)
    before = {"references.base": str(tmp_path / "before")}
    named = Workspace(tmp_path / "run", replaced(config, before))
    named.__dict__["tokenizer"] = later.tokenizer
    checking.check_model(named.config)
    assert named.has_backbone
    theirs = checkpoint_cases.load(tmp_path / "before")
    np.testing.assert_array_equal(
        _logits(*named.backbone), _logits(decoder.bind(theirs.graphdef), {}, theirs.base)
    )
    checkpoint_cases.write_model(tmp_path / "before", "olmo2")
    with pytest.raises(ValueError, match="references.base must be what .* was fine-tuned from"):
        checking.check_model(named.config)
    assert set(later.finetuned["layers"]) == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize(
    ("named", "is_told"),
    [
        ("", False),
        ("owner/Base", False),
        ("/somewhere/base/", False),
        ("owner/called-so", False),
        ("owner/base-unsloth-bnb-4bit", False),
        ("owner/base-instruct", True),
    ],
)
def test_an_adapter_that_names_another_base_is_told(tmp_path, capsys, named, is_told):
    _write_base(tmp_path, changes={"_name_or_path": "owner/called-so"})
    _write_adapter(tmp_path, base_model_name_or_path=named)
    checking.check_model(_config(tmp_path))
    said = capsys.readouterr().err
    assert (f"trained on '{named}'" in said) == is_told
    assert (said != "") == is_told
    assert len(said) <= 300 + len(str(tmp_path))
