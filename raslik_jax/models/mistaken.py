"""Errors for a folder that is not the checkpoint or the adapter that a flag expects.

A checkpoint that another program has quantized is refused: its weights are rounded, and every
program packs them in another format. Give the base from before quantization; `--backbone.format`
packs it again.
"""

import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from raslik_jax.base.messages import shown, some_of
from raslik_jax.data.words import refused
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
_PACKED = re.compile(r"(-unsloth)?(-bnb-[48]bit|-(gptq|awq|fp8)\b.*)$")
_DTYPES = ("F8_E4M3", "F8_E5M2", "U8", "I8", "I32")


def base_name(folder: pathlib.Path) -> str:
    """Returns an adapter's name for the model that it was trained on; "" if it has none."""
    path = folder / storage.ADAPTER_CONFIG
    named = storage.read_json(path, {"base_model_name_or_path?": (str, None)})
    return named.get("base_model_name_or_path") or ""


def describe_base(adapter: pathlib.Path, folder: pathlib.Path, name: str, revision: str) -> str:
    """Returns a line if an adapter was trained on another base than the checkpoint; else "".

    Names are compared by their last part without the name of a quantization. They prove nothing: a
    folder or a mirror may have any name. So the line only shows the difference. `name` and
    `revision` are those of the checkpoint, whose files are in the folder.
    """
    named = base_name(adapter)
    shape = {"_name_or_path?": (str, None)}
    own = storage.read_json(folder / "config.json", shape).get("_name_or_path")
    if named and _bare_name(named) not in {_bare_name(one) for one in (name, own) if one}:
        return (
            f"the adapter says that it was trained on {shown(named, 80)}, and "
            f"the checkpoint is {shown(name, 80)}. The shapes fit, but other weights make "
            "another model"
        )
    asked = storage.read_json(adapter / storage.ADAPTER_CONFIG, dict).get("revision")
    if asked in (None, "", "main", revision) or pathlib.Path(name).is_dir():
        return ""
    got = f"the checkpoint is of {shown(revision, 60) if revision else 'the newest one'}"
    return (
        f"the adapter says that it was trained on revision {shown(asked, 60)} of its base, and "
        f"{got}: load that one (--backbone.revision)"
    )


def _bare_name(name: str) -> str:
    """Returns the last part of a model's name without the name of a quantization."""
    return _PACKED.sub("", pathlib.PurePath(name).name.lower())


def no_checkpoint(folder: pathlib.Path, lacking: str) -> ValueError:
    """Returns why a folder without config.json or weights is no checkpoint, and its kind."""
    origin = shown(str(folder), 120)
    if (folder / storage.ADAPTER_CONFIG).is_file():
        base = base_name(folder)
        named = f"its base {shown(base, 80)}" if base else "the model that it was trained on"
        mend = f"give it as --adapter, and {named} as --checkpoint"
        return ValueError(f"--checkpoint must be a whole model, {origin} is an adapter: {mend}")
    must = f"the checkpoint {origin} must hold config.json and weights, it lacks {lacking}"
    if any(folder.glob("*.gguf")):
        return ValueError(f"{must} and has GGUF: give the checkpoint that this was made from")
    return ValueError(f"{must}: {_below(folder, 'config.json', '--checkpoint')}")


def no_adapter(folder: pathlib.Path, lacking: Sequence[str]) -> ValueError:
    """Returns why a folder that lacks files is no adapter, and its kind."""
    origin = shown(str(folder), 120)
    if (folder / "config.json").is_file() and storage.has_weights(folder):
        mend = "give it as --checkpoint, and leave --adapter out"
        return ValueError(f"--adapter must be an adapter, {origin} is a whole model: {mend}")
    must = f"must hold {storage.ADAPTER_CONFIG} and {storage.ADAPTER_WEIGHTS}, as peft saves them"
    lacks = f"it lacks {' and '.join(lacking)}"
    mend = _below(folder, storage.ADAPTER_CONFIG, "--adapter")
    return ValueError(f"the adapter {origin} {must}, {lacks}: {mend}")


def _below(folder: pathlib.Path, name: str, flag: str) -> str:
    """Returns which folder below holds the file; of checkpoint-N the newest comes first."""
    found = [path.parent for depth in ("*", "*/*") for path in folder.glob(f"{depth}/{name}")]
    found = [path for path in found if "/." not in path.relative_to(folder.parent).as_posix()]
    if not found:
        return "name another folder"

    def rank(path: pathlib.Path) -> tuple[int, int, str]:
        steps = re.findall(r"(?:^|/)checkpoint-(\d+)", path.as_posix())
        return (-int(steps[-1]) if steps else -1, len(path.parts), path.as_posix())

    first, *others = sorted(found, key=rank)
    is_newest = bool(others) and rank(first)[0] < -1
    named = f"give {flag}={first}" + (", the newest" if is_newest else "")
    return named + (f", or {some_of(others, 2, quoted=False)}" if others else "")


def plain_fields(path: pathlib.Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a config.json without those of a quantization; or refuses one."""
    for name in _FIELDS:
        if how := _describe(fields.get(name)):
            _refuse(f"{shown(str(path), 120)} ({name}: {how})")
    for name, how in _FILES.items():
        if (path.parent / name).is_file():
            _refuse(f"{shown(str(path.parent / name), 120)} ({how})")
    return {name: value for name, value in fields.items() if name not in _FIELDS}


def check_tensors(tensors: storage.Tensors) -> None:
    """Refuses tensors if one of them shows that the weights are quantized."""
    for key in tensors.files:
        if how := next((how for end, how in _ENDS.items() if re.search(f"({end})$", key)), ""):
            _refuse(f"{_folder_of(tensors, key)} ({how}: it has {tensors.label(key)})")
    for key in tensors.files:
        dtype = tensors.header(key)[1]
        if key.endswith(".weight") and dtype in _DTYPES:
            _refuse(f"{_folder_of(tensors, key)} ({tensors.label(key)} is {dtype})")


def _folder_of(tensors: storage.Tensors, key: str) -> str:
    return shown(str(tensors.files[key].parent), 100)


def _describe(given: Any) -> str:
    """Returns the method and the bits of a quantization; "" if there is none."""
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
    raise refused("quantized", what=what)
