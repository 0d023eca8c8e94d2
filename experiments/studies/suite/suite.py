"""Runs a grid of experiments, each once, and makes one report.

  python experiments/studies/raslik.py suite --out=runs/seeds --flagfiles=experiments/flags/demo.flags --seeds=0,1,2

Every flag file is run with every seed, and with every value of each --vary:

  --vary=sketch.size=1024,4096                                    two runs instead of one
  --vary=unlearn.ga_gdr.learning_rate,unlearn.ga_klr.learning_rate=1e-5,1e-4    move together

--set=name=value adds a flag to all runs. It is a setting, or --stages, --measure or --mesh.* of
`raslik run`. A run takes units with the same settings and inputs from earlier ones, such as
fine-tuning, sketches and sets. Each unit is made once. Each run is a process with a log. If one
fails, the report lists it, the others continue, and the exit status is 1. The same command
continues where it stopped.

With --choose the grid is measured on validation queries, without TOFU's questions, which the rule
does not read. The rule of `raslik.py choose` chooses one learning rate and epoch for each strategy
and algorithm. The chosen models are then measured on the test queries once. Nothing is trained
again for that.

--out holds runs/<cell>, logs/<cell>.log, choice-<flag file>.json, suite.json (state of every cell),
report.md (a table for every flag file and variation, over its seeds) and report.html (the page).
"""

import dataclasses
import itertools
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from experiments.studies.suite import choice, choose
from raslik_jax.base import settings as settings_lib
from raslik_jax.base.files import write_json, write_text
from raslik_jax.base.messages import shown, some_of
from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import setting_flags
from raslik_jax.cli import run as run_command
from raslik_jax.config import Config, to_json
from raslik_jax.report import facts, page, results, tables
from raslik_jax.run import artifacts
from raslik_jax.run.written import locked

# The program that runs a cell: with the members of the studies.
PROGRAM = [str(pathlib.Path(__file__).resolve().parents[1] / "raslik.py")]
LINK = str(pathlib.Path(__file__).resolve().with_name("link.py"))
WHEN_STOPPED = "stopped: start the same command again to go on from here"
# What the suite itself decides of every run.
_OWN_FLAGS = {"seed": "give --seeds", "update": "give --update", "dry_run": "give --dry_run"}
_OWN_FLAGS["workdir"] = "it is a folder of --out"
# What a run may be told beside its settings and --stages.
RUN_FLAGS = [
    leaf
    for leaf in settings_lib.leaves(run_command.Options())
    if leaf.name.startswith(("measure", "mesh."))
]
# The rule of choice reads F, R and signs of damage, none of which are answers to such questions.
_VALIDATION = ("--references.query_split=validation",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """Options of a suite."""

    out: str = setting("", "Folder of the suite.")
    flagfiles: tuple[str, ...] = setting((), "Flag files of runs, one experiment each.")
    seeds: tuple[int, ...] = setting((0,), "Seeds of every experiment.", low=0)
    vary: tuple[str, ...] = setting((), "name,...=value,value.", is_repeated=True)
    set: tuple[str, ...] = setting((), "name=value, for all runs.", is_repeated=True)
    choose: bool = setting(False, 
        "Choose settings on validation queries and measure them on test queries."
    )
    floor: choice.Floor = setting("backbone", "--choose: F below which models count as equal.")
    update: bool = setting(False, "Use work directories of other settings.")
    dry_run: bool = setting(False, "Print the grid and run nothing.")


class Cell(NamedTuple):
    """One run of the grid."""

    name: str  # of its folder and log
    experiment: str  # stem of its flag file
    group: str  # what its table is named after: experiment and variation, without the seed
    arguments: tuple[str, ...]  # of `raslik run`, without the work directory


def _parse_axis(text: str) -> list[tuple[str, list[str]]]:
    """Returns the points of one --vary: a label each, and its flags."""
    left, _, right = text.partition("=")
    names, values = left.split(","), right.split(",")
    if not all(names) or not all(values) or len(set(values)) < len(values):
        raise ValueError(f"--vary must be name=value,value, all different, got {shown(text)}")
    return [(f"{names[0]}={value}", [f"--{name}={value}" for name in names]) for value in values]


def _check_names(options: Options) -> None:
    """Refuses files and flags that are missing or given twice, or that the suite itself decides."""
    files = options.flagfiles
    missing = [path for path in files if not pathlib.Path(path).is_file()]
    if not files or missing:
        raise ValueError(f"--flagfiles must be a list of files, got {some_of(missing) or 'none'}")
    for text in options.set:
        if not text.partition("=")[0] or "=" not in text:
            raise ValueError(f"--set must be name=value, got {shown(text)}")
    texts = (*options.vary, *options.set)
    names = [name.replace("-", "_") for text in texts for name in text.partition("=")[0].split(",")]
    for name in names:
        if name in _OWN_FLAGS:
            raise ValueError(f"--vary and --set must not name {name}: {_OWN_FLAGS[name]}")
        if names.count(name) > 1:
            raise ValueError(f"--vary and --set must name a flag once, got {name} twice")


def _parse_cells(cells: Sequence[Cell]) -> list[Config]:
    """Returns the settings of a grid, before it runs; refuses equal cells and wrong flags."""
    seen: dict[Any, Cell] = {}
    configs = []
    for cell in cells:
        try:
            configs.append(setting_flags.parse_config(cell.arguments, RUN_FLAGS))
        except ValueError as error:
            raise ValueError(f"{cell.name} cannot run: {error}") from None
        for key in (cell.name, (cell.experiment, str(to_json(configs[-1])))):
            other = seen.setdefault(key, cell)
            if other is not cell:
                got = f"{shown(other.name)} and {shown(cell.name)}"
                raise ValueError(f"every run must differ in folder and settings, got {got}")
    return configs


def _make_grid(
    options: Options, axes: Sequence[Sequence[tuple[str, list[str]]]], common: Sequence[str]
) -> Iterator[Cell]:
    """Yields the cells of a grid: seeds within variations within flag files."""
    for path, point in itertools.product(options.flagfiles, itertools.product(*axes)):
        stem = pathlib.Path(path).name.removesuffix(".flags")
        group = " ".join([stem, *(label for label, _ in point)])
        varied = [flag for _, part in point for flag in part]
        for seed in options.seeds:
            flagfile = f"--flagfile={pathlib.Path(path).resolve()}"
            # A folder's name; without commas, so that it can stand in a list of runs.
            name = f"{group} seed={seed}".replace(" ", "-").replace("/", "_").replace(",", "+")
            yield Cell(name, stem, group, (flagfile, *varied, *common, f"--seed={seed}"))


def plan_cells(options: Options) -> tuple[list[Cell], list[Cell]]:
    """Returns the grid, and the cells that measure on test queries what was chosen from it."""
    _check_names(options)
    axes, common = [*map(_parse_axis, options.vary)], [f"--{text}" for text in options.set]
    grid = [*_make_grid(options, axes, (*common, *(_VALIDATION if options.choose else ())))]
    if not options.choose:
        _parse_cells(grid)
        return grid, []
    tests = []
    for cell in _make_grid(options, (), common):
        path = _choice_path(options, cell.experiment).resolve()
        arguments = (*cell.arguments, f"--unlearn.choice={path}", "--references.query_split=test")
        tests.append(Cell(f"test-{cell.name}", cell.experiment, f"{cell.group} test", arguments))
    first: dict[str, Any] = {}
    for cell, config in zip(grid, _parse_cells([*grid, *tests]), strict=False):
        settings = to_json(config)
        choice.check_settings(settings, run=cell.name)
        choose.check_alike(first.setdefault(cell.experiment, settings), settings, run=cell.name)
    if not axes:
        raise ValueError("--choose needs --vary of learning rates, got none")
    return grid, tests


def _choice_path(options: Options, experiment: str) -> pathlib.Path:
    return pathlib.Path(options.out) / f"choice-{experiment}.json"


def run_process(arguments: Sequence[str], log: pathlib.Path) -> int:
    """Runs a command to its end, writes its output to a log, and returns its exit status.

    At Ctrl-C or a termination of this process, the command is ended first.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    # A run finds the package where this process did, installed or not.
    places = [str(pathlib.Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places))}
    try:
        with (
            open(log, "w", encoding="utf-8") as out,
            subprocess.Popen(arguments, stdout=out, stderr=out, env=environment) as process,
        ):
            try:
                return process.wait()
            except KeyboardInterrupt:
                process.terminate()
                process.wait()
                raise
    finally:
        signal.signal(signal.SIGTERM, before)


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
        findings = self.findings(cells)
        done = [cell for cell in cells if self.is_done(cell) and cell.name not in findings]
        roots = [self.workdir(cell) for cell in done]
        return [root for root in roots if artifacts.METRICS.is_there(root)]

    def findings(self, cells: Sequence[Cell]) -> dict[str, str]:
        """Returns why cells that are done found no row, by their names."""
        done = [cell for cell in cells if self.is_done(cell)]
        found = {cell.name: artifacts.read_finding(self.workdir(cell)) for cell in done}
        return {name: text for name, text in found.items() if text}

    def record(self, cell: Cell, state: str, **details: Any) -> None:
        """Notes what became of a cell, in suite.json too."""
        self.states[cell.name] = {"state": state, "group": cell.group, **details}
        write_json(self.out / "suite.json", {"cells": self.states})

    def run(self, cell: Cell, label: str) -> None:
        """Runs a cell; what fails is recorded with the last lines of its log."""
        log = self.out / "logs" / f"{cell.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        arguments = [sys.executable, *PROGRAM, "run", *cell.arguments]
        arguments.append(f"--workdir={self.workdir(cell).resolve()}")
        arguments += ["--update"] if self.options.update else []
        print(f"{label} {cell.name} ...", flush=True)
        start = time.monotonic()
        try:
            # What fails there fails in the run, which says so.
            run_process([sys.executable, LINK, str(self.workdir(cell)), *cell.arguments], log)
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
        print("\n".join(f"    {line}" for line in lines[-3:]), flush=True)

    def choose(self, cells: Sequence[Cell], experiment: str) -> str:
        """Writes the choice from validation runs; returns why there is none, if so."""
        if not all(map(self.is_done, cells)):
            return "not run, its validation runs are not all done"
        print(f"chosen for {experiment} on validation queries:", flush=True)
        names = tuple(str(self.workdir(cell)) for cell in cells)
        output = str(_choice_path(self.options, experiment))
        try:
            choose.run(choose.Options(runs=names, output=output, floor=self.options.floor))
        except ValueError as error:
            return f"not run, nothing could be chosen ({error})"
        return ""

    def report(self, cells: Sequence[Cell]) -> str:
        """Returns the report: a table of every group over its seeds, and what is not done."""
        parts = ["# Suite"]
        for group, same in itertools.groupby(cells, lambda cell: cell.group):
            members = [*same]
            found = [artifacts.read_metrics(root) for root in self.measured(members)]
            parts.append(f"## {tables.escape_markdown(group)}")
            findings = self.findings(members)
            lines = [f"- {tables.escape_markdown(f'{n}: {t}')}" for n, t in findings.items()]
            parts += ["No row was found:\n\n" + "\n".join(lines)] if lines else []
            if not found and lines:
                continue
            if not found:
                parts.append("No run has metrics.")
                continue
            split = found[0]["corpus"]["query_split"]
            parts.append(f"{len(found)} of {len(members)} runs; {split} queries.")
            # Of one run the intervals over queries, of several the spread over seeds; either says
            # which models were judged damaged.
            parts += map(tables.render_markdown, results.tables_of(found)[:2])
        failed = {n: cell["state"] for n, cell in self.states.items() if cell["state"] != "done"}
        if failed:
            lines = [f"- {tables.escape_markdown(name)}: {why}" for name, why in failed.items()]
            parts += ["## Not done", "\n".join(lines)]
        return "\n\n".join(parts) + "\n"

    def run_all(self, grid: Sequence[Cell], tests: Sequence[Cell]) -> bool:
        """Runs the cells and makes the report; returns whether every cell ended well."""
        cells = (*grid, *tests)
        labels = {cell.name: f"[{i}/{len(cells)}]" for i, cell in enumerate(cells, start=1)}
        for cell in grid:
            self.run(cell, labels[cell.name])
        for experiment, chosen in itertools.groupby(tests, lambda cell: cell.experiment):
            problem = self.choose([c for c in grid if c.experiment == experiment], experiment)
            for cell in chosen:
                if problem:
                    self.record(cell, problem)
                    print(f"{labels[cell.name]} {cell.name}: {problem}", flush=True)
                else:
                    self.run(cell, labels[cell.name])
        text = self.report(cells)
        write_text(self.out / "report.md", text)
        # Where nothing was chosen, the page shows what the choice was to be made from.
        roots = self.measured(tests) or self.measured(grid)
        experiments = facts.group_runs([*map(facts.read_facts, roots)])
        how: Any = {"title": self.out.name, "findings": self.findings(cells)}
        html = page.render(experiments, **how)
        write_text(self.out / artifacts.PAGE.file, html)
        print(f"\n{text}\nreport: {self.out / artifacts.PAGE.file} (and report.md beside it)")
        return all(map(self.is_done, cells))


def run(options: Options) -> int:
    """Runs or shows the grid; returns the exit status."""
    if not options.out:
        raise ValueError("--out must be the folder of the suite, got none")
    (grid, tests), suite = plan_cells(options), Suite(options)
    if options.dry_run:
        for cell in (*grid, *tests):
            is_measured = artifacts.METRICS.is_there(suite.workdir(cell))
            print(f"{cell.name}  [{'has metrics' if is_measured else '-'}]")
            print(f"    raslik run {' '.join(cell.arguments)}")
        print(f"{len(grid) + len(tests)} runs")
        return 0
    foreign = [
        name
        for name in ("report.md", artifacts.PAGE.file)
        if os.path.lexists(suite.out / name)
    ]
    if foreign and not (suite.out / "suite.json").is_file():
        must = "be a new folder or that of an earlier suite"
        raise ValueError(f"--out must {must}, {shown(str(suite.out))} has another {foreign[0]}")
    with locked(suite.out, "--out"):
        return int(not suite.run_all(grid, tests))
