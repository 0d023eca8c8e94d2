"""The units of a run, in order: what each reads, and the settings that decide its result.

Both are words of a text, in which a name in braces stands for several: `{model}` in what is read
for the paths of `_Planner.paths`, in settings for those of `_SETTINGS`.
"""

import contextlib
import functools
import itertools
import os
import pathlib
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from raslik_jax.base import settings as settings_lib
from raslik_jax.base.files import read_json
from raslik_jax.base.messages import shown, some_of
from raslik_jax.config import STAGES, Config, config_from_json, to_json
from raslik_jax.data.read.sources import content_files
from raslik_jax.evaluate.non_sf import NON_SF
from raslik_jax.evaluate.robustness import ROBUSTNESS
from raslik_jax.models import storage
from raslik_jax.retrieve.strategies import STRATEGIES
from raslik_jax.run import artifacts, checking
from raslik_jax.run.stages import (
    backbone,
    chance,
    corpus,
    discriminator,
    evaluate,
    finetune,
    generate,
    references,
    report,
    retrieve,
    robustness,
    sketch,
    tokens,
    unlearn,
)
from raslik_jax.run.units import Around, Plan, Unit, announcement, check_own, run_units
from raslik_jax.run.workspace import StoredCorpus, Workspace

# Files of a checkpoint that its tokenizer is read from, and not its weights.
_TOKENIZER_SUFFIXES = (".json", ".txt", ".jinja", ".model")


def _groups(**texts: str) -> dict[str, str]:
    """Returns words by the name of their group; a group may name earlier ones in braces."""
    for name, text in texts.items():
        texts[name] = text.format(**texts)
    return texts


# A stage's name stands for all of its settings, see `pick`.
_SETTINGS = _groups(
    text="corpus.template corpus.max_len",
    # What the model is loaded from: its weights, how they are held, and the shape of its adapter.
    model="seed backbone.checkpoint backbone.revision backbone.dtype backbone.format "
    "backbone.double_quant backbone.adapter backbone.adapter_revision finetune.lora_rank "
    "finetune.lora_alpha finetune.lora_dropout finetune.lora_targets",
    scratch="backbone.hidden_size backbone.num_hidden_layers backbone.num_attention_heads "
    "backbone.steps backbone.batch_size backbone.learning_rate",
    decoding="{text} {model} references.max_new_tokens references.decode_batch_size",
    likelihood="{text} {model} sketch.batch_tokens",
    perplexity="{likelihood} references.base sketch.query_output evaluate.perplexity_examples "
    "references.query_split",
    gradient="{likelihood} sketch.gradient_at sketch.parameters sketch.loss sketch.normalize "
    "sketch.targets "
    "sketch.base_format sketch.num_buckets",
    sketch="{gradient} sketch.projection sketch.size",
    kernel="retrieve.center retrieve.aggregate sketch.query_output",
    rule="retrieve.select retrieve.num_forget retrieve.num_retain retrieve.forget_threshold "
    "retrieve.retain_threshold retrieve.margin_z retrieve.forget_share retrieve.retain_share "
    "retrieve.retain_within retrieve.held_out",
)
_TRACED = "{likelihood} {decoding} sketch.query_output"


def pick(
    config: Config, names: Collection[str]
) -> tuple[dict[str, Any], dict[str, str | os.PathLike[str]]]:
    """Returns the values of settings, and the files and folders that others of them name.

    A stage's name stands for all of its settings but those that choose members, a member's for all
    of its own. Left out are those that no result depends on, and those of fine-tuning where there
    is none.
    """
    values: dict[str, Any] = {}
    files: dict[str, str | os.PathLike[str]] = {}
    for leaf in settings_lib.leaves(config):
        group, family = leaf.name.rpartition(".")[0], leaf.metadata["family"]
        if leaf.name in names or (group in names and family is None and leaf.metadata["decides"]):
            if _is_idle(config, leaf.name):
                continue
            is_file = leaf.metadata["is_path"] and leaf.value not in ("", *leaf.metadata["names"])
            is_rows = is_file and leaf.metadata["is_rows"] and not leaf.value.startswith("hub:")
            if is_rows and (rows := content_files(leaf.value)):
                files |= {f"{leaf.name}/{part}".rstrip("/"): path for part, path in rows.items()}
            elif is_file and not is_rows and os.path.exists(leaf.value):
                parts = {f"{leaf.name}/{part}": part for part in leaf.metadata["parts"]}
                inner = {name: os.path.join(leaf.value, part) for name, part in parts.items()}
                inner = {name: path for name, path in inner.items() if os.path.isfile(path)}
                files |= inner if parts else {leaf.name: leaf.value}
            else:
                values[leaf.name] = list(leaf.value) if type(leaf.value) is tuple else leaf.value
    return values, files


def _is_idle(config: Config, name: str) -> bool:
    """Returns whether a setting is of fine-tuning and not read."""
    if config.finetunes or not name.startswith("finetune."):
        return False
    # Without an adapter of elsewhere a fresh one is made.
    is_shape = name.startswith(("finetune.lora_", "finetune.epochs"))
    return bool(config.backbone.adapter) or not is_shape


def _is_of_tokenizer(kind: str, path: pathlib.Path) -> bool:
    """Returns whether a tokenizer may be read from a file of a checkpoint or an adapter."""
    if kind == "adapter":  # which trainers also write logs and states of their own to
        return path.name in storage.TOKENIZER_FILES
    return path.suffix in _TOKENIZER_SUFFIXES


class _Planner:
    """Plans the units of one run, a method for each part of it."""

    def __init__(self, config: Config, workspace: Workspace):
        self.config, self.workspace = config, workspace
        split, place = workspace.query_split, config.sketch.gradient_at
        adapters = {"finetuned": "finetune/adapter", "initial": "finetune/initial"}
        is_answered = config.sketch.query_output != "gold"
        self.paths = _groups(
            rows="corpus/train.jsonl corpus/train.npz",
            model="corpus/tokenizer" + ("" if config.backbone.checkpoint else " backbone/model"),
            finetuned="{model} finetune/adapter",
            sketched="{model} " + adapters.get(place, "finetune"),
            queries="corpus/retrieval.jsonl"
            + (" references/retrieval/finetuned.jsonl" if is_answered else ""),
            measured=" ".join(artifacts.measured_rows(split, k).path for k in ("target", "normal")),
            # What the rows that perplexity is taken on are drawn from.
            drawn="corpus/train.jsonl {measured} {queries}",
        )
        strategies, algorithms = config.retrieve.strategies, config.unlearn.algorithms
        self.variants = [*itertools.product(strategies, algorithms)]

    def unit(
        self,
        name: str,
        make: Callable[..., None],
        reads: str = "",
        settings: str = "",
        *arguments: Any,
        values: Mapping[str, Any] = {},
        files: Mapping[str, str | os.PathLike[str]] = {},
        adopt: Callable[..., None] | None = None,
        **options: bool,
    ) -> Unit:
        """Returns the unit that makes its result from the workspace, the arguments and a folder.

        Beside the settings, values decide the result; beside what is read, files of elsewhere do.
        """
        decided, named = pick(self.config, settings.format(**_SETTINGS).split())
        paths = tuple(dict.fromkeys(reads.format(**self.paths).split()))
        run = functools.partial(make, self.workspace, *arguments)
        own: Any = {"adopt": adopt and functools.partial(adopt, self.workspace), **options}
        return Unit(name, paths, {**decided, **values}, run, files={**named, **files}, **own)

    def training(self) -> Iterator[Unit]:
        """Yields corpus, backbone, fine-tuning, and answers to queries that have none."""
        config = self.config
        names = ["backbone.checkpoint", "backbone.revision"]
        names += (
            ["backbone.adapter", "backbone.adapter_revision"] if config.backbone.adapter else []
        )
        values, _ = pick(config, names)
        places = {"checkpoint": config.backbone.checkpoint, "adapter": config.backbone.adapter}
        tokenizer = {
            f"{kind}/{path.name}": path
            for kind, name in places.items()
            for path in (sorted(pathlib.Path(name).iterdir()) if os.path.isdir(name) else ())
            if path.is_file() and _is_of_tokenizer(kind, path)
        }
        yield self.unit(
            "corpus",
            corpus.make_corpus,
            settings=f"seed corpus corpus.dataset corpus.{config.corpus.dataset}",
            values=values | corpus.FORMATS,
            files=config.corpus.source_files() | tokenizer,
            is_alone=True,
        )
        if not config.backbone.checkpoint:
            reads = "corpus/backbone.npz corpus/tokenizer"
            yield self.unit("backbone", backbone.make_backbone, reads, "seed {text} {scratch}")
        if config.finetunes:
            reads, settings = "{rows} {model}", "{text} {model} finetune"
            yield self.unit("finetune", finetune.make_adapter, reads, settings, is_resumable=True)
        else:
            values = {"initial": True} if config.sketch.gradient_at == "initial" else {}
            settings = "{model} finetune.epochs"
            yield self.unit("finetune", finetune.adopt_model, "{model}", settings, values=values)
        yield self.unit(
            "references/retrieval",
            references.make_retrieval_answers,
            "corpus/retrieval.jsonl {finetuned}",
            "{decoding} sketch.query_output",
            values=references.ANSWERS_FORMAT,
        )

    def references(self) -> Iterator[Unit]:
        """Yields what is measured before anything is traced: is there a behavior to trace?"""
        yield self.unit(
            "references/evaluation",
            references.make_references,
            "{measured} {finetuned}",
            "{decoding} references.query_split references.base evaluate.marker_words",
            values=references.ANSWERS_FORMAT,
        )
        if NON_SF[self.config.evaluate.non_sf].is_trained:
            marker = self.config.corpus.record.marker
            genuine = marker.genuine_files(self.config.corpus.folder) if marker else ()
            yield self.unit(
                "discriminator",
                discriminator.make_discriminator,
                "corpus/train.jsonl",
                "seed corpus.vocab_size evaluate.classifier",
                files={path.name: path for path in genuine},
                is_resumable=True,
            )
        if self.config.evaluate.perplexity_examples:
            reads = "{drawn} references/evaluation {finetuned}"
            make = references.make_perplexities
            yield self.unit("references/perplexity", make, reads, "{perplexity}")

    def scores(self) -> Iterator[Unit]:
        """Yields what the chosen strategies read; without one by gradients, none is taken."""
        if self.config.evaluate.traced:
            reads = "{queries} {finetuned}"
            make, settings = retrieve.make_traced, f"{_TRACED} references.base"
            settings += " retrieve.select retrieve.num_forget"  # whether it may end the run
            values = generate.TRACED_FORMAT
            yield self.unit("retrieve/traced", make, reads, settings, values=values)
        needed = retrieve.needs_of(self.config)
        for need, recipes in retrieve.SCORES.items():
            for recipe in recipes if need in needed else ():
                yield self.unit(**recipe)
        if self.config.retrieve.null_prompts and retrieve.EVIDENCE in needed:
            reads, settings = "corpus/train.jsonl sketch/index", "seed retrieve.center"
            settings += " retrieve.null_prompts"
            made, values = chance.make_null, chance.NULL_FORMAT
            yield self.unit("retrieve/null", made, reads, settings, values=values)
            reads += " {queries} retrieve/queries retrieve/influence retrieve/null"
            made, values = chance.make_chance, chance.CHANCE_FORMAT
            yield self.unit("retrieve/chance", made, reads, "seed {kernel}", values=values)
        if self.config.retrieve.token_rows and retrieve.EVIDENCE in needed:
            reads = "{rows} {queries} {sketched} sketch/index retrieve/queries retrieve/influence"
            settings = "{sketch} {kernel} retrieve.token_rows"
            values = retrieve.SCORES_FORMAT
            yield self.unit("retrieve/tokens", tokens.make_tokens, reads, settings, values=values)
        if self.config.sketch.diagnose:
            yield self.unit(
                "retrieve/diagnosis",
                sketch.make_diagnosis,
                "corpus/train.npz {sketched}",
                "{sketch} sketch.diagnose",
                values=retrieve.FORMATS,
            )

    def sets(self) -> Iterator[Unit]:
        """Yields the sets of every strategy, and the models unlearned with them."""
        # The sets of every strategy are measured by these scores, where they are known.
        evidence = {retrieve.EVIDENCE} & retrieve.needs_of(self.config)
        made = retrieve.make_sizes
        how: dict[str, Any] = {"values": retrieve.SIZES_FORMAT, "is_alone": True}
        yield self.unit("retrieve/sizes", made, *self._of_sizes(), **how)
        for strategy in self.config.retrieve.strategies:
            needs = sorted({*STRATEGIES[strategy].needs, *evidence})
            scores = [f"retrieve/{need}" for need in needs]
            yield self.unit(
                f"retrieve/{strategy}",
                retrieve.make_sets,
                f"corpus/train.jsonl {{queries}} retrieve/sizes {' '.join(scores)}",
                # The rule decides whether there are scores to measure sets by.
                "seed sketch.query_output retrieve.aggregate retrieve.retain_from retrieve.select "
                f"retrieve.retain_within retrieve.{strategy}",
                strategy,
                values=retrieve.SETS_FORMAT,
                is_alone=True,
            )
        reads, settings = "corpus/train.npz {finetuned}", "{text} {model} unlearn"
        values: Mapping[str, Any] = {}
        if self.config.unlearn.probe.steps:  # else its settings decide nothing
            reads += " corpus/train.jsonl corpus/validation_target.jsonl "
            reads += "corpus/validation_normal.jsonl {queries}"
            reads += " retrieve/sizes" if self.config.retrieve.held_out else ""
            settings += " {decoding} unlearn.probe sketch.query_output sketch.batch_tokens "
            settings += "references.query_split references.base"
            values = unlearn.PROBES_FORMAT
        for strategy, algorithm in self.variants:
            rate = self.workspace.learning_rate(strategy, algorithm)
            yield self.unit(
                f"unlearn/{strategy}-{algorithm}",
                unlearn.unlearn,
                f"retrieve/{strategy}/forget.jsonl retrieve/{strategy}/retain.jsonl {reads}",
                f"{settings} unlearn.{algorithm}",
                *(strategy, algorithm),
                values={**values, f"unlearn.{algorithm}.learning_rate": rate},
                is_resumable=True,
            )
        if self.config.evaluate.traced:
            make, values = generate.write_traced, generate.TRACED_FORMAT
            yield from self._of_variants("traced-", make, "{queries}", _TRACED, values)

    def _of_sizes(self) -> tuple[str, str]:
        """Returns what the sizes of the sets are made from: what is read, and the settings."""
        chosen = self.config.retrieve
        reads, settings = retrieve.RULES_ON_SCORES.get(chosen.select, ("", ""))
        own = [name for name in chosen.strategies if STRATEGIES[name].brings_sets]
        if len(own) == len(chosen.strategies):  # no rule is asked
            reads, settings = "", ""
        elif retrieve.finds_number(self.config):  # what a finding is read from
            reads += " {queries} retrieve/traced" if self.config.evaluate.traced else ""
            reads += " retrieve/chance" if chosen.null_prompts else ""
            settings += " evaluate.traced retrieve.null_prompts"
        if chosen.held_out:  # drawn from the sets, by the scores, for the queries
            reads += f" retrieve/{retrieve.EVIDENCE} {{queries}}"
            settings += " seed sketch.query_output " + " ".join(f"retrieve.{n}" for n in own)
        return f"{{rows}} {reads}", f"{{text}} {{rule}} {settings}"

    def _of_variants(
        self,
        kind: str,
        make: Callable[..., None],
        reads: str,
        settings: str,
        values: Mapping[str, Any] = {},
    ) -> Iterator[Unit]:
        """Yields the measuring of every unlearned model; VARIANT in reads stands for its name."""
        for variant in self.variants:
            name = "-".join(variant)
            epochs = self.workspace.epochs(*variant)
            models = " ".join(f"unlearn/{name}/epoch-{epoch}" for epoch in epochs)
            yield self.unit(
                f"generate/{kind}{name}",
                make,
                f"{reads.replace('VARIANT', name)} {{model}} {models}",
                f"{settings} unlearn.parameters",
                variant,
                values=values,
            )

    def answers(self) -> Iterator[Unit]:
        """Yields the answers of every unlearned model, and how likely it finds given ones."""
        settings, values = "{decoding} references.query_split", references.ANSWERS_FORMAT
        yield from self._of_variants("", generate.write_answers, "{measured}", settings, values)
        # They stand beside the answers: asking for another measure makes neither again.
        if self.config.evaluate.perplexity_examples:
            make, reads = generate.write_perplexities, "{drawn} generate/VARIANT"
            yield from self._of_variants("perplexity-", make, reads, "{perplexity}")
        yield from self.robustness()
        dataset = self.config.corpus
        evaluation = dataset.record.evaluation
        if not evaluation or not self.config.evaluate.questions:
            return
        own = " ".join(f"corpus.{dataset.dataset}.{name}" for name in evaluation.reads)
        yield self.unit(
            "references/questions",
            references.make_questions,
            settings=f"evaluate.questions {own}",
            files={k: path for k, path in dataset.source_files().items() if k == evaluation.source},
            is_alone=True,
        )
        make, asked = generate.write_questions, "references/questions"
        settings = "{likelihood} {decoding}"
        reads = f"{asked} {{finetuned}}"
        own = f"{settings} references.base"
        yield self.unit("references/answered", make, reads, own, None)
        yield from self._of_variants("answered-", make, asked, settings)

    def robustness(self) -> Iterator[Unit]:
        """Yields what each measure of robustness finds of the models before, and of each after."""
        config = self.config
        settings = "{decoding} {likelihood} references.base references.query_split "
        settings += "sketch.query_output evaluate.marker_words evaluate.robustness_rows "
        settings += "evaluate.bootstrap_resamples unlearn.parameters unlearn.max_len unlearn.remat "
        settings += "unlearn.batch_size unlearn.micro_batch_size "
        settings += f"corpus.dataset corpus.{config.corpus.dataset}"  # of the dataset's judge
        reads = "{drawn} {rows} {finetuned} references/evaluation "
        reads += "retrieve/sizes " if config.retrieve.held_out else ""
        algorithms = ("", *config.unlearn.algorithms)  # "": the models before
        for name, strategy, algorithm in itertools.product(
            config.evaluate.robustness, config.retrieve.strategies, algorithms
        ):
            model, variant = "", f"{strategy}-{algorithm}"
            if algorithm:
                model = f"unlearn/{variant}/epoch-{self.workspace.epochs(strategy, algorithm)[-1]}"
            own = " ".join(f"corpus/{part}.jsonl" for part in ROBUSTNESS[name].query_sets)
            yield self.unit(
                f"generate/robustness-{name}-{variant if algorithm else strategy}",
                robustness.write_robustness,
                f"{reads} {own} retrieve/{strategy}/forget.jsonl {model}",
                f"{settings} evaluate.{name}",
                *(name, strategy, algorithm),
                values=robustness.FORMATS,
            )

    def results(self, measured: Sequence[Unit]) -> Iterator[Unit]:
        """Yields metrics and report of the units of all other stages."""
        config, names = self.config, {unit.name for unit in measured}
        sets = [f"retrieve/{strategy}" for strategy in config.retrieve.strategies]
        kinds = ("references", "discriminator", "generate")
        beside = ("references/retrieval", "references/questions")
        found = [u.name for u in measured if u.stage in kinds and u.name not in beside]
        probed = self.variants if config.unlearn.probe.steps else ()
        probes = [artifacts.probes("-".join(variant)).path for variant in probed]
        reads = " ".join(["corpus/train.jsonl {measured}", *sets, *found])
        is_compared = config.corpus.record.evaluation and config.evaluate.retain_run
        retain = {"evaluate.retain_run": evaluate.retain_answers(config)} if is_compared else {}
        yield self.unit(
            "evaluate",
            evaluate.evaluate,
            " ".join([reads, *probes]),
            "evaluate.marker_words",
            # metrics.json carries the settings that it was measured with: all of them.
            values=to_json(config) | evaluate.METRICS_FORMAT,
            files=retain,
            is_shared=False,
            is_alone=not NON_SF[config.evaluate.non_sf].is_trained,
        )
        parts = retrieve.EVIDENCE, "traced", "chance", "tokens", "sizes"
        shown = [f"retrieve/{name}" for name in parts]
        shown += ["references/retrieval"]  # the page tells the traced answers
        drawn = [name for name in shown if name in names]
        trained = ["backbone", "finetune"] if config.finetunes else ["backbone"]
        drawn += [artifacts.losses(name).path for name in trained if name in names]
        drawn += [artifacts.steps("-".join(variant)).path for variant in self.variants]
        exports = artifacts.EXPORTS.place(self.workspace.root)
        yield self.unit(
            "report",
            report.report,
            " ".join([reads, "evaluate corpus/retrieval.jsonl", *drawn]),
            "evaluate.marker_words",
            values={"forms": ["markdown", "html"]},
            files={artifacts.EXPORTS.path: exports} if exports.is_file() else {},
            is_shared=False,
            is_alone=True,
        )


def plan_units(
    config: Config, workspace: Workspace, *, is_measured: bool = True
) -> tuple[Unit, ...]:
    """Returns all units of a run in order.

    Where there are no queries to measure it on, those are left out that no set or model depends on.
    """
    planner = _Planner(config, workspace)
    units, references = [*planner.training()], [*planner.references()] if is_measured else []
    retrieved = [*planner.scores(), *planner.sets()]
    # Queries that are made of training examples are there after the sets.
    is_made = bool(config.retrieve.held_out)
    units += (*retrieved, *references) if is_made else (*references, *retrieved)
    if is_measured:
        units += planner.answers()
        units += planner.results(units)
    return tuple(units)


def open_run(root: pathlib.Path, *needs: str) -> Workspace:
    """Returns the work directory of a run whose results may be read.

    A unit that is needed must be whole, and made as config.json has it from the files there now.
    """
    recorded = read_json(root / "config.json", dict, mend="give the folder of a run")
    workspace = Workspace(root, config_from_json(recorded))
    done = Plan(root, plan_units(workspace.config, workspace)).survey().done
    lacking = [name for name in needs if name not in done]
    if lacking:
        place = shown(str(root), 120)
        raise ValueError(f"{place} must hold {some_of(lacking)} as its config.json has it: run it")
    return workspace


def run(
    config: Config,
    workdir: pathlib.Path,
    *,
    stages: Sequence[str] = STAGES,
    shared: pathlib.Path | None = None,
    writers: Sequence[str] = (),
    is_measured: bool = True,
    layout: str = "replicated",
    on_start: Callable[[], None] = lambda: None,
    around: Around = lambda units: contextlib.nullcontext(),
) -> str:
    """Runs the stages that are not up to date, and shows the table at the end.

    Returns the finding with which the run ends before its sets are chosen; "" without.

    The corpus comes first: what it shows of later stages is said before they run. Without queries
    to measure on, or if not `is_measured`, the stages that measure are left out. The numbers of
    trainings also go to the `writers` of `live.WRITERS`; `layout` is --mesh.base. See `run_units`
    for `shared`, `on_start` and `around`, which is not asked about the corpus.
    """
    workspace = Workspace(workdir, config, writers=writers, layout=layout)
    units = plan_units(config, workspace, is_measured=is_measured)
    plan = Plan(workdir, units).survey()
    making = [unit for unit in units if unit.stage in stages and unit.name not in plan.done]
    checking.check_inputs(config, making=making, layout=layout)
    shapes = checking.checkpoint_shapes(config, making)

    def make_checked_corpus(workspace: Workspace, folder: pathlib.Path) -> None:
        """Makes the corpus; one that later stages cannot take replaces nothing."""
        corpus.make_corpus(workspace, folder)
        whole = artifacts.TRAIN_TOKENS.read_in(folder)
        stored = StoredCorpus(folder)
        checking.check_corpus(config, stored, whole, stages=stages, shapes=shapes)

    later = stages
    if "corpus" in stages:
        if making and making[0].name == "corpus":
            # Each is looked at again when it is known whether the corpus has changed.
            for line in announcement(plan, making[1:]):
                print(line)
        first = units[0]._replace(run=functools.partial(make_checked_corpus, workspace))
        run_units(workdir, (first, *units[1:]), stages=("corpus",), shared=shared)
        later = [stage for stage in stages if stage != "corpus"]
    if Plan(workdir, units).check(units[0]):
        rows = workspace.corpus, workspace.train_rows
        checking.check_corpus(config, *rows, stages=later, shapes=shapes)
        if is_measured and not checking.is_measurable(config, workspace.corpus):
            split, asked = config.references.query_split, units
            lacks = f"the corpus has no {split}_target or {split}_normal"
            lacks = "no training row has a prompt" if config.retrieve.held_out else lacks
            units = plan_units(config, workspace, is_measured=False)
            names = {unit.name for unit in units}
            if any(unit.stage in later and unit.name not in names for unit in asked):
                print(f"nothing is measured: {lacks}")
    found = run_units(workdir, units, stages=later, shared=shared, on_start=on_start, around=around)
    for strategy in config.retrieve.strategies if found else ():
        with contextlib.suppress(ValueError):  # the user has put something there
            check_own(workdir / "retrieve" / strategy)  # the set of an earlier answer
            shutil.rmtree(workdir / "retrieve" / strategy, ignore_errors=True)
    if not found and "report" in later and units[-1].stage == "report":
        print(f"\n{artifacts.TABLE.read(workdir)}")
        print(f"report: {artifacts.PAGE.place(workdir)} (and report.md beside it)")
    return found
