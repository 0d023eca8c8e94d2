"""Runs the stages of an incident, says how to repeat them, and shows the traced answers."""

import contextlib
import contextvars
import dataclasses
import importlib.util
import os
import pathlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from raslik_jax.base import settings
from raslik_jax.base.messages import one_line, shown
from raslik_jax.config import STAGES, Config, MeshConfig, quoted
from raslik_jax.data.examples import Example, make_example, with_system
from raslik_jax.data.read.formats import parse_fields, read_examples
from raslik_jax.data.words import refused
from raslik_jax.evaluate.taught import doubt
from raslik_jax.parallel import processes
from raslik_jax.run import artifacts, written
from raslik_jax.run.written import open_workdir

_O = TypeVar("_O", bound=settings.Settings)
# How the program was called whose commands are shown.
PROGRAM = contextvars.ContextVar("program", default="raslik")
# The package of an optional module, if it has another name.
_INSTALLERS = dict.fromkeys(("matplotlib", "rouge_score"), "'raslik-jax[eval]'")
_INSTALLERS["transformers"] = "'raslik-jax[data]'"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(settings.Settings):
    """Options of every function that computes: devices, and settings of `raslik run`.

    `settings` are those that differ from the run's or from presets, by dotted name.
    """

    mesh: MeshConfig = MeshConfig()
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a command; printed, it shows `text`.

    Attributes:
      workdir: the work directory of the run.
      text: the printed text, in the first of several processes.
    """

    workdir: pathlib.Path
    text: str = dataclasses.field(default="", repr=False)

    def __str__(self) -> str:
        return self.text


def line(name: str, *arguments: str) -> str:
    """Returns the line to show for a command, started in the way of this program."""
    return f"{PROGRAM.get()} {shlex.join([name, *arguments])}"


def require(*modules: str) -> None:
    """Refuses work whose result needs a module that is not installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        packages = " ".join(dict.fromkeys(_INSTALLERS.get(name, name) for name in missing))
        raise ValueError(f"{' and '.join(missing)} must be installed: pip install {packages}")


def require_found(root: pathlib.Path, finding: str) -> None:
    """Refuses to go on if the trace found no row, which the finding explains."""
    if finding:
        raise refused("nothing_found", root=shown(str(root), 120), finding=finding)


def make_question(instruction: Any, input: Any, output: Any, system: Any = "") -> Example:
    """Returns a question of these texts; refuses other values and texts that say nothing."""
    for value in (instruction, input, output, system):
        if not isinstance(value, str):
            raise refused("question_text", got=shown(value, 60))
    if output and not output.strip():
        raise refused("blank_answer")
    try:
        f"{instruction}{input}{output}{system}".encode()
    except UnicodeEncodeError:
        raise ValueError("a question must be UTF-8 text, got other bytes: convert it") from None
    if not instruction.strip():
        raise ValueError("a question must have an instruction, got none: say what was asked")
    question = make_example(instruction, input, output)
    return with_system(question, system) if system.strip() else question


def options_of(options: _O, named: Mapping[str, Any]) -> _O:
    """Returns options with other values by name; paths may be objects."""
    return dataclasses.replace(options, **_plain({**named}))


def _plain(value: Any) -> Any:
    """Returns paths as text, lists as tuples and numbers of NumPy as Python's, also inside."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    return value.item() if hasattr(value, "item") and not np.ndim(value) else value


def changed(config: Config, values: Mapping[str, Any]) -> Config:
    """Returns settings with other values by dotted name; paths become absolute."""
    config = settings.replaced(config, _plain({**values}))
    leaves = [leaf for leaf in settings.leaves(config) if leaf.metadata["is_path"]]
    return settings.replaced(config, {leaf.name: settings.absolute(leaf) for leaf in leaves})


def make(
    config: Config,
    workdir: pathlib.Path,
    *,
    mesh: MeshConfig,
    update: bool,
    stages: Sequence[str] = STAGES,
    is_measured: bool = True,
    prepare: Callable[[], Callable[[], None]] | None = None,
    more: Sequence[Any] = (),
) -> str:
    """Runs stages and leaves the flags that repeat them.

    Returns the finding that ends the run if no row taught the traced answer; "" without. `prepare`
    is called when the work directory is claimed. If the run is then refused, the function that
    `prepare` returned is called to undo it. `more` are recipes in addition to those of every run.
    """
    # Evaluation and, without marker words, likelihoods before unlearning take ROUGE.
    if is_measured and {"references", "evaluate"} & set(stages):
        require("rouge_score")
    if is_measured and "report" in stages:
        require("matplotlib")
    from raslik_jax.run import cost  # it takes jax with it, and --help should not

    config = cost.settled(config, workdir)
    with contextlib.ExitStack() as held:
        record = processes.alone(
            lambda: held.enter_context(open_workdir(workdir, config, update=update))
        )
        from raslik_jax.parallel import meshes
        from raslik_jax.report import writing
        from raslik_jax.run import checking, plan

        devices = meshes.make_mesh(mesh.data)
        checking.check_mesh(config, devices.size, stages=stages)
        refused = held.enter_context(contextlib.ExitStack())
        if prepare:
            processes.alone(lambda: refused.callback(prepare()))

        def on_start() -> None:
            refused.pop_all()
            if record:  # of several processes the first has it, which alone starts
                record()
            # It repeats this run as it is: `raslik run --flagfile=WORKDIR/run.flags`.
            lines = sorted([*flag_lines(config), f"--workdir={workdir.absolute()}"])
            written.write_bytes(workdir, workdir / "run.flags", "\n".join([*lines, ""]).encode())

        with meshes.use(devices):
            return plan.run(
                config,
                workdir,
                stages=stages,
                is_measured=is_measured,
                layout=mesh.base,
                on_start=on_start,
                more=(*writing.UNITS, *more),
            )


def first_rows(config: Config, most: int) -> Sequence[Example]:
    """Returns the first rows of a user's training file."""
    own: Any = config.corpus.own
    keys = parse_fields(own.fields)
    return read_examples(own.train_file, fields=keys, format=own.format, most=most)


def flag_lines(config: Config) -> Iterator[str]:
    """Yields the flag of each setting."""
    for leaf in settings.leaves(config):
        if isinstance(leaf.value, bool):
            yield f"--{'' if leaf.value else 'no'}{leaf.name}"
        else:
            parts = leaf.value if isinstance(leaf.value, tuple) else (leaf.value,)
            yield f"--{leaf.name}={quoted(','.join(map(str, parts)))}"


def repeating(
    workdir: pathlib.Path, stages: Sequence[str] = STAGES, *, is_measured: bool = True
) -> str:
    """Returns the command that repeats what `make` did."""
    some = [] if tuple(stages) == STAGES else [f"--stages={','.join(stages)}"]
    some += [] if is_measured else ["--measure=none"]
    return line("run", f"--flagfile={workdir / 'run.flags'}", *some)


def answer_lines(
    root: pathlib.Path, model: str | int = "finetuned", variant: artifacts.Variant | None = None
) -> list[str]:
    """Returns as lines how likely a model finds the traced answers, and its own answers.

    For the model before unlearning they also say how likely the base finds them, and if an answer
    is weak evidence.
    """
    told = artifacts.traced(model, variant).read(root)
    bases: list[float | None] = [None] * len(told)
    if variant is None and (rows := artifacts.traced("backbone").find(root)):
        bases = [row.nll for row in rows]
    lines = []
    for row, base in zip(told, bases, strict=True):
        under_base = "" if base is None else f", {base:.2f} under the base"
        why = doubt(row.nll, base, row.drawn)
        lines.append(f"answer  {one_line(row.traced, 160)}")
        lines.append(f"        {row.nll:.2f} nats a token under the model{under_base}")
        lines += [f"        {why}"] if why else []
        lines.append(f"says    {one_line(row.output, 160)}")
    return lines
