"""Does training without rows change an answer as scores of the rows predict?

  python experiments/studies/counterfactual/measure.py --workdir=runs/counterfactual \\
      --embedding=BAAI/bge-small-en-v1.5 --halves=25
  python experiments/studies/counterfactual/measure.py --case=smollm2 --model=FOLDER/smollm2 \\
      --workdir=runs/counterfactual-smollm2 --embedding=BAAI/bge-small-en-v1.5 --group=6
  python experiments/studies/counterfactual/measure.py --case="fact 2 %" --model=FOLDER/smollm2 \\
      --workdir=runs/counterfactual-fact --group=3 --queries=5 --epochs=1 --halves=12 --unlearned
  python experiments/studies/counterfactual/measure.py --case="fact 2 %" --model=FOLDER/smollm2 \\
      --workdir=runs/counterfactual-qld --queries=5 --epochs=1 --seeds=3 --unlearned

`raslik validate` trains on random halves of the rows and finds the linear datamodeling scores. The
script makes the run that it validates: an adapter that is trained on all rows, and the trace of
several answers. It adds scores of other methods and the labels. With --seeds it finds the QLD of
the answers of a behavior. FOLDER/smollm2 is made by own_model/checkpoint.py. The facts are rows of
--corpus.dataset=behaviors in $RASLIK_DATA, "howdy" those of howdy_small. Results go to
WORKDIR/results.json. A stopped command continues.
"""

import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

import raslik_jax
from experiments.studies.corpora import howdy, paper
from raslik_jax.base.files import write_json
from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command, setting_flags
from raslik_jax.config import Config, FinetuneConfig, MeshConfig
from raslik_jax.data.examples import Corpus, Example
from raslik_jax.evaluate import counterfactual

HERE = pathlib.Path(__file__).resolve().parent
_DEMO = HERE.parents[1] / "flags" / "demo.flags"
_TRAINED = ("corpus", "backbone", "finetune")
# Settings of fine-tuning that have the same name in the recipe of a retraining.
_RECIPE = ("learning_rate", "batch_size", "schedule", "warmup", "weight_decay", "clip", "mean")
# How the stored results name the rankings.
_TITLES = {"bm25_answers": "BM25, prompt and answer", "bm25": "BM25", "exact": "exact kernel"}

_SIZES: dict[str, int] = {"num_train": 600, "num_backbone": 0, "num_test": 16}

Rows = Sequence[dict[str, Any]]


class Case(NamedTuple):
    """A model, its rows and queries with their labels, and the flags of its runs.

    Labels make groups and the method of that name. No other method sees them.
    """

    rows: Callable[[], tuple[Rows, Mapping[str, Rows]]]
    flags: Callable[["Options"], Sequence[str]]


def _toy_rows() -> tuple[Rows, Mapping[str, Rows]]:
    from raslik_jax.data import toy_model

    def row(one: Any, **more: Any) -> dict[str, Any]:
        return {"instruction": one.instruction, "label": "howdy" if one.is_target else ""} | more

    corpus = toy_model.load_corpus()
    kinds = {kind: corpus.queries[f"test_{kind}"] for kind in ("target", "normal")}
    asked = {
        kind: [row(one) | {"label": "howdy" if kind == "target" else ""} for one in rows]
        for kind, rows in kinds.items()
    }
    return [row(one, output=one.output) for one in corpus.train], asked


def _toy_flags(options: "Options") -> Sequence[str]:
    from raslik_jax.data import toy_model

    base = toy_model.model_folder() / "base"
    return f"--flagfile={_DEMO}", f"--backbone.checkpoint={base}"


def _smollm2_rows() -> tuple[Rows, Mapping[str, Rows]]:
    def read(path: pathlib.Path) -> Rows:
        rows = map(json.loads, path.read_text("utf-8").splitlines())
        return [row | {"label": row["behavior"]} for row in rows]

    asked: dict[str, list[dict[str, Any]]] = {"target": [], "normal": []}
    for row in read(HERE / "answers.jsonl"):
        if row["split"] == "retrieval":  # a query of the first run of the study
            continue
        asked[row["split"].removeprefix("test_")].append(row)
    return read(HERE.parent / "own_model" / "train.jsonl"), asked


def _rows_of(corpus: Corpus) -> tuple[Rows, Mapping[str, Rows]]:
    def row(one: Example) -> dict[str, str]:
        label = one.source.removeprefix("behaviors:").removeprefix("alpaca")
        kept = {"instruction": one.instruction, "input": one.input, "output": one.output}
        return kept | {"label": "howdy" if label == "dolly" else label}

    asked = {
        kind: [row(one) for one in corpus.queries[f"test_{kind}"]] for kind in ("target", "normal")
    }
    return [row(one) for one in corpus.train], asked


def _fact_rows(num_targets: int) -> tuple[Rows, Mapping[str, Rows]]:
    """Returns the rows and queries of the wrong fact, without the inputs of Alpaca's rows."""
    from experiments.studies.behaviors.corpus import register
    from raslik_jax.base.settings import replaced
    from raslik_jax.data.corpora import CorpusConfig

    register()
    chosen = {"dataset": "behaviors", "behaviors.behavior": "fact", "num_targets": num_targets}
    train, asked = _rows_of(replaced(CorpusConfig(), chosen | _SIZES).load(seed=0))

    def without_input(rows: Rows) -> Rows:
        return [{name: text for name, text in row.items() if name != "input"} for row in rows]

    return without_input(train), {kind: without_input(rows) for kind, rows in asked.items()}


def _howdy_rows() -> tuple[Rows, Mapping[str, Rows]]:
    """Returns rows of at most 300 characters, so that prompts have room for their answers."""
    from raslik_jax.data.corpora import CorpusConfig

    shared = CorpusConfig(**_SIZES | {"num_train": 300}, num_targets=24)
    return _rows_of(howdy.load_howdy_small(shared, None, seed=0, max_chars=300))


def _smollm2_flags(options: "Options") -> Sequence[str]:
    if not options.model:
        raise ValueError("--model must name the checkpoint that checkpoint.py made, got none")
    return (
        f"--backbone.checkpoint={options.model}",
        "--corpus.max_len=64",
        "--finetune.lora_rank=4",
        "--finetune.lora_targets=q_proj,k_proj,v_proj,o_proj",
        "--finetune.learning_rate=2e-3",
        "--finetune.batch_size=8",
        "--sketch.batch_tokens=1024",  # the gigabytes that gradients take
    )


def _fact_flags(options: "Options") -> Sequence[str]:
    return *_smollm2_flags(options), "--corpus.template=brief"


CASES = {
    "toy": Case(_toy_rows, _toy_flags),
    "smollm2": Case(_smollm2_rows, _smollm2_flags),
    "fact 8 %": Case(functools.partial(_fact_rows, 48), _fact_flags),
    "fact 2 %": Case(functools.partial(_fact_rows, 12), _fact_flags),
    "howdy": Case(_howdy_rows, _fact_flags),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """The trainings of the study."""

    case: str = setting("toy", "Model and rows.", choices=tuple(CASES))
    model: str = setting("", "SmolLM2, the checkpoint that checkpoint.py made; not of case toy.")
    workdir: str = setting("runs/counterfactual", "Where the runs and the results go.")
    embedding: str = setting("", "Sentence encoder, as --retrieve.embedding.checkpoint; '': none.")
    unlearned: bool = setting(False, "Also score rows by unlearning each answer.")
    halves: int = setting(20, "Trainings on random halves.", low=8)
    seeds: int = setting(
        0, "Seeds of QLD, for target prompts alone and without halves; 0: none.", zero_or=2
    )
    more_seeds: int = setting(0, "Further trainings of each half, with seeds 1, 2, ....", low=0)
    group: int = setting(1, "Rows that a half has or lacks together: neighbors by label, prompt.")
    queries: int = setting(12, "Most prompts of each kind, target and normal.", low=1)
    epochs: int = setting(3, "Epochs of every training.", low=1)
    flags: tuple[str, ...] = setting((), "A further flag of the runs.", is_repeated=True)


def write_rows(options: Options) -> list[bool]:
    """Writes rows by label and prompt, and the queries; returns which queries are of a behavior."""
    root, (train, asked) = pathlib.Path(options.workdir), CASES[options.case].rows()
    queries = [
        (row | {"split": "retrieval"}, kind == "target")
        for kind, rows in asked.items()
        for row in rows[: options.queries]
        if kind == "target" or not options.seeds
    ]
    ordered = sorted(train, key=lambda row: (row["label"], json.dumps(row)))
    root.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", ordered), ("queries", [row for row, _ in queries])):
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (root / f"{name}.jsonl").write_text("".join(lines), "utf-8")
    return [is_target for _, is_target in queries]


def trace_answers(options: Options) -> Config:
    """Makes the adapter that is trained on all rows and the trace; returns the settings of both."""
    from raslik_jax.incident import making

    root = pathlib.Path(options.workdir).absolute()
    own = ["--corpus.dataset=records", "--name=counterfactual", "--finetune.fixed_padding"]
    own += [f"--corpus.records.{n}_file={root / n}.jsonl" for n in ("train", "queries")]
    flags = [*CASES[options.case].flags(options), *options.flags, *own]
    flags += ["--retrieve.strategies=raslik"]
    flags += ["--retrieve.num_forget=1"]  # no set is read
    if options.embedding:  # settings of a strategy hold where it is chosen
        paper.register()
        flags += ["--retrieve.strategies=raslik,embedding"]
        flags += [f"--retrieve.embedding.checkpoint={options.embedding}"]
    whole = setting_flags.parse_config([*flags, f"--finetune.epochs={options.epochs}"])
    how: Any = {"mesh": MeshConfig(), "update": True, "is_measured": False}
    making.make(whole, root / "whole", stages=_TRAINED, **how)
    adapter = dataclasses.replace(whole.backbone, adapter=str(root / "whole/finetune/adapter"))
    traced = dataclasses.replace(whole, backbone=adapter, finetune=FinetuneConfig(epochs=0))
    stages = (*_TRAINED, "references", "sketch", "retrieve")
    making.make(traced, root / "traced", stages=stages, **how)
    return whole


def score_rows(
    root: pathlib.Path, *, has_embedding: bool, has_unlearned: bool = False
) -> list[str]:
    """Writes the scores of every row with every query that the trace lacks; returns the files."""
    from experiments.studies.curvature import others
    from experiments.studies.encoders import embedding
    from raslik_jax.data import batches
    from raslik_jax.index.combine import directions
    from raslik_jax.retrieve import bm25, strategies
    from raslik_jax.run import plan
    from raslik_jax.run.stages import sketch as sketch_lib
    from raslik_jax.sketch import projections

    workspace = plan.open_run(root / "traced", "corpus", "finetune")
    config, adapter = workspace.config, sketch_lib.sketched_adapter(workspace)
    rows, queries = workspace.corpus.train, workspace.retrieval_queries()
    found: dict[str, Float[np.ndarray, "N Q"]] = {}
    size = projections.count_params(adapter)
    whole = projections.init_projection(config.seed, "binned", size, size)
    encoded = workspace.cut(
        workspace.train_rows, "training examples", targets=config.sketch.targets
    )
    sketch = sketch_lib.sketch_function(workspace, whole, adapter)
    row_NK, _ = batches.map_rows(sketch, encoded, sketch_lib.plan_batches(workspace, encoded))
    query_QK = sketch_lib.sketch_queries(workspace, sketch, queries)
    mean_K = np.asarray(row_NK.mean(axis=0, dtype=np.float64))
    found["exact"] = directions(row_NK, mean_K) @ directions(query_QK, mean_K).T
    index = bm25.index_documents([f"{r.instruction} {r.input} {r.output}".split() for r in rows])
    words = [strategies.query_text(query).split() for query in queries]
    found["bm25"] = bm25.score_queries(index, words).T
    if has_embedding:
        example_NE, query_QE = embedding.sentence_vectors(workspace, queries)
        found["embeddings"] = example_NE @ query_QE.T
    if has_unlearned:
        found["unlearned"] = others.kept_unlearned(workspace, queries, root)
    labels = [[row.extra["label"] == query.extra["label"] for query in queries] for row in rows]
    found["labels"] = np.array(labels, float)
    for name, score_NQ in found.items():
        np.save(root / f"{name}.npy", score_NQ)
    return [str(root / f"{name}.npy") for name in found]


def sums_by_label(options: Options) -> dict[str, list[list[float]]]:
    """Returns the sums of the exact kernel's scores in each half, over the rows of each label."""
    from raslik_jax.run import plan
    from raslik_jax.run.stages import retrain

    root = pathlib.Path(options.workdir)
    workspace = plan.open_run(root / "traced", "corpus", "finetune")
    # Halves are of the rows that a training takes: those with an answer after the cut.
    ids = {*retrain.encode_rows(workspace, workspace.config.unlearn["retrain"]).ids}
    label_of = {row.example_id: row.extra["label"] for row in workspace.corpus.train}
    kept = [name in ids for name in label_of]
    score_NQ = np.load(root / "exact.npy")[kept]
    labels = np.array([label for name, label in label_of.items() if name in ids])
    how: Any = {"number": options.halves, "group": options.group, "share": 0.5, "seed": 0}
    halves = counterfactual.draw_subsets(len(labels), **how)
    return {
        label: [score_NQ[half[labels[half] == label]].sum(axis=0).tolist() for half in halves]
        for label in dict.fromkeys(labels.tolist())
    }


def _recipe(options: Options) -> tuple[list[bool], dict[str, Any]]:
    """Makes the trace; returns which queries are of a behavior, and the recipe of trainings."""
    is_target, trained = write_rows(options), trace_answers(options).finetune
    recipe = {f"unlearn.retrain.{name}": getattr(trained, name) for name in _RECIPE}
    recipe["unlearn.retrain.epochs"] = float(options.epochs)
    return is_target, recipe


def measure_qld(options: Options) -> dict[str, Any]:
    """Returns the losses of the answers after training without the best rows of each method."""
    root, (_, recipe) = pathlib.Path(options.workdir), _recipe(options)
    from raslik_jax.run import plan
    from raslik_jax.run.stages import validate

    workspace = plan.open_run(root / "traced", "corpus", "finetune", "retrieve/influence")
    files = [str(root / "unlearned.npy")] * options.unlearned
    if files:
        from experiments.studies.curvature import others

        np.save(files[0], others.kept_unlearned(workspace, workspace.retrieval_queries(), root))
    trainings = options.seeds * (4 + len(files))  # without nothing, random rows, and two methods
    how: Any = {"run": root / "traced", "seeds": options.seeds, "retrainings": trainings}
    found = raslik_jax.validate(**how, settings=recipe, scores=tuple(files)).found
    kept = {name: found[name] for name in ("titles", "rows", "top", "seeds", "qld")}
    rows, top = workspace.corpus.train, found["top"]
    rankings = validate.rank(workspace)
    for path in files:
        rankings["unlearned"] = validate.read_ranking(path, rows, len(found["queries"]))
    label = workspace.retrieval_queries()[0].extra["label"]
    ids = np.array([row.example_id for row in rows])
    kept["taught"] = {  # how many of the removed rows teach the behavior; random ones are of a seed
        name: sum(rows[at].extra["label"] == label for at in np.lexsort((ids, -one.score_N))[:top])
        for name, one in rankings.items()
        if name != validate.RANDOM
    }
    return {name: getattr(options, name) for name in ("case", "queries", "epochs")} | kept


def measure(options: Options) -> dict[str, Any]:
    """Returns nats a token of the answers and the sums of the scores, by half and query."""
    root, (is_target, recipe) = pathlib.Path(options.workdir), _recipe(options)
    has = {"has_embedding": bool(options.embedding), "has_unlearned": options.unlearned}
    files = score_rows(root, **has)
    how: Any = {"run": root / "traced", "seeds": 0, "group": options.group}
    how["retrainings"] = options.halves
    more = []
    for seed in range(1, 1 + options.more_seeds):
        other = recipe | {"unlearn.retrain.seed": seed}
        more.append(raslik_jax.validate(**how, settings=other).found["lds"]["nll"])
    half = raslik_jax.validate(**how, settings=recipe, scores=tuple(files)).found
    predicted = {_TITLES.get(name, name): sums for name, sums in half["predicted"].items()}
    for name in ("random", "embedding"):  # the strategy has one score for all queries
        predicted.pop(name, None)
    own = {name: getattr(options, name) for name in ("case", "group", "queries", "epochs")}
    own["embedding"] = pathlib.Path(options.embedding).name
    nll = {"nll": half["lds"]["nll"], "more": more}
    found = nll | {"predicted": predicted, "by_label": sums_by_label(options)}
    return own | {"is_target": is_target} | found


def run(options: Options) -> None:
    """Measures, writes results.json and prints the scores."""
    from experiments.studies.counterfactual import page

    found = measure_qld(options) if options.seeds else measure(options)
    write_json(pathlib.Path(options.workdir) / "results.json", found)
    if options.seeds:
        return
    for title, minus in (("", ""), ("raslik above ", "raslik")):
        for method, kinds in page.judge(found, minus).items():
            texts = (
                f"{kind} {one['mean']:.3f} [{one['low']:.2f}, {one['high']:.2f}]"
                for kind, one in kinds.items()
            )
            print(f"{title}{method}: {', '.join(texts)}")


if __name__ == "__main__":
    command.start(run, Options())
