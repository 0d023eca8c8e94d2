"""The tables of a forecast: the plan and cost of a run, and whether it fits on the devices."""

from typing import Any

from raslik_jax.report.tables import Column, Table
from raslik_jax.run import checking
from raslik_jax.run.forecast import Forecast, Step, format_bytes, format_seconds
from raslik_jax.run.gpus import Device
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


def steps_table(found: Forecast, device: Device) -> Table:
    """Returns the table of a run's stages: the whole work, the remaining work, and its cost.

    Units of one stage with equal costs share a row.
    """
    groups: dict[tuple[Any, ...], list[Step]] = {}
    for step in found.steps:
        alike = step.stage, step.operations, step.bytes_moved, step.device_bytes
        groups.setdefault(alike, []).append(step)
    rows: list[tuple[str, ...]] = []
    for group in groups.values():
        first, count, seconds = group[0], len(group), found.seconds(group, device)
        last = group[-1].name.removeprefix(f"{first.stage}/")
        moved, held = count * first.bytes_moved, sum(step.disk_bytes for step in group)
        rows.append(
            (
                first.name + (f" ... {last}" if count > 1 else ""),
                f"{sum(step.is_done for step in group)} of {count}",
                f"{count * first.operations:.2e}" if first.operations else "-",
                format_bytes(moved) if moved else "-",
                format_seconds(seconds) if seconds else "-",
                format_bytes(first.device_bytes) if first.device_bytes else "-",
                format_bytes(held) if held else "-",
            )
        )
    disk = format_bytes(sum(step.disk_bytes for step in found.steps))
    for name, steps, size in (("all", found.steps, disk), ("left to do", found.left, "")):
        rows.append((name, "", "", "", format_seconds(found.seconds(steps, device)), "", size))
    names = ("Done", "Operations", "Bytes moved", "Time", "Device memory", "Disk")
    columns = (Column("Stage"), *(Column(name, "right") for name in names))
    programs, devices = sum(step.num_programs for step in found.steps), found.run.num_devices
    rates = f"{device.flops_per_second:.3g} operations and {device.bytes_per_second:.3g} bytes"
    notes = [
        f"Rates of {device.title}: {rates} a second. About {programs} programs to compile, "
        f"{found.compile_seconds:.2g} s each.",
        "Time: the larger of operations / rate and bytes of device memory / rate, plus compiling. "
        "Files and work on the host are left out. Rows are as long as Alpaca's in Pythia's tokens.",
    ]
    if devices > 1:
        notes.append(f"Of one device. {devices} devices share the rows of every batch.")
    is_known = any(one.name == "retrieve/sizes" and one.is_done for one in found.steps)
    if found.run.config.retrieve.select != "count" and not is_known:
        notes.append("Sizes of sets are those of the rule count. --retrieve.select decides them.")
    return Table(columns, tuple(rows), tuple(notes))


def describe_memory(found: Forecast, device: Device) -> str:
    """Returns whether all stages fit on the devices, in a sentence."""
    steps, usable = sorted(found.steps, key=lambda step: step.device_bytes), device.usable_bytes
    devices = f"{found.run.num_devices} x {device.title} of {format_bytes(usable)}"
    beyond = {step.stage: step.device_bytes for step in steps if step.device_bytes > usable}
    if not beyond:
        longest, held = int(found.run.length_N.max()), format_bytes(steps[-1].device_bytes)
        own = found.run.config
        limit = max(own.corpus.max_len, own.finetune.max_len, own.unlearn.max_len)
        rows = "" if longest >= limit else f", for rows of at most {longest:,} tokens"
        return f"All stages fit on {devices}: at most {held}{rows}."
    named = ", ".join(f"{name} ({format_bytes(size)})" for name, size in beyond.items())
    mend = "try --mesh.data=2, 4 or 8, with --mesh.base=sharded to split the weights"
    return f"Does not fit on {devices}: {named}. To share the work, {mend}."
