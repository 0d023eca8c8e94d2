"""A checkpoint with its adapter, loaded for use in your own code."""

import os
import warnings
from typing import Any

import jax.numpy as jnp

from raslik_jax.base.messages import shown
from raslik_jax.models import adapters, checkpoint, mistaken, storage


def load_model(
    base: str | os.PathLike[str], adapter: str | os.PathLike[str] = "", *, dtype: Any = "float32"
) -> checkpoint.LoadedModel:
    """Returns a Hugging Face checkpoint with its LoRA adapter, as trees of arrays.

    `bind(loaded.graphdef)` returns the model's functions. Their first arguments are `loaded.lora`
    and `loaded.base`. A ValueError names all tensors and settings that do not fit.

    Args:
      base: the base model: a folder, or OWNER/NAME on the hub.
      adapter: an adapter in PEFT's format: a folder, or OWNER/NAME. "" for none; `lora` is then
        empty.
      dtype: dtype of the weights of the base.

    Example:
      loaded = load_model("base", "mine")
      decoder = bind(loaded.graphdef)
      hidden_LE = decoder.hidden(loaded.lora, loaded.base, tokens_L)
    """
    folder = checkpoint.resolve_folder(os.fspath(base))
    if not os.fspath(adapter):
        if (folder / storage.ADAPTER_CONFIG).is_file():
            has = f"{shown(str(folder), 120)} has an adapter too, which is not loaded"
            warnings.warn(f"{has}: pass it as adapter to use it", stacklevel=2)
        return checkpoint.load_model(folder, dtype=jnp.dtype(dtype))
    place, config = adapters.find_adapter(adapter), checkpoint.read_config(folder)
    lora_config = adapters.read_adapter_config(place, config)
    loaded = checkpoint.load_model(folder, dtype=jnp.dtype(dtype), lora_config=lora_config)
    how: Any = {"base": loaded.identity, "base_folder": folder}
    loaded = loaded._replace(lora=adapters.load_adapter(place, config, **how))
    if line := mistaken.describe_base(place, folder, os.fspath(base), ""):
        warnings.warn(line, stacklevel=2)
    return loaded
