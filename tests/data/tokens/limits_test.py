"""Errors of chat templates and tokenizers of others are sentences."""

import pytest
import tokenizers
from tokenizers import pre_tokenizers

from raslik_jax.data.contents import Conversation
from raslik_jax.data.tokens import chat, tokenization

_MESSAGES = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"})
_PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
_SPLIT = pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")


@pytest.mark.parametrize("source", ["{{ 'a' * 10**7 }}", "{{ 1 / 0 }}", "{{ messages.x.y }}"])
def test_a_template_that_fails_or_writes_too_much_is_refused(source):
    with pytest.raises(ValueError, match="chat template refuses the conversation"):
        chat.render(chat.ChatTemplate(source + _PLAIN, {}), Conversation(_MESSAGES))


def test_a_panic_on_a_text_is_an_error():
    tokenizer = tokenization.train_bpe(["a b"], vocab_size=300)
    tokenizer.backend.pre_tokenizer = _SPLIT
    for encode in (
        lambda: tokenizer.encode("a" * 40 + "b"),
        lambda: tokenizer.encode_marked(["a" * 40 + "b"]),
    ):
        with pytest.raises(ValueError, match="tokenizer"):
            encode()
    assert tokenizer.encode("b") == [tokenizer.backend.token_to_id("b")]
