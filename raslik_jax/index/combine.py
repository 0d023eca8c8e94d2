"""How the scores of several queries become one: weights from the cosines between them.

NumPy, on the host.
"""

import numpy as np
from jaxtyping import Float

# In units of a query's squared length: large against the noise of a sketch, small against what
# several queries share. .1 to .5 measured alike (docs/studies/retrieval_quality.md).
COMMON_RIDGE = 0.5


def common_weights(query_gram_QQ: Float[np.ndarray, "Q Q"]) -> Float[np.ndarray, " Q"]:
    """Returns weights w of the queries for which sum_q w_q u_q is what they have in common.

    w = (C + ridge I)^-1 1, scaled to a sum of 1, with C the cosines between the queries. Of all
    directions this is the one that ridge regression finds for "the inner product with every query
    is 1". A mean is pulled to wherever many queries happen to lie; here a query that says what
    others have said counts less, so that what is left is shared by all. With a large ridge it is
    the mean, with one query that query. Weights may be negative.

    Linear in the queries, as the mean is, so it costs no more at search; C comes from sketches.

    Args:
      query_gram_QQ: cosines between the (centered) queries.
    """
    count = len(query_gram_QQ)
    gram_QQ = np.asarray(query_gram_QQ, np.float64) + COMMON_RIDGE * np.eye(count)
    weight_Q = np.linalg.solve(gram_QQ, np.ones(count))
    return weight_Q / weight_Q.sum()
