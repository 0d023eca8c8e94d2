"""One process of a `jax.distributed` job, for the tests that start two and kill one.

  python distributed_worker.py TASK COORDINATOR NUM_PROCESSES PROCESS_ID NUM_DEVICES [PATH]

Task `search` prints both ends of the ranking, `train` an unlearned adapter, and `wait` works on
and on until another process is lost.
"""

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from raslik_jax import distributed


def search(path: str) -> None:
    """Prints the tails of two queries as JSON, process 0 and 1 alike."""
    from raslik_jax.index.sharded import search_sharded, shard_store
    from raslik_jax.index.store import SketchStore

    mesh = distributed.data_mesh()
    store = SketchStore.open(path)
    rows = shard_store(store, mesh)
    shards = [shard.data.shape for shard in rows.stored_NW.addressable_shards]
    query_QK = np.random.default_rng(1).standard_normal((2, store.size))
    center = store.dtype != "sign"
    tails = search_sharded(
        store, rows, query_QK, mesh=mesh, center=center, k_forget=40, k_retain=30
    )
    print(
        json.dumps(
            {
                "devices": len(jax.devices()),
                "rows_here": [shape[0] for shape in shards],
                "forget_ids": tails.forget_ids,
                "retain_ids": tails.retain_ids,
                "forget_scores": tails.forget_scores.tolist(),
                "retain_scores": tails.retain_scores.tolist(),
            }
        )
    )


def train() -> None:
    """Prints an adapter after two unlearning steps, its batches split over all devices."""
    import functools

    import optax
    from support import tiny_model, token_rows

    from raslik_jax.unlearning import objectives, steps

    model, mesh = tiny_model(), distributed.data_mesh()

    def batch(seed: int) -> objectives.TokenBatch:
        rows = token_rows(seed, [(3 + n % 3, 2 + n % 4) for n in range(8)])
        return objectives.TokenBatch(
            *(
                distributed.shard_leading(mesh, leaf.shape, leaf.dtype, leaf.__getitem__)
                for leaf in (np.asarray(rows.tokens_BL), np.asarray(rows.target_mask_BL))
            )
        )

    algorithm = steps.ga_gdr(model.decoder, optax.adamw(1e-2))
    step = jax.jit(functools.partial(algorithm.step, forget_targets=8, retain_targets=8))
    lora, base = distributed.replicate(mesh, (model.lora, model.base))
    state = algorithm.init(lora)
    for number in range(2):
        state, info = step(
            state, steps.Frozen(base=base, reference=lora), batch(number), batch(10 + number)
        )
    leaves = [np.asarray(leaf).ravel() for leaf in jax.tree.leaves(state.params)]
    print(json.dumps({"lora": np.concatenate(leaves).tolist(), "loss": float(info.loss)}))


def fail(process: str) -> None:
    """Fails in one process; the others work on."""
    if jax.process_index() == int(process):
        raise ValueError(f"of process {process}")
    wait()


def wait() -> None:
    """Sums over all processes again and again, far longer than the test lasts."""
    mesh = distributed.data_mesh()
    total = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(jnp.sum(x), "data"),
            mesh=mesh,
            in_specs=PartitionSpec("data"),
            out_specs=PartitionSpec(),
        )
    )
    devices = len(jax.devices())
    ones = distributed.shard_leading(
        mesh, (devices,), np.float32, lambda span: np.ones(span.stop - span.start, np.float32)
    )
    for _ in range(10_000):
        if float(total(ones)) != devices:
            raise SystemExit("wrong sum")
        print("summed", flush=True)
        time.sleep(0.05)


if __name__ == "__main__":
    task, coordinator, num_processes, process_id, num_devices, *rest = sys.argv[1:]
    with distributed.job(
        coordinator,
        num_processes=int(num_processes),
        process_id=int(process_id),
        num_cpu_devices=int(num_devices),
    ):
        {"search": search, "train": train, "wait": wait, "fail": fail}[task](*rest)
