"""Measures batched greedy decoding against one prompt at a time, in one run.

  python experiments/bench/decode.py
  python experiments/bench/decode.py --model=pythia-14m --prompts=8 --alone=2 --json

The model has the preset's shapes and random weights. All prompts are decoded in batches, with no
end token, so every prompt gives all its new tokens. One at a time is measured on a sample of the
prompts, spread over their lengths, and taken to cost the same for the rest; the sample is cut in
parts that run between the batches, so that other load on the machine falls on both. Every program
is compiled before anything is timed.

With --json each line of stdout is one object. Its key "stage" says which:

setup: every flag; device, cpus, jax.
batched, alone: prompts (all, or the sample), seconds and cpu_seconds of these, tokens_per_s (new
  tokens), seconds_for_all (seconds, times all prompts over these).
summary: speedup (seconds_for_all, alone over batched), equal_tokens (the share of the sample's
  tokens, up to the first that differs in each continuation, that both ways agree on).
"""

import dataclasses
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from experiments.bench import harness
from experiments.bench.harness import Line, say
from raslik_jax.base.settings import setting
from raslik_jax.data.batches import next_rung
from raslik_jax.models import decode, decoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(harness.ModelOptions):
    """Options of the benchmark."""

    prompts: int = setting(200, "Prompts.", low=1)
    prompt_tokens: tuple[int, ...] = setting(
        (33, 64), "Shortest and longest prompt, in tokens.", low=1
    )
    new_tokens: int = setting(128, "New tokens of each prompt.", low=1)
    batch_size: int = setting(100, "Prompts decoded together.", low=1)
    alone: int = setting(8, "Number of prompts that are also decoded one at a time.", low=1)


def measure(options: Options) -> Iterator[Line]:
    """Yields the lines of the module's docstring."""
    model = harness.draw_model(options, None)
    random, count = np.random.default_rng(options.seed), options.prompts
    shortest, longest = min(options.prompt_tokens), max(options.prompt_tokens)
    length_N = np.sort(random.integers(shortest, longest + 1, count))
    prompts = [random.integers(0, model.config.vocab_size, n).tolist() for n in length_N]
    decode_rows = functools.partial(
        decode.generate,
        decoder.bind(model.graphdef),
        model.lora,
        model.base,
        max_new_tokens=options.new_tokens,
        eos_id=None,
        pad_id=0,
    )
    # Prompts are sorted by length, so these are the batches that `generate` would make of them all.
    size = min(options.batch_size, count)
    work = [("batched", prompts[start : start + size], size) for start in range(0, count, size)]
    sample = np.unique(np.linspace(0, count - 1, options.alone).astype(int))
    parts = np.array_split(sample, len(work) + 1)
    for place, part in reversed(list(enumerate(parts))):
        work[place:place] = [("alone", [prompts[index]], 1) for index in part]
    say("compiling every shape")
    shapes = {(next_rung(max(map(len, rows))), batch, len(rows)): rows for _, rows, batch in work}
    for (_, batch, _), rows in shapes.items():
        decode_rows(rows, batch_size=batch)

    tokens: dict[str, list[list[int]]] = {"batched": [], "alone": []}
    taken = {stage: np.zeros(2) for stage in tokens}
    for number, (stage, rows, batch) in enumerate(work, start=1):
        say(f"{number} of {len(work)}: {stage}")
        new, seconds = harness.timed(functools.partial(decode_rows, rows, batch_size=batch))
        tokens[stage] += new
        taken[stage] += seconds
    for stage, new in tokens.items():
        wall, processor = taken[stage].tolist()
        yield {
            "stage": stage,
            "prompts": len(new),
            "seconds": wall,
            "cpu_seconds": processor,
            "tokens_per_s": len(new) * options.new_tokens / wall,
            "seconds_for_all": wall * count / len(new),
        }
    differs = np.array(tokens["alone"]) != np.array(tokens["batched"])[sample]
    speed = {stage: len(new) / taken[stage][0] for stage, new in tokens.items()}
    yield {
        "stage": "summary",
        "speedup": speed["batched"] / speed["alone"],
        "equal_tokens": float(np.mean(np.cumsum(differs, axis=1) == 0)),
    }


if __name__ == "__main__":
    harness.start(Options(), measure)
