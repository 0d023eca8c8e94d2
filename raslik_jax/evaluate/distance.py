"""The distance of a model to one that was trained again without the rows to forget.

A second training with another seed gives other answers too. Its distance to the first is the noise
floor. Pure functions on the host. The KL per token comes from `likelihood.answer_divergence`.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from raslik_jax.evaluate import rates

# The parts of a distance on the answers to one kind of query, with heading and format in a table.
# Parts of one heading share a column. "kl" is the mean of both directions: the verdict's distance.
PARTS = {
    "kl_from_retrained": ("KL from / to\nretrained, {}", ".3g"),
    "kl_to_retrained": ("KL from / to\nretrained, {}", ".3g"),
    "kl": ("", ""),
    "same_answers": ("Same answers,\n{}", ".0%"),
    "rouge": ("ROUGE-L,\n{}", ".2f"),
}


def compare(
    divergences: Mapping[str, Mapping[str, Sequence[float]]],
    answers: Mapping[str, str],
    retrained: Mapping[str, str],
) -> dict[str, Float[np.ndarray, " Q"]]:
    """Returns `PARTS` for each kind of query, as "normal/kl": an array over queries.

    "same_answers" is 1 if the greedy answers are equal. "rouge" is the ROUGE-L F1 between them. Two
    blank answers are equal and have ROUGE-L 1.

    Args:
      divergences: KL(retrained || model) and KL(model || retrained), by kind and query id.
      answers: the model's greedy answers by query id.
      retrained: the retrained model's greedy answers by query id.
    """
    found = dict[str, Float[np.ndarray, " Q"]]()
    for kind, by_query in divergences.items():
        rows = []
        for name, kl in by_query.items():
            own, other = answers[name].strip(), retrained[name].strip()
            rouge = 1.0 if own == other else rates.rouge_l_f1(own, other)
            rows.append((*kl, sum(kl) / 2, float(own == other), rouge))
        columns = np.array(rows, np.float64).reshape(-1, len(PARTS)).T
        parts = zip(PARTS, columns, strict=True) if rows else ()
        found |= {f"{kind}/{part}": value_Q for part, value_Q in parts}
    return found
