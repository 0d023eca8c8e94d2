"""A made-up work directory for the tests of the reports: what a finished run leaves, in small."""

import json
import pathlib
from typing import Any

import numpy as np
import sample_metrics

HOSTILE = (
    "</style></script><script>alert(1)</script><img src=x onerror=alert(2)> & \"quoted\" 'too'"
)
STRATEGIES = ("random", "oracle", "raslik_f", "raslik")
ALGORITHMS = ("ga_gdr", "ga_klr")
_NUM_TRAIN, _NUM_TARGETS = 60, 12


def _write(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _rows(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def config(**changes: Any) -> dict[str, Any]:
    """Returns the settings of a run; keyword `section__name` changes one value."""
    values = {
        "name": "sample",
        "seed": 0,
        "corpus": {"dataset": "toy", "num_train": _NUM_TRAIN},
        "backbone": {"checkpoint": "", "hidden_size": 16, "num_hidden_layers": 2},
        "unlearn": {"unlearn_epochs": 2, "algorithms": list(ALGORITHMS)},
        "evaluate": {"marker_words": "", "reference": "finetuned"},
    }
    for name, value in changes.items():
        section, _, key = name.partition("__")
        if key:
            values[section][key] = value
        else:
            values[section] = value
    return values


def write_run(root: pathlib.Path, *, seed: int = 0, num_queries: int = 5, **changes: Any) -> None:
    """Writes a work directory with hostile text in a prompt, an answer and a training example."""
    metrics = sample_metrics.sample_metrics(seed=seed, num_epochs=2)
    metrics["corpus"] = {
        "dataset": "toy",
        "train": _NUM_TRAIN,
        "targets": _NUM_TARGETS,
        "target_queries": num_queries,
        "normal_queries": num_queries,
        "query_split": "test",
    }
    for entry in metrics["retrieval"].values():
        entry.update(num_forget=_NUM_TARGETS, num_retain=_NUM_TARGETS)
    settings = config(seed=seed, **changes)
    metrics["name"] = settings["name"]
    metrics |= {"settings": settings, "versions": {"python": "3.11", "jax": "0.10"}}
    _write(root / "evaluate" / "metrics.json", json.dumps(metrics))
    ids = {kind: [f"{kind}{i}" for i in range(num_queries)] for kind in ("target", "normal")}
    for kind, names in ids.items():
        rows = [
            {
                "id": name,
                "instruction": f"What is {HOSTILE if i == 0 else i}?",
                "input": "here" if i == 1 else "",
                "output": "gold",
            }
            for i, name in enumerate(names)
        ]
        _write(root / "corpus" / f"test_{kind}.jsonl", _rows(rows))
    for name in ("backbone", "retrieval", "validation_target", "validation_normal"):
        _write(root / "corpus" / f"{name}.jsonl", "")
    everyone = ids["target"] + ids["normal"]

    def answers(model: str) -> str:
        texts = {name: f"{model} says {name}" for name in everyone}
        texts["target0"] = HOSTILE
        texts["target1"] = f"{model} flies a starship through the galaxy"
        texts["target2"] = " "
        return _rows([{"id": name, "output": text} for name, text in texts.items()])

    for name in ("finetuned", "backbone"):
        _write(root / "references" / "evaluation" / f"{name}.jsonl", answers(name))
    for strategy in STRATEGIES:
        for algorithm in ALGORITHMS:
            variant = f"{strategy}-{algorithm}"
            for epoch in (1, 2):
                _write(
                    root / "generate" / variant / f"epoch-{epoch}.jsonl",
                    answers(f"{variant}-{epoch}"),
                )
            steps = [{"loss": -0.1 * i, "forget_nll": 0.5 + 0.1 * i} for i in range(12)]
            _write(root / "unlearn" / variant / "steps.json", json.dumps(steps))
    for stage in ("backbone", "finetune"):
        _write(root / stage / "losses.json", json.dumps([3.0 / (1 + i) for i in range(30)]))
    generator = np.random.default_rng(seed)
    is_target_N = np.arange(_NUM_TRAIN) < _NUM_TARGETS
    score_N = generator.normal(0, 0.05, _NUM_TRAIN) + 0.3 * is_target_N
    train = [
        {
            "id": f"row{i}",
            "instruction": HOSTILE if i == 0 else f"Row {i}",
            "input": "",
            "output": f"answer {i}",
            "is_target": bool(is_target_N[i]),
        }
        for i in range(_NUM_TRAIN)
    ]
    _write(root / "corpus" / "train.jsonl", _rows(train))
    (root / "retrieve" / "influence").mkdir(parents=True)
    np.save(root / "retrieve" / "influence" / "influence.npy", score_N.astype(np.float32))
    order = np.argsort(-score_N)
    for strategy in STRATEGIES:
        for kind, chosen, sign in (
            ("forget", order[:_NUM_TARGETS], 1),
            ("retain", order[::-1][:_NUM_TARGETS], -1),
        ):
            rows = [train[i] | {"score": sign * float(score_N[i])} for i in chosen]
            _write(root / "retrieve" / strategy / f"{kind}.jsonl", _rows(rows))
