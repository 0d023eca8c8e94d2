"""Conversations as text by a chat template in transformers' Jinja sandbox.

A template is the checkpoint's text or the user's. The sandbox runs no code of either. No torch is
needed.
"""

import datetime
import importlib.util
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from raslik_jax.base import bounded
from raslik_jax.base.messages import one_line, shown
from raslik_jax.data.contents import Conversation, text_of
from raslik_jax.data.words import refused

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Some templates write the day of their rendering. Llama 3's takes a day as input, and others do
# not. All get the day that Llama 3's writes without a clock.
_DAY = datetime.datetime(2024, 7, 26)
_FIXED = {"date_string": _DAY.strftime("%d %b %Y")}
_CODES = {f"%{code}": _DAY.strftime(f"%{code}") for code in "aAbBcdfHIjmMpSUwWxXyYZ"}
_CODES |= {"%-d": "26", "%e": "26", "%-m": "7", "%F": "2024-07-26"}
# In front of a template, in place of the function of transformers, which lets no other be given. A
# block takes the line feed behind it away, and no more.
_CLOCK = "{{% macro strftime_now(format) %}}{{{{ format{} }}}}{{% endmacro %}}\n".format(
    "".join(f"|replace({code!r}, {text!r})" for code, text in _CODES.items())
)
# Some versions take torch with them, which is beyond the limits of a template.
LOADED_FIRST = "transformers.utils.chat_template_utils"
# How many characters a template may write beyond so many times those of the messages.
_MOST_ADDED, _MOST_TIMES = 100_000, 20

_QUESTION, _ANSWER = ({"role": role, "content": "a"} for role in ("user", "assistant"))
# The places of marks: at both ends of each text, at its end, within it.
_WAYS = ("ends", "end", "within")
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_TAGS = re.compile(r"(</?think(?:ing)?>|\[/?THINK\])")
_Message = Mapping[str, Any]
_Said = Sequence[_Message]
_Change = Callable[[str, str], str]
_Spans = Sequence[tuple[int, int]]


class Rendered(NamedTuple):
    """A row as text with its targets.

    Attributes:
      text: the whole text of the row.
      spans: the first character of each answer in order, and the one behind its last.
      before: a text before all targets; None if the spans show the targets.
      dropped: parts of the row that the template does not write: messages by role, "tools", and
        "thought", "text" and "tool call" of answers.
      waits: whether the answer is missing; only its EOS is then a target.
    """

    text: str
    spans: _Spans = ()
    before: str | None = None
    dropped: tuple[str, ...] = ()
    waits: bool = False


class ChatTemplate(NamedTuple):
    """A chat template in Jinja with the names of special tokens that it may read."""

    source: str
    special_tokens: Mapping[str, str]


def render(template: ChatTemplate, conversation: Conversation) -> Rendered:
    """Returns a conversation as text with its targets, one for each answer.

    The text is one rendering of all messages. An answer begins behind the header after which the
    model writes. It ends with its turn. `{% generation %}` in the template shows its place.
    Otherwise marks in the messages show it. A completion begins with the first token at which the
    whole text and the prompt differ, as in TRL.
    """
    messages, turns = conversation.messages, conversation.turns
    writer, is_completion = _Writer.of(template, conversation), conversation.is_completion
    by_template = bool(_GENERATION.search(template.source)) and not is_completion
    chosen = {conversation.first - 1} if is_completion else {at - 1 for at in turns}
    chosen |= {*turns}
    if by_template:
        chosen |= {at for at, message in enumerate(messages) if message["role"] == "assistant"}
    ((text, spans),) = writer.write((messages, False), tells_spans=by_template)
    for way in _WAYS:
        said = _mark(messages, chosen, writer.salt, way)
        whole = writer.read(said)
        if whole.text == text:
            dropped = _dropped(conversation, whole)
            break
    else:  # no mark leaves the text as it is: only texts that begin alike show answers then
        said, whole, dropped = [*messages], _Marked(text, {}), ()
    dropped += _unsaid(conversation, text)
    if by_template:
        return Rendered(text, _targets_of(spans, conversation, whole), dropped=dropped)
    if is_completion:
        at, head = whole.after(writer.ask(said[: conversation.first]))
        return Rendered(text, ((at, len(text)),), (whole.text[:at] + head) or None, dropped)
    last = len(messages) - 1
    spans = [
        (writer.begin(said, at, whole), len(text) if at == last else writer.end(said, at, whole))
        for at in turns
    ]
    return Rendered(text, spans, dropped=dropped)


def render_question(template: ChatTemplate, conversation: Conversation) -> str:
    """Returns the text after which the model writes its answer."""
    return _Writer.of(template, conversation).ask(conversation.asked).text


def require_system(template: ChatTemplate) -> None:
    """Raises a ValueError if a template has no place for a system prompt or leaves it out."""
    said = "Answer as a sailor."
    messages = ({"role": "system", "content": said}, _QUESTION)
    try:
        text = render_question(template, Conversation(messages, is_open=True))
    except ValueError as error:
        raise refused("system_refused") from error
    if said not in text:
        raise refused("system_unwritten")


def end_of_turn(template: ChatTemplate) -> str:
    """Returns the text that the template writes behind an answer; empty if it is unknown."""
    messages = (_QUESTION, {**_ANSWER, "content": "b"})
    writer = _Writer.of(template, Conversation(messages))
    try:
        marked = writer.read(_mark(messages, [1], writer.salt, "end"))
    except ValueError:
        return ""
    return marked.text[marked.places[1, 1] :].strip() if marked.places else ""


# marks -------------------------------------------------------------------------------------------
#
# A mark is a short word of letters and digits that occurs nowhere else. It survives templates that
# trim, escape or encode a text. A rendering of marked messages without its marks is compared with
# that of the messages. This finds marks that change a template's output.


class _Marked(NamedTuple):
    """A text without its marks, and their places by message and number in order."""

    text: str
    places: Mapping[tuple[int, int], int]

    def after(self, other: "_Marked") -> tuple[int, str]:
        """Returns where this text has the last mark of another one, and what follows it there.

        Without a mark in common it is the beginning of both.
        """
        for mark, place in reversed([*other.places.items()]):
            if mark in self.places:
                return self.places[mark], other.text[place:]
        return 0, other.text


class _Writer(NamedTuple):
    """A template, its input in addition to the messages, and the salt of marks in messages."""

    source: str
    given: Mapping[str, Any]
    salt: int

    @classmethod
    def of(cls, template: ChatTemplate, conversation: Conversation) -> "_Writer":
        if importlib.util.find_spec("transformers") is None:
            raise refused("template_package")
        source = template.source
        source = _CLOCK + source if "strftime_now" in source else source
        given = {**template.special_tokens, **_FIXED, **conversation.options}
        salt = next(n for n in itertools.count() if f"q{n}x" not in str(conversation.messages))
        return cls(source, given, salt)

    def write(
        self, *parts: tuple[_Said, bool], tells_spans: bool = False
    ) -> list[tuple[str, _Spans]]:
        """Returns messages as texts with the spans of characters that the template marks.

        Each part has messages and says whether the header of an answer follows.
        """
        # Templates write None where a message has the key.
        said = [([{k: v for k, v in m.items() if v is not None} for m in ms], a) for ms, a in parts]
        try:
            return bounded.call(
                _render, self.source, said, tells_spans, self.given, what="the chat template"
            )
        except bounded.OverLimit:
            raise
        except ValueError as error:
            raise refused("conversation_refused", error=one_line(str(error), 120)) from error

    def read(self, messages: _Said) -> _Marked:
        """Returns the text of marked messages without the marks."""
        return _read(self.write((messages, False))[0][0], self.salt)

    def ask(self, asked: _Said) -> _Marked:
        """Returns the text before the model's answer, with the marks of the messages.

        If `add_generation_prompt` changes nothing, the header is the text in front of an answer.
        Blanks at its end belong to the answer, because the answer's first token has them.
        """
        (begun, _), (plain, _) = self.write((asked, True), (asked, False))
        if begun != plain:
            return _read(begun, self.salt)
        known, head = _read(plain, self.salt), self.before_answer(asked)
        if not head.text:
            raise refused("header_unknown")
        if head.text.rstrip() == known.text.rstrip():
            return known
        # Mistral's older templates write a system prompt only where no answer follows, which is in
        # no row that was learned.
        return head._replace(text=head.text.rstrip(" "))

    def before_answer(self, asked: _Said) -> _Marked:
        """Returns the text that the template writes before a short answer; empty without one."""
        place = len(asked)
        found = self.read(_mark([*asked, _ANSWER], [place], self.salt, "ends"))
        end = found.places.get((place, 0), 0)
        places = {name: at for name, at in found.places.items() if name[0] < place and at <= end}
        return _Marked(found.text[:end], places)

    def header(self, asked: _Said) -> str:
        """Returns the text that `add_generation_prompt` appends; empty if it appends none."""
        try:
            (begun, _), (plain, _) = self.write((asked, True), (asked, False))
        except ValueError:
            return ""
        return begun.removeprefix(plain) if begun.startswith(plain) else ""

    def begin(self, said: _Said, place: int, whole: _Marked) -> int:
        """Returns the place where an answer begins in a whole conversation."""
        if not place:
            if (0, 0) not in whole.places:
                raise refused("answer_unclear", what="begins")
            gap, header = whole.text[: whole.places[0, 0]], self.header([_QUESTION])
            is_in = header and header in gap
            return gap.rindex(header) + len(header) if is_in else len(gap.rstrip(" "))
        at, head = whole.after(self.ask(said[:place]))
        if whole.text.startswith(head, at):
            return at + len(head)
        # The template writes the question differently when an answer follows it, or it asks with
        # more than it writes, as with the opening of a thought.
        place_of_gap, gap = whole.after(self.before_answer(said[:place]))
        header = self.header(said[:place])
        is_in = bool(header) and header in gap
        gap = gap[: gap.index(header) + len(header)] if is_in else gap
        is_known = is_in or head.startswith(gap)
        if not is_known or place_of_gap != at or not whole.text.startswith(gap, at):
            raise refused("answer_unclear", what="begins")
        return at + len(gap)

    def end(self, said: _Said, place: int, whole: _Marked) -> int:
        """Returns the end of a turn that others follow, from the text behind it as a last one."""
        at, tail = whole.after(self.read(said[: place + 1]))
        if not whole.text.startswith(tail, at):  # Phi-3 ends the whole conversation with EOS
            tail = tail.removesuffix(self.given.get("eos_token", ""))
        if not whole.text.startswith(tail, at):
            raise refused("answer_unclear", what="ends")
        return at + len(tail)


def _dropped(conversation: Conversation, whole: _Marked) -> tuple[str, ...]:
    """Returns the kinds of text in answers that the template leaves out; refuses a lost answer."""
    dropped: set[str] = set()
    for place in conversation.turns:
        message = conversation.messages[place]
        lost, is_written = _lost(message, place, whole)
        if "text" in lost and not is_written:
            end = text_of(message).strip()[-20:]
            raise refused("answer_unwritten", end=shown(end, 30))
        dropped |= lost
    return tuple(sorted(dropped))


def _unsaid(conversation: Conversation, text: str) -> tuple[str, ...]:
    """Returns the kinds of messages before answers, and of tools, that a rendering does not have.

    A template may write a result of a tool as JSON.
    """
    named: dict[str, list[str]] = {"system prompt": []}
    for place, message in enumerate(conversation.messages):
        role = message["role"]
        if role != "assistant" and place not in conversation.turns:
            kind = "system prompt" if role == "system" else f"{role} message"
            content = message.get("content") or ""
            parts = [content] if isinstance(content, str) else [one.get("text") for one in content]
            named.setdefault(kind, []).extend(part.strip() for part in parts if part)
    tools = [one.get("function", one) for one in conversation.options.get("tools") or ()]
    named["tools"] = [str(one["name"]) for one in tools if isinstance(one, dict) and "name" in one]
    forms = (str, lambda said: json.dumps(said, ensure_ascii=False)[1:-1])
    return tuple(
        kind
        for kind, parts in named.items()
        if not all(any(form(said) in text for form in forms) for said in parts)
    )


def _targets_of(spans: _Spans, conversation: Conversation, whole: _Marked) -> _Spans:
    """Returns the spans that a template marks without those of answers that are no targets."""
    spoken = {at for at, one in enumerate(conversation.messages) if one["role"] == "assistant"}
    others = spoken - {*conversation.turns}
    unmarked = others - {message for message, _ in whole.places}  # they have no text
    if unmarked and len(spans) != len(spoken):
        raise refused("answer_unclear", what="begins")
    muted = [span for at, span in zip(sorted(spoken), spans, strict=False) if at in unmarked]
    places = [at for (message, _), at in whole.places.items() if message in others]
    kept = [span for span in spans if span[0] < span[1] and span not in muted]
    return [(start, end) for start, end in kept if not any(start <= at <= end for at in places)]


def _render(
    source: str, parts: Sequence[tuple[_Said, bool]], tells_spans: bool, given: Mapping[str, Any]
) -> list[tuple[str, _Spans]]:
    """Returns the result of `_Writer.write` in the child process of `bounded`."""
    render_template = importlib.import_module(LOADED_FIRST).render_jinja_template
    rendered: list[tuple[str, _Spans]] = []
    for messages, begins_answer in parts:
        texts, spans = render_template(
            [messages],
            chat_template=source,
            add_generation_prompt=begins_answer,
            return_assistant_tokens_mask=tells_spans,
            **given,
        )
        most = _MOST_ADDED + _MOST_TIMES * (len(str(messages)) + len(str(given)))
        if len(texts[0]) > most:
            raise ValueError(f"it writes {len(texts[0]):,} characters, more than {most:,}")
        rendered.append((texts[0], spans[0] if tells_spans else ()))
    return rendered


def _mark(
    messages: Sequence[_Message], places: Iterable[int], salt: int, way: str
) -> list[_Message]:
    """Returns messages with marks in those at some places in one of `_WAYS`."""
    marked = [*messages]
    for place in {*places} & {*range(len(messages))}:
        numbers = itertools.count()

        def change(kind: str, text: str, place: int = place, numbers: Any = numbers) -> str:
            first, last = (f"q{salt}x{place}x{next(numbers)}q" for _ in range(2))
            core = text.strip()
            lead, tail = text.split(core, 1)
            if way == "within":
                half = len(core) // 2
                return f"{lead}{core[:half]}{last}{core[half:]}{tail}"
            return f"{lead}{first if way == 'ends' else ''}{core}{last}{tail}"

        marked[place] = _rewrite(messages[place], change)
    return marked


def _read(text: str, salt: int) -> _Marked:
    """Returns a rendering of marked messages without the marks."""
    places: dict[tuple[int, int], int] = {}
    plain, *parts = re.split(rf"q{salt}x(\d+)x(\d+)q", text)
    for message, number, part in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        name = int(message), int(number)
        places.pop(name, None)  # of a text that is written twice the later one counts
        places[name] = len(plain)
        plain += part
    return _Marked(plain, places)


def _lost(message: _Message, place: int, marked: _Marked) -> tuple[set[str], bool]:
    """Returns the kinds of text of a marked message that are not written, and whether any is."""
    kinds: list[str] = []

    def note(kind: str, text: str) -> str:
        kinds.append(kind)
        return text

    _rewrite(message, note)
    numbers = {number // 2 for at, number in marked.places if at == place}
    gone = {kind for number, kind in enumerate(kinds) if number not in numbers}
    return gone, bool(numbers) or not kinds


def _rewrite(message: _Message, change: _Change) -> _Message:
    """Returns a message with changed texts: thoughts, text and names of called tools."""
    new = dict(message)
    thought = next((t for key in _THOUGHTS if isinstance(t := message.get(key), str)), "")
    if thought.strip():
        changed = change("thought", thought)
        new |= {key: changed for key in _THOUGHTS if message.get(key) == thought}
    content = message.get("content")
    if isinstance(content, str):
        new["content"] = _rewrite_text(content, change)
    if isinstance(content, list):
        new["content"] = [
            {**part, "text": _rewrite_text(part["text"], change)}
            if isinstance(part.get("text"), str)
            else part
            for part in content
        ]
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        new["tool_calls"] = [_rewrite_call(call, change) for call in calls]
    if call := message.get("function_call"):  # older than tool_calls, and read by few templates
        new["function_call"] = _rewrite_call(call, change)
    return new


def _rewrite_text(text: str, change: _Change) -> str:
    parts = [*_TAGS.split(text), ""]
    for number in range(0, len(parts), 2):
        if parts[number].strip():
            kind = "thought" if "/" in parts[number + 1] else "text"
            parts[number] = change(kind, parts[number])
    return "".join(parts)


def _rewrite_call(call: Any, change: _Change) -> Any:
    fields = call if isinstance(call, Mapping) else {}
    if isinstance(fields.get("function"), Mapping):
        return {**call, "function": _rewrite_call(call["function"], change)}
    name = fields.get("name")
    if isinstance(name, str) and name.strip():
        return {**call, "name": change("tool call", name)}
    return call
