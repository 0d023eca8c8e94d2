"""PEFT LoRA adapters in and out: from `adapter_config.json` and safetensors to stacked factors.

An adapter is read whole or refused by name. Rank and alpha may differ by module, as `rank_pattern`
and `alpha_pattern` say. Modules may be without an adapter in some layers. The factors of a target
are stacked at its largest rank with zeros beyond a layer's own (`LoRAConfig.layers`). They are
written back as they were.

Source: peft 0.21, `tuners/lora/model.py` (rank, alpha and scale of a module) and
`utils/save_and_load.py` (keys).
"""

import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from raslik_jax.base import files
from raslik_jax.base.axes import Tree
from raslik_jax.base.messages import shown, some_of
from raslik_jax.data.words import refused
from raslik_jax.models import adapter_targets, key_map, mistaken, storage
from raslik_jax.models import decoder as decoders
from raslik_jax.models.adapter_targets import MERGE
from raslik_jax.models.lora import LoRAConfig

WEIGHTS, CONFIG = storage.ADAPTER_WEIGHTS, storage.ADAPTER_CONFIG
_AGAIN = "save the adapter with peft again, or fetch it again"
# In the header of an adapter of ours: the identity of its base.
_BASE = "base identity"
_PREFIX = "base_model.model."
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# In keys of what an adapter computes beyond plain LoRA of a decoder.
_MORE = re.compile(
    r"lora_(embedding|magnitude)|lora_[AB]\.bias|modules_to_save|trainable_tokens"
    r"|vision_tower|multi_modal_projector|(lm_head|embed_out)\.lora_"
)
_FACTORS = frozenset(
    "lora_A lora_B lora_embedding_A lora_embedding_B lora_magnitude_vector".split()
)
# Fields of adapter_config.json that do not change what a finished adapter computes. The fan-in
# order is that of another kind of layer; where and how deep adapters are, the tensors show.
_INERT = frozenset(
    """alpha auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config
    fan_in_fan_out inference_mode init_lora_weights loftq_config lora_dropout lora_ga_config
    megatron_core peft_type peft_version qalora_group_size revision runtime_config task_type
    """.split()
)
# Starts that keep the base as it was; the others subtract the adapter's start from it.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
# Kinds that have no weights to merge.
_PROMPTS = frozenset(
    """ADAPTION_PROMPT CARTRIDGE CPT MULTITASK_PROMPT_TUNING POLY PREFIX_TUNING PROMPT_TUNING
    P_TUNING XLORA""".split()
)
_NAMES = (str, [str], None)
# Fields that are read.
_SHAPE = {
    "peft_type": str,
    "r": int,
    "lora_alpha": float,
    "lora_dropout?": (float, None),
    "use_rslora?": (bool, None),
    "rank_pattern?": ({str: int}, None),
    "alpha_pattern?": ({str: float}, None),
    "target_modules": (str, [str]),
    "exclude_modules?": _NAMES,
    "layers_to_transform?": (int, [int], None),
    "layers_pattern?": _NAMES,
    "base_model_name_or_path?": (str, None),
}


def find_adapter(name: str | os.PathLike[str], *, revision: str | None = None) -> pathlib.Path:
    """Returns the directory of a PEFT adapter, fetched from the hub if need be; or refuses it."""
    folder = storage.resolve_folder(name, revision=revision, weights=WEIGHTS)
    lacking = [file for file in (CONFIG, WEIGHTS) if not (folder / file).is_file()]
    if not lacking:
        is_local = pathlib.Path(name).is_dir()
        has_tokenizer = any((folder / file).is_file() for file in storage.TOKENIZER_FILES)
        if not (is_local or has_tokenizer):  # PEFT downloads an adapter without it
            storage.fetch_tokenizer(str(name), folder)
        return folder
    origin = shown(str(folder), 160)
    is_hub = not (pathlib.Path(name).is_dir() or storage.has_weights(folder))
    if lacking == [WEIGHTS] and (is_hub or (folder / "adapter_model.bin").is_file()):
        got = "none" if is_hub else "pickled weights only, which can run code"
        mend = "load it with peft and save it again"
        raise ValueError(f"the adapter {origin} must have safetensors, got {got}: {mend}")
    raise mistaken.no_adapter(folder, lacking)


def read_adapter_config(folder: str | os.PathLike[str], config: decoders.ModelConfig) -> LoRAConfig:
    """Returns the settings of a directory's PEFT adapter on a decoder of these settings.

    Settings that change the result and are not supported are refused by name: DoRA, biases, modules
    saved whole, targets outside of the layers and others.
    """
    path = pathlib.Path(folder) / CONFIG
    kind = files.read_json(path, {"peft_type": str}, mend=_AGAIN)["peft_type"]
    if kind != "LORA":
        mend = "train a LoRA in its place" if kind in _PROMPTS else MERGE
        raise ValueError(f"peft_type in {path} must be 'LORA', got {shown(kind)}: {mend}")
    fields = files.read_json(path, _SHAPE, mend=_AGAIN)
    _refuse_others(path, fields)
    sizes = adapter_targets.find_sizes(path, fields, config)
    targets = tuple(name for name, layers in sizes.items() if any(rank for rank, _ in layers))
    own = {size for name in targets for size in sizes[name]}
    is_even = len(own) == 1
    rank, alpha = own.pop() if is_even else (fields["r"], float(fields["lora_alpha"]))
    try:
        return LoRAConfig(
            rank=rank,
            alpha=alpha,
            dropout=float(fields.get("lora_dropout") or 0.0),
            targets=targets,
            use_rslora=bool(fields.get("use_rslora")),
            layers=() if is_even else tuple((name, sizes[name]) for name in sorted(targets)),
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _refuse_others(path: pathlib.Path, fields: Mapping[str, Any]) -> None:
    """Raises a ValueError that names settings that have an effect and are not read."""
    # PEFT grows switches; off, they are False, None or empty, and change nothing.
    known = _INERT | {name.removesuffix("?") for name in _SHAPE}
    active = {name: value for name, value in fields.items() if value and name not in known}
    if active.get("bias") == "none":
        del active["bias"]
    if fields.get("init_lora_weights") not in _PLAIN_STARTS:
        active["init_lora_weights"] = fields["init_lora_weights"]
    if active:
        settings = [f"{name}={shown(value, 40)}" for name, value in sorted(active.items())]
        got = some_of(settings, 3, quoted=False)
        raise ValueError(f"{path} must be a plain LoRA, {got} is not supported: {MERGE}")
    ranks = {"r": fields["r"], **(fields.get("rank_pattern") or {})}
    for name, rank in ranks.items():
        if rank < 1:
            where = "r" if name == "r" else "rank_pattern"
            raise refused("adapter_rank", where=where, path=path, rank=rank)


class _PaddedTensors(storage.Tensors):
    """Tensors with zeros up to the shape of their slot, or whole without a slot."""

    slots: Mapping[str, key_map.Slot] = {}

    def read(self, key: str) -> np.ndarray:
        """Returns the tensor of a slot."""
        shape = self.slots[key].shape
        if key not in self.files:
            return np.zeros(shape, np.float32)
        tensor = super().read(key)
        return np.pad(
            tensor, [(0, new - old) for old, new in zip(tensor.shape, shape, strict=True)]
        )


def _own_slots(
    slots: Mapping[str, key_map.Slot], lora_config: LoRAConfig
) -> dict[str, key_map.Slot]:
    """Returns the slots of an adapter as a file holds them: each with its own rank."""
    ranks = lora_config.ranks()

    def own(slot: key_map.Slot) -> key_map.Slot:
        sizes = ranks.get(slot.path[-2])
        if sizes is None or slot.layer is None:
            return slot
        rank, (first, last) = sizes[slot.layer], slot.shape
        shape = (rank, last) if slot.path[-1] == "a" else (first, rank)
        return slot._replace(shape=shape)

    trimmed = {key: own(slot) for key, slot in slots.items()}
    return {key: slot for key, slot in trimmed.items() if 0 not in slot.shape}


def _bare_key(key: str) -> str:
    """Returns the key of a tensor in the base's own names, without trainers' prefixes.

    It leaves out PEFT's prefix, the wrappers of torch.compile, FSDP and data parallel training, and
    the adapter's name.
    """
    parts = [part for part in key.split(".") if part not in _WRAPPERS]
    while parts[:1] == ["module"] or parts[:2] == ["base_model", "model"]:
        del parts[: 1 if parts[0] == "module" else 2]
    if len(parts) > 3 and parts[-3] in _FACTORS and parts[-1] == "weight":
        del parts[-2]
    return ".".join(part for part in parts if part != "base_layer")


def _check_file(path: pathlib.Path) -> None:
    """Refuses tensors without values and factors of several adapters in one file."""
    tensors, origin = storage.Tensors([path]), shown(str(path), 120)
    empty = [key for key in tensors.files if 0 in tensors.header(key)[0]]
    if empty:
        raise refused("adapter_empty", origin=origin, count=len(empty), first=empty[0])
    split = [key.split(".") for key in tensors.files]
    factors = [one for one in split if {*one[-3:-1]} & _FACTORS]
    found = {one[-2] if {*one[-3:-2]} & _FACTORS else "" for one in factors}
    if len(found) > 1:
        raise refused("adapter_several", origin=origin, got=some_of(sorted(found)))


def _unchanged_weights(
    tensors: storage.Tensors, config: decoders.ModelConfig, base_folder: pathlib.Path
) -> list[str]:
    """Returns the keys of the base's own weights in an adapter's file; refuses changed ones."""
    keys = [key for key in tensors.files if not any(f".{one}" in key for one in _FACTORS)]
    if not keys:
        return []
    names = decoders.ARCHITECTURES[config.model_type].key_map
    embed, head = (f"{names[part]}.weight" for part in ("embed", "head"))
    base = storage.open_tensors(base_folder, auto="AutoModelForCausalLM", rename=config.full_key)
    for key in keys:
        own = key.removeprefix(_PREFIX)
        own = embed if own == head and own not in base.files else own
        if own not in base.files:
            continue  # named with all others that do not fit
        if not tensors.is_same(key, own, other=base):
            shape, its = (
                list(part.header(name)[0]) for part, name in ((tensors, key), (base, own))
            )
            got = "its values differ" if shape == its else f"it is {shape}, not {its}"
            must = f"must be the base's or left out, {got}"
            raise ValueError(f"{tensors.label(key)} {must}: {MERGE}")
    return [key for key in keys if key.removeprefix(_PREFIX) in {*base.files, head}]


def load_adapter(
    folder: str | os.PathLike[str],
    config: decoders.ModelConfig,
    *,
    lora_config: LoRAConfig | None = None,
    base: str = "",
    base_folder: pathlib.Path | None = None,
) -> Tree:
    """Returns the float32 factors of a PEFT adapter for a decoder, or names every misfit.

    Args:
      folder: Has adapter_config.json and adapter_model.safetensors.
      config: The decoder's settings.
      lora_config: The required settings of the adapter; None takes its own (`read_adapter_config`).
        Dropout may differ.
      base: Identity of the base under it. An adapter that `save_adapter` wrote for another base is
        refused. Other adapters do not identify their base.
      base_folder: The checkpoint of that base. Weights of the base in the adapter's file, such as
        its embedding, have to be equal to it; without a folder they are refused.
    """
    folder = pathlib.Path(folder)
    path = folder / CONFIG
    own = read_adapter_config(folder, config)
    if lora_config is not None:
        differing = [
            f"{name}={getattr(own, name)!r}, not {getattr(lora_config, name)!r}"
            for name in ("rank", "alpha", "targets", "use_rslora", "layers")
            if getattr(own, name) != getattr(lora_config, name)
        ]
        if differing:
            got = "; ".join(differing)
            raise ValueError(f"{path} must have this run's settings, got {got}: give another")
    _, shapes, _ = decoders.abstract(config, own)
    architecture = decoders.ARCHITECTURES[config.model_type]
    slots = key_map.plan(architecture.key_map, shapes, prefix=_PREFIX)
    _check_file(folder / WEIGHTS)
    tensors = _PaddedTensors(
        [folder / WEIGHTS], lambda key: _PREFIX + config.full_key(_bare_key(key))
    )
    tensors.slots = slots
    own_slots = _own_slots(slots, own)
    kept = [] if base_folder is None else _unchanged_weights(tensors, config, base_folder)
    # Of parts that are not read, such as the one for images. Training on text leaves B at 0.
    unread = re.compile(re.escape(_PREFIX) + rf"({architecture.buffers}).*\.lora_[AB]\.weight")
    others = [key for key in tensors.files if unread.fullmatch(key)]
    if not any(tensors.read_part(key, ()).any() for key in others if ".lora_B." in key):
        kept += others
    inert = "|".join(map(re.escape, kept))
    what = f"the adapter of {path} on this {config.model_type}"
    is_more = any(key not in own_slots and _MORE.search(key) for key in tensors.files)
    mend = MERGE if is_more else "give the base that it was trained on"
    key_map.check_fit(own_slots, tensors, what, inert, mend=mend)
    trained_on = tensors.metadata.get(_BASE, base)
    if base and trained_on != base:
        differ = f"the base {shown(trained_on)}, got {shown(base)}"
        raise ValueError(f"{shown(str(folder), 160)} was trained on {differ}: train it again")
    return key_map.fill(shapes, slots, tensors)


def check_effect(lora: Tree, folder: str | os.PathLike[str]) -> None:
    """Refuses an adapter that changes nothing because A or B of every layer is zero."""
    for factors in lora["layers"].values():
        pairs = zip(np.asarray(factors["a"]), np.asarray(factors["b"]), strict=True)
        if any(a.any() and b.any() for a, b in pairs):
            return
    name = "B" if any(np.any(factors["a"]) for factors in lora["layers"].values()) else "A"
    origin = shown(str(pathlib.Path(folder) / WEIGHTS), 120)
    raise refused("adapter_zero", name=name, origin=origin)


def save_adapter(
    folder: str | os.PathLike[str],
    lora: Tree,
    lora_config: LoRAConfig,
    config: decoders.ModelConfig,
    *,
    base: str = "",
    base_model: str = "",
    base_revision: str = "",
) -> None:
    """Writes an adapter in PEFT's format, for `peft.PeftModel.from_pretrained`.

    Args:
      folder: A directory that is not there yet or empty.
      lora: The factors.
      lora_config: Their settings.
      config: The settings of the decoder they belong to.
      base: Identity of the base that it was trained on, which `load_adapter` checks.
      base_model: Hub name of the base, noted for PEFT's AutoPeftModel.
      base_revision: Its branch, tag or commit, "" for the newest.
    """
    _, shapes, _ = decoders.abstract(config, lora_config)
    key_map.check_tree(lora, shapes, f"an adapter of {lora_config} on this {config.model_type}")
    fields = {
        "base_model_name_or_path": base_model or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": _plain(lora_config.alpha),
        "lora_dropout": lora_config.dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": lora_config.rank,
        "revision": base_revision or None,
        "target_modules": list(lora_config.targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": lora_config.use_rslora,
        **_patterns(lora_config, config),
    }
    names = decoders.ARCHITECTURES[config.model_type].key_map
    slots = key_map.plan(names, lora, prefix=_PREFIX)
    whole = key_map.tensors_of(lora, slots)
    own = _own_slots(slots, lora_config)
    tensors = {key: whole[key][tuple(map(slice, slot.shape))] for key, slot in own.items()}
    lost = [k for k in whole if np.count_nonzero(whole[k]) != np.count_nonzero(tensors.get(k, 0))]
    if lost:
        must = f"factors must be 0 beyond a layer's own rank, got others in {lost[0]}"
        raise ValueError(f"{must}: set them to 0")
    with storage.new_folder(folder) as partial:
        storage.write_tensors(partial / WEIGHTS, tensors, {_BASE: base} if base else None)
        files.write_json(partial / CONFIG, fields)


def _patterns(lora_config: LoRAConfig, config: decoders.ModelConfig) -> dict[str, Any]:
    """Returns the fields of ranks and alphas that differ by module; {} if none does.

    Patterns are whole names of modules, so that a pattern matches one module only. So are targets
    in a model that has other parts than the text part.
    """
    modules, has_others = adapter_targets.module_names(config), config.text_part is not config
    size = lora_config.rank, lora_config.alpha
    even = tuple((target, (size,) * config.num_hidden_layers) for target in lora_config.targets)
    if not (lora_config.layers or has_others):
        return {}
    sizes: dict[str, tuple[int, float]] = {}
    for target, layers in lora_config.layers or even:
        sizes |= dict(zip(modules[target], layers, strict=True))
    with_adapter = {name: size for name, size in sizes.items() if size[0]}
    ranks = {n: rank for n, (rank, _) in with_adapter.items() if rank != lora_config.rank}
    alphas = {n: _plain(a) for n, (_, a) in with_adapter.items() if a != lora_config.alpha}
    fields = {
        "rank_pattern": {re.escape(name): rank for name, rank in ranks.items()},
        "alpha_pattern": {re.escape(name): alpha for name, alpha in alphas.items()},
    }
    is_everywhere = len(with_adapter) == len(sizes) and not has_others
    return fields if is_everywhere else {**fields, "target_modules": sorted(with_adapter)}


def _plain(alpha: float) -> int | float:
    return int(alpha) if float(alpha).is_integer() else alpha
