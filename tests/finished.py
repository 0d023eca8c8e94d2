"""Folders of made-up results as finished units of a work directory."""

import json
import pathlib
import types
from collections.abc import Mapping
from typing import Any

from raslik_jax import pipeline


def write_manifest(
    root: pathlib.Path,
    name: str,
    reads: tuple[str, ...] = (),
    files: Mapping[str, pathlib.Path] = types.MappingProxyType({}),
    **settings: Any,
) -> None:
    """Writes the manifest of a unit whose files lie in its folder, and whose inputs are finished.

    Args:
      root: the work directory.
      name: of the unit.
      reads: what it reads of earlier units.
      files: what it reads outside.
      **settings: its settings.
    """
    folder, hashes = root / name, pipeline.Hashes()
    folder.mkdir(parents=True, exist_ok=True)
    manifest: dict[str, Any] = {
        "format": 2,
        "key": f"key of {name}",
        "settings": settings,
        "reads": {path: _content(root, path) for path in reads},
        "files": {what: hashes.of_content(path) for what, path in files.items()},
        "seconds": 1.0,
        "outputs": {
            str(path.relative_to(folder)): {
                "size": path.stat().st_size,
                "sha256": hashes.of_file(path),
            }
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name != "manifest.json"
        },
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))


def _content(root: pathlib.Path, path: str) -> str:
    owner = pipeline._owner_on_disk(root, path)
    manifest: Mapping[str, Any] = json.loads((root / owner / "manifest.json").read_text())
    return pipeline._content(path, owner, manifest)
