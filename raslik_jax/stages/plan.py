"""The units of a run, in order, each with what decides its result."""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from raslik_jax.config import STAGES, Algorithm, Config
from raslik_jax.data import howdy
from raslik_jax.index.store import INDEX_FORMAT
from raslik_jax.influence.projections import SKETCH_FORMAT
from raslik_jax.pipeline import Unit, run_units
from raslik_jax.stages.discriminating import data_dir, make_discriminator, measure_before
from raslik_jax.stages.likelihoods import (
    make_questions,
    reference_perplexity,
    reference_questions,
    variant_perplexity,
    variant_questions,
)
from raslik_jax.stages.measuring import evaluate, generate, retain_answers, unlearn
from raslik_jax.stages.reporting import report
from raslik_jax.stages.retrieving import (
    make_diagnosis,
    make_embeddings,
    make_exact_scores,
    make_index,
    make_scores,
    make_sets,
)
from raslik_jax.stages.training import (
    make_adapter,
    make_backbone,
    make_corpus,
    make_references,
    make_retrieval_answers,
)
from raslik_jax.stages.workspace import Workspace

# Settings that came after the first results. At their defaults they are no part of a unit's key,
# so that results of before stay up to date.
_LATER = frozenset(
    """base_format double_quant sketch_base_format finetune_micro_batch_size finetune_max_len
    finetune_fixed_padding finetune_mean finetune_remat finetune_checkpoint_steps
    unlearn_micro_batch_size unlearn_parameters unlearn_max_len unlearn_fixed_padding
    unlearn_mean unlearn_remat npo_beta simnpo_beta simnpo_delta simnpo_forget_weight""".split()
)


def file_identity(path: str | os.PathLike[str]) -> str:
    """Returns the SHA-256 of a file, or a ValueError that names it where it is missing."""
    try:
        return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise ValueError(f"the file {path} is wanted, it cannot be read ({error})") from None


def plan_units(config: Config, workspace: Workspace) -> tuple[Unit, ...]:
    """Returns all units of a run in order, each with what decides its result."""
    seed = {"seed": config.seed}

    def settings(*parts: Any) -> dict[str, Any]:
        merged: dict[str, Any] = dict(seed)
        for part in parts:
            values = dataclasses.asdict(part)
            defaults = {field.name: field.default for field in dataclasses.fields(part)}
            merged |= {
                name: value
                for name, value in values.items()
                if name not in _LATER or value != defaults[name]
            }
        return json.loads(json.dumps(merged))

    def bind(function: Callable[..., None], *args: str) -> Callable[[pathlib.Path], None]:
        return functools.partial(function, workspace, *args)

    words = config.evaluate.marker_words
    marker = {"marker_words": file_identity(words) if words else ""}
    retrieved = ("corpus", "references/retrieval", "retrieve/influence")
    scored = {"center": config.retrieve.center, "aggregate": config.retrieve.aggregate}
    margin_names = ("select", "forget_threshold", "retain_threshold")
    margin = (
        {name: getattr(config.retrieve, name) for name in margin_names}
        if config.retrieve.select == "margin"
        else {}
    )
    # Which queries a run is measured on changes nothing of what it retrieves and unlearns.
    decoding = settings(config.references)
    del decoding["query_split"]
    # The diagnosis reads gradients of its own: it changes neither the index nor what follows.
    sketching = settings(config.sketch)
    del sketching["diagnose"]
    sketching["formats"] = {"index": INDEX_FORMAT, "projection": SKETCH_FORMAT}
    finetuning = settings(config.finetune)
    finetuning.pop("finetune_checkpoint_steps", None)
    corpus = settings(config.corpus)
    if config.corpus.tofu_train == "full":
        del corpus["tofu_train"]  # corpora of before the choice stay up to date
    corpus |= {"checkpoint": config.backbone.checkpoint, "revision": config.backbone.revision}
    units = [
        Unit("corpus", (), corpus, bind(make_corpus)),
        Unit(
            "backbone",
            ("corpus",),
            settings(config.backbone) | {"max_new_tokens": config.references.max_new_tokens},
            bind(make_backbone),
        ),
        Unit(
            "finetune",
            ("corpus", "backbone"),
            finetuning,
            bind(make_adapter),
            is_resumable=True,
        ),
        Unit(
            "references/retrieval",
            ("corpus", "backbone", "finetune"),
            decoding | {"query_output": config.sketch.query_output},
            bind(make_retrieval_answers),
        ),
        Unit(
            "references/evaluation",
            ("corpus", "backbone", "finetune"),
            settings(config.references) | marker,
            bind(make_references),
        ),
    ]
    evaluating = settings(config.evaluate)
    classifying = {k: evaluating.pop(k) for k in list(evaluating) if k.startswith("classifier_")}
    judged: tuple[str, ...] = ()
    if config.evaluate.non_sf == "classifier":
        genuine = [file_identity(path) for path in howdy.genuine_files(data_dir(config))]
        judged = ("discriminator",)
        units += [
            Unit(
                "discriminator",
                ("corpus",),
                seed | classifying | {"genuine": genuine},
                bind(make_discriminator),
                is_resumable=True,
            ),
            Unit(
                "references/non_sf",
                ("corpus", "references/evaluation", *judged),
                {"bootstrap_resamples": config.evaluate.bootstrap_resamples},
                bind(measure_before),
            ),
        ]
    units += [
        Unit(
            "sketch",
            ("corpus", "backbone", "finetune", "references/retrieval"),
            sketching,
            bind(make_index),
            is_resumable=True,
        ),
        Unit(
            "retrieve/influence",
            ("corpus", "references/retrieval", "sketch"),
            scored | margin,
            bind(make_scores),
        ),
    ]
    if config.sketch.diagnose:
        units.append(
            Unit(
                "retrieve/diagnosis",
                ("corpus", "backbone", "finetune"),
                settings(config.sketch),
                bind(make_diagnosis),
            )
        )
    needs: dict[str, tuple[str, ...]] = {}
    if "embedding" in config.retrieve.strategies:
        names = ("query_text", "encoder_checkpoint", "encoder_pooling")
        units.append(
            Unit(
                "retrieve/embeddings",
                ("corpus", "references/retrieval"),
                {name: getattr(config.retrieve, name) for name in names},
                bind(make_embeddings),
            )
        )
        needs["embedding"] = ("retrieve/embeddings",)
    if "exact" in config.retrieve.strategies:
        units.append(
            Unit(
                "retrieve/exact_kernel",
                ("corpus", "backbone", "finetune", "references/retrieval"),
                sketching | scored,
                bind(make_exact_scores),
            )
        )
        needs["exact"] = ("retrieve/exact_kernel",)
    shared = settings(config.retrieve)
    del shared["strategies"]
    for strategy in config.retrieve.strategies:
        inputs = (*retrieved, *needs.get(strategy, ()))
        units.append(Unit(f"retrieve/{strategy}", inputs, shared, bind(make_sets, strategy)))

    def measured(strategy: str, name: str) -> dict[str, Any]:
        epochs = workspace.epochs(strategy, name)
        return {"epochs": list(epochs)} if config.unlearn.choice else {}

    variants = [(s, a) for s in config.retrieve.strategies for a in config.unlearn.algorithms]
    common = settings(config.unlearn)
    rates = [f"{name}_learning_rate" for name in get_args(Algorithm)]
    for name in ("algorithms", "choice", *rates):
        common.pop(name, None)
    for strategy, name in variants:
        units.append(
            Unit(
                f"unlearn/{strategy}-{name}",
                ("backbone", "finetune", f"retrieve/{strategy}"),
                common | {"learning_rate": workspace.learning_rate(strategy, name)},
                bind(unlearn, strategy, name),
                is_resumable=True,
            )
        )
    for strategy, name in variants:
        units.append(
            Unit(
                f"generate/{strategy}-{name}",
                ("corpus", "backbone", f"unlearn/{strategy}-{name}"),
                settings(config.references) | measured(strategy, name),
                bind(generate, strategy, name),
            )
        )
    likely: list[Unit] = []
    if config.evaluate.perplexity_examples:
        drawn = {
            **seed,
            "perplexity_examples": config.evaluate.perplexity_examples,
            "query_split": config.references.query_split,
        }
        likely += _per_model(
            "perplexity",
            ("corpus",),
            drawn,
            bind(reference_perplexity),
            {(s, a): (measured(s, a), bind(variant_perplexity, s, a)) for s, a in variants},
        )
    if config.corpus.dataset == "tofu" and config.evaluate.tofu_questions:
        asked = {
            "tofu_forget": config.corpus.tofu_forget,
            "tofu_questions": config.evaluate.tofu_questions,
        }
        questions = Unit("references/questions", (), asked, bind(make_questions))
        likely += [
            questions,
            *_per_model(
                "tofu",
                ("corpus", questions.name),
                {"max_new_tokens": config.references.max_new_tokens},
                bind(reference_questions),
                {(s, a): (measured(s, a), bind(variant_questions, s, a)) for s, a in variants},
            ),
        ]
    units += likely
    retrievals = tuple(f"retrieve/{strategy}" for strategy in config.retrieve.strategies)
    generated = tuple(f"generate/{strategy}-{name}" for strategy, name in variants)
    units.append(
        Unit(
            "evaluate",
            (
                "corpus",
                "references/evaluation",
                *retrievals,
                *generated,
                *(unit.name for unit in likely),
                *judged,
            ),
            evaluating | marker | _retain_model(config) | {"name": config.name},
            bind(evaluate),
        )
    )
    evaluated = ("corpus", "backbone", "finetune", "references/evaluation", "evaluate")
    unlearned = tuple(f"unlearn/{strategy}-{name}" for strategy, name in variants)
    units.append(
        Unit(
            "report",
            (*evaluated, "retrieve/influence", *unlearned, *generated),
            {"forms": ["markdown", "html"]},
            bind(report),
        )
    )
    return tuple(units)


def _retain_model(config: Config) -> dict[str, str]:
    """Returns the identity of the retain model's answers, where a run of it is named."""
    if config.corpus.dataset != "tofu" or not config.evaluate.tofu_retain_run:
        return {}
    return {"tofu_retain_run": file_identity(retain_answers(config))}


def _per_model(
    name: str,
    inputs: tuple[str, ...],
    settings: dict[str, Any],
    of_references: Callable[[pathlib.Path], None],
    of_variants: Mapping[tuple[str, str], tuple[dict[str, Any], Callable[[pathlib.Path], None]]],
) -> list[Unit]:
    """Returns the units that measure every model: the two before unlearning, and each variant.

    They stand beside the answers of the same stage: asking for another measure makes neither the
    answers nor what follows from them again.
    """
    return [
        Unit(f"references/{name}", (*inputs, "backbone", "finetune"), settings, of_references),
        *(
            Unit(
                f"generate/{name}-{strategy}-{algorithm}",
                (*inputs, "backbone", f"unlearn/{strategy}-{algorithm}"),
                settings | more,
                run,
            )
            for (strategy, algorithm), (more, run) in of_variants.items()
        ),
    ]


def run(
    config: Config,
    workdir: pathlib.Path,
    *,
    stages: Sequence[str] = STAGES,
    shared: pathlib.Path | None = None,
) -> None:
    """Runs the stages that are not up to date, and shows the table at the end."""
    workspace = Workspace(workdir, config)
    run_units(workdir, plan_units(config, workspace), stages=stages, shared=shared)
    if "report" in stages:
        print()
        print((workdir / "report" / "table.txt").read_text())
        print(f"report: {workdir / 'report' / 'report.html'} (and report.md beside it)")
