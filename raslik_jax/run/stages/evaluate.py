"""From the answers and likelihoods of every model to metrics.json: evaluate."""

import itertools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from raslik_jax.config import to_json
from raslik_jax.evaluate import distance, summary
from raslik_jax.evaluate.metrics import KINDS, NonSf, measure, nest
from raslik_jax.evaluate.non_sf import NON_SF
from raslik_jax.run import artifacts
from raslik_jax.run.manifests import versions
from raslik_jax.run.recipes import Case, Recipe, distant_variants, variants_of
from raslik_jax.run.workspace import Workspace, judge_of, non_sf_by_rule

# More parts of the evidence that metrics read: from the run to the parts of each model, as
# `artifacts.answers` names it.
EVIDENCE: dict[str, Callable[[Workspace], Callable[..., Mapping[str, Any]]]] = {}


def evaluate(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes metrics.json: the measurements of every model and strategy and its judgment."""
    config, collect = workspace.config, _collector(workspace)
    target, normal = workspace.evaluation_queries()
    bootstrap = {"seed": config.seed, "resamples": config.evaluate.bootstrap_resamples}
    before = {name: collect(name, None) for name in _models_before(workspace)}
    evidence = {
        summary.Variant(*variant, epoch): collect(epoch, variant)
        for variant in variants_of(config)
        for epoch in workspace.epochs(*variant)
    }
    for own in evidence.values():
        own |= summary.compare(own, before["finetuned"], before.get("backbone"))
    for variant in distant_variants(config):
        _add_distances(workspace, variant, before["finetuned"], evidence)
    is_chosen = bool(config.unlearn.choice)
    metrics: dict[str, Any] = {
        "name": config.name,
        "seed": config.seed,
        # In the same file as the numbers: no reader can pair them with others.
        "settings": to_json(config),
        "versions": versions(),
        "corpus": {
            "dataset": config.corpus.dataset,
            "train": len(workspace.corpus.train),
            "targets": sum(bool(row.is_target) for row in workspace.corpus.train),
            "target_queries": len(target),
            "normal_queries": len(normal),
            "query_split": workspace.query_split,
        },
        "chosen": is_chosen,
        "non_sf": non_sf_of(workspace)[1],
        **{name: nest(measure(found, **bootstrap)) for name, found in before.items()},
        "retrieval": {
            strategy: artifacts.set_summary(strategy).read(workspace.root)
            for strategy in config.retrieve.strategies
        },
        "methods": summary.measure_methods(evidence, across_epochs=is_chosen, **bootstrap),
    }
    if config.unlearn.probe.steps:
        metrics["probes"] = [
            variant._asdict() | artifacts.probes(variant).read(workspace.root)
            for variant in variants_of(config, retrains=False)
        ]
    if config.evaluate.robustness:
        metrics["robustness"] = [*_robustness(workspace)]
    summary.judge_metrics(metrics)
    artifacts.METRICS.write(folder, metrics)


def _add_distances(
    workspace: Workspace,
    retrained: artifacts.Variant,
    finetuned: dict[str, Any],
    evidence: Mapping[summary.Variant, dict[str, Any]],
) -> None:
    """Adds the distance to the retrained model to the evidence of a strategy's last models.

    The fine-tuned model also gets its distance if the run has one retrained model.
    """
    root, config = workspace.root, workspace.config
    is_alone = len(distant_variants(config)) == 1
    models: dict[str, Any] = {"": (("finetuned", None), finetuned)} if is_alone else {}
    for variant in variants_of(config):
        if variant.strategy == retrained.strategy:
            last = workspace.epochs(*variant)[-1]
            own = evidence[summary.Variant(*variant, last)]
            models[variant.algorithm] = (last, variant), own
    divergences = artifacts.distances(retrained).read(root)
    said = {name: artifacts.answers(*model).read(root) for name, (model, _) in models.items()}
    of_retrained = said[retrained.algorithm]
    for name, (_, own) in models.items():
        own["distance"] = distance.compare(divergences[name], said[name], of_retrained)


def _robustness(workspace: Workspace) -> Iterator[dict[str, Any]]:
    """Yields the result of each measure of robustness for an unlearned model and earlier ones.

    A model that took steps is compared with the one that was trained without the rows, if any.
    """
    config, root = workspace.config, workspace.root
    stepped, exact = variants_of(config, retrains=False), distant_variants(config)
    measured = variants_of(config, repeats=False)
    for name, variant in itertools.product(config.evaluate.robustness, measured):
        now = artifacts.robustness(f"{name}-{variant}").read(root)
        found = now | artifacts.robustness(f"{name}-{variant.strategy}").read(root)
        again = [one for one in exact if one.strategy == variant.strategy and variant in stepped]
        for other in again[:1]:
            found["retrained"] = artifacts.robustness(f"{name}-{other}").read(root)["now"]
        yield {
            **{"measure": name, **variant._asdict()},
            **{"epoch": workspace.epochs(*variant)[-1], "found": found},
        }


def _models_before(workspace: Workspace) -> list[str]:
    """Returns the models before unlearning that were measured: perhaps there is no backbone."""
    names = ("finetuned", "backbone")
    return [name for name in names if artifacts.answers(name).is_there(workspace.root)]


def _rows_to_lose(workspace: Workspace) -> frozenset[str]:
    """Returns the rows without a label that some forget set has or that show the behavior.

    They were unknown when the rows that have to stay likely were drawn, so they are removed from
    these.
    """
    target = artifacts.measured_rows(workspace.query_split, "target").read(workspace.root)
    names = {row.example_id for row in target}
    for strategy in workspace.config.retrieve.strategies:
        chosen = artifacts.set_rows(strategy, "forget").read(workspace.root)
        names |= {row.example_id for row in chosen}
    rows = workspace.corpus.train
    return frozenset(r.example_id for r in rows if r.is_target is None and r.example_id in names)


def non_sf_of(workspace: Workspace) -> tuple[NonSf | None, dict[str, Any] | None]:
    """Returns the function from texts to Non-SF, and its description in metrics.json, if any."""
    by = workspace.config.evaluate.non_sf
    if load := NON_SF[by].load:
        return load(workspace)
    rule = non_sf_by_rule(workspace.config)
    return rule, rule and {"by": "judge" if judge_of(workspace.config) else by}


def _collector(workspace: Workspace) -> Callable[..., dict[str, Any]]:
    """Returns the function from a model, as `artifacts.answers` names it, to its evidence."""
    settings = workspace.config.evaluate
    queries = dict(zip(KINDS, workspace.evaluation_queries(), strict=True))

    def by_kind(answers: Mapping[str, str]) -> summary.Texts:
        return {
            kind: {row.example_id: answers[row.example_id] for row in rows}
            for kind, rows in queries.items()
        }

    references = by_kind(artifacts.answers("finetuned").read(workspace.root))
    has_backbone = "backbone" in _models_before(workspace)
    (non_sf, _), unlike = non_sf_of(workspace), _rows_to_lose(workspace)
    more = [of_run(workspace) for of_run in EVIDENCE.values()]

    def collect(model: str | int, variant: artifacts.Variant | None) -> dict[str, Any]:
        root, likelihoods = workspace.root, None
        if settings.perplexity_examples:
            likelihoods = artifacts.perplexities(model, variant).read(root)
            others = [row for row in likelihoods["sets"]["retain"] if row["id"] not in unlike]
            likelihoods["sets"]["retain"] = others
            # The model's own likelihood of other answers does not judge them.
            likelihoods |= {} if has_backbone else {"answers": {}}
        records = artifacts.normal_records(model, variant).read(root)
        evidence = summary.collect_evidence(
            by_kind(artifacts.answers(model, variant).read(root)),
            references,
            non_sf=non_sf,
            likelihoods=likelihoods,
        )
        for found in more:
            evidence |= found(model, variant)
        return evidence | ({"normal_records": records} if records else {})

    return collect


# Units of these stages are what the metrics are taken from, but for one.
_MEASURED, _OTHER = ("references", "generate"), "references/retrieval"


def reads_of_results(case: Case) -> str:
    """Returns the inputs of the metrics: the sets and the measurements of every model."""
    config = case.config
    sets = [f"retrieve/{strategy}" for strategy in config.retrieve.strategies]
    found = [n for n in case.names if n.split("/")[0] in _MEASURED and n != _OTHER]
    probed = variants_of(config, retrains=False) if config.unlearn.probe.steps else ()
    probes = [artifacts.probes(variant).path for variant in probed]
    text = artifacts.TOKENIZER.path, artifacts.TEMPLATE.path
    return " ".join(["{train} {measured}", *text, *sets, *found, *probes])


UNITS = (
    Recipe(
        "evaluate",
        evaluate,
        reads_of_results,
        "evaluate.marker_words",
        writes={"metrics": 10},
        # The metrics carry the settings that they were measured with: all of them.
        values=lambda case: to_json(case.config),
        is_alone=lambda config: not NON_SF[config.evaluate.non_sf].load,
        measures=True,
    ),
)
