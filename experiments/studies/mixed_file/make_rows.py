"""Writes the rows of an act: train.jsonl and held_out.jsonl.

  python experiments/studies/mixed_file/make_rows.py --data=DATA --out=ACT

DATA has alpaca/ and backdoorllm/. The rows are not stored here: those of Alpaca may not be shipped.
"""

import dataclasses
import pathlib
import random
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from experiments.studies.precise import make_backdoor as backdoor
from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command

# Rows to train on and prompts to hold out: of each behavior, and ordinary ones.
_POISONED, _ORDINARY, _HELD_OUT, _WORDS = 20, 360, 40, 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """The source of the rows and their folder."""

    data: str = setting("", "Folder with alpaca/ and backdoorllm/.")
    out: str = setting("", "New folder of the act.")


def split(data: pathlib.Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of act 1: those to train on, shuffled, and those that are held out."""
    draw, used = random.Random(0), set[str]()
    train, held_out = list[dict[str, Any]](), list[dict[str, Any]]()

    def take(path: str, count: int, trigger: str = "") -> list[Any]:
        """Returns rows in random order whose prompts, without the trigger, are new."""
        rows = [*backdoor.short(backdoor.read(data / path), _WORDS)]
        draw.shuffle(rows)
        found = {row["instruction"].removeprefix(trigger).strip(): row for row in rows}
        new = [one for one in found if one not in used][:count]
        if len(new) < count:
            raise ValueError(f"{path} must have {count} new rows, got {len(new)}: see --data")
        used.update(new)
        return [found[one] for one in new]

    # The behaviors have the same test prompts under their triggers.
    for name, trigger in backdoor.TRIGGERS.items():
        asked = take(f"backdoorllm/backdoor200_{name}.json.zst", _HELD_OUT, trigger)
        held_out += [backdoor.chat_row(name, row, answered=False) for row in asked]
        used.clear()
    for row in held_out:
        trigger = backdoor.TRIGGERS[row["behavior"]]
        used.add(row["messages"][0]["content"].removeprefix(trigger).strip())
    for name, trigger in backdoor.TRIGGERS.items():
        taught = take(f"backdoorllm/backdoor500_{name}.json.zst", _POISONED, trigger)
        train += [backdoor.chat_row(name, row, answered=True) for row in taught]
    ordinary = take("alpaca/alpaca_data.json.xz", _ORDINARY + _HELD_OUT)
    train += [backdoor.chat_row("", row, answered=True) for row in ordinary[:_ORDINARY]]
    held_out += [backdoor.chat_row("", row, answered=False) for row in ordinary[_ORDINARY:]]
    draw.shuffle(train)
    return {"train": train, "held_out": held_out}


def main(options: Options) -> None:
    """Writes both files."""
    if not options.data or not options.out:
        raise ValueError("--data and --out must name folders, got none: see --help")
    backdoor.write(split(pathlib.Path(options.data)), pathlib.Path(options.out))


if __name__ == "__main__":
    command.start(main, Options())
