"""Membership inference: do forgotten rows look trained on, never seen, or unlearned?

Three attacks say how far a row looks trained on, from the nats of the tokens of its answer: the
loss (Yeom et al. 2018, arXiv:1709.01604), the mean over the k % least likely tokens (min-k%, Shi et
al. 2024, arXiv:2310.16789), and the loss over the bytes that zlib takes for the answer (Carlini et
al. 2021, arXiv:2012.07805). The AUC is the chance that a forgotten row looks more trained on than a
held-out one, .5 where nothing tells them apart. Rows of two origins differ in more than having been
trained on, so that it stands beside that of the base, which saw neither.
"""

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from raslik_jax.base.settings import Settings, setting
from raslik_jax.data.examples import Corpus, Example
from raslik_jax.data.read.formats import AUTO, read_examples
from raslik_jax.evaluate import ranking, rates
from raslik_jax.evaluate.judgment import LEAST_QUERIES
from raslik_jax.evaluate.metrics import Column
from raslik_jax.evaluate.robustness.record import Compared, Cost, RobustnessMeasure, as_entry

ATTACKS = ("loss", "min-k%", "zlib")
# Queries like the rows to forget: with their labels, rows that were not trained on.
_QUERY_SETS = ("test_target", "validation_target")
# Nats of each token of an answer, and its text.
Told = tuple[Float[np.ndarray, " T"], str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MembershipSettings(Settings):
    """Which rows the forgotten ones are told from."""

    held_out_file: str = setting(
        "",
        "Rows like the forgotten ones that the model was never trained on, a file as for training; "
        "empty: the labeled target queries of the corpus.",
        is_rows=True,
    )
    least_share: float = setting(
        0.2, "min-k%: share of the tokens, the least likely ones.", above=0, high=1
    )


@runtime_checkable
class Teller(Protocol):
    """What the measure asks of a run."""

    bootstrap: Mapping[str, int]

    def unseen(self, settings: MembershipSettings) -> tuple[Example, ...]:
        """Returns rows that the model was never trained on."""
        ...

    def token_nats(
        self, model: Any, unseen: Sequence[Example]
    ) -> tuple[Sequence[Told], Sequence[Told]]:
        """Returns what a model makes of forgotten rows and of these."""
        ...


def unseen_rows(settings: MembershipSettings, corpus: Any) -> tuple[Example, ...]:
    """Returns the rows of --evaluate.membership.held_out_file, else the labeled target queries."""
    if settings.held_out_file:
        return read_examples(settings.held_out_file, format=AUTO)
    return tuple(row for name in _QUERY_SETS for row in corpus.queries[name] if row.output.strip())


def lacks(settings: MembershipSettings, corpus: Corpus | Any) -> str:
    """Returns why a corpus has no rows to tell forgotten ones from; "" where it has."""
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
    """Returns how far a row looks trained on, by each attack; the higher, the more.

    Of few tokens min-k% takes at least one; an empty answer has the 8 bytes that zlib begins with.
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

    With its 95 % percentile bootstrap interval, rows of each kind drawn with replacement. An
    AUC of 0 or 1 has an interval of no width: no draw mixes what does not overlap.
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
    return rates.Interval(area(own_N, other_M), float(low), float(high))


def measure(bench: Teller, model: Any, settings: MembershipSettings) -> list[dict[str, Any]]:
    """Returns the AUC of each attack on a model."""
    parts = [
        [membership_scores(told, least_share=settings.least_share) for told in part]
        for part in bench.token_nats(model, bench.unseen(settings))
    ]
    found = list[dict[str, Any]]()
    for attack in ATTACKS:
        own_N, other_M = (np.array([row[attack] for row in part]) for part in parts)
        area = as_entry(auc_interval(own_N, other_M, **bench.bootstrap))
        counts = {"forgotten": len(own_N), "held_out": len(other_M)}
        found.append({"condition": attack, "auc": area, **counts})
    return found


def tell(compared: Compared) -> str:
    """Returns the AUC of each attack, and whether its interval holds that in the base.

    Above it forgotten rows still look trained on. Below they look unlearned, which gives them away
    as well, unless the AUC was as low before unlearning. An interval that holds the AUC before
    unlearning too decides nothing, nor do fewer than `LEAST_QUERIES` rows of a kind.
    """
    now, base = compared["now"], compared.get("backbone")
    first, parts = now[0], []
    places: dict[str, list[str]] = {"above": [], "below": [], "before": [], "either": []}
    for number, entry in enumerate(now):
        area, before = entry["auc"], compared["finetuned"][number]["auc"]["mean"]
        text = f"{area['mean']:.2f} [{area['low']:.2f}, {area['high']:.2f}] by {entry['condition']}"
        text += f" (before unlearning {before:.2f}"
        if base:
            usual = base[number]["auc"]["mean"]
            text += f", in the base {usual:.2f}"
            if usual < area["low"]:
                places["above"].append(entry["condition"])
            elif usual > area["high"]:
                places["below" if before > area["high"] else "before"].append(entry["condition"])
            elif area["low"] <= before <= area["high"]:
                places["either"].append(entry["condition"])
        parts.append(f"{text})")
    text = f"{first['forgotten']} forgotten rows are told from {first['held_out']} held-out ones "
    text += f"with an AUC of {', '.join(parts)}; 0.50 is a guess."
    if not base:
        return text
    if min(first["forgotten"], first["held_out"]) < LEAST_QUERIES:
        return f"{text} So few rows do not tell whether they look trained on."
    if places["above"]:
        text += f" They still look trained on by {' and '.join(places['above'])}."
    if places["below"]:
        text += f" They look unlearned by {' and '.join(places['below'])}: beside held-out rows "
        text += "less likely than in the base."
    if places["before"]:
        text += f" They look less trained on than in the base by {' and '.join(places['before'])}, "
        text += "but did so before unlearning."
    if not (places["above"] or places["below"] or places["before"]):
        text += " Each interval holds the base's AUC, as if they had never been trained on"
        either = " and ".join(places["either"])
        text += (
            f"; by {either} also that before unlearning: so few rows do not tell" if either else ""
        )
        text += "."
    return text


MEMBERSHIP = RobustnessMeasure(
    title="Membership inference",
    measure=measure,
    tell=tell,
    columns={
        "auc": Column("AUC, forgotten\nabove held-out", ".2f", ".2f"),
        "forgotten": Column("Forgotten\nrows", "d"),
        "held_out": Column("Held-out\nrows", "d"),
    },
    note="How surely forgotten rows look more trained on than held-out ones; below .5 they look "
    "less so. Brackets: 95 % bootstrap interval over rows of both kinds.",
    cost=lambda own: Cost(0, given=2),
    lacks=lacks,
    settings=MembershipSettings(),
    query_sets=_QUERY_SETS,
)
