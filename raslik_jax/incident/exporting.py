"""A stored run's unlearned model as files that other programs read."""

import dataclasses
import itertools
import pathlib
import re
import shutil
from collections.abc import Collection
from typing import Any

import jax.numpy as jnp

from raslik_jax.base import files
from raslik_jax.base.messages import shown, some_of
from raslik_jax.config import Config, config_from_json, to_json
from raslik_jax.data.tokens import tokenization
from raslik_jax.data.words import refused
from raslik_jax.evaluate.summary import MethodEntry, Metrics, Variant
from raslik_jax.incident.configuring import with_own_query
from raslik_jax.models import adapters, checkpoint, storage
from raslik_jax.models import decoder as decoders
from raslik_jax.parallel import meshes
from raslik_jax.report import incident
from raslik_jax.report.card import Base, CardFacts, render_card
from raslik_jax.run import artifacts
from raslik_jax.run.manifests import Manifest, check_finished
from raslik_jax.run.plan import open_run
from raslik_jax.run.units import Plan
from raslik_jax.run.workspace import Workspace, tokenizer_folders


@meshes.on_host()
def export_model(
    root: pathlib.Path, of: artifacts.Variant, out: pathlib.Path, *, epoch: str, merged: bool
) -> pathlib.Path:
    """Writes one unlearned model of a run with tokenizer and card to a new folder, and returns it.

    A merge is computed on the processor, whose memory has to hold the weights. Only the run and its
    base checkpoint, if it has one, are read. If the run has no measurements, the card says this.
    Results that were made again since unlearning or measuring are refused.
    """
    config, metrics, entries = _read_run(root, of)
    variant = _find_variant(entries, of, epoch)
    strategy, algorithm, name = *variant[:2], f"unlearn/{variant.strategy}-{variant.algorithm}"
    # The card's numbers are of these weights: nothing was made again, no byte is another.
    manifest = check_finished(root, name)
    scratch = [] if config.backbone.checkpoint else ["backbone"]
    for other in ["corpus", f"retrieve/{strategy}", *scratch]:
        check_finished(root, other)
    # The base of a merged model is read again, unquantized: an adapter learned on a quantized base
    # is folded into the weights that were quantized.
    own = config.backbone
    plain = dataclasses.replace(own, format="plain", double_quant=False, operands=own.dtype)
    backbone = plain if merged else config.backbone
    workspace = Workspace(root, dataclasses.replace(config, backbone=backbone), whole=merged)
    model, base = workspace.model, _base_of(root, config, manifest)
    weights_of = f"weights in {jnp.dtype(backbone.dtype).name}, identity {model.identity}"
    train = [] if metrics else [bool(row.is_target) for row in workspace.corpus.train]
    sets = {kind: artifacts.set_rows(strategy, kind) for kind in ("forget", "retain")}
    facts = CardFacts(
        config=to_json(config),
        metrics=metrics,
        entry=entries[variant],
        variant=variant,
        num_train=metrics["corpus"]["train"] if metrics else len(train),
        num_targets=metrics["corpus"]["targets"] if metrics else sum(train),
        learning_rate=manifest["settings"][f"unlearn.{algorithm}.learning_rate"],
        ended=incident.read_ending(root, strategy, algorithm),
        retrieved=artifacts.set_summary(strategy).read(root),
        set_hashes={kind: files.hash_file(rows.place(root))[:16] for kind, rows in sets.items()},
        base=base._replace(origin=f"{base.origin}, {weights_of}"),
        lora=model.lora_config,
        is_served=decoders.ARCHITECTURES[model.decoder.config.model_type].is_served_with_lora,
        adapter_origin=_adapter_origin(config),
        is_merged=merged,
        prompt=workspace.template.without_input,
    )
    unlearned, lora_config = workspace.unlearned(*variant), model.lora_config
    if merged:
        weights = checkpoint.merge(unlearned.lora, unlearned.base, lora_config)
        checkpoint.save_model(out, model.decoder.config, weights)
        _write_generation(out, base, workspace)
    else:
        names: Any = {"base_model": base.hub_name, "base_revision": base.revision}
        of_model = lora_config, model.decoder.config
        adapters.save_adapter(out, unlearned.lora, *of_model, **names, base=model.identity)
    _write_tokenizer(out, workspace)
    files.write_text(out / "README.md", render_card(facts))
    return out


def _read_run(
    root: pathlib.Path, of: artifacts.Variant
) -> tuple[Config, Metrics | None, dict[Variant, MethodEntry | None]]:
    """Returns a run's settings, its metrics if it has any, and its models with their answers."""
    if artifacts.METRICS.is_there(root):
        metrics = artifacts.read_metrics(root)
        found = {Variant(e["strategy"], e["algorithm"], e["epoch"]): e for e in metrics["methods"]}
        return config_from_json(metrics["settings"]), metrics, {**found}
    config = config_from_json(with_own_query(artifacts.CONFIG.read(root), root))
    every = [*itertools.product(config.retrieve.strategies, config.unlearn.algorithms)]
    pairs = [pair for pair in every if _fits(pair, of)] or every
    workspace = open_run(root, *(f"unlearn/{one}-{two}" for one, two in pairs), config=config)
    made = (Variant(*pair, epoch) for pair in pairs for epoch in workspace.epochs(*pair))
    return config, None, dict.fromkeys(made)


def _find_variant(known: Collection[Variant], of: artifacts.Variant, asked: str) -> Variant:
    """Returns the only model of the run with these names, if not empty, and epoch (or last)."""
    pairs = sorted({one[:2] for one in known})
    fitting = [pair for pair in pairs if _fits(pair, of)]
    if len(fitting) != 1:
        named = some_of((f"--strategy={a} --algorithm={b}" for a, b in pairs), 8, quoted=False)
        got = " with ".join(map(shown, filter(None, of))) or "none"
        raise ValueError(f"one model of the run must be named, got {got}: give {named}")
    epochs = sorted(one.epoch for one in known if one[:2] == fitting[0])
    if (epoch := epochs[-1] if asked == "last" else int(asked)) not in epochs:
        raise ValueError(f"--epoch must be one of {epochs} or last, got {epoch}: correct it")
    return Variant(*fitting[0], epoch)


def _fits(pair: tuple[str, ...], of: artifacts.Variant) -> bool:
    return all(asked in ("", own) for own, asked in zip(pair, of, strict=True))


def _base_of(root: pathlib.Path, config: Config, manifest: Manifest) -> Base:
    settings = config.backbone
    name, revision = settings.checkpoint, settings.revision
    if not name:
        size = f"{settings.num_hidden_layers} layers, {settings.hidden_size} wide"
        how = "trained from scratch in the same run (its folder backbone/model), published nowhere"
        return Base(None, "", f"a GPT-NeoX of {size}, {how}")
    folder = checkpoint.resolve_folder(name, revision=revision or None)
    if not pathlib.Path(name).is_dir():
        return Base(folder, name, name + (f" at {revision}" if revision else ""), revision)
    if Plan(root, ()).hashes.of_content(folder) != manifest["files"]["backbone.checkpoint"]:
        raise refused("export_changed", what="checkpoint", name=shown(name, 120))
    # A path says nothing on another machine, and the name in config.json is not the folder's: it is
    # what the weights were loaded from before they were trained.
    fields = storage.read_json(folder / "config.json", {"_name_or_path?": (str, None)})
    own = fields.get("_name_or_path") or ""
    own = own if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", own) else ""
    origin = f"loaded from {own} and perhaps trained since" if own else "of unknown origin"
    return Base(folder, "", f"the local folder {folder.resolve().name}, {origin}")


def _adapter_origin(config: Config) -> str:
    """Returns the origin of the adapter before unlearning; "" if the run fine-tuned it."""
    name = config.backbone.adapter
    if config.finetunes:
        return ""
    if not name:
        return "the base as it was given, with a fresh adapter"
    # A path says nothing on another machine.
    is_folder = pathlib.Path(name).is_dir() or pathlib.Path(name).is_absolute()
    at = f" at {config.backbone.adapter_revision}" if config.backbone.adapter_revision else ""
    kind = f"the local folder {pathlib.Path(name).name}" if is_folder else name + at
    return f"an adapter that was trained elsewhere, {kind}"


def _write_tokenizer(out: pathlib.Path, workspace: Workspace) -> None:
    """Copies the files of the run's tokenizer or writes the one that the run trained.

    If the user gave a chat template of the training, it replaces theirs.
    """
    tokenizer, config = workspace.tokenizer, workspace.config
    if not (config.backbone.checkpoint and _copy_tokenizer(out, tokenizer, config)):
        tokenization.save_tokenizer(out, tokenizer)
    template = workspace.template.chat
    source = tokenizer.chat_template if template is None else template.source
    if source and tokenization.load_tokenizer(out).chat_template != source:
        (out / storage.TOOL_TEMPLATE).unlink(missing_ok=True)  # it would come first
        files.write_text(out / storage.CHAT_TEMPLATE, source)


def _copy_tokenizer(out: pathlib.Path, tokenizer: tokenization.Tokenizer, config: Config) -> bool:
    """Copies tokenizer files byte for byte; returns whether they give the run's tokenizer."""
    try:
        folders = tokenizer_folders(config)
    except ValueError:
        return False  # the adapter is gone: the run has copies of it and of its tokenizer
    own, kept = tokenization.load_tokenizer(*folders), tokenization.tokenizer_hash(tokenizer)
    if tokenization.tokenizer_hash(own) != kept or own.chat_template != tokenizer.chat_template:
        raise refused("export_changed", what="tokenizer in", name=shown(str(folders[0]), 160))
    # A whole tokenizer takes no part of the base's.
    place = next(n for n, one in enumerate(folders) if (one / "tokenizer.json").is_file())
    for folder in reversed(folders[: place + 1]):
        for name in storage.TOKENIZER_FILES:
            if (folder / name).is_file():
                (out / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(folder / name, out / name)
    return tokenization.tokenizer_hash(tokenization.load_tokenizer(out)) == kept


def _write_generation(out: pathlib.Path, base: Base, workspace: Workspace) -> None:
    """Copies the checkpoint's generation_config.json, or writes one with the end tokens.

    With an adapter it is also written if the copy does not name the EOS of the run's tokenizer.
    """
    fields: dict[str, object] = {}
    if base.folder is not None and (base.folder / storage.GENERATION).is_file():
        shutil.copyfile(base.folder / storage.GENERATION, out / storage.GENERATION)
        is_known = workspace.tokenizer.eos_id in checkpoint.read_end_ids(base.folder)
        if is_known or not workspace.config.backbone.adapter:
            return
        fields = storage.read_json(base.folder / storage.GENERATION)
    ends, pad = workspace.end_ids, workspace.tokenizer.pad_id
    ids = {"eos_token_id": ends[0] if len(ends) == 1 else [*ends], "pad_token_id": pad}
    files.write_json(out / storage.GENERATION, fields | ids)
