"""Ids and targets of conversations beside transformers' own, by the rules of TRL's SFTTrainer."""

import json
import os

import families
import numpy as np
import pytest
from support import shared_data

from raslik_jax.data.read import formats
from raslik_jax.data.tokens import encoding, tokenization

_TEMPLATES = {
    "chatml": families.unmarked(families.TEMPLATES["chatml_greeting"]),
    "marked": families.TEMPLATES["chatml"],
}
_TEXTS = [
    "What is a kettle?",
    "A kettle boils water.\n\n- It is hot.\n- It whistles.",
    "  And in Zürich? 😀 <|im_end|>",
    "\n\nIt is the same, 12345 times.",
]


def _talk(count, system=""):
    roles = ["system"] * bool(system) + ["user", "assistant"] * 2
    texts = [system] * bool(system) + _TEXTS
    pairs = list(zip(roles, texts, strict=True))[: count + bool(system)]
    return [{"role": role, "content": text} for role, text in pairs]


@pytest.fixture(scope="module", params=sorted(_TEMPLATES))
def tokenizers(request, tmp_path_factory):
    """Ours and transformers', from one folder as transformers saves it."""
    import transformers

    folder = tmp_path_factory.mktemp("tokenizer")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(shared_data() / "tokenizers" / "smollm2" / "tokenizer.json"),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        bos_token="<|im_start|>",
    )
    theirs.chat_template = _TEMPLATES[request.param]
    theirs.save_pretrained(folder)
    return tokenization.load_tokenizer(folder), theirs, "generation %" in theirs.chat_template


def _encode(ours, records, path):
    path.write_text("\n".join(map(json.dumps, records)))
    rows = formats.read_examples(path, format=formats.AUTO)
    encoded = encoding.encode(rows, ours, template="chat")
    return encoded.tokens, encoded.target_masks(), rows


def _num_common(some, others):
    return len(os.path.commonprefix([list(some), list(others)]))


def _ids(theirs, messages, **options):
    return theirs.apply_chat_template(messages, return_dict=True, **options)["input_ids"]


@pytest.mark.heavy
def test_conversations_have_the_ids_and_masks_of_transformers(tokenizers, tmp_path):
    ours, theirs, is_marked = tokenizers
    talks = [_talk(2), _talk(4), _talk(2, "Be brief."), _talk(4, "Be brief."), _talk(3)]
    tokens, masks, rows = _encode(
        ours, [{"messages": talk} for talk in talks], tmp_path / "r.jsonl"
    )
    for talk, ids, mask in zip(talks, tokens, masks, strict=True):
        whole = theirs.apply_chat_template(
            talk, return_dict=True, return_assistant_tokens_mask=is_marked
        )
        assert ids.tolist() == whole["input_ids"]
        expected = np.zeros(len(ids), bool)
        if is_marked:
            expected = np.array(whole["assistant_masks"], bool)
        else:
            for place, message in enumerate(talk):
                if message["role"] == "assistant":
                    before = _ids(theirs, talk[:place], add_generation_prompt=True)
                    through = _ids(theirs, talk[: place + 1])
                    span = _num_common(before, ids), _num_common(through, ids)
                    expected[slice(*span)] = True
        np.testing.assert_array_equal(mask, expected)
    asked = encoding.encode_prompts(rows, ours, max_len=999, template="chat")
    for talk, ids in zip(talks, asked, strict=True):
        last = max(i for i, message in enumerate(talk) if message["role"] == "assistant")
        assert ids == _ids(theirs, talk[:last], add_generation_prompt=True)


@pytest.mark.heavy
def test_texts_and_completions_of_text_end_with_eos_once(tokenizers, tmp_path):
    ours, theirs, _ = tokenizers
    pairs = [("The sky is", " blue."), ("A:", "\n\nB<|im_end|>"), ("x ", " y"), ("", "All of it.")]
    records = [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
    for (prompt, completion), ids, mask in zip(
        pairs, *_encode(ours, records, tmp_path / "r.jsonl")[:2], strict=True
    ):
        text = prompt + completion
        whole = theirs(text if text.endswith("<|im_end|>") else text + "<|im_end|>")["input_ids"]
        start = max(_num_common(theirs(prompt)["input_ids"], whole), 1)
        assert ids.tolist() == whole
        assert mask.tolist() == [False] * start + [True] * (len(whole) - start)
    (ids,), (mask,), _ = _encode(ours, [{"text": _TEXTS[2]}], tmp_path / "t.jsonl")
    assert ids.tolist() == theirs(_TEXTS[2])["input_ids"]
    assert mask.tolist() == [False] + [True] * (len(ids) - 1)
