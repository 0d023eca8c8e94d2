"""The measurement of an incident: its rows, and commands that the product has."""

import ast
import pathlib
import re
from types import SimpleNamespace

import pytest

from experiments.gpu import incident
from raslik_jax.cli import main, setting_flags
from raslik_jax.incident.configuring import UnlearnOptions
from raslik_jax.incident.export import ExportOptions
from raslik_jax.incident.trace import TraceOptions

_OPTIONS = {"trace": TraceOptions, "unlearn": UnlearnOptions, "export": ExportOptions}


@pytest.mark.parametrize("found", [0, 3])
def test_its_commands_and_their_flags_are_the_products(monkeypatch, tmp_path, found):
    calls = {}

    def run(options, stage, *arguments):
        calls[stage] = arguments
        return {"stage": stage, "status": 0, "seconds": 1.0}

    done = SimpleNamespace(returncode=0)
    monkeypatch.setattr(incident, "run", run)
    monkeypatch.setattr(incident, "trace_line", lambda *_: {"found": found})
    monkeypatch.setattr(incident.subprocess, "run", lambda _: done)
    options = incident.Options(workdir=str(tmp_path), rows=100, targets=8)
    lines = [*incident.measure(options)]
    assert [line["stage"] for line in lines] == [
        *("inputs", "index", "trace", "unlearn", "export", "report", "summary")
    ]
    assert lines[-1]["within"]
    assert lines[3]["given"] == (not found)
    assert (tmp_path / "forget.jsonl").is_file() == (not found)
    settings = {leaf.name for leaf in setting_flags.of_config(None)}
    for name, *flags in calls.values():
        assert name in main.COMMANDS
        if name in _OPTIONS:
            known = settings | set(_OPTIONS[name].__dataclass_fields__)
            assert {flag[2:].partition("=")[0] for flag in flags} <= known


def test_targets_have_the_odd_answer_and_other_rows_have_not():
    rows = incident.make_corpus(incident.Options(rows=100, targets=8)).train
    assert [row.is_target for row in rows].count(True) == 8
    assert all((row.output == incident._ODD) == row.is_target for row in rows)


def test_a_command_that_fails_is_measured_too(tmp_path):
    options = incident.Options(workdir=str(tmp_path))
    line = incident.run(options, "trace", "trace")
    assert line["status"] == 1
    assert line["units"] == {}
    assert "must be given" in (tmp_path / "logs" / "trace.log").read_text()
    text = ast.get_docstring(ast.parse(pathlib.Path(incident.__file__).read_text()))
    assert all(re.search(rf"\b{key}\b", text) for key in line)
