"""The rooms' order, and what stays light: found by reading the imports."""

import ast
import functools
import pathlib
import subprocess
import sys
from collections.abc import Collection, Mapping

from absl.testing import parameterized

_PACKAGE = pathlib.Path(__file__).resolve().parents[1] / "raslik_jax"
# Rooms in the order of DESIGN.md; a module imports only from rooms to its left, or from its own.
_ROOMS = (
    "base parallel data models sketch index retrieve train evaluate run report incident cli".split()
)
# These stand beside the rooms: records of members reach the settings of a run.
_USES_ALL = ("config",)
# Modules that list members, settings or results for tools that compute nothing.
_WITHOUT_JAX = (
    *("base/", "config"),
    *("data/", "report/", "incident/", "cli/"),
    *(
        "retrieve/strategies",
        "train/objectives",
        "evaluate/summary",
        "evaluate/metrics",
        "evaluate/judgment",
    ),
    *("run/artifacts", "run/manifests", "run/units", "run/live"),
)
# Its batches are trees of jax.
_WITH_JAX = (
    "data/batches",
    "base/axes",
    "incident/exporting",
    "incident/tracer",
    "report/forecast",
    "report/writing",
)


@functools.cache
def _imports(path: pathlib.Path) -> tuple[str, ...]:
    """Returns every name a file imports, lazily or not."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(names)


def _circles(reads: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Returns groups of files that import one another, from the files that each one imports."""
    reached = {}
    for start in reads:
        found, open_ends = set(), [start]
        while open_ends:
            new = set(reads[open_ends.pop()]) - found
            found |= new
            open_ends += new
        reached[start] = found
    groups = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in reached
    }
    return sorted(map(list, groups - {()}))


_FILES = {
    str(path.relative_to(_PACKAGE).with_suffix("")): path
    for path in sorted(_PACKAGE.rglob("*.py"))
    if path.name != "__init__.py"
}


def _room(name: str) -> int:
    """Returns the place of a module's room; modules beside the rooms come before all of them."""
    first = name.split("/")[0]
    return _ROOMS.index(first) if "/" in name else -1


class ImportsTest(parameterized.TestCase):
    def test_every_folder_is_a_room(self):
        folders = {name.split("/")[0] for name in _FILES if "/" in name}
        self.assertEqual(folders - set(_ROOMS), set())

    def test_a_module_imports_only_from_rooms_above(self):
        wrong = {}
        for name, path in _FILES.items():
            if name in _USES_ALL:
                continue
            own = [n.split(".")[1] for n in _imports(path) if n.startswith("raslik_jax.")]
            below = [r for r in own if r in _ROOMS and _ROOMS.index(r) > _room(name)]
            if below:
                wrong[name] = sorted(set(below))
        self.assertEqual(wrong, {})

    def test_no_file_imports_itself_by_way_of_others(self):
        # Late imports count, those of a type alone too: such files are one piece in two places.
        files = {
            ".".join(path.relative_to(_PACKAGE.parent).with_suffix("").parts): path
            for path in _PACKAGE.rglob("*.py")
        }
        files = {name.removesuffix(".__init__"): path for name, path in files.items()}
        reads = {}
        for name, path in files.items():
            found = {n if n in files else n.rpartition(".")[0] for n in _imports(path)}
            reads[name] = found & {*files}
        self.assertEqual(_circles(reads), [])

    def test_a_circle_is_found(self):
        reads = {"a": ["b", "d"], "b": ["c"], "c": ["a"], "d": [], "e": ["d", "e"]}
        self.assertEqual(_circles(reads), [["a", "b", "c"], ["e"]])

    def test_families_know_no_settings_of_a_run(self):
        above = _ROOMS[: _ROOMS.index("run")]
        for name, path in _FILES.items():
            if name.split("/")[0] in above:
                used = [n for n in _imports(path) if n.startswith("raslik_jax.config")]
                self.assertEqual(used, [], name)

    def test_flax_stays_in_models_and_flags_in_cli(self):
        for name, path in _FILES.items():
            tops = {imported.split(".")[0] for imported in _imports(path)}
            self.assertTrue(not tops & {"flax"} or name.startswith("models/"), name)
            self.assertFalse(tops & {"torch", "peft"}, name)
            self.assertTrue(not tops & {"transformers"} or name == "data/tokens/chat", name)
            absl = any(imported.startswith("absl.flags") for imported in _imports(path))
            self.assertTrue(not absl or name.startswith("cli/"), name)

    def test_modules_that_compute_nothing_load_without_jax(self):
        names = [n for n in _FILES if n.startswith(_WITHOUT_JAX) and n not in _WITH_JAX]
        modules = ", ".join(f"raslik_jax.{name.replace('/', '.')}" for name in names)
        code = (
            f"import sys, {modules}; sys.exit(bool({{'jax', 'transformers'}} & {{*sys.modules}}))"
        )
        self.assertEqual(subprocess.run([sys.executable, "-c", code]).returncode, 0)
