"""The machine that this process runs on."""

import os


def usable_cpus() -> int:
    """Returns how many cores of this machine the process may run on."""
    whole = os.cpu_count() or 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else whole
