"""The program `raslik`: its help, its version, names of commands and flags, paths."""

import pathlib
import sys

import pytest
from absl import flags

import raslik_jax
from raslik_jax.cli import main, setting_flags
from raslik_jax.config import Config, to_json
from raslik_jax.incident import making
from raslik_jax.models.storage import resolve_folder


@pytest.fixture
def started(monkeypatch):
    """What is started, in place of commands."""
    found = []
    monkeypatch.setattr(main, "start", lambda name: found.append((name, *sys.argv[1:])))
    return found


def _call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [*arguments])
    return main.main()


@pytest.mark.parametrize("arguments", [("--help",), ("-h",), ("help",)])
def test_help_names_the_commands(monkeypatch, capsys, arguments):
    assert _call(monkeypatch, "raslik", *arguments) == 0
    said = capsys.readouterr()
    assert "retrain" in said.out and said.err == ""


@pytest.mark.parametrize("name", ["version", "--version"])
def test_the_version_is_the_one_of_the_package(monkeypatch, capsys, name):
    assert _call(monkeypatch, "raslik", name) == 0
    assert capsys.readouterr().out == f"raslik {raslik_jax.__version__}\n"


def test_help_of_a_command_is_that_command_with_help(monkeypatch, started):
    _call(monkeypatch, "raslik", "help", "trace")
    _call(monkeypatch, "raslik", "retrain", "--run=x")
    assert started == [("trace", "--help"), ("retrain", "--run=x")]


@pytest.mark.parametrize(("name", "near"), [("trce", "trace"), ("unlern", "unlearn"), ("", "none")])
def test_an_unknown_command_is_named_with_near_ones(monkeypatch, capsys, name, near):
    assert _call(monkeypatch, "raslik", *filter(None, [name])) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and near in error and (not name or repr(name) in error)


def test_next_steps_name_the_program_that_was_called(monkeypatch, started):
    for called, line in (
        ("raslik", "raslik unlearn --run=x"),
        ("/no/where/raslik_jax/cli/main.py", "raslik unlearn --run=x"),
        ("../no/where/raslik", "../no/where/raslik unlearn --run=x"),
        ("a checkout/raslik.py", "python 'a checkout/raslik.py' unlearn --run=x"),
    ):
        monkeypatch.setattr(making, "PROGRAM", _Program())
        _call(monkeypatch, called, "trace")
        assert making.line("unlearn", "--run=x") == line


class _Program:
    """A context variable of this test alone."""

    def set(self, value):
        self.get = lambda: value


def _settings(*arguments):
    return to_json(setting_flags.parse_config(arguments))


def test_flags_take_hyphens_in_all_their_names_in_flag_files_too(tmp_path):
    file = tmp_path / "some.flags"
    file.write_text("--no-retrieve.center\n--unlearn.ga-gdr.learning-rate=1e-2\n")
    hyphens = "--sketch.gradient-at=initial", "--sketch.num-buckets", "3", f"--flagfile={file}"
    plain = "--sketch.gradient_at=initial", "--sketch.num_buckets=3", "--noretrieve.center"
    assert _settings(*hyphens) == _settings(*plain, "--unlearn.ga_gdr.learning_rate=1e-2")
    # A value keeps its hyphens, one that looks like a flag too.
    assert _settings("--name", "--no-such-name")["name"] == "--no-such-name"
    with pytest.raises(ValueError, match="no-such"):
        _settings("--no-such=1")
    with pytest.raises(ValueError, match="other.flags"):
        _settings(f"--flagfile={tmp_path}/other.flags")


@pytest.mark.parametrize(("flag", "value"), [("seed", "x"), ("sketch.size", "1e3")])
def test_what_is_no_number_is_named_with_its_flag(flag, value):
    with pytest.raises(ValueError, match=f"--{flag}={value}.*integer"):
        _settings(f"--{flag}={value}")


def test_paths_of_settings_are_absolute_and_names_of_the_hub_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "model").mkdir(parents=True)
    (tmp_path / "template.jinja").write_text("{{ messages }}")
    values = flags.FlagValues()
    setting_flags.define(Config(), values)
    given = {
        "backbone.checkpoint": ("own/model", f"{tmp_path}/own/model"),
        "backbone.adapter": ("owner/adapter", "owner/adapter"),
        "corpus.dataset": ("records", "records"),
        "corpus.template": ("template.jinja", f"{tmp_path}/template.jinja"),
        "corpus.records.train_file": ("hub:owner/rows", "hub:owner/rows"),
        "corpus.records.queries_file": ("runs/queries.jsonl", f"{tmp_path}/runs/queries.jsonl"),
        "evaluate.marker_words": ("../words.txt", f"{tmp_path.parent}/words.txt"),
    }
    values(["raslik", *(f"--{name}={value}" for name, (value, _) in given.items())])
    stored = to_json(setting_flags.read(Config(), values))
    found = {name: _pick(stored, name) for name in given}
    assert found == {name: expected for name, (_, expected) in given.items()}
    assert _pick(_settings("--corpus.template=alpaca"), "corpus.template") == "alpaca"


def _pick(stored, name):
    for part in name.split("."):
        stored = stored[part]
    return stored


@pytest.mark.parametrize("name", ["../nosuch", "./nosuch", "/no/such", ".hidden/x"])
def test_a_path_that_is_not_there_is_no_name_of_the_hub(name):
    with pytest.raises(ValueError, match=pathlib.PurePath(name).name + ".* not there"):
        resolve_folder(name)
