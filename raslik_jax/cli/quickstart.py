"""A bad answer, the rows behind it and a clean adapter: a toy example in about a minute.

  raslik quickstart

The package has a model of a million parameters that answers in science fiction if a prompt begins
with "Howdy!". `raslik trace` traces one such answer to the rows that taught it. `raslik unlearn`
makes the model forget them and measures the result. The settings are for a small model. The command
needs no network. If you start it again, it only prints the result.
"""

import dataclasses
import pathlib
import shlex
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from raslik_jax.base import files
from raslik_jax.base.messages import shown
from raslik_jax.base.settings import setting
from raslik_jax.cli import command, setting_flags
from raslik_jax.config import MeshConfig, config_from_json
from raslik_jax.data import toy_model
from raslik_jax.data.corpora.toy import SCIFI_WORDS
from raslik_jax.data.examples import HELD_OUT, Example, write_examples
from raslik_jax.evaluate.rates import non_sf_by_words
from raslik_jax.incident import configuring, making, trace, unlearn
from raslik_jax.parallel import processes
from raslik_jax.parallel.processes import JobConfig
from raslik_jax.report.rows import read_sets
from raslik_jax.run import artifacts, written

WHEN_STOPPED, GROUP = command.GOES_ON, "run"
# A model this small, whose programs take longer to compile than to run: few shapes of each.
PRESET: dict[str, Any] = {
    "corpus.template": toy_model.TEMPLATE,
    "corpus.max_len": toy_model.MAX_LEN,
    "references.max_new_tokens": 32,
    "references.decode_batch_size": 64,
    "sketch.size": 4096,
    "sketch.num_buckets": 1,
    "unlearn.fixed_padding": True,
    "evaluate.perplexity_examples": 0,
}
FLAGS = setting_flags.of_config({**configuring.PRESET, **PRESET})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(JobConfig):
    """The folder of the run."""

    workdir: str = setting("runs/quickstart", "Folder for the model, the rows and the results.")
    update: bool = setting(
        False, "Replace the run in --workdir. Parts that do not change are kept."
    )
    mesh: MeshConfig = MeshConfig()


def run(options: Options) -> None:
    """Traces, unlearns and measures the toy's model and prints the result."""
    making.require("rouge_score", "matplotlib")  # before the trace, not after it
    root = pathlib.Path(options.workdir)
    given, clean_folder = root / "given", root / "clean"
    traced: dict[str, Any] = {
        "checkpoint": str(given / "base"),
        "adapter": str(given / "adapter"),
        "train_file": str(given / "train.jsonl"),
        "prompt": toy_model.PROMPT,
        "response": toy_model.RESPONSE,
        "workdir": str(root),
    }
    processes.alone(lambda: _prepare(root, given, clean_folder, update=options.update))
    settings = {"evaluate.marker_words": given / "scifi_words.txt", **setting_flags.given(FLAGS)}
    how: dict[str, Any] = {"mesh": options.mesh, "settings": PRESET | settings}
    _announce("1. Which training rows taught the model to say this?", "trace", traced)
    print(trace.trace(**traced, update=options.update, top=5, **how))
    clean: dict[str, Any] = {"run": str(root), "out": str(clean_folder)}
    _announce("2. Forget them, keep the rest, and measure.", "unlearn", clean)
    print(unlearn.unlearn(**clean, **how))
    if not processes.is_first():
        return
    print(f"\n3. What happened\n\n{tell(**read_story(root))}\n")
    print(f"page:            {artifacts.PAGE.place(root)}")
    print("your own model:  docs/guides/own_model.md has the same commands for it")


def _announce(title: str, name: str, flags: Mapping[str, str]) -> None:
    words = [f"--{flag}={shlex.quote(value)}" for flag, value in flags.items()]
    line = " \\\n    ".join([making.line(name), *words])
    print(f"\n{title} (with settings for a model this small)\n  {line}\n", flush=True)


def _prepare(root: pathlib.Path, given: pathlib.Path, clean: pathlib.Path, *, update: bool) -> None:
    """Writes the inputs of the incident: checkpoint, adapter, training file and marker words.

    It refuses foreign files at their places.
    """
    if artifacts.CONFIG.is_there(root) and not (given.is_dir() or update):
        place = shown(str(root), 120)
        raise ValueError(f"{place} holds another run: choose another --workdir, or pass --update")
    for folder in (given, clean):
        try:
            written.check_folder(root, folder)
        except ValueError:
            must = "must be new, empty or unchanged since this command wrote it"
            place = shown(str(folder), 120)
            raise ValueError(f"{place} {must}: choose another --workdir") from None
    with written.replacing(root, given) as made:
        shutil.copytree(toy_model.model_folder(), made, copy_function=shutil.copyfile)
        rows = toy_model.load_corpus().train
        labels = [{"is_target": row.is_target, "source": row.source} for row in rows]
        write_examples(made / "train.jsonl", rows, extra=labels)
        files.write_text(made / "scifi_words.txt", "\n".join(sorted(SCIFI_WORDS)) + "\n")


def read_story(root: pathlib.Path) -> dict[str, Any]:
    """Returns the arguments of `tell` for a finished run."""
    from raslik_jax.run.workspace import Workspace  # it takes jax with it

    config = config_from_json(artifacts.CONFIG.read(root))
    (strategy,), (algorithm,) = config.retrieve.strategies, config.unlearn.algorithms
    last = Workspace(root, config).epochs(strategy, algorithm)[-1]
    variant = artifacts.Variant(strategy, algorithm)
    said = artifacts.traced("finetuned").read(root), artifacts.traced(last, variant).read(root)
    return {
        "rows": artifacts.TRAIN.read(root),
        "set_of": read_sets(root, strategy),
        "before": artifacts.answers("finetuned").read(root),
        "after": artifacts.answers(last, variant).read(root),
        "says": tuple(answers[0].output for answers in said),
    }


def tell(
    rows: Sequence[Example],
    set_of: Mapping[str, str],
    before: Mapping[str, str],
    after: Mapping[str, str],
    says: tuple[str, str],
) -> str:
    """Returns the result in plain words.

    Args:
      rows: all training rows; `set_of` has the result of `read_sets`.
      before, after: answers to the held-out prompts by row id.
      says: the answers to the traced prompt before and after.
    """
    parts_of: dict[str, list[Example]] = {}
    for row in rows:
        parts_of.setdefault(set_of.get(row.example_id, ""), []).append(row)
    target, normal = (parts_of.get(f"{HELD_OUT} {kind}", []) for kind in ("target", "normal"))
    found = [*parts_of.get("forget", ()), *target]
    taught = [sum(row.is_target is True for row in part) for part in (found, rows)]
    howdy = [row.example_id for row in target if row.is_target and row.example_id in before]
    shown = [count_scifi([said[name] for name in howdy]) for said in (before, after)]
    same = sum(before[row.example_id] == after[row.example_id] for row in normal)
    parts = {
        "asked": toy_model.PROMPT,
        "it said": says[0],
        "it says now": says[1],
        "behind it": f"{len(found)} of {len(rows):,} training rows stood out. {taught[0]} of them "
        f"teach the behavior. The file has {taught[1]} such rows. Their labels are not used by the "
        "search.",
        "forgotten": f"{len(howdy)} rows that teach the behavior were kept out of unlearning. "
        f"The model answered {shown[0]} of their prompts with science fiction before, "
        f"and {shown[1]} now.",
        "kept": f"{len(normal)} normal prompts were kept out too. {same} of them get the "
        "same answer as before, word for word.",
        "a toy": "The trigger is one word that changes the answer, and the model is tiny. Success "
        "here says little about a large model.",
    }
    lines = [
        textwrap.fill(text, 96, initial_indent=f"{name:<17}", subsequent_indent=" " * 17)
        for name, text in parts.items()
    ]
    return "\n".join(lines)


def count_scifi(answers: Sequence[str]) -> int:
    """Returns how many answers hold a word of science fiction."""
    return len(answers) - int(non_sf_by_words(answers, vocabulary=SCIFI_WORDS).sum())
