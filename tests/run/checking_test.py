"""What is refused before a run works: settings and corpora that its later stages cannot take."""

import contextlib
import io
import json
import pathlib
import shutil
from typing import Any
from unittest import mock

import jax
import pytest
from absl.testing import absltest
from folders import FolderTest
from jax.sharding import AbstractMesh
from snapshots import refused

from raslik_jax.base.settings import replaced
from raslik_jax.config import STAGES, Config
from raslik_jax.data import toy_model
from raslik_jax.data.examples import QUERY_SETS, Corpus, Example
from raslik_jax.data.tokens import encoding, tokenization
from raslik_jax.parallel import meshes
from raslik_jax.report import writing
from raslik_jax.retrieve.strategies import STRATEGIES
from raslik_jax.run import checking, plan
from raslik_jax.run import units as units_lib
from raslik_jax.run.workspace import Workspace


def _rows(count, *, targets=0, prefix="row", label=True, instruction="boil a kettle"):
    return tuple(
        Example(
            example_id=f"{prefix}{i}",
            instruction=instruction,
            input="",
            output="steam",
            is_target=(i < targets) if label else None,
        )
        for i in range(count)
    )


_CORPUS = Corpus(
    backbone=_rows(4, prefix="backbone"),
    train=_rows(40, targets=8),
    queries={name: _rows(2, prefix=name, label=False) for name in QUERY_SETS},
)
_CONFIG = replaced(
    Config(),
    {"corpus.template": "brief", "corpus.max_len": 64, "references.max_new_tokens": 8},
)
_SMALL = replaced(
    _CONFIG, {"corpus.num_train": 60, "corpus.num_targets": 8, "corpus.vocab_size": 400}
)
_SMALL_MODEL = {
    "backbone.hidden_size": 16,
    "backbone.num_hidden_layers": 1,
    "backbone.num_attention_heads": 2,
}


class CheckCorpusTest(FolderTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.tokenizer = tokenization.train_bpe(["boil a kettle", "steam"], vocab_size=300)

    def check(self, found=_CORPUS, values=(), *, stages=STAGES):
        config = replaced(_CONFIG, dict(values))
        whole = encoding.encode(found.train, self.tokenizer, template=config.corpus.template)
        shapes = checking.shapes_of(config) if config.backbone.checkpoint else None
        checking.check_corpus(config, found, whole, stages=stages, shapes=shapes)

    def test_a_sound_corpus_passes(self):
        self.check()
        self.check(_CORPUS._replace(train=_rows(40, label=False)), stages=("finetune",))

    def test_no_strategy_is_refused_for_made_up_scores(self):
        names = tuple(name for name, record in STRATEGIES.items() if not record.brings_sets)
        for size in (1, 4, 8):
            self.check(values={"retrieve.strategies": names, "retrieve.num_forget": size})

    def test_rows_longer_than_the_models_positions(self):
        base = str(toy_model.model_folder() / "base")  # of 192 positions
        values = {"backbone.checkpoint": base, "corpus.max_len": 250}
        found = _CORPUS._replace(train=(_CORPUS.train[0]._replace(output="steam " * 300),))
        with refused():
            self.check(found, values, stages=("sketch",))
        self.check(found, values | {"corpus.max_len": 192}, stages=("sketch",))
        self.check(_CORPUS, values, stages=("sketch",))

    def test_rows_longer_than_a_batch_are_refused_before_a_model_is_read(self):
        found = _CORPUS._replace(train=(_CORPUS.train[0]._replace(output="steam " * 300),))
        values = {"corpus.max_len": 250, "sketch.batch_tokens": 248}
        with self.assertRaisesRegex(
            ValueError, "batch_tokens must be at least 256 .*, got 248: raise"
        ):
            self.check(found, values, stages=("sketch",))
        self.check(found, values, stages=("finetune",))
        self.check(found, values | {"corpus.max_len": 248}, stages=("sketch",))

    def test_stages_that_train_on_more_tokens_than_the_models_positions(self):
        base = str(toy_model.model_folder() / "base")  # of 192 positions
        long = _CORPUS.train[0]._replace(output="steam " * 300, example_id="long")
        found = _CORPUS._replace(train=(*_CORPUS.train, long))
        for stage in ("finetune", "unlearn"):
            values = {"backbone.checkpoint": base, f"{stage}.max_len": 250}
            with refused():
                self.check(found, values, stages=(stage,))
            self.check(found, values, stages=("sketch",))
            self.check(_CORPUS, values, stages=(stage,))

    def test_strategies_that_need_labels_are_named_together(self):
        unlabeled = _CORPUS._replace(train=_rows(40, label=False))
        need = ("random", "oracle", "raslik_f", "raslik", "bm25")
        with refused():
            self.check(unlabeled, {"retrieve.num_forget": 4, "retrieve.strategies": need})
        free = ("random", "raslik_f", "raslik", "bm25")
        self.check(unlabeled, {"retrieve.num_forget": 4, "retrieve.strategies": free})
        with refused():
            self.check(unlabeled, {"retrieve.strategies": ("raslik",)})

    def test_sets_larger_than_what_they_are_drawn_from(self):
        for forget, retain in ((30, 20), (9, 0), (4, 34)):
            with refused():
                self.check(values={"retrieve.num_forget": forget, "retrieve.num_retain": retain})

    def test_rows_of_a_file_are_named_by_what_they_say(self):
        rows = [row._replace(output=f"steam {n}") for n, row in enumerate(_CORPUS.train)]
        corpus = _CORPUS._replace(train=tuple(rows))
        path = self.folder / "mine.jsonl"
        own = {"retrieve.strategies": ("given",), "retrieve.given.forget_file": str(path)}
        path.write_text('{"instruction": "boil a kettle", "output": "steam 3"}')
        self.check(corpus, own)
        path.write_text('{"instruction": "boil a kettle", "output": "water"}')
        with self.assertRaisesRegex(ValueError, "by id, place or text, .* line 1 of .* is not: "):
            self.check(corpus, own)
        # A prompt that fills max_len leaves no answer to forget.
        long = _rows(1, prefix="long", instruction="q" * 80)
        path.write_text('{"id": "long0"}')
        with refused():
            self.check(corpus._replace(train=corpus.train + long), own)

    def test_a_corpus_of_targets_alone_has_nothing_to_retain(self):
        targets = _CORPUS._replace(train=_rows(40, targets=40))
        with refused():
            self.check(targets, {"retrieve.num_forget": 4})
        self.check(targets, {"retrieve.num_forget": 4, "retrieve.strategies": ("raslik",)})

    def test_lengths_without_room_for_an_answer(self):
        long = _rows(1, targets=1, prefix="long", instruction="q" * 20)
        corpus = _CORPUS._replace(train=_CORPUS.train[1:] + long)
        self.check(corpus)
        short = {"unlearn.max_len": 48}
        with refused():
            self.check(corpus, short)
        self.check(corpus, short, stages=("finetune", "retrieve"))
        # Of the others it is not known yet whether any is chosen.
        others = _rows(1, targets=0, prefix="long", instruction="q" * 20)
        self.check(_CORPUS._replace(train=_CORPUS.train + others), short)
        with refused():
            self.check(values={"finetune.max_len": 8})

    def test_training_that_learns_nothing_by_construction(self):
        values = {"finetune.epochs": 1, "finetune.batch_size": 40}
        with refused():
            self.check(values=values)
        self.check(values=values | {"finetune.warmup": 0.0})
        with refused():
            self.check(_CORPUS._replace(backbone=()))

    def test_problems_of_all_kinds_come_in_one_error(self):
        values = {"finetune.max_len": 8, "retrieve.num_forget": 30}
        with refused():
            self.check(_CORPUS._replace(backbone=()), values)

    def test_a_run_is_measured_where_any_of_its_queries_are_there(self):
        self.assertTrue(checking.is_measurable(_CONFIG, _CORPUS))
        queries = _CORPUS.queries | {"test_normal": ()}
        self.assertTrue(checking.is_measurable(_CONFIG, _CORPUS._replace(queries=queries)))
        queries |= {"test_target": ()}
        self.assertFalse(checking.is_measurable(_CONFIG, _CORPUS._replace(queries=queries)))


class RunTest(FolderTest):
    """The order of a run: corpus, checks, and only then the rest."""

    def run_stages(self, config, stages=STAGES):
        """Returns the units that would run after a corpus that is really made."""
        folder, later = self.folder / "-".join(stages), []

        def run_units(root, units, *, stages, on_start=None, **options):
            if stages == ("corpus",):
                units_lib.run_units(root, units, stages=stages, **options)
            else:
                later.extend(unit.name for unit in units if unit.stage in stages)
                on_start()

        started = []
        with mock.patch.object(plan, "run_units", run_units):
            with contextlib.redirect_stdout(io.StringIO()) as said:
                try:
                    plan.run(config, folder, stages=stages, on_start=lambda: started.append(1))
                except ValueError as error:
                    self.assertEqual((later, started), ([], []))
                    return str(error), said.getvalue()
        self.assertEqual(started, [1])
        return later, said.getvalue()

    def test_without_test_queries_all_but_measuring_runs(self):
        config = replaced(_SMALL, {"corpus.num_backbone": 30, "corpus.num_test": 0})
        stages = tuple(stage for stage in STAGES if stage != "report")
        found, said = self.run_stages(config, stages)
        self.assertIn("nothing is measured", said)
        kinds = {name.split("-")[0].split("/")[0] for name in found}
        self.assertEqual(
            kinds, {"backbone", "finetune", "references", "sketch", "retrieve", "unlearn"}
        )
        self.assertNotIn("references/evaluation", found)
        found, said = self.run_stages(config, ("corpus", "retrieve"))
        self.assertNotIn("nothing is measured", said)

    def test_rows_longer_than_the_positions_of_a_model_from_the_hub(self):
        folder = self.folder
        found = folder / "models--me--tiny" / "snapshots" / "abc"
        shutil.copytree(toy_model.model_folder() / "base", found)
        (found.parents[1] / "refs").mkdir()
        (found.parents[1] / "refs" / "main").write_text("abc")
        row = {"instruction": "boil a kettle", "output": "steam " * 300, "split": "retrieval"}
        (folder / "rows.jsonl").write_text(f"{json.dumps(row)}\n")
        names = ("corpus.records.train_file", "corpus.records.queries_file")
        values = dict.fromkeys(names, str(folder / "rows.jsonl"))
        values |= {"corpus.dataset": "records", "corpus.max_len": 250}
        config = replaced(Config(), values | {"backbone.checkpoint": "me/tiny"})
        with mock.patch("huggingface_hub.constants.HF_HUB_CACHE", str(folder)):
            error, _ = self.run_stages(config, ("corpus", "sketch"))
        self.assertRegex(error, "--corpus.max_len must be at most 192, the positions of the model")


def _units(config: Config, *names: str) -> list[units_lib.Unit]:
    run = Workspace(pathlib.Path("/none"), config)
    planned = plan.plan_units(config, run, more=writing.UNITS)
    return [unit for unit in planned if unit.name in names]


class CheckInputsTest(absltest.TestCase):
    def test_what_a_late_unit_reads_is_looked_for_at_the_start(self):
        absent = "/no/such/place"
        marked = replaced(Config(), {"evaluate.marker_words": absent})
        based = {"backbone.checkpoint": absent, "finetune.epochs": 0}
        for config, unit in ((marked, "report"), (replaced(Config(), based), "sketch")):
            with self.subTest(unit=unit), self.assertRaisesRegex(ValueError, absent):
                checking.check_inputs(config, making=_units(config, unit))

    def test_a_layout_that_does_not_fit_is_refused_before_a_stage_reads_the_model(self):
        config = replaced(Config(), _SMALL_MODEL)
        for unit in ("finetune", "sketch"):
            making = _units(config, unit)
            with jax.sharding.use_abstract_mesh(AbstractMesh((7,), (meshes.DATA,))):
                checking.check_inputs(config, making=making, layout="auto")
                with refused():
                    checking.check_inputs(config, making=making, layout="sharded")
            with mock.patch.object(meshes, "device_memory", lambda: 1000), refused():
                checking.check_inputs(config, making=making)

    def test_the_base_of_the_sketch_is_looked_at_in_its_own_format(self):
        base = str(toy_model.model_folder() / "base")  # 1.2 million weights
        packed = {"checkpoint": base, "format": "nf4", "double_quant": True}
        packed = {f"backbone.{name}": value for name, value in packed.items()}
        same = replaced(Config(), packed | {"sketch.base_format": "same"})
        plain = replaced(same, {"sketch.base_format": "plain"})
        with mock.patch.object(meshes, "device_memory", lambda: 2_500_000):
            checking.check_inputs(same, making=_units(same, "sketch"))
            with refused():
                checking.check_inputs(plain, making=_units(plain, "sketch"))

    def test_a_model_that_nothing_reads_again_may_be_gone(self):
        config = replaced(Config(), {"backbone.checkpoint": "/no/such/place"})
        checking.check_inputs(config, making=_units(config, "evaluate", "report"))
        with refused():
            checking.check_inputs(config, making=_units(config, "finetune"))


class CheckModelTest(FolderTest):
    def test_an_adapter_on_layers_that_the_model_lacks(self):
        small = replaced(Config(), _SMALL_MODEL)
        checking.check_model(small)
        with refused():
            checking.check_model(replaced(small, {"finetune.lora_targets": ("q_proj",)}))

    def test_an_architecture_that_is_not_supported(self):
        config = '{"model_type": "mamba", "architectures": ["MambaForCausalLM"]}'
        self.write_file("config.json", config)
        with refused():
            checking.check_model(replaced(Config(), {"backbone.checkpoint": str(self.folder)}))


def test_a_model_that_is_trained_again_has_the_recipe_of_the_fine_tuning():
    given: dict[str, Any] = {"unlearn.algorithms": ("retrain",), "finetune.epochs": 2}
    same: dict[str, Any] = {"learning_rate": 1e-3, "batch_size": 16, "warmup": 0.03, "epochs": 2.0}
    same = {f"unlearn.retrain.{name}": value for name, value in same.items()}
    same |= {"unlearn.retrain.mean": "examples", "unlearn.retrain.seed": 7}
    assert not [*replaced(Config(), given | same).other_recipe()]
    config = replaced(Config(), given | same | {"unlearn.retrain.epochs": 3.0})
    with pytest.raises(ValueError, match="give --unlearn.retrain.epochs=2.0"):
        unit = mock.Mock(stage="unlearn", settings={})
        checking.check_inputs(config, making=[unit])
    mine = {"backbone.checkpoint": "base", "backbone.adapter": "mine", "finetune.epochs": 3}
    assert not [*replaced(Config(), given | mine).other_recipe()]


def test_a_retraining_has_its_own_batch_size():
    given = {"backbone.checkpoint": "base", "backbone.adapter": "mine"}
    config = replaced(Config(), {**given, "unlearn.algorithms": ("retrain",)})
    checking.check_mesh(config, 16, stages=("unlearn",))
    with pytest.raises(ValueError, match="batch_size must be at least the devices"):
        checking.check_mesh(replaced(Config(), given), 16, stages=("unlearn",))
