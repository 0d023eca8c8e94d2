"""Numbers of trainings on their way to files: in order, once, and never fatal."""

import json

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


def test_lines_that_cannot_be_written_are_named_once_and_end_no_training(tmp_path, capsys):
    (tmp_path / "live").write_text("a file in place of the folder")
    with live.Live(tmp_path, _UNIT) as log:
        log.write(1, {"loss": 0.5})
        log.write(2, {"loss": 0.4})
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("note: raslik-ga.jsonl is not written (")
