"""How stages are run and repeated: modules that are missing, flags that repeat a run, options."""

import pathlib
from types import SimpleNamespace

import numpy as np
import pytest

from raslik_jax.cli import setting_flags
from raslik_jax.config import Config
from raslik_jax.incident import making
from raslik_jax.incident.configuring import PRESET
from raslik_jax.incident.trace import TraceOptions
from raslik_jax.incident.validate import ValidateOptions


def test_a_missing_extra_is_named_with_what_installs_it(monkeypatch):
    making.require("matplotlib", "rouge_score")
    monkeypatch.setattr(making.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"matplotlib and rouge_score must be .*'raslik-jax\[eval\]'$"
    ):
        making.require("matplotlib", "rouge_score")


def test_the_flags_of_a_run_give_its_settings_again():
    given = {**PRESET, "retrieve.center": False, "sketch.size": 4096, "evaluate.robustness": ()}
    given |= {"backbone.checkpoint": "some/model", "backbone.adapter": "/a"}
    given |= {f"corpus.records.{name}_file": pathlib.Path(name) for name in ("train", "queries")}
    config = making.changed(Config(), given)
    lines = list(making.flag_lines(config))
    assert (
        "--noretrieve.center" in lines
        and f"--corpus.records.train_file={pathlib.Path.cwd()}/train" in lines
    )
    assert setting_flags.parse_config(lines) == config


@pytest.mark.parametrize("text", ["a\n\nb", "a\n# b", "a\n--seed=7", " a ", 'json:"a"', "json: a"])
def test_a_text_of_several_lines_is_one_flag(text, tmp_path):
    config = making.changed(Config(), {"retrieve.wished": text})
    file = tmp_path / "run.flags"
    file.write_text("\n".join(making.flag_lines(config)))
    assert setting_flags.parse_config([f"--flagfile={file}"]) == config


def test_options_take_paths_and_refuse_what_is_none():
    assert making.options_of(TraceOptions(), {"workdir": pathlib.Path("x")}).workdir == "x"
    given = {"scores": [pathlib.Path("a.npy"), "b.npy"], "settings": {"seed": np.int64(3)}}
    found = making.options_of(ValidateOptions(), given)
    assert (found.scores, dict(found.settings)) == (("a.npy", "b.npy"), {"seed": 3})
    for wrong in (np.array([1, 2]), SimpleNamespace(ndim=2)):
        with pytest.raises(ValueError, match="^--train_file must be text, got"):
            making.options_of(TraceOptions(), {"train_file": wrong})
    with pytest.raises(TypeError, match="reponse"):
        making.options_of(TraceOptions(), {"reponse": "x"})
