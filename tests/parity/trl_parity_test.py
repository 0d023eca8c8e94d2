"""Ids and targets of conversations compared with TRL's own SFTTrainer._prepare_dataset."""

import json
import pathlib

import families
import pytest
from support import shared_data

from raslik_jax.data.read import formats
from raslik_jax.data.tokens import encoding, tokenization

# Rows that TRL trains by a template of its own in place of the checkpoint's. What differs there:
# "targets" where the ids are equal, "ids", or "" for nothing.
_ROWS = ("one_turn", "two_turns", "thought", "thoughts", "two_answers", "call_of_null")
_REPLACED = {
    "qwen2_5": dict.fromkeys(_ROWS, "targets"),
    "qwen3": {row: "" if row in ("one_turn", "thought") else "ids" for row in _ROWS},
    "qwen3_instruct_2507": dict.fromkeys(_ROWS, ""),
    "llama3": dict.fromkeys(_ROWS, ""),
    "gemma": dict.fromkeys(_ROWS[:4], ""),
    "gemma3": dict.fromkeys(_ROWS[:4], ""),
    "phi3": dict.fromkeys(_ROWS[:5], ""),
    "deepseek_r1_distill": {row: "ids" if "thought" in row else "targets" for row in _ROWS[:5]},
    "glm4moe": dict.fromkeys(_ROWS, "ids"),
}


def _prepare(template, record, folder, *, replaced=None):
    import trl_rows

    file = shared_data() / "tokenizers" / "smollm2" / "tokenizer.json"
    tokenizer = trl_rows.tokenizer_of(file, template, eos="<|im_end|>", folder=folder)
    return trl_rows.prepare(record, tokenizer, template=replaced, folder=folder)


def _encode(template, record, folder):
    """Returns ids and labels of a row by raslik_jax, with the tokenizer of a folder."""
    path = folder / "rows.jsonl"
    path.write_text(json.dumps(record))
    tokenizer = tokenization.load_tokenizer(folder)._replace(chat_template=template)
    rows = formats.read_examples(path, format=formats.AUTO)
    encoded = encoding.encode(rows, tokenizer, template="chat")
    (ids,), (mask,) = encoded.tokens, encoded.target_masks()
    return ids.tolist(), [0 if is_target else -100 for is_target in mask]


@pytest.mark.parametrize("name", families.TEMPLATES)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("unmarked", marks=pytest.mark.heavy),
        # `make parity` runs them too. The golden file has all of them.
        pytest.param("marked", marks=pytest.mark.study),
        pytest.param("completion", marks=pytest.mark.study),
    ],
)
def test_families_have_the_ids_and_targets_of_trl(kind, name, tmp_path):
    source = families.TEMPLATES[name]
    source = families.unmarked(source) if kind == "completion" else source
    expected = {}
    for row, record in families.records(kind).items():
        try:
            expected[row] = families.checksum(*_prepare(source, record, tmp_path))
        except ValueError:
            expected[row] = "refused"
    wrong = families.compare(kind, name, expected, lambda *what: _encode(*what, tmp_path))
    assert wrong == {}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "row"), [(name, row) for name, found in _REPLACED.items() for row in found]
)
def test_what_differs_where_trl_takes_its_own_template_is_what_the_guide_says(name, row, tmp_path):
    import trl

    folder = pathlib.Path(trl.__file__).parent / "chat_templates"
    own, training = (
        (folder / f"{name}{kind}.jinja").read_text(encoding="utf-8") for kind in ("", "_training")
    )
    theirs = _prepare(own, families.ROWS[row], tmp_path, replaced=training)
    assert _difference(_encode(training, families.ROWS[row], tmp_path), theirs) == ""
    assert _difference(_encode(own, families.ROWS[row], tmp_path), theirs) == _REPLACED[name][row]


def _difference(ours, theirs):
    if families.checksum(*ours) == families.checksum(*theirs):
        return ""
    return "targets" if ours[0] == theirs[0] else "ids"
