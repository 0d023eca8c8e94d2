"""How every command of experiments/ begins and ends."""

import contextlib
import dataclasses
import functools
import importlib.util
import io
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TextIO, get_args, get_origin, get_type_hints

from absl import app, flags

from raslik_jax.messages import bounded, printable, some_of

# Those defined here are listed as flags of the command that asks for them.
flags.disclaim_key_flags()


def start(
    main: Callable[..., int | None], options: type | None = None, *, when_stopped: str = "stopped"
) -> NoReturn:
    """Reads the flags, runs a command and exits with its status.

    The status is what main returns, 0 for None; 1 for a ValueError or OSError, which is said in one
    sentence on stderr (or raised where RASLIK_TRACEBACK is set); 2 for an argument that is no flag;
    130 when somebody stops it. What it prints is UTF-8, with control characters escaped.

    Args:
      main: the command; it reads its own flags, or is called with its options.
      options: dataclass of `option` fields, each of which becomes a flag; None for no options.
      when_stopped: said on stderr at Ctrl-C.
    """
    if options is not None:
        read, call = define_options(options), main

        def main() -> int | None:
            return call(read())

    app.run(functools.partial(_run, main, when_stopped))


def _run(main: Callable[[], int | None], when_stopped: str, argv: Sequence[str]) -> int:
    if len(argv) > 1:
        named = some_of(argv[1:])
        print(f"error: arguments must be flags, got {named}: write --name=value", file=sys.stderr)
        return 2
    # Texts of data are printed whole on any terminal, whatever the locale.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        _check_finite()
        with contextlib.redirect_stdout(_Printable(sys.stdout)):
            return main() or 0
    except (ValueError, OSError) as error:
        if os.environ.get("RASLIK_TRACEBACK"):
            raise
        print(f"error: {bounded(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(when_stopped, file=sys.stderr)
        return 130


class _Printable(io.TextIOBase):
    """A stream on which control characters of texts are shown and not obeyed."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(printable(text))

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()


def _check_finite() -> None:
    """Refuses NaN and infinity in every flag that is a number."""
    for name, value in flags.FLAGS.flag_values_dict().items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"--{name} must be a finite number, got {value}")


# What installs a module that not every command needs.
_INSTALLERS = {
    "matplotlib": "'raslik-jax[eval]'",
    "rouge_score": "'raslik-jax[eval]'",
    "torch": "torch",
    "peft": "peft",
    "transformers": "'raslik-jax[data]'",
}


def require(*modules: str) -> None:
    """Refuses a command that would miss a module only after its work.

    Raises:
      ValueError: one is not installed.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        wanted = " ".join(dict.fromkeys(_INSTALLERS[name] for name in missing))
        raise ValueError(f"{' and '.join(missing)} must be installed: pip install {wanted}")


class _ListParser(flags.ArgumentParser):
    """Reads a list whose items are numbers of a kind, or names that are known."""

    def __init__(self, items: type | Sequence[str], low: int | float):
        self.items = items
        self.low = low
        kind = "numbers" if isinstance(items, type) else "names"
        self.syntactic_help = f"different {kind}, separated by commas"

    def parse(self, argument: Any) -> list[Any]:
        if isinstance(argument, list):  # the default
            return argument
        found = [self.parse_item(item.strip()) for item in argument.split(",")]
        if len(set(found)) < len(found):
            raise ValueError("each item must be given once")
        return found

    def parse_item(self, item: str) -> Any:
        if isinstance(self.items, type):
            try:
                number = self.items(item)
            except ValueError:
                raise ValueError(f"every item must be a number, got {item!r}") from None
            if not self.low <= number <= sys.maxsize:
                raise ValueError(f"every number must be finite and at least {self.low}")
            return number
        if item not in self.items:
            raise ValueError(f"every item must be one of {', '.join(self.items)}")
        return item


def define_list(
    name: str,
    default: Sequence[Any],
    help: str,
    items: type | Sequence[str],
    *,
    low: int | float = 1,
    flag_values: flags.FlagValues = flags.FLAGS,
) -> flags.FlagHolder:
    """Returns a flag of one or more different numbers, or of different names.

    Args:
      name: of the flag.
      default: its items.
      help: its text.
      items: the type of the numbers, or the names that are known.
      low: the least number.
      flag_values: where it is defined.
    """
    parser, serializer = _ListParser(items, low), flags.CsvListSerializer(",")
    return flags.DEFINE(
        parser, name, list(default), help, flag_values=flag_values, serializer=serializer
    )


def option(
    default: Any, text: str, *, low: int | float | None = None, of: Iterable[str] = ()
) -> Any:
    """Returns a field of a command's options.

    Args:
      default: of the field and of its flag.
      text: help.
      low: least value of a number, or of each number of a list.
      of: the names that a text, or each text of a list, may be; none: any.
    """
    metadata = {"help": text, "low": low, "of": tuple(of)}
    return dataclasses.field(default=default, metadata=metadata)


def define_options(options: type, flag_values: flags.FlagValues = flags.FLAGS) -> Callable[[], Any]:
    """Defines a flag for each field of a dataclass, and returns what reads them into one of it.

    A field is a bool, int, float, str, a Literal of names, or a tuple of one of these; or None.
    """
    hints = get_type_hints(options)
    fields = dataclasses.fields(options)
    for field in fields:
        _define_option(field, hints[field.name], flag_values)

    def read() -> Any:
        values = {field.name: flag_values[field.name].value for field in fields}
        return options(**{n: tuple(v) if isinstance(v, list) else v for n, v in values.items()})

    return read


def _define_option(field: Any, hint: Any, flag_values: flags.FlagValues) -> None:
    name, low, default = field.name, field.metadata["low"], field.default
    arguments: dict[str, Any] = {"help": field.metadata["help"], "flag_values": flag_values}
    if type(None) in get_args(hint):
        hint = get_args(hint)[0]
    item = get_args(hint)[0] if get_origin(hint) is tuple else hint
    names = get_args(item) or field.metadata["of"]
    if item is not hint and (names or item is not str):
        define_list(name, default, items=names or item, low=low or 0, **arguments)
    elif item is not hint:
        flags.DEFINE_list(name, list(default), **arguments)
    elif names:
        flags.DEFINE_enum(name, default, list(names), **arguments)
    elif hint is int:
        flags.DEFINE_integer(name, default, lower_bound=low, **arguments)
    elif hint is float:
        flags.DEFINE_float(name, default, lower_bound=low, **arguments)
    elif hint is bool:
        flags.DEFINE_boolean(name, default, **arguments)
    else:
        flags.DEFINE_string(name, default, **arguments)
