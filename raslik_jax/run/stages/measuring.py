"""From sets to metrics: unlearn, generate, evaluate."""

import functools
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from raslik_jax.axes import Tree
from raslik_jax.config import Config, to_json
from raslik_jax.data import batches, examples
from raslik_jax.evaluate import judgment, perplexity, summary, tofu_metrics
from raslik_jax.files import read_json, write_json
from raslik_jax.messages import shown
from raslik_jax.models import checkpoint
from raslik_jax.pipeline import check_finished, versions
from raslik_jax.progress import progress
from raslik_jax.run import memory, resuming
from raslik_jax.run.stages import discriminating, likelihoods
from raslik_jax.run.workspace import Workspace, write_rows
from raslik_jax.train import finetune, steps


@memory.explained("unlearning", "--unlearn.micro_batch_size or --unlearn.max_len")
def unlearn(workspace: Workspace, strategy: str, name: str, folder: pathlib.Path) -> None:
    """Unlearns one strategy's sets by one algorithm, and saves the model of every epoch.

    A run that was killed goes on after its last finished epoch, with the same result.
    """
    config, settings, model = workspace.config, workspace.config.unlearn, workspace.model
    sets = {
        kind: examples.read_examples(workspace.root / "retrieve" / strategy / f"{kind}.jsonl")
        for kind in ("forget", "retain")
    }
    max_len = settings.max_len or config.corpus.max_len
    encoded = {
        kind: workspace.encode(rows, f"{kind} examples", max_len=max_len)
        for kind, rows in sets.items()
    }
    # What cannot be forgotten at this length is an error; a retain example less is told by encode.
    batches.require_answers(encoded["forget"], "forget examples", max_len=max_len)
    encoded["retain"] = encoded["retain"].with_answers()
    batch_size, num_epochs = settings.batch_size, settings.epochs
    rate = workspace.learning_rate(strategy, name)
    algorithm, step = workspace.unlearning_step(name, rate)
    if settings.parameters == "lora":
        params = workspace.finetuned
    else:
        merged = checkpoint.merge(workspace.finetuned, model.base, model.lora_config)
        # Copies also where the base is float32: nothing of it may be donated or changed.
        params = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), merged)
    state = algorithm.init(params)
    frozen = steps.Frozen(base=model.base, reference=workspace.finetuned)
    per_epoch = max(
        finetune.num_steps_of(len(part.ids), batch_size=batch_size, num_epochs=1)
        for part in encoded.values()
    )
    total = per_epoch * num_epochs
    log = np.zeros((0, len(steps.Info._fields)), np.float32)
    saved = resuming.load_progress(
        folder, lambda number: (state, np.zeros((number, len(steps.Info._fields)), np.float32))
    )
    if saved is not None:
        done, (state, log) = saved
        print(f"    goes on after epoch {done // per_epoch} of {num_epochs}")
    # The smaller set comes round again within an epoch; each pass in an order of its own.
    streams = {
        kind: finetune.epoch_batches(
            encoded[kind],
            batch_size=batch_size,
            seed=config.seed + offset,
            num_epochs=total,
            start=len(log),
            shape=(
                finetune.fixed_shape(encoded[kind], max_len=max_len)
                if settings.fixed_padding
                else None
            ),
        )
        for offset, kind in enumerate(sets)
    }
    what = f"unlearning of {strategy}'s sets by {name}"
    rate_flag = f"--{name}_learning_rate, or the rate of --unlearn.choice (it is {rate})"
    rows = list(log)
    numbers = range(len(log) + 1, total + 1)
    for number in progress(numbers, f"{strategy} {name}", total=len(numbers)):
        forget = next(streams["forget"])
        retain = next(streams["retain"]) if algorithm.reads_retain else None
        state, info = step(
            state,
            frozen,
            forget.batch,
            retain.batch if retain else None,
            forget_targets=forget.num_targets,
            retain_targets=retain.num_targets if retain else 0,
        )
        rows.append(np.array(info, np.float32))
        for field, value in zip(steps.Info._fields, rows[-1], strict=True):
            finetune.check_finite(
                value[None], what=what, step=number, rate_flag=rate_flag, quantity=field
            )
        if number % per_epoch == 0:
            finetune.check_weights(state.params, what=what, step=number, rate_flag=rate_flag)
            _save_epoch(workspace, folder / f"epoch-{number // per_epoch}", state.params)
            if number < total:
                resuming.save_progress(folder, number, (state, np.stack(rows)))
    fields = steps.Info._fields
    write_json(
        folder / "steps.json",
        [dict(zip(fields, map(float, row), strict=True)) for row in rows],
    )


def _save_epoch(workspace: Workspace, folder: pathlib.Path, params: Tree) -> None:
    """Writes an epoch's adapter, or its whole model in the dtype of the base."""
    model = workspace.model
    # An interrupted run may have come as far as this.
    shutil.rmtree(folder, ignore_errors=True)
    if workspace.config.unlearn.parameters == "lora":
        checkpoint.save_adapter(
            folder, params, model.lora_config, model.decoder.config, base=model.identity
        )
    else:
        weights = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), params, model.base)
        checkpoint.save_model(folder, model.decoder.config, weights)


@memory.explained("decoding", "--references.decode_batch_size or --references.max_new_tokens")
def generate(workspace: Workspace, strategy: str, name: str, folder: pathlib.Path) -> None:
    """Writes the greedy answers of one unlearned model to the queries, after every epoch."""
    target, normal = workspace.evaluation_queries()
    rows = (*target, *normal)
    for epoch in workspace.epochs(strategy, name):
        model = workspace.unlearned(strategy, name, epoch)
        outputs = workspace.generate(model, rows, f"{strategy} {name} epoch {epoch}")
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


def _model_entries(metrics: dict[str, Any]) -> list[tuple[summary.ModelEntry, str]]:
    """Returns the entry of every model, the fine-tuned one first, and where each measure lies."""
    return [
        (metrics["finetuned"], "references/{}/finetuned.json"),
        (metrics["backbone"], "references/{}/backbone.json"),
        *(
            (
                entry,
                f"generate/{{}}-{entry['strategy']}-{entry['algorithm']}/epoch-{entry['epoch']}.json",
            )
            for entry in metrics["methods"]
        ),
    ]


def retain_answers(config: Config) -> pathlib.Path:
    """Returns the file of TOFU's answers in the run of --evaluate.tofu_retain_run.

    Raises:
      ValueError: it is no such run.
    """
    run = pathlib.Path(config.evaluate.tofu_retain_run)
    check_finished(run, "references/tofu")
    made = check_finished(run, "corpus")["settings"]
    if (made["dataset"], made["tofu_train"]) != ("tofu", "retain"):
        raise ValueError(
            "--evaluate.tofu_retain_run must be a run with --corpus.dataset=tofu "
            "--corpus.tofu_train=retain, got "
            f"{shown(str(run), 120)} with {made['dataset']} and {made['tofu_train']}"
        )
    return run / "references" / "tofu" / "finetuned.json"


def _perplexities(
    records: Mapping[str, Sequence[Mapping[str, Any]]], *, seed: int, resamples: int
) -> dict[str, summary.IntervalEntry]:
    """Returns the perplexity of each set that has any answer."""
    found = {
        name: perplexity.perplexity(part, seed=seed, resamples=resamples)
        for name, part in records.items()
    }
    return {
        name: summary.IntervalEntry(mean=value.mean, low=value.low, high=value.high)
        for name, value in found.items()
        if value is not None
    }


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
        non_sf=discriminating.non_sf(workspace),
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
    metrics: dict[str, Any] = {
        "name": config.name,
        "seed": config.seed,
        # In the same file as the numbers: no reader can pair them with others.
        "settings": to_json(config),
        "versions": versions(),
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
        "non_sf": discriminating.describe(workspace),
        **{
            name: summary.summarize(measure(_outputs(workspace, answers)), **bootstrap)
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
    retain_records = ()
    if config.corpus.dataset == "tofu" and settings.tofu_retain_run:
        retain_records = read_json(retain_answers(config))
    for entry, place in _model_entries(metrics):
        if settings.perplexity_examples:
            records = read_json(workspace.root / place.format("perplexity"))
            entry["perplexity"] = _perplexities(records["sets"], **bootstrap)
            entry["answer_perplexity"] = _perplexities(records["answers"], **bootstrap)
        if config.corpus.dataset == "tofu" and settings.tofu_questions:
            entry["tofu"] = tofu_metrics.evaluate_questions(
                read_json(workspace.root / place.format("tofu")), retain_records=retain_records
            )
    judge_metrics(metrics, rouge=likelihoods.rouge_to_labels(workspace))
    write_json(folder / "metrics.json", metrics)


def judge_metrics(metrics: dict[str, Any], *, rouge: tuple[float, float] | None = None) -> None:
    """Adds to the measures what they say: the behavior before, each judgment, the frontier."""
    finetuned, backbone = metrics["finetuned"], metrics["backbone"]
    metrics["behavior"] = _behavior(metrics["non_sf"], finetuned, backbone)
    if metrics["behavior"] and metrics["behavior"]["by"] == "likelihood" and rouge:
        metrics["behavior"]["rouge"] = rouge
    for entry in metrics["methods"]:
        entry["judgment"] = judgment.judge(entry, finetuned, backbone, behavior=metrics["behavior"])
    metrics["methods"] = summary.mark_frontier(
        metrics["methods"], across_epochs=bool(metrics["chosen"])
    )


def _behavior(
    non_sf: Mapping[str, Any] | None,
    finetuned: summary.ModelEntry,
    backbone: summary.ModelEntry,
) -> judgment.BehaviorEntry | None:
    """Returns how far the behavior was there: by what marks it, or else by likelihood."""
    marked = finetuned["non_sf_target"], backbone["non_sf_target"]
    if non_sf and marked[0] and marked[1]:
        shares = [1 - entry["mean"] for entry in marked if entry]
        return judgment.find_behavior(non_sf["by"], finetuned=shares[0], backbone=shares[1])
    likely = [model.get("perplexity", {}).get("behavior") for model in (finetuned, backbone)]
    if not likely[0] or not likely[1]:
        return None
    return judgment.find_behavior(
        "likelihood", finetuned=likely[0]["mean"], backbone=likely[1]["mean"]
    )
