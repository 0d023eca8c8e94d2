"""Settings as flags: one for each with its dotted name, default and help."""

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, get_args, get_origin

from absl import flags

from raslik_jax.base import settings
from raslik_jax.base.messages import some_of
from raslik_jax.config import QUOTED, Config

# They are listed as flags of the command that asks for them.
flags.disclaim_key_flags()

_S = TypeVar("_S", bound=settings.Settings)


class _Number(flags.ArgumentParser):
    """Reads a number; an error names the allowed values."""

    def __init__(self, kind: Callable[[str], Any], must: str):
        self._kind, self.syntactic_help = kind, must

    def parse(self, argument: Any) -> Any:
        try:
            return self._kind(argument)
        except (ValueError, OverflowError):
            raise ValueError(f"it must be {self.syntactic_help}") from None


def _define_number(kind: Callable[[str], Any], must: str) -> Callable[..., Any]:
    serializer: Any = flags.ArgumentSerializer()
    return functools.partial(flags.DEFINE, _Number(kind, must), serializer=serializer)


_SCALARS: dict[Any, Any] = {bool: flags.DEFINE_boolean}
_SCALARS[int] = _define_number(int, "an integer")
_SCALARS[float] = _define_number(float, "a number")


def define(defaults: settings.Settings, flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags of all settings."""
    define_leaves(settings.leaves(defaults), flag_values)


def define_leaves(
    leaves: Iterable[settings.Leaf], flag_values: flags.FlagValues = flags.FLAGS, group: str = ""
) -> None:
    """Defines the flags of some settings; help lists those of a stage under its name.

    Flags of no stage are the command's own or are listed under the name of their `group`.
    """
    for leaf in leaves:
        text = f"{leaf.member}: {leaf.metadata['help']}" if leaf.member else leaf.metadata["help"]
        choices = settings.choices_of(leaf.hint, leaf.metadata)
        arguments: dict[str, Any] = {"name": leaf.name, "default": leaf.value}
        arguments["flag_values"] = flag_values
        if "." in leaf.name or group:
            arguments["module_name"] = leaf.name.split(".")[0] if "." in leaf.name else group
        if get_origin(leaf.hint) is tuple:
            is_repeated = leaf.metadata["is_repeated"]
            define_list = flags.DEFINE_multi_string if is_repeated else flags.DEFINE_list
            text += f" Any of {', '.join(choices)}." if choices else ""
            define_list(help=text, **arguments | {"default": leaf.value and list(leaf.value)})
        elif choices and leaf.metadata["family"] is None:
            flags.DEFINE_enum(help=text, enum_values=choices, **arguments)
        elif (bare := leaf.metadata["bare"]) is not None:
            # absl reads --name as true and --noname as false.
            serializer: Any = flags.ArgumentSerializer()
            number = _Number(functools.partial(_read_bare, bare), "a number")
            flags.DEFINE(number, help=text, serializer=serializer, boolean=True, **arguments)
        else:
            # The settings refuse what is no member.
            text += f" One of {', '.join(choices)}." if choices else ""
            _SCALARS.get(leaf.hint, flags.DEFINE_string)(help=text, **arguments)


def _read_bare(bare: float, text: str) -> float:
    words = {"true": bare, "false": 0.0}
    return words[text] if text in words else float(text)


def of_config(preset: Mapping[str, Any] | None) -> tuple[settings.Leaf, ...]:
    """Returns all settings of a run with the defaults of a preset; None: without defaults."""
    leaves = settings.leaves(Config())
    if preset is None:
        return tuple(leaf._replace(value=None) for leaf in leaves)
    return tuple(leaf._replace(value=preset.get(leaf.name, leaf.value)) for leaf in leaves)


def read(defaults: _S, flag_values: flags.FlagValues = flags.FLAGS) -> _S:
    """Returns the settings of the flags with absolute paths; refuses as the settings do."""
    leaves = settings.leaves(defaults)
    return settings.replaced(defaults, {leaf.name: _value(leaf, flag_values) for leaf in leaves})


def given(
    leaves: Iterable[settings.Leaf], flag_values: flags.FlagValues = flags.FLAGS
) -> dict[str, Any]:
    """Returns the values of those flags that the user has given, by name."""
    leaves = [leaf for leaf in leaves if flag_values[leaf.name].present]
    return {leaf.name: _value(leaf, flag_values) for leaf in leaves}


# Flags of a command that name files or folders. No shell expands ~ in --out=~/clean. Of two lists
# absl has the last one. Other lists, such as --stages, may replace that of a flag file.
_PLACES = frozenset("workdir run runs out index cleaned_train_file queries recipe scores".split())


def _value(leaf: settings.Leaf, flag_values: flags.FlagValues) -> Any:
    value: Any = flag_values[leaf.name].value
    # The queries of a study or benchmark are numbers.
    if leaf.name in _PLACES and value and str in (leaf.hint, *get_args(leaf.hint)):
        is_list = get_origin(leaf.hint) is tuple
        if is_list and flag_values[leaf.name].present > 1:
            raise ValueError(f"--{leaf.name} must be given once: join its values with commas")
        value = [*map(os.path.expanduser, value)] if is_list else os.path.expanduser(value)
    if "." in leaf.name and isinstance(value, str) and value.startswith(f'{QUOTED}"'):
        value = json.loads(value.removeprefix(QUOTED))
    item = get_args(leaf.hint)[0] if get_origin(leaf.hint) is tuple else str
    with contextlib.suppress(ValueError):  # the settings refuse the unchanged text
        value = [item(text) for text in value] if item in (int, float) else value
    return settings.absolute(leaf._replace(value=value)) if leaf.metadata["is_path"] else value


def expand(
    arguments: Sequence[str], flag_values: flags.FlagValues = flags.FLAGS
) -> tuple[list[str], str]:
    """Returns arguments with those of flag files in their place, and the one that asks for help.

    Names of flags may have hyphens: --train-file is --train_file, --no-dry-run is --nodry_run.
    """
    found, asked, is_value, is_open = list[str](), "", False, True
    try:
        whole = flag_values.read_flags_from_files([*arguments], force_gnu=False)
    except (flags.CantOpenFlagFileError, UnicodeDecodeError) as error:
        named = some_of([text for text in arguments if "flagfile" in text])
        reason = str(error).rpartition("flagfile: ")[2]
        raise ValueError(
            f"{named} must name UTF-8 text files that can be read ({reason}): correct the "
            "path or the file"
        ) from None
    for text in whole:
        is_open = is_open and text != "--"
        if is_value or not is_open or not text.startswith("-"):
            is_value = False
            found.append(text)
            continue
        name, equals, value = text.lstrip("-").partition("=")
        asked = asked or (text if name in ("help", "h", "helpshort", "helpfull") else "")
        name = _flag_name(name, flag_values)
        is_value = name in flag_values and not equals and not flag_values[name].boolean
        found.append(f"--{name}{equals}{value}")
    return found, asked


def _flag_name(name: str, flag_values: flags.FlagValues) -> str:
    plain = name.replace("-", "_")
    if plain.startswith("no_") and plain.removeprefix("no_") in flag_values:
        return plain.replace("no_", "no", 1)
    is_known = plain in flag_values or plain.removeprefix("no") in flag_values
    return plain if is_known else name


def parse_config(arguments: Sequence[str], own: Iterable[settings.Leaf] = ()) -> Config:
    """Returns the config of a run with these arguments; other flags do not count.

    The other flags are --stages, --workdir and the `own` flags of the command.
    """
    flag_values = flags.FlagValues()
    define(Config(), flag_values)
    define_leaves(own, flag_values)
    for name in ("stages", "workdir"):
        flags.DEFINE_string(name, "", "", flag_values=flag_values)
    try:
        _, *left = flag_values(["raslik run", *expand(arguments, flag_values)[0]])
    except flags.Error as error:
        raise ValueError(str(error)) from None
    if left:
        raise ValueError(no_flags(left))
    return read(Config(), flag_values)


def no_flags(arguments: Sequence[str]) -> str:
    """Returns the sentence that refuses arguments that are no flags."""
    return f"arguments must be flags, got {some_of(arguments)}: write --name=value"
