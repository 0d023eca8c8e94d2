"""A finished run as a work directory holds it, without having run: what an export reads."""

import json
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import sample_metrics
from finished import write_manifest

from raslik_jax import config as config_lib
from raslik_jax.axes import Tree
from raslik_jax.config import BackboneConfig, Config, CorpusConfig, FinetuneConfig, UnlearnConfig
from raslik_jax.data import tokenization
from raslik_jax.models import checkpoint, decoder, gpt_neox
from raslik_jax.models.lora import LoRAConfig

NUM_EPOCHS = 2


class StoredRun(NamedTuple):
    """A work directory, and what is in it.

    Attributes:
      root: the work directory.
      decoder: the model's pure functions.
      base: weights of the backbone.
      lora_config: of the adapters.
      adapters: the unlearned adapter after each epoch, of raslik and ga_gdr.
    """

    root: pathlib.Path
    decoder: decoder.Decoder
    base: Tree
    lora_config: LoRAConfig
    adapters: tuple[Tree, ...]


def write_stored_run(
    root: pathlib.Path,
    *,
    parameters: str = "lora",
    base_format: str = "plain",
    base: pathlib.Path | None = None,
) -> StoredRun:
    """Writes a run of a tiny random GPT-NeoX whose metrics are made up.

    Args:
      root: where.
      parameters: "lora", or "all": each epoch is then a whole model, the base with its adapter.
      base_format: as the run's config has it.
      base: where the base is put, as a checkpoint with its tokenizer that the run was made from;
        None for one that the run trained.
    """
    tokenizer = tokenization.train_bpe(["a kettle hums in orbit", "a kettle boils"], vocab_size=300)
    tokenization.save_tokenizer(root / "corpus" / "tokenizer", tokenizer)
    model_config = gpt_neox.GPTNeoXConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    lora_config = LoRAConfig(rank=2, alpha=4.0, dropout=0.0, targets=("query_key_value", "dense"))
    graphdef, lora, weights = decoder.create(
        model_config, lora_config, key=jax.random.key(0), dtype=jnp.float32
    )
    checkpoint.save_model(base or root / "backbone" / "model", model_config, weights)
    if base:
        tokenization.save_tokenizer(base, tokenizer)
    adapters = []
    for epoch in range(1, NUM_EPOCHS + 1):
        leaves, structure = jax.tree.flatten(lora)
        keys = jax.random.split(jax.random.key(epoch), len(leaves))
        adapter = jax.tree.unflatten(
            structure,
            [0.3 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)],
        )
        folder = root / "unlearn" / "raslik-ga_gdr" / f"epoch-{epoch}"
        if parameters == "all":
            whole = checkpoint.merge(adapter, weights, lora_config)
            checkpoint.save_model(folder, model_config, whole)
        else:
            checkpoint.save_adapter(folder, adapter, lora_config, model_config)
        adapters.append(adapter)
    config = Config(
        name="a: run",
        corpus=CorpusConfig(template="brief"),
        backbone=BackboneConfig(
            checkpoint=str(base or ""),
            hidden_size=16,
            num_hidden_layers=2,
            base_format=base_format,
        ),
        finetune=FinetuneConfig(lora_rank=2, lora_alpha=4.0, lora_targets=lora_config.targets),
        unlearn=UnlearnConfig(unlearn_epochs=NUM_EPOCHS, unlearn_parameters=parameters),
    )
    metrics = sample_metrics.sample_metrics(num_epochs=NUM_EPOCHS)
    metrics["corpus"] = {
        "dataset": "toy",
        "train": 2000,
        "targets": 200,
        "target_queries": 48,
        "normal_queries": 47,
        "query_split": "test",
    }
    metrics["settings"] = config_lib.to_json(config)
    _write(root / "evaluate" / "metrics.json", metrics)
    sets, variant = root / "retrieve" / "raslik", "raslik-ga_gdr"
    _write(sets / "summary.json", metrics["retrieval"]["raslik"])
    for kind in ("forget", "retain"):
        (sets / f"{kind}.jsonl").write_text('{"instruction": "x"}\n')
    (root / "generate" / variant).mkdir(parents=True)
    (root / "generate" / variant / "epoch-2.jsonl").write_text("")
    finish(root, base=base)
    return StoredRun(root, decoder.bind(graphdef), weights, lora_config, tuple(adapters))


def finish(root: pathlib.Path, *, base: pathlib.Path | None = None) -> None:
    """Writes the manifests of a stored run as its files are now."""
    variant = "raslik-ga_gdr"
    for name in ("corpus", "backbone", "retrieve/raslik"):
        write_manifest(root, name)
    reads = ("retrieve/raslik", "corpus/tokenizer", *(() if base else ("backbone/model",)))
    outside = {"checkpoint": base} if base else {}
    write_manifest(root, f"unlearn/{variant}", reads, outside, learning_rate=3e-4)
    write_manifest(root, f"generate/{variant}", (f"unlearn/{variant}/epoch-2",))
    write_manifest(root, "evaluate", (f"generate/{variant}",))


def _write(path: pathlib.Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
