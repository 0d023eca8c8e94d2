"""A decoder of one matrix, whose gradients are written out by hand, and its losses in NumPy."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from raslik_jax.models.decoder import Decoder

V, E = 11, 5


def _decoder(find):
    def hidden(lora, base, tokens_L, *, dropout_key=None):
        hidden_LE = base["embed"]["embedding"][tokens_L]
        if dropout_key is not None:
            keep_LE = jax.random.bernoulli(dropout_key, 0.5, hidden_LE.shape)
            hidden_LE = jnp.where(keep_LE, 2.0 * hidden_LE, 0.0)
        return hidden_LE @ find(lora, base)

    def logits(lora, base, hidden_TE):
        del lora
        # The constant moves no probability.
        return hidden_TE @ base["head"]["kernel"] + base["constant"]

    return Decoder(None, hidden, logits, None, None)


# The next token's logits are embedding[token] @ w @ head, w being the adapter or part of the base.
ADAPTED = _decoder(lambda lora, base: lora["w"])
WHOLE = _decoder(lambda lora, base: base["w"])


def random_weights(seed=0, *, constant=0.0):
    """Returns (lora, base) of which w is the adapter's; the base has another w."""
    generator = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(generator.normal(size=shape), jnp.float32)

    lora = {"w": normal(E, E)}
    base = {"embed": {"embedding": normal(V, E)}, "head": {"kernel": normal(E, V)}}
    return lora, base | {"w": normal(E, E), "constant": jnp.full((), constant)}


class Values(NamedTuple):
    """One number per example and its gradient with respect to w."""

    value_B: np.ndarray
    grad_BEE: np.ndarray


def _log_softmax(logits_V):
    shifted_V = logits_V - logits_V.max()
    return shifted_V - np.log(np.exp(shifted_V).sum())


def _per_example(w, base, batch, of_token):
    """Returns the token means of of_token(log_p_V, x_E, label) -> (value, slope at the logits)."""
    embed, head = (np.asarray(base[a][b], np.float64) for a, b in
                   (("embed", "embedding"), ("head", "kernel")))  # fmt: skip
    values, grads = [], []
    for tokens_L, mask_L in zip(*map(np.asarray, batch), strict=True):
        value, grad, positions = 0.0, np.zeros((E, E)), np.flatnonzero(mask_L)
        for t in positions:
            x_E = embed[tokens_L[t - 1]]
            term, slope_V = of_token(_log_softmax(x_E @ w @ head), x_E, tokens_L[t])
            value += term / len(positions)
            grad += np.outer(x_E, head @ slope_V) / len(positions)
        values.append(value)
        grads.append(grad)
    return Values(np.array(values), np.array(grads))


def nll_values(w, base, batch):
    """Returns each example's mean token negative log likelihood."""

    def of_token(log_p_V, x_E, label):
        return -log_p_V[label], np.exp(log_p_V) - np.eye(V)[label]

    return _per_example(np.asarray(w, np.float64), base, batch, of_token)


def kl_values(w, reference, base, batch, *, direction):
    """Returns each example's mean token KL to the model with another w."""
    head = np.asarray(base["head"]["kernel"], np.float64)

    def of_token(log_p_V, x_E, label):
        log_q_V = _log_softmax(x_E @ np.asarray(reference, np.float64) @ head)
        p_V, q_V = np.exp(log_p_V), np.exp(log_q_V)
        if direction == "forward":
            return q_V @ (log_q_V - log_p_V), p_V - q_V
        kl = p_V @ (log_p_V - log_q_V)
        return kl, p_V * (log_p_V - log_q_V - kl)

    return _per_example(np.asarray(w, np.float64), base, batch, of_token)
