"""Measures the time of an index from the command line on, by us and by others, in turns.

  taskset -c 0 python experiments/studies/cold/measure.py --rows=64 --bergson_python=ENV/bin/python
  taskset -c 0 python experiments/studies/cold/measure.py --rows=1000 --nowarm --programs=ours,torch_loop

Every program is a process of its own. All read the same checkpoint (shapes of the preset, random
weights), the same LoRA adapter and the same rows of Alpaca. Each ends with an index on disk:

ours: `raslik run` up to its sketch stage, 65,536 coordinates a row. It reads the rows as text.
torch_loop: a plain loop over examples in PyTorch that makes the same sketches from token ids.
bergson: `bergson build`, 16 x 16 coordinates for each module, from the same token ids.

So only our time includes rendering and tokenizing. Python's own bytecode exists, as after an
installation. Caches are folders of the benchmark. They are empty at the first start in each turn
and filled at the second. Seconds are processor seconds (user and system) of the process and its
children.

torch_loop needs torch, transformers and peft here. bergson needs a Python that has it (pip install
bergson). Give it an environment of its own, because CUDA's libraries come with it. The command
reports a missing program before anything starts.

With --json each line of stdout is one object. Its key "stage" names it:

setup: every flag; device, cpus, jax.
plan: mean_tokens and mean_targets (per row), num_params.
check: worst_cosine (lowest of our sketches with the loop's; null without both), gradient_error
  (largest relative error of a row of bergson's gradients, unprojected, against the loop's; null
  without both).
program (one for each): program, first and second (processor seconds, medians of the turns; second
  is null with --nowarm), first_least and first_most (of the turns), first_wall and second_wall (by
  the clock), system (the kernel's share of the first), ours and ours_second (our seconds over its,
  median of the turns' ratios; null without us).
"""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, get_args

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

import numpy as np
import safetensors

from experiments.bench import harness, workload
from experiments.bench.harness import Line, say
from raslik_jax.base.settings import setting
from raslik_jax.cli import command
from raslik_jax.data import examples
from raslik_jax.data.read import formats
from raslik_jax.data.tokens import encoding, tokenization
from raslik_jax.index.store import SketchStore
from raslik_jax.models import adapters, checkpoint
from raslik_jax.models.presets import MODEL_PRESETS

Program = Literal["ours", "torch_loop", "bergson"]
_ROOT = pathlib.Path(__file__).resolve().parents[3]
_MAX_LEN, _SIZE = 512, 65536


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(harness.ModelOptions):
    """Options of the benchmark."""

    model: str = setting("pythia-14m", "Preset whose shapes it has.", choices=MODEL_PRESETS)
    programs: tuple[Program, ...] = setting(get_args(Program), "What to measure.")
    rows: int = setting(64, "Rows of Alpaca, drawn by the seed.", low=2)
    repeats: int = setting(5, "Turns; medians are reported.", low=1)
    warm: bool = setting(True, "Start each program a second time in every turn.")
    data: str = setting("", "Folder of Alpaca and the tokenizers; empty: RASLIK_DATA.")
    tokenizer: str = setting("pythia", "Tokenizer, a folder in tokenizers of the data.")
    bergson_python: str = setting(sys.executable, "Python that has bergson.", is_path=True)
    bergson_tokens: int = setting(2048, "Tokens of one of bergson's batches.", low=8)


class Taken(NamedTuple):
    """The time of one start of a program, in seconds."""

    user: float
    system: float
    wall: float

    @property
    def processor(self) -> float:
        return self.user + self.system


class Files(NamedTuple):
    """The files that the programs read, with their tokens, targets and parameters."""

    base: pathlib.Path
    adapter: pathlib.Path
    texts: pathlib.Path
    queries: pathlib.Path
    tokens: pathlib.Path
    projection: pathlib.Path
    encoded: encoding.Encoded
    num_params: int


def require_all(options: Options) -> pathlib.Path:
    """Returns the folder of the data, or names what is missing before anything starts."""
    if "torch_loop" in options.programs:
        command.require("torch", "transformers", "peft")
    if "bergson" in options.programs:
        find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('bergson') is None)"
        try:
            found = subprocess.run([options.bergson_python, "-c", find]).returncode
        except OSError:
            found = 1
        if found:
            raise ValueError(
                f"--bergson_python must have bergson, got {options.bergson_python}: pip install "
                "bergson into an environment and name its python, or leave it out of --programs"
            )
    folder = pathlib.Path(options.data or os.environ.get("RASLIK_DATA", ""))
    if not (folder / "alpaca" / "alpaca_data.json.xz").is_file():
        raise ValueError(
            f"--data must have alpaca/alpaca_data.json.xz, got {folder}: name it by --data or "
            "RASLIK_DATA"
        )
    return folder


def write_files(options: Options, data: pathlib.Path, folder: pathlib.Path) -> Files:
    """Writes the files of the programs: model, adapter, rows as text and as ids, projection."""
    subject = workload.make_subject(
        workload.Options(model=options.model, dtype=options.dtype, seed=options.seed, size=_SIZE)
    )
    found = Files(
        base=folder / "base",
        adapter=folder / "adapter",
        texts=folder / "rows.jsonl",
        queries=folder / "queries.jsonl",
        tokens=folder / "ids.jsonl",
        projection=folder / "projection",
        encoded=_write_rows(options, data, folder),
        num_params=subject.projection.spec.num_params,
    )
    config, _, lora, base = subject.model
    checkpoint.save_model(found.base, config, base)
    for path in (data / "tokenizers" / options.tokenizer).iterdir():
        shutil.copy(path, found.base)
    adapters.save_adapter(found.adapter, lora, subject.adapter, config, base_model=str(found.base))
    # bergson reads the tokenizer, which it does not use, beside the adapter.
    for path in (data / "tokenizers" / options.tokenizer).iterdir():
        shutil.copy(path, found.adapter)
    found.projection.mkdir()
    sign_P, bin_P = workload.signs_and_bins(subject.projection.spec)
    np.save(found.projection / "sign.npy", sign_P.astype(np.float32))
    np.save(found.projection / "bin.npy", bin_P.astype(np.int64))
    with safetensors.safe_open(found.adapter / "adapter_model.safetensors", "numpy") as opened:
        names = list(opened.keys())
    order = [names[place] for place in workload.manifest_order(names, lora)]
    # Loaded, a parameter also has the name of its adapter.
    order = [f"{name.removesuffix('.weight')}.default.weight" for name in order]
    (found.projection / "order.json").write_text(json.dumps(order), encoding="utf-8")
    return found


def _write_rows(options: Options, data: pathlib.Path, folder: pathlib.Path) -> encoding.Encoded:
    """Writes rows of Alpaca that have an answer, as text and as token ids; returns the latter."""
    rows = formats.read_examples(data / "alpaca" / "alpaca_data.json.xz")
    tokenizer = tokenization.load_tokenizer(data / "tokenizers" / options.tokenizer)
    drawn = np.random.default_rng(options.seed).permutation(len(rows))[: 2 * options.rows]
    some = examples.make_examples(rows[place] for place in drawn.tolist())
    encoded = encoding.encode(some, tokenizer, template="alpaca").cut(_MAX_LEN)
    has_answer = np.flatnonzero(encoded.num_targets_N > 0)[: options.rows]
    encoded = encoded.take(has_answer)
    texts = [
        {"instruction": row.instruction, "input": row.input, "output": row.output}
        for row in (some[place] for place in has_answer.tolist())
    ]
    ids = [
        {
            "input_ids": tokens.tolist(),
            "labels": [-100] * int(start) + tokens[int(start) :].tolist(),
        }
        for tokens, start in zip(encoded.tokens, encoded.start_N, strict=True)
    ]
    queries = [text | {"split": "retrieval"} for text in texts[:1]]
    for name, lines in (("rows", texts), ("queries", queries), ("ids", ids)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return encoded


def command_of(
    program: str, options: Options, made: Files, out: pathlib.Path, *, is_whole: bool = False
) -> list[str]:
    """Returns the command line of a program; `is_whole` asks peers for the gradients as well."""
    here = pathlib.Path(__file__).parent
    if program == "torch_loop":
        paths = {"model": made.adapter, "rows": made.tokens, "projection": made.projection}
        flags = [f"--{name}={path}" for name, path in (paths | {"out": out}).items()]
        script = [sys.executable, str(here / "torch_program.py"), *flags, f"--size={_SIZE}"]
        return [*script, "--gradients"] if is_whole else script
    if program == "bergson":
        dims, tokens = ("0" if is_whole else "16"), str(options.bergson_tokens)
        flags = ["--model", str(made.adapter), "--dataset", str(made.tokens)]
        flags += ["--projection_dim", dims, "--token_batch_size", tokens]
        flags += ["--loss_reduction", "mean", "--precision", "fp32"]
        return [options.bergson_python, "-m", "bergson", "build", str(out), *flags]
    settings = {
        "workdir": out,
        "backbone.checkpoint": made.base,
        "backbone.adapter": made.adapter,
        "corpus.dataset": "records",
        "corpus.records.train_file": made.texts,
        "corpus.records.queries_file": made.queries,
        "corpus.template": "alpaca",
        "corpus.max_len": _MAX_LEN,
        "sketch.targets": "response",
        "sketch.loss": "next_token",
        "sketch.size": _SIZE,
        "retrieve.num_forget": 1,
        "retrieve.strategies": "raslik",
        "stages": "corpus,backbone,finetune,sketch",
        "measure": "false",
    }
    flags = [f"--{name}={value}" for name, value in settings.items()]
    return [sys.executable, str(_ROOT / "experiments" / "run.py"), *flags]


def start(line: list[str], caches: pathlib.Path) -> Taken:
    """Runs a program to its end and returns what it took, its children included."""
    dropped = "CACHE", "DONTWRITEBYTECODE"
    environment = {k: v for k, v in os.environ.items() if not any(d in k for d in dropped)}
    caches.mkdir(exist_ok=True)
    environment |= {"XDG_CACHE_HOME": str(caches), "HF_HOME": str(caches / "hf")}
    environment |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    log = caches / "log.txt"
    began = time.perf_counter()
    with open(log, "w", encoding="utf-8") as stream:
        child = subprocess.Popen(line, stdout=stream, stderr=stream, env=environment, cwd=_ROOT)
        _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        said = log.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise ValueError(f"{line} must end well, got status {child.returncode}:\n{said}")
    return Taken(usage.ru_utime, usage.ru_stime, time.perf_counter() - began)


def check(options: Options, made: Files, folder: pathlib.Path) -> Line:
    """Returns how well the programs agree; refuses to time what computes something else."""
    for program in options.programs:
        say(f"checking {program}")
        line = command_of(program, options, made, folder / program, is_whole=True)
        start(line, folder / f"{program}-caches")
    cosine = error = None
    if "torch_loop" in options.programs:
        theirs = np.load(folder / "torch_loop" / "sketches.npy")
        if "ours" in options.programs:
            store = SketchStore.open(folder / "ours" / "sketch" / "index")
            ours = store.rows(store.positions_of(made.encoded.ids))
            cosine = float(np.sum(theirs * ours, axis=1).min())
        if "bergson" in options.programs:
            error = _gradient_error(folder)
    if (cosine is not None and not cosine > 0.9999) or (error is not None and not error < 1e-3):
        raise ValueError(
            "the programs must make the same gradients, got sketches with a lowest cosine of "
            f"{cosine} and gradients that differ by {error}: nothing was timed"
        )
    return {"stage": "check", "worst_cosine": cosine, "gradient_error": error}


def _gradient_error(folder: pathlib.Path) -> float:
    """Returns the largest relative error of a row of bergson's gradients against the loop's."""
    info = json.loads((folder / "bergson" / "info.json").read_text(encoding="utf-8"))
    sizes = info["grad_sizes"]
    flat = np.memmap(folder / "bergson" / "gradients.bin", info["base_dtype"], "r")
    theirs = flat.reshape(info["num_grads"], sum(sizes.values()))
    with np.load(folder / "torch_loop" / "gradients.npz") as loop:
        ours = {
            name.removeprefix("base_model.").removesuffix(".weight"): loop[name] for name in loop
        }
    whole = np.concatenate([ours[name].reshape(len(theirs), -1) for name in sizes], axis=1)
    off_N = np.linalg.norm(theirs - whole, axis=1)
    return float((off_N / np.linalg.norm(whole, axis=1)).max())


def measure(options: Options) -> Iterator[Line]:
    """Yields the lines of the module's docstring."""
    data = require_all(options)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        made = write_files(options, data, folder)
        yield {
            "stage": "plan",
            "mean_tokens": float(made.encoded.lengths_N.mean()),
            "mean_targets": float(made.encoded.num_targets_N.mean()),
            "num_params": made.num_params,
        }
        checked = folder / "check"
        checked.mkdir()
        yield check(options, made, checked)
        shutil.rmtree(checked)
        yield from _turns(options, made, folder)


def _turns(options: Options, made: Files, folder: pathlib.Path) -> Iterator[Line]:
    """Yields what each program takes: all in turn, first with empty caches and then filled."""
    first: dict[str, list[Taken]] = {program: [] for program in options.programs}
    second: dict[str, list[Taken]] = {program: [] for program in options.programs}
    for turn in range(1, options.repeats + 1):
        say(f"turn {turn} of {options.repeats}")
        for program in options.programs:
            caches = folder / "caches"
            for found in (first, second)[: 1 + options.warm]:
                line = command_of(program, options, made, folder / "index")
                found[program].append(start(line, caches))
                shutil.rmtree(folder / "index")
            shutil.rmtree(caches)

    def median(taken: list[Taken], of: Callable[[Taken], float]) -> float | None:
        return float(np.median([of(one) for one in taken])) if taken else None

    def ratio(taken: dict[str, list[Taken]], program: str) -> float | None:
        if "ours" not in taken or not taken[program]:
            return None
        pairs = zip(taken["ours"], taken[program], strict=True)
        return float(np.median([ours.processor / its.processor for ours, its in pairs]))

    for program in options.programs:
        seconds = [one.processor for one in first[program]]
        yield {
            "stage": "program",
            "program": program,
            "first": median(first[program], lambda one: one.processor),
            "first_least": min(seconds),
            "first_most": max(seconds),
            "second": median(second[program], lambda one: one.processor),
            "first_wall": median(first[program], lambda one: one.wall),
            "second_wall": median(second[program], lambda one: one.wall),
            "system": median(first[program], lambda one: one.system / one.processor),
            "ours": ratio(first, program),
            "ours_second": ratio(second, program),
        }


if __name__ == "__main__":
    harness.start(Options(), measure)
