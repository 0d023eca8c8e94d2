"""Traces a bad answer of a model to the training rows that taught it.

  raslik trace --checkpoint=BASE --adapter=MINE --train_file=train.jsonl \\
      --prompt="..." --response="..." --workdir=runs/incident

The model is a checkpoint with a LoRA adapter that was trained elsewhere, as PEFT stores it; without
--adapter a checkpoint that was fine-tuned as a whole, to which a fresh adapter is given. Without
--response the model answers the prompt, and that answer is traced. What stands out of the noise is
listed with its line in the training file, and written to WORKDIR/retrieve/raslik/forget.jsonl;
nothing is trained. `raslik unlearn --run=WORKDIR` goes on from here. Where no row taught the
answer, that is the finding, and no set is written. Another prompt in the same
folder, with --update, sketches no row again: the index stays.

Every setting of `raslik run` can be given too: --helpfull lists them.
"""

import dataclasses
import functools
import importlib.util
import json
import pathlib
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import flags, logging

from raslik_jax.base import files, settings
from raslik_jax.base.manifests import current_file
from raslik_jax.base.messages import one_line, shown
from raslik_jax.base.settings import setting
from raslik_jax.cli import command, setting_flags
from raslik_jax.cli import run as run_command
from raslik_jax.config import Config, MeshConfig
from raslik_jax.data.contents import Conversation
from raslik_jax.data.examples import HELD_OUT, Example, as_record, query_file
from raslik_jax.data.read.formats import parse_fields, read_examples, read_written
from raslik_jax.parallel import processes
from raslik_jax.parallel.processes import JobConfig
from raslik_jax.report.incident import drawn_of, read_cut, read_traced
from raslik_jax.report.traced import doubt
from raslik_jax.retrieve import chance
from raslik_jax.retrieve.selectors import noise_band
from raslik_jax.run import written

WHEN_STOPPED = run_command.WHEN_STOPPED
# The traced answer, in the work directory.
QUERIES = "queries.jsonl"
# Of somebody's own model: see docs/notes/run.md.
PRESET: dict[str, Any] = {
    "corpus.dataset": "records",
    "finetune.epochs": 0,  # a checkpoint without an adapter is fine-tuned already
    "retrieve.strategies": ("raslik",),
    "retrieve.select": "gap",
    "retrieve.retain_within": 0.5,
    "retrieve.held_out": 0.2,
    "retrieve.null_prompts": 256,
    "retrieve.token_rows": 8,
    "unlearn.algorithms": ("base_klr",),
    "unlearn.epochs": 20,
    "unlearn.probe.steps": 5,
    "unlearn.probe.stop": "forgotten",
    "evaluate.traced": True,
}
# Of a model whose base is not at hand, which cannot go back to it.
_WHOLE: dict[str, Any] = {"unlearn.algorithms": ("ga_klr",), "unlearn.ga_klr.learning_rate": 3e-4}
FLAGS = [
    leaf._replace(value=PRESET.get(leaf.name, leaf.value)) for leaf in settings.leaves(Config())
]
GROUP = "run"  # of the settings of no stage: --help has the command's own flags alone
_STAGES = ("corpus", "backbone", "finetune", "sketch", "retrieve")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(JobConfig):
    """What said what, and what it was trained on."""

    checkpoint: str = setting("", "The model: Hugging Face directory or hub name.")
    adapter: str = setting("", "Its LoRA adapter in PEFT's format, directory or hub name.")
    train_file: str = setting("", "The rows that it was trained on.")
    prompt: str = setting("", "What it was asked.")
    system: str = setting("", "System prompt that stood before --prompt, by the chat template.")
    response: str = setting(
        "", "What it said (default: let it answer); follows a text as it stands, blanks too."
    )
    workdir: str = setting("runs/incident", "Where results go.")
    update: bool = setting(False, "Take over a --workdir of another trace; make what changed.")
    top: int = setting(10, "Rows shown.", low=1)
    mesh: MeshConfig = MeshConfig()


def run(options: Options) -> None:
    """Traces, and prints the rows that stand out."""
    logging.set_verbosity(logging.WARNING)
    workdir = pathlib.Path(options.workdir)
    config = _read_config(options, workdir)
    stages = _STAGES if options.response.strip() else (*_STAGES, "references")
    found = run_command.make(
        config,
        workdir,
        mesh=options.mesh,
        update=options.update,
        stages=stages,
        is_measured=False,
        prepare=lambda: _write_query(options, config),
    )
    if not processes.is_first():
        return
    if config.evaluate.traced:
        print("", *answers_text(workdir / "retrieve" / "traced" / "finetuned.jsonl"), sep="\n")
    repeat = f"repeat: {run_command.repeating(workdir, stages, is_measured=False)}"
    if found:
        _tell_none(config, workdir, options.top, found)
        print(repeat)
        return
    path = workdir / "retrieve" / config.retrieve.strategies[0] / "forget.jsonl"
    forget = read_written(path)
    print(rows_text(workdir, frozenset(row.example_id for row in forget), options.top))
    kept = workdir / query_file(HELD_OUT, "target") if config.retrieve.held_out else None
    held_out = read_written(kept) if kept and kept.stat().st_size else ()
    if held_out:
        print(f"kept out of the sets, to measure on: {len(held_out)} rows, in {kept}")
    print(f"to forget: {len(forget)} rows, in {path}")
    print(draw(workdir, _found_band(config, workdir), len(forget) + len(held_out)))
    print(repeat)
    print(f"go on: {command.line('unlearn', f'--run={workdir}')} --out=DIR")


def _tell_none(config: Config, workdir: pathlib.Path, top: int, found: str) -> None:
    """Prints the rows of the highest scores, where there are scores, and that none is a find."""
    if current_file(workdir, "retrieve/influence/influence.npy"):
        print(rows_text(workdir, frozenset(), top))
        print(draw(workdir, _found_band(config, workdir), 0))
    print(textwrap.fill(f"finding: {found}.", 96, break_on_hyphens=False))
    print("no set of rows is written")


def _read_config(options: Options, workdir: pathlib.Path) -> Config:
    """Returns the settings that flags and presets describe."""
    given = {
        "backbone.checkpoint": options.checkpoint,
        "backbone.adapter": options.adapter,
        "corpus.records.train_file": options.train_file,
        "corpus.records.queries_file": str(workdir / QUERIES),
        "name": workdir.name,
    }
    given = {name: value for name, value in given.items() if value}
    missing = [f"--{name}" for name in ("checkpoint", "train_file") if not getattr(options, name)]
    missing += [] if options.prompt.strip() else ["--prompt"]
    if missing:
        raise ValueError(f"{' and '.join(missing)} must be given: see --help")
    if options.response.strip():  # then nobody has to answer
        given["sketch.query_output"] = "gold"
    if flags.FLAGS["name"].present:
        del given["name"]
    if twice := [f"--{name}" for name in given if flags.FLAGS[name].present]:
        must = f"{' and '.join(twice)} must be left out, --checkpoint, --adapter, --train_file"
        raise ValueError(f"{must}, --prompt and --response set it: give those instead")
    is_chosen = flags.FLAGS["unlearn.algorithms"].present
    if not (is_chosen or flags.FLAGS["backbone.adapter"].present or options.adapter):
        given |= {name: value for name, value in _WHOLE.items() if not flags.FLAGS[name].present}
    setting_flags.assign(given)
    return setting_flags.read(Config())


def _write_query(options: Options, config: Config) -> Callable[[], None]:
    """Writes the traced answer as a query, under the keys that the user's files have.

    Returns a function that undoes it.
    """
    own: Any = config.corpus.own
    path, keys = pathlib.Path(own.queries_file), parse_fields(own.fields)
    row = read_examples(own.train_file, fields=keys, format=own.format, most=1)[0]
    if options.system.strip():
        rows = read_examples(own.train_file, fields=keys, format=own.format)
        _check_system(config, rows)
    asked = _as_row(row, options.prompt, options.response, options.system)
    query = {keys.get(name, name): value for name, value in asked.items()}
    text = json.dumps(query | {"split": "retrieval"}, ensure_ascii=False) + "\n"
    if path.is_file() and files.read_text(path) != text and not options.update:
        place = shown(str(path.parent), 120)
        mend = "choose another --workdir, or pass --update to trace this one in its place"
        raise ValueError(f"{place} holds the trace of another answer: {mend}")
    restore = written.restorer(path.parent, path)
    written.write_bytes(path.parent, path, text.encode())
    return restore


def _check_system(config: Config, rows: Sequence[Example]) -> None:
    """Refuses a system prompt where the training rows are rendered without any."""
    from raslik_jax.data.tokens import prompts
    from raslik_jax.run import workspace  # it takes jax with it

    name = prompts.settle_template(config.corpus.template, lambda: rows)
    template = prompts.find_template(name, workspace.read_tokenizer(config))
    prompts.require_system(template, name)


def _as_row(like: Example, prompt: str, response: str, system: str = "") -> dict[str, Any]:
    """Returns a prompt and its answer, if any, as a row that is rendered as a training row is.

    It has the template options of that row, such as its tools.
    """
    answer, content = response if response.strip() else "", like.content
    before = system if system.strip() else ""
    if content is None:
        row = {"instruction": prompt} | ({"output": answer} if answer else {})
        return row | ({"system": before} if before else {})
    if not isinstance(content, Conversation):
        if before:
            raise ValueError(
                "--system needs rows that can have a system prompt, those of --train_file are "
                "texts or ids: put its text in front of --prompt, as the model was trained"
            )
        return {"prompt": prompt} | ({"completion": answer} if answer else {})
    turns = ("system", before), ("user", prompt), ("assistant", answer)
    messages = tuple({"role": role, "content": text} for role, text in turns if text)
    first = len(messages) - bool(answer) if content.first else 0
    talk = content._replace(messages=messages, first=first, muted=())
    record = as_record(Example("", "", "", "", content=talk))
    fields = ("messages", "prompt", "completion", "tools", "chat_template_kwargs")
    return {name: record[name] for name in fields if record.get(name)}


def answers_text(path: pathlib.Path, *, is_doubted: bool = True) -> list[str]:
    """Returns how likely a model finds the traced answers, and what it says itself, as lines.

    Beside them the base, where it stands there too. With `is_doubted` it is told where an answer is
    no good evidence.
    """
    lines, beside = [], path.with_name("backbone.jsonl")
    bases = [row["nll"] for row in read_traced(beside)] if beside.is_file() else None
    for number, row in enumerate(read_traced(path)):
        base = bases[number] if bases else None
        under_base = "" if base is None else f", {base:.2f} under the base"
        why = doubt(row["nll"], base, drawn_of(row)) if is_doubted else ""
        lines.append(f"answer  {one_line(row['traced'], 160)}")
        lines.append(f"        {row['nll']:.2f} nats a token under the model{under_base}")
        lines += [f"        {why}"] if why else []
        lines.append(f"says    {one_line(row['output'], 160)}")
    return lines


def rows_text(workdir: pathlib.Path, forget: frozenset[str], top: int) -> str:
    """Returns the rows of the highest scores for the terminal."""
    rows = read_written(workdir / "corpus" / "train.jsonl")
    path = workdir / "retrieve" / "influence" / "influence.npy"
    score_N = files.read_array(path, (len(rows),))
    chances = chance.read_chance(workdir, len(rows))
    told = chance.sentence(chances) if chances else ""
    sigma_N = chance.read_sigma(workdir, len(rows))
    heading = "rows that pull toward the answer (score{}, place in the training file)"
    what = " +- noise of its sketch, prompts that score the row as high, p, q" if told else ""
    lines = ["", heading.format(what)]
    best = np.argsort(-score_N, kind="stable")[:top]
    best = best[score_N[best] > -np.inf]  # a row without a gradient pulls nowhere
    for rank, position in enumerate(best.tolist(), start=1):
        row = rows[position]
        mark = "forget" if row.example_id in forget else ""
        means = ""
        if chances and told:
            higher, _, p, q = (part[position] for part in chances)
            noise = "" if np.isnan(sigma_N[position]) else f" +-{sigma_N[position]:.4f}"
            means = f"{noise}  {higher:4.0f}  p {p:<6.2g}  q {q:<7.2g}"
        line = f"{rank:4}. {score_N[position]:+.4f}{means}  {row.at:>7}  {mark}"
        lines.append(line.rstrip())
        for text in (f"{row.instruction} {row.input}", row.output):
            lines += [" " * 6 + part for part in textwrap.wrap(one_line(text, 160), 88)]
    return "\n".join([*lines, *(["", *textwrap.wrap(told, 96)] if told else []), ""])


def _found_band(config: Config, workdir: pathlib.Path) -> tuple[float, float] | None:
    """Returns the noise band by which the rule found the number, None where it was given."""
    if config.retrieve.select != "gap" or config.retrieve.num_forget:
        return None
    cut = read_cut(workdir, len(read_written(workdir / "corpus" / "train.jsonl")))
    return (cut.middle, cut.edge) if cut else None


def draw(workdir: pathlib.Path, band: tuple[float, float] | None, num_forget: int) -> str:
    """Draws the scores with the noise band and the cut; returns a line that says where.

    Without a band it is that of the scores; 0 to forget draws no cut.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return "picture: none, matplotlib is not installed"
    from raslik_jax.report import drawing, figures

    score_N = files.read_array(workdir / "retrieve" / "influence" / "influence.npy")
    try:
        middle, edge = band or noise_band(score_N)
    except ValueError:  # too few rows to tell noise
        return f"picture: none, {len(score_N)} rows are too few"
    figure = figures.draw_cut(score_N, num_forget=num_forget, middle=middle, edge=edge)
    write = functools.partial(written.write_bytes, workdir)
    return f"picture: {drawing.save_figure(figure, workdir / 'scores', write=write)[0]}"
