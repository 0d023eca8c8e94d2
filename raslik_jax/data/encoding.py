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
    """Token rows of unequal length.

    Attributes:
      ids: the example ids, in corpus order.
      tokens: for each example its int32 ids: prompt, response, EOS.
      start_N: position of the first token that counts in the loss.
      whole_N: tokens of each example before any was cut at the right end.
      pad_id: fills up the rectangles.
      limit: tokens that the model takes at most, padding included.
    """

    ids: tuple[str, ...]
    tokens: tuple[np.ndarray, ...]
    start_N: np.ndarray
    whole_N: np.ndarray
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
            whole_N=self.whole_N[rows],
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

        Args:
          max_len: tokens at most, prompt included.
          targets: what counts in the loss: "response" (with EOS), or "all" tokens but the first,
            which nothing predicts. Where the prompt leaves no room for an answer, nothing counts.

        Raises:
          ValueError: max_len below 2.
        """
        if max_len < 2:
            raise ValueError(f"{max_len=} has no room for a prompt and an answer: give at least 2")
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
            whole=self.whole_N,
            pad_id=np.array(self.pad_id),
        )


def load_encoded(path: pathlib.Path) -> Encoded:
    """Returns the examples that `Encoded.save` wrote."""
    with np.load(path, allow_pickle=False) as stored:
        return Encoded(
            ids=tuple(json.loads(stored["ids"].tobytes())),
            tokens=tuple(np.split(stored["tokens"], stored["ends"])[:-1]),
            start_N=stored["start"],
            whole_N=stored["whole"],
            pad_id=int(stored["pad_id"]),
        )


def encode_rows(tokens: Sequence[Sequence[int]], *, pad_id: int, limit: int = _NO_LIMIT) -> Encoded:
    """Returns token rows of which every token counts: texts for an encoder, prompts.

    Raises:
      ValueError: a row is empty or longer than the limit.
    """
    length_N = np.array([len(row) for row in tokens], np.int64)
    if len(tokens) and not 1 <= length_N.min() <= length_N.max() <= limit:
        raise ValueError(
            f"texts must have 1 to {limit} tokens, got {length_N.min()} to {length_N.max()}: cut "
            "them when tokenizing"
        )
    return Encoded(
        ids=tuple(str(row) for row in range(len(tokens))),
        tokens=tuple(np.array(row, np.int32) for row in tokens),
        start_N=np.zeros(len(tokens), np.int64),
        whole_N=length_N,
        pad_id=pad_id,
        limit=limit,
    )


def require_answers(encoded: Encoded, what: str, *, max_len: int) -> None:
    """Raises a ValueError that names the examples whose prompt leaves no room for their answer.

    Args:
      encoded: of `encode`.
      what: what the examples are, in the plural, for the message.
      max_len: that they were encoded with.
    """
    lost = np.flatnonzero(encoded.num_targets_N == 0)
    if len(lost):
        longest = int(encoded.start_N[lost].max())
        raise ValueError(
            f"{what} must have room for their answers in max_len={max_len} tokens, the prompts of "
            f"{some_of((encoded.ids[row] for row in lost), 3)} have up to {longest}: shorten them, "
            "or use a run with a larger --corpus.max_len"
        )


def describe_cuts(encoded: Encoded, what: str, *, max_len: int) -> str:
    """Returns a sentence about the examples that were cut at max_len, empty where none was.

    Args:
      encoded: of `encode`.
      what: what the examples are, in the plural.
      max_len: that they were encoded with.
    """
    cut = np.flatnonzero(encoded.whole_N > encoded.lengths_N)
    lost = np.flatnonzero(encoded.num_targets_N == 0)
    if not len(cut):
        return ""
    names = some_of((encoded.ids[row] for row in cut), 3)
    line = f"{len(cut):,} of {len(encoded.ids):,} {what} are cut at {max_len} tokens ({names})"
    if len(lost):
        names = some_of((encoded.ids[row] for row in lost), 3)
        line += f", {len(lost):,} of them lose their whole answer and are left out ({names})"
    return line


def encode(examples: Sequence[Example], tokenizer: Tokenizer, *, template: str) -> Encoded:
    """Returns each example as prompt, response and EOS ids, whole; see `Encoded.cut`.

    Prompt and response are tokenized apart, so that training sees exactly the prompt ids that
    decoding starts from.

    Args:
      examples: the rows.
      tokenizer: text to ids.
      template: a name in `prompts.TEMPLATES`.

    Raises:
      ValueError: an unknown template.
    """
    prompts = tokenizer.encode_prompts([render_prompt(row, template) for row in examples])
    outputs = tokenizer.encode_batch([row.output for row in examples])
    tokens = tuple(
        np.array([*prompt, *output, tokenizer.eos_id], np.int32)
        for prompt, output in zip(prompts, outputs, strict=True)
    )
    return Encoded(
        ids=tuple(row.example_id for row in examples),
        tokens=tokens,
        start_N=np.array([len(prompt) for prompt in prompts], np.int64),
        whole_N=np.array([len(row) for row in tokens], np.int64),
        pad_id=tokenizer.pad_id,
    )


def encode_prompts(
    examples: Sequence[Example], tokenizer: Tokenizer, *, max_len: int, template: str
) -> list[list[int]]:
    """Returns the ids that decoding starts from, the same ones that `encode` puts in front.

    Raises:
      ValueError: an unknown template, or prompts longer than max_len: cutting one would drop the
        place where the answer begins.
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
