"""The formats of rows, and the content that each gives a row.

The keys of a row show its format. The format turns it into one of the contents. After that no code
asks for the format.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from raslik_jax.base.files import parse_json
from raslik_jax.base.messages import shown, some_of
from raslik_jax.data.contents import Conversation, Passage, text_of
from raslik_jax.data.examples import Example, example_of
from raslik_jax.data.read.pieces import MEDIA
from raslik_jax.data.words import by_word, flag_of, load_words, refused

_KEYS = load_words("row_keys")
# Fields that hold lists or objects, and never a text of its own.
_NESTED = frozenset(_KEYS["nested"])
# Names of roles in files -> the role of a chat template. Some templates read names of their own.
_ROLES, _OF_TEMPLATES = by_word(_KEYS["roles"]), frozenset(_KEYS["roles_of_templates"])
# Roles whose messages are calls as JSON: LLaMA-Factory's and ms-swift's.
_CALLS = frozenset(_KEYS["roles_of_calls"])
# Loss flags: OpenAI and Mistral; axolotl; ms-swift; LLaMA-Factory.
FLAGS: tuple[str, ...] = tuple(_KEYS["loss_flags"])
# The keys of a message part that is no text, those of its text, and those of what a message says.
_MEDIA: list[str] = _KEYS["media"]
_PART_TEXTS: list[str] = _KEYS["part_texts"]
_SPEAKERS = frozenset(("system", "user", "assistant"))
_SAID = frozenset(_KEYS["message_texts"])
_LOST_TALK = re.compile(r"(?s)\s*\[\s*\{\s*'(role|from|content|value)'\s*:.*\}\s*\]\s*\Z")
_IN_PROMPT = "be in the prompt, because nothing else is read: move it there"


class Row(NamedTuple):
    """A row of a file through a field map from fields to keys."""

    record: Mapping[str, Any]
    keys: Mapping[str, str]

    def get(self, name: str) -> Any:
        """Returns the value of a field or None; reads a list or object in a table's JSON text."""
        value = self.record.get(self.keys[name]) if name in self.keys else None
        return parsed(value) if name in _NESTED else value

    def has(self, name: str) -> bool:
        """Returns whether a field holds something; a blank cell of a table does not."""
        return self.get(name) not in (None, "")

    def problem(self, name: str, must: str) -> ValueError:
        """Returns the error of a field with a wrong value; it names the row's keys."""
        value, key = self.get(name), self.keys.get(name, name)
        got = "nothing" if value is None else shown(value, 40)
        if value is None and self.record and key not in self.record:
            other = f"--corpus.records.fields={name}=KEY names another key"
            got += f" (the row has {some_of(self.record)}; {other})"
        elif name in _NESTED and isinstance(value, str):
            got += ", which is not JSON (json.dumps writes it)"
        return ValueError(f"{key!r} must {must}, got {got}")

    def text(self, name: str, default: str | None = None) -> str:
        """Returns the text of a field, "" for null; refuses a missing field without a default."""
        value = self.get(name)
        if value is None:
            value = "" if self.keys.get(name) in self.record else default
        if not isinstance(value, str):
            raise self.problem(name, "be text")
        return value


class Format(NamedTuple):
    """A format of rows.

    Attributes:
      names: fields of this format, in addition to id, is_target and source. A row that has the
        first of them may be of this format.
      read: function from a row, and whether it must have an answer, to an unnamed example; raises
        ValueError. The example is muted if the loss flags exclude all of it.
      rank: if several formats fit a row, the highest rank decides.
      raised_by: a field that raises the rank by one.
      barred_by: a field that no row of this format has.
    """

    names: tuple[str, ...]
    read: Callable[[Row, bool], Example]
    rank: int = 2
    raised_by: str = ""
    barred_by: str = ""

    def claim(self, row: Row) -> int:
        """Returns how well a row fits this format; 0 if it does not."""
        may_be = row.has(self.names[0]) and not row.has(self.barred_by)
        return may_be * (self.rank + row.has(self.raised_by))


def parsed(value: Any) -> Any:
    """Returns the list or the object that a text holds as JSON; otherwise the value itself."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return parse_json(value, "a cell")
        except ValueError:
            pass
    return value


# formats -----------------------------------------------------------------------------------------


def _read_alpaca(row: Row, needs_output: bool) -> Example:
    asked = row.text("instruction")
    if not asked.strip():
        raise row.problem("instruction", "hold text")
    more, answer = row.text("input", ""), row.text("output", None if needs_output else "")
    history = row.get("history") or []
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and [type(text) for text in pair] == [str, str] for pair in history
    ):
        raise row.problem("history", "be a list of [question, answer]")
    system = row.text("system", "")
    if not (system.strip() or history):
        return Example("", asked, more, answer)
    turns = [("system", system)] if system.strip() else []
    for pair in [*history, (f"{asked}\n{more}" if more.strip() else asked, answer)]:
        turns += zip(("user", "assistant"), pair, strict=True)
    is_open = not (needs_output or answer)
    messages = [{"role": role, "content": text} for role, text in turns]
    return example_of(Conversation(tuple(messages[:-1] if is_open else messages), is_open=is_open))


def _reader_of(name: str) -> Callable[[Row, bool], Example]:
    """Returns the reader of a conversation in one field with the assistant's turns as targets."""

    def read(row: Row, needs_output: bool) -> Example:
        turns = row.get(name)
        messages, muted = _messages_of(row, name, turns)
        # LLaMA-Factory reads the column of ShareGPT's rows. TRL reads messages with roles alone.
        first = parsed(turns[0]) if isinstance(turns, list) and turns else turns or {}
        is_own = "from" in first and "role" not in first and messages[0]["role"] != "system"
        must = "be in the messages, the only text that is read: move it there"
        if system := _system_of(row, map(text_of, messages), must, is_own=is_own):
            messages = ({"role": "system", "content": system}, *messages)
            muted = tuple(place + 1 for place in muted)
        waits = not needs_output and bool(messages) and messages[-1]["role"] != "assistant"
        muted *= needs_output  # a query's flags say nothing of its answer
        talk = Conversation(messages, is_open=waits, options=_options_of(row), muted=muted)
        if not messages or (needs_output and not talk.spoken):
            got = some_of(message["role"] for message in messages) or "no message"
            raise refused("no_assistant", got=got)
        return example_of(talk, is_muted=needs_output and not talk.turns)

    return read


def _read_completion(row: Row, needs_output: bool) -> Example:
    prompt, completion = map(_as_turns, (row.get("prompt"), row.get("completion")))
    key = row.keys["completion"]
    if needs_output and completion is None and key not in row.record:
        raise refused("prompt_only", key=key, got=some_of(row.record))
    if not isinstance(prompt, list):
        if _LOST_TALK.match(row.text("prompt")):
            raise row.problem("prompt", "be text, or its messages as JSON (json.dumps writes it)")
        answer = row.text("completion", None if needs_output else "")
        if needs_output and not (row.text("prompt") + answer).strip():
            raise row.problem("completion", "hold text, because the prompt is blank")
        _system_of(row, [row.text("prompt")], _IN_PROMPT)
        return example_of(Passage(row.text("prompt"), answer))
    if not prompt:
        raise row.problem("prompt", "hold a message")
    if isinstance(completion, str) and completion.strip():
        completion = [{"role": "assistant", "content": completion}]
    if needs_output and not completion:
        raise row.problem("completion", "be a list of messages, because the prompt is one")
    asked, _ = _messages_of(row, "prompt", prompt)
    said, muted = _messages_of(row, "completion", completion or [], first=len(prompt) + 1)
    _system_of(row, map(text_of, asked), _IN_PROMPT)
    talk = Conversation((*asked, *said), len(asked), bool(said), not said, _options_of(row))
    if needs_output and muted and len(muted) < len(talk.spoken):
        raise row.problem("completion", "have equal loss flags, some are 0 and others 1")
    return example_of(talk, is_muted=needs_output and bool(muted))


def _as_turns(value: Any) -> Any:
    """Returns a field of text or messages; messages may be one, or JSON in a text."""
    found = parsed(value)
    turns = [found] if isinstance(found, dict) else found
    is_talk = isinstance(turns, list) and all(
        isinstance(turn, dict) and {"role", "from"} & turn.keys() for turn in turns
    )
    return turns if is_talk else value


def _read_text(row: Row, needs_output: bool) -> Example:
    if not row.text("text").strip():
        raise row.problem("text", "hold text")
    return example_of(Passage("", row.text("text")))


_OPTIONS = ("tools", "chat_template_kwargs")
FORMATS: dict[str, Format] = {
    "alpaca": Format(("instruction", "input", "output", "system", "history"), _read_alpaca),
    "messages": Format(("messages", "system", *_OPTIONS), _reader_of("messages")),
    "sharegpt": Format(
        ("conversations", "system", *_OPTIONS), _reader_of("conversations"), barred_by="messages"
    ),
    "prompt_completion": Format(
        ("prompt", "completion", *_OPTIONS), _read_completion, rank=1, raised_by="completion"
    ),
    "text": Format(("text",), _read_text, rank=1),
}
# Of rows of any format.
COMMON = ("id", "is_target", "source")
_OF_FORMATS = [name for record in FORMATS.values() for name in record.names]
FIELDS = tuple(dict.fromkeys([*_OF_FORMATS[:3], *COMMON, *_OF_FORMATS]))


def detect_format(row: Row) -> str:
    """Returns the name of a row's format by its keys; refuses none and several."""
    claims = {name: record.claim(row) for name, record in FORMATS.items()}
    best = [name for name, claim in claims.items() if claim and claim == max(claims.values())]
    if not best:  # a blank cell, as of a text that is empty
        best = [name for name, record in FORMATS.items() if row.get(record.names[0]) == ""]
    if len(best) == 1:
        return best[0]
    if best:
        raise refused("row_formats", got=" and ".join(best))
    raise refused("row_unknown", got=some_of(row.record) or "no keys")


# conversations -----------------------------------------------------------------------------------

_Messages = tuple[Mapping[str, Any], ...]


def _messages_of(
    row: Row, name: str, value: Any, *, first: int = 1
) -> tuple[_Messages, tuple[int, ...]]:
    """Returns a field's messages, and the positions of the assistant's with a loss flag of 0."""
    turns = [value] if isinstance(value, dict) else value
    if not isinstance(turns, list):
        raise row.problem(name, "be a list of messages with role and content, or from and value")
    turns = [*map(parsed, turns)]
    messages = [_message(turn, place) for place, turn in enumerate(turns, start=first)]
    flags = [_is_counted(turn, place) for place, turn in enumerate(turns, start=first)]
    pairs = enumerate(zip(messages, flags, strict=True))
    muted = (at for at, (one, counts) in pairs if not counts and one["role"] == "assistant")
    return tuple(messages), tuple(muted)


def _message(turn: Any, place: int) -> dict[str, Any]:
    said = (turn.get("role"), turn.get("from")) if isinstance(turn, dict) else (None, None)
    name = next((one for one in said if isinstance(one, str)), None)
    if name is None or not _SAID & turn.keys():
        raise ValueError(f"message {place} must have a role and content, got {shown(turn, 40)}")
    is_own = isinstance(said[0], str) and name in _OF_TEMPLATES
    if name not in _ROLES and (said[0] is None or name.lower() in _ROLES):
        raise refused("message_role", place=place, got=shown(name, 40))
    kept = {key: v for key, v in turn.items() if key not in ("from", "value", *FLAGS)}
    # A template may know roles of its own.
    kept["role"] = name if is_own else _ROLES.get(name, name)
    text = next((turn[key] for key in ("content", "value") if turn.get(key) is not None), None)
    is_call = name in _CALLS and not is_own
    kept["content"] = None if is_call else _content(text, place, kept["role"])
    if is_call:
        kept["tool_calls"] = _calls_of(text, place)
    elif "tool_calls" in kept:
        kept["tool_calls"] = parsed(kept["tool_calls"])
    return kept


def _calls_of(said: Any, place: int) -> list[dict[str, Any]]:
    """Returns the calls that a message of a role for calls has as JSON, one or a list."""
    found = parsed(said)
    calls = found if isinstance(found, list) else [found]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise refused("message_call", place=place, got=shown(said, 40))
    return [{"type": "function", "function": call} for call in calls]


def _content(content: Any, place: int, role: str) -> Any:
    """Returns a message's content: a text, null, or parts of text; not a tool's object."""
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, dict) and not any(kind in content for kind in _MEDIA):
        content = [content]
    if not isinstance(content, list):
        raise ValueError(f"the content of message {place} must be text, got {shown(content, 40)}")
    parts = []
    for part in content:
        fields = {"text": part} if isinstance(part, str) else part if isinstance(part, dict) else {}
        kind = str(fields.get("type") or "")
        for name in _MEDIA:
            if name in kind or fields.get(name) or fields.get(f"{name}_url"):
                raise refused("message_media", place=place, kind=name)
        texts = [fields[key] for key in _PART_TEXTS if isinstance(fields.get(key), str)]
        if len(texts) != 1 or (role not in _SPEAKERS and kind != "text"):  # a tool's object
            raise ValueError(f"the content of message {place} must be text, got {shown(part, 40)}")
        others = {key: value for key, value in fields.items() if key not in _PART_TEXTS}
        parts.append({"type": "text", **others, "text": texts[0]})
    return parts


def _is_counted(turn: Any, place: int) -> bool:
    """Returns whether the loss flags of a message include it; refuses fractions and the like."""
    fields, counts = turn if isinstance(turn, dict) else {}, True
    for name in FLAGS:
        value = fields.get(name)
        flag = True if value is None or value == "" else flag_of(value)
        if flag is None:
            raise refused("message_flag", flag=name, place=place, got=shown(value, 40))
        counts = counts and flag
    if fields.get("train_detail"):
        raise refused("message_detail", place=place)
    return counts


def _system_of(row: Row, texts: Iterable[str], must: str, *, is_own: bool = False) -> str:
    """Returns a row's system prompt that is in no message; refuses it unless it `is_own`."""
    system = row.get("system") or ""
    if not isinstance(system, str):
        raise row.problem("system", "be text")
    said = system.strip()
    if said and not is_own and not any(said in text for text in texts):
        raise row.problem("system", must)
    return system if said and is_own else ""


def _options_of(row: Row) -> dict[str, Any]:
    """Returns a row's further input for the template; an empty list of tools is one, as in TRL."""
    kwargs, given = row.get("chat_template_kwargs") or {}, row.get("tools")
    tools = given or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise row.problem("tools", "be a list of tools, or one as JSON")
    if not isinstance(kwargs, dict):
        raise row.problem("chat_template_kwargs", "be an object")
    if row.get("conversations"):  # LLaMA-Factory's
        tools = [{"type": "function", "function": t} if "name" in t else t for t in tools]
        given = tools or None  # an empty list is none there
    return kwargs if given in (None, "") else {"tools": tools} | kwargs


# columns that no reader follows ------------------------------------------------------------------


def require_read(query: Example) -> None:
    """Refuses a query without an output whose answer is under another key."""
    for key in () if query.output else _KEYS["answers"]:
        if isinstance(said := query.extra.get(key), str) and said.strip():
            raise refused("answer_unread", column=key)


def unread_columns(row: Row) -> Iterator[ValueError]:
    """Yields the errors of columns of preferences, ids, images, audio or videos.

    A column in the field map is read for another purpose.
    """
    mapped = {key for name, key in row.keys.items() if name != key}
    filled = [key for key, value in row.record.items() if value not in (None, "", [], {})]
    # As TRL, axolotl, LLaMA-Factory and ms-swift name them.
    chosen = [key for key in filled if re.fullmatch(r"chosen(_\w+)?", key)]
    rejected = [key for key in filled if re.fullmatch(r"rejected(_\w+)?|non_preferred_output", key)]
    if not {*chosen} & mapped:
        if chosen and rejected:
            answers = parsed(row.record[chosen[0]])
            is_whole = isinstance(answers, list) and len(answers) > 1
            # How the chosen answers are read with other columns.
            maps = {"": "messages="} if is_whole else _KEYS["maps_of_chosen"]
            fields = next(text for name, text in maps.items() if not name or row.record.get(name))
            names = {"chosen": chosen[0], "rejected": rejected[0]}
            yield refused("pairs", **names, fields=fields + chosen[0])
        elif {*_KEYS["rejected"]} & {*rejected}:
            yield refused("rejected", column=rejected[0])
        # KTO's label: LLaMA-Factory's, and TRL's next to a prompt or messages.
        is_talk = bool({"prompt", "messages", "conversations"} & {*filled})
        for name in ("kto_tag", *["label"] * is_talk):
            value = None if name in mapped else row.record.get(name)
            # A 0 may be a class in a column of the user's own, but not next to a completion.
            is_number = name == "kto_tag" or "completion" in filled
            if str(value).lower() == "false" or (is_number and flag_of(value) is False):
                yield refused("kto", column=name)
    for key in (key for key in filled if key not in mapped):
        flags = parsed(row.record[key]) if key in FLAGS else None
        if isinstance(flags, list) and None not in map(flag_of, flags):
            yield refused("flags_listed", column=key)
        kind = MEDIA.fullmatch(key)
        # A text may be a column of the user's own, unless a text of the row has its place.
        if kind and (
            isinstance(parsed(row.record[key]), list | dict) or f"<{kind[1]}>" in str(row.record)
        ):
            yield refused("media", kind=kind[1], column=key)
    if "input_ids" in filled and "input_ids" not in mapped:
        yield refused("ids")
