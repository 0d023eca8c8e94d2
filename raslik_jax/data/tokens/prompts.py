"""The one place that turns an example into a prompt, for training, queries and decoding."""

import hashlib
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from raslik_jax.base.files import read_text
from raslik_jax.base.messages import shown
from raslik_jax.data.contents import Conversation
from raslik_jax.data.examples import Example
from raslik_jax.data.tokens import chat
from raslik_jax.data.tokens.chat import ChatTemplate
from raslik_jax.data.tokens.tokenization import Tokenizer
from raslik_jax.data.words import load_words, refused


class Template(NamedTuple):
    """Two forms of a prompt, for examples with and without an input, and a renderer for the rest.

    `has_chat` says whether conversations go by a chat template, the tokenizer's or the user's.
    """

    with_input: str = ""
    without_input: str = ""
    has_chat: bool = False
    chat: ChatTemplate | None = None

    @property
    def is_bare(self) -> bool:
        """Whether the forms put no text between the question and the answer."""
        return self.without_input == "{instruction}"

    @property
    def frames_or_chats(self) -> bool:
        """Whether the training rows decide if it is a frame or a chat template."""
        return self.has_chat and bool(self.without_input)

    def has_form(self, example: Example) -> bool:
        """Whether the two forms have all text before the answer of an example."""
        return example.content is None and bool(self.without_input)


# alpaca is word for word PROMPT_DICT in train.py of github.com/tatsu-lab/stanford_alpaca at 15b51ae
# (Apache-2.0), without a line feed at its end; axolotl's is alpaca_newline. brief is a short one.
TEMPLATES: dict[str, Template] = {
    name: Template(**fields) for name, fields in load_words("prompts").items()
}


def check_template(name: str) -> str:
    """Returns why a name is no template and no file of one, or nothing."""
    if name in TEMPLATES or pathlib.Path(name).is_file():
        return ""
    return f"one of {', '.join(TEMPLATES)}, or a file of a Jinja template, got {shown(name, 120)}"


def settle_template(name: str, trained: Callable[[], Sequence[Example]]) -> str:
    """Returns the name of the template of all rows and queries of a corpus.

    It is the given name unless the template can both frame instructions and render conversations.
    In that case the training rows are read. If the frame lacks a part of some instruction, such as
    a system prompt, the chat template renders every row.
    """
    template = TEMPLATES.get(name, Template())
    if not template.frames_or_chats or all(map(template.has_form, rows := trained())):
        return name
    return "chat" if any(isinstance(row.content, Conversation) for row in rows) else "plain"


def find_template(name: str, tokenizer: Tokenizer) -> Template:
    """Returns a template by its name or Jinja file with the tokenizer's part of it."""
    template = TEMPLATES.get(name, Template(has_chat=True))
    source = tokenizer.chat_template if name in TEMPLATES else read_text(name)
    if not template.has_chat or not source:
        return template
    return template._replace(chat=ChatTemplate(source, tokenizer.special_tokens))


def require_chat(template: Template, name: str) -> ChatTemplate:
    """Returns the chat template of a template called `name`; refuses one without."""
    if template.frames_or_chats:
        raise refused("template_framed", template=name)
    if template.chat is not None:
        return template.chat
    if template.has_chat:
        raise refused("template_without_chat", template=name)
    raise refused("template_without_talk", template=name)


def require_system(template: Template, name: str) -> None:
    """Raises a ValueError if a template called `name` writes no system prompt."""
    chat.require_system(require_chat(template, name))


def text_of(example: Example, template: Template) -> str:
    """Returns all text of an example, for a tokenizer to be trained on."""
    if template.has_form(example):
        return fill_form(example, template) + example.output
    return "\n".join(text for text in example[1:4] if text)


def fill_form(example: Example, template: Template) -> str:
    """Returns the text after which the model writes; an input of whitespace counts as none."""
    form = template.with_input if example.input.strip() else template.without_input
    return form.format(instruction=example.instruction, input=example.input)


def template_hash(template: Template) -> str:
    """Returns 16 hex digits of the sha256 of all that decides a prompt, for manifests."""
    decides: list[Any] = [template.with_input, template.without_input]
    if template.has_chat:
        decides += [template.chat and [template.chat.source, dict(template.chat.special_tokens)]]
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]
