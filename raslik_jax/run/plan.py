"""The units of a run, in order: what each reads, and the settings that decide its result."""

import functools
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from raslik_jax import settings as settings_lib
from raslik_jax.config import STAGES, Config, config_from_json, to_json
from raslik_jax.data import encoding
from raslik_jax.data.corpora.record import Evaluation
from raslik_jax.evaluate.non_sf import NON_SF
from raslik_jax.files import read_json
from raslik_jax.index.format import INDEX_FORMAT
from raslik_jax.messages import shown, some_of
from raslik_jax.retrieve.strategies import STRATEGIES
from raslik_jax.run import checking
from raslik_jax.run.stages import (
    backbone,
    corpus,
    discriminator,
    evaluate,
    finetune,
    generate,
    references,
    reporting,
    retrieve,
    sketch,
    unlearn,
)
from raslik_jax.run.units import Plan, Unit, announcement, run_units
from raslik_jax.run.workspace import StoredCorpus, Workspace
from raslik_jax.sketch.projections import SKETCH_FORMAT

# Files of a checkpoint that its tokenizer is read from, and not its weights.
_TOKENIZER_SUFFIXES = (".json", ".txt", ".jinja", ".model")
_TRAIN, _ROWS, _TOKENIZER = "corpus/train.jsonl", "corpus/train.npz", "corpus/tokenizer"

# Settings by what they decide; a stage's name stands for all of it, see `pick`.
_TEXT = ("corpus.template", "corpus.max_len")
# What the model is loaded from: its weights, how they are held, and the shape of its adapter.
_MODEL = (
    "seed",
    *("backbone.checkpoint", "backbone.revision"),
    *("backbone.dtype", "backbone.format", "backbone.double_quant"),
    *("finetune.lora_rank", "finetune.lora_alpha", "finetune.lora_dropout"),
    "finetune.lora_targets",
)
_DECODING = (*_TEXT, *_MODEL, "references.max_new_tokens", "references.decode_batch_size")
_LIKELIHOOD = (*_TEXT, *_MODEL, "sketch.batch_tokens")
_GRADIENT = (
    *(*_TEXT, *_MODEL),
    *("sketch.gradient_at", "sketch.loss", "sketch.normalize", "sketch.targets"),
    *("sketch.base_format", "sketch.batch_tokens", "sketch.num_buckets"),
)
_SKETCH = (*_GRADIENT, "sketch.projection", "sketch.size")
_RULE = (
    *("retrieve.select", "retrieve.num_forget", "retrieve.num_retain"),
    *("retrieve.forget_threshold", "retrieve.retain_threshold", "retrieve.margin_z"),
    *("retrieve.forget_share", "retrieve.retain_share"),
)
_SCRATCH = (
    *("backbone.hidden_size", "backbone.num_hidden_layers", "backbone.num_attention_heads"),
    *("backbone.steps", "backbone.batch_size", "backbone.learning_rate"),
)
_PERPLEXITY = (
    *(*_LIKELIHOOD, "sketch.query_output"),
    *("evaluate.perplexity_examples", "references.query_split"),
)
_FORMATS = {"formats": {"index": INDEX_FORMAT, "projection": SKETCH_FORMAT}}
_KERNEL = ("retrieve.center", "retrieve.aggregate", "sketch.query_output")


def pick(
    config: Config, names: Sequence[str]
) -> tuple[dict[str, Any], dict[str, str | os.PathLike[str]]]:
    """Returns the values of settings, and the files and folders that others of them name.

    Args:
      config: settings of a run.
      names: dotted; a stage's stands for all its settings but those that choose members, a
        member's for all its own. Settings that no result depends on are left out.
    """
    values: dict[str, Any] = {}
    files: dict[str, str | os.PathLike[str]] = {}
    for leaf in settings_lib.leaves(config):
        group, family = leaf.name.rpartition(".")[0], leaf.metadata["family"]
        if leaf.name in names or (group in names and family is None and leaf.metadata["decides"]):
            if leaf.metadata["is_path"] and leaf.value and os.path.exists(leaf.value):
                files[leaf.name] = leaf.value
            else:
                values[leaf.name] = list(leaf.value) if type(leaf.value) is tuple else leaf.value
    return values, files


class _Planner:
    """Plans the units of one run, a method for each part of it."""

    def __init__(self, config: Config, workspace: Workspace):
        self.config = config
        self.workspace = workspace
        is_loaded = bool(config.backbone.checkpoint)
        self.model = (_TOKENIZER,) if is_loaded else (_TOKENIZER, "backbone/model")
        self.finetuned = (*self.model, "finetune/adapter")
        adapters = {"finetuned": "finetune/adapter", "initial": "finetune/initial"}
        self.sketched = (*self.model, adapters.get(config.sketch.gradient_at, "finetune"))
        self.queries: tuple[str, ...] = ("corpus/retrieval.jsonl",)
        if config.sketch.query_output != "gold":
            self.queries += ("references/retrieval/finetuned.jsonl",)
        split = config.references.query_split
        self.measured_on = (f"corpus/{split}_target.jsonl", f"corpus/{split}_normal.jsonl")
        self.variants = [
            (strategy, algorithm)
            for strategy in config.retrieve.strategies
            for algorithm in config.unlearn.algorithms
        ]

    def unit(
        self,
        name: str,
        make: Callable[..., None],
        *arguments: Any,
        reads: Sequence[str] = (),
        settings: Sequence[str] = (),
        values: Mapping[str, Any] = {},
        files: Mapping[str, str | os.PathLike[str]] = {},
        **options: bool,
    ) -> Unit:
        """Returns a unit.

        Args:
          name: of the unit.
          make: makes the result from the workspace, these arguments and a folder.
          *arguments: between workspace and folder.
          reads: what it reads of earlier units.
          settings: names of those that decide the result, see `pick`.
          values: what else decides it.
          files: what else it reads outside the work directory.
          **options: as in `Unit`.
        """
        decided, named = pick(self.config, settings)
        run = functools.partial(make, self.workspace, *arguments)
        reads = tuple(dict.fromkeys(reads))
        return Unit(name, reads, {**decided, **values}, run, files={**named, **files}, **options)

    def training(self) -> Iterator[Unit]:
        """Yields corpus, backbone and fine-tuning."""
        config = self.config
        values, checkpoint = pick(config, ("backbone.checkpoint", "backbone.revision"))
        tokenizer = {
            f"checkpoint/{path.name}": path
            for folder in checkpoint.values()
            for path in sorted(pathlib.Path(folder).iterdir())
            if path.is_file() and path.suffix in _TOKENIZER_SUFFIXES
        }
        yield self.unit(
            "corpus",
            corpus.make_corpus,
            settings=("seed", "corpus", "corpus.dataset", f"corpus.{config.corpus.dataset}"),
            values=values,
            files=config.corpus.source_files() | tokenizer,
        )
        if not config.backbone.checkpoint:
            yield self.unit(
                "backbone",
                backbone.make_backbone,
                reads=("corpus/backbone.npz", _TOKENIZER),
                settings=("seed", *_TEXT, *_SCRATCH),
            )
        yield self.unit(
            "finetune",
            finetune.make_adapter,
            reads=(_TRAIN, _ROWS, *self.model),
            settings=(*_TEXT, *_MODEL, "finetune"),
            is_resumable=True,
        )
        yield self.unit(
            "references/retrieval",
            references.make_retrieval_answers,
            reads=("corpus/retrieval.jsonl", *self.finetuned),
            settings=(*_DECODING, "sketch.query_output"),
        )

    def references(self) -> Iterator[Unit]:
        """Yields what is measured before anything is traced: is there a behavior to trace?"""
        yield self.unit(
            "references/evaluation",
            references.make_references,
            reads=(*self.measured_on, *self.finetuned),
            settings=(*_DECODING, "references.query_split", "evaluate.marker_words"),
        )
        if NON_SF[self.config.evaluate.non_sf].is_trained:
            yield from self._classifier()
        if self.config.evaluate.perplexity_examples:
            yield self.unit(
                "references/perplexity",
                references.make_perplexities,
                reads=(*self._drawn(), "references/evaluation", *self.finetuned),
                settings=_PERPLEXITY,
            )

    def _classifier(self) -> Iterator[Unit]:
        marker = self.config.corpus.record.marker
        genuine = marker.genuine_files(self.config.corpus.folder) if marker else ()
        yield self.unit(
            "discriminator",
            discriminator.make_discriminator,
            reads=(_TRAIN,),
            settings=("seed", "corpus.vocab_size", "evaluate.classifier"),
            files={path.name: path for path in genuine},
            is_resumable=True,
        )
        yield self.unit(
            "references/non_sf",
            discriminator.measure_before,
            reads=(*self.measured_on, "references/evaluation", "discriminator"),
            settings=(
                *("seed", "references.query_split"),
                *("evaluate.bootstrap_resamples", "evaluate.non_sf"),
            ),
        )

    def _drawn(self) -> tuple[str, ...]:
        """Returns what the rows that perplexity is taken on are drawn from."""
        return (_TRAIN, *self.measured_on, *self.queries)

    def scores(self) -> Iterator[Unit]:
        """Yields what the chosen strategies read; without one by gradients, none is taken."""
        needed = retrieve.needs_of(self.config)
        makers = {
            "influence": self._influence,
            "embeddings": self._embeddings,
            "exact_kernel": self._exact_kernel,
        }
        for need, make in makers.items():
            if need in needed:
                yield from make()
        if self.config.sketch.diagnose:
            yield self.unit(
                "retrieve/diagnosis",
                sketch.make_diagnosis,
                reads=(_ROWS, *self.sketched),
                settings=(*_SKETCH, "sketch.diagnose"),
                values=_FORMATS,
            )

    def _influence(self) -> Iterator[Unit]:
        yield self.unit(
            "sketch",
            sketch.make_index,
            reads=(_TRAIN, _ROWS, *self.sketched),
            settings=(*_SKETCH, "sketch.dtype", "sketch.chunk_rows"),
            values=_FORMATS,
            is_resumable=True,
        )
        yield self.unit(
            "retrieve/queries",
            sketch.make_query_sketches,
            reads=(*self.queries, *self.sketched),
            settings=(*_SKETCH, "sketch.query_output"),
            values=_FORMATS,
        )
        yield self.unit(
            "retrieve/influence",
            retrieve.make_scores,
            reads=(_TRAIN, *self.queries, "sketch/index", "retrieve/queries"),
            settings=_KERNEL,
        )

    def _embeddings(self) -> Iterator[Unit]:
        yield self.unit(
            "retrieve/embeddings",
            retrieve.make_embeddings,
            reads=(_TRAIN, *self.queries),
            settings=("retrieve.embedding", "retrieve.aggregate", "sketch.query_output"),
        )

    def _exact_kernel(self) -> Iterator[Unit]:
        yield self.unit(
            "retrieve/exact_kernel",
            retrieve.make_exact_scores,
            reads=(_TRAIN, _ROWS, *self.queries, *self.sketched),
            settings=(*_GRADIENT, *_KERNEL),
        )

    def sets(self) -> Iterator[Unit]:
        """Yields the sets of every strategy, and the models unlearned with them."""
        needed = retrieve.needs_of(self.config)
        is_by_score = self.config.retrieve.select in retrieve.RULES_ON_SCORES
        is_by_noise = self.config.retrieve.select == "margin"
        index = ("sketch/index", "retrieve/queries", *self.queries) if is_by_noise else ()
        yield self.unit(
            "retrieve/sizes",
            retrieve.make_sizes,
            reads=(_TRAIN, _ROWS, *(("retrieve/influence",) if is_by_score else ()), *index),
            settings=(*_TEXT, *_RULE, *(("retrieve.center",) if is_by_noise else ())),
        )
        for strategy in self.config.retrieve.strategies:
            # What is anti-aligned is told of every strategy, where it is known.
            read = {*STRATEGIES[strategy].needs, *({"influence"} & needed)}
            yield self.unit(
                f"retrieve/{strategy}",
                retrieve.make_sets,
                strategy,
                reads=(
                    *(_TRAIN, *self.queries, "retrieve/sizes"),
                    *(f"retrieve/{need}" for need in sorted(read)),
                ),
                settings=(
                    *("seed", "sketch.query_output", "retrieve.aggregate", "retrieve.retain_from"),
                    "retrieve.select",  # whether there is influence to measure sets by
                    f"retrieve.{strategy}",
                ),
            )
        for strategy, algorithm in self.variants:
            rate = self.workspace.learning_rate(strategy, algorithm)
            yield self.unit(
                f"unlearn/{strategy}-{algorithm}",
                unlearn.unlearn,
                *(strategy, algorithm),
                reads=(
                    *(f"retrieve/{strategy}/{kind}.jsonl" for kind in ("forget", "retain")),
                    *(_ROWS, *self.finetuned),
                ),
                settings=(*_TEXT, *_MODEL, "unlearn", f"unlearn.{algorithm}"),
                values={f"unlearn.{algorithm}.learning_rate": rate},
                is_resumable=True,
            )

    def _of_variants(
        self, kind: str, make: Callable[..., None], reads: Sequence[str], settings: Sequence[str]
    ) -> Iterator[Unit]:
        """Yields the measuring of every unlearned model; reads may name the `{variant}`."""
        for strategy, algorithm in self.variants:
            variant = f"{strategy}-{algorithm}"
            epochs = self.workspace.epochs(strategy, algorithm)
            yield self.unit(
                f"generate/{kind}{variant}",
                make,
                generate.Variant(strategy, algorithm),
                reads=(
                    *(path.format(variant=variant) for path in reads),
                    *self.model,
                    *(f"unlearn/{variant}/epoch-{epoch}" for epoch in epochs),
                ),
                settings=(*settings, "unlearn.parameters"),
            )

    def answers(self) -> Iterator[Unit]:
        """Yields the answers of every unlearned model, and how likely it finds given ones."""
        split = "references.query_split"
        yield from self._of_variants(
            "", generate.write_answers, self.measured_on, (*_DECODING, split)
        )
        # They stand beside the answers: asking for another measure makes neither again.
        if self.config.evaluate.perplexity_examples:
            yield from self._of_variants(
                "perplexity-",
                generate.write_perplexities,
                (*self._drawn(), "generate/{variant}"),
                _PERPLEXITY,
            )
        if self.config.corpus.record.evaluation and self.config.evaluate.questions:
            yield from self._questions(self.config.corpus.record.evaluation)

    def _questions(self, evaluation: Evaluation) -> Iterator[Unit]:
        corpus = self.config.corpus
        sources = corpus.source_files()
        yield self.unit(
            "references/questions",
            references.make_questions,
            settings=(
                "evaluate.questions",
                *(f"corpus.{corpus.dataset}.{name}" for name in evaluation.reads),
            ),
            files={name: path for name, path in sources.items() if name == evaluation.source},
        )
        asked = ("references/questions",)
        settings = (*_LIKELIHOOD, *_DECODING)
        yield self.unit(
            "references/answered",
            generate.write_questions,
            None,
            reads=(*asked, *self.finetuned),
            settings=settings,
        )
        yield from self._of_variants("answered-", generate.write_questions, asked, settings)

    def results(self, measured: Sequence[Unit]) -> Iterator[Unit]:
        """Yields metrics and report.

        Args:
          measured: units of all other stages.
        """
        config = self.config
        sets = [f"retrieve/{strategy}" for strategy in config.retrieve.strategies]
        kinds = ("references", "discriminator", "generate")
        beside = ("references/retrieval", "references/non_sf", "references/questions")
        found = [u.name for u in measured if u.stage in kinds and u.name not in beside]
        reads = (_TRAIN, *self.measured_on, *sets, *found)
        retain = {}
        if config.corpus.record.evaluation and config.evaluate.retain_run:
            retain = {"evaluate.retain_run": evaluate.retain_answers(config)}
        marker = ("evaluate.marker_words",)
        yield self.unit(
            "evaluate",
            evaluate.evaluate,
            reads=reads,
            settings=marker,
            # metrics.json carries the settings that it was measured with: all of them.
            values=to_json(config),
            files=retain,
            is_shared=False,
        )
        names = {unit.name for unit in measured}
        curves = [f"{name}/losses.json" for name in ("backbone", "finetune") if name in names]
        curves += [f"unlearn/{s}-{a}/steps.json" for s, a in self.variants]
        scores = [name for name in ("retrieve/influence",) if name in names]
        yield self.unit(
            "report",
            reporting.report,
            reads=(*reads, "evaluate", *scores, *curves),
            settings=marker,
            values={"forms": ["markdown", "html"]},
            is_shared=False,
        )


def plan_units(
    config: Config, workspace: Workspace, *, is_measured: bool = True
) -> tuple[Unit, ...]:
    """Returns all units of a run in order.

    Args:
      config: settings of the run.
      workspace: its work directory.
      is_measured: whether there are queries to measure it on; without, those units are left out
        that no set and no model depends on.
    """
    planner = _Planner(config, workspace)
    units = [*planner.training()]
    units += planner.references() if is_measured else ()
    units += (*planner.scores(), *planner.sets())
    if is_measured:
        units += planner.answers()
        units += planner.results(units)
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
    making = [unit for unit in units if unit.stage in stages and unit.name not in plan.done]
    checking.check_inputs(config, making={unit.name for unit in making})
    if "corpus" in stages:
        if making and making[0].name == "corpus":
            # Each is looked at again when it is known whether the corpus has changed.
            for line in announcement(plan, making[1:]):
                print(line)
        checked = functools.partial(_make_checked_corpus, workspace, stages)
        first = units[0]._replace(run=checked)
        run_units(workdir, (first, *units[1:]), stages=("corpus",), shared=shared)
        stages = [stage for stage in stages if stage != "corpus"]
    if Plan(workdir, units).check(units[0]):
        checking.check_corpus(config, workspace.corpus, workspace.train_rows, stages=stages)
        if not checking.is_measurable(config, workspace.corpus):
            units = _without_measures(units, workspace, stages)
    run_units(workdir, units, stages=stages, shared=shared, on_start=on_start)
    if "report" in stages and units[-1].stage == "report":
        print()
        print((workdir / "report" / "table.txt").read_text())
        print(f"report: {workdir / 'report' / 'report.html'} (and report.md beside it)")


def _make_checked_corpus(workspace: Workspace, stages: Sequence[str], folder: pathlib.Path) -> None:
    """Makes the corpus; one that later stages cannot take replaces nothing."""
    corpus.make_corpus(workspace, folder)
    whole = encoding.load_encoded(folder / "train.npz")
    checking.check_corpus(workspace.config, StoredCorpus(folder), whole, stages=stages)


def _without_measures(
    units: Sequence[Unit], workspace: Workspace, stages: Sequence[str]
) -> tuple[Unit, ...]:
    """Returns the units that measure nothing, and says so where others were asked for."""
    left = plan_units(workspace.config, workspace, is_measured=False)
    names = {unit.name for unit in left}
    if any(unit.stage in stages for unit in units if unit.name not in names):
        split = workspace.config.references.query_split
        print(
            f"nothing is measured: the corpus must have {split}_target or {split}_normal queries "
            "for that"
        )
    return left
