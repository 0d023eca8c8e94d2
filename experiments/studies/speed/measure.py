"""Measures the time of an index, of decoding and of unlearning, by us and by others, in turns.

  taskset -c 0 python experiments/studies/speed/measure.py --checkpoint=FOLDER/smollm2 \\
    --python=ENV/bin/python
  taskset -c 0 python experiments/studies/speed/measure.py --model=pythia-14m \\
    --tokenizer=pythia --tasks=index --rows=320 --fewer=64 --python=ENV/bin/python

FOLDER/smollm2 is made by own_model/checkpoint.py. ENV has torch, transformers, peft, bergson and
dattri. One core keeps the threads of PyTorch from waiting for each other. Seconds are processor
seconds (user and system). All is done once per turn, and pages show medians.

index: rows of Alpaca become an index on disk. Every program is a process of its own, with its
  children. All read the same checkpoint, the same adapter with random factors and the same rows.
  Ours is `raslik run` up to its sketch stage with 65,536 coordinates a row. Only ours renders and
  tokenizes the text of the rows. torch_program.py has the others. Without --checkpoint the weights
  are random.
  cold: --rows rows, caches are empty. Python's own bytecode exists, as after an installation.
  filled: the same again, with the compiled programs that the first left. The loop and bergson
    compile nothing, so that one start counts for both.
  fewer: --fewer of the rows, caches filled. The difference gives the time of a further row.
decode: greedy answers to prompts in one batch with a cache. Nothing ends an answer, so that each
  has all new tokens. The other program is transformers' `generate`.
unlearn: steps of CAP_KLR on 8 rows of either set. The other program is a plain loop in PyTorch. It
  computes the model before unlearning and the backbone in every step. We compute them once in a
  call of four steps.

decode and unlearn need --checkpoint, and torch, transformers and peft in this Python. They have the
adapter, prompts and rows of ways_out. Nothing is compiled or loaded in a call that counts.

Nothing is timed before its result is checked. Whole gradients and sketches are compared with the
float32 loop in PyTorch on the fewer rows, tokens and losses with PyTorch's. The lowest and the
median cosine of rows, the share of equal tokens and the largest relative error of a loss are stored
with the times.
Results go to results.json next to this file, by machine and model. Each task replaces its own.
"""

import dataclasses
import functools
import importlib.metadata
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

import numpy as np
import safetensors

from experiments.bench import workload
from experiments.bench.harness import say
from raslik_jax.base import files
from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command
from raslik_jax.data import examples
from raslik_jax.data.read import formats
from raslik_jax.data.tokens import encoding, tokenization
from raslik_jax.index.store import SketchStore
from raslik_jax.models import adapters, checkpoint
from raslik_jax.models.presets import MODEL_PRESETS

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = HERE / "results.json"
Dtype = Literal["float32", "bfloat16"]
Task = Literal["index", "decode", "unlearn"]
_ROOT = HERE.parents[2]
_MAX_LEN, _SIZE = 512, 65536
# The lowest and the median cosine with the gradients in float32 that rounding explains.
_LEAST = {"float32": (0.9999, 0.9999), "bfloat16": (0.98, 0.99)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """What is measured."""

    model: str = setting("smollm2-135m", "Preset whose shapes it has.", choices=MODEL_PRESETS)
    checkpoint: str = setting("", "Folder of its weights; empty: random weights.")
    tasks: tuple[Task, ...] = setting(get_args(Task), "What to measure.")
    tools: tuple[str, ...] = setting(
        ("ours", "loop", "bergson", "dattri"),
        "Programs of the index.",
        choices=("ours", "loop", "bergson", "dattri"),
    )
    dtypes: tuple[Dtype, ...] = setting(get_args(Dtype), "Dtypes of products with the base.")
    rows: int = setting(96, "Rows of Alpaca, drawn by the seed.", low=2)
    fewer: int = setting(32, "The first of these rows.", low=1)
    prompts: int = setting(24, "Prompts.", low=1)
    new_tokens: int = setting(80, "New tokens of each.", low=1)
    repeats: int = setting(3, "Turns.", low=1)
    seed: int = setting(0, "Seed of the rows, the adapter and random weights.", low=0)
    data: str = setting("", "Folder of Alpaca and the tokenizers; empty: RASLIK_DATA.")
    tokenizer: str = setting(
        "smollm2", "Tokenizer of random weights, a folder in tokenizers of the data."
    )
    python: str = setting(sys.executable, "Python of the other programs.")

    def problems(self) -> list[str]:
        if self.fewer < self.rows:
            return []
        return [f"--fewer must be below --rows={self.rows}, got {self.fewer}: lower it"]

    def shown(self) -> str:
        """The command, without the folders of a machine."""
        names = ("checkpoint", "data", "python")
        lines = [
            f"--{f.name}={','.join(v) if isinstance(v, tuple) else v}"
            for f in dataclasses.fields(self)
            if (v := getattr(self, f.name)) != f.default and f.name not in names
        ]
        return " ".join(["python experiments/studies/speed/measure.py", *lines])


class Rows(NamedTuple):
    """The same rows as text and as ids, in files and encoded."""

    texts: pathlib.Path
    ids: pathlib.Path
    encoded: encoding.Encoded


class Files(NamedTuple):
    """The files that the programs read."""

    base: pathlib.Path
    adapter: pathlib.Path
    queries: pathlib.Path
    projection: pathlib.Path
    rows: Mapping[int, Rows]  # by their number


class Start(NamedTuple):
    """One start of a program: its rows, where it writes, and whether it keeps whole gradients."""

    made: Files
    num_rows: int
    dtype: str
    out: pathlib.Path
    is_whole: bool = False


class Tool(NamedTuple):
    """A program that makes an index.

    Attributes:
      title: how pages name it.
      line: returns the command line of a start.
      cosines: returns the cosine of each row with the float32 loop, whose folder is given.
      has_caches: whether a second start finds compiled programs of the first.
    """

    title: str
    line: Callable[[Start, Options], list[str]]
    cosines: Callable[[Start, pathlib.Path], np.ndarray]
    has_caches: bool = False


def _our_line(start: Start, options: Options) -> list[str]:
    settings = {
        "workdir": start.out,
        "backbone.checkpoint": start.made.base,
        "backbone.adapter": start.made.adapter,
        "backbone.operands": start.dtype,
        "corpus.dataset": "records",
        "corpus.records.train_file": start.made.rows[start.num_rows].texts,
        "corpus.records.queries_file": start.made.queries,
        "corpus.template": "alpaca",
        "corpus.max_len": _MAX_LEN,
        "sketch.targets": "response",
        "sketch.loss": "next_token",
        "sketch.size": _SIZE,
        "retrieve.num_forget": 1,
        "retrieve.strategies": "raslik",
        "stages": "corpus,backbone,finetune,sketch",
        "measure": "none",
    }
    flags = [f"--{name}={value}" for name, value in settings.items()]
    return [sys.executable, str(_ROOT / "experiments" / "run.py"), *flags]


def _torch_line(program: str, start: Start, options: Options) -> list[str]:
    paths = {
        "model": start.made.adapter,
        "rows": start.made.rows[start.num_rows].ids,
        "projection": start.made.projection,
        "out": start.out,
    }
    flags = [f"--{name}={path}" for name, path in paths.items()]
    flags += [f"--dtype={start.dtype}", f"--size={_SIZE}", *["--gradients"] * start.is_whole]
    return [options.python, str(HERE / "torch_program.py"), program, *flags]


def _cosines(own_NK: np.ndarray, other_NK: np.ndarray) -> np.ndarray:
    # In float32 a sum over 460,800 products would be off by .0005.
    pairs = zip(own_NK.astype(np.float64), other_NK.astype(np.float64), strict=True)
    return np.array([a @ b / np.sqrt((a @ a) * (b @ b)) for a, b in pairs])


def _our_cosines(start: Start, loop: pathlib.Path) -> np.ndarray:
    store = SketchStore.open(start.out / "sketch" / "index")
    places = store.positions_of(start.made.rows[start.num_rows].encoded.ids)
    return _cosines(store.rows(places), np.load(loop / "sketches.npy"))


def _kept_cosines(start: Start, loop: pathlib.Path) -> np.ndarray:
    with np.load(start.out / "gradients.npz") as own, np.load(loop / "gradients.npz") as other:
        found = [
            np.concatenate([array[name].reshape(start.num_rows, -1) for name in other], axis=1)
            for array in (own, other)
        ]
    return _cosines(*found)


def _bergson_cosines(start: Start, loop: pathlib.Path) -> np.ndarray:
    folder = start.out / "index"
    info = json.loads((folder / "info.json").read_text(encoding="utf-8"))
    sizes = info["grad_sizes"]
    flat = np.memmap(folder / "gradients.bin", info["base_dtype"], "r")
    with np.load(loop / "gradients.npz") as kept:
        named = {n.removeprefix("base_model.").removesuffix(".weight"): kept[n] for n in kept}
    whole = np.concatenate([named[name].reshape(start.num_rows, -1) for name in sizes], axis=1)
    return _cosines(flat.reshape(info["num_grads"], -1).astype(np.float32), whole)


TOOLS = {
    "ours": Tool("raslik_jax", _our_line, _our_cosines, True),
    "loop": Tool("PyTorch loop", functools.partial(_torch_line, "loop"), _kept_cosines),
    "bergson": Tool("bergson", functools.partial(_torch_line, "bergson"), _bergson_cosines),
    "dattri": Tool("dattri", functools.partial(_torch_line, "dattri"), _kept_cosines, True),
}


def require_all(options: Options) -> pathlib.Path:
    """Returns the folder of the data, or names what is missing before anything starts."""
    if {"decode", "unlearn"} & {*options.tasks}:
        command.require("torch", "transformers", "peft")
        if not options.checkpoint:
            raise ValueError("--checkpoint must name a folder for decode and unlearn, got none")
    needed = {"torch", "transformers", "peft", *options.tools} - {"ours", "loop"}
    if "index" in options.tasks:
        find = f"import importlib.util as i, sys; sys.exit(not all(map(i.find_spec, {needed})))"
        try:
            found = subprocess.run([options.python, "-c", find]).returncode
        except OSError:
            found = 1
        if found:
            raise ValueError(
                f"--python must have {', '.join(sorted(needed))}, got {options.python}: name a "
                "Python that has them, or leave the program out of --tools"
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
        workload.Options(model=options.model, dtype="float32", seed=options.seed, size=_SIZE)
    )
    base = pathlib.Path(options.checkpoint).resolve() if options.checkpoint else folder / "base"
    tokenizer = base if options.checkpoint else data / "tokenizers" / options.tokenizer
    made = Files(
        base=base,
        adapter=folder / "adapter",
        queries=folder / "queries.jsonl",
        projection=folder / "projection",
        rows=_write_rows(options, data, tokenizer, folder),
    )
    config, _, lora, weights = subject.model
    if not options.checkpoint:
        checkpoint.save_model(base, config, weights)
        for path in tokenizer.iterdir():
            shutil.copy(path, base)
    adapters.save_adapter(made.adapter, lora, subject.adapter, config, base_model=str(base))
    # bergson reads the tokenizer, which it does not use, next to the adapter.
    for path in tokenizer.glob("*token*"):
        shutil.copy(path, made.adapter)
    made.projection.mkdir()
    sign_P, bin_P = workload.signs_and_bins(subject.projection.spec)
    np.save(made.projection / "sign.npy", sign_P.astype(np.float32))
    np.save(made.projection / "bin.npy", bin_P.astype(np.int64))
    with safetensors.safe_open(made.adapter / "adapter_model.safetensors", "numpy") as opened:
        names = list(opened.keys())
    order = [names[place] for place in workload.manifest_order(names, lora)]
    # Loaded, a parameter also has the name of its adapter.
    order = [f"{name.removesuffix('.weight')}.default.weight" for name in order]
    (made.projection / "order.json").write_text(json.dumps(order), encoding="utf-8")
    return made


def _write_rows(
    options: Options, data: pathlib.Path, tokens: pathlib.Path, folder: pathlib.Path
) -> dict[int, Rows]:
    """Writes rows of Alpaca that have an answer, as text and as ids, and a query."""
    rows = formats.read_examples(data / "alpaca" / "alpaca_data.json.xz")
    tokenizer = tokenization.load_tokenizer(tokens)
    drawn = np.random.default_rng(options.seed).permutation(len(rows))[: 2 * options.rows]
    some = examples.make_examples(rows[place] for place in drawn.tolist())
    encoded = encoding.encode(some, tokenizer, template="alpaca").cut(_MAX_LEN)
    has_answer = np.flatnonzero(encoded.num_targets_N > 0)[: options.rows]

    def write(name: str, lines: list[dict[str, Any]]) -> pathlib.Path:
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        return folder / f"{name}.jsonl"

    texts = [
        {"instruction": row.instruction, "input": row.input, "output": row.output}
        for row in (some[place] for place in has_answer.tolist())
    ]
    write("queries", [texts[0] | {"split": "retrieval"}])
    found = {}
    for count in (options.rows, options.fewer):
        part = encoded.take(has_answer[:count])
        ids = [
            {"input_ids": tokens.tolist(), "labels": [-100] * int(n) + tokens[int(n) :].tolist()}
            for tokens, n in zip(part.tokens, part.start_N, strict=True)
        ]
        found[count] = Rows(write(f"rows{count}", texts[:count]), write(f"ids{count}", ids), part)
    return found


def run(line: list[str], caches: pathlib.Path) -> float:
    """Runs a program to its end and returns its processor seconds, those of children included."""
    dropped = "CACHE", "DONTWRITEBYTECODE"
    environment = {k: v for k, v in os.environ.items() if not any(d in k for d in dropped)}
    caches.mkdir(exist_ok=True)
    environment |= {"XDG_CACHE_HOME": str(caches), "HF_HOME": str(caches / "hf")}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor")}
    environment |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    log = caches / "log.txt"
    with open(log, "w", encoding="utf-8") as stream:
        child = subprocess.Popen(line, stdout=stream, stderr=stream, env=environment, cwd=_ROOT)
        _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        said = log.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise ValueError(f"{line} must end well, got status {child.returncode}:\n{said}")
    return round(usage.ru_utime + usage.ru_stime, 2)


def check(options: Options, made: Files, folder: pathlib.Path) -> dict[str, list[float]]:
    """Returns the lowest and median cosine of each; refuses to time what differs from the loop."""
    loop = Start(made, options.fewer, "float32", folder / "loop-float32", is_whole=True)
    say("checking: the loop in float32")
    run(TOOLS["loop"].line(loop, options), folder / "loop-caches")
    found = {}
    for name, dtype in itertools.product(options.tools, options.dtypes):
        key = f"{name}/{dtype}"
        start = loop._replace(dtype=dtype, out=folder / f"{name}-{dtype}")
        if start != loop:
            say(f"checking: {key}")
            run(TOOLS[name].line(start, options), kept_caches(folder, key))
        cosine_N = TOOLS[name].cosines(start, loop.out)
        found[key] = [round(float(value), 7) for value in (cosine_N.min(), np.median(cosine_N))]
        say(f"{key}: lowest and median cosine {found[key]}")
        if not all(value >= least for value, least in zip(found[key], _LEAST[dtype], strict=True)):
            raise ValueError(
                f"the gradients of {key} must be those of the float32 loop, got rows with a lowest "
                f"and a median cosine of {found[key]}: nothing was timed"
            )
        if start != loop:
            shutil.rmtree(start.out)
    shutil.rmtree(loop.out)
    return found


def kept_caches(folder: pathlib.Path, key: str) -> pathlib.Path:
    """Returns the caches of a program that the check fills with the programs of fewer rows."""
    return folder / f"{key.replace('/', '-')}-caches"


def time_index(
    options: Options, made: Files, folder: pathlib.Path, store: Callable[[Any], None]
) -> None:
    """Times all programs in turn, and stores after each what there is."""
    lengths_N = made.rows[options.rows].encoded.lengths_N
    facts = {"rows": options.rows, "fewer": options.fewer}
    facts |= {"mean_tokens": round(float(lengths_N.mean()), 1)}
    taken: dict[str, Any] = {
        key: {"cosine": cosine, "cold": [], "filled": [], "fewer": []}
        for key, cosine in check(options, made, folder).items()
    }
    for turn in range(1, options.repeats + 1):
        for key in taken:
            say(f"turn {turn} of {options.repeats}: {key}")
            name, dtype = key.split("/")
            caches = folder / "caches"

            def time_start(what: str, count: int, caches: pathlib.Path) -> None:
                start = Start(made, count, dtype, folder / "index")  # noqa: B023
                seconds = run(TOOLS[name].line(start, options), caches)  # noqa: B023
                shutil.rmtree(start.out)
                taken[key][what].append(seconds)  # noqa: B023

            time_start("cold", options.rows, caches)
            if TOOLS[name].has_caches:
                time_start("filled", options.rows, caches)
            else:
                taken[key]["filled"].append(taken[key]["cold"][-1])
            shutil.rmtree(caches)
            time_start("fewer", options.fewer, kept_caches(folder, key))
            store(facts | {"each": {key: one for key, one in taken.items() if one["fewer"]}})


def machine() -> str:
    """Returns the processor, its family, and what it can do with bfloat16."""
    path = pathlib.Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    facts = dict(
        (part.strip() for part in line.split(":", 1)) for line in text.splitlines() if ":" in line
    )
    extra = [name for name in ("avx512_bf16", "amx_bf16") if name in facts.get("flags", "").split()]
    name, family = facts.get("model name", "unknown processor"), facts.get("cpu family")
    return ", ".join([name, *([f"family {family}"] if family else []), *extra])


def versions(options: Options) -> dict[str, str]:
    """Returns the versions of what was measured, by name."""
    names = ("torch", "transformers", "peft", "bergson", "dattri")
    ask = (
        "import importlib.metadata as m, json, sys; found = ((d.metadata['Name'], d.version) for d "
        "in m.distributions()); print(json.dumps({n: v for n, v in found if n in sys.argv}))"
    )
    said = subprocess.check_output([options.python, "-c", ask, *names], text=True)
    return {"jax": importlib.metadata.version("jax"), **json.loads(said)}


def merge(before: Mapping[str, Any], now: Mapping[str, Any], command: str) -> dict[str, Any]:
    """Returns a task's results with the programs that an earlier command measured in the same way.

    Everything but `each`, the programs, and `commands` must be equal. Otherwise the earlier ones
    are dropped.
    """
    same = all(before.get(name) == value for name, value in now.items() if name != "each")
    kept = before if same else {}
    commands = [*dict.fromkeys([*kept.get("commands", ()), command])]
    return {**now, "commands": commands, "each": {**kept.get("each", {}), **now["each"]}}


def main(options: Options) -> None:
    """Measures the tasks and stores what they took."""
    data = require_all(options)
    facts = {
        "versions": versions(options),
        "seed": options.seed,
        "weights": "the checkpoint's" if options.checkpoint else "random",
    }

    def store(task: str, measured: Mapping[str, Any]) -> None:
        # Read again, because another command may have stored something in the meantime.
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        found = results.setdefault(machine(), {}).setdefault(options.model, {})
        found[task] = merge(found.get(task, {}), {**facts, **measured}, options.shown())
        files.write_json(RESULTS, results)

    for task in options.tasks:
        if task == "index":
            with tempfile.TemporaryDirectory() as name:
                folder = pathlib.Path(name)
                made = write_files(options, data, folder)
                time_index(options, made, folder, functools.partial(store, task))
        else:
            from experiments.studies.speed import calls

            calls.measure(task, options, functools.partial(store, task))


if __name__ == "__main__":
    command.start(main, Options())
