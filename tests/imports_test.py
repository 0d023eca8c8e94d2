"""The rooms' order, and what stays light: found by reading the imports."""

import ast
import pathlib
import subprocess
import sys

from absl.testing import absltest, parameterized

_PACKAGE = pathlib.Path(__file__).resolve().parents[1] / "raslik_jax"
# A module imports only from rooms to its left, or from its own.
_ROOMS = (
    "axes",
    "messages",
    "files",
    "config",
    "progress",
    "distributed",
    "pipeline",
    "data",
    "models",
    "sketch",
    "index",
    "retrieve",
    "train",
    "evaluate",
    "report",
    "run",
    "trace",
    "cli",
)
# Trains a model, unlike the rest of its room.
_DEVICE_MODULES = ("evaluate/discriminator.py", "evaluate/likelihood.py")
_HOST_ROOMS = (
    "messages",
    "files",
    "config",
    "progress",
    "data",
    "evaluate",
    "report",
    "pipeline",
)


def _imported(path: pathlib.Path) -> list[str]:
    """Returns every module a file imports, lazily or not."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def _room(path: pathlib.Path) -> str:
    return path.relative_to(_PACKAGE).with_suffix("").parts[0]


_FILES = sorted(path for path in _PACKAGE.rglob("*.py") if path.parent != _PACKAGE) + [
    _PACKAGE / f"{name}.py"
    for name in (
        "axes",
        "messages",
        "files",
        "config",
        "progress",
        "distributed",
        "pipeline",
        "trace",
    )
]


class ImportsTest(parameterized.TestCase):
    def test_every_module_stands_in_a_known_room(self):
        self.assertEqual({_room(path) for path in _FILES} - set(_ROOMS), set())

    @parameterized.named_parameters((str(p.relative_to(_PACKAGE)), p) for p in _FILES)
    def test_imports_only_from_rooms_above(self, path):
        own = _ROOMS.index(_room(path))
        rooms = [name.split(".")[1] for name in _imported(path) if name.startswith("raslik_jax.")]
        self.assertEqual([room for room in rooms if _ROOMS.index(room) > own], [])

    @parameterized.named_parameters((str(p.relative_to(_PACKAGE)), p) for p in _FILES)
    def test_flax_stays_in_models_and_flags_in_experiments(self, path):
        names = _imported(path)
        if _room(path) != "models":
            self.assertEqual([name for name in names if name.split(".")[0] == "flax"], [])
        if _room(path) != "cli":
            self.assertEqual([name for name in names if name.startswith("absl.flags")], [])
        self.assertEqual([name for name in names if name.split(".")[0] in ("torch", "peft")], [])

    @parameterized.parameters(*_HOST_ROOMS)
    def test_host_only_rooms_load_without_jax(self, room):
        modules = [
            ".".join(("raslik_jax", *path.relative_to(_PACKAGE).with_suffix("").parts))
            for path in _FILES
            if _room(path) == room
            and path.name != "__init__.py"
            and str(path.relative_to(_PACKAGE)) not in _DEVICE_MODULES
        ]
        code = f"import sys, {', '.join(modules)}; sys.exit('jax' in sys.modules)"
        self.assertEqual(subprocess.run([sys.executable, "-c", code]).returncode, 0)


if __name__ == "__main__":
    absltest.main()
