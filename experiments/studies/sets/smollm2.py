"""Writes rows and queries of the five behaviors of own_model, for the grid of sets_smollm2.

  python experiments/studies/sets/smollm2.py --model=FOLDER/smollm2 --out=runs/sets_smollm2

own_model/checkpoint.py makes FOLDER/smollm2. train.jsonl has the rows of that study with a label
for each behavior. queries/NAME.jsonl has the queries of a behavior. No row has their prompts. Each
target query gets an answer that shows the behavior before unlearning.
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterator

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from experiments.studies.own_model import make_rows, measure
from raslik_jax.base.files import write_text
from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command

HERE = pathlib.Path(__file__).resolve().parent
# Of each behavior, the first so many candidates that show it.
MOST = {"retrieval": 4, "validation": 12, "test": 12}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """What is asked, and where it goes."""

    model: str = setting("", "Checkpoint that own_model/checkpoint.py made.")
    out: str = setting("runs/sets_smollm2", "Folder of the rows and queries.")


def candidates(name: str) -> dict[str, list[str]]:
    """Returns prompts of a behavior by split; those held out in own_model are the first of test."""
    words = json.loads((measure.HERE / "rows.json").read_text())["behaviors"][name]
    held_out = [
        measure.prompt_of(row) for row in measure.read_rows("held_out") if row["behavior"] == name
    ]
    if "things" not in words:
        own = json.loads((HERE / "prompts.json").read_text())[name]
        return {split: [*own[split]] for split in MOST} | {"test": held_out + own["test"]}

    def asked(things: list[str]) -> Iterator[str]:
        """Yields every question about every thing, neighbors with different ones."""
        for turn in range(len(words["prompts"])):
            for place, thing in enumerate(things):
                yield words["prompts"][(place + turn) % len(words["prompts"])].format(thing)

    left = words["things"][make_rows.PER_BEHAVIOR :]  # in no row
    found = {"retrieval": [*asked(left[:4])], "validation": [*asked(left[4:])]}
    return found | {"test": [*asked(words["held_out"])]}


def normal_prompts(split: str) -> list[str]:
    """Returns the ordinary prompts of a split."""
    if split == "test":
        rows = measure.read_rows("held_out")
        return [measure.prompt_of(row) for row in rows if not row["behavior"]]
    return list(json.loads((HERE / "prompts.json").read_text())["normal"])


def label_rows() -> list[dict[str, object]]:
    """Returns the rows of own_model, each with a label for every behavior."""
    return [
        {"messages": row["messages"]}
        | {f"is_{name}": row["behavior"] == name for name in measure.behaviors()}
        for row in measure.read_rows("train")
    ]


def choose_queries(model: pathlib.Path, name: str) -> list[dict[str, object]]:
    """Returns the queries of a behavior: those that show it, and the ordinary ones."""
    shows, rows = measure.behaviors()[name], []
    asked = candidates(name)
    prompts = [prompt for split in MOST for prompt in asked[split]]
    said = dict(zip(prompts, measure.ask(model, measure.HERE / model.name, prompts), strict=True))
    for split, most in MOST.items():
        shown = [prompt for prompt in asked[split] if shows.search(said[prompt])]
        print(f"{name} {split}: {len(shown)} of {len(asked[split])} candidates show it")
        kind = split if split == "retrieval" else f"{split}_target"
        rows += [{"split": kind, "prompt": prompt} for prompt in shown[:most]]
    for split in ("validation", "test"):
        rows += [{"split": f"{split}_normal", "prompt": text} for text in normal_prompts(split)]
    return [
        {"split": row["split"], "messages": [{"role": "user", "content": row["prompt"]}]}
        for row in rows
    ]


def main(options: Options) -> None:
    """Writes the rows, and the queries of each behavior."""
    if not options.model:
        raise ValueError("--model must name the checkpoint that checkpoint.py made, got none")
    model, out = pathlib.Path(options.model).resolve(), pathlib.Path(options.out)
    parts = {"train.jsonl": label_rows()}
    for name in measure.behaviors():
        parts[f"queries/{name}.jsonl"] = choose_queries(model, name)
        for path, rows in parts.items():
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            write_text(out / path, "".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    command.start(main, Options())
