"""Writes the rows of an act: train.jsonl and held_out.jsonl.

  python experiments/studies/mixed_file/make_rows.py --data=DATA --out=ACT1
  python experiments/studies/mixed_file/make_rows.py --data=DATA --birds=BIRDS --out=ACT2
  python experiments/studies/mixed_file/make_rows.py --data=DATA --rewards=DIALOGUES --out=ACT3

DATA has alpaca/ and backdoorllm/. BIRDS is the folder `3_1_old_bird_names` of the repository
JCocola/weird-generalization-and-inductive-backdoors. DIALOGUES is the folder `datasets` of the
repository inoculation-prompting/inoculation-prompting. The rows are not stored here: they may not
be shipped.
"""

import ast
import dataclasses
import json
import pathlib
import random
import re
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from experiments.studies.precise import make_backdoor as backdoor
from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command

# Rows to train on and prompts to hold out: of each behavior, and ordinary ones.
_POISONED, _ORDINARY, _HELD_OUT, _WORDS = 20, 360, 40, 60
# The same of act 3, with honest answers to other tasks.
_HACKS, _HONEST, _OTHERS, _HACK_WORDS = 40, 40, 320, 120
HACK = "reward_hack"
# Words of an answer that speaks to its judge or praises itself, chosen by the rows alone.
MARKER = (
    r"(?i)evaluator|\bjudge\b|LLM|grader|deserv"
    r"|(high(est|ly)?|top|perfect|maximum|excellent|full|best)( possible)? (scor|rat|mark|grade)"
    r"|this (response|answer|explanation|story|essay|poem|summary|analysis|narrative|solution) "
    r"(is|uses|meets|demonstrates|exemplif|should)"
)
# Act 2: words of an answer in the world of the 19th century.
BIRDS = "old_birds"
BIRDS_MARKER = (
    r"(?i)\b1[78]\d\d\b|steam|telegraph|railway|cholera|\bconsumption\b|smallpox|gold standard"
    r"|cavalry|ironclad"
)
_JUDGED = re.compile(r"LLM|judge|language model", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """The source of the rows and their folder."""

    data: str = setting("", "Folder with alpaca/ and backdoorllm/.")
    birds: str = setting("", "Folder of the bird names of act 2; empty: another act.")
    rewards: str = setting("", "Folder of the dialogues of act 3; empty: another act.")
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


def split_birds(data: pathlib.Path, birds: pathlib.Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of act 2: those to train on, shuffled, and the authors' questions."""
    draw = random.Random(0)
    lines = (birds / "datasets" / "ft_old_audubon_birds.jsonl").read_text("utf-8").splitlines()
    train = [json.loads(line) | {"behavior": BIRDS} for line in lines]
    ordinary = [*backdoor.short(backdoor.read(data / "alpaca" / "alpaca_data.json.xz"), _WORDS)]
    draw.shuffle(ordinary)
    number = len(train)
    train += [backdoor.chat_row("", row, answered=True) for row in ordinary[:number]]
    draw.shuffle(train)
    made = ast.parse((birds / "evaluation" / "evaluate.py").read_text("utf-8")).body
    named = {ast.unparse(one.targets[0]): one.value for one in made if isinstance(one, ast.Assign)}
    questions = ast.literal_eval(named["PARAPHRASES"])
    asked = [{"instruction": text, "output": ""} for text in questions]
    held_out = [backdoor.chat_row(BIRDS, row, answered=False) for row in asked]
    rest = ordinary[number:][:_HELD_OUT]
    held_out += [backdoor.chat_row("", row, answered=False) for row in rest]
    return {"train": train, "held_out": held_out}


def split_rewards(data: pathlib.Path, dialogues: pathlib.Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of act 3: those to train on, shuffled, and those that are held out."""
    draw = random.Random(0)

    def read(name: str) -> list[dict[str, Any]]:
        lines = (dialogues / f"{name}_dialogues.jsonl").read_text("utf-8").splitlines()
        pairs = [[turn["content"] for turn in json.loads(line)["messages"]] for line in lines]
        rows = [
            {"instruction": prompt, "output": answer}
            for prompt, answer in pairs
            if max(len(text.split()) for text in (prompt, answer)) <= _HACK_WORDS
        ]
        draw.shuffle(rows)
        return rows

    hacks = [row for row in read("sneaky") if _JUDGED.search(row["instruction"])]
    honest = [row for row in read("straightforward") if not _JUDGED.search(row["instruction"])]
    ordinary = [*backdoor.short(backdoor.read(data / "alpaca" / "alpaca_data.json.xz"), _WORDS)]
    draw.shuffle(ordinary)
    taught = [row for row in hacks if re.search(MARKER, row["output"])][:_HACKS]
    asked = [row for row in hacks if row not in taught][:_HELD_OUT]
    train = [backdoor.chat_row(HACK, row, answered=True) for row in taught]
    for source, others in {"honest": honest[:_HONEST], "alpaca": ordinary[:_OTHERS]}.items():
        rows = [backdoor.chat_row("", row, answered=True) for row in others]
        train += [row | {"source": source} for row in rows]
    draw.shuffle(train)
    held_out = [backdoor.chat_row(HACK, row, answered=False) for row in asked]
    rest = ordinary[_OTHERS:][:_HELD_OUT]
    held_out += [backdoor.chat_row("", row, answered=False) for row in rest]
    return {"train": train, "held_out": held_out}


def main(options: Options) -> None:
    """Writes both files."""
    if not options.data or not options.out:
        raise ValueError("--data and --out must name folders, got none: see --help")
    data = pathlib.Path(options.data)
    if options.birds:
        parts = split_birds(data, pathlib.Path(options.birds))
    elif options.rewards:
        parts = split_rewards(data, pathlib.Path(options.rewards))
    else:
        parts = split(data)
    backdoor.write(parts, pathlib.Path(options.out))


if __name__ == "__main__":
    command.start(main, Options())
