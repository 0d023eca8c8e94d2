"""A run's settings as flags: one for each, with its dotted name, default and help."""

from collections.abc import Sequence
from typing import Any, TypeVar, get_args, get_origin

from absl import flags

from raslik_jax import settings
from raslik_jax.config import Config

# They are listed as flags of the command that asks for them.
flags.disclaim_key_flags()

_S = TypeVar("_S", bound=settings.Settings)


def define(
    defaults: settings.Settings | None = None, flag_values: flags.FlagValues = flags.FLAGS
) -> None:
    """Defines the flags of all settings, by default those of a run."""
    for leaf in settings.leaves(defaults or Config()):
        _define_one(leaf, flag_values)


def _define_one(leaf: settings.Leaf, flag_values: flags.FlagValues) -> None:
    default, text = leaf.value, leaf.metadata["help"]
    text = f"{leaf.member}: {text}" if leaf.member else text
    choices = settings.choices_of(leaf.hint, leaf.metadata)
    arguments: dict[str, Any] = {"name": leaf.name, "flag_values": flag_values}
    if get_origin(leaf.hint) is tuple:
        text += f" Any of {', '.join(choices)}." if choices else ""
        flags.DEFINE_list(default=list(default), help=text, **arguments)
    elif choices:
        flags.DEFINE_enum(default=default, help=text, enum_values=choices, **arguments)
    else:
        kinds: dict[Any, Any]
        kinds = {bool: flags.DEFINE_boolean, int: flags.DEFINE_integer, float: flags.DEFINE_float}
        kinds.get(leaf.hint, flags.DEFINE_string)(default=default, help=text, **arguments)


def read(defaults: _S, flag_values: flags.FlagValues = flags.FLAGS) -> _S:
    """Returns the settings that the flags describe.

    Raises:
      ValueError: a value that the settings refuse.
    """
    values = {
        leaf.name: _items(leaf.hint, flag_values[leaf.name].value)
        for leaf in settings.leaves(defaults)
    }
    return settings.replaced(defaults, values)


def _items(hint: Any, value: Any) -> Any:
    """Returns a flag's value, the items of a list of numbers as such where they are numbers."""
    item = get_args(hint)[0] if get_origin(hint) is tuple else str
    try:
        return [item(text) for text in value] if item in (int, float) else value
    except ValueError:
        return value


def read_config(flag_values: flags.FlagValues = flags.FLAGS) -> Config:
    """Returns the config that the flags describe, as `read` does."""
    return read(Config(), flag_values)


def parse_config(arguments: Sequence[str]) -> Config:
    """Returns the config of a run with these arguments; flags that are no settings play no part.

    Raises:
      ValueError: an unknown flag, or a value that is refused.
    """
    flag_values = flags.FlagValues()
    define(flag_values=flag_values)
    for name in ("stages", "workdir", "shared_units"):
        flags.DEFINE_string(name, "", "", flag_values=flag_values)
    try:
        flag_values(["run.py", *arguments])
    except flags.Error as error:
        raise ValueError(str(error)) from None
    return read_config(flag_values)
