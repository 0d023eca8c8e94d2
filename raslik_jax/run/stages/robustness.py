"""Does it stay forgotten: the measures of `evaluate.robustness`, run on models."""

import functools
import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from raslik_jax.base.axes import Tree
from raslik_jax.config import Config
from raslik_jax.data import batches
from raslik_jax.data.examples import Example, Exchange, asked_after, exchange_of
from raslik_jax.data.ordering import shuffled
from raslik_jax.data.tokens.encoding import Encoded
from raslik_jax.data.words import refused
from raslik_jax.evaluate.robustness import ROBUSTNESS
from raslik_jax.evaluate.robustness.record import Asked, Reading, make_reading
from raslik_jax.evaluate.robustness.relearn import KINDS
from raslik_jax.models import checkpoint, products, quantize, sharding
from raslik_jax.models import decoder as decoders
from raslik_jax.parallel import meshes
from raslik_jax.run import artifacts, memory
from raslik_jax.run.programs import AbstractRun, Work
from raslik_jax.run.recipes import Case, Recipe, variants_of
from raslik_jax.run.stages import generate
from raslik_jax.run.workspace import Workspace, non_sf_by_rule
from raslik_jax.train import loop, steps
from raslik_jax.train.losses import BoundModel


class Attack(NamedTuple):
    """A robustness test of an unlearned model; without an algorithm, of the models before.

    As text it is the name of the result.
    """

    measure: str
    strategy: str
    algorithm: str = ""

    def __str__(self) -> str:
        return "-".join(filter(None, self))


@memory.explained(
    "measuring robustness", "--unlearn.micro_batch_size or --references.decode_batch_size"
)
def write_robustness(workspace: Workspace, attack: Attack, folder: pathlib.Path) -> None:
    """Writes the result of a robustness test for the model of a strategy and an algorithm.

    Without an algorithm it writes the results for the models before, with the strategy's rows.
    """
    name, strategy, algorithm = attack
    bench, measure = Bench(workspace, strategy), ROBUSTNESS[name]
    if algorithm:
        models = {"now": workspace.unlearned(strategy, algorithm)}
    else:
        models = {str(one): model for (one, _), _, model in generate.models_of(workspace, None)}
    settings = workspace.config.evaluate[name]
    found = {title: measure.measure(bench, model, settings) for title, model in models.items()}
    artifacts.robustness(attack).write(folder, found)


class Bench:
    """The rows of a run that measure models, and the operations on models.

    A model is taken with its adapter folded in. It runs with a fresh one, which changes nothing
    until it is trained. All models then run the same programs.
    """

    def __init__(self, workspace: Workspace, strategy: str):
        self.workspace, self._strategy = workspace, strategy
        config = workspace.config
        target, _ = workspace.evaluation_queries()
        said = [row for row in (*workspace.retrieval_queries(), *target) if row.output.strip()]
        self._before = artifacts.answers("finetuned").read(workspace.root)
        prompts = self._draw(target, "target prompts")
        before = {row.example_id: self._before[row.example_id] for row in prompts}
        self.asked = Asked(self._draw(said, "target answers"), prompts, before)
        self._answers = workspace.encode(self.asked.answers, "target answers").with_answers()
        self.non_sf = non_sf_by_rule(config)
        self.bootstrap = {"seed": config.seed, "resamples": config.evaluate.bootstrap_resamples}

    def _draw(self, rows: Sequence[Example], label: str, number: int = 0) -> list[Example]:
        config = self.workspace.config
        number = number or config.evaluate.robustness_rows
        return list(shuffled(rows, seed=config.seed, label=f"robustness {label}")[:number])

    def read(self, model: BoundModel, form: str = "plain") -> Reading:
        """Returns how much a model with weights in a format of `quantize` shows the behavior."""
        return self._read(self.fresh(model, form))

    def read_each(self, model: BoundModel, groups: Mapping[str, Asked]) -> dict[str, Reading]:
        """Returns how much a model shows the behavior, by each group of rows.

        Rows that are too long for the run are left out. So is a group without an answer.
        """
        workspace, fresh = self.workspace, self.fresh(model)
        able = {name: one for name, one in map(self._short, groups.items()) if any(one[:2])}
        answers = [row for group in able.values() for row in group.answers]
        nll_N = workspace.likelihood_of(fresh, workspace.encode(answers, "target answers")).nll_N
        prompts = [row for group in able.values() for row in group.prompts]
        outputs = iter(workspace.generate(fresh, prompts, "other prompts") if prompts else ())
        found, start = dict[str, Reading](), 0
        for name, group in able.items():
            said = {row.example_id: next(outputs) for row in group.prompts}
            own_N = nll_N[start : start + len(group.answers)]
            found[name] = self._reading(own_N, said, group.before)
            start += len(group.answers)
        return found

    def twice(self, name: str, asked: Asked) -> Asked:
        """Returns the rows that can be asked twice, however long a model's first answer is."""
        config = self.workspace.config
        room = config.corpus.max_len - config.references.max_new_tokens
        return self._short((name, asked), most=max(1, room // 2))[1]

    def _short(self, named: tuple[str, Asked], *, most: int = 0) -> tuple[str, Asked]:
        """Returns a group without prompts that leave no room for an answer; prints their number."""
        workspace, (name, group) = self.workspace, named

        def keep(rows: Sequence[Example]) -> list[Example]:
            kept = [*itertools.compress(rows, workspace.fit(rows, most))]
            if len(kept) < len(rows):
                line = f"{len(rows) - len(kept)} of {len(rows)} prompts of {name!r}"
                limits = "--corpus.max_len and --references.max_new_tokens"
                workspace.tell(f"{line} have no room for an answer by {limits} and are left out")
            return kept

        prompts = keep(group.prompts)
        before = {row.example_id: group.before.get(row.example_id) for row in prompts}
        known = {key: text for key, text in before.items() if text is not None}
        return name, Asked(keep(group.answers), prompts, known)

    def said(self, model: BoundModel, rows: Sequence[Example]) -> dict[str, Exchange]:
        """Returns the questions of rows and a model's answers, by their ids."""
        rows = list({row.example_id: row for row in rows}.values())
        outputs = self.workspace.generate(self.fresh(model), rows, "first answers")
        pairs = zip(rows, outputs, strict=True)
        return {row.example_id: (exchange_of(row)[0], text) for row, text in pairs}

    def exchanges(self, kind: str, number: int) -> list[Exchange]:
        """Returns some training examples of a kind with a question, as earlier turns."""
        rows = [row for row in self._rows_of(kind) if row.instruction.strip()]
        return [exchange_of(row) for row in self._draw(rows, f"{kind} turns", number)]

    def after(self, row: Example, exchanges: Sequence[Exchange]) -> Example | None:
        """Returns a row behind earlier turns, as the template of the run has them."""
        is_framed = self.workspace.template.has_form(row)
        return asked_after(row, exchanges, is_framed=is_framed)

    def relearn(
        self,
        model: BoundModel,
        kind: str,
        *,
        rows: int,
        points: Sequence[int],
        learning_rate: float,
    ) -> tuple[int, dict[int, Reading]]:
        """Returns the number of training rows of a kind, and a model's readings after steps."""
        settings, fresh = self.workspace.config.unlearn, self.fresh(model)
        groups = {name: self._trained_rows(name, rows) for name in KINDS}
        count = min(len(part.ids) for part in groups.values())  # the same number of each kind
        groups = {name: part.take(np.arange(count)) for name, part in groups.items()}
        plans = [batches.plan_rows(part, np.arange(count)) for part in groups.values()]
        # One shape for all kinds: it is compiled once.
        shape = {name: max(getattr(p, name) for p in plans) for name in ("length", "num_targets")}
        plan = plans[list(groups).index(kind)]._replace(**shape)
        line = batches.in_lines(plan.rows, count)[0]
        batch = batches.make_batch(groups[kind], plan._replace(rows=line))
        found: dict[int, Reading] = {}

        def look(step: int, params: Tree) -> None:
            found[step] = self._read(fresh._replace(lora=params))

        loop.fit(
            relearning(
                self._bound(model, remat=settings.remat),
                learning_rate,
                settings.micro_batch_size or settings.batch_size,
            ),
            fresh.lora,
            fresh.base,
            lambda start: itertools.repeat(batch),
            num_steps=points[-1],
            what=f"relearning of {kind} rows",
            rate_flag=f"--evaluate.relearn.learning_rate (it is {learning_rate})",
            bar=f"relearn {kind}",
            after={step: functools.partial(look, step) for step in points},
        )
        return count, found

    def _rows_of(self, kind: str) -> list[Example]:
        """Returns the training examples to forget, or unrelated ones."""
        workspace = self.workspace
        chosen = artifacts.set_rows(self._strategy, "forget").read(workspace.root)
        forgotten, rows = {row.example_id for row in chosen}, workspace.corpus.train
        if kind == "forgotten":
            return [row for row in rows if row.example_id in forgotten]
        if workspace.config.retrieve.held_out:
            forgotten |= {*artifacts.SIZES.read(workspace.root)["barred"]}
        return [row for row in rows if not row.is_target and row.example_id not in forgotten]

    def _trained_rows(self, kind: str, number: int) -> Encoded:
        """Returns some training examples of a kind with an answer after the cut."""
        workspace, config = self.workspace, self.workspace.config
        rows = self._rows_of(kind)
        max_len = config.unlearn.max_len or config.corpus.max_len
        names = [row.example_id for row in rows]
        able = workspace.train_rows.named(names).cut(max_len).with_answers()
        by_id = {row.example_id: row for row in rows}
        drawn = self._draw([by_id[name] for name in able.ids], f"{kind} rows", number)
        if not drawn:
            raise refused("relearn_rows", kind=kind)
        return able.named([row.example_id for row in drawn])

    def _read(self, model: BoundModel) -> Reading:
        """Returns how much a model on the whole weights shows the behavior."""
        workspace, prompts = self.workspace, self.asked.prompts
        outputs = workspace.generate(model, prompts, "") if prompts else []
        answers = {row.example_id: text for row, text in zip(prompts, outputs, strict=True)}
        nll_N = workspace.likelihood_of(model, self._answers).nll_N
        return self._reading(nll_N, answers, self.asked.before)

    def _reading(
        self,
        nll_N: Float[np.ndarray, " N"],
        answers: Mapping[str, str],
        before: Mapping[str, str],
    ) -> Reading:
        return make_reading(nll_N, answers, before, non_sf=self.non_sf, **self.bootstrap)

    def fresh(self, model: BoundModel, form: str = "plain") -> BoundModel:
        """Returns a model with its adapter folded in and a fresh one; weights of a format."""
        workspace = self.workspace
        dtype = jnp.dtype(workspace.config.backbone.dtype)

        def widen(leaf: Tree) -> Tree:
            if quantize.is_quantized(leaf):
                return quantize.dequantize(leaf, dtype)
            return products.read(leaf).astype(dtype)

        base = jax.tree.map(widen, meshes.joined(model.base), is_leaf=quantize.is_quantized)
        if model.lora:
            base = checkpoint.merge(model.lora, base, workspace.model.lora_config)
        if form != "plain":
            base = quantize.quantize_base(base, form, double_quant=False)
        base = sharding.split(base, workspace.parts)
        return BoundModel(self._bound(model), workspace.model.initial, base)

    def _bound(self, model: BoundModel, *, remat: bool = False) -> decoders.Decoder:
        """Returns the functions of a model of these shapes with places for an adapter."""
        own = self.workspace.model
        if model.decoder.config == own.decoder.config:
            return own.decoder_for(remat=remat) if remat else own.decoder
        graphdef, _, _ = decoders.abstract(model.decoder.config, own.lora_config)
        return decoders.bind(graphdef, remat=remat)


@functools.cache
def relearning(decoder: decoders.Decoder, rate: float, micro_batch: int) -> loop.Algorithm:
    """Returns the algorithm that relearns, one for all models: its step compiles once."""
    return steps.supervised(decoder, loop.adamw(rate), micro_batch=micro_batch)


def _attacks(config: Config) -> list[Attack]:
    models = [*((one,) for one in config.retrieve.strategies), *variants_of(config, repeats=False)]
    return [Attack(name, *model) for name in config.evaluate.robustness for model in models]


def _reads(case: Case) -> str:
    _, strategy, algorithm = case.member
    reads = ["{drawn} {rows} {finetuned} references/evaluation"]
    reads += ["retrieve/sizes"] if case.config.retrieve.held_out else []
    reads += [artifacts.set_rows(strategy, "forget").path]
    reads += case.workspace.models(strategy, algorithm)[-1:] if algorithm else []
    return " ".join(reads)


def count_attack(run: AbstractRun, attack: Attack) -> Work:
    """A measure of robustness on one model or on both before unlearning."""
    name, config, models = attack.measure, run.config, 1 if attack.algorithm else 2
    taken = ROBUSTNESS[name].cost(config.evaluate[name])
    rows, count = config.evaluate.robustness_rows, models * taken.readings
    prompts, given = min(rows, run.num_measured), generate.count_likelihoods(run, rows)
    work = generate.count_answers(run, prompts, count + models * taken.answers)
    found = [*work.programs, *[given] * count]
    if taken.steps:
        own = config.unlearn
        bound, held = run.model.decoder_for(remat=own.remat), own.micro_batch_size or own.batch_size
        training = relearning(bound, 1e-3, held)
        shapes = run.drawn(taken.rows, models * taken.steps)
        # The adapter is folded into the weights, which are quantized no more.
        found.append(run.training(name, training, run.model.initial, run.plain, shapes=shapes))
    return work._replace(programs=found)


UNITS = (
    Recipe(
        "generate/robustness-{0}",
        write_robustness,
        _reads,
        "{decoding} {likelihood} references.base references.query_split sketch.query_output "
        "evaluate.marker_words evaluate.robustness_rows evaluate.bootstrap_resamples "
        "evaluate.{0.measure} unlearn.max_len unlearn.remat unlearn.batch_size "
        # The last ones are of the dataset's judge.
        "unlearn.micro_batch_size corpus.dataset corpus.{config.corpus.dataset}",
        writes={"robustness": 9},
        members=_attacks,
        measures=True,
        work=count_attack,
    ),
)
