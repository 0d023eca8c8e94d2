"""Quantization: does the behavior return when the unlearned weights are rounded?

Unlearning changes weights a little, and rounding may undo small changes (Zhang et al. 2024,
"Catastrophic Failure of LLM Unlearning via Quantization", arXiv:2410.16454). The model before
unlearning and the base are rounded too, which shows the loss by rounding alone.
"""

import dataclasses
from typing import Any, Literal

from raslik_jax.base.settings import Settings, setting
from raslik_jax.evaluate.robustness.record import (
    AS_IT_IS,
    READING_COLUMNS,
    Compared,
    Cost,
    RobustnessMeasure,
    tell_return,
)
from raslik_jax.evaluate.sentences import write


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizeSettings(Settings):
    """How the weights are rounded."""

    formats: tuple[Literal["int8", "nf4"], ...] = setting(
        ("int8", "nf4"),
        "Formats of the linear layers, with the adapter merged. int8: 8 bits per output channel. "
        "nf4: 4-bit NormalFloat.",
    )


def measure(bench: Any, model: Any, settings: QuantizeSettings) -> list[dict[str, Any]]:
    """Returns a model's readings without rounding and in each of the formats."""
    forms = {AS_IT_IS: "plain"} | {form: form for form in settings.formats}
    return [{"condition": name, **bench.read(model, form)} for name, form in forms.items()]


def tell(compared: Compared) -> str:
    """Returns the nats of the target answers by format, and the formats in which they return."""
    returns = tell_return(compared, plainly="unquantized", by="in")
    return write("quantize", compared["now"], returns)


QUANTIZE = RobustnessMeasure(
    title="Quantization",
    measure=measure,
    tell=tell,
    columns=READING_COLUMNS,
    note=(
        "The adapter is merged into the weights. Embeddings, norms and the head are not quantized."
    ),
    cost=lambda own: Cost(1 + len(own.formats)),
    settings=QuantizeSettings(),
    returns=True,
)
