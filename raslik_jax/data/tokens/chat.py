"""Conversations as text by a chat template in transformers' Jinja sandbox.

A template is the checkpoint's text or the user's. The sandbox runs no code of either. No torch is
needed.
"""

import datetime
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from raslik_jax.base import bounded
from raslik_jax.base.messages import one_line, shown
from raslik_jax.data.contents import Conversation, text_of, without_nulls
from raslik_jax.data.tokens import marks

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

# How many characters a template may write beyond so many times those of the messages.
_MOST_ADDED, _MOST_TIMES = 100_000, 20


class Target(NamedTuple):
    """A part of a rendered conversation that is a target: the characters from `start` to `end`.

    With a text `before` it begins instead with the first token in which the whole differs from
    that text.
    """

    start: int
    end: int
    before: str = ""


class Rendered(NamedTuple):
    """A whole conversation as text, its targets in order and the parts that the template left out.

    `dropped` has the parts of a row that the template does not write: "system prompt", and
    "thought", "text" and "tool call" of answers.
    """

    text: str
    targets: tuple[Target, ...]
    dropped: tuple[str, ...] = ()


class ChatTemplate(NamedTuple):
    """A chat template in Jinja with the names of special tokens that it may read."""

    source: str
    special_tokens: Mapping[str, str]

    @property
    def marks_targets(self) -> bool:
        """Whether the template says by `{% generation %}` what the assistant writes."""
        return bool(_GENERATION.search(self.source))


def render(template: ChatTemplate, conversation: Conversation) -> Rendered:
    """Returns a conversation as text with its targets, one for each answer.

    The text is one rendering of all messages. An answer reaches from behind the header after which
    the model writes to the end of its turn. `{% generation %}` in the template shows where that is.
    Otherwise marks in the messages show it, see `marks`. A completion is all behind its prompt.
    """
    messages, turns = conversation.messages, conversation.turns
    writer = _writer(template, conversation)
    by_template = template.marks_targets and not conversation.is_completion
    begins = [conversation.first] if conversation.is_completion else [*turns]
    chosen = {*turns, *(place - 1 for place in begins)}
    if by_template:
        chosen |= {place for place, one in enumerate(messages) if one["role"] == "assistant"}
    ((text, spans),) = writer.write([(messages, False)], tells_spans=by_template)
    for way in marks.WAYS:
        said = marks.mark(messages, chosen, writer.salt, way)
        whole = writer.read(said)
        if whole.text == text:
            dropped = _dropped(conversation, whole)
            break
    else:  # no mark leaves the text as it is: only texts that begin alike show answers then
        said, whole, dropped = [*messages], marks.Marked(text, {}), ()
    systems = [text_of(message).strip() for message in messages if message["role"] == "system"]
    dropped += () if all(system in text for system in systems) else ("system prompt",)
    if by_template:
        return Rendered(text, _targets_of(spans, conversation, whole), dropped)
    targets = []
    is_completion = conversation.is_completion
    for place in begins:
        start, before = _begin(writer, said, place, whole, is_completion=is_completion)
        is_last = is_completion or place == len(messages) - 1
        end = len(text) if is_last else _end(writer, said, place, whole)
        targets.append(Target(start, end, before))
    return Rendered(text, tuple(targets), dropped)


def render_question(template: ChatTemplate, conversation: Conversation) -> str:
    """Returns the text after which the model writes its answer."""
    return _ask(_writer(template, conversation), conversation.asked).text


def require_system(template: ChatTemplate) -> None:
    """Raises a ValueError if a template has no place for a system prompt or leaves it out."""
    said = "Answer as a sailor."
    messages = ({"role": "system", "content": said}, {"role": "user", "content": "a"})
    try:
        text = render_question(template, Conversation(messages, is_open=True))
    except ValueError as error:
        raise ValueError(
            "the chat template refuses a system prompt: leave out --system, or put its text in "
            "front of --prompt if the model was trained so"
        ) from error
    if said not in text:
        raise ValueError(
            "the chat template writes no system prompt, so the model never read one: leave "
            "out --system"
        )


def end_of_turn(template: ChatTemplate) -> str:
    """Returns what the template writes behind an answer; empty where that is unknown."""
    messages = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    writer = _writer(template, Conversation(messages))
    try:
        marked = writer.read(marks.mark(messages, [1], writer.salt, "end"))
    except ValueError:
        return ""
    return marked.text[marked.places[1, 1] :].strip() if marked.places else ""


_Said = Sequence[Mapping[str, Any]]
_Texts = list[tuple[str, Sequence[tuple[int, int]]]]


class _Writer(NamedTuple):
    """A template with the options of a conversation.

    Attributes:
      source: of the template.
      given: what it reads next to the messages.
      salt: of the marks in messages.
    """

    source: str
    given: Mapping[str, Any]
    salt: int

    def write(self, parts: Sequence[tuple[_Said, bool]], *, tells_spans: bool = False) -> _Texts:
        """Returns messages as texts with the spans of characters that the template marks.

        Each part has messages and says whether the header of an answer follows.
        """
        # Templates write None where a key is there.
        said = [(without_nulls([*messages]), begins_answer) for messages, begins_answer in parts]
        try:
            return bounded.call(
                _render, self.source, said, tells_spans, self.given, what="the chat template"
            )
        except bounded.OverLimit:
            raise
        except ValueError as error:
            raise ValueError(
                f"the chat template refuses the conversation ({one_line(str(error), 120)}): "
                "correct the row, or give another template"
            ) from error

    def read(self, messages: _Said) -> marks.Marked:
        """Returns the text of marked messages without the marks."""
        return marks.read(self.write([(messages, False)])[0][0], self.salt)

    def without_eos(self, text: str) -> str:
        """Returns a text without the EOS with which some templates end a whole conversation."""
        return text.removesuffix(self.given.get("eos_token", ""))


def _writer(template: ChatTemplate, conversation: Conversation) -> _Writer:
    if importlib.util.find_spec("transformers") is None:
        need = "a chat template needs the package transformers: install raslik-jax[data]"
        raise ValueError(need)
    source = _CLOCK + template.source if "strftime_now" in template.source else template.source
    given = {**template.special_tokens, **_FIXED, **conversation.options}
    return _Writer(source, given, marks.find_salt(conversation.messages))


_QUESTION = {"role": "user", "content": "a"}
_ANSWER = {"role": "assistant", "content": "a"}


def _ask(writer: _Writer, asked: _Said) -> marks.Marked:
    """Returns the text before the model's answer, with the marks of the messages.

    If `add_generation_prompt` changes nothing the header is the text in front of an answer. Blanks
    at its end belong to the answer, whose first token has them.
    """
    (begun, _), (plain, _) = writer.write([(asked, True), (asked, False)])
    if begun != plain:
        return marks.read(begun, writer.salt)
    known, head = marks.read(plain, writer.salt), _before_answer(writer, asked)
    if not head.text:
        raise ValueError(
            "the chat template does not read add_generation_prompt, and nothing shows what it "
            "writes in front of an answer: end it with {% if add_generation_prompt %}, the header "
            "of the assistant and {% endif %}"
        )
    if head.text.rstrip() == known.text.rstrip():
        return known
    # Mistral's older templates write a system prompt only where no answer follows, which is in no
    # row that was learned.
    return head._replace(text=head.text.rstrip(" "))


def _before_answer(writer: _Writer, asked: _Said) -> marks.Marked:
    """Returns what the template writes before a short answer; empty where it writes none."""
    place = len(asked)
    found = writer.read(marks.mark([*asked, _ANSWER], [place], writer.salt, "ends"))
    end = found.places.get((place, 0), 0)
    places = {name: at for name, at in found.places.items() if name[0] < place and at <= end}
    return marks.Marked(found.text[:end], places)


def _header(writer: _Writer, asked: _Said) -> str:
    """Returns what `add_generation_prompt` appends; empty where it does not append."""
    try:
        (begun, _), (plain, _) = writer.write([(asked, True), (asked, False)])
    except ValueError:
        return ""
    return begun.removeprefix(plain) if begun.startswith(plain) else ""


def _begin(
    writer: _Writer, said: _Said, place: int, whole: marks.Marked, *, is_completion: bool
) -> tuple[int, str]:
    """Returns the beginning of an answer, and the text before it if tokens show it.

    A completion begins with the first token in which whole and prompt differ, as in TRL.
    """
    if not place:
        if (0, 0) not in whole.places:
            raise ValueError(_unclear("begins"))
        gap, header = whole.text[: whole.places[0, 0]], _header(writer, [_QUESTION])
        if header and header in gap:
            return gap.rindex(header) + len(header), ""
        return len(gap.rstrip(" ")), ""
    at, head = whole.after(_ask(writer, said[:place]))
    if is_completion:
        return at, whole.text[:at] + head
    if whole.text.startswith(head, at):
        return at + len(head), ""
    # The template writes the question differently when an answer follows it, or it asks with more
    # than it writes, as with the opening of a thought.
    place_of_gap, gap = whole.after(_before_answer(writer, said[:place]))
    header = _header(writer, said[:place])
    if header and header in gap:
        gap = gap[: gap.index(header) + len(header)]
    elif not head.startswith(gap):
        raise ValueError(_unclear("begins"))
    if place_of_gap != at or not whole.text.startswith(gap, at):
        raise ValueError(_unclear("begins"))
    return at + len(gap), ""


def _end(writer: _Writer, said: _Said, place: int, whole: marks.Marked) -> int:
    """Returns the end of an answer's turn that others follow.

    The template writes the same text behind it as behind a last answer, but for the EOS of the
    whole.
    """
    at, tail = whole.after(writer.read(said[: place + 1]))
    if not whole.text.startswith(tail, at):  # Phi-3 ends the whole conversation with EOS
        tail = writer.without_eos(tail)
    if not whole.text.startswith(tail, at):
        raise ValueError(_unclear("ends"))
    return at + len(tail)


def _unclear(what: str) -> str:
    return (
        f"nothing shows where an answer {what}, because the chat template writes it differently "
        "in other places: mark answers in the template with {% generation %}"
    )


def _dropped(conversation: Conversation, whole: marks.Marked) -> tuple[str, ...]:
    """Returns the kinds of text in answers that the template does not write.

    It refuses an answer that is not written at all.
    """
    dropped: set[str] = set()
    for place in conversation.turns:
        message = conversation.messages[place]
        lost, is_written = marks.lost(message, place, whole)
        if "text" in lost and not is_written:
            end = text_of(message).strip()[-20:]
            raise ValueError(
                f"the chat template does not write the answer that ends with {shown(end, 30)}: "
                "correct the content of the message, or give another template"
            )
        dropped |= lost
    return tuple(sorted(dropped))


def _targets_of(
    spans: Sequence[tuple[int, int]], conversation: Conversation, whole: marks.Marked
) -> tuple[Target, ...]:
    """Returns the spans that a template marks without those of answers that are no targets."""
    others = {
        place
        for place, message in enumerate(conversation.messages)
        if message["role"] == "assistant" and place not in conversation.turns
    }
    if others and not whole.places:
        raise ValueError(_unclear("begins"))

    def is_other(start: int, end: int) -> bool:
        owners = {message for (message, _), at in whole.places.items() if start <= at <= end}
        return bool(owners & others)

    return tuple(Target(*span) for span in spans if span[0] < span[1] and not is_other(*span))


def _render(
    source: str,
    parts: Sequence[tuple[_Said, bool]],
    tells_spans: bool,
    given: Mapping[str, Any],
) -> _Texts:
    """Returns the result of `_Writer.write` in the child process of `bounded`."""
    from transformers.utils import chat_template_utils

    render_template: Callable[..., Any] = chat_template_utils.render_jinja_template
    rendered: _Texts = []
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
