"""The settings of a traced run with the changes of unlearning or of retraining."""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from raslik_jax.base.files import read_json
from raslik_jax.base.messages import shown, some_of
from raslik_jax.base.settings import Settings, replaced, setting
from raslik_jax.config import Config, EvaluateConfig, config_from_json
from raslik_jax.data.contents import Conversation
from raslik_jax.data.words import load_words, refused
from raslik_jax.incident import making
from raslik_jax.models import storage
from raslik_jax.parallel import processes
from raslik_jax.report.recipes import FIELDS, recipe_lines
from raslik_jax.run import artifacts
from raslik_jax.train import recipe
from raslik_jax.train.objectives import OBJECTIVES

# For a user's own model and for one whose base is not at hand.
PRESET, WHOLE = (
    {name: tuple(value) if isinstance(value, list) else value for name, value in one.items()}
    for one in load_words("presets").values()
)
ALGORITHM = "retrain"
AGAIN = tuple(name for name, one in OBJECTIVES.items() if one.repeats == ALGORITHM)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnlearnOptions(making.Options):
    """The run to go on with, the sets, and the files to write."""

    run: str = setting("", "Work directory of a trace.")
    out: str = setting(
        "",
        "Folder for the new adapter and its card. It must be new, empty or unchanged since "
        "this run wrote it.",
    )
    forget_file: str = setting("", "File of rows to forget, in place of those of the trace.")
    retain_file: str = setting(
        "", "With --forget_file: file of rows to retain (default: random other rows)."
    )
    cleaned_train_file: str = setting(
        "",
        "Where to write the training file without the rows that were found (default: in --run). "
        "It is a folder if the trace read several files.",
    )
    measure: Literal["quick", "full"] = setting(
        "quick",
        "quick: the answers to held-out prompts, and the traced answer. full: also the perplexity "
        "of the sets and of the answers.",
    )
    merged: bool = setting(False, "Write a whole checkpoint instead of an adapter.")
    dry_run: bool = setting(
        False,
        "Print the cost of unlearning and of retraining with an advice, and do neither.",
    )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.retain_file and not self.forget_file:
            yield "--retain_file needs --forget_file: give both"
        elif self.out and self.cleaned_train_file:
            folder, file = (pathlib.Path(p).resolve() for p in (self.out, self.cleaned_train_file))
            if file.is_relative_to(folder):
                yield str(refused("cleaned_inside"))


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


def make_config(options: UnlearnOptions) -> Config:
    """Returns the settings of the run with the changes of the options.

    The requested algorithm comes first. If the run already has a model of the other kind (unlearned
    or retrained) that is up to date under these settings, the run keeps it and measures it too.
    """
    root = pathlib.Path(options.run)
    recorded = processes.from_first(lambda: artifacts.CONFIG.read(root))
    given = dict(options.settings)
    used = [name for name in recorded["unlearn"]["algorithms"] if name in OBJECTIVES]
    stepped = [name for name in used if not OBJECTIVES[name].retrains]
    given.setdefault("unlearn.algorithms", tuple(stepped or PRESET["unlearn.algorithms"]))
    if options.forget_file:
        names = {"forget_file": options.forget_file, "retain_file": options.retain_file}
        given |= {f"retrieve.given.{name}": path for name, path in names.items()}
        given["retrieve.strategies"] = ("given",)
    run = config_from_json(with_own_query(recorded, root))
    if options.measure == "full" and not run.evaluate.perplexity_examples:
        given.setdefault("evaluate.perplexity_examples", EvaluateConfig().perplexity_examples)
    config = making.changed(run, given)
    asked = config.unlearn.algorithms
    for name, chosen in (
        ("retrieve.strategies", config.retrieve.strategies),
        ("unlearn.algorithms", [one for one in asked if OBJECTIVES[one].repeats not in asked]),
    ):
        if len(chosen) > 1:
            raise ValueError(f"--{name} must be one, the run has {', '.join(chosen)}: choose one")
    is_other = not OBJECTIVES[asked[0]].retrains
    others = [n for n in used if OBJECTIVES[n].retrains == is_other or OBJECTIVES[n].repeats]
    others = [name for name in others if name not in asked]
    if not others:
        return config
    config = making.changed(run, {**given, "unlearn.algorithms": (*asked, *others)})
    from raslik_jax.run.plan import Plan, plan_units  # it takes jax with it
    from raslik_jax.run.workspace import Workspace

    done = Plan(root, plan_units(config, Workspace(root, config))).survey().done
    (strategy,) = config.retrieve.strategies
    places = {name: f"unlearn/{artifacts.Variant(strategy, name)}" for name in others}
    for name, place in places.items():
        if place not in done and (root / place).is_dir():
            print(f"left out: {name}, which was made with other rows or settings")
    kept = [name for name in others if places[name] in done]
    return replaced(config, {"unlearn.algorithms": (*asked, *kept)})


def with_own_query(recorded: dict[str, Any], root: pathlib.Path) -> dict[str, Any]:
    """Returns a run's settings with the traced answer inside the run.

    A copied or moved run would otherwise read it at the old place.
    """
    own, corpus = artifacts.TRACED_QUERY.place(root), recorded["corpus"]
    records = corpus.get("records") or {}
    if pathlib.Path(records.get("queries_file", "")).name != own.name or not own.is_file():
        return recorded
    records = {**records, "queries_file": str(own.absolute())}
    return {**recorded, "corpus": {**corpus, "records": records}}


def train_file(config: Config) -> str:
    """Returns the training file of a trace; a ValueError if the run has another dataset."""
    if not hasattr(config.corpus.own, "train_file"):
        raise refused("run_dataset", got=config.corpus.dataset)
    return str(config.corpus.own.train_file)


def check_hub_rows(config: Config, root: pathlib.Path) -> None:
    """Refuses a hub dataset that changed since its rows were read; it has no file to compare."""
    from raslik_jax.run.workspace import Workspace  # it takes jax with it

    source = train_file(config)
    if source.startswith("hub:") and not Workspace(root, config).has_rows_of_today():
        raise refused("hub_changed", source=source)


def read_settings(
    config: Config,
    options: RecipeOptions,
    given: Mapping[str, Any],
    *,
    root: pathlib.Path | None = None,
    is_told: bool = True,
) -> dict[str, Any]:
    """Returns the settings of training a run's adapter again, all by dotted name, and prints them.

    They are printed if `is_told`. Values that are `given` replace those of the recipe. With the
    folder `root` of the run it refuses to go on without a recipe for its rows.
    """
    if not config.backbone.adapter:
        raise refused("run_adapter")
    train_file(config)  # refuses a run that is no trace
    from raslik_jax.run.workspace import adapter_source  # it takes jax with it

    folder = adapter_source(config)
    files = [pathlib.Path(path) for path in options.recipe]
    found = recipe.recipe_of(folder, files)
    trained = read_json(folder / storage.ADAPTER_CONFIG, dict)
    if (start := trained.get("init_lora_weights", True)) not in (True, None):
        lack = f"the start of the adapter (init_lora_weights of the adapter is {shown(start)})"
        found = found._replace(lacks=(*found.lacks, lack))
    if files and not found.settings:
        raise refused("recipe_silent", files=some_of((path.name for path in files), 3))
    if found.lacks and not options.approximate:
        raise refused("recipe_lacks", got="; ".join(found.lacks))
    known = {*found.settings, *(name.removeprefix(f"unlearn.{ALGORITHM}.") for name in given)}
    known |= {"epochs"} if "steps" in known else set()
    if root and (missing := [name for name in recipe.DECISIVE if name not in known]):
        raise refused("recipe_missing", names=", ".join(missing))
    values = {name: one.value for name, one in found.settings.items()}
    if root and found.steps and f"unlearn.{ALGORITHM}.batch_size" not in given:
        from raslik_jax.evaluate import reproduction

        count = len(artifacts.TRAIN.read(root))
        off = reproduction.check_devices(values, count, found.steps, found.passes)
        found = found._replace(differences=(*found.differences, *off))
    if values.get("targets") == recipe.BY_ROWS:
        row = making.first_rows(config, 1)[0]
        is_talk = isinstance(row.content, Conversation) and not row.content.first
        values["targets"] = "all" if is_talk else "response"
    # All of them, so that nothing of an earlier training of this run is left.
    plain: dict[str, Any] = {field.name: field.default for field in FIELDS}
    own = f"unlearn.{ALGORITHM}."
    settings = {own + name: value for name, value in (plain | values).items()}
    settings |= given
    for name, number in (("epochs", "steps"), ("warmup", "warmup_steps")):
        if own + name in given and own + number not in given:
            settings[own + number] = 0  # it would decide in place of the value that is given
    for name in AGAIN:
        again = {f"unlearn.{name}.{key}": settings[own + key] for key in plain}
        again[f"unlearn.{name}.seed"] = settings[own + "seed"] + 1
        settings = again | settings
    if is_told and processes.is_first():
        texts = recipe_lines(found, values, settings, given, own, trained.get("lora_dropout"))
        print(*texts, sep="\n", flush=True)
    return settings
