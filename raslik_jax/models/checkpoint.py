"""Checkpoints in and out: Hugging Face models, hashes, merging.

Loading is strict: every tensor of the file is used once and every leaf of the model is filled once.
Otherwise it fails and names every misfit (`key_map`). Tensors are read one at a time and cast
before they enter the stacked leaf. So the memory stays near the size of the model in the requested
dtype. Writing is atomic: a directory appears whole or not at all (`storage`).
"""

import contextlib
import functools
import hashlib
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from raslik_jax.base import files
from raslik_jax.base.axes import Tree
from raslik_jax.base.messages import shown
from raslik_jax.data.tokens import tokenization
from raslik_jax.data.words import refused
from raslik_jax.models import decoder as decoders
from raslik_jax.models import key_map, mistaken, quantize, storage
from raslik_jax.models.architecture import Architecture, ModelConfig
from raslik_jax.models.lora import LoRAConfig
from raslik_jax.models.storage import resolve_folder
from raslik_jax.parallel import meshes, processes

# Fields of generation_config.json that transformers applies to greedy answers, and their neutral
# values (transformers/generation/utils.py at 5.23).
_PROCESSORS = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_new_tokens": 0,
    "min_length": 0,
    "num_beams": 1,
    "guidance_scale": 1.0,
    "sequence_bias": {},
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "watermarking_config": None,
    "bad_words_ids": [],
    "stop_strings": [],
}


class LoadedModel(NamedTuple):
    """A decoder from a checkpoint.

    graphdef: The argument of `decoder.bind`. lora: A fresh adapter, only its shapes without a key;
    {} if none was asked for. base: The frozen weights, quantized if asked for. identity: 32 hex
    digits of the weights as stored, the same for any dtype that they are loaded in.
    """

    graphdef: decoders.GraphDef
    lora: Tree
    base: Tree
    identity: str


def read_config(folder: str | os.PathLike[str]) -> decoders.ModelConfig:
    """Returns the settings of the decoder in a checkpoint directory."""
    config: decoders.ModelConfig = read_settings(folder, decoders.ARCHITECTURES, "decoders")[0]
    return config


def read_settings(
    folder: str | os.PathLike[str], known: Mapping[str, Architecture], kind: str
) -> tuple[Any, dict[str, Any]]:
    """Returns the settings in the config.json of a known architecture and its fields."""
    path = pathlib.Path(folder) / "config.json"
    if not path.exists():
        raise mistaken.no_checkpoint(path.parent, path.name)
    fields = storage.read_json(path, {"model_type": str})
    if fields["model_type"] not in known:
        must = f"must be one of the {kind} {sorted(known)}, got {shown(fields['model_type'])}"
        raise ValueError(f"model_type in {path} {must}: point to another checkpoint")
    plain = mistaken.plain_fields(path, fields)
    with _naming(path):
        return known[fields["model_type"]].config.from_hf(plain), fields


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Iterator[None]:
    """Puts the file's name in front of a ValueError from inside."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def check_vocabulary(
    config: ModelConfig,
    num_tokens: int,
    *,
    origin: str,
    mend: str = "use the model's own tokenizer",
) -> None:
    """Raises a ValueError if a tokenizer has ids without an embedding in the model.

    More rows than tokens are usual: Pythia pads 50,277 entries to 50,304 rows. `num_tokens` is the
    tokenizer's largest id + 1. `origin` names it.
    """
    if num_tokens > config.vocab_size:
        got = {"most": config.vocab_size, "got": num_tokens}
        raise refused("vocabulary_size", **got, origin=origin, mend=mend)


def check_own_tokenizer(folder: pathlib.Path, config: ModelConfig) -> None:
    path = folder / "tokenizer.json"
    if path.is_file():
        ids = tokenization.read_backend(path)[1].get_vocab(with_added_tokens=True).values()
        check_vocabulary(config, max(ids, default=-1) + 1, origin=str(path))


def read_end_ids(folder: str | os.PathLike[str]) -> tuple[int, ...]:
    """Returns the ids that end an answer of a checkpoint's model, as transformers decodes.

    They come from generation_config.json, otherwise from config.json. There may be none.
    """
    for name in (storage.GENERATION, "config.json"):
        path = pathlib.Path(folder) / name
        if path.is_file():
            ids = storage.read_json(path, {"eos_token_id?": (int, [int], None)}).get("eos_token_id")
            if ids is not None:
                return (ids,) if isinstance(ids, int) else tuple(ids)
    return ()


def describe_generation(folder: str | os.PathLike[str]) -> str:
    """Returns which settings of generation change greedy answers and are not read, if any."""
    path = pathlib.Path(folder) / storage.GENERATION
    path = path if path.is_file() else path.with_name("config.json")  # as transformers
    fields = storage.read_json(path) if path.is_file() else {}
    found = [
        f"{n} {fields[n]}" for n, off in _PROCESSORS.items() if fields.get(n) not in (None, off)
    ]
    if not found:
        return ""
    return f"{path.name} has {', '.join(found)}: answers of models here are made without it"


def check_weights(folder: pathlib.Path) -> None:
    """Refuses a decoder's checkpoint as `load_model` does, by the headers of its files."""
    config = read_config(folder)
    check_own_tokenizer(folder, config)
    _open_fitting(folder, config, decoders.abstract(config, None)[2])


def _open_fitting(
    folder: pathlib.Path, config: decoders.ModelConfig, shapes: Tree
) -> tuple[dict[str, key_map.Slot], storage.Tensors]:
    """Returns the slots of a decoder's base and the tensors that fill each of them."""
    architecture = decoders.ARCHITECTURES[config.model_type]
    slots = key_map.plan(architecture.key_map, shapes)
    if not storage.has_weights(folder):
        raise mistaken.no_checkpoint(folder, storage.WEIGHTS)
    tensors = storage.open_tensors(folder, auto="AutoModelForCausalLM", rename=config.full_key)
    mistaken.check_tensors(tensors)
    inert = architecture.buffers
    if config.tie_word_embeddings:
        # A tied checkpoint may repeat its embedding as the head, but not contradict it.
        head, embedding = (f"{architecture.key_map[part]}.weight" for part in ("head", "embed"))
        inert += "|" + re.escape(head)
        if {head, embedding} <= set(tensors.files) and not tensors.is_same(head, embedding):
            raise refused("tied_head", file=tensors.files[head], head=head, other=embedding)
    key_map.check_fit(slots, tensors, f"the {config.model_type} of {folder / 'config.json'}", inert)
    return slots, tensors


def load_model(
    name: str | os.PathLike[str],
    *,
    dtype: Any,
    lora_config: LoRAConfig | None = None,
    key: jax.Array | None = None,
    revision: str | None = None,
    base_format: str | None = None,
    double_quant: bool = False,
    parts: int = 1,
    whole: bool = True,
) -> LoadedModel:
    """Returns a decoder from a Hugging Face checkpoint, or names every misfit.

    Host memory peaks near the size of the result; with an accelerator, near the largest leaf.

    Args:
      name: A directory, or "owner/model" on the hub.
      dtype: The dtype of the base (of what stays unquantized, if it is quantized).
      lora_config: Gives the model a fresh adapter.
      key: Draws the fresh adapter; without it `lora` holds shapes only, for a caller that brings
        its own (`decoder.init_lora`, `load_adapter`).
      revision: Branch, tag or commit on the hub.
      base_format: "int8" or "nf4" packs the linear kernels, layer by layer as they are read.
      double_quant: nf4 only: the scales in eight bits as well.
      parts: Number of parts into which large leaves of the base are split over the mesh.
      whole: If not, `base` has shapes only. The identity is the same.
    """
    folder = resolve_folder(name, revision=revision)
    config = read_config(folder)
    check_own_tokenizer(folder, config)
    graphdef, lora, shapes = decoders.abstract(config, lora_config, dtype)
    options: dict[str, Any] = {"format": base_format, "double_quant": double_quant}
    pack = functools.partial(quantize.quantize_kernel, **options) if base_format else None
    slots, tensors = _open_fitting(folder, config, shapes)
    if processes.count() > 1:
        tensors.check_shared()
    base = shapes
    if whole:
        base = key_map.fill(shapes, slots, tensors, pack and jax.jit(pack), num_parts=parts)
    identity = tensors.identity(slots, is_shared=parts > 1)
    if lora_config is not None and key is not None:
        lora = decoders.init_lora(graphdef, key=key)
    return LoadedModel(graphdef, lora, base, identity)


def save_model(
    folder: str | os.PathLike[str],
    config: decoders.ModelConfig,
    weights: Tree,
    *,
    shard_bytes: int = storage.SHARD_BYTES,
) -> None:
    """Writes a decoder as a Hugging Face checkpoint that transformers loads.

    A model that also reads images is written as its text part, a checkpoint of its own kind.

    Args:
      folder: A directory that is not there yet or empty.
      config: The model's settings.
      weights: Not quantized, written in their own dtype.
      shard_bytes: Weights beyond this size go into several files with an index.
    """
    config = config.text_part
    shapes, names = decoders.abstract(config, None)[2], decoders.ARCHITECTURES[config.model_type]
    key_map.check_tree(weights, shapes, f"a {config.model_type} of this config")
    dtype = np.dtype(weights["embed"]["embedding"].dtype).name
    with storage.new_folder(folder) as partial:
        key_map.write_weights(partial, key_map.plan(names.key_map, weights), weights, shard_bytes)
        fields = {**config.to_hf(), "dtype": dtype, "torch_dtype": dtype}
        files.write_json(partial / "config.json", fields)


def merge(lora: Tree, base: Tree, lora_config: LoRAConfig) -> Tree:
    """Returns the base with the adapter folded into its kernels: W + scale A B.

    The sum is float32, layer by layer, and is rounded once to the kernel's dtype. The kernels must
    not be quantized. The other leaves are the same arrays as in `base`.
    """
    stacked, scales = dict(base["layers"]), lora_config.scales()
    for name, factors in lora["layers"].items():
        kernel = stacked[name]["kernel"]
        if quantize.is_quantized(kernel):
            raise refused("merge_quantized", name=name)
        scale_of_layer = scales.get(name, (lora_config.scale,) * len(kernel))
        folded = _fold(kernel, factors["a"], factors["b"], jnp.array(scale_of_layer, jnp.float32))
        stacked[name] = {**stacked[name], "kernel": folded}
    return {**base, "layers": stacked}


@jax.jit
def _fold(kernel: Any, a: Any, b: Any, scale: Any) -> Any:
    def fold_layer(layer: tuple[Any, Any, Any, Any]) -> Any:
        kernel_IO, a_IR, b_RO, scale = layer
        product_IO = jnp.matmul(a_IR, b_RO, precision=jax.lax.Precision.HIGHEST)
        return (kernel_IO.astype(jnp.float32) + scale * product_IO).astype(kernel_IO.dtype)

    # A map, not a vmap: one layer's float32 copies at a time.
    return jax.lax.map(fold_layer, (kernel, a, b, scale))


def base_hash(base: Tree) -> str:
    """Returns the hex sha256 of the base weights: their paths, dtypes, shapes and bytes."""
    return _tree_hash(base, "base")


def adapter_hash(lora: Tree) -> str:
    """Returns the hex sha256 of an adapter: its paths, dtypes, shapes and bytes."""
    return _tree_hash(lora, "adapter")


def _tree_hash(tree: Tree, kind: str) -> str:
    digest = hashlib.sha256(kind.encode())
    leaves = {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    for path in sorted(leaves):
        leaf = leaves[path]
        digest.update(f"{path} {np.dtype(leaf.dtype).name} {leaf.shape} ".encode())
        # Leaves with parts in other processes come a layer at a time. The rest is here already.
        is_layered = path.startswith("['layers']") and meshes.is_elsewhere(leaf)
        for row in range(len(leaf)) if is_layered else (...,):
            array = np.ascontiguousarray(meshes.fetch(leaf[row] if is_layered else leaf))
            digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
