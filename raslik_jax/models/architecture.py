"""The declarations of an architecture's own file: its settings and its record."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from raslik_jax.base.messages import shown
from raslik_jax.models import hf_config, layers
from raslik_jax.models.lora import ATTENTION_TARGETS

_SIZES = """vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size
    max_position_embeddings type_vocab_size layer_norm_eps rms_norm_eps""".split()
# Above any depth that a model has: a damaged file would be worked on without an end.
_MOST_LAYERS = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The settings of all models under Hugging Face's names.

    Fields without a default must be in a config.json. Fields that a class does not have are refused
    there. Class attributes: `model_type` and `hf_name`, the architecture in Hugging Face's spelling
    in config.json and in front of its classes; `spellings`, other names of fields in config.json
    with ours.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    hidden_act: str
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    model_type: ClassVar[str]
    hf_name: ClassVar[str]
    spellings: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        sizes = {name: vars(self)[name] for name in _SIZES if name in vars(self)}
        wrong = {name: size for name, size in sizes.items() if not size > 0}
        if wrong:
            raise ValueError(f"sizes must be positive, got {shown(wrong, 99)}: correct config.json")
        depth, width, heads = self.num_hidden_layers, self.hidden_size, self.num_attention_heads
        groups = getattr(self, "num_key_value_heads", None) or heads
        is_cut = getattr(self, "head_dim", None) or width % heads == 0
        few = f"at most {_MOST_LAYERS:,}, got {shown(depth)}"
        acts, act = sorted(layers.ACTIVATIONS), self.hidden_act
        of_heads = f"a multiple of num_attention_heads, got {width} and {heads}"
        of_groups = f"a multiple of num_key_value_heads, got {heads} and {shown(groups)}"
        for is_right, must in (
            (depth <= _MOST_LAYERS, f"num_hidden_layers must be {few}"),
            (is_cut, f"hidden_size must be {of_heads}"),
            (groups > 0 and heads % groups == 0, f"num_attention_heads must be {of_groups}"),
            (act in acts, f"hidden_act must be of {acts}, got {shown(act)}"),
        ):
            if not is_right:
                raise ValueError(f"{must}: correct config.json, or use another model")

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> Any:
        """Returns the config of a parsed config.json; refuses as `hf_config.read_fields` does."""
        return hf_config.read_fields(cls, values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """The settings of all decoders; a subclass adds `rms_norm_eps` or `layer_norm_eps`.

    Class attribute: `old_rope`, the older spellings of rotary fields that are written in addition
    to the new one.
    """

    max_position_embeddings: int = 2048
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    rope_parameters: hf_config.RopeParameters = hf_config.RopeParameters()

    old_rope: ClassVar[Mapping[str, str]] = {"rope_theta": "rope_theta"}

    def __post_init__(self) -> None:
        super().__post_init__()
        for rope in set(self.layer_ropes):
            hf_config.rope_frequencies(rope, self.head_width)

    @property
    def head_width(self) -> int:
        """The width of one attention head."""
        width: int | None = getattr(self, "head_dim", None)
        return width or self.hidden_size // self.num_attention_heads

    @property
    def num_cached_heads(self) -> int:
        """The number of key-value heads; Hugging Face leaves it out where all heads have one."""
        groups: int | None = getattr(self, "num_key_value_heads", None)
        return groups or self.num_attention_heads

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The number of tokens that each layer looks back, itself included; None for all."""
        return (None,) * self.num_hidden_layers

    @property
    def layer_ropes(self) -> tuple[hf_config.RopeParameters, ...]:
        """How positions rotate queries and keys in each layer."""
        return (self.rope_parameters,) * self.num_hidden_layers

    @property
    def rotation_border(self) -> int | None:
        """The length beyond which a row is rotated otherwise (longrope); None for none."""
        found = (r for r in self.layer_ropes if r.rope_type == "longrope")
        lengths = [r.original_max_position_embeddings for r in found]
        return min((length for length in lengths if length is not None), default=None)

    @property
    def attention_scale(self) -> float | None:
        """The factor on a query's product with a key; None for 1 / sqrt(head width)."""
        return None

    @property
    def attention_cap(self) -> float | None:
        """The bound c of attention logits, c tanh(x / c); None for none."""
        return None

    @property
    def logit_cap(self) -> float | None:
        """The bound c of the vocabulary's logits, c tanh(x / c); None for none."""
        return None

    @property
    def embedding_scale(self) -> float | None:
        """The factor on a token's embedding but not on a head tied to it; None for 1."""
        return None

    @property
    def text_part(self) -> "DecoderConfig":
        """The settings of the decoder alone in a model that has other parts too."""
        return self

    @classmethod
    def full_key(cls, key: str) -> str:
        """Returns the key that the key map knows for one of a file."""
        return key

    def to_hf(self) -> dict[str, Any]:
        """Returns the fields of a config.json."""
        return hf_config.write_fields(self, f"{self.hf_name}ForCausalLM")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlidingConfig(DecoderConfig):
    """A decoder whose layers look back `sliding_window` tokens; None for all."""

    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sliding_window is not None and self.sliding_window < 1:
            got = f"got {self.sliding_window}: correct config.json"
            raise ValueError(f"sliding_window must be at least 1, {got}")

    def to_hf(self) -> dict[str, Any]:
        """Returns the fields of a config.json."""
        values = super().to_hf()
        # Some of transformers' classes take a null for the width itself.
        return {k: value for k, value in values.items() if k != "head_dim" or value is not None}

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The number of tokens that each layer looks back, itself included; None for all."""
        return (self.sliding_window,) * self.num_hidden_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedConfig(SlidingConfig):
    """A decoder with the sliding window in some of its layers.

    These are the layers that `layer_types` calls "sliding_attention". Without `layer_types` the
    method `slides` of the architecture decides.
    """

    layer_types: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds, depth = self.layer_types, self.num_hidden_layers
        known = ["full_attention", "sliding_attention"]
        if kinds is not None and (len(kinds) != depth or not set(kinds) <= set(known)):
            must = f"must name {depth} layers, each of {known}"
            raise ValueError(f"layer_types {must}, got {shown(kinds, 99)}: correct config.json")
        if self.sliding_window is None and any(map(self.is_sliding, range(depth))):
            raise ValueError("layers with a window must have sliding_window: set it in config.json")

    def slides(self, layer: int) -> bool:
        """Whether a layer has the window where `layer_types` is not given."""
        raise NotImplementedError

    def is_sliding(self, layer: int) -> bool:
        """Whether a layer has the window."""
        if self.layer_types is None:
            return self.slides(layer)
        return self.layer_types[layer] == "sliding_attention"

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The number of tokens that each layer looks back, itself included; None for all."""
        layers_ = range(self.num_hidden_layers)
        return tuple(self.sliding_window if self.is_sliding(i) else None for i in layers_)


class Architecture(NamedTuple):
    """The facts about one architecture that the rest of the program uses.

    Attributes:
      config: The class of its settings.
      key_map: Our module -> Hugging Face's. Those of a layer follow "layers" with {layer} for the
        layer's number. Modules that a config does not use are not looked up.
      buffers: A pattern of tensors in files that are not read, because they follow from the config
        or belong to an unused head.
      modules: The Flax modules of a decoder's layer and of its final norm.
      lora_targets: The linear layers of its attention, which --finetune.lora_targets=auto adapts.
      is_served_with_lora: Whether vLLM takes an adapter on it (its class is a SupportsLoRA).
    """

    config: Any
    key_map: Mapping[str, str]
    buffers: str
    modules: tuple[Any, Any] = (None, None)
    lora_targets: tuple[str, ...] = ATTENTION_TARGETS
    is_served_with_lora: bool = True
