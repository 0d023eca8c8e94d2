"""From a run to its unlearned model as files that other programs read."""

import dataclasses
import pathlib
from typing import Any

from raslik_jax.base import files
from raslik_jax.base.settings import Settings, setting
from raslik_jax.incident import making
from raslik_jax.run import artifacts, written


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions(Settings):
    """The model to export and its place."""

    run: str = setting("", "Work directory of a run that has unlearned.")
    strategy: str = setting("", "Retrieval strategy of the sets; empty: the only one of the run.")
    algorithm: str = setting("", "Objective of the model; empty: the only one of the run.")
    epoch: str = setting("last", "Number of the epoch, or last.")
    out: str = setting("", "Folder to write. It must be new or empty.")
    merged: bool = setting(False, "Write a whole checkpoint instead of an adapter.")

    def problems(self) -> list[str]:
        wrong = f"--epoch must be a number or last, got {self.epoch!r}: correct it"
        return [] if self.epoch == "last" or self.epoch.isdecimal() else [wrong]


@dataclasses.dataclass(frozen=True)
class ExportResult:
    """The folder of an exported model."""

    folder: pathlib.Path
    kind: str

    def __str__(self) -> str:
        return f"{self.kind} and its card: {self.folder}"


def export(options: ExportOptions | None = None, **named: Any) -> ExportResult:
    """Writes the unlearned model of a stored run with its tokenizer and a card.

    Options are those of `ExportOptions`, as an object or by name.

    Example:
      print(raslik_jax.export(run="runs/demo", strategy="raslik", algorithm="ga_gdr", out="out"))
    """
    options = making.options_of(options or ExportOptions(), named)
    if not options.run or not options.out:
        raise ValueError("--run and --out must be named: give --run=WORKDIR and --out=DIR")
    root, folder = pathlib.Path(options.run), pathlib.Path(options.out)
    written.check_outside(folder, "--out", root)
    files.check_new_folder(folder)
    from raslik_jax.incident import exporting  # it takes jax with it, and --help should not

    with written.replacing(root, folder) as made:
        of = artifacts.Variant(options.strategy, options.algorithm)
        exporting.export_model(root, of, made, epoch=options.epoch, merged=options.merged)
    return ExportResult(folder, "model" if options.merged else "adapter")
