"""Examples as rows of token ids: what is tokenized once and read by every stage."""

import contextlib
import json
import pathlib
import zipfile
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Int

from raslik_jax.base.messages import some_of
from raslik_jax.base.progress import progress
from raslik_jax.data.examples import Example
from raslik_jax.data.tokens import masking
from raslik_jax.data.tokens.prompts import fill_form, find_template
from raslik_jax.data.tokens.tokenization import Tokenizer

Targets = Literal["response", "all"]
_NO_LIMIT = 2**30
_PART_ROWS = 2048
_LONG_TEXT = 1_000_000


class Encoded(NamedTuple):
    """Token rows of unequal length, in corpus order: int32 ids of prompt, response and EOS.

    `start_N` is the position of the first token that counts in the loss, beyond all positions in a
    row without one; `pad_id` fills up the
    rectangles; the model takes at most `limit` tokens, padding included. Where some row has other
    tokens among its targets, as a conversation of several turns has, `masks` says of every token
    whether it counts; None where all from `start_N` on do. `dropped` has what the
    chat template left out of answers, and the ids of their rows, see `describe_dropped`.
    """

    ids: tuple[str, ...]
    tokens: tuple[np.ndarray, ...]
    start_N: np.ndarray
    pad_id: int
    limit: int = _NO_LIMIT
    masks: tuple[np.ndarray, ...] | None = None
    dropped: Mapping[str, Sequence[str]] = MappingProxyType({})

    @property
    def lengths_N(self) -> Int[np.ndarray, " N"]:
        """Tokens of each example."""
        return np.array([len(row) for row in self.tokens], np.int64)

    @property
    def num_targets_N(self) -> Int[np.ndarray, " N"]:
        """Tokens of each example that count in the loss."""
        if self.masks is not None:
            return np.array([np.count_nonzero(mask) for mask in self.masks], np.int64)
        return np.maximum(self.lengths_N - self.start_N, 0)

    def target_masks(self) -> tuple[np.ndarray, ...]:
        """Returns of every example which of its tokens count in the loss."""
        if self.masks is not None:
            return self.masks
        starts = zip(self.tokens, self.start_N.tolist(), strict=True)
        return tuple(np.arange(len(row)) >= start for row, start in starts)

    def take(self, rows: Int[np.ndarray, " M"]) -> "Encoded":
        """Returns some of the examples, by position."""
        return self._replace(
            ids=tuple(self.ids[row] for row in rows.tolist()),
            tokens=tuple(self.tokens[row] for row in rows.tolist()),
            start_N=self.start_N[rows],
            masks=self.masks and tuple(self.masks[row] for row in rows.tolist()),
        )

    def named(self, ids: Sequence[str]) -> "Encoded":
        """Returns the examples of these ids, in their order."""
        place = {name: row for row, name in enumerate(self.ids)}
        return self.take(np.array([place[name] for name in ids], np.int64))

    def with_answers(self) -> "Encoded":
        """Returns the examples of which something is left that counts in the loss."""
        return self.take(np.flatnonzero(self.num_targets_N))

    def cut(self, max_len: int, *, targets: Targets = "response") -> "Encoded":
        """Returns whole examples without what is beyond max_len at their right end.

        What counts in the loss is the "response" with EOS, or "all" tokens but the first, which
        nothing predicts. Where the prompt leaves no room for an answer, nothing counts.
        """
        start_N, masks = self.start_N, self.masks
        if targets == "all":
            start_N, masks = np.where(start_N >= max_len, start_N, 1), None
        return self._replace(
            tokens=tuple(row[:max_len] for row in self.tokens),
            start_N=start_N,
            masks=masks and tuple(mask[:max_len] for mask in masks),
        )

    def save(self, path: pathlib.Path) -> None:
        """Writes the examples as an .npz file of few arrays."""
        arrays = {
            "ids": [np.frombuffer(json.dumps(self.ids).encode(), np.uint8)],
            "tokens": [np.zeros(0, np.int32), *self.tokens],
            "ends": [np.cumsum(self.lengths_N)],
            "start": [self.start_N],
            "pad_id": [np.array(self.pad_id)],
        }
        if self.masks is not None:
            arrays["masks"] = [np.zeros(0, np.bool_), *self.masks]
        # As np.savez does, which needs all rows as one array in memory once more.
        with zipfile.ZipFile(path, "w") as archive:
            for name, parts in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    _write_array(file, parts)


def _write_array(file: Any, parts: Sequence[np.ndarray]) -> None:
    """Writes the parts of a 1-D array, or one array, as a .npy file."""
    shape = parts[0].shape and (sum(map(len, parts)),)
    header = {"descr": parts[0].dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    for start in range(0, len(parts), _PART_ROWS):
        file.write(b"".join(part.tobytes() for part in parts[start : start + _PART_ROWS]))


def load_encoded(path: pathlib.Path) -> Encoded:
    """Returns the examples that `Encoded.save` wrote."""
    with np.load(path, allow_pickle=False) as stored:
        ids = tuple(json.loads(stored["ids"].tobytes()))
        tokens = tuple(np.split(stored["tokens"], stored["ends"])[:-1])
        encoded = Encoded(ids, tokens, stored["start"], int(stored["pad_id"]))
        if "masks" not in stored:
            return encoded
        return encoded._replace(masks=tuple(np.split(stored["masks"], stored["ends"])[:-1]))


def join(parts: Sequence[Encoded]) -> Encoded:
    """Returns the examples of one or more parts as one, in their order."""
    masks = None
    if any(part.masks is not None for part in parts):
        masks = tuple(mask for part in parts for mask in part.target_masks())
    dropped: dict[str, list[str]] = {}
    for kind, ids in ((kind, ids) for part in parts for kind, ids in part.dropped.items()):
        dropped.setdefault(kind, []).extend(ids)
    return parts[0]._replace(
        ids=tuple(name for part in parts for name in part.ids),
        tokens=tuple(row for part in parts for row in part.tokens),
        start_N=np.concatenate([part.start_N for part in parts]),
        masks=masks,
        dropped=dropped,
    )


def encode_rows(tokens: Sequence[Sequence[int]], *, pad_id: int, limit: int = _NO_LIMIT) -> Encoded:
    """Returns token rows of which every token counts: texts for an encoder, prompts."""
    rows = tuple(np.array(row, np.int32) for row in tokens)
    ids = tuple(map(str, range(len(rows))))
    encoded = Encoded(ids, rows, np.zeros(len(rows), np.int64), pad_id, limit)
    length_N = encoded.lengths_N
    if len(rows) and not 1 <= length_N.min() <= length_N.max() <= limit:
        raise ValueError(
            f"texts must have 1 to {limit} tokens, got {length_N.min()} to {length_N.max()}: cut "
            "them when tokenizing"
        )
    return encoded


def require_answers(encoded: Encoded, what: str, *, max_len: int) -> None:
    """Raises a ValueError that names the examples whose prompt leaves no room for their answer.

    They may be whole or cut at max_len; `what` is what they are, in the plural.
    """
    lost = np.flatnonzero((encoded.start_N >= max_len) & (encoded.start_N < _NO_LIMIT))
    if len(lost):
        raise ValueError(
            f"{what} must have room for their answers in max_len={max_len} tokens, the prompts of "
            f"{some_of((encoded.ids[row] for row in lost), 3)} have up to "
            f"{encoded.start_N[lost].max()}: shorten them, or use a run with a larger "
            "--corpus.max_len"
        )


def describe_cuts(whole: Encoded, what: str, *, max_len: int) -> str:
    """Returns a sentence about the examples, called `what`, that are cut at max_len, if any."""

    def names(rows: np.ndarray) -> str:
        return some_of((whole.ids[row] for row in rows), 3)

    cut = np.flatnonzero(whole.lengths_N > max_len)
    lost = np.flatnonzero((whole.start_N >= max_len) & (whole.start_N < _NO_LIMIT))
    line = f"{len(cut):,} of {len(whole.ids):,} {what} are cut at {max_len} tokens ({names(cut)})"
    if len(lost):
        line += f", {len(lost):,} of them lose their whole answer and are left out ({names(lost)})"
    return line if len(cut) else ""


def describe_long(rows: Sequence[Example], what: str) -> str:
    """Returns a sentence about examples, called `what`, that take seconds each to tokenize."""
    long = [row.example_id for row in rows if sum(map(len, row[1:4])) > _LONG_TEXT]
    names = f"{len(long):,} of {len(rows):,} {what} have over {_LONG_TEXT:,} characters"
    return f"{names} ({some_of(long, 3)}): to tokenize each takes seconds" if long else ""


def describe_dropped(encoded: Encoded, what: str) -> str:
    """Returns a sentence about examples, called `what`, that are encoded without parts, if any."""
    return "; ".join(
        f"the chat template leaves out the {kind} in {len(ids):,} of {len(encoded.ids):,} {what} "
        f"({some_of(ids, 3)}), so no token of it is read: give the template that the model was "
        "trained with if that one writes it"
        for kind, ids in encoded.dropped.items()
    )


def encode(
    examples: Sequence[Example], tokenizer: Tokenizer, *, template: str, only_last: bool = False
) -> Encoded:
    """Returns each example as prompt, response and EOS ids, whole; see `Encoded.cut`.

    Where a form of the template says the prompt, it is tokenized apart from the response, so that
    training sees exactly the prompt ids that decoding starts from. Other rows become what their
    format and the chat template make of them, see `masking`; with `only_last` the last answer of a
    conversation is all that counts, as for a query.

    A tokenizer takes many times the memory of the ids, so that rows are encoded in parts.
    """
    starts, parts = range(0, max(len(examples), 1), _PART_ROWS), list[Encoded]()
    with contextlib.closing(progress(None, "tokens", total=len(examples), unit="example")) as bar:
        for start in starts:
            rows = examples[start : start + _PART_ROWS]
            part = _encode_part(rows, tokenizer, template=template, only_last=only_last)
            flat = np.concatenate([np.zeros(0, np.int32), *part.tokens])
            tokens = np.split(flat, np.cumsum(part.lengths_N))[:-1]
            parts.append(part._replace(tokens=tuple(tokens)))
            bar.update(len(rows))
    return join(parts) if len(parts) > 1 else parts[0]


def _encode_part(
    examples: Sequence[Example], tokenizer: Tokenizer, *, template: str, only_last: bool
) -> Encoded:
    """Returns what `encode` does, of all rows at once."""
    chosen = find_template(template, tokenizer)
    formed = [row for row in examples if chosen.has_form(row)]
    prompts = tokenizer.encode_prompts([fill_form(row, chosen) for row in formed])
    outputs = tokenizer.encode_batch([row.output for row in formed])
    of_form = zip(prompts, outputs, strict=True)
    others = [row for row in examples if not chosen.has_form(row)]
    of_content = iter(
        masking.mask_rows(others, tokenizer, chosen, template, only_last=only_last)
        if others
        else ()
    )

    def of_row(row: Example) -> masking.Masked:
        if not chosen.has_form(row):
            return next(of_content)
        prompt, output = next(of_form)
        ids = np.array([*prompt, *output, tokenizer.eos_id], np.int32)
        return masking.Masked(ids, np.arange(len(ids)) >= len(prompt))

    masked = [of_row(row) for row in examples]
    masked = [
        one._replace(is_target=np.zeros_like(one.is_target)) if row.is_muted else one
        for row, one in zip(examples, masked, strict=True)
    ]
    starts = [int(np.argmax(one.is_target)) if one.is_target.any() else _NO_LIMIT for one in masked]
    start_N = np.array(starts, np.int64)
    is_whole = all(
        row.is_target[start:].all() for row, start in zip(masked, start_N.tolist(), strict=True)
    )
    dropped: dict[str, list[str]] = {}
    for row, example in zip(masked, examples, strict=True):
        for kind in row.dropped:
            dropped.setdefault(kind, []).append(example.example_id)
    return Encoded(
        ids=tuple(row.example_id for row in examples),
        tokens=tuple(row.ids for row in masked),
        start_N=start_N,
        pad_id=tokenizer.pad_id,
        masks=None if is_whole else tuple(row.is_target for row in masked),
        dropped=dropped,
    )


def encode_prompts(
    examples: Sequence[Example], tokenizer: Tokenizer, *, max_len: int, template: str
) -> list[list[int]]:
    """Returns the ids that decoding starts from, the same ones that `encode` puts in front.

    Prompts longer than max_len are refused: cut, they would lose the place where the answer begins.
    """
    chosen = find_template(template, tokenizer)
    formed = [fill_form(row, chosen) for row in examples if chosen.has_form(row)]
    others = [row for row in examples if not chosen.has_form(row)]
    of_form = iter(tokenizer.encode_prompts(formed))
    of_content = iter(masking.question_ids(others, tokenizer, chosen, template) if others else ())
    prompts = [next(of_form if chosen.has_form(row) else of_content) for row in examples]
    long = [
        row.example_id for row, ids in zip(examples, prompts, strict=True) if len(ids) > max_len
    ]
    if long:
        raise ValueError(
            f"prompts must have at most {max_len} tokens, {len(long)} have more ({some_of(long)}): "
            "leave them out or raise --corpus.max_len"
        )
    return prompts
