"""The rooms keep to their budgets, and docs/house.md shows their sizes.

`python tests/house_test.py` writes the sizes of today into the page.
"""

import pathlib
import re

_TOP = pathlib.Path(__file__).resolve().parents[1]
_PAGE = _TOP / "docs" / "house.md"
_TABLE = re.compile(r"(<!-- sizes.*?-->\n\| room.*?\n.*?\n)(.*?)(<!-- end -->)", re.DOTALL)
BUDGETS = {
    "base": 850,
    "parallel": 650,
    "config.py": 480,
    "data": 3900,
    "models": 4700,
    "sketch": 1700,
    "index": 1800,
    "retrieve": 1300,
    "train": 1100,
    "evaluate": 2900,
    "run": 5300,
    "report": 3200,
    "incident": 900,
    "cli": 1450,
}
_PACKAGE, _EXPERIMENTS, _TESTS = 31_000, 2_000, 27_000
# Rooms above their budget, and the size that each may not exceed. Sizes here only become smaller.
_ABOVE = {
    "base": 1_171,
    "train": 1_291,
    "run": 6_839,
    "incident": 1_976,
}


def lines_of(path: pathlib.Path) -> int:
    """Returns the lines of a file, or of all Python files below a folder but studies."""
    files = [path] if path.is_file() else path.rglob("*.py")
    kept = (file for file in files if "studies" not in file.relative_to(_TOP).parts)
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in kept)


def table() -> str:
    """Returns the rows of the page's table; sizes are rounded up to 50 lines."""
    sizes = {name: lines_of(_TOP / "raslik_jax" / name) for name in BUDGETS}
    rows = [(name, budget, sizes[name]) for name, budget in BUDGETS.items()]
    rows += [
        ("the package", _PACKAGE, lines_of(_TOP / "raslik_jax")),
        ("experiments without studies", _EXPERIMENTS, lines_of(_TOP / "experiments")),
        ("tests", _TESTS, lines_of(_TOP / "tests")),
    ]
    return "".join(
        f"| {name} | {most:,} | {-(-size // 50) * 50:,} |\n" for name, most, size in rows
    )


def test_every_room_keeps_to_its_budget():
    top = _TOP / "raslik_jax"
    rooms = {p.name for p in top.iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()}
    assert rooms - {"__init__.py"} == {*BUDGETS}
    over = {name: lines_of(top / name) for name in BUDGETS}
    over = {name: size for name, size in over.items() if size > 1.1 * BUDGETS[name]}
    assert {name: size for name, size in over.items() if size > _ABOVE.get(name, 0)} == {}


def test_the_page_shows_the_sizes_of_today():
    found = _TABLE.search(_PAGE.read_text(encoding="utf-8"))
    assert found and found[2] == table(), "run `make house`"


if __name__ == "__main__":
    text = _PAGE.read_text(encoding="utf-8")
    _PAGE.write_text(_TABLE.sub(lambda m: m[1] + table() + m[3], text), encoding="utf-8")
