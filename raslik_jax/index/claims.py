"""Many jobs, one index: each claims the chunks it makes, and a claim dies with its job.

Sketching needs no communication. A job takes the first chunk that is neither committed nor claimed.
It creates `claims/<chunk>.json`, which only one job can do. Then its heart beats: it rewrites its
claim every few seconds. A job without a heartbeat loses its claim. If several jobs take it over at
the same moment more than one may win, since nothing is locked.

No clock is shared. Each watcher measures by its own clock how long a claim has not changed. It
looks for processes of its own host directly. A slow job may lose its chunk to another, and both
make it. This is harmless: the same chunk has the same bytes, and every write is atomic. Claims save
work and guard nothing.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from raslik_jax.base.files import check_shape, parse_json
from raslik_jax.index.store import SketchStore

_HOST = socket.gethostname()
_CLAIM = {"worker": str, "host": str, "pid": int, "beat": int, "index": str}


class Claim(NamedTuple):
    """A chunk that is this job's for now."""

    chunk: int
    generation: bytes


class Claims:
    """The claims of one job on the chunks of an index.

    `worker` names the job for people to read. A claim without a heartbeat for `expiry_s` seconds is
    void: several heartbeats, since a compilation or a slow disk can hold one up.

    Example:
      for chunk in Claims(store, worker=f"{socket.gethostname()}-{os.getpid()}").chunks():
        store.write_chunk(chunk, *sketch(store.ids[store.chunk_positions(chunk)]))
      store.finish()
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
        self._store, self._place, self._worker = store, store.place, worker
        self._heartbeat_s, self._expiry_s, self._clock = heartbeat_s, expiry_s, clock
        self._seen: dict[int, tuple[bytes, float]] = {}  # of others: generation, since when

    def chunks(self, poll_s: float = 1.0) -> Iterator[int]:
        """Yields chunks for this job to make, until none of the index is missing.

        A chunk is this job's until the next one is asked for. While other jobs hold all that is
        missing, looks again every `poll_s` seconds for a claim that has expired.
        """
        # All commits are listed before the first claim and after the last, and not for each.
        is_complete = not self._store.missing_chunks()
        while not is_complete:
            claim = self.take()
            if claim:
                with self.beating(claim):
                    yield claim.chunk
                continue
            is_complete = not self._store.missing_chunks()
            if not is_complete:
                time.sleep(poll_s)

    def take(self) -> Claim | None:
        """Returns a missing chunk that is now this job's; None while others have them all."""
        try:
            missing = filter(self._store.is_missing, range(self._store.num_chunks))
            claims = map(self._claim, missing)
            return next((claim for claim in claims if claim is not None), None)
        except OSError:
            # Another job that found the index complete removes all claims, also this job's. Any
            # other change is an error.
            if self._store.missing_chunks():
                raise
            return None

    def _claim(self, chunk: int) -> Claim | None:
        """Claims a chunk; None if it is committed or belongs to another job."""
        file, value = claim_file(chunk), self._value(chunk, 0)
        seen = self._place.look(file)
        if seen.value is not None and not (
            self._is_void(chunk, seen.value) or self._is_expired(chunk, seen.generation)
        ):
            return None
        self._store.require_current(chunk)
        write = self._place.create if seen.value is None else self._place.write
        generation = write(file, value, if_equal=seen.generation)
        if not generation:
            return None  # another job was faster
        # Its last maker may have committed it between our look and our claim.
        if self._store.is_missing(chunk):
            return Claim(chunk, generation)
        self._place.write(file, None, if_equal=generation)
        return None

    def _is_void(self, chunk: int, value: bytes) -> bool:
        """Whether a claim is of an earlier index or of this host's dead process."""
        try:
            claim = parse_json(value.decode(errors="replace"), "a claim")
            check_shape(claim, _CLAIM, "a claim")
            if claim["index"] == self._origin(chunk):
                if claim["host"] == _HOST:
                    os.kill(claim["pid"], 0)
                return False
        except ProcessLookupError:
            return True
        except (ValueError, PermissionError, OverflowError):  # perhaps one just being written
            return False
        return True

    def _is_expired(self, chunk: int, generation: bytes) -> bool:
        now = self._clock()
        known, since = self._seen.get(chunk, (b"", now))
        self._seen[chunk] = (generation, since if known == generation else now)
        return now - self._seen[chunk][1] > self._expiry_s

    def _origin(self, chunk: int) -> str:
        return self._store.manifest.chunks[chunk].origin

    def _value(self, chunk: int, beat: int) -> bytes:
        claim = (self._worker, _HOST, os.getpid(), beat, self._origin(chunk))
        return json.dumps(dict(zip(_CLAIM, claim, strict=True))).encode()

    @contextlib.contextmanager
    def beating(self, claim: Claim) -> Iterator[None]:
        """Keeps a claim alive and drops it at the end."""
        stop, file, generation = threading.Event(), claim_file(claim.chunk), claim.generation

        def write(value: bytes | None) -> None:
            # Not where the index was moved away: a write would make it again. A full disk must not
            # stop the heart: the next beat may succeed. A claim that cannot be dropped will expire.
            nonlocal generation
            local = self._place.local
            with contextlib.suppress(OSError):
                is_there = local is None or local.is_dir()
                generation = (
                    self._place.write(file, value, if_equal=generation) if is_there else b""
                )

        def beat() -> None:
            number = 0
            # An empty generation: the claim was taken over, or the complete index has none.
            while generation and not stop.wait(self._heartbeat_s):
                number += 1
                write(self._value(claim.chunk, number))

        heart = threading.Thread(target=beat, name=f"claim on chunk {claim.chunk}", daemon=True)
        heart.start()
        try:
            yield
        finally:
            stop.set()
            heart.join()
            if generation:
                write(None)


def claim_file(chunk: int) -> str:
    """Returns the name of the file of a claim."""
    return f"claims/{chunk}.json"
