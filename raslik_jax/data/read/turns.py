"""The messages of a conversation in trainers' formats with their loss flags."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from raslik_jax.base.messages import shown, some_of
from raslik_jax.data.contents import Conversation, text_of, without_nulls
from raslik_jax.data.read.fields import Parts, Row, parsed
from raslik_jax.data.words import by_word, load_words

_KEYS = load_words("row_keys")
# Names of roles in ShareGPT's and ms-swift's files -> the role of a chat template. Some templates
# read names of their own as a `role`.
_ROLES, _OF_TEMPLATES = by_word(_KEYS["roles"]), frozenset(_KEYS["roles_of_templates"])
# Loss flags: OpenAI and Mistral; axolotl; ms-swift; LLaMA-Factory.
FLAGS: tuple[str, ...] = tuple(_KEYS["loss_flags"])
# The keys of a message part that is no text.
_MEDIA: list[str] = _KEYS["media"]


class Turns(NamedTuple):
    """Messages with `role` and `content`, and the positions of those whose loss flag is 0."""

    messages: tuple[Mapping[str, Any], ...]
    muted: tuple[int, ...]


def read_turns(row: Row, name: str, value: Any, *, first: int = 1) -> Turns:
    """Returns the messages of a field: a list of `role` and `content` or of `from` and `value`.

    Args:
      row: names the field in an error.
      name: of the field.
      value: of the field; one message means a list of one.
      first: number of the first message in an error.
    """
    turns = [value] if isinstance(value, dict) else value
    if not isinstance(turns, list):
        raise row.problem(name, "be a list of messages with role and content, or from and value")
    messages = [_message(turn, place) for place, turn in enumerate(turns, start=first)]
    flags = [_flag(turn, place) for place, turn in enumerate(turns, start=first)]
    muted = [
        place
        for place, (message, flag) in enumerate(zip(messages, flags, strict=True))
        if flag == 0 and message["role"] == "assistant"
    ]
    return Turns(tuple(messages), tuple(muted))


def _message(turn: Any, place: int) -> dict[str, Any]:
    turn = parsed(turn)
    if not isinstance(turn, dict):
        raise ValueError(f"message {place} must have a role and content, got {shown(turn, 40)}")
    said = turn.get("role"), turn.get("from")
    name = next((one for one in said if isinstance(one, str)), None)
    if name is None:
        raise ValueError(f"message {place} must have a role and content, got {shown(turn, 40)}")
    role = name if isinstance(said[0], str) and name in _OF_TEMPLATES else _ROLES.get(name, "")
    if not role and said[0] is None:
        must = "must be from system, human, gpt, tool or another of ShareGPT's roles"
        raise ValueError(f"message {place} {must}, got {shown(name, 40)}")
    role = role or name  # a template may know roles of its own
    kept = {key: v for key, v in turn.items() if key not in ("from", "value", *FLAGS)}
    content = turn.get("content", turn.get("value"))
    kept |= {"role": role, "content": _content(content, place)}
    if "tool_calls" in kept:
        kept["tool_calls"] = parsed(kept["tool_calls"])
    return kept


def _content(content: Any, place: int) -> Any:
    """Returns a message's content: a text, null, or parts of text."""
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, dict) and not any(kind in content for kind in _MEDIA):
        content = [content]
    if not isinstance(content, list):
        raise ValueError(f"the content of message {place} must be text, got {shown(content, 40)}")
    return [_part(part, place) for part in content]


def _part(part: Any, place: int) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, dict):
        kind = str(part.get("type") or "")
        seen = [
            name for name in _MEDIA if name in kind or part.get(name) or part.get(f"{name}_url")
        ]
        if seen:
            raise ValueError(
                f"message {place} must be text, got a part with {seen[0]}, which no model here "
                "reads: remove the row"
            )
        texts = [
            part[key] for key in ("text", "value", "content") if isinstance(part.get(key), str)
        ]
        if texts:
            others = {k: v for k, v in part.items() if k not in ("text", "value", "content")}
            return {"type": "text", **others, "text": texts[0]}
    raise ValueError(f"the content of message {place} must be text, got {shown(part, 40)}")


def _flag(turn: Any, place: int) -> int:
    """Returns 0 where the loss flags of a message exclude it, else 1; refuses another value."""
    found = 1
    for name in FLAGS:
        value = turn.get(name) if isinstance(turn, dict) else None
        if value is None or value == "":
            continue
        if isinstance(value, str) and value.lower() in ("true", "false"):
            value = value.lower() == "true"
        if value not in (0, 1):
            raise ValueError(
                f"{name!r} of message {place} must be 0, 1, false or true, got {shown(value, 40)}"
            )
        found = min(found, int(value))
    details = turn.get("train_detail") if isinstance(turn, dict) else None
    if details:
        raise ValueError(
            f"message {place} must have 'train', got 'train_detail': parts of a message "
            "cannot be left out"
        )
    return found


def read_talk(row: Row, name: str, needs_output: bool) -> Parts:
    """Returns a conversation of one field whose targets are the assistant's messages."""
    turns = row.get(name)
    messages, muted = read_turns(row, name, turns)
    if system := _system_of(row, turns, messages):
        messages = ({"role": "system", "content": system}, *messages)
        muted = tuple(place + 1 for place in muted)
    waits = not needs_output and bool(messages) and messages[-1]["role"] != "assistant"
    talk = Conversation(messages, is_open=waits, options=read_options(row), muted=muted)
    if not messages or (needs_output and not talk.spoken):
        roles = [message["role"] for message in messages]
        raise ValueError(
            f"a conversation must have an assistant turn, got {some_of(roles) or 'no message'}: "
            "remove the row, or correct its roles"
        )
    return Parts(talk, needs_output and not talk.turns)


def _system_of(row: Row, turns: Sequence[Any], messages: Sequence[Mapping[str, Any]]) -> str:
    """Returns a row's system prompt that the messages do not have (as ShareGPT's rows)."""
    system = row.get("system")
    if not isinstance(system, str) or not system.strip():
        return ""
    if any(system.strip() in text_of(message) for message in messages):
        return ""
    # LLaMA-Factory reads the column of ShareGPT's rows. TRL reads messages with roles alone.
    is_shared = "from" in turns[0] and "role" not in turns[0] if turns else False
    if not is_shared or messages[0]["role"] == "system":
        raise row.problem("system", "be in the messages, the only text that is read: move it there")
    return system


def read_options(row: Row) -> dict[str, Any]:
    """Returns a row's further input for the template, as TRL reads it."""
    tools, kwargs = row.get("tools") or [], row.get("chat_template_kwargs") or {}
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise row.problem("tools", "be a list of tools, or one as JSON")
    if not isinstance(kwargs, dict):
        raise row.problem("chat_template_kwargs", "be an object")
    found: dict[str, Any] = without_nulls(kwargs)
    return ({"tools": without_nulls(tools)} if tools else {}) | found
