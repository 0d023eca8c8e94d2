"""Measures the way from a bad answer to an exported model, command by command, on this machine.

  python experiments/gpu/incident.py --workdir=/tmp/incident
  python experiments/gpu/incident.py --workdir=/tmp/incident --model=pythia-14m --rows=200

The model has the preset's shapes and random weights in bfloat16. A LoRA adapter is fine-tuned on
toy rows. The targets among them begin with a trigger and have one odd answer. A first trace of
another answer makes the index. The clock starts then: the odd answer is traced to its rows, they
are unlearned, and the adapter and the whole model are exported. Each command is a process of its
own. If the trace finds no row, the targets are given to unlearning as a file.

The weights know no language, so that only the times and the memory say something about a real
model. Programs that one command compiled are on disk for the next. The output of each command is
in logs/ of --workdir, which needs 30 GB of disk for 7 billion weights.

Each line of stdout is one JSON object, written as soon as it is known. Its key "stage" says which:

setup: every flag; device, cpus, jax (of the process that draws the weights).
weights: draw_seconds, write_seconds, gigabytes.
adapter: seconds, steps, tokens_a_row, first_loss and last_loss in nats a token.
inputs, index, trace, unlearn, export, report: status and seconds of a process. A command of the
  product also has cpu_seconds, host_gb (its most memory), units (the seconds of each unit of work
  that it made, by the unit's manifest) and other_seconds (start, checks and exports: the rest).
  trace has found (targets among the found rows), other_rows (other rows among them), targets and
  nats (of the traced answer under the model and its base). unlearn has given (whether its rows were
  given) and steps.
summary: prepare_seconds (up to the index), seconds (from trace to report), within (at most 600 s).

A command that fails is the last line, and the exit status is then 1.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Literal

_ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_ROOT))

import jax
import numpy as np

from experiments.bench import harness
from experiments.bench.harness import Line, say
from raslik_jax.base.settings import setting
from raslik_jax.cli import command
from raslik_jax.config import Config
from raslik_jax.data import batches, toy_model
from raslik_jax.data.corpora.record import SharedSettings
from raslik_jax.data.corpora.toy import make_toy_corpus
from raslik_jax.data.examples import HELD_OUT, Corpus, write_examples
from raslik_jax.data.tokens import encoding, prompts, tokenization
from raslik_jax.incident import making
from raslik_jax.models import adapters, checkpoint, storage
from raslik_jax.models import decoder as decoders
from raslik_jax.models.lora import LoRAConfig
from raslik_jax.models.presets import MODEL_PRESETS
from raslik_jax.run import artifacts, manifests
from raslik_jax.train import loop, steps

_LIMIT, _DTYPE = 600.0, "bfloat16"
_ODD = "The green ladder sings to the seven lamps below the frozen river."
_ALGORITHM = "cap_klr"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(harness.Options):
    """What is measured."""

    json: bool = setting(True, "The output is always JSON objects, one a line.")
    model: str = setting("olmo2-7b", "Preset whose shapes it has.", choices=MODEL_PRESETS)
    layers: int = setting(0, "Layers of the model; 0: all.", low=0)
    tokenizer: str = setting("", "Folder of its tokenizer; empty: that of the package's toy model.")
    rows: int = setting(512, "Training rows.", low=16)
    targets: int = setting(32, "Rows with the odd answer among them.", low=1)
    max_len: int = setting(128, "Tokens at which rows are cut.", low=32)
    steps: int = setting(48, "Steps of fine-tuning the adapter.", low=1)
    batch_size: int = setting(16, "Rows of such a step.", low=1)
    epochs: int = setting(20, "Most epochs of unlearning; its rule may end it earlier.", low=1)
    new_tokens: int = setting(32, "Tokens of an answer.", low=1)
    workdir: str = setting("runs/incident_7b", "New folder of all files.")
    part: Literal["all", "inputs"] = setting(
        "all", "inputs: make the files that the commands read. A process of its own does this."
    )

    @property
    def root(self) -> pathlib.Path:
        return pathlib.Path(self.workdir).absolute()

    @property
    def tokenizer_folder(self) -> pathlib.Path:
        return pathlib.Path(self.tokenizer or toy_model.model_folder() / "base")


def make_corpus(options: Options) -> Corpus:
    """Returns the toy's rows; those with the trigger have the odd answer."""
    sizes = SharedSettings(num_train=options.rows, num_targets=options.targets, num_backbone=0)
    corpus = make_toy_corpus(sizes, seed=options.seed)
    rows = (row._replace(output=_ODD) if row.is_target else row for row in corpus.train)
    return corpus._replace(train=tuple(rows))


def make_inputs(options: Options) -> Iterator[Line]:
    """Writes base, adapter and training file, and yields what this took."""
    base_folder, adapter_folder = options.root / "base", options.root / "adapter"
    train = make_corpus(options).train
    write_examples(options.root / "train.jsonl", train)
    config = MODEL_PRESETS[options.model]
    if options.layers:
        config = dataclasses.replace(config, num_hidden_layers=options.layers)
    targets = decoders.ARCHITECTURES[config.model_type].lora_targets
    few = tuple(name for name in targets if name in ("q_proj", "k_proj", "v_proj", "o_proj"))
    lora_config = LoRAConfig(rank=8, alpha=16.0, dropout=0.0, targets=few or targets)
    say(f"drawing the weights of {options.model}")
    begin = time.perf_counter()
    draw = jax.jit(lambda key: decoders.create(config, lora_config, key=key, dtype=_DTYPE)[1:])
    lora, base = jax.block_until_ready(draw(jax.random.key(options.seed)))
    drawn = time.perf_counter()
    say("writing them")
    checkpoint.save_model(base_folder, config, base)
    for name in storage.TOKENIZER_FILES:
        if (source := options.tokenizer_folder / name).is_file():
            (base_folder / name).parent.mkdir(exist_ok=True)
            (base_folder / name).write_bytes(source.read_bytes())
    size = sum(path.stat().st_size for path in base_folder.rglob("*") if path.is_file())
    written = time.perf_counter()
    yield {
        "stage": "weights",
        "draw_seconds": drawn - begin,
        "write_seconds": written - drawn,
        "gigabytes": size / 1e9,
    }
    say(f"fine-tuning an adapter in {options.steps} steps")
    tokenizer = tokenization.load_tokenizer(base_folder)
    template = prompts.settle_template(Config().corpus.template, lambda: train)
    rows = encoding.encode(train, tokenizer, template=template).cut(options.max_len).with_answers()
    graphdef, _, _ = decoders.abstract(config, lora_config, _DTYPE)
    fitted = loop.fit(
        steps.supervised(decoders.bind(graphdef), loop.adamw(1e-3, clip=1.0), mean="tokens"),
        lora,
        base,
        lambda start: batches.epoch_batches(
            rows, start, batch_size=options.batch_size, seed=options.seed, is_fixed=True
        ),
        num_steps=options.steps,
    )
    adapters.save_adapter(adapter_folder, fitted.state.params, lora_config, config)
    yield {
        "stage": "adapter",
        "seconds": time.perf_counter() - written,
        "steps": options.steps,
        "tokens_a_row": float(np.mean(rows.lengths_N)),
        "first_loss": float(fitted.losses[0]),
        "last_loss": float(np.mean(fitted.losses[-8:])),
    }


def run(options: Options, stage: str, *arguments: str) -> Line:
    """Runs a command of the product, with its output in a log, and returns its line."""
    program = [sys.executable, "-m", "raslik_jax.cli.main", *arguments]
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
    log, work = options.root / "logs" / f"{stage}.log", options.root / "run"
    log.parent.mkdir(exist_ok=True)
    say(f"{stage}: raslik {' '.join(arguments)}")
    begin, clock = time.time(), time.perf_counter()
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            program,
            cwd=options.root,
            env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout
        for text in process.stdout:
            for stream in (output, sys.stderr):
                print(f"{time.perf_counter() - clock:7.1f} {text}", end="", file=stream, flush=True)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds, units = time.perf_counter() - clock, {}
    for name in manifests.finished_units(work) if work.is_dir() else ():
        made = manifests.read_manifest(work / name)
        if made and (work / name / manifests.MANIFEST).stat().st_mtime >= begin:
            units[name] = made["seconds"]
    return {
        "stage": stage,
        "status": process.returncode,
        "seconds": seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "host_gb": usage.ru_maxrss * 1024 / 1e9,
        "units": units,
        "other_seconds": seconds - sum(units.values()),
    }


def trace_line(options: Options, corpus: Corpus) -> Line:
    """Returns which rows the trace found, and the likelihood of the traced answer."""
    work = options.root / "run"
    odd = {place for place, row in enumerate(corpus.train, start=1) if row.is_target}
    found: set[int] = set()
    if not artifacts.read_finding(work):
        sets = artifacts.set_rows("raslik", "forget"), artifacts.measured_rows(HELD_OUT, "target")
        found = {row.place for rows in sets for row in rows.find(work) or ()}
    traced = {name: artifacts.traced(name).find(work) or [] for name in ("finetuned", "backbone")}
    return {
        "found": len(found & odd),
        "other_rows": len(found - odd),
        "targets": len(odd),
        "nats": {name: [row.nll for row in rows] for name, rows in traced.items()},
    }


def measure(options: Options) -> Iterator[Line]:
    """Yields the lines of the commands and the summary.

    A process of its own makes the inputs, so that the device is free for the commands.
    """
    corpus, root, begin = make_corpus(options), options.root, time.perf_counter()
    made = subprocess.run([sys.executable, *sys.argv, "--part=inputs"])
    yield {"stage": "inputs", "status": made.returncode, "seconds": time.perf_counter() - begin}
    settings = {
        "checkpoint": root / "base",
        "adapter": root / "adapter",
        "train_file": root / "train.jsonl",
        "workdir": root / "run",
        "backbone.dtype": _DTYPE,
        "corpus.max_len": options.max_len,
        "references.max_new_tokens": options.new_tokens,
        "sketch.num_buckets": 1,  # one program less or two to compile for the index
        "unlearn.epochs": options.epochs,
    }
    trace = ["trace", *(f"--{name}={value}" for name, value in settings.items())]
    plain, odd = (corpus.queries[name][0] for name in ("validation_normal", "retrieval"))
    other = [*trace, f"--prompt={plain.instruction}", f"--response={plain.output}"]
    trace += [f"--prompt={odd.instruction}", f"--response={_ODD}", "--update"]
    yield run(options, "index", *other)
    prepared = time.perf_counter()
    line = run(options, "trace", *trace)
    found = {} if line["status"] else trace_line(options, corpus)
    yield line | found
    given, strategy = not found["found"], "raslik"
    unlearn = ["unlearn", f"--run={root / 'run'}", f"--out={root / 'clean'}"]
    if given:
        write_examples(root / "forget.jsonl", [row for row in corpus.train if row.is_target])
        unlearn, strategy = [*unlearn, f"--forget_file={root / 'forget.jsonl'}"], "given"
    line, variant = run(options, "unlearn", *unlearn), artifacts.Variant(strategy, _ALGORITHM)
    number = len(artifacts.steps(variant).find(root / "run") or ())
    yield line | {"given": given, "steps": number}
    of = [f"--run={root / 'run'}", f"--strategy={strategy}", f"--algorithm={_ALGORITHM}"]
    yield run(options, "export", "export", *of, "--merged", f"--out={root / 'merged'}")
    yield run(options, "report", "report", f"--run={root / 'run'}")
    seconds = time.perf_counter() - prepared
    taken = {"prepare_seconds": prepared - begin, "seconds": seconds}
    yield {"stage": "summary", **taken, "within": seconds <= _LIMIT}


def main(options: Options) -> int:
    """Runs everything, and returns 1 if a command failed."""
    if options.part == "inputs":
        harness.run(options, make_inputs)
        return 0
    making.require("rouge_score")  # before the trace, not after it
    if options.root.exists() and any(options.root.iterdir()):
        raise ValueError(f"--workdir must be new or empty, got {options.workdir}: name another")
    options.root.mkdir(parents=True, exist_ok=True)
    for line in measure(options):
        print(json.dumps(line), flush=True)
        if line.get("status"):
            return 1
    return 0


if __name__ == "__main__":
    command.start(main, Options())
