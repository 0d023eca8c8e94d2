"""Measures calls within one process: greedy answers and steps of unlearning, by us and by PyTorch.

measure.py says how. Both programs must give the same tokens and losses, or nothing is stored.
"""

import dataclasses
import functools
import math
import pathlib
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.bench.harness import say
from experiments.studies.speed.measure import Options
from experiments.studies.ways_out import measure as ways_out
from raslik_jax.data.examples import Example
from raslik_jax.data.tokens import encoding, masking, prompts, tokenization
from raslik_jax.train.goals import LEAST_CARRIED, LONGEST_WAY
from raslik_jax.train.objectives import CappedSettings

_ROWS, _STEPS, _RATE, _OBJECTIVE = 8, 4, 4e-4, CappedSettings()
# The share of equal tokens up to the first that differs in an answer, and the relative difference
# of losses that the rounding of a dtype explains.
_LEAST = {"float32": 0.99, "bfloat16": 0.5}
_MOST = {"float32": 1e-3, "bfloat16": 5e-2}


class Calls(NamedTuple):
    """The same work by both programs.

    `check` returns how far the two results agree, and raises a ValueError if they do not.
    """

    ours: Callable[[], np.ndarray]
    theirs: Callable[[], np.ndarray]
    check: Callable[[np.ndarray, np.ndarray], float]


def encode_sets(options: Options) -> tuple[encoding.Encoded, ...]:
    """Returns the first rows of the brand and of the others by the chat template."""
    rows = ways_out.cases()["brand"].rows("train")
    tokenizer = tokenization.load_tokenizer(pathlib.Path(options.checkpoint))
    found = []
    for kind in ("brand", ""):
        chosen = [row for row in rows if row["behavior"] == kind][:_ROWS]
        texts = [[message["content"] for message in row["messages"]] for row in chosen]
        some = [Example(str(n), asked, "", said) for n, (asked, said) in enumerate(texts)]
        found.append(encoding.encode(some, tokenizer, template="chat").cut(512))
    return tuple(found)


def find_prompts(options: Options) -> list[list[int]]:
    """Returns the tokens of the prompts by the chat template of the model."""
    case = ways_out.cases()["brand"]
    rows = [*case.rows("held_out"), *case.rows("train")][: options.prompts]
    asked = [Example(str(n), ways_out.own.prompt_of(row), "", "") for n, row in enumerate(rows)]
    tokenizer = tokenization.load_tokenizer(pathlib.Path(options.checkpoint))
    return encoding.encode_prompts(asked, tokenizer, max_len=512, template="chat")


@functools.cache
def our_model(folder: str, dtype: str) -> tuple[Any, Any, Any]:
    """Returns our decoder, adapter and base."""
    from raslik_jax.models import adapters, checkpoint, decoder

    path, adapter = pathlib.Path(folder), ways_out.cases()["brand"].adapter
    shapes = checkpoint.read_config(path)
    settings = adapters.read_adapter_config(adapter, shapes)
    model = checkpoint.load_model(path, dtype=("float32", dtype), lora_config=settings)
    lora = adapters.load_adapter(adapter, shapes, lora_config=settings)
    return decoder.bind(model.graphdef), lora, model.base


def their_model(folder: str, dtype: str) -> Any:
    """Returns the model of transformers with the adapter of peft in float32."""
    import peft
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft's use of transformers
        base: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype)
        )
        adapter = ways_out.cases()["brand"].adapter
        return peft.PeftModel.from_pretrained(base, adapter, is_trainable=True).eval()


def decoding(options: Options, dtype: str) -> Calls:
    """Returns the task of greedy answers."""
    import torch

    from raslik_jax.models import decode

    asked, most = find_prompts(options), options.new_tokens
    ours = our_model(options.checkpoint, dtype)
    model, longest = their_model(options.checkpoint, dtype), max(map(len, asked))
    model.generation_config.eos_token_id = None  # nothing ends an answer
    tokens_BL = torch.tensor([[0] * (longest - len(p)) + list(p) for p in asked])
    mask_BL = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in asked])

    def our_call() -> np.ndarray:
        how = {"eos_id": None, "pad_id": 0, "batch_size": len(asked), "max_new_tokens": most}
        return np.array(decode.generate(*ours, asked, **how))

    def their_call() -> np.ndarray:
        how = {"max_new_tokens": most, "do_sample": False}
        with torch.no_grad():
            out = model.generate(input_ids=tokens_BL, attention_mask=mask_BL, pad_token_id=0, **how)
        return out[:, longest:].numpy()

    def check(own: np.ndarray, other: np.ndarray) -> float:
        share = float(np.cumprod(own == other, axis=1).mean())
        if share < _LEAST[dtype]:
            raise ValueError(f"answers in {dtype} must be the same, got {share:.3f} equal tokens")
        return share

    return Calls(our_call, their_call, check)


def unlearning(options: Options, dtype: str) -> Calls:
    """Returns the task of some steps of CAP_KLR from the adapter on."""
    import jax

    from raslik_jax.data import batches
    from raslik_jax.train import loop, steps
    from raslik_jax.train.objectives import OBJECTIVES

    tokenizer = tokenization.load_tokenizer(pathlib.Path(options.checkpoint))
    ends = masking.end_ids(tokenizer, prompts.find_template("chat", tokenizer))
    sets = encode_sets(options)
    given = [
        next(batches.epoch_batches(rows, batch_size=_ROWS, seed=0, is_fixed=True)) for rows in sets
    ]
    decoder, lora, base = our_model(options.checkpoint, dtype)
    adapters = {"reference": lora, "backbone": jax.tree.map(np.zeros_like, lora)}
    reads = (*adapters,), ("reference",)
    algorithm = steps.unlearning(
        OBJECTIVES["cap_klr"],
        decoder,
        loop.adamw(_RATE, weight_decay=0.0, clip=1.0),
        steps.Options(end_ids=ends),
    )
    step = jax.jit(algorithm.step)

    def our_call() -> np.ndarray:
        known = []
        for batch, names in zip(given, reads, strict=True):
            states = {n: steps.find_states(decoder)(adapters[n], base, batch) for n in names}
            known.append(dataclasses.replace(batch, known=states))
        state, found = algorithm.init(lora), []
        for _ in range(_STEPS):
            state, info = step(state, steps.Frozen(base, lora), tuple(known))
            found.append(float(info.loss))
        return np.array(found)

    def check(own: np.ndarray, other: np.ndarray) -> float:
        error = float(np.abs(own / other - 1).max())
        if not error <= _MOST[dtype]:
            raise ValueError(f"losses in {dtype} must be the same, got {own} and {other}")
        return error

    return Calls(our_call, torch_steps(options, dtype, sets, ends), check)


def torch_steps(
    options: Options, dtype: str, sets: Sequence[encoding.Encoded], ends: Sequence[int]
) -> Callable[[], np.ndarray]:
    """Returns the same steps as a plain loop in PyTorch."""
    import torch
    from torch.nn.functional import log_softmax

    model = their_model(options.checkpoint, dtype)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in trained.items()}

    def logs(tokens_BL: Any, counted_BL: Any) -> Any:
        """Log probabilities of the next token at all positions that predict a target."""
        logits_BLV = model(input_ids=tokens_BL).logits[:, :-1]
        return log_softmax(logits_BLV[counted_BL[:, 1:]].float(), dim=-1)

    def frozen(tokens_BL: Any, counted_BL: Any, *, is_bare: bool = False) -> Any:
        now = {name: p.detach().clone() for name, p in trained.items()}
        with torch.no_grad():
            for name, p in trained.items():
                p.copy_(torch.zeros_like(p) if is_bare else before[name])
            found = logs(tokens_BL, counted_BL)
            for name, p in trained.items():
                p.copy_(now[name])
        return found

    rows = []
    for encoded in sets:
        longest = max(map(len, encoded.tokens))
        tokens_BL = np.zeros((len(encoded.ids), longest), np.int64)
        counted_BL = np.zeros(tokens_BL.shape, bool)
        for row, (tokens, start) in enumerate(zip(encoded.tokens, encoded.start_N, strict=True)):
            tokens_BL[row, : len(tokens)] = tokens
            counted_BL[row, start : len(tokens)] = True
        rows.append((torch.from_numpy(tokens_BL), torch.from_numpy(counted_BL)))

    def mean(values: Any, counted_BL: Any) -> Any:
        """The mean over rows of the means over their targets."""
        parts = values.split(counted_BL.sum(dim=1).tolist())
        return torch.stack([part.mean() for part in parts]).mean()

    def forget_term(tokens_BL: Any, counted_BL: Any, old: Any, bare: Any) -> Any:
        own = logs(tokens_BL, counted_BL)
        label = tokens_BL[counted_BL]
        learned = (old - bare).gather(1, label[:, None])[:, 0]
        carries = (learned >= LEAST_CARRIED) & ~torch.isin(label, torch.tensor(ends))
        capped = log_softmax(torch.minimum(old, bare + math.log(_OBJECTIVE.cap)), dim=-1)
        goal = torch.where(carries[:, None], capped, old)
        kl = (goal.exp() * (goal - own)).sum(dim=-1)
        weight = torch.where(carries, learned.clamp(max=LONGEST_WAY), torch.zeros_like(learned))
        counts = counted_BL.sum(dim=1).tolist()
        pushed = [
            (w * k).sum() / w.sum().clamp(min=LEAST_CARRIED)
            for w, k in zip(weight.split(counts), kl.split(counts), strict=True)
        ]
        return torch.stack(pushed).mean() + mean(kl.masked_fill(carries, 0.0), counted_BL)

    def retain_term(tokens_BL: Any, counted_BL: Any, old: Any) -> Any:
        own = logs(tokens_BL, counted_BL)
        return mean((own.exp() * (own - old)).sum(dim=-1), counted_BL)

    def call() -> np.ndarray:
        with torch.no_grad():
            for name, p in trained.items():
                p.copy_(before[name])
        optimizer = torch.optim.AdamW([*trained.values()], lr=_RATE, weight_decay=0.0)
        found = []
        for step in range(_STEPS):
            factor = _OBJECTIVE.hold * 0.5 ** (step / _OBJECTIVE.halving)
            # They change the weights, so they come before the passes that are differentiated.
            old, bare, held = frozen(*rows[0]), frozen(*rows[0], is_bare=True), frozen(*rows[1])
            loss = forget_term(*rows[0], old, bare) + factor * retain_term(*rows[1], held)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_([*trained.values()], 1.0)
            optimizer.step()
            found.append(float(loss.detach()))
        return np.array(found)

    return call


TASKS: Mapping[str, Callable[[Options, str], Calls]] = {"decode": decoding, "unlearn": unlearning}


def measure(task: str, options: Options, store: Callable[[Mapping[str, Any]], None]) -> None:
    """Measures both programs in every dtype, and stores after each turn what they took."""
    facts = {
        "decode": {"prompts": options.prompts, "new_tokens": options.new_tokens},
        "unlearn": {"rows": _ROWS, "steps": _STEPS},
    }
    for dtype in options.dtypes:
        say(f"checking: {task} in {dtype}")
        calls = TASKS[task](options, dtype)
        agreement = calls.check(calls.ours(), calls.theirs())
        taken: dict[str, Any] = {
            f"{name}/{dtype}": {"agreement": agreement, "seconds": []} for name in ("ours", "loop")
        }
        for turn in range(1, options.repeats + 1):
            say(f"turn {turn} of {options.repeats}: {task} in {dtype}")
            for found, call in zip(taken.values(), (calls.ours, calls.theirs), strict=True):
                begin = time.process_time()
                call()
                found["seconds"].append(round(time.process_time() - begin, 2))
            store(facts[task] | {"each": taken})
