"""raslik: one program for all commands.

raslik COMMAND --flag=value ...
raslik COMMAND --help
"""

import importlib
import pkgutil
import sys
from typing import NoReturn

from absl import flags

from raslik_jax import cli
from raslik_jax.cli import command, setting_flags

if __name__ != "__main__":
    flags.disclaim_key_flags()  # --help lists those of the command
# A command is a module with `Options`, `run`, and perhaps `FLAGS`, their `GROUP`, `WHEN_STOPPED`.
_HELPERS = ("asking", "command", "main", "setting_flags")
_COMMANDS = [name for _, name, _ in pkgutil.iter_modules(cli.__path__) if name not in _HELPERS]


def main() -> int:
    """Runs the command that the first argument names; returns 2 where it names none."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in _COMMANDS:
        print(f"{__doc__}\ncommands: {', '.join(_COMMANDS)}", file=sys.stderr)
        return 2
    sys.argv[:2] = [f"raslik {name}"]
    start(name)


def start(name: str) -> NoReturn:
    """Runs a command with the arguments of this process."""
    module = importlib.import_module(f"raslik_jax.cli.{name}")
    # What --help shows.
    sys.modules["__main__"].__doc__ = module.__doc__
    group = getattr(module, "GROUP", "")
    setting_flags.define_leaves(getattr(module, "FLAGS", ()), group=group)
    when_stopped = getattr(module, "WHEN_STOPPED", "stopped")
    command.start(module.run, module.Options(), when_stopped=when_stopped)


if __name__ == "__main__":
    sys.exit(main())
