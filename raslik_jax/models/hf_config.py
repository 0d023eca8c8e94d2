"""Reads and writes the config.json of a Hugging Face model, without transformers.

The fields that decide the arithmetic are those of an architecture's config class. A field that
neither the class nor hf_fields.json knows is refused by name unless it is null. Old and new
spellings of the rotary fields are read, and both are written.
"""

import dataclasses
import json
import math
import pathlib
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from raslik_jax.base.messages import shown
from raslik_jax.data.words import refused

_Config = TypeVar("_Config")

_QUOTES = "'\""

_FIELDS = json.loads(pathlib.Path(__file__).with_name("hf_fields.json").read_text("utf-8"))
# Fields that decide how an answer is drawn, from transformers' GenerationConfig (releases 4 and 5).
GENERATION = frozenset(_FIELDS["generation"])
# In addition those of the file, the tokenizer, the training run and the kernels. None of them
# changes the result of a model in evaluation mode.
IGNORED = GENERATION | frozenset(_FIELDS["ignored"])
# Fields that are harmless where they are off (zero, false or empty), or at one value only.
_OFF, _ONLY_VALUE = frozenset(_FIELDS["off"]), _FIELDS["only_value"]

# Older spellings of rotary fields, which are next to the other fields and not in an object.
_OLD_ROPE = {
    "rope_theta": "rope_theta",
    "rotary_emb_base": "rope_theta",
    "partial_rotary_factor": "partial_rotary_factor",
    "rotary_pct": "partial_rotary_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
}
# Written next to `rope_scaling` and not in it.
_BESIDE_SCALING = ("rope_theta", "partial_rotary_factor")
# The fields that each kind of rotary scaling needs.
_ORIGINAL = "original_max_position_embeddings"
_SCALING = {
    "default": [],
    "linear": ["factor"],
    "llama3": ["factor", "low_freq_factor", "high_freq_factor", _ORIGINAL],
    "yarn": ["factor", _ORIGINAL],
    "longrope": ["short_factor", "long_factor", _ORIGINAL],
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeParameters:
    """How positions rotate queries and keys; the names are Hugging Face's newer ones.

    Attributes:
      rope_type: "default", "linear", "llama3", "yarn" or "longrope".
      rope_theta: The base of the geometric series of wavelengths.
      partial_rotary_factor: The fraction of each head that is rotated, in (0, 1].
      factor: How much longer the context is made; "longrope" may leave it out.
      low_freq_factor: For "llama3": wavelengths above original / low_freq_factor are stretched
        by `factor`.
      high_freq_factor: For "llama3": wavelengths below original / high_freq_factor stay; those
        between the two bounds are interpolated.
      original_max_position_embeddings: The context length before stretching; "longrope" takes the
        long factors for longer rows.
      beta_fast: For "yarn": pairs that turn more often than this in the original context stay; 32
        unless given.
      beta_slow: For "yarn": pairs that turn less often are stretched by `factor`; 1 unless given.
      attention_factor: For "yarn" and "longrope": the factor on cosines and sines, found from the
        others unless given.
      short_factor: For "longrope": the factor on the wavelength of each pair, up to the original
        length.
      long_factor: The same, beyond it.
    """

    rope_type: str = "default"
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        missing = [n for n in _SCALING.get(self.rope_type, ()) if getattr(self, n) is None]
        kinds, fraction = sorted(_SCALING), self.partial_rotary_factor
        for is_right, must in (
            (self.rope_type in kinds, f"rope_type must be of {kinds}, got {shown(self.rope_type)}"),
            (not missing, f"rope_type {self.rope_type!r} needs {missing}"),
            (self.rope_theta > 0, f"rope_theta must be positive, got {self.rope_theta}"),
            (0 < fraction <= 1, f"partial_rotary_factor must be in (0, 1], got {fraction}"),
        ):
            if not is_right:
                raise ValueError(f"{must}: correct config.json, or use another model")

    def to_hf(self) -> dict[str, Any]:
        """Returns the fields that are set, in the form of config.json."""
        return {name: value for name, value in vars(self).items() if value is not None}


class RotaryTable(NamedTuple):
    """The rotation that `rope_parameters` give for one width of heads.

    frequency_F: The rotary frequency of each rotated pair, in radians per position.
    long_frequency_F: The same for rows longer than the original context; None if it is the same.
    scale: The factor on cosines and sines.
    """

    frequency_F: np.ndarray
    long_frequency_F: np.ndarray | None
    scale: float


def rotary_table(rope: RopeParameters, head_dim: int, num_positions: int) -> RotaryTable:
    """Returns the frequencies and the factor of a model that has `num_positions` positions.

    "longrope" has two lists of frequencies. It scales cosines and sines by sqrt(1 + log s / log
    original) with s = num_positions / original, or with s = `factor` if it is given. "yarn" scales
    them by 0.1 log(factor) + 1 (Ding et al. 2024, arXiv:2402.13753; Peng et al. 2023,
    arXiv:2309.00071).
    """
    frequency_F, scale = rope_frequencies(rope, head_dim), rope.attention_factor
    if rope.rope_type not in ("yarn", "longrope"):
        return RotaryTable(frequency_F, None, 1.0)
    original = rope.original_max_position_embeddings or num_positions
    factor = rope.factor or num_positions / original
    if rope.rope_type == "yarn":
        found = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        return RotaryTable(frequency_F, None, found if scale is None else scale)
    found = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    long_rope = dataclasses.replace(rope, short_factor=rope.long_factor)
    long_F = rope_frequencies(long_rope, head_dim)
    return RotaryTable(frequency_F, long_F, found if scale is None else scale)


def rope_frequencies(rope: RopeParameters, head_dim: int) -> np.ndarray:
    """Returns the rotary frequency of each rotated pair, in radians per position.

    ``theta ** (-2 i / d)`` for i = 0 .. ceil(d / 2) - 1 with d = int(head_dim * fraction). "linear"
    divides all by `factor`. "llama3" divides long wavelengths by it, keeps short ones and
    interpolates between (Llama 3.1's schedule). "yarn" does so by the number of turns in the
    original context. "longrope" divides each by its own number, here the short one.

    Source: Su et al. 2021 (arXiv:2104.09864); transformers `modeling_rope_utils.py`, release 5.23.
    """
    width = int(head_dim * rope.partial_rotary_factor)
    exponent_F = np.arange(0, width, 2).astype(np.float32) / np.float32(width)
    if 2 * len(exponent_F) > head_dim:
        raise ValueError(f"rotary positions need pairs, got {head_dim=}: use an even head width")
    # Rounded where torch rounds. At position 5,000 one unit in the last place of a frequency is
    # 3e-4 radians, and the models were trained with these very numbers.
    power_F = (np.float64(rope.rope_theta) ** exponent_F.astype(np.float64)).astype(np.float32)
    frequency_F = np.float32(1.0) / power_F
    match rope.rope_type:
        case "default":
            return frequency_F
        case "longrope":
            for factors in (rope.short_factor, rope.long_factor):
                if len(factors or ()) != len(power_F):
                    raise refused("longrope", pairs=len(power_F), got=len(factors or ()))
            return np.float32(1.0) / (np.asarray(rope.short_factor, np.float32) * power_F)
        case "yarn":
            return _interpolate_by_turns(rope, power_F, width)
    stretched_F = frequency_F / np.float32(rope.factor or 1.0)
    if rope.rope_type == "linear":
        return stretched_F
    factor, low, high, original = (float(getattr(rope, name)) for name in _SCALING["llama3"])
    wavelength_F = np.float32(2 * math.pi) / frequency_F
    smooth_F = (np.float32(original) / wavelength_F - np.float32(low)) / np.float32(high - low)
    between_F = (1 - smooth_F) * frequency_F / np.float32(factor) + smooth_F * frequency_F
    return np.where(
        smooth_F <= 0, stretched_F, np.where(smooth_F >= 1, frequency_F, between_F)
    ).astype(np.float32)


def _interpolate_by_turns(rope: RopeParameters, power_F: np.ndarray, width: int) -> np.ndarray:
    """Returns YaRN's frequencies; `power_F` are the inverse ones before stretching."""
    original = float(rope.original_max_position_embeddings or 1)

    def pair_with(turns: float) -> float:
        # The number, not whole, of the pair that turns this often in the original context.
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    first = max(math.floor(pair_with(rope.beta_fast or 32.0)), 0)
    last = min(math.ceil(pair_with(rope.beta_slow or 1.0)), width - 1)
    span = np.float32(last - first if last != first else 0.001)
    pairs_F = np.arange(len(power_F), dtype=np.float32)
    stretched_F = np.clip((pairs_F - np.float32(first)) / span, 0, 1)
    kept_F = np.float32(1.0) - stretched_F
    inverse_F = np.float32(1.0) / (np.float32(rope.factor or 1.0) * power_F)
    mixed_F = inverse_F * (1 - kept_F) + np.float32(1.0) / power_F * kept_F
    return mixed_F.astype(np.float32)


def read_rope(values: dict[str, Any], default: RopeParameters, source: str) -> RopeParameters:
    """Returns the rotary settings and removes their fields in any spelling from `values`.

    `default` of the architecture gives the fields that the file does not have.
    """
    # Newer files carry `rope_parameters`; `rope_scaling` is its older, partial form.
    pairs: list[tuple[str, Any]] = []
    for field in ("rope_scaling", "rope_parameters"):
        given = values.pop(field, None) or {}
        if not isinstance(given, Mapping):
            raise refused("config_object", field=field, source=source, got=shown(given))
        pairs += [("rope_type" if name == "type" else name, given[name]) for name in given]
    old = [(name, values.pop(field, None)) for field, name in _OLD_ROPE.items()]
    found: dict[str, Any] = {}
    for name, value in pairs + [pair for pair in old if pair[1] is not None]:
        if found.setdefault(name, value) != value:
            both = f"{shown(found[name])} and, in another spelling, {shown(value)}"
            raise ValueError(f"{source} gives {name} as {both}: keep one of them")
    known = vars(default)
    given = {k: value for k, value in found.items() if value is not None or k not in known}
    found = {**default.to_hf(), **given}
    if _ORIGINAL in _SCALING.get(str(found["rope_type"]), ()):
        length = values.get("max_position_embeddings")
        found.setdefault(_ORIGINAL, length)
    return _build(RopeParameters, found, f"rope_parameters of {source}")


def _convert(name: str, value: Any, expected: Any, source: str) -> Any:
    """Returns `value` as the annotated type, because JSON may write a float as 10000."""
    kinds = typing.get_args(expected) or (expected,)
    if value is None and type(None) in kinds:
        return None
    if isinstance(value, list | tuple) and any(typing.get_origin(kind) is tuple for kind in kinds):
        (item_kind,) = {typing.get_args(kind)[0] for kind in kinds if typing.get_origin(kind)}
        return tuple(_convert(name, item, item_kind, source) for item in value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # No count of a model is larger, and no float passes the range of float32.
    if not (is_number and abs(value) > (1e38 if float in kinds else 2**31 - 1)):
        if type(value) in kinds:
            return value
        if is_number and float in kinds:
            return float(value)
    kind = getattr(expected, "__name__", expected)
    raise ValueError(f"{name} of {source} must be {kind}, got {shown(value)}: correct it")


def _build(config_class: type[_Config], values: Mapping[str, Any], source: str) -> _Config:
    """Returns the dataclass filled from `values`; refuses unknown and missing fields together."""
    fields = {field.name: field for field in dataclasses.fields(config_class)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - set(fields))
    missing = sorted(
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and values.get(name) is None
    )
    problems = []
    if unknown:
        given = ", ".join(
            f"{shown(name, 40).strip(_QUOTES)}={shown(values[name], 30)}" for name in unknown[:3]
        )
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        problems.append(f"unknown fields that may change the arithmetic ({given}{more})")
    if missing:
        problems.append(f"missing fields ({', '.join(missing)})")
    if problems:
        mend = "take a checkpoint of the published architecture"
        if unknown:
            mend += ", or remove a field that does not change the model's results"
        raise ValueError(f"{source} has {' and '.join(problems)}: {mend}")
    kept = {}
    for name, value in values.items():
        expected: Any = fields[name].type
        if value is None and type(None) not in typing.get_args(expected):
            continue  # null means the default
        kept[name] = value if name == "rope_parameters" else _convert(name, value, expected, source)
    return config_class(**kept)


def read_fields(config_class: Any, values: Mapping[str, Any]) -> Any:
    """Returns a config dataclass filled from the fields of a config.json.

    Fields without a default must be in the file. null means the default. It refuses fields that are
    unknown, missing or ill-typed, and two spellings that disagree.
    """
    source = f"the config.json of this {config_class.model_type} model"
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    values = _respell(values, config_class.spellings, source)

    def is_harmless(name: str, value: Any) -> bool:
        is_usual = name in _ONLY_VALUE and value == _ONLY_VALUE[name]
        return value is None or is_usual or name in IGNORED or (name in _OFF and not value)

    rest = {k: value for k, value in values.items() if k in fields or not is_harmless(k, value)}
    if "rope_parameters" in fields:
        default: Any = fields["rope_parameters"].default
        rope = rest["rope_parameters"] = read_rope(rest, default, source)
        share = rope.partial_rotary_factor
        reads = "partial_rotary_factor" in config_class.old_rope.values()
        if share != default.partial_rotary_factor and not reads:
            raise refused("partial_rope", source=source, got=share)
    return _build(config_class, rest, source)


def _respell(
    values: Mapping[str, Any], spellings: Mapping[str, str], source: str
) -> dict[str, Any]:
    """Returns the fields with those of another spelling under our names."""
    found = {name: value for name, value in values.items() if name not in spellings}
    for theirs, ours in spellings.items():
        value = values.get(theirs)
        if value is None:
            continue
        if found.get(ours) is None:
            found[ours] = value
        elif found[ours] != value:
            both = f"{shown(found[ours])} and, as {theirs}, {shown(value)}"
            raise ValueError(f"{source} gives {ours} as {both}: keep one of them")
    return found


def write_fields(config: Any, architecture: str) -> dict[str, Any]:
    """Returns the config.json of a model, as `transformers` 4 and 5 both read it.

    The rotary settings are written in the new spelling and in the old one of the model's kind.
    """
    values = {"model_type": config.model_type, "architectures": [architecture], **vars(config)}
    values |= {theirs: values[ours] for theirs, ours in config.spellings.items()}
    rope = values.get("rope_parameters")
    if rope is not None:
        new = values["rope_parameters"] = rope.to_hf()
        values |= {old: getattr(rope, name) for old, name in config.old_rope.items()}
        if rope.rope_type != "default":
            scaling = values["rope_scaling"] = {k: new[k] for k in new if k not in _BESIDE_SCALING}
            # With YaRN, releases before 4.56 took the factor from the two lengths.
            if rope.rope_type == "yarn" and new[_ORIGINAL] == values["max_position_embeddings"]:
                del scaling[_ORIGINAL]
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
    }
