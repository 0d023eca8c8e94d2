"""A roofline from the text of a compiled program: no clock, no device.

Every instruction takes the longer of its matrix products at the device's rate and its bytes at the
device's bandwidth, as often as its loops run. Slices count as slices and updates in place as their
update, inside a fusion too; caches, launch times and overlap are left out. So no run is faster,
and what is far from a product shows.
"""

import collections
import functools
import math
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "f8e4m3fn": 8, "f8e5m2": 8}
_ARRAY = re.compile(r"\b(pred|bf16|f8e4m3fn|f8e5m2|[suf]\d+|c\d+)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_NAME = re.compile(r"%([\w.\-]+)")
_FREE = frozenset(
    "parameter constant get-tuple-element tuple bitcast after-all iota partition-id copy-done "
    "all-gather-done all-reduce-done async-done collective-permute-done add-dependency".split()
)
_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# Of a value that an instruction only looks at in another way.
_VIEWS = frozenset(("bitcast", "reshape", "transpose", "copy"))


class Instruction(NamedTuple):
    """One line of a computation; `number` is that of a parameter, `rest` follows the operands."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    number: int
    rest: str
    is_root: bool

    def called(self, attribute: str) -> str:
        """Returns the computation that an attribute names."""
        return re.search(rf"\b{attribute}=%?([\w.\-]+)", self.rest)[1]  # type: ignore[index]


class Item(NamedTuple):
    """What one instruction takes in all its trips: seconds, operations, bytes.

    `is_open` says that it is in a loop whose length is known at run time only.
    """

    seconds: float
    operations: float
    bytes_moved: float
    trips: int
    is_open: bool
    name: str
    opcode: str
    shape: str
    source: str


class Running(NamedTuple):
    """An instruction that runs, its computation, how often, and whether in a loop of any length."""

    one: Instruction
    name: str
    times: int
    is_open: bool


class Exchange(NamedTuple):
    """What devices send each other: its kind, the arrays that a device is left with, how often."""

    kind: str
    arrays: tuple[str, ...]
    times: int

    @property
    def size(self) -> float:
        """The bytes that a device is left with, once."""
        return sum(map(size_of, self.arrays))

    def sent(self, devices: int) -> float:
        """Returns the bytes that a device sends in all its trips, in a ring of so many devices.

        A gather and a sum of parts pass on all but a device's own part; a sum is both. A
        permutation passes on all of it, once.
        """
        if self.kind == "collective-permute":
            return self.times * self.size
        others = self.times * (devices - 1)
        whole = {"all-reduce": 2 / devices, "reduce-scatter": 1.0}
        return others * self.size * whole.get(self.kind, 1 / devices)


def _kernel(one: Instruction) -> str:
    """Returns the name of the Pallas kernel that an instruction calls, else nothing."""
    found = re.search(r'op_name="[^"]*?([\w.]+)/pallas_call"', one.rest)
    return found[1] if found and one.opcode == "custom-call" else ""


def _result(one: Instruction) -> list[str]:
    """Returns the arrays that an exchange makes; a start may have its operands first."""
    arrays = [found[0] for found in _ARRAY.finditer(one.shape)]
    is_both = one.opcode.endswith("-start") and one.opcode != "all-reduce-start"
    return arrays[len(arrays) // 2 :] if is_both else arrays


def arrays_of(shape: str) -> list[tuple[str, int]]:
    """Returns dtype and number of elements of the arrays in a shape as the text writes it."""
    found = _ARRAY.findall(shape)
    return [(d, math.prod(int(size) for size in dims.split(",") if size)) for d, dims in found]


def size_of(shape: str) -> float:
    """Returns the bytes of an array or a tuple of arrays."""
    bits = {dtype: _BITS.get(dtype) or int(dtype[1:]) for dtype, _ in arrays_of(shape)}
    return sum(bits[dtype] / 8 * count for dtype, count in arrays_of(shape))


def _dims(shape: str) -> list[int]:
    found = _ARRAY.search(shape)
    return [int(size) for size in found[2].split(",") if size] if found else []


def _balanced(text: str) -> int:
    """Returns the place after the parenthesis that closes the one that the text starts with."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return place + 1
    raise ValueError(f"a compiled program must have whole lines, got {text[:80]!r}")


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
                is_root, name, text_of = found.groups()
                cut = _balanced(text_of) if text_of.startswith("(") else text_of.index(" ")
                shape, call = text_of[:cut], text_of[cut:].lstrip()
                if "(" not in call:
                    continue
                opcode, place = call[: call.index("(")], call.index("(")
                end = place + _balanced(call[place:])
                operands = tuple(_NAME.findall(call[place:end]))
                number = int(call[place + 1 : end - 1]) if opcode == "parameter" else -1
                body[name] = Instruction(
                    name, shape, opcode, operands, number, call[end:], bool(is_root)
                )

    def instructions(self, *, trips: int = 1) -> Iterator["Running"]:
        """Yields what runs, outside of fusions.

        A loop whose length the text does not know runs `trips` times.
        """
        yield from self._walk(self.entry, 1, trips, False)

    def _walk(self, name: str, times: int, unknown: int, is_open: bool) -> Iterator["Running"]:
        for one in self.computations[name].values():
            if one.opcode == "while":
                known = re.search(r'known_trip_count":\{"n":"(\d+)"', one.rest)
                count = int(known[1]) if known else unknown
                inside = is_open or not known
                yield from self._walk(one.called("body"), times * count, unknown, inside)
            elif one.opcode in ("call", "conditional", "async-start"):
                yield Running(one, name, times, is_open)
                for called in _NAME.findall(one.rest):
                    if called in self.computations:
                        yield from self._walk(called, times, unknown, is_open)
            elif one.opcode not in _FREE:
                yield Running(one, name, times, is_open)

    @functools.cache  # noqa: B019  a program lives as long as its analysis
    def operations(self, name: str) -> float:
        """Returns the operations of the matrix products in a computation, fusions included."""
        total = 0.0
        for one in self.computations[name].values():
            if one.opcode == "dot":
                total += self._of_dot(name, one)
            elif one.opcode == "fusion":
                total += self.operations(one.called("calls"))
        return total

    def _of_dot(self, name: str, dot: Instruction) -> float:
        left = _dims(self.computations[name][dot.operands[0]].shape)
        found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.rest)
        axes = [int(axis) for axis in found[1].split(",") if axis] if found else []
        return 2.0 * math.prod(_dims(dot.shape)) * math.prod(left[axis] for axis in axes)

    def cost(self, name: str, one: Instruction) -> tuple[float, float]:
        """Returns the operations and bytes of one instruction of a computation."""
        body = self.computations[name]
        given = [body[operand].shape if operand in body else "" for operand in one.operands]
        if one.opcode == "fusion":
            inner = one.called("calls")
            reads = sum(self._read(inner, place, size_of(s)) for place, s in enumerate(given))
            return self.operations(inner), reads + self._written(inner)
        if one.opcode in ("dynamic-slice", "gather", "slice"):
            return 0.0, 2 * size_of(one.shape)
        if one.opcode in ("dynamic-update-slice", "scatter"):
            return 0.0, 2 * size_of(given[1 if one.opcode != "scatter" else -1])
        if one.opcode in ("call", "conditional", "async-start"):
            return 0.0, 0.0
        # Their shapes have their operands too.
        if one.opcode in ("all-gather-start", "collective-permute-start", "copy-start"):
            return 0.0, size_of(one.shape)
        operations = self._of_dot(name, one) if one.opcode == "dot" else 0.0
        return operations, sum(map(size_of, given)) + size_of(one.shape)

    def _read(self, name: str, parameter: int, whole: float) -> float:
        """Returns the bytes that a fusion reads of one of its parameters."""
        body = self.computations[name]
        todo = [one.name for one in body.values() if one.number == parameter]
        total = 0.0
        while todo:
            value = todo.pop()
            for one in (one for one in body.values() if value in one.operands):
                if one.opcode in ("dynamic-slice", "gather", "slice"):
                    total += size_of(one.shape)
                elif one.opcode in _VIEWS:
                    todo.append(one.name)
                elif one.opcode == "fusion":
                    inner = one.called("calls")
                    for place in (p for p, name in enumerate(one.operands) if name == value):
                        total += self._read(inner, place, whole)
                elif one.opcode == "dynamic-update-slice" and one.operands[0] == value:
                    pass  # written in place
                elif one.opcode != "tuple":
                    return whole
        return min(total, whole)

    def _written(self, name: str) -> float:
        """Returns the bytes that a fusion writes."""
        body = self.computations[name]

        def of(one: Instruction) -> float:
            if one.opcode == "tuple":
                return sum(of(body[operand]) for operand in one.operands)
            if one.opcode in _VIEWS and one.operands[0] in body:
                return of(body[one.operands[0]])
            if one.opcode == "dynamic-update-slice":
                return size_of(body[one.operands[1]].shape)
            return size_of(one.shape)

        return of(next(one for one in body.values() if one.is_root))

    def items(
        self,
        *,
        flops_per_second: float,
        bytes_per_second: float,
        trips: int = 1,
        kernels: Mapping[str, float] = MappingProxyType({}),
    ) -> list[Item]:
        """Returns what every instruction takes at these rates, the largest first.

        The text does not show the operations inside kernels: all calls of one are given `kernels`.
        """
        calls: collections.Counter[str] = collections.Counter()
        for one, _, times, _ in self.instructions(trips=trips):
            calls[_kernel(one)] += times
        found = []
        for one, name, times, is_open in self.instructions(trips=trips):
            operations, moved = self.cost(name, one)
            if kernel := _kernel(one):
                operations += kernels.get(kernel, 0.0) / calls[kernel]
            seconds = max(operations / flops_per_second, moved / bytes_per_second)
            source = re.search(r'op_name="([^"]*)"', one.rest)
            found.append(
                Item(
                    *(seconds * times, operations * times, moved * times, times, is_open),
                    *(one.name, one.opcode, one.shape, source[1] if source else ""),
                )
            )
        return sorted(found, reverse=True)

    def collectives(self, *, trips: int = 1) -> list[Exchange]:
        """Returns the exchanges between devices."""
        return [
            Exchange(kind, tuple(_result(one)), times)
            for one, _, times, _ in self.instructions(trips=trips)
            for kind in _COLLECTIVES
            if one.opcode in (kind, f"{kind}-start")
        ]

    def kernels(self) -> set[str]:
        """Returns the names of the Pallas kernels that are called, assembled."""
        return {_kernel(running.one) for running in self.instructions()} - {""}

    def loop_products(self) -> list[tuple[tuple[str, ...], float]]:
        """Returns the products in loops: dtypes of the operands, operations over the most."""
        found = []
        for one, name, times, _ in self.instructions():
            inner = one.called("calls") if one.opcode == "fusion" else name
            body = self.computations[inner]
            dots = [one] if one.opcode == "dot" else [d for d in body.values() if d.opcode == "dot"]
            for dot in dots if times > 1 and one.opcode in ("dot", "fusion") else ():
                dtypes = tuple(arrays_of(body[operand].shape)[0][0] for operand in dot.operands)
                found.append((dtypes, self._of_dot(inner, dot)))
        most = max((operations for _, operations in found), default=1.0)
        return [(dtypes, operations / most) for dtypes, operations in found]

    def shapes(self) -> Iterator[str]:
        """Yields the shapes of all buffers: results of what runs outside of fusions."""
        for running in self.instructions():
            yield running.one.shape
