"""Decoders as plain dicts of arrays and pure functions: create, abstract, bind.

This is the edge of the only room that knows Flax. `create` returns a description of the model
(`GraphDef`, hashable, no arrays) and two nested dicts of arrays. `bind` turns the description into
pure functions of those dicts for one example:

    graphdef, lora, base = create(config, lora_config, key=key, dtype=jnp.float32)
    decoder = bind(graphdef)
    hidden_LE = decoder.hidden(lora, base, tokens_L)
    logits_LV = decoder.logits(lora, base, hidden_LE)

The dicts follow Hugging Face's leaf names. All layers of one kind are stacked along a leading axis
NL, and kernels are [in, out] (torch's transposed), so that a layer computes x @ kernel:

    base["embed"]["embedding"]             [V, E]
    base["layers"][<linear>]["kernel"]     [NL, in, out]   query_key_value, dense, q_proj, ...
    base["layers"][<linear>]["bias"]       [NL, out]       where the architecture has one
    base["layers"][<norm>]["scale"]        [NL, E]         input_layernorm, ...; "bias" in LayerNorm
                                                           "offset" for the scale in Gemma
    base["final_norm"]["scale"]            [E]             "bias" in LayerNorm
    base["head"]["kernel"]                 [E, V]          absent where the embedding is tied
    lora["layers"][<target>]["a"]          [NL, in, rank]  PEFT's lora_A.weight, transposed
    lora["layers"][<target>]["b"]          [NL, rank, out] PEFT's lora_B.weight, transposed

LoRA leaves are float32. Base leaves have the requested dtype. A quantized kernel (`quantize`) may
replace a "kernel". The rest of the tree stays unchanged.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float, Int

from raslik_jax.base.axes import Array, Tree
from raslik_jax.data.words import refused
from raslik_jax.models import (
    gemma2,
    gemma3,
    gpt_neox,
    layers,
    llama,
    mistral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
)
from raslik_jax.models.architecture import Architecture, DecoderConfig
from raslik_jax.models.lora import LoRAConfig, LoRAParam

ModelConfig = DecoderConfig

# By the model_type of config.json.
ARCHITECTURES: dict[str, Architecture] = {
    found.config.model_type: found
    for found in (
        *(m.ARCHITECTURE for m in (gpt_neox, llama, mistral, olmo2, phi3, qwen2, qwen3)),
        *(gemma2.ARCHITECTURE, gemma3.ARCHITECTURE, gemma3.WITH_IMAGES),
    )
}


@dataclasses.dataclass(frozen=True)
class GraphDef:
    """The description of a model without its arrays: hashable, a static argument of a jit.

    `definition` is Flax's description of the module tree. It has no use outside models/.
    """

    config: ModelConfig
    lora_config: LoRAConfig | None
    definition: Any = dataclasses.field(repr=False)


class Decoder(NamedTuple):
    """Pure functions of (lora, base, ...) on one example; the caller vmaps.

    Attributes:
      hidden: (lora, base, tokens_L, *, mask_L=None, positions_L=None, dropout_key=None) ->
        hidden_LE, the final norm applied. mask_L is True at real tokens. Padding may be at either
        end, and at the right end needs no mask (a causal model never looks there). Positions count
        real tokens from 0 unless given. No dropout without a key.
      logits: (lora, base, hidden_TE) -> float32 logits_TV. Rows of the vocabulary beyond the
        tokenizer's are ordinary rows.
      prefill: (lora, base, tokens_L, *, mask_L=None, positions_L=None) -> (hidden_LE, KeyValues of
        these tokens, [NL, G, L, D] each).
      extend: (lora, base, tokens_L, past, *, past_mask_S, positions_L) -> (hidden_LE, KeyValues of
        these tokens). `past` is read and not written: the caller stores the new ones.
    """

    config: ModelConfig
    hidden: Callable[..., Float[jax.Array, "L E"]]
    logits: Callable[..., Float[jax.Array, "T V"]]
    prefill: Callable[..., tuple[Float[jax.Array, "L E"], layers.KeyValues]]
    extend: Callable[..., tuple[Float[jax.Array, "L E"], layers.KeyValues]]


def abstract(
    config: ModelConfig, lora_config: LoRAConfig | None, dtype: Any = jnp.float32
) -> tuple[GraphDef, Tree, Tree]:
    """Returns the result of `create` with shapes in place of arrays; nothing is allocated."""
    modules = ARCHITECTURES[config.model_type].modules
    definition, *trees = _define(config, lora_config, modules, dtype)
    lora, base = (jax.tree.map(lambda leaf: leaf, tree) for tree in trees)  # the caller's own
    if lora_config is not None:
        linears = {name for name, leaves in base["layers"].items() if "kernel" in leaves}
        unknown = sorted(set(lora_config.targets) - linears)
        if unknown:
            kind, known = config.model_type, sorted(linears)
            raise refused("lora_targets", kind=kind, known=known, got=unknown)
    return GraphDef(config, lora_config, definition), lora, base


@functools.lru_cache(maxsize=64)  # a run reads every adapter for itself
def _define(
    config: ModelConfig, lora_config: LoRAConfig | None, modules: Any, dtype: Any
) -> tuple[Any, Tree, Tree]:
    block, norm = modules
    module = nnx.eval_shape(lambda: layers.CausalLM(config, lora_config, block, norm, dtype=dtype))
    # The specific filter first: LoRAParam is also a Param, and the first match takes the leaf.
    definition, lora_state, base_state = nnx.split(module, LoRAParam, ...)  # type: ignore[misc]
    return definition, nnx.to_pure_dict(lora_state), nnx.to_pure_dict(base_state)


def init_lora(graphdef: GraphDef, *, key: jax.Array) -> Tree:
    """Returns a fresh adapter for a model, {} if it has none.

    Factor A is uniform in +-1 / sqrt(in) and B is zero, as in PEFT. The adapter changes no output,
    and the gradient of A is zero until B has moved. Beyond a layer's own rank A is zero too and
    both stay zero.
    """
    _, shapes, _ = abstract(graphdef.config, graphdef.lora_config)
    lora = layers.init_weights(shapes, key=key, initializer_range=0.0)
    ranks = graphdef.lora_config.ranks() if graphdef.lora_config else {}
    for name, ranks_NL in ranks.items():
        factors = lora["layers"][name]
        is_own_NLR = np.arange(factors["a"].shape[-1]) < np.array(ranks_NL)[:, None]
        factors["a"] = factors["a"] * is_own_NLR[:, None, :].astype(np.float32)
    return lora


def create(
    config: ModelConfig, lora_config: LoRAConfig | None, *, key: jax.Array, dtype: Any = jnp.float32
) -> tuple[GraphDef, Tree, Tree]:
    """Returns a model with random weights: (graphdef, lora, base).

    Kernels and embeddings are normal with the config's `initializer_range`, biases 0 and norms 1,
    as Hugging Face starts these models. The adapter is as in `init_lora`, {} without its settings.
    The dtype is the base's.
    """
    graphdef, _, base = abstract(config, lora_config, dtype)
    base_key, lora_key = jax.random.split(key)
    base = layers.init_weights(base, key=base_key, initializer_range=config.initializer_range)
    return graphdef, init_lora(graphdef, key=lora_key), base


def count_parameters(tree: Tree) -> int:
    """Returns the number of scalars in a tree of arrays or shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


@functools.cache
def bind(
    graphdef: GraphDef, *, remat: bool = False, attention: layers.AttentionKind | None = None
) -> Decoder:
    """Returns the model's pure functions.

    Arguments given alike give the same object, so functions jitted over it are compiled once.

    Args:
      graphdef: From `create`, `abstract` or a checkpoint.
      remat: Gradient checkpointing: each block's activations are recomputed in the backward pass.
        The results are the same; memory falls from all layers' activations to one layer's.
      attention: The implementation of `jax.nn.dot_product_attention`; None chooses the fastest, and
        on a CPU `row_attention`, which has no forward-mode derivative: "xla" has.
        "cudnn" needs 16-bit weights on an NVIDIA GPU and serves rows without a mask.
    """
    merge: Any = functools.partial(nnx.merge, graphdef.definition)

    def run(
        lora: Tree,
        base: Tree,
        tokens_L: Int[Array, " L"],
        *,
        mask_L: Bool[Array, " L"] | None = None,
        positions_L: Int[Array, " L"] | None = None,
        **options: Any,
    ) -> Any:
        if positions_L is None:
            positions_L = _count_positions(tokens_L, mask_L)
        options = {"mask_L": mask_L, "positions_L": positions_L, "kind": attention, **options}
        return merge(lora, base).run(tokens_L, **options)

    def hidden(*inputs: Any, **options: Any) -> Float[jax.Array, "L E"]:
        return run(*inputs, remat=remat, **options)[0]

    def extend(
        lora: Tree, base: Tree, tokens_L: Int[Array, " L"], past: layers.KeyValues, **options: Any
    ) -> tuple[Float[jax.Array, "L E"], layers.KeyValues]:
        return merge(lora, base).run(tokens_L, past=past, keep=True, **options)

    def logits(lora: Tree, base: Tree, hidden_TE: Float[Array, "T E"]) -> Float[jax.Array, "T V"]:
        return merge(lora, base).logits(hidden_TE)

    return Decoder(graphdef.config, hidden, logits, functools.partial(run, keep=True), extend)


def _count_positions(
    tokens_L: Int[Array, " L"], mask_L: Bool[Array, " L"] | None
) -> Int[jax.Array, " L"]:
    """Returns each token's number among the real tokens from 0; 0 on left padding."""
    if mask_L is None:
        return jnp.arange(tokens_L.shape[0])
    return jnp.maximum(jnp.cumsum(mask_L.astype(jnp.int32)) - 1, 0)
