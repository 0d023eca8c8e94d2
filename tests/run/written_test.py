"""What a run wrote for its user: written again while it is as it was, and left alone otherwise."""

import errno
import pathlib
import shutil

import pytest

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
    with pytest.raises(ValueError, match="clean' is there already"):
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
    with pytest.raises(ValueError, match="--file must name a new file, .*rows.jsonl' is there"):
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
    monkeypatch.chdir(tmp_path / "clean")
    for name in (".", "../clean"):
        with pytest.raises(ValueError, match="must not be the directory that the command is start"):
            written.check_folder(root, pathlib.Path(name))


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
