"""What each stage of a run does: from files of earlier stages to files of its own.

The maths lives in the rooms; here their functions meet the run's settings and its files.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from raslik_jax.axes import Tree
from raslik_jax.config import STAGES, Config
from raslik_jax.data import batches, corpora, examples, prompts, tokenization
from raslik_jax.data.examples import Corpus, Example
from raslik_jax.data.toy import SCIFI_WORDS
from raslik_jax.evaluation import ranking, rates, summary
from raslik_jax.index import build, search
from raslik_jax.index.store import SketchStore
from raslik_jax.influence import gradients, projections, theory
from raslik_jax.influence.loss import example_loss
from raslik_jax.models import checkpoint, decode, decoder, encoder, gpt_neox
from raslik_jax.models.lora import LoRAConfig
from raslik_jax.pipeline import Unit, read_json, run_units, write_json
from raslik_jax.progress import progress
from raslik_jax.reporting import figures, tables
from raslik_jax.retrieval import selection as selection_lib
from raslik_jax.retrieval import strategies as strategies_lib
from raslik_jax.retrieval.embeddings import embed_texts
from raslik_jax.retrieval.selection import select_by_count
from raslik_jax.retrieval.strategies import STRATEGIES, Request
from raslik_jax.unlearning import finetune, objectives, steps

# Queries whose answers the report shows side by side.
_SHOWN_TARGET, _SHOWN_NORMAL = 6, 3
_CORPUS_FIELDS = {**examples.WRITTEN_FIELDS, "is_target": "is_target", "source": "source"}


class Model(NamedTuple):
    """The backbone with places for an adapter.

    Attributes:
      decoder: pure functions; with the initial adapter (B = 0) they are the backbone's.
      base: frozen weights.
      initial: the adapter as fine-tuning started from it.
      lora_config: its rank, alpha, dropout and targets.
    """

    decoder: decoder.Decoder
    base: Tree
    initial: Tree
    lora_config: LoRAConfig


class Workspace:
    """The results of earlier stages, read from the work directory when first asked for."""

    def __init__(self, root: pathlib.Path, config: Config):
        self.root = root
        self.config = config

    @functools.cached_property
    def corpus(self) -> Corpus:
        """The training examples and queries."""
        folder = self.root / "corpus"

        def read(name: str) -> tuple[Example, ...]:
            path = folder / f"{name}.jsonl"
            return (
                examples.read_examples(path, fields=_CORPUS_FIELDS) if path.stat().st_size else ()
            )

        return Corpus(
            backbone=read("backbone"),
            train=read("train"),
            queries={name: read(name) for name in examples.QUERY_SETS},
        )

    @functools.cached_property
    def tokenizer(self) -> tokenization.Tokenizer:
        """The checkpoint's tokenizer, or the one trained on the corpus."""
        return tokenization.load_tokenizer(self.root / "corpus" / "tokenizer")

    @functools.cached_property
    def model(self) -> Model:
        """The backbone, with an adapter that changes nothing yet."""
        settings, lora_config = self.config.backbone, _lora_config(self.config)
        loaded = checkpoint.load_model(
            settings.checkpoint or self.root / "backbone" / "model",
            dtype=jnp.dtype(settings.base_dtype),
            lora_config=lora_config,
            key=jax.random.key(self.config.seed),
            revision=settings.revision or None,
        )
        checkpoint.check_vocabulary(
            loaded.graphdef.config,
            self.tokenizer.vocab_size,
            origin=str(self.root / "corpus" / "tokenizer"),
        )
        return Model(decoder.bind(loaded.graphdef), loaded.base, loaded.lora, lora_config)

    def adapter(self, *parts: str) -> Tree:
        """Returns an adapter that a stage saved."""
        return checkpoint.load_adapter(
            self.root.joinpath(*parts),
            self.model.decoder.config,
            lora_config=self.model.lora_config,
        )

    @functools.cached_property
    def finetuned(self) -> Tree:
        """The adapter before unlearning."""
        return self.adapter("finetune", "adapter")

    def encode(self, rows: Sequence[Example], *, targets: str = "response") -> batches.Encoded:
        """Returns the examples as token ids."""
        return batches.encode(
            rows,
            self.tokenizer,
            max_len=self.config.corpus.max_len,
            template=self.config.corpus.template,
            targets=targets,
        )

    def answers(self, *parts: str) -> dict[str, str]:
        """Returns decoded outputs by query id."""
        with open(self.root.joinpath(*parts)) as lines:
            return {row["id"]: row["output"] for row in map(json.loads, lines)}

    def retrieval_queries(self) -> tuple[Example, ...]:
        """Returns the queries that retrieval sees, with the model's own answers or the labelled."""
        queries = self.corpus.queries["retrieval"]
        if self.config.sketch.query_output == "gold":
            return queries
        answers = self.answers("references", "finetuned.jsonl")
        return tuple(row._replace(output=answers[row.example_id]) for row in queries)

    def evaluation_queries(self) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
        """Returns the target and the normal queries that the run is measured on."""
        split = self.config.references.query_split
        queries = self.corpus.queries
        return queries[f"{split}_target"], queries[f"{split}_normal"]

    def generate(self, lora: Tree, rows: Sequence[Example], what: str) -> list[str]:
        """Returns the greedy answers of the model with an adapter."""
        tokenizer = self.tokenizer
        outputs = decode.generate(
            self.model.decoder,
            lora,
            self.model.base,
            batches.encode_prompts(
                rows,
                tokenizer,
                max_len=self.config.corpus.max_len,
                template=self.config.corpus.template,
            ),
            max_new_tokens=self.config.references.max_new_tokens,
            eos_id=tokenizer.eos_id,
            pad_id=tokenizer.pad_id,
            batch_size=self.config.references.decode_batch_size,
            progress=what,
        )
        return [tokenizer.decode(tokens).strip() for tokens in outputs]

    @functools.cache  # noqa: B019  one workspace lives as long as its run
    def unlearning_step(self, name: str) -> tuple[steps.Algorithm, Callable[..., Any]]:
        """Returns an algorithm and its jitted step, compiled once for all strategies."""
        settings = self.config.unlearn
        tx = finetune.adamw(
            getattr(settings, f"{name}_learning_rate"),
            weight_decay=settings.unlearn_weight_decay,
            clip=settings.unlearn_clip,
        )
        weights = {
            "forget_weight": settings.forget_weight,
            "retain_weight": settings.retain_weight,
        }
        if name == "ga_klr":
            algorithm = steps.ga_klr(
                self.model.decoder, tx, direction=settings.kl_direction, **weights
            )
        else:
            algorithm = steps.ga_gdr(self.model.decoder, tx, **weights)
        static = ("forget_targets", "retain_targets")
        return algorithm, jax.jit(algorithm.step, static_argnames=static)


def _lora_config(config: Config) -> LoRAConfig:
    settings = config.finetune
    return LoRAConfig(
        rank=settings.lora_rank,
        alpha=settings.lora_alpha,
        dropout=settings.lora_dropout,
        targets=settings.lora_targets,
    )


def _write_rows(path: pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


# corpus -----------------------------------------------------------------------------------------


def make_corpus(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the training examples, the queries and the tokenizer."""
    config = workspace.config
    corpus = corpora.load_corpus(config.corpus, seed=config.seed)
    for name, rows in {
        "backbone": corpus.backbone,
        "train": corpus.train,
        **corpus.queries,
    }.items():
        labels = [{"is_target": row.is_target, "source": row.source} for row in rows]
        examples.write_examples(folder / f"{name}.jsonl", rows, extra=labels)
    if config.backbone.checkpoint:
        tokenizer = tokenization.load_tokenizer(
            checkpoint.resolve_folder(
                config.backbone.checkpoint, revision=config.backbone.revision or None
            )
        )
    else:
        texts = [
            prompts.render_prompt(row, config.corpus.template) + row.output
            for row in (*corpus.backbone, *corpus.train)
        ]
        tokenizer = tokenization.train_bpe(texts, vocab_size=config.corpus.vocab_size)
    tokenization.save_tokenizer(folder / "tokenizer", tokenizer)
    targets = sum(bool(row.is_target) for row in corpus.train)
    print(f"    {len(corpus.train):,} training examples, {targets:,} of them labelled targets")


# backbone ---------------------------------------------------------------------------------------


def make_backbone(workspace: Workspace, folder: pathlib.Path) -> None:
    """Trains a small GPT-NeoX from scratch, all parameters, on the backbone's examples."""
    config, settings = workspace.config, workspace.config.backbone
    if settings.checkpoint:
        print(f"    {settings.checkpoint}")
        return
    if not workspace.corpus.backbone:
        raise ValueError(
            "examples to pretrain a backbone on wanted, the corpus has none: name a --checkpoint"
        )
    model_config = gpt_neox.GPTNeoXConfig(
        vocab_size=workspace.tokenizer.vocab_size,
        hidden_size=settings.hidden_size,
        num_hidden_layers=settings.num_hidden_layers,
        num_attention_heads=settings.num_attention_heads,
        intermediate_size=4 * settings.hidden_size,
        max_position_embeddings=config.corpus.max_len + config.references.max_new_tokens,
    )
    graphdef, _, base = decoder.create(
        model_config, None, key=jax.random.key(config.seed), dtype=jnp.float32
    )
    bound = decoder.bind(graphdef)

    def loss(
        params: Tree,
        frozen: Tree,
        batch: objectives.TokenBatch,
        *,
        num_targets: int,
        dropout_key: jax.Array | None,
    ) -> jax.Array:
        del frozen, dropout_key
        return objectives.nll(bound, {}, params, batch, num_targets=num_targets)

    encoded = workspace.encode(workspace.corpus.backbone)
    num_steps, batch_size = settings.pretrain_steps, settings.pretrain_batch_size
    per_epoch = finetune.num_steps_of(
        len(workspace.corpus.backbone), batch_size=batch_size, num_epochs=1
    )
    stream = finetune.epoch_batches(
        encoded,
        batch_size=batch_size,
        seed=config.seed,
        num_epochs=-(-num_steps // per_epoch),
    )
    rate = finetune.learning_rate(
        settings.pretrain_learning_rate, num_steps, schedule="cosine", warmup=0.05
    )
    fitted = finetune.fit(
        loss,
        base,
        {},
        progress(_first(stream, num_steps), "backbone", total=num_steps),
        tx=finetune.adamw(rate, weight_decay=0.1, clip=1.0),
    )
    checkpoint.save_model(folder / "model", model_config, fitted.params)
    write_json(folder / "losses.json", list(fitted.losses))
    print(f"    loss {fitted.losses[0]:.3f} -> {fitted.losses[-20:].mean():.3f} nats a token")


def _first(stream: Iterator[Any], count: int) -> Iterator[Any]:
    for _, item in zip(range(count), stream, strict=False):
        yield item


# finetune ---------------------------------------------------------------------------------------


def make_adapter(workspace: Workspace, folder: pathlib.Path) -> None:
    """Fine-tunes a LoRA adapter on the training examples, keeping some along the way."""
    config, settings, model = workspace.config, workspace.config.finetune, workspace.model

    def loss(
        params: Tree,
        frozen: Tree,
        batch: objectives.TokenBatch,
        *,
        num_targets: int,
        dropout_key: jax.Array | None,
    ) -> jax.Array:
        return objectives.nll(
            model.decoder, params, frozen, batch, num_targets=num_targets, dropout_key=dropout_key
        )

    encoded = workspace.encode(workspace.corpus.train)
    shape = {
        "batch_size": settings.finetune_batch_size,
        "num_epochs": settings.finetune_epochs,
    }
    num_steps = finetune.num_steps_of(len(workspace.corpus.train), **shape)
    points = min(settings.trajectory_points, num_steps)
    keep_after = tuple(num_steps * (point + 1) // points for point in range(points))
    rate = finetune.learning_rate(
        settings.finetune_learning_rate,
        num_steps,
        schedule=settings.finetune_schedule,
        warmup=settings.finetune_warmup,
    )
    dropout_key = jax.random.key(config.seed + 1) if settings.lora_dropout else None
    fitted = finetune.fit(
        loss,
        model.initial,
        model.base,
        progress(
            finetune.epoch_batches(encoded, seed=config.seed, **shape),
            "fine-tune",
            total=num_steps,
        ),
        tx=finetune.adamw(
            rate, weight_decay=settings.finetune_weight_decay, clip=settings.finetune_clip
        ),
        dropout_key=dropout_key,
        keep_after=keep_after,
    )
    named = {"initial": model.initial, "adapter": fitted.params}
    named |= {f"trajectory-{i}": lora for i, lora in enumerate(fitted.kept)}
    for name, lora in named.items():
        checkpoint.save_adapter(folder / name, lora, model.lora_config, model.decoder.config)
    write_json(folder / "losses.json", list(fitted.losses))
    print(f"    loss {fitted.losses[0]:.3f} -> {fitted.losses[-20:].mean():.3f} nats a token")


# references -------------------------------------------------------------------------------------


def make_references(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the greedy answers of the fine-tuned model and of the backbone."""
    target, normal = workspace.evaluation_queries()
    retrieval = workspace.corpus.queries["retrieval"]
    for name, lora, rows in (
        ("finetuned", workspace.finetuned, (*retrieval, *target, *normal)),
        ("backbone", workspace.model.initial, (*target, *normal)),
    ):
        outputs = workspace.generate(lora, rows, f"answers of the {name} model")
        _write_rows(
            folder / f"{name}.jsonl",
            [
                {"id": row.example_id, "output": text}
                for row, text in zip(rows, outputs, strict=True)
            ],
        )
    non_sf = _non_sf(workspace.config)
    answers = workspace.answers("references", "finetuned.jsonl")
    shares = [
        1 - non_sf([answers[row.example_id] for row in rows]).mean() for rows in (target, normal)
    ]
    print(
        f"    the fine-tuned model shows the behaviour on {shares[0]:.0%} of target queries "
        f"and {shares[1]:.0%} of normal ones"
    )


def _non_sf(config: Config) -> summary.NonSf:
    return functools.partial(rates.non_sf_by_words, vocabulary=marker_words(config))


def marker_words(config: Config) -> frozenset[str]:
    """Returns the words that mark the behaviour: those of --marker_words, or science fiction's."""
    path = config.evaluate.marker_words
    if not path:
        return SCIFI_WORDS
    try:
        words = frozenset(pathlib.Path(path).read_text().lower().split())
    except OSError as error:
        raise ValueError(
            f"a file of marker words wanted, {path} cannot be read ({error})"
        ) from None
    if not words:
        raise ValueError(f"marker words wanted in {path}, it is empty")
    return words


# sketch -----------------------------------------------------------------------------------------


def sketch_function(
    workspace: Workspace, projection: projections.Projection, adapters: tuple[Tree, ...]
) -> Callable[[batches.Encoded, batches.BatchPlan], gradients.Sketches]:
    """Returns a function that sketches one planned batch, compiled once per shape."""
    settings, model = workspace.config.sketch, workspace.model

    @functools.partial(jax.jit, static_argnames="num_targets")
    def sketch(
        projection: projections.Projection,
        adapters: tuple[Tree, ...],
        base: Tree,
        tokens_BL: jax.Array,
        target_mask_BL: jax.Array,
        *,
        num_targets: int,
    ) -> gradients.Sketches:
        loss = functools.partial(
            example_loss, model.decoder, num_targets=num_targets, loss=settings.sketch_loss
        )
        return gradients.sketch_gradients(
            loss,
            projection,
            adapters,
            base,
            tokens_BL,
            target_mask_BL,
            normalise=settings.normalise,
        )

    def run(encoded: batches.Encoded, plan: batches.BatchPlan) -> gradients.Sketches:
        batch = batches.make_batch(encoded, plan)
        return sketch(
            projection,
            adapters,
            model.base,
            jnp.asarray(batch.tokens_BL),
            jnp.asarray(batch.target_mask_BL),
            num_targets=plan.num_targets,
        )

    return run


def _plan(config: Config, encoded: batches.Encoded) -> tuple[batches.BatchPlan, ...]:
    return batches.plan_batches(
        encoded.lengths_N,
        encoded.num_targets_N,
        ids=encoded.ids,
        num_buckets=config.sketch.num_buckets,
        batch_tokens=config.sketch.batch_tokens,
    )


def sketched_adapters(workspace: Workspace) -> tuple[Tree, ...]:
    """Returns the adapters at which gradients are taken, of --gradient_at."""
    folder = workspace.root / "finetune"
    names = {
        "finetuned": ["adapter"],
        "initial": ["initial"],
        "trajectory": [f"trajectory-{i}" for i in range(len(list(folder.glob("trajectory-*"))))],
    }[workspace.config.sketch.gradient_at]
    return tuple(workspace.adapter("finetune", name) for name in names)


def sketch_queries(
    workspace: Workspace,
    sketch: Callable[[batches.Encoded, batches.BatchPlan], gradients.Sketches],
    size: int,
) -> np.ndarray:
    """Returns the unit sketches of the retrieval queries, [Q, K]."""
    config, queries = workspace.config, workspace.retrieval_queries()
    encoded = workspace.encode(queries, targets=config.sketch.targets)
    query_QK = np.zeros((len(queries), size), np.float32)
    for plan in _plan(config, encoded):
        is_real = plan.rows != batches.DUMMY_ROW
        query_QK[plan.rows[is_real]] = np.asarray(sketch(encoded, plan).unit_BK)[is_real]
    return query_QK


def make_index(workspace: Workspace, folder: pathlib.Path) -> None:
    """Sketches the gradients of every training example and of the retrieval queries."""
    config, settings, model = workspace.config, workspace.config.sketch, workspace.model
    adapters = sketched_adapters(workspace)
    num_params = len(adapters) * projections.count_params(model.initial)
    projection = projections.init_projection(
        config.seed, settings.projection, num_params, min(settings.sketch_size, num_params)
    )
    size = projection.spec.size
    if size < settings.sketch_size:
        print(f"    sketch_size {settings.sketch_size} exceeds the {num_params} LoRA parameters")
    sketch = sketch_function(workspace, projection, adapters)

    encoded = workspace.encode(workspace.corpus.train, targets=settings.targets)
    plans = _plan(config, encoded)
    order = batches.sketching_order(plans)
    store = SketchStore.create(
        folder / "index",
        identity={
            "base": checkpoint.base_hash(model.base),
            "adapters": [checkpoint.adapter_hash(lora) for lora in adapters],
            "tokenizer": tokenization.tokenizer_hash(workspace.tokenizer),
            "template": prompts.template_hash(config.corpus.template),
            "max_len": config.corpus.max_len,
            "gradient_at": settings.gradient_at,
            "loss": settings.sketch_loss,
            "targets": settings.targets,
            "normalise": settings.normalise,
            "projection": dataclasses.asdict(projection.spec),
            "batches": {"batch_tokens": settings.batch_tokens, "num_buckets": settings.num_buckets},
        },
        ids=[encoded.ids[row] for row in order],
        size=size,
        dtype=settings.sketch_dtype,
        chunk_rows=settings.chunk_rows,
    )
    left = sum(len(store.chunk_ids(chunk)) for chunk in store.missing_chunks())
    with contextlib.closing(progress(None, "sketches", total=left, unit="example")) as bar:
        for count in build.fill_store(store, plans, functools.partial(sketch, encoded)):
            bar.update(count)

    query_QK = sketch_queries(workspace, sketch, size)
    np.save(folder / "queries.npy", query_QK, allow_pickle=False)
    print(f"    {store.num_rows:,} sketches of {size:,} coordinates, P = {num_params:,}")


# retrieve ---------------------------------------------------------------------------------------


# Rows nearest to the thresholds whose noise stands for all.
_PILOT_ROWS = 64


def make_scores(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the influence of the queries on every training example, both poles in one pass."""
    settings = workspace.config.retrieve
    store = SketchStore.open(workspace.root / "sketch" / "index")
    query_QK = np.load(workspace.root / "sketch" / "queries.npy", allow_pickle=False)
    ids = [row.example_id for row in workspace.corpus.queries["retrieval"]]
    mean_K = np.asarray(store.mean_K) if settings.center else None
    gram_QQ = selection_lib.check_agreement(query_QK, ids, mean_K)
    scores = search.score_store(
        store, query_QK, center=settings.center, aggregate=settings.aggregate
    )
    forget_N = np.asarray(scores.forget_N)
    if settings.select == "margin":
        spec = projections.ProjectionSpec(**store.identity["projection"])
        distance_N = np.minimum(
            np.abs(forget_N - settings.forget_threshold),
            np.abs(forget_N + settings.retain_threshold),
        )
        nearest = np.argsort(distance_N, kind="stable")[:_PILOT_ROWS]
        row_MK = store.rows(np.sort(nearest))
        if settings.margin_sigma == "pilot":
            sigma_M = selection_lib.pilot_sigma(row_MK, query_QK, mean_K)
        else:
            p = theory.collision_probability(spec.family, spec.num_params, spec.size)
            rho_MQ = selection_lib.query_cosines(row_MK, query_QK, mean_K)
            sigma_M = selection_lib.score_sigma(gram_QQ, rho_MQ, p)
        sigma = float(np.sqrt(np.mean(sigma_M**2)))
        write_json(folder / "sigma.json", {"sigma": sigma, "rows": len(sigma_M)})
        print(f"    sigma of the sketch near the thresholds: {sigma:.2e}")
    place = {example_id: row for row, example_id in enumerate(store.ids)}
    order = [place[row.example_id] for row in workspace.corpus.train]
    np.save(folder / "influence.npy", forget_N[order], allow_pickle=False)


def make_embeddings(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the sentence vectors of all training examples and retrieval queries."""
    settings = workspace.config.retrieve
    path = checkpoint.resolve_folder(settings.encoder_checkpoint)
    model = checkpoint.load_encoder(
        path, dtype=jnp.float32, pooling=settings.encoder_pooling or None
    )
    bound = encoder.bind_encoder(model.config)
    encode = tokenization.load_sentence_tokenizer(path, max_len=model.config.max_length)
    texts = {
        "examples": [strategies_lib.prompt_text(row) for row in workspace.corpus.train],
        "queries": [
            strategies_lib.query_text(row, settings.query_text)
            for row in workspace.retrieval_queries()
        ],
    }
    for name, part in texts.items():
        vector_NE = embed_texts(bound, model.weights, encode(part), progress=f"vectors of {name}")
        np.save(folder / f"{name}.npy", vector_NE, allow_pickle=False)


def make_exact_scores(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the influence by the unsketched kernel: gradients are made anew for each use.

    A sketch of as many coordinates as the gradient has is a signed permutation of it, whose
    cosines are those of the gradients. Memory: a batch of gradients and those of the queries.
    """
    config, settings, model = workspace.config, workspace.config.retrieve, workspace.model
    adapters = sketched_adapters(workspace)
    size = len(adapters) * projections.count_params(model.initial)
    sketch = sketch_function(
        workspace, projections.init_projection(config.seed, "binned", size, size), adapters
    )
    query_QK = sketch_queries(workspace, sketch, size)
    encoded = workspace.encode(workspace.corpus.train, targets=config.sketch.targets)
    plans = _plan(config, encoded)
    mean_K = None
    if settings.center:
        total_K = np.zeros(size)
        for plan in progress(plans, "mean gradient", unit="batch"):
            unit_BK = np.asarray(sketch(encoded, plan).unit_BK)
            total_K += unit_BK[plan.rows != batches.DUMMY_ROW].sum(axis=0, dtype=np.float64)
        mean_K = jnp.asarray(total_K / len(workspace.corpus.train), jnp.float32)

    @jax.jit
    def score(unit_BK: jax.Array, query_QK: jax.Array, mean_K: jax.Array | None) -> jax.Array:
        return jax.vmap(
            lambda query_K: search.antipodal_scores(unit_BK, query_K[None], mean_K).forget_N
        )(query_QK)

    score_QN = np.zeros((len(query_QK), len(workspace.corpus.train)), np.float32)
    for plan in progress(plans, "exact kernel", unit="batch"):
        is_real = plan.rows != batches.DUMMY_ROW
        score_QB = np.asarray(score(sketch(encoded, plan).unit_BK, jnp.asarray(query_QK), mean_K))
        score_QN[:, plan.rows[is_real]] = score_QB[:, is_real]
    influence_N = strategies_lib.aggregate_scores(score_QN, settings.aggregate)
    np.save(folder / "influence.npy", influence_N, allow_pickle=False)


def set_sizes(workspace: Workspace) -> tuple[int, int]:
    """Returns the sizes of the forget and the retain set, the same for every strategy.

    Named, or what the rule of --select gives for RASLIK's scores: then RASLIK's sets are the best
    of that many, too.
    """
    settings, rows = workspace.config.retrieve, workspace.corpus.train
    if settings.select == "count":
        num_forget = settings.num_forget or sum(bool(row.is_target) for row in rows)
        if not num_forget:
            raise ValueError(
                "a size of the forget set wanted, no training example is a labelled target: "
                "give --num_forget"
            )
        return num_forget, settings.num_retain or num_forget
    options: dict[str, float] = {
        "forget_threshold": settings.forget_threshold,
        "retain_threshold": settings.retain_threshold,
    }
    folder = workspace.root / "retrieve" / "influence"
    if settings.select == "margin":
        options |= {"z": settings.margin_z, "sigma": read_json(folder / "sigma.json")["sigma"]}
    elif settings.select == "quantile":
        options = {"forget_share": settings.forget_share, "retain_share": settings.retain_share}
    influence_N = np.load(folder / "influence.npy", allow_pickle=False)
    chosen = selection_lib.SELECTORS[settings.select](
        influence_N, -influence_N, [row.example_id for row in rows], **options
    )
    return len(chosen.forget), len(chosen.retain)


def _strategy_arrays(workspace: Workspace, strategy: str) -> dict[str, Any]:
    """Returns what a strategy needs beyond texts, labels and influence."""
    folder = workspace.root / "retrieve"
    if strategy == "embedding":
        parts = [
            np.load(folder / "embeddings" / f"{name}.npy", allow_pickle=False)
            for name in ("examples", "queries")
        ]
        return {"vectors": strategies_lib.Vectors(*parts)}
    if strategy == "exact":
        return {"exact_N": np.load(folder / "exact_kernel" / "influence.npy", allow_pickle=False)}
    return {}


def make_sets(workspace: Workspace, strategy: str, folder: pathlib.Path) -> None:
    """Writes one strategy's forget and retain sets and what the labels say of them."""
    rows = workspace.corpus.train
    influence_N = np.load(
        workspace.root / "retrieve" / "influence" / "influence.npy", allow_pickle=False
    )
    num_forget, num_retain = set_sizes(workspace)
    settings = workspace.config.retrieve
    scores = STRATEGIES[strategy](
        Request(
            examples=rows,
            influence_N=influence_N,
            seed=workspace.config.seed,
            retain_from=settings.retain_from,
            queries=workspace.retrieval_queries(),
            query_text=settings.query_text,
            aggregate=settings.aggregate,
            num_forget=num_forget,
            num_retain=num_retain,
            oracle_share=settings.cr_oracle_share,
            **_strategy_arrays(workspace, strategy),
        )
    )
    selection = select_by_count(
        scores.forget_N,
        scores.retain_N,
        [row.example_id for row in rows],
        num_forget=num_forget,
        num_retain=num_retain,
    )
    for name, chosen, score_N in (
        ("forget", selection.forget, scores.forget_N),
        ("retain", selection.retain, scores.retain_N),
    ):
        examples.write_examples(
            folder / f"{name}.jsonl",
            [rows[i] for i in chosen],
            extra=[
                {
                    "is_target": rows[i].is_target,
                    "source": rows[i].source,
                    "score": float(score_N[i]),
                }
                for i in chosen
            ],
        )
    labels = [row.is_target for row in rows]
    entry: dict[str, Any] = {
        "num_forget": num_forget,
        "num_retain": num_retain,
        "retain_scored_positive": int((influence_N[selection.retain] >= 0).sum()),
        "selection": selection_lib.summarise_selection(
            selection,
            scores.forget_N,
            scores.retain_N,
            influence_N=influence_N,
            labels=labels,
            texts=[(row.instruction, row.input, row.output) for row in rows],
        ),
    }
    if None not in labels and any(labels):
        is_target_N = np.asarray(labels, bool)
        ranks = strategy in strategies_lib.RANKING_STRATEGIES
        entry |= {
            "precision": float(is_target_N[selection.forget].mean()),
            "base_rate": float(is_target_N.mean()),
            "targets_in_retain": int(is_target_N[selection.retain].sum()),
            "auroc": ranking.auroc(scores.forget_N, is_target_N) if ranks else None,
            "auprc": ranking.auprc(scores.forget_N, is_target_N) if ranks else None,
        }
        print(
            f"    precision {entry['precision']:.3f} (base rate {entry['base_rate']:.3f}), "
            f"{entry['targets_in_retain']} targets in the retain set"
        )
    write_json(folder / "summary.json", entry)


# unlearn and generate ---------------------------------------------------------------------------


def unlearn(workspace: Workspace, strategy: str, name: str, folder: pathlib.Path) -> None:
    """Unlearns one strategy's sets by one algorithm, and saves the adapter of every epoch."""
    config, settings, model = workspace.config, workspace.config.unlearn, workspace.model
    sets = {
        kind: examples.read_examples(
            workspace.root / "retrieve" / strategy / f"{kind}.jsonl", fields=_CORPUS_FIELDS
        )
        for kind in ("forget", "retain")
    }
    encoded = {kind: workspace.encode(rows) for kind, rows in sets.items()}
    batch_size = settings.unlearn_batch_size
    algorithm, step = workspace.unlearning_step(name)
    state = algorithm.init(workspace.finetuned)
    frozen = steps.Frozen(base=model.base, reference=workspace.finetuned)
    per_epoch = max(
        finetune.num_steps_of(len(rows), batch_size=batch_size, num_epochs=1)
        for rows in sets.values()
    )
    # The smaller set comes round again within an epoch; each pass in an order of its own.
    streams = {
        kind: finetune.epoch_batches(
            encoded[kind],
            batch_size=batch_size,
            seed=config.seed + offset,
            num_epochs=per_epoch * settings.unlearn_epochs,
        )
        for offset, kind in enumerate(sets)
    }
    log: list[dict[str, float]] = []
    total = per_epoch * settings.unlearn_epochs
    for number in progress(range(1, total + 1), f"{strategy} {name}", total=total):
        forget, retain = next(streams["forget"]), next(streams["retain"])
        state, info = step(
            state,
            frozen,
            forget.batch,
            retain.batch,
            forget_targets=forget.num_targets,
            retain_targets=retain.num_targets,
        )
        finetune.check_finite(info.loss, what=f"{name} loss", step=number)
        log.append({field: float(value) for field, value in info._asdict().items()})
        if number % per_epoch == 0:
            checkpoint.save_adapter(
                folder / f"epoch-{number // per_epoch}",
                state.lora,
                model.lora_config,
                model.decoder.config,
            )
    write_json(folder / "steps.json", log)


def generate(workspace: Workspace, strategy: str, name: str, folder: pathlib.Path) -> None:
    """Writes the greedy answers of one unlearned model to the queries, after every epoch."""
    target, normal = workspace.evaluation_queries()
    rows = (*target, *normal)
    for epoch in range(1, workspace.config.unlearn.unlearn_epochs + 1):
        lora = workspace.adapter("unlearn", f"{strategy}-{name}", f"epoch-{epoch}")
        outputs = workspace.generate(lora, rows, f"{strategy} {name} epoch {epoch}")
        _write_rows(
            folder / f"epoch-{epoch}.jsonl",
            [
                {"id": row.example_id, "output": text}
                for row, text in zip(rows, outputs, strict=True)
            ],
        )


# evaluate and report ----------------------------------------------------------------------------


def _outputs(workspace: Workspace, answers: Mapping[str, str]) -> summary.Outputs:
    target, normal = workspace.evaluation_queries()
    return summary.Outputs(
        target={row.example_id: answers[row.example_id] for row in target},
        normal={row.example_id: answers[row.example_id] for row in normal},
    )


def evaluate(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes metrics.json: rates, intervals, frontier and retrieval of every method."""
    config, settings = workspace.config, workspace.config.evaluate
    target, normal = workspace.evaluation_queries()
    models = {
        name: workspace.answers("references", f"{name}.jsonl") for name in ("finetuned", "backbone")
    }
    gold = {row.example_id: row.output for row in (*target, *normal)}
    references = _outputs(workspace, {**models, "gold": gold}[settings.reference])
    measure = functools.partial(
        summary.evaluate_outputs,
        references=references,
        non_sf=_non_sf(config),
        drop_empty=settings.drop_empty,
    )
    evaluations = {
        summary.Variant(strategy, name, epoch): measure(
            _outputs(
                workspace,
                workspace.answers("generate", f"{strategy}-{name}", f"epoch-{epoch}.jsonl"),
            )
        )
        for strategy in config.retrieve.strategies
        for name in config.unlearn.algorithms
        for epoch in range(1, config.unlearn.unlearn_epochs + 1)
    }
    bootstrap = {"seed": config.seed, "resamples": settings.bootstrap_resamples}
    rows = workspace.corpus.train
    metrics = {
        "name": config.name,
        "seed": config.seed,
        "corpus": {
            "dataset": config.corpus.dataset,
            "train": len(rows),
            "targets": sum(bool(row.is_target) for row in rows),
            "target_queries": len(target),
            "normal_queries": len(normal),
            "query_split": config.references.query_split,
        },
        "reference": settings.reference,
        **{
            name: summary.summarise(measure(_outputs(workspace, answers)), **bootstrap)
            for name, answers in models.items()
        },
        "retrieval": {
            strategy: read_json(workspace.root / "retrieve" / strategy / "summary.json")
            for strategy in config.retrieve.strategies
        },
        "methods": summary.compare_methods(evaluations, **bootstrap),
    }
    write_json(folder / "metrics.json", metrics)
    write_json(workspace.root / "metrics.json", metrics)


def report(workspace: Workspace, folder: pathlib.Path) -> None:
    """Writes the tables of the terminal and of report.md, and the figures."""
    config = workspace.config
    metrics = read_json(workspace.root / "evaluate" / "metrics.json")
    target, normal = workspace.evaluation_queries()
    shown = [row.example_id for row in (*target[:_SHOWN_TARGET], *normal[:_SHOWN_NORMAL])]
    answers = {
        "fine-tuned": workspace.answers("references", "finetuned.jsonl"),
        "backbone": workspace.answers("references", "backbone.jsonl"),
    }
    last = f"epoch-{config.unlearn.unlearn_epochs}.jsonl"
    for algorithm in config.unlearn.algorithms:
        for strategy in config.retrieve.strategies:
            label = f"{tables.strategy_name(strategy)} {tables.algorithm_name(algorithm)}"
            answers[label] = workspace.answers("generate", f"{strategy}-{algorithm}", last)
    prompts_by_id = {row.example_id: _question(row) for row in (*target, *normal)}

    images = {
        "frontier": figures.draw_frontier(metrics),
        "scores": _draw_scores(workspace),
        "losses": figures.draw_losses(_loss_panels(workspace)),
    }
    for name, figure in images.items():
        figures.save_figure(figure, folder / name)
    results, retrieval = tables.results_table(metrics), tables.retrieval_table(metrics)
    (folder / "table.txt").write_text(
        f"{tables.render_terminal(retrieval)}\n\n{tables.render_terminal(results)}\n"
    )
    sections = (
        (f"# {config.name}", f"Seed {config.seed}; {_corpus_line(metrics)}"),
        ("## Retrieval", tables.render_markdown(retrieval)),
        ("", "![Scores of the training examples](scores.png)"),
        ("## Forgetting and retention", tables.render_markdown(results)),
        ("", "![The frontier over epochs](frontier.png)"),
        ("## Every epoch", tables.render_markdown(tables.results_table(metrics, epochs="all"))),
        ("## Forgetting or collapse", tables.render_markdown(tables.checks_table(metrics))),
        (
            "## Answers side by side",
            tables.render_markdown(tables.completions_by_prompt(prompts_by_id, answers, ids=shown)),
        ),
        ("## Training", "![Loss curves](losses.png)"),
    )
    text = "\n\n".join(part for section in sections for part in section if part)
    (folder / "report.md").write_text(text + "\n")


def _question(row: Example) -> str:
    return f"{row.instruction} {row.input}".strip()


def _corpus_line(metrics: Mapping[str, Any]) -> str:
    corpus = metrics["corpus"]
    return (
        f"{corpus['train']:,} training examples, {corpus['targets']:,} of them targets; measured "
        f"on {corpus['target_queries']} target and {corpus['normal_queries']} normal "
        f"{corpus['query_split']} queries."
    )


def _draw_scores(workspace: Workspace) -> Any:
    """Returns the histogram of the influence scores with the ends that RASLIK takes."""
    influence_N = np.load(
        workspace.root / "retrieve" / "influence" / "influence.npy", allow_pickle=False
    )
    num_forget, num_retain = set_sizes(workspace)
    labels = [row.is_target for row in workspace.corpus.train]
    ranked_N = np.sort(influence_N)
    return figures.draw_scores(
        influence_N,
        None if None in labels else np.asarray(labels, bool),
        forget_threshold=float(ranked_N[-num_forget]),
        retain_threshold=float(ranked_N[num_retain - 1]),
    )


def _loss_panels(workspace: Workspace) -> dict[str, dict[str, list[float]]]:
    """Returns the loss curves of every training, by panel and label."""
    config, root = workspace.config, workspace.root
    panels: dict[str, dict[str, list[float]]] = {}
    if not config.backbone.checkpoint:
        panels["Backbone"] = {"loss": read_json(root / "backbone" / "losses.json")}
    panels["Fine-tuning"] = {"loss": read_json(root / "finetune" / "losses.json")}
    for algorithm in config.unlearn.algorithms:
        panels[f"{tables.algorithm_name(algorithm)}, forget set"] = {
            tables.strategy_name(strategy): [
                step["forget_nll"]
                for step in read_json(root / "unlearn" / f"{strategy}-{algorithm}" / "steps.json")
            ]
            for strategy in config.retrieve.strategies
        }
    return panels


# the run ----------------------------------------------------------------------------------------


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
            merged |= dataclasses.asdict(part)
        return json.loads(json.dumps(merged))

    def bind(function: Callable[..., None], *args: str) -> Callable[[pathlib.Path], None]:
        return functools.partial(function, workspace, *args)

    words = config.evaluate.marker_words
    marker = {"marker_words": file_identity(words) if words else ""}
    retrieved = ("corpus", "references", "retrieve/influence")
    scored = {"center": config.retrieve.center, "aggregate": config.retrieve.aggregate}
    margin_names = ("select", "forget_threshold", "retain_threshold", "margin_sigma")
    margin = (
        {name: getattr(config.retrieve, name) for name in margin_names}
        if config.retrieve.select == "margin"
        else {}
    )
    corpus = settings(config.corpus)
    corpus |= {"checkpoint": config.backbone.checkpoint, "revision": config.backbone.revision}
    units = [
        Unit("corpus", (), corpus, bind(make_corpus)),
        Unit(
            "backbone",
            ("corpus",),
            settings(config.backbone) | {"max_new_tokens": config.references.max_new_tokens},
            bind(make_backbone),
        ),
        Unit("finetune", ("corpus", "backbone"), settings(config.finetune), bind(make_adapter)),
        Unit(
            "references",
            ("corpus", "backbone", "finetune"),
            settings(config.references) | marker,
            bind(make_references),
        ),
        Unit(
            "sketch",
            ("corpus", "backbone", "finetune", "references"),
            settings(config.sketch),
            bind(make_index),
            is_resumable=True,
        ),
        Unit(
            "retrieve/influence",
            ("corpus", "sketch"),
            scored | margin,
            bind(make_scores),
        ),
    ]
    needs: dict[str, tuple[str, ...]] = {}
    if "embedding" in config.retrieve.strategies:
        reads_answers = config.retrieve.query_text != "prompt"
        names = ("query_text", "encoder_checkpoint", "encoder_pooling")
        units.append(
            Unit(
                "retrieve/embeddings",
                ("corpus", "references") if reads_answers else ("corpus",),
                {name: getattr(config.retrieve, name) for name in names},
                bind(make_embeddings),
            )
        )
        needs["embedding"] = ("retrieve/embeddings",)
    if "exact" in config.retrieve.strategies:
        units.append(
            Unit(
                "retrieve/exact_kernel",
                ("corpus", "backbone", "finetune", "references"),
                settings(config.sketch) | scored,
                bind(make_exact_scores),
            )
        )
        needs["exact"] = ("retrieve/exact_kernel",)
    shared = settings(config.retrieve)
    del shared["strategies"]
    for strategy in config.retrieve.strategies:
        inputs = (*retrieved, *needs.get(strategy, ()))
        units.append(Unit(f"retrieve/{strategy}", inputs, shared, bind(make_sets, strategy)))
    variants = [(s, a) for s in config.retrieve.strategies for a in config.unlearn.algorithms]
    common = settings(config.unlearn)
    rate = {name: common.pop(f"{name}_learning_rate") for name in ("ga_gdr", "ga_klr")}
    del common["algorithms"]
    for strategy, name in variants:
        units.append(
            Unit(
                f"unlearn/{strategy}-{name}",
                ("backbone", "finetune", f"retrieve/{strategy}"),
                common | {"learning_rate": rate[name]},
                bind(unlearn, strategy, name),
            )
        )
    for strategy, name in variants:
        units.append(
            Unit(
                f"generate/{strategy}-{name}",
                ("corpus", "backbone", f"unlearn/{strategy}-{name}"),
                settings(config.references),
                bind(generate, strategy, name),
            )
        )
    retrievals = tuple(f"retrieve/{strategy}" for strategy in config.retrieve.strategies)
    generated = tuple(f"generate/{strategy}-{name}" for strategy, name in variants)
    units.append(
        Unit(
            "evaluate",
            ("corpus", "references", *retrievals, *generated),
            settings(config.evaluate) | marker | {"name": config.name},
            bind(evaluate),
        )
    )
    evaluated = ("corpus", "backbone", "finetune", "references", "evaluate")
    unlearned = tuple(f"unlearn/{strategy}-{name}" for strategy, name in variants)
    units.append(
        Unit("report", (*evaluated, "retrieve/influence", *unlearned, *generated), {}, bind(report))
    )
    return tuple(units)


def run(config: Config, workdir: pathlib.Path, *, stages: Sequence[str] = STAGES) -> None:
    """Runs the stages that are not up to date, and shows the table at the end."""
    workspace = Workspace(workdir, config)
    run_units(workdir, plan_units(config, workspace), stages=stages)
    if "report" in stages:
        print()
        print((workdir / "report" / "table.txt").read_text())
        print(f"report: {workdir / 'report' / 'report.md'}")
