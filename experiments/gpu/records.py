"""What steps take, as `stated.json` keeps it: bounds of later checks, and the page's numbers."""

import importlib.metadata
import json
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from experiments.gpu import roofline
from experiments.gpu.steps import MODELS, STEPS, Compiled
from raslik_jax.base import files
from raslik_jax.run import gpus

_STATED = pathlib.Path(__file__).with_name("stated.json")
_GIB = 2**30
_ITEMS = 5
# A step may take so much more memory and time than stated: XLA's own choices vary by that much.
_SLACK = 1.03


class Record(NamedTuple):
    """What a device takes for one step.

    Attributes:
      ms: least time by kind of GPU: every instruction takes the longer of its products and bytes.
      token_ms: the part of it that one token takes, where a step generates; else nothing.
      tera: operations of the text's products, in 1e12; `useful_tera` of the jaxpr's.
      gb: bytes moved, in 1e9; `gathered_gb` and `summed_gb` are sent to other devices.
      passes: how often all weights are gathered.
      items: the longest instructions: milliseconds on the first kind of GPU, result, source;
        `others` those without a product or a kernel, which take `others_ms` together.
    """

    gib: float
    ms: dict[str, float]
    token_ms: dict[str, float]
    tera: float
    useful_tera: float
    gb: float
    gathered_gb: float
    summed_gb: float
    passes: float
    items: list[list[Any]]
    others_ms: float
    others: list[list[Any]]

    def useful(self, gpu: str) -> float:
        """Returns the share of the least time that the products of the step's jaxpr take."""
        return self.useful_tera * 1e12 / gpus.GPUS[gpu].flops_per_second / (self.ms[gpu] / 1e3)


def versions() -> dict[str, str]:
    """Returns the versions of what compiles."""
    names = ("jax", "jaxlib", "jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12")
    return {name: importlib.metadata.version(name) for name in names}


def _source(text: str) -> str:
    """Returns where an instruction comes from: the names of a trace that say something."""
    parts = [part for part in text.split("/") if "(" not in part]
    parts = [part for part in parts if part not in ("while", "body", "closed_call", "checkpoint")]
    return "/".join(parts[-2:]) or "no name"


def record_of(model: str, name: str, found: Compiled) -> Record:
    """Returns the record of a compiled step."""
    step, devices = STEPS[name], MODELS[model].devices
    program = roofline.Program(found.text)
    ms: dict[str, float] = {}
    token_ms: dict[str, float] = {}
    items: list[roofline.Item] = []
    for key, gpu in gpus.GPUS.items():
        rates = {"flops_per_second": gpu.flops_per_second}
        rates["bytes_per_second"] = gpu.bytes_per_second
        of_gpu = program.items(**rates, trips=step.trips, kernels=found.kernels)
        ms[key] = _rounded(1e3 * sum(item.seconds for item in of_gpu))
        if step.trips > 1:
            inside = 1e3 * sum(item.seconds for item in of_gpu if item.is_open)
            token_ms[key] = _rounded(inside / step.trips)
        items = items or of_gpu
    others = [item for item in items if not item.operations and item.opcode != "custom-call"]
    sent = {"all-gather": 0.0, "all-reduce": 0.0, "reduce-scatter": 0.0}
    for exchange in program.collectives(trips=step.trips):
        sent[exchange.kind] = sent.get(exchange.kind, 0.0) + exchange.sent(devices)
    gathered, summed = sent.pop("all-gather"), sum(sent.values())
    return Record(
        gib=_rounded(found.memory_bytes / _GIB),
        ms=ms,
        token_ms=token_ms,
        tera=_rounded(sum(item.operations for item in items) / 1e12),
        useful_tera=_rounded(found.useful / 1e12),
        gb=_rounded(sum(item.bytes_moved for item in items) / 1e9),
        gathered_gb=_rounded(gathered / 1e9),
        summed_gb=_rounded(summed / 1e9),
        passes=_rounded(gathered / (found.base_bytes * (1 - 1 / devices)) if devices > 1 else 0.0),
        items=_longest(items),
        others_ms=_rounded(1e3 * sum(item.seconds for item in others)),
        others=_longest(others),
    )


def _longest(items: list[roofline.Item]) -> list[list[Any]]:
    return [
        [_rounded(1e3 * item.seconds), item.shape.partition("{")[0], _source(item.source)]
        for item in items[:_ITEMS]
    ]


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def read() -> tuple[dict[str, str], dict[str, Record]]:
    """Returns the versions and the records of `stated.json`, by "model step"."""
    stored = json.loads(_STATED.read_text())
    return stored["versions"], {key: Record(**fields) for key, fields in stored["steps"].items()}


def write(records: dict[str, Record]) -> None:
    """Writes `stated.json`, as of these versions, in the order of models and steps."""
    keys = [f"{model} {name}" for model in MODELS for name in STEPS]
    steps = {key: records[key]._asdict() for key in keys if key in records}
    lines = [f"  {json.dumps(key)}: {json.dumps(fields)}" for key, fields in steps.items()]
    head = f' "versions": {json.dumps(versions())},\n "steps": {{\n'
    files.write_text(_STATED, "{\n" + head + ",\n".join(lines) + "\n }\n}\n")


def excess_of(found: Record, stated: Record) -> Iterator[str]:
    """Yields where a step takes more memory or time than was stated."""
    if found.gib > _SLACK * stated.gib:
        yield f"must take {stated.gib:.4g} GiB, takes {found.gib:.4g}"
    for gpu, ms in found.ms.items():
        if ms > _SLACK * stated.ms[gpu]:
            yield f"must take {stated.ms[gpu]:.4g} ms on {gpu}, takes {ms:.4g}"
