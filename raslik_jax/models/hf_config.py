"""Reads and writes the config.json of a Hugging Face model, without transformers.

A field that is not known is refused by name: it may change the arithmetic. The exceptions are the
fields in `IGNORED`, which describe the file, the tokenizer or the training run. Old and new
spellings of the rotary fields are read, and both are written.
"""

import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from raslik_jax.messages import shown

_Config = TypeVar("_Config")

_QUOTES = "'\""

# None of these changes what a model computes in evaluation mode.
IGNORED = frozenset(
    """_attn_implementation_autoset _name_or_path architectures chunk_size_feed_forward
    classifier_dropout dtype finetuning_task gradient_checkpointing id2label is_decoder
    is_encoder_decoder is_llama_config label2id model_type output_attentions output_hidden_states
    problem_type return_dict task_specific_params torch_dtype transformers.js_config
    transformers_version use_cache""".split()
)

# Fields that are harmless where they are off (zero, false or null), or at one value only.
_OFF = frozenset(
    """attention_dropout hidden_dropout rope_interleaved clip_qkv sep_token_id
    decoder_start_token_id cross_attention_hidden_size add_cross_attention
    tie_encoder_decoder""".split()
)
_ONLY_VALUE = {"pretraining_tp": 1, "position_embedding_type": "absolute"}

# Older spellings of rotary fields, which stand beside the other fields and not in an object.
_OLD_ROPE = {
    "rope_theta": "rope_theta",
    "rotary_emb_base": "rope_theta",
    "partial_rotary_factor": "partial_rotary_factor",
    "rotary_pct": "partial_rotary_factor",
}
# What each kind of rotary scaling needs.
_LLAMA3 = "factor low_freq_factor high_freq_factor original_max_position_embeddings".split()
_SCALING = {"default": [], "linear": ["factor"], "llama3": _LLAMA3}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeParameters:
    """How positions rotate queries and keys; the names are Hugging Face's newer ones.

    Attributes:
      rope_type: "default", "linear" or "llama3".
      rope_theta: The base of the geometric series of wavelengths.
      partial_rotary_factor: The fraction of each head that is rotated, in (0, 1].
      factor: For "linear" and "llama3": how much longer the context is made.
      low_freq_factor: For "llama3": wavelengths above original / low_freq_factor are stretched
        by `factor`.
      high_freq_factor: For "llama3": wavelengths below original / high_freq_factor stay; those
        between the two bounds are interpolated.
      original_max_position_embeddings: For "llama3": the context length before stretching.
    """

    rope_type: str = "default"
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None

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
        """Returns the fields that are set, as they stand in a config.json."""
        return {name: value for name, value in vars(self).items() if value is not None}


def rope_frequencies(rope: RopeParameters, head_dim: int) -> np.ndarray:
    """Returns the rotary frequency of each rotated pair, in radians per position.

    ``theta ** (-2 i / d)`` for i = 0 .. ceil(d / 2) - 1 with d = int(head_dim * fraction); "linear"
    divides all by `factor`; "llama3" divides long wavelengths by it, keeps short ones and
    interpolates between (Llama 3.1's schedule).

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
    scaling = [float(getattr(rope, name)) for name in _SCALING[rope.rope_type]]
    if not scaling:
        return frequency_F
    stretched_F = frequency_F / np.float32(scaling[0])
    if rope.rope_type == "linear":
        return stretched_F
    factor, low, high, original = scaling
    wavelength_F = np.float32(2 * math.pi) / frequency_F
    smooth_F = (np.float32(original) / wavelength_F - np.float32(low)) / np.float32(high - low)
    between_F = (1 - smooth_F) * frequency_F / np.float32(factor) + smooth_F * frequency_F
    return np.where(
        smooth_F <= 0, stretched_F, np.where(smooth_F >= 1, frequency_F, between_F)
    ).astype(np.float32)


def _read_rope(values: dict[str, Any], default: RopeParameters, source: str) -> RopeParameters:
    """Returns the rotary settings and takes their fields, of any spelling, out of `values`."""
    # Newer files carry `rope_parameters`; `rope_scaling` is its older, partial form.
    pairs: list[tuple[str, Any]] = []
    for field in ("rope_scaling", "rope_parameters"):
        given = values.pop(field, None) or {}
        if not isinstance(given, Mapping):
            raise ValueError(
                f"{field} of {source} must be an object, got {shown(given)}: correct it"
            )
        pairs += [("rope_type" if name == "type" else name, given[name]) for name in given]
    old = [(name, values.pop(field, None)) for field, name in _OLD_ROPE.items()]
    found: dict[str, Any] = {}
    for name, value in pairs + [pair for pair in old if pair[1] is not None]:
        if found.setdefault(name, value) != value:
            both = f"{shown(found[name])} and, in another spelling, {shown(value)}"
            raise ValueError(f"{source} gives {name} as {both}: keep one of them")
    found.setdefault("partial_rotary_factor", default.partial_rotary_factor)
    if found.get("rope_type") == "llama3":
        length = values.get("max_position_embeddings")
        found.setdefault("original_max_position_embeddings", length)
    return _build(RopeParameters, found, f"rope_parameters of {source}")


def _convert(name: str, value: Any, expected: Any, source: str) -> Any:
    """Returns `value` as the annotated type; JSON writes 10000 where a float is meant."""
    kinds = typing.get_args(expected) or (expected,)
    if value is None and type(None) in kinds:
        return None
    if isinstance(value, list) and any(typing.get_origin(kind) is tuple for kind in kinds):
        return tuple(_convert(name, item, int, source) for item in value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # No field of a model is larger; later arithmetic would overflow.
    if not (is_number and abs(value) > 2**31 - 1):
        if type(value) in kinds:
            return value
        if is_number and float in kinds:
            return float(value)
    kind = getattr(expected, "__name__", expected)
    raise ValueError(f"{name} of {source} must be {kind}, got {shown(value)}: correct it")


def _build(config_class: type[_Config], values: Mapping[str, Any], source: str) -> _Config:
    """Returns the dataclass filled from `values`, refusing unknown and missing fields together."""
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
        mend = "use another checkpoint, or remove a field that is known to be harmless"
        raise ValueError(f"{source} has {' and '.join(problems)}: {mend}")
    kept = {}
    for name, value in values.items():
        expected: Any = fields[name].type
        if value is None and type(None) not in typing.get_args(expected):
            continue  # null stands for the default
        kept[name] = value if name == "rope_parameters" else _convert(name, value, expected, source)
    return config_class(**kept)


def read_fields(config_class: Any, values: Mapping[str, Any]) -> Any:
    """Returns a config dataclass filled from the fields of a config.json.

    Fields without a default must be in the file; null stands for the default. Refused are fields
    that are unknown, missing or ill-typed, and two spellings that disagree.
    """
    source = f"the config.json of this {config_class.model_type} model"
    fields = {field.name: field for field in dataclasses.fields(config_class)}

    def is_harmless(name: str, value: Any) -> bool:
        if name in _ONLY_VALUE:
            return value in (_ONLY_VALUE[name], None)
        return name in IGNORED or (name in _OFF and not value)

    rest = {k: value for k, value in values.items() if k in fields or not is_harmless(k, value)}
    if "rope_parameters" in fields:
        default: Any = fields["rope_parameters"].default
        rest["rope_parameters"] = _read_rope(rest, default, source)
    return _build(config_class, rest, source)


def write_fields(config: Any, architecture: str) -> dict[str, Any]:
    """Returns the config.json of a model, as `transformers` 4 and 5 both read it.

    The rotary settings are written in the new spelling and in the old one of the model's kind.
    """
    values = {"model_type": config.model_type, "architectures": [architecture], **vars(config)}
    rope = values.get("rope_parameters")
    if rope is not None:
        new = values["rope_parameters"] = rope.to_hf()
        values |= {old: getattr(rope, name) for old, name in config.old_rope.items()}
        if rope.rope_type != "default":
            values["rope_scaling"] = {name: new[name] for name in new if name not in _OLD_ROPE}
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
    }
