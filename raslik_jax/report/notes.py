"""Sentences on a run's numbers; those below its tables are written by notes.jinja."""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from raslik_jax.evaluate import judgment, left, rates, stopping, verdict
from raslik_jax.evaluate.metrics import look_up
from raslik_jax.evaluate.sentences import percent
from raslik_jax.evaluate.summary import Metrics
from raslik_jax.report.names import algorithm_name, kernel_note, make_environment, strategy_name
from raslik_jax.report.tables import format_interval
from raslik_jax.report.tidy import Model, is_probed


def write_notes(table: str, **values: Any) -> tuple[str, ...]:
    """Returns the notes of a table: the lines of its macro in notes.jinja."""
    lines = getattr(macros(), table)(**values).split("\n")
    return tuple(line for line in lines if line.strip())


@functools.cache
def macros() -> Any:
    """Returns the macros of notes.jinja."""
    environment = make_environment()
    environment.globals.update(
        behavior_sentence=behavior_sentence,
        coverage=rates.coverage,
        format_interval=format_interval,
        having=having,
        is_probed=is_probed,
        judgment=judgment,
        judgment_sentence=judgment_sentence,
        kernel_note=kernel_note,
        least_likely=math.exp(verdict.LONGEST_WAY),
        left=left,
        percent=percent,
        look_up=look_up,
        model_name=_model_name,
        share="{:.0%}".format,
        stopping=stopping,
        verdict=verdict,
    )
    return environment.get_template("notes.jinja").module


def having(models: Iterable[Model], metric: str) -> list[Model]:
    """Returns the models with this number, with this flag set or with a count above zero."""
    return [m for m in models if (v := m.value(metric)) or isinstance(v, float)]


def _model_name(model: Model) -> str:
    return f"{strategy_name(model.strategy)} {algorithm_name(model.algorithm)}"


def judgment_sentence(models: Sequence[Model]) -> str:
    """Returns the outcome of the models by verdict in one sentence; "" if none was judged."""
    names = list(map(_model_name, models))
    named: dict[str, list[str]] = {}
    for model, name in zip(models, names, strict=True):
        if state := model.value("judgment/verdict"):
            epoch = f" epoch {model.epochs[0]}" if names.count(name) > 1 else ""
            named.setdefault(state, []).append(name + epoch)
    parts = [f"{v}: {', '.join(named[v])}" for v in verdict.DEFINITIONS if v in named]
    if len(models) == 1 and named:
        return f"Judgment of {names[0]}: {next(iter(named))}."
    return f"Judgment: {'; '.join(parts)}." if parts else ""


def behavior_sentence(metrics: Metrics) -> str:
    """Returns how much the model showed the behavior before unlearning; "" if not measured."""
    found = metrics.get("behavior")
    text = judgment.describe_behavior(found) if found else ""
    return f"{text[:1].upper()}{text[1:]}." if text else ""
