"""What a command's end looks like: one sentence, and the status that belongs to it."""

import dataclasses
import os
import pathlib
import platform
import signal
import subprocess
import sys
import time

import pytest
from absl import flags

from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command, setting_flags

_EXPERIMENTS = pathlib.Path(__file__).resolve().parents[2] / "experiments"
_STUDIES = _EXPERIMENTS / "studies"
# Seconds until a command counts as one that does not end.
_PATIENCE = 120
_SCRIPT = """
from raslik_jax.cli import command

def main():
    {body}

command.start(main, when_stopped="stopped; go on")
"""


def ended(body: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command of that body, after its end."""
    return subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(body=body), *arguments],
        env=os.environ | {"PYTHONPATH": str(_EXPERIMENTS.parent)} | environment,
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
    )


def end_of(body: str, *arguments: str, **environment: str) -> tuple[int, str]:
    """Exit status and stderr of a command of that body."""
    done = ended(body, *arguments, **environment)
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


def test_errors_of_the_system_name_their_file_and_arguments_are_utf8(tmp_path):
    status, said = end_of(f"open({str(tmp_path / 'no' / 'file')!r})")
    assert status == 1 and said.startswith(f"error: '{tmp_path}/no/file' cannot be used (No such")
    status, said = end_of("raise MemoryError('Unable to allocate 7 TiB')")
    assert status == 1 and said.startswith("error: the memory is too small (Unable to allocate")
    status, said = end_of("raise MemoryError")
    assert status == 1 and said.startswith("error: the memory is too small: lower the batch sizes")
    full = "raise RuntimeError('RESOURCE_EXHAUSTED: Out of memory while trying to allocate 7 TiB')"
    status, said = end_of(full)
    assert status == 1 and said.startswith("error: the memory is too small (Out of memory while")
    status, said = end_of("raise RuntimeError(\"Unable to initialize backend 'cuda'\")")
    assert status == 1 and said.endswith("correct JAX_PLATFORMS, or the installation\n")
    status, said = end_of("raise RuntimeError('a defect')")
    assert status == 1 and "Traceback" in said
    status, said = end_of("pass", "--prompt=\udcff")
    assert status == 2 and said.startswith(r"error: arguments must be UTF-8 text, got '--prompt=")


def test_a_closed_pipe_stops_a_command_as_a_signal_does():
    body = "[print('a' * 9999, flush=True) for _ in range(99)]"
    piped = ["sh", "-c", '"$@" | head -c 1', "sh", sys.executable, "-c", _SCRIPT.format(body=body)]
    done = subprocess.run(
        piped,
        env=os.environ | {"PYTHONPATH": str(_EXPERIMENTS.parent)},
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
    )
    assert (done.stdout, done.stderr) == ("a", "stopped; go on\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("work", "count"),
    [
        ("import time; time.sleep(10**6)", 1),
        # As XLA compiles: Python's handlers do not run until it returns.
        ("import hashlib; hashlib.pbkdf2_hmac('sha256', b'a', b'b', 10**9)", 2),
    ],
)
def test_a_signal_stops_a_command_and_a_second_one_at_any_moment(number, work, count):
    process = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT.format(body=f"print('ready', flush=True); {work}")],
        env=os.environ | {"PYTHONPATH": str(_EXPERIMENTS.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    for _ in range(count):
        process.send_signal(number)
        time.sleep(0.2)  # two signals at once are one
    _, said = process.communicate(timeout=_PATIENCE)
    assert (process.returncode, said) == (130, "stopped; go on\n")


def test_a_signal_in_a_callback_of_the_garbage_collector_is_not_lost():
    body = """
    import gc, os, signal, time
    def _xla_gc_callback(*args):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
    gc.callbacks.append(_xla_gc_callback)
    gc.collect()
    time.sleep(10**6)"""
    assert end_of(body) == (130, "stopped; go on\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_just_before_a_call_that_blocks_is_not_lost(number):
    # As there, the call is not interrupted: another thread gets the signal.
    body = f"""
    import signal, threading, time
    def interrupt():
        time.sleep(0.2)
        signal.pthread_kill(threading.get_ident(), {int(number)})
    threading.Thread(target=interrupt).start()
    time.sleep(10**6)"""
    assert end_of(body) == (130, "stopped; go on\n")


def test_a_line_is_in_a_pipe_when_it_is_printed():
    done = ended("import os; print('said'); os._exit(3)", PYTHONUNBUFFERED="")
    assert (done.returncode, done.stdout) == (3, "said\n")


_HEAP = """
    import numpy as np
    large = np.ones(10**8, np.uint8)
    # NumPy asks for huge pages in the middle of it, which makes several lines of one heap.
    lines = [line for line in open("/proc/self/maps") if line.endswith("[heap]\\n")]
    places = [[int(place, 16) for place in line.split()[0].split("-")] for line in lines]
    return 3 * any(start <= large.ctypes.data < end for start, end in places)
"""


_LIBC = platform.libc_ver()[0]


@pytest.mark.skipif(_LIBC != "glibc", reason="sets glibc's malloc, which is not here")
def test_large_buffers_come_from_a_heap_that_is_kept_unless_the_user_sets_it():
    assert end_of(_HEAP) == (3, "")
    assert end_of(_HEAP, MALLOC_ARENA_MAX="2") == (0, "")


def test_text_of_data_is_printed_and_not_obeyed(capfd):
    def main():
        print("a\x1b[31mb\u202e\tc\n中")
        raise ValueError("row \x1b[2J" + "x" * 9999 + ": correct it")

    assert command._run(main, "stopped", ["x"]) == 1
    out, err = capfd.readouterr()
    assert out == "a\\x1b[31mb\\u202e\tc\n中\n"
    assert err.startswith("error: row \\x1b[2Jxxx") and err.endswith("x: correct it\n")
    assert len(err) < 320


def test_compiled_programs_are_kept_where_the_user_says_or_in_a_folder_of_the_machine(
    monkeypatch, tmp_path
):
    monkeypatch.delitem(sys.modules, "jax", raising=False)  # the session's own folder stays
    names = ("DIR", "MAX_SIZE")
    for name in names:
        monkeypatch.setenv(f"JAX_COMPILATION_CACHE_{name}", "/users/own")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "true")
    command.keep_compiled(True)
    assert [*tmp_path.iterdir()] == []
    command.keep_compiled(False)
    assert os.environ["JAX_ENABLE_COMPILATION_CACHE"] == "false"
    for name in names:
        monkeypatch.delenv(f"JAX_COMPILATION_CACHE_{name}")
    command.keep_compiled(True)
    (folder,) = (tmp_path / "raslik_jax").iterdir()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == str(folder)
    assert int(os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"]) == 4 * 10**9
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    command.keep_compiled(True)  # a home that cannot be written harms nothing
    assert "JAX_COMPILATION_CACHE_DIR" not in os.environ


def test_the_users_share_of_a_gpus_memory_stays(monkeypatch):
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    for name in names:  # so that both are as they were afterwards
        monkeypatch.setenv(name, ".5")
    monkeypatch.delenv(names[0])
    command.reserve_memory()
    assert names[0] not in os.environ
    monkeypatch.delenv(names[1])
    command.reserve_memory()
    assert os.environ[names[0]] == "0.95"


@pytest.mark.parametrize("first", ["", "import jax\n"], ids=["alone", "after an import of jax"])
def test_a_second_start_reads_what_the_first_compiled(tmp_path, first):
    body = """import jax
    jax.monitoring.register_event_listener(lambda name, **_: name.endswith("hits") and print(name))
    jax.jit(lambda x: jax.lax.sort(x @ x))(jax.numpy.ones((32, 32))).block_until_ready()"""
    script = first + _SCRIPT.format(body=body)
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    environment |= {"PYTHONPATH": str(_EXPERIMENTS.parent), "XDG_CACHE_HOME": str(tmp_path)}
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    said = [
        subprocess.run(
            [sys.executable, "-c", script, *flag], env=environment, capture_output=True, text=True
        )
        for flag in ([], ["--nokeep_compiled"], [])
    ]
    assert ["hits" in done.stdout for done in said] == [False, False, True], said[-1].stderr


def test_what_is_no_flag_is_refused():
    status, said = end_of("print('never')", "name=value")
    assert status == 2
    assert said == "error: arguments must be flags, got 'name=value': write --name=value\n"


def test_a_defect_keeps_its_traceback():
    status, said = end_of("raise KeyError('x')")
    assert status == 1
    assert "Traceback" in said
    status, said = end_of("raise ValueError('a folder wanted')", RASLIK_TRACEBACK="1")
    assert status == 1
    assert "Traceback" in said


@pytest.mark.parametrize(
    "start", [["tests/fixtures/program.py", "export"], ["-m", "raslik_jax.cli.main", "export"]]
)
def test_help_lists_the_flags_of_the_command(start):
    done = subprocess.run(
        [sys.executable, *start, "--help"], cwd=_EXPERIMENTS.parent, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Writes the unlearned model")
    assert "--[no]merged: Write a whole checkpoint" in done.stdout


def test_every_script_is_such_a_command():
    paths = [path for path in _EXPERIMENTS.rglob("*.py") if _STUDIES not in path.parents]
    scripts = {path.name: path.read_text() for path in paths}
    commands = {name: text for name, text in scripts.items() if "__main__" in text}
    assert {"run.py", "sketch.py"} <= set(commands)
    begins = ("command.start(", "harness.start(", "sys.exit(cli.main())")
    assert [n for n, text in commands.items() if not any(map(text.__contains__, begins))] == []


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options(Settings):
    sizes: tuple[int, ...] = setting((1,), "Sizes.", low=1)
    runs: tuple[str, ...] = setting((), "Runs.")


def test_options_are_flags_and_a_list_of_numbers_holds_different_ones():
    def parse(*arguments):
        values = flags.FlagValues()
        setting_flags.define(_Options(), values)
        values(["command", *arguments])
        return values

    values = parse("--sizes=4, 16", "--runs=a,b")
    assert setting_flags.read(_Options(), values) == _Options(sizes=(4, 16), runs=("a", "b"))
    for wrong in ("", "4,4", "4,04", "0", "x", "1.5", "4,", "nan"):
        values = parse(f"--sizes={wrong}")
        with pytest.raises(ValueError, match="--sizes must be a list of numbers"):
            setting_flags.read(_Options(), values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Files(Settings):
    """A folder and a list of files."""

    out: str = setting("", "A folder.")
    recipe: tuple[str, ...] = setting((), "Files.")
    prompt: str = setting("", "A text.")


def _read_files(*arguments: str) -> _Files:
    values = flags.FlagValues()
    setting_flags.define(_Files(), values)
    values(["x", *arguments])
    return setting_flags.read(_Files(), values)


def test_places_begin_at_the_home_folder_and_texts_do_not(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    found = _read_files("--out=~/clean", "--recipe=~/a.yml,b.json", "--prompt=~/.bashrc")
    assert found.out == "/home/me/clean"
    assert found.recipe == ("/home/me/a.yml", "b.json")
    assert found.prompt == "~/.bashrc"


def test_a_list_replaces_that_of_a_flag_file():
    """As --stages does; files are joined or refused."""
    values = flags.FlagValues()
    setting_flags.define(_Options(), values)
    values(["x", "--sizes=4", "--sizes=16"])
    assert setting_flags.read(_Options(), values).sizes == (16,)


def test_a_list_of_files_that_is_given_twice_is_refused():
    with pytest.raises(ValueError, match="--recipe must be given once: join its values"):
        _read_files("--recipe=a.yml", "--recipe=b.json")
