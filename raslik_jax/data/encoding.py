"""Examples as rows of token ids: what is tokenized once and read by every stage."""

import json
import pathlib
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int

from raslik_jax.data.examples import Example
from raslik_jax.data.prompts import render_prompt
from raslik_jax.data.tokenization import Tokenizer
from raslik_jax.messages import some_of

Targets = Literal["response", "all"]
_NO_LIMIT = 2**30


class Encoded(NamedTuple):
    """Token rows of unequal length, in corpus order: int32 ids of prompt, response and EOS.

    `start_N` is the position of the first token that counts in the loss; `pad_id` fills up the
    rectangles; the model takes at most `limit` tokens, padding included.
    """

    ids: tuple[str, ...]
    tokens: tuple[np.ndarray, ...]
    start_N: np.ndarray
    pad_id: int
    limit: int = _NO_LIMIT

    @property
    def lengths_N(self) -> Int[np.ndarray, " N"]:
        """Tokens of each example."""
        return np.array([len(row) for row in self.tokens], np.int64)

    @property
    def num_targets_N(self) -> Int[np.ndarray, " N"]:
        """Tokens of each example that count in the loss."""
        return np.maximum(self.lengths_N - self.start_N, 0)

    def take(self, rows: Int[np.ndarray, " M"]) -> "Encoded":
        """Returns some of the examples, by position."""
        return self._replace(
            ids=tuple(self.ids[row] for row in rows.tolist()),
            tokens=tuple(self.tokens[row] for row in rows.tolist()),
            start_N=self.start_N[rows],
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
        start_N = self.start_N
        if targets == "all":
            start_N = np.where(start_N >= max_len, start_N, 1)
        return self._replace(tokens=tuple(row[:max_len] for row in self.tokens), start_N=start_N)

    def save(self, path: pathlib.Path) -> None:
        """Writes the examples as an .npz file of few arrays."""
        np.savez(
            path,
            ids=np.frombuffer(json.dumps(self.ids).encode(), np.uint8),
            tokens=np.concatenate([np.zeros(0, np.int32), *self.tokens]),
            ends=np.cumsum(self.lengths_N),
            start=self.start_N,
            pad_id=np.array(self.pad_id),
        )


def load_encoded(path: pathlib.Path) -> Encoded:
    """Returns the examples that `Encoded.save` wrote."""
    with np.load(path, allow_pickle=False) as stored:
        ids = tuple(json.loads(stored["ids"].tobytes()))
        tokens = tuple(np.split(stored["tokens"], stored["ends"])[:-1])
        return Encoded(ids, tokens, stored["start"], int(stored["pad_id"]))


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
    lost = np.flatnonzero(encoded.start_N >= max_len)
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
    lost = np.flatnonzero(whole.start_N >= max_len)
    line = f"{len(cut):,} of {len(whole.ids):,} {what} are cut at {max_len} tokens ({names(cut)})"
    if len(lost):
        line += f", {len(lost):,} of them lose their whole answer and are left out ({names(lost)})"
    return line if len(cut) else ""


def encode(examples: Sequence[Example], tokenizer: Tokenizer, *, template: str) -> Encoded:
    """Returns each example as prompt, response and EOS ids, whole; see `Encoded.cut`.

    Prompt and response are tokenized apart, so that training sees exactly the prompt ids that
    decoding starts from.
    """
    prompts = tokenizer.encode_prompts([render_prompt(row, template) for row in examples])
    outputs = tokenizer.encode_batch([row.output for row in examples])
    return Encoded(
        ids=tuple(row.example_id for row in examples),
        tokens=tuple(
            np.array([*prompt, *output, tokenizer.eos_id], np.int32)
            for prompt, output in zip(prompts, outputs, strict=True)
        ),
        start_N=np.array([len(prompt) for prompt in prompts], np.int64),
        pad_id=tokenizer.pad_id,
    )


def encode_prompts(
    examples: Sequence[Example], tokenizer: Tokenizer, *, max_len: int, template: str
) -> list[list[int]]:
    """Returns the ids that decoding starts from, the same ones that `encode` puts in front.

    Prompts longer than max_len are refused: cut, they would lose the place where the answer begins.
    """
    prompts = tokenizer.encode_prompts([render_prompt(row, template) for row in examples])
    long = [
        row.example_id for row, ids in zip(examples, prompts, strict=True) if len(ids) > max_len
    ]
    if long:
        raise ValueError(
            f"prompts must have at most {max_len} tokens, {len(long)} have more ({some_of(long)}): "
            "leave them out or raise --corpus.max_len"
        )
    return prompts
