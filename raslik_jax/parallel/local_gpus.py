"""The NVIDIA GPUs of this machine before JAX opens any, and their division among processes."""

import os
import pathlib
import socket
from collections.abc import Sequence
from typing import NamedTuple

_DEVICES = pathlib.Path("/dev")
# The same for all processes of a machine, in whatever containers, until it is started again.
_BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")


class Seen(NamedTuple):
    """The machine of a process and the GPUs that CUDA shows it, in CUDA's order."""

    machine: str
    gpus: tuple[str, ...]


def numbers(devices: pathlib.Path = _DEVICES) -> list[str]:
    """Returns the numbers of the GPUs that this process may open, by the system's count."""
    # A scheduler may leave the names of others where it denies to open them.
    found = [path for path in devices.glob("nvidia[0-9]*") if os.access(path, os.R_OK | os.W_OK)]
    names = [path.name.removeprefix("nvidia") for path in found]
    return sorted(filter(str.isdecimal, names), key=int)


def look(devices: pathlib.Path = _DEVICES) -> Seen:
    """Returns the GPUs of this process; CUDA_VISIBLE_DEVICES has places or names of GPUs."""
    there = numbers(devices)
    gpus = [*there]
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        gpus = []
        for name in os.environ["CUDA_VISIBLE_DEVICES"].replace(" ", "").split(","):
            is_place = name.isdecimal()
            if name in ("", "-1") or (is_place and int(name) >= len(there)):
                break  # as CUDA reads it, no further
            gpus.append(there[int(name)] if is_place else name)
    is_told = _BOOT.is_file()
    machine = _BOOT.read_text(encoding="utf-8").strip() if is_told else socket.gethostname()
    return Seen(machine, tuple(gpus))


def divide(seen: Sequence[Seen]) -> list[tuple[int, ...]]:
    """Returns which GPUs each process of a job takes, as places among those that it sees.

    Processes of one machine that see the same GPUs divide them evenly, in order. Other processes
    keep the GPUs that a launcher gave them. It raises a ValueError if two would open the same GPU.
    """
    taken = []
    for number, own in enumerate(seen):
        beside = [
            n for n, other in enumerate(seen)
            if other.machine == own.machine and {*other.gpus} & {*own.gpus}
        ]  # fmt: skip
        for n in beside:
            if seen[n].gpus != own.gpus:
                got = " and ".join(",".join(one.gpus) for one in (own, seen[n]))
                raise ValueError(
                    "processes of one machine must see the same GPUs or different ones, got "
                    f"{got}: correct CUDA_VISIBLE_DEVICES"
                )
        each, left = divmod(len(own.gpus), max(len(beside), 1))
        if left:
            raise ValueError(
                f"processes of one machine must divide its GPUs evenly, got {len(beside)} for "
                f"{len(own.gpus)}: start another number, or give each its own by "
                "CUDA_VISIBLE_DEVICES"
            )
        first = beside.index(number) * each if own.gpus else 0
        taken.append(tuple(range(first, first + each)))
    return taken
