"""A run's settings as flags: one for each, with its dotted name, default and help."""

from collections.abc import Sequence
from typing import Any, get_origin

from absl import flags

from raslik_jax import settings
from raslik_jax.config import Config

# They are listed as flags of the command that asks for them.
flags.disclaim_key_flags()


def define(flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags of all settings."""
    for leaf in settings.leaves(Config()):
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


def read_config(flag_values: flags.FlagValues = flags.FLAGS) -> Config:
    """Returns the config that the flags describe.

    Raises:
      ValueError: a value that the settings refuse.
    """
    names = [leaf.name for leaf in settings.leaves(Config())]
    return settings.replaced(Config(), {name: flag_values[name].value for name in names})


def parse_config(arguments: Sequence[str]) -> Config:
    """Returns the config of a run with these arguments; flags that are no settings play no part.

    Raises:
      ValueError: an unknown flag, or a value that is refused.
    """
    flag_values = flags.FlagValues()
    define(flag_values)
    for name in ("stages", "workdir", "shared_units"):
        flags.DEFINE_string(name, "", "", flag_values=flag_values)
    try:
        flag_values(["run.py", *arguments])
    except flags.Error as error:
        raise ValueError(str(error)) from None
    return read_config(flag_values)
