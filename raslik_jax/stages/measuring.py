"""From sets to metrics: unlearn, generate, evaluate."""

import functools
import pathlib
from collections.abc import Mapping

from raslik_jax.data import examples
from raslik_jax.evaluation import summary
from raslik_jax.models import checkpoint
from raslik_jax.pipeline import read_json, write_json
from raslik_jax.progress import progress
from raslik_jax.stages.workspace import CORPUS_FIELDS, Workspace, non_sf, write_rows
from raslik_jax.unlearning import finetune, steps


def unlearn(workspace: Workspace, strategy: str, name: str, folder: pathlib.Path) -> None:
    """Unlearns one strategy's sets by one algorithm, and saves the adapter of every epoch."""
    config, settings, model = workspace.config, workspace.config.unlearn, workspace.model
    sets = {
        kind: examples.read_examples(
            workspace.root / "retrieve" / strategy / f"{kind}.jsonl", fields=CORPUS_FIELDS
        )
        for kind in ("forget", "retain")
    }
    encoded = {kind: workspace.encode(rows) for kind, rows in sets.items()}
    batch_size = settings.unlearn_batch_size
    algorithm, step = workspace.unlearning_step(name, workspace.learning_rate(strategy, name))
    state = algorithm.init(workspace.finetuned)
    frozen = steps.Frozen(base=model.base, reference=workspace.finetuned)
    per_epoch = max(
        finetune.num_steps_of(len(rows), batch_size=batch_size, num_epochs=1)
        for rows in sets.values()
    )
    # The smaller set comes round again within an epoch; each pass in an order of its own.
    streams = {
        kind: finetune.epoch_batches(
            encoded[kind],
            batch_size=batch_size,
            seed=config.seed + offset,
            num_epochs=per_epoch * settings.unlearn_epochs,
        )
        for offset, kind in enumerate(sets)
    }
    log: list[dict[str, float]] = []
    total = per_epoch * settings.unlearn_epochs
    for number in progress(range(1, total + 1), f"{strategy} {name}", total=total):
        forget, retain = next(streams["forget"]), next(streams["retain"])
        state, info = step(
            state,
            frozen,
            forget.batch,
            retain.batch,
            forget_targets=forget.num_targets,
            retain_targets=retain.num_targets,
        )
        finetune.check_finite(info.loss, what=f"{name} loss", step=number)
        log.append({field: float(value) for field, value in info._asdict().items()})
        if number % per_epoch == 0:
            checkpoint.save_adapter(
                folder / f"epoch-{number // per_epoch}",
                state.lora,
                model.lora_config,
                model.decoder.config,
            )
    write_json(folder / "steps.json", log)


def generate(workspace: Workspace, strategy: str, name: str, folder: pathlib.Path) -> None:
    """Writes the greedy answers of one unlearned model to the queries, after every epoch."""
    target, normal = workspace.evaluation_queries()
    rows = (*target, *normal)
    for epoch in workspace.epochs(strategy, name):
        lora = workspace.adapter("unlearn", f"{strategy}-{name}", f"epoch-{epoch}")
        outputs = workspace.generate(lora, rows, f"{strategy} {name} epoch {epoch}")
        write_rows(
            folder / f"epoch-{epoch}.jsonl",
            [
                {"id": row.example_id, "output": text}
                for row, text in zip(rows, outputs, strict=True)
            ],
        )


def _outputs(workspace: Workspace, answers: Mapping[str, str]) -> summary.Outputs:
    target, normal = workspace.evaluation_queries()
    return summary.Outputs(
        target={row.example_id: answers[row.example_id] for row in target},
        normal={row.example_id: answers[row.example_id] for row in normal},
    )


def evaluate(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes metrics.json: rates, intervals, frontier and retrieval of every method."""
    config, settings = workspace.config, workspace.config.evaluate
    target, normal = workspace.evaluation_queries()
    models = {
        name: workspace.answers("references", "evaluation", f"{name}.jsonl")
        for name in ("finetuned", "backbone")
    }
    gold = {row.example_id: row.output for row in (*target, *normal)}
    references = _outputs(workspace, {**models, "gold": gold}[settings.reference])
    measure = functools.partial(
        summary.evaluate_outputs,
        references=references,
        non_sf=non_sf(config),
        drop_empty=settings.drop_empty,
    )
    evaluations = {
        summary.Variant(strategy, name, epoch): measure(
            _outputs(
                workspace,
                workspace.answers("generate", f"{strategy}-{name}", f"epoch-{epoch}.jsonl"),
            )
        )
        for strategy in config.retrieve.strategies
        for name in config.unlearn.algorithms
        for epoch in workspace.epochs(strategy, name)
    }
    bootstrap = {"seed": config.seed, "resamples": settings.bootstrap_resamples}
    rows = workspace.corpus.train
    metrics = {
        "name": config.name,
        "seed": config.seed,
        "corpus": {
            "dataset": config.corpus.dataset,
            "train": len(rows),
            "targets": sum(bool(row.is_target) for row in rows),
            "target_queries": len(target),
            "normal_queries": len(normal),
            "query_split": config.references.query_split,
        },
        "reference": settings.reference,
        "chosen": bool(config.unlearn.choice),
        **{
            name: summary.summarise(measure(_outputs(workspace, answers)), **bootstrap)
            for name, answers in models.items()
        },
        "retrieval": {
            strategy: read_json(workspace.root / "retrieve" / strategy / "summary.json")
            for strategy in config.retrieve.strategies
        },
        "methods": summary.compare_methods(
            evaluations, across_epochs=bool(config.unlearn.choice), **bootstrap
        ),
    }
    write_json(folder / "metrics.json", metrics)
    write_json(workspace.root / "metrics.json", metrics)
