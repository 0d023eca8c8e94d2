"""From one bad generation to an unlearned model and a report.

Finds the training examples that taught a behavior and those that pull the other way (RASLIK and
its baselines), forgets the first set while training on the second, and measures what was
forgotten and what was kept.

  python experiments/run.py --flagfile=experiments/flags/quickstart.flags

Every stage leaves its results and a manifest in --workdir, and is not run again while they are up
to date. Put the flag file first: later flags win over earlier ones.
"""

import pathlib
import sys
from typing import Any

from absl import flags, logging

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from raslik_jax import config as config_lib  # noqa: E402
from raslik_jax import files, manifests  # noqa: E402
from raslik_jax.cli import command, setting_flags  # noqa: E402
from raslik_jax.messages import shown  # noqa: E402
from raslik_jax.run import workdir as workdir_lib  # noqa: E402

_WORKDIR = flags.DEFINE_string("workdir", "", "Where results go (default: runs/<name>).")
_STAGES = flags.DEFINE_list(
    "stages", list(config_lib.STAGES), f"Stages to run, of {', '.join(config_lib.STAGES)}."
)
_UPDATE = flags.DEFINE_boolean(
    "update", False, "Take over a work directory of other settings; make again what changed."
)
_VERIFY = flags.DEFINE_boolean(
    "verify",
    False,
    "Read every result in --workdir and name what is damaged; run nothing.",
)
_SHARED_UNITS = flags.DEFINE_string(
    "shared_units",
    "",
    "Folder in which runs share finished units of the same settings; empty: none is shared.",
)
_DRY_RUN = flags.DEFINE_boolean(
    "dry_run", False, "Print the plan: stages, sizes, memory, operations, time; run nothing."
)
_FLOPS_PER_SECOND = flags.DEFINE_float(
    "flops_per_second",
    None,
    "--dry_run: operations a second (default: measured on this device).",
    lower_bound=1.0,
)
_BYTES_PER_SECOND = flags.DEFINE_float(
    "bytes_per_second",
    None,
    "--dry_run: bytes of device memory a second (default: measured on this device).",
    lower_bound=1.0,
)
_COMPILE = flags.DEFINE_boolean(
    "compile",
    True,
    "--dry_run: compile the largest programs for this device, a minute or so, for XLA's own figure "
    "of their memory; without it a bound by formula is shown.",
)
# What says how to go about a run is no part of it.
_NOT_RECORDED = (
    "stages",
    "update",
    "workdir",
    "shared_units",
    "verify",
    "dry_run",
    "flops_per_second",
    "bytes_per_second",
    "compile",
)


setting_flags.define()


def write_run_flags(workdir: pathlib.Path) -> None:
    """Writes run.flags, which repeats this run as it is: `run.py --flagfile=.../run.flags`."""
    own = flags.FLAGS.get_key_flags_for_module(sys.argv[0])
    lines = [flag.serialize() for flag in own if flag.name not in _NOT_RECORDED]
    lines.append(f"--workdir={workdir}")
    files.write_text(
        workdir / "run.flags", "\n".join(sorted(line for line in lines if line)) + "\n"
    )


def print_plan(config: config_lib.Config, workdir: pathlib.Path) -> None:
    """Prints what a run will do and take; writes nothing."""
    # Imported here, because it takes jax with it and --help should not.
    from raslik_jax.report import tables
    from raslik_jax.run import forecast, programs

    found = forecast.forecast(config, workdir, stages=_STAGES.value, compiles=_COMPILE.value)
    rates: dict[str, Any] = {
        "flops_per_second": _FLOPS_PER_SECOND.value,
        "bytes_per_second": _BYTES_PER_SECOND.value,
    }
    if None in rates.values():
        inputs, outputs = found.width
        measured = programs.measure_rates(
            inputs=inputs, outputs=outputs, dtype=config.backbone.dtype
        )
        rates["flops_per_second"] = rates["flops_per_second"] or measured.operations
        rates["bytes_per_second"] = rates["bytes_per_second"] or measured.bytes_moved
        rates["origin"] = f"measured on this device ({measured.device}) where not given"
    print(f"{config.name}, seed {config.seed}, in {workdir}\n")
    for table in (forecast.sizes_table(found), forecast.steps_table(found, **rates)):
        print(tables.render_terminal(table) + "\n")


def verify(workdir: pathlib.Path) -> int:
    """Reads all results of a work directory, names what is damaged; returns the exit status."""
    if not (workdir / "config.json").is_file():
        raise ValueError(
            f"--workdir must be the work directory of a run, {shown(str(workdir), 160)} has no "
            "config.json: correct the path"
        )
    found = manifests.verify(workdir)
    print("\n".join(found) or f"{workdir}: all results are as they were made")
    return int(bool(found))


def main() -> int:
    stages = _STAGES.value
    if not stages or not set(stages) <= set(config_lib.STAGES) or len(set(stages)) < len(stages):
        raise ValueError(
            f"--stages must be a list of {', '.join(config_lib.STAGES)}, each once, got "
            f"{shown(','.join(stages))}"
        )
    config = setting_flags.read_config()
    workdir = pathlib.Path(_WORKDIR.value or f"runs/{config.name}")
    logging.set_verbosity(logging.WARNING)
    if _VERIFY.value:
        return verify(workdir)
    if _DRY_RUN.value:
        print_plan(config, workdir)
        return 0
    # Evaluation and, without marker words, likelihoods before unlearning take ROUGE.
    if {"references", "evaluate"} & set(stages):
        command.require("rouge_score")
    if "report" in stages:
        command.require("matplotlib")
    with workdir_lib.open_workdir(workdir, config, update=_UPDATE.value) as record:
        from raslik_jax.run import plan  # for the same reason, here

        def on_start() -> None:
            record()
            write_run_flags(workdir)

        shared = pathlib.Path(_SHARED_UNITS.value) if _SHARED_UNITS.value else None
        plan.run(config, workdir, stages=_STAGES.value, shared=shared, on_start=on_start)
    return 0


if __name__ == "__main__":
    command.start(main, when_stopped="stopped; the same command goes on from here")
