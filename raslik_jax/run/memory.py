"""Out of memory in one sentence: what needed it, and which setting to lower."""

import contextlib
from collections.abc import Iterator

import jax

from raslik_jax.messages import one_line


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error says that the device or the host has no memory left."""
    is_of_device = isinstance(error, jax.errors.JaxRuntimeError)
    return isinstance(error, MemoryError) or (is_of_device and "RESOURCE_EXHAUSTED" in str(error))


@contextlib.contextmanager
def explained(what: str, lower: str) -> Iterator[None]:
    """Turns an allocation that failed into a ValueError; a context or a decorator.

    Args:
      what: the stage, "fine-tuning" for example.
      lower: settings that make it smaller.
    """
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        reason = one_line(str(error).removeprefix("RESOURCE_EXHAUSTED: "), 80)
        raise ValueError(f"{what} ran out of memory ({reason}): lower {lower}") from error
