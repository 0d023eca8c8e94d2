"""The tables of a forecast: the plan and cost of a run, and whether it fits on the devices."""

from typing import Any

from raslik_jax.report.tables import Column, Table
from raslik_jax.run import checking
from raslik_jax.run.forecast import Forecast, Step, format_bytes, format_seconds
from raslik_jax.run.programs import AbstractRun


def sizes_table(run: AbstractRun) -> Table:
    """Returns the table of a run's sizes."""
    sizes, gradient = run.sizes, 4 * run.num_params
    rows = {
        "Model": checking.model_of(run.config)[0],
        "Frozen weights": f"{run.num_weights:,}, {format_bytes(run.base_bytes)} on the device",
        **run.layout,
        "LoRA parameters, P": f"{run.num_params:,}",
        "Training examples, N": f"{sizes.train:,}, with {sizes.targets:,} targets",
        "Forget set, retain set": f"{sizes.forget:,} and {sizes.retain:,}",
        "Queries": "; ".join(f"{name}: {count}" for name, count in run.queries.items()),
        "Sketch, K": f"{run.sketch_size:,} of {run.num_params:,} coordinates",
        "One gradient, one sketch": f"{format_bytes(gradient)} and {format_bytes(run.row_bytes)}, "
        f"{gradient / run.row_bytes:.3g} to 1",
        "Index, N x K": format_bytes(run.index_bytes),
    }
    return Table((Column("What"), Column("Size")), tuple(rows.items()))


def steps_table(
    found: Forecast, *, flops_per_second: float, bytes_per_second: float, origin: str = "as given"
) -> Table:
    """Returns the table of a run's stages: the whole work, the remaining work, and its cost.

    Units of one stage with equal costs share a row. `origin` names the source of the rates.
    """
    groups: dict[tuple[Any, ...], list[Step]] = {}
    for step in found.steps:
        alike = step.stage, step.operations, step.bytes_moved, step.device_bytes
        groups.setdefault(alike, []).append(step)
    rows: list[tuple[str, ...]] = []
    total = left = 0.0
    for group in groups.values():
        first, last = group[0], group[-1].name.removeprefix(f"{group[0].stage}/")
        seconds = first.seconds(flops_per_second, bytes_per_second)
        compiling = found.compile_seconds * sum(step.num_programs for step in group)
        done, count = sum(step.is_done for step in group), len(group)
        total += count * seconds + compiling
        left += (count - done) * seconds + compiling
        moved, disk = count * first.bytes_moved, sum(step.disk_bytes for step in group)
        rows.append(
            (
                first.name + (f" ... {last}" if count > 1 else ""),
                f"{done} of {count}",
                f"{count * first.operations:.2e}" if first.operations else "-",
                format_bytes(moved) if moved else "-",
                format_seconds(count * seconds + compiling) if seconds or compiling else "-",
                format_bytes(first.device_bytes) if first.device_bytes else "-",
                format_bytes(disk) if disk else "-",
            )
        )
    disk = sum(step.disk_bytes for step in found.steps)
    rows.append(("all", "", "", "", format_seconds(total), "", format_bytes(disk)))
    rows.append(("left to do", "", "", "", format_seconds(left), "", ""))
    names = ("Done", "Operations", "Bytes moved", "Time", "Device memory", "Disk")
    rates = (
        f"Rates: {flops_per_second:.3g} operations and {bytes_per_second:.3g} bytes a second, "
        f"{origin}. About {sum(step.num_programs for step in found.steps)} programs to "
        f"compile, {found.compile_seconds:.2g} s each."
    )
    columns = (Column("Stage"), *(Column(name, "right") for name in names))
    return Table(columns, tuple(rows), (rates, *found.notes))


def describe_memory(found: Forecast, memory_bytes: int, title: str) -> str:
    """Returns whether all stages fit on the devices, in a sentence."""
    taken: dict[str, float] = {}
    for step in found.steps:
        taken[step.stage] = max(step.device_bytes, taken.get(step.stage, 0.0))
    devices = f"{found.run.num_devices} x {title} of {format_bytes(memory_bytes)}"
    beyond = [f"{name} ({format_bytes(n)})" for name, n in taken.items() if n > memory_bytes]
    if beyond:
        mend = "try --mesh.data=2, 4 or 8, with --mesh.base=sharded to split the weights"
        return f"Does not fit on {devices}: {', '.join(beyond)}. To share the work, {mend}."
    return f"All stages fit on {devices}: at most {format_bytes(max(taken.values()))}."
