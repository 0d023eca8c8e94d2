"""Checkpoints and adapters as transformers and peft read and write them."""

import re
import shlex
import subprocess
import sys

import checkpoint_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import make_checkpoints

from raslik_jax.models import adapters, checkpoint, decoder, hf_config

pytestmark = pytest.mark.heavy

_TOKENS = np.array([[3, 17, 4, 4, 40, 21, 9]])


def _load(folder, name):
    """Base, adapter and functions of a golden case with weights of a trained model's size."""
    base = checkpoint_cases.write_model(folder / "hf", name)
    adapter = checkpoint_cases.write_adapter(folder / "peft", name)
    settings = adapters.read_adapter_config(adapter, checkpoint.read_config(base))
    model = checkpoint_cases.load(base, lora_config=settings)
    lora = adapters.load_adapter(folder / "peft", model.graphdef.config)
    return model._replace(base=_small(model.base), lora=_small(lora))


def _small(tree):
    return jax.tree.map(lambda leaf: 0.2 * leaf, tree)


def _ours(graphdef, lora, base):
    bound = decoder.bind(graphdef)
    return np.asarray(bound.logits(lora, base, bound.hidden(lora, base, jnp.asarray(_TOKENS[0]))))


def _theirs(model):
    import torch

    with torch.no_grad():
        return model.eval()(torch.from_numpy(_TOKENS)).logits[0].numpy()


def _assert_same_logits(ours, theirs):
    np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=1e-4)
    assert np.abs(ours).max() > 0.5  # or the comparison says little


def test_every_field_of_transformers_generation_is_known_to_be_harmless():
    import transformers

    fields = set(transformers.GenerationConfig().to_dict())
    ids = {"bos_token_id", "eos_token_id", "pad_token_id"}  # which every architecture reads
    assert fields - ids <= hf_config.IGNORED


def test_the_golden_file_is_what_transformers_and_peft_write_today():
    today = make_checkpoints.make()
    for name, case in today.items():
        for part in ("tensors", "adapter_tensors", "config", "adapter_config"):
            assert case[part] == checkpoint_cases.GOLDEN[name][part], (name, part)
    assert set(today) == set(checkpoint_cases.GOLDEN)


@pytest.mark.parametrize("name", checkpoint_cases.NAMES)
def test_transformers_loads_what_is_saved_and_what_is_merged(name, tmp_path):
    import transformers

    model = _load(tmp_path, name)
    config = model.graphdef.config
    plain, _, _ = decoder.abstract(config, None)
    checkpoint.save_model(tmp_path / "saved", config, model.base, shard_bytes=10_000)
    saved, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", output_loading_info=True
    )
    assert not any(report.values()), report
    _assert_same_logits(_ours(plain, {}, model.base), _theirs(saved))
    merged = checkpoint.merge(model.lora, model.base, model.graphdef.lora_config)
    checkpoint.save_model(tmp_path / "merged", config, merged)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    _assert_same_logits(_ours(model.graphdef, model.lora, model.base), _theirs(loaded))


@pytest.mark.parametrize("name", checkpoint_cases.NAMES)
def test_a_round_trip_through_peft_is_exact(name, tmp_path):
    import peft
    import transformers

    model = _load(tmp_path, name)
    config, settings = model.graphdef.config, model.graphdef.lora_config
    checkpoint.save_model(tmp_path / "base", config, model.base)
    adapters.save_adapter(
        tmp_path / "out", model.lora, settings, config, base_model=str(tmp_path / "base")
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "out")
    _assert_same_logits(_ours(model.graphdef, model.lora, model.base), _theirs(theirs))
    theirs.save_pretrained(tmp_path / "back")
    assert adapters.read_adapter_config(tmp_path / "back", config) == settings
    back = adapters.load_adapter(tmp_path / "back", config, lora_config=settings)
    jax.tree.map(np.testing.assert_array_equal, back, model.lora)
    auto = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    np.testing.assert_array_equal(_theirs(auto), _theirs(theirs))


def test_the_command_for_pickles_converts_them(tmp_path):
    import safetensors.torch
    import torch

    folder = checkpoint_cases.write_model(tmp_path, "olmo2")
    file = folder / "model.safetensors"
    torch.save(safetensors.torch.load_file(file), folder / "pytorch_model.bin")
    before = checkpoint_cases.load(folder).base
    file.unlink()
    with pytest.raises(ValueError) as refusal:
        checkpoint_cases.load(folder)
    command = re.search(r"python (-c .*)$", str(refusal.value)).group(1)
    subprocess.run([sys.executable, *shlex.split(command)], check=True, capture_output=True)
    jax.tree.map(np.testing.assert_array_equal, before, checkpoint_cases.load(folder).base)
