"""Ragged token rows into rectangular batches: encoding, length buckets, training order.

NumPy only. Two rules hold everywhere: the composition of a batch follows from the corpus and the
settings alone, never from what is left to do; and all batches of a bucket have one shape, so that
each bucket compiles once.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int32

from raslik_jax.data.examples import Example
from raslik_jax.data.ordering import shuffled
from raslik_jax.data.prompts import render_prompt
from raslik_jax.data.tokenization import Tokenizer
from raslik_jax.messages import some_of

DUMMY_ROW = -1


class Batch(NamedTuple):
    """A rectangle of tokens, padded on the right.

    Attributes:
      tokens_BL: int32 ids; pads hold the tokenizer's pad id.
      target_mask_BL: True where the token's own prediction counts in the loss: the response and
        EOS. Prompt and pads never count. A dummy row has none.
      length_B: int32 tokens of each row without pads; 0 for a dummy row.
    """

    tokens_BL: np.ndarray
    target_mask_BL: np.ndarray
    length_B: np.ndarray


class Encoded(NamedTuple):
    """Token rows of unequal length.

    Attributes:
      ids: the example ids, in corpus order.
      tokens: for each example its int32 ids: prompt, response, EOS.
      start_N: position of the first token that counts in the loss.
      whole_N: tokens of each example before any was cut at the right end.
      pad_id: fills up the rectangles.
    """

    ids: tuple[str, ...]
    tokens: tuple[np.ndarray, ...]
    start_N: np.ndarray
    whole_N: np.ndarray
    pad_id: int

    @property
    def lengths_N(self) -> Int[np.ndarray, " N"]:
        """Tokens of each example."""
        return np.array([len(row) for row in self.tokens], np.int64)

    @property
    def num_targets_N(self) -> Int[np.ndarray, " N"]:
        """Tokens of each example that count in the loss."""
        return np.maximum(self.lengths_N - self.start_N, 0)

    def with_answers(self) -> "Encoded":
        """Returns the examples of which something is left that counts in the loss."""
        kept = np.flatnonzero(self.num_targets_N)
        if len(kept) == len(self.ids):
            return self
        return Encoded(
            ids=tuple(self.ids[row] for row in kept),
            tokens=tuple(self.tokens[row] for row in kept),
            start_N=self.start_N[kept],
            whole_N=self.whole_N[kept],
            pad_id=self.pad_id,
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


class BatchPlan(NamedTuple):
    """Which rows make a batch, and its static shape.

    Attributes:
      rows: [B] corpus positions; DUMMY_ROW where there is none.
      length: L, a multiple of the planner's `multiple`.
      num_targets: T, at least the target tokens of any row in the bucket, likewise a multiple.
    """

    rows: np.ndarray
    length: int
    num_targets: int


def encode(
    examples: Sequence[Example],
    tokenizer: Tokenizer,
    *,
    max_len: int,
    template: str,
    targets: str = "response",
) -> Encoded:
    """Returns each example as prompt, response and EOS ids.

    Prompt and response are tokenized apart, so that training sees exactly the prompt ids that
    decoding starts from. What is longer than max_len loses its right end, EOS included.

    Args:
      examples: the rows.
      tokenizer: text to ids.
      max_len: tokens at most, prompt included.
      template: a name in `prompts.TEMPLATES`.
      targets: what counts in the loss: "response" (with EOS), or "all" tokens but the first, which
        nothing predicts. Where the prompt leaves no room for an answer, nothing counts in either.

    Raises:
      ValueError: an unknown template or targets, or max_len below 2.
    """
    if targets not in ("response", "all"):
        raise ValueError(f"targets must be 'response' or 'all', got {targets!r}")
    if max_len < 2:
        raise ValueError(f"{max_len=} has no room for a prompt and an answer: give at least 2")
    prompts = tokenizer.encode_prompts([render_prompt(row, template) for row in examples])
    outputs = tokenizer.encode_batch([row.output for row in examples])
    whole = [
        prompt + output + [tokenizer.eos_id]
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    start_N = np.array(
        [
            len(prompt) if targets == "response" or len(prompt) >= max_len else 1
            for prompt in prompts
        ],
        np.int64,
    )
    return Encoded(
        ids=tuple(row.example_id for row in examples),
        tokens=tuple(np.array(row[:max_len], np.int32) for row in whole),
        start_N=start_N,
        whole_N=np.array([len(row) for row in whole], np.int64),
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


def plan_batches(
    lengths_N: Int[np.ndarray, " N"],
    targets_N: Int[np.ndarray, " N"],
    *,
    ids: Sequence[str],
    num_buckets: int = 12,
    batch_tokens: int = 8192,
    multiple: int = 8,
) -> tuple[BatchPlan, ...]:
    """Returns the batches of a corpus in sketching order: by bucket, then by id.

    The edges of the buckets are those that leave the fewest tokens in all rectangles, dummy rows
    included (dynamic programme over all lengths that occur; at equal cost fewer buckets). A bucket
    of n rows and length L needs ceil(n / (batch_tokens // L)) batches and spreads its rows evenly
    over them, so that less than one row per batch is a dummy, all of them at the bucket's end. The
    result follows from the arguments alone, and not from the order of the rows.

    Args:
      lengths_N: tokens of each row.
      targets_N: tokens of each row that count in the loss.
      ids: the row ids, all different.
      num_buckets: shapes at most; each costs a compilation.
      batch_tokens: B * L at most.
      multiple: divides every L and T.

    Raises:
      ValueError: no rows, arguments of unequal length, ids that repeat, a setting below 1, or a row
        longer than batch_tokens.
    """
    num_rows = len(lengths_N)
    if num_rows == 0:
        raise ValueError("batches must have at least one row, got none")
    if not len(targets_N) == len(ids) == num_rows:
        raise ValueError(
            f"each row must have a length, a target count and an id, got {num_rows}, "
            f"{len(targets_N)} and {len(ids)}"
        )
    if len(set(ids)) != num_rows:
        raise ValueError(f"ids have to differ, {num_rows - len(set(ids))} of {num_rows} repeat")
    if min(num_buckets, batch_tokens, multiple) < 1:
        raise ValueError(f"{num_buckets=} {batch_tokens=} {multiple=}: each has to be at least 1")
    padded_N = round_up(lengths_N, multiple)
    longest = int(padded_N.max())
    if longest > batch_tokens:
        raise ValueError(
            f"a row of {longest} tokens exceeds {batch_tokens=}: raise it or lower max_len"
        )
    edges = _bucket_edges(padded_N, num_buckets, batch_tokens)
    bucket_N = np.searchsorted(edges, padded_N)
    # Sorted as Python text, by code point: NumPy would copy every id into a fixed width.
    order = sorted(range(num_rows), key=lambda position: (bucket_N[position], ids[position]))
    sizes = np.bincount(bucket_N, minlength=len(edges))
    plans: list[BatchPlan] = []
    start = 0
    for edge, size in zip(edges.tolist(), sizes.tolist(), strict=True):
        members = np.array(order[start : start + size], np.int64)
        start += size
        num_batches = -(-size // (batch_tokens // edge))
        batch_size = -(-size // num_batches)
        slots = np.full(num_batches * batch_size, DUMMY_ROW, np.int64)
        slots[:size] = members
        num_targets = int(round_up(targets_N[members], multiple).max())
        plans.extend(
            BatchPlan(rows, edge, num_targets) for rows in slots.reshape(num_batches, batch_size)
        )
    return tuple(plans)


def sketching_order(plans: Sequence[BatchPlan]) -> Int[np.ndarray, " N"]:
    """Returns the corpus positions in the order of the plans, without dummy rows."""
    rows = np.concatenate([plan.rows for plan in plans])
    return rows[rows != DUMMY_ROW]


def padding_waste(plans: Sequence[BatchPlan], lengths_N: Int[np.ndarray, " N"]) -> float:
    """Returns the share of all tokens in the rectangles that are pads, dummy rows included."""
    computed = sum(plan.rows.size * plan.length for plan in plans)
    return 1.0 - float(lengths_N[sketching_order(plans)].sum()) / computed


def plan_rows(encoded: Encoded, rows: Int[np.ndarray, " B"]) -> BatchPlan:
    """Returns a batch of these rows in the next shape of a short ladder.

    For training, where batches are drawn at random and every shape costs a compilation: L is the
    next of 16, 24, 32, 48, 64, 96, ..., at most a half more than needed, and T is L or half of it.

    Args:
      encoded: the corpus.
      rows: corpus positions, at least one of them real; DUMMY_ROW for none.
    """
    # Not encoded.lengths_N, which counts the whole corpus at every call.
    real = rows[rows != DUMMY_ROW]
    length_B = np.array([len(encoded.tokens[row]) for row in real.tolist()], np.int64)
    length = next_rung(int(length_B.max()))
    num_targets = int((length_B - encoded.start_N[real]).max())
    return BatchPlan(rows, length, length // 2 if num_targets <= length // 2 else length)


def next_rung(count: int) -> int:
    """Returns the least of 2^k and 3 * 2^(k - 1) that holds so many, from 16 up."""
    power = 1 << max(count - 1, 15).bit_length()
    return power if count > power // 4 * 3 else max(power // 4 * 3, 16)


def make_batch(encoded: Encoded, plan: BatchPlan) -> Batch:
    """Returns the rectangle of a plan.

    Raises:
      ValueError: a row that is longer than the plan, which was then made for another corpus.
    """
    shape = len(plan.rows), plan.length
    tokens_BL = np.full(shape, encoded.pad_id, np.int32)
    target_mask_BL = np.zeros(shape, np.bool_)
    length_B = np.zeros(len(plan.rows), np.int32)
    for slot, row in enumerate(plan.rows.tolist()):
        if row == DUMMY_ROW:
            continue
        tokens = encoded.tokens[row]
        if len(tokens) > plan.length:
            raise ValueError(
                f"{encoded.ids[row]} has {len(tokens)} tokens, the plan holds {plan.length}: plan "
                "the batches of this corpus"
            )
        tokens_BL[slot, : len(tokens)] = tokens
        target_mask_BL[slot, encoded.start_N[row] : len(tokens)] = True
        length_B[slot] = len(tokens)
    return _checked(tokens_BL, target_mask_BL, length_B)


def training_batches(
    num_examples: int, batch_size: int, *, seed: int, epoch: int
) -> Int[np.ndarray, "M B"]:
    """Returns one epoch of row positions, one batch per line, each position exactly once.

    Where batch_size does not divide num_examples the last line ends with DUMMY_ROW: a dummy row
    has no targets and must have no weight in the mean over the batch.

    Args:
      num_examples: rows of the corpus.
      batch_size: rows per batch.
      seed: of the run.
      epoch: from 0; every epoch has an order of its own.

    Raises:
      ValueError: a count below 1.
    """
    if min(num_examples, batch_size) < 1:
        raise ValueError(f"{num_examples=} and {batch_size=} have to be at least 1")
    order = shuffled(range(num_examples), seed=seed, label=f"training epoch {epoch}")
    slots = np.full(-(-num_examples // batch_size) * batch_size, DUMMY_ROW, np.int64)
    slots[:num_examples] = order
    return slots.reshape(-1, batch_size)


def _checked(
    tokens_BL: Int32[np.ndarray, "B L"],
    target_mask_BL: Bool[np.ndarray, "B L"],
    length_B: Int32[np.ndarray, " B"],
) -> Batch:
    return Batch(tokens_BL, target_mask_BL, length_B)


def round_up(counts_N: Int[np.ndarray, " N"], multiple: int) -> Int[np.ndarray, " N"]:
    """Returns the next multiples, at least one of it each."""
    return np.maximum(-(-counts_N // multiple), 1) * multiple


def _bucket_edges(
    padded_N: Int[np.ndarray, " N"], num_buckets: int, batch_tokens: int
) -> Int[np.ndarray, " M"]:
    """Returns the upper edges, each the length of some row, of the cheapest buckets.

    best[k][j] = min over i < j of best[k - 1][i] + cost[i + 1, j]: k buckets for the distinct
    lengths up to the j-th, where cost counts the tokens in the rectangles of one bucket.
    """
    length_M, count_M = np.unique(padded_N, return_counts=True)
    below_M = np.concatenate([[0], np.cumsum(count_M)])
    # cost[i, j]: one bucket for the i-th to the j-th distinct length, both included.
    rows = below_M[None, 1:] - below_M[:-1, None]
    num_batches = -(-rows // (batch_tokens // length_M))
    batch_size = -(-rows // np.maximum(num_batches, 1))
    impossible = np.iinfo(np.int64).max // 4
    cost = np.where(rows > 0, num_batches * batch_size * length_M, impossible)

    best = cost[0]
    came_from = []
    best_by_count = [best[-1]]
    for _ in range(1, min(num_buckets, len(length_M))):
        totals = best[:-1, None] + cost[1:, :]
        came_from.append(np.argmin(totals, axis=0))
        best = totals.min(axis=0)
        best_by_count.append(best[-1])
    end = len(length_M) - 1
    edges = [end]
    for step in reversed(range(int(np.argmin(best_by_count)))):
        end = int(came_from[step][end])
        edges.append(end)
    return length_M[edges[::-1]]
