"""Runs a grid of experiments, each once, and makes one report.

  python experiments/suite.py --out=runs/seeds --flagfiles=experiments/flags/quickstart.flags \\
    --seeds=0,1,2

Every flag file is run with every seed, and with every value of each --vary:

  --vary=sketch_size=1024,4096                                    two runs instead of one
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

from raslik_jax.cli import command, setting_flags  # noqa: E402
from raslik_jax.evaluate import choice  # noqa: E402
from raslik_jax.files import write_json, write_text  # noqa: E402
from raslik_jax.messages import shown, some_of  # noqa: E402
from raslik_jax.report import page, published, results, runs, tables  # noqa: E402
from raslik_jax.report.tables import escape_markdown  # noqa: E402
from raslik_jax.run.choosing import choose_from_runs  # noqa: E402

_OUT = flags.DEFINE_string("out", "", "Folder of the suite.")
_FLAGFILES = flags.DEFINE_list("flagfiles", [], "Flag files of run.py, one experiment each.")
_SEEDS = command.define_list("seeds", [0], "Seeds of every experiment.", int, low=0)
_VARY = flags.DEFINE_multi_string("vary", [], "name=value,value or name,name=value,value.")
_SET = flags.DEFINE_multi_string("set", [], "name=value, for all runs; may be given repeatedly.")
_CHOOSE = flags.DEFINE_boolean(
    "choose", False, "Measure the grid on validation queries, choose, measure that on test queries."
)
_PER = flags.DEFINE_enum(
    "per", "strategy", list(choice.PER), "--choose: what has a choice of its own."
)
_FLOOR = flags.DEFINE_enum(
    "floor", "backbone", list(choice.FLOORS), "--choose: F that is no longer improved upon."
)
_UPDATE = flags.DEFINE_boolean("update", False, "Take over work directories of other settings.")
_DRY_RUN = flags.DEFINE_boolean("dry_run", False, "Show the grid, run nothing.")

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


class Cell(NamedTuple):
    """One run of the grid.

    Attributes:
      name: of its folder and log.
      experiment: stem of its flag file.
      group: what its table is named after: experiment and variation, without the seed.
      arguments: of run.py, without the work directory.
      choice: file that it reads its learning rates and epochs from, if any.
    """

    name: str
    experiment: str
    group: str
    arguments: tuple[str, ...]
    choice: pathlib.Path | None = None


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


def _is_of_rates(axis: Sequence[Variation]) -> bool:
    return all(
        flag.partition("=")[0].endswith(".learning_rate")
        for variation in axis
        for flag in variation.arguments
    )


def check_names(axes: Sequence[str], common: Sequence[str]) -> None:
    """Refuses flags that are given twice, or that the suite itself decides.

    Args:
      axes: texts of --vary.
      common: texts of --set.

    Raises:
      ValueError: such a flag, or a --set without a name or value.
    """
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


def check_cells(cells: Sequence[Cell]) -> None:
    """Refuses a grid before it runs: what no run takes, and cells that are the same.

    Raises:
      ValueError: an unknown flag, a refused value, two cells of one folder, or of one config.
    """
    folders: dict[str, Cell] = {}
    configs: dict[Any, Cell] = {}
    for cell in cells:
        try:
            # From where it will run: flag files name those they include from there.
            with contextlib.chdir(_REPOSITORY):
                config = setting_flags.parse_config(cell.arguments)
        except ValueError as error:
            raise ValueError(f"{cell.name} cannot run: {error}") from None
        same_folder = folders.setdefault(cell.name, cell)
        same_config = configs.setdefault((cell.experiment, config), cell)
        for other in (same_folder, same_config):
            if other is not cell:
                raise ValueError(
                    f"every run must differ from the others, got {shown(other.name)} and "
                    f"{shown(cell.name)} with one folder or the same settings: leave one out"
                )


def make_grid(
    flagfiles: Sequence[str],
    seeds: Sequence[int],
    axes: Sequence[tuple[Variation, ...]],
    common: Sequence[str],
) -> tuple[Cell, ...]:
    """Returns the cells of a grid: seeds within variations within flag files.

    Raises:
      ValueError: no flag file, one that is not there, or two of one name.
    """
    missing = [path for path in flagfiles if not pathlib.Path(path).is_file()]
    if not flagfiles or missing:
        raise ValueError(f"--flagfiles must be a list of files, got {some_of(missing) or 'none'}")
    stems = [pathlib.Path(path).name.removesuffix(".flags") for path in flagfiles]
    if len(set(stems)) < len(stems):
        raise ValueError(f"--flagfiles must have different names, got {some_of(stems)}")
    cells = []
    for path, stem in zip(flagfiles, stems, strict=True):
        for point in itertools.product(*axes):
            group = " ".join([stem, *(variation.label for variation in point)])
            flags_of_point = [flag for variation in point for flag in variation.arguments]
            for seed in seeds:
                arguments = (
                    f"--flagfile={pathlib.Path(path).resolve()}",
                    *flags_of_point,
                    *common,
                    f"--seed={seed}",
                )
                # A folder's name; without commas, so that it can stand in a list of runs.
                name = f"{group} seed={seed}".replace(" ", "-").replace("/", "_").replace(",", "+")
                cells.append(Cell(name, stem, group, arguments))
    return tuple(cells)


def test_cells(
    flagfiles: Sequence[str], seeds: Sequence[int], common: Sequence[str], out: pathlib.Path
) -> tuple[Cell, ...]:
    """Returns the cells that measure on test queries what was chosen."""
    cells = []
    for cell in make_grid(flagfiles, seeds, (), common):
        path = out / f"choice-{cell.experiment}.json"
        arguments = (
            *cell.arguments,
            f"--unlearn.choice={path.resolve()}",
            "--references.query_split=test",
        )
        cells.append(
            Cell(f"test-{cell.name}", cell.experiment, f"{cell.group} test", arguments, path)
        )
    return tuple(cells)


def run_process(command: Sequence[str], log: pathlib.Path) -> int:
    """Runs a command to its end, writing to a log, and returns its exit status.

    What stops this process (Ctrl-C, a termination, a closed terminal) stops the command first.

    Raises:
      KeyboardInterrupt: this process was to stop; the command has ended.
    """
    process: subprocess.Popen[bytes] | None = None

    def stop(number: int, frame: object) -> None:
        if process is not None:
            process.send_signal(number)
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {n: signal.signal(n, stop) for n in numbers if signal.getsignal(n) != signal.SIG_IGN}
    try:
        with open(log, "w", encoding="utf-8") as file:
            # A session of its own, so that it is told to stop once, by us. From the checkout's
            # folder: flag files name those they include from there.
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=_REPOSITORY,
                start_new_session=True,
            )
            return process.wait()
    finally:
        if process is not None:
            process.wait()
        for number, handler in handlers.items():
            signal.signal(number, handler)


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

    def __init__(self, out: pathlib.Path, *, update: bool):
        self.out = out
        self.update = update
        self.states: dict[str, dict[str, Any]] = {}

    def workdir(self, cell: Cell) -> pathlib.Path:
        """Returns where a cell's results are."""
        return self.out / "runs" / cell.name

    def is_done(self, cell: Cell) -> bool:
        """Returns whether a cell has ended well in this call of the suite."""
        return self.states.get(cell.name, {}).get("state") == "done"

    def record(self, cell: Cell, state: str, **details: Any) -> None:
        """Notes what became of a cell, in suite.json too."""
        self.states[cell.name] = {"state": state, "group": cell.group, **details}
        write_json(self.out / "suite.json", {"cells": self.states})

    def run(self, cell: Cell, label: str) -> None:
        """Runs a cell; what fails is recorded with the last lines of its log."""
        log = self.out / "logs" / f"{cell.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            str(_REPOSITORY / "experiments" / "run.py"),
            *cell.arguments,
            f"--workdir={self.workdir(cell).resolve()}",
            f"--shared_units={(self.out / 'units').resolve()}",
            *(["--update"] if self.update else []),
        ]
        print(f"{label} {cell.name} ...", flush=True)
        start = time.monotonic()
        try:
            status = run_process(command, log)
        except KeyboardInterrupt:
            self.record(cell, "stopped", log=str(log))
            raise
        seconds = round(time.monotonic() - start, 1)
        if status:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            self.record(cell, "failed", log=str(log), status=status, seconds=seconds)
            print(f"{label} {cell.name}: failed after {seconds} s, {log} ends with")
            print("\n".join(f"    {line}" for line in lines[-_LAST_LINES:]), flush=True)
        else:
            self.record(cell, "done", log=str(log), seconds=seconds)
            print(f"{label} {cell.name}: done in {seconds} s", flush=True)


def choose(suite: Suite, cells: Sequence[Cell], experiment: str) -> None:
    """Writes the choice of one experiment from its validation runs."""
    found = choose_from_runs(
        [suite.workdir(cell) for cell in cells],
        suite.out / f"choice-{experiment}.json",
        per=_PER.value,
        floor=_FLOOR.value,
    )
    print(f"chosen for {experiment} on validation queries:")
    print(choice.describe(found), flush=True)


def report(suite: Suite, cells: Sequence[Cell]) -> str:
    """Returns the report: a table of every group over its seeds, and what is not done."""
    parts = ["# Suite"]
    for group in dict.fromkeys(cell.group for cell in cells):
        done = [cell for cell in cells if cell.group == group and suite.is_done(cell)]
        roots = [suite.workdir(cell) for cell in done]
        found = [runs.read_metrics(root) for root in roots if runs.metrics_path(root).is_file()]
        parts.append(f"## {escape_markdown(group)}")
        if not found:
            parts.append("No run has metrics.")
            continue
        split = found[0]["corpus"]["query_split"]
        parts.append(
            f"{len(found)} of {sum(c.group == group for c in cells)} runs; {split} queries."
        )
        # Of one run the intervals over queries, of several the spread over seeds.
        if len(found) == 1:
            shown = [results.retrieval_table(found[0]), results.results_table(found[0])]
        else:
            shown = [results.seeds_table(found)]
        parts += [tables.render_markdown(table) for table in shown]
    failed = [name for name, state in suite.states.items() if state["state"] != "done"]
    if failed:
        parts.append("## Not done")
        parts.append(
            "\n".join(
                f"- {escape_markdown(name)}: {suite.states[name]['state']}" for name in failed
            )
        )
    return "\n\n".join(parts) + "\n"


def run_suite(out: pathlib.Path) -> bool:
    """Runs the suite of the flags; returns whether every cell ended well."""
    axes = tuple(parse_axis(text) for text in _VARY.value)
    check_names(_VARY.value, _SET.value)
    if _CHOOSE.value and (not axes or not all(map(_is_of_rates, axes))):
        raise ValueError("--choose needs --vary of learning rates and of nothing else")
    common = tuple(f"--{text}" for text in _SET.value)
    grid = make_grid(
        _FLAGFILES.value, _SEEDS.value, axes, (*common, *(_VALIDATION if _CHOOSE.value else ()))
    )
    tests = test_cells(_FLAGFILES.value, _SEEDS.value, common, out) if _CHOOSE.value else ()
    cells = (*grid, *tests)
    check_cells(cells)
    if _DRY_RUN.value:
        for cell in cells:
            state = "has metrics" if runs.metrics_path(out / "runs" / cell.name).is_file() else "-"
            print(f"{cell.name}  [{state}]\n    run.py {' '.join(cell.arguments)}")
        print(f"{len(cells)} runs")
        return True
    with lock_folder(out):
        return run_cells(out, grid, tests)


def run_cells(out: pathlib.Path, grid: Sequence[Cell], tests: Sequence[Cell]) -> bool:
    """Runs the cells and makes the report; returns whether every cell ended well."""
    cells = (*grid, *tests)
    suite = Suite(out, update=_UPDATE.value)
    for number, cell in enumerate(grid, start=1):
        suite.run(cell, f"[{number}/{len(cells)}]")
    for experiment in dict.fromkeys(cell.experiment for cell in tests):
        part = [cell for cell in grid if cell.experiment == experiment]
        problem = ""
        if not all(map(suite.is_done, part)):
            problem = "not run, its validation runs are not all done"
        else:
            try:
                choose(suite, part, experiment)
            except ValueError as error:
                problem = f"not run, nothing could be chosen ({error})"
        for number, cell in enumerate(tests, start=len(grid) + 1):
            if cell.experiment != experiment:
                continue
            if problem:
                suite.record(cell, problem)
                print(f"[{number}/{len(cells)}] {cell.name}: {problem}", flush=True)
            else:
                suite.run(cell, f"[{number}/{len(cells)}]")
    text = report(suite, cells)
    write_text(out / "report.md", text)
    done = [suite.workdir(cell) for cell in tests or grid if suite.is_done(cell)]
    stored = [runs.read_run(root) for root in done if runs.metrics_path(root).is_file()]
    html = page.render(runs.group_runs(stored), paper=published.read_blocks(), title=out.name)
    write_text(out / "report.html", html)
    print(f"\n{text}\nreport: {out / 'report.html'} (and report.md beside it)")
    return all(map(suite.is_done, cells))


def main() -> int:
    if not _OUT.value:
        raise ValueError("--out must be the folder of the suite, got none")
    return 0 if run_suite(pathlib.Path(_OUT.value)) else 1


if __name__ == "__main__":
    command.start(main, when_stopped="stopped; the same command goes on from here")
