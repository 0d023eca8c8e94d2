"""An architecture added in this one file loads, decodes, takes an adapter and is saved."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_cases import GOLDEN, load, write_model

from raslik_jax.models import architecture, checkpoint, decode, decoder, layers, llama
from raslik_jax.models.lora import LoRAConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyConfig(architecture.DecoderConfig):
    """Llama's settings, with a factor on what the MLP adds."""

    num_key_value_heads: int | None = None
    rms_norm_eps: float = 1e-6
    share: float = 1.0

    model_type = "toy"
    hf_name = "Toy"


class ToyBlock(layers.GatedBlock):
    """One norm before attention and MLP alike."""

    def __init__(self, config, lora, *, dtype):
        super().__init__(config, lora, mlp_bias=False, dtype=dtype)
        self.norm = layers.RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, dtype=dtype)

    def __call__(self, hidden_LE, context):
        """Returns the residual stream after this layer, and its keys and values."""
        read_LE = self.norm(hidden_LE)
        mixed_LE, fresh = self.attention(read_LE, context)
        return hidden_LE + mixed_LE + self.config.share * self.mlp(read_LE, context), fresh


_SIZES = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TOY = architecture.Architecture(
    ToyConfig,
    key_map={**llama.KEY_MAP, "layers/norm": "norm"},
    buffers="nothing",
    modules=(ToyBlock, layers.RMSNorm),
    presets={"toy-1k": ToyConfig(**_SIZES, intermediate_size=48)},
    hub_names={r"Toy-(1K)": "toy-{}"},
)


@pytest.fixture(autouse=True)
def _added(monkeypatch):
    monkeypatch.setitem(decoder.ARCHITECTURES, "toy", TOY)


def test_it_goes_through_files_adapter_and_decoding(tmp_path):
    config = ToyConfig.from_hf({"model_type": "toy", **_SIZES, "intermediate_size": 48, "share": 2})
    lora_config = LoRAConfig(rank=2, alpha=4.0, targets=("q_proj",))
    graphdef, lora, base = decoder.create(config, lora_config, key=jax.random.key(0))
    checkpoint.save_model(tmp_path / "model", config, base)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["share"] == 2.0
    model = checkpoint.load_model(tmp_path / "model", dtype=jnp.float32, lora_config=lora_config)
    assert model.graphdef == graphdef
    jax.tree.map(np.testing.assert_array_equal, model.base, base)
    checkpoint.save_adapter(tmp_path / "adapter", lora, lora_config, config)
    jax.tree.map(
        np.testing.assert_array_equal, checkpoint.load_adapter(tmp_path / "adapter", config), lora
    )
    options = {"max_new_tokens": 3, "eos_id": None, "pad_id": 0, "batch_size": 2}
    new = decode.generate(decoder.bind(graphdef), lora, base, [[1, 2], [3]], **options)
    assert [len(tokens) for tokens in new] == [3, 3]


def test_a_file_of_another_architecture_is_refused(tmp_path):
    folder = write_model(tmp_path, "llama", changes={"model_type": "toy"})
    assert "toy" not in GOLDEN
    with pytest.raises(ValueError, match="the toy of|unknown fields"):
        load(folder)
