"""A stored run's unlearned model as files that other programs read."""

import dataclasses
import json
import os
import pathlib
from typing import Any

import jax.numpy as jnp

from raslik_jax import files
from raslik_jax.config import Config, config_from_json
from raslik_jax.data import prompts, tokenization
from raslik_jax.evaluation.summary import MethodEntry
from raslik_jax.models import checkpoint, storage
from raslik_jax.pipeline import read_json
from raslik_jax.reporting.model_card import CardFacts, render_card
from raslik_jax.stages.plan import file_identity
from raslik_jax.stages.workspace import Workspace


def export_model(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    strategy: str,
    algorithm: str,
    epoch: int | None,
    merged: bool,
) -> pathlib.Path:
    """Writes one unlearned model of a stored run, with tokenizer and card, and returns its folder.

    The folder appears whole or not at all. Nothing is computed but the merge, and nothing read but
    the run and, where it has one, its base checkpoint.

    Args:
      run: work directory of a finished run.
      out: a folder that is not there yet or empty.
      strategy: whose sets were forgotten and retained.
      algorithm: that unlearned.
      epoch: after which; None takes the last.
      merged: a whole checkpoint that transformers loads; otherwise an adapter that peft loads.

    Raises:
      ValueError: the run is not there, not finished, changed since it was measured, or has no such
        model; the folder holds something.
    """
    root, out = pathlib.Path(run), pathlib.Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"a new folder wanted as --out, {out} holds something: choose another")
    if not (root / "config.json").is_file():
        raise ValueError(f"the work directory of a run wanted as --run, {root} has no config.json")
    config = config_from_json(read_json(root / "config.json"))
    entry = _entry(root, config, strategy, algorithm, epoch)
    is_whole = config.unlearn.unlearn_parameters == "all"
    if is_whole and not merged:
        raise ValueError(
            f"an adapter wanted of {root}, the run unlearned in all weights and has none: export "
            "the merged model"
        )
    if merged:
        # What was learned on a quantised base is folded into the weights that were quantised.
        plain = dataclasses.replace(config.backbone, base_format="plain", double_quant=False)
        config = dataclasses.replace(config, backbone=plain)
    workspace = Workspace(root, config)
    unlearned = workspace.unlearned(strategy, algorithm, entry["epoch"])
    model, checkpoint_name = workspace.model, config.backbone.checkpoint
    base_folder = pathlib.Path(checkpoint_name or root / "backbone" / "model")
    is_on_hub = bool(checkpoint_name) and not base_folder.exists()
    tokenizer = workspace.tokenizer
    with storage.new_folder(out) as partial:
        if merged:
            weights = unlearned.base
            if not is_whole:
                weights = checkpoint.merge(unlearned.lora, weights, model.lora_config)
            checkpoint.save_model(partial, model.decoder.config, weights)
            ids = {"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
            files.write_json(partial / "generation_config.json", ids)
        else:
            checkpoint.save_adapter(
                partial,
                unlearned.lora,
                model.lora_config,
                model.decoder.config,
                base_model=checkpoint_name if is_on_hub else str(base_folder.resolve()),
            )
        tokenization.save_tokenizer(partial, tokenizer)
        facts = _facts(root, config, entry, merged=merged, is_on_hub=is_on_hub)
        (partial / "README.md").write_text(render_card(facts))
    return out


def _entry(
    root: pathlib.Path, config: Config, strategy: str, algorithm: str, epoch: int | None
) -> MethodEntry:
    """Returns the metrics of the model asked for, if they are of the model that is there."""
    wanted = f"{strategy}-{algorithm}"
    metrics = read_json(root / "metrics.json")
    found = {
        entry["epoch"]: entry
        for entry in metrics["methods"]
        if (entry["strategy"], entry["algorithm"]) == (strategy, algorithm)
    }
    if not found:
        known = sorted({f"{e['strategy']}-{e['algorithm']}" for e in metrics["methods"]})
        raise ValueError(f"a model of the run {root} wanted, {wanted} is none of {known}")
    epoch = max(found) if epoch is None else epoch
    if epoch not in found:
        raise ValueError(f"an epoch of {sorted(found)} wanted, came {epoch}: --epoch=last has all")
    # The card's numbers have to be of these weights: each stage names what it read.
    names = ("evaluate", f"generate/{wanted}", f"unlearn/{wanted}")
    manifests = [read_json(root / name / "manifest.json") for name in names]
    for reader, name, read in zip(manifests, names[1:], manifests[1:], strict=False):
        if reader["inputs"].get(name) != read["key"]:
            raise ValueError(
                f"a run that was measured as it is wanted, {name} of {root} has changed since: run "
                "experiments/run.py on it to the end"
            )
    return found[epoch]


def _facts(
    root: pathlib.Path, config: Config, entry: MethodEntry, *, merged: bool, is_on_hub: bool
) -> CardFacts:
    settings, folder = config.backbone, root / "retrieve" / entry["strategy"]
    name = settings.checkpoint
    if name:
        origin = f"{name if is_on_hub else pathlib.Path(name).name}" + (
            f" at {settings.revision}" if settings.revision else ""
        )
    else:
        origin = (
            f"a GPT-NeoX of {settings.num_hidden_layers} layers, {settings.hidden_size} wide, "
            f"trained from scratch in the same run (its folder backbone/model)"
        )
    unlearned = read_json(
        root / "unlearn" / f"{entry['strategy']}-{entry['algorithm']}" / "manifest.json"
    )
    recorded: dict[str, Any] = json.loads((root / "config.json").read_text())
    # As the run had it: for a merged model the base was read again, unquantised.
    quantised = recorded["backbone"].get("base_format", "plain")
    return CardFacts(
        config=recorded,
        metrics=read_json(root / "metrics.json"),
        entry=entry,
        learning_rate=unlearned["settings"]["learning_rate"],
        retrieved=read_json(folder / "summary.json"),
        set_hashes={kind: file_identity(folder / f"{kind}.jsonl") for kind in ("forget", "retain")},
        base_model=name if is_on_hub else "",
        base_origin=f"{origin}, weights in {jnp.dtype(settings.base_dtype).name}",
        base_format="" if quantised == "plain" else quantised,
        is_merged=merged,
        prompt=prompts.TEMPLATES[config.corpus.template].without_input,
    )
