"""Low-rank adapters: their settings, their parameters and their start.

A LoRA linear layer computes ``x W + b + (dropout(x) A) B * scale`` with ``A`` [in, rank] and ``B``
[rank, out]. The scale is alpha / rank. It is alpha / sqrt(rank) if it is rank-stabilized. This is
PEFT's layer with its two weight matrices transposed.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv:2106.09685);
initialization and the place of dropout as in PEFT (`peft.tuners.lora.layer`, release 0.21).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from raslik_jax.parallel import meshes

# Rank and alpha of every layer's adapter on one target; rank 0 where it has none.
LayerSizes = tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """The settings of one adapter.

    Attributes:
      rank: The inner width r.
      alpha: The output of the adapter is scaled by alpha / rank.
      dropout: The probability with which an input of the adapter is zeroed in training, in [0, 1).
      targets: The linear layers that get an adapter, by the last part of their Hugging Face name
        ("query_key_value", "q_proj", ...), in any order; kept sorted.
      use_rslora: The scale is alpha / sqrt(rank) (Kalajdzievski 2023, arXiv:2312.03732).
      layers: Rank and alpha of each layer by target, if they are not the same for all. The stacked
        factors are as wide as the largest rank of their target. Beyond a layer's own rank both are
        0, and so are their gradients: the function is the same.
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    targets: tuple[str, ...]
    use_rslora: bool = False
    layers: tuple[tuple[str, LayerSizes], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", tuple(sorted(self.targets)))
        is_named_once = self.targets and len(set(self.targets)) == len(self.targets)
        sizes = [size for _, layer in self.layers for size in layer]
        ranks, alphas = [rank for rank, _ in sizes], [alpha for rank, alpha in sizes if rank]
        for is_right, must in (
            (self.rank >= 1, f"rank must be at least 1, got {self.rank}"),
            (
                min(ranks, default=0) >= 0,
                f"ranks must not be negative, got {min(ranks, default=0)}",
            ),
            *(
                (0 < alpha < math.inf, f"alpha must be positive, got {alpha}")
                for alpha in (self.alpha, *alphas)
            ),
            (0 <= self.dropout < 1, f"dropout must be in [0, 1), got {self.dropout}"),
            (is_named_once, f"targets must be one or more different names, got {self.targets}"),
        ):
            if not is_right:
                raise ValueError(f"{must}: correct the adapter's settings")

    @property
    def scale(self) -> float:
        """The factor on the adapter's output if all layers have the same one."""
        return self._scale_of(self.rank, self.alpha)

    def _scale_of(self, rank: int, alpha: float) -> float:
        return alpha / (math.sqrt(rank) if self.use_rslora else rank) if rank else 0.0

    def scales(self) -> dict[str, tuple[float, ...]]:
        """Returns the factor of every layer by target; {} if all layers have the same one."""
        return {name: tuple(self._scale_of(*size) for size in sizes) for name, sizes in self.layers}

    def ranks(self) -> dict[str, tuple[int, ...]]:
        """Returns the rank of every layer by target; {} if all layers have the same one."""
        return {name: tuple(rank for rank, _ in sizes) for name, sizes in self.layers}

    def width(self, target: str) -> int:
        """Returns the stored rank of a target's factors: its largest."""
        return max(self.ranks().get(target, (self.rank,)))

    def describe(self) -> str:
        """Returns rank, alpha and targets in words."""
        text = f"rank {self.rank}, alpha {self.alpha:g} on {', '.join(self.targets)}"
        text += ", rank-stabilized" if self.use_rslora else ""
        return text + (", with ranks and alphas of their own in some layers" if self.layers else "")


class LoRAParam(nnx.Param):
    """A parameter of an adapter, separate from the frozen weights when a model is split."""


# The name of what a backward pass keeps; all else it computes again (`layers`).
KEPT = "kept"

ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


def init_factor_a(key: jax.Array, shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Returns the first factor [..., in, rank] at its start: uniform in +-1 / sqrt(in).

    This is PEFT's `kaiming_uniform_(a=sqrt(5))` from `torch.nn.Linear`. The second factor starts at
    zero. A fresh adapter therefore changes nothing.
    """
    bound = 1.0 / math.sqrt(shape[-2])
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound)


def drop(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Returns x with entries zeroed at this rate and the others scaled up if there is a key."""
    if key is None or rate == 0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def inner_product(
    input_LI: Float[Array, "L I"],
    a_IR: Float[Array, "I R"],
    *,
    dropout: float = 0.0,
    key: jax.Array | None = None,
) -> Float[Array, "L R"]:
    """Returns dropout(x) A of a linear layer's input; `key` switches the dropout on."""
    # The adapter is what is learned: its matmuls stay in float32 whatever the frozen weights are.
    # They cost rank / in_features of the frozen matmul.
    hidden_LI = drop(input_LI.astype(jnp.float32), dropout, key)
    if meshes.platform() != "cpu":
        return checkpoint_name(hidden_LI @ a_IR, KEPT)
    # So that a row's gradient of A is a product [R, I]: a CPU takes a fifth of the time for it that
    # it takes for [I, R]. Without the barrier XLA turns it round.
    a_RI = jax.lax.optimization_barrier(a_IR.T)
    return checkpoint_name(jnp.einsum("li,ri->lr", hidden_LI, a_RI), KEPT)
