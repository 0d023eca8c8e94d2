"""Runs a grid of experiments, each once, and makes one report.

  python experiments/suite.py --out=runs/seeds --flagfiles=experiments/flags/quickstart.flags \\
    --seeds=0,1,2

Every flag file is run with every seed, and with every value of each --vary:

  --vary=sketch.size=1024,4096                                    two runs instead of one
  --vary=unlearn.ga_gdr.learning_rate,unlearn.ga_klr.learning_rate=1e-5,1e-4    move together

--set=name=value adds a flag to all runs. Runs share what they have in common (fine-tuning,
sketches, sets, anything whose settings and inputs are the same) through --out/units and make it
once. Each is a process of its own with a log of its own; one that fails is listed and the others go
on, and the exit status is then 1. The same command goes on where it stopped.

With --choose the grid is measured on validation queries (without perplexity and TOFU's questions,
which the rule does not read), one learning rate and epoch is chosen from it for each strategy and
algorithm by the rule of experiments/choose.py, and what was chosen is then measured on the test
queries, once: nothing is trained again for that.

--out holds runs/<cell>, logs/<cell>.log, choice-<flag file>.json, suite.json (state of every cell)
report.md (a table for every flag file and variation, over its seeds) and report.html (the page).
"""

import contextlib
import dataclasses
import fcntl
import itertools
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from absl import flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from raslik_jax.cli import command, setting_flags
from raslik_jax.config import Config, to_json
from raslik_jax.evaluate import choice
from raslik_jax.files import write_json, write_text
from raslik_jax.messages import shown, some_of
from raslik_jax.report import page, published, results, runs, tables
from raslik_jax.report.tables import escape_markdown
from raslik_jax.run import choosing
from raslik_jax.settings import Settings, setting

_VARY = flags.DEFINE_multi_string("vary", [], "name=value,value or name,name=value,value.")
_SET = flags.DEFINE_multi_string("set", [], "name=value, for all runs; may be given repeatedly.")

_REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
_LAST_LINES = 3
# What the suite itself decides of every run.
_OWN_FLAGS = {
    "seed": "give --seeds",
    "workdir": "it is a folder of --out",
    "shared_units": "it is a folder of --out",
    "update": "give --update",
    "dry_run": "give --dry_run",
}
# The rule of choice reads F and R alone.
_VALIDATION = (
    "--references.query_split=validation",
    "--evaluate.perplexity_examples=0",
    "--evaluate.questions=0",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """Options of a suite, beside --vary and --set."""

    out: str = setting("", "Folder of the suite.")
    flagfiles: tuple[str, ...] = setting((), "Flag files of run.py, one experiment each.")
    seeds: tuple[int, ...] = setting((0,), "Seeds of every experiment.", low=0)
    choose: bool = setting(
        False, "Measure the grid on validation queries, choose, measure that on test queries."
    )
    per: choice.Per = setting("strategy", "--choose: what has a choice of its own.")
    floor: choice.Floor = setting("backbone", "--choose: F that is no longer improved upon.")
    update: bool = setting(False, "Take over work directories of other settings.")
    dry_run: bool = setting(False, "Show the grid, run nothing.")


def stem_of(flagfile: str) -> str:
    """Returns the name of an experiment."""
    return pathlib.Path(flagfile).name.removesuffix(".flags")


class Cell(NamedTuple):
    """One run of the grid.

    Attributes:
      name: of its folder and log.
      experiment: stem of its flag file.
      group: what its table is named after: experiment and variation, without the seed.
      arguments: of run.py, without the work directory.
    """

    name: str
    experiment: str
    group: str
    arguments: tuple[str, ...]


class Variation(NamedTuple):
    """One point of the grid beside flag file and seed: a label and its flags."""

    label: str
    arguments: tuple[str, ...]


def parse_axis(text: str) -> tuple[Variation, ...]:
    """Returns the points of one --vary.

    Raises:
      ValueError: no name, no value, or a value twice.
    """
    left, _, right = text.partition("=")
    names, values = left.split(","), right.split(",")
    if not all(names) or not all(values) or len(set(values)) < len(values):
        raise ValueError(
            f"--vary must be name=value,value with different values, got {shown(text)}"
        )
    return tuple(
        Variation(f"{names[0]}={value}", tuple(f"--{name}={value}" for name in names))
        for value in values
    )


def check_names(flagfiles: Sequence[str], axes: Sequence[str], common: Sequence[str]) -> None:
    """Refuses files and flags that are missing or given twice, or that the suite itself decides.

    Args:
      flagfiles: paths.
      axes: texts of --vary.
      common: texts of --set.

    Raises:
      ValueError: such a file or flag, or a --set without a name or value.
    """
    missing = [path for path in flagfiles if not pathlib.Path(path).is_file()]
    if not flagfiles or missing:
        raise ValueError(f"--flagfiles must be a list of files, got {some_of(missing) or 'none'}")
    stems = list(map(stem_of, flagfiles))
    if len(set(stems)) < len(stems):
        raise ValueError(f"--flagfiles must have different names, got {some_of(stems)}")
    wrong = [text for text in common if not text.partition("=")[0] or "=" not in text]
    if wrong:
        raise ValueError(f"--set must be name=value, got {shown(wrong[0])}")
    names = [name for text in axes for name in text.partition("=")[0].split(",")]
    names += [text.partition("=")[0] for text in common]
    for name in names:
        if name in _OWN_FLAGS:
            raise ValueError(f"--vary and --set must not name {name}: {_OWN_FLAGS[name]}")
        if names.count(name) > 1:
            raise ValueError(f"--vary and --set must name a flag once, got {name} twice")


def parse_cells(cells: Sequence[Cell]) -> list[Config]:
    """Returns the settings of a grid before it runs.

    Raises:
      ValueError: an unknown flag, a refused value, two cells of one folder, or of one config.
    """
    seen: dict[Any, Cell] = {}
    configs = []
    for cell in cells:
        try:
            # From where it will run: flag files name those they include from there.
            with contextlib.chdir(_REPOSITORY):
                configs.append(setting_flags.parse_config(cell.arguments))
        except ValueError as error:
            raise ValueError(f"{cell.name} cannot run: {error}") from None
        for key in (cell.name, (cell.experiment, str(to_json(configs[-1])))):
            other = seen.setdefault(key, cell)
            if other is not cell:
                raise ValueError(
                    f"every run must differ from the others, got {shown(other.name)} and "
                    f"{shown(cell.name)} with one folder or the same settings: leave one out"
                )
    return configs


def make_grid(
    options: Options, axes: Sequence[tuple[Variation, ...]], common: Sequence[str]
) -> tuple[Cell, ...]:
    """Returns the cells of a grid: seeds within variations within flag files."""
    cells = []
    for path in options.flagfiles:
        for point in itertools.product(*axes):
            group = " ".join([stem_of(path), *(variation.label for variation in point)])
            varied = [flag for variation in point for flag in variation.arguments]
            flagfile = f"--flagfile={pathlib.Path(path).resolve()}"
            for seed in options.seeds:
                arguments = (flagfile, *varied, *common, f"--seed={seed}")
                # A folder's name; without commas, so that it can stand in a list of runs.
                name = f"{group} seed={seed}".replace(" ", "-").replace("/", "_").replace(",", "+")
                cells.append(Cell(name, stem_of(path), group, arguments))
    return tuple(cells)


def plan_cells(
    options: Options, vary: Sequence[str], common: Sequence[str]
) -> tuple[tuple[Cell, ...], tuple[Cell, ...]]:
    """Returns the grid, and the cells that measure on test queries what was chosen from it.

    Raises:
      ValueError: a grid that cannot be run, or that nothing can be chosen from.
    """
    check_names(options.flagfiles, vary, common)
    axes = tuple(map(parse_axis, vary))
    shared = tuple(f"--{text}" for text in common)
    if not options.choose:
        grid = make_grid(options, axes, shared)
        parse_cells(grid)
        return grid, ()
    grid = make_grid(options, axes, (*shared, *_VALIDATION))
    tests = []
    for cell in make_grid(options, (), shared):
        path = choice_path(options, cell.experiment).resolve()
        arguments = (*cell.arguments, f"--unlearn.choice={path}", "--references.query_split=test")
        tests.append(Cell(f"test-{cell.name}", cell.experiment, f"{cell.group} test", arguments))
    configs = parse_cells((*grid, *tests))
    first: dict[str, Any] = {}
    for cell, config in zip(grid, configs, strict=False):
        settings = to_json(config)
        choosing.check_alike(first.setdefault(cell.experiment, settings), settings, run=cell.name)
    if not axes:
        raise ValueError("--choose needs --vary of learning rates, got none")
    return grid, tuple(tests)


def choice_path(options: Options, experiment: str) -> pathlib.Path:
    """Returns where the choice of an experiment is."""
    return pathlib.Path(options.out) / f"choice-{experiment}.json"


def run_process(arguments: Sequence[str], log: pathlib.Path) -> int:
    """Runs a command to its end, writing to a log, and returns its exit status.

    Raises:
      KeyboardInterrupt: Ctrl-C or a termination of this process; the command has ended.
    """

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        # From the checkout's folder: flag files name those they include from there.
        with (
            open(log, "w", encoding="utf-8") as file,
            subprocess.Popen(
                arguments, stdout=file, stderr=subprocess.STDOUT, cwd=_REPOSITORY
            ) as process,
        ):
            try:
                return process.wait()
            except KeyboardInterrupt:
                process.terminate()
                process.wait()
                raise
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def lock_folder(out: pathlib.Path) -> Iterator[None]:
    """Makes the folder of a suite and holds it against a second one.

    Raises:
      ValueError: it is no folder, holds a report that no suite made, or another suite runs in it.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out must be a folder, got the file {shown(str(out))}")
    foreign = [name for name in ("report.md", "report.html") if os.path.lexists(out / name)]
    if foreign and not (out / "suite.json").is_file():
        raise ValueError(
            f"--out must be a new folder or that of an earlier suite, {shown(str(out))} holds "
            f"another {foreign[0]}: give another"
        )
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".lock", "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"--out={shown(str(out))} is in use by another suite: wait for it, or give another"
            ) from None
        yield


class Suite:
    """Runs cells one after the other, and keeps suite.json as it goes."""

    def __init__(self, options: Options):
        self.options = options
        self.out = pathlib.Path(options.out)
        self.states: dict[str, dict[str, Any]] = {}

    def workdir(self, cell: Cell) -> pathlib.Path:
        """Returns where a cell's results are."""
        return self.out / "runs" / cell.name

    def is_done(self, cell: Cell) -> bool:
        """Returns whether a cell has ended well in this call of the suite."""
        return self.states.get(cell.name, {}).get("state") == "done"

    def measured(self, cells: Sequence[Cell]) -> list[pathlib.Path]:
        """Returns the work directories of the cells that are done and have metrics."""
        roots = [self.workdir(cell) for cell in cells if self.is_done(cell)]
        return [root for root in roots if runs.metrics_path(root).is_file()]

    def record(self, cell: Cell, state: str, **details: Any) -> None:
        """Notes what became of a cell, in suite.json too."""
        self.states[cell.name] = {"state": state, "group": cell.group, **details}
        write_json(self.out / "suite.json", {"cells": self.states})

    def run(self, cell: Cell, label: str) -> None:
        """Runs a cell; what fails is recorded with the last lines of its log."""
        log = self.out / "logs" / f"{cell.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        arguments = [
            sys.executable,
            str(_REPOSITORY / "experiments" / "run.py"),
            *cell.arguments,
            f"--workdir={self.workdir(cell).resolve()}",
            f"--shared_units={(self.out / 'units').resolve()}",
            *(["--update"] if self.options.update else []),
        ]
        print(f"{label} {cell.name} ...", flush=True)
        start = time.monotonic()
        try:
            status = run_process(arguments, log)
        except KeyboardInterrupt:
            self.record(cell, "stopped", log=str(log))
            raise
        seconds = round(time.monotonic() - start, 1)
        if not status:
            self.record(cell, "done", log=str(log), seconds=seconds)
            print(f"{label} {cell.name}: done in {seconds} s", flush=True)
            return
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        self.record(cell, "failed", log=str(log), status=status, seconds=seconds)
        print(f"{label} {cell.name}: failed after {seconds} s, {log} ends with")
        print("\n".join(f"    {line}" for line in lines[-_LAST_LINES:]), flush=True)

    def choose(self, cells: Sequence[Cell], experiment: str) -> str:
        """Writes the choice from validation runs; returns why there is none, if so."""
        if not all(map(self.is_done, cells)):
            return "not run, its validation runs are not all done"
        try:
            found = choosing.choose_from_runs(
                [self.workdir(cell) for cell in cells],
                choice_path(self.options, experiment),
                per=self.options.per,
                floor=self.options.floor,
            )
        except ValueError as error:
            return f"not run, nothing could be chosen ({error})"
        print(f"chosen for {experiment} on validation queries:")
        print(choice.describe(found), flush=True)
        return ""

    def report(self, cells: Sequence[Cell]) -> str:
        """Returns the report: a table of every group over its seeds, and what is not done."""
        parts = ["# Suite"]
        for group in dict.fromkeys(cell.group for cell in cells):
            members = [cell for cell in cells if cell.group == group]
            found = [runs.read_metrics(root) for root in self.measured(members)]
            parts.append(f"## {escape_markdown(group)}")
            if not found:
                parts.append("No run has metrics.")
                continue
            split = found[0]["corpus"]["query_split"]
            parts.append(f"{len(found)} of {len(members)} runs; {split} queries.")
            # Of one run the intervals over queries, of several the spread over seeds.
            made = [results.seeds_table(found)]
            if len(found) == 1:
                made = [results.retrieval_table(found[0]), results.results_table(found[0])]
            parts += map(tables.render_markdown, made)
        failed = {n: cell["state"] for n, cell in self.states.items() if cell["state"] != "done"}
        if failed:
            lines = (f"- {escape_markdown(name)}: {state}" for name, state in failed.items())
            parts += ["## Not done", "\n".join(lines)]
        return "\n\n".join(parts) + "\n"

    def run_all(self, grid: Sequence[Cell], tests: Sequence[Cell]) -> bool:
        """Runs the cells and makes the report; returns whether every cell ended well."""
        cells = (*grid, *tests)
        labels = {cell.name: f"[{i}/{len(cells)}]" for i, cell in enumerate(cells, start=1)}
        for cell in grid:
            self.run(cell, labels[cell.name])
        for experiment in dict.fromkeys(cell.experiment for cell in tests):
            part = [cell for cell in grid if cell.experiment == experiment]
            problem = self.choose(part, experiment)
            for cell in (cell for cell in tests if cell.experiment == experiment):
                if problem:
                    self.record(cell, problem)
                    print(f"{labels[cell.name]} {cell.name}: {problem}", flush=True)
                else:
                    self.run(cell, labels[cell.name])
        text = self.report(cells)
        write_text(self.out / "report.md", text)
        stored = list(map(runs.read_run, self.measured(tests or grid)))
        experiments = runs.group_runs(stored)
        html = page.render(experiments, paper=published.read_blocks(), title=self.out.name)
        write_text(self.out / "report.html", html)
        print(f"\n{text}\nreport: {self.out / 'report.html'} (and report.md beside it)")
        return all(map(self.is_done, cells))


def main(options: Options) -> int:
    if not options.out:
        raise ValueError("--out must be the folder of the suite, got none")
    grid, tests = plan_cells(options, _VARY.value, _SET.value)
    suite = Suite(options)
    if options.dry_run:
        for cell in (*grid, *tests):
            is_measured = runs.metrics_path(suite.workdir(cell)).is_file()
            print(f"{cell.name}  [{'has metrics' if is_measured else '-'}]")
            print(f"    run.py {' '.join(cell.arguments)}")
        print(f"{len(grid) + len(tests)} runs")
        return 0
    with lock_folder(suite.out):
        return 0 if suite.run_all(grid, tests) else 1


if __name__ == "__main__":
    command.start(main, Options(), when_stopped="stopped; the same command goes on from here")
