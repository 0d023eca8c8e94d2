"""Runs units of work in order, each once: what is up to date is not run again.

A unit owns one folder of the work directory. It is made below `.making` and takes its place by a
rename when it is whole, so that the result that it replaces stays until then. Its manifest.json
lists every file with its SHA-256, and its key: the hash of its settings, of the files outside that
it reads, and of what it reads of earlier units, all by content. An earlier unit that is made again
with the same bytes makes nothing after it stale.
"""

import contextlib
import fcntl
import importlib.metadata
import os
import pathlib
import platform
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from raslik_jax.config import STAGES, Config, content_hash, to_json
from raslik_jax.files import hash_file, read_json, sync_folder, write_json
from raslik_jax.messages import shown, some_of

_FORMAT = 2
_MANIFEST, _STARTED = "manifest.json", "started.json"
# What an interrupted training goes on from: no part of the result.
RESUME = "resume"
_MAKING = ".making"
_PACKAGES = ("raslik-jax", "jax", "flax", "optax", "numpy", "tensorstore", "tokenizers")
_SHAPE = {
    "key": str,
    "settings": dict,
    "reads": {str: str},
    "files": {str: str},
    "outputs": {str: {"size": int, "sha256": str}},
    "seconds": float,
}
# Above it a file that kept its size, time and inode is not read again at every start.
_LARGE = 2**26
# A partial folder of shared units this old was left by a process that is gone.
_ABANDONED_SECONDS = 24 * 3600.0

Manifest = Mapping[str, Any]


class Unit(NamedTuple):
    """One unit of work.

    Attributes:
      name: its folder below the work directory; the first part is its stage.
      reads: what it reads of earlier units: files or folders below the work directory.
      settings: all that decides its result beside what it reads, as JSON values.
      run: makes the result in the folder given.
      files: the files or folders outside the work directory that it reads, by what they are.
      is_resumable: run goes on from what an interrupted run left in the folder.
      is_shared: runs of the same key may take its result from each other.
    """

    name: str
    reads: tuple[str, ...]
    settings: Mapping[str, Any]
    run: Callable[[pathlib.Path], None]
    files: Mapping[str, str | os.PathLike[str]] = {}
    is_resumable: bool = False
    is_shared: bool = True

    @property
    def stage(self) -> str:
        """The stage this unit belongs to."""
        return self.name.split("/")[0]


class Key(NamedTuple):
    """What a unit's result is decided by.

    Attributes:
      value: hash of all of it.
      reads: content of what it reads of earlier units, by path.
      files: content of the files outside, by what they are.
    """

    value: str
    reads: dict[str, str]
    files: dict[str, str]


class Hashes:
    """SHA-256 of files; that of a large file is kept on disk by its size, time and inode."""

    def __init__(self, path: pathlib.Path | None = None):
        """Reads what is known already.

        Args:
          path: where the hashes of large files are kept; None keeps them nowhere.
        """
        self._path = path
        self._known: dict[str, list[Any]] = {}
        if path and path.is_file():
            with contextlib.suppress(ValueError):  # it only saves time
                self._known = read_json(path, {str: list})
        self._stored = dict(self._known)
        self._seen: dict[str, list[Any]] = {}

    def of_file(self, path: str | os.PathLike[str]) -> str:
        """Returns the hash of a file's bytes; reads it unless it is known and unchanged."""
        found = os.stat(path)
        # Under another name the file is the same.
        name, identity = f"{found.st_dev}-{found.st_ino}", [found.st_size, found.st_mtime_ns]
        known = self._seen.get(name)
        if known is None and found.st_size > _LARGE:
            known = self._known.get(name)
        if known is None or known[:2] != identity:
            known = [*identity, hash_file(path)]
        self._seen[name] = known
        if found.st_size > _LARGE:
            self._known[name] = known
        return known[2]

    def of_content(self, path: str | os.PathLike[str]) -> str:
        """Returns the hash of a file, or of the names and contents of all files of a folder.

        Raises:
          ValueError: there is no such file or folder.
        """
        folder = pathlib.Path(path)
        if not folder.exists():
            raise ValueError(f"no file or folder {shown(str(path), 200)}: correct the path")
        if not folder.is_dir():
            return self.of_file(folder)
        return content_hash(
            {name: self.of_file(folder / name) for name in _files_of(folder) if name[0] != "."}
        )

    def save(self) -> None:
        """Writes the hashes of large files, if there are new ones."""
        if self._path and self._known != self._stored:
            self._path.parent.mkdir(exist_ok=True)
            write_json(self._path, self._known)
            self._stored = dict(self._known)


class Plan:
    """The units of a run beside what its work directory holds.

    Attributes:
      units: by name, each after those it reads.
      done: manifests of the units found up to date so far, by name.
    """

    def __init__(self, root: pathlib.Path, units: Sequence[Unit], hashes: Hashes | None = None):
        self.root = root
        self.units = {unit.name: unit for unit in units}
        self.done: dict[str, Manifest] = {}
        self._hashes = hashes or Hashes(root / _MAKING / "hashes.json")

    def owner(self, path: str) -> str:
        """Returns the unit that a path below the work directory belongs to."""
        for name in self.units:
            if path == name or path.startswith(f"{name}/"):
                return name
        raise ValueError(f"{path} belongs to no unit of the run")

    def missing(self, unit: Unit) -> list[str]:
        """Returns the units that this one reads and that are not up to date."""
        owners = dict.fromkeys(map(self.owner, unit.reads))
        return [name for name in owners if name not in self.done]

    def key(self, unit: Unit) -> Key:
        """Returns the key of a unit of which all that it reads is up to date.

        Raises:
          ValueError: a file that it reads is missing.
        """
        reads = {}
        for path in unit.reads:
            owner = self.owner(path)
            reads[path] = _content(path, owner, self.done[owner])
            if not reads[path]:
                raise ValueError(f"{unit.name} reads {path}, which {owner} has not left")
        files = {what: self._hashes.of_content(path) for what, path in unit.files.items()}
        parts = {"settings": dict(unit.settings), "reads": reads, "files": files}
        return Key(content_hash({"name": unit.name, **parts}), reads, files)

    def check(self, unit: Unit) -> bool:
        """Returns whether a unit is up to date, whole, and made from what is there now."""
        manifest = read_manifest(self.root / unit.name)
        if manifest is None or manifest.get("format") != _FORMAT or self.missing(unit):
            return False
        if manifest["key"] != self.key(unit).value:
            return False
        if damaged_outputs(self.root / unit.name, manifest, self._hashes):
            return False
        self.done[unit.name] = manifest
        return True

    def survey(self) -> "Plan":
        """Checks all units; returns itself."""
        for unit in self.units.values():
            self.check(unit)
        return self

    def make(self, unit: Unit) -> None:
        """Runs a unit, or takes up what an interrupted run left of it, and puts it in its place."""
        key = self.key(unit)
        folder = start_unit(self.root, unit, key.value)
        if (folder / _STARTED).is_file():
            started = read_json(folder / _STARTED, {"key": str, "seconds?": float})
            if "seconds" not in started:
                begin = time.monotonic()
                try:
                    unit.run(folder)
                except Exception:
                    if not unit.is_resumable:
                        shutil.rmtree(folder, ignore_errors=True)
                    raise
                for left in folder.rglob(".*"):  # of a save that was killed
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
                started["seconds"] = round(time.monotonic() - begin, 1)
                _sync_tree(folder)
                # From here on the result is kept whatever happens: what follows takes seconds.
                write_json(folder / _STARTED, started)
            names = [name for name in _files_of(folder) if not _is_note(name)]
            manifest = {
                "format": _FORMAT,
                "key": key.value,
                "settings": dict(unit.settings),
                "reads": key.reads,
                "files": key.files,
                "seconds": started["seconds"],
                "versions": versions(),
                "outputs": {
                    name: {
                        "size": (folder / name).stat().st_size,
                        "sha256": self._hashes.of_file(folder / name),
                    }
                    for name in names
                },
            }
            write_json(folder / _MANIFEST, manifest)
            shutil.rmtree(folder / RESUME, ignore_errors=True)
            (folder / _STARTED).unlink()
        self._install(unit, folder)

    def _install(self, unit: Unit, made: pathlib.Path) -> None:
        """Puts a whole result in its place; the one that was there goes when the new one stands."""
        final, old = self.root / unit.name, _replaced(self.root, unit)
        check_own(final)
        shutil.rmtree(old, ignore_errors=True)
        final.parent.mkdir(parents=True, exist_ok=True)
        if final.exists():
            old.parent.mkdir(parents=True, exist_ok=True)
            os.rename(final, old)
        os.rename(made, final)
        sync_folder(final.parent)
        shutil.rmtree(old, ignore_errors=True)
        self.done[unit.name] = read_json(final / _MANIFEST, _SHAPE)

    def restore(self) -> None:
        """Puts back the results that an interrupted run had taken from their place."""
        for unit in self.units.values():
            final, old = self.root / unit.name, _replaced(self.root, unit)
            if old.is_dir() and not final.exists():
                os.rename(old, final)
            shutil.rmtree(old, ignore_errors=True)

    def take(self, unit: Unit, shared: pathlib.Path) -> bool:
        """Takes a unit that another run of the same key left; returns whether it was whole."""
        key = self.key(unit).value
        taken = self.root / _MAKING / ".taken" / unit.name
        shutil.rmtree(taken, ignore_errors=True)
        if not _copy_whole(shared / key, taken, key):
            return False
        shutil.rmtree(making_folder(self.root, unit.name), ignore_errors=True)
        self._install(unit, taken)
        return True

    def publish(self, unit: Unit, shared: pathlib.Path) -> None:
        """Leaves a unit for other runs, unless another one was first."""
        key = self.done[unit.name]["key"]
        shared.mkdir(parents=True, exist_ok=True)
        for left in shared.glob(".*.partial"):
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > _ABANDONED_SECONDS:
                    shutil.rmtree(left, ignore_errors=True)
        place = shared / key
        if _is_whole(place, key):
            return
        own = f".{key}.{socket.gethostname()}.{os.getpid()}"
        partial, damaged = shared / f"{own}.partial", shared / f"{own}.damaged.partial"
        shutil.rmtree(partial, ignore_errors=True)
        if not _copy_whole(self.root / unit.name, partial, key):
            return
        # A rename never replaces a folder that holds something.
        with contextlib.suppress(OSError):
            os.rename(partial, place)
        if partial.exists() and not _is_whole(place, key):
            with contextlib.suppress(OSError):
                os.rename(place, damaged)
                os.rename(partial, place)
        for left in (partial, damaged):
            shutil.rmtree(left, ignore_errors=True)

    def save_hashes(self) -> None:
        """Keeps the hashes of large files for the next start."""
        self._hashes.save()


def making_folder(root: pathlib.Path, name: str) -> pathlib.Path:
    """Returns where a unit of a work directory is made, before it takes its place."""
    return root / _MAKING / name


def _replaced(root: pathlib.Path, unit: Unit) -> pathlib.Path:
    return root / _MAKING / ".replaced" / unit.name


def start_unit(root: pathlib.Path, unit: Unit, key: str) -> pathlib.Path:
    """Returns the folder in which a unit is made: as it was left, if it can go on with this key."""
    folder = making_folder(root, unit.name)
    manifest = read_manifest(folder)
    if manifest is not None and manifest["key"] == key:
        return folder
    if (folder / _STARTED).is_file():
        started = read_json(folder / _STARTED, {"key": str, "seconds?": float})
        if started["key"] == key and (unit.is_resumable or "seconds" in started):
            return folder
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    write_json(folder / _STARTED, {"key": key})
    return folder


def join_unit(root: pathlib.Path, unit: Unit, key: str) -> pathlib.Path:
    """Returns the folder in which several processes make a unit together; removes nothing.

    Raises:
      ValueError: it is being made with another key.
    """
    folder = making_folder(root, unit.name)
    folder.mkdir(parents=True, exist_ok=True)
    started = folder / _STARTED
    # Of processes that begin together each writes the same note: the partial ones of others, which
    # are hidden, are no result.
    if not started.is_file() and all(path.name[0] == "." for path in folder.iterdir()):
        write_json(started, {"key": key})
    if not started.is_file() or read_json(started, {"key": str})["key"] != key:
        raise ValueError(
            f"{folder} holds a result of other settings: run run.py, which makes it again"
        )
    return folder


def reopen_unit(root: pathlib.Path, name: str) -> pathlib.Path:
    """Takes a finished unit out of its place, so that the next run goes on making it."""
    folder, made = root / name, making_folder(root, name)
    manifest = read_manifest(folder)
    if manifest is None:
        return folder
    shutil.rmtree(made, ignore_errors=True)
    made.parent.mkdir(parents=True, exist_ok=True)
    os.rename(folder, made)
    write_json(made / _STARTED, {"key": manifest["key"]})
    (made / _MANIFEST).unlink()
    return made


def read_manifest(folder: pathlib.Path) -> Manifest | None:
    """Returns the manifest of a unit's folder, None where it has none.

    Raises:
      ValueError: it is damaged.
    """
    path = folder / _MANIFEST
    if not path.is_file():
        return None
    mend = f"move or delete the folder {shown(folder.name)}, then run again"
    found = read_json(path, {"key": str, "outputs": dict}, mend=mend)
    return read_json(path, _SHAPE, mend=mend) if found.get("format") == _FORMAT else found


def damaged_outputs(folder: pathlib.Path, manifest: Manifest, hashes: Hashes) -> list[str]:
    """Returns the files of a unit that are missing or not as its manifest lists them."""

    def is_as_listed(name: str, listed: Mapping[str, Any]) -> bool:
        path = folder / name
        return (
            path.is_file()
            and path.stat().st_size == listed["size"]
            and hashes.of_file(path) == listed["sha256"]
        )

    return [name for name, listed in manifest["outputs"].items() if not is_as_listed(name, listed)]


def check_own(folder: pathlib.Path) -> None:
    """Raises a ValueError where a folder that is to be replaced holds what no run made."""
    if not os.path.lexists(folder):
        return
    is_folder = folder.is_dir() and not folder.is_symlink()
    manifest = read_manifest(folder) if is_folder else None
    if manifest is None:
        raise ValueError(
            f"{shown(str(folder), 160)} must be a folder that a run made, it has no manifest.json: "
            "move it away, or choose another --workdir"
        )
    foreign = [
        name for name in _files_of(folder) if name not in manifest["outputs"] and not _is_note(name)
    ]
    if foreign:
        raise ValueError(
            f"{shown(str(folder), 120)} must hold only what the run made to be replaced, got "
            f"{some_of(foreign, 3)}: move that away"
        )


def _is_note(name: str) -> bool:
    """Returns whether a file of a unit's folder is about the result and no part of it."""
    return name in (_MANIFEST, _STARTED) or name.startswith(f"{RESUME}/")


def _files_of(folder: pathlib.Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _content(path: str, owner: str, manifest: Manifest) -> str:
    """Returns the hash of the names and contents below a path of a unit, "" where none is."""
    inner = path.removeprefix(owner).lstrip("/")
    found = {
        name: listed["sha256"]
        for name, listed in manifest["outputs"].items()
        if inner in ("", name) or name.startswith(f"{inner}/")
    }
    return content_hash(found) if found else ""


def _sync_tree(folder: pathlib.Path) -> None:
    """Makes all files of a folder durable."""
    for path in (folder, *folder.rglob("*")):
        if path.is_dir() or path.is_file():
            sync_folder(path)


def _is_whole(folder: pathlib.Path, key: str) -> bool:
    try:
        manifest = read_manifest(folder)
        return (
            manifest is not None
            and manifest["key"] == key
            and not damaged_outputs(folder, manifest, Hashes())
        )
    except (OSError, ValueError):  # another process is replacing it
        return False


def _copy_whole(source: pathlib.Path, target: pathlib.Path, key: str) -> bool:
    """Copies a finished unit, by hard links where they work; returns whether it came out whole.

    Finished results are never written in place, only replaced, so that the two stay independent.
    """

    def link(old: str, new: str) -> str:
        try:
            os.link(old, new)
        except OSError:  # another file system, or one without links
            shutil.copy2(old, new)
        return new

    if not source.is_dir():
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):  # it may be replaced meanwhile; shutil.Error is one
        shutil.copytree(source, target, copy_function=link)
    if _is_whole(target, key):
        return True
    shutil.rmtree(target, ignore_errors=True)
    return False


def run_units(
    root: pathlib.Path,
    units: Sequence[Unit],
    *,
    stages: Sequence[str] = STAGES,
    shared: pathlib.Path | None = None,
    log: Callable[[str], None] = print,
    on_start: Callable[[], None] = lambda: None,
) -> None:
    """Runs the units of these stages that are not up to date, in order.

    Args:
      root: work directory.
      units: all units, each after those it reads.
      stages: stages to run; what they read must be up to date already or run here too.
      shared: folder in which runs share units of the same name and key; what is there is taken
        and not made, what is made here is left there.
      log: receives a line per unit.
      on_start: called when nothing is left to refuse, before the first unit runs.

    Raises:
      ValueError: an input of a unit is neither up to date nor about to be made, or the place of a
        unit is taken by something that no run made.
    """
    plan = Plan(root, units)
    plan.restore()
    plan.survey()
    wanted = [unit for unit in units if unit.stage in stages]
    for unit in wanted:
        for name in plan.missing(unit):
            if plan.units[name].stage not in stages:
                raise ValueError(_lacks(plan, unit, name))
        if unit.name not in plan.done:
            check_own(root / unit.name)
    for line in announcement(plan, wanted):
        log(line)
    on_start()
    # What is made may change what follows, so that everything is looked at again in turn.
    plan.done.clear()
    number = 0
    for unit in units:
        is_done = plan.check(unit)
        if unit.stage not in stages:
            continue
        number += 1
        label = f"[{number:{len(str(len(wanted)))}}/{len(wanted)}] {unit.name}"
        if is_done:
            log(f"{label}: up to date")
            continue
        if plan.missing(unit):
            raise ValueError(_lacks(plan, unit, plan.missing(unit)[0]))
        place = shared if unit.is_shared else None
        if place is not None and plan.take(unit, place):
            log(f"{label}: taken from another run")
            continue
        log(f"{label} ...")
        plan.make(unit)
        log(f"{label}: done in {plan.done[unit.name]['seconds']:.1f} s")
        if place is not None:
            plan.publish(unit, place)
    plan.save_hashes()
    for folder in sorted((root / _MAKING).rglob("*/"), reverse=True):
        with contextlib.suppress(OSError):  # it holds what a later run goes on from
            folder.rmdir()


def _lacks(plan: Plan, unit: Unit, name: str) -> str:
    stage = plan.units[name].stage
    return (
        f"{unit.name} reads the result {name}, which is missing or out of date: add {stage} to "
        "--stages"
    )


def announcement(plan: Plan, wanted: Sequence[Unit]) -> Iterator[str]:
    """Yields a line for each finished unit that will or may be made again, and what it took."""
    for unit in wanted:
        manifest = read_manifest(plan.root / unit.name)
        if manifest is None or unit.name in plan.done:
            continue
        waits = plan.missing(unit)
        took = f"took {manifest['seconds']:.1f} s" if "seconds" in manifest else "older version"
        when = f", if {waits[0]} changes" if waits else ""
        yield f"{'may' if waits else 'will'} be made again: {unit.name} ({took}{when})"


def finished_units(root: pathlib.Path) -> list[str]:
    """Returns the names of the units that a work directory holds, whatever their settings."""
    folders = [path for path in sorted(root.glob("*")) if path.is_dir() and path.name[0] != "."]
    found = []
    for folder in folders:
        inner = [folder] if (folder / _MANIFEST).is_file() else sorted(folder.glob("*/"))
        found += [str(f.relative_to(root)) for f in inner if (f / _MANIFEST).is_file()]
    return found


def verify(root: pathlib.Path) -> list[str]:
    """Returns what is wrong with the results of a work directory, a line each; reads every byte.

    Raises:
      ValueError: there are no results.
    """
    names, hashes, found = finished_units(root), Hashes(), []
    if not names:
        raise ValueError(f"{shown(str(root), 200)} must hold results of a run: correct --workdir")
    for name in names:
        manifest = read_manifest(root / name)
        if manifest is None or manifest.get("format") != _FORMAT:
            found.append(f"{name}: made by an older version")
            continue
        damaged = damaged_outputs(root / name, manifest, hashes)
        found += [f"{name}/{file}: missing or damaged" for file in damaged]
        found += [
            f"{name}: made from another {path} than is there"
            for path in _changed_reads(root, manifest)
        ]
    return found


def _changed_reads(root: pathlib.Path, manifest: Manifest) -> list[str]:
    """Returns what a unit read of earlier ones that is another now; what is gone is not."""
    changed = []
    for path, recorded in manifest.get("reads", {}).items():
        owner = _owner_on_disk(root, path)
        upstream = read_manifest(root / owner) if owner else None
        if upstream is not None and (
            upstream.get("format") != _FORMAT or _content(path, owner, upstream) != recorded
        ):
            changed.append(path)
    return changed


def _owner_on_disk(root: pathlib.Path, path: str) -> str:
    parts = path.split("/")
    names = ("/".join(parts[:count]) for count in range(1, len(parts) + 1))
    return next((name for name in names if (root / name / _MANIFEST).is_file()), "")


def check_whole(root: pathlib.Path, name: str) -> Manifest:
    """Returns the manifest of a finished unit whose files are as it lists them.

    Raises:
      ValueError: the unit is missing or damaged, or an older version made it.
    """
    manifest, shown_root = read_manifest(root / name), shown(str(root), 120)
    mend = "run experiments/run.py on it to the end"
    if manifest is None or manifest.get("format") != _FORMAT:
        raise ValueError(f"{shown_root} must hold a finished {name} of this version: {mend}")
    damaged = damaged_outputs(root / name, manifest, Hashes())
    if damaged:
        raise ValueError(f"{some_of(damaged, 2)} of {name} in {shown_root} is damaged: {mend}")
    return manifest


def check_finished(root: pathlib.Path, name: str) -> Manifest:
    """Returns the manifest of a unit that was made from the results that are there now.

    The files of the unit and of those that it reads are compared byte by byte, those further back
    by their manifests; a unit whose folder was deleted contradicts nothing.

    Raises:
      ValueError: as `check_whole`; something has been made again since.
    """
    manifest = check_whole(root, name)
    seen, open_names = {name}, [name]
    while open_names:
        reader = open_names.pop()
        found = read_manifest(root / reader)
        if found is None:
            continue
        for path in _changed_reads(root, found):
            raise ValueError(
                f"{path} of {shown(str(root), 120)} has changed since {reader} read it: run "
                "experiments/run.py on it to the end"
            )
        owners = {_owner_on_disk(root, path) for path in found.get("reads", {})} - seen - {""}
        for owner in sorted(owners if reader == name else ()):
            check_whole(root, owner)
        seen |= owners
        open_names += sorted(owners)
    return manifest


def differing_fields(old: Any, new: Any, prefix: str = "") -> list[str]:
    """Returns one `field: old -> new` line per value that two nested configs do not share."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            line
            for name in sorted(old.keys() | new.keys())
            for line in differing_fields(old.get(name), new.get(name), f"{prefix}{name}.")
        ]
    return [] if old == new else [f"{prefix.rstrip('.')}: {old!r} -> {new!r}"]


@contextlib.contextmanager
def open_workdir(
    root: pathlib.Path, config: Config, *, update: bool
) -> Iterator[Callable[[], None]]:
    """Claims a work directory for one run.

    Args:
      root: work directory, made where it is missing; left as it was if the run is refused before
        it records anything.
      config: settings of the run.
      update: take over a directory of another configuration; what changed is made again.

    Yields:
      A function that records the run's config and versions, to be called when the first unit runs.

    Raises:
      ValueError: the directory belongs to another configuration, is in use, or is a file.
    """
    if root.exists() and not root.is_dir():
        raise ValueError(f"--workdir must be a folder, {shown(str(root), 200)} is a file")
    made = [path for path in (root, *root.parents) if not path.exists()]
    root.mkdir(parents=True, exist_ok=True)
    try:
        with open(root / ".lock", "w", encoding="utf-8") as lock:
            _lock(lock, root)
            _check_config(root, config, update=update)
            yield lambda: _record(root, config)
    finally:
        # Nothing was recorded: nothing stays.
        if made and [path.name for path in root.iterdir()] == [".lock"]:
            (root / ".lock").unlink(missing_ok=True)
            for path in made:
                with contextlib.suppress(OSError):
                    path.rmdir()


def _lock(lock: Any, root: pathlib.Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = os.fstat(lock.fileno()).st_ino == (root / ".lock").stat().st_ino
    except OSError:
        is_ours = False
    if not is_ours:
        raise ValueError(
            f"{shown(str(root), 160)} is in use by another run: wait for it, or choose another "
            "--workdir"
        )


def _check_config(root: pathlib.Path, config: Config, *, update: bool) -> None:
    """Raises a ValueError where a work directory holds results of another configuration."""
    recorded = root / "config.json"
    if update or not recorded.is_file() or not finished_units(root):
        return
    differing = differing_fields(read_json(recorded, dict), to_json(config))
    if differing:
        raise ValueError(
            f"{shown(str(root), 100)} holds a run of another configuration "
            f"({'; '.join(differing[:5])}"
            f"{f'; and {len(differing) - 5} more' if len(differing) > 5 else ''}): choose "
            "another --workdir, or pass --update to make again only what changed"
        )


def _record(root: pathlib.Path, config: Config) -> None:
    write_json(root / "config.json", to_json(config))
    write_json(root / "versions.json", versions())


def versions() -> dict[str, str]:
    """Returns the versions of what a result may depend on; imports none of it."""
    found = {"python": platform.python_version(), "machine": platform.platform()}
    # Products are split by the cores there are, and so rounded otherwise.
    used = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found["cpus"] = f"{used} of {os.cpu_count()}"
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
