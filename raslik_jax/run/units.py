"""Runs units of work in order, each once: units that are up to date are not run again.

A unit owns one folder of the work directory. The folder is made below `.making` and renamed to its
place when it is whole. The earlier result stays until then. The key of a unit is the hash of its
settings, of its files outside and of its files of earlier units, all by content. If an earlier unit
is made again with the same bytes, later units stay up to date.
"""

import contextlib
import functools
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from raslik_jax.base.files import RESUME, clear_left, read_json, sync, unwritten, write_json
from raslik_jax.base.messages import shown, some_of
from raslik_jax.config import STAGES
from raslik_jax.data.words import refused
from raslik_jax.parallel import processes
from raslik_jax.run import artifacts, manifests
from raslik_jax.run.manifests import MANIFEST, STARTED, Hashes, Manifest, content_hash

_MAKING = ".making"
_STARTED = {"key": str, "seconds?": float}
# The files that several processes write together in the folder of a unit.
_TOGETHER = (RESUME, "index")


class Unit(NamedTuple):
    """One unit of work.

    Attributes:
      name: its folder below the work directory; the first part is its stage.
      reads: its inputs of earlier units: files or folders below the work directory.
      settings: other values that decide its result, as JSON values.
      run: function that makes the result in the given folder.
      files: its inputs outside the work directory by their kind.
      is_resumable: whether `run` continues from the files of an interrupted run in the folder.
      is_alone: whether only the first of several processes makes it, without the mesh.
      work: function from an abstract run to its work; None for work of the host.
    """

    name: str
    reads: tuple[str, ...]
    settings: Mapping[str, Any]
    run: Callable[[pathlib.Path], None]
    files: Mapping[str, str | os.PathLike[str]] = {}
    is_resumable: bool = False
    is_alone: bool = False
    work: Callable[[Any], Any] | None = None

    @property
    def stage(self) -> str:
        """The stage that it belongs to."""
        return self.name.split("/")[0]


def owner_of(path: str, names: Collection[str]) -> str:
    """Returns the unit that a path below the work directory belongs to; "" without one."""
    return next((name for name in names if f"{path}/".startswith(f"{name}/")), "")


class Plan:
    """The units of a run and the content of its work directory."""

    def __init__(self, root: pathlib.Path, units: Sequence[Unit]):
        self.root = root
        self.units = {unit.name: unit for unit in units}  # each after those it reads
        self.done: dict[str, Manifest] = {}  # what was found up to date so far
        self.hashes = Hashes(root / _MAKING / "hashes.json")
        # Files outside, from the first unit that was made of them: their content stays in memory if
        # the files change.
        self._held: dict[str, str] = {}

    def owner(self, path: str) -> str:
        """Returns the unit that a path below the work directory belongs to."""
        if name := owner_of(path, self.units):
            return name
        raise ValueError(f"{path} belongs to no unit of the run")

    def missing(self, unit: Unit) -> list[str]:
        """Returns the units that this one reads and that are not up to date."""
        owners = dict.fromkeys(map(self.owner, unit.reads))
        return [name for name in owners if name not in self.done]

    def inputs(self, unit: Unit) -> dict[str, Any]:
        """Returns the inputs that decide a unit, all up to date, and their hash as the `key`."""
        reads = {}
        for path in unit.reads:
            owner = self.owner(path)
            reads[path] = manifests.content_below(path, owner, self.done[owner])
            if not reads[path]:
                raise ValueError(f"{unit.name} reads {path}, which {owner} did not write")
        files = {
            what: self._held.get(os.fspath(path)) or self.hashes.of_content(path)
            for what, path in unit.files.items()
        }
        parts = {"settings": dict(unit.settings), "reads": reads, "files": files}
        return {"key": content_hash({"name": unit.name, **parts}), **parts}

    def check(self, unit: Unit) -> bool:
        """Returns whether a unit is up to date, whole, and made from the current inputs."""
        folder = self.root / unit.name

        def key_of_whole() -> str:
            manifest = manifests.read_manifest(folder)
            if manifest is None or self.missing(unit):
                return ""
            is_current = manifest["key"] == self.inputs(unit)["key"]
            is_whole = is_current and not manifests.damaged_outputs(folder, manifest, self.hashes)
            return str(manifest["key"]) if is_whole else ""

        if key := processes.from_first(key_of_whole):
            self.done[unit.name] = _read_visible(folder, key)
        return bool(key)

    def survey(self) -> "Plan":
        """Checks all units, up to one that ends the run, and returns itself."""
        any(self.check(unit) and self.finding(unit) for unit in self.units.values())
        return self

    def finding(self, unit: Unit) -> str:
        """Returns the finding of an up-to-date unit, which ends the run; "" without."""
        if unit.name not in self.done:
            return ""
        return processes.from_first(lambda: artifacts.finding(unit.name).find(self.root) or "")

    def make(self, unit: Unit) -> None:
        """Runs a unit or resumes it from an interrupted run, and puts it in its place."""
        folder, inputs = making_folder(self.root, unit.name), dict[str, Any]()

        def begin() -> bool:
            """Returns whether the unit is still to run."""
            inputs.update(self.inputs(unit))
            self._held |= {os.fspath(path): inputs["files"][n] for n, path in unit.files.items()}
            return _start(folder, unit, inputs["key"])

        def finish() -> str:
            if (folder / STARTED).is_file():
                self._write_manifest(folder, inputs, seconds)
            self._install(unit, folder)
            return str(inputs["key"])

        seconds = _run_in(folder, unit) if processes.from_first(begin) else 0.0
        self.done[unit.name] = _read_visible(self.root / unit.name, processes.from_first(finish))

    def _write_manifest(
        self, folder: pathlib.Path, inputs: Mapping[str, Any], seconds: float
    ) -> None:
        """Writes the manifest of a unit that has run, in the folder in which it was made."""
        # With its seconds the result is kept, whatever ends the process before the manifest.
        started = {"seconds": seconds, **read_json(folder / STARTED, _STARTED)}
        write_json(folder / STARTED, started)
        outputs = {
            name: {"size": path.stat().st_size, "sha256": self.hashes.of_file(path)}
            for name in manifests.files_of(folder)
            for path in [folder / name]
        }
        made = {"seconds": started["seconds"], "versions": manifests.versions()}
        manifest = {"format": manifests.FORMAT, **inputs, **made, "outputs": outputs}
        write_json(folder / MANIFEST, manifest)
        shutil.rmtree(folder / RESUME, ignore_errors=True)
        (folder / STARTED).unlink()

    def _install(self, unit: Unit, made: pathlib.Path) -> None:
        """Puts a whole result in its place and then removes the earlier one."""
        final, old = self.root / unit.name, making_folder(self.root, f".replaced/{unit.name}")
        check_own(final)
        shutil.rmtree(old, ignore_errors=True)
        final.parent.mkdir(parents=True, exist_ok=True)
        if final.exists():
            old.parent.mkdir(parents=True, exist_ok=True)
            os.rename(final, old)
        os.rename(made, final)
        sync(final.parent)
        shutil.rmtree(old, ignore_errors=True)

    def restore(self) -> None:
        """Puts back the results that a killed run had moved; removes its files."""
        clear_left(self.root, is_deep=True)
        for unit in self.units.values():
            final, old = self.root / unit.name, making_folder(self.root, f".replaced/{unit.name}")
            if old.is_dir() and not final.exists():
                os.rename(old, final)
            shutil.rmtree(old, ignore_errors=True)

    def finish(self) -> None:
        """Stores the hashes of large files and removes empty folders."""
        self.hashes.save()
        for folder in sorted((self.root / _MAKING).rglob("*/"), reverse=True):
            with contextlib.suppress(OSError):  # it holds what a later run goes on from
                folder.rmdir()


def making_folder(root: pathlib.Path, name: str) -> pathlib.Path:
    """Returns the folder in which a unit is made before it takes its place."""
    return root / _MAKING / name


def _start(folder: pathlib.Path, unit: Unit, key: str) -> bool:
    """Prepares the folder in which a unit is made; returns whether the unit is still to run."""
    manifest = manifests.read_manifest(folder)
    if manifest is not None and manifest["key"] == key:
        return False
    place = folder / STARTED
    started = read_json(place, _STARTED) if place.is_file() else {}
    if started.get("key") == key and (unit.is_resumable or "seconds" in started):
        return "seconds" not in started
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    write_json(place, {"key": key})
    return True


def _run_in(folder: pathlib.Path, unit: Unit) -> float:
    """Makes a unit's result durable in its folder and returns its seconds.

    Processes other than the first one delete their files.
    """
    begin = time.monotonic()
    try:
        if unit.is_alone:
            processes.alone(lambda: unit.run(folder))
        else:
            with processes.own_folder(folder, shared=_TOGETHER) as own:
                unit.run(own)
    except Exception as error:
        if not unit.is_resumable and processes.is_first():
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError) and not error.filename:  # of a file that is open
            raise unwritten(folder, error) from error
        raise
    if not processes.is_first():
        return 0.0
    for left in folder.rglob(".*"):  # of a save that was killed
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    seconds = round(time.monotonic() - begin, 1)
    sync(*(path for path in (folder, *folder.rglob("*")) if path.is_dir() or path.is_file()))
    return seconds


def _read_visible(folder: pathlib.Path, key: str) -> Manifest:
    """Returns the manifest of a unit that the first process has made."""

    def read() -> Manifest:
        found = manifests.read_manifest(folder)
        if found is None or found["key"] != key:  # or half of an older state
            place = shown(str(folder), 160)
            raise refused("shared_workdir", place=place)
        return found

    return processes.when_visible(read)


def check_own(folder: pathlib.Path) -> None:
    """Raises a ValueError if a folder that would be replaced has files that no run made."""
    if not os.path.lexists(folder):
        return
    is_folder = folder.is_dir() and not folder.is_symlink()
    manifest = manifests.read_manifest(folder, any_version=True) if is_folder else None
    if manifest is None:
        name = shown(str(folder), 160)
        raise ValueError(f"{name} must be a folder that a run made, got another: move it away")
    foreign = [name for name in manifests.files_of(folder) if name not in manifest["outputs"]]
    if foreign:
        name, others = shown(str(folder), 120), some_of(foreign, 3)
        raise ValueError(f"{name} must hold only files of the run, got {others}: move these away")


def run_units(
    root: pathlib.Path,
    units: Sequence[Unit],
    *,
    stages: Sequence[str] = STAGES,
    on_start: Callable[[], None] = lambda: None,
) -> str:
    """Runs units of these stages that are not up to date; returns the finding that ends the run.

    Args:
      root: work directory.
      units: all units, each after those it reads; a line is printed for each.
      stages: the stages to run. Units that they read must be up to date or in these stages.
      on_start: function that is called after all checks, before the first unit runs.
    """

    def refuse(unit: Unit, missing: Sequence[str]) -> None:
        for name in missing:
            mend = f"add {plan.units[name].stage} to --stages"
            raise ValueError(f"{unit.name} reads {name}, which is missing or out of date: {mend}")

    plan = Plan(root, units)
    processes.alone(plan.restore)
    plan.survey()
    every, last = units, next(filter(plan.finding, units), units[-1])
    units = units[: units.index(last) + 1]
    asked = [unit for unit in units if unit.stage in stages]
    for unit in asked:
        refuse(unit, [n for n in plan.missing(unit) if plan.units[n].stage not in stages])
        if unit.name not in plan.done:
            processes.alone(functools.partial(check_own, root / unit.name))
    for line in processes.from_first(lambda: [*_announcement(plan, asked)]):
        print(line)
    processes.alone(on_start)
    # A made unit may change those that follow, so all are looked at again in turn.
    plan.done.clear()
    for place, unit in enumerate(units):
        if place and plan.finding(units[place - 1]):
            break
        is_done = plan.check(unit)
        if unit.stage not in stages:
            continue
        label = f"[{1 + asked.index(unit):{len(str(len(asked)))}}/{len(asked)}] {unit.name}"
        if is_done:
            print(f"{label}: up to date")
            continue
        refuse(unit, plan.missing(unit))
        print(f"{label} ...")
        plan.make(unit)
        print(f"{label}: done in {plan.done[unit.name]['seconds']:.1f} s")
    processes.alone(plan.finish)
    return next(filter(None, map(plan.finding, every)), "")


def _announcement(plan: Plan, asked: Sequence[Unit]) -> Iterator[str]:
    """Yields a line for each finished unit that will or may be made again, with its seconds."""
    for unit in asked:
        old = manifests.read_manifest(plan.root / unit.name, any_version=True)
        if unit.name in plan.done or old is None:
            continue
        waits = plan.missing(unit)
        is_own = old.get("format") == manifests.FORMAT
        took = f"took {old['seconds']:.1f} s" if is_own else "older version"
        when = f", if {waits[0]} changes" if waits else ""
        yield f"{'may' if waits else 'will'} be made again: {unit.name} ({took}{when})"
