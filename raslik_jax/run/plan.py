"""The units of a run, in order, each with what decides its result."""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, get_args

from raslik_jax.config import STAGES, Algorithm, Config, config_from_json, to_json
from raslik_jax.data import corpora, howdy, tokenization
from raslik_jax.files import read_json
from raslik_jax.index.format import INDEX_FORMAT
from raslik_jax.messages import shown, some_of
from raslik_jax.pipeline import Plan, Unit, announcement, run_units
from raslik_jax.run import checking
from raslik_jax.run.stages.discriminating import data_dir, make_discriminator, measure_before
from raslik_jax.run.stages.evaluate import evaluate, retain_answers
from raslik_jax.run.stages.likelihoods import (
    make_questions,
    reference_perplexity,
    reference_questions,
    variant_perplexity,
    variant_questions,
)
from raslik_jax.run.stages.measuring import generate, unlearn
from raslik_jax.run.stages.reporting import report
from raslik_jax.run.stages.retrieving import (
    make_diagnosis,
    make_embeddings,
    make_exact_scores,
    make_index,
    make_query_sketches,
    make_scores,
    make_sets,
)
from raslik_jax.run.stages.training import (
    make_adapter,
    make_backbone,
    make_corpus,
    make_references,
    make_retrieval_answers,
)
from raslik_jax.run.workspace import StoredCorpus, Workspace
from raslik_jax.sketch.projections import SKETCH_FORMAT

# Files of a checkpoint that its tokenizer is read from, and not its weights.
_TOKENIZER_SUFFIXES = (".json", ".txt", ".jinja", ".model")


def _settings(*parts: Any, without: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the fields of settings as JSON values, but for some."""
    merged: dict[str, Any] = {}
    for part in parts:
        merged |= _pick(part, *(f.name for f in dataclasses.fields(part) if f.name not in without))
    return merged


def _pick(part: Any, *names: str) -> dict[str, Any]:
    """Returns some fields of settings as JSON values."""
    values = {f"{part.prefix()}{name}": getattr(part, name) for name in names}
    return json.loads(json.dumps(values))


def _source(name: str, path: str) -> tuple[dict[str, Any], dict[str, pathlib.Path]]:
    """Returns how a checkpoint counts: one of the hub by its name, a folder by its content."""
    if path and pathlib.Path(path).is_dir():
        return {}, {name: pathlib.Path(path)}
    return {name: path}, {}


def plan_units(config: Config, workspace: Workspace) -> tuple[Unit, ...]:
    """Returns all units of a run in order, each with what it reads and what decides its result."""
    seed = {"seed": config.seed}
    text = _pick(config.corpus, "template", "max_len")
    bootstrap = seed | _pick(config.evaluate, "bootstrap_resamples")
    split = config.references.query_split
    measured_on = (f"corpus/{split}_target.jsonl", f"corpus/{split}_normal.jsonl")
    tokenizer, train = "corpus/tokenizer", "corpus/train.jsonl"

    def bind(function: Callable[..., None], *args: str) -> Callable[[pathlib.Path], None]:
        return functools.partial(function, workspace, *args)

    # What the model is loaded from: its weights, how they are held, and the shape of its adapter.
    held = ("dtype", "format", "double_quant")
    named, weights = _source("checkpoint", config.backbone.checkpoint)
    if config.backbone.checkpoint:
        named |= _pick(config.backbone, "revision")
    model = (
        seed
        | named
        | _pick(config.backbone, *held)
        | _pick(config.finetune, "lora_rank", "lora_alpha", "lora_dropout", "lora_targets")
    )
    model_reads = (tokenizer,) if config.backbone.checkpoint else (tokenizer, "backbone/model")
    finetuned = (*model_reads, "finetune/adapter")
    sketched = (*model_reads, "finetune")
    if config.sketch.gradient_at != "trajectory":
        names = {"finetuned": "adapter", "initial": "initial"}
        sketched = (*model_reads, f"finetune/{names[config.sketch.gradient_at]}")

    decoding = text | model | _settings(config.references, without=("query_split",))
    likelihood = text | model | _pick(config.sketch, "batch_tokens")
    words = config.evaluate.marker_words
    marker = {"marker_words": pathlib.Path(words)} if words else {}
    queries: tuple[str, ...] = ("corpus/retrieval.jsonl",)
    if config.sketch.query_output != "gold":
        queries += ("references/retrieval/finetuned.jsonl",)
    asked = _pick(config.sketch, "query_output")

    sources = corpora.source_files(config.corpus)
    corpus = _settings(config.corpus, without=("data_dir", "answers_cache", *sources))
    sources |= {
        f"checkpoint/{path.name}": path
        for folder in weights.values()
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix in _TOKENIZER_SUFFIXES
    }
    units = [
        Unit("corpus", (), seed | corpus | named, bind(make_corpus), files=sources),
        Unit(
            "backbone",
            () if config.backbone.checkpoint else ("corpus/backbone.jsonl", tokenizer),
            seed | text | named | _settings(config.backbone, without=("checkpoint", *held)),
            bind(make_backbone),
            files=weights,
        ),
        Unit(
            "finetune",
            (train, *model_reads),
            text | model | _settings(config.finetune, without=("checkpoint_steps",)),
            bind(make_adapter),
            files=weights,
            is_resumable=True,
        ),
        Unit(
            "references/retrieval",
            ("corpus/retrieval.jsonl", *finetuned),
            decoding | asked,
            bind(make_retrieval_answers),
            files=weights,
        ),
        Unit(
            "references/evaluation",
            (*measured_on, *finetuned),
            decoding | {"query_split": split},
            bind(make_references),
            files=weights | marker,
        ),
    ]
    judged: tuple[str, ...] = ()
    if config.evaluate.non_sf == "classifier":
        start, encoder = _source("classifier_checkpoint", config.evaluate.classifier_checkpoint)
        classifying = {
            name: value
            for name, value in _settings(config.evaluate).items()
            if name.startswith("evaluate.classifier_") and name != "evaluate.classifier_checkpoint"
        }
        is_theirs = config.corpus.dataset in corpora.MARKER_WORDS
        files = howdy.genuine_files(data_dir(config)) if is_theirs else ()
        genuine = {path.name: path for path in files}
        judged = ("discriminator",)
        units += [
            Unit(
                "discriminator",
                (train,),
                seed | classifying | start | _pick(config.corpus, "vocab_size"),
                bind(make_discriminator),
                files=encoder | genuine,
                is_resumable=True,
            ),
            Unit(
                "references/non_sf",
                (*measured_on, "references/evaluation", *judged),
                bootstrap | {"query_split": split, "non_sf": config.evaluate.non_sf},
                bind(measure_before),
            ),
        ]
    likely: list[Unit] = []
    drawn = likelihood | asked | _pick(config.evaluate, "perplexity_examples")
    drawn |= {"query_split": split}
    if config.evaluate.perplexity_examples:
        # Before anything is traced: it says whether there is a behavior to trace.
        likely.append(
            Unit(
                "references/perplexity",
                (train, *measured_on, *queries, "references/evaluation", *finetuned),
                drawn,
                bind(reference_perplexity),
                files=weights,
            )
        )
    units += likely
    # The diagnosis reads gradients of its own: it changes neither the index nor what follows.
    sketching = text | model | _settings(config.sketch, without=("diagnose", "query_output"))
    sketching["formats"] = {"index": INDEX_FORMAT, "projection": SKETCH_FORMAT}
    scored = _pick(config.retrieve, "center", "aggregate")
    margin = _pick(config.retrieve, "select", "forget_threshold", "retain_threshold")
    units += [
        Unit(
            "sketch",
            (train, *sketched),
            sketching,
            bind(make_index),
            files=weights,
            is_resumable=True,
        ),
        Unit(
            "retrieve/queries",
            (*queries, *sketched),
            sketching | asked,
            bind(make_query_sketches),
            files=weights,
        ),
        Unit(
            "retrieve/influence",
            (train, *queries, "sketch/index", "retrieve/queries"),
            scored | asked | (margin if config.retrieve.select == "margin" else {"select": ""}),
            bind(make_scores),
        ),
    ]
    if config.sketch.diagnose:
        units.append(
            Unit(
                "retrieve/diagnosis",
                (train, *sketched),
                sketching | _pick(config.sketch, "diagnose"),
                bind(make_diagnosis),
                files=weights,
            )
        )
    more_reads: dict[str, tuple[str, ...]] = {}
    if "embedding" in config.retrieve.strategies:
        start, encoder = _source("encoder_checkpoint", config.retrieve.encoder_checkpoint)
        units.append(
            Unit(
                "retrieve/embeddings",
                (train, *queries),
                start | asked | _pick(config.retrieve, "query_text", "encoder_pooling"),
                bind(make_embeddings),
                files=encoder,
            )
        )
        more_reads["embedding"] = ("retrieve/embeddings",)
    if "exact" in config.retrieve.strategies:
        units.append(
            Unit(
                "retrieve/exact_kernel",
                (train, *queries, *sketched),
                sketching | asked | scored,
                bind(make_exact_scores),
                files=weights,
            )
        )
        more_reads["exact"] = ("retrieve/exact_kernel",)
    selecting = _settings(
        config.retrieve,
        without=("strategies", "center", "encoder_checkpoint", "encoder_pooling"),
    )
    for strategy in config.retrieve.strategies:
        units.append(
            Unit(
                f"retrieve/{strategy}",
                (train, *queries, "retrieve/influence", *more_reads.get(strategy, ())),
                seed | asked | selecting,
                bind(make_sets, strategy),
            )
        )

    variants = [(s, a) for s in config.retrieve.strategies for a in config.unlearn.algorithms]
    rates = [f"{name}_learning_rate" for name in get_args(Algorithm)]
    unlearning = text | model | _settings(config.unlearn, without=("algorithms", "choice", *rates))
    for strategy, name in variants:
        units.append(
            Unit(
                f"unlearn/{strategy}-{name}",
                (f"retrieve/{strategy}", *finetuned),
                unlearning | {"learning_rate": workspace.learning_rate(strategy, name)},
                bind(unlearn, strategy, name),
                files=weights,
                is_resumable=True,
            )
        )
    trained = _pick(config.unlearn, "parameters")

    def unlearned(strategy: str, name: str) -> tuple[str, ...]:
        folder = f"unlearn/{strategy}-{name}"
        return tuple(f"{folder}/epoch-{epoch}" for epoch in workspace.epochs(strategy, name))

    for strategy, name in variants:
        units.append(
            Unit(
                f"generate/{strategy}-{name}",
                (*measured_on, *model_reads, *unlearned(strategy, name)),
                decoding | trained | {"query_split": split},
                bind(generate, strategy, name),
                files=weights,
            )
        )
    measures: list[Unit] = []
    if config.evaluate.perplexity_examples:
        reads = (train, *measured_on, *queries, *model_reads)
        measures += [
            Unit(
                f"generate/perplexity-{strategy}-{name}",
                (*reads, *unlearned(strategy, name), f"generate/{strategy}-{name}"),
                drawn | trained,
                bind(variant_perplexity, strategy, name),
                files=weights,
            )
            for strategy, name in variants
        ]
    if config.corpus.dataset == "tofu" and config.evaluate.tofu_questions:
        measures += [
            Unit(
                "references/questions",
                (),
                _pick(config.corpus, "tofu_forget") | _pick(config.evaluate, "tofu_questions"),
                bind(make_questions),
                files={name: path for name, path in sources.items() if name == "tofu"},
            ),
            Unit(
                "references/tofu",
                ("references/questions", *finetuned),
                likelihood | decoding,
                bind(reference_questions),
                files=weights,
            ),
            *(
                Unit(
                    f"generate/tofu-{strategy}-{name}",
                    ("references/questions", *model_reads, *unlearned(strategy, name)),
                    likelihood | decoding | trained,
                    bind(variant_questions, strategy, name),
                    files=weights,
                )
                for strategy, name in variants
            ),
        ]
    # They stand beside the answers: asking for another measure makes neither again.
    units += measures
    likely += measures
    sets = tuple(f"retrieve/{strategy}" for strategy in config.retrieve.strategies)
    generated = tuple(f"generate/{strategy}-{name}" for strategy, name in variants)
    answers = (train, *measured_on, "references/evaluation", *sets, *generated)
    curves = ("finetune/losses.json", *(f"unlearn/{s}-{a}/steps.json" for s, a in variants))
    if not config.backbone.checkpoint:
        curves += ("backbone/losses.json",)
    units += [
        Unit(
            "evaluate",
            (*answers, *(unit.name for unit in likely), *judged),
            # metrics.json carries the settings that it was measured with: all of them.
            to_json(config),
            bind(evaluate),
            files=marker | _retain_model(config),
            is_shared=False,
        ),
        Unit(
            "report",
            (*answers, "evaluate", "retrieve/influence", *curves),
            {"forms": ["markdown", "html"]},
            bind(report),
            files=marker,
            is_shared=False,
        ),
    ]
    return tuple(units)


def open_run(root: pathlib.Path, *needs: str) -> Workspace:
    """Returns the work directory of a run whose results may be read.

    Args:
      root: work directory.
      needs: units that must be whole, and made by the settings in its config.json from the files
        that are there now.

    Raises:
      ValueError: the run is not there, or lacks one of them.
    """
    recorded = read_json(root / "config.json", dict, mend="give the folder of a run")
    workspace = Workspace(root, config_from_json(recorded))
    done = Plan(root, plan_units(workspace.config, workspace)).survey().done
    lacking = [name for name in needs if name not in done]
    if lacking:
        raise ValueError(
            f"{shown(str(root), 120)} must hold {some_of(lacking)} as its config.json has it: run "
            "experiments/run.py on it"
        )
    return workspace


def _retain_model(config: Config) -> dict[str, pathlib.Path]:
    """Returns the file of the retain model's answers, where a run of it is named."""
    if config.corpus.dataset != "tofu" or not config.evaluate.tofu_retain_run:
        return {}
    return {"tofu_retain_run": retain_answers(config)}


def _measures(unit: Unit) -> bool:
    """Returns whether a unit serves to measure models alone: no set and no model depends on it."""
    if unit.stage == "references":
        return unit.name != "references/retrieval"
    return unit.stage in ("discriminator", "generate", "evaluate", "report")


def _make_checked_corpus(workspace: Workspace, stages: Sequence[str], folder: pathlib.Path) -> None:
    """Makes the corpus; one that later stages cannot take replaces nothing."""
    make_corpus(workspace, folder)
    tokenizer = tokenization.load_tokenizer(folder / "tokenizer")
    checking.check_corpus(workspace.config, StoredCorpus(folder), tokenizer, stages=stages)


def run(
    config: Config,
    workdir: pathlib.Path,
    *,
    stages: Sequence[str] = STAGES,
    shared: pathlib.Path | None = None,
    on_start: Callable[[], None] = lambda: None,
) -> None:
    """Runs the stages that are not up to date, and shows the table at the end.

    The corpus comes first: what it shows of later stages is said before they run. Without queries
    to measure on, the stages that measure are left out.

    Args:
      config: settings of the run.
      workdir: where results go.
      stages: those to run.
      shared: as in `run_units`.
      on_start: called when nothing is left to refuse, before the first unit after the corpus runs.

    Raises:
      ValueError: the settings, the model or the corpus do not allow these stages.
    """
    workspace = Workspace(workdir, config)
    units = plan_units(config, workspace)
    plan = Plan(workdir, units).survey()
    making = {unit.name for unit in units if unit.stage in stages} - plan.done.keys()
    checking.check_inputs(config, making=making)
    if "corpus" in stages:
        if "corpus" in making:
            # Each is looked at again when it is known whether the corpus has changed.
            later = [unit for unit in units if unit.stage in stages and unit.name != "corpus"]
            for line in announcement(plan, later):
                print(line)
        checked = functools.partial(_make_checked_corpus, workspace, stages)
        first = [u._replace(run=checked) if u.name == "corpus" else u for u in units]
        run_units(workdir, first, stages=("corpus",), shared=shared)
        stages = [stage for stage in stages if stage != "corpus"]
    corpus_unit = next(unit for unit in units if unit.name == "corpus")
    if Plan(workdir, units).check(corpus_unit):
        checking.check_corpus(config, workspace.corpus, workspace.tokenizer, stages=stages)
        if not checking.is_measurable(config, workspace.corpus):
            left = [unit for unit in units if not _measures(unit)]
            if any(_measures(unit) and unit.stage in stages for unit in units):
                split = config.references.query_split
                print(
                    f"nothing is measured: the corpus must have {split}_target or {split}_normal "
                    "queries for that"
                )
            units = tuple(left)
    run_units(workdir, units, stages=stages, shared=shared, on_start=on_start)
    if "report" in stages and units[-1].stage == "report":
        print()
        print((workdir / "report" / "table.txt").read_text())
        print(f"report: {workdir / 'report' / 'report.html'} (and report.md beside it)")
