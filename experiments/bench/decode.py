"""Measures batched greedy decoding against one prompt at a time, in one run.

  python experiments/bench/decode.py
  python experiments/bench/decode.py --model=pythia-14m --prompts=8 --alone=2 --json

The model has the preset's shapes and random weights. All prompts are decoded in batches, with no
end token, so every prompt gives all its new tokens. One at a time is measured on a sample of the
prompts, spread over their lengths, and taken to cost the same for the rest; the sample is cut in
parts that run between the batches, so that other load on the machine falls on both. Every program
is compiled before anything is timed. The tokens of the sample are compared with the batched ones.
Progress goes to stderr.

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
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from experiments.bench import harness
from experiments.bench.harness import Cost, Line, say
from raslik_jax.data.batches import next_rung
from raslik_jax.models import decode, decoder
from raslik_jax.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(harness.ModelOptions):
    """Options of the benchmark."""

    prompts: int = setting(200, "Prompts.", low=1)
    prompt_tokens: tuple[int, ...] = setting(
        (33, 64), "Length of the shortest and of the longest prompt.", low=1
    )
    new_tokens: int = setting(128, "New tokens of each prompt.", low=1)
    batch_size: int = setting(100, "Prompts decoded together.", low=1)
    alone: int = setting(8, "Prompts decoded one at a time as well.", low=1)

    def problems(self) -> list[str]:
        found, lengths = [*super().problems()], self.prompt_tokens
        if len(lengths) > 2 or lengths[0] > lengths[-1]:
            found.append(f"--prompt_tokens must be one number, or two that rise, got {lengths}")
        if self.alone > self.prompts:
            found.append(f"--alone must be at most --prompts={self.prompts}, got {self.alone}")
        return found


def agreement(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Returns how many tokens agree before the first that does not."""
    pairs = zip(ours, theirs, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(ours))


def measure(options: Options) -> Iterator[Line]:
    """Yields the lines of the module's docstring."""
    model = harness.draw_model(options, None)
    bound = decoder.bind(model.graphdef)
    random = np.random.default_rng(options.seed)
    lengths = options.prompt_tokens
    prompts = [
        random.integers(0, model.config.vocab_size, int(length)).tolist()
        for length in np.sort(random.integers(lengths[0], lengths[-1] + 1, options.prompts))
    ]

    def decode_all(rows: list[list[int]], batch_size: int) -> list[list[int]]:
        return decode.generate(
            bound,
            model.lora,
            model.base,
            rows,
            max_new_tokens=options.new_tokens,
            eos_id=None,
            pad_id=0,
            batch_size=batch_size,
        )

    # Prompts are sorted by length, so these are the batches that `generate` would make of them all.
    size = min(options.batch_size, len(prompts))
    batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    sample = np.unique(np.linspace(0, len(prompts) - 1, options.alone).astype(int))
    say("compiling every shape")
    work = [*((rows, size) for rows in batches), *(([prompts[i]], 1) for i in sample)]
    shapes = {(next_rung(max(map(len, rows))), count): rows for rows, count in work}
    for (_, count), rows in shapes.items():
        decode_all(rows, count)

    together: list[list[int]] = []
    alone: list[list[int]] = []
    costs: dict[str, list[Cost]] = {"batched": [], "alone": []}
    for number, part in enumerate(np.array_split(sample, len(batches) + 1)):
        for index in part:
            say(f"alone: prompt {len(alone) + 1} of {len(sample)}")
            new, cost = harness.timed(functools.partial(decode_all, [prompts[index]], 1))
            alone.extend(new)
            costs["alone"].append(cost)
        if number < len(batches):
            say(f"batch {number + 1} of {len(batches)}")
            new, cost = harness.timed(functools.partial(decode_all, batches[number], size))
            together.extend(new)
            costs["batched"].append(cost)
    seconds = {}
    for stage, rows in (("batched", together), ("alone", alone)):
        seconds[stage] = sum(cost.wall for cost in costs[stage])
        line: Line = {
            "stage": stage,
            "prompts": len(rows),
            "seconds": seconds[stage],
            "cpu_seconds": sum(cost.processor for cost in costs[stage]),
            "tokens_per_s": len(rows) * options.new_tokens / seconds[stage],
            "seconds_for_all": seconds[stage] * len(prompts) / len(rows),
        }
        yield line
    equal = sum(agreement(alone[i], together[index]) for i, index in enumerate(sample))
    yield {
        "stage": "summary",
        "speedup": line["seconds_for_all"] / seconds["batched"],
        "equal_tokens": equal / (len(sample) * options.new_tokens),
    }


if __name__ == "__main__":
    harness.start(Options(), measure)
