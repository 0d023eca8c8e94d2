"""The peers' way to the same sketches: one example at a time, in PyTorch.

transformers' model and peft's adapter with the weights, the adapter, the loss and the projection of
the run that it is measured against: all logits, one backward pass an example, then the sketch. Used
by bench_sketch.py; needs torch, transformers and peft.
"""

import pathlib
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

# sketch(tokens_L, target_mask_L) -> unit sketch_K of one example.
Peer = Callable[[np.ndarray, np.ndarray], np.ndarray]


def make_peer(
    config: Any,
    lora_config: Any,
    lora: Any,
    base: Any,
    spec: Any,
    *,
    loss: str,
    device: str,
) -> Peer:
    """Returns the function that sketches one example.

    Args:
      config: the model's settings.
      lora_config: the adapter's; its dropout stays off.
      lora: adapter weights, copied.
      base: base weights, copied, in their own dtype.
      spec: of the projection, `binned` or `binned_hashed`.
      loss: `next_token` or `unshifted`.
      device: torch's name of a device.

    Raises:
      ValueError: torch, transformers or peft is missing, or the family is dense.
    """
    try:
        import peft
        import torch
        import transformers
    except ImportError as error:
        raise ValueError(
            f"--compare=torch_loop wants torch, transformers and peft, and {error.name} is "
            f"missing: pip install -e '.[parity,data]'"
        ) from None

    from raslik_jax.models import checkpoint

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft's use of transformers
        model_folder, adapter_folder = (pathlib.Path(folder) / x for x in ("model", "adapter"))
        checkpoint.save_model(model_folder, config, base)
        checkpoint.save_adapter(adapter_folder, lora, lora_config, config)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype="auto")
        model = peft.PeftModel.from_pretrained(model, adapter_folder, is_trainable=True)
    # Evaluation mode drops nothing out; gradients flow all the same.
    model = model.to(device).eval()
    names, parameters = zip(
        *((name, p) for name, p in model.named_parameters() if p.requires_grad), strict=True
    )
    order = manifest_order(names, lora)
    project = torch_projection(spec, device)

    def sketch(tokens_L: np.ndarray, target_mask_L: np.ndarray) -> np.ndarray:
        tokens_1L = torch.from_numpy(tokens_L.astype(np.int64))[None].to(device)
        labels = np.where(target_mask_L, tokens_L, -100).astype(np.int64)
        labels_L = torch.from_numpy(labels).to(device)
        logits_LV = model(input_ids=tokens_1L).logits[0].float()
        if loss == "next_token":
            logits_LV, labels_L = logits_LV[:-1], labels_L[1:]
        value = torch.nn.functional.cross_entropy(logits_LV, labels_L, ignore_index=-100)
        gradients = torch.autograd.grad(value, parameters)
        # torch keeps the factors transposed.
        sketch_K = project(torch.cat([gradients[i].T.reshape(-1) for i in order]).float())
        return (sketch_K / sketch_K.norm()).cpu().numpy()

    return sketch


def manifest_order(names: tuple[str, ...], lora: Any) -> list[int]:
    """Returns the parameters' positions in the order of the flat gradient.

    Ours stacks the layers of one factor: "layers/dense/a" is layer 0's, 1's, ... `dense.lora_A`.
    """
    from raslik_jax.sketch import projections

    order = []
    for segment in projections.gradient_manifest(lora):
        _, target, factor = segment.path.split("/")
        for layer in range(segment.shape[0]):
            inside, end = f".layers.{layer}.", f".{target}.lora_{factor.upper()}.default.weight"
            matches = [i for i, name in enumerate(names) if inside in name and name.endswith(end)]
            if len(matches) != 1:
                raise ValueError(f"one parameter {inside}*{end} was wanted, got {len(matches)}")
            order += matches
    return order


def torch_projection(spec: Any, device: str) -> Callable[[Any], Any]:
    """Returns the function of a flat gradient in torch."""
    import torch

    from raslik_jax.sketch import hashing, projections, theory

    if spec.family not in theory.BINNED_FAMILIES:
        raise ValueError(
            f"--compare=torch_loop sketches by bins, got --family={spec.family}: "
            f"use {' or '.join(theory.BINNED_FAMILIES)}"
        )
    if spec.family == "binned":
        table_MK = projections.binned_table(spec)
        index_MK = table_MK ^ (table_MK >> 31)
        sign_MK = np.where(index_MK < spec.num_params, np.where(table_MK < 0, -1.0, 1.0), 0.0)
        index_MK = np.minimum(index_MK, spec.num_params - 1).astype(np.int64)
        index, sign = (torch.from_numpy(x).to(device) for x in (index_MK, sign_MK))
        sign = sign.float()
        return lambda flat_P: (flat_P[index] * sign).sum(0)
    keys = hashing.stream_keys(spec.seed, hashing.SIGN_STREAM)
    word_P = hashing.counter_hash(np.arange(spec.num_params, dtype=np.uint32), keys)
    sign = torch.from_numpy(np.where(word_P >> np.uint32(31) == 1, -1.0, 1.0)).float().to(device)
    bins = torch.from_numpy(theory.bin_of_coordinate(spec)).to(device)
    return lambda flat_P: torch.zeros(spec.size, device=device).index_add_(0, bins, flat_P * sign)
