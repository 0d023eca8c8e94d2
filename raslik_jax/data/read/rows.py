"""The formats that rows of a file can have, and what each makes of a row.

A format is found by the keys of a row. It turns a row into texts and one of the three contents.
After that no code asks for the format.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from raslik_jax.base.messages import some_of
from raslik_jax.data.contents import (
    NO_TARGET,
    Conversation,
    Instruction,
    Passage,
    TokenRow,
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
            raise row.problem(
                "completion", "be the answer that was learned; there is only a prompt"
            )
        answer = row.text("completion", None if needs_output else "")
        _check_system(row, [row.text("prompt")])
        return Parts(Passage(row.text("prompt"), answer))
    if not prompt:
        raise row.problem("prompt", "hold a message")
    if isinstance(completion, str) and completion.strip():
        completion = [{"role": "assistant", "content": completion}]
    if needs_output and not completion:
        raise row.problem("completion", "be a list of messages, as the prompt is")
    asked, _ = read_turns(row, "prompt", prompt)
    answers, muted = read_turns(row, "completion", completion or [], first=len(prompt) + 1)
    _check_system(row, [text_of(message) for message in asked])
    if muted and len(muted) < sum(message["role"] == "assistant" for message in answers):
        raise row.problem("completion", "count whole or not at all, and some loss flags are 0")
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
        raise row.problem("system", "be in the prompt, which alone is read: move it there")


def _read_text(row: Row, needs_output: bool) -> Parts:
    text = row.text("text")
    if not text.strip():
        raise row.problem("text", "hold text")
    return Parts(Passage("", text))


def _is_numbers(value: Any, count: int) -> bool:
    is_list = isinstance(value, list) and len(value) == count
    return is_list and all(type(item) is int for item in value)


def _read_tokens(row: Row, needs_output: bool) -> Parts:
    ids = row.get("input_ids")
    if not isinstance(ids, list) or not ids or not _is_numbers(ids, len(ids)):
        raise row.problem("input_ids", "be a list of token ids")
    if not 0 <= min(ids) <= max(ids) < 2**31:
        raise row.problem("input_ids", "be token ids from 0 to 2147483647")
    labels, (start, end) = _labels_of(row, ids), _unpadded(row, len(ids))
    ids, labels = ids[start:end], labels[start:end]
    # Nothing predicts the first token.
    tokens = TokenRow(tuple(ids), (NO_TARGET, *labels[1:]))
    start, end = tokens.last_answer()
    if start == end:
        raise row.problem("labels", f"have a target behind the first token, not {NO_TARGET} only")
    return Parts(tokens)


def _labels_of(row: Row, ids: Sequence[int]) -> list[int]:
    """Returns the labels of a row of ids, or those that its masks give."""
    masks = [row.get(name) for name in ("completion_mask", "assistant_masks", "loss_mask")]
    masks = [mask for mask in masks if mask is not None]
    labels = row.get("labels")
    if labels is None:
        if not all(_is_numbers(mask, len(ids)) for mask in masks):
            raise ValueError("the masks of a row must be as long as its 'input_ids': correct them")
        labels = [
            token if all(bits) else NO_TARGET for token, *bits in zip(ids, *masks, strict=True)
        ]
    if not _is_numbers(labels, len(ids)) or any(
        label not in (NO_TARGET, token) for token, label in zip(ids, labels, strict=True)
    ):
        raise row.problem("labels", f"repeat each id or be {NO_TARGET}, as many as 'input_ids'")
    return list(labels)


def _unpadded(row: Row, length: int) -> tuple[int, int]:
    """Returns where the ids of a row begin and end that are no pads; refuses several sequences."""
    mask = row.get("attention_mask")
    mask = [1] * length if mask is None else mask
    # Some packers number the sequences of a row by it.
    if not isinstance(mask, list) or len(mask) != length or not all(bit in (0, 1) for bit in mask):
        raise row.problem("attention_mask", "be 0 or 1 for each of 'input_ids', of one sequence")
    if 1 not in mask:
        raise row.problem("attention_mask", "have a 1")
    start, end = mask.index(1), length - mask[::-1].index(1)
    if 0 in mask[start:end]:
        raise row.problem("attention_mask", "have its zeros at the ends, where the pads are")
    places = row.get("position_ids")
    if places is not None and not (
        _is_numbers(places, length)
        and places[start:end] == [*range(places[start], places[start] + end - start)]
    ):
        raise row.problem("position_ids", "count through one sequence, as of a row not packed")
    lengths = row.get("seq_lengths")
    if lengths is not None and not (isinstance(lengths, list) and len(lengths) == 1):
        raise row.problem("seq_lengths", "be of one sequence, as of a row not packed")
    return start, end


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
    "tokens": Format(
        ("input_ids", "labels", "completion_mask", "assistant_masks", "loss_mask")
        + ("attention_mask", "position_ids", "seq_lengths"),
        _read_tokens,
        rank=3,
    ),
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
            f"a row must have one format, got keys of {' and '.join(best)}: choose by "
            "--corpus.records.format"
        )
    raise ValueError(
        "a row must have 'instruction' and 'output', 'messages', 'conversations', 'prompt' and "
        f"'completion', 'text' or 'input_ids', got {some_of(row.record) or 'no keys'}: rename keys "
        "by --corpus.records.fields"
    )
