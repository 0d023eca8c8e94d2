"""Random, Oracle and RASLIK-F with a retain set from all rows: what a protocol without labels does.

The package retains no row that is labeled as a target, as the paper.
"""

from raslik_jax.retrieve.strategies import STRATEGIES, Request, Scores, Strategy, uniform


def _anywhere(record: Strategy) -> Strategy:
    """Returns a strategy with a retain set from all rows."""

    def score(request: Request) -> Scores:
        return record.score(request)._replace(retain_N=uniform(request, stream=1))

    return record._replace(title=f"{record.title}, any retain", score=score, color="", marker="")


MEMBERS = {
    f"{name}_anywhere": _anywhere(STRATEGIES[name]) for name in ("random", "oracle", "raslik_f")
}
