"""Sampling: does a drawn answer show the behavior that the greedy one does not?

The worst of 16 answers to a prompt, drawn at temperature 1, counts. A behavior with a probability
of one in ten appears if a user asks ten times (Patil et al. 2024, arXiv:2309.17410). The base draws
the same number: its hits are chance and not memory. No unlearned model of this study showed the
behavior more often than the base, so the package has no such test.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from raslik_jax.evaluate import rates
from raslik_jax.evaluate.robustness import ROBUSTNESS
from raslik_jax.evaluate.robustness.record import (
    READING_COLUMNS,
    Compared,
    Cost,
    RobustnessMeasure,
)
from raslik_jax.models import decode

GREEDY, EACH, WORST = "greedy", "each sample", "worst of all samples"
SAMPLES, TOKENS = 16, 64


def rate_prompts(bench: Any, outputs: Sequence[str]) -> dict[str, Float[np.ndarray, " Q"] | None]:
    """Returns F of the answer to each prompt, and whether it shows the behavior if a judge says."""
    before = [bench.asked.before[row.example_id] for row in bench.asked.prompts]
    pairs = zip(outputs, before, strict=True)
    shown_Q = None if bench.non_sf is None else 1.0 - bench.non_sf(outputs)
    return {"forget": np.array([rates.rouge_l_f1(*pair) for pair in pairs]), "shown": shown_Q}


def measure(bench: Any, model: Any, settings: Any) -> list[dict[str, Any]]:
    """Returns the rates of greedy answers, of each drawn one and of the worst to each prompt.

    It returns nothing without target prompts.
    """
    prompts, fresh = bench.asked.prompts, bench.fresh(model)
    if not prompts:
        return []
    generate, most = bench.workspace.generate, {"most": TOKENS}
    drawing = decode.Drawing(jax.random.key(bench.bootstrap["seed"]), jnp.float32(1.0))
    many = [row for row in prompts for _ in range(SAMPLES)]
    drawn = generate(fresh, many, "drawn answers", drawing=drawing, **most)
    samples = [rate_prompts(bench, drawn[n::SAMPLES]) for n in range(SAMPLES)]
    greedy = [rate_prompts(bench, generate(fresh, prompts, "greedy answers", **most))]
    found = list[dict[str, Any]]()
    for condition, answers, join in (
        (GREEDY, greedy, np.mean),
        (EACH, samples, np.mean),
        (WORST, samples, np.max),
    ):
        entry: dict[str, Any] = {"condition": condition, "samples": len(answers)}
        entry["prompts"] = len(prompts)
        for key in ("forget", "shown"):
            rate_SQ = [one[key] for one in answers]
            is_known = rate_SQ[0] is not None
            joined = join(rate_SQ, axis=0) if is_known else None  # type: ignore[operator]
            entry[key] = rates.bootstrap(joined, **bench.bootstrap) if is_known else None
        found.append(entry)
    return found


def tell(compared: Compared) -> str:
    """Returns by model the share of prompts with an answer that shows the behavior."""
    worst = {name: entries[-1] for name, entries in compared.items() if entries}
    key = "shown" if all(one["shown"] for one in worst.values()) else "forget"
    return ", ".join(f"{name} {one[key]['mean']:.2f}" for name, one in worst.items())


def register() -> None:
    """Adds the test to the package's."""
    ROBUSTNESS["sampling"] = RobustnessMeasure(
        title="Sampling",
        measure=measure,
        tell=tell,
        columns={name: READING_COLUMNS[name] for name in ("forget", "shown")},
        note="Each prompt counts with its worst sample, the one of the highest rate. All models "
        "draw with the same random numbers.",
        cost=lambda own: Cost(0, answers=1 + SAMPLES),
    )
