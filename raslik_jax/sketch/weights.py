"""Gradients of a model's own weights in place of its adapter's.

Weights are chosen by their Hugging Face names. The trained tree then has the chosen ones in
float32: "layers/q_proj/kernel" -> [layers chosen, ...]. The adapter joins the frozen base. Both go
through `sketch.gradients` as an adapter and its base do. A leaf outside of layers gets an axis of
one in front, so that the first axis is of layers everywhere.
"""

import math
import re
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from raslik_jax.base.axes import Tree
from raslik_jax.base.messages import shown
from raslik_jax.models import decoder as decoders
from raslik_jax.models import key_map
from raslik_jax.sketch.gradients import ExampleLoss
from raslik_jax.sketch.loss import example_loss

LORA = "lora"
# A copy of the weights in float32, their gradient, its flat copy, the table of the projection.
BYTES_EACH = 16
_MOST = 2**31  # coordinates are numbered in 32 bits


class Chosen(NamedTuple):
    """A leaf of the base with the rows that are chosen of it; none where it is not stacked."""

    path: tuple[str, ...]
    layers: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """Its key among what is differentiated."""
        return "/".join(self.path)

    @property
    def is_whole(self) -> bool:
        """Whether no row of it is left out."""
        return not self.layers or len(self.layers) == self.shape[0]


def choose_weights(pattern: str, config: decoders.ModelConfig) -> tuple[Chosen, ...]:
    """Returns the weights in whose Hugging Face names a regular expression is found.

    A ValueError where there are none, or 2**31 or more.
    """
    _, _, base = decoders.abstract(config, None)
    slots = key_map.plan(decoders.ARCHITECTURES[config.model_type].key_map, base)
    leaves = key_map.flatten(base)
    found: dict[tuple[str, ...], list[int]] = {}
    for name, slot in slots.items():
        if re.search(pattern, name):
            found.setdefault(slot.path, []).extend([] if slot.layer is None else [slot.layer])
    if not found:
        must = f"must be lora, or found in names of weights such as {sorted(slots)[-1]}"
        raise ValueError(f"--sketch.parameters {must}, got {shown(pattern)}: correct it")
    chosen = tuple(
        Chosen(path, tuple(sorted(layers)), tuple(leaves[path].shape))
        for path, layers in sorted(found.items())
    )
    if (size := count_weights(chosen)) >= _MOST:
        must = f"must match fewer than 2**31 = {_MOST:,} weights, got {size:,}"
        raise ValueError(f"--sketch.parameters {must}: match fewer layers")
    return chosen


def count_weights(chosen: tuple[Chosen, ...]) -> int:
    """Returns P, the number of chosen weights."""
    return sum(
        math.prod(one.shape) // (one.shape[0] if one.layers else 1) * max(len(one.layers), 1)
        for one in chosen
    )


def check_memory(num_weights: int, available: int) -> None:
    """Refuses weights for whose gradients so many bytes of the device's memory are too few."""
    needed = BYTES_EACH * num_weights
    if needed > available:
        sizes = f"{num_weights:,} x {BYTES_EACH} bytes = {needed / 1e9:,.1f} GB"
        what = "weights, gradient, its flat copy and the projection's table"
        raise ValueError(
            f"--sketch.parameters matches too many weights: {sizes} for {what}, got "
            f"{available / 1e9:,.1f} GB beside the model: match fewer"
        )


def take(base: Tree, chosen: tuple[Chosen, ...]) -> dict[str, Array]:
    """Returns the chosen weights of a base in float32 with layers in front."""
    leaves = key_map.flatten(base)

    def rows(one: Chosen) -> Array:
        leaf = leaves[one.path].astype(jnp.float32)
        if not one.layers:
            return leaf[None]
        return leaf if one.is_whole else leaf[jnp.array(one.layers)]

    return {one.name: rows(one) for one in chosen}


def put(base: Tree, chosen: tuple[Chosen, ...], weights: dict[str, Array]) -> Tree:
    """Returns the base with other values of the chosen weights in its own dtypes."""
    for one in chosen:
        rows = weights[one.name]

        def place(leaf: Array, one: Chosen = one, rows: Array = rows) -> Array:
            rows = rows.astype(leaf.dtype)
            if not one.layers:
                return rows[0]
            return rows if one.is_whole else leaf.at[jnp.array(one.layers)].set(rows)

        base = _with(base, one.path, place)
    return base


def _with(tree: Tree, path: tuple[str, ...], place: Any) -> Tree:
    first, *rest = path
    below = tree[first]
    return {**tree, first: _with(below, tuple(rest), place) if rest else place(below)}


def weights_loss(
    decoder: decoders.Decoder, chosen: tuple[Chosen, ...], **options: Any
) -> ExampleLoss:
    """Returns the loss of one example as a function of the chosen weights.

    The arguments are (weights, {"lora": ..., "base": ...}, tokens_L, target_mask_L). Options and
    value are those of `example_loss`.
    """
    names = {one.name for one in chosen}

    def loss(
        weights: dict[str, Array], held: Tree, tokens_L: Array, target_mask_L: Array
    ) -> Float[Array, ""]:
        base = held["base"]
        head = "head/kernel" if "head" in base else "embed/embedding"
        return example_loss(
            decoder,
            held["lora"],
            put(base, chosen, weights),
            tokens_L,
            target_mask_L,
            trains_head=head in names,
            **options,
        )

    return loss
