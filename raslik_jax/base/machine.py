"""The machine that this process runs on."""

import hashlib
import os
import pathlib
import platform


def usable_cpus() -> int:
    """Returns how many cores of this machine the process may run on."""
    whole = os.cpu_count() or 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else whole


def kind() -> str:
    """Returns a name of the processor's kind: its architecture and a hash of its instructions."""
    found: tuple[str, ...] = (platform.machine(), platform.processor())
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
        names = ("flags", "Features", "model name")
        found += tuple(next((ln for ln in lines if ln.startswith(name)), "") for name in names)
    return f"{found[0]}-{hashlib.sha256(repr(found).encode()).hexdigest()[:8]}"
