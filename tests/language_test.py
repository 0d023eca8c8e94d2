"""Plain American English: words that are kept out of the code, its messages and its pages."""

import pathlib
import re

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
) + [_REPOSITORY / name for name in ("README.md", "BUILD_NOTES.md", "Makefile")]
# Errors say `X must be ..., got ...: do ...`; spelling is American; no mannered turns.
_KEPT_OUT = re.compile(
    r"(?:, came|\b(?:none|{\w+}) came)\b|\b(wanted|whatsoever|anew|thereof|hitherto"
    r"|(?:un)?label(?:led|ling)|cent(?:re|red|ring)|colour\w*|behaviour\w*|neighbour\w*|favour\w*"
    r"|(?:re|de|un)?(?:normal|quant|minim|maxim|summar|optim|initial|recogn|organ|token|serial)is"
    r"(?:e|ed|es|ing|er|ation)s?|towards|judgement)\b",
    re.IGNORECASE,
)


def test_words_that_are_kept_out():
    found = [
        f"{path.relative_to(_REPOSITORY)}:{number}: {match[0]}"
        for path in _FILES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for match in _KEPT_OUT.finditer(line)
    ]
    assert not found
