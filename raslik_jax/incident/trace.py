"""From a bad answer of a model to the training rows that taught it."""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import pathlib
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from raslik_jax.base import files
from raslik_jax.base.messages import one_line, shown
from raslik_jax.base.settings import setting
from raslik_jax.config import Config, MeshConfig, to_json
from raslik_jax.data.contents import Conversation, Passage
from raslik_jax.data.examples import HELD_OUT, Example, as_record
from raslik_jax.data.read.formats import parse_fields, read_examples
from raslik_jax.data.words import refused
from raslik_jax.evaluate import taught
from raslik_jax.incident import making
from raslik_jax.incident.configuring import PRESET, WHOLE, UnlearnOptions, check_hub_rows
from raslik_jax.parallel import processes
from raslik_jax.report import rows as rows_lib
from raslik_jax.retrieve.selectors import noise_band
from raslik_jax.run import artifacts, written

if TYPE_CHECKING:  # it takes jax with it
    from raslik_jax.incident.tracer import Tracer

_STAGES = ("corpus", "backbone", "finetune", "sketch", "retrieve")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceOptions(making.Options):
    """The bad answer, the model and its training rows."""

    checkpoint: str = setting("", "The base model: a Hugging Face directory or hub name.")
    adapter: str = setting("", "Its LoRA adapter in PEFT's format: a directory or hub name.")
    train_file: str = setting("", "The rows that it was trained on.")
    prompt: str = setting("", "The prompt.")
    input: str = setting("", "Input of the prompt, for rows with an instruction and an input.")
    system: str = setting("", "System prompt before --prompt, for the chat template.")
    response: str = setting(
        "", "The bad answer, unchanged, blanks too (default: let the model answer)."
    )
    wished: str = setting(
        "", "The answer that you wished for. The report compares the rows of both answers."
    )
    workdir: str = setting("runs/incident", "Folder for the results.")
    update: bool = setting(
        False, "Replace the trace in --workdir. Parts that do not change are kept."
    )
    top: int = setting(10, "Rows shown.", low=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceResult(making.Result):
    """The result of a trace; printed, it shows the rows and how to go on.

    Attributes:
      config: the settings of the run.
      finding: why no row was found; "" if there are rows.
      forget: the rows to forget.
      held_out: the found rows that are kept out of the sets to measure on.
    """

    config: Config = dataclasses.field(repr=False)
    finding: str
    forget: Sequence[Example] = dataclasses.field(default=(), repr=False)
    held_out: Sequence[Example] = dataclasses.field(default=(), repr=False)

    @property
    def forget_file(self) -> pathlib.Path:
        """The rows to forget of the last trace in the folder; no file if it found none."""
        return artifacts.set_rows(self.config.retrieve.strategies[0], "forget").place(self.workdir)

    def tracer(self) -> "Tracer":
        """Returns a tracer by the model and the index that the folder has now."""
        from raslik_jax.incident.tracer import Tracer

        return Tracer(self.workdir)


def trace(options: TraceOptions | None = None, **named: Any) -> TraceResult:
    """Traces a bad answer of a model to the training rows that taught it.

    The rows that stand out are written to WORKDIR/retrieve/raslik/forget.jsonl. Nothing is trained.
    Options are those of `TraceOptions`, as an object or by name. Progress is printed.

    Example:
      found = raslik_jax.trace(checkpoint="base", adapter="mine", train_file="train.jsonl",
                               prompt="...", response="...", workdir="runs/incident")
      print(found)
    """
    options = making.options_of(options or TraceOptions(), named)
    workdir = pathlib.Path(options.workdir)
    from raslik_jax.run import cost  # it takes jax with it

    config = cost.settled(make_config(options), workdir)
    stages = _STAGES if options.response else (*_STAGES, "references")
    finding = making.make(
        config,
        workdir,
        mesh=options.mesh,
        update=options.update,
        stages=stages,
        is_measured=False,
        prepare=lambda: write_query(options, config),
    )
    # Read now: the next trace in the folder replaces the files.
    rows: Any = dict.fromkeys(("forget", "held_out"), ())
    if not finding:
        rows["forget"] = artifacts.set_rows(config.retrieve.strategies[0], "forget").read(workdir)
        if config.retrieve.held_out:
            rows["held_out"] = artifacts.measured_rows(HELD_OUT, "target").read(workdir)
    found = TraceResult(workdir=workdir, config=config, finding=finding, **rows)
    if not processes.is_first():
        return found
    lines = [] if not config.evaluate.traced else ["", *making.answer_lines(workdir)]
    lines += _found_lines(found, options.top)
    lines.append(f"repeat: {making.repeating(workdir, stages, is_measured=False)}")
    if not finding:
        lines += _ways_lines(found, options.mesh)
    return dataclasses.replace(found, text="\n".join(lines))


def _ways_lines(found: TraceResult, mesh: MeshConfig) -> list[str]:
    """Returns the next commands, with the advice if the cost of both can be counted."""
    from raslik_jax.incident import advising

    options = UnlearnOptions(run=str(found.workdir), mesh=mesh)
    if processes.count() == 1 and found.config.backbone.adapter:
        # Shapes may be unknown, and the memory of a device may be full.
        with contextlib.suppress(ValueError, OSError, RuntimeError):
            return [*advising.lines(options, is_short=True)]
    return [f"next: {making.line('unlearn', f'--run={found.workdir}')} --out=DIR"]


def make_config(options: TraceOptions) -> Config:
    """Returns the settings that options and presets describe."""
    workdir, own = pathlib.Path(options.workdir), dict(options.settings)
    if "," in (place := str(workdir.absolute())):  # of several files
        raise ValueError(f"--workdir must have no comma, got {shown(place, 120)}: rename it")
    given = {
        "backbone.checkpoint": options.checkpoint,
        "backbone.adapter": options.adapter,
        "corpus.records.train_file": options.train_file,
        "corpus.records.queries_file": str(workdir / artifacts.TRACED_QUERY.file),
        "retrieve.wished": options.wished,
    }
    given = {name: value for name, value in given.items() if value}
    needed = ("checkpoint", "train_file", "prompt", "workdir")
    if missing := [f"--{name}" for name in needed if not getattr(options, name).strip()]:
        raise ValueError(f"{' and '.join(missing)} must be given: see raslik help trace")
    if any(text and not text.strip() for text in (options.response, options.wished)):
        raise refused("blank_answer")
    if options.response:  # then no answer is needed
        given["sketch.query_output"] = "gold"
    if twice := [f"--{name}" for name in given if name in own]:
        raise refused("trace_settings", names=" and ".join(twice))
    has_base = options.adapter or "backbone.adapter" in own
    preset = PRESET if has_base or "unlearn.algorithms" in own else {**PRESET, **WHOLE}
    # The path may have any characters, and the escapes of some have a backslash again.
    name = one_line(workdir.absolute().name.replace("\\", "-")).replace("\\", "-").strip(". ")
    return making.changed(Config(), {**preset, "name": name or "incident", **own, **given})


def write_query(options: TraceOptions, config: Config) -> Callable[[], None]:
    """Writes the traced answer as a query, under the keys that the user's files have.

    Returns a function that undoes it.
    """
    own: Any = config.corpus.own
    path, keys = pathlib.Path(own.queries_file), parse_fields(own.fields)
    if artifacts.TRAIN.is_there(path.parent) and artifacts.CONFIG.is_there(path.parent):
        earlier = artifacts.CONFIG.read(path.parent)["corpus"]
        if earlier == to_json(config)["corpus"]:  # else the rows are read again
            check_hub_rows(config, path.parent)
    (row,) = making.first_rows(config, 1)
    if isinstance(row.content, Passage):
        if line := taught.unframed(making.first_rows(config, taught.FRAMED), options.prompt):
            print(line)
    if options.system.strip():
        _check_system(config, read_examples(own.train_file, fields=keys, format=own.format))
    elif isinstance(row.content, Conversation) and row.content.messages[0]["role"] == "system":
        print("the training rows have a system prompt, --prompt has none: give it as --system")
    asked = as_row(row, options.prompt, options.response, options.system)
    if options.input.strip():
        if row.content is not None:
            raise refused("input_of_others")
        asked["input"] = options.input
    query = {keys.get(name, name): value for name, value in asked.items()}
    text = json.dumps(query | {"split": "retrieval"}, ensure_ascii=False) + "\n"
    old = files.read_text(path) if path.is_file() else ""
    if old.split("\n", 1)[0].rstrip("\r") == text.rstrip("\n"):
        text = old  # further answers that the user wrote stay
    elif old and path.name not in written.places_of(path.parent):
        raise refused("trace_of_none", place=shown(str(path), 120))
    elif old and not options.update:
        raise refused("trace_of_another", place=shown(str(path.parent), 120))
    elif more := len(old.splitlines()[1:]):
        where = f"in {shown(str(path), 120)} that belong to the earlier trace"
        print(f"left out: {more} more answers {where}")
    restore = written.restorer(path.parent, path)
    written.write_bytes(path.parent, path, text.encode())
    return restore


def _check_system(config: Config, rows: Sequence[Example]) -> None:
    """Refuses a system prompt if the training rows are rendered without one."""
    from raslik_jax.data.tokens import prompts
    from raslik_jax.run import workspace  # it takes jax with it

    name = prompts.settle_template(config.corpus.template, lambda: rows)
    template = prompts.find_template(name, workspace.read_tokenizer(config))
    prompts.require_system(template, name)


def as_row(like: Example, prompt: str, response: str, system: str = "") -> dict[str, Any]:
    """Returns a prompt and its answer, if any, as a row in the rendering of a training row.

    It has the template options of that row, such as its tools.
    """
    answer, content, before = response, like.content, system if system.strip() else ""
    if content is None:
        row = {"instruction": prompt} | ({"output": answer} if answer else {})
        return row | ({"system": before} if before else {})
    if not isinstance(content, Conversation):
        if before:
            raise refused("system_of_texts")
        return {"prompt": prompt} | ({"completion": answer} if answer else {})
    turns = ("system", before), ("user", prompt), ("assistant", answer)
    messages = tuple({"role": role, "content": text} for role, text in turns if text)
    first = len(messages) - bool(answer) if content.first else 0
    talk = content._replace(messages=messages, first=first, muted=())
    record = as_record(Example("", "", "", "", content=talk))
    fields = ("messages", "prompt", "completion", "tools", "chat_template_kwargs")
    return {name: record[name] for name in fields if record.get(name)}


def _found_lines(found: TraceResult, top: int) -> Iterator[str]:
    """Yields the rows of the highest scores, and the use of those that were found or why none."""
    forget, held_out, root = found.forget, found.held_out, found.workdir
    has_scores = artifacts.INFLUENCE.current(root) is not None
    if has_scores:
        yield rows_lib.best_text(root, frozenset(row.example_id for row in forget), top)
    if held_out:
        path = artifacts.measured_rows(HELD_OUT, "target").place(root)
        yield f"kept out of the sets for measuring: {len(held_out)} rows, in {path}"
    if not found.finding:
        yield f"to forget: {len(forget)} rows, in {found.forget_file}"
    if has_scores:
        yield draw(found, len(forget) + len(held_out))
    if found.finding:
        yield textwrap.fill(f"finding: {found.finding}.", 96, break_on_hyphens=False)
        yield "no set of rows is written"


def draw(found: TraceResult, num_forget: int) -> str:
    """Draws the scores with the noise band and the cut; returns a line with the place.

    The band is the one by which the rule found the number of rows. If this was given, the band is
    computed from the scores. With 0 rows to forget it draws no cut.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return "picture: none, because matplotlib is not installed"
    from raslik_jax.report import drawing, figures

    root, retrieve = found.workdir, found.config.retrieve
    score_N = artifacts.INFLUENCE.read(root)
    is_ruled = retrieve.select == "gap" and not retrieve.num_forget
    cut = artifacts.CUT.current(root) if is_ruled else None
    try:
        middle, edge = (cut.middle, cut.edge) if cut else noise_band(score_N)
    except ValueError:  # too few rows to tell noise
        return f"picture: none, because {len(score_N)} rows are too few"
    figure = figures.draw_cut(score_N, num_forget=num_forget, middle=middle, edge=edge)
    write = functools.partial(written.write_bytes, root)
    return f"picture: {drawing.save_figure(figure, root / 'scores', write=write)[0]}"
