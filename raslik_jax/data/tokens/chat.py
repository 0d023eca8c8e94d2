"""Conversations as text by a chat template, rendered by transformers in its Jinja sandbox.

A template is the checkpoint's text or the user's; the sandbox runs no code of either, and no torch
is needed.
"""

import datetime
import importlib.util
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from raslik_jax import bounded
from raslik_jax.data.contents import Conversation, text_of, without_nulls
from raslik_jax.messages import one_line, shown

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Some templates write the day on which they are rendered: Llama 3's unless it is told one, others
# whatever they are told. All are told the day that Llama 3's writes where it cannot ask.
_DAY = datetime.datetime(2024, 7, 26)
_FIXED = {"date_string": _DAY.strftime("%d %b %Y")}
_CODES = {f"%{code}": _DAY.strftime(f"%{code}") for code in "aAbBcdfHIjmMpSUwWxXyYZ"}
_CODES |= {"%-d": "26", "%e": "26", "%-m": "7", "%F": "2024-07-26"}
# In front of a template, in place of the function of transformers, which lets no other be given. A
# block takes the line feed behind it away, and no more.
_CLOCK = "{{% macro strftime_now(format) %}}{{{{ format{} }}}}{{% endmacro %}}\n".format(
    "".join(f"|replace({code!r}, {text!r})" for code, text in _CODES.items())
)

# How many characters a template may write beyond so many times those of the messages.
_MOST_ADDED, _MOST_TIMES = 100_000, 20


class Target(NamedTuple):
    """A part of a rendered conversation that is a target.

    Where the template marks it: the characters from `start` to `end`. Else it is what the whole
    has beyond the text `before` it, up to the end of the text `through` it.
    """

    start: int = 0
    end: int = 0
    before: str = ""
    through: str = ""


class Rendered(NamedTuple):
    """A whole conversation as text, and its targets in order."""

    text: str
    targets: tuple[Target, ...]


class ChatTemplate(NamedTuple):
    """A chat template in Jinja, with the names of special tokens that it may read."""

    source: str
    special_tokens: Mapping[str, str]

    @property
    def marks_targets(self) -> bool:
        """Whether the template says by `{% generation %}` what the assistant writes."""
        return bool(_GENERATION.search(self.source))


def render(template: ChatTemplate, conversation: Conversation) -> Rendered:
    """Returns a conversation as text with its targets, one for each answer.

    With `{% generation %}` in the template they are what stands in it, else what the template adds
    to the conversation before an answer, with the beginning of one, up to the end of its turn. A
    completion is always found in the second way, as TRL does it.
    """
    messages, write = conversation.messages, _writer(template, conversation.options)
    if conversation.is_completion:
        text, _ = write(messages)
        before, _ = write(conversation.asked, begins_answer=True)
        return Rendered(text, (Target(before=before, through=text),))
    text, marked = write(messages, marks=template.marks_targets)
    for place in conversation.turns:
        # Of an answer with a thought the template may leave out the beginning.
        if (end := text_of(messages[place]).strip()[-20:]) not in text:
            raise ValueError(
                f"the chat template does not write the answer that ends with {shown(end, 30)}: "
                "correct the content of the message, or give another template"
            )
    if template.marks_targets:
        return Rendered(text, tuple(Target(*span) for span in marked if span[0] < span[1]))
    targets = []
    for place in conversation.turns:
        if place:
            before, _ = write(messages[:place], begins_answer=True)
        else:
            before = _before_first(messages[0], write)
        through = text if place == len(messages) - 1 else write(messages[: place + 1])[0]
        if not text.startswith(through):  # Phi-3 ends the whole conversation with EOS
            through = through.removesuffix(template.special_tokens.get("eos_token", ""))
        if not text.startswith(through):
            through = _through_turn(text, before, through, text_of(messages[place]))
        targets.append(Target(before=before, through=through))
    return Rendered(text, tuple(targets))


def render_question(template: ChatTemplate, conversation: Conversation) -> str:
    """Returns the text after which the model writes its answer."""
    return _writer(template, conversation.options)(conversation.asked, begins_answer=True)[0]


def require_system(template: ChatTemplate) -> None:
    """Raises a ValueError where a template has no place for a system prompt, or leaves it out."""
    said = "Answer as a sailor."
    messages = ({"role": "system", "content": said}, {"role": "user", "content": "a"})
    try:
        text = render_question(template, Conversation(messages, is_open=True))
    except ValueError as error:
        raise ValueError(
            "the chat template refuses a system prompt: leave out --system, and put its text in "
            "front of --prompt if the model was trained so"
        ) from error
    if said not in text:
        raise ValueError(
            "the chat template writes no system prompt, so the model read none: leave out --system"
        )


def end_of_turn(template: ChatTemplate) -> str:
    """Returns what the template writes behind an answer; empty where that cannot be told."""
    answer = "answer"
    messages = ({"role": "user", "content": "a"}, {"role": "assistant", "content": answer})
    try:
        text = render(template, Conversation(messages)).text
    except ValueError:
        return ""
    return text.rpartition(answer)[2].strip() if answer in text else ""


Write = Callable[..., tuple[str, Sequence[tuple[int, int]]]]


def _before_first(message: Mapping[str, Any], write: Write) -> str:
    """Returns what a template writes before the answer that a conversation begins with.

    Of no message at all it may write nothing, or raise: what it puts in front of any conversation,
    such as a system prompt of its own, comes with the first one.
    """
    return os.path.commonprefix([write(({**message, "content": text},))[0] for text in "ab"])


def _through_turn(text: str, before: str, alone: str, answer: str) -> str:
    """Returns the text through a turn that the template renders otherwise once others follow.

    Such a template leaves out the thoughts of earlier answers; what it writes behind the answer
    is the same.
    """
    answer = answer.strip()
    head = len(os.path.commonprefix([text, before]))
    at, tail = text.find(answer, head), alone.rpartition(answer)[2]
    end = at + len(answer) + len(tail)
    if not answer or at < 0 or text[at + len(answer) : end] != tail:
        raise ValueError(
            "the chat template renders an answer otherwise once others follow, so that nothing "
            "tells where it ends: mark answers in it with {% generation %}"
        )
    return text[:end]


def _writer(template: ChatTemplate, options: Mapping[str, Any]) -> Write:
    """Returns the function from messages to text and the marked spans of characters."""
    if importlib.util.find_spec("transformers") is None:
        need = "a chat template needs the package transformers: install raslik-jax[data]"
        raise ValueError(need)
    source = _CLOCK + template.source if "strftime_now" in template.source else template.source
    given = {**template.special_tokens, **_FIXED, **options}

    def write(
        messages: Sequence[Mapping[str, Any]], *, begins_answer: bool = False, marks: bool = False
    ) -> tuple[str, Sequence[tuple[int, int]]]:
        # Templates write None where a key is there.
        said = without_nulls([*messages])
        try:
            return bounded.call(
                _render, source, said, begins_answer, marks, given, what="the chat template"
            )
        except bounded.OverLimit:
            raise
        except ValueError as error:
            raise ValueError(
                f"the chat template refuses the conversation ({one_line(str(error), 120)}): "
                "correct the row, or give another template"
            ) from error

    return write


def _render(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    begins_answer: bool,
    marks: bool,
    given: Mapping[str, Any],
) -> tuple[str, Sequence[tuple[int, int]]]:
    """Returns what `Write` returns, in the child process of `bounded`."""
    from transformers.utils import chat_template_utils

    render_template: Callable[..., Any] = chat_template_utils.render_jinja_template
    texts, spans = render_template(
        [messages],
        chat_template=source,
        add_generation_prompt=begins_answer,
        return_assistant_tokens_mask=marks,
        **given,
    )
    most = _MOST_ADDED + _MOST_TIMES * (len(str(messages)) + len(str(given)))
    if len(texts[0]) > most:
        raise ValueError(f"it writes {len(texts[0]):,} characters, more than {most:,}")
    return texts[0], spans[0] if marks else ()
