"""The corpus stage on rows in other formats: what it stores, and what later stages read of it."""

import contextlib
import io
import json

import numpy as np
import pytest

from raslik_jax import config as config_lib
from raslik_jax.base.settings import replaced
from raslik_jax.run.stages.corpus import make_corpus
from raslik_jax.run.workspace import Workspace

_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def _talk(*texts):
    roles = ["user", "assistant"] * 2
    return [{"role": r, "content": text} for r, text in zip(roles, texts, strict=False)]


_CASES = {
    "messages": (
        [{"messages": _talk("Hi?", "Ho.", "Sure?", "Yes."), "k": i} for i in range(3)],
        {"messages": _talk("Hi?", "Ha!")},
        ("chat", "[user] Hi?"),
    ),
    "text": ([{"text": f"A story of {i}."} for i in range(3)], {"text": "Ha!"}, ("plain", "")),
}


@pytest.mark.parametrize("name", sorted(_CASES))
def test_rows_are_stored_and_read_with_their_targets(name, tmp_path):
    train, query, (template, prompt) = _CASES[name]
    files = {"train_file": tmp_path / "train.jsonl", "queries_file": tmp_path / "queries.jsonl"}
    files["train_file"].write_text("\n\n".join(map(json.dumps, train)))
    files["queries_file"].write_text(json.dumps({**query, "split": "retrieval"}))
    (tmp_path / "own.jinja").write_text(_TEMPLATE)
    own = str(tmp_path / "own.jinja") if template == "chat" else "auto"
    values = {"corpus.dataset": "records", "corpus.template": own, "corpus.vocab_size": 300}
    values |= {f"corpus.records.{key}": str(path) for key, path in files.items()}
    workspace = Workspace(tmp_path / "run", replaced(config_lib.Config(), values))
    folder = tmp_path / "run" / "corpus"
    folder.mkdir(parents=True)
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        make_corpus(workspace, folder)
    kinds = {"messages": "conversations", "text": "texts"}
    assert f"3 rows of {kinds[name]}" in told.getvalue()
    assert workspace.template_name == (own if template == "chat" else template)
    assert (folder / "template.txt").read_text() == ("" if template == "chat" else template)
    assert [row.place for row in workspace.corpus.train] == [1, 3, 5]
    rows, tokenizer = workspace.train_rows, workspace.tokenizer
    said = [
        tokenizer.decode(row[mask].tolist())
        for row, mask in zip(rows.tokens, rows.target_masks(), strict=True)
    ]
    if name == "messages":
        assert [text.replace(" ", "") for text in said] == ["Ho.\nYes.\n"] * 3
    if name == "text":  # all but the first token, which nothing predicts
        assert [text[-10:] for text in said] == [row["text"][-10:] for row in train]
    (asked,) = workspace.retrieval_queries()
    assert asked.output == "Ha!"
    encoded = workspace.encode([asked])
    start = int(encoded.start_N[0])
    assert tokenizer.decode(encoded.tokens[0][:start].tolist()).startswith(prompt)
    assert "Ha!"[1:] in tokenizer.decode(encoded.tokens[0][start:].tolist())
    np.testing.assert_array_equal(encoded.num_targets_N, len(encoded.tokens[0]) - start)


def test_an_instruction_asked_of_texts_is_stored_as_a_text(tmp_path):
    train, query = _CASES["text"][0], {"instruction": "Hi?", "input": "Now?", "output": " Ha!"}
    found = []
    for number, one in enumerate((query, {"prompt": "Hi?\nNow?", "completion": " Ha!"})):
        root = tmp_path / str(number)
        folder = root / "corpus"
        folder.mkdir(parents=True)
        files = {"train_file": root / "train.jsonl", "queries_file": root / "queries.jsonl"}
        files["train_file"].write_text("\n".join(map(json.dumps, train)))
        files["queries_file"].write_text(json.dumps({**one, "split": "retrieval"}))
        values = {"corpus.dataset": "records", "corpus.vocab_size": 300}
        values |= {f"corpus.records.{key}": str(path) for key, path in files.items()}
        workspace = Workspace(root, replaced(config_lib.Config(), values))
        make_corpus(workspace, folder)
        (row,) = workspace.retrieval_queries()
        (tokens,) = workspace.encode([row]).tokens
        found.append((row.content, tokens.tolist()))
    assert found[0] == found[1]
    assert row.output == " Ha!"
