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
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from raslik_jax import files
from raslik_jax.axes import Tree
from raslik_jax.messages import shown, some_of
from raslik_jax.models import decoder as decoders
from raslik_jax.models import encoder as encoders
from raslik_jax.models import key_map, quantize, storage
from raslik_jax.models.lora import LoRAConfig
from raslik_jax.models.storage import resolve_folder

_ADAPTER, _ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
# In the header of an adapter of ours: the identity of its base.
_BASE = "base identity"


class LoadedModel(NamedTuple):
    """A decoder from a checkpoint.

    graphdef: What `decoder.bind` takes.
    lora: The adapter; {} where none was asked for. A fresh adapter without a key is only shapes.
    base: The frozen weights, quantized where asked for.
    identity: 32 hex digits that stand for the weights as stored, whatever dtype or quantization
      they were loaded in.
    """

    graphdef: decoders.GraphDef
    lora: Tree
    base: Tree
    identity: str


class LoadedEncoder(NamedTuple):
    """An encoder from a checkpoint: what `encoder.bind_encoder` takes, and its weights."""

    config: encoders.EncoderConfig
    weights: Tree


# models -----------------------------------------------------------------------------------------


def read_config(folder: str | os.PathLike[str]) -> decoders.ModelConfig:
    """Returns the settings of the decoder in a checkpoint directory.

    Raises:
      ValueError: config.json is absent, unreadable, of an architecture that is no decoder here, or
        has a field that is unknown, missing or contradictory.
    """
    path = pathlib.Path(folder) / "config.json"
    fields = storage.read_json(path, {"model_type": str})
    model_type = fields["model_type"]
    if model_type not in decoders.ARCHITECTURES:
        raise ValueError(
            f"model_type in {path} must be one of the decoders {sorted(decoders.ARCHITECTURES)},"
            f" got {shown(model_type)}: point to another checkpoint"
        )
    with _naming(path):
        return decoders.ARCHITECTURES[model_type][0].from_hf(fields)


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Iterator[None]:
    """Puts the file's name in front of a ValueError from inside."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def check_vocabulary(
    config: decoders.ModelConfig | encoders.EncoderConfig, num_tokens: int, *, origin: str
) -> None:
    """Raises a ValueError where a tokenizer has ids that the model has no embedding for.

    More rows than tokens are usual: Pythia pads 50,277 entries to 50,304 rows.

    Args:
      config: The model's settings.
      num_tokens: The tokenizer's largest id + 1.
      origin: Names the tokenizer in the error.
    """
    if num_tokens > config.vocab_size:
        module = {"bert": "word", "roberta": "word"}.get(config.model_type, "embed")
        key = f"{key_map.MODULES[config.model_type][module]}.weight"
        raise ValueError(
            f"the tokenizer must have at most {config.vocab_size} entries, the rows of {key}, got"
            f" {shown(num_tokens)} in {origin}: use the model's own tokenizer"
        )


def _check_own_tokenizer(folder: pathlib.Path, config: Any) -> None:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return
    shape = {
        "model": {"vocab?": (dict, list, None)},
        "added_tokens?": ([{"id": int}], None),
    }
    fields = storage.read_json(path, shape)
    vocabulary = fields["model"].get("vocab") or {}
    # Unigram models list their entries in the order of their ids, the others map them to ids.
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
    if not all(isinstance(token, int) for token in ids):
        raise ValueError(f"model.vocab in {path} must map text to integers: fetch the file again")
    ids += [token["id"] for token in fields.get("added_tokens") or []]
    check_vocabulary(config, max(ids, default=-1) + 1, origin=str(path))


def read_end_ids(folder: str | os.PathLike[str]) -> tuple[int, ...]:
    """Returns the ids that end an answer of a checkpoint's model, as transformers decodes with it.

    Those of generation_config.json, or where it names none those of config.json; perhaps none.

    Raises:
      ValueError: A file that is no JSON, or ids that are no integers.
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
    """Returns a decoder from a Hugging Face checkpoint: (graphdef, lora, base).

    Tensors are read one by one, cast, and put where they belong, so host memory peaks near the
    size of the result; with an accelerator it peaks near the largest stacked leaf.

    Args:
      name: A directory, or "owner/model" on the hub.
      dtype: The dtype of the base (of what stays unquantized, if it is quantized).
      lora_config: Gives the model a fresh adapter.
      key: Draws the fresh adapter; without it `lora` holds shapes only, for a caller that brings
        its own (`decoder.init_lora`, `load_adapter`).
      revision: Branch, tag or commit on the hub.
      base_format: "int8" or "nf4" packs the linear kernels, layer by layer as they are read.
      double_quant: nf4 only: the scales in eight bits as well.

    Raises:
      ValueError: The checkpoint is not there, damaged, pickled, of another architecture, has
        missing, unexpected, ill-shaped or non-finite weights, or a tokenizer.json with more
        entries than the embedding has rows; adapter targets that the model does not have.
    """
    folder = resolve_folder(name, revision=revision)
    config = read_config(folder)
    _check_own_tokenizer(folder, config)
    graphdef, lora, shapes = decoders.abstract(config, lora_config, dtype)
    slots = key_map.plan(config.model_type, shapes)
    pack = None
    if base_format is not None:
        pack = jax.jit(
            functools.partial(
                quantize.quantize_kernel, format=base_format, double_quant=double_quant
            )
        )
    with contextlib.ExitStack() as stack:
        tensors = storage.open_tensors(folder, stack, auto="AutoModelForCausalLM")
        inert = key_map.BUFFERS[config.model_type]
        if config.tie_word_embeddings:
            inert += "|" + re.escape(_check_tied_head(config.model_type, tensors))
        key_map.check_fit(
            slots, tensors, f"the {config.model_type} of {folder / 'config.json'}", inert
        )
        base = key_map.fill(shapes, slots, tensors, pack)
        identity = tensors.identity(slots)
    if lora_config is not None and key is not None:
        lora = decoders.init_lora(graphdef, key=key)
    return LoadedModel(graphdef, lora, base, identity)


def _check_tied_head(model_type: str, tensors: storage.Tensors) -> str:
    """Returns the key of the head, which a tied checkpoint may repeat but not contradict."""
    head = key_map.MODULES[model_type]["head"] + ".weight"
    embedding = key_map.MODULES[model_type]["embed"] + ".weight"
    if head in tensors and embedding in tensors:
        if not np.array_equal(tensors.read(head), tensors.read(embedding)):
            raise ValueError(
                f"{tensors.files[head]}: {head} differs from {embedding} although config.json ties"
                " them; correct tie_word_embeddings"
            )
    return head


def save_model(
    folder: str | os.PathLike[str],
    config: decoders.ModelConfig,
    base: Tree,
    *,
    shard_bytes: int = storage.SHARD_BYTES,
) -> None:
    """Writes a decoder as a Hugging Face checkpoint that transformers loads.

    config.json, and model.safetensors or, above `shard_bytes`, numbered shards and their index.
    The directory appears whole or not at all.

    Args:
      folder: A directory that is not there yet or empty.
      config: The model's settings.
      base: Its weights, unquantized, written in their own dtype.
      shard_bytes: The largest file, in bytes of tensors.

    Raises:
      ValueError: The directory has something in it; the base does not fit the config, or is
        quantized.
    """
    leaves = key_map.flatten(base)
    packed = sorted("/".join(path) for path, leaf in leaves.items() if quantize.is_quantized(leaf))
    if packed:
        raise ValueError(
            f"weights must be plain to be saved, {some_of(packed, 3, quoted=False)} are quantized; "
            "save the original base or dequantize it"
        )
    _, _, shapes = decoders.abstract(config, None)
    key_map.check_tree(base, shapes, f"a {config.model_type} of this config")
    dtype = np.dtype(leaves[("embed", "embedding")].dtype).name
    fields = {**config.to_hf(), "dtype": dtype, "torch_dtype": dtype}
    with storage.new_folder(folder) as partial:
        key_map.write_weights(partial, key_map.plan(config.model_type, base), leaves, shard_bytes)
        files.write_json(partial / "config.json", fields)


# encoders ---------------------------------------------------------------------------------------


def load_encoder(
    name: str | os.PathLike[str],
    *,
    dtype: Any,
    pooling: str | None = None,
    num_labels: int | None = None,
    key: jax.Array | None = None,
    revision: str | None = None,
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
      revision: Branch, tag or commit on the hub.

    Raises:
      ValueError: As `load_model`; a pooling that contradicts the checkpoint's or is not
        supported; a head that the checkpoint lacks, without a key to draw one.
    """
    folder = resolve_folder(name, revision=revision, auto="AutoModel")
    path = folder / "config.json"
    fields = storage.read_json(path, {"model_type": str})
    model_type = fields["model_type"]
    if model_type not in encoders.ENCODERS:
        raise ValueError(
            f"model_type in {path} must be one of the encoders {sorted(encoders.ENCODERS)},"
            f" got {shown(model_type)}: point to another checkpoint"
        )
    with _naming(path):
        config = encoders.ENCODERS[model_type].from_hf(fields)
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
        tensors = storage.open_tensors(
            folder, stack, auto="AutoModel", rename=_encoder_key(model_type)
        )
        if config.num_labels and not has_own_head:
            # A BERT without a classifier may still bring the pooler, its first half.
            absent = [
                name
                for name in ("head_dense", "head_output")
                if f"{key_map.MODULES[model_type][name]}.weight" not in tensors
            ]
            if absent and key is None:
                raise ValueError(
                    f"{folder} has no classification head for {num_labels=}; give a key to draw one"
                )
            if key is not None:
                fresh = encoders.init_weights(
                    {name: shapes[name] for name in absent},
                    key=key,
                    initializer_range=config.initializer_range,
                )
            shapes = {name: leaf for name, leaf in shapes.items() if name not in fresh}
        slots = key_map.plan(model_type, shapes)
        inert = key_map.BUFFERS[model_type] + ("" if config.num_labels else r"|classifier\..*")
        key_map.check_fit(slots, tensors, f"the {model_type} of {path}", inert)
        weights = key_map.fill(shapes, slots, tensors)
    return LoadedEncoder(config, {**weights, **fresh})


def _encoder_key(model_type: str) -> Callable[[str], str]:
    """Returns the renaming of the keys that bare encoders and old releases write."""

    def rename(key: str) -> str:
        if key.startswith(("embeddings.", "encoder.", "pooler.")):
            key = f"{model_type}.{key}"
        return key.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
            "LayerNorm.beta", "LayerNorm.bias"
        )

    return rename


def _read_pooling(folder: pathlib.Path, fields: Mapping[str, Any], asked: str | None) -> str | None:
    path = folder / "1_Pooling" / "config.json"
    own = None
    if path.is_file():
        modes = {name for name, is_on in storage.read_json(path).items() if is_on is True}
        modes = {name for name in modes if name.startswith("pooling_mode_")}
        known = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}
        if len(modes) != 1 or not modes <= set(known):
            raise ValueError(
                f"{path} must set one of {sorted(known)}, got {sorted(modes)}: this kind of"
                " pooling is not implemented"
            )
        own = known[modes.pop()]
    elif "bge-" in str(fields.get("_name_or_path", "")).lower():
        own = "cls"
    if own is not None and asked not in (None, own):
        raise ValueError(f"{folder} was trained with pooling {own!r}, got {asked!r}; leave it out")
    return own or asked


def save_encoder(
    folder: str | os.PathLike[str], config: encoders.EncoderConfig, weights: Tree
) -> None:
    """Writes an encoder as a Hugging Face checkpoint that transformers loads.

    The pooling, if there is one, goes into 1_Pooling/config.json, as sentence-transformers has it.

    Args:
      folder: A directory that is not there yet or empty.
      config: The encoder's settings.
      weights: Its weights, written in their own dtype.

    Raises:
      ValueError: The directory has something in it, or the weights do not fit the config.
    """
    shapes = encoders.abstract_encoder(config, dtype=jnp.float32)
    key_map.check_tree(weights, shapes, f"a {config.model_type} of this config")
    leaves = key_map.flatten(weights)
    dtype = np.dtype(leaves[("word", "embedding")].dtype).name
    with storage.new_folder(folder) as partial:
        key_map.write_weights(
            partial, key_map.plan(config.model_type, weights), leaves, storage.SHARD_BYTES
        )
        files.write_json(
            partial / "config.json", {**config.to_hf(), "dtype": dtype, "torch_dtype": dtype}
        )
        if config.pooling is not None:
            (partial / "1_Pooling").mkdir()
            files.write_json(
                partial / "1_Pooling" / "config.json",
                {
                    "word_embedding_dimension": config.hidden_size,
                    "pooling_mode_cls_token": config.pooling == "cls",
                    "pooling_mode_mean_tokens": config.pooling == "mean",
                },
            )


# adapters ---------------------------------------------------------------------------------------

_PEFT_PREFIX = "base_model.model."
# Fields of adapter_config.json that do not change what a finished adapter computes.
_ADAPTER_INERT = frozenset(
    """alpha auto_mapping base_model_name_or_path corda_config eva_config inference_mode
    init_lora_weights lora_alpha lora_dropout loftq_config megatron_core peft_type peft_version
    qalora_group_size r revision runtime_config target_modules task_type""".split()
)
# Starts that keep the base as it was; the others subtract the adapter's start from it.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")


def read_adapter_config(folder: str | os.PathLike[str]) -> LoRAConfig:
    """Returns the settings of the PEFT adapter in a directory.

    Raises:
      ValueError: No readable adapter_config.json, or a setting that changes what the adapter
        computes in a way that is not supported (DoRA, rank-stabilized scaling, rank patterns,
        biases, modules saved whole, targets given as a pattern, ...), by name.
    """
    path = pathlib.Path(folder) / _ADAPTER_CONFIG
    fields = storage.read_json(path)
    if fields.get("peft_type") != "LORA":
        raise ValueError(
            f"peft_type in {path} must be 'LORA', got {shown(fields.get('peft_type'))}: point to"
            " another adapter"
        )
    # PEFT grows switches; off, they are False, None or empty, and change nothing.
    active = {name: value for name, value in fields.items() if value and name not in _ADAPTER_INERT}
    if active.get("bias") == "none":
        del active["bias"]
    if fields.get("init_lora_weights") not in _PLAIN_STARTS:
        active["init_lora_weights"] = fields.get("init_lora_weights")
    targets = fields.get("target_modules")
    if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
        active["target_modules"] = targets
    if active:
        settings = [f"{name}={shown(value, 40)}" for name, value in sorted(active.items())]
        raise ValueError(
            f"{path} must be a plain LoRA on named modules, {some_of(settings, 3, quoted=False)} "
            "is not supported; merge this adapter with peft and load the merged model"
        )
    shape = {"r": int, "lora_alpha": float, "lora_dropout?": (float, None)}
    files.check_shape(fields, shape, shown(str(path), 160))
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
    """Returns the factors of a PEFT adapter for a decoder, float32.

    Args:
      folder: Holds adapter_config.json and adapter_model.safetensors.
      config: The decoder's settings.
      lora_config: What the adapter has to be; None takes what it is (`read_adapter_config`).
        Dropout is the trainer's business and may differ.
      base: Identity of the base that it will stand on. An adapter that `save_adapter` wrote for
        another base is refused; one from elsewhere does not say what it was trained on.

    Raises:
      ValueError: As `read_adapter_config`; an adapter of another rank, alpha or other targets,
        or of another base; missing, unexpected, ill-shaped, damaged or non-finite tensors; targets
        that the model lacks.
    """
    folder = pathlib.Path(folder)
    own = read_adapter_config(folder)
    if lora_config is not None:
        differing = [
            f"{name}={getattr(own, name)!r}, not {getattr(lora_config, name)!r}"
            for name in ("rank", "alpha", "targets")
            if getattr(own, name) != getattr(lora_config, name)
        ]
        if differing:
            raise ValueError(
                f"{folder / _ADAPTER_CONFIG} must be of this run's settings, got"
                f" {'; '.join(differing)}: point to another adapter or change the settings"
            )
    with _naming(folder / _ADAPTER_CONFIG):
        _, shapes, _ = decoders.abstract(config, own)
    slots = key_map.plan(config.model_type, shapes, prefix=_PEFT_PREFIX)
    with contextlib.ExitStack() as stack:
        tensors = storage.Tensors([folder / _ADAPTER], stack)
        what = f"the adapter of {folder / _ADAPTER_CONFIG} on this {config.model_type}"
        key_map.check_fit(slots, tensors, what, "")
        trained_on = tensors.metadata.get(_BASE, base)
        if base and trained_on != base:
            raise ValueError(
                f"{shown(str(folder), 160)} was trained on the base {shown(trained_on)}, got"
                f" {shown(base)}: use the base it was trained on, or train it again"
            )
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

    Raises:
      ValueError: The directory has something in it, or the factors do not fit the settings.
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
    with storage.new_folder(folder) as partial:
        tensors = {}
        leaves = {path: np.asarray(leaf) for path, leaf in key_map.flatten(lora).items()}
        for key, slot in key_map.plan(config.model_type, lora, prefix=_PEFT_PREFIX).items():
            leaf = leaves[slot.path]
            tensors[key] = np.ascontiguousarray(
                (leaf if slot.layer is None else leaf[slot.layer]).T
            )
        storage.write_tensors(partial / _ADAPTER, tensors, {_BASE: base} if base else None)
        files.write_json(partial / _ADAPTER_CONFIG, fields)


def merge(lora: Tree, base: Tree, lora_config: LoRAConfig) -> Tree:
    """Returns the base with the adapter folded into its kernels: W + A B alpha / rank.

    The sum is taken in float32, layer by layer, and rounded once to the kernel's dtype. The other
    leaves are the same arrays as in `base`.

    Raises:
      ValueError: A kernel is quantized, and so has no room for the adapter, or absent.
    """
    kernels, factors = key_map.flatten(base), key_map.flatten(lora)
    for module in {path[:-1] for path in factors}:
        path = (*module, "kernel")
        if path not in kernels or quantize.is_quantized(kernels[path]):
            state = "quantized" if path in kernels else "absent"
            raise ValueError(
                f"{'/'.join(path)} must be a plain kernel to fold the adapter into, it is {state}: "
                "merge into the original base"
            )
        kernels[path] = _fold(
            kernels[path], factors[*module, "a"], factors[*module, "b"], scale=lora_config.scale
        )
    return key_map.unflatten(kernels)


@functools.partial(jax.jit, static_argnames="scale")
def _fold(kernel: Any, a: Any, b: Any, *, scale: float) -> Any:
    def fold_layer(layer: tuple[Any, Any, Any]) -> Any:
        kernel_IO, a_IR, b_RO = layer
        product_IO = jnp.matmul(a_IR, b_RO, precision=jax.lax.Precision.HIGHEST)
        return (kernel_IO.astype(jnp.float32) + scale * product_IO).astype(kernel_IO.dtype)

    # A map, not a vmap: one layer's float32 copies at a time.
    return jax.lax.map(fold_layer, (kernel, a, b))


# hashes -----------------------------------------------------------------------------------------


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
