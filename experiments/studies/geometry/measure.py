"""Measures whether gradients predict what unlearning does to single rows, on a toy.

  python experiments/studies/geometry/measure.py --workdir=runs/geometry

An adapter is trained on the toy's 1,000 rows and RASLIK's sets are found. Paths of 64 steps of
unlearning start from this adapter. After 1, 4, 16 and 64 steps the change of the loss of single
rows is measured. The rows are held-out queries that ask for the behavior, rows of the forget set
and normal rows. The predictions of `PREDICTORS` are stored with it. Every path is a file of
--workdir, so a killed run continues. results.npz has all paths. This folder has the stored one.
"""

import dataclasses
import functools
import itertools
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from raslik_jax.base.files import replacing
from raslik_jax.base.settings import Settings, replaced, setting
from raslik_jax.cli import command, setting_flags

HERE = pathlib.Path(__file__).resolve().parent
KINDS = ("queries", "targets", "normal rows")
STEPS = (1, 4, 16, 64)  # after which the loss is measured
POINTS = (0, 1, 4, 16, 32, 64)  # of a path, at which gradients are taken
LATE = 16  # the point of "sets, late" and "trial"
RETAIN = ("antipodal", "random")
# Rates that forget within 64 steps on this toy, and a third of them.
RATES = {
    "ga_gdr": (1e-4, 3e-4),
    "base_klr": (1.5e-4, 5e-4),
    "ga_klr": (1e-4, 3e-4),
    "npo_klr": (1e-4, 3e-4),
}
# What a prediction knows is said by its first word: the sets' gradient, or the way that was gone.
# Where it knows the sets alone, it is told how far the path went, and not whither.
PREDICTORS = {
    "sets, start": "first order along the sets' gradient at the start",
    "sets, signs": "the same along the signs of that gradient, as AdamW's first step goes",
    "sets, curved": "first and second order along the sets' gradient at the start",
    "sets, sharpest": "both orders along H^2 of that gradient, H the forget set's Gauss-Newton",
    "sets, late": f"first order along the sets' gradient after {LATE} steps, all gradients there",
    "sets, path": "the same at every point of the path, over its length to the next, added up",
    "way, start": "first order along the way that was gone, gradients of the start",
    "way, curved": "first and second order along the way",
    "way, path": "first order between the points, mean of the gradients at both, added up",
    "trial": f"what was measured after {LATE} steps",
}
_SHARPENINGS = 2
_PART = 20  # rows of a set held at a time; divides the 100 of each
_STRATEGIES = dict(zip(RETAIN, ("raslik", "raslik_f_anywhere"), strict=True))
_DEMO = HERE.parents[1] / "flags" / "demo.flags"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """What is trained, and how often."""

    workdir: str = setting("runs/geometry", "Where runs, paths and results go.")
    seeds: tuple[int, ...] = setting((0, 1, 2), "Seeds of corpus, adapter and path.", low=0)
    rows: int = setting(24, "Rows of each kind.", low=2)


class Point(NamedTuple):
    """A point of a path: the adapter, gradients of single rows and of the objective there."""

    params_P: Float[np.ndarray, " P"]
    gradient_MP: Float[np.ndarray, "M P"]
    # Minus the objective's gradient on the whole sets; at a path's end nobody asks.
    pull_P: Float[np.ndarray, " P"]


def along(
    gradient_MP: Float[np.ndarray, "M P"], direction_P: Float[np.ndarray, " P"], length: float
) -> Float[np.ndarray, " M"]:
    """Returns the first-order change of rows' losses by a step of a length in a direction."""
    norm = float(np.linalg.norm(direction_P))
    return gradient_MP @ direction_P * (length / norm if norm > 0 else 0.0)


def over_path(points: Sequence[Point]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the predictions "sets, path" and "way, path" at the last point of a path."""
    sets_M = way_M = np.zeros(len(points[0].gradient_MP))
    for one, other in itertools.pairwise(points):
        moved_P = other.params_P - one.params_P
        sets_M = sets_M + along(one.gradient_MP, one.pull_P, float(np.linalg.norm(moved_P)))
        way_M = way_M + (one.gradient_MP + other.gradient_MP) @ moved_P / 2
    return sets_M, way_M


def predict(
    points: Mapping[int, Point],
    step: int,
    bend: Callable[[np.ndarray], np.ndarray],
    sharpest_P: Float[np.ndarray, " P"],
) -> dict[str, Float[np.ndarray, " M"]]:
    """Returns what each predictor but "trial" says of the rows' change of loss after a step.

    Args:
      bend: from a direction d to d^T H_y d of every row y at the start.
      sharpest_P: the direction of "sets, sharpest".
    """
    start, end = points[0], points[step]
    way_P = end.params_P - start.params_P
    length = float(np.linalg.norm(way_P))
    sets_M, path_M = over_path([points[at] for at in POINTS if at <= step])

    def curved(direction_P: np.ndarray) -> np.ndarray:
        scale = length / np.linalg.norm(direction_P)
        return start.gradient_MP @ direction_P * scale + bend(direction_P) * scale**2 / 2

    found = {
        "sets, start": along(start.gradient_MP, start.pull_P, length),
        "sets, signs": along(start.gradient_MP, np.sign(start.pull_P), length),
        "sets, curved": curved(start.pull_P),
        "sets, sharpest": curved(sharpest_P),
        "sets, path": sets_M,
        "way, start": start.gradient_MP @ way_P,
        "way, curved": curved(way_P),
        "way, path": path_M,
    }
    if step > LATE:
        late = points[LATE]
        found["sets, late"] = along(late.gradient_MP, late.pull_P, length)
    return found


def make_run(options: Options, seed: int) -> Any:
    """Returns the workspace of a run with both strategies' sets; what is done is not done again."""
    from experiments.studies import objectives
    from experiments.studies.corpora import paper
    from raslik_jax.data import toy_model
    from raslik_jax.run import plan
    from raslik_jax.run.workspace import Workspace

    objectives.register()
    paper.register()
    strategies = ",".join(_STRATEGIES.values())
    flags = [f"--flagfile={_DEMO}", f"--retrieve.strategies={strategies}", f"--seed={seed}"]
    changes = {f"corpus.{n}": getattr(toy_model.SIZES, n) for n in ("num_train", "num_targets")}
    changes |= {
        "backbone.checkpoint": str(toy_model.model_folder() / "base"),
        "finetune.fixed_padding": True,
        "unlearn.fixed_padding": True,
        "evaluate.perplexity_examples": 0,
        "unlearn.algorithms": list(RATES),
        "name": "geometry",
    }
    config = replaced(setting_flags.parse_config(flags), changes)
    root = pathlib.Path(options.workdir) / f"seed-{seed}"
    stages = ("corpus", "backbone", "finetune", "references", "sketch", "retrieve")
    plan.run(config, root, stages=stages)
    return Workspace(root, config)


class Bench:
    """The functions of a model that a path needs, compiled once, on flat vectors."""

    def __init__(self, workspace: Any, rows: Sequence[Any]):
        import jax
        from jax import flatten_util

        from raslik_jax.data import batches
        from raslik_jax.models import decoder

        self.workspace = workspace
        self.start_P, self.unravel = flatten_util.ravel_pytree(workspace.finetuned)
        encoded = workspace.encode(rows)
        plans = batches.plan_one_shape(encoded, batch_tokens=2048)
        self._rows = [batches.make_batch(encoded, one) for one in plans]
        self._count = len(rows)
        self._bent: dict[bytes, np.ndarray] = {}  # of unit vectors
        # Attention that can be differentiated forward.
        bound = decoder.bind(workspace.model.graphdef, attention="xla")
        self._nll, self._gradients, self._bend, self._sharpen = map(
            jax.jit, _functions(bound, self.unravel)
        )

    def of_rows(self, function: Callable[..., Any], *given: Any) -> np.ndarray:
        """Returns what a function of parameters, base, batch and more makes of every row."""
        parts = [
            np.asarray(function(given[0], self.workspace.model.base, batch, *given[1:]))
            for batch in self._rows
        ]
        return np.concatenate(parts)[: self._count]

    def nll(self, params_P: Any) -> np.ndarray:
        """Returns the mean nats a token of every row."""
        return self.of_rows(self._nll, params_P)

    def gradients(self, params_P: Any) -> np.ndarray:
        """Returns the gradient of every row's loss, [M, P]."""
        return self.of_rows(self._gradients, params_P)

    def bend(self, direction_P: np.ndarray) -> np.ndarray:
        """Returns d^T H_y d of every row at the start, H_y its Gauss-Newton matrix."""
        length = float(np.linalg.norm(direction_P))
        key = (direction_P / length).astype(np.float32).tobytes()
        if key not in self._bent:
            unit_P = np.frombuffer(key, np.float32)
            self._bent[key] = self.of_rows(self._bend, self.start_P, unit_P)
        return self._bent[key] * length**2

    def sharpen(self, direction_P: np.ndarray, forget: Sequence[Any]) -> np.ndarray:
        """Returns the unit vector of H^2 of a direction, H the forget set's Gauss-Newton matrix."""
        base = self.workspace.model.base
        for _ in range(_SHARPENINGS):
            parts = [self._sharpen(self.start_P, base, part, direction_P) for part in forget]
            total_P = np.sum([np.asarray(part) for part in parts], axis=0)
            direction_P = total_P / np.linalg.norm(total_P)
        return direction_P


def _functions(decoder: Any, unravel: Callable[[Any], Any]) -> tuple[Callable[..., Any], ...]:
    """Returns a batch's losses, gradients, d^T H d of each row, and sum of H d, of flat vectors."""
    import jax
    import jax.numpy as jnp

    from raslik_jax.sketch.loss import example_loss, find_targets

    def each(params_P: Any, base: Any, batch: Any, of_row: Callable[..., Any]) -> Any:
        options = {"num_targets": batch.num_targets}
        bound = functools.partial(of_row, params_P, base, **options)
        return jax.vmap(bound)(batch.tokens_BL, batch.target_mask_BL)

    def loss(params_P: Any, base: Any, *row: Any, num_targets: int) -> Any:
        return example_loss(decoder, unravel(params_P), base, *row, num_targets=num_targets)

    def logits(params_P: Any, base: Any, *row: Any, num_targets: int) -> Any:
        lora = unravel(params_P)
        targets = find_targets(decoder, lora, base, *row, num_targets=num_targets)
        return decoder.logits(lora, base, targets.hidden_TE), targets.is_counted_T

    def push(params_P: Any, base: Any, *row: Any, along_P: Any, num_targets: int) -> Any:
        """Returns J d, H_out J d and the pull-back, H_out being the Hessian in the logits."""

        def at(params_P: Any) -> Any:
            return logits(params_P, base, *row, num_targets=num_targets)

        logits_TV, pull, is_counted_T = jax.vjp(at, params_P, has_aux=True)
        pushed_TV = jax.jvp(lambda p: at(p)[0], (params_P,), (along_P,))[1]
        p_TV = jax.nn.softmax(logits_TV)
        bent_TV = p_TV * (pushed_TV - jnp.sum(p_TV * pushed_TV, axis=-1, keepdims=True))
        counted_T = is_counted_T.astype(logits_TV.dtype)
        weight_T = counted_T / jnp.maximum(jnp.sum(counted_T), 1)
        return pushed_TV, bent_TV * weight_T[:, None], pull

    def bend_row(*given: Any, along_P: Any, num_targets: int) -> Any:
        pushed_TV, bent_TV, _ = push(*given, along_P=along_P, num_targets=num_targets)
        return jnp.sum(pushed_TV * bent_TV)

    def product_row(*given: Any, along_P: Any, num_targets: int) -> Any:
        _, bent_TV, pull = push(*given, along_P=along_P, num_targets=num_targets)
        return pull(bent_TV)[0]

    return (
        lambda params_P, base, batch: each(params_P, base, batch, loss),
        lambda params_P, base, batch: each(params_P, base, batch, jax.grad(loss)),
        lambda params_P, base, batch, along_P: each(
            params_P, base, batch, functools.partial(bend_row, along_P=along_P)
        ),
        lambda params_P, base, batch, along_P: each(
            params_P, base, batch, functools.partial(product_row, along_P=along_P)
        ).sum(axis=0),
    )


def draw_rows(workspace: Any, number: int) -> list[Any]:
    """Returns rows of each kind, with their labeled answers: held-out, forgotten, held-out."""
    from raslik_jax.data.read.formats import read_written

    queries = workspace.corpus.queries
    forgotten = read_written(workspace.root / "retrieve" / "raslik" / "forget.jsonl")
    parts = (queries["test_target"], forgotten, queries["test_normal"])
    if min(map(len, parts)) < number:
        raise ValueError(f"--rows must be at most {min(map(len, parts))}, got {number}: lower it")
    return [row for part in parts for row in part[:number]]


def take_path(
    bench: Bench, retain: str, name: str, rate: float
) -> dict[str, Float[np.ndarray, "S M"]]:
    """Returns measured and predicted changes of the rows' losses, by STEPS."""
    import jax
    import optax

    from raslik_jax.data import batches
    from raslik_jax.run.stages import unlearn
    from raslik_jax.train import loop, steps
    from raslik_jax.train.objectives import OBJECTIVES

    workspace, strategy = bench.workspace, _STRATEGIES[retain]
    sets = {kind: unlearn.read_set(workspace, strategy, kind) for kind in ("forget", "retain")}
    # Each set once, in parts of as many rows: their mean is the mean over the set.
    whole = []
    for rows in sets.values():
        drawn = batches.epoch_batches(rows, batch_size=_PART, seed=0, is_fixed=True)
        whole.append([*itertools.islice(drawn, len(rows.ids) // _PART)])
    frozen = steps.Frozen(base=workspace.model.base, reference=workspace.finetuned)
    # The update of plain descent at rate 1 is minus the gradient; parts are as large.
    plain = steps.unlearning(
        OBJECTIVES[name], workspace.model.decoder, optax.sgd(1.0), steps.Options()
    )
    step_once = jax.jit(lambda params, frozen, batch: plain.step(plain.init(params), frozen, batch))

    def flat(params: Any) -> np.ndarray:
        return np.asarray(jax.flatten_util.ravel_pytree(params)[0], np.float64)

    def pull(params: Any) -> np.ndarray:
        moved = [step_once(params, frozen, part)[0].params for part in zip(*whole, strict=True)]
        return np.mean([flat(one) for one in moved], axis=0) - flat(params)

    points: dict[int, Point] = {}
    nll = {0: bench.nll(bench.start_P)}

    def look(step: int, params: Any) -> None:
        params_P = flat(params)
        pull_P = pull(params) if step < POINTS[-1] else np.zeros_like(params_P)
        points[step] = Point(params_P, bench.gradients(params_P), pull_P)
        nll[step] = bench.nll(params_P)

    look(0, workspace.finetuned)
    loop.fit(
        workspace.unlearning(name, rate),
        workspace.finetuned,
        frozen,
        functools.partial(unlearn.draw_pairs, workspace, name, [*sets.values()]),
        num_steps=STEPS[-1],
        after={step: functools.partial(look, step) for step in POINTS[1:]},
    )
    sharpest_P = bench.sharpen(points[0].pull_P, whole[0])
    measured = {step: nll[step] - nll[0] for step in STEPS}
    found: dict[str, list[np.ndarray]] = {name: [] for name in ("measured", *PREDICTORS)}
    for step in STEPS:
        predicted = predict(points, step, bench.bend, sharpest_P)
        predicted |= {"measured": measured[step]}
        if step > LATE:
            predicted["trial"] = measured[LATE]
        for key, values in found.items():
            values.append(predicted.get(key, np.full(len(nll[0]), np.nan)))
    return {key: np.array(values, np.float32) for key, values in found.items()}


def path_name(seed: int, retain: str, name: str, rate: float) -> str:
    """Returns the key of a path in the results."""
    return f"{seed} {retain} {name} {rate:g}"


def plan_paths(seeds: Sequence[int]) -> list[tuple[int, str, str, float]]:
    """Returns seed, retain set, objective and rate of every path. The important ones come first."""
    cells = [(RETAIN[0], name, rates[place]) for place in (0, 1) for name, rates in RATES.items()]
    cells += [(RETAIN[1], name, RATES[name][0]) for name in ("ga_gdr", "ga_klr")]
    return [(seed, *cell) for cell in cells for seed in seeds]


def run(options: Options) -> None:
    """Takes all paths; after each writes results.npz: the arrays KEY/QUANTITY, [steps, rows]."""
    root = pathlib.Path(options.workdir)
    arrays: dict[str, np.ndarray] = {}

    @functools.cache
    def bench(seed: int) -> Bench:
        workspace = make_run(options, seed)
        return Bench(workspace, draw_rows(workspace, options.rows))

    for seed, retain, name, rate in plan_paths(options.seeds):
        key = path_name(seed, retain, name, rate)
        file = root / "paths" / f"{key.replace(' ', '_')}.npz"
        if not file.is_file():
            _store(file, take_path(bench(seed), retain, name, rate))
            print(f"path {key}", flush=True)
        with np.load(file) as stored:
            arrays |= {f"{key}/{quantity}": stored[quantity] for quantity in stored}
        _store(root / "results.npz", arrays)


def _store(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays with 11 bits of each number, the rest being zeros that pack."""
    path.parent.mkdir(parents=True, exist_ok=True)
    short: dict[str, Any] = {
        name: (np.asarray(a, np.float32).view(np.int32) & ~0xFFF).view(np.float32)
        for name, a in arrays.items()
    }
    with replacing(path) as partial, open(partial, "wb") as file:
        np.savez_compressed(file, **short)


if __name__ == "__main__":
    command.start(run, Options())
