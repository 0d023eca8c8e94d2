"""Which tensor of a Hugging Face file is which leaf of our trees, in both directions.

One table per architecture (`MODULES`) pairs our modules with Hugging Face's; loading, saving and
adapters all read it. Every tensor is used once and every leaf filled once, or `check_fit` names all
that does not fit.
"""

import math
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from raslik_jax import files
from raslik_jax.axes import Tree
from raslik_jax.messages import some_of
from raslik_jax.models import quantize, storage

_NEOX_LAYER = "gpt_neox.layers.{layer}."
_LLAMA_LAYER = "model.layers.{layer}."
_ATTENTION = {name: f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
_GATED_MLP = {name: f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")}
_NORMS = ("input_layernorm", "post_attention_layernorm", "post_feedforward_layernorm")
_BERT_LAYER = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention_output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "mlp_norm": "output.LayerNorm",
}


def _stack(prefix: str, names: Mapping[str, str]) -> dict[str, str]:
    return {f"layers/{ours}": prefix + theirs for ours, theirs in names.items()}


def _llama_like(extra: Mapping[str, str]) -> dict[str, str]:
    return {
        "embed": "model.embed_tokens",
        **_stack(
            _LLAMA_LAYER,
            {**_ATTENTION, **_GATED_MLP, **dict(zip(_NORMS, _NORMS, strict=True)), **extra},
        ),
        "final_norm": "model.norm",
        "head": "lm_head",
    }


def _bert_like(prefix: str, head: Mapping[str, str]) -> dict[str, str]:
    return {
        "word": f"{prefix}.embeddings.word_embeddings",
        "position": f"{prefix}.embeddings.position_embeddings",
        "type": f"{prefix}.embeddings.token_type_embeddings",
        "embed_norm": f"{prefix}.embeddings.LayerNorm",
        **_stack(f"{prefix}.encoder.layer.{{layer}}.", _BERT_LAYER),
        **head,
    }


# Our module -> the Hugging Face module. A module that a config does without (a tied head, a norm
# that only one of the architectures has) is simply never looked up.
MODULES: dict[str, dict[str, str]] = {
    "gpt_neox": {
        "embed": "gpt_neox.embed_in",
        **_stack(
            _NEOX_LAYER,
            {
                "input_layernorm": "input_layernorm",
                "post_attention_layernorm": "post_attention_layernorm",
                "query_key_value": "attention.query_key_value",
                "dense": "attention.dense",
                "dense_h_to_4h": "mlp.dense_h_to_4h",
                "dense_4h_to_h": "mlp.dense_4h_to_h",
            },
        ),
        "final_norm": "gpt_neox.final_layer_norm",
        "head": "embed_out",
    },
    "llama": _llama_like({}),
    "olmo2": _llama_like({"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}),
    "bert": _bert_like("bert", {"head_dense": "bert.pooler.dense", "head_output": "classifier"}),
    "roberta": _bert_like(
        "roberta", {"head_dense": "classifier.dense", "head_output": "classifier.out_proj"}
    ),
}
# Our leaf -> the Hugging Face parameter, and whether it is stored transposed ([out, in]).
PARAMETERS = {
    "kernel": ("weight", True),
    "embedding": ("weight", False),
    "scale": ("weight", False),
    "bias": ("bias", False),
    "a": ("lora_A.weight", True),
    "b": ("lora_B.weight", True),
}
# Buffers that older releases of transformers wrote beside the weights; they follow from the config.
BUFFERS = {
    "gpt_neox": r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
    "llama": r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
    "olmo2": r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
    # The pretraining heads of an encoder, and the pooler where no head is asked for.
    "bert": r"bert\.(embeddings\.position_ids|pooler\.dense\.(weight|bias))|cls\..*",
    "roberta": r"roberta\.(embeddings\.position_ids|pooler\.dense\.(weight|bias))|lm_head\..*",
}


class Slot(NamedTuple):
    """One tensor of a file: `path` is our leaf, `layer` its row there, None if not stacked."""

    path: tuple[str, ...]
    layer: int | None
    shape: tuple[int, ...]
    is_transposed: bool


def flatten(tree: Tree) -> dict[tuple[str, ...], Any]:
    """Returns the leaves of nested dicts by path; a quantized kernel is one leaf."""
    pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=quantize.is_quantized)
    return {tuple(key.key for key in path): leaf for path, leaf in pairs}


def unflatten(leaves: Mapping[tuple[str, ...], Any]) -> Tree:
    """Returns the nested dicts of leaves by path, the inverse of `flatten`."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = leaf
    return tree


def plan(model_type: str, shapes: Tree, *, prefix: str = "") -> dict[str, Slot]:
    """Returns the Hugging Face key of every tensor of a tree, leaf by leaf, layer by layer."""
    slots: dict[str, Slot] = {}
    for path, leaf in flatten(shapes).items():
        module = prefix + MODULES[model_type]["/".join(path[:-1])]
        parameter, is_transposed = PARAMETERS[path[-1]]
        is_stacked = path[0] == "layers"
        shape = tuple(leaf.shape[1:] if is_stacked else leaf.shape)
        for layer in range(leaf.shape[0]) if is_stacked else (None,):
            key = f"{module.format(layer=layer)}.{parameter}"
            slots[key] = Slot(path, layer, shape[::-1] if is_transposed else shape, is_transposed)
    return slots


def check_fit(slots: Mapping[str, Slot], tensors: storage.Tensors, what: str, inert: str) -> None:
    """Raises one ValueError that names every tensor that is missing, unexpected or ill-shaped."""
    present = tensors.keys()
    missing = [key for key in slots if key not in present]
    unexpected = sorted(
        tensors.label(key) for key in present - set(slots) if not re.fullmatch(inert, key)
    )
    shared = [key for key in slots if key in present]
    wrong = [
        f"{tensors.label(key)} is {list(tensors.shape(key))}, not {list(slot.shape)}"
        for key, slot in slots.items()
        if key in present and tensors.shape(key) != slot.shape
    ]
    kinds = [
        f"{tensors.label(key)} is {tensors.dtype(key)}"
        for key in shared
        if tensors.dtype(key) not in storage.FLOATS.values()
    ]
    _refuse_misfit(
        what,
        {
            "missing": missing,
            "unexpected": unexpected,
            "of another shape": wrong,
            "no floating point weights": kinds,
        },
    )


def _aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns an uninitialized array that JAX takes over on a CPU without a copy."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(num_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


def fill(
    shapes: Tree,
    slots: Mapping[str, Slot],
    tensors: storage.Tensors,
    quantize: Callable[[Any], Any] | None = None,
) -> Tree:
    """Returns the tree with every leaf read from its tensors, in the dtype of its shape.

    Args:
      shapes: Abstract leaves.
      slots: From `plan`, all of them in `tensors`.
      tensors: The open files.
      quantize: Packs the linear kernels, called with one layer's at a time; on a stack of layers
        it must do the same to each.

    Raises:
      ValueError: Tensors with NaN or infinity, or with values beyond the range of the dtype.
    """
    keys: dict[tuple[str, ...], list[str]] = {}
    for key, slot in slots.items():
        keys.setdefault(slot.path, []).append(key)
    leaves: dict[tuple[str, ...], Any] = {}
    broken: list[str] = []
    for path, shape in flatten(shapes).items():
        pack = quantize if path[0] == "layers" and path[-1] == "kernel" else None
        template = shape if pack is None else jax.eval_shape(pack, shape)
        buffers = jax.tree.map(lambda leaf: _aligned_empty(leaf.shape, leaf.dtype), template)
        for key in keys[path]:
            slot, tensor = slots[key], tensors.read(key)
            tensor = tensor.T if slot.is_transposed else tensor
            parts = jax.tree.leaves(tensor if pack is None else pack(tensor))
            row: Any = ... if slot.layer is None else slot.layer
            is_sound = storage.is_finite(tensor)
            for buffer, part in zip(jax.tree.leaves(buffers), parts, strict=True):
                with np.errstate(over="ignore", invalid="ignore"):
                    buffer[row] = part
                if np.issubdtype(buffer.dtype, np.floating) and buffer.dtype != tensor.dtype:
                    is_sound = is_sound and storage.is_finite(buffer[row])
            if not is_sound:
                broken.append(tensors.label(key))
        leaves[path] = jax.device_put(buffers)
    if broken:
        folder = next(iter(tensors.files.values())).parent
        raise ValueError(
            f"{folder}: weights must be finite, got NaN, infinity or values beyond the dtype in"
            f" {some_of(broken, 3, quoted=False)}; fetch the checkpoint again or load it in a wider"
            " dtype"
        )
    return unflatten(leaves)


def check_tree(tree: Tree, shapes: Tree, what: str) -> None:
    """Raises a ValueError unless the tree has exactly these leaves and shapes."""
    given, expected = flatten(tree), flatten(shapes)
    wrong = [
        f"{'/'.join(path)} is {list(leaf.shape)}, not {list(expected[path].shape)}"
        for path, leaf in given.items()
        if path in expected and tuple(leaf.shape) != tuple(expected[path].shape)
    ]
    _refuse_misfit(
        what,
        {
            "missing": ["/".join(path) for path in expected if path not in given],
            "unexpected": ["/".join(path) for path in given if path not in expected],
            "of another shape": wrong,
        },
    )


def _refuse_misfit(what: str, problems: Mapping[str, Sequence[str]]) -> None:
    """Raises a ValueError that names the tensors of every kind of problem, if there are any."""
    found = [
        f"{title} {some_of(names, 3, quoted=False)}" for title, names in problems.items() if names
    ]
    if found:
        raise ValueError(f"the weights do not fit {what}: {'; '.join(found)}; match the two")


def write_weights(
    folder: pathlib.Path,
    slots: Mapping[str, Slot],
    leaves: Mapping[tuple[str, ...], Any],
    shard_bytes: int,
) -> None:
    """Writes the tensors, a shard in memory at a time."""
    sizes = {
        key: math.prod(slot.shape) * np.dtype(leaves[slot.path].dtype).itemsize
        for key, slot in slots.items()
    }
    shards: list[list[str]] = [[]]
    filled = 0
    for key, size in sizes.items():
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(key)
        filled += size
    weight_map: dict[str, str] = {}
    host: tuple[tuple[str, ...], np.ndarray] | None = None
    for number, keys in enumerate(shards, 1):
        file = (
            storage.WEIGHTS
            if len(shards) == 1
            else f"model-{number:05}-of-{len(shards):05}.safetensors"
        )
        tensors = {}
        for key in keys:
            slot = slots[key]
            if host is None or host[0] != slot.path:
                host = slot.path, np.asarray(leaves[slot.path])
            tensor = host[1] if slot.layer is None else host[1][slot.layer]
            tensors[key] = np.ascontiguousarray(tensor.T if slot.is_transposed else tensor)
            weight_map[key] = file
        storage.write_tensors(folder / file, tensors)
    if len(shards) > 1:
        files.write_json(
            folder / storage.INDEX,
            {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map},
        )
