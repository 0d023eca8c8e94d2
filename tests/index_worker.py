"""One sketching job as a process of its own, for the tests that kill it.

  python index_worker.py PATH NUM_ROWS SIZE CHUNK_ROWS DTYPE [--claim NAME] [--die_before N]
      [--die_after N] [--delay SECONDS] [--expiry SECONDS] [--host NAME]

Rows are a function of their position, so any process makes the same. --die_before=N kills the
process with SIGKILL before its N-th write to the index, --die_after=N after it.
"""

import argparse
import os
import signal
import sys
import time

import numpy as np

from raslik_jax.index import claims
from raslik_jax.index.store import SketchStore


def sketches(span: slice, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Unit rows and norms at these positions."""
    rows = np.stack(
        [
            np.random.default_rng(position).standard_normal(size)
            for position in range(span.start, span.stop)
        ]
    ).astype(np.float32)
    norms = np.linalg.norm(rows, axis=1)
    return rows / norms[:, None], norms


def die_at_write(number: int, *, after: bool) -> None:
    """Makes the process kill itself before or after its number-th write."""
    writes = 0

    def wrap(write):
        def wrapped(self, *args, **kwargs):
            nonlocal writes
            writes += 1
            if writes == number and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = write(self, *args, **kwargs)
            if writes == number and after:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    for name in ("_put_array", "_put_bytes"):
        setattr(SketchStore, name, wrap(getattr(SketchStore, name)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("num_rows", type=int)
    parser.add_argument("size", type=int)
    parser.add_argument("chunk_rows", type=int)
    parser.add_argument("dtype")
    parser.add_argument("--claim")
    parser.add_argument("--die_before", type=int)
    parser.add_argument("--die_after", type=int)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--expiry", type=float, default=60.0)
    parser.add_argument("--host")
    args = parser.parse_args()
    if args.host:  # so that other jobs cannot see whether this process is there
        claims._HOST = args.host
    if args.die_before or args.die_after:
        die_at_write(args.die_before or args.die_after, after=bool(args.die_after))
    store = SketchStore.create(
        args.path,
        identity={"made_by": "index_worker"},
        ids=[f"row-{position}" for position in range(args.num_rows)],
        size=args.size,
        dtype=args.dtype,
        chunk_rows=args.chunk_rows,
    )
    if args.claim:
        chunks = claims.claimed_chunks(
            store, worker=args.claim, heartbeat_s=args.expiry / 5, expiry_s=args.expiry, poll_s=0.05
        )
    else:
        chunks = iter(store.missing_chunks())
    for chunk in chunks:
        print(chunk, flush=True)
        rows, norms = sketches(store.chunk_positions(chunk), args.size)
        time.sleep(args.delay)
        store.write_chunk(chunk, rows, norms)
    store.finish()
    print("finished", flush=True)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        print(f"error: {error.strerror}", file=sys.stderr)
        sys.exit(1)
