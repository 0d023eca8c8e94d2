"""What a compiled program runs, read from its text: no clock, no device."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_BITS = {"pred": 8, "bf16": 16, "f8e4m3fn": 8, "f8e5m2": 8}
_ARRAY = re.compile(r"\b(pred|bf16|f8e4m3fn|f8e5m2|[suf]\d+|c\d+)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_NAME = re.compile(r"%([\w.\-]+)")
# What makes no buffer of its own.
_FREE = frozenset(
    "parameter constant get-tuple-element tuple bitcast after-all iota partition-id copy-done "
    "all-gather-done all-reduce-done async-done collective-permute-done add-dependency".split()
)
_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


class Instruction(NamedTuple):
    """One line of a computation; `rest` is what follows the opcode, operands first."""

    name: str
    shape: str
    opcode: str
    rest: str

    @property
    def operands(self) -> list[str]:
        """The names of its operands."""
        return _NAME.findall(self.rest.partition(")")[0])

    @property
    def kernel(self) -> str:
        """The name of the Pallas kernel that it calls, else nothing."""
        found = re.search(r'op_name="[^"]*?([\w.]+)/pallas_call"', self.rest)
        return found[1] if found and self.opcode == "custom-call" else ""

    def called(self, attribute: str) -> str:
        """Returns the computation that an attribute names."""
        return re.search(rf"\b{attribute}=%?([\w.\-]+)", self.rest)[1]  # type: ignore[index]


class Running(NamedTuple):
    """An instruction that runs, its computation, and how often."""

    one: Instruction
    name: str
    times: int


class Exchange(NamedTuple):
    """What devices send each other: its kind, the arrays that a device is left with, how often."""

    kind: str
    arrays: tuple[str, ...]
    times: int

    @property
    def size(self) -> float:
        """The bytes that a device is left with, once."""
        return sum(map(size_of, self.arrays))


def arrays_of(shape: str) -> list[tuple[str, int]]:
    """Returns dtype and number of elements of the arrays in a shape as the text writes it."""
    found = _ARRAY.findall(shape)
    return [(d, math.prod(int(size) for size in dims.split(",") if size)) for d, dims in found]


def size_of(shape: str) -> float:
    """Returns the bytes of an array or a tuple of arrays."""
    found = arrays_of(shape)
    return sum((_BITS.get(dtype) or int(dtype[1:])) / 8 * count for dtype, count in found)


class Program:
    """A compiled program: its computations by name, each a dict of instructions in order."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        body: dict[str, Instruction] = {}
        for line in text.splitlines():
            if head := _COMPUTATION.match(line):
                body = self.computations[head[2]] = {}
                self.entry = head[2] if head[1] else getattr(self, "entry", "")
            elif found := _INSTRUCTION.match(line):
                body[found[1]] = Instruction(*found.groups())

    def instructions(self) -> Iterator[Running]:
        """Yields what runs outside of fusions; a loop of a length that is not known runs once."""
        yield from self._walk(self.entry, 1)

    def _walk(self, name: str, times: int) -> Iterator[Running]:
        for one in self.computations[name].values():
            if one.opcode == "while":
                known = re.search(r'known_trip_count":\{"n":"(\d+)"', one.rest)
                yield from self._walk(one.called("body"), times * int(known[1] if known else 1))
                continue
            if one.opcode not in _FREE:
                yield Running(one, name, times)
            if one.opcode in ("call", "conditional", "async-start"):
                for called in _NAME.findall(one.rest):
                    if called in self.computations:
                        yield from self._walk(called, times)

    def shapes(self) -> Iterator[str]:
        """Yields the shapes of all buffers: results of what runs outside of fusions."""
        for running in self.instructions():
            yield running.one.shape

    def kernels(self) -> set[str]:
        """Returns the names of the Pallas kernels that are called, assembled."""
        return {running.one.kernel for running in self.instructions()} - {""}

    def collectives(self) -> Iterator[Exchange]:
        """Yields the exchanges between devices."""
        for one, _, times in self.instructions():
            kind = one.opcode.removesuffix("-start")
            if kind in _COLLECTIVES:
                arrays = [found[0] for found in _ARRAY.finditer(one.shape)]
                # A start may have its operands first.
                is_both = one.opcode != kind and kind != "all-reduce"
                yield Exchange(kind, tuple(arrays[len(arrays) // 2 if is_both else 0 :]), times)

    def loop_products(self) -> list[tuple[tuple[str, ...], float]]:
        """Returns the products in loops: dtypes of the operands, operations over the most."""
        found = []
        for one, name, times in self.instructions():
            inner = one.called("calls") if one.opcode == "fusion" else name
            parts = self.computations[inner].values() if one.opcode == "fusion" else (one,)
            for dot in (part for part in parts if part.opcode == "dot" and times > 1):
                shapes = [self.computations[inner][operand].shape for operand in dot.operands]
                dtypes = tuple(arrays_of(shape)[0][0] for shape in shapes)
                found.append((dtypes, _operations(dot.shape, shapes[0], dot.rest)))
        most = max((operations for _, operations in found), default=1.0)
        return [(dtypes, operations / most) for dtypes, operations in found]


def _operations(shape: str, left: str, rest: str) -> float:
    """Returns the operations of a matrix product of this shape."""
    axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", rest)
    dims = _ARRAY.search(left)
    sizes = [int(size) for size in dims[2].split(",") if size] if dims else []
    summed = [sizes[int(axis)] for axis in axes[1].split(",") if axis] if axes else []
    return 2.0 * arrays_of(shape)[0][1] * math.prod(summed)
