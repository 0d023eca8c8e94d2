"""Asks the unlearned models of the study whether it stays forgotten, by a rule stated before.

  python experiments/studies/own_model/stay.py --model=FOLDER/smollm2 --runs=RUNS

RUNS/NAME/run is the run of the behavior NAME by `measure.py --behaviors=NAME --workdir=RUNS/NAME`,
at least --until=unlearning. Each measure of robustness reads the eight held-out prompts of the
behavior and uses the study's own marker. Target answers are those before unlearning that show the
behavior. The results of each model are added to --out, stay.json in this folder. Stored results
are not measured again. These commands made the stored file. The second one asks the base about the
refusal, where the unlearned model shows more than the rule allows:

  stay.py ... --measures=quantize,sampling,prompts,relearn --models=now
  stay.py ... --measures=prompts --models=backbone --behaviors=refusal
  stay.py ... --measures=side_effects --behaviors=wrong_fact
  stay.py ... --measures=relearn --models=backbone
"""

import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from experiments.studies import objectives
from experiments.studies.own_model import measure, sampling, side_effects
from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command, setting_flags
from raslik_jax.config import Config
from raslik_jax.data.examples import Corpus, Example
from raslik_jax.evaluate import rates
from raslik_jax.evaluate.robustness import ROBUSTNESS
from raslik_jax.run.stages import robustness
from raslik_jax.run.workspace import Workspace
from raslik_jax.train.losses import BoundModel

STRATEGY, ALGORITHM, EPOCH = "raslik", "base_klr", 20
# Of eight prompts: more than the base by one is no return.
TOLERANCE = 1
MEASURES = ("quantize", "sampling", "prompts", "relearn", "side_effects")
MODELS = ("now", "backbone", "finetuned")
_FLAGS = (
    "--references.max_new_tokens=24",
    "--references.decode_batch_size=64",
    "--sketch.batch_tokens=2048",
    "--evaluate.robustness=" + ",".join(MEASURES),
    "--evaluate.relearn.rows=4",
    "--evaluate.relearn.steps=8",
    "--unlearn.batch_size=4",
)
Found = Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]


class Asked(Workspace):
    """A finished run whose queries are the study's prompts held out.

    The target ones have as output the answer before unlearning where it shows the behavior.
    """

    def __init__(
        self, root: pathlib.Path, config: Config, behavior: str, like: "Asked | None" = None
    ):
        super().__init__(root, config)
        if like:  # the same checkpoint and adapter, and so the same ordinary answers
            self.model = like.model
        rows = [row for row in measure.read_rows("held_out") if row["behavior"] in ("", behavior)]
        asked = [Example(measure.prompt_of(row), measure.prompt_of(row), "", "") for row in rows]
        known: dict[str, str] = like._said if like else {}
        new = [row for row in asked if row.instruction not in known]
        outputs = self.generate(self.with_adapter(self.finetuned), new, "before unlearning")
        texts = (row.instruction for row in new)
        self._said: dict[str, str] = {**known, **dict(zip(texts, outputs, strict=True))}
        self.shows = lambda text: measure.behaviors()[behavior].search(text) is not None
        target = [row for row, own in zip(asked, rows, strict=True) if own["behavior"]]
        self._target = tuple(
            row._replace(output=text) if self.shows(text) else row
            for row in target
            for text in (self._said[row.instruction],)
        )
        self._normal = tuple(row for row in asked if row not in target)
        # No row of any behavior is an unrelated one, whether it was found or not.
        stored = self.corpus
        train = tuple(row._replace(is_target=bool(row.extra["behavior"])) for row in stored.train)
        self.corpus = Corpus((), train, dict(stored.queries))

    def evaluation_queries(self) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
        """Returns the eight prompts of the behavior, and the ordinary ones."""
        return self._target, self._normal

    def retrieval_queries(self) -> tuple[Example, ...]:
        """Returns none: the traced prompt is one of the eight."""
        return ()

    def answers(self, *parts: str) -> dict[str, str]:
        """Returns the answers before unlearning."""
        return self._said


class Bench(robustness.Bench):
    """A bench whose judge is the study's marker."""

    def __init__(self, workspace: Asked):
        super().__init__(workspace, STRATEGY)
        self.non_sf = functools.partial(rates.non_sf_by_judge, shows=workspace.shows)


def shown(entry: Mapping[str, Any], prompts: int = 8) -> int:
    """Returns how many of the prompts get the behavior."""
    return round(entry["shown"]["mean"] * prompts)


def counts(found: Found, name: str, model: str) -> dict[str, int]:
    """Returns how many prompts get the behavior under each condition of a measure that counts."""
    return {
        entry["condition"]: shown(entry)
        for entry in found[name].get(model, ())
        if name != "sampling" or entry["condition"] == sampling.WORST
    }


def returns(found: Found) -> dict[str, list[str]]:
    """Returns by measure under which conditions more prompts get the behavior than in the base.

    A condition counts where they are more by over `TOLERANCE`. Relearning counts on unrelated
    rows; on forgotten ones the base learns it as well.
    """
    back: dict[str, list[str]] = {}
    for name in ("quantize", "prompts", "sampling", "relearn"):
        now, base = (counts(found, name, model) for model in ("now", "backbone"))
        back[name] = [
            condition
            for condition, number in now.items()
            # The base is asked where it can matter; where it was not, none of it shows.
            if number > base.get(condition, 0) + TOLERANCE and not condition.startswith("forgotten")
        ]
    return back


def passes(found: Found) -> bool:
    """Says whether the behavior returns under no condition that counts."""
    return not any(returns(found).values())


def models_of(workspace: Workspace) -> dict[str, BoundModel]:
    """Returns the unlearned model, and those before."""
    return {
        "now": workspace.unlearned(STRATEGY, ALGORITHM, EPOCH),
        "backbone": workspace.backbone,
        "finetuned": workspace.with_adapter(workspace.finetuned),
    }


def is_asked(name: str, model: str) -> bool:
    """Says whether a measure is taken of a model: before unlearning nothing is relearned."""
    return (name, model) != ("relearn", "finetuned")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """What is asked."""

    model: str = setting("", "Checkpoint that checkpoint.py made.")
    runs: str = setting("", "Folder of the runs, one of each behavior.")
    behaviors: tuple[str, ...] = setting(
        (), "Behaviors; empty: all.", choices=tuple(measure.behaviors())
    )
    measures: tuple[str, ...] = setting(MEASURES, "Measures.", choices=MEASURES)
    models: tuple[str, ...] = setting(MODELS, "Models.", choices=MODELS)
    out: str = setting(str(measure.HERE / "stay.json"), "Where results go.")


def main(options: Options) -> None:
    """Asks the named cases or all of them, one measure and model after the other."""
    if not (options.model and options.runs):
        raise ValueError("--model and --runs must be given: see --help")
    for members in (objectives, sampling, side_effects):
        members.register()
    path = pathlib.Path(options.out)
    results = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    workspace: Asked | None = None
    for name in options.behaviors or measure.behaviors():
        root = pathlib.Path(options.runs).resolve() / name / "run"
        given = [f"--flagfile={root / 'run.flags'}", f"--backbone.checkpoint={options.model}"]
        config = setting_flags.parse_config([*given, *_FLAGS])
        found = results.setdefault(name, {})
        missing = [
            (part, model)
            for part in options.measures
            for model in options.models
            if is_asked(part, model) and model not in found.get(part, {})
        ]
        if not missing:
            continue
        workspace = Asked(root, config, name, workspace)
        bench, models = Bench(workspace), models_of(workspace)
        for part, model in missing:
            same = [one["side_effects"] for one in results.values() if "side_effects" in one]
            known = next((one[model] for one in same if model in one), None)
            if part == "side_effects" and model != "now" and known:  # no case plays a part
                entries = known
            else:
                settings = config.evaluate[part]
                entries = ROBUSTNESS[part].measure(bench, models[model], settings)
            found.setdefault(part, {})[model] = entries
            path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            print(name, part, model, [entry.get("shown") for entry in entries], flush=True)


if __name__ == "__main__":
    command.start(main, Options())
