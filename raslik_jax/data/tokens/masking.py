"""Conversations and passages as token ids with their targets.

Ids and targets equal those of TRL's SFTTrainer for the same rows with `assistant_only_loss` or
`completion_only_loss` (`_prepare_dataset` in trl/trainer/sft_trainer.py at 1.16).
"""

import collections
import json
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from raslik_jax.base.messages import listed_problems, shown
from raslik_jax.data.contents import Conversation, Passage
from raslik_jax.data.examples import Example, content_of
from raslik_jax.data.tokens import chat, prompts
from raslik_jax.data.tokens.tokenization import Tokenizer
from raslik_jax.data.words import refused

_T = TypeVar("_T")


class Masked(NamedTuple):
    """The ids of a row, those that count in the loss (never the first), and the parts left out.

    `dropped` has the kinds of text that the chat template leaves out (see `chat.Rendered`).
    """

    ids: np.ndarray
    is_target: np.ndarray
    dropped: tuple[str, ...] = ()


def mask_rows(
    rows: Sequence[Example],
    tokenizer: Tokenizer,
    template: prompts.Template,
    name: str,
    *,
    only_last: bool,
) -> list[Masked]:
    """Returns the ids and targets of rows that no form of the template renders.

    The names of special tokens in their texts become those tokens, as in training by TRL. `name` is
    the name of the template. With `only_last` only the last answer is a target.
    """
    eos = tokenizer.backend.id_to_token(tokenizer.eos_id)

    def render(row: Example) -> chat.Rendered:
        content = content_of(row)
        if isinstance(content, Passage):
            whole = content.prompt + content.completion
            whole += "" if content.completion.endswith(eos) else eos
            return chat.Rendered(whole, before=content.prompt)
        frame = prompts.require_chat(template, name)
        if content.turns or content.is_completion:
            return chat.render(frame, content)
        question = chat.render_question(frame, content)
        return chat.Rendered(question, before=question, waits=True)

    rendered = _each(rows, render)
    wholes = tokenizer.encode_marked([one.text for one in rendered])
    befores = tokenizer.encode_marked([one.before or "" for one in rendered])
    masked = []
    for row, one, whole, before in zip(rows, rendered, wholes, befores, strict=True):
        prefix = tokenizer.prompt_prefix if isinstance(row.content, Passage) else ()
        ids = [*prefix, *whole.ids, *[tokenizer.eos_id] * one.waits]
        spans = [_tokens_of(whole, *span) for span in one.spans]
        if one.before is not None:
            equal = os.path.commonprefix([before.ids, whole.ids])
            spans = [(len(prefix) + len(equal) if one.before else 0, len(ids))]
        is_target = np.zeros(len(ids), np.bool_)
        for start, end in spans:
            is_target[max(start, 1) : end] = True
        masked.append(Masked(np.array(ids, np.int32), is_target, one.dropped))
    pairs = zip(rows, masked, strict=True)
    empty = [row for row, one in pairs if not (row.is_muted or one.is_target.any())]
    if empty:
        mend = "correct or remove these rows, or the {% generation %} of the chat template"
        raise ValueError(
            listed_problems([f"{_place(row)} has no learned token" for row in empty], mend)
        )
    return [_last_only(one) for one in masked] if only_last else masked


def question_ids(
    rows: Sequence[Example], tokenizer: Tokenizer, template: prompts.Template, name: str
) -> list[list[int]]:
    """Returns the ids that decoding starts from, for rows whose prompt is in no form."""

    def ask(row: Example) -> str:
        content = content_of(row)
        if isinstance(content, Conversation):
            return chat.render_question(prompts.require_chat(template, name), content)
        if content.prompt:
            return content.prompt
        raise ValueError("a query must have a prompt, got none: give a prompt and a completion")

    found = zip(rows, tokenizer.encode_marked(_each(rows, ask)), strict=True)
    prefix = tokenizer.prompt_prefix
    return [
        [*prefix, *one.ids] if isinstance(row.content, Passage) else one.ids for row, one in found
    ]


def read_answers(
    rows: Sequence[Example],
    asked: Sequence[Sequence[int]],
    said: Sequence[Sequence[int]],
    tokenizer: Tokenizer,
    template: prompts.Template,
) -> list[str]:
    """Returns a model's answers as texts. Rows with these answers mostly have the same ids again.

    In a frame an answer keeps the blanks around it and lacks special tokens. A chat template
    separates answer and prompt, so blanks are left out. There an answer has the names of special
    tokens, such as that of a tool call. A passage continues directly, mostly with a blank, which
    SentencePiece drops at the beginning of a text. So its answer is both texts less the prompt's.

    Args:
      rows: the questions, of any format.
      asked: the ids that decoding started from.
      said: the ids that the model added, without the token that ends an answer.
    """

    def read(row: Example, prompt: Sequence[int], answer: Sequence[int]) -> str:
        if not isinstance(content_of(row), Passage):
            is_form = template.has_form(row)
            text = tokenizer.decode(answer) if is_form else tokenizer.decode_marked(answer)
            return text if is_form else text.strip()
        before, whole = map(tokenizer.decode_marked, (prompt, [*prompt, *answer]))
        if whole.startswith(before):
            return whole.removeprefix(before)
        return tokenizer.decode_marked(answer)

    return [read(*parts) for parts in zip(rows, asked, said, strict=True)]


def as_trained(query: Example, row: Example, template: prompts.Template) -> Example:
    """Returns a query in the rendering of a training row: as a text, or with its template options.

    If rows are texts, a query is a prompt and its continuation: some tokenizers put a blank in
    front of every text, so a separate answer would have other ids. A conversation without options
    of its own gets those of the row, such as its tools. A text is refused if rows have a template.
    """
    is_framed = not (isinstance(row.content, Passage) or template.is_bare)
    if is_framed and isinstance(query.content, Passage):
        raise refused("query_text", row=shown(query.example_id))
    if isinstance(row.content, Conversation) and row.content.options:
        talk = content_of(query)
        if isinstance(talk, Conversation) and not talk.options:
            if query.content is None and not query.output:
                talk = talk._replace(messages=talk.asked, is_open=True)
            return query._replace(content=talk._replace(options=row.content.options))
        return query
    if template.has_form(row) or not (template.is_bare and template.has_form(query)):
        return query
    return query._replace(content=Passage(prompts.fill_form(query, template), query.output))


def end_ids(tokenizer: Tokenizer, template: prompts.Template) -> tuple[int, ...]:
    """Returns the ids that end an answer: EOS and the token that the chat template writes there."""
    (written,) = tokenizer.encode_marked([chat.end_of_turn(template.chat) if template.chat else ""])
    marks = tokenizer.backend.get_added_tokens_decoder()
    first = [token for token in written.ids[:1] if token in marks]
    return tuple(dict.fromkeys([tokenizer.eos_id, *first]))


def describe_rows(rows: Sequence[Example], template: str) -> str:
    """Returns a line that counts the rows of a file by content and template, if any."""
    chosen = prompts.TEMPLATES.get(template, prompts.Template(has_chat=True))
    frame = "alpaca" if template == "auto" else template
    chat_template = "chat template" if template in prompts.TEMPLATES else f"template {template}"

    def how(row: Example) -> str:
        if chosen.has_form(row):
            end = chosen.without_input.rpartition("}")[2].lstrip()
            before = end and f" ({end!r} before the answer)"
            return f"instructions, by the template {frame}{before}"
        is_talk = isinstance(content_of(row), Conversation)
        return f"conversations, by the {chat_template}" if is_talk else "texts, unchanged"

    found = collections.Counter(how(row) for row in rows if row.place)
    parts = [f"{count:,} rows of {name}" for name, count in found.items()]
    held = [row.content for row in rows if not row.is_muted]
    muted = len(rows) - len(held), sum(len(c.muted) for c in held if isinstance(c, Conversation))
    for count, what in zip(muted, ("of them", "answers in conversations"), strict=True):
        parts += [f"{count:,} {what} are left out because of their loss flag 0"] if count else []
    return "; ".join(parts)


def describe_options(rows: Sequence[Example], queries: Sequence[Example]) -> str:
    """Returns a line if conversations are asked with other options than some rows have."""

    def options_of(row: Example) -> str:
        options = row.content.options if isinstance(row.content, Conversation) else {}
        return json.dumps(dict(options), sort_keys=True, ensure_ascii=False)

    asked = {options_of(row) for row in queries}
    others = [row for row in rows if options_of(row) not in asked]
    if not (asked and others):
        return ""
    return (
        f"{len(others):,} of {len(rows):,} rows have other template options than the queries: "
        f"{shown(options_of(others[0]), 80)} in {_place(others[0])}, and {shown(min(asked), 80)} "
        "in the queries"
    )


def _each(rows: Sequence[Example], function: Callable[[Example], _T]) -> list[_T]:
    """Returns a function of every row; raises its errors together with each row's place."""
    found, problems = [], []
    for row in rows:
        try:
            found.append(function(row))
        except ValueError as error:
            problems.append(f"{_place(row)}: {error}")
    if problems:
        raise ValueError(listed_problems(problems))
    return found


def _place(row: Example) -> str:
    name = f"row {shown(row.example_id, 40)}"
    where = row.at if row.file else f"{row.place} of its file"
    return f"{name} at {where}" if row.place else name


def _last_only(masked: Masked) -> Masked:
    """Returns a row in which the last run of targets counts."""
    at = np.flatnonzero(masked.is_target)
    start = at[np.flatnonzero(np.diff(at, prepend=-1) > 1)[-1]] if len(at) else 0
    return masked._replace(is_target=masked.is_target & (np.arange(len(masked.ids)) >= start))


def _tokens_of(encoding: Any, start: int, end: int) -> tuple[int, int]:
    """Returns the first token of some characters of a text, and the one after their last."""
    places = range(start, end)  # blanks may belong to no token
    first = next((t for c in places if (t := encoding.char_to_token(c)) is not None), None)
    last = next((t for c in reversed(places) if (t := encoding.char_to_token(c)) is not None), None)
    return (0, 0) if first is None or last is None else (first, last + 1)
