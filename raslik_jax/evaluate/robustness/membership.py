"""Membership inference: do the losses of forgotten rows look like those of unseen rows?

Three attacks use the nats of the tokens of a row's answer. They are the loss (Yeom et al. 2018,
arXiv:1709.01604), the mean over the k % least likely tokens (min-k%, Shi et al. 2024,
arXiv:2310.16789), and the loss over the zlib bytes of the answer (Carlini et al. 2021,
arXiv:2012.07805). The AUC is the chance that the attack ranks a forgotten row above a held-out one.
It is .5 if nothing separates them. Rows of two origins also differ in other ways. The table
therefore has the AUC of the base, which saw neither.
"""

import dataclasses
import zlib
from typing import Any

import numpy as np
from jaxtyping import Float

from raslik_jax.base.settings import Settings, setting
from raslik_jax.data.examples import Corpus, Example
from raslik_jax.data.read.formats import AUTO, read_examples
from raslik_jax.evaluate import ranking, rates
from raslik_jax.evaluate.judgment import LEAST_QUERIES
from raslik_jax.evaluate.metrics import Column
from raslik_jax.evaluate.robustness.record import Compared, Cost, RobustnessMeasure
from raslik_jax.evaluate.sentences import write

ATTACKS = ("loss", "min-k%", "zlib")
# Queries like the rows to forget: with their labels, rows that were not trained on.
_QUERY_SETS = ("test_target", "validation_target")
# Nats of each token of an answer, and its text.
Told = tuple[Float[np.ndarray, " T"], str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MembershipSettings(Settings):
    """The rows that the forgotten ones are compared with."""

    held_out_file: str = setting(
        "",
        "File of rows like the forgotten ones that the model was never trained on; empty: the "
        "labeled target queries of the corpus.",
        is_rows=True,
    )
    least_share: float = setting(
        0.2, "Share of a row's tokens that counts, the least likely ones (min-k%).", above=0, high=1
    )


def unseen_rows(settings: MembershipSettings, corpus: Any) -> tuple[Example, ...]:
    """Returns the rows of --evaluate.membership.held_out_file, else the labeled target queries."""
    if settings.held_out_file:
        return read_examples(settings.held_out_file, format=AUTO)
    return tuple(row for name in _QUERY_SETS for row in corpus.queries[name] if row.output.strip())


def lacks(settings: MembershipSettings, corpus: Corpus | Any) -> str:
    """Returns why a corpus has no rows to compare forgotten ones with; "" if it has."""
    name = "--evaluate.membership.held_out_file"
    rows = unseen_rows(settings, corpus)
    if len(rows) < 2:
        is_given = bool(settings.held_out_file)
        got = "in that file: add more" if is_given else "labeled target queries: give such a file"
        return f"{name} must hold 2 rows or more that were not trained on, got {len(rows)} {got}"
    trained = {row[1:4] for row in corpus.train}
    if seen := sum(row[1:4] in trained for row in rows):
        must = f"{name} must hold rows that were not trained on"
        return f"{must}, got {seen} training rows: remove those"
    return ""


def membership_scores(told: Told, *, least_share: float) -> dict[str, float]:
    """Returns the score of a row by each attack; higher means more likely trained on.

    min-k% takes at least one of few tokens. An empty answer has the 8 bytes that zlib begins with.
    """
    nats_T, text = told
    count = max(1, int(len(nats_T) * least_share))
    loss = float(nats_T.mean())
    return {
        "loss": -loss,
        "min-k%": -float(np.sort(nats_T)[-count:].mean()),
        "zlib": -loss / len(zlib.compress(text.encode())),
    }


def auc_interval(
    own_N: Float[np.ndarray, " N"], other_M: Float[np.ndarray, " M"], *, seed: int, resamples: int
) -> rates.Interval:
    """Returns the chance that one of the first scores is above one of the others, ties one half.

    It has a 95 % percentile bootstrap interval: rows of each kind are drawn with replacement. The
    interval of an AUC of 0 or 1 has no width, because no draw overlaps.
    """

    def area(own: np.ndarray, other: np.ndarray) -> float:
        is_own = np.arange(len(own) + len(other)) < len(own)
        return ranking.auroc(np.concatenate([own, other]), is_own)

    generator = np.random.default_rng(seed)
    drawn = [
        area(generator.choice(own_N, len(own_N)), generator.choice(other_M, len(other_M)))
        for _ in range(resamples)
    ]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return rates.Interval(mean=area(own_N, other_M), low=float(low), high=float(high))


def measure(bench: Any, model: Any, settings: MembershipSettings) -> list[dict[str, Any]]:
    """Returns the AUC of each attack on a model."""
    parts = [
        [membership_scores(told, least_share=settings.least_share) for told in part]
        for part in bench.token_nats(model, bench.unseen(settings))
    ]
    found = list[dict[str, Any]]()
    for attack in ATTACKS:
        own_N, other_M = (np.array([row[attack] for row in part]) for part in parts)
        area = auc_interval(own_N, other_M, **bench.bootstrap)
        counts = {"forgotten": len(own_N), "held_out": len(other_M)}
        found.append({"condition": attack, "auc": area, **counts})
    return found


def tell(compared: Compared) -> str:
    """Returns the AUC of each attack and whether its interval contains that in the base.

    If the AUC is above that of the base, forgotten rows still look trained on. If it is below, they
    look unlearned, which also reveals them, unless the AUC was as low before unlearning. An
    interval that also contains the AUC before unlearning decides nothing. Neither do fewer than
    `LEAST_QUERIES` rows of a kind.
    """
    now, *others = (compared.get(name) for name in ("now", "finetuned", "backbone"))
    places: dict[str, list[str]] = {name: [] for name in ("above", "below", "before", "either")}
    rows = []
    for number, entry in enumerate(now or ()):
        area = entry["auc"]
        before, usual = (model and model[number]["auc"]["mean"] for model in others)
        rows.append((entry, before, usual))
        if usual is not None and usual < area["low"]:
            places["above"].append(entry["condition"])
        elif usual is not None and usual > area["high"]:
            places["below" if before > area["high"] else "before"].append(entry["condition"])
        elif area["low"] <= before <= area["high"]:
            places["either"].append(entry["condition"])
    return write("membership", rows, places, LEAST_QUERIES)


MEMBERSHIP = RobustnessMeasure(
    title="Membership inference",
    measure=measure,
    tell=tell,
    columns={
        "auc": Column("AUC, forgotten\nabove held-out", ".2f", ".2f"),
        "forgotten": Column("Forgotten\nrows", "d"),
        "held_out": Column("Held-out\nrows", "d"),
    },
    note="AUC of separating forgotten rows from held-out ones: above .5 the forgotten rows look "
    "more trained on. Brackets: 95 % bootstrap interval over rows of both kinds.",
    cost=lambda own: Cost(0, given=2),
    lacks=lacks,
    settings=MembershipSettings(),
    query_sets=_QUERY_SETS,
)
