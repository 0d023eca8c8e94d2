"""Strategies of the paper's protocol that the package leaves out: what is drawn at random.

CR mixes the oracle's rows with others ("Controlled Randomization", Section 5). `*_anywhere` draws
the retain set from all rows, where the package retains no row that is labeled as a target.
"""

import dataclasses
from typing import Any

import numpy as np

from raslik_jax.base.settings import Settings, setting
from raslik_jax.retrieve.selectors import select_by_count
from raslik_jax.retrieve.strategies import STRATEGIES, Request, Scores, Strategy, oracle, uniform


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureSettings(Settings):
    """Settings of controlled randomization."""

    oracle_share: float = setting(
        0.5, "Share of the forget set that the oracle chooses.", low=0, high=1
    )


def mixture(request: Request) -> Scores:
    """Returns CR-x: a share of the forget set from the oracle, the rest random non-targets.

    The retain set is the oracle's for the same seed. The draws are the same for every share, so
    only the mixture changes.
    """
    best, ids = oracle(request), [row.example_id for row in request.examples]
    num_targets = int((best.forget_N > -np.inf).sum())
    num_forget = min(request.num_forget, num_targets)
    chosen = select_by_count(*best, ids, num_forget=num_forget, num_retain=request.num_retain)
    num_oracle = round(request.settings.oracle_share * request.num_forget)
    if num_oracle > num_targets:
        raise ValueError(
            f"CR's share of the forget set must be at most the {num_targets} targets, got "
            f"{num_oracle}: lower its oracle_share or --retrieve.num_forget"
        )
    is_target_N = np.array([row.is_target for row in request.examples], bool)
    forget_N = np.where(is_target_N, -np.inf, uniform(request, stream=2))
    forget_N[chosen.retain] = -np.inf
    forget_N[chosen.forget[:num_oracle]] = 2 + best.forget_N[chosen.forget[:num_oracle]]
    retain_N = np.full_like(forget_N, -np.inf)
    retain_N[chosen.retain] = best.retain_N[chosen.retain]
    return Scores(forget_N=forget_N, retain_N=retain_N)


def variant(strategy: Strategy, title: str, **bound: Any) -> Strategy:
    """Returns a strategy with its own settings bound."""
    settings = dataclasses.replace(strategy.settings, **bound)

    def score(request: Request) -> Scores:
        return strategy.score(request._replace(settings=settings))

    return strategy._replace(title=title, score=score, settings=Settings(), color="", marker="")


def _anywhere(record: Strategy) -> Strategy:
    """Returns a strategy with a retain set from all rows."""

    def score(request: Request) -> Scores:
        return record.score(request)._replace(retain_N=uniform(request, stream=1))

    return record._replace(title=f"{record.title}, any retain", score=score, color="", marker="")


_MIXTURE = Strategy("CR", mixture, settings=MixtureSettings())
ANYWHERE = {
    f"{name}_anywhere": _anywhere(STRATEGIES[name]) for name in ("random", "oracle", "raslik_f")
}
MEMBERS = {
    "cr": _MIXTURE,
    # The shares of the paper's table; any other is `cr` with an oracle_share of its own.
    **{
        f"cr_{x}": variant(_MIXTURE, f"CR-{x}", oracle_share=x / 100)
        for x in (25, 35, 45, 50, 62, 75)
    },
    **ANYWHERE,
}
