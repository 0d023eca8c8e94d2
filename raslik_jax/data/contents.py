"""The content of a row for a tokenizer: a conversation, or a passage of text.

Every file format becomes one of the two. The functions here give and change the question and the
answer of any of them.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple


class Instruction(NamedTuple):
    """Three texts of an example without another content."""

    instruction: str
    input: str
    output: str


class Conversation(NamedTuple):
    """Messages that a chat template renders; the model is trained on what the assistant says.

    Attributes:
      messages: objects with `role`, `content` and other fields of the template.
      first: position of the first message that may be a target.
      is_completion: whether all from `first` on is one target, in any role.
      is_open: whether the assistant has yet to answer: nothing is learned then.
      options: further input of the template, such as `tools`.
      muted: positions of messages of the assistant that are no targets.
    """

    messages: tuple[Mapping[str, Any], ...]
    first: int = 0
    is_completion: bool = False
    is_open: bool = False
    options: Mapping[str, Any] = MappingProxyType({})
    muted: tuple[int, ...] = ()

    @property
    def spoken(self) -> tuple[int, ...]:
        """Positions of the messages of the assistant from `first` on."""
        places = range(self.first, len(self.messages))
        return tuple(i for i in places if self.messages[i]["role"] == "assistant")

    @property
    def turns(self) -> tuple[int, ...]:
        """Positions of the messages of the assistant that are targets."""
        return () if self.is_open else tuple(i for i in self.spoken if i not in self.muted)

    @property
    def asked(self) -> tuple[Mapping[str, Any], ...]:
        """The messages before the last answer; all of an open conversation."""
        if self.is_completion:
            return self.messages[: self.first]
        answers = self.turns or (() if self.is_open else self.spoken)
        return self.messages[: answers[-1]] if answers else self.messages


class Passage(NamedTuple):
    """Text as the model reads it, without a template; without a prompt all is learned."""

    prompt: str
    completion: str


Content = Conversation | Passage


def texts_of(content: Content) -> tuple[str, str]:
    """Returns the text before the last answer and that answer, to read."""
    if isinstance(content, Passage):
        return content.prompt, content.completion
    asked = content.asked
    answer = content.messages[len(asked) :]
    return as_lines(asked), said(answer if content.is_completion else answer[:1])


def said(messages: Sequence[Mapping[str, Any]]) -> str:
    """Returns what the assistant says in messages: a tool call without a text as its JSON."""
    if len(messages) != 1:
        return as_lines(messages)
    calls = messages[0].get("tool_calls")
    return text_of(messages[0]) or (json.dumps(calls) if calls else "")


def answered(content: Content, text: str) -> Content:
    """Returns a question with a text as its answer in place of any other.

    Raises:
      ValueError: the content has no prompt in words.
    """
    if isinstance(content, Conversation):
        messages = *content.asked, {"role": "assistant", "content": text}
        muted = tuple(i for i in content.muted if i < len(messages) - 1)
        is_completion = content.first > 0
        return content._replace(
            messages=messages, is_completion=is_completion, is_open=False, muted=muted
        )
    if isinstance(content, Passage) and content.prompt:
        return content._replace(completion=text)
    raise ValueError("a row must have a prompt in words, got none: give prompt and completion")


def prefixed(content: Content, text: str) -> Content | None:
    """Returns a content with a text before its last question; None where no user asks in words."""
    if isinstance(content, Passage):
        return content._replace(prompt=text + content.prompt) if content.prompt else None
    asked = content.asked
    places = [i for i, message in enumerate(asked) if message["role"] == "user"]
    if not places:
        return None
    messages, last = [*content.messages], asked[places[-1]]
    old = last.get("content") or ""
    new = text + old if isinstance(old, str) else [{"type": "text", "text": text}, *old]
    messages[places[-1]] = {**last, "content": new}
    return content._replace(messages=tuple(messages))


# A question and its answer, as an earlier turn of a conversation.
Exchange = tuple[str, str]


def asked_after(content: Content, exchanges: Sequence[Exchange]) -> Content | None:
    """Returns a content with exchanges before its last question; None as of `prefixed`.

    A text has them as lines in front.
    """
    if not isinstance(content, Conversation):
        return prefixed(content, as_text(exchanges))
    places = [i for i, message in enumerate(content.asked) if message["role"] == "user"]
    if not places:
        return None
    at = places[-1]
    roles = itertools.cycle(("user", "assistant"))
    new = [{"role": next(roles), "content": text} for one in exchanges for text in one]
    return content._replace(
        messages=(*content.messages[:at], *new, *content.messages[at:]),
        first=content.first + len(new) * (content.first > at),
        muted=tuple(i + len(new) * (i >= at) for i in content.muted),
    )


def as_text(exchanges: Sequence[Exchange]) -> str:
    """Returns exchanges as text before a question."""
    return "".join(f"{asked}\n{said}\n\n" for asked, said in exchanges)


def without_nulls(value: Any) -> Any:
    """Returns a value of JSON without the keys that hold null, at any depth.

    Parquet and saved datasets give each object the keys of all others; TRL leaves these out.
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def text_of(message: Mapping[str, Any]) -> str:
    """Returns a message's text, or its text parts one after the other."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    return content or ""


def as_lines(messages: Sequence[Mapping[str, Any]]) -> str:
    """Returns messages as plain lines after their roles; a sole user message has no role."""
    if len(messages) == 1 and messages[0]["role"] == "user":
        return text_of(messages[0])
    return "\n".join(f"{message['role']}: {text_of(message)}" for message in messages)
