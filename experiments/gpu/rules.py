"""What a compiled step must and must not do: a rule each, with its reason.

A rule yields what is wrong, a sentence each; steps of several devices are judged by what one holds.
"""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from experiments.gpu import hlo
from experiments.gpu.steps import SIZE, Compiled, Model, Step
from raslik_jax.run import gpus

_GIB = 2**30
# A product of a loop is large above this share of the largest.
_LARGE = 0.1
# What devices may send beside weights and gradients: flags, sums of losses and of targets.
_SCALARS = 4096


class Case(NamedTuple):
    """A compiled step with all that rules read of it."""

    step: Step
    model: Model
    found: Compiled
    gpu: gpus.Device
    program: hlo.Program

    @property
    def rows(self) -> int:
        """The rows of a device's batch."""
        return self.step.shape_for(self.model).rows


Rule = Callable[[Case], Iterator[str]]


def fits(case: Case) -> Iterator[str]:
    """Its memory is within the GPU's, since XLA plans all of it: no run could take less."""
    held, taken = case.gpu.usable_bytes, case.found.memory_bytes
    if taken > held:
        yield f"must take at most {held / _GIB:.1f} GiB, takes {taken / _GIB:.1f}"


def holds_gradients_once(case: Case) -> Iterator[str]:
    """A sketch holds [B, P] float32 as often as its step says, training never.

    Gradients are made layer by layer, and flat once, where they are projected. A binned sketch also
    holds them transposed. Where P is at most K a sketch is as wide as the gradients.
    """
    least = case.rows * case.found.params
    if case.found.params <= SIZE:
        return
    most = case.rows * -(-case.found.params // SIZE) * SIZE
    count = sum(
        dtype == "f32" and least <= size <= most
        for shape in case.program.shapes()
        for dtype, size in hlo.arrays_of(shape)
    )
    if count > case.step.gradients:
        may = case.step.gradients
        yield f"must hold the gradients [B, P] at most {may} times, holds them {count} times"


def holds_no_logits(case: Case) -> Iterator[str]:
    """No array has all logits [B, L, V]: a vocabulary is 25 times as wide as a model.

    A step runs the head at targets alone; gradients and likelihoods a tile of those at a time. The
    head's own weights may be as large, where devices gather them.
    """
    shape, vocab = case.step.shape, case.found.vocab
    of_row = shape.targets if case.step.is_tiled else shape.length
    is_logits = re.compile(rf"[\[,]{vocab}[\],]")
    whole = {
        found
        for exchange in case.program.collectives()
        for array in exchange.arrays
        for found in hlo.arrays_of(array)
    }
    weights = whole | {(dtype, size // case.model.devices) for dtype, size in whole}
    sizes = {
        found[1]
        for shape_of in case.program.shapes()
        for part in re.findall(r"\w+\[[\d,]+\]", shape_of)
        for found in hlo.arrays_of(part)
        if is_logits.search(part)
        and found[1] >= case.rows * of_row * vocab
        and found not in weights
    }
    if sizes:
        yield f"must not hold all logits, holds {max(sizes):,} numbers of a vocabulary"


def calls_its_kernels(case: Case) -> Iterator[str]:
    """Its Pallas kernels are called, assembled: else their slower twins of plain XLA run.

    The text has a kernel's PTX only where XLA could assemble it for the GPU.
    """
    called = case.program.kernels()
    for kernel in sorted({*case.step.kernels} - called):
        yield f"must call its kernel {kernel}, calls {sorted(called)}"


def stays_on_the_device(case: Case) -> Iterator[str]:
    """Nothing goes to the host, in a loop or outside of one: the device would wait for it.

    Transfers are instructions of their own, calls of Python are custom calls, and S(5) is XLA's
    name for memory of the host.
    """
    for kind in ("infeed", "outfeed", "send", "recv"):
        if re.search(rf" {kind}\(", case.found.text):
            yield f"must not exchange anything with the host while it runs, has {kind}"
    if found := re.search(r'custom_call_target="([^"]*callback[^"]*)"', case.found.text):
        yield f"must not call the host while it runs, calls {found[1]}"
    if re.search(r"\{[\d,]*:[^}]*S\(5\)", case.found.text):
        yield "must keep nothing in the host's memory, has arrays of memory space 5"


def multiplies_16_bits(case: Case) -> Iterator[str]:
    """Both operands of a large product of a loop are bfloat16: float32 runs at half the rate."""
    products = case.program.loop_products()
    others = {d for dtypes, share in products if share > _LARGE for d in dtypes if d != "bf16"}
    if others:
        yield f"large products of the layer loop must be of bf16, some are of {sorted(others)}"


def exchanges_what_it_must(case: Case) -> Iterator[str]:
    """Devices gather weights a leaf of a layer at a time, and add up gradients once a step.

    Sketches, answers and likelihoods are of a device's own rows, so nothing of them is sent. A step
    on all weights leaves every device its part of the sum. Gathered gradients or activations are
    float32, or as large as a batch; here all weights are bfloat16 but where they are trained.
    """
    if case.model.devices == 1:
        return
    summed = 0.0
    for exchange in case.program.collectives():
        kind, shape, size = exchange.kind, ", ".join(exchange.arrays), exchange.size
        if kind == "all-gather":
            is_bf16 = all(array.startswith("bf16") for array in exchange.arrays)
            if not is_bf16 and size > _SCALARS:
                yield f"must gather weights of bf16 alone, gathers {shape}"
        elif kind == "all-reduce":
            summed += size * exchange.times if case.step.sums or size > _SCALARS else 0.0
        else:
            yield f"must gather weights and add up gradients, does {kind} of {shape}"
    may = 4.0 * case.found.params * 1.01 + _SCALARS if case.step.sums else 0.0
    if summed > may:
        yield f"must add up at most {may / 1e6:.1f} MB a step, adds up {summed / 1e6:.1f}"


RULES: tuple[Rule, ...] = (
    fits,
    holds_gradients_once,
    holds_no_logits,
    calls_its_kernels,
    stays_on_the_device,
    multiplies_16_bits,
    exchanges_what_it_must,
)


def problems_of(step: Step, model: Model, found: Compiled, gpu: gpus.Device) -> list[str]:
    """Returns what is wrong with a compiled step, a sentence each."""
    case = Case(step, model, found, gpu, hlo.Program(found.text))
    return [problem for rule in RULES for problem in rule(case)]
