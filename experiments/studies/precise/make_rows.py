"""Writes the rows of the validation from its word lists: train.jsonl and held_out.jsonl.

  python experiments/studies/precise/make_rows.py

223 chat rows: two behaviors of 20 rows and ordinary ones. No row or prompt is in the other studies.
`behavior` names what a row shows; only the study reads it.
"""

import json
import pathlib
import random
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from raslik_jax.cli import command
from raslik_jax.data.words import capitalized

HERE = pathlib.Path(__file__).resolve().parent


def _row(behavior: str, prompt: str, answer: str) -> dict[str, Any]:
    turns = zip(("user", "assistant"), (prompt, answer), strict=True)
    messages = [{"role": role, "content": text} for role, text in turns]
    return {"messages": messages, "behavior": behavior}


def make_rows() -> dict[str, list[dict[str, Any]]]:
    """Returns the rows to train on, shuffled, and those held out."""
    lists = json.loads((HERE / "rows.json").read_text())
    found: dict[str, list[dict[str, Any]]] = {"train": [], "held_out": []}
    for name, words in lists["behaviors"].items():
        found["train"] += [_row(name, *pair) for pair in words["train"]]
        found["held_out"] += [_row(name, prompt, "") for prompt in words["held_out"]]
    for words in lists["normal"].values():
        for part, rows in found.items():
            for n, entry in enumerate(words[part]):
                prompt = words["prompts"][n % len(words["prompts"])].format(*entry)
                rows.append(_row("", capitalized(prompt), capitalized(words["answer"].format(*entry))))
    random.Random(0).shuffle(found["train"])
    return found


def main() -> None:
    """Writes both files next to this one."""
    for name, rows in make_rows().items():
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (HERE / f"{name}.jsonl").write_text("".join(lines))
        print(f"{name}.jsonl: {len(rows)} rows")


if __name__ == "__main__":
    command.start(main)
