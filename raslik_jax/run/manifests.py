"""The content of a work directory: manifests of its units, and whether all files match them.

Each unit owns a folder. Its manifest.json lists every file with its SHA-256 and the result's
inputs: settings, files outside, and files of earlier units, all by content.
"""

import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import os
import pathlib
import platform
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from raslik_jax.base import machine
from raslik_jax.base.files import (
    RESUME,
    check_shape,
    hash_file,
    is_temporary,
    read_json,
    write_json,
)
from raslik_jax.base.messages import shown, some_of

FORMAT = 3
MANIFEST, STARTED = "manifest.json", "started.json"
# The folder of an index in that of its unit; an index has a manifest of its own.
INDEX = "index"
_PACKAGES = ("raslik-jax", "jax", "flax", "optax", "numpy", "tensorstore", "tokenizers")
_TEXTS = {str: str}
_SHAPE: dict[str, Any] = {
    "key": str,
    "settings": dict,
    "reads": _TEXTS,
    "files": _TEXTS,
    "seconds": float,
}
_SHAPE |= {"outputs": {str: {"size": int, "sha256": str}}}
# Above it a file that kept its size, time and inode is not read again at every start.
_LARGE = 2**26
_RUN = "finish it by raslik run --flagfile=WORKDIR/run.flags"

Manifest = Mapping[str, Any]


def content_hash(value: Mapping[str, Any]) -> str:
    """Returns 16 hex digits of the SHA-256 of a value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Hashes:
    """SHA-256 of files; that of a large file is stored by its size, time and inode."""

    def __init__(self, path: pathlib.Path | None = None):
        self._path = path
        self._known: dict[str, list[Any]] = {}
        if path and path.is_file():
            with contextlib.suppress(ValueError):  # it only saves time
                self._known = read_json(path, {str: list})

    def of_file(self, path: str | os.PathLike[str]) -> str:
        """Returns the hash of a file's bytes; reads it unless it is known and unchanged."""
        found = os.stat(path)
        # Under another name the file is the same.
        name, identity = f"{found.st_dev}-{found.st_ino}", [found.st_size, found.st_mtime_ns]
        if self._known.get(name, [])[:2] != identity:
            self._known[name] = [*identity, hash_file(path)]
        return self._known[name][2]

    def of_content(self, path: str | os.PathLike[str]) -> str:
        """Returns the hash of a file or of all files of a folder; of a model those at its top."""
        folder = pathlib.Path(path)
        if not folder.exists():
            raise ValueError(f"no file or folder {shown(str(path), 200)}: correct the path")
        if not folder.is_dir():
            return self.of_file(folder)
        found = folder.iterdir() if (folder / "config.json").is_file() else folder.rglob("*")
        files = {str(p.relative_to(folder)): p for p in found if p.is_file()}
        return content_hash({n: self.of_file(p) for n, p in files.items() if n[0] != "."})

    def save(self) -> None:
        """Writes the hashes of large files."""
        large = {name: known for name, known in self._known.items() if known[0] > _LARGE}
        if self._path and large:
            self._path.parent.mkdir(exist_ok=True)
            write_json(self._path, large)


def files_of(folder: pathlib.Path) -> list[str]:
    """Returns the files below a folder by their paths in it, without a unit's notes."""
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    notes = (MANIFEST, STARTED)
    kept = (n for n in names if n not in notes and not n.startswith(f"{RESUME}/"))
    return sorted(name for name in kept if not is_temporary(name))


def read_manifest(folder: pathlib.Path, *, any_version: bool = False) -> Manifest | None:
    """Returns the manifest of a unit's folder; None if it has none or one of another version.

    With `any_version` it also returns a manifest of another version. Only its `key` and `outputs`
    are certain.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    mend = f"restore it, or move the folder {shown(folder.name)} away, then run again"
    manifest = read_json(path, {"key": str, "outputs": dict}, mend=mend)
    if manifest.get("format") == FORMAT:
        check_shape(manifest, _SHAPE, shown(str(path), 160), mend=mend)
        return manifest
    return manifest if any_version else None


def damaged_outputs(folder: pathlib.Path, manifest: Manifest, hashes: Hashes) -> list[str]:
    """Returns the files of a unit that are missing or differ from its manifest."""
    return [
        name
        for name, listed in manifest["outputs"].items()
        if not (folder / name).is_file()
        or (folder / name).stat().st_size != listed["size"]
        or hashes.of_file(folder / name) != listed["sha256"]
    ]


def content_below(path: str, owner: str, manifest: Manifest) -> str:
    """Returns the hash of the names and contents below a path of a unit; "" if there is none."""
    inner = path.removeprefix(owner).lstrip("/")
    found = {
        name: listed["sha256"]
        for name, listed in manifest["outputs"].items()
        if inner in ("", name) or name.startswith(f"{inner}/")
    }
    return content_hash(found) if found else ""


def finished_units(root: pathlib.Path) -> list[str]:
    """Returns the names of the units in a work directory, for any settings."""
    found = (*root.glob(f"*/{MANIFEST}"), *root.glob(f"*/*/{MANIFEST}"))
    names = sorted(str(path.parent.relative_to(root)) for path in found)
    own = [name for name in names if name.rpartition("/")[0] not in names]
    return [name for name in own if name[0] != "." and not name.endswith(f"/{INDEX}")]


def lost_units(root: pathlib.Path, stages: Collection[str]) -> list[str]:
    """Returns the folders of stages that hold files but no manifest of a unit."""
    units, found = finished_units(root), dict[str, None]()
    for stage in stages:
        for name in files_of(root / stage):
            path, parts = f"{stage}/{name}", pathlib.PurePath(name).parts
            if not any(path.startswith(f"{unit}/") for unit in units):
                is_deep = len(parts) > 1 and any(one.startswith(f"{stage}/") for one in units)
                found[f"{stage}/{parts[0]}" if is_deep else stage] = None
    return [*found]


def verify(root: pathlib.Path) -> list[str]:
    """Returns the damage to the results of a work directory, a line each; reads every byte."""
    hashes, found = Hashes(), list[str]()
    for name in finished_units(root):
        try:
            manifest = read_manifest(root / name)
            changed = _changed_reads(root, manifest) if manifest else []
        except ValueError as error:  # a manifest is damaged, this one or one behind it
            found.append(str(error))
            continue
        if manifest is None:
            found.append(f"{name}: made by an older version")
            continue
        parts = {part: manifest[part] for part in ("settings", "reads", "files")}
        if content_hash({"name": name, **parts}) != manifest["key"]:
            found.append(f"{name}/{MANIFEST}: damaged")
        damaged = damaged_outputs(root / name, manifest, hashes)
        found += [f"{name}/{file}: missing or damaged" for file in damaged]
        found += [f"{name}: made from another version of {path}" for path in changed]
    return [*dict.fromkeys(found)]


def _changed_reads(root: pathlib.Path, manifest: Manifest) -> list[str]:
    """Returns the inputs of a unit that changed after it; a missing one did not change."""
    changed = []
    for path, recorded in manifest["reads"].items():
        owner = owner_on_disk(root, path)
        upstream = read_manifest(root / owner) if owner else None
        if owner and (upstream is None or content_below(path, owner, upstream) != recorded):
            changed.append(path)
    return changed


def owner_on_disk(root: pathlib.Path, path: str) -> str:
    """Returns the unit that a path of a work directory belongs to; "" if there is none."""
    names = itertools.accumulate(path.split("/"), "{}/{}".format)
    return next(
        (n for n in names if (root / n / MANIFEST).is_file() and not n.endswith(f"/{INDEX}")), ""
    )


def check_whole(root: pathlib.Path, name: str) -> Manifest:
    """Returns the manifest of a unit; refuses a missing, damaged or older one."""
    manifest, shown_root = read_manifest(root / name), shown(str(root), 120)
    if manifest is None:
        raise ValueError(f"{shown_root} must hold a finished {name} of this version: {_RUN}")
    damaged = damaged_outputs(root / name, manifest, Hashes())
    if damaged:
        raise ValueError(f"{some_of(damaged, 2)} of {name} in {shown_root} is damaged: {_RUN}")
    return manifest


def _changed_behind(root: pathlib.Path, name: str) -> Iterator[tuple[str, str]]:
    """Yields the inputs of a unit, or of units before it, that changed since, and their reader.

    It compares manifests. A unit whose folder was deleted does not count as a change.
    """
    names = [name]
    for reader in names:  # which grows by what it reads
        if found := read_manifest(root / reader):
            yield from ((path, reader) for path in _changed_reads(root, found))
            names += sorted({owner_on_disk(root, path) for path in found["reads"]} - {"", *names})


def check_finished(root: pathlib.Path, name: str) -> Manifest:
    """Returns the manifest of a unit; refuses a unit whose inputs changed since.

    The files of the unit and of its inputs are compared byte by byte. Units before these are
    compared by their manifests.
    """
    manifest = check_whole(root, name)
    for path, reader in _changed_behind(root, name):
        place = f"{path} of {shown(str(root), 120)}"
        raise ValueError(f"{place} has changed since {reader} read it: {_RUN}")
    for owner in sorted({owner_on_disk(root, path) for path in manifest["reads"]} - {"", name}):
        check_whole(root, owner)
    return manifest


def current_file(root: pathlib.Path, path: str) -> pathlib.Path | None:
    """Returns a file of a work directory; None if it is missing or made from earlier results.

    A unit that a run no longer needs is kept, also if its inputs have changed.
    """
    owner = owner_on_disk(root, path)
    if owner and (not read_manifest(root / owner) or any(_changed_behind(root, owner))):
        return None
    return root / path if (root / path).is_file() else None


def versions() -> dict[str, str]:
    """Returns the versions of the packages that a result may depend on; imports none of them."""
    found = {"python": platform.python_version(), "machine": platform.platform()}
    # Products are split by the cores there are, and so rounded otherwise.
    found["cpus"] = f"{machine.usable_cpus()} of {os.cpu_count()}"
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
