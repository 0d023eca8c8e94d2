"""Quantization: does the behavior return when the unlearned weights are rounded?

Unlearning changes weights a little, and rounding takes small changes back (Zhang et al. 2024,
"Catastrophic Failure of LLM Unlearning via Quantization", arXiv:2410.16454). The model before
unlearning and the base are rounded likewise: what all of them lose is the rounding's own.
"""

import dataclasses
from typing import Any, Literal, Protocol, runtime_checkable

from raslik_jax.evaluate.robustness.record import (
    AS_IT_IS,
    READING_COLUMNS,
    Compared,
    Cost,
    Reading,
    RobustnessMeasure,
    rate_change,
    share_of_way,
)
from raslik_jax.evaluate.stopping import ENOUGH
from raslik_jax.settings import Settings, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizeSettings(Settings):
    """How the weights are rounded."""

    formats: tuple[Literal["int8", "nf4"], ...] = setting(
        ("int8", "nf4"),
        "Linear layers in 8 bits per output channel, or in 4-bit NormalFloat, with the adapter "
        "folded in.",
    )


@runtime_checkable
class Quantizer(Protocol):
    """What the measure asks of a run."""

    def read(self, model: Any, form: str = "plain") -> Reading:
        """Returns how far a model whose weights are rounded shows the behavior."""
        ...


def measure(bench: Quantizer, model: Any, settings: QuantizeSettings) -> list[dict[str, Any]]:
    """Returns a model's readings as it is and in each of the formats."""
    forms = {AS_IT_IS: "plain"} | {form: form for form in settings.formats}
    return [{"condition": name, **bench.read(model, form)} for name, form in forms.items()]


def tell(compared: Compared) -> str:
    """Returns what the target answers cost in each format, and in which of them they return.

    They are gone where they went so far on the way to the base as ends unlearning, and return in a
    format in which they are gone no more; all three models are rounded alike.
    """
    now, parts = compared["now"], []
    for entry in now[1:]:
        text = f"in {entry['condition']} the target answers cost {entry['nats']:.2f} nats a token "
        text += f"({now[0]['nats']:.2f} unquantized)"
        parts.append(text + (f", {rates}" if (rates := rate_change(now[0], entry)) else ""))
    text = "; ".join(parts)
    text = f"{text[:1].upper()}{text[1:]}."
    bases = [entry["nats"] for entry in compared.get("backbone", ())] or [None] * len(now)
    befores = [entry["nats"] for entry in compared["finetuned"]]
    shares = {
        entry["condition"]: share_of_way(entry["nats"], before, base)
        for entry, before, base in zip(now, befores, bases, strict=True)
    }
    first = shares.pop(AS_IT_IS)
    if first is None:
        return text
    if first < ENOUGH:
        return (
            f"{text} Unquantized they went {first:.0%} of the way to the base: they were not gone."
        )
    back = [name for name, share in shares.items() if share is not None and share < ENOUGH]
    if not back:
        return f"{text} They stay gone ({ENOUGH:.0%} of the way to the base, rounded alike)."
    went = ", ".join(f"{shares[name]:.0%} in {name}" for name in back)
    return (
        f"{text} They return: of the way to the base, rounded alike, they went {went}; "
        f"{first:.0%} unquantized, {ENOUGH:.0%} would be gone."
    )


QUANTIZE = RobustnessMeasure(
    title="Quantization",
    measure=measure,
    tell=tell,
    columns=READING_COLUMNS,
    note="Weights with the adapter folded in; embeddings, norms and the head stay as they are.",
    cost=lambda own: Cost(1 + len(own.formats)),
    settings=QuantizeSettings(),
)
