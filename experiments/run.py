"""From one bad generation to an unlearned model and a report.

Finds the training examples that taught a behaviour and those that pull the other way (RASLIK and
its baselines), forgets the first set while training on the second, and measures what was
forgotten and what was kept.

  python experiments/run.py --flagfile=experiments/flags/quickstart.flags

Every stage leaves its results and a manifest in --workdir, and is not run again while they are up
to date. Put the flag file first: later flags win over earlier ones.
"""

import dataclasses
import pathlib
import sys
from typing import Any, Literal, get_args, get_origin, get_type_hints

from absl import flags, logging

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from raslik_jax import command, pipeline  # noqa: E402
from raslik_jax import config as config_lib  # noqa: E402
from raslik_jax.messages import shown  # noqa: E402

_WORKDIR = flags.DEFINE_string("workdir", "", "Where results go (default: runs/<name>).")
_STAGES = flags.DEFINE_list(
    "stages", list(config_lib.STAGES), f"Stages to run, of {', '.join(config_lib.STAGES)}."
)
_UPDATE = flags.DEFINE_boolean(
    "update", False, "Take over a work directory of other settings; make again what changed."
)
_SHARED_UNITS = flags.DEFINE_string(
    "shared_units",
    "",
    "Folder in which runs share finished units of the same settings; empty: none is shared.",
)
# Of one H200, measured with a prototype: per-example gradients of OLMo-2-7B at 8,192 tokens a step,
# and reading an index (3.0 to 3.5e12; 4.8e12 is published).
_DRY_RUN = flags.DEFINE_boolean(
    "dry_run", False, "Print the plan: stages, sizes, operations, time by arithmetic; run nothing."
)
_FLOPS_PER_SECOND = flags.DEFINE_float(
    "flops_per_second", 475e12, "--dry_run: operations a second.", lower_bound=1.0
)
_BYTES_PER_SECOND = flags.DEFINE_float(
    "bytes_per_second", 3.0e12, "--dry_run: bytes of device memory a second.", lower_bound=1.0
)
# What says how to go about a run is no part of it.
_NOT_RECORDED = (
    "stages",
    "update",
    "workdir",
    "shared_units",
    "dry_run",
    "flops_per_second",
    "bytes_per_second",
)


def define_setting(field: dataclasses.Field, hint: Any) -> flags.FlagHolder:
    """Returns the flag of one field of a stage's settings."""
    default: Any = field.default
    text = field.metadata["help"]
    if hint is bool:
        return flags.DEFINE_boolean(field.name, default, text)
    if hint is int:
        return flags.DEFINE_integer(field.name, default, text)
    if hint is float:
        return flags.DEFINE_float(field.name, default, text)
    if get_origin(hint) is Literal:
        return flags.DEFINE_enum(field.name, default, list(get_args(hint)), text)
    if get_origin(hint) is tuple:
        choices = get_args(get_args(hint)[0])
        listed = f" Any of {', '.join(choices)}." if choices else ""
        return flags.DEFINE_list(field.name, list(default), text + listed)
    return flags.DEFINE_string(field.name, default, text)


def define_settings(settings: type) -> dict[str, flags.FlagHolder]:
    """Returns the flags of a settings class by field; the classes within it have their own."""
    hints = get_type_hints(settings)
    return {
        field.name: define_setting(field, hints[field.name])
        for field in dataclasses.fields(settings)
        if not dataclasses.is_dataclass(hints[field.name])
    }


_RUN = define_settings(config_lib.Config)
_SETTINGS = {
    stage: define_settings(settings) for stage, settings in config_lib.stage_configs().items()
}


def read_settings(holders: dict[str, flags.FlagHolder]) -> dict[str, Any]:
    """Returns the values of the flags of a settings class."""
    values = {name: holder.value for name, holder in holders.items()}
    return {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}


def read_config() -> config_lib.Config:
    """Returns the run's config from the flags."""
    stages = {
        stage: settings(**read_settings(_SETTINGS[stage]))
        for stage, settings in config_lib.stage_configs().items()
    }
    return config_lib.Config(**read_settings(_RUN), **stages)


def write_run_flags(workdir: pathlib.Path) -> None:
    """Writes run.flags, which repeats this run as it is: `run.py --flagfile=.../run.flags`."""
    own = flags.FLAGS.get_key_flags_for_module(sys.argv[0])
    lines = [flag.serialize() for flag in own if flag.name not in _NOT_RECORDED]
    lines.append(f"--workdir={workdir}")
    path = workdir / "run.flags.partial"
    path.write_text("\n".join(sorted(line for line in lines if line)) + "\n")
    path.replace(workdir / "run.flags")


def print_plan(config: config_lib.Config, workdir: pathlib.Path) -> None:
    """Prints what a run will do and take; writes nothing."""
    # Imported here, because it takes jax with it and --help should not.
    from raslik_jax.reporting import tables
    from raslik_jax.stages import forecast

    found = forecast.forecast(config, workdir, stages=_STAGES.value)
    rates = {
        "flops_per_second": _FLOPS_PER_SECOND.value,
        "bytes_per_second": _BYTES_PER_SECOND.value,
    }
    print(f"{config.name}, seed {config.seed}, in {workdir}\n")
    for table in (forecast.sizes_table(found), forecast.steps_table(found, **rates)):
        print(tables.render_terminal(table) + "\n")


def main() -> None:
    stages = _STAGES.value
    if not stages or not set(stages) <= set(config_lib.STAGES) or len(set(stages)) < len(stages):
        raise ValueError(
            f"--stages must be a list of {', '.join(config_lib.STAGES)}, each once, got "
            f"{shown(','.join(stages))}"
        )
    config = read_config()
    workdir = pathlib.Path(_WORKDIR.value or f"runs/{config.name}")
    logging.set_verbosity(logging.WARNING)
    if _DRY_RUN.value:
        print_plan(config, workdir)
        return
    with pipeline.open_workdir(workdir, config, update=_UPDATE.value):
        write_run_flags(workdir)
        from raslik_jax.stages import plan  # for the same reason, here

        shared = pathlib.Path(_SHARED_UNITS.value) if _SHARED_UNITS.value else None
        plan.run(config, workdir, stages=_STAGES.value, shared=shared)


if __name__ == "__main__":
    command.start(main, when_stopped="stopped; the same command goes on from here")
