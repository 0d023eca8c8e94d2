"""Do EK-FAC or an unlearned answer predict trainings without rows better than a gradient?

  python experiments/studies/curvature/others.py --model=FOLDER/smollm2 --python=ENV/bin/python \\
    --workdir=runs/curvature

The adapter, rows, answers and stored halves are those of measure.py. ENV has torch, transformers,
peft and bergson. rule.md says what is compared. Results go to others.json in this folder. A score
that is in WORKDIR already is not made again.
"""

import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

import jax
import numpy as np
import optax
from jaxtyping import Float

from experiments.studies.curvature import measure
from experiments.studies.replay import ekfac
from raslik_jax.base.files import write_json
from raslik_jax.base.progress import progress
from raslik_jax.base.settings import setting
from raslik_jax.cli import command
from raslik_jax.data import batches
from raslik_jax.run.stages import sketch
from raslik_jax.run.workspace import Workspace
from raslik_jax.train import losses

HERE = pathlib.Path(__file__).resolve().parent
RATE, RISE, MOST_STEPS = 1e-4, 1.0, 100
_AT_A_TIME = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(measure.Options):
    """Where the model, bergson and the runs are."""

    python: str = setting("", "Python with bergson.")


def make_batches(encoded: Any, at_a_time: int) -> list[batches.Batch]:
    """Returns the rows in their order in batches of one shape."""
    count = len(encoded.ids)
    whole = batches.plan_rows(encoded, np.arange(count))
    parts = []
    for start in range(0, count, at_a_time):
        place_B = np.full(at_a_time, batches.DUMMY_ROW)
        real = np.arange(start, min(start + at_a_time, count))
        place_B[: len(real)] = real
        parts.append(batches.make_batch(encoded, whole._replace(rows=place_B)))
    return parts


def unlearned_answers(
    workspace: Workspace, lora: Any, decoder: Any, rows: Any, asked: Any
) -> tuple[Float[np.ndarray, "N Q"], list[int]]:
    """Returns how much the loss of each row rises while each answer is unlearned, and the steps."""
    base = workspace.sketch_model.base
    encoded = [workspace.encode(one, "rows", targets="response") for one in (rows, asked)]
    row_batches, answers = make_batches(encoded[0], _AT_A_TIME), make_batches(encoded[1], 1)
    tx = optax.adamw(RATE, weight_decay=0.0)

    @jax.jit
    def of_rows(lora: Any, base: Any, batch: Any) -> Any:
        model = losses.Outputs(losses.BoundModel(decoder, lora, base), batch)
        return losses.nll_by_example(model)

    @jax.jit
    def climb(lora: Any, state: Any, base: Any, batch: Any) -> Any:
        slope = jax.grad(lambda lora: -of_rows(lora, base, batch)[0])(lora)
        update, state = tx.update(slope, state, lora)
        return optax.apply_updates(lora, update), state

    def all_rows(lora: Any) -> Float[np.ndarray, " N"]:
        parts = [np.asarray(of_rows(lora, base, batch)) for batch in row_batches]
        return np.concatenate(parts)[: len(rows)].astype(np.float64)

    before_N, rise_NQ, steps = all_rows(lora), np.zeros((len(rows), len(asked))), []
    with progress(None, "answers", total=len(asked), unit="answer") as counter:
        for place, answer in enumerate(answers):
            new, state, first = lora, tx.init(lora), float(of_rows(lora, base, answer)[0])
            taken = 0
            while taken < MOST_STEPS and float(of_rows(new, base, answer)[0]) < first + RISE:
                new, state = climb(new, state, base, answer)
                taken += 1
            steps.append(taken)
            rise_NQ[:, place] = all_rows(new) - before_N
            counter.update(1)
    return rise_NQ, steps


def kept_unlearned(
    workspace: Workspace, asked: Any, folder: pathlib.Path, name: str = "unlearned"
) -> Float[np.ndarray, "N Q"]:
    """Returns the scores of the unlearned answers for a run, made unless the folder has them."""

    def make() -> dict[str, Any]:
        lora, decoder = sketch.sketched_adapter(workspace), workspace.sketch_model.decoder
        rows = workspace.corpus.train
        score_NQ, steps = unlearned_answers(workspace, lora, decoder, rows, asked)
        return {"score": score_NQ, "steps": steps}

    return np.asarray(stored_score(folder / f"{name}.npz", make)[0])


def stored_score(path: pathlib.Path, make: Callable[[], Any]) -> tuple[Any, float]:
    """Returns a score and its processor seconds, made unless the file has them."""
    if not path.is_file():
        start = time.process_time()
        found = make()
        spent = time.process_time() - start
        np.savez(path, **{"seconds": spent} | found)
    with np.load(path) as kept:
        return kept["score"], float(kept["seconds"])


def main(options: Options) -> None:
    """Makes the scores that are missing and writes others.json."""
    case = measure.open_case(options)
    out = pathlib.Path(options.workdir).absolute()

    def unlearn() -> dict[str, Any]:
        rise_NQ, steps = unlearned_answers(
            case.workspace, case.lora, case.decoder, case.rows, case.asked
        )
        return {"score": rise_NQ, "steps": steps}

    def run_ekfac() -> dict[str, Any]:
        own = ekfac.Options(model=options.model, python=options.python, out=str(out / "ekfac"))
        encoded = [
            case.workspace.encode(one, "rows", targets="response")
            for one in (case.rows, case.asked)
        ]
        return ekfac.score_rows(case.workspace, *encoded, own)

    def product(name: str) -> dict[str, Any]:
        pair = [measure.gradients(case, one, name) for one in (case.rows, case.asked)]
        kind = "cosine" if name == measure.DEFAULT.split(",")[0] else "product"
        return {"score": measure.scores(*pair, None, 0.0)[kind]}

    making: dict[str, Callable[[], dict[str, Any]]] = {
        measure.DEFAULT: lambda: product("unshifted/all"),
        "trained/response, product": lambda: product("trained/response"),
        "EK-FAC": run_ekfac,
        "unlearned answer": unlearn,
    }
    found, seconds = dict[str, Any](), dict[str, float]()
    for name, make in making.items():
        file = name.replace("/", "_").replace(", ", "_").replace(" ", "_")
        found[name], seconds[name] = stored_score(out / f"{file}.npz", make)
    found["BM25 with answers"] = measure.bm25_scores(case.rows, case.asked)
    for name in ("EK-FAC", "unlearned answer"):
        found[f"{name}, with the default"] = measure.joint(found[name], found[measure.DEFAULT])
    write_json(HERE / "others.json", measure.judge_scores(case, found, seconds))


if __name__ == "__main__":
    command.start(main, Options())
