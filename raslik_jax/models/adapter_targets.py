"""The linear layers of a PEFT adapter with rank and alpha of each.

Source: peft 0.21, `tuners_utils.py` (`check_target_module_exists`, all-linear) and `utils/other.py`
(`get_pattern_key`). Regular expressions of an adapter are matched within `bounded`'s limits.
"""

import pathlib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from raslik_jax.base import bounded
from raslik_jax.base.messages import shown, some_of
from raslik_jax.data.words import refused
from raslik_jax.models import decoder as decoders

MERGE = (
    "merge it with peft (AutoPeftModelForCausalLM, merge_and_unload, save_pretrained) and give the"
    " result as --checkpoint, without --adapter"
)
# Without a group, an alternative or a repetition a pattern takes no time.
_IS_SIMPLE = re.compile(r"[\w.\\^$-]*")


def find_sizes(
    path: pathlib.Path, fields: Mapping[str, Any], config: decoders.ModelConfig
) -> dict[str, tuple[tuple[int, float], ...]]:
    """Returns rank and alpha of every layer of every linear layer; (0, 0.0) without an adapter.

    Args:
      path: adapter_config.json, for errors.
      fields: its fields.
      config: the settings of the decoder.
    """
    architecture = decoders.ARCHITECTURES[config.model_type]
    outside = [architecture.key_map[part] for part in ("embed", "head")]
    modules = module_names(config)
    names = [name for layers in modules.values() for name in layers]
    is_all = str(fields["target_modules"]).lower() == "all-linear"  # which leaves out the head
    targeted = _find_targeted(path, fields, names if is_all else [*names, *outside])
    if on_others := [name for name in outside if name in targeted]:
        must = "must have adapters on the linear layers of its blocks alone"
        tied = " (untie the base first: head and embedding share a tensor, and both would change)"
        tied *= config.tie_word_embeddings
        raise ValueError(f"{path} {must}, got one on {some_of(on_others)}: {MERGE}{tied}")
    ranks = _by_pattern(path, fields, "rank_pattern", names)
    alphas = _by_pattern(path, fields, "alpha_pattern", names)

    def size(name: str) -> tuple[int, float]:
        if name not in targeted:
            return 0, 0.0
        return ranks.get(name, fields["r"]), float(alphas.get(name, fields["lora_alpha"]))

    if not targeted:
        got, known = shown(fields["target_modules"], 120), some_of(sorted(modules), 7, quoted=False)
        raise refused("adapter_targets", path=path, kind=config.model_type, names=known, got=got)
    return {target: tuple(map(size, layers)) for target, layers in modules.items()}


def module_names(config: decoders.ModelConfig) -> dict[str, list[str]]:
    """Returns the full names of every linear layer of a decoder's blocks by its last part."""
    names = decoders.ARCHITECTURES[config.model_type].key_map
    _, _, base = decoders.abstract(config, None)
    linears = [name for name, leaves in base["layers"].items() if "kernel" in leaves]
    depth = range(config.num_hidden_layers)
    stem = names["layers"]
    return {
        name: [f"{stem}.{names[f'layers/{name}']}".format(layer=layer) for layer in depth]
        for name in linears
    }


def _by_pattern(
    path: pathlib.Path, fields: Mapping[str, Any], name: str, modules: Iterable[str]
) -> dict[str, Any]:
    """Returns the value of the first pattern that matches the end of each module's name."""
    found: dict[str, Any] = {}
    left = list(modules)
    for key, value in (fields.get(name) or {}).items():
        matches = _match(path, name, rf"(.*\.)?({key})$", left, given=key, is_whole=False)
        found |= {module: value for module in matches}
        left = [module for module in left if module not in found]
    return found


def _find_targeted(
    path: pathlib.Path, fields: Mapping[str, Any], modules: Collection[str]
) -> set[str]:
    """Returns the modules that peft gives an adapter."""
    targets, layers = fields["target_modules"], fields.get("layers_to_transform")
    found = set(modules)
    if str(targets).lower() != "all-linear":
        found = _named(path, fields, "target_modules", modules)
    found -= _named(path, fields, "exclude_modules", modules)
    if isinstance(targets, str) or layers is None or layers == []:
        return found
    patterns = fields.get("layers_pattern") or [r"[^.]*"]
    layer_of: dict[str, int] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        whole = rf"(?:^|.*?\.){pattern}\.(\d+)\."
        left = [name for name in modules if name not in layer_of]
        name = "layers_pattern"
        matches = _match(path, name, whole, left, given=pattern, is_whole=False)
        layer_of |= {module: int(groups[-1]) for module, groups in matches.items()}
    chosen = [layers] if isinstance(layers, int) else layers
    return {name for name in found if layer_of.get(name) in chosen}


def _named(
    path: pathlib.Path, fields: Mapping[str, Any], name: str, modules: Collection[str]
) -> set[str]:
    """Returns the modules whose whole name matches a pattern or whose last parts are in a list."""
    given = fields.get(name) or ()
    if isinstance(given, str):
        return set(_match(path, name, given, modules, given=given, is_whole=True))
    return {m for m in modules if any(m == one or m.endswith(f".{one}") for one in given)}


def _match(
    path: pathlib.Path,
    name: str,
    pattern: str,
    modules: Collection[str],
    *,
    given: str,
    is_whole: bool,
) -> dict[str, tuple[Any, ...]]:
    """Returns the groups of a pattern in each module that it matches."""
    what = f"the pattern {shown(given, 60)} of {name} in {path}"
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{what} must be a regular expression: correct it") from error
    if _IS_SIMPLE.fullmatch(given):
        match = re.compile(pattern).fullmatch if is_whole else re.compile(pattern).match
        found = [match(module) for module in modules]
        groups: list[Any] = [one and (one[0], *one.groups()) for one in found]
    else:
        groups = [*bounded.call(bounded.match_all, pattern, [*modules], is_whole, what=what)]
    return {module: one for module, one in zip(modules, groups, strict=True) if one}
