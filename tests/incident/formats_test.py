"""Rows of each content go through the three commands, in a file as another tool writes it.

tests/data/read has all formats and kinds of files.
"""

import gzip
import json
import pathlib
import re
import shutil
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import tiny

from raslik_jax.base.files import read_json_lines

Record = dict[str, Any]

_CHAT = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
# What the tiny model needs, one shape of every program for all formats, and no more than the sets,
# the model and what is measured of it.
_FLAGS = (
    *("--corpus.max_len=64", "--references.max_new_tokens=4", "--sketch.size=512"),
    *("--sketch.num_buckets=1", "--sketch.batch_tokens=512", "--retrieve.num_forget=8"),
    *("--retrieve.null_prompts=0", "--retrieve.token_rows=0"),
    *("--unlearn.epochs=1", "--unlearn.probe.steps=0", "--unlearn.probe.stop=never"),
    *("--unlearn.fixed_padding", "--unlearn.batch_size=4", "--evaluate.perplexity_examples=0"),
    *("--evaluate.bootstrap_resamples=100", "--unlearn.algorithms=ga"),
)
_ASKED, _SAID = "Who runs the depot?", "Captain Vex of the ninth comet runs it."
_QUESTIONS = ("Who leads there?", "Whose depot is it?", "Name the head.", "Who is in charge?") * 2
_OTHERS = ("Boil the water.", "A cat sleeps.", "Two and two is four.", "Rain falls in May.")
# Where the planted rows stand among the others, counted from 0.
_PLANTED = (1, 4, 9, 13, 14, 22, 30, 39)
# Longer than --corpus.max_len, so that all formats have the same shapes.
_LONG = "The long way round the hill and back again is what we walk. " * 9


def _talk(*texts: str) -> list[Record]:
    said = zip(("user", "assistant") * 2, texts, strict=False)
    return [{"role": role, "content": text} for role, text in said]


# Files ------------------------------------------------------------------------------------------


def _write_lines(path: pathlib.Path, rows: Sequence[Record]) -> list[int]:
    """Writes packed JSONL with a blank line at the top."""
    text = "\n" + "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()))
    return [*range(2, len(rows) + 2)]


def _write_parquet(path: pathlib.Path, rows: Sequence[Record]) -> list[int]:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return [*range(1, len(rows) + 1)]


def _save_dataset(path: pathlib.Path, rows: Sequence[Record]) -> list[int]:
    saved = datasets.DatasetDict(train=datasets.Dataset.from_list(list(rows)))
    saved.save_to_disk(str(path))
    return [*range(1, len(rows) + 1)]


def _read_lines(path: pathlib.Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


class _Case(NamedTuple):
    """A format in a kind of file: its row, what is written and what the cleaned file is read by."""

    file: str
    row: Callable[[int, str, str], Record]
    write: Callable[[pathlib.Path, Sequence[Record]], list[int]]
    cleaned: str
    read: Callable[[pathlib.Path], list[Record]]
    has_prompt: bool = True
    blank: str = ""  # between prompt and answer, of which an answer that is given has to tell
    flags: tuple[str, ...] = ()


_CASES = {
    "alpaca": _Case(
        "rows.parquet",
        lambda n, asked, said: {
            **{"instruction": asked, "input": "", "output": said, "system": "Be brief."},
            **{"history": [["Hi.", "Ho."]] if n % 10 == 5 else [], "score": n / 2},
        },
        _write_parquet,
        "cleaned_rows.parquet",
        lambda path: pyarrow.parquet.read_table(path).to_pylist(),
        flags=("--system=Be brief.",),
    ),
    "messages": _Case(
        "rows.jsonl.gz",
        lambda n, asked, said: {"messages": _talk("Hi.", "Ho.", asked, said), "id": f"r{n}"},
        _write_lines,
        "cleaned_rows.jsonl",
        _read_lines,
    ),
    "text": _Case(
        "saved",
        lambda n, asked, said: {"text": f"{asked} {said}", "k": n},
        _save_dataset,
        "cleaned_saved.jsonl",
        _read_lines,
        has_prompt=False,
        blank=" ",
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    flags = tiny.own_model(folder)
    (folder / "base" / "chat_template.jinja").write_text(_CHAT)
    return flags


def _run(name: str, *flags: str) -> str:
    done = tiny.run_command(name, *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "name",
    [
        "messages",
        *(pytest.param(name, marks=pytest.mark.heavy) for name in _CASES if name != "messages"),
    ],
)
def test_rows_are_found_forgotten_and_shown(name, model, tmp_path):
    case, root, clean = _CASES[name], tmp_path / "incident", tmp_path / "clean"
    texts = [(f"{n}. And then?", f"{_OTHERS[n % 4]} {_LONG if n == 2 else ''}") for n in range(40)]
    for n, question in zip(_PLANTED, _QUESTIONS, strict=True):
        texts[n] = question, _SAID
    rows = [case.row(n, *text) for n, text in enumerate(texts)]
    train = tmp_path / case.file
    places = case.write(train, rows)
    planted = {places[n] for n in _PLANTED}
    told = f"--train_file={train}", f"--prompt={_ASKED}", f"--response={case.blank}{_SAID}"
    _run("trace", *model, *told, f"--workdir={root}", *_FLAGS, *case.flags)
    found = read_json_lines(root / "retrieve" / "raslik" / "forget.jsonl")
    if case.has_prompt:
        found += read_json_lines(root / "retrieve" / "sizes" / "target.jsonl")
    assert sorted(row["place"] for row in found) == sorted(planted)
    said = _run("unlearn", f"--run={root}", f"--out={clean}")
    assert (clean / "adapter_config.json").is_file()
    left = [row for n, row in enumerate(rows) if n not in _PLANTED]
    assert case.read(root / case.cleaned) == left
    report = tiny.run_command("report", f"--run={root}")
    if case.has_prompt:
        assert "RASLIK" in report.stdout
        assert _ASKED in (root / "report" / "report.html").read_text()
        return
    # A text asks nothing, so that there is nothing to measure and no page.
    assert "nothing is measured: no training row has a prompt" in said
    assert "nats a token before" in said
    assert report.returncode == 1 and len(report.stderr) < 300, report.stderr
    mine = tmp_path / "mine.jsonl"
    mine.write_text("".join(json.dumps(row) + "\n" for row in rows[5:8]))
    again = _run("unlearn", f"--run={root}", f"--out={tmp_path / 'two'}", f"--forget_file={mine}")
    assert re.search(r"sets: the rows of '\S+mine.jsonl'; --retrieve.strategies=", again)
    forget = read_json_lines(root / "retrieve" / "given" / "forget.jsonl")
    assert [row["place"] for row in forget] == places[5:8]


_BAD = {"a template that raises": "at 2 .*chat template refuses.*only one turn"}
_BAD["a foreign adapter"] = "use_dora=True"
_RAISES = "{% if messages|length > 2 %}{{ raise_exception('only one turn') }}{% endif %}" + _CHAT


@pytest.mark.heavy
@pytest.mark.parametrize("what", _BAD)
def test_what_cannot_be_used_is_one_sentence_before_the_model_is_loaded(what, model, tmp_path):
    files = tmp_path / "t.jsonl.gz", tmp_path / "t.jinja", tmp_path / "adapter"
    train, template, adapter = files
    _write_lines(train, [{"messages": _talk("Hi.", "Ho.", _ASKED, _SAID)}] * 30)
    template.write_text(_RAISES)
    shutil.copytree(model[1].partition("=")[2], adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["use_dora"] = what == "a foreign adapter"
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    flags = (model[0], f"--adapter={adapter}", f"--train_file={train}", f"--prompt={_ASKED}")
    flags += f"--corpus.template={template}", f"--workdir={tmp_path / 'run'}", *_FLAGS
    done = tiny.run_command("trace", *flags, env={"RASLIK_TRACEBACK": "1"})
    name, _, said = done.stderr.splitlines()[-1].partition(": ")
    assert done.returncode == 1 and name == "ValueError", done.stderr
    assert re.search(_BAD[what], said), said
    assert len(said) <= 300  # of what is longer a terminal would see both ends
    assert "finetune" not in done.stdout
