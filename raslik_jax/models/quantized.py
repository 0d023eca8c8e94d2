"""Recognizes checkpoints that another program has quantized, which are refused.

Their weights are rounded, and every program packs them in a format of its own. The base that they
were made from is loaded in their place; `--backbone.format` packs it again.
"""

import pathlib
import re
from collections.abc import Mapping
from typing import Any

from raslik_jax.base.messages import shown
from raslik_jax.models import storage

# Of config.json: transformers, compressed-tensors' older spelling, MLX.
_FIELDS = ("quantization_config", "compression_config", "quantization")
# Older GPTQ and AWQ programs write a file of their own next to config.json.
_FILES = {"quantize_config.json": "GPTQ", "quant_config.json": "AWQ"}
_BITS = ("bits", "w_bit", "num_bits", "nbits", "weight_bits")
# Ends of the keys that a format adds to a linear layer -> the format.
_ENDS = {
    r"\.weight\.(nested_)?(absmax|quant_map)": "bitsandbytes, 4 bits",
    r"\.quant_state\.bitsandbytes__\w+": "bitsandbytes, 4 bits",
    r"\.(SCB|weight_format)": "bitsandbytes, 8 bits",
    r"\.(qweight|qzeros|g_idx)": "GPTQ or AWQ",
    r"\.(weight_packed|weight_shape|weight_zero_point|weight_g_idx)": "compressed-tensors",
    r"\.(weight_scale|weight_scale_inv|input_scale|activation_scale|scale_weight)": "FP8",
    r"\.(scales|biases)": "MLX",
}
_DTYPES = {
    "F8_E4M3": "FP8",
    "F8_E5M2": "FP8",
    "U8": "integers",
    "I8": "integers",
    "I32": "integers",
}


def plain_fields(path: pathlib.Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a config.json without those of a quantization, or refuses one."""
    for name in _FIELDS:
        if how := _describe(fields.get(name)):
            _refuse(f"{shown(str(path), 120)} ({name}: {how})")
    for name, how in _FILES.items():
        if (path.parent / name).is_file():
            _refuse(f"{shown(str(path.parent / name), 120)} ({how})")
    return {name: value for name, value in fields.items() if name not in _FIELDS}


def check_tensors(tensors: storage.Tensors) -> None:
    """Refuses tensors where one shows that the weights are quantized."""
    for key in tensors.files:
        if how := next((how for end, how in _ENDS.items() if re.search(f"({end})$", key)), ""):
            _refuse(f"{_folder_of(tensors, key)} ({how}: it has {tensors.label(key)})")
    for key in tensors.files:
        dtype = tensors.header(key)[1]
        if key.endswith(".weight") and dtype in _DTYPES:
            said = f"{_DTYPES[dtype]}: {tensors.label(key)} is {dtype}"
            _refuse(f"{_folder_of(tensors, key)} ({said})")


def _folder_of(tensors: storage.Tensors, key: str) -> str:
    return shown(str(tensors.files[key].parent), 100)


def _describe(given: Any) -> str:
    """Returns the method and the bits of a quantization, "" where it is none."""
    if not isinstance(given, Mapping):
        return shown(given, 40) if given else ""
    switches = [given.get(f"load_in_{bits}bit") for bits in (4, 8)]
    if not given or (None not in switches and not any(switches)):
        return ""  # bitsandbytes writes its switches also where both are off
    bits = [str(bits) for bits, is_on in zip((4, 8), switches, strict=True) if is_on]
    bits += [str(given[name]) for name in _BITS if isinstance(given.get(name), int)]
    method = given.get("quant_method") or ("bitsandbytes" if any(switches) else "")
    named = [str(method)] if method else []
    return ", ".join(named + [f"{count} bits" for count in bits[:1]]) or shown(dict(given), 40)


def _refuse(what: str) -> None:
    raise ValueError(
        f"the checkpoint must not be quantized, {what}: give the unquantized one that it was made"
        " from, an adapter of it fits that too; --backbone.format=nf4 or int8 packs it again"
    )
