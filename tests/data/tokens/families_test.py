"""Ids and targets of 26 rows under 24 chat templates, compared with stored ones of TRL."""

import json
import pathlib

import families
import pytest

from raslik_jax.data.read import formats
from raslik_jax.data.tokens import encoding, tokenization

_GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "chats.json"


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """The function from a record to its rows, each read from a file once."""
    folder, known = tmp_path_factory.mktemp("rows"), {}

    def read(record):
        text = json.dumps(record)
        if text not in known:
            path = folder / f"{len(known)}.jsonl"
            path.write_text(text)
            known[text] = formats.read_examples(path, format=formats.AUTO)
        return known[text]

    return read


@pytest.mark.parametrize("name", families.TEMPLATES)
def test_conversations_have_the_ids_and_targets_of_trl(name, read):
    tokenizer = tokenization.load_tokenizer(families.TOY)
    names = {"bos_token": families.BOS, "eos_token": families.EOS}
    golden = json.loads(_GOLDEN.read_text())[name]

    def encode(template, record):
        own = tokenizer._replace(chat_template=template, special_tokens=names)
        encoded = encoding.encode(read(record), own, template="chat")
        (ids,), (mask,) = encoded.tokens, encoded.target_masks()
        return ids, [0 if is_target else -100 for is_target in mask]

    for kind in ("marked", "unmarked", "completion"):
        stored = "completion" if kind == "completion" else "messages"
        expected = {row: golden[f"{stored}/{row}"] for row in families.ROWS}
        assert families.compare(kind, name, expected, encode) == {}, kind
