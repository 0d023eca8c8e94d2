"""From the rows that a trace found to an adapter that is trained again without them."""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from raslik_jax.base.files import read_json
from raslik_jax.base.messages import some_of
from raslik_jax.base.settings import Settings, setting
from raslik_jax.config import Config, config_from_json
from raslik_jax.data.contents import Conversation
from raslik_jax.incident import making
from raslik_jax.incident.unlearn import (
    UnlearnOptions,
    UnlearnResult,
    forecast_both,
    train_file,
    unlearn,
)
from raslik_jax.models import storage
from raslik_jax.parallel import processes
from raslik_jax.run import artifacts
from raslik_jax.train import recipe
from raslik_jax.train.objectives import OBJECTIVES, RetrainSettings

ALGORITHM = "retrain"
# The recipe, without what checks it.
_FIELDS = [one for one in dataclasses.fields(RetrainSettings) if one.metadata["decides"]]
_NAMES = [f"unlearn.{ALGORITHM}.{field.name}" for field in _FIELDS]
_AGAIN = tuple(name for name, one in OBJECTIVES.items() if one.repeats == ALGORITHM)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeOptions(Settings):
    """By which recipe an adapter is trained."""

    recipe: tuple[str, ...] = setting(
        (),
        "Files that say how the adapter was trained: training_args.json, trainer_state.json, "
        "YAML of axolotl or LLaMA-Factory, or a model card. The first one that has a setting "
        "decides it (default: the files next to the adapter).",
    )
    approximate: bool = setting(
        False, "Leave out parts of the recipe that this program cannot repeat, and train."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetrainOptions(RecipeOptions, UnlearnOptions):
    """The run to go on with, the recipe, and the files to write."""

    other_seed: bool = setting(
        False,
        "Also train a second adapter with the next seed. The distance between the two is the "
        "noise floor of all distances to a retrained model. The training takes twice as long.",
    )
    check_recipe: float = setting(
        0.0,
        "First train on all rows for this share of the steps, and report whether the recipe "
        "gives the adapter. Without a value: all steps.",
        low=0,
        high=1,
        bare=1.0,
    )


def retrain(options: RetrainOptions | None = None, **named: Any) -> UnlearnResult:
    """Trains the adapter again without the rows that a trace found, and measures it.

    A fresh adapter is trained by the recipe that the trainer stored in files. Values in `settings`,
    such as `{"unlearn.retrain.epochs": 3}`, replace those of the files. All other settings have the
    defaults of `objectives.RetrainSettings`. The printed recipe names the source of each.

    Raises:
      ValueError: if the run has no adapter, a file is no recipe, or the recipe names a setting that
        this program cannot repeat and `approximate` is not given.

    Example:
      print(raslik_jax.retrain(run="runs/incident", out="clean"))
    """
    options = making.options_of(options or RetrainOptions(), named)
    if not options.run or not (options.out or options.dry_run):
        raise ValueError("--run and --out must be given: give --run=WORKDIR and --out=DIR")
    recorded = artifacts.CONFIG.read(pathlib.Path(options.run), "give the folder of a trace")
    config = config_from_json(recorded)
    settings = read_settings(config, options, options.settings)
    checked = _check(config, options) if options.check_recipe else {}
    settings = checked | settings
    if options.dry_run:
        return forecast_both(dataclasses.replace(options, settings=checked | {**options.settings}))
    settings["unlearn.algorithms"] = (ALGORITHM, *(_AGAIN if options.other_seed else ()))
    return unlearn(dataclasses.replace(options, settings=settings))


def read_settings(
    config: Config,
    options: RecipeOptions,
    given: Mapping[str, Any],
    *,
    is_needed: bool = False,
    is_told: bool = True,
) -> dict[str, Any]:
    """Returns the settings of training a run's adapter again, all by dotted name, and prints them.

    They are printed if `is_told`. Values that are `given` replace those of the recipe. With
    `is_needed` it refuses to go on without a recipe.
    """
    if not config.backbone.adapter:
        raise ValueError(
            "--run must be a trace of an adapter, got one without: trace again with --adapter"
        )
    train_file(config)  # refuses a run that is no trace
    from raslik_jax.run.workspace import adapter_source  # it takes jax with it

    folder = adapter_source(config)
    files = [pathlib.Path(path) for path in options.recipe]
    found = recipe.read_recipe(files or recipe.find_files(folder))
    if files and not found.settings:
        silent = some_of((path.name for path in files), 3)
        raise ValueError(
            "--recipe must be training_args.json, trainer_state.json, YAML of axolotl or "
            f"LLaMA-Factory, or a model card, {silent} has no setting of a training: name "
            "another file, or give each setting as --unlearn.retrain.NAME"
        )
    if found.lacks and not options.approximate:
        listed = "; ".join(found.lacks)
        raise ValueError(
            f"the recipe must be one that this program can repeat, it has {listed}: train with "
            "your trainer on the cleaned file, or pass --approximate to leave this out"
        )
    if is_needed and not found.settings and not any(name in given for name in _NAMES):
        raise ValueError(
            "the recipe of the adapter must be known, no file next to it has one: give --recipe, "
            "or settings as --unlearn.retrain.NAME"
        )
    values = {name: one.value for name, one in found.settings.items()}
    if values.get("targets") == recipe.BY_ROWS:
        row = making.first_row(config)
        is_talk = isinstance(row.content, Conversation) and not row.content.first
        values["targets"] = "all" if is_talk else "response"
    # All of them, so that nothing of an earlier training of this run is left.
    plain: dict[str, Any] = {field.name: field.default for field in _FIELDS}
    settings = {f"unlearn.{ALGORITHM}.{name}": value for name, value in (plain | values).items()}
    settings |= given
    steps, epochs = (f"unlearn.{ALGORITHM}.{name}" for name in ("steps", "epochs"))
    if epochs in given and steps not in given:
        settings[steps] = 0  # a number of steps would decide in place of the epochs that are given
    for name in _AGAIN:
        own = {f"unlearn.{name}.{key}": settings[f"unlearn.{ALGORITHM}.{key}"] for key in plain}
        seed = {f"unlearn.{name}.seed": settings[f"unlearn.{ALGORITHM}.seed"] + 1}
        settings = {**own, **seed, **settings}
    if is_told and processes.is_first():
        print(*_lines(folder, found, values, settings, given), sep="\n", flush=True)
    return settings


def _check(config: Config, options: RetrainOptions) -> dict[str, Any]:
    """Returns the settings of a check, with the log of the trainer that it compares, if any."""
    from raslik_jax.run.workspace import adapter_source  # it takes jax with it

    files = options.recipe or map(str, recipe.find_files(adapter_source(config)))
    log = next((path for path in files if path.endswith(recipe.STATE)), "")
    if options.check_recipe < 1 and not log:
        raise ValueError(
            f"--check_recipe={options.check_recipe} must have {recipe.STATE} with the losses of "
            "the training next to the adapter: name one with --recipe, or pass --check_recipe to "
            "train all steps"
        )
    values = {"check_recipe": options.check_recipe, "check_log": log}
    return {f"unlearn.{ALGORITHM}.{name}": value for name, value in values.items()}


def _lines(
    adapter: pathlib.Path,
    found: recipe.Recipe,
    values: Mapping[str, Any],
    settings: Mapping[str, Any],
    given: Mapping[str, Any],
) -> Iterator[str]:
    """Yields the recipe, one line per setting, with the source of each value."""
    yield "recipe of the training"
    for field in _FIELDS:
        value = settings[f"unlearn.{ALGORITHM}.{field.name}"]
        origin = "default"
        if field.name in values:
            origin = found.settings[field.name].origin
        if value != values.get(field.name, field.default):
            origin = "given"
        yield f"  {field.name:<17}{value!s:<10} {origin}"
    if not values:
        yield "  no file says how the adapter was trained: give --recipe, or each setting"
    targets = found.settings.get("targets")
    if targets and targets.value == recipe.BY_ROWS and f"unlearn.{ALGORITHM}.targets" not in given:
        other = {"all": "response", "response": "all"}[values["targets"]]
        yield "  the trainer chose the targets by the form of its rows, here by those of the run's"
        yield f"  file: for a file of another form pass --unlearn.{ALGORITHM}.targets={other}"
    for difference in found.differences:
        yield f"  the files differ: {difference}; the first one decides"
    for lack in found.lacks:
        yield f"  left out: {lack}"
    trained = read_json(adapter / storage.ADAPTER_CONFIG, dict)
    if trained.get("lora_dropout"):
        yield "  dropout uses other random numbers than the trainer"
