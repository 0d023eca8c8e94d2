"""The formats that rows of a file can have, and what each makes of a row.

A format is told from the keys of a row. Its own keys are the example's `content`, so that the row
can be written again as it was read; the example's texts are what word counts and reports read.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from raslik_jax.data.contents import (
    NO_TARGET,
    Content,
    Conversation,
    Passage,
    TokenRow,
    as_lines,
    text_of,
    without_nulls,
)
from raslik_jax.data.examples import Example
from raslik_jax.data.read.fields import Parts, Row
from raslik_jax.messages import shown, some_of

_ROLES = {
    **{name: "system" for name in ("system", "developer")},
    **{name: "user" for name in ("user", "human", "prompter")},
    **{name: "assistant" for name in ("assistant", "gpt", "chatgpt", "bing", "bard", "model")},
    **{name: "tool" for name in ("tool", "observation", "function_response")},
}


class Format(NamedTuple):
    """A format of rows.

    Attributes:
      title: as people call it.
      names: fields of a row that are its own, beside id, is_target and source.
      claim: how surely a row is of this format, 0 for not at all; of several the highest counts.
      read: from a row and whether it must have an answer, its parts; raises ValueError.
      content: from an example, what a tokenizer reads of it.
      answer: from an example and a text, the example with that as its answer.
      ask: from an example and a text, the example with that before its last question; None where
        the format has no prompt in words.
    """

    title: str
    names: tuple[str, ...]
    claim: Callable[[Row], int]
    read: Callable[[Row, bool], Parts]
    content: Callable[[Example], Content]
    answer: Callable[[Example, str], Example]
    ask: Callable[[Example, str], Example | None]


# alpaca ------------------------------------------------------------------------------------------


def _read_alpaca(row: Row, needs_output: bool) -> Parts:
    asked = row.text("instruction")
    if not asked.strip():
        raise row.problem("instruction", "hold text")
    output = row.text("output", None if needs_output else "")
    parts = Parts(asked, row.text("input", ""), output, {})
    if row.text("system", "").strip():
        parts.content["system"] = row.get("system")
    history = row.get("history") or []
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and [type(text) for text in pair] == [str, str] for pair in history
    ):
        raise row.problem("history", "be a list of [question, answer]")
    if history:
        parts.content["history"] = history
    return parts


def _alpaca_messages(row: Example) -> Conversation:
    said = [("system", row.content["system"])] if "system" in row.content else []
    for question, answer in row.content.get("history", ()):
        said += [("user", question), ("assistant", answer)]
    asked = f"{row.instruction}\n{row.input}" if row.input.strip() else row.instruction
    said += [("user", asked), ("assistant", row.output)]
    return Conversation(tuple({"role": role, "content": text} for role, text in said))


# messages and sharegpt ---------------------------------------------------------------------------


def _first_of(row: Row, name: str) -> Mapping[str, Any]:
    value = row.get(name)
    is_list = isinstance(value, list) and value and isinstance(value[0], dict)
    return value[0] if is_list else {}


def _claims_messages(row: Row) -> int:
    is_given = row.get("messages") is not None or row.get("conversations") is not None
    return 0 if not is_given or _claims_sharegpt(row) else 2


def _claims_sharegpt(row: Row) -> int:
    first = _first_of(row, "conversations")
    return 2 if row.get("messages") is None and "from" in first and "role" not in first else 0


def _check_message(message: Any, place: int) -> None:
    """Raises a ValueError where a value is no message of text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"message {place} must have a role and content, got {shown(message, 40)}")
    content = message.get("content")
    is_parts = isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    )
    if not (content is None or isinstance(content, str) or is_parts):
        raise ValueError(f"the content of message {place} must be text, got {shown(content, 40)}")


def _check_system(row: Row, said: Sequence[str]) -> None:
    """Raises a ValueError where a row has a system prompt beside texts that do not say it."""
    system = row.get("system")
    if isinstance(system, str) and not any(system.strip() in text for text in said):
        raise row.problem("system", "stand in the messages or the prompt, which alone are read")


def _options(row: Row) -> dict[str, Any]:
    """Returns what a row gives to the template beside its messages, as TRL reads it."""
    found = {name: row.get(name) for name in ("tools", "chat_template_kwargs") if row.get(name)}
    tools = found.get("tools", [])
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            raise row.problem("tools", "be a list of tools, or one as JSON") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise row.problem("tools", "be a list of tools, or one as JSON")
    if not isinstance(found.get("chat_template_kwargs", {}), dict):
        raise row.problem("chat_template_kwargs", "be an object")
    return found


def _given_options(content: Mapping[str, Any]) -> dict[str, Any]:
    tools = content.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) else without_nulls(tools)
    given = {"tools": tools} if tools else {}
    return given | without_nulls(content.get("chat_template_kwargs", {}))


def _talk(conversation: Conversation, content: dict[str, Any], needs_output: bool) -> Parts:
    """Returns the texts of a conversation: what stands before the last answer, and that answer."""
    messages = conversation.messages
    if not messages or (needs_output and not conversation.turns):
        roles = [message["role"] for message in messages]
        raise ValueError(
            f"a conversation must have an assistant turn, got {some_of(roles) or 'no message'}: "
            "remove the row, or correct its roles"
        )
    if not needs_output and messages[-1]["role"] != "assistant":
        return Parts(as_lines(messages), "", "", content)
    last = messages[len(conversation.asked)]
    said = text_of(last) or (json.dumps(last["tool_calls"]) if last.get("tool_calls") else "")
    return Parts(as_lines(conversation.asked), "", said, content)


def _read_messages(row: Row, needs_output: bool) -> Parts:
    name = "conversations" if row.get("messages") is None else "messages"
    messages = row.get(name)
    if not isinstance(messages, list):
        raise row.problem(name, "be a list of messages")
    for place, message in enumerate(messages, start=1):
        _check_message(message, place)
    _check_system(row, [text_of(message) for message in messages])
    content = {name: messages, **_options(row)}
    return _talk(Conversation(tuple(messages)), content, needs_output)


def _messages_of(row: Example) -> Conversation:
    messages = tuple(row.content.get("messages") or row.content["conversations"])
    options = _given_options(row.content)
    return Conversation(messages, is_open=_is_open(row, messages), options=options)


def _is_open(row: Example, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether an example is a query that waits for its answer."""
    return not row.output and messages[-1]["role"] != "assistant"


def _answer_messages(row: Example, text: str) -> Example:
    name = "messages" if "messages" in row.content else "conversations"
    asked = row.content[name][: len(_messages_of(row).asked)]
    messages = [*asked, {"role": "assistant", "content": text}]
    return row._replace(output=text, content={**row.content, name: messages})


def _ask_messages(row: Example, text: str) -> Example | None:
    name = "messages" if "messages" in row.content else "conversations"
    num_asked = len(_messages_of(row).asked)
    said = _with_question(row.content[name], num_asked, text)
    if said is None:
        return None
    return row._replace(instruction=as_lines(said[:num_asked]), content={**row.content, name: said})


def _with_question(
    messages: Sequence[Mapping[str, Any]], num_asked: int, text: str
) -> list[Mapping[str, Any]] | None:
    """Returns messages with a text before what the user says last; None where no user speaks."""
    places = [i for i, message in enumerate(messages[:num_asked]) if message["role"] == "user"]
    if not places:
        return None
    last, said = messages[places[-1]], list(messages)
    content = last.get("content") or ""
    is_text = isinstance(content, str)
    longer = text + content if is_text else [{"type": "text", "text": text}, *content]
    said[places[-1]] = {**last, "content": longer}
    return said


def _read_sharegpt(row: Row, needs_output: bool) -> Parts:
    turns = row.get("conversations")
    if not isinstance(turns, list):
        raise row.problem("conversations", "be a list of turns")
    for place, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            raise ValueError(f"turn {place} must have from and value, got {shown(turn, 40)}")
        if turn.get("from") not in _ROLES:
            got = shown(turn.get("from"), 40)
            raise ValueError(f"turn {place} must be from system, human, gpt or tool, got {got}")
    content = {"conversations": turns, **_options(row)}
    if row.text("system", "").strip():
        content["system"] = row.get("system")
    return _talk(Conversation(_sharegpt_messages(content)), content, needs_output)


def _sharegpt_messages(content: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    said = [("system", content["system"])] if "system" in content else []
    said += [(_ROLES[turn["from"]], turn["value"]) for turn in content["conversations"]]
    return tuple({"role": role, "content": text} for role, text in said)


def _sharegpt_of(row: Example) -> Conversation:
    messages, options = _sharegpt_messages(row.content), _given_options(row.content)
    return Conversation(messages, is_open=_is_open(row, messages), options=options)


def _answer_sharegpt(row: Example, text: str) -> Example:
    num_asked = len(_sharegpt_of(row).asked) - ("system" in row.content)
    turns = [*row.content["conversations"][:num_asked], {"from": "gpt", "value": text}]
    return row._replace(output=text, content={**row.content, "conversations": turns})


def _ask_sharegpt(row: Example, text: str) -> Example | None:
    turns = list(row.content["conversations"])
    num_asked = len(_sharegpt_of(row).asked) - ("system" in row.content)
    places = [i for i, turn in enumerate(turns[:num_asked]) if _ROLES[turn["from"]] == "user"]
    if not places:
        return None
    last = turns[places[-1]]
    turns[places[-1]] = {**last, "value": text + last["value"]}
    longer = row._replace(content={**row.content, "conversations": turns})
    return longer._replace(instruction=as_lines(_sharegpt_of(longer).asked))


# prompt and completion ---------------------------------------------------------------------------


def _claims_completion(row: Row) -> int:
    if row.get("prompt") is None:
        return 0
    return 1 if row.get("completion") is None else 2


def _read_completion(row: Row, needs_output: bool) -> Parts:
    prompt, completion = row.get("prompt"), row.get("completion")
    if not isinstance(prompt, list):
        output = row.text("completion", None if needs_output else "")
        asked = row.text("prompt")
        _check_system(row, [asked])
        return Parts(asked, "", output, {"prompt": asked, "completion": output})
    completion = [] if completion is None and not needs_output else completion
    if not isinstance(completion, list) or (needs_output and not completion):
        raise row.problem("completion", "be a list of messages, as the prompt is")
    for place, message in enumerate([*prompt, *completion], start=1):
        _check_message(message, place)
    _check_system(row, [text_of(message) for message in prompt])
    content = {"prompt": prompt, "completion": completion, **_options(row)}
    if not prompt:
        raise row.problem("prompt", "hold a message")
    return Parts(as_lines(prompt), "", _said(completion), content)


def _said(messages: list[Mapping[str, Any]]) -> str:
    """Returns what the messages of a completion say."""
    return text_of(messages[0]) if len(messages) == 1 else as_lines(messages)


def _completion_of(row: Example) -> Content:
    prompt, completion = row.content["prompt"], row.content["completion"]
    if isinstance(prompt, str):
        return Passage(prompt, completion)
    options = _given_options(row.content)
    told = bool(completion)
    return Conversation((*prompt, *completion), len(prompt), told, not told, options)


def _answer_prompt(row: Example, text: str) -> Example:
    is_text = isinstance(row.content["prompt"], str)
    completion = text if is_text else [{"role": "assistant", "content": text}]
    return row._replace(output=text, content={**row.content, "completion": completion})


def _ask_prompt(row: Example, text: str) -> Example | None:
    prompt = row.content["prompt"]
    if isinstance(prompt, str):
        longer = text + prompt
        return row._replace(instruction=longer, content={**row.content, "prompt": longer})
    said = _with_question(prompt, len(prompt), text)
    if said is None:
        return None
    return row._replace(instruction=as_lines(said), content={**row.content, "prompt": said})


# text and tokens ---------------------------------------------------------------------------------


def _read_text(row: Row, needs_output: bool) -> Parts:
    if not row.text("text").strip():
        raise row.problem("text", "hold text")
    return Parts("", "", row.text("text"), {"text": row.text("text")})


def _is_numbers(value: Any, count: int) -> bool:
    is_list = isinstance(value, list) and len(value) == count
    return is_list and all(type(item) is int for item in value)


def _read_tokens(row: Row, needs_output: bool) -> Parts:
    ids = row.get("input_ids")
    if not isinstance(ids, list) or not ids or not _is_numbers(ids, len(ids)) or min(ids) < 0:
        raise row.problem("input_ids", "be a list of token ids")
    labels, (start, end) = _labels_of(row, ids), _unpadded(row, len(ids))
    ids, labels = ids[start:end], labels[start:end]
    # Nothing predicts the first token.
    tokens = TokenRow(tuple(ids), (NO_TARGET, *labels[1:]))
    content = {"input_ids": ids, "labels": list(tokens.labels)}
    if row.get("attention_mask") is not None:
        content["attention_mask"] = [1] * len(ids)
    start, end = tokens.last_answer()
    if start == end:
        raise row.problem("labels", f"have a target behind the first token, not {NO_TARGET} only")
    texts = (" ".join(map(str, part)) for part in (ids[:start], ids[start:end]))
    return Parts(next(texts), "", next(texts), content)


def _labels_of(row: Row, ids: Sequence[int]) -> list[int]:
    """Returns the labels of a row of ids, or what its masks make of these."""
    masks = [row.get(name) for name in ("completion_mask", "assistant_masks")]
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


def _no_answer(row: Example, text: str) -> Example:
    raise ValueError(
        f"a query in the format {row.format} has no prompt to answer, got {shown(row.example_id)}: "
        "give it as prompt and completion"
    )


FORMATS: dict[str, Format] = {
    "alpaca": Format(
        title="instruction, input, output",
        names=("instruction", "input", "output", "system", "history"),
        claim=lambda row: 2 if row.get("instruction") is not None else 0,
        read=_read_alpaca,
        content=_alpaca_messages,
        answer=lambda row, text: row._replace(output=text),
        ask=lambda row, text: row._replace(instruction=text + row.instruction),
    ),
    "messages": Format(
        title="messages with role and content",
        names=("messages", "conversations", "tools", "chat_template_kwargs"),
        claim=_claims_messages,
        read=_read_messages,
        content=_messages_of,
        answer=_answer_messages,
        ask=_ask_messages,
    ),
    "sharegpt": Format(
        title="conversations with from and value",
        names=("conversations", "system", "tools", "chat_template_kwargs"),
        claim=_claims_sharegpt,
        read=_read_sharegpt,
        content=_sharegpt_of,
        answer=_answer_sharegpt,
        ask=_ask_sharegpt,
    ),
    "prompt_completion": Format(
        title="prompt and completion",
        names=("prompt", "completion", "tools", "chat_template_kwargs"),
        claim=_claims_completion,
        read=_read_completion,
        content=_completion_of,
        answer=_answer_prompt,
        ask=_ask_prompt,
    ),
    "text": Format(
        title="text, all of which is learned",
        names=("text",),
        claim=lambda row: 1 if row.get("text") is not None else 0,
        read=_read_text,
        content=lambda row: Passage("", row.content["text"]),
        answer=_no_answer,
        ask=lambda row, text: None,
    ),
    "tokens": Format(
        title="input_ids and labels",
        names=(
            *("input_ids", "labels", "completion_mask", "assistant_masks"),
            *("attention_mask", "position_ids", "seq_lengths"),
        ),
        claim=lambda row: 3 if row.get("input_ids") is not None else 0,
        read=_read_tokens,
        content=lambda row: TokenRow(tuple(row.content["input_ids"]), tuple(row.content["labels"])),
        answer=_no_answer,
        ask=lambda row, text: None,
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


def prefixed(example: Example, text: str) -> Example | None:
    """Returns a row with a text before its last question; None where it asks nothing in words."""
    return FORMATS[example.format].ask(example, text)


def answered(example: Example, text: str) -> Example:
    """Returns a query with a text as its answer, in place of the one it may have."""
    return FORMATS[example.format].answer(example, text)


def detect_format(row: Row) -> str:
    """Returns the name of the format that a row has, by its keys; refuses none and several."""
    claims = {name: record.claim(row) for name, record in FORMATS.items()}
    best = [name for name, claim in claims.items() if claim and claim == max(claims.values())]
    if len(best) == 1:
        return best[0]
    if best:
        raise ValueError(
            f"a row must have one format, got keys of {' and '.join(best)}: say which by "
            "--corpus.records.format"
        )
    raise ValueError(
        "a row must have 'instruction' and 'output', 'messages', 'conversations', 'prompt' and "
        f"'completion', 'text' or 'input_ids', got {some_of(row.record) or 'no keys'}: rename keys "
        "by --corpus.records.fields"
    )
