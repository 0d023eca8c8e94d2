"""Chat templates and tokenizers of others end in bounded time, memory and length."""

import threading

import pytest
import tokenizers
import waiting
from tokenizers import normalizers, pre_tokenizers

from raslik_jax.base import bounded
from raslik_jax.data.contents import Conversation
from raslik_jax.data.tokens import chat, tokenization

_MESSAGES = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"})
_PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
_LOOPS = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
_TEMPLATES = {
    "nested loops": _LOOPS,
    "a product of texts": "{{ 'a' * 10**10 }}",
    "doubling": "{% set n = namespace(x='a') %}{% for i in range(60) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "a width": "{{ '%10000000000d' % 1 }}",
    "a wide filter": "{{ 'a'|center(10**10) }}",
    "a list": "{{ [0] * 10**10 }}",
    "a long text": "{{ 'a' * 10**7 }}",
}


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """Lowers the processor time of a call."""
    call = bounded.call
    monkeypatch.setattr(bounded, "call", lambda *a, **how: call(*a, **{"seconds": 3.0} | how))


@pytest.mark.parametrize(
    ("name", "is_main"), [("nested loops", False), *((name, True) for name in _TEMPLATES)]
)
def test_a_template_without_end_is_refused_in_any_thread(name, is_main):
    template, refused = chat.ChatTemplate(_TEMPLATES[name] + _PLAIN, {}), []

    def render():
        with pytest.raises(ValueError, match="chat template"):
            chat.render(template, Conversation(_MESSAGES))
        assert chat.render(chat.ChatTemplate(_PLAIN, {}), Conversation(_MESSAGES)).text
        refused.append(True)

    if is_main:
        render()
    else:
        thread = threading.Thread(target=render)
        thread.start()
        thread.join(waiting.SECONDS)
    assert refused == [True]


def _save(folder, *, normalizer=None, pre_tokenizer=None):
    """Writes a byte-level tokenizer with a part of its own."""
    backend = tokenization.train_bpe(["a b"], vocab_size=300).backend
    if normalizer:
        backend.normalizer = normalizer
    if pre_tokenizer:
        backend.pre_tokenizer = pre_tokenizer
    (folder / "tokenizer.json").write_text(backend.to_str())


_SPLIT = pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")
_REPLACE = normalizers.Replace(tokenizers.Regex("( +)+$"), "x")
_GROWTH = normalizers.Sequence([normalizers.Replace("a", "aa")] * 40)


@pytest.mark.parametrize(
    "part", [{"pre_tokenizer": _SPLIT}, {"normalizer": _REPLACE}, {"normalizer": _GROWTH}]
)
def test_a_tokenizer_that_fails_on_runs_of_a_character_is_refused_by_file(tmp_path, part):
    _save(tmp_path, **part)
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        tokenization.load_tokenizer(tmp_path)


def test_a_panic_on_a_text_is_an_error(tmp_path):
    _save(tmp_path, pre_tokenizer=pre_tokenizers.Split(tokenizers.Regex("(xy?)+$"), "isolated"))
    tokenizer = tokenization.load_tokenizer(tmp_path)
    backend = tokenizer.backend
    backend.pre_tokenizer = _SPLIT
    for encode in (
        lambda: tokenizer.encode("a" * 40 + "b"),
        lambda: tokenizer.encode_marked(["a" * 40 + "b"]),
    ):
        with pytest.raises(ValueError, match="tokenizer"):
            encode()
    assert tokenizer.encode("b") == [tokenizer.backend.token_to_id("b")]
