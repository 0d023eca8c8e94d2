"""From sets to unlearned models and their answers: unlearn, generate."""

import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np

from raslik_jax.axes import Tree
from raslik_jax.data import batches
from raslik_jax.data.formats import read_examples
from raslik_jax.files import write_json
from raslik_jax.models import checkpoint
from raslik_jax.progress import progress
from raslik_jax.run import memory, resuming
from raslik_jax.run.workspace import Workspace, write_rows
from raslik_jax.train import finetune, steps


@memory.explained("unlearning", "--unlearn.micro_batch_size or --unlearn.max_len")
def unlearn(workspace: Workspace, strategy: str, name: str, folder: pathlib.Path) -> None:
    """Unlearns one strategy's sets by one algorithm, and saves the model of every epoch.

    A run that was killed goes on after its last finished epoch, with the same result.
    """
    config, settings, model = workspace.config, workspace.config.unlearn, workspace.model
    sets = {
        kind: read_examples(workspace.root / "retrieve" / strategy / f"{kind}.jsonl")
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
    rate_flag = f"--unlearn.{name}.learning_rate, or the rate of --unlearn.choice (it is {rate})"
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
