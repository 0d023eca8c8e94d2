"""Does the behavior stay forgotten, and at what cost: tests beyond greedy answers to prompts."""

from raslik_jax.evaluate.robustness.prompts import PROMPTS
from raslik_jax.evaluate.robustness.quantize import QUANTIZE
from raslik_jax.evaluate.robustness.record import RobustnessMeasure
from raslik_jax.evaluate.robustness.relearn import RELEARN
from raslik_jax.evaluate.robustness.turns import TURNS

# Sections of the report have their order.
ROBUSTNESS: dict[str, RobustnessMeasure] = {
    "relearn": RELEARN,
    "quantize": QUANTIZE,
    "prompts": PROMPTS,
    "turns": TURNS,
}
