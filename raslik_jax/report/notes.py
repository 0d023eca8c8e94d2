"""Sentences below the tables of a run: what the numbers mean and how far to trust them."""

from collections.abc import Sequence

from raslik_jax.evaluate import judgment
from raslik_jax.evaluate.summary import Metrics
from raslik_jax.report.names import algorithm_name, kernel_notes, strategy_name
from raslik_jax.report.records import Model

# Whose answers the rates are taken against.
ANSWERS = {
    "finetuned": "the answers of the fine-tuned model before unlearning",
    "backbone": "the answers of the backbone",
    "gold": "the gold answers",
}
DAMAGED = "†"


def _model_name(model: Model) -> str:
    return f"{strategy_name(model.strategy)} {algorithm_name(model.algorithm)}"


def judgment_sentence(methods: Sequence[Model]) -> str:
    """Returns what became of the models, by verdict, in one sentence; "" where none was judged."""
    names = [_model_name(model) for model in methods]
    named: dict[str, list[str]] = {}
    for model, name in zip(methods, names, strict=True):
        if verdict := model.get("judgment/verdict"):
            epoch = f" epoch {model.epochs[0]}" if names.count(name) > 1 else ""
            named.setdefault(verdict.value, []).append(name + epoch)
    parts = [f"{v}: {', '.join(named[v])}" for v in judgment.VERDICTS if v in named]
    return f"Judgment: {'; '.join(parts)}." if parts else ""


def behavior_sentence(metrics: Metrics) -> str:
    """Returns how far the behavior was there before unlearning; "" where nothing measured it."""
    found = metrics.get("behavior")
    text = judgment.describe_behavior(found) if found else ""
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def _classifier_note(metrics: Metrics) -> list[str]:
    measured = metrics.get("non_sf") or {}
    if measured.get("by") != "classifier":
        return []
    scores = [
        f"{name} answers: {judgment.describe_classifier(found)}"
        for part, name in (("held_out", "held-out"), ("genuine", "genuine"))
        if (found := measured.get(part))
    ]
    return [
        "Non-SF: mean probability, by a classifier trained on the labels, that an answer does not "
        f"show the behavior. The classifier on {'; on '.join(scores)}."
    ]


def answers_taken_against(metrics: Metrics) -> str:
    """Returns in words whose answers F and R are taken against."""
    reference = metrics.get("reference", "finetuned")
    return ANSWERS.get(reference, reference)


def _rate_notes(metrics: Metrics) -> list[str]:
    """Returns what F and R are, or which of them the run cannot have."""
    start, whose = metrics["finetuned"], answers_taken_against(metrics)
    kinds = {"F": (start["forget"], "target"), "R": (start["retain"], "normal")}
    rates = [name for name, (rate, _) in kinds.items() if rate is not None]
    if len(rates) == 2:
        return [
            f"F and R: mean ROUGE-L F1 against {whose}, on held-out target and normal queries. "
            "Distance: Euclidean, to R = 1 and F = 0. Brackets: 95 % bootstrap interval over "
            "queries."
        ]
    notes = [
        f"{name}: mean ROUGE-L F1 against {whose}. Brackets: 95 % bootstrap interval over queries."
        for name in rates
    ]
    lacking = [name for name in kinds if name not in rates]
    queries = " and no ".join(kinds[name][1] for name in lacking)
    notes.append(f"No {' and no '.join(lacking)}: the run has no {queries} queries to measure on.")
    return notes


def result_notes(metrics: Metrics, methods: Sequence[Model]) -> list[str]:
    """Returns what has to be known to read the result table of a run."""
    start = metrics["finetuned"]
    notes = _rate_notes(metrics)
    notes += kernel_notes(metrics["settings"], [model.strategy for model in methods])
    notes += _classifier_note(metrics)
    is_own = metrics.get("reference", "finetuned") == "finetuned"
    if "backbone" in metrics and is_own and start["forget"] is not None:
        notes.append(
            "The backbone never learned the behavior: an F below its own forgets nothing more."
        )
    found = metrics.get("behavior")
    if found and (not found["is_shown"] or found["by"] == "likelihood"):
        notes.append(behavior_sentence(metrics))
    notes += [text for text in [judgment_sentence(methods)] if text]
    if any((tie := model.get("tie")) and tie.value for model in methods):
        notes.append("~: the Pareto flag hangs on a tie within three decimals.")
    if any(model.num_damaged() for model in methods):
        notes.append(
            f"{DAMAGED}: damaged (the table of damage says how): a low F is then no forgetting, "
            "and the model is no candidate for the Pareto set."
        )
    notes += distance_notes(methods, is_chosen=bool(metrics.get("chosen")))
    empty = [
        f"{_model_name(model)} epoch {model.epochs[0]}: {record.value}"
        for model in methods
        if (record := model.get("empty")) and record.value
    ]
    if empty:
        notes.append("Empty answers, each counted as ROUGE 0: " + "; ".join(empty) + ".")
    if start["empty_references"]:
        notes.append(f"Empty references: {start['empty_references']}; their pairs score 0.")
    return notes


def distance_notes(methods: Sequence[Model], *, is_chosen: bool) -> list[str]:
    """Returns what has to be known of D_mah: pool, epoch, condition number, the warning."""
    pools: dict[tuple[str, int], list[Model]] = {}
    for model in methods:
        pools.setdefault((model.algorithm, 0 if is_chosen else model.epochs[0]), []).append(model)
    notes, is_warned = [], False
    for (algorithm, epoch), pool in pools.items():
        known = [model for model in pool if model.get("mahalanobis/distance")]
        if known:
            names = ", ".join(strategy_name(model.strategy) for model in pool)
            number = known[0].values["mahalanobis/condition_number"][0].value
            after = "chosen epochs" if is_chosen else f"epoch {epoch}"
            notes.append(
                f"D_mah of {algorithm_name(algorithm)}, {after}: pool {names}; "
                f"correlations shrunk by a tenth, condition number {number:.3g}."
            )
            is_warned |= any(model.values["mahalanobis/is_negative"][0].value for model in known)
    if notes:
        notes.append("D_mah is to be compared within one pool only.")
    if is_warned:
        notes.append(
            "!: F and R are negatively correlated in this pool, so a better method may have a "
            "larger D_mah."
        )
    return notes
