"""Examples as rows of token ids. They are tokenized once, and every stage reads them."""

import collections
import contextlib
import functools
import json
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import IO, Any, Literal, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Bool, Int

from raslik_jax.base.messages import some_of
from raslik_jax.base.progress import progress
from raslik_jax.data.examples import Example
from raslik_jax.data.tokens import masking
from raslik_jax.data.tokens.prompts import Template, fill_form, find_template
from raslik_jax.data.tokens.tokenization import Tokenizer
from raslik_jax.data.words import refused

Targets = Literal["response", "all"]
_T = TypeVar("_T")
NO_LIMIT = 2**30
_PART_ROWS = 2048
_LONG_TEXT = 1_000_000


class Ragged(Sequence[np.ndarray]):
    """Rows of unequal length as parts of one array, taken and cut without a copy.

    The array may be a function that reads it at the first use.
    """

    def __init__(self, flat: np.ndarray | Callable[[], np.ndarray], start_N: Any, end_N: Any):
        self._flat, self.start_N, self.end_N = flat, start_N, end_N

    @classmethod
    def of(cls, rows: Sequence[np.ndarray]) -> "Ragged":
        """Returns rows as parts of one array."""
        if isinstance(rows, cls):
            return rows
        length_N = np.array([len(row) for row in rows], np.int64)
        flat = np.concatenate([*rows]) if rows else np.zeros(0, np.int32)
        return cls.joined(flat, length_N)

    @classmethod
    def joined(cls, flat: np.ndarray | Callable[[], np.ndarray], length_N: np.ndarray) -> "Ragged":
        """Returns rows of these lengths from one array that has them in order."""
        end_N = np.cumsum(length_N)
        return cls(flat, end_N - length_N, end_N)

    def __len__(self) -> int:
        return len(self.start_N)

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return Ragged(self._flat, self.start_N[row], self.end_N[row])
        flat = self._flat() if callable(self._flat) else self._flat
        return flat[self.start_N[row] : self.end_N[row]]

    @property
    def lengths_N(self) -> Int[np.ndarray, " N"]:
        """Tokens of each row."""
        return self.end_N - self.start_N

    def take(self, rows: Int[np.ndarray, " M"]) -> "Ragged":
        """Returns some of the rows, by position."""
        return Ragged(self._flat, self.start_N[rows], self.end_N[rows])

    def cut(self, max_len: int) -> "Ragged":
        """Returns the rows cut at max_len at their right end."""
        return Ragged(self._flat, self.start_N, np.minimum(self.end_N, self.start_N + max_len))


class Encoded(NamedTuple):
    """Token rows of unequal length in corpus order: int32 ids of prompt, response and EOS.

    Attributes:
      start_N: position of the first token that counts in the loss; without one, the end of the row.
      pad_id: id that fills the rectangles.
      limit: most tokens that the model takes, padding included.
      masks: whether each token counts in the loss; None if all from `start_N` on do.
      dropped: ids of the rows by the parts of answers that the chat template left out.
    """

    ids: tuple[str, ...]
    tokens: Sequence[np.ndarray]
    start_N: np.ndarray
    pad_id: int
    limit: int = NO_LIMIT
    masks: Sequence[np.ndarray] | None = None
    dropped: Mapping[str, Sequence[str]] = MappingProxyType({})

    @property
    def lengths_N(self) -> Int[np.ndarray, " N"]:
        """Tokens of each example."""
        return Ragged.of(self.tokens).lengths_N

    @property
    def num_targets_N(self) -> Int[np.ndarray, " N"]:
        """Tokens of each example that count in the loss."""
        if self.masks is not None:
            return np.array([np.count_nonzero(mask) for mask in self.masks], np.int64)
        return np.maximum(self.lengths_N - self.start_N, 0)

    def target_masks(self) -> Sequence[np.ndarray]:
        """Returns of every example which of its tokens count in the loss."""
        if self.masks is not None:
            return self.masks
        length_N = self.lengths_N
        first_N = np.cumsum(length_N) - length_N + self.start_N
        return Ragged.joined(np.arange(length_N.sum()) >= np.repeat(first_N, length_N), length_N)

    def ends(self, end_ids: Sequence[int], width: int) -> Bool[np.ndarray, "N T"]:
        """Returns which targets of each row, in order, are its ends; T is `width`."""
        is_end_NT = np.zeros((len(self.ids), width), np.bool_)
        for is_end_T, tokens, mask in zip(is_end_NT, self.tokens, self.target_masks(), strict=True):
            targets = tokens[mask]
            is_end_T[: len(targets)] = np.isin(targets, [*end_ids])
        return is_end_NT

    def take(self, rows: Int[np.ndarray, " M"]) -> "Encoded":
        """Returns some of the examples, by position."""
        return self._replace(
            ids=tuple(self.ids[row] for row in rows.tolist()),
            tokens=Ragged.of(self.tokens).take(rows),
            start_N=self.start_N[rows],
            masks=None if self.masks is None else Ragged.of(self.masks).take(rows),
        )

    def named(self, ids: Sequence[str]) -> "Encoded":
        """Returns the examples of these ids in their order."""
        place = {name: row for row, name in enumerate(self.ids)}
        return self.take(np.array([place[name] for name in ids], np.int64))

    def with_answers(self) -> "Encoded":
        """Returns the examples with at least one token that counts in the loss."""
        return self.take(np.flatnonzero(self.num_targets_N))

    def cut(self, max_len: int, *, targets: Targets = "response") -> "Encoded":
        """Returns whole examples cut at max_len at their right end.

        The loss counts the "response" with EOS, or "all" tokens except the first. It counts nothing
        if there is no room for an answer.
        """
        start_N, masks = self.start_N, self.masks
        if targets == "all":
            start_N, masks = np.where(start_N >= max_len, start_N, 1), None
        return self._replace(
            tokens=Ragged.of(self.tokens).cut(max_len),
            start_N=start_N,
            masks=None if masks is None else Ragged.of(masks).cut(max_len),
        )


def save_parts(path: pathlib.Path, parts: Iterable[Encoded]) -> Encoded:
    """Writes examples part by part; returns all of them with their tokens left in the file."""
    ids, start_N, length_N, dropped, has_masks = list[str](), [], [], [], False
    with (
        tempfile.TemporaryFile(dir=path.parent) as tokens,
        tempfile.TemporaryFile(dir=path.parent) as masks,
    ):
        for part in parts:
            tokens.write(b"".join(row.tobytes() for row in part.tokens))
            masks.write(b"".join(mask.tobytes() for mask in part.target_masks()))
            ids += part.ids
            start_N.append(part.start_N)
            length_N.append(part.lengths_N)
            dropped.append(part.dropped)
            has_masks |= part.masks is not None
        found: dict[str, Any] = {
            "ids": np.frombuffer(json.dumps(ids).encode(), np.uint8),
            "tokens": _mapped(tokens, np.int32),
            "ends": np.cumsum(np.concatenate(length_N)),
            "start": np.concatenate(start_N),
            "pad_id": np.array(part.pad_id),
        }
        found |= {"masks": _mapped(masks, np.bool_)} if has_masks else {}
        with path.open("wb") as file:  # np.savez reads what is mapped a part at a time
            np.savez(file, **found)
    return load_encoded(path)._replace(dropped=_all_dropped(dropped))


def _mapped(file: IO[bytes], kind: type) -> np.ndarray:
    file.flush()
    return np.memmap(file, kind, "r") if file.tell() else np.zeros(0, kind)


def load_encoded(path: pathlib.Path) -> Encoded:
    """Returns the examples that `save_parts` wrote; tokens are read when one is asked for."""

    def read(name: str) -> np.ndarray:
        with np.load(path, allow_pickle=False) as stored:
            return stored[name]

    def rows(name: str) -> Ragged:
        return Ragged.joined(functools.cache(lambda: read(name)), length_N)

    with np.load(path, allow_pickle=False) as stored:
        has_masks = "masks" in stored
    ids, length_N = tuple(json.loads(read("ids").tobytes())), np.diff(read("ends"), prepend=0)
    found = Encoded(ids, rows("tokens"), read("start"), int(read("pad_id")))
    return found._replace(masks=rows("masks")) if has_masks else found


def _all_dropped(parts: Iterable[Mapping[str, Sequence[str]]]) -> dict[str, list[str]]:
    found = collections.defaultdict[str, list[str]](list)
    for kind, ids in (item for part in parts for item in part.items()):
        found[kind] += ids
    return dict(found)


def join(parts: Sequence[Encoded]) -> Encoded:
    """Returns the examples of one or more parts as one in their order."""
    masks = None
    if any(part.masks is not None for part in parts):
        masks = Ragged.of([mask for part in parts for mask in part.target_masks()])
    return parts[0]._replace(
        ids=tuple(name for part in parts for name in part.ids),
        tokens=Ragged.of([row for part in parts for row in part.tokens]),
        start_N=np.concatenate([part.start_N for part in parts]),
        masks=masks,
        dropped=_all_dropped(part.dropped for part in parts),
    )


def encode_rows(tokens: Sequence[Sequence[int]], *, pad_id: int, limit: int = NO_LIMIT) -> Encoded:
    """Returns token rows in which every token counts: texts for an encoder, prompts."""
    rows = Ragged.of([np.array(row, np.int32) for row in tokens])
    ids = tuple(map(str, range(len(rows))))
    encoded = Encoded(ids, rows, np.zeros(len(rows), np.int64), pad_id, limit)
    length_N = encoded.lengths_N
    if len(rows) and not 1 <= length_N.min() <= length_N.max() <= limit:
        raise refused("texts_length", limit=limit, least=length_N.min(), most=length_N.max())
    return encoded


def require_answers(encoded: Encoded, what: str, *, max_len: int) -> None:
    """Raises a ValueError that names the examples, `what` in the plural, without room to answer."""
    lost = np.flatnonzero((encoded.start_N >= max_len) & (encoded.start_N < NO_LIMIT))
    if len(lost):
        rows, most = some_of((encoded.ids[row] for row in lost), 3), encoded.start_N[lost].max()
        raise refused("no_room", what=what, max_len=max_len, rows=rows, most=most)


def describe_cuts(whole: Encoded, what: str, *, max_len: int) -> str:
    """Returns a sentence about the examples, called `what`, that are cut at max_len, if any."""

    def names(rows: np.ndarray) -> str:
        return some_of((whole.ids[row] for row in rows), 3)

    cut = np.flatnonzero(whole.lengths_N > max_len)
    lost = np.flatnonzero((whole.start_N >= max_len) & (whole.start_N < NO_LIMIT))
    line = f"{len(cut):,} of {len(whole.ids):,} {what} are cut at {max_len} tokens ({names(cut)})"
    if len(lost):
        line += f", {len(lost):,} of them lose their whole answer and are left out ({names(lost)})"
    return line if len(cut) else ""


def describe_long(rows: Sequence[Example]) -> str:
    """Returns a sentence about rows that take seconds each to tokenize, if any."""
    long = [row.example_id for row in rows if sum(map(len, row[1:4])) > _LONG_TEXT]
    names = f"{len(long):,} of {len(rows):,} rows have more than {_LONG_TEXT:,} characters"
    return f"{names} ({some_of(long, 3)}): each takes seconds to tokenize" if long else ""


def describe_dropped(encoded: Encoded, what: str) -> str:
    """Returns a sentence about examples, called `what`, that are encoded without parts, if any."""
    return "; ".join(
        f"the chat template leaves out the {kind} in {len(ids):,} of {len(encoded.ids):,} {what} "
        f"({some_of(ids, 3)}), so the model does not read it: if the model was trained with a "
        "template that writes it, give that one as --corpus.template"
        for kind, ids in encoded.dropped.items()
    )


def encode(
    examples: Sequence[Example], tokenizer: Tokenizer, *, template: str, only_last: bool = False
) -> Encoded:
    """Returns each example as prompt, response and EOS ids, whole (see `Encoded.cut`).

    If a form of the template renders the prompt, prompt and response are tokenized separately.
    Training then sees the exact prompt ids that decoding starts from. `masking` encodes other rows
    by their format and chat template. With `only_last` only the last answer of a conversation
    counts, as for a query.
    """
    parts = [*encode_parts(examples, tokenizer, template=template, only_last=only_last)]
    return join(parts) if len(parts) > 1 else parts[0]


def encode_parts(
    examples: Sequence[Example], tokenizer: Tokenizer, *, template: str, only_last: bool = False
) -> Iterator[Encoded]:
    """Yields what `encode` returns in one or more parts of few rows, for `save_parts`.

    A tokenizer takes many times the memory of the ids.
    """
    chosen = find_template(template, tokenizer)

    def of_form(rows: Sequence[Example]) -> Iterator[masking.Masked]:
        prompts = tokenizer.encode_prompts([fill_form(row, chosen) for row in rows])
        outputs = tokenizer.encode_batch([row.output for row in rows])
        for prompt, output in zip(prompts, outputs, strict=True):
            ids = np.array([*prompt, *output, tokenizer.eos_id], np.int32)
            yield masking.Masked(ids, np.arange(len(ids)) >= len(prompt))

    def of_content(rows: Sequence[Example]) -> Sequence[masking.Masked]:
        return masking.mask_rows(rows, tokenizer, chosen, template, only_last=only_last)

    with contextlib.closing(progress(None, "tokens", total=len(examples), unit="example")) as bar:
        for start in range(0, max(len(examples), 1), _PART_ROWS):
            rows = examples[start : start + _PART_ROWS]
            found = _of_each(rows, chosen, of_form, of_content)
            masks = [one.is_target & (not r.is_muted) for r, one in zip(rows, found, strict=True)]
            starts = [int(np.argmax(mask)) if mask.any() else NO_LIMIT for mask in masks]
            has_masks = not all(mask[at:].all() for mask, at in zip(masks, starts, strict=True))
            yield Encoded(
                tuple(row.example_id for row in rows),
                Ragged.of([one.ids for one in found]),
                np.array(starts, np.int64),
                tokenizer.pad_id,
                masks=Ragged.of(masks) if has_masks else None,
                dropped=_all_dropped(
                    {kind: [row.example_id]}
                    for row, one in zip(rows, found, strict=True)
                    for kind in one.dropped
                ),
            )
            bar.update(len(rows))


def encode_prompts(
    examples: Sequence[Example], tokenizer: Tokenizer, *, max_len: int, template: str
) -> list[list[int]]:
    """Returns the ids that decoding starts from, the same ones that `encode` puts in front.

    Prompts longer than max_len are refused: a cut prompt loses the place of the answer.
    """
    chosen = find_template(template, tokenizer)
    prompts = _of_each(
        examples,
        chosen,
        lambda rows: tokenizer.encode_prompts([fill_form(row, chosen) for row in rows]),
        lambda rows: masking.question_ids(rows, tokenizer, chosen, template),
    )
    pairs = zip(examples, prompts, strict=True)
    if long := [row.example_id for row, ids in pairs if len(ids) > max_len]:
        raise refused("prompts_length", max_len=max_len, count=len(long), rows=some_of(long))
    return prompts


def _of_each(
    examples: Sequence[Example],
    template: Template,
    of_form: Callable[[Sequence[Example]], Iterable[_T]],
    of_content: Callable[[Sequence[Example]], Iterable[_T]],
) -> list[_T]:
    """Returns a function of the rows that a form has and another of all others, in their order."""
    has_form = [template.has_form(row) for row in examples]
    formed = iter(of_form([row for row, has in zip(examples, has_form, strict=True) if has]))
    others = [row for row, has in zip(examples, has_form, strict=True) if not has]
    found = iter(of_content(others) if others else ())
    return [next(formed if has else found) for has in has_form]
