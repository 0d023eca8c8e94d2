"""raslik: one program for all commands.

raslik COMMAND --flag=value ...
raslik COMMAND --help
"""

import importlib
import pkgutil
import sys

from absl import flags

from raslik_jax import cli

if __name__ != "__main__":
    flags.disclaim_key_flags()  # --help lists those of the command
_HELPERS = ("command", "main", "setting_flags")


def commands() -> list[str]:
    """Returns the names of all commands: each is a module of this folder with a `main`."""
    return [name for _, name, _ in pkgutil.iter_modules(cli.__path__) if name not in _HELPERS]


def main() -> int:
    """Runs the command that the first argument names; returns 2 where it names none."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in commands():
        print(f"{__doc__}\ncommands: {', '.join(commands())}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"raslik_jax.cli.{name}")
    sys.argv[:2] = [f"raslik {name}"]
    # What --help shows.
    sys.modules["__main__"].__doc__ = module.__doc__
    return module.main()


if __name__ == "__main__":
    sys.exit(main())
