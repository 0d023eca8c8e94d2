"""The declaration of a unit of work: its inputs and the settings that decide its result.

Both are texts of words. A name in braces means several words: those of `_paths` for inputs, those
of `_SETTINGS` for settings. `{0}` means the member of the unit.
"""

import functools
import itertools
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from raslik_jax.base import settings as settings_lib
from raslik_jax.config import Config
from raslik_jax.data.read.sources import content_files
from raslik_jax.run import artifacts
from raslik_jax.run.artifacts import Variant
from raslik_jax.run.programs import Work
from raslik_jax.run.units import Unit
from raslik_jax.run.workspace import Workspace
from raslik_jax.train.objectives import OBJECTIVES

Files = Mapping[str, str | os.PathLike[str]]


class Case(NamedTuple):
    """The context of a recipe: a run, one of the members, and the units planned before it."""

    workspace: Workspace
    member: Any = None
    names: Sequence[str] = ()

    @property
    def config(self) -> Config:
        """The settings of the run."""
        return self.workspace.config


class Recipe(NamedTuple):
    """Units of one kind: declared once, next to the function that makes them.

    Attributes:
      name: the folder; `{0}` means the member.
      run: function of the workspace, the member if there are members, and the folder. It makes the
        result.
      reads: its inputs: files of earlier units.
      settings: the settings that decide the result. A stage's name means all of its settings (see
        `pick`).
      writes: the format numbers of its files by name. Raise one if a file changes its meaning.
      values: other values that decide the result.
      files: its inputs outside of the work directory by their kind.
      is_asked: whether a run makes them.
      members: function that returns the members, such as strategies; each has a unit. By default
        there is one unit without a member.
      measures: whether they only measure: no set and no model depends on them.
      work: function from an abstract run and the member to the work of a unit; None for work of the
        host.
      is_resumable, is_alone: as in `Unit`.
    """

    name: str
    run: Callable[..., None]
    reads: str | Callable[[Case], str] = ""
    settings: str | Callable[[Case], str] = ""
    writes: Mapping[str, int] = {}
    values: Callable[[Case], Mapping[str, Any]] = lambda case: {}
    files: Callable[[Case], Files] = lambda case: {}
    is_asked: Callable[[Config], object] = lambda config: True
    members: Callable[[Config], Sequence[Any]] = lambda config: (None,)
    measures: bool = False
    work: Callable[..., Work] | None = None
    is_resumable: bool = False
    is_alone: bool | Callable[[Config], bool] = False

    def units(self, workspace: Workspace, names: Sequence[str] = ()) -> Iterator[Unit]:
        """Yields the units of a run; `names` are those that are planned before."""
        config, work = workspace.config, self.work
        for member in self.members(config) if self.is_asked(config) else ():
            case = Case(workspace, member, names)
            reads, settings = (
                one if isinstance(one, str) else one(case) for one in (self.reads, self.settings)
            )
            words = _paths(workspace)
            text = settings.format(member, config=config, **_SETTINGS)
            decided, named = pick(config, text.split())
            formats = {"formats": dict(self.writes)} if self.writes else {}
            given = [] if member is None else [member]
            alone = self.is_alone if isinstance(self.is_alone, bool) else self.is_alone(config)
            yield Unit(
                self.name.format(member),
                tuple(dict.fromkeys(reads.format(member, config=config, **words).split())),
                {**decided, **formats, **self.values(case)},
                functools.partial(self.run, workspace, *given),
                files={**named, **self.files(case)},
                is_resumable=self.is_resumable,
                is_alone=alone,
                work=work and (lambda run, given=given: work(run, *given)),
            )


def variants_of(
    config: Config, *, retrains: bool | None = None, repeats: bool = True
) -> Sequence[Variant]:
    """Returns the models that a run unlearns: by steps on the adapter, or by training again.

    `retrains` takes one of these two kinds. Without `repeats` no model is a second training on the
    rows of another.
    """
    pairs = itertools.product(config.retrieve.strategies, config.unlearn.algorithms)
    return [
        Variant(strategy, name)
        for strategy, name in pairs
        if retrains in (None, OBJECTIVES[name].retrains)
        and (repeats or not OBJECTIVES[name].repeats)
    ]


# The retrained models with which other models of a run are compared.
distant_variants = functools.partial(variants_of, retrains=True, repeats=False)


def _groups(**texts: str) -> dict[str, str]:
    """Returns words by the name of their group; a group may name earlier ones in braces."""
    for name, text in texts.items():
        texts[name] = text.format(**texts)
    return texts


_SETTINGS = _groups(
    text="corpus.template corpus.max_len",
    # The source of the model: its weights, their format, and the shape of its adapter.
    model="seed backbone.checkpoint backbone.revision backbone.dtype backbone.operands "
    "backbone.format backbone.double_quant backbone.adapter backbone.adapter_revision "
    "finetune.lora_rank finetune.lora_alpha finetune.lora_dropout finetune.lora_targets",
    decoding="{text} {model} references.max_new_tokens references.decode_batch_size",
    likelihood="{text} {model} sketch.batch_tokens",
    perplexity="{likelihood} references.base sketch.query_output evaluate.perplexity_examples "
    "references.query_split",
    traced="{likelihood} {decoding} sketch.query_output",
    gradient="{likelihood} sketch.gradient_at sketch.loss sketch.normalize "
    "sketch.targets sketch.base_format sketch.num_buckets",
    sketch="{gradient} sketch.projection sketch.size",
    kernel="retrieve.center retrieve.aggregate sketch.query_output",
)


def _paths(workspace: Workspace) -> dict[str, str]:
    """Returns the groups of inputs by their names."""
    config = workspace.config
    own_model = "" if config.backbone.checkpoint else " backbone/model"
    place = {"finetuned": " finetune/adapter", "initial": " finetune/initial"}
    answers = "" if config.sketch.query_output == "gold" else f" {artifacts.OWN_ANSWERS.path}"
    measured = [
        artifacts.measured_rows(workspace.query_split, kind).path for kind in ("target", "normal")
    ]
    return _groups(
        train=artifacts.TRAIN.path,
        tokens=artifacts.TRAIN_TOKENS.path,
        rows="{train} {tokens}",
        model=f"{artifacts.TOKENIZER.path} {artifacts.TEMPLATE.path}{own_model}",
        finetuned="{model} finetune/adapter",
        sketched="{model}" + place[config.sketch.gradient_at],
        queries=artifacts.RETRIEVAL.path + answers,
        measured=" ".join(measured),
        # The source of the rows that perplexity is taken on.
        drawn="{train} {measured} {queries}",
    )


def pick(config: Config, names: Collection[str]) -> tuple[dict[str, Any], Files]:
    """Returns the values of settings, and the files and folders that others of them name.

    A stage's name means all of its settings except those that choose members. A member's name means
    all of its own settings. Settings that decide no result are left out. So are the settings of
    fine-tuning in a run without it.
    """
    values: dict[str, Any] = {}
    files: dict[str, str | os.PathLike[str]] = {}
    for leaf in settings_lib.leaves(config):
        group, family = leaf.name.rpartition(".")[0], leaf.metadata["family"]
        if leaf.name in names or (group in names and family is None and leaf.metadata["decides"]):
            if _is_idle(config, leaf.name):
                continue
            is_file = leaf.metadata["is_path"] and leaf.value not in ("", *leaf.metadata["names"])
            is_rows = is_file and leaf.metadata["is_rows"] and not leaf.value.startswith("hub:")
            if is_rows and (rows := content_files(leaf.value)):
                files |= {f"{leaf.name}/{part}".rstrip("/"): path for part, path in rows.items()}
            elif is_file and not is_rows and os.path.exists(leaf.value):
                parts = {f"{leaf.name}/{part}": part for part in leaf.metadata["parts"]}
                inner = {name: os.path.join(leaf.value, part) for name, part in parts.items()}
                inner = {name: path for name, path in inner.items() if os.path.isfile(path)}
                files |= inner if parts else {leaf.name: leaf.value}
            else:
                values[leaf.name] = list(leaf.value) if type(leaf.value) is tuple else leaf.value
    return values, files


def _is_idle(config: Config, name: str) -> bool:
    """Returns whether a setting belongs to fine-tuning and is not read."""
    if config.finetunes or not name.startswith("finetune."):
        return False
    # Without an adapter of elsewhere a fresh one is made.
    is_shape = name.startswith(("finetune.lora_", "finetune.epochs"))
    return bool(config.backbone.adapter) or not is_shape
