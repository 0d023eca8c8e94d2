"""The programs in PyTorch run on a tiny model, and every key of their lines is documented."""

import ast
import pathlib
import re

import pytest

from experiments.studies.gpu import peers

_TINY = ["--model=olmo2-tiny", "--rows=2", "--batched_rows=2", "--prompts=3", "--batch_size=2"]
_TINY += ["--new_tokens=2", "--size=512", "--batch_tokens=128"]


def test_stages_are_checked_before_anything_is_loaded(capsys):
    with pytest.raises(SystemExit):
        peers.parse(["--stages=loop,all"])
    assert "stages must be of decode, loop, bergson, dattri, dattri_llm, got all" in (
        capsys.readouterr().err
    )


@pytest.mark.heavy
def test_a_tiny_model_is_measured_and_a_stage_that_fails_stops_no_other(monkeypatch, capsys):
    for name in ("torch", "transformers", "peft"):
        pytest.importorskip(name)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native")

    def fail(*_):
        raise RuntimeError("no memory")

    monkeypatch.setitem(peers.PROGRAMS, "bergson", peers.Program(fail))
    options = peers.parse([*_TINY, "--stages=decode,bergson,loop"])
    setup, decode, bergson, loop = peers.measure(options)
    text = ast.get_docstring(ast.parse(pathlib.Path(peers.__file__).read_text()))
    for line in (setup, decode, loop):
        for key in line.keys() - vars(options).keys() - {"stage"}:
            assert re.search(rf"\b{key}\b", text), key
        assert re.search(rf"\b{line['stage']}\b", text)
    assert (decode["prompts"], loop["rows"], setup["model"]) == (3, 2, "olmo2-tiny")
    assert decode["tokens_per_s"] > 0 < loop["rows_per_s"] < loop["tokens_per_s"]
    assert 0.9 < loop["nonzero"] <= 1
    error = {"stage": "bergson", "error": "RuntimeError: no memory", "batch_tokens": 128}
    assert bergson == error
    assert "drawing the weights of olmo2-tiny" in capsys.readouterr().err
