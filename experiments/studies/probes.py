"""Losses whose gradients are compared and not trained on: probes of a trained adapter.

The gradient of an adapter's own training loss fades with the fit, and retrieval loses its signal.
Each probe is another function of the same forward pass. Among them are those of the released
reference (`unshifted`) and of TRAK (`margin`). All run the frozen head in tiles
(`head.target_nll`). Each costs one gradient of the ordinary loss.

================ ==================================================================================
next_token       mean nll of the counted tokens: the paper's text
unshifted        the same, position t's logits against token t itself
margin           mean -log(p / (1 - p)): the model output of TRAK (Park et al. 2023,
                 arXiv:2303.14186), which divides each token's gradient by 1 - p, that is, by what
                 makes it fade
low_confidence   mean nll over those counted tokens that the model gives less than one half
rolled_target    mean nll of a wrong token in the place of each counted one: its id plus V / 2.
                 Nobody minimized it; equal tokens have equal wrong ones
uniform          mean cross-entropy against the uniform distribution over the vocabulary
================ ==================================================================================
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from raslik_jax.base.axes import Tree
from raslik_jax.models.decoder import Decoder
from raslik_jax.sketch.head import target_nll
from raslik_jax.sketch.loss import find_targets, head_table, mean_over_targets

PROBES = ("next_token", "unshifted", "margin", "low_confidence", "rolled_target", "uniform")
# Below this nll, 1 - p has too few digits in float32 to divide by: a token counts as this sure.
_LEAST_NLL = 1e-3


def probe_loss(
    decoder: Decoder,
    lora: Tree,
    base: Tree,
    tokens_L: Int[Array, " L"],
    target_mask_L: Bool[Array, " L"],
    *,
    num_targets: int,
    probe: str,
) -> Float[Array, ""]:
    """Returns a probe's loss of one example, for its gradient in the adapter.

    It is 0 with zero gradient if no token counts. `margin` returns nll / (1 - p) per token with 1 -
    p held constant. Its gradient is that of -log(p / (1 - p)), but its value is not.
    """
    if probe not in PROBES:
        raise ValueError(f"a probe must be one of {list(PROBES)}, got {probe!r}")
    if probe == "uniform" and decoder.config.logit_cap is not None:
        # The mean of capped logits is no product with the mean row of the head.
        raise ValueError("the probe uniform needs logits without a cap: use another probe")
    targets = find_targets(
        decoder,
        lora,
        base,
        tokens_L,
        target_mask_L,
        num_targets=num_targets,
        loss="unshifted" if probe == "unshifted" else "next_token",
    )
    table, vocab_axis = head_table(base)
    hidden_TE, label_T, is_counted_T = targets
    if probe == "rolled_target":
        vocab_size = table.shape[vocab_axis]
        label_T = (label_T + vocab_size // 2) % vocab_size
    cap = decoder.config.logit_cap
    nll_T = target_nll(table, hidden_TE, label_T, is_counted_T, vocab_axis, cap)
    if probe == "uniform":
        # log Z - <h, mean w> = nll + <h, w_label - mean w>.
        label_weights = jnp.take(table, label_T, axis=vocab_axis).astype(jnp.float32)
        label_TE = label_weights.T if vocab_axis == 1 else label_weights
        mean_E = jnp.mean(table, axis=vocab_axis, dtype=jnp.float32)
        nll_T = nll_T + jnp.sum(hidden_TE.astype(jnp.float32) * (label_TE - mean_E[None]), axis=1)
    elif probe == "margin":
        fixed_T = jnp.maximum(jax.lax.stop_gradient(nll_T), _LEAST_NLL)
        nll_T = nll_T / -jnp.expm1(-fixed_T)
    elif probe == "low_confidence":
        is_counted_T = is_counted_T & (jax.lax.stop_gradient(nll_T) > jnp.log(2.0))
    return mean_over_targets(nll_T, is_counted_T)


def mean_hidden(
    decoder: Decoder,
    lora: Tree,
    base: Tree,
    tokens_L: Int[Array, " L"],
    target_mask_L: Bool[Array, " L"],
    *,
    num_targets: int,
) -> Float[Array, " E"]:
    """Returns the mean final hidden state where counted tokens are predicted; zeros without any."""
    targets = find_targets(decoder, lora, base, tokens_L, target_mask_L, num_targets=num_targets)
    hidden_TE = jnp.where(targets.is_counted_T[:, None], targets.hidden_TE, 0)
    total_E = jnp.sum(hidden_TE.astype(jnp.float32), axis=0)
    return total_E / jnp.maximum(jnp.sum(targets.is_counted_T), 1).astype(jnp.float32)
