"""A stored run's unlearned model as files that other programs read."""

import dataclasses
import os
import pathlib
import re
import shutil
from typing import NamedTuple

import jax.numpy as jnp

from raslik_jax import files
from raslik_jax.config import Config, config_from_json, to_json
from raslik_jax.data import prompts, tokenization
from raslik_jax.evaluate.summary import MethodEntry, Metrics, Variant
from raslik_jax.files import hash_file, read_json
from raslik_jax.manifests import Hashes, check_finished
from raslik_jax.messages import shown
from raslik_jax.models import checkpoint, storage
from raslik_jax.report.card import CardFacts, render_card
from raslik_jax.report.runs import metrics_path, read_metrics
from raslik_jax.run.plan import open_run
from raslik_jax.run.workspace import Workspace


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
      run: work directory of a run that has unlearned; of one that has not measured the model, the
        card says so.
      out: a folder that is not there yet or empty; its tokenizer and generation files are those
        of the checkpoint, byte for byte, where the run has one.
      strategy: whose sets were forgotten and retained.
      algorithm: that unlearned.
      epoch: after which; None takes the last.
      merged: a whole checkpoint that transformers loads; otherwise an adapter that peft loads.

    Raises:
      ValueError: the run is not there, has no such model, or something was made again since it was
        unlearned or measured; the folder holds something.
    """
    root, out = pathlib.Path(run), pathlib.Path(out)
    files.check_new_folder(out)
    name = f"unlearn/{strategy}-{algorithm}"
    metrics = read_metrics(root) if metrics_path(root).is_file() else None
    if metrics is None:
        config = open_run(root, name).config
        entry, variant = None, _variant(config, strategy, algorithm, epoch)
    else:
        config = config_from_json(metrics["settings"])
        entry = _entry(metrics, strategy, algorithm, epoch)
        variant = Variant(strategy, algorithm, entry["epoch"])
    # The card's numbers are of these weights: nothing was made again, no byte is another.
    made = check_finished(root, name)
    scratch = () if config.backbone.checkpoint else ("backbone",)
    for other in ("corpus", *scratch, f"retrieve/{strategy}"):
        check_finished(root, other)
    is_whole = config.unlearn.parameters == "all"
    if is_whole and not merged:
        raise ValueError(
            f"{root} must have an adapter to export one, it was unlearned in all weights: export "
            "the merged model"
        )
    # As the run had it: of a merged model the base is read again, unquantized.
    recorded, quantized = to_json(config), config.backbone.format
    if merged:
        # What was learned on a quantized base is folded into the weights that were quantized.
        plain = dataclasses.replace(config.backbone, format="plain", double_quant=False)
        config = dataclasses.replace(config, backbone=plain)
    workspace = Workspace(root, config)
    unlearned = workspace.unlearned(*variant)
    model = workspace.model
    base = _base_of(config)
    given = pathlib.Path(config.backbone.checkpoint) if config.backbone.checkpoint else None
    if (
        given
        and given.is_dir()
        and Hashes().of_content(given) != made["files"]["backbone.checkpoint"]
    ):
        raise ValueError(
            f"the checkpoint {shown(str(given), 120)} must be the one that the run was made with, "
            "its content has changed: restore it"
        )
    with storage.new_folder(out) as partial:
        if merged:
            weights = unlearned.base
            if not is_whole:
                weights = checkpoint.merge(unlearned.lora, weights, model.lora_config)
            checkpoint.save_model(partial, model.decoder.config, weights)
            _write_generation(partial, base, workspace)
        else:
            checkpoint.save_adapter(
                partial,
                unlearned.lora,
                model.lora_config,
                model.decoder.config,
                base=model.identity,
                base_model=base.hub_name,
            )
        _write_tokenizer(partial, base, workspace.tokenizer)
        folder = root / "retrieve" / strategy
        kinds = ("forget", "retain")
        train = [row.is_target for row in workspace.corpus.train] if metrics is None else []
        facts = CardFacts(
            config=recorded,
            metrics=metrics,
            entry=entry,
            variant=variant,
            num_train=metrics["corpus"]["train"] if metrics else len(train),
            num_targets=metrics["corpus"]["targets"] if metrics else sum(map(bool, train)),
            learning_rate=made["settings"][f"unlearn.{algorithm}.learning_rate"],
            retrieved=read_json(folder / "summary.json"),
            set_hashes={kind: hash_file(folder / f"{kind}.jsonl")[:16] for kind in kinds},
            base_model=base.hub_name,
            base_origin=f"{base.origin}, weights in {jnp.dtype(config.backbone.dtype).name}, "
            f"identity {model.identity}",
            base_format="" if quantized == "plain" else quantized,
            is_merged=merged,
            prompt=prompts.TEMPLATES[config.corpus.template].without_input,
        )
        files.write_text(partial / "README.md", render_card(facts))
    return out


class _Base(NamedTuple):
    """Where the base of a run came from.

    Attributes:
      folder: its files; None for a base that the run trained itself.
      hub_name: its name on the hub; "" where it has none.
      origin: what it is, for people.
    """

    folder: pathlib.Path | None
    hub_name: str
    origin: str


def _base_of(config: Config) -> _Base:
    settings = config.backbone
    name, revision = settings.checkpoint, settings.revision
    if not name:
        return _Base(
            None,
            "",
            f"a GPT-NeoX of {settings.num_hidden_layers} layers, {settings.hidden_size} wide, "
            "trained from scratch in the same run (its folder backbone/model), published nowhere",
        )
    folder = checkpoint.resolve_folder(name, revision=revision or None)
    if not pathlib.Path(name).is_dir():
        return _Base(folder, name, name + (f" at {revision}" if revision else ""))
    # A path says nothing on another machine; the name that the checkpoint gives itself may.
    fields = storage.read_json(folder / "config.json", {"_name_or_path?": (str, None)})
    own = fields.get("_name_or_path") or ""
    local = f"the local folder {folder.resolve().name}"
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", own):
        return _Base(folder, own, f"{local}, which calls itself {own}")
    return _Base(folder, "", f"{local}, which does not say where it came from")


def _write_tokenizer(out: pathlib.Path, base: _Base, tokenizer: tokenization.Tokenizer) -> None:
    """Copies the tokenizer of the checkpoint, or writes the one that the run trained."""
    if base.folder is None:
        tokenization.save_tokenizer(out, tokenizer)
        return
    own = tokenization.load_tokenizer(base.folder)
    if tokenization.tokenizer_hash(own) != tokenization.tokenizer_hash(tokenizer):
        raise ValueError(
            f"the tokenizer in {shown(str(base.folder), 160)} must be the one that the run used, "
            "it has changed since: restore it, or run again"
        )
    for name in storage.TOKENIZER_FILES:
        if (base.folder / name).is_file():
            shutil.copyfile(base.folder / name, out / name)


def _write_generation(out: pathlib.Path, base: _Base, workspace: Workspace) -> None:
    """Copies the checkpoint's generation_config.json, or writes what ends an answer."""
    if base.folder is not None and (base.folder / storage.GENERATION).is_file():
        shutil.copyfile(base.folder / storage.GENERATION, out / storage.GENERATION)
        return
    ends = workspace.end_ids
    ids = {
        "eos_token_id": ends[0] if len(ends) == 1 else list(ends),
        "pad_token_id": workspace.tokenizer.pad_id,
    }
    files.write_json(out / storage.GENERATION, ids)


def _variant(config: Config, strategy: str, algorithm: str, epoch: int | None) -> Variant:
    """Returns the model asked for of a run that has not measured it."""
    last = config.unlearn.epochs
    strategies, algorithms = config.retrieve.strategies, config.unlearn.algorithms
    if strategy not in strategies or algorithm not in algorithms:
        raise ValueError(
            f"--strategy must be one of {list(strategies)} and --algorithm one of "
            f"{list(algorithms)}, got {shown(strategy)} and {shown(algorithm)}"
        )
    if epoch is not None and not 1 <= epoch <= last:
        raise ValueError(f"--epoch must be 1 to {last} or last, got {epoch}")
    return Variant(strategy, algorithm, last if epoch is None else epoch)


def _entry(metrics: Metrics, strategy: str, algorithm: str, epoch: int | None) -> MethodEntry:
    """Returns the metrics of the model asked for."""
    found = {
        entry["epoch"]: entry
        for entry in metrics["methods"]
        if (entry["strategy"], entry["algorithm"]) == (strategy, algorithm)
    }
    if not found:
        known = sorted({f"{e['strategy']}-{e['algorithm']}" for e in metrics["methods"]})
        raise ValueError(
            f"--strategy and --algorithm must name a model of the run, {strategy}-{algorithm} is "
            f"none of {known}"
        )
    epoch = max(found) if epoch is None else epoch
    if epoch not in found:
        raise ValueError(f"--epoch must be one of {sorted(found)} or last, got {epoch}")
    return found[epoch]
