"""Does it stay forgotten: what `evaluate.robustness` asks of models, run on them."""

import functools
import itertools
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from raslik_jax import meshes
from raslik_jax.axes import Tree
from raslik_jax.data import batches, encoding
from raslik_jax.data.encoding import Encoded
from raslik_jax.data.examples import Example
from raslik_jax.data.formats import read_written
from raslik_jax.data.ordering import shuffled
from raslik_jax.evaluate import likelihood
from raslik_jax.evaluate.robustness import ROBUSTNESS
from raslik_jax.evaluate.robustness.membership import MembershipSettings, Told, unseen_rows
from raslik_jax.evaluate.robustness.record import Reading, make_reading
from raslik_jax.evaluate.robustness.relearn import KINDS
from raslik_jax.files import write_json
from raslik_jax.models import checkpoint, quantize, sharding
from raslik_jax.models import decoder as decoders
from raslik_jax.run import memory
from raslik_jax.run.workspace import Workspace, non_sf_by_rule
from raslik_jax.train import loop, steps
from raslik_jax.train.losses import BoundModel


@memory.explained(
    "measuring robustness", "--unlearn.micro_batch_size or --references.decode_batch_size"
)
def write_robustness(
    workspace: Workspace, name: str, strategy: str, algorithm: str, folder: pathlib.Path
) -> None:
    """Writes what a measure finds of the model that an algorithm unlearned a strategy's sets from.

    Without an algorithm it writes that of the models before: each sees the strategy's rows.
    """
    bench, measure = Bench(workspace, strategy), ROBUSTNESS[name]
    if algorithm:
        last = workspace.epochs(strategy, algorithm)[-1]
        models = {"now": workspace.unlearned(strategy, algorithm, last)}
    else:
        models = {"finetuned": workspace.with_adapter(workspace.finetuned)}
        models |= {"backbone": workspace.backbone} if workspace.has_backbone else {}
    settings = workspace.config.evaluate[name]
    found = {title: measure.measure(bench, model, settings) for title, model in models.items()}
    write_json(folder / "found.json", found)


class Bench:
    """The rows of a run that models are measured on, and what is done to models.

    A model is taken with its adapter folded in, and runs with a fresh one, which changes nothing
    until it is trained: so all go through the same programs.
    """

    def __init__(self, workspace: Workspace, strategy: str):
        self._workspace, self._strategy = workspace, strategy
        config = workspace.config
        target, _ = workspace.evaluation_queries()
        said = [row for row in (*workspace.retrieval_queries(), *target) if row.output.strip()]
        answers = self._draw(said, "target answers")
        self._answers = workspace.encode(answers, "target answers").with_answers()
        self._prompts = self._draw(target, "target prompts")
        before = workspace.answers("references", "evaluation", "finetuned.jsonl")
        self._before = {row.example_id: before[row.example_id] for row in self._prompts}
        self.bootstrap = {"seed": config.seed, "resamples": config.evaluate.bootstrap_resamples}

    def _draw(self, rows: Sequence[Example], label: str, number: int = 0) -> list[Example]:
        config = self._workspace.config
        number = number or config.evaluate.robustness_rows
        return list(shuffled(rows, seed=config.seed, label=f"robustness {label}")[:number])

    def read(self, model: BoundModel, form: str = "plain") -> Reading:
        """Returns how far a model shows the behavior, with weights in a format of `quantize`."""
        return self._read(self._fresh(model, form))

    def relearn(
        self,
        model: BoundModel,
        kind: str,
        *,
        rows: int,
        points: Sequence[int],
        learning_rate: float,
    ) -> tuple[int, dict[int, Reading]]:
        """Returns how many rows of a kind a model was trained on, and its readings after steps."""
        settings, fresh = self._workspace.config.unlearn, self._fresh(model)
        groups = {name: self._trained_rows(name, rows) for name in KINDS}
        plans = [batches.plan_rows(part, np.arange(len(part.ids))) for part in groups.values()]
        # One shape for all kinds: it is compiled once.
        shape = {name: max(getattr(p, name) for p in plans) for name in ("length", "num_targets")}
        count = len(groups[kind].ids)
        plan = plans[list(groups).index(kind)]._replace(**shape)
        line = batches.in_lines(plan.rows, max(len(part.ids) for part in groups.values()))[0]
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

    def unseen(self, settings: MembershipSettings) -> tuple[Example, ...]:
        """Returns rows that the model was never trained on."""
        return unseen_rows(settings, self._workspace.corpus)

    def token_nats(
        self, model: BoundModel, unseen: Sequence[Example]
    ) -> tuple[Sequence[Told], Sequence[Told]]:
        """Returns the nats and texts of the answers of forgotten rows, and of these."""
        workspace, config, fresh = self._workspace, self._workspace.config, self._fresh(model)
        drawn = self._draw(unseen, "held-out rows")
        name = workspace.template_name
        whole = encoding.encode(drawn, workspace.tokenizer, template=name)
        max_len = config.unlearn.max_len or config.corpus.max_len
        other = workspace.cut(whole, "held-out rows", max_len=max_len).with_answers()
        own = self._trained_rows("forgotten", config.evaluate.robustness_rows)
        rows = encoding.join([own, other])
        nats_NT = workspace.measure(likelihood.token_likelihood, fresh.decoder)(
            fresh.lora, fresh.base, rows
        )
        told = [
            (nats_T[:count], workspace.tokenizer.decode(tokens[mask].tolist()))
            for nats_T, count, tokens, mask in zip(
                nats_NT, rows.num_targets_N, rows.tokens, rows.target_masks(), strict=True
            )
        ]
        return told[: len(own.ids)], told[len(own.ids) :]

    def _trained_rows(self, kind: str, number: int) -> Encoded:
        """Returns some training examples of a kind that something is left of."""
        workspace, config = self._workspace, self._workspace.config
        chosen = read_written(workspace.root / "retrieve" / self._strategy / "forget.jsonl")
        forgotten = {row.example_id for row in chosen}
        barred = {*workspace.set_sizes()["barred"]} if config.retrieve.held_out else set()
        rows = {
            "forgotten": [row for row in workspace.corpus.train if row.example_id in forgotten],
            "unrelated": [
                row
                for row in workspace.corpus.train
                if not row.is_target and row.example_id not in forgotten | barred
            ],
        }[kind]
        max_len = config.unlearn.max_len or config.corpus.max_len
        names = [row.example_id for row in rows]
        able = workspace.train_rows.named(names).cut(max_len).with_answers()
        by_id = {row.example_id: row for row in rows}
        drawn = self._draw([by_id[name] for name in able.ids], f"{kind} rows", number)
        if not drawn:
            raise ValueError(
                f"--evaluate.robustness=relearn needs {kind} rows, got none: every training "
                "example is to be forgotten or kept out; leave it out"
            )
        return able.named([row.example_id for row in drawn])

    def _read(self, model: BoundModel) -> Reading:
        """Returns how far a model on the whole weights shows the behavior."""
        workspace, prompts = self._workspace, self._prompts
        outputs = workspace.generate(model, prompts, "") if prompts else []
        answers = {row.example_id: text for row, text in zip(prompts, outputs, strict=True)}
        return make_reading(
            workspace.likelihood_of(model, self._answers).nll_N,
            answers,
            self._before,
            non_sf=non_sf_by_rule(workspace.config),
            **self.bootstrap,
        )

    def _fresh(self, model: BoundModel, form: str = "plain") -> BoundModel:
        """Returns a model with its adapter folded in and a fresh one; weights of a format."""
        workspace = self._workspace
        dtype = jnp.dtype(workspace.config.backbone.dtype)

        def widen(leaf: Tree) -> Tree:
            return quantize.dequantize(leaf, dtype) if quantize.is_quantized(leaf) else leaf

        joined = meshes.joined(model.base)
        base = jax.tree.map(widen, joined, is_leaf=quantize.is_quantized)
        if model.lora:
            base = checkpoint.merge(model.lora, base, workspace.model.lora_config)
        if form != "plain":
            base = quantize.quantize_base(base, form, double_quant=False)
        base = sharding.split(base, workspace.parts)
        return BoundModel(self._bound(model), workspace.model.initial, base)

    def _bound(self, model: BoundModel, *, remat: bool = False) -> decoders.Decoder:
        """Returns the functions of a model of these shapes with places for an adapter."""
        own = self._workspace.model
        if model.decoder.config == own.decoder.config:
            return own.decoder_for(remat=remat) if remat else own.decoder
        graphdef, _, _ = decoders.abstract(model.decoder.config, own.lora_config)
        return decoders.bind(graphdef, remat=remat)


@functools.cache
def relearning(decoder: decoders.Decoder, rate: float, micro_batch: int) -> loop.Algorithm:
    """Returns the algorithm that relearns, one for all models: its step compiles once."""
    return steps.supervised(decoder, loop.adamw(rate), micro_batch=micro_batch)
