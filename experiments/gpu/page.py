"""The page of compiled steps, `docs/notes/gpu.md`: all its numbers are those of `stated.json`."""

import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from experiments.gpu.records import Record
from experiments.gpu.steps import MODELS, STEPS, Model, steps_of
from raslik_jax.report.tables import Column, Table, render_markdown
from raslik_jax.run import gpus

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "notes" / "gpu.md"
# Bytes a second that a device sends to another machine: a network of 400 Gbit/s for each.
_NETWORK = 50e9
_FIRST, _SECOND = gpus.GPUS
# Columns after the step's name.
_STEPS = "Rows x tokens|GiB|T|GB|ms, H100|Useful|ms, H200|Useful|Others".split("|")
_EXCHANGES = "Rows x tokens|GiB|ms, H100|GB gathered|Passes|GB summed".split("|")
_EXCHANGES += ["Share, NVLink", "Share, network"]
# From a model's and a step's name and its record to the step's rows.
_Cells = Callable[[str, str, Record], list[tuple[str, ...]]]

_INTRO = """\
# Steps compiled for GPUs

`python experiments/gpu/check.py --state=all` writes this page; a test holds it to
`experiments/gpu/stated.json`. **No GPU was there and nothing was timed**: XLA compiled every step
for an H100, and the numbers are read from the compiled programs. How to ask about your own model,
and what the numbers mean for it: [GPUs](../guides/gpu.md).

Compiled by {versions}.

- **GiB**: memory of a device by XLA: weights, batch, results and work space.
- **T**: operations of the compiled products, in 1e12. **GB**: bytes that instructions read and
  write, in 1e9; slices count as slices, caches are left out.
- **ms**: the least time. Every instruction takes the longer of its products, at {flops:.0f}
  TFLOP/s, and its bytes, at {rates}. Launching and waiting are left out.
  XLA without a device chooses the tiles of products by rule and calls no cuBLAS: these are bounds,
  no forecasts.
- **Useful**: the share of that time which the products of the step, as the program is written,
  would take alone; with `remat` that is the forward pass twice. Attention's kernel takes the time
  of its bytes.
- **Others**: the share, on an H100, of instructions without a product or a kernel.
- What is compiled for an H100 is held against the rates of both: programs for an H200 take the same
  memory and move the same bytes, to 0.1 % in three steps of OLMo-2-7B.
"""
_MESHES = """\
## Eight GPUs

Weights are split over the devices and gathered a layer at a time; where it says so, every device
has all. The rows are those of one device. **Passes**: how often all weights are gathered; a device
sends seven eighths of them each time. **Summed**: what a device sends to add up gradients.
**Share**: the part of a step in which a device computes, first when nothing is sent while it does,
then when all is; by NVLink at {link:.0f} GB/s in each direction, and by a network of {network:.0f}
GB/s for each device. Assumed: exchanges in a ring at the full rate, without a delay before the
first byte.
"""
_LONGEST = """\
## What takes longest

The five longest instructions of each step on an {title}, all trips of their loops
together: what they make, and the names of the code that they come from. Second, those without a
product or a kernel.
"""


def _title(of_model: Model) -> str:
    base = of_model.checkpoint.rpartition("/")[2]
    if of_model.devices == 1:
        return base
    layout = "weights split" if of_model.layout == "sharded" else "weights whole"
    trained = ", all weights trained" if of_model.is_whole else ""
    kept = ", remat" if of_model.remat else ""
    return f"{base}, {of_model.devices} devices, {layout}{trained}{kept}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.01 else f"{value:.1g}"


def _rows(model: str, name: str) -> str:
    shape = STEPS[name].shape_for(MODELS[model])
    return f"{shape.rows} x {shape.length}"


def _table(
    columns: Iterable[Column], cells: _Cells, models: Iterable[str], records: Mapping[str, Record]
) -> str:
    """Returns a table with a group for each model and the rows of each step that has a record."""
    rows: list[str | tuple[str, ...]] = []
    for model in models:
        rows.append(_title(MODELS[model]))
        for name in steps_of(model):
            if found := records.get(f"{model} {name}"):
                rows += cells(model, name, found)
    return render_markdown(Table((Column("Step"), *columns), tuple(rows)))


def _right(heads: Iterable[str]) -> list[Column]:
    return [Column(head, "right") for head in heads]


def _cells_of_step(model: str, name: str, found: Record) -> list[tuple[str, ...]]:
    times = [(_number(found.ms[gpu]), f"{found.useful(gpu):.0%}") for gpu in gpus.GPUS]
    shares = *times[0], *times[1], f"{found.others_ms / found.ms[_FIRST]:.0%}"
    sizes = map(_number, (found.gib, found.tera, found.gb))
    rows = [(name, _rows(model, name), *sizes, *shares)]
    if found.token_ms:
        each = [_number(found.token_ms[gpu]) for gpu in gpus.GPUS]
        rows.append((f"{name}, of it a token", *[""] * 4, each[0], "", each[1], "", ""))
    return rows


def _shares(ms: float, sent: float, rate: float) -> str:
    exchange = 1e3 * sent / rate
    return f"{ms / (ms + exchange):.0%} to {ms / max(ms, exchange):.0%}"


def _cells_of_exchange(model: str, name: str, found: Record) -> list[tuple[str, ...]]:
    ms, sent = found.ms[_FIRST], 1e9 * (found.gathered_gb + found.summed_gb)
    numbers = map(_number, (found.gib, ms, found.gathered_gb, found.passes, found.summed_gb))
    links = (gpus.GPUS[_FIRST].link_bytes_per_second, _NETWORK)
    shares = [_shares(ms, sent, rate) for rate in links]
    return [(name, _rows(model, name), *numbers, *shares)]


def _cells_of_longest(model: str, name: str, found: Record) -> list[tuple[str, ...]]:
    return [(name, *map(_listed, (found.items, found.others)))]


def _listed(items: list[list[Any]]) -> str:
    return "; ".join(f"{_number(ms)} ms {made} {of}" for ms, made, of in items)


def render(versions: Mapping[str, str], records: Mapping[str, Record]) -> str:
    """Returns the page of all steps that have records, but for those of Pythia-14m."""
    single = [name for name, m in MODELS.items() if m.devices == 1 and name != "pythia-14m"]
    meshes = [name for name, m in MODELS.items() if m.devices > 1]
    first, second = gpus.GPUS[_FIRST], gpus.GPUS[_SECOND]
    tera = [gpu.bytes_per_second / 1e12 for gpu in (first, second)]
    rates = f"{tera[0]:.3g} TB/s (H100) or {tera[1]:.3g} (H200)"
    intro = _INTRO.format(
        versions=", ".join(f"{name} {version}" for name, version in versions.items()),
        flops=first.flops_per_second / 1e12,
        rates=rates,
    )
    link = first.link_bytes_per_second
    longest = Column("Longest first"), Column("Longest of the others")
    parts = [intro, "## One GPU\n", _table(_right(_STEPS), _cells_of_step, single, records), ""]
    parts += [_MESHES.format(link=link / 1e9, network=_NETWORK / 1e9)]
    parts += [_table(_right(_EXCHANGES), _cells_of_exchange, meshes, records), ""]
    parts += [_LONGEST.format(title=first.title)]
    parts += [_table(longest, _cells_of_longest, [*single, *meshes], records), ""]
    return "\n".join(parts)
