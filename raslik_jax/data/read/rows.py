"""The formats that rows of a file can have, and what each makes of a row.

A format is found by the keys of a row. It turns a row into texts and one of the two contents.
After that no code asks for the format.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from raslik_jax.base.messages import some_of
from raslik_jax.data.contents import (
    Conversation,
    Instruction,
    Passage,
    text_of,
)
from raslik_jax.data.read.fields import Parts, Row, parsed
from raslik_jax.data.read.turns import read_options, read_talk, read_turns


class Format(NamedTuple):
    """A format of rows.

    Attributes:
      names: fields of a row that are its own, in addition to id, is_target and source. A row that
        has the first of them may be of this format.
      read: from a row and whether it must have an answer, its parts; raises ValueError.
      rank: of the formats that a row may be of, the highest rank decides.
      raised_by: a field that raises the rank by one.
      barred_by: a field that no row of this format has.
    """

    names: tuple[str, ...]
    read: Callable[[Row, bool], Parts]
    rank: int = 2
    raised_by: str = ""
    barred_by: str = ""

    def claim(self, row: Row) -> int:
        """Returns how surely a row has this format; 0 for not at all."""
        may_be = row.has(self.names[0]) and not row.has(self.barred_by)
        return may_be * (self.rank + row.has(self.raised_by))


def _read_alpaca(row: Row, needs_output: bool) -> Parts:
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
        return Parts(Instruction(asked, more, answer))
    turns = [("system", system)] if system.strip() else []
    for pair in history:
        turns += zip(("user", "assistant"), pair, strict=True)
    turns += [("user", f"{asked}\n{more}" if more.strip() else asked)]
    turns += [("assistant", answer)] if needs_output or answer else []
    messages = tuple({"role": role, "content": text} for role, text in turns)
    return Parts(Conversation(messages, is_open=messages[-1]["role"] == "user"))


def _talks_in(name: str) -> Callable[[Row, bool], Parts]:
    return lambda row, needs_output: read_talk(row, name, needs_output)


def _read_completion(row: Row, needs_output: bool) -> Parts:
    prompt, completion = (_as_turns(row.get(name)) for name in ("prompt", "completion"))
    if not isinstance(prompt, list):
        if completion is None and needs_output and "completion" not in row.record:
            raise row.problem("completion", "be the learned answer, the row has a prompt only")
        answer = row.text("completion", None if needs_output else "")
        _check_system(row, [row.text("prompt")])
        return Parts(Passage(row.text("prompt"), answer))
    if not prompt:
        raise row.problem("prompt", "hold a message")
    if isinstance(completion, str) and completion.strip():
        completion = [{"role": "assistant", "content": completion}]
    if needs_output and not completion:
        raise row.problem("completion", "be a list of messages, because the prompt is one")
    asked, _ = read_turns(row, "prompt", prompt)
    answers, muted = read_turns(row, "completion", completion or [], first=len(prompt) + 1)
    _check_system(row, [text_of(message) for message in asked])
    if muted and len(muted) < sum(message["role"] == "assistant" for message in answers):
        raise row.problem("completion", "have equal loss flags, some are 0 and others 1")
    talk = Conversation(
        (*asked, *answers), len(asked), bool(answers), not answers, read_options(row)
    )
    return Parts(talk, bool(muted))


def _as_turns(value: Any) -> Any:
    """Returns a field of text or messages; messages may be one, or JSON in a text."""
    found = parsed(value)
    turns = [found] if isinstance(found, dict) else found
    is_talk = isinstance(turns, list) and all(
        isinstance(turn, dict) and {"role", "from"} & turn.keys() for turn in turns
    )
    return turns if is_talk else value


def _check_system(row: Row, texts: Sequence[str]) -> None:
    """Raises a ValueError where a row has a system prompt that its prompt does not say."""
    system = row.get("system")
    if isinstance(system, str) and not any(system.strip() in text for text in texts):
        raise row.problem("system", "be in the prompt, because nothing else is read: move it there")


def _read_text(row: Row, needs_output: bool) -> Parts:
    text = row.text("text")
    if not text.strip():
        raise row.problem("text", "hold text")
    return Parts(Passage("", text))


_OPTIONS = ("system", "tools", "chat_template_kwargs")
FORMATS: dict[str, Format] = {
    "alpaca": Format(("instruction", "input", "output", "system", "history"), _read_alpaca),
    "messages": Format(("messages", *_OPTIONS), _talks_in("messages")),
    "sharegpt": Format(
        ("conversations", *_OPTIONS), _talks_in("conversations"), barred_by="messages"
    ),
    "prompt_completion": Format(
        ("prompt", "completion", "tools", "chat_template_kwargs"),
        _read_completion,
        rank=1,
        raised_by="completion",
    ),
    "text": Format(("text",), _read_text, rank=1),
}

# Of rows of any format.
COMMON = ("id", "is_target", "source")
FIELDS = tuple(
    dict.fromkeys(
        [*("instruction", "input", "output"), *COMMON]
        + [name for record in FORMATS.values() for name in record.names]
    )
)


def detect_format(row: Row) -> str:
    """Returns the name of a row's format by its keys; refuses none and several."""
    claims = {name: record.claim(row) for name, record in FORMATS.items()}
    best = [name for name, claim in claims.items() if claim and claim == max(claims.values())]
    if not best:  # a blank cell, as of a text that is empty
        best = [name for name, record in FORMATS.items() if row.get(record.names[0]) == ""]
    if len(best) == 1:
        return best[0]
    if best:
        raise ValueError(
            f"a row must have one format, got keys of {' and '.join(best)}: choose one with "
            "--corpus.records.format"
        )
    raise ValueError(
        "a row must have 'instruction' and 'output', 'messages', 'conversations', 'prompt' and "
        f"'completion', or 'text', got {some_of(row.record) or 'no keys'}: name its keys with "
        "--corpus.records.fields"
    )
