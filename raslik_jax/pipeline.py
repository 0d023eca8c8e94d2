"""Runs units of work in order, each once: what is up to date is not run again.

A unit owns one folder of the work directory. It counts as done when its manifest is there, which
is written last; the manifest's key hashes the unit's settings and the keys of the units it reads,
so a changed setting makes exactly its own unit and what follows stale.
"""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from raslik_jax.config import STAGES, Config, content_hash, to_json

# Made anew for every run: they leave results beside their folder, and cost seconds.
_NEVER_SHARED = ("evaluate", "report")
_PACKAGES = ("raslik-jax", "jax", "flax", "optax", "numpy", "tensorstore", "tokenizers")


class Unit(NamedTuple):
    """One unit of work.

    Attributes:
      name: its folder below the work directory; the first part is its stage.
      inputs: names of the units whose results it reads.
      settings: all that decides its result beside the inputs, as JSON values.
      run: makes the result in the folder given.
      is_resumable: run goes on from what an interrupted run left in the folder.
    """

    name: str
    inputs: tuple[str, ...]
    settings: Mapping[str, Any]
    run: Callable[[pathlib.Path], None]
    is_resumable: bool = False

    @property
    def stage(self) -> str:
        """The stage this unit belongs to."""
        return self.name.split("/")[0]


def unit_keys(units: Sequence[Unit]) -> dict[str, str]:
    """Returns each unit's key, the hash of its settings and of the keys of its inputs."""
    keys: dict[str, str] = {}
    for unit in units:
        inputs = {name: keys[name] for name in unit.inputs}
        keys[unit.name] = content_hash({"settings": dict(unit.settings), "inputs": inputs})
    return keys


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes a JSON file whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n")
    partial.replace(path)


def read_json(path: pathlib.Path) -> Any:
    """Returns the value of a JSON file.

    Raises:
      ValueError: the file is missing or is no JSON.
    """
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path} wanted, it is not there: run the stage that makes it") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON ({error}): delete it and run again") from None


def is_done(root: pathlib.Path, unit: Unit, key: str) -> bool:
    """Returns whether a unit's result is there, whole, and made with this key."""
    path = root / unit.name / "manifest.json"
    if not path.is_file():
        return False
    manifest = read_json(path)
    return manifest["key"] == key and all(
        (path.parent / name).is_file() and (path.parent / name).stat().st_size == size
        for name, size in manifest["outputs"].items()
    )


def _run_unit(root: pathlib.Path, unit: Unit, keys: Mapping[str, str]) -> None:
    """Runs one unit in its folder and writes its manifest last."""
    folder, key = root / unit.name, keys[unit.name]
    started = folder / "started.json"
    goes_on = unit.is_resumable and started.is_file() and read_json(started)["key"] == key
    if folder.exists() and not goes_on:
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").unlink(missing_ok=True)
    write_json(started, {"key": key})
    unit.run(folder)
    started.unlink()
    outputs = {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = {
        "key": key,
        "settings": dict(unit.settings),
        "inputs": {name: keys[name] for name in unit.inputs},
        "outputs": outputs,
    }
    write_json(folder / "manifest.json", manifest)


def _link_folder(source: pathlib.Path, target: pathlib.Path) -> None:
    """Makes target a copy of source, whole or not at all, by hard links where they work.

    Finished results are never written in place, only replaced, so that the two stay independent.
    """

    def link(old: str, new: str) -> str:
        try:
            os.link(old, new)
        except OSError:  # another file system, or one without links
            shutil.copy2(old, new)
        return new

    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, partial, copy_function=link)
    if target.exists():
        shutil.rmtree(target)
    partial.rename(target)


def run_units(
    root: pathlib.Path,
    units: Sequence[Unit],
    *,
    stages: Sequence[str] = STAGES,
    shared: pathlib.Path | None = None,
    log: Callable[[str], None] = print,
) -> None:
    """Runs the units of these stages that are not up to date, in order.

    Args:
      root: work directory.
      units: all units, each after those it reads.
      stages: stages to run; what they read must be up to date already or run here too.
      shared: folder in which runs share units of the same name and key; what is there is taken
        and not made, what is made here is left there.
      log: receives a line per unit.

    Raises:
      ValueError: an input of a wanted unit is neither up to date nor about to be made.
    """
    keys = unit_keys(units)
    done = {unit.name: is_done(root, unit, keys[unit.name]) for unit in units}
    for unit in units:
        if unit.stage in stages:
            continue
        wanted_by = [u.name for u in units if u.stage in stages and unit.name in u.inputs]
        if wanted_by and not done[unit.name]:
            raise ValueError(
                f"stage {unit.stage} wanted by {wanted_by[0]}, its result {unit.name} is missing "
                f"or out of date: add {unit.stage} to --stages"
            )
    wanted = [unit for unit in units if unit.stage in stages]
    for number, unit in enumerate(wanted, start=1):
        label = f"[{number:{len(str(len(wanted)))}}/{len(wanted)}] {unit.name}"
        if done[unit.name]:
            log(f"{label}: up to date")
            continue
        key, place = keys[unit.name], None
        if shared is not None and unit.stage not in _NEVER_SHARED:
            place = shared / key
            if is_done(place, unit, key):
                _link_folder(place / unit.name, root / unit.name)
                log(f"{label}: taken from another run")
                continue
        log(f"{label} ...")
        start = time.monotonic()
        _run_unit(root, unit, keys)
        log(f"{label}: done in {time.monotonic() - start:.1f} s")
        if place is not None:
            _link_folder(root / unit.name, place / unit.name)


def differing_fields(old: Any, new: Any, prefix: str = "") -> list[str]:
    """Returns one `field: old -> new` line per value that two nested configs do not share."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            line
            for name in sorted(old.keys() | new.keys())
            for line in differing_fields(old.get(name), new.get(name), f"{prefix}{name}.")
        ]
    return [] if old == new else [f"{prefix.rstrip('.')}: {old!r} -> {new!r}"]


def _completed(value: Any, defaults: Any) -> Any:
    """Returns a nested config with the defaults of the fields that it does not have."""
    if not isinstance(value, dict) or not isinstance(defaults, dict):
        return value
    filled = {name: _completed(item, defaults.get(name)) for name, item in value.items()}
    return {**defaults, **filled}


@contextlib.contextmanager
def open_workdir(root: pathlib.Path, config: Config, *, update: bool) -> Iterator[None]:
    """Claims a work directory for one run, and records the run's config and versions in it.

    Args:
      root: work directory, made where it is missing.
      config: settings of the run.
      update: take over a directory of another configuration; what changed is made again.

    Raises:
      ValueError: the directory belongs to another configuration, is in use, or is a file.
    """
    if root.exists() and not root.is_dir():
        raise ValueError(f"a work directory wanted, {root} is a file: choose another --workdir")
    recorded, values = root / "config.json", to_json(config)
    if recorded.is_file() and not update:
        # A field that came later is at its default in a run of before.
        known = _completed(read_json(recorded), to_json(Config()))
        differing = differing_fields(known, values)
        if differing:
            raise ValueError(
                f"{root} holds a run of another configuration ({'; '.join(differing[:5])}"
                f"{f'; and {len(differing) - 5} more' if len(differing) > 5 else ''}): choose "
                "another --workdir, or pass --update to make again only what changed"
            )
    root.mkdir(parents=True, exist_ok=True)
    with open(root / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{root} is in use by another run: wait for it, or choose another --workdir"
            ) from None
        write_json(recorded, values)
        write_json(root / "versions.json", versions())
        yield


def versions() -> dict[str, str]:
    """Returns the versions of what a result may depend on; imports none of it."""
    found = {"python": platform.python_version(), "machine": platform.platform()}
    found["cpus"] = str(os.cpu_count())
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
