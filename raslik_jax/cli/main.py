"""raslik: one program for all commands.

raslik COMMAND --flag=value ...
raslik help COMMAND
raslik version
"""

import difflib
import importlib
import pathlib
import pkgutil
import shlex
import shutil
import sys
from typing import NoReturn

from absl import flags

import raslik_jax
from raslik_jax import cli
from raslik_jax.base.messages import shown
from raslik_jax.cli import command, setting_flags
from raslik_jax.incident import making

if __name__ != "__main__":
    flags.disclaim_key_flags()  # --help lists those of the command
# A command is a module with `Options`, `run`, and perhaps `FLAGS`, their `GROUP`, `WHEN_STOPPED`.
_HELPERS = ("command", "main", "setting_flags")
COMMANDS = {
    name: f"{cli.__name__}.{name}"
    for _, name, _ in pkgutil.iter_modules(cli.__path__)
    if name not in _HELPERS
}


def main() -> int:
    """Runs the command that the first argument names; returns 2 if it names none."""
    program, name, *rest = [*sys.argv, ""] if len(sys.argv) < 2 else sys.argv
    if name in ("version", "--version"):
        print(f"raslik {raslik_jax.__version__}")
        return 0
    is_help = name in ("help", *command.HELP)
    if is_help and rest:
        name, rest = rest[0], ["--help"]
    elif is_help:
        print(f"{__doc__}\ncommands: {', '.join(COMMANDS)}")
        return 0
    name = name.replace("-", "_") if name.replace("-", "_") in COMMANDS else name
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=3, cutoff=0.5)
        got = f"got {shown(name)}" if name else "got none"
        got += f", do you mean {' or '.join(near)}?" if near else ""
        must = f"a command must be one of {', '.join(COMMANDS)}"
        print(f"error: {must}, {got}", file=sys.stderr)
        return 2
    making.PROGRAM.set(_program(program))
    sys.argv[:] = [f"raslik {name}", *rest]
    try:
        start(name)
    except KeyboardInterrupt:  # before the command has begun
        print("stopped", file=sys.stderr)
        return command.STOPPED


def _program(called: str) -> str:
    """Returns the call of this program, such as Python with raslik.py of a checkout."""
    path = pathlib.Path(called)
    if path.name == "raslik.py":
        return f"python {shlex.quote(called)}"
    found = shutil.which(path.name)
    is_far = path.name == "raslik" and not (found and path.samefile(found))
    return shlex.quote(called) if is_far else "raslik"


def start(name: str) -> NoReturn:
    """Runs a command with the arguments of this process."""
    module = importlib.import_module(COMMANDS[name])
    # The text of --help.
    sys.modules["__main__"].__doc__ = module.__doc__
    group = getattr(module, "GROUP", "")
    setting_flags.define_leaves(getattr(module, "FLAGS", ()), group=group)
    when_stopped = getattr(module, "WHEN_STOPPED", "stopped")
    command.start(module.run, module.Options(), when_stopped=when_stopped)


if __name__ == "__main__":
    sys.exit(main())
