"""The content of a row for a tokenizer: a conversation, or a passage of text.

Every file format becomes one of the two.
"""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple


class Conversation(NamedTuple):
    """Messages that a chat template renders; the model is trained on the assistant's messages.

    Attributes:
      messages: objects with `role`, `content` and other fields of the template.
      first: position of the first message that may be a target.
      is_completion: whether all messages from `first` on are one target, in any role.
      is_open: whether the assistant has not answered yet; then nothing is learned.
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

    @property
    def question(self) -> int | None:
        """Position of the last message of a user before the last answer."""
        places = (i for i, message in enumerate(self.asked) if message["role"] == "user")
        return max(places, default=None)


class Passage(NamedTuple):
    """Text as the model reads it, without a template; without a prompt all of it is learned."""

    prompt: str
    completion: str


Content = Conversation | Passage


def texts_of(content: Content) -> tuple[str, str]:
    """Returns the text before the last answer and that answer, to read.

    A tool call without a text is its JSON.
    """
    if isinstance(content, Passage):
        return content.prompt, content.completion
    asked = content.asked
    answer = content.messages[len(asked) :][: None if content.is_completion else 1]
    if len(answer) != 1:
        return as_lines(asked), as_lines(answer)
    calls = answer[0].get("tool_calls") or answer[0].get("function_call")
    return as_lines(asked), text_of(answer[0]) or (json.dumps(calls) if calls else "")


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
