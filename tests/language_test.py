"""Plain American English: words that are kept out, and how hard it is to read.

A document or the docstrings of a module have at most one comma per sentence, and all together have
at most .7. One sentence in a hundred may have an avoided construction.
"""

import ast
import math
import operator
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

_REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
_FILES = sorted(
    path
    for folder, suffixes in {
        "raslik_jax": (".py", ".jinja", ".js", ".css"),
        "experiments": (".py", ".flags"),
        "docs": (".md",),
    }.items()
    for path in (_REPOSITORY / folder).rglob("*")
    if path.suffix in suffixes and "third_party" not in path.parts and "_test" not in path.stem
)
_FILES += [_REPOSITORY / name for name in ("README.md", "BUILD_NOTES.md", "Makefile")]
_FILES.append(_REPOSITORY / "raslik_jax" / "data" / "words" / "refusals.json")
# Errors say `X must be ..., got ...: do ...`; spelling is American; no mannered turns.
_KEPT_OUT = re.compile(
    r"(?:, came|\b(?:none|{\w+}) came)\b|\b(wanted|whatsoever|anew|thereof|hitherto"
    r"|(?:un)?label(?:led|ling)|cent(?:re|red|ring)|colour\w*|behaviour\w*|neighbour\w*|favour\w*"
    r"|(?:re|de|un)?(?:normal|quant|minim|maxim|summar|optim|initial|recogn|organ|token|serial)is"
    r"(?:e|ed|es|ing|er|ation)s?|towards|judgement)\b",
    re.IGNORECASE,
)
_MOST_COMMAS, _MOST_COMMAS_IN_ALL, _MOST_AVOIDED = 1.0, 0.7, 0.01
_FEWEST = 5  # Fewer sentences say little about a file. They count in the means of all.
_AVOIDED = re.compile(
    r"^(?:Of|What|Where|Whoever|That)\b|\b(?:told|beside|nobody|whoever|thereby|whither)\b"
    r"|\bstands?\b(?! out)"
    r"|\b(?:of which|held to|has it that|of the way to|(?:read|said|asked|come) of)\b"
    r"|\bpulls? (?:toward|against)\b|\bcosts? [^.]{,20}\bnats\b"
)


class Measured(NamedTuple):
    """What is counted in the sentences of a text."""

    sentences: int
    commas: int
    avoided: int

    def means(self) -> tuple[float, float]:
        """Returns commas and avoided constructions per sentence, rounded up to a hundredth."""
        count = max(self.sentences, 1)
        return math.ceil(100 * self.commas / count) / 100, math.ceil(
            100 * self.avoided / count
        ) / 100


def measure(text: str) -> Measured:
    """Returns the counts of a text. Code, tables, titles and numbers do not count."""
    text = re.sub(
        r"^```.*?^```|<!--.*?-->|^---\n.*?^---$", "", text, flags=re.DOTALL | re.MULTILINE
    )
    text = re.sub(r"^(?:[|#>]|    |\t).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`", "code", text)
    text = re.sub(r"(?<=\d),(?=\d)", "", re.sub(r"\]\([^)]*\)", "", text))
    text = re.sub(r"[*_\[\]()\"]", "", text)
    found = []
    for paragraph in re.split(r"\n\s*\n|\n\s*(?:-|\d+\.) ", "\n" + text):
        parts = re.split(r"(?<=[.!?:;])\s+(?=[A-Z])", " ".join(paragraph.split()))
        found += [part for part in parts if len(part.split()) > 3]
    hits = sum(len(_AVOIDED.findall(part)) for part in found)
    return Measured(len(found), sum(part.count(",") for part in found), hits)


def _docstrings(path: pathlib.Path) -> str:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
    return "\n\n".join(re.split(r"\n\n(?:Args|Example|Attributes):", text)[0] for text in texts)


def _texts() -> Iterator[tuple[str, str, str]]:
    """Yields kind, path and text of every document and of every module of the package."""
    pages = [*_REPOSITORY.glob("*.md"), *(_REPOSITORY / "docs").rglob("*.md")]
    for path in sorted(pages):
        yield "documents", str(path.relative_to(_REPOSITORY)), path.read_text(encoding="utf-8")
    for path in sorted((_REPOSITORY / "raslik_jax").rglob("*.py")):
        if "third_party" not in path.parts:
            yield "docstrings", str(path.relative_to(_REPOSITORY)), _docstrings(path)


def _limit(name: str) -> tuple[float, float]:
    return _MOST_COMMAS_IN_ALL if name.startswith("all ") else _MOST_COMMAS, _MOST_AVOIDED


def test_documents_and_docstrings_are_easy_to_read():
    found: dict[str, Measured] = {}
    for kind, name, text in _texts():
        one = measure(text)
        whole = found.get(f"all {kind}", Measured(0, 0, 0))
        found[f"all {kind}"] = Measured(*map(sum, zip(whole, one, strict=True)))
        found |= {name: one} if one.sentences >= _FEWEST else {}
    harder = {
        name: f"{now} commas and avoided constructions per sentence, the limit is {limit}"
        for name, one in found.items()
        if any(map(operator.gt, now := one.means(), limit := _limit(name)))
    }
    assert harder == {}


def test_the_measure_counts_what_a_reader_meets():
    text = "# A, b\n\nThe run reads `a, b` and 1,000 rows. Of two, the first is here now.\n\n| a, |"
    assert measure(text) == Measured(2, 1, 1)
    text = "- One row is told here, twice, by name.\n- It is a second item."
    assert measure(text) == Measured(2, 2, 1)


def test_words_that_are_kept_out():
    found = [
        f"{path.relative_to(_REPOSITORY)}:{number}: {match[0]}"
        for path in _FILES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for match in _KEPT_OUT.finditer(line)
    ]
    assert not found
