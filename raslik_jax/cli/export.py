"""Writes the unlearned model of a stored run as files that other programs read.

  raslik export --run=runs/demo --strategy=raslik --algorithm=ga_gdr --out=exported

writes a PEFT adapter; --merged a whole Hugging Face checkpoint. Either has the tokenizer and a
model card, which says what was removed, from what, by which settings, and what was measured. The
folder appears whole or not at all, and one that holds something is refused. --push_to_hub uploads
it as well, as a private model.
"""

import dataclasses
import pathlib
from typing import Any

from absl import logging

from raslik_jax.base import files
from raslik_jax.base.settings import Settings, setting
from raslik_jax.run import hub, written


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """What is exported, and where to."""

    run: str = setting("", "Work directory of a run that has unlearned.")
    strategy: str = setting("raslik", "Whose sets were forgotten and retained.")
    algorithm: str = setting("ga_gdr", "Algorithm that unlearned.")
    epoch: str = setting("last", "Epoch after which, or last.")
    out: str = setting("", "Folder to write, new or empty.")
    push_to_hub: str = setting("", "OWNER/NAME on the Hugging Face hub to upload it to as well.")
    public: bool = setting(False, "--push_to_hub: for everybody to see; else private.")
    merged: bool = setting(False, "A whole checkpoint instead of an adapter.")
    max_shard_gb: float = setting(
        2.0,
        "--merged: gigabytes of a file of weights; more go into several with an index.",
        above=0,
    )

    def problems(self) -> list[str]:
        if self.public and not self.push_to_hub:
            return ["--public needs --push_to_hub: name where to"]
        if self.epoch == "last" or self.epoch.isdecimal():
            return []
        return [f"--epoch must be a number or last, got {self.epoch!r}"]


def run(options: Options) -> None:
    """Exports, and prints where to."""
    if not options.run or not options.out:
        raise ValueError("--run and --out must be named: give --run=WORKDIR and --out=DIR")
    logging.set_verbosity(logging.WARNING)
    root, folder = pathlib.Path(options.run), pathlib.Path(options.out)
    written.check_outside(folder, "--out", root)
    files.check_new_folder(folder)
    if options.push_to_hub:
        hub.check_hub(options.push_to_hub, is_public=options.public)
    from raslik_jax.run.exporting import export_model  # it takes jax with it, and --help should not

    epoch = None if options.epoch == "last" else int(options.epoch)
    names: Any = {"strategy": options.strategy, "algorithm": options.algorithm}
    shard_bytes = int(options.max_shard_gb * 1e9)
    how: Any = {"epoch": epoch, "merged": options.merged, "shard_bytes": shard_bytes}
    with written.replacing(root, folder) as made:
        export_model(root, made, **names, **how)
    print(f"{'model' if options.merged else 'adapter'} and its card: {folder}")
    if options.push_to_hub:
        url = hub.push_folder(folder, options.push_to_hub, is_public=options.public)
        print(f"on the hub: {url}")
