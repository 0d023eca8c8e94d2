"""From a run to its unlearned model as files that other programs read."""

import dataclasses
import pathlib
from typing import Any

from raslik_jax.base import files
from raslik_jax.base.settings import Settings, setting
from raslik_jax.incident import hub, making
from raslik_jax.run import written


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions(Settings):
    """The model to export and its place."""

    run: str = setting("", "Work directory of a run that has unlearned.")
    strategy: str = setting("raslik", "Retrieval strategy of the sets.")
    algorithm: str = setting("ga_gdr", "Objective of the model; after a trace cap_klr.")
    epoch: str = setting("last", "Number of the epoch, or last.")
    out: str = setting("", "Folder to write. It must be new or empty.")
    push_to_hub: str = setting(
        "", "Also upload the files to this OWNER/NAME on the Hugging Face hub."
    )
    public: bool = setting(False, "--push_to_hub: make the repository public (default: private).")
    merged: bool = setting(False, "Write a whole checkpoint instead of an adapter.")
    max_shard_gb: float = setting(2.0, "--merged: most gigabytes of one file of weights.", above=0)

    def problems(self) -> list[str]:
        if self.public and not self.push_to_hub:
            return ["--public needs --push_to_hub: name the repository"]
        if self.epoch == "last" or self.epoch.isdecimal():
            return []
        return [f"--epoch must be a number or last, got {self.epoch!r}: correct it"]


@dataclasses.dataclass(frozen=True)
class ExportResult:
    """The place of an exported model: its folder, and its address on the hub ("" for none)."""

    folder: pathlib.Path
    kind: str
    url: str = ""

    def __str__(self) -> str:
        said = f"{self.kind} and its card: {self.folder}"
        return f"{said}\non the hub: {self.url}" if self.url else said


def export(options: ExportOptions | None = None, **named: Any) -> ExportResult:
    """Writes the unlearned model of a stored run with its tokenizer and a card.

    Options are those of `ExportOptions`, as an object or by name.

    Example:
      print(raslik_jax.export(run="runs/demo", algorithm="ga_gdr", out="exported"))
    """
    options = making.options_of(options or ExportOptions(), named)
    if not options.run or not options.out:
        raise ValueError("--run and --out must be named: give --run=WORKDIR and --out=DIR")
    root, folder = pathlib.Path(options.run), pathlib.Path(options.out)
    written.check_outside(folder, "--out", root)
    files.check_new_folder(folder)
    if options.push_to_hub:
        hub.check_hub(options.push_to_hub, is_public=options.public)
    from raslik_jax.incident.exporting import (
        export_model,  # it takes jax with it, and --help should not
    )

    epoch = None if options.epoch == "last" else int(options.epoch)
    names: Any = {"strategy": options.strategy, "algorithm": options.algorithm}
    shard_bytes = int(options.max_shard_gb * 1e9)
    how: Any = {"epoch": epoch, "merged": options.merged, "shard_bytes": shard_bytes}
    with written.replacing(root, folder) as made:
        export_model(root, made, **names, **how)
    url, to = "", options.push_to_hub
    if to:
        url = hub.push_folder(folder, to, is_public=options.public)
    return ExportResult(folder, "model" if options.merged else "adapter", url)
