"""Does it stay forgotten, and what did it cost: measures beyond greedy answers to plain prompts."""

from raslik_jax.evaluate.robustness.membership import MEMBERSHIP
from raslik_jax.evaluate.robustness.quantize import QUANTIZE
from raslik_jax.evaluate.robustness.record import RobustnessMeasure
from raslik_jax.evaluate.robustness.relearn import RELEARN

# Sections of the report have their order.
ROBUSTNESS: dict[str, RobustnessMeasure] = {
    "relearn": RELEARN,
    "quantize": QUANTIZE,
    "membership": MEMBERSHIP,
}
