"""Numbers of trainings on their way to files and programs: in order, once, and never fatal."""

import json
import sys
import types

import pytest

from raslik_jax.run import live

_UNIT = "unlearn/raslik-ga"


def _lines(root):
    text = (root / "live" / "unlearn" / "raslik-ga.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_every_step_is_a_line_as_soon_as_it_is_written(tmp_path):
    with live.Live(tmp_path, _UNIT) as log:
        log.write(1, {"loss": 0.5})
        (line,) = _lines(tmp_path)
        assert line.pop("seconds") >= 0
        assert line == {"step": 1, "loss": 0.5}
        log.write(1, {"answer": "blue\n"})
    assert _lines(tmp_path)[1]["answer"] == "blue\n"


def test_a_training_that_goes_on_replaces_the_steps_that_it_repeats(tmp_path):
    with live.Live(tmp_path, _UNIT) as log:
        for step in (0, 1, 2, 3):
            log.write(step, {"loss": float(step)})
    path = tmp_path / "live" / "unlearn" / "raslik-ga.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "lo')  # a process was killed
    with live.Live(tmp_path, _UNIT) as log:
        log.write(2, {"loss": 20.0})
    assert [line["loss"] for line in _lines(tmp_path)] == [0.0, 1.0, 20.0]
    with live.Live(tmp_path, _UNIT) as log:
        log.write(1, {"loss": 10.0})
    assert [line["loss"] for line in _lines(tmp_path)] == [0.0, 10.0]


class _Recorder:
    """Stands for a package: records what is called, by name."""

    def __init__(self, calls, name=""):
        self._calls, self._name = calls, name

    def __getattr__(self, name):
        return _Recorder(self._calls, f"{self._name}.{name}" if self._name else name)

    def __call__(self, *arguments, **named):
        self._calls.append((self._name, arguments, named))
        return _Recorder(self._calls, self._name)


def test_tensorboard_is_handed_numbers_and_texts(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setitem(sys.modules, "tensorboardX", _Recorder(calls))
    with live.Live(tmp_path, _UNIT, ["tensorboard"]) as log:
        assert calls == []  # nothing is begun before there is something to show
        log.write(7, {"loss": 0.5})
        log.write(7, {"answer": "blue"})
    folder = str(tmp_path / "live" / "tensorboard" / "unlearn" / "raslik-ga")
    assert calls == [
        ("SummaryWriter", (folder,), {"purge_step": 7, "flush_secs": 5}),
        ("SummaryWriter.add_scalar", ("loss", 0.5, 7), {}),
        ("SummaryWriter.add_text", ("answer", "blue", 7), {}),
        ("SummaryWriter.close", (), {}),
    ]


@pytest.mark.parametrize("is_there", [False, True])
def test_a_program_that_fails_is_named_once_and_ends_no_training(
    tmp_path, monkeypatch, capsys, is_there
):
    closed = []

    class Board:
        def add_scalar(self, *arguments):
            raise RuntimeError("no disk")

        def close(self):
            closed.append(True)
            raise RuntimeError("no disk")

    found = types.SimpleNamespace(SummaryWriter=lambda *_, **__: Board()) if is_there else None
    monkeypatch.setitem(sys.modules, "tensorboardX", found)  # an import of None fails
    with live.Live(tmp_path, _UNIT, ["tensorboard"]) as log:
        log.write(1, {"loss": 0.5})
        log.write(2, {"loss": 0.4})
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("note: tensorboard fails (") and len(said) == 1 + is_there
    assert closed == [True] * is_there  # what it had begun is ended
    assert [line["step"] for line in _lines(tmp_path)] == [1, 2]
