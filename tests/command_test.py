"""What a command's end looks like: one sentence, and the status that belongs to it."""

import os
import pathlib
import subprocess
import sys

import pytest

_EXPERIMENTS = pathlib.Path(__file__).resolve().parents[1] / "experiments"
_SCRIPT = """
from raslik_jax import command

def main():
    {body}

command.start(main, when_stopped="stopped; go on")
"""


def end_of(body: str, *arguments: str, **environment: str) -> tuple[int, str]:
    """Exit status and stderr of a command of that body."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(body=body), *arguments],
        env=os.environ | {"PYTHONPATH": str(_EXPERIMENTS.parent)} | environment,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("pass", 0, ""),
        ("return 3", 3, ""),
        ("raise ValueError('a folder wanted')", 1, "error: a folder wanted\n"),
        ("raise FileNotFoundError('no file')", 1, "error: no file\n"),
        ("raise KeyboardInterrupt", 130, "stopped; go on\n"),
    ],
)
def test_statuses(body, status, said):
    assert end_of(body) == (status, said)


def test_what_is_no_flag_is_refused():
    status, said = end_of("print('never')", "name=value")
    assert status == 2
    assert said == "error: flags alone are wanted, got ['name=value']: write --name=value\n"


def test_a_defect_keeps_its_traceback():
    status, said = end_of("raise KeyError('x')")
    assert status == 1
    assert "Traceback" in said
    status, said = end_of("raise ValueError('a folder wanted')", RASLIK_TRACEBACK="1")
    assert status == 1
    assert "Traceback" in said


def test_every_script_is_such_a_command():
    scripts = {path.name: path.read_text() for path in _EXPERIMENTS.glob("*.py")}
    del scripts["torch_peer.py"]  # imported by bench_sketch.py
    assert [name for name, text in scripts.items() if "command.start(" not in text] == []
