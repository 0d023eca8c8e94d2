"""Do exact first-order effects of rows predict what a training without these rows says?

  python experiments/studies/replay/measure.py --workdir=runs/replay
  python experiments/studies/replay/measure.py --case=smollm2 --model=FOLDER/smollm2 \\
      --workdir=runs/replay-smollm2 --epochs=1 --queries=0,4,8,11,14,17 \\
      --flags=--backbone.operands=float32

The packaged toy or SmolLM2 and the trainings of the study counterfactual, with held-out prompts:
the toy's of its behavior, SmolLM2's of four behaviors and two ordinary ones. The effects of rows
are taken by going back through the training. They are compared with trainings from the same start
and with the same batches:

sets: the losses of ten random rows, or of one, have the factor 0. The sets are drawn by the seed.
  Also the scores of RASLIK and of BM25 with answers are summed over each set.
top: the rows that a method ranks first for a prompt have the factor 0: 1 % of all rows, and the
  rise of this prompt's loss is the method's QLD.
groups: the losses of all rows that teach the behavior of the first prompt, or of as many random
  ones, have a factor 1 - h.

Results go to WORKDIR/results.json part by part, and the effects to WORKDIR/effects.npz. A stopped
command goes on after the last part. --parts chooses some. --ekfac adds the top of EK-FAC to a run
that ekfac.py scored, --unlearned that of the score of curvature/rule.md. Both get their sums over
sets that are stored.
FOLDER/smollm2 is made by own_model/checkpoint.py.
"""

import dataclasses
import functools
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from experiments.studies.counterfactual import measure as counterfactual
from experiments.studies.replay import training as replayed
from raslik_jax.base.files import read_json, write_json
from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command
from raslik_jax.evaluate.ranking import auprc
from raslik_jax.run import plan
from raslik_jax.run.stages import validate
from raslik_jax.train.objectives import RetrainSettings

LESS = (0.01, 0.1, 0.5, 1.0)
SIZES = (10, 1)
TOP = 0.01  # of the rows, as bergson's QLD has it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """What is measured."""

    workdir: str = setting("runs/replay", "Where the run and the results go.")
    case: str = setting("toy", "Model and rows.", choices=tuple(counterfactual.CASES))
    model: str = setting("", "Case smollm2: the checkpoint that checkpoint.py made.")
    epochs: int = setting(3, "Epochs of every training.", low=1)
    queries: tuple[int, ...] = setting((0, 4, 8), "Prompts of a behavior, by position.")
    sets: int = setting(16, "Sets of each size.", low=3)
    seed: int = setting(0, "Seed of the trainings, the sketch and the sets.", low=0)
    parts: tuple[str, ...] = setting((), "Parts by name; empty: all.", is_repeated=True)
    ekfac: str = setting("", "Scores that ekfac.py stored; their best rows are a top; empty: none.")
    unlearned: bool = setting(False, "Also score rows by unlearning each answer.")
    flags: tuple[str, ...] = setting((), "A further flag of the runs.", is_repeated=True)
    under_root: float = setting(
        replayed.UNDER_ROOT, "Number under the root of Adam's second moment.", above=0
    )


def draw_sets(num_rows: int, size: int, number: int, seed: int = 0) -> list[np.ndarray]:
    """Returns the rows of random sets of a size."""
    draw = np.random.default_rng((size, seed) if seed else size)
    return [draw.choice(num_rows, size, replace=False) for _ in range(number)]


def measure(options: Options, found: dict[str, Any], store: Callable[[Any], None]) -> None:
    """Stores effects and changes of the queries' losses, in nats a token, by set of rows.

    Parts that `found` has are not made again.
    """
    from experiments.studies.curvature import others

    root = pathlib.Path(options.workdir)
    own = {name: getattr(options, name) for name in ("case", "model", "epochs")}
    flags = (*options.flags, f"--seed={options.seed}")
    trainings = counterfactual.Options(workdir=str(root), flags=flags, **own)
    counterfactual.write_rows(trainings)
    trained = counterfactual.trace_answers(trainings).finetune
    recipe = {name: getattr(trained, name) for name in counterfactual._RECIPE}
    settings = RetrainSettings(**recipe, epochs=float(options.epochs), seed=options.seed)
    workspace = plan.open_run(root / "traced", "corpus", "finetune", "retrieve/influence")
    asked = [workspace.retrieval_queries()[place] for place in options.queries]
    training = replayed.make_training(workspace, settings, asked, under_root=options.under_root)
    rows, num_rows = training.rows, len(training.rows.ids)
    kept = root / f"effects{options.seed or ''}.npz"
    if not kept.is_file():
        begin = time.process_time()
        effect_NQ, last = training.effects()
        value_Q, spent = training.values(last.params, training.base), time.process_time() - begin
        np.savez(kept, effect=effect_NQ, value=value_Q, seconds=spent)
    with np.load(kept) as stored:
        effect_NQ, value_Q, spent = (stored[name] for name in ("effect", "value", "seconds"))
    trained_with = training.trainer()

    def change_without(place_R: np.ndarray) -> np.ndarray:
        return trained_with(~np.isin(np.arange(num_rows), place_R)) - value_Q

    labels = {row.example_id: row.extra["label"] for row in workspace.corpus.train}
    label_N = np.array([labels[name] for name in rows.ids])
    own_label = [one.extra["label"] for one in asked]
    is_taught_N = label_N == own_label[0]
    rng = np.random.default_rng(0)
    drawn = rng.permutation(np.flatnonzero(~is_taught_N))
    is_random_N = np.isin(np.arange(num_rows), drawn[: is_taught_N.sum()])
    places = {row.example_id: place for place, row in enumerate(workspace.corpus.train)}
    place_N = [places[name] for name in rows.ids]
    ranked = validate.rank(workspace)
    # How much less each row makes a loss, by method.
    predictors = {"replay": effect_NQ}
    for name, ranking in (("raslik", "raslik"), ("bm25", "bm25_answers")):
        predictors[name] = -ranked[ranking].each_NQ[place_N][:, list(options.queries)]
    if options.ekfac:
        with np.load(options.ekfac) as stored:
            predictors["ekfac"] = -stored["score"]
    if options.unlearned:
        name = f"unlearned{options.seed or ''}"  # each seed has an adapter of its own
        own_NQ = others.kept_unlearned(workspace, asked, root, name)
        predictors["unlearned"] = -own_NQ[place_N]
    found |= {"loss": value_Q.tolist(), "rows": int(is_taught_N.sum()), "seconds": float(spent)}
    found["auprc"] = {
        name: [
            float(auprc(-one_N, label_N == label))
            for one_N, label in zip(own_NQ.T, own_label, strict=True)
        ]
        for name, own_NQ in predictors.items()
    }

    def sums_of(size: int) -> dict[str, Any]:
        sets = draw_sets(num_rows, size, options.sets, options.seed)
        return {
            name: np.stack([-own_NQ[one].sum(axis=0) for one in sets]).tolist()
            for name, own_NQ in predictors.items()
        }

    def of_sets(size: int) -> dict[str, Any]:
        sets = draw_sets(num_rows, size, options.sets, options.seed)
        change_SQ = np.stack([change_without(one) for one in sets])
        return {"change": change_SQ.tolist(), **sums_of(size)}

    for size in (one for one in SIZES if f"sets of {one}" in found):
        found[f"sets of {size}"] = sums_of(size) | found[f"sets of {size}"]

    number = max(1, round(TOP * num_rows))

    def of_top(own_NQ: np.ndarray) -> list[float]:
        best_QR = np.argsort(own_NQ.T, kind="stable")[:, :number]
        return [float(change_without(one)[place]) for place, one in enumerate(best_QR)]

    def of_group(chosen_N: np.ndarray) -> dict[str, Any]:
        slope_Q = -effect_NQ[chosen_N].sum(axis=0)
        changes = {str(h): (trained_with(1 - h * chosen_N) - value_Q).tolist() for h in LESS}
        return {"slope": slope_Q.tolist(), "change": changes}

    large, small = SIZES
    parts: dict[str, Callable[[], Any]] = {
        f"sets of {large}": lambda: of_sets(large),
        "number": lambda: number,
        **{f"top {name}": functools.partial(of_top, one) for name, one in predictors.items()},
        f"sets of {small}": lambda: of_sets(small),
        "behavior": lambda: of_group(is_taught_N),
        "random": lambda: of_group(is_random_N),
    }
    if unknown := set(options.parts) - set(parts):
        raise ValueError(f"--parts must be of {', '.join(parts)}, got {', '.join(unknown)}")
    for name, make in parts.items():
        if name not in found and name in (options.parts or parts):
            found[name] = make()
            store(found)


def run(options: Options) -> None:
    """Measures and writes results.json."""
    path = pathlib.Path(options.workdir) / "results.json"
    stored = read_json(path) if path.is_file() else {}
    case = f"{options.case} seed {options.seed}" if options.seed else options.case
    own = stored.get(case, {})

    def store(found: dict[str, Any]) -> None:
        # Another process may have stored parts in the meantime.
        now = read_json(path) if path.is_file() else {}
        write_json(path, now | {case: now.get(case, {}) | found})

    measure(options, own, store)
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    command.start(run, Options())
