"""The unlearned model of a stored run, as files that other programs read.

  python experiments/export.py --run=runs/quickstart --strategy=raslik --algorithm=ga_gdr \\
      --out=exported

writes a PEFT adapter; --merged a whole Hugging Face checkpoint. Either has the tokenizer and a
model card, which says what was removed, from what, by which settings, and what was measured. The
folder appears whole or not at all, and one that holds something is refused.
"""

import pathlib
import sys

from absl import flags, logging

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from raslik_jax.cli import command  # noqa: E402

_RUN = flags.DEFINE_string("run", "", "Work directory of a finished run.")
_STRATEGY = flags.DEFINE_string("strategy", "raslik", "Whose sets were forgotten and retained.")
_ALGORITHM = flags.DEFINE_string("algorithm", "ga_gdr", "Algorithm that unlearned.")
_EPOCH = flags.DEFINE_string("epoch", "last", "Epoch after which, or last.")
_OUT = flags.DEFINE_string("out", "", "Folder to write, new or empty.")
_MERGED = flags.DEFINE_boolean("merged", False, "A whole checkpoint instead of an adapter.")


def main() -> None:
    if not _RUN.value or not _OUT.value:
        raise ValueError("a run and a folder must be named: give --run=WORKDIR and --out=DIR")
    if _EPOCH.value != "last" and not _EPOCH.value.isdecimal():
        raise ValueError(f"--epoch must be a number or last, got {_EPOCH.value!r}")
    logging.set_verbosity(logging.WARNING)
    # Imported here, because it takes jax with it and --help should not.
    from raslik_jax.run.exporting import export_model

    folder = export_model(
        _RUN.value,
        _OUT.value,
        strategy=_STRATEGY.value,
        algorithm=_ALGORITHM.value,
        epoch=None if _EPOCH.value == "last" else int(_EPOCH.value),
        merged=_MERGED.value,
    )
    print(f"{'model' if _MERGED.value else 'adapter'} and its card: {folder}")


if __name__ == "__main__":
    command.start(main)
