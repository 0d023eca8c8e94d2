"""Writes checkpoints.json: how transformers and peft lay out tiny models of every architecture.

    python tests/golden/make_checkpoints.py

For each decoder: config.json, the keys and shapes of its state, and the same of a LoRA adapter as
peft saves it. No weights: the tests make their own. Needs the parity extra.
"""

import json
import pathlib
import tempfile

FILE = pathlib.Path(__file__).with_name("checkpoints.json")

_SIZES = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_SIZES |= {"intermediate_size": 40, "max_position_embeddings": 32, "bos_token_id": 0}
_SIZES |= {"eos_token_id": 0, "pad_token_id": None}
CASES = {
    "gpt_neox": ("GPTNeoX", {}, ["query_key_value", "dense", "dense_4h_to_h"]),
    "gpt_neox_tied": ("GPTNeoX", {"tie_word_embeddings": True, "attention_bias": False}, ["dense"]),
    "llama": ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}, ["q_proj"]),
    "llama_biased": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 6},
        ["q_proj", "v_proj", "down_proj"],
    ),
    "olmo2": ("Olmo2", {"num_key_value_heads": 2}, ["q_proj", "k_proj", "v_proj", "o_proj"]),
}


def _shapes(tensors) -> dict[str, list[int]]:
    return {key: list(tensor.shape) for key, tensor in sorted(tensors.items())}


def make() -> dict:
    """Returns the content of the golden file."""
    import peft
    import safetensors.torch
    import transformers

    golden = {}
    for name, (family, settings, targets) in CASES.items():
        config = getattr(transformers, f"{family}Config")(**_SIZES, **settings)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(f"{folder}/model")
            lora = peft.LoraConfig(
                r=3, lora_alpha=6, lora_dropout=0.25, target_modules=targets, task_type="CAUSAL_LM"
            )
            peft.get_peft_model(model, lora).save_pretrained(f"{folder}/adapter")
            root = pathlib.Path(folder)
            adapter_config = json.loads((root / "adapter/adapter_config.json").read_text())
            golden[name] = {
                "config": json.loads((root / "model/config.json").read_text()),
                "tensors": _shapes(safetensors.torch.load_file(root / "model/model.safetensors")),
                "adapter_config": adapter_config
                | {"target_modules": sorted(adapter_config["target_modules"])},
                "adapter_tensors": _shapes(
                    safetensors.torch.load_file(root / "adapter/adapter_model.safetensors")
                ),
            }
    return golden


if __name__ == "__main__":
    FILE.write_text(json.dumps(make(), indent=1, sort_keys=True) + "\n")
