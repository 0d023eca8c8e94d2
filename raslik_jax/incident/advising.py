"""Unlearn or retrain: the cost of both for a traced run, and a recommendation with its reason."""

import dataclasses
import pathlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from raslik_jax.evaluate import reproduction
from raslik_jax.incident import making
from raslik_jax.incident.configuring import (
    AGAIN,
    ALGORITHM,
    RecipeOptions,
    UnlearnOptions,
    make_config,
    read_settings,
)
from raslik_jax.report import tables
from raslik_jax.run import artifacts
from raslik_jax.run.gpus import Device

# Retraining is exact. It is worth so many times the time of unlearning, or so many seconds more.
_TIMES, _SECONDS_MORE = 2.0, 600.0


class Cost(NamedTuple):
    """Seconds and bytes of device memory of the remaining work of a command; 0 bytes if unknown."""

    seconds: float
    device_bytes: float = 0.0


def choose(
    unlearn: Cost, retrain: Cost, *, unknown: str = "", memory_bytes: float = 0
) -> tuple[str, str]:
    """Returns the command, to unlearn or to retrain, and the reason.

    Retraining is better if it is possible and cheap, because it is the exact way. It is cheap if it
    takes at most twice as long as unlearning, or ten minutes longer.

    Args:
      unknown: why the recipe is not known; "" if it is known.
      memory_bytes: memory of the device; 0 if it is not known.
    """
    from raslik_jax.run.forecast import format_bytes, format_seconds  # it takes jax with it

    if unknown:
        return "unlearn", f"retraining needs a known recipe: {unknown}"
    for command, cost, other in (("unlearn", retrain, unlearn), ("retrain", unlearn, retrain)):
        if other.device_bytes <= memory_bytes < cost.device_bytes:
            has = f"the device has {format_bytes(memory_bytes)}"
            needs = f"needs {format_bytes(cost.device_bytes)} of memory and {has}"
            return command, f"{'retraining' if cost is retrain else 'unlearning'} {needs}"
    times = f"about {format_seconds(retrain.seconds)}"
    times += f", unlearning at most {format_seconds(unlearn.seconds)}"
    more = retrain.seconds - unlearn.seconds
    if retrain.seconds <= _TIMES * unlearn.seconds or more <= _SECONDS_MORE:
        return "retrain", f"it is exact for the rows that were found and takes {times}"
    return "unlearn", f"retraining takes {times}"


def _compare(options: UnlearnOptions, compiles: bool) -> tuple[dict[str, Cost], str, Device]:
    """Returns the costs of the commands, why there is no recipe, and the device.

    Options that name a recipe are used. With `compiles` the largest programs are compiled to
    measure their memory.
    """
    from raslik_jax.parallel import meshes
    from raslik_jax.report import writing
    from raslik_jax.run import cost, forecast
    from raslik_jax.run.workspace import Workspace

    root, config, unknown = pathlib.Path(options.run), make_config(options), ""
    rows = Workspace(root, config).train_rows
    mesh = meshes.make_mesh(options.mesh.data)
    how: Any = {"more": writing.UNITS, "compiles": compiles, "rows": rows}
    how |= {"mesh": mesh if mesh.size > 1 else None, "layout": options.mesh.base}
    how["memory"] = meshes.device_memory()
    found = {"unlearn": forecast.forecast(config, root, **how)}
    device = cost.measure(*found["unlearn"].run.widest_kernel, config.backbone.dtypes)
    named = options if isinstance(options, RecipeOptions) else RecipeOptions()
    try:
        read_settings(config, named, options.settings, root=root, is_told=False)
    except ValueError as error:
        unknown = str(error)
    if config.backbone.adapter:
        named = dataclasses.replace(named, approximate=True)
        own = read_settings(config, named, options.settings, is_told=False)
        own["unlearn.algorithms"] = (ALGORITHM, *AGAIN * getattr(options, "other_seed", False))
        config = make_config(dataclasses.replace(options, settings=own))
        found["retrain"] = forecast.forecast(config, root, **how)
        done = {step.name for step in found["retrain"].steps if step.is_done}
        check = artifacts.RECIPE
        if check.unit in done and not reproduction.is_confirmed(check.read(root)):
            unknown = unknown or "--check_recipe did not confirm its recipe"
    costs = {}
    for command, one in found.items():
        memory = max((step.device_bytes for step in one.left), default=0.0)
        costs[command] = Cost(one.seconds(one.left, device), memory)
    return costs, unknown, device


def lines(options: UnlearnOptions, *, is_short: bool = False) -> Iterator[str]:
    """Yields the costs of both commands as a table, and the advice with the next commands.

    If `is_short` there is no table and nothing is compiled.
    """
    from raslik_jax.run.forecast import format_bytes, format_seconds

    found, unknown, device = _compare(options, compiles=not is_short)
    rows = []
    for command, cost in found.items():
        memory = format_bytes(cost.device_bytes) if cost.device_bytes else "-"
        rows.append((command, format_seconds(cost.seconds) if cost.seconds else "done", memory))
    ends = (tables.Column(title, "right") for title in ("Time", "Device memory"))
    note = (
        f"Estimated from the speed of matrix products on {device.title}. Unlearning may end "
        "earlier."
    )
    if not is_short:
        columns = tables.Column("Left to do"), *ends
        yield tables.render_terminal(tables.Table(columns, tuple(rows), (note,)))
    both = found["unlearn"], found.get("retrain", found["unlearn"])
    advised, reason = choose(*both, unknown=unknown, memory_bytes=device.memory_bytes)
    yield f"advice: {advised}, because {reason}"
    other = {"unlearn": "retrain", "retrain": "unlearn"}[advised]
    recipe = options.recipe if isinstance(options, RecipeOptions) else ()
    lacks = re.findall(r"--approximate|--unlearn\.retrain\.batch_size=\d+", unknown)[:1]
    names_file = recipe or (unknown and not lacks)
    files = lacks + [f"--recipe={','.join(recipe) or 'FILE'}"] * bool(names_file)
    names = ("run", "forget_file", "retain_file")
    own = [f"--{name}={given}" for name in names if (given := getattr(options, name))]
    for title, command in (("next", advised), ("or", other))[: len(found)]:
        yield f"{title}: {making.line(command, *own, *files * (command == 'retrain'))} --out=DIR"
