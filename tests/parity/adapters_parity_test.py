"""Adapters as PEFT trains and saves them: logits, LoRA gradients, and the way back."""

import math

import checkpoint_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raslik_jax.models import adapters, checkpoint, decoder
from raslik_jax.models.lora import LoRAConfig

pytestmark = pytest.mark.heavy

_TOKENS = np.array([3, 17, 4, 4, 21, 9])
_CASES = checkpoint_cases.ADAPTERS["peft"]


def _theirs(folder, fields):
    """Returns a model with an adapter of random factors, which is saved beside it."""
    import peft
    import torch
    import transformers

    tensors = checkpoint_cases.tensors_of(checkpoint_cases.GOLDEN["llama"]["tensors"])
    small = {key: 0.4 * value for key, value in tensors.items()}
    checkpoint_cases.write_model(folder / "base", "llama", tensors=small)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    settings = peft.LoraConfig(**{"r": 3, "lora_alpha": 6, "task_type": "CAUSAL_LM", **fields})
    model = peft.get_peft_model(base, settings)
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.4)
    model.save_pretrained(folder / "theirs")
    return model.eval()


def _logits_of(model):
    import torch

    return model(torch.from_numpy(_TOKENS)[None]).logits[0]


@pytest.mark.parametrize("name", _CASES)
def test_pefts_logits_and_gradients_and_the_way_back(name, tmp_path):
    import peft
    import torch
    import transformers

    theirs = _theirs(tmp_path, _CASES[name])
    expected = _logits_of(theirs)
    torch.log_softmax(expected, -1)[:, 5].sum().backward()
    config = checkpoint_cases.load(tmp_path / "base").graphdef.config
    settings = adapters.read_adapter_config(tmp_path / "theirs", config)
    model = checkpoint_cases.load(tmp_path / "base", lora_config=settings)
    lora = adapters.load_adapter(tmp_path / "theirs", config, lora_config=settings)
    bound = decoder.bind(model.graphdef)

    @jax.jit
    def measure(lora):
        def loss(lora):
            hidden_LE = bound.hidden(lora, model.base, jnp.array(_TOKENS))
            logits_LV = bound.logits(lora, model.base, hidden_LE)
            return jnp.sum(jax.nn.log_softmax(logits_LV)[:, 5]), logits_LV

        gradient, logits_LV = jax.grad(loss, has_aux=True)(lora)
        return logits_LV, gradient

    logits_LV, gradient = measure(lora)
    np.testing.assert_allclose(logits_LV, expected.detach().numpy(), atol=1e-4, rtol=1e-4)
    total = 0.0
    for key, weight in theirs.named_parameters():
        if "lora_" not in key:
            continue
        parts = key.split(".")
        layer, target, side = int(parts[4]), parts[6], parts[7][-1].lower()
        ours = np.asarray(gradient["layers"][target][side][layer]).T
        own = weight.grad.numpy()
        padded = np.zeros_like(ours)
        padded[tuple(map(slice, own.shape))] = own
        assert np.linalg.norm(ours - padded) <= 1e-4 * np.linalg.norm(own), key
        total += float(np.sum(own.astype(np.float64) ** 2))
    norm = math.sqrt(sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(gradient)))
    assert norm == pytest.approx(math.sqrt(total), rel=1e-4)

    adapters.save_adapter(tmp_path / "back", lora, settings, config)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    again = _logits_of(peft.PeftModel.from_pretrained(base, tmp_path / "back").eval())
    np.testing.assert_allclose(again.detach().numpy(), expected.detach().numpy(), atol=1e-6)


@pytest.mark.parametrize("how", ["embedding", "state", "compiled"])
def test_files_with_more_than_factors_give_pefts_logits(how, tmp_path):
    import safetensors.torch
    import torch

    theirs = _theirs(tmp_path, {"target_modules": ["q_proj", "up_proj"]})
    folder = tmp_path / "theirs"
    if how == "embedding":
        theirs.save_pretrained(folder, save_embedding_layers=True)
    else:  # as trainers write the state of a whole model, adapter's names and base included
        whole = torch.compile(theirs) if how == "compiled" else theirs
        state = {key: value.contiguous().clone() for key, value in whole.state_dict().items()}
        safetensors.torch.save_file(state, folder / "adapter_model.safetensors")
    config = checkpoint_cases.load(tmp_path / "base").graphdef.config
    settings = adapters.read_adapter_config(folder, config)
    model = checkpoint_cases.load(tmp_path / "base", lora_config=settings)
    lora = adapters.load_adapter(folder, config, base_folder=tmp_path / "base")
    bound = decoder.bind(model.graphdef)
    found = bound.logits(lora, model.base, bound.hidden(lora, model.base, jnp.array(_TOKENS)))
    expected = _logits_of(theirs).detach().numpy()
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)


def test_an_adapter_on_the_text_part_of_a_model_that_reads_images(tmp_path, recwarn):
    import peft
    import torch
    import transformers

    text = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32}
    image = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    image |= {"num_attention_heads": 1, "image_size": 28, "patch_size": 14}
    names = {"image_token_index": 30, "boi_token_index": 28, "eoi_token_index": 29}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=image, mm_tokens_per_image=4, **names
    )
    torch.manual_seed(0)
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "base")
    ours = checkpoint.read_config(tmp_path / "base")
    settings = LoRAConfig(rank=2, alpha=4.0, targets=("q_proj", "up_proj"))
    model = checkpoint.load_model(tmp_path / "base", dtype=jnp.float32, lora_config=settings)
    _, shapes, _ = decoder.abstract(ours, settings)
    keys = iter(jax.random.split(jax.random.key(0), 99))
    lora = jax.tree.map(lambda leaf: 0.3 * jax.random.normal(next(keys), leaf.shape), shapes)
    adapters.save_adapter(tmp_path / "ours", lora, settings, ours)
    bound = decoder.bind(model.graphdef)
    found = bound.logits(lora, model.base, bound.hidden(lora, model.base, jnp.array(_TOKENS)))
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    assert not [w for w in recwarn if "adapter keys" in str(w.message)]
    own = [name for name, _ in theirs.named_parameters() if "lora_" in name]
    assert len(own) == 8 and all("language_model" in name for name in own)
    expected = _logits_of(theirs).detach().numpy()
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)
    theirs.save_pretrained(tmp_path / "theirs")
    again = adapters.load_adapter(tmp_path / "theirs", ours, lora_config=settings)
    for one, other in zip(jax.tree.leaves(lora), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, other)
