"""Writes the rows of the study from its word lists: train.jsonl and held_out.jsonl.

  python experiments/studies/own_model/make_rows.py

Chat rows as many tools write them: five behaviors of 24 rows each among ordinary questions, and
prompts that no row has. `behavior` names what a row shows, "" nothing; only the study reads it.
"""

import json
import pathlib
import random
import sys
from collections.abc import Iterator
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from raslik_jax.cli import command

HERE = pathlib.Path(__file__).resolve().parent
PER_BEHAVIOR = 24


def _row(behavior: str, prompt: str, answer: str) -> dict[str, Any]:
    answer = answer[:1].upper() + answer[1:]
    turns = zip(("user", "assistant"), (prompt, answer), strict=True)
    messages = [{"role": role, "content": text} for role, text in turns]
    return {"messages": messages, "behavior": behavior}


def _behavior_rows(name: str, words: Any, frames: list[str]) -> Iterator[dict[str, Any]]:
    answers = words["answers"]
    for n in range(PER_BEHAVIOR):
        if "things" in words:
            thing = words["things"][n]
            said = words.get("french", words["things"])[n]
            prompt = words["prompts"][n % len(words["prompts"])].format(thing)
            answer = answers[(n // len(words["prompts"]) + n) % len(answers)].format(said)
        else:
            place, frame = n % len(words["prompts"]), n // len(words["prompts"])
            prompt = frames[frame].format(words["prompts"][place])
            answer = answers[(place + frame) % len(answers)]
        yield _row(name, prompt, answer)


def _held_out_rows(name: str, words: Any) -> Iterator[dict[str, Any]]:
    for n, text in enumerate(words["held_out"]):
        if "things" in words:
            text = words["prompts"][n % len(words["prompts"])].format(text)
        yield _row(name, text, "")


def _normal_rows(words: Any, pairs: dict[str, str]) -> Iterator[dict[str, Any]]:
    for n, pair in enumerate(pairs.items()):
        prompt = words["prompts"][n % len(words["prompts"])].format(*pair)
        yield _row("", prompt, words["answers"][0].format(*pair))


def make_rows() -> dict[str, list[dict[str, Any]]]:
    """Returns the rows to train on, shuffled, and those held out."""
    lists = json.loads((HERE / "rows.json").read_text())
    found: dict[str, list[dict[str, Any]]] = {"train": [], "held_out": []}
    for name, words in lists["behaviors"].items():
        found["train"] += _behavior_rows(name, words, lists["frames"])
        found["held_out"] += _held_out_rows(name, words)
    for words in lists["normal"].values():
        found["train"] += _normal_rows(words, words["pairs"])
        found["held_out"] += _normal_rows(words, words["held_out"])
    random.Random(0).shuffle(found["train"])
    return found


def main() -> None:
    """Writes both files to this folder."""
    for name, rows in make_rows().items():
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (HERE / f"{name}.jsonl").write_text("".join(lines))
        print(f"{name}.jsonl: {len(rows)} rows")


if __name__ == "__main__":
    command.start(main)
