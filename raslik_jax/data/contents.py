"""What a row is to a tokenizer: a conversation, a passage of text, or ids."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

# The label of a token that is no target.
NO_TARGET = -100


class Conversation(NamedTuple):
    """Messages that a chat template renders; the model is trained on what the assistant says.

    Attributes:
      messages: objects with `role` and `content`, and whatever else the template reads.
      first: position of the first message that may be a target.
      is_completion: whether all from `first` on is one target, whoever says it.
      is_open: whether the assistant has yet to answer, which leaves nothing to learn.
      options: what the template is given beside them, such as `tools`.
    """

    messages: tuple[Mapping[str, Any], ...]
    first: int = 0
    is_completion: bool = False
    is_open: bool = False
    options: Mapping[str, Any] = MappingProxyType({})

    @property
    def turns(self) -> tuple[int, ...]:
        """Positions of the messages of the assistant that are targets."""
        places = range(self.first, 0 if self.is_open else len(self.messages))
        return tuple(i for i in places if self.messages[i]["role"] == "assistant")

    @property
    def asked(self) -> tuple[Mapping[str, Any], ...]:
        """The messages before the last answer, of an open conversation all."""
        if self.is_completion:
            return self.messages[: self.first]
        return self.messages[: self.turns[-1]] if self.turns else self.messages


class Passage(NamedTuple):
    """Text as the model reads it, without a template; without a prompt all of it is learned."""

    prompt: str
    completion: str


class TokenRow(NamedTuple):
    """Ids, and the same ids again where they are targets; elsewhere `NO_TARGET`."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]

    def last_answer(self) -> tuple[int, int]:
        """Returns where the last run of targets begins and ends.

        0 for where it begins, if that is behind the first token, of which nothing is learned in any
        row: it is no prompt.
        """
        end = max((i + 1 for i, label in enumerate(self.labels) if label != NO_TARGET), default=0)
        start = end
        while start and self.labels[start - 1] != NO_TARGET:
            start -= 1
        return start if start > 1 else 0, end


Content = Conversation | Passage | TokenRow


def without_nulls(value: Any) -> Any:
    """Returns a value of JSON without the keys that hold null, at any depth.

    Parquet and saved datasets give each object the keys of all others; TRL leaves these out.
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def text_of(message: Mapping[str, Any]) -> str:
    """Returns what a message says: its text, or its text parts one after the other."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    return content or ""


def as_lines(messages: Sequence[Mapping[str, Any]]) -> str:
    """Returns messages as plain lines, each after its role; what a sole user says stands alone."""
    if len(messages) == 1 and messages[0]["role"] == "user":
        return text_of(messages[0])
    return "\n".join(f"{message['role']}: {text_of(message)}" for message in messages)
