"""Reads and writes the config.json of a Hugging Face model, without transformers.

A field that is not known is refused by name: it may change the arithmetic. The exceptions are the
fields in `IGNORED`, which describe the file, the tokenizer or the training run. Old and new
spellings of the rotary fields are read, and both are written.
"""

import dataclasses
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from raslik_jax.messages import shown

_Config = TypeVar("_Config")

# Above any field and any depth that a model has.
_LARGEST, _MOST_LAYERS = 2**31 - 1, 10_000
_QUOTES = "'\""

# None of these changes what a model computes in evaluation mode.
IGNORED = frozenset(
    {
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "dtype",
        "finetuning_task",
        "gradient_checkpointing",
        "id2label",
        "is_decoder",
        "is_encoder_decoder",
        "is_llama_config",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "return_dict",
        "task_specific_params",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "use_cache",
    }
)

# Fields that are harmless at one value only; any other value is refused.
_ONLY_VALUE: dict[str, Any] = {
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "pretraining_tp": 1,
    "rope_interleaved": False,
    "clip_qkv": None,
    "sep_token_id": None,
    "decoder_start_token_id": None,
    "cross_attention_hidden_size": None,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
}


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
        expected = {
            "default": (),
            "linear": ("factor",),
            "llama3": (
                "factor",
                "low_freq_factor",
                "high_freq_factor",
                "original_max_position_embeddings",
            ),
        }
        if self.rope_type not in expected:
            raise ValueError(
                f"rope_type must be one of {sorted(expected)}, got {shown(self.rope_type)}: "
                "this kind of rotary scaling is not implemented"
            )
        missing = [name for name in expected[self.rope_type] if getattr(self, name) is None]
        if missing:
            raise ValueError(
                f"rope_type {self.rope_type!r} needs {missing}: add them to rope_parameters"
            )
        if not self.rope_theta > 0 or not 0 < self.partial_rotary_factor <= 1:
            raise ValueError(
                "rope_theta must be positive and partial_rotary_factor in (0, 1], got "
                f"{self.rope_theta=} and {self.partial_rotary_factor=}: correct config.json"
            )

    @property
    def llama3_fields(self) -> tuple[float, float, float, float]:
        """The factor, the two frequency factors and the original length of "llama3"."""
        fields = (
            self.factor,
            self.low_freq_factor,
            self.high_freq_factor,
            self.original_max_position_embeddings,
        )
        return tuple(float(field) for field in fields if field is not None)  # type: ignore[return-value]

    def to_hf(self) -> dict[str, Any]:
        """Returns the fields that are set, as they stand in a config.json."""
        values = dataclasses.asdict(self)
        return {name: value for name, value in values.items() if value is not None}


def _read_rope(
    values: dict[str, Any], *, default_fraction: float, max_positions: int | None, source: str
) -> RopeParameters:
    """Returns the rotary settings and takes their fields, of any spelling, out of `values`."""
    nested: dict[str, Any] = {}
    # Newer files carry `rope_parameters`; `rope_scaling` is its older, partial form.
    for field in ("rope_scaling", "rope_parameters"):
        given = values.pop(field, None)
        if given is None:
            continue
        if not isinstance(given, Mapping):
            raise ValueError(
                f"{field} of {source} must be an object, got {shown(given)}: correct it"
            )
        renamed = {("rope_type" if k == "type" else k): v for k, v in given.items()}
        _merge(nested, renamed, source)
    for old, new in (
        ("rope_theta", "rope_theta"),
        ("rotary_emb_base", "rope_theta"),
        ("partial_rotary_factor", "partial_rotary_factor"),
        ("rotary_pct", "partial_rotary_factor"),
    ):
        if values.get(old) is not None:
            _merge(nested, {new: values[old]}, source)
        values.pop(old, None)
    nested.setdefault("partial_rotary_factor", default_fraction)
    if nested.get("rope_type") == "llama3":
        nested.setdefault("original_max_position_embeddings", max_positions)
    return _build(RopeParameters, nested, f"rope_parameters of {source}")


def _merge(into: dict[str, Any], values: Mapping[str, Any], source: str) -> None:
    """Adds `values` to `into`; two spellings of one field must agree."""
    for name, value in values.items():
        if name in into and into[name] != value:
            raise ValueError(
                f"{source} gives {name} as {shown(into[name])} in one spelling and as "
                f"{shown(value)} in another: keep one of them"
            )
        into[name] = value


def _convert(name: str, value: Any, expected: Any, source: str) -> Any:
    """Returns `value` as the annotated type; JSON writes 10000 where a float is meant."""
    kinds = typing.get_args(expected) or (expected,)
    if value is None and type(None) in kinds:
        return None
    if isinstance(value, list) and any(typing.get_origin(kind) is tuple for kind in kinds):
        return tuple(_convert(name, item, int, source) for item in value)
    if isinstance(value, bool):
        if bool in kinds:
            return value
    elif isinstance(value, int | float) and abs(value) > _LARGEST:
        pass  # no field of a model is as large; later arithmetic would overflow
    elif isinstance(value, int) and int in kinds:
        return value
    elif isinstance(value, int | float) and float in kinds:
        return float(value)
    elif isinstance(value, str) and str in kinds:
        return value
    raise ValueError(
        f"{name} of {source} must be {getattr(expected, '__name__', expected)}, got "
        f"{shown(value)}: correct it"
    )


def _build(config_class: type[_Config], values: Mapping[str, Any], source: str) -> _Config:
    """Returns the dataclass filled from `values`, refusing unknown and missing fields together."""
    fields = {field.name: field for field in dataclasses.fields(config_class)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - set(fields))
    missing = sorted(
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and values.get(name) is None
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
        raise ValueError(
            f"{source} has {' and '.join(problems)}: use a checkpoint of this architecture, or "
            "remove a field that is known to be harmless"
        )
    kept = {}
    for name, value in values.items():
        expected: Any = fields[name].type
        if value is None and type(None) not in typing.get_args(expected):
            continue  # null stands for the default
        kept[name] = value if name == "rope_parameters" else _convert(name, value, expected, source)
    return config_class(**kept)


def read_fields(
    config_class: type[_Config],
    values: Mapping[str, Any],
    *,
    model_type: str,
    default_rotary_fraction: float | None = 1.0,
) -> _Config:
    """Returns a config dataclass filled from the fields of a config.json.

    Args:
      config_class: A frozen dataclass whose fields carry Hugging Face's names. Fields without a
        default must be in the file; null stands for the default.
      values: The parsed config.json.
      model_type: The architecture that the file must name.
      default_rotary_fraction: The rotated fraction of a head where the file gives none; None for
        a model without rotary positions (its dataclass has no field `rope_parameters`).

    Raises:
      ValueError: Another model_type; unknown, missing or ill-typed fields; two spellings of a
        rotary field that disagree; a base dropout other than 0 in a decoder.
    """
    source = f"the config.json of this {model_type} model"
    given_type = values.get("model_type")
    if given_type != model_type:
        raise ValueError(
            f"model_type must be {model_type!r}, got {shown(given_type)}: "
            "load this checkpoint with its own architecture"
        )
    rest = {name: value for name, value in values.items() if name not in IGNORED}
    names = {field.name for field in dataclasses.fields(config_class)}  # type: ignore[arg-type]
    for name, only in _ONLY_VALUE.items():
        if name in rest and name not in names and (rest[name] == only or rest[name] is None):
            del rest[name]
    if default_rotary_fraction is not None:
        rest["rope_parameters"] = _read_rope(
            rest,
            default_fraction=default_rotary_fraction,
            max_positions=rest.get("max_position_embeddings"),
            source=source,
        )
    return _build(config_class, rest, source)


def write_fields(config: Any, *, model_type: str, architecture: str) -> dict[str, Any]:
    """Returns the config.json of a model, as `transformers` 4 and 5 both read it.

    The rotary settings are written in the old and in the new spelling; `read_fields` checks that
    the two agree.
    """
    values: dict[str, Any] = {"model_type": model_type, "architectures": [architecture]}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, RopeParameters):
            values["rope_parameters"] = value.to_hf()
            if model_type == "gpt_neox":
                values["rotary_emb_base"] = value.rope_theta
                values["rotary_pct"] = value.partial_rotary_factor
            else:
                values["rope_theta"] = value.rope_theta
            if value.rope_type != "default":
                scaling = value.to_hf()
                del scaling["rope_theta"], scaling["partial_rotary_factor"]
                values["rope_scaling"] = scaling
        else:
            values[field.name] = list(value) if isinstance(value, tuple) else value
    return values


def check_sizes(config: Any, names: tuple[str, ...]) -> None:
    """Raises ValueError unless every named field of the config is a number of possible size."""
    wrong = {name: getattr(config, name) for name in names if not getattr(config, name) > 0}
    if wrong:
        raise ValueError(f"these sizes must be positive: {shown(wrong, 200)}; correct config.json")
    # No model is as large; a damaged file would otherwise be worked on without an end.
    if config.num_hidden_layers > _MOST_LAYERS:
        raise ValueError(
            f"num_hidden_layers must be at most {_MOST_LAYERS:,}, got "
            f"{shown(config.num_hidden_layers)}: correct config.json"
        )


def check_heads(config: Any, *, explicit_head_dim: bool) -> None:
    """Raises ValueError unless the heads divide the width, and the key-value heads the heads.

    Args:
      config: A decoder's config.
      explicit_head_dim: Whether the architecture may set its head width apart from hidden_size.
    """
    heads = config.num_attention_heads
    if not (explicit_head_dim and config.head_dim) and config.hidden_size % heads:
        raise ValueError(
            "hidden_size must be a multiple of num_attention_heads, got "
            f"hidden_size={config.hidden_size} and num_attention_heads={heads}: "
            "correct config.json"
        )
    groups = getattr(config, "num_key_value_heads", None)
    if groups is not None and (groups < 1 or heads % groups):
        raise ValueError(
            "num_attention_heads must be a multiple of num_key_value_heads, got "
            f"num_attention_heads={heads} and num_key_value_heads={shown(groups)}: correct "
            "config.json"
        )


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raises ValueError unless the value of a field is one that is implemented."""
    if value not in set(choices):
        raise ValueError(
            f"{name} must be one of {sorted(choices)}, got {shown(value)}: it is not implemented"
        )
