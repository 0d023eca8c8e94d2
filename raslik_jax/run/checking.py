"""The problems of a run, reported before it works: from its settings and then from its corpus."""

import dataclasses
import pathlib
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool

from raslik_jax.base.messages import listed_problems, shown, some_of
from raslik_jax.base.settings import leaves
from raslik_jax.config import Config
from raslik_jax.data import corpora
from raslik_jax.data.batches import num_steps_of
from raslik_jax.data.read import formats
from raslik_jax.data.tokens import tokenization
from raslik_jax.data.tokens.encoding import Encoded
from raslik_jax.data.words import refused
from raslik_jax.evaluate.robustness import ROBUSTNESS
from raslik_jax.models import checkpoint, decoder, mistaken, presets, storage
from raslik_jax.models.adapter_targets import MERGE
from raslik_jax.retrieve import sets
from raslik_jax.retrieve.strategies import STRATEGIES, Request, choose
from raslik_jax.run import memory
from raslik_jax.run.stages.finetune import shape_of
from raslik_jax.run.units import Unit
from raslik_jax.run.workspace import (
    AnyCorpus,
    adapter_source,
    checkpoint_folder,
    load_adopted,
    lora_config_of,
    tokenizer_folders,
)
from raslik_jax.train.objectives import OBJECTIVES

# Those that retrieve, and those that need what was retrieved.
_RETRIEVING = frozenset({"retrieve", "unlearn", "generate", "evaluate", "report"})


def model_of(config: Config) -> tuple[str, decoder.ModelConfig]:
    """Returns the name and the shapes of a run's model; reads no more than a config.json."""
    settings, name = config.backbone, config.backbone.checkpoint
    if not name:
        return "trained from scratch", shape_of(config, vocab_size=config.corpus.vocab_size)
    if pathlib.Path(name).is_dir():
        return name, checkpoint.read_config(name)
    preset = presets.preset_of(name)
    if preset is None:
        known = some_of(sorted(presets.MODEL_PRESETS), 6, quoted=False)
        raise refused("preset", known=known, got=shown(name))
    at = f" at {settings.revision}" if settings.revision else ""
    return f"{name}{at}, shapes of the preset {preset}", presets.MODEL_PRESETS[preset]


def check_inputs(config: Config, *, making: Collection[Unit], layout: str = "replicated") -> None:
    """Refuses missing models and files that a unit would otherwise notice only after hours."""
    corpora.marker_words(config.corpus.dataset, config.evaluate.marker_words)
    if any(unit.stage == "finetune" for unit in making):
        check_model(config)
    trains = any(unit.stage == "unlearn" for unit in making)
    if differing := [f"{name}={value}" for name, value in config.other_recipe()] if trains else []:
        raise refused("retrain_recipe", flags=" ".join(differing))
    read = {name for unit in making for name in unit.settings}
    if "backbone.dtype" in read:
        memory.lay_out(config.backbone, shapes_of(config), layout)
        form = config.sketch.base_format
        if "sketch.base_format" in read and form != "same":
            is_double = config.backbone.double_quant and form == "nf4"
            held = dataclasses.replace(config.backbone, format=form, double_quant=is_double)
            memory.lay_out(held, shapes_of(config), layout)
    for leaf in leaves(config):
        if leaf.metadata["auto"] and leaf.value and leaf.name in read:
            checkpoint.resolve_folder(leaf.value, auto=leaf.metadata["auto"])


def check_mesh(config: Config, devices: int, *, stages: Sequence[str]) -> None:
    """Refuses batches of training that are smaller than the devices that share their rows."""
    sizes = {}
    if not all(OBJECTIVES[name].retrains for name in config.unlearn.algorithms):
        sizes["unlearn"] = config.unlearn.batch_size
    if not config.backbone.checkpoint:
        sizes["backbone"] = config.backbone.batch_size
    if config.finetunes:
        sizes["finetune"] = config.finetune.batch_size
    for stage, size in sizes.items():
        if stage in stages and size < devices:
            raise refused("batch_devices", stage=stage, devices=devices, got=size)


def check_model(config: Config) -> None:
    """Refuses an architecture that is not supported and adapters on layers that it lacks."""
    model_config = shapes_of(config)
    if config.backbone.adapter:
        # Adapters are small: one that does not fit is found before the model is loaded.
        source = adapter_source(config)
        load_adopted(config, source, model_config)
        own = _check_own_tokenizer(config, model_config)
        named = config.backbone.checkpoint, config.backbone.revision
        doubts = [mistaken.describe_base(source, checkpoint_folder(config), *named), own]
    else:
        decoder.abstract(model_config, lora_config_of(config, model_config))
        if config.references.base:
            _check_references_base(config, model_config)
        doubts = [_doubt_checkpoint(config)] if config.backbone.checkpoint else []
    for line in filter(None, doubts):
        print(f"    {line}", file=sys.stderr)
    if config.backbone.checkpoint:
        checkpoint.check_weights(checkpoint_folder(config))


def _doubt_checkpoint(config: Config) -> str:
    """Returns a line if a checkpoint's folder also has an adapter, which is not applied."""
    folder = checkpoint_folder(config)
    if not (folder / storage.ADAPTER_CONFIG).is_file():
        return ""
    unused = "has an adapter too, which the run does not use: give it as --adapter to use it"
    return f"{shown(str(folder), 120)} {unused}"


def _check_own_tokenizer(config: Config, shapes: decoder.ModelConfig) -> str:
    """Returns the difference of an adapter's own tokenizer from the checkpoint's, or refuses it."""
    folders = tokenizer_folders(config)
    if len(folders) == 1:
        return ""
    own, where = tokenization.load_tokenizer(*folders), shown(str(folders[0]), 120)
    mend = f"its embedding was resized in training. Instead, {MERGE}"
    checkpoint.check_vocabulary(shapes, own.vocab_size, origin=where, mend=mend)
    if not (folders[1] / "tokenizer.json").is_file():
        return ""
    differs = tokenization.describe_difference(own, tokenization.load_tokenizer(folders[1]))
    decides = f"the tokenizer files next to the adapter {where} decide"
    return f"{decides}; they differ from the checkpoint's in {differs}" if differs else ""


def shapes_of(config: Config) -> decoder.ModelConfig:
    """Returns the model settings of the checkpoint or of the model that is trained here."""
    if not config.backbone.checkpoint:
        return model_of(config)[1]
    return checkpoint.read_config(checkpoint_folder(config))


def _check_references_base(config: Config, model_config: decoder.ModelConfig) -> None:
    """Refuses a model before fine-tuning of another shape; its tokens must be the same ones."""
    shapes = checkpoint.read_config(checkpoint.resolve_folder(config.references.base))
    shapes, model_config = shapes.text_part, model_config.text_part
    names = ("model_type", "hidden_size", "num_hidden_layers", "intermediate_size")
    differing = [
        f"{name}={shown(getattr(shapes, name))}, not {shown(getattr(model_config, name))}"
        for name in names
        if getattr(shapes, name) != getattr(model_config, name)
    ]
    if differing:
        must = "must be what --backbone.checkpoint was fine-tuned from"
        raise ValueError(f"--references.base {must}, got {'; '.join(differing)}: correct it")


def is_measurable(config: Config, corpus: AnyCorpus) -> bool:
    """Returns whether there are target or normal queries to measure a run on."""
    if config.retrieve.held_out:  # they are made of training rows
        return sets.can_be_asked(corpus.train)
    split = config.references.query_split
    return any(corpus.queries[f"{split}_{kind}"] for kind in ("target", "normal"))


def check_corpus(
    config: Config,
    corpus: AnyCorpus,
    whole: Encoded | None,
    *,
    stages: Sequence[str],
    shapes: decoder.ModelConfig | None = None,
) -> None:
    """Refuses a corpus that makes later stages impossible or useless; names all problems at once.

    Such problems are rows without room for an answer, too few rows for two steps or for the sets,
    and strategies without labels. `whole` None leaves out checks that depend on the
    length of prompts. `shapes` None leaves out the positions of the checkpoint.
    """
    prompt_N = np.zeros(len(corpus.train), np.int64) if whole is None else whole.start_N
    problems = [*_training_problems(config, corpus, prompt_N, stages)]
    if whole is not None:
        problems += _length_problems(config, whole, shapes, stages)
    if _RETRIEVING & set(stages):
        problems += _selection_problems(config, corpus, prompt_N < config.corpus.max_len)
    for name in config.evaluate.robustness if "generate" in stages else ():
        problems += filter(None, [ROBUSTNESS[name].lacks(config.evaluate[name], corpus)])
    if problems:
        raise ValueError(listed_problems(problems))


def _length_problems(
    config: Config, whole: Encoded, shapes: decoder.ModelConfig | None, stages: Sequence[str]
) -> Iterator[str]:
    """Yields the problems of rows with more tokens than a batch or the model takes."""
    need = -(-min(int(whole.lengths_N.max(initial=0)), config.corpus.max_len) // 8) * 8
    if "sketch" in stages and need > config.sketch.batch_tokens:
        got = f"got {config.sketch.batch_tokens}: raise it or lower --corpus.max_len"
        yield f"--sketch.batch_tokens must be at least {need} for the longest row, {got}"
    positions = shapes.text_part.max_position_embeddings if shapes else sys.maxsize
    limits = {"corpus": config.corpus.max_len, "unlearn": config.unlearn.max_len}
    limits |= {"finetune": config.finetune.max_len} if config.finetunes else {}
    for stage, max_len in limits.items():
        longest = min(int(whole.lengths_N.max(initial=0)), max_len)
        if longest > positions and stage in ("corpus", *stages):
            must = f"must be at most {positions}, the positions of the model"
            yield f"--{stage}.max_len {must}, got {max_len} and rows of {longest} tokens: lower it"


def _training_problems(
    config: Config, corpus: AnyCorpus, prompt_N: np.ndarray, stages: Sequence[str]
) -> Iterator[str]:
    """Yields the problems of a stage that trains, from the length of each prompt."""
    rows, longest, finetune = corpus.train, config.corpus.max_len, config.finetune
    if not config.finetunes:
        stages = [stage for stage in stages if stage != "finetune"]
    to_finetune = finetune.max_len or longest
    if "finetune" in stages and np.all(prompt_N >= to_finetune):
        yield f"--finetune.max_len={to_finetune} leaves no training example an answer: raise it"
    to_unlearn = config.unlearn.max_len or longest
    # A labeled target is there to be forgotten; other rows are looked at when they are chosen.
    is_target_N = np.array([row.is_target is True for row in rows])
    lost = np.flatnonzero(is_target_N & (prompt_N >= to_unlearn) & (prompt_N < longest))
    if "unlearn" in stages and len(lost):
        names = some_of((rows[int(row)].example_id for row in lost), 3)
        left = f"{len(lost)} labeled targets without an answer ({names})"
        yield f"--unlearn.max_len={to_unlearn} leaves {left}: raise it"
    if "backbone" in stages and not config.backbone.checkpoint and not corpus.backbone:
        name = config.corpus.dataset
        yield f"--corpus.dataset={name} has no rows to pretrain a model on: give a checkpoint"
    steps = num_steps_of(len(rows), batch_size=finetune.batch_size, num_epochs=finetune.epochs)
    if "finetune" in stages and steps == 1 and finetune.warmup:
        got = f"got 1 for {len(rows)} examples"
        yield f"fine-tuning must take 2 steps or more, {got}: lower --finetune.batch_size"


def _selection_problems(
    config: Config, corpus: AnyCorpus, has_answer_N: Bool[np.ndarray, " N"]
) -> list[str]:
    """Returns why strategies cannot choose sets, found by choosing with made-up scores.

    Rows without an answer are barred: they have no gradient and are in no set.
    """
    settings, rows = config.retrieve, corpus.train
    eligible = int(has_answer_N.sum())
    num_barred = len(rows) - eligible
    is_target_N = np.array([bool(row.is_target) for row in rows])
    sizes: tuple[int, int] | None = (0, 0)
    if not all(STRATEGIES[name].brings_sets for name in settings.strategies):
        counts = {"num_targets": int(is_target_N.sum()), "num_eligible": eligible}
        try:
            sizes = sets.set_sizes(settings, **counts)
        except ValueError as error:
            return [str(error)]
    num_forget, num_retain = sizes or (1, 1)  # what stands out is not known yet
    if num_forget + num_retain > eligible:
        without = f", {num_barred} of them without an answer" if num_barred else ""
        return [
            f"--retrieve.num_forget and --retrieve.num_retain must be at most {len(rows):,} "
            f"training examples together{without}, got {num_forget:,} and {num_retain:,}: lower one"
        ]
    # Any texts and the best possible scores: targets first and about zero, so that both sets have
    # suitable rows. Problems with these occur with all scores.
    score_N = is_target_N + np.linspace(0.0, 0.5, len(rows))
    score_N -= score_N.mean()
    blank: dict[str, Any] = {"instruction": "a", "input": "", "output": ""}
    request = Request(
        examples=[row._replace(**blank) for row in rows],
        is_eligible_N=np.ones(len(rows), bool),
        seed=config.seed,
        queries=[row._replace(**blank) for row in corpus.queries["retrieval"][:1]],
        fields=formats.parse_fields(getattr(config.corpus.own, "fields", "")),
        num_forget=num_forget,
        num_retain=num_retain,
    )
    names_of: dict[str, list[str]] = {}
    for name in settings.strategies:
        record = STRATEGIES[name]
        scores = {need: score_N for need in record.needs}
        try:
            own = request._replace(settings=settings[name], scores=scores)
            # Files name their rows by what they say.
            named = own._replace(examples=rows, is_eligible_N=has_answer_N)
            choose(record, named if record.brings_sets else own)
        except ValueError as error:
            names_of.setdefault(str(error), []).append(name)
    return [f"--retrieve.strategies={','.join(names)}: {text}" for text, names in names_of.items()]
