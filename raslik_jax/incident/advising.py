"""Unlearn or retrain: the cost of both for a traced run, and a recommendation with its reason."""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from raslik_jax.evaluate import reproduction
from raslik_jax.incident import making, retrain, unlearn
from raslik_jax.report import tables
from raslik_jax.run import artifacts

if TYPE_CHECKING:  # they take jax with them
    from raslik_jax.run.cost import Rates
    from raslik_jax.run.forecast import Forecast

# Retraining is exact. It is worth so many times the time of unlearning, or so many seconds more.
_TIMES, _SECONDS_MORE = 2.0, 600.0


class Cost(NamedTuple):
    """Seconds and bytes of device memory of the remaining work of a command; 0 bytes if unknown."""

    seconds: float
    device_bytes: float = 0.0


class Advice(NamedTuple):
    """The command that is recommended, and why."""

    command: str
    reason: str


def choose(unlearn: Cost, retrain: Cost, *, unknown: str = "", memory_bytes: float = 0) -> Advice:
    """Returns whether to unlearn or to retrain.

    Retraining is better if it is possible and cheap, because it is the exact way. It is cheap if it
    takes at most twice as long as unlearning, or ten minutes longer.

    Args:
      unknown: why the recipe is not known; "" if it is known.
      memory_bytes: memory of the device; 0 if it is not known.
    """
    from raslik_jax.run.forecast import format_bytes, format_seconds  # it takes jax with it

    if unknown:
        return Advice("unlearn", f"retraining needs a known recipe: {unknown}")
    for command, cost, other in (("unlearn", retrain, unlearn), ("retrain", unlearn, retrain)):
        if other.device_bytes <= memory_bytes < cost.device_bytes:
            has = f"the device has {format_bytes(memory_bytes)}"
            needs = f"needs {format_bytes(cost.device_bytes)} of memory and {has}"
            return Advice(command, f"{'retraining' if cost is retrain else 'unlearning'} {needs}")
    times = f"about {format_seconds(retrain.seconds)}"
    times += f", unlearning at most {format_seconds(unlearn.seconds)}"
    more = retrain.seconds - unlearn.seconds
    if retrain.seconds <= _TIMES * unlearn.seconds or more <= _SECONDS_MORE:
        return Advice("retrain", f"it is exact for the rows that were found and takes {times}")
    return Advice("unlearn", f"retraining takes {times}")


def _cost_of(found: "Forecast", rates: "Rates") -> Cost:
    """Returns the cost of the remaining work of a run at these rates of a device."""
    left = [step for step in found.steps if not step.is_done]
    seconds = sum(step.seconds(rates.operations, rates.bytes_moved) for step in left)
    seconds += found.compile_seconds * sum(step.num_programs for step in left)
    return Cost(seconds, max((step.device_bytes for step in left), default=0.0))


class Plans(NamedTuple):
    """The cost of both commands and the advice; `retrain` is None if it is impossible."""

    unlearn: Cost
    retrain: Cost | None
    advice: Advice
    device: str


def plan(options: unlearn.UnlearnOptions, *, compiles: bool) -> Plans:
    """Returns the costs of unlearning and of retraining for a traced run, and which is better.

    Options that name a recipe are used. With `compiles` the largest programs are compiled to
    measure their memory. Without it a rule counts the operations, which takes no time.
    """
    from raslik_jax.report import writing
    from raslik_jax.run import cost, forecast, memory
    from raslik_jax.run.workspace import Workspace

    root, config = pathlib.Path(options.run), unlearn.make_config(options)
    how: Any = {"more": writing.UNITS, "compiles": compiles, "traces": compiles}
    how["rows"] = Workspace(root, config).train_rows
    first, second, unknown = forecast.forecast(config, root, **how), None, ""
    inputs, outputs = first.run.widest_kernel
    rates = cost.measure_rates(inputs=inputs, outputs=outputs, dtype=config.backbone.dtype)
    named = options if isinstance(options, retrain.RecipeOptions) else retrain.RecipeOptions()
    try:
        retrain.read_settings(config, named, options.settings, is_needed=True, is_told=False)
    except ValueError as error:
        unknown = str(error)
    if config.backbone.adapter:
        named = dataclasses.replace(named, approximate=True)
        own = retrain.read_settings(config, named, options.settings, is_told=False)
        own["unlearn.algorithms"] = (retrain.ALGORITHM,)
        config = unlearn.make_config(dataclasses.replace(options, settings=own))
        second = forecast.forecast(config, root, **how)
        done = {step.name for step in second.steps if step.is_done}
        if artifacts.RECIPE.unit in done and not reproduction.is_confirmed(
            artifacts.RECIPE.read(root)
        ):
            unknown = unknown or "--check_recipe showed that its recipe gives another adapter"
    unlearning = _cost_of(first, rates)
    retraining = _cost_of(second, rates) if second else None
    advice = choose(
        unlearning,
        retraining or unlearning,
        unknown=unknown,
        memory_bytes=memory.device_bytes(),
    )
    return Plans(unlearning, retraining, advice, rates.device)


def lines(options: unlearn.UnlearnOptions, *, compiles: bool = True) -> Iterator[str]:
    """Yields the costs of both commands as a table, and the advice."""
    from raslik_jax.run.forecast import format_bytes, format_seconds

    found = plan(options, compiles=compiles)
    rows = []
    for command, cost in (("unlearn", found.unlearn), ("retrain", found.retrain)):
        if cost:
            memory = format_bytes(cost.device_bytes) if cost.device_bytes else "-"
            rows.append((command, format_seconds(cost.seconds) if cost.seconds else "done", memory))
    ends = (tables.Column(title, "right") for title in ("Time", "Device memory"))
    note = (
        f"Estimated from the speed of matrix products on {found.device}. Unlearning may end "
        "earlier."
    )
    yield tables.render_terminal(
        tables.Table((tables.Column("Left to do"), *ends), tuple(rows), (note,))
    )
    yield from next_lines(found.advice, options.run)


def next_lines(advice: Advice, run: str) -> Iterator[str]:
    """Yields the advice, and the two commands with the one that is recommended first."""
    yield f"advice: {advice.command}, because {advice.reason}"
    other = {"unlearn": "retrain", "retrain": "unlearn"}[advice.command]
    for title, command in (("next", advice.command), ("or", other)):
        yield f"{title}: {making.line(command, f'--run={run}')} --out=DIR"
