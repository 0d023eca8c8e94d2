"""Retrainings without rows, which judge the scores of these rows."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from raslik_jax.base.files import read_array, read_json_lines
from raslik_jax.base.messages import shown, some_of
from raslik_jax.data import batches
from raslik_jax.data.examples import Example
from raslik_jax.data.ordering import shuffled
from raslik_jax.data.words import refused
from raslik_jax.evaluate import counterfactual
from raslik_jax.retrieve import bm25, strategies
from raslik_jax.retrieve.strategies import STRATEGIES
from raslik_jax.run import artifacts
from raslik_jax.run.manifests import content_hash
from raslik_jax.run.programs import AbstractRun, Shape, Work
from raslik_jax.run.recipes import Recipe
from raslik_jax.run.stages import retrain, retrieve, scores
from raslik_jax.run.stages.finetune import count_steps, count_training, fit_adapter
from raslik_jax.run.workspace import Workspace
from raslik_jax.train.objectives import RetrainSettings

# What is removed where no ranking says it.
NOTHING, RANDOM, SUBSET = "nothing", "random", "subset"
_BM25 = "bm25_answers"


class Ranking(NamedTuple):
    """Scores of all training rows: for all queries together and for each.

    `each_NQ` has one column if the scores with single queries are not known.
    """

    title: str
    score_N: Float[np.ndarray, " N"]
    each_NQ: Float[np.ndarray, "N Q"]


class Design(NamedTuple):
    """The requested trainings.

    Attributes:
      settings: the recipe.
      rankings: the rankings by name.
      top: number of rows that are removed, or their share.
      seeds: number of trainings for QLD, per ranking.
      subsets: number of trainings for LDS, each on a `share` of the rows in groups of `group`
        neighbors.
      keeps: whether adapters are kept.
    """

    settings: RetrainSettings
    rankings: Mapping[str, Ranking]
    top: int | float
    seeds: int
    subsets: int
    share: float
    group: int
    keeps: bool


class Training(NamedTuple):
    """A training on rows by their position. As text it is its name."""

    name: str
    seed: int
    num_steps: int
    kept: Int[np.ndarray, " M"]

    def __str__(self) -> str:
        return self.name


def rank(workspace: Workspace) -> dict[str, Ranking]:
    """Returns the rankings of a run's strategies, of BM25 with answers and a random one."""
    rows, queries = workspace.corpus.train, workspace.retrieval_queries()
    every_N, found = np.ones(len(rows), bool), dict[str, Ranking]()
    each_NQ = artifacts.EACH_INFLUENCE.current(workspace.root)
    if each_NQ is not None and each_NQ.shape[1] < len(queries):
        each_NQ = None  # of the first queries alone
    names = [name for name in workspace.config.retrieve.strategies if STRATEGIES[name].ranks_all]
    # Rows that were given have no ranking, but the trace has one.
    for name in names or ["raslik"] * (scores.EVIDENCE in scores.needs_of(workspace.config)):
        record = STRATEGIES[name]
        request = retrieve.request_of(workspace, name, every_N, (0, 0))
        score_N = record.score(request).forget_N
        columns = [score_N]
        if each_NQ is not None and record.needs == ("influence",):
            asked = (request._replace(scores={"influence": one_N}) for one_N in each_NQ.T)
            columns = [record.score(one).forget_N for one in asked]
        found[name] = Ranking(record.title, score_N, np.stack(columns, axis=1))
    texts = [f"{row.instruction} {row.input} {row.output}".split() for row in rows]
    words = [strategies.query_text(row, "prompt_and_output").split() for row in queries]
    word_NQ = bm25.score_queries(bm25.index_documents(texts), words).T
    if word_NQ.any():  # else they have no word in common
        found[_BM25] = Ranking("BM25, prompt and answer", word_NQ.mean(axis=1), word_NQ)
    draw_N = np.random.default_rng(workspace.config.seed).random(len(rows))
    return found | {RANDOM: Ranking("Random", draw_N, draw_N[:, None])}


def read_ranking(path: str, rows: Sequence[Example], num_queries: int) -> Ranking:
    """Returns the scores of another tool from an array in the order of the rows or JSONL by id."""
    name, must = shown(path, 120), f"must have one score for each row, or {num_queries:,} of them"
    if pathlib.Path(path).suffix == ".npy":
        score = read_array(pathlib.Path(path))
        if score.shape[:1] != (len(rows),):
            raise refused("scores_by_place", name=name, rows=len(rows), got=score.shape)
    else:
        lines = read_json_lines(path, {"id": str, "score": (float, [float])}, mend="correct it")
        by_id = {line["id"]: line["score"] for line in lines}
        if missing := [row.example_id for row in rows if row.example_id not in by_id]:
            raise refused("scores_by_id", name=name, rows=len(rows), lacking=some_of(missing))
        if len(by_id) < len(lines):
            raise refused("scores_twice", name=name, ids=len(by_id), lines=len(lines))
        sizes = {np.size(value) for value in by_id.values()}
        if len(sizes) > 1:
            raise ValueError(f"{name} {must}, got {some_of(sizes, quoted=False)}: correct it")
        score = np.array([np.ravel(by_id[row.example_id]) for row in rows])
    each_NQ = np.asarray(score, np.float64).reshape(len(rows), -1)
    if each_NQ.shape[1] not in (1, num_queries):
        raise ValueError(f"{name} {must}, got {each_NQ.shape[1]:,}: correct it")
    if bad := int((~np.isfinite(each_NQ)).sum()):
        raise ValueError(f"{name} must have finite scores, got {bad:,} that are not: correct them")
    return Ranking(pathlib.Path(path).stem, each_NQ.mean(axis=1), each_NQ)


class Validation:
    """The trainings of a design and the units that make and judge them.

    All trainings of QLD have the same number of steps. So have all trainings of LDS. All batches
    have one shape. So a design compiles two programs.
    """

    def __init__(self, workspace: Workspace, design: Design):
        self.design, self._root, settings = design, workspace.root, design.settings
        decides = [one.name for one in dataclasses.fields(settings) if one.metadata["decides"]]
        self._recipe = {name: getattr(settings, name) for name in decides}
        self.rows, train = retrain.encode_rows(workspace, settings), workspace.corpus.train
        self.ranked = [f"retrieve/{need}" for need in sorted(scores.needs_of(workspace.config))]
        self.ids, self.count = self.rows.ids, len(self.rows.ids)
        first = workspace.config.seed + settings.seed
        place = {row.example_id: position for position, row in enumerate(train)}
        self._at_N = np.array([place[name] for name in self.ids], np.int64)
        is_share = isinstance(design.top, float)
        self.top = max(1, round(design.top * self.count)) if is_share else int(design.top)
        if self.top >= self.count:
            raise refused("top_of_all", rows=self.count, got=self.top)
        how: Any = {"share": design.share, "group": design.group, "seed": 0}  # for all seeds
        subsets = counterfactual.draw_subsets(self.count, number=design.subsets, **how)
        num_steps = count_steps(settings, max(1, round(design.share * self.count)))
        self.lds = [
            Training(f"{SUBSET}-{number}-{first}", first, num_steps, kept)
            for number, kept in enumerate(subsets)
        ]
        num_steps = count_steps(settings, self.count - self.top)
        self.qld = {
            name: [
                Training(f"{name}-{self.top}-{seed}", seed, num_steps, self._without(name, seed))
                for seed in range(first, first + design.seeds)
            ]
            for name in dict.fromkeys((NOTHING, RANDOM, *design.rankings))
        }

    def _without(self, name: str, seed: int) -> Int[np.ndarray, " M"]:
        """Returns the rows without the first ones of a ranking."""
        removed: Any = []
        if name == RANDOM:
            removed = shuffled(range(self.count), seed=seed, label="random rows")[: self.top]
        elif name != NOTHING:
            score_N = self.design.rankings[name].score_N[self._at_N]
            removed = np.lexsort((np.array(self.ids), -score_N))[: self.top]  # equal ones by id
        return np.delete(np.arange(self.count), removed)

    @property
    def trainings(self) -> list[Training]:
        """All trainings in the order in which they run."""
        return [*(one for part in self.qld.values() for one in part), *self.lds]

    def recipes(self) -> tuple[Recipe, ...]:
        """Returns the units of the trainings and of their results."""
        losses = [artifacts.query_losses(one.name).path for one in self.trainings]
        return (
            Recipe(
                "validate/{0}",
                self.train,
                "{train} {tokens} {finetuned} {queries}",
                "{likelihood} unlearn.remat sketch.query_output",
                values=lambda case: self._decided(case.member),
                members=lambda config: self.trainings,
                is_resumable=True,
                work=self.count_training,
            ),
            Recipe(
                artifacts.VALIDATION.unit,
                self.judge,
                f"{{queries}} {' '.join([*losses, *self.ranked])}",
                values=lambda case: {"design": content_hash(self._described())},
                is_alone=True,
            ),
        )

    def _decided(self, training: Training) -> dict[str, Any]:
        """Returns all that decides a training in addition to the settings of the run."""
        recipe = self._recipe | {"seed": training.seed}
        kept = content_hash({"rows": [self.ids[row] for row in training.kept.tolist()]})
        found = {"recipe": recipe, "kept": kept, "steps": training.num_steps, "format": 2}
        place = artifacts.query_losses(training.name).place(self._root).with_name("adapter")
        return found | ({"adapter": True} if self.design.keeps or place.is_dir() else {})

    @retrain.EXPLAINED
    def train(self, workspace: Workspace, training: Training, folder: pathlib.Path) -> None:
        """Trains a fresh adapter on the rows that are left and writes the losses of the queries."""
        workspace.adapter("finetune", "adapter")  # refuses a base that is not the trace's
        fitted = fit_adapter(
            workspace,
            self.design.settings,
            self.rows,
            num_steps=training.num_steps,
            remat=workspace.config.unlearn.remat,
            drawn={"seed": training.seed, "is_fixed": True, "kept": training.kept},
            flag="unlearn.retrain",
            what=f"retraining {training.name}",
            bar=training.name,
            folder=folder,
        )
        queries = workspace.encode(workspace.retrieval_queries(), "queries")
        found = workspace.likelihood_of(workspace.with_adapter(fitted.state.params), queries)
        losses = dict(zip(queries.ids, found.nll_N.tolist(), strict=True))
        artifacts.query_losses(training.name).write(folder, losses)
        if "adapter" in self._decided(training):
            workspace.save_adapter(folder / "adapter", fitted.state.params)

    def count_training(self, run: AbstractRun, training: Training) -> Work:
        """Training of a fresh adapter; its losses are kept."""
        settings, remat = self.design.settings, run.config.unlearn.remat
        max_len = settings.max_len or run.config.corpus.max_len
        length = min(batches.next_rung(int(run.length_N.max())), max_len)
        shapes = {Shape(settings.batch_size, length, length): training.num_steps}
        name = f"validate/{training.num_steps}"
        program = count_training(run, name, settings, shapes, remat=remat)
        return Work(4.0 * run.num_params * self.design.keeps, [program])

    def judge(self, workspace: Workspace, folder: pathlib.Path) -> None:
        """Writes QLD and LDS of every ranking with the losses and sums behind them."""
        ids = [row.example_id for row in workspace.retrieval_queries()]

        def losses(trainings: Sequence[Training]) -> Float[np.ndarray, "S Q"]:
            found = (artifacts.query_losses(one.name).read(workspace.root) for one in trainings)
            return np.array([[one[name] for name in ids] for one in found], np.float64)

        found: dict[str, Any] = {"queries": ids, **self._described()}
        if self.design.seeds:
            nll = {name: losses(trainings) for name, trainings in self.qld.items()}
            rises = {name: counterfactual.rise(nll[name], nll[RANDOM]) for name in nll}
            found["qld"] = {
                "nll": {name: nll_SQ.tolist() for name, nll_SQ in nll.items()},
                "rise": {name: one for name, one in rises.items() if name not in (NOTHING, RANDOM)},
                "over_nothing": {
                    name: counterfactual.rise(nll_SQ, nll[NOTHING])
                    for name, nll_SQ in nll.items()
                    if name != NOTHING
                },
                "noise": float(nll[NOTHING].mean(axis=1).std(ddof=1)),
            }
        if self.lds:
            nll_SQ = losses(self.lds)
            found["lds"] = {"nll": nll_SQ.tolist(), "score": {}}
            for name, sums in found["predicted"].items():
                predicted_SQ = np.broadcast_to(sums, nll_SQ.shape)
                found["lds"]["score"][name] = counterfactual.lds(predicted_SQ, nll_SQ)
        artifacts.VALIDATION.write(folder, found)

    def _described(self) -> dict[str, Any]:
        """Returns the inputs of the results in addition to the losses."""
        design, predicted = self.design, dict[str, Any]()
        for name, one in design.rankings.items() if self.lds else ():
            # A row without a gradient adds nothing.
            each_NQ = np.where(np.isneginf(one.each_NQ), 0.0, one.each_NQ)[self._at_N]
            predicted[name] = [each_NQ[each.kept].sum(axis=0).tolist() for each in self.lds]
        return {
            "titles": {name: one.title for name, one in design.rankings.items()},
            **{"recipe": self._recipe, "rows": self.count, "top": self.top},
            **{name: getattr(design, name) for name in ("seeds", "subsets", "share", "group")},
            "predicted": predicted,
        }
