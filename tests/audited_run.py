"""run.py under an audit: which files and settings does each unit use?

  python tests/audited_run.py OUT.json FLAGS...

Writes, by unit, what it declares and what it used: paths below the work directory that Python
opened or that the workspace was asked for, and names of settings. Libraries that open files
without Python (TensorStore, safetensors) are seen by what the workspace hands them.
"""

import json
import os
import pathlib
import runpy
import sys
from typing import Any

_REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_REPOSITORY))

from raslik_jax import config as config_lib  # noqa: E402
from raslik_jax import pipeline  # noqa: E402
from raslik_jax.index.store import SketchStore  # noqa: E402
from raslik_jax.stages import plan  # noqa: E402
from raslik_jax.stages.workspace import Workspace  # noqa: E402

# What stands for a path: these are loaded once for all units.
_LOADED = {
    "model": "backbone/model",
    "sketch_model": "backbone/model",
    "tokenizer": "corpus/tokenizer",
}
_used: dict[str, dict[str, Any]] = {}
_state: dict[str, Any] = {"unit": None, "root": None}


def _note(kind: str, value: str) -> None:
    if _state["unit"]:
        _used[_state["unit"]][kind].add(value)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or not _state["unit"] or not isinstance(arguments[0], str):
        return
    path, root = pathlib.Path(os.path.abspath(arguments[0])), _state["root"]
    if root in path.parents and ".making" not in path.parts and path.name != "manifest.json":
        _note("reads", str(path.relative_to(root)))


def _watch(kind: type, method: str, note: Any) -> None:
    real = getattr(kind, method)

    def watched(*args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return real(*args, **kwargs)

    setattr(kind, method, watched)


def _watch_settings(settings: type) -> None:
    real = settings.__getattribute__

    def watched(self: Any, name: str) -> Any:
        if name in settings.__dataclass_fields__:
            _note("settings", name)
        return real(self, name)

    settings.__getattribute__ = watched


def _unnoted(function: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        unit, _state["unit"] = _state["unit"], None
        try:
            return function(*args, **kwargs)
        finally:
            _state["unit"] = unit

    return run


def _audited(unit: Any) -> Any:
    def run(folder: pathlib.Path) -> None:
        workspace = unit.run.args[0]
        # Read again by every unit, so that each is seen to.
        for name in ("corpus", "tokenizer", "finetuned"):
            workspace.__dict__.pop(name, None)
        _used[unit.name] = {
            "reads": set(),
            "settings": set(),
            "declared": {"reads": list(unit.reads), "settings": list(unit.settings)},
        }
        _state["unit"] = unit.name
        try:
            unit.run(folder)
        finally:
            _state["unit"] = None

    return unit._replace(run=run)


def main() -> None:
    out, flags = sys.argv[1], sys.argv[2:]
    real = plan.run_units

    def run_units(root: pathlib.Path, units: Any, **options: Any) -> None:
        _state["root"] = pathlib.Path(os.path.abspath(root))
        real(root, [_audited(unit) for unit in units], **options)

    plan.run_units = run_units
    for settings in config_lib.stage_configs().values():
        _watch_settings(settings)
    _watch(Workspace, "adapter", lambda self, *parts: _note("reads", "/".join(parts)))
    _watch(
        SketchStore,
        "open",
        lambda path, **_: _note(
            "reads", str(pathlib.Path(os.path.abspath(path)).relative_to(_state["root"]))
        ),
    )
    # Checking a file against its manifest, or a corpus for later stages, is no use of it.
    pipeline.hash_file = _unnoted(pipeline.hash_file)
    plan.checking.check_corpus = _unnoted(plan.checking.check_corpus)
    asked = Workspace.__getattribute__

    def watched(self: Workspace, name: str) -> Any:
        if name in _LOADED:
            _note("reads", _LOADED[name])
        return asked(self, name)

    Workspace.__getattribute__ = watched
    sys.addaudithook(_hook)
    sys.argv = [str(_REPOSITORY / "experiments" / "run.py"), *flags]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        for used in _used.values():
            used |= {kind: sorted(used[kind]) for kind in ("reads", "settings")}
        pathlib.Path(out).write_text(json.dumps(_used))


if __name__ == "__main__":
    main()
