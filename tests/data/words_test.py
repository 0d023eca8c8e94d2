"""Every sentence of the table of refusals is used, with the values that it has places for."""

import ast
import json
import pathlib
import string

from raslik_jax.data.words import load_words

_PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "raslik_jax"


def _calls():
    """Yields the calls of `refused` by name, and the names of their values; None with **."""
    for path in _PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "refused":
                names = [keyword.arg for keyword in node.keywords]
                yield ast.literal_eval(node.args[0]), {*names}


def test_no_name_of_a_file_of_words_is_there_twice():
    def check(pairs):
        assert len({name for name, _ in pairs}) == len(pairs)
        return dict(pairs)

    for path in (_PACKAGE / "data" / "words").glob("*.json"):
        assert json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=check)


def test_each_refusal_has_its_values_and_its_use():
    sentences, used = load_words("refusals"), dict(_calls())
    assert used.keys() == sentences.keys()
    for name, sentence in sentences.items():
        places = {field for _, field, *_ in string.Formatter().parse(sentence) if field is not None}
        given = used[name]
        assert places == given or (None in given and given - {None} < places), name
