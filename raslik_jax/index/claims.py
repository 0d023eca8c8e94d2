"""Many jobs, one index: each claims the chunks it makes, and a claim dies with its job.

Sketching needs no communication. A job that looks for work takes the first chunk that is neither
committed nor claimed, by a conditional write of `claims/<chunk>.json` that only one job can win.
Then its heart beats: it rewrites its claim every few seconds. A heart that stopped loses its claim.

No clock is shared. Each watcher measures, by its own clock, for how long a claim has not changed;
a process of its own host it can simply look for. A job that was only slow may so lose its chunk to
another, and both make it. That is harmless: the same chunk has the same bytes, and every write is
atomic. Claims save work, they guard nothing.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from raslik_jax.files import check_shape, parse_json
from raslik_jax.index.store import SketchStore

_HOST = socket.gethostname()
_CLAIM = {"worker": str, "host": str, "pid": int, "beat": int, "index": str}


def _is_void(value: bytes, origin: str) -> bool:
    """Whether a claim need not be waited for.

    It is of an index that was here before, or of a process of this host that is no more. One that
    cannot be read, such as one that is just being written, is waited for like any other.
    """
    try:
        claim = parse_json(value.decode(errors="replace"), "a claim")
        check_shape(claim, _CLAIM, "a claim")
    except ValueError:
        return False
    if claim["index"] != origin:
        return True
    if claim["host"] != _HOST:
        return False
    try:
        os.kill(claim["pid"], 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False


class Claim(NamedTuple):
    """A chunk that is this job's for now."""

    chunk: int
    generation: bytes


class Claims:
    """The claims of one job on the chunks of an index.

    Args:
      store: the index.
      worker: names the job in its claims, for people to read.
      heartbeat_s: seconds between two heartbeats.
      expiry_s: seconds without a heartbeat after which another job's claim is void; several
        heartbeats, since a compilation or a slow disk can hold one up.
      clock: seconds that only grow.
    """

    def __init__(
        self,
        store: SketchStore,
        *,
        worker: str,
        heartbeat_s: float = 10.0,
        expiry_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        if not 0 < heartbeat_s < expiry_s:
            raise ValueError(
                f"expiry_s must be longer than heartbeat_s, got {heartbeat_s=}, {expiry_s=}: make "
                "it several times as long"
            )
        self._store, self._place = store, store.place
        self._worker = worker
        self._heartbeat_s = heartbeat_s
        self._expiry_s = expiry_s
        self._clock = clock
        self._seen: dict[int, tuple[bytes, float]] = {}  # of others: generation, since when

    def take(self) -> Claim | None:
        """Returns a missing chunk that is now this job's, or None while others have them all."""
        try:
            return self._take()
        except OSError:
            # Another job that found the index complete clears the claims away, ours under our
            # hands. That is no failure of this one; anything else is.
            if self._store.missing_chunks():
                raise
            return None

    def _take(self) -> Claim | None:
        for chunk in self._store.missing_chunks():
            file, value = claim_file(chunk), self._value(chunk, 0)
            seen = self._place.look(file)
            if seen.value is not None and not (
                _is_void(seen.value, self._store.manifest.chunks[chunk].origin)
                or self._is_expired(chunk, seen.generation)
            ):
                continue
            self._store.require_current(chunk)
            if seen.value is None:
                generation = self._place.create(file, value, seen.generation)
            else:
                generation = self._place.write(file, value, if_equal=seen.generation)
            if not generation:
                continue  # another job was faster
            # Its last maker may have committed it between our look and our claim.
            if chunk in self._store.missing_chunks():
                return Claim(chunk, generation)
            self._place.delete(file, if_equal=generation)
        return None

    def _is_expired(self, chunk: int, generation: bytes) -> bool:
        now = self._clock()
        known, since = self._seen.get(chunk, (b"", now))
        if known != generation:
            since = now
        self._seen[chunk] = (generation, since)
        return now - since > self._expiry_s

    def _value(self, chunk: int, beat: int) -> bytes:
        claim = {
            "worker": self._worker,
            "host": _HOST,
            "pid": os.getpid(),
            "beat": beat,
            "index": self._store.manifest.chunks[chunk].origin,
        }
        return json.dumps(claim).encode()

    @contextlib.contextmanager
    def beating(self, claim: Claim) -> Iterator[None]:
        """Keeps a claim alive, and drops it at the end."""
        stop, file = threading.Event(), claim_file(claim.chunk)
        generation = claim.generation

        def beat() -> None:
            nonlocal generation
            number = 0
            while generation and not stop.wait(self._heartbeat_s):
                number += 1
                # A full disk must not stop the heart: the next beat may succeed. An empty
                # generation says that the claim was taken over, or cleared away because the index
                # is complete; one that was moved away must not be made again by a write.
                with contextlib.suppress(OSError):
                    value = self._value(claim.chunk, number)
                    is_there = self._place.is_there()
                    generation = (
                        self._place.write(file, value, if_equal=generation) if is_there else b""
                    )

        heart = threading.Thread(target=beat, name=f"claim on chunk {claim.chunk}", daemon=True)
        heart.start()
        try:
            yield
        finally:
            stop.set()
            heart.join()
            # A claim that cannot be dropped, since a finishing job is clearing all of them or the
            # disk is full, will expire or be cleared: it guards nothing.
            if generation and self._place.is_there():
                with contextlib.suppress(OSError):
                    self._place.delete(file, if_equal=generation)


def claim_file(chunk: int) -> str:
    """Returns the name of the file of a claim."""
    return f"claims/{chunk}.json"


def claimed_chunks(
    store: SketchStore,
    *,
    worker: str,
    heartbeat_s: float = 10.0,
    expiry_s: float = 60.0,
    poll_s: float = 1.0,
) -> Iterator[int]:
    """Yields chunks for this job to make, until none of the index is missing.

    A chunk is this job's until the next one is asked for. While other jobs hold all that is
    missing, waits: for their commits, or for a claim to expire.

    Args:
      store: the index, the same for all jobs (`SketchStore.create` by each of them is safe).
      worker: names the job; different for each (host name and process id, say).
      heartbeat_s: seconds between two heartbeats.
      expiry_s: seconds after which a claim without heartbeats is void.
      poll_s: seconds between two looks while waiting.

    Example:
      for chunk in claimed_chunks(store, worker=f"{socket.gethostname()}-{os.getpid()}"):
        store.write_chunk(chunk, *sketch(store.chunk_ids(chunk)))
      store.finish()
    """
    claims = Claims(store, worker=worker, heartbeat_s=heartbeat_s, expiry_s=expiry_s)
    while store.missing_chunks():
        claim = claims.take()
        if claim is None:
            time.sleep(poll_s)
            continue
        with claims.beating(claim):
            yield claim.chunk
