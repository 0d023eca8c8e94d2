"""From a generation to the training examples behind it, with an index alone.

The index is in the folder of the run that made it. The run's config names the model. The index's
own manifest decides the gradient. Another model, adapter, tokenizer or template is refused.
"""

import functools
import itertools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32

from raslik_jax.base.files import check_shape
from raslik_jax.base.messages import shown, some_of
from raslik_jax.base.settings import replaced
from raslik_jax.config import MeshConfig, config_from_json
from raslik_jax.data import batches
from raslik_jax.data.examples import Example, answered, drop_unanswered
from raslik_jax.data.tokens import masking, prompts
from raslik_jax.data.words import refused
from raslik_jax.evaluate import taught
from raslik_jax.incident import making
from raslik_jax.index import search
from raslik_jax.index.combine import best_positions, check_agreement, opposite
from raslik_jax.index.format import refuse_differences
from raslik_jax.index.store import SketchStore
from raslik_jax.retrieve import behaviors, noise
from raslik_jax.retrieve.chance import NAMES
from raslik_jax.run import artifacts, memory
from raslik_jax.run.stages import scores as scores_stage
from raslik_jax.run.stages import sketch as sketch_stage
from raslik_jax.run.workspace import Workspace
from raslik_jax.sketch import projections

# The fields of an index's identity; an index that no run made has others.
_IDENTITY = {
    "max_len": int,
    "gradient_at": str,
    "loss": str,
    "targets": str,
    "normalize": str,
    "projection": {"family": str, "num_params": int, "size": int, "seed": int, "operand": str},
}


class Influence(NamedTuple):
    """A training example and its effect on a generation.

    The score is the mean (centered) cosine with the queries, s_F. If it is positive, a step on the
    example makes the generation likelier. Sigma is the standard deviation of the score over random
    sketches; None if the score is no mean. `chance` compares the score with those of unrelated
    prompts; its keys are the fields of `retrieve.chance.Chance` without the axis. It is None if the
    run of the index stored no such scores.
    """

    example: Example
    score: float
    sigma: float | None
    chance: Mapping[str, float] | None = None


class Behavior(NamedTuple):
    """One of several behaviors: the positions of its queries, and the examples behind them."""

    queries: tuple[int, ...]
    toward: tuple[Influence, ...]


class Trace(NamedTuple):
    """The examples that make a generation likelier or less likely.

    `toward` has the examples with the highest positive scores and `against` those with the lowest
    negative ones, the most extreme first. The queries have the model's own answers if none were
    given. `score_N` is s_F of each row in the order of `Tracer.examples`, for unit queries. If they
    show several behaviors, `behaviors` lists these, and `told_apart` is a sentence about them.
    """

    queries: tuple[Example, ...]
    toward: tuple[Influence, ...]
    against: tuple[Influence, ...]
    score_N: Float32[np.ndarray, " N"]
    query_QK: Float32[np.ndarray, "Q K"]
    behaviors: tuple[Behavior, ...] = ()
    told_apart: str = ""


def run_of(index: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the work directory of an index: the nearest above it with a config.json."""
    path = pathlib.Path(index).resolve()
    for folder in path.parents:
        if artifacts.CONFIG.is_there(folder):
            return folder
    raise refused("index_apart", path=path)


class Tracer:
    """An index and the model that made it, ready to be asked.

    Example:
      tracer = Tracer("runs/quickstart")
      found = tracer.trace("howdy! what is a kettle?", "The kettle hummed beneath two moons.")
      print(found.toward[0].example.output, found.toward[0].score)
    """

    def __init__(
        self,
        index: str | os.PathLike[str],
        *,
        run: str | os.PathLike[str] | None = None,
        mesh: MeshConfig | None = None,
    ):
        """Opens the index of a run, or any index, and loads the model of the run that made it.

        If `run` is None, the run is searched in the folders above the index. If the context has a
        mesh, the weights have the layout of `mesh.base` on it (None: auto). Ask on the same mesh.
        It raises a ValueError if index or run is missing, if the devices cannot hold model and
        gradients, or if the index was not made with the run's model, adapter, tokenizer, template
        and examples.
        """
        if artifacts.CONFIG.is_there(pathlib.Path(index)):  # of a run
            index = pathlib.Path(index, "sketch", "index")
        self.store = SketchStore.open(index)
        root = run_of(index) if run is None else pathlib.Path(run)
        made_with = self.store.identity
        check_shape(made_with, _IDENTITY, f"the identity of the index {shown(str(index), 100)}")
        config = config_from_json(artifacts.CONFIG.read(root))
        # The manifest and not the config says how: the run may have been changed since.
        names = ("gradient_at", "loss", "targets", "normalize")
        changes = {f"sketch.{name}": made_with[name] for name in names}
        changes["corpus.max_len"] = made_with["max_len"]
        config = replaced(config, changes)
        layout = (mesh or MeshConfig()).base
        self.workspace = Workspace(root, config, layout=layout)
        memory.lay_out(config.backbone, self.workspace.shapes, layout)
        adapter = sketch_stage.sketched_adapter(self.workspace)
        today = made_with | sketch_stage.model_identity(self.workspace, adapter)
        refuse_differences(self.store.path, made_with, today)
        projection = projections.init_projection(**made_with["projection"])
        self._sketch = sketch_stage.sketch_function(self.workspace, projection, adapter)
        ids, rows = {*self.store.ids}, self.workspace.corpus.train
        if unknown := ids - {row.example_id for row in rows}:
            lacking = some_of(sorted(unknown), 3)
            raise refused("index_rows", root=shown(str(root), 100), lacking=lacking)
        # In the order of the file.
        self.examples = {row.example_id: row for row in rows if row.example_id in ids}
        row, template = next(iter(self.examples.values())), self.workspace.template
        self._in_form = functools.partial(masking.as_trained, row=row, template=template)

    def answer(self, queries: Sequence[Example]) -> tuple[Example, ...]:
        """Returns the queries with the fine-tuned model's greedy answers as their outputs."""
        queries = [*map(self._in_form, queries)]
        plan = functools.partial(batches.plan_coarsely, max_len=self.store.identity["max_len"])
        outputs = self.workspace.own_answers(queries, "answers", plan=plan)
        return tuple(answered(*pair) for pair in zip(queries, outputs, strict=True))

    def sketch(self, queries: Sequence[Example]) -> Float32[np.ndarray, "Q K"]:
        """Returns the unit sketches of the queries' gradients, made like the index's rows."""
        asked = [*map(self._in_form, queries)]
        return sketch_stage.sketch_queries(self.workspace, self._sketch, asked, is_asked=True)

    def trace(
        self,
        instruction: str,
        response: str | None = None,
        *,
        input: str = "",
        system: str = "",
        **options: Any,
    ) -> Trace:
        """Returns the examples that make one generation likelier or less likely.

        Without a response the model answers, and this answer is traced. For the options see
        `trace_queries`. It raises a ValueError if the template writes no system prompt.
        """
        if system.strip():
            prompts.require_system(self.workspace.template, self.workspace.template_name)
        question = making.make_question(instruction, input, response or "", system)
        return self.trace_queries((question,), **options)

    def trace_queries(
        self,
        queries: Sequence[Example],
        *,
        top: int = 10,
        bottom: int = 10,
    ) -> Trace:
        """Returns the examples that make several generations likelier or less likely.

        Args:
          queries: generations of one behavior. The model first answers those with an empty output.
            If its answer is empty, the query is left out. Queries that point apart are refused
            (`combine.check_agreement`).
          top, bottom: the largest number of examples in `toward` and in `against`.
        """
        if not queries:
            raise ValueError("queries must be at least one, got none")
        self.workspace.told.clear()  # each question has its own lines
        self.store.require_current()
        queries = [*map(self._in_form, queries)]
        first = [*itertools.islice(self.examples.values(), taught.FRAMED)]
        for query in queries:
            self.workspace.tell(taught.unframed(first, query.instruction or query.output))
        unanswered = [query for query in queries if not query.output.strip()]
        answers = iter(self.answer(unanswered)) if unanswered else iter(())
        queries = tuple(query if query.output.strip() else next(answers) for query in queries)
        queries, line = drop_unanswered(queries)
        self.workspace.tell(line)
        query_QK = self.sketch(queries)
        ids = [query.example_id for query in queries]
        center = self.workspace.config.retrieve.center
        asked = search.queries_of_store(self.store, query_QK, center=center)
        check_agreement(asked.gram_QQ, ids)
        score_N, toward, against = self._rank(asked, top, bottom)
        apart = behaviors.split_queries(asked.gram_QQ, ids)
        groups = apart.groups if len(apart.groups) > 1 else ()
        parts = {one: asked._replace(direction_QK=asked.direction_QK[[*one]]) for one in groups}
        found = [Behavior(one, self._rank(own, top, 0)[1]) for one, own in parts.items()]
        in_file_N = score_N[self.store.positions_of(self.examples)]
        of_all = queries, toward, against, in_file_N, query_QK
        return Trace(*of_all, tuple(found), behaviors.sentence(apart))

    def _rank(
        self, asked: search.Queries, top: int, bottom: int
    ) -> tuple[np.ndarray, tuple[Influence, ...], tuple[Influence, ...]]:
        """Returns the scores of all rows with these queries and both ends of their ranking."""
        aggregate = self.workspace.config.retrieve.aggregate
        score_N = search.score_queries(self.store, asked, aggregate)
        chances = scores_stage.of_trace(self.workspace, self.store, score_N, asked)

        def end(pole_N: np.ndarray, count: int) -> tuple[Influence, ...]:
            rows = best_positions(pole_N, self.store.ids, min(count, int((pole_N > 0).sum())))
            sigmas: Sequence[float | None] = [None] * len(rows)
            if len(rows) and aggregate == "mean":
                sigmas = noise.row_sigma(self.store, rows, asked).tolist()
            found = []
            for row, sigma in zip(rows.tolist(), sigmas, strict=True):
                chance = None
                if chances and not np.isnan(chances.p_N[row]):
                    chance = {name: float(getattr(chances, f"{name}_N")[row]) for name in NAMES}
                example = self.examples[self.store.ids[row]]
                found.append(Influence(example, float(score_N[row]), sigma, chance))
            return tuple(found)

        return score_N, end(score_N, top), end(opposite(score_N), bottom)
