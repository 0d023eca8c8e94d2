"""Measures batched greedy decoding against one prompt at a time, in one run.

  python experiments/bench_decode.py
  python experiments/bench_decode.py --model=pythia-14m --prompts=8 --alone=2 --json

The model has the preset's shapes and random weights. All prompts are decoded in batches, with no
end token, so every prompt gives all its new tokens. One at a time is measured on a sample of the
prompts, spread over their lengths, and taken to cost the same for the rest; the sample is cut in
parts that run between the batches, so that other load on the machine falls on both. Every program
is compiled before anything is timed. The tokens of the sample are compared with the batched ones.
Progress goes to stderr.

With --json stdout is one object. Its keys: model, dtype, device, cpus, jax, seed, prompts,
prompt_tokens (shortest and longest), new_tokens, batch_size, batched_seconds (all prompts),
batched_tokens_per_s (new tokens), batched_cpu_seconds, alone_prompts (the size of the sample),
alone_seconds (the sample), alone_tokens_per_s, alone_cpu_seconds (the sample),
alone_seconds_for_all (of the sample, times prompts over alone_prompts), speedup
(alone_seconds_for_all over batched_seconds), equal_tokens (the share of the sample's tokens, up to
the first that differs in each continuation, that both ways agree on).
"""

import functools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from raslik_jax.cli import command  # noqa: E402

_MODEL = flags.DEFINE_string("model", "smollm2-135m", "Shapes of the model, a preset's name.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of the weights.")
_PROMPTS = flags.DEFINE_integer("prompts", 200, "Prompts.", 1)
_PROMPT_TOKENS = command.define_list(
    "prompt_tokens", [33, 64], "Length of the shortest and of the longest prompt.", int
)
_NEW_TOKENS = flags.DEFINE_integer("new_tokens", 128, "New tokens of each prompt.", 1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 100, "Prompts decoded together.", 1)
_ALONE = flags.DEFINE_integer("alone", 8, "Prompts decoded one at a time as well.", 1)
_SEED = flags.DEFINE_integer("seed", 0, "Of the weights and the prompts.", 0)
_JSON = flags.DEFINE_boolean("json", False, "Print one JSON object, no table.")


class Cost(NamedTuple):
    """What one measured call took, in seconds."""

    wall: float
    cpu: float


def measure(call: Callable[[], Any]) -> tuple[Any, Cost]:
    """Returns the call's result and its cost. Decoding ends with tokens on the host."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return result, Cost(time.perf_counter() - wall, time.process_time() - cpu)


def agreement(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Returns how many tokens agree before the first that does not."""
    pairs = zip(ours, theirs, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(ours))


def run() -> dict[str, Any]:
    """Returns the measurements by the names of the module's docstring."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from raslik_jax.models import decode, decoder, presets

    if _MODEL.value not in presets.MODEL_PRESETS:
        raise ValueError(
            f"--model must be one of {sorted(presets.MODEL_PRESETS)}, got {_MODEL.value!r}: "
            "choose a preset"
        )
    config = presets.MODEL_PRESETS[_MODEL.value]
    shortest, longest = _PROMPT_TOKENS.value[0], _PROMPT_TOKENS.value[-1]
    if shortest > longest or len(_PROMPT_TOKENS.value) > 2 or _ALONE.value > _PROMPTS.value:
        raise ValueError(
            "--prompt_tokens must be one number, or two that rise, and --alone at most --prompts, "
            f"got {_PROMPT_TOKENS.value}, {_ALONE.value} and {_PROMPTS.value}: correct them"
        )

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    say(f"drawing the weights of {_MODEL.value}")
    graphdef, lora, base = decoder.create(
        config, None, key=jax.random.key(_SEED.value), dtype=jnp.dtype(_DTYPE.value)
    )
    bound = decoder.bind(graphdef)
    rng = np.random.default_rng(_SEED.value)
    prompts = [
        rng.integers(0, config.vocab_size, int(length)).tolist()
        for length in np.sort(rng.integers(shortest, longest + 1, _PROMPTS.value))
    ]

    def decode_all(rows: list[list[int]], batch_size: int) -> list[list[int]]:
        return decode.generate(
            bound,
            lora,
            base,
            rows,
            max_new_tokens=_NEW_TOKENS.value,
            eos_id=None,
            pad_id=0,
            batch_size=batch_size,
        )

    # Prompts are sorted by length, so these are the batches that `generate` would make of them all.
    size = min(_BATCH_SIZE.value, len(prompts))
    batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    sample = np.unique(np.linspace(0, len(prompts) - 1, _ALONE.value).astype(int)).tolist()
    say("compiling every shape")
    seen = set()
    for rows, batch_size in [*((b, size) for b in batches), *(([prompts[i]], 1) for i in sample)]:
        shape = decode.bucket_length(max(map(len, rows))), batch_size
        if shape not in seen:
            decode_all(rows, batch_size)
            seen.add(shape)

    together: list[list[int]] = []
    alone: list[list[int]] = []
    batched_costs, alone_costs = [], []
    parts = np.array_split(np.asarray(sample), len(batches) + 1)
    for number, part in enumerate(parts):
        for index in part:
            say(f"alone: prompt {len(alone) + 1} of {len(sample)}")
            new, cost = measure(functools.partial(decode_all, [prompts[index]], 1))
            alone.extend(new)
            alone_costs.append(cost)
        if number < len(batches):
            say(f"batch {number + 1} of {len(batches)}")
            new, cost = measure(functools.partial(decode_all, batches[number], size))
            together.extend(new)
            batched_costs.append(cost)

    batched_seconds = sum(cost.wall for cost in batched_costs)
    alone_seconds = sum(cost.wall for cost in alone_costs)
    all_alone = alone_seconds * len(prompts) / len(sample)
    equal = sum(agreement(alone[i], together[index]) for i, index in enumerate(sample))
    device = jax.devices()[0]
    return {
        "model": _MODEL.value,
        "dtype": _DTYPE.value,
        "device": f"{device.platform}: {device.device_kind}",
        "cpus": os.cpu_count(),
        "jax": jax.__version__,
        "seed": _SEED.value,
        "prompts": len(prompts),
        "prompt_tokens": [len(prompts[0]), len(prompts[-1])],
        "new_tokens": _NEW_TOKENS.value,
        "batch_size": size,
        "batched_seconds": batched_seconds,
        "batched_tokens_per_s": len(prompts) * _NEW_TOKENS.value / batched_seconds,
        "batched_cpu_seconds": sum(cost.cpu for cost in batched_costs),
        "alone_prompts": len(sample),
        "alone_seconds": alone_seconds,
        "alone_tokens_per_s": len(sample) * _NEW_TOKENS.value / alone_seconds,
        "alone_cpu_seconds": sum(cost.cpu for cost in alone_costs),
        "alone_seconds_for_all": all_alone,
        "speedup": all_alone / batched_seconds,
        "equal_tokens": equal / (len(sample) * _NEW_TOKENS.value),
    }


def report(result: dict[str, Any]) -> str:
    """Returns the measurements as a table for the terminal."""
    from raslik_jax.report import tables

    rows = (
        ("batched, all prompts, s", f"{result['batched_seconds']:.1f}"),
        ("batched, new tokens / s", f"{result['batched_tokens_per_s']:.1f}"),
        (f"alone, {result['alone_prompts']} prompts, s", f"{result['alone_seconds']:.1f}"),
        ("alone, new tokens / s", f"{result['alone_tokens_per_s']:.1f}"),
        ("alone, all prompts, s (from the sample)", f"{result['alone_seconds_for_all']:.1f}"),
        ("speedup", f"{result['speedup']:.2f}"),
        ("tokens that both ways agree on", f"{result['equal_tokens']:.1%}"),
    )
    first, last = result["prompt_tokens"]
    table = tables.Table(
        columns=(tables.Column("measured"), tables.Column("value", "right")),
        rows=rows,
        notes=(
            f"{result['model']}, {result['dtype']}, {result['prompts']} prompts of {first} to "
            f"{last} tokens, {result['new_tokens']} new tokens each, batches of "
            f"{result['batch_size']}; {result['device']}, {result['cpus']} CPUs, "
            f"jax {result['jax']}.",
        ),
    )
    return tables.render_terminal(table)


def main() -> None:
    result = run()
    print(json.dumps(result) if _JSON.value else report(result))


if __name__ == "__main__":
    command.start(main)
