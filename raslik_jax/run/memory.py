"""Errors of memory in one sentence: the cause and the setting to change."""

import contextlib
import os
from collections.abc import Iterator

import jax

from raslik_jax.base.axes import Tree
from raslik_jax.base.messages import one_line
from raslik_jax.config import BackboneConfig
from raslik_jax.models import decoder, sharding
from raslik_jax.parallel import meshes


@contextlib.contextmanager
def explained(what: str, lower: str) -> Iterator[None]:
    """Turns an allocation that failed into a ValueError that names the settings to lower."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = one_line(str(error).removeprefix("RESOURCE_EXHAUSTED: "), 80)
        raise ValueError(f"{what} ran out of memory ({reason}): lower {lower}") from error


def device_bytes() -> int:
    """Returns the memory of the first device, or of the machine if it has none of its own."""
    return meshes.device_memory() or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def rows_held(tokens: int, hidden_size: int) -> int:
    """Returns the rows of this number of tokens that a CPU trains on at a time; 0 for all.

    A narrow model keeps little memory per token for the backward pass. A model of 576 units keeps 1
    MB a token.
    """
    is_alone = meshes.platform() == "cpu" and meshes.num_shards() == 1
    return max(1024 // tokens, 1) if tokens and is_alone and hidden_size >= 512 else 0


def lay_out(settings: BackboneConfig, shapes: decoder.ModelConfig, kind: str) -> tuple[int, Tree]:
    """Returns the parts of a model's weights on the mesh and their shapes, marked as split.

    It raises a ValueError if the mesh cannot split them or a device cannot hold its own.
    """
    return sharding.lay_out(
        kind,
        decoder.abstract(shapes, None, settings.dtypes)[2],
        settings.format,
        double_quant=settings.double_quant,
        devices=meshes.num_shards(),
        memory=meshes.device_memory(),
    )


decoding = explained("decoding", "--references.decode_batch_size or --references.max_new_tokens")
likelihoods = explained(
    "measuring likelihoods", "--sketch.batch_tokens or --references.decode_batch_size"
)
