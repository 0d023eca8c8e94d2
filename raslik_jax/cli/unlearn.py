"""Unlearns what a trace has found, measures, and writes the clean adapter.

  raslik unlearn --run=runs/incident --out=clean

goes on with the run of `raslik trace`: on the rows that stood out the model goes back to what its
base says without the adapter, while it is held to others (a model without one unlearns by ascent),
measures on rows that no set has and on the traced prompt itself, and writes the adapter with a card
to --out, the training file without the rows that were found, and the report. Sets that were edited,
or made elsewhere, are given as --forget_file and --retain_file: training rows by their id, place or
text. They stay the run's until --retrieve.strategies names another.

Every setting of `raslik run` can be given too: --helpfull lists them.
"""

import contextlib
import dataclasses
import importlib.util
import os
import pathlib
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from absl import flags, logging

from raslik_jax.base import settings
from raslik_jax.base.files import hash_file, read_json
from raslik_jax.base.manifests import Hashes, check_whole, current_file, read_manifest
from raslik_jax.base.messages import one_line, shown
from raslik_jax.base.settings import setting
from raslik_jax.cli import command, setting_flags
from raslik_jax.cli import run as run_command
from raslik_jax.cli.trace import QUERIES, answers_text
from raslik_jax.config import STAGES, Config, MeshConfig, config_from_json, to_json
from raslik_jax.data.examples import HELD_OUT, query_file
from raslik_jax.data.read.cleaning import cleaned_name, is_folder, write_without
from raslik_jax.data.read.formats import read_written
from raslik_jax.parallel import processes
from raslik_jax.parallel.processes import JobConfig
from raslik_jax.report import rows as rows_lib
from raslik_jax.report.incident import EXPORTS, read_incident, read_outcome
from raslik_jax.report.runs import read_metrics
from raslik_jax.retrieve.finding import read_finding
from raslik_jax.retrieve.strategies import STRATEGIES
from raslik_jax.run import hub, written

WHEN_STOPPED = run_command.WHEN_STOPPED
# Prompts kept out whose answers are shown.
_ASKED = 4
FLAGS = [leaf._replace(value=None) for leaf in settings.leaves(Config())]
GROUP = "run"  # of the settings of no stage: --help has the command's own flags alone


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(JobConfig):
    """Which run goes on, with which sets, and what it leaves."""

    run: str = setting("", "Work directory of a trace.")
    out: str = setting(
        "",
        "Folder for the unlearned adapter and its card: new, empty, or as this run has written it.",
    )
    forget_file: str = setting("", "Rows to forget in place of those of the trace.")
    retain_file: str = setting("", "Rows to retain, with --forget_file (default: random others).")
    cleaned_train_file: str = setting(
        "",
        "File for the training file without what was found, new or as this run has written it "
        "(default: in --run). A folder where the trace read several files.",
    )
    push_to_hub: str = setting("", "OWNER/NAME on the Hugging Face hub to upload it to as well.")
    public: bool = setting(False, "--push_to_hub: for everybody to see; else private.")
    merged: bool = setting(False, "Write a whole checkpoint instead of an adapter.")
    mesh: MeshConfig = MeshConfig()

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.retain_file and not self.forget_file:
            yield "--retain_file needs a --forget_file: give both"
        elif self.public and not self.push_to_hub:
            yield "--public needs --push_to_hub: name where to"
        elif self.out and self.cleaned_train_file:
            folder, file = (pathlib.Path(p).resolve() for p in (self.out, self.cleaned_train_file))
            if file.is_relative_to(folder):
                yield "--cleaned_train_file must lie outside --out, which the model has for itself"


def run(options: Options) -> None:
    """Unlearns, measures and exports; prints what became of the traced prompt."""
    logging.set_verbosity(logging.WARNING)
    if not options.run or not options.out:
        raise ValueError("--run and --out must be given: give --run=WORKDIR and --out=DIR")
    root, folder = pathlib.Path(options.run), pathlib.Path(options.out)
    config = _read_config(options, root)
    (strategy,), (algorithm,) = config.retrieve.strategies, config.unlearn.algorithms
    if config.unlearn.parameters == "all" and not options.merged:
        raise ValueError("--unlearn.parameters=all trains more than an adapter has: give --merged")
    source = _train_file(config)
    cleaned = pathlib.Path(options.cleaned_train_file or root / cleaned_name(source))

    processes.alone(lambda: _check_places(options, source, cleaned))
    recorded = read_json(root / "config.json", dict)["retrieve"]
    _check_found(root, read_finding(root) if to_json(config)["retrieve"] == recorded else "")
    print(f"sets: {_describe_sets(config, strategy)}")
    command.require("matplotlib")  # the report comes last, what it lacks is told first
    how: Any = {"mesh": options.mesh, "update": True, "prepare": lambda: _drop_exports(root)}
    measured = [stage for stage in STAGES if stage != "report"]
    _check_found(root, run_command.make(config, root, stages=measured, **how))
    from raslik_jax.run.exporting import export_model  # they take jax with them
    from raslik_jax.run.workspace import Workspace

    names: Any = {"strategy": strategy, "algorithm": algorithm}

    def export() -> str:
        with written.replacing(root, folder) as made:
            export_model(root, made, **names, epoch=None, merged=options.merged)
        told, exported = _clean(config, root, strategy, cleaned)
        kind = "Model" if options.merged else "Adapter"
        # The page says where all of it lies.
        places = {f"{kind} without it": str(folder.resolve()), **exported}
        written.write_json(root, root / EXPORTS, places)
        return told

    told = processes.alone(export)
    run_command.make(config, root, mesh=options.mesh, update=True, stages=("report",))
    if not processes.is_first():
        return
    if config.evaluate.traced:
        after = root / "generate" / f"traced-{strategy}-{algorithm}"
        before = root / "retrieve" / "traced" / "finetuned.jsonl"
        print("\nbefore unlearning", *answers_text(before), sep="\n")
        epoch = Workspace(root, config).epochs(strategy, algorithm)[-1]
        print(
            "\nafter unlearning",
            *answers_text(after / f"epoch-{epoch}.jsonl", is_doubted=False),
            sep="\n",
        )
        print(*_told(root, config, (strategy, algorithm), epoch), sep="\n")
    print(f"\n{'model' if options.merged else 'adapter'} and its card: {folder}")
    print(told)
    print(f"repeat: {run_command.repeating(root)}")
    if options.push_to_hub:
        url = hub.push_folder(folder, options.push_to_hub, is_public=options.public)
        print(f"on the hub: {url}")


def _check_places(options: Options, source: str, cleaned: pathlib.Path) -> None:
    """Refuses places that hold something else than this run has written, before it starts."""
    root, folder = pathlib.Path(options.run), pathlib.Path(options.out)
    for place, name in ((folder, "--out"), (cleaned, "--cleaned_train_file")):
        written.check_outside(place, name, root)
    written.check_folder(root, folder)
    if is_folder(source):
        written.check_folder(root, cleaned)
    else:
        written.check_file(root, cleaned, "--cleaned_train_file")
    if importlib.util.find_spec("pyarrow"):
        written.check_folder(root, (root / rows_lib.PLACE).parent)
    if options.cleaned_train_file and not is_folder(source):
        ending = pathlib.Path(cleaned_name(source)).suffix
        if cleaned.suffix != ending:
            must = f"must end in {ending}, the form that it is written in"
            raise ValueError(f"--cleaned_train_file {must}, got {shown(cleaned.name)}: rename it")
    if options.push_to_hub:
        hub.check_hub(options.push_to_hub, is_public=options.public)


def _check_found(root: pathlib.Path, finding: str) -> None:
    """Refuses to unlearn where the trace found no row, which the finding explains."""
    if finding:
        must = "must be a trace that found rows"
        raise ValueError(
            f"--run {must}, {shown(str(root), 120)} found none ({finding}): give rows of your own "
            "as --forget_file"
        )


def _drop_exports(root: pathlib.Path) -> Callable[[], None]:
    """Forgets what the page says of an earlier model's exports; returns what undoes it."""
    restore = written.restorer(root, root / EXPORTS)
    written.forget(root, root / EXPORTS)
    return restore


def _told(
    root: pathlib.Path, config: Config, variant: tuple[str, str], epoch: int
) -> Iterator[str]:
    """Yields lines of what became of the behavior: answers to prompts kept out, and the rule's."""
    from raslik_jax.run.workspace import read_answers  # it takes jax with it

    path = root / query_file(HELD_OUT, "target")
    if config.retrieve.held_out and path.stat().st_size:
        asked = read_written(path)
        before = read_answers(root / "references" / "evaluation" / "finetuned.jsonl")
        after = read_answers(root / "generate" / "-".join(variant) / f"epoch-{epoch}.jsonl")
        yield f"\n{len(asked)} prompts of rows like these that no step saw, before and after"
        for row in asked[:_ASKED]:
            yield f"asked   {one_line(f'{row.instruction} {row.input}', 160)}"
            yield f"said    {one_line(before[row.example_id], 160)}"
            yield f"says    {one_line(after[row.example_id], 160)}"
    if current_file(root, "evaluate/metrics.json") is None:
        outcome = read_outcome(root, *variant)
    else:
        incident = read_incident(root, read_metrics(root))
        outcome = incident.outcome if incident else ()
    yield from ("",) if outcome else ()
    for sentence in outcome:
        how: Any = {"subsequent_indent": " " * 8, "break_on_hyphens": False}
        yield textwrap.fill(sentence, 96, **how)


def _read_config(options: Options, root: pathlib.Path) -> Config:
    """Returns the settings of the run, less those that flags change."""
    recorded = read_json(root / "config.json", dict, mend="give the folder of a trace")
    leaves = [*settings.leaves(config_from_json(_with_own_query(recorded, root)))]
    kept = {leaf.name: leaf.value for leaf in leaves if flags.FLAGS[leaf.name].value is None}
    setting_flags.assign(kept)
    if options.forget_file:
        names = {"forget_file": options.forget_file, "retain_file": options.retain_file}
        setting_flags.assign({f"retrieve.given.{name}": path for name, path in names.items()})
        setting_flags.assign({"retrieve.strategies": ("given",)})
    config = setting_flags.read(Config())
    for name, chosen in (
        ("retrieve.strategies", config.retrieve.strategies),
        ("unlearn.algorithms", config.unlearn.algorithms),
    ):
        if len(chosen) > 1:
            raise ValueError(f"--{name} must be one, the run has {', '.join(chosen)}: choose one")
    return config


def _with_own_query(recorded: dict[str, Any], root: pathlib.Path) -> dict[str, Any]:
    """Returns a run's settings with the traced answer that lies in it.

    One that was copied or moved would read what is traced at the old place now, if anything.
    """
    made_of = (read_manifest(root / "corpus") or {"files": {}})["files"].get("queries_file")
    own, corpus = root / QUERIES, recorded["corpus"]
    if not (made_of and own.is_file() and hash_file(own) == made_of):
        return recorded
    with contextlib.suppress(OSError):  # it is gone
        if os.path.samefile(own, corpus["records"]["queries_file"]):
            return recorded
    records = {**corpus["records"], "queries_file": str(own)}
    return {**recorded, "corpus": {**corpus, "records": records}}


def _describe_sets(config: Config, strategy: str) -> str:
    """Returns where the sets come from: those of files stay with the run."""
    record, own = STRATEGIES[strategy], config.retrieve[strategy]
    if not record.brings_sets:
        return f"what the trace found ({record.title})"
    named = " and ".join(shown(path, 120) for path in dataclasses.astuple(own) if path)
    return f"the rows of {named}; --retrieve.strategies=raslik takes what the trace found"


def _train_file(config: Config) -> str:
    """Returns the training file of a trace; a ValueError where the run is on another dataset."""
    if not hasattr(config.corpus.own, "train_file"):
        raise ValueError(
            f"--run must be a trace, got a run on {config.corpus.dataset}: trace first"
        )
    return str(config.corpus.own.train_file)


def _check_traced(config: Config, root: pathlib.Path) -> None:
    """Refuses a training file that is another than the trace read: its rows have other places."""
    source, traced = _train_file(config), check_whole(root, "corpus")["files"]
    files = config.corpus.source_files().items()
    now = {name: Hashes().of_content(path) for name, path in files if _is_training(name)}
    if now != {name: content for name, content in traced.items() if _is_training(name)}:
        must = "must be as the trace read it, it has changed meanwhile"
        raise ValueError(f"{shown(source, 120)} {must}: restore it, or run again")


def _is_training(name: str) -> bool:
    """Returns whether a source of the corpus, or a file of one, is of the training rows."""
    return name.partition("/")[0] == "train_file"


def _clean(
    config: Config, root: pathlib.Path, strategy: str, target: pathlib.Path
) -> tuple[str, dict[str, str]]:
    """Writes the training file without what was found, and all rows with scores.

    Returns lines that say where, and the places by their titles, in the work directory as there.
    """
    sets = {name: root / "retrieve" / strategy / f"{name}.jsonl" for name in ("forget", "retain")}
    if config.retrieve.held_out:
        names = {f"held-out {kind}": query_file(HELD_OUT, kind) for kind in ("target", "normal")}
        sets |= {name: root / path for name, path in names.items()}
    rows = {name: read_written(path) for name, path in sets.items() if path.stat().st_size}
    # What was kept out of the sets to measure on was found all the same.
    named = (row for name in ("forget", "held-out target") for row in rows.get(name, ()))
    found = {(row.file, row.place) for row in named}
    with written.replacing(root, target) as made:
        left = write_without(_train_file(config), made, found)
        _check_traced(config, root)
    is_own = target.resolve().parent == root.resolve()
    exported = {"Training file without them": target.name if is_own else str(target.resolve())}
    lines = [f"training file without the {len(found)} rows that were found, {left} left: {target}"]
    if importlib.util.find_spec("pyarrow"):
        set_of = {row.example_id: name for name, part in rows.items() for row in part}
        with written.replacing(root, (root / rows_lib.PLACE).parent) as made:
            rows_lib.write_rows(made, root, to_json(config), set_of)
        lines.append(f"all rows with their scores: {root / rows_lib.PLACE}")
        exported["All rows with their scores"] = rows_lib.PLACE
    return "\n".join(lines), exported
