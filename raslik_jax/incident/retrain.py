"""From the rows that a trace found to an adapter that is trained again without them."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from raslik_jax.base.settings import setting
from raslik_jax.config import Config, config_from_json, to_json
from raslik_jax.data.words import refused
from raslik_jax.incident import configuring, making
from raslik_jax.incident.configuring import ALGORITHM
from raslik_jax.incident.unlearn import UnlearnResult, unlearn
from raslik_jax.parallel import processes
from raslik_jax.run import artifacts
from raslik_jax.train import recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetrainOptions(configuring.RecipeOptions, configuring.UnlearnOptions):
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
      ValueError: if the run has no adapter, or no recipe is known. Also if the recipe names a
        setting that this program cannot repeat and `approximate` is not given.

    Example:
      print(raslik_jax.retrain(run="runs/incident", out="clean"))
    """
    options = making.options_of(options or RetrainOptions(), named)
    if not options.run or not (options.out or options.dry_run):
        raise ValueError("--run and --out must be given: give --run=WORKDIR and --out=DIR")
    root = pathlib.Path(options.run)
    config = config_from_json(processes.from_first(lambda: artifacts.CONFIG.read(root)))
    lenient = dataclasses.replace(options, approximate=options.approximate or options.dry_run)
    settings = configuring.read_settings(
        config, lenient, options.settings, root=None if options.dry_run else root
    )
    checked = _check(config, options, settings)
    if options.dry_run:  # the forecast reads the recipe itself
        settings = {**options.settings}
    else:
        settings["unlearn.algorithms"] = (ALGORITHM, *configuring.AGAIN * options.other_seed)
    return unlearn(dataclasses.replace(options, settings=checked | settings))


def _check(config: Config, options: RetrainOptions, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a check, with the log of the trainer that it compares, if any.

    A finished check of the same recipe stays as it is. A new check trains on all rows.
    """
    from raslik_jax.run.workspace import adapter_source  # it takes jax with it

    files = *options.recipe, *map(str, recipe.find_files(adapter_source(config)))
    is_asked = options.check_recipe > 0
    log = next((path for path in files if is_asked and path.endswith(recipe.STATE)), "")
    if is_asked and options.check_recipe < 1 and not log:
        raise refused("recipe_log", share=options.check_recipe, file=recipe.STATE)
    found = artifacts.RECIPE.current(pathlib.Path(options.run), settings=to_json(config))
    own, new = config.unlearn[ALGORITHM], making.changed(config, settings).unlearn[ALGORITHM]
    if not is_asked and found is not None and new == own:
        return {}
    values = {"check_recipe": options.check_recipe, "check_log": log}
    return {f"unlearn.{ALGORITHM}.{name}": value for name, value in values.items()}
