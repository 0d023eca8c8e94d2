"""Measures methods that rank training rows, on sets that others made, and contrast queries.

  python experiments/studies/which_method/measure.py --model=FOLDER/smollm2 --sets=LI/datasets \\
    --embedding=FOLDER/bge-small-en-v1.5 --python=ENV/bin/python

rule.md says what is measured. own_model/checkpoint.py makes FOLDER/smollm2. LI is a checkout of
plumprc/Failures-of-Influence-Functions-in-LLMs (Li et al., arXiv 2409.19998). ENV has torch,
transformers, peft and bergson. --parts names some of the parts.

Each part leaves its files in --workdir: an adapter, one pass over the rows, the scores of the other
programs. A file that is there is not made again. The measures go to results.json in this folder
after each part.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

import numpy as np
from jaxtyping import Bool, Float

from experiments.studies.own_model import measure as own_model
from experiments.studies.which_gradient import cells
from experiments.studies.which_gradient import measure as passes
from raslik_jax.base.files import read_json, write_json
from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command, setting_flags
from raslik_jax.config import MeshConfig
from raslik_jax.data.examples import Example, answered
from raslik_jax.evaluate.ranking import auprc
from raslik_jax.incident import making
from raslik_jax.models import adapters
from raslik_jax.retrieve.strategies import query_text
from raslik_jax.run import plan
from raslik_jax.run.workspace import Workspace

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = HERE / "results.json"
# The most tokens of a row of each set, and the epochs of its adapter.
SETS = {"grammars": (96, 3), "math": (96, 1), "backdoor": (64, 1)}
CONTRAST = "own_model"
# The recipe of which_gradient/rows.flags, but for its epochs.
RECIPE = (
    "--finetune.lora_targets=q_proj,k_proj,v_proj,o_proj",
    "--finetune.lora_rank=8",
    "--finetune.batch_size=8",
    "--finetune.learning_rate=2e-3",
)
DEFAULT, TRAINED, RESPONSE = passes.DEFAULT, "next_token/all", "next_token/response"
# In the order of which_gradient, by which the stored numbers are named.
LOSSES = (DEFAULT, TRAINED, "smoothed/all")
_CONTRASTED = (DEFAULT, TRAINED, RESPONSE, "smoothed/all")
_HIDDEN, _END = "hidden last/all", "last/prompt end"
SHARES = (0.02, 0.05, 0.1, 0.2, 0.5)
_STAGES = ("corpus", "backbone", "finetune")
_DRAWS, _SEED, _MOST_TOKENS = 10_000, 0, 48


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """What is measured."""

    model: str = setting("", "Checkpoint that own_model/checkpoint.py made.")
    sets: str = setting("", "The folder `datasets` of the repository of Li et al.")
    embedding: str = setting("", "Folder of the sentence encoder; empty: none.")
    python: str = setting("", "Python with bergson; empty: none.")
    workdir: str = setting("runs/which_method", "Where adapters, vectors and scores go.")
    parts: tuple[str, ...] = setting((), "Parts; empty: all.", choices=(*SETS, CONTRAST))
    rows: int = setting(300, "Training rows of a set, as many of each class.", low=1)
    queries: int = setting(50, "Test rows of a set, as many of each class.", low=1)


def draw_classes(rows: Sequence[dict[str, str]], number: int) -> list[dict[str, str]]:
    """Returns rows drawn by the seed, as many of each class."""
    labels = np.array([row["label"] for row in rows])
    random, kinds = np.random.default_rng(_SEED), np.unique(labels)
    drawn = [
        random.permutation(np.flatnonzero(labels == kind))[: number // len(kinds)] for kind in kinds
    ]
    return [rows[place] for place in np.sort(np.concatenate(drawn)).tolist()]


def read_set(folder: pathlib.Path, name: str, part: str) -> list[dict[str, str]]:
    """Returns the rows of a set of Li et al., train or test, with their class as label."""
    command.require("pyarrow")
    import pyarrow

    path = folder / name / part / "data-00000-of-00001.arrow"
    if not path.is_file():
        raise ValueError(
            f"--sets must have {name}/{part}/{path.name}, got {folder}: name the folder `datasets` "
            "of plumprc/Failures-of-Influence-Functions-in-LLMs"
        )
    with pyarrow.memory_map(str(path)) as file:
        rows = pyarrow.ipc.open_stream(file).read_all().to_pylist()
    return [
        {"instruction": row["prompts"], "output": row["response"], "label": row["variation"]}
        for row in rows
    ]


def _make(root: pathlib.Path, flags: Sequence[str]) -> Workspace:
    """Returns a work directory up to its adapter."""
    config = setting_flags.parse_config(flags)
    how: Any = {"mesh": MeshConfig(), "update": True, "is_measured": False}
    making.make(config, root, stages=_STAGES, **how)
    return plan.open_run(root, "corpus", "finetune")


def _write_lines(path: pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> pathlib.Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path


def _seconds() -> float:
    """Returns the processor seconds of this process and of its children that ended."""
    return sum(os.times()[:4])


def train_set(name: str, options: Options) -> Workspace:
    """Returns the run with the adapter that is trained on a set."""
    root, folder = pathlib.Path(options.workdir).resolve() / name, pathlib.Path(options.sets)
    numbers = {"train": options.rows, "test": options.queries}
    rows = {
        part: draw_classes(read_set(folder, name, part), size) for part, size in numbers.items()
    }
    asked = [row | {"split": "retrieval"} for row in rows["test"]]
    most, epochs = SETS[name]
    parts = {"train": rows["train"], "queries": asked}
    return train_rows(root, parts, options.model, max_len=most, epochs=epochs)


def train_rows(
    root: pathlib.Path,
    parts: Mapping[str, Sequence[Mapping[str, Any]]],
    model: str,
    *,
    max_len: int,
    epochs: int,
    seed: int = _SEED,
) -> Workspace:
    """Returns the run with the adapter that is trained on rows; "queries" are others."""
    files = {
        part: _write_lines(root.with_suffix(f".{part}.jsonl"), rows) for part, rows in parts.items()
    }
    flags = [f"--corpus.records.{part}_file={path}" for part, path in files.items()]
    flags += ["--name=which_method", "--corpus.dataset=records"]
    flags += [] if "text" in parts["train"][0] else ["--corpus.template=chat"]
    flags += [f"--corpus.max_len={max_len}", f"--finetune.epochs={epochs}", *RECIPE]
    return _make(root, [*flags, f"--seed={seed}", f"--backbone.checkpoint={model}"])


def pass_set(name: str, workspace: Workspace, out: pathlib.Path) -> None:
    """Writes the vectors of all rows and of the test rows with their given answers."""
    start = time.process_time()
    labels = [str(row.extra["label"]) for row in workspace.corpus.train]
    given = [
        passes.Traced(row, str(row.extra["label"]), True)
        for row in workspace.corpus.queries["retrieval"]
    ]
    states = (*passes.STATES, _END)
    passes.store(workspace, given, labels, labels, out / name, LOSSES, states, seconds=start)


def _texts_of(workspace: Workspace) -> list[Example]:
    return [*workspace.corpus.train, *workspace.corpus.queries["retrieval"]]


def embed(
    workspace: Workspace, texts: Sequence[Example], folder: pathlib.Path, options: Any
) -> np.ndarray:
    """Returns the products of the sentence vectors of prompt and answer."""
    from jax import numpy as jnp

    from experiments.studies.encoders import checkpoint, embedding
    from experiments.studies.encoders.encoder import bind_encoder

    path = pathlib.Path(options.embedding)
    model = checkpoint.load_encoder(path, dtype=jnp.float32)
    encode = checkpoint.load_sentence_tokenizer(path, max_len=model.config.max_length)
    tokens = encode([query_text(row, "prompt_and_output") for row in texts])
    bound = bind_encoder(model.config)
    return passes.unit_gram(embedding.embed_texts(bound, model.weights, tokens))


def run_bergson(
    workspace: Workspace,
    texts: Sequence[Example],
    folder: pathlib.Path,
    options: Any,
    dtype: str = "bfloat16",
) -> np.ndarray:
    """Returns the products of bergson's unit gradients of the mean loss of all tokens.

    It reads the token ids of our program, and our adapter in PEFT's files.
    """
    encoded = workspace.encode(texts, targets="all")
    ids = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in encoded.tokens]
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was interrupted
    folder.mkdir()
    config, given = workspace.model.decoder.config, {"base_model": options.model}
    adapter = folder / "adapter"
    adapters.save_adapter(
        adapter, workspace.finetuned, workspace.model.lora_config, config, **given
    )
    # bergson reads the tokenizer, which it does not use, next to the adapter.
    for path in pathlib.Path(options.model).glob("*token*"):
        shutil.copy(path, adapter)
    line = [options.python, HERE.parent / "speed" / "torch_program.py", "bergson"]
    line += [f"--model={adapter}", f"--rows={_write_lines(folder / 'ids.jsonl', ids)}"]
    line += [f"--out={folder / 'out'}", f"--dtype={dtype}", "--size=0", "--projection=none"]
    subprocess.run([*map(str, line)], check=True)
    index = folder / "out" / "index"
    info = read_json(index / "info.json")
    flat = np.memmap(index / "gradients.bin", info["base_dtype"], "r")
    return passes.unit_gram(flat.reshape(info["num_grads"], -1).astype(np.float32))


# Other programs: the name of the option that says where each is, and how it is run.
Peers = Mapping[str, tuple[str, Callable[..., np.ndarray]]]
PEERS: Peers = {"bge-small": ("embedding", embed), "bergson": ("python", run_bergson)}


def run_peers(
    name: str, workspace: Workspace, out: pathlib.Path, options: Any, peers: Peers = PEERS
) -> None:
    """Writes the products of the vectors of other programs, and their processor seconds."""
    for peer, (flag, make) in peers.items():
        path, start = out / f"{name}.{peer}.npz", _seconds()
        if getattr(options, flag) and not path.is_file():
            gram_MM = make(workspace, _texts_of(workspace), out / f"{name}.{peer}", options)
            np.savez(path, gram=gram_MM.astype(np.float32), seconds=_seconds() - start)


def all_scores(
    run: cells.Run, out: pathlib.Path
) -> Iterator[tuple[str, Float[np.ndarray, "Q N"], float | None]]:
    """Yields the scores of every method, and the processor seconds of another program."""
    number = len(run.labels)
    for name, score_QN in run.scores():
        yield name, score_QN, None
    at = passes.fields_of(run.losses).index(f"norm {TRAINED}")
    norm_M = run.arrays["fields"][:, at].astype(np.float64)
    yield "dot product, trained", (run.arrays[f"gram {TRAINED}"] * norm_M)[number:, :number], None
    end_ME = run.arrays[f"state {_END}"].astype(np.float64)
    yield "hidden end of prompt, not centered", passes.unit_gram(end_ME)[number:, :number], None
    for peer in PEERS:
        path = out / f"{run.name}.{peer}.npz"
        if path.is_file():
            with np.load(path) as kept:
                yield peer, kept["gram"][number:, :number], float(kept["seconds"])


def top_share(score_N: Float[np.ndarray, " N"], is_target_N: Bool[np.ndarray, " N"]) -> float:
    """Returns the share of targets among the best rows, as many as there are targets."""
    number = int(is_target_N.sum())
    return float(is_target_N[np.argsort(-score_N, kind="stable")[:number]].mean())


def paired_interval(difference_Q: Float[np.ndarray, " Q"]) -> list[float]:
    """Returns the mean of the differences and its 95 % bootstrap interval."""
    random = np.random.default_rng(_SEED)
    drawn = random.choice(difference_Q, (_DRAWS, len(difference_Q))).mean(axis=1)
    return [round(float(x), 4) for x in (difference_Q.mean(), *np.quantile(drawn, (0.025, 0.975)))]


def rescored(
    cheap_N: Float[np.ndarray, " N"], fine_N: Float[np.ndarray, " N"], share: float
) -> Float[np.ndarray, " N"]:
    """Returns scores by which the best share of a cheap ranking is ranked by the fine one."""
    number = round(share * len(cheap_N))
    best = np.argsort(-cheap_N, kind="stable")[:number]
    found_N = -1.0 - np.argsort(np.argsort(-cheap_N, kind="stable"), kind="stable")
    found_N[best] = fine_N[best]
    return np.asarray(found_N, np.float64)


def measure_set(run: cells.Run, out: pathlib.Path) -> dict[str, Any]:
    """Returns the measures of every method on a set, and of two stages."""
    is_target_QN = (
        np.array([one["behavior"] for one in run.stored["queries"]])[:, None] == (run.labels[None])
    )

    def each(measure: Callable[[Any, Any], float], score_QN: np.ndarray) -> np.ndarray:
        return np.array([measure(*pair) for pair in zip(score_QN, is_target_QN, strict=True)])

    found: list[dict[str, Any]] = []
    kept, base = {}, (np.zeros(0), np.zeros(0))
    for name, score_QN, seconds in all_scores(run, out):
        kept[name] = score_QN
        area_Q, cover_Q = each(auprc, score_QN), each(top_share, score_QN)
        base = (area_Q, cover_Q) if name == DEFAULT else base
        best_Q = score_QN.argmax(axis=1)
        one = {
            "method": name,
            "top1": float(is_target_QN[np.arange(len(best_Q)), best_Q].mean()),
            "coverage": cover_Q.mean(),
            "auprc": area_Q.mean(),
            "lowest": area_Q.min(),
            "f1": each(cells.found_f1, score_QN).mean(),
        }
        found.append({key: _rounded(value) for key, value in one.items()})
        found[-1] |= {
            "auprc_gain": paired_interval(area_Q - base[0]),
            "coverage_gain": paired_interval(cover_Q - base[1]),
            "seconds": seconds,
        }
    staged = {
        str(share): _rounded(
            np.mean(
                [
                    auprc(rescored(cheap_N, fine_N, share), is_target_N)
                    for cheap_N, fine_N, is_target_N in zip(
                        kept[_HIDDEN], kept[DEFAULT], is_target_QN, strict=True
                    )
                ]
            )
        )
        for share in SHARES
    }
    return {
        "rows": len(run.labels),
        "queries": len(is_target_QN),
        "tokens": _rounded(run.arrays["fields"][:, 3].mean()),
        "nll_answer": _rounded(np.median(run.arrays["fields"][: len(run.labels), 0])),
        "methods": found,
        "two_stages": staged,
    }


def _rounded(value: Any) -> Any:
    return value if isinstance(value, str) else round(float(value), 4)


def pass_contrast(out: pathlib.Path, options: Options) -> None:
    """Writes the vectors of the rows of own_model, of the bad answers and of the wished ones."""
    kind, start = passes.KINDS[CONTRAST], time.process_time()
    query = own_model.read_rows("held_out")[0] | {"split": "retrieval"}  # a run needs one
    files = {
        "train": own_model.HERE / "train.jsonl",
        "queries": _write_lines(out / "queries.jsonl", [query]),
    }
    flags = [f"--corpus.records.{part}_file={path}" for part, path in files.items()]
    flags += ["--name=which_method", "--corpus.dataset=records", "--corpus.template=chat"]
    flags += [f"--backbone.adapter={own_model.HERE / 'smollm2'}", "--finetune.epochs=0"]
    flags += [f"--backbone.checkpoint={options.model}", "--corpus.max_len=256"]
    workspace = _make(out / f"{CONTRAST}-run", flags)
    queries = [*kind.queries(workspace)]
    rows = [one.example for one in queries]
    models = workspace.with_adapter(workspace.finetuned), workspace.backbone
    bad, wished = (workspace.generate(one, rows, "answers", most=_MOST_TOKENS) for one in models)
    is_asked = [one.shows(text) for one, text in zip(queries, bad, strict=True)]
    given = [
        passes.Traced(answered(one.example, text), one.behavior, texts is bad)
        for texts in (bad, wished)
        for one, text, asked in zip(queries, texts, is_asked, strict=True)
        if asked
    ]
    labels = [*kind.labels(workspace)]
    passes.store(workspace, given, labels, labels, out / CONTRAST, _CONTRASTED, seconds=start)


def contrast_scores(run: cells.Run, loss: str, *, is_unit: bool) -> Float[np.ndarray, "Q N"]:
    """Returns the cosines of the centered rows with the gradients of bad less wished answers.

    The queries of the run are the bad answers and then, in the same order, the wished ones.
    """
    number, half = len(run.labels), len(run.stored["queries"]) // 2
    gram_MM = run.arrays[f"gram {loss}"].astype(np.float64)
    at = passes.fields_of(run.losses).index(f"norm {loss}")
    norm_M = np.ones(len(gram_MM)) if is_unit else run.arrays["fields"][:, at].astype(np.float64)
    bad, wished = np.arange(number, number + half), np.arange(number + half, len(gram_MM))
    product_MM = gram_MM * norm_M
    moved_NM = product_MM[:number] - product_MM[:number].mean(axis=0)
    row_N = np.sqrt(np.diag(cells.kernels.center(gram_MM, number))[:number])
    square_Q = norm_M[bad] ** 2 + norm_M[wished] ** 2
    square_Q -= 2 * gram_MM[bad, wished] * norm_M[bad] * norm_M[wished]
    cosine_NQ = (moved_NM[:, bad] - moved_NM[:, wished]) / row_N[:, None] / np.sqrt(square_Q)
    return np.asarray(cosine_NQ.T)


def measure_contrast(run: cells.Run) -> dict[str, Any]:
    """Returns the areas of single queries by behavior, plain and contrasted."""
    half = len(run.stored["queries"]) // 2
    scores = {name: score_QN[:half] for name, score_QN in run.scores()}
    found = {
        "plain": scores[DEFAULT],
        "contrast": contrast_scores(run, DEFAULT, is_unit=False),
        "contrast, unit": contrast_scores(run, DEFAULT, is_unit=True),
        "trained, response": scores[RESPONSE],
        "contrast, trained": contrast_scores(run, RESPONSE, is_unit=False),
        "contrast, trained, unit": contrast_scores(run, RESPONSE, is_unit=True),
        "hidden": scores[_HIDDEN],
        "BM25, answers": scores["BM25, answers"],
    }

    def of(behavior: str, score_QN: np.ndarray) -> dict[str, list[float]]:
        is_target_N = run.labels == behavior
        own_QN = score_QN[run.asked(behavior)]
        return {
            "auprc": [_rounded(auprc(one_N, is_target_N)) for one_N in own_QN],
            "f1": [_rounded(cells.found_f1(one_N, is_target_N)) for one_N in own_QN],
        }

    return {
        name: {behavior: of(behavior, score_QN) for behavior in run.behaviors()}
        for name, score_QN in found.items()
    }


def main(options: Options) -> None:
    """Makes what is missing, and measures what is there."""
    if not options.model:
        raise ValueError("--model must name the checkpoint that checkpoint.py made, got none")
    out = pathlib.Path(options.workdir).resolve()
    out.mkdir(parents=True, exist_ok=True)
    for name in options.parts or (*SETS, CONTRAST):
        start, results = _seconds(), read_json(RESULTS) if RESULTS.is_file() else {}
        if name != CONTRAST:
            is_trained = (out / name / "finetune").is_dir()
            workspace = train_set(name, options)
            trained = results.get(name, {}).get("adapter_seconds") if is_trained else None
            trained = trained or round(_seconds() - start)
            if not (out / f"{name}.json").is_file():
                pass_set(name, workspace, out)
            run_peers(name, workspace, out, options)
            run = next(one for one in cells.read_runs(out) if one.name == name)
            found = measure_set(run, out) | {"adapter_seconds": trained}
        else:
            if not (out / f"{name}.json").is_file():
                pass_contrast(out, options)
            run = next(one for one in cells.read_runs(out) if one.name == name)
            found = measure_contrast(run)
        results = read_json(RESULTS) if RESULTS.is_file() else {}
        write_json(RESULTS, results | {name: found | {"pass_seconds": run.stored["seconds"]}})
        print(f"{name}: {_seconds() - start:.0f} processor seconds", flush=True)


if __name__ == "__main__":
    command.start(main, Options())
