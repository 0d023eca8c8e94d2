"""Checkpoints in and out: Hugging Face models and encoders, PEFT adapters, hashes, merging.

Loading is strict: every tensor of the file is used once, every leaf of the model is filled once, or
it fails and names all that does not fit (`key_map`). Tensors are read one at a time and cast on
their way into the stacked leaf, so memory stays near the size of the model in the dtype asked for.
Writing is atomic: a directory appears whole or not at all (`storage`).
"""

import contextlib
import dataclasses
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

from raslik_jax import files
from raslik_jax.axes import Tree
from raslik_jax.data import tokenization
from raslik_jax.messages import shown, some_of
from raslik_jax.models import decoder as decoders
from raslik_jax.models import encoder as encoders
from raslik_jax.models import key_map, layers, quantize, storage
from raslik_jax.models.architecture import Architecture, ModelConfig
from raslik_jax.models.lora import LoRAConfig
from raslik_jax.models.storage import resolve_folder

_ADAPTER, _ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
# In the header of an adapter of ours: the identity of its base.
_BASE = "base identity"
# How an encoder pools, in the layout of sentence-transformers.
_POOLING = pathlib.Path("1_Pooling", "config.json")
_POOLINGS = {"cls_token": "cls", "mean_tokens": "mean"}


class LoadedModel(NamedTuple):
    """A decoder from a checkpoint.

    graphdef: What `decoder.bind` takes.
    lora: A fresh adapter, only its shapes without a key; {} where none was asked for.
    base: The frozen weights, quantized where asked for.
    identity: 32 hex digits that stand for the weights as stored, whatever they were loaded as.
    """

    graphdef: decoders.GraphDef
    lora: Tree
    base: Tree
    identity: str


class LoadedEncoder(NamedTuple):
    """An encoder from a checkpoint: what `encoder.bind_encoder` takes, and its weights."""

    config: encoders.EncoderConfig
    weights: Tree


def read_config(folder: str | os.PathLike[str]) -> decoders.ModelConfig:
    """Returns the settings of the decoder in a checkpoint directory."""
    config: decoders.ModelConfig = _read_config(folder, decoders.ARCHITECTURES, "decoders")[0]
    return config


def _read_config(
    folder: str | os.PathLike[str], known: Mapping[str, Architecture], kind: str
) -> tuple[Any, dict[str, Any]]:
    """Returns the settings in the config.json of a known architecture, and its fields."""
    path = pathlib.Path(folder) / "config.json"
    fields = storage.read_json(path, {"model_type": str})
    if fields["model_type"] not in known:
        must = f"must be one of the {kind} {sorted(known)}, got {shown(fields['model_type'])}"
        raise ValueError(f"model_type in {path} {must}: point to another checkpoint")
    with _naming(path):
        return known[fields["model_type"]].config.from_hf(fields), fields


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Iterator[None]:
    """Puts the file's name in front of a ValueError from inside."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def check_vocabulary(config: ModelConfig, num_tokens: int, *, origin: str) -> None:
    """Raises a ValueError where a tokenizer has ids that the model has no embedding for.

    More rows than tokens are usual: Pythia pads 50,277 entries to 50,304 rows. `num_tokens` is the
    tokenizer's largest id + 1, and `origin` names it.
    """
    if num_tokens > config.vocab_size:
        raise ValueError(
            f"the tokenizer must have at most {config.vocab_size} entries, the rows of the model's"
            f" embedding, got {shown(num_tokens)} in {origin}: use the model's own tokenizer"
        )


def _check_own_tokenizer(folder: pathlib.Path, config: ModelConfig) -> None:
    path = folder / "tokenizer.json"
    if path.is_file():
        ids = tokenization.read_backend(path)[1].get_vocab(with_added_tokens=True).values()
        check_vocabulary(config, max(ids, default=-1) + 1, origin=str(path))


def read_end_ids(folder: str | os.PathLike[str]) -> tuple[int, ...]:
    """Returns the ids that end an answer of a checkpoint's model, as transformers decodes with it.

    Those of generation_config.json, or where it names none those of config.json; perhaps none.
    """
    for name in (storage.GENERATION, "config.json"):
        path = pathlib.Path(folder) / name
        if path.is_file():
            ids = storage.read_json(path, {"eos_token_id?": (int, [int], None)}).get("eos_token_id")
            if ids is not None:
                return (ids,) if isinstance(ids, int) else tuple(ids)
    return ()


def load_model(
    name: str | os.PathLike[str],
    *,
    dtype: Any,
    lora_config: LoRAConfig | None = None,
    key: jax.Array | None = None,
    revision: str | None = None,
    base_format: str | None = None,
    double_quant: bool = False,
) -> LoadedModel:
    """Returns a decoder from a Hugging Face checkpoint, or names all that does not fit.

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
    """
    folder = resolve_folder(name, revision=revision)
    config = read_config(folder)
    _check_own_tokenizer(folder, config)
    graphdef, lora, shapes = decoders.abstract(config, lora_config, dtype)
    architecture = decoders.ARCHITECTURES[config.model_type]
    slots = key_map.plan(architecture.key_map, shapes)
    options: dict[str, Any] = {"format": base_format, "double_quant": double_quant}
    pack = functools.partial(quantize.quantize_kernel, **options) if base_format else None
    with contextlib.ExitStack() as stack:
        tensors = storage.open_tensors(folder, stack, auto="AutoModelForCausalLM")
        inert = architecture.buffers
        if config.tie_word_embeddings:
            # A tied checkpoint may repeat its embedding as the head, but not contradict it.
            head, embedding = (f"{architecture.key_map[part]}.weight" for part in ("head", "embed"))
            inert += "|" + re.escape(head)
            if {head, embedding} <= set(tensors.files):
                if not np.array_equal(tensors.read(head), tensors.read(embedding)):
                    raise ValueError(
                        f"{tensors.files[head]}: {head} differs from {embedding} although"
                        " config.json ties them; correct tie_word_embeddings"
                    )
        what = f"the {config.model_type} of {folder / 'config.json'}"
        key_map.check_fit(slots, tensors, what, inert)
        base = key_map.fill(shapes, slots, tensors, pack and jax.jit(pack))
        identity = tensors.identity(slots)
    if lora_config is not None and key is not None:
        lora = decoders.init_lora(graphdef, key=key)
    return LoadedModel(graphdef, lora, base, identity)


def save_model(
    folder: str | os.PathLike[str],
    config: decoders.ModelConfig | encoders.EncoderConfig,
    weights: Tree,
    *,
    shard_bytes: int = storage.SHARD_BYTES,
) -> None:
    """Writes a decoder or an encoder as a Hugging Face checkpoint that transformers loads.

    An encoder's pooling goes with it, as sentence-transformers has it.

    Args:
      folder: A directory that is not there yet or empty.
      config: The model's settings.
      weights: Not quantized, written in their own dtype.
      shard_bytes: Weights beyond this size go into several files with an index.
    """
    if isinstance(config, encoders.EncoderConfig):
        shapes, table = encoders.abstract_encoder(config, dtype=jnp.float32), "word"
    else:
        (_, _, shapes), table = decoders.abstract(config, None), "embed"
    key_map.check_tree(weights, shapes, f"a {config.model_type} of this config")
    names = {**decoders.ARCHITECTURES, **encoders.ENCODERS}[config.model_type].key_map
    dtype = np.dtype(weights[table]["embedding"].dtype).name
    pooling = getattr(config, "pooling", None)
    with storage.new_folder(folder) as partial:
        key_map.write_weights(partial, key_map.plan(names, weights), weights, shard_bytes)
        fields = {**config.to_hf(), "dtype": dtype, "torch_dtype": dtype}
        files.write_json(partial / "config.json", fields)
        if pooling is not None:
            modes = {f"pooling_mode_{name}": pooling == _POOLINGS[name] for name in _POOLINGS}
            (partial / _POOLING).parent.mkdir()
            width = {"word_embedding_dimension": config.hidden_size}
            files.write_json(partial / _POOLING, width | modes)


def load_encoder(
    name: str | os.PathLike[str],
    *,
    dtype: Any,
    pooling: str | None = None,
    num_labels: int | None = None,
    key: jax.Array | None = None,
) -> LoadedEncoder:
    """Returns a BERT or RoBERTa encoder from a Hugging Face checkpoint: (config, weights).

    Args:
      name: A directory, or "owner/model" on the hub.
      dtype: The dtype of the weights.
      pooling: "cls" or "mean"; None takes what the checkpoint says in 1_Pooling/config.json, and
        "cls" for the BGE family, which was trained so. Otherwise there are no sentence vectors.
      num_labels: Classes of the classification head; None takes the checkpoint's own head, if it
        is a sequence classifier, else none.
      key: Draws a head of `num_labels` classes where the checkpoint has none.
    """
    folder = resolve_folder(name, auto="AutoModel")
    config, fields = _read_config(folder, encoders.ENCODERS, "encoders")
    architecture = encoders.ENCODERS[config.model_type]
    names = architecture.key_map
    has_own_head = config.num_labels > 0
    config = dataclasses.replace(
        config,
        pooling=_read_pooling(folder, fields, pooling),
        num_labels=config.num_labels if num_labels is None else num_labels,
    )
    _check_own_tokenizer(folder, config)
    shapes = encoders.abstract_encoder(config, dtype=dtype)
    fresh: Tree = {}
    with contextlib.ExitStack() as stack:
        tensors = storage.open_tensors(folder, stack, auto="AutoModel", rename=config.full_key)
        if config.num_labels and not has_own_head:
            # A BERT without a classifier may still bring the pooler, its first half.
            keys = {name: f"{names[name]}.weight" for name in ("head_dense", "head_output")}
            absent = {name: shapes.pop(name) for name in keys if keys[name] not in tensors.files}
            spread = config.initializer_range
            if absent and key is None:
                raise ValueError(f"{folder} has no head for {num_labels=}: give a key to draw one")
            if key is not None:
                fresh = layers.init_weights(absent, key=key, initializer_range=spread)
        slots = key_map.plan(names, shapes)
        what = f"the {config.model_type} of {folder / 'config.json'}"
        key_map.check_fit(slots, tensors, what, architecture.buffers)
        weights = key_map.fill(shapes, slots, tensors)
    return LoadedEncoder(config, {**weights, **fresh})


def _read_pooling(folder: pathlib.Path, fields: Mapping[str, Any], asked: str | None) -> str | None:
    path, own = folder / _POOLING, None
    if path.is_file():
        on = [name for name, is_on in storage.read_json(path).items() if is_on is True]
        modes = [name for name in on if name.startswith("pooling_mode_")]
        own = _POOLINGS.get(modes[0].removeprefix("pooling_mode_")) if len(modes) == 1 else None
        if own is None:
            must = f"must set one pooling mode of {sorted(_POOLINGS)}"
            raise ValueError(f"{path} {must}, got {sorted(modes)}: use another encoder")
    elif "bge-" in str(fields.get("_name_or_path", "")).lower():
        own = "cls"
    if own is not None and asked not in (None, own):
        raise ValueError(f"{folder} was trained with pooling {own!r}, got {asked!r}; leave it out")
    return own or asked


_PEFT_PREFIX = "base_model.model."
# Fields of adapter_config.json that do not change what a finished adapter computes.
_ADAPTER_INERT = frozenset(
    """alpha auto_mapping base_model_name_or_path corda_config eva_config inference_mode
    init_lora_weights lora_alpha lora_dropout loftq_config megatron_core peft_type peft_version
    qalora_group_size r revision runtime_config target_modules task_type""".split()
)
# Starts that keep the base as it was; the others subtract the adapter's start from it.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")


def find_adapter(name: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the directory of a PEFT adapter, fetched from the hub if need be, or refuses it."""
    folder = resolve_folder(name, weights=_ADAPTER)
    lacking = [file for file in (_ADAPTER_CONFIG, _ADAPTER) if not (folder / file).is_file()]
    if not lacking:
        return folder
    origin = shown(str(folder), 160)
    if lacking == [_ADAPTER] and (folder / "adapter_model.bin").is_file():
        got = "got pickled weights only, which can run code: load it with peft and save it again"
        raise ValueError(f"the adapter {origin} must have safetensors, {got}")
    must = f"must hold {_ADAPTER_CONFIG} and {_ADAPTER}, as peft saves them"
    raise ValueError(f"the adapter {origin} {must}, it lacks {' and '.join(lacking)}: name another")


def read_adapter_config(folder: str | os.PathLike[str]) -> LoRAConfig:
    """Returns the settings of the PEFT adapter in a directory.

    What changes what the adapter computes in a way that is not supported is refused by name: DoRA,
    rank-stabilized scaling, rank patterns, biases, modules saved whole, targets as a pattern, ...
    """
    path = pathlib.Path(folder) / _ADAPTER_CONFIG
    shape = {"peft_type": str, "r": int, "lora_alpha": float, "lora_dropout?": (float, None)}
    fields = storage.read_json(path, shape)
    kind = fields["peft_type"]
    if kind != "LORA":
        raise ValueError(f"peft_type in {path} must be 'LORA', got {shown(kind)}: take another")
    # PEFT grows switches; off, they are False, None or empty, and change nothing.
    active = {name: value for name, value in fields.items() if value and name not in _ADAPTER_INERT}
    if active.get("bias") == "none":
        del active["bias"]
    if fields.get("init_lora_weights") not in _PLAIN_STARTS:
        active["init_lora_weights"] = fields["init_lora_weights"]
    targets = fields.get("target_modules")
    if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
        active["target_modules"] = targets
    if active:
        settings = [f"{name}={shown(value, 40)}" for name, value in sorted(active.items())]
        raise ValueError(
            f"{path} must be a plain LoRA on named modules, {some_of(settings, 3, quoted=False)} "
            "is not supported; merge this adapter with peft and load the merged model"
        )
    with _naming(path):
        return LoRAConfig(
            rank=fields["r"],
            alpha=float(fields["lora_alpha"]),
            dropout=float(fields.get("lora_dropout") or 0.0),
            # "attention.dense" and the whole name of a module are PEFT's longer forms of "dense".
            targets=tuple({name.rsplit(".", 1)[-1] for name in fields["target_modules"]}),
        )


def load_adapter(
    folder: str | os.PathLike[str],
    config: decoders.ModelConfig,
    *,
    lora_config: LoRAConfig | None = None,
    base: str = "",
) -> Tree:
    """Returns the factors of a PEFT adapter for a decoder, float32, or names what does not fit.

    Args:
      folder: Holds adapter_config.json and adapter_model.safetensors.
      config: The decoder's settings.
      lora_config: What the adapter has to be; None takes what it is (`read_adapter_config`).
        Dropout is the trainer's business and may differ.
      base: Identity of the base that it will stand on. An adapter that `save_adapter` wrote for
        another base is refused; one from elsewhere does not say what it was trained on.
    """
    folder = pathlib.Path(folder)
    path = folder / _ADAPTER_CONFIG
    own = read_adapter_config(folder)
    if lora_config is not None:
        differing = [
            f"{name}={getattr(own, name)!r}, not {getattr(lora_config, name)!r}"
            for name in ("rank", "alpha", "targets")
            if getattr(own, name) != getattr(lora_config, name)
        ]
        if differing:
            got = "; ".join(differing)
            raise ValueError(f"{path} must be of this run's settings, got {got}: take another")
    with _naming(path):
        _, shapes, _ = decoders.abstract(config, own)
    names = decoders.ARCHITECTURES[config.model_type].key_map
    slots = key_map.plan(names, shapes, prefix=_PEFT_PREFIX)
    with contextlib.ExitStack() as stack:
        tensors = storage.Tensors([folder / _ADAPTER], stack)
        what = f"the adapter of {path} on this {config.model_type}"
        key_map.check_fit(slots, tensors, what, "")
        trained_on = tensors.metadata.get(_BASE, base)
        if base and trained_on != base:
            differ = f"the base {shown(trained_on)}, got {shown(base)}"
            raise ValueError(f"{shown(str(folder), 160)} was trained on {differ}: train it again")
        return key_map.fill(shapes, slots, tensors)


def save_adapter(
    folder: str | os.PathLike[str],
    lora: Tree,
    lora_config: LoRAConfig,
    config: decoders.ModelConfig,
    *,
    base: str = "",
    base_model: str = "",
) -> None:
    """Writes an adapter in PEFT's format, as `peft.PeftModel.from_pretrained` reads it.

    Args:
      folder: A directory that is not there yet or empty.
      lora: The factors.
      lora_config: Their settings.
      config: The settings of the decoder they belong to.
      base: Identity of the base that it was trained on, which `load_adapter` checks.
      base_model: Hub name of the base, noted for PEFT's AutoPeftModel.
    """
    _, shapes, _ = decoders.abstract(config, lora_config)
    key_map.check_tree(lora, shapes, f"an adapter of {lora_config} on this {config.model_type}")
    alpha = lora_config.alpha
    fields = {
        "base_model_name_or_path": base_model or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": lora_config.dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": lora_config.rank,
        "target_modules": list(lora_config.targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    names = decoders.ARCHITECTURES[config.model_type].key_map
    slots = key_map.plan(names, lora, prefix=_PEFT_PREFIX)
    with storage.new_folder(folder) as partial:
        tensors = key_map.tensors_of(lora, slots)
        storage.write_tensors(partial / _ADAPTER, tensors, {_BASE: base} if base else None)
        files.write_json(partial / _ADAPTER_CONFIG, fields)


def merge(lora: Tree, base: Tree, lora_config: LoRAConfig) -> Tree:
    """Returns the base with the adapter folded into its kernels: W + A B alpha / rank.

    The sum is taken in float32, layer by layer, and rounded once to the kernel's dtype, which must
    not be quantized. The other leaves are the same arrays as in `base`.
    """
    stacked = dict(base["layers"])
    for name, factors in lora["layers"].items():
        kernel = stacked[name]["kernel"]
        if quantize.is_quantized(kernel):
            raise ValueError(f"layers/{name}/kernel is quantized: merge into the original base")
        folded = _fold(kernel, factors["a"], factors["b"], scale=lora_config.scale)
        stacked[name] = {**stacked[name], "kernel": folded}
    return {**base, "layers": stacked}


@functools.partial(jax.jit, static_argnames="scale")
def _fold(kernel: Any, a: Any, b: Any, *, scale: float) -> Any:
    def fold_layer(layer: tuple[Any, Any, Any]) -> Any:
        kernel_IO, a_IR, b_RO = layer
        product_IO = jnp.matmul(a_IR, b_RO, precision=jax.lax.Precision.HIGHEST)
        return (kernel_IO.astype(jnp.float32) + scale * product_IO).astype(kernel_IO.dtype)

    # A map, not a vmap: one layer's float32 copies at a time.
    return jax.lax.map(fold_layer, (kernel, a, b))


def base_hash(base: Tree) -> str:
    """Returns the sha256, in hex, of the base weights: their paths, dtypes, shapes and bytes."""
    return _tree_hash(base, "base")


def adapter_hash(lora: Tree) -> str:
    """Returns the sha256, in hex, of an adapter: its paths, dtypes, shapes and bytes."""
    return _tree_hash(lora, "adapter")


def _tree_hash(tree: Tree, kind: str) -> str:
    digest = hashlib.sha256(kind.encode())
    leaves = {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    for path in sorted(leaves):
        array = np.ascontiguousarray(leaves[path])
        digest.update(f"{path} {array.dtype.name} {array.shape} ".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
