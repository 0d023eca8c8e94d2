"""Functions and files stay small enough to be read at once."""

import ast
import pathlib

_TOP = pathlib.Path(__file__).resolve().parents[1]
# Their reason stands in docs/notes/run.md under "Long files".
_LONG_FILES = {"config.py", "workspace.py"}


def _sources():
    paths = [path for part in ("raslik_jax", "experiments") for path in (_TOP / part).rglob("*.py")]
    return [path for path in paths if _TOP / "experiments" / "studies" not in path.parents]


def test_no_function_is_longer_than_80_lines():
    lengths = {
        f"{path.relative_to(_TOP)}: {node.name}": node.end_lineno - node.lineno + 1
        for path in _sources()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert len(lengths) > 1000
    assert [name for name, length in lengths.items() if length > 80] == []


def test_no_file_is_longer_than_500_lines_without_a_reason():
    notes = (_TOP / "docs" / "notes" / "run.md").read_text(encoding="utf-8")
    reasons = notes[notes.index("**Long files.**") :].split("\n\n")[0]
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in _sources()}
    long = {path.name for path, length in lengths.items() if length > 500}
    assert long == _LONG_FILES
    assert all(name in reasons for name in long)
