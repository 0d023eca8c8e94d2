"""Measures how close models stay to the one before unlearning, and what else is lost.

  python experiments/studies/precise/closeness.py --model=FOLDER/smollm2 \\
    --unlearned=runs/precise --retrained=runs/ways_out

--unlearned is the work directory of measure.py and --retrained that of ways_out/measure.py. In each
cell with all adapters, the model before answers the ordinary held-out prompts. `kl` is the mean KL
of the other model to it over the tokens of these answers, in nats. `others` counts held-out prompts
of other behaviors whose answers show the behavior of the prompt. Results go to closeness.json in
this folder.
"""

import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

import jax
import jax.numpy as jnp
import numpy as np

from experiments.studies.own_model import measure as own
from experiments.studies.ways_out import measure as ways
from raslik_jax.base.files import read_json, write_json
from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command
from raslik_jax.data import batches, examples
from raslik_jax.data.tokens import encoding, tokenization
from raslik_jax.models import adapters, checkpoint, decoder
from raslik_jax.train import losses

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = HERE / "closeness.json"
_OBJECTIVES = ("base_klr", "cap_klr")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """Where the adapters are."""

    model: str = setting("", "Checkpoint that own_model/checkpoint.py made.")
    unlearned: str = setting("runs/precise", "Work directory of measure.py.")
    retrained: str = setting("runs/ways_out", "Work directory of ways_out/measure.py.")


def divergences(
    model: pathlib.Path,
    before: pathlib.Path,
    after: Sequence[pathlib.Path],
    prompts: Sequence[str],
    answers: Sequence[str],
) -> list[float]:
    """Returns KL(before || after) in nats a token of the answers of the model before."""
    tokenizer, config = tokenization.load_tokenizer(model), checkpoint.read_config(model)
    lora_config = adapters.read_adapter_config(before, config)
    loaded = checkpoint.load_model(model, dtype=jnp.float32, lora_config=lora_config)
    rows = [
        examples.Example(str(n), prompt, "", text)
        for n, (prompt, text) in enumerate(zip(prompts, answers, strict=True))
        if text
    ]
    encoded = encoding.encode(rows, tokenizer, template="chat").cut(512).with_answers()
    (plan,) = batches.plan_one_shape(encoded, batch_tokens=10**6)
    batch = jax.tree.map(jnp.asarray, batches.make_batch(encoded, plan))
    bound = functools.partial(losses.BoundModel, decoder.bind(loaded.graphdef))

    @jax.jit
    def divergence(new: Any, old: Any, base: Any, batch: Any) -> Any:
        outputs = (losses.Outputs(bound(one, base), batch) for one in (new, old))
        kl_B = losses.kl_by_example(*outputs, direction="forward")
        return losses.weighted_mean(kl_B, batch, mean="tokens")

    old, *new = (adapters.load_adapter(folder, config) for folder in (before, *after))
    return [round(float(divergence(one, old, loaded.base, batch)), 5) for one in new]


def others_shown(case: ways.Case, answers: Sequence[str]) -> int:
    """Returns how many prompts of other behaviors have an answer that shows theirs."""
    shows = own.behaviors()
    pairs = zip(case.rows("held_out"), answers, strict=True)
    kinds = [(row["behavior"], text) for row, text in pairs]
    return sum(
        bool(shows[kind].search(text)) for kind, text in kinds if kind not in ("", case.behavior)
    )


def measure_cell(name: str, found: dict[str, Any], options: Options) -> dict[str, Any]:
    """Returns the distances to the model before and the other behaviors, by model."""
    case, (_, seed) = ways.cases()[name.split("/")[0]], name.split("/")
    place = f"{case.behavior}-{seed}"
    folders = {one: pathlib.Path(options.unlearned, f"out-{place}-{one}") for one in _OBJECTIVES}
    folders["retrained"] = pathlib.Path(options.retrained, f"retrain-{place}")
    folders = {key: folder for key, folder in folders.items() if folder.is_dir()}
    model, held_out = pathlib.Path(options.model), case.rows("held_out")
    prompts = [own.prompt_of(row) for row in held_out]
    before = own.ask(model, case.adapter, prompts)
    is_ordinary = np.array([not row["behavior"] for row in held_out])
    asked = [np.array(texts, object)[is_ordinary].tolist() for texts in (prompts, before)]
    kls = divergences(model, case.adapter, [*folders.values()], *asked)
    cell: dict[str, Any] = {"kl": dict(zip(folders, kls, strict=True))}
    if case.folder == own.HERE:
        said = {key: found[key]["answers"] for key in _OBJECTIVES if key in found}
        if "retrained" in folders:
            said["retrained"] = own.ask(model, folders["retrained"], prompts)
        said["before"] = before
        cell["others"] = {key: others_shown(case, texts) for key, texts in said.items()}
    return cell


def main(options: Options) -> None:
    """Measures the cells that are missing."""
    if not options.model:
        raise ValueError("--model must name the checkpoint that checkpoint.py made, got none")
    known = read_json(pathlib.Path(options.unlearned, "results.json"))
    for name, found in known.items():
        results = read_json(RESULTS) if RESULTS.is_file() else {}
        if name.split("/")[0] in ways.cases() and name not in results:
            results[name] = measure_cell(name, found, options)
            write_json(RESULTS, results)
            print(name, json.dumps(results[name]), flush=True)


if __name__ == "__main__":
    command.start(main, Options())
