"""Numbers of trainings on their way to files and programs: in order, once, and never fatal."""

import json
import sys
import types

import pytest

from raslik_jax.run import live


def _place(root):
    return live.Place(root, "mine", "unlearn/raslik-ga", {"seed": 0})


def _lines(root):
    text = (root / "live" / "unlearn" / "raslik-ga.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_every_step_is_a_line_as_soon_as_it_is_written(tmp_path):
    with live.Live(_place(tmp_path)) as log:
        log.write(1, {"loss": 0.5})
        (line,) = _lines(tmp_path)
        assert line.pop("seconds") >= 0
        assert line == {"step": 1, "loss": 0.5}
        log.write(1, {"answer": "blue\n"})
    assert _lines(tmp_path)[1]["answer"] == "blue\n"


def test_a_training_that_goes_on_replaces_the_steps_that_it_repeats(tmp_path):
    with live.Live(_place(tmp_path)) as log:
        for step in (0, 1, 2, 3):
            log.write(step, {"loss": float(step)})
    path = tmp_path / "live" / "unlearn" / "raslik-ga.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "lo')  # a process was killed
    with live.Live(_place(tmp_path)) as log:
        log.write(2, {"loss": 20.0})
    assert [line["loss"] for line in _lines(tmp_path)] == [0.0, 1.0, 20.0]
    with live.Live(_place(tmp_path)) as log:
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


_EXPECTED = {
    "tensorboard": [
        ("SummaryWriter.add_scalar", ("loss", 0.5, 7), {}),
        ("SummaryWriter.add_text", ("answer", "blue", 7), {}),
        ("SummaryWriter.close", (), {}),
    ],
    "wandb": [("init.log", ({"loss": 0.5},), {"step": 7}), ("init.finish", (), {})],
    "mlflow": [("log_metrics", ({"loss": 0.5},), {"step": 7}), ("end_run", (), {})],
    "trackio": [("log", ({"loss": 0.5},), {"step": 7}), ("finish", (), {})],
}


@pytest.mark.parametrize("name", live.WRITERS)
def test_each_program_is_handed_the_numbers_in_its_own_way(tmp_path, monkeypatch, name):
    calls = []
    monkeypatch.setitem(sys.modules, live.WRITERS[name].module, _Recorder(calls))
    with live.Live(_place(tmp_path), [name]) as log:
        assert calls == []  # nothing is begun before there is something to show
        log.write(7, {"loss": 0.5})
        log.write(7, {"answer": "blue"})
    begun = len(calls) - len(_EXPECTED[name])
    assert calls[begun:] == _EXPECTED[name]
    named = {key: value for _, _, given in calls[:begun] for key, value in given.items()}
    if name == "tensorboard":
        assert calls[0][1] == (str(tmp_path / "live" / "tensorboard" / "unlearn" / "raslik-ga"),)
        assert named["purge_step"] == 7
    else:
        assert "unlearn/raslik-ga" in named.values()


def test_a_program_that_fails_is_named_once_and_ends_no_training(tmp_path, monkeypatch, capsys):
    closed = []

    def fail(*arguments, **named):
        raise RuntimeError("no network")

    def finish():
        closed.append(True)
        fail()

    failing = types.SimpleNamespace(init=lambda **_: None, log=fail, finish=finish)
    monkeypatch.setitem(sys.modules, "trackio", failing)
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import of it fails
    with live.Live(_place(tmp_path), ["wandb", "trackio"]) as log:
        log.write(1, {"loss": 0.5})
        log.write(2, {"loss": 0.4})
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" fails")[0] for line in said] == [
        "note: Weights & Biases",
        "note: Trackio",
    ]
    assert "RuntimeError: no network" in said[1]
    assert closed == [True]  # what it had begun is ended
    assert [line["step"] for line in _lines(tmp_path)] == [1, 2]


def test_every_writer_names_a_module_and_is_asked_for_by_name():
    assert set(_EXPECTED) == set(live.WRITERS)
    with pytest.raises(KeyError):
        live.Live(_place(None), ["prometheus"])
