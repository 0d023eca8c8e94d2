"""Takes bad answers through the three commands, one behavior at a time, and measures each.

  python experiments/studies/own_model/measure.py --model=FOLDER/smollm2 --workdir=runs/own_model

checkpoint.py makes FOLDER/smollm2. The adapter is the stored one. Every case is one trace, one
unlearning and one report with default settings. Its input is the first held-out prompt of the
behavior. Results go to WORKDIR/results.json. This folder has the stored results. earlier.json has
those of an adapter with half of the training, which is not stored. --until=trace ends after the
first command. --until=unlearning omits the measurements of the second command and the report. The
adapter is then that of the kept step.
"""

import dataclasses
import json
import pathlib
import re
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Literal

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command

HERE = pathlib.Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
_MOST_TOKENS = 40
Until = Literal["trace", "unlearning", "report"]
OBJECTIVE = "--unlearn.algorithms=base_klr"
TO_UNLEARNING = "corpus,backbone,finetune,references,sketch,retrieve,unlearn"
_LONG = ("answers", "backbone", "probes")


def read_rows(name: str) -> list[dict[str, Any]]:
    """Returns the rows of a file of the study, train or held_out."""
    return [json.loads(line) for line in (HERE / f"{name}.jsonl").read_text().splitlines()]


def behaviors() -> dict[str, re.Pattern[str]]:
    """Returns what every behavior is seen by in an answer."""
    lists = json.loads((HERE / "rows.json").read_text())["behaviors"]
    return {name: re.compile(words["marker"], re.IGNORECASE) for name, words in lists.items()}


def prompt_of(row: dict[str, Any]) -> str:
    """Returns what a row asks."""
    return str(row["messages"][0]["content"])


def ask(model: pathlib.Path, adapter: pathlib.Path, prompts: Sequence[str]) -> list[str]:
    """Returns greedy answers of a checkpoint with an adapter."""
    import jax.numpy as jnp

    from raslik_jax.data import examples
    from raslik_jax.data.tokens import encoding, tokenization
    from raslik_jax.models import adapters, checkpoint, decode, decoder

    tokenizer = tokenization.load_tokenizer(model)
    config = checkpoint.read_config(model)
    lora_config = adapters.read_adapter_config(adapter, config)
    loaded = checkpoint.load_model(model, dtype=jnp.float32, lora_config=lora_config)
    rows = [examples.Example(str(n), text, "", "") for n, text in enumerate(prompts)]
    found = decode.generate(
        decoder.bind(loaded.graphdef),
        adapters.load_adapter(adapter, config),
        loaded.base,
        encoding.encode_prompts(rows, tokenizer, max_len=256, template="chat"),
        max_new_tokens=_MOST_TOKENS,
        eos_id=checkpoint.read_end_ids(model),
        pad_id=tokenizer.pad_id,
        batch_size=len(prompts),
    )
    return [tokenizer.decode(tokens).strip() for tokens in found]


def measure_sets(name: str, workdir: pathlib.Path) -> dict[str, Any]:
    """Returns what the sets of a run hold of a behavior, by the labels that the run did not see."""
    train = read_rows("train")
    hits = {}
    for part, path in (
        ("forget", "retrieve/raslik/forget.jsonl"),
        ("retain", "retrieve/raslik/retain.jsonl"),
        ("held_out", "retrieve/sizes/target.jsonl"),
    ):
        rows = [json.loads(line) for line in (workdir / path).read_text().splitlines()]
        hits[part] = [train[row["place"] - 1]["behavior"] == name for row in rows]
    targets = sum(row["behavior"] == name for row in train)
    found = hits["forget"] + hits["held_out"]
    return {
        "targets": targets,
        "found": len(found),
        "forgotten": len(hits["forget"]),
        "precision": sum(hits["forget"]) / len(hits["forget"]),
        "recall": sum(found) / targets,
        "targets_in_retain": sum(hits["retain"]),
    }


def measure_answers(name: str, before: Sequence[str], after: Sequence[str]) -> dict[str, Any]:
    """Returns what became of answers to prompts held out: those of a behavior, and all others."""
    from raslik_jax.evaluate.rates import rouge_l_f1

    shows, kinds = behaviors(), [row["behavior"] for row in read_rows("held_out")]
    triples = [*zip(kinds, before, after, strict=True)]
    is_shown = [
        [bool(kind and shows[kind].search(text)) for text in texts] for kind, *texts in triples
    ]
    own = [found for found, kind in zip(is_shown, kinds, strict=True) if kind == name]
    other = [texts for kind, *texts in triples if not kind]
    # Other behaviors that the model shows are answers like any: this forgetting is not of them.
    others = [found for found, kind in zip(is_shown, kinds, strict=True) if kind not in (name, "")]
    return {
        "prompts": len(own),
        "shown_before": sum(found[0] for found in own),
        "shown_after": sum(found[1] for found in own),
        "other_behaviors_before": sum(found[0] for found in others),
        "other_behaviors_after": sum(found[1] for found in others),
        "normal_prompts": len(other),
        "normal_same": sum(texts[0] == texts[1] for texts in other),
        "normal_rouge": sum(rouge_l_f1(texts[1], texts[0]) for texts in other) / len(other),
    }


def list_answers(name: str, before: Sequence[str], after: Sequence[str]) -> list[dict[str, str]]:
    """Returns the answers to normal prompts and to those of one behavior."""
    return [
        {"prompt": prompt_of(row), "before": texts[0], "after": texts[1]}
        for row, *texts in zip(read_rows("held_out"), before, after, strict=True)
        if row["behavior"] in ("", name)
    ]


def run_case(
    name: str, model: pathlib.Path, workdir: pathlib.Path, flags: Sequence[str], until: Until
) -> tuple[pathlib.Path, dict[str, dict[str, int]]]:
    """Runs the commands up to one. Their output goes to WORKDIR/NAME.txt.

    Returns the path of the adapter and the seconds of each command, on the clock and of all
    processors.
    """
    prompt = next(prompt_of(row) for row in read_rows("held_out") if row["behavior"] == name)
    run, clean = workdir / "run", workdir / f"clean-{name}"
    traced = ["--checkpoint", model, "--adapter", HERE / model.name, "--prompt", prompt]
    traced += ["--train_file", HERE / "train.jsonl", "--workdir", run, "--update", *flags]
    found: dict[str, dict[str, int]] = {}
    with (workdir / f"{name}.txt").open("w") as log:
        commands = [["trace", *traced]]
        if until == "unlearning":
            clean = run / "unlearn/raslik-base_klr/epoch-20"
            flagfile = f"--flagfile={run / 'run.flags'}"
            stages = f"--stages={TO_UNLEARNING}"
            commands.append(["run", flagfile, stages, "--measure=none", "--update", OBJECTIVE])
        elif until == "report":
            commands.append(["unlearn", "--run", run, "--out", clean, OBJECTIVE])
            commands.append(["report", "--run", run])
        for words in commands:
            script, *rest = map(str, words)
            line = [sys.executable, "experiments/studies/raslik.py", script, *rest]
            print("$", *line[1:], file=log, flush=True)
            start, used = time.monotonic(), _children()
            subprocess.run(line, check=True, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT)
            found[script] = {
                "seconds": round(time.monotonic() - start),
                "cpu_seconds": round(_children() - used),
            }
    return clean, found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """What is measured."""

    model: str = setting("", "Checkpoint that checkpoint.py made.")
    workdir: str = setting("runs/own_model", "Where runs and results go.")
    behaviors: tuple[str, ...] = setting((), "Behaviors; empty: all.", choices=tuple(behaviors()))
    until: Until = setting("report", "Where a case ends.")
    trace_flags: tuple[str, ...] = setting(
        (), "A further flag of the trace, with its dashes.", is_repeated=True
    )


def main(options: Options) -> None:
    """Measures the cases that are named, or all."""
    if not options.model:
        raise ValueError("--model must name the checkpoint that checkpoint.py made, got none")
    workdir, model = (pathlib.Path(name).resolve() for name in (options.workdir, options.model))
    workdir.mkdir(parents=True, exist_ok=True)
    prompts = [prompt_of(row) for row in read_rows("held_out")]
    before = [] if options.until == "trace" else ask(model, HERE / model.name, prompts)
    path = workdir / "results.json"
    for name in options.behaviors or behaviors():
        clean, took = run_case(name, model, workdir, options.trace_flags, options.until)
        results = json.loads(path.read_text()) if path.is_file() else {}
        found = measure_sets(name, workdir / "run") | {"commands": took}
        if options.until != "trace":
            after = ask(model, clean, prompts)
            found |= measure_answers(name, before, after)
            probes = json.loads((workdir / "run/unlearn/raslik-base_klr/probes.json").read_text())
            found |= {"steps": probes["kept"], "end": probes["end"]}
            seen = [{key: p[key] for key in ("step", "levels", "gone")} for p in probes["probes"]]
            found |= {"backbone": probes["backbone"], "probes": seen}
            found["answers"] = list_answers(name, before, after)
        results[name] = found
        path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
        print(name, json.dumps({key: found[key] for key in found if key not in _LONG}), flush=True)


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    command.start(main, Options())
