"""A member of each family, added in this one file, goes through plan, dry run, run and report."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from raslik_jax.base.files import read_json, write_json
from raslik_jax.base.lazy import jnp
from raslik_jax.base.settings import Settings, setting
from raslik_jax.data.corpora import DATASETS
from raslik_jax.data.corpora.record import Dataset
from raslik_jax.data.examples import Corpus, make_example, make_examples
from raslik_jax.data.tokens import tokenization
from raslik_jax.evaluate.metrics import METRICS, Column, Metric
from raslik_jax.evaluate.robustness import ROBUSTNESS
from raslik_jax.evaluate.robustness.record import READING_COLUMNS, Cost, RobustnessMeasure
from raslik_jax.models import architecture, checkpoint, decoder, layers, llama
from raslik_jax.models.decoder import ARCHITECTURES
from raslik_jax.report import writing
from raslik_jax.report.sections import SECTIONS, Section
from raslik_jax.retrieve.strategies import STRATEGIES, Request, Scores, Strategy
from raslik_jax.run import artifacts, forecast, plan
from raslik_jax.run.manifests import verify
from raslik_jax.run.recipes import Recipe, variants_of
from raslik_jax.run.workspace import Workspace
from raslik_jax.sketch.families import PROJECTIONS, ProjectionFamily
from raslik_jax.train.objectives import OBJECTIVES, Objective, ObjectiveSettings, descend


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counting(Settings):
    """Settings of the dataset."""

    last: int = setting(30, "Largest number that is counted to.", low=1)


def load_counting(shared, own, *, seed):
    """Returns questions for the next number; numbers divisible by five are answered badly."""

    def rows(start):
        return make_examples(
            make_example(
                f"What comes after {n}?",
                "",
                "A fish." if n % 5 == 0 else f"It is {n + 1}.",
                is_target=n % 5 == 0,
            )
            for n in range(start, start + own.last)
        )

    train, asked = rows(0), rows(1000)
    bad = [row for row in asked if row.is_target]
    good = [row for row in asked if not row.is_target]
    sets = {"retrieval": bad[:2], "test_target": bad[2:4], "test_normal": good[:2]}
    sets |= {"validation_target": bad[4:5], "validation_normal": good[2:3]}
    return Corpus(rows(2000), train, {name: tuple(found) for name, found in sets.items()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Length(Settings):
    """Settings of the strategy."""

    power: float = setting(1.0, "Power of the length.", above=0)


def shortest(request: Request) -> Scores:
    """Returns short answers to forget, and long ones to retain."""
    length_N = np.array([len(row.output) for row in request.examples], np.float64)
    score_N = length_N**request.settings.power
    return Scores(forget_N=-score_N, retain_N=score_N)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pushing(ObjectiveSettings):
    """Settings of the objective."""

    bound: float = setting(3.0, "Nats a token beyond which nothing is pushed.", above=0)


def push(rows, settings):
    """Returns how far below a bound the nll lies."""
    return jnp.maximum(settings.bound - rows.nll_B, 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyConfig(architecture.DecoderConfig):
    """Llama's settings, with a factor on what the MLP adds."""

    num_key_value_heads: int | None = None
    rms_norm_eps: float = 1e-6
    share: float = 1.0

    model_type = "added"
    hf_name = "Toy"


class ToyBlock(layers.GatedBlock):
    """One norm before attention and MLP alike."""

    def __init__(self, config, lora, *, dtype):
        super().__init__(config, lora, dtype=dtype)
        self.norm = layers.RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, dtype=dtype)

    def __call__(self, hidden_LE, context):
        """Returns the residual stream after this layer, and its keys and values."""
        read_LE = self.norm(hidden_LE)
        mixed_LE, fresh = self.attention(read_LE, context)
        return hidden_LE + mixed_LE + self.config.share * self.mlp(read_LE, context), fresh


MEMBERS = (
    (
        ARCHITECTURES,
        architecture.Architecture(
            ToyConfig,
            key_map={**llama.KEY_MAP, "layers/norm": "norm"},
            buffers="nothing",
            modules=(ToyBlock, layers.RMSNorm),
        ),
    ),
    (DATASETS, Dataset("Counting", load_counting, settings=Counting())),
    (
        STRATEGIES,
        Strategy("Shortest", shortest, ranks_all=True, retains_opposite=True, settings=Length()),
    ),
    (
        PROJECTIONS,
        ProjectionFamily(
            "the first K", lambda spec: (), lambda spec, table, g_BP: g_BP[:, : spec.size]
        ),
    ),
    (OBJECTIVES, Objective("Push", push, descend, settings=Pushing(learning_rate=1e-4))),
    (
        METRICS,
        Metric(
            ("texts",),
            lambda texts: max(map(len, texts)),
            columns={"checks": Column("Longest answer", "d")},
        ),
    ),
    (
        ROBUSTNESS,
        RobustnessMeasure(
            "Read again",
            lambda bench, model, settings: [{"condition": "as it is", **bench.read(model)}],
            lambda found: f"Found of {', '.join(found)}.",
            columns=READING_COLUMNS,
            note="Nothing is done.",
            cost=lambda settings: Cost(readings=1, steps=1, rows=2),
        ),
    ),
    (
        plan.UNITS,
        (
            Recipe(
                "generate/added-{0}",
                lambda workspace, variant, folder: write_json(folder / "said.json", [*variant]),
                "{train} generate/{0}",
                "seed corpus.added",
                writes={"said": 2},
                members=variants_of,
                measures=True,
            ),
        ),
    ),
    (
        SECTIONS,
        Section(
            "Only counted",
            "method",
            lambda experiments: {"number": len(experiments)},
            "<p>{{ number }} experiment is <i>counted</i>.</p>",
        ),
    ),
)
FLAGS = (
    *("--corpus.dataset=added", "--corpus.added.last=60", "--retrieve.strategies=added"),
    *("--retrieve.added.power=2", "--unlearn.algorithms=added", "--unlearn.added.bound=4"),
    *("--unlearn.epochs=1", "--sketch.projection=added", "--evaluate.robustness=added"),
)
# The sizes of made corpora have no effect on this one.
SIZES = tuple(f for f in tiny.FLAGS if f.startswith("--corpus.num_") or "dataset" in f)


@pytest.fixture(autouse=True)
def members(monkeypatch):
    for family, member in MEMBERS:
        monkeypatch.setitem(family, "added", member)


def _config(*flags):
    return tiny.tiny_config(
        *(f"{flag.partition('=')[0]}={_default(flag)}" for flag in SIZES), *FLAGS, *flags
    )


def _default(flag):
    name = flag.partition("=")[0].removeprefix("--corpus.")
    return getattr(type(tiny.tiny_config().corpus)(), name)


def _write_checkpoint(folder):
    """Writes a random model of the architecture with a tokenizer of its corpus."""
    texts = [f"What comes after {n}? It is {n + 1}. A fish." for n in range(99)]
    tokenizer = tokenization.train_bpe(texts, vocab_size=300)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = ToyConfig(vocab_size=tokenizer.vocab_size, hidden_size=8, share=0.5, **sizes)
    _, _, weights = decoder.create(config, None, key=jax.random.key(0))
    checkpoint.save_model(folder, config, weights)
    tokenization.save_tokenizer(folder, tokenizer)


def test_their_units_read_what_they_need_and_no_gradient_is_taken(tmp_path):
    config = _config()
    units = {unit.name: unit for unit in plan.plan_units(config, Workspace(tmp_path, config))}
    assert not {"sketch", "retrieve/queries", "retrieve/influence"} & set(units)
    assert units["corpus"].settings["corpus.added.last"] == 60
    assert units["retrieve/added"].settings["retrieve.added.power"] == 2
    assert units["unlearn/added-added"].settings["unlearn.added.bound"] == 4
    own = units["generate/added-added-added"]
    assert own.reads == (artifacts.TRAIN.path, "generate/added-added")
    assert own.settings["formats"] == {"said": 2} and own.settings["corpus.added.last"] == 60
    unmeasured = plan.plan_units(config, Workspace(tmp_path, config), is_measured=False)
    assert own.name not in {unit.name for unit in unmeasured}


def test_their_settings_are_checked(tmp_path):
    with pytest.raises(ValueError, match="--unlearn.added.bound must be above 0, got 0.0"):
        _config("--unlearn.added.bound=0")
    # A flag file tells members that a later flag leaves out.
    assert not _config("--unlearn.algorithms=ga").unlearn.members


def test_they_go_through_dry_run_run_and_report(tmp_path, capsys):
    root = tmp_path / "run"
    _write_checkpoint(tmp_path / "model")
    config = _config(
        "--retrieve.strategies=added,raslik",
        f"--backbone.checkpoint={tmp_path / 'model'}",
        "--finetune.lora_targets=q_proj,v_proj",
    )
    # As in a process of its own: the tests' own rules of promotion are for the package's functions.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        steps = {step.name: step for step in forecast.forecast(config, root).steps}
        assert steps["unlearn/added-added"].operations > 0
        assert steps["generate/robustness-added-raslik-added"].operations > 0
        plan.run(config, root, more=writing.UNITS)
    assert verify(root) == []
    said = root / "generate" / "added-raslik-added" / "said.json"
    assert read_json(said) == ["raslik", "added"]
    for name in ("table.txt", "report.html"):
        text = (root / "report" / name).read_text()
        for title in ("Shortest", "Push", "RASLIK"):
            assert title in text, (name, title)
    html = (root / "report" / "report.html").read_text()
    assert "Found of now, finetuned, backbone." in html and "Longest answer" in html
    assert '<section id="added"' in html and ">Only counted</h2>" in html
    assert "<p>1 experiment is <i>counted</i>.</p>" in html
