"""Hugging Face's torch models with PEFT's adapters: the reference of the decoder ports.

Used by the scripts that make golden files and by the live comparison, never by the package. Torch
is imported inside the functions: the default tests are collected where it is not installed.
"""

from typing import Any, NamedTuple

import decoder_cases
import numpy as np


class Batch(NamedTuple):
    """Rows of tokens with padding at either end, or none."""

    tokens_BL: np.ndarray
    mask_BL: np.ndarray
    target_mask_BL: np.ndarray
    positions_BL: np.ndarray


def make_batch(case: decoder_cases.Case, *, seed: int, length: int = 10) -> Batch:
    """Returns four rows: unpadded, right-padded, left-padded, and padded at both ends.

    Targets are about half of the real tokens, never the first (nothing predicts it) and never
    padding. Padding holds random tokens, so that a leak shows.
    """
    rng = np.random.default_rng(seed)
    tokens_BL = rng.integers(0, case.vocab_used, (4, length)).astype(np.int32)
    mask_BL = np.ones((4, length), bool)
    mask_BL[1, length - 4 :] = False
    mask_BL[2, :4] = False
    mask_BL[3, :2] = False
    mask_BL[3, length - 3 :] = False
    is_first_BL = np.cumsum(mask_BL, axis=1) == 1
    target_mask_BL = mask_BL & ~is_first_BL & (rng.random((4, length)) < 0.5)
    target_mask_BL[:, length // 2 + 1] = True
    positions_BL = np.maximum(np.cumsum(mask_BL, axis=1) - 1, 0) + case.first_position
    return Batch(tokens_BL, mask_BL, target_mask_BL, positions_BL.astype(np.int32))


def make_model(case: decoder_cases.Case, *, seed: int) -> Any:
    """Returns a PEFT model on the CPU in float32, with every parameter random.

    All weights are float16 numbers, so that golden files can store them exactly in half the space.
    Norm scales scatter around 1 and biases around 0: their defaults hide a missing one. Both LoRA
    factors are random: with B = 0 the gradient of A vanishes.
    """
    import peft
    import torch
    import transformers

    values = dict(case.config)
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    adapter = peft.LoraConfig(
        r=decoder_cases.RANK,
        lora_alpha=decoder_cases.ALPHA,
        lora_dropout=0.1,
        target_modules=list(case.targets),
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(model, adapter).eval()
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            values_ = rng.normal(size=tuple(parameter.shape))
            if "norm" in name and name.endswith("weight"):
                values_ = 1.0 + 0.2 * values_
            elif "embed_" in name or parameter.ndim == 1:
                values_ = 0.5 * values_
            else:
                # Wider weights saturate the softmax: gradients of 1e-5 of the others' size are
                # then differences of nearly equal numbers, in torch as well.
                gain = 0.2 if "lora_B" in name else 0.7
                values_ = gain * values_ / np.sqrt(parameter.shape[-1])
            parameter.copy_(torch.from_numpy(values_.astype(np.float16).astype(np.float32)))
    return model


def base_weights(model: Any) -> dict[str, np.ndarray]:
    """Returns the frozen weights under the keys of a Hugging Face checkpoint."""
    weights = {}
    tied = model.base_model.model.config.tie_word_embeddings
    is_neox = model.base_model.model.config.model_type == "gpt_neox"
    for key, value in model.base_model.model.state_dict().items():
        if "lora_" in key or (tied and key.startswith("lm_head")):
            continue
        key = key.replace(".base_layer", "")
        # In memory transformers 5 calls every head lm_head; the files of this family do not.
        key = key.replace("lm_head", "embed_out") if is_neox else key
        weights[key] = value.numpy().copy()
    return weights


def adapter_leaves(model: Any, *, gradient: bool) -> dict[str, np.ndarray]:
    """Returns the LoRA factors, or their gradients, by "<module path>.lora_A" or "....lora_B"."""
    leaves = {}
    for key, value in model.base_model.model.named_parameters():
        if "lora_" in key:
            array = value.grad if gradient else value.detach()
            leaves[key.replace(".default.weight", "")] = array.numpy().copy()
    return leaves


def forward(model: Any, batch: Batch, row: int) -> Any:
    """Returns the logits [L, V] of one row, a torch tensor."""
    import torch

    rows = slice(row, row + 1)
    output = model(
        input_ids=torch.from_numpy(batch.tokens_BL[rows].astype(np.int64)),
        attention_mask=torch.from_numpy(batch.mask_BL[rows].astype(np.int64)),
        position_ids=torch.from_numpy(batch.positions_BL[rows].astype(np.int64)),
    )
    return output.logits[0]


def loss_and_gradient(
    model: Any, batch: Batch, row: int
) -> tuple[float, np.ndarray, dict[str, np.ndarray]]:
    """Returns one row's mean next-token loss, its logits, and the gradient of every LoRA factor."""
    import torch

    model.zero_grad(set_to_none=True)
    logits = forward(model, batch, row)
    targets = np.flatnonzero(batch.target_mask_BL[row])
    loss = torch.nn.functional.cross_entropy(
        logits[targets - 1], torch.from_numpy(batch.tokens_BL[row, targets].astype(np.int64))
    )
    loss.backward()
    return float(loss.detach()), logits.detach().numpy(), adapter_leaves(model, gradient=True)
