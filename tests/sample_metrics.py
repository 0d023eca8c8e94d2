"""A made-up metrics.json of plausible shape for the tests of the reports."""

from raslik_jax.evaluation import judgment, summary
from raslik_jax.evaluation.summary import IntervalEntry, MethodEntry, Metrics, ModelEntry

# Share of the way from remembering to the floor, and of retention lost, per epoch of GA_GDR.
_SPEED = {
    "random": (0.12, 0.025),
    "oracle": (0.34, 0.045),
    "raslik_f": (0.32, 0.04),
    "raslik": (0.36, 0.03),
}


def interval(mean: float, half: float = 0.04) -> IntervalEntry:
    """Returns an interval around a mean, cut to [0, 1]."""
    return IntervalEntry(mean=mean, low=max(0.0, mean - half), high=min(1.0, mean + half))


def interval_from_one(mean: float) -> IntervalEntry:
    """Returns an interval around a perplexity."""
    return IntervalEntry(mean=mean, low=max(1.0, mean - 0.1), high=mean + 0.1)


def model_entry(forget: float, retain: float, non_sf: float, *, empty: int = 0) -> ModelEntry:
    """Returns the entry of a model with these rates."""
    distance = ((1 - retain) ** 2 + forget**2) ** 0.5
    return ModelEntry(
        forget=interval(forget),
        retain=interval(retain),
        non_sf_target=interval(non_sf, 0.08),
        non_sf_normal=interval(0.99, 0.01),
        empty=empty,
        empty_references=0,
        distinct_2=0.41,
        repetition_4=0.02,
        euclidean=distance,
        diversity={
            kind: summary.DiversityEntry(
                answers=48, empty=empty, distinct_2=distinct, repetition_4=0.02
            )
            for kind, distinct in (("target", 0.44), ("normal", 0.38))
        },
        perplexity={
            "forget": interval_from_one(3.0 - 1.5 * forget),
            "retain": interval_from_one(1.2 + 0.2 * (1 - retain)),
            "held-out": interval_from_one(1.3 + 0.3 * (1 - retain)),
        },
    )


def sample_metrics(*, seed: int = 0, num_epochs: int = 5) -> Metrics:
    """Returns the metrics of a run with four strategies, two algorithms and five epochs."""
    methods: list[MethodEntry] = []
    for algorithm, factor in (("ga_gdr", 1.0), ("ga_klr", 0.8)):
        for strategy, (speed, loss) in _SPEED.items():
            for epoch in range(1, num_epochs + 1):
                forgotten = 1 - (1 - speed * factor) ** (epoch + 0.1 * seed)
                forget, retain = 1 - 0.75 * forgotten, 1 - loss * factor * epoch
                difference = summary.DifferenceEntry(
                    **interval(-0.3 * forgotten), share_below_zero=0.998
                )
                difference.update(low=difference["mean"] - 0.06, high=difference["mean"] + 0.06)
                random = strategy == "random"
                methods.append(
                    MethodEntry(
                        strategy=strategy,
                        algorithm=algorithm,
                        epoch=epoch,
                        **model_entry(forget, retain, forgotten),
                        forget_minus_random=None if random else difference,
                        retain_minus_random=None if random else difference,
                        pareto=strategy in ("random", "raslik"),
                        tie=strategy == "oracle",
                        euclidean_min_max=0.5,
                        mahalanobis=None,
                    )
                )
    finetuned, backbone = model_entry(1.0, 1.0, 0.02), model_entry(0.27, 0.55, 1.0)
    for entry in methods:
        entry["judgment"] = judgment.judge(entry, finetuned, backbone)
    return Metrics(
        name="sample",
        seed=seed,
        settings={},
        corpus={"num_train": 2000, "num_targets": 200},
        finetuned=finetuned,
        backbone=backbone,
        retrieval={
            name: summary.RetrievalEntry(
                precision=precision,
                base_rate=0.1,
                num_forget=200,
                num_queries=3,
                num_retain=200,
                targets_in_retain=0,
                retain_scored_positive=12,
                auroc=area,
                auprc=area and area - 0.01,
            )
            for name, precision, area in (
                ("random", 0.105, None),
                ("oracle", 1.0, None),
                ("raslik_f", 0.965, 0.991),
                ("raslik", 0.965, 0.991),
            )
        },
        methods=methods,
    )
