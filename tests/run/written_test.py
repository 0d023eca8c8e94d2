"""What a run wrote for its user: written again while it is as it was, and left alone otherwise."""

import contextlib
import errno
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys

import pytest
from snapshots import said

from raslik_jax.base import files
from raslik_jax.run import written


@pytest.fixture
def root(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def _write(root, place, text):
    with written.replacing(root, place) as made:
        made.mkdir()
        (made / "weights").write_text(text)


def test_a_folder_is_the_runs_own_until_somebody_changes_it(root, tmp_path):
    place = tmp_path / "new" / "clean"
    written.check_folder(root, place)
    for text in ("first", "second", "second"):
        _write(root, place, text)
        written.check_folder(root, place)
        assert (place / "weights").read_text() == text
        assert [path.name for path in place.parent.iterdir()] == ["clean"]


@pytest.mark.parametrize("name", ["weights", "mine", ".git"])
def test_a_folder_that_somebody_changed_is_theirs(root, tmp_path, name):
    _write(root, tmp_path / "clean", "first")
    (tmp_path / "clean" / name).write_text("mine")
    with pytest.raises(ValueError, match="clean' must be a new or empty directory"):
        written.check_folder(root, tmp_path / "clean")
    shutil.rmtree(tmp_path / "clean")
    written.check_folder(root, tmp_path / "clean")


def test_what_was_made_elsewhere_is_not_the_runs_own(root, tmp_path):
    _write(root, tmp_path / "clean", "x")
    shutil.copytree(tmp_path / "clean", tmp_path / "other")
    (tmp_path / "link").symlink_to(tmp_path / "clean")
    (tmp_path / "file").write_text("x")
    for name in ("other", "link", "file"):
        with pytest.raises(ValueError, match=f"{name}' must be a new or empty directory"):
            written.check_folder(root, tmp_path / name)
    with pytest.raises(ValueError, match="clean' exists"):
        written.check_file(root, tmp_path / "clean", "--file")
    with pytest.raises(ValueError, match="clean' must be a new or empty directory"):
        written.check_folder(tmp_path / "another run", tmp_path / "clean")


def test_a_file_is_the_runs_own_until_somebody_changes_it(root):
    place = root / "rows.jsonl"
    for text in ("first", "second"):
        written.check_file(root, place, "--file")
        with written.replacing(root, place) as made:
            made.write_text(text)
    moved = root.rename(root.with_name("moved"))
    written.check_file(moved, moved / "rows.jsonl", "--file")
    (moved / "rows.jsonl").write_text("mine")
    with pytest.raises(ValueError, match="--file must name a new file, .*rows.jsonl' exists"):
        written.check_file(moved, moved / "rows.jsonl", "--file")


@pytest.mark.parametrize(
    ("stops_at", "left"),
    [("files.write_json", "first"), ("os.replace", "first"), ("files.sync", "second")],
)
def test_wherever_it_is_stopped_the_place_is_the_runs_own(
    root, tmp_path, monkeypatch, stops_at, left
):
    place, (module, name) = tmp_path / "clean", stops_at.split(".")
    stopped = getattr(written, module)
    unharmed = getattr(stopped, name)

    def stop(*args):
        if args[0] in (root / "written.json", place, place.parent):  # not within another function
            raise KeyboardInterrupt
        return unharmed(*args)

    _write(root, place, "first")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(stopped, name, stop)
        _write(root, place, "second")
    written.check_folder(root, place)
    assert (place / "weights").read_text() == left
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clean", "run"]


def test_a_place_that_cannot_be_written_is_named(root, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="/file/clean' cannot be written .File exists.: free"):
        _write(root, tmp_path / "file" / "clean", "x")

    def mounted(*args):
        raise OSError(errno.EBUSY, "Device or resource busy", *args)

    (tmp_path / "clean").mkdir()
    monkeypatch.setattr(written.os, "replace", mounted)
    monkeypatch.setattr(written.files, "write_json", lambda *args: None)
    with pytest.raises(OSError, match="^'.*/clean' cannot be written .Device or resource busy."):
        _write(root, tmp_path / "clean", "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clean", "file", "run"]


def test_the_directory_that_one_is_in_is_refused(root, tmp_path, monkeypatch):
    (tmp_path / "clean").mkdir()
    _write(root, tmp_path / "own", "of this run")
    written.check_folder(root, tmp_path / "own")
    for name, must in (("clean", "not be the directory that the command is"), ("own", "be a new")):
        monkeypatch.chdir(tmp_path / name)
        for here in (".", f"../{name}"):
            with pytest.raises(ValueError, match=f"must {must}"):
                written.check_folder(root, pathlib.Path(here))


@pytest.mark.parametrize("is_folder", [True, False])
def test_what_comes_to_lie_there_while_it_is_made_is_kept(root, tmp_path, is_folder):
    place = tmp_path / "clean"
    written.check_folder(root, place)
    must = "must be a new or empty directory" if is_folder else "must name a new file"
    with pytest.raises(ValueError, match=must), written.replacing(root, place) as made:
        if is_folder:
            _write(tmp_path, place, "of another run")
            made.mkdir()
        else:
            place.write_text("mine")
            made.write_text("")
    left = place / "weights" if is_folder else place
    assert left.read_text() == ("of another run" if is_folder else "mine")


def _files_of(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_what_dead_processes_left_is_cleared_and_nothing_else(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host = socket.gethostname()
    kept = [
        f".clean.{host}.{os.getppid()}-0.partial",
        f".clean.{host}x.{dead.pid}-0.partial",
        f".other.{host}.{dead.pid}-0.partial",
        f"clean.{host}.{dead.pid}-0.partial",
        ".clean.partial",
    ]
    for name in (*kept, f".clean.{host}.{dead.pid}-0.partial"):
        (tmp_path / name).write_text("half")
    (tmp_path / f".clean.{host}.{dead.pid}-1.partial" / "clean").mkdir(parents=True)
    written.check_folder(tmp_path, tmp_path / "clean")
    assert sorted(_files_of(tmp_path)) == sorted(kept)
    files.write_text(tmp_path / "other", "whole")
    kept[2] = "other"
    assert sorted(_files_of(tmp_path)) == sorted(kept)


_KILLED = """
import os, pathlib, signal, sys
from raslik_jax.base import files
from raslik_jax.models import storage
from raslik_jax.run import written
root, place, step = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
def kill(*args): os.kill(os.getpid(), signal.SIGKILL)
with written.replacing(root, place) as made:
    with storage.new_folder(made) as partial:
        (partial / "weights").write_text("new")
        if step == "within": kill()
    if step == "before": kill()
    if step == "record": files.write_json = kill
    real = os.replace
    if step == "replace": os.replace = lambda a, b: kill() if b == place else real(a, b)
files.sync = kill
"""


@pytest.mark.parametrize("step", ["within", "before", "record", "replace"])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_kill_of_an_export_leaves_the_old_one_and_nothing_after_the_next(
    root, tmp_path, step, is_there
):
    place = tmp_path / "clean"
    if is_there:
        _write(root, place, "old")
    arguments = [sys.executable, "-c", _KILLED, str(root), str(place), step]
    assert subprocess.run(arguments).returncode == -signal.SIGKILL
    # Between two renames neither is in the place.
    is_between = is_there and step == "replace"
    assert written.verify(root) == ([f"{place}: missing"] if is_between else [])
    left = {path.name for path in tmp_path.iterdir()} - {"run", "clean"}
    assert len(left) == 1
    if is_there and not is_between:
        assert (place / "weights").read_text() == "old"
    written.check_folder(root, place)
    _write(root, place, "new")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "clean"}
    assert written.verify(root) == []


def test_verify_names_every_file_that_is_not_as_it_was_written(root, tmp_path):
    places = [tmp_path / "elsewhere" / "clean", root / "cleaned.jsonl", root / "config.json"]
    _write(root, places[0], "weights")
    with written.replacing(root, places[1]) as made:
        made.write_text("rows")
    written.write_json(root, places[2], {"seed": 0})
    assert written.verify(root) == []
    (places[0] / "weights").write_text("weight5")
    places[2].write_text('{"seed": 1}')
    (places[0] / "mine").write_text("")
    found = written.verify(root)
    names = [f"{places[0]}/{name}" for name in ("weights", "mine")]
    assert [line.partition(":")[0] for line in found] == [*names, "config.json"]
    shutil.rmtree(places[0])
    places[1].unlink()
    found = written.verify(root)
    names = [line.partition(":")[0] for line in found]
    assert names == [str(places[0]), "cleaned.jsonl", "config.json"]
    written.write_json(root, places[2], {"seed": 0})
    _write(root, places[0], "weights")
    written.forget(root, places[1])
    assert written.verify(root) == []


@pytest.mark.parametrize("stops_at", ["files.write_json", "files.write_bytes", "os.replace"])
def test_wherever_it_is_stopped_verify_finds_no_damage(root, tmp_path, monkeypatch, stops_at):
    module, name = stops_at.split(".")
    stopped = getattr(written, module)
    unharmed = getattr(stopped, name)

    def stop(*args):
        if args[0] == root / "written.json" and name == "write_json":
            raise KeyboardInterrupt
        if args[0] in (root / "config.json", tmp_path / "clean"):
            raise KeyboardInterrupt
        return unharmed(*args)

    for second in (False, True):
        with monkeypatch.context() as patch:
            if second:
                patch.setattr(stopped, name, stop)
            for write in (
                lambda: _write(root, tmp_path / "clean", f"weights {second}"),  # noqa: B023
                lambda: written.write_json(root, root / "config.json", second),  # noqa: B023
            ):
                with contextlib.suppress(KeyboardInterrupt):
                    write()
        assert written.verify(root) == []


def test_a_place_among_results_of_a_run_is_refused(root, tmp_path, monkeypatch):
    files.write_json(root / "config.json", {"corpus": {}, "unlearn": {}})
    for name, manifest in (
        ("shared/12ab", {"key": "", "outputs": {}}),
        ("index", {"index_format": 1}),
    ):
        (tmp_path / name).mkdir(parents=True)
        files.write_json(tmp_path / name / "manifest.json", manifest)
    files.write_json(tmp_path / "manifest.json", {"name": "an extension of a browser"})
    _write(root, tmp_path / "clean", "weights")
    (tmp_path / "link").symlink_to(root / "retrieve")
    for place in (
        *("run/sketch", "run/sketch/int8", "run/report/new", "run/.making/x", "run/rows/x"),
        *("shared/12ab/x", "index/copy", "clean/x", "link/x", "run/../run/unlearn/a/b"),
    ):
        with pytest.raises(ValueError, match="--out"):
            written.check_outside(tmp_path / place, "--out", root)
    with pytest.raises(ValueError, match="--out"):
        written.check_outside("http://127.0.0.1/x", "--out", root)
    for place in ("clean", "run/clean", "run", "other/sketch", "shared/x", "run/left.jsonl"):
        written.check_outside(tmp_path / place, "--out", root)
    _write(root, root / "new", "weights")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="--out"):
        written.check_outside("run/new/x", "--out", pathlib.Path("run"))


def test_verify_names_a_lost_manifest(root):
    for name in ("sketch/index/manifest.json", "corpus/train.jsonl"):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text("{}")
    said("\n".join(written.verify_run(root)))
