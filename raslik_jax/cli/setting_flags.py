"""A run's settings as flags: one for each field, whose name, default and help it has."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

from absl import flags

from raslik_jax import config as config_lib

# They are listed as flags of the command that asks for them.
flags.disclaim_key_flags()


def define(flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags of all settings."""
    for settings in (config_lib.Config, *config_lib.stage_configs().values()):
        hints = get_type_hints(settings)
        for field in dataclasses.fields(settings):
            if not dataclasses.is_dataclass(hints[field.name]):
                _define_one(settings.prefix(), field, hints[field.name], flag_values)


def _define_one(
    prefix: str, field: dataclasses.Field, hint: Any, flag_values: flags.FlagValues
) -> None:
    default: Any = field.default
    arguments: dict[str, Any] = {
        "name": prefix + field.name,
        "default": list(default) if isinstance(default, tuple) else default,
        "flag_values": flag_values,
    }
    text = field.metadata["help"]
    if hint is bool:
        flags.DEFINE_boolean(help=text, **arguments)
    elif hint is int:
        flags.DEFINE_integer(help=text, **arguments)
    elif hint is float:
        flags.DEFINE_float(help=text, **arguments)
    elif get_origin(hint) is Literal:
        flags.DEFINE_enum(help=text, enum_values=list(get_args(hint)), **arguments)
    elif get_origin(hint) is tuple:
        choices = get_args(get_args(hint)[0])
        text += f" Any of {', '.join(choices)}." if choices else ""
        flags.DEFINE_list(help=text, **arguments)
    else:
        flags.DEFINE_string(help=text, **arguments)


def read_config(flag_values: flags.FlagValues = flags.FLAGS) -> config_lib.Config:
    """Returns the config that the flags describe.

    Raises:
      ValueError: a value that the settings refuse.
    """

    def values(settings: Any) -> dict[str, Any]:
        flag_of = {
            field.name: settings.prefix() + field.name for field in dataclasses.fields(settings)
        }
        found = {n: flag_values[flag].value for n, flag in flag_of.items() if flag in flag_values}
        return {n: tuple(v) if isinstance(v, list) else v for n, v in found.items()}

    stages = {
        stage: settings(**values(settings))
        for stage, settings in config_lib.stage_configs().items()
    }
    return config_lib.Config(**values(config_lib.Config), **stages)


def parse_config(arguments: Sequence[str]) -> config_lib.Config:
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
