"""What is wrong with a run, said before it works: from its settings, then from its corpus."""

import pathlib
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from raslik_jax.config import Config
from raslik_jax.data import corpora
from raslik_jax.data.batches import num_steps_of
from raslik_jax.data.encoding import Encoded
from raslik_jax.data.examples import Corpus, Example
from raslik_jax.evaluate.non_sf import NON_SF
from raslik_jax.messages import listed_problems, shown, some_of
from raslik_jax.models import checkpoint, decoder, gpt_neox, presets
from raslik_jax.retrieve import sets
from raslik_jax.retrieve.selectors import select_by_count
from raslik_jax.retrieve.strategies import STRATEGIES, Request
from raslik_jax.run.workspace import StoredCorpus, lora_config_of

# Those that retrieve, and those that need what was retrieved.
_RETRIEVING = frozenset({"retrieve", "unlearn", "generate", "evaluate", "report"})


def model_of(config: Config) -> tuple[str, decoder.ModelConfig]:
    """Returns the name and the shapes of a run's model; reads no more than a config.json.

    Raises:
      ValueError: a checkpoint that is neither a folder nor a published model with a preset.
    """
    settings = config.backbone
    if not settings.checkpoint:
        return "trained from scratch", gpt_neox.GPTNeoXConfig(
            vocab_size=config.corpus.vocab_size,
            hidden_size=settings.hidden_size,
            num_hidden_layers=settings.num_hidden_layers,
            num_attention_heads=settings.num_attention_heads,
            intermediate_size=4 * settings.hidden_size,
        )
    name = settings.checkpoint
    if pathlib.Path(name).is_dir():
        return name, checkpoint.read_config(name)
    preset = presets.preset_of(name)
    if preset is None:
        raise ValueError(
            "--backbone.checkpoint must be a folder or a published model of known shapes, got "
            f"{shown(name)}: fetch it, or name one of {', '.join(sorted(presets.MODEL_PRESETS))}"
        )
    at = f" at {settings.revision}" if settings.revision else ""
    return f"{name}{at}, shapes of the preset {preset}", presets.MODEL_PRESETS[preset]


def check_inputs(config: Config, *, making: Collection[str]) -> None:
    """Refuses models and files that units of a run would miss only after hours.

    Args:
      config: settings of the run.
      making: names of the units that are not up to date; what none of them reads may be gone.

    Raises:
      ValueError: a file or model is missing, or one that `check_model` refuses.
    """
    settings = config.evaluate
    corpora.marker_words(config.corpus.dataset, settings.marker_words)
    if "finetune" in making:
        check_model(config)
    if "retrieve/embeddings" in making:
        checkpoint.resolve_folder(config.retrieve["embedding"].checkpoint, auto="AutoModel")
    if "discriminator" in making and settings["classifier"].checkpoint:
        checkpoint.resolve_folder(settings["classifier"].checkpoint, auto="AutoModel")


def check_model(config: Config) -> None:
    """Refuses an architecture that is not supported, and adapters on layers that it lacks.

    Reads no more than a checkpoint's config.json, once the checkpoint is here.

    Raises:
      ValueError: such a model, or one that is not there.
    """
    settings = config.backbone
    if settings.checkpoint:
        revision = settings.revision or None
        folder = checkpoint.resolve_folder(settings.checkpoint, revision=revision)
        model_config = checkpoint.read_config(folder)
    else:
        _, model_config = model_of(config)
    decoder.abstract(model_config, lora_config_of(config))


def is_measurable(config: Config, corpus: Corpus | StoredCorpus) -> bool:
    """Returns whether there are queries to measure a run on, of targets or normal ones."""
    split = config.references.query_split
    return any(corpus.queries[f"{split}_{kind}"] for kind in ("target", "normal"))


def check_corpus(
    config: Config,
    corpus: Corpus | StoredCorpus,
    whole: Encoded | None,
    *,
    stages: Sequence[str],
) -> None:
    """Refuses what the corpus shows of a run's later stages to be impossible or void.

    Args:
      config: settings of the run.
      corpus: its examples and queries.
      whole: the training examples as whole rows of token ids; None leaves out what depends on the
        length of prompts.
      stages: those that run.

    Raises:
      ValueError: all problems in one error: rows without room for an answer, too few rows for two
        steps or for the sets, strategies or a classifier without labels.
    """
    prompt_N = np.zeros(len(corpus.train), np.int64) if whole is None else whole.start_N
    problems = list(_row_problems(config, corpus.train, prompt_N, stages))
    if "backbone" in stages and not config.backbone.checkpoint and not corpus.backbone:
        problems.append(
            f"--corpus.dataset={config.corpus.dataset} has no rows to pretrain a model on: give a "
            "--backbone.checkpoint"
        )
    if "finetune" in stages:
        problems += _finetune_problems(config, corpus)
    if "discriminator" in stages and NON_SF[config.evaluate.non_sf].is_trained:
        labels = [row.is_target for row in corpus.train]
        if labels.count(True) < 2 or labels.count(False) < 2:
            problems.append(
                "--evaluate.non_sf=classifier must have two or more training examples of each "
                "label, got "
                f"{labels.count(True)} targets and {labels.count(False)} others"
            )
    if _RETRIEVING & set(stages):
        num_barred = int(np.sum(prompt_N >= config.corpus.max_len))
        problems += _selection_problems(config, corpus, num_barred=num_barred)
    if problems:
        raise ValueError(listed_problems(problems))


def _row_problems(
    config: Config, rows: Sequence[Example], prompt_N: np.ndarray, stages: Sequence[str]
) -> Iterator[str]:
    """Yields where prompts leave no room for the answers that a stage trains on."""
    longest = config.corpus.max_len
    to_finetune = config.finetune.max_len or longest
    if "finetune" in stages and np.all(prompt_N >= to_finetune):
        yield f"--finetune.max_len={to_finetune} leaves no training example an answer: raise it"
    to_unlearn = config.unlearn.max_len or longest
    # A labeled target is there to be forgotten; other rows are looked at when they are chosen.
    is_target_N = np.array([row.is_target is True for row in rows])
    lost = np.flatnonzero(is_target_N & (prompt_N >= to_unlearn) & (prompt_N < longest))
    if "unlearn" in stages and len(lost):
        names = some_of((rows[int(row)].example_id for row in lost), 3)
        yield (
            f"--unlearn.max_len={to_unlearn} leaves {len(lost)} labeled targets without an "
            f"answer to unlearn ({names}): raise it"
        )


def _finetune_problems(config: Config, corpus: Corpus | StoredCorpus) -> Iterator[str]:
    settings = config.finetune
    num_steps = num_steps_of(
        len(corpus.train),
        batch_size=settings.batch_size,
        num_epochs=settings.epochs,
    )
    if num_steps == 1 and settings.warmup:
        yield (
            f"fine-tuning must take 2 steps or more, the first warms up at rate 0, got 1 for "
            f"{len(corpus.train)} examples: lower --finetune.batch_size"
        )


def _without_text(row: Example) -> Example:
    return row._replace(instruction="a", input="", output="")


def _selection_problems(
    config: Config, corpus: Corpus | StoredCorpus, *, num_barred: int
) -> list[str]:
    """Returns why strategies cannot choose sets, found by choosing with made-up scores.

    Args:
      config: settings of the run.
      corpus: with its labels.
      num_barred: rows without an answer, which have no gradient and are in no set.
    """
    settings, rows = config.retrieve, corpus.train
    eligible = len(rows) - num_barred
    num_targets = sum(bool(row.is_target) for row in rows)
    try:
        sizes = sets.set_sizes(settings, num_targets=num_targets, num_eligible=eligible)
    except ValueError as error:
        return [str(error)]
    num_forget, num_retain = sizes or (1, 1)  # what passes a threshold is not known yet
    if num_forget + num_retain > eligible:
        without = f", {num_barred} of them without an answer" if num_barred else ""
        return [
            f"--retrieve.num_forget and --retrieve.num_retain must be at most {len(rows):,} "
            f"training examples together{without}, got {num_forget:,} and {num_retain:,}"
        ]
    # Any texts will do, and the best scores there are: targets first. What is missing or too few
    # for these is so for all.
    is_target_N = np.array([bool(row.is_target) for row in rows])
    score_N = is_target_N + np.linspace(0.0, 0.5, len(rows))
    names_of: dict[str, list[str]] = {}
    for name in settings.strategies:
        record = STRATEGIES[name]
        request = Request(
            examples=[_without_text(row) for row in rows],
            is_eligible_N=np.ones(len(rows), bool),
            seed=config.seed,
            retain_from=settings.retain_from,
            settings=settings[name],
            queries=[_without_text(row) for row in corpus.queries["retrieval"][:1]],
            num_forget=num_forget,
            num_retain=num_retain,
            scores={need: score_N for need in record.needs},
        )
        try:
            select_by_count(
                *record.score(request),
                [row.example_id for row in rows],
                num_forget=num_forget,
                num_retain=num_retain,
            )
        except ValueError as error:
            names_of.setdefault(str(error), []).append(name)
    return [f"--retrieve.strategies={','.join(names)}: {text}" for text, names in names_of.items()]
