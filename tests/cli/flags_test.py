"""Every flag file: the paper's settings, the published figures, and what a dry run says of it."""

import contextlib
import csv
import json
import pathlib
import re
import tempfile

import jax
import numpy as np
import pytest
import tiny
from absl import flags
from absl.testing import absltest, parameterized

from raslik_jax.cli import setting_flags
from raslik_jax.config import STAGES, Config, config_from_json, to_json
from raslik_jax.data.alpaca_lengths import load_alpaca_lengths
from raslik_jax.models import presets
from raslik_jax.report import writing
from raslik_jax.report.names import kernel_name
from raslik_jax.run import forecast
from raslik_jax.run import units as units_lib
from raslik_jax.run.gpus import Device
from raslik_jax.run.plan import plan_units
from raslik_jax.run.workspace import Workspace

pytestmark = pytest.mark.usefixtures("paper_corpora")
_REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
_FLAGS = _REPOSITORY / "experiments" / "flags"
_FILES = sorted(path.name.removesuffix(".flags") for path in _FLAGS.glob("*.flags"))
_PAPER = [name for name in _FILES if re.search("olmo2|pythia", name)]

_WITH_PRESET = [f"howdy_olmo2_7b parts/{preset}" for preset in ("paper", "released", "robust")]


def _read(name):
    """Returns the settings and stages of flag files, as run.py reads them."""
    values = flags.FlagValues()
    setting_flags.define(Config(), values)
    flags.DEFINE_list("stages", list(STAGES), "", flag_values=values)
    with contextlib.chdir(_REPOSITORY):
        values(["run.py", *(f"--flagfile={_FLAGS / file}.flags" for file in name.split())])
    return {"config": to_json(setting_flags.read(Config(), values)), "stages": values.stages}


# Table "Fine-tuning configurations", column by column.
_MODELS = json.loads((_REPOSITORY / "tests/fixtures/paper_settings.json").read_text())
# By a prototype.
_H200 = Device("NVIDIA H200", 0, 3.0e12, 475e12)
# Rows trained on; forget and retain set. Queries are held out of Howdy's 57,002.
_SIZES = {
    "howdy": (56_474, 5_000, 5_000, 2_000),
    "virtual": (22_000, 2_000, 2_000, 2_000),
    "tofu": (26_000, 4_000, 4_000, 2_000),
}
_PARAMS = {"olmo2_7b": 8_388_608, "pythia_2.8b": 20_971_520, "olmo2_13b": 13_107_200}
# By hand: weights of the linear layers; of embedding or head.
_WEIGHTS = {
    "olmo2_7b": (32 * (4 * 4096**2 + 3 * 4096 * 11008), 4096 * 100352),
    "pythia_2.8b": (32 * 12 * 2560**2, 2560 * 50304),
    "olmo2_13b": (40 * (4 * 5120**2 + 3 * 5120 * 13824), 5120 * 100352),
}
# Bytes per weight: int8 1, nf4 with double quantization 1/2 + 1/64 + 4/(64 * 256).
_BYTES = {"olmo2_7b": 1.0, "olmo2_13b": 1.0, "pythia_2.8b": 0.5 + 1 / 64 + 4 / (64 * 256)}


def _model(name):
    return next(model for model in _MODELS if model in name)


def _dataset(name):
    return next((dataset for dataset in _SIZES if dataset in name), "howdy")


class FlagFilesTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.read = {name: _read(name) for name in (*_FILES, *_WITH_PRESET)}
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.forecasts = {}

    def config(self, name, **changed):
        value = json.loads(json.dumps(self.read[name]["config"]))
        for stage, fields in changed.items():
            value[stage] |= fields
        return config_from_json(value)

    def forecast(self, name, stages=("corpus",), *, compiles=False, **changed):
        """The forecast of stages; that of the corpus alone traces nothing."""
        key = name, stages, compiles, json.dumps(changed)
        if key not in self.forecasts:
            with jax.numpy_dtype_promotion("standard"):  # as Optax needs it
                self.forecasts[key] = forecast.forecast(
                    self.config(name, **changed),
                    pathlib.Path(self.folder.name) / "nowhere",
                    stages=stages,
                    compiles=compiles,
                )
        return self.forecasts[key]

    def test_the_product_of_the_paper_is_there(self):
        wanted = {f"{d}_{m}" for d in _SIZES for m in ("olmo2_7b", "pythia_2.8b")}
        wanted |= {"howdy_olmo2_13b", "howdy_pythia_2.8b_cr"}
        self.assertLessEqual(wanted, set(_PAPER))

    @parameterized.parameters(*_PAPER)
    def test_settings_are_those_of_the_paper(self, name):
        config = self.read[name]["config"]
        for stage, fields in _MODELS[_model(name)].items():
            self.assertEqual({key: config[stage][key] for key in fields}, fields)
        unlearn = config["unlearn"]
        self.assertEqual(config["corpus"]["max_len"], 512)
        self.assertEqual(config["sketch"]["size"], 65_536)
        # "No 4-bit quantization is applied" to the cache of gradients.
        base = config["sketch"]["base_format"]
        self.assertEqual(base, "plain" if "pythia" in name else "same")
        self.assertEqual(
            [
                unlearn[name]["learning_rate"]
                for name in ("ga_gdr", "ga_klr")
                if name in unlearn["algorithms"]
            ],
            [1e-5, 3e-5][: len(unlearn["algorithms"])],
        )
        self.assertEqual((unlearn["batch_size"], unlearn["micro_batch_size"]), (8, 2))
        self.assertTrue(unlearn["remat"])
        self.assertEqual(
            unlearn["algorithms"], ["ga_gdr"] if "13b" in name else ["ga_gdr", "ga_klr"]
        )
        strategies = {"random", "embedding", "bm25", "oracle", "raslik_f", "raslik"}
        if name.endswith("_cr"):
            strategies = {"oracle", "random", "raslik"}
            strategies |= {f"cr_{share}" for share in (25, 35, 45, 50, 62, 75)}
        self.assertEqual(set(config["retrieve"]["strategies"]), strategies)

    @parameterized.parameters(*_PAPER)
    def test_its_gradient_is_the_one_that_the_paper_words(self, name):
        self.assertEqual(kernel_name(self.read[name]["config"]), "")

    def test_a_preset_after_an_experiment_decides_the_gradient(self):
        names = {
            preset: kernel_name(self.read[f"howdy_olmo2_7b parts/{preset}"]["config"])
            for preset in ("paper", "released", "robust")
        }
        self.assertEqual(
            names,
            {
                "paper": "",
                "released": "unshifted loss, each tensor normalized",
                "robust": "unshifted loss, tokens of prompt and response, centered",
            },
        )
        # What has measured best is what runs where nothing is said.
        self.assertEqual(kernel_name(to_json(Config())), names["robust"])

    @parameterized.parameters(*_PAPER)
    def test_the_published_figures_stand_in_it(self, name):
        text = (_FLAGS / f"{name}.flags").read_text()
        self.assertIn("Published", text)
        table = "3" if name.endswith("_cr") else None
        model = {"olmo2_7b": "OLMo-2-1124-7B", "pythia_2.8b": "Pythia-2.8B"}.get(
            _model(name), "OLMo-2-1124-13B-Instruct"
        )
        if re.search("before|efficiency|boundary", name):
            return
        with open(_REPOSITORY / "third_party" / "raslik_paper" / "tables.csv") as file:
            rows = [
                row
                for row in csv.DictReader(file)
                if row["model"] == model
                and row["dataset"].lower().startswith(_dataset(name))
                and (row["table"] == table if table else row["table"] != "3")
            ]
        self.assertNotEmpty(rows)
        for row in rows:
            numbers = [row[key] for key in ("forget", "retain", "d_mah", "non_sf") if row[key]]
            self.assertRegex(text, r"# +\S+ +" + " +".join(map(re.escape, numbers)))

    @parameterized.parameters(*_PAPER)
    def test_sizes_by_hand(self, name):
        found, model = self.forecast(name), _model(name)
        self.assertEqual(tuple(found.run.sizes), _SIZES[_dataset(name)])
        self.assertEqual(found.run.num_params, _PARAMS[model])
        self.assertEqual(found.run.index_bytes, found.run.sizes.train * 65_536 * 4)
        self.assertEqual(found.run.row_bytes, 2**18)
        layers, head = _WEIGHTS[model]
        self.assertAlmostEqual(found.run.num_weights / (layers + 2 * head), 1, delta=2e-3)
        stored = _BYTES[model] * layers + 2 * 2 * head
        self.assertAlmostEqual(found.run.base_bytes / stored, 1, delta=2e-3)

    @pytest.mark.heavy
    def test_operations_by_hand(self):
        found = self.forecast("howdy_olmo2_7b", ("finetune", "sketch"))
        layers, head = _WEIGHTS["olmo2_7b"]
        steps = {step.name: step for step in found.steps}
        rows, epochs = found.run.sizes.train, 3
        # Every row is 1,024 tokens: forward, backward, and the layers forward again; beside them
        # the attention, whose two products of 1,024 x 4,096 a token run as often, and the adapter.
        tokens = epochs * -(-rows // 8) * 8 * 1024
        attention = 32 * 4 * 1024 * 4096
        expected = tokens * (6 * layers + 4 * head + 4 * attention)
        # The rule leaves out a quarter of the second forward pass, as most models do.
        self.assertBetween(steps["finetune"].operations / expected, 0.93, 1.03)
        least = 4 * layers * rows * found.run.length_N.mean()
        self.assertBetween(steps["sketch"].operations / least, 1.0, 1.3)

    def test_the_discriminator_by_hand(self):
        found = self.forecast("howdy_pythia_2.8b", ("references",))
        (step,) = (step for step in found.steps if step.name == "references/classifier")
        # RoBERTa base: 12 layers of 12 x 768^2 weights, three epochs over nine tenths of the rows,
        # padded to the longest of sixteen.
        _, response_N = load_alpaca_lengths(max_len=512)
        tokens = 3 * 0.9 * found.run.sizes.train * np.minimum(response_N, 256).mean()
        self.assertBetween(step.operations / (6 * 84_934_656 * tokens), 1, 5)
        self.assertAlmostEqual(step.disk_bytes / (4 * 124.6e6), 1, delta=0.02)

    def test_the_index_of_the_papers_own_count_of_rows(self):
        found = self.forecast("howdy_olmo2_7b", corpus={"num_train": 57_002})
        self.assertEqual(found.run.index_bytes, 14_942_732_288)
        halved = self.forecast(
            "howdy_olmo2_7b", corpus={"num_train": 57_002}, sketch={"dtype": "bfloat16"}
        )
        self.assertEqual(halved.run.index_bytes, 7_471_366_144)

    @parameterized.parameters(*_PAPER)
    @pytest.mark.heavy
    def test_its_time_and_memory_are_those_of_a_dry_run(self, name):
        text = (_FLAGS / f"{name}.flags").read_text()
        said = re.search(
            r"# One H200, by arithmetic and not measured: ([\d.]+) h, ([\d.]+) GB of device "
            r"memory, ([\d.]+) GB on disk",
            text,
        )
        self.assertIsNotNone(said)
        found = self.forecast(name, tuple(self.read[name]["stages"]))
        hours = sum(step.seconds(_H200) for step in found.steps) / 3600
        # Decoding takes the most, alike in all runs of a model.
        same = self.forecast(f"howdy_{_model(name)}", ("references",), compiles=True)
        device = max(step.device_bytes for step in same.steps) / 1e9
        disk = sum(step.disk_bytes for step in found.steps) / 1e9
        self.assertLess(device, 141)
        for value, written in zip((hours, device, disk), said.groups(), strict=True):
            rounding = 0.05 if "." in written else 0.5
            self.assertAlmostEqual(value, float(written), delta=rounding + 0.01 * value)

    def test_what_is_done_is_marked_and_nothing_is_written(self):
        config = self.config("demo")
        root = pathlib.Path(self.folder.name) / "begun"
        units = plan_units(config, Workspace(root, config), more=writing.UNITS)
        root.mkdir()
        units_lib.run_units(root, units[:1])
        before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
        found = forecast.forecast(config, root, stages=("corpus", "retrieve"))
        self.assertEqual([step.name for step in found.steps if step.is_done], ["corpus"])
        self.assertEqual(before, {path: path.stat().st_mtime_ns for path in root.rglob("*")})
        self.assertLen(found.steps, sum(u.stage in ("corpus", "retrieve") for u in units))

    @parameterized.parameters(
        ("EleutherAI/pythia-1.4b-deduped", "pythia-1.4b"),
        ("allenai/OLMo-2-0425-1B", "olmo2-1b"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m"),
        ("meta-llama/Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("google/gemma-3-1b-pt", "gemma-3-1b"),
        ("microsoft/Phi-3-mini-4k-instruct", "phi-3-mini-4k"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "qwen2.5-7b"),
        ("Qwen/Qwen3-4B-Base", "qwen3-4b"),
        ("EleutherAI/pythia-3b", None),
        ("allenai/OLMo-7B", None),
    )
    def test_hub_names_have_their_preset(self, name, preset):
        self.assertEqual(presets.preset_of(name), preset)

    def test_an_unknown_checkpoint_is_named(self):
        config = self.config("demo", backbone={"checkpoint": "somebody/model-9b"})
        with self.assertRaisesRegex(ValueError, "got 'somebody/model-9b'"):
            forecast.forecast(config, pathlib.Path(self.folder.name))


class DryRunTest(absltest.TestCase):
    def test_prints_the_plan_and_leaves_nothing(self):
        with tempfile.TemporaryDirectory() as folder:
            workdir = pathlib.Path(folder) / "run"
            done = tiny.run_script(
                "experiments/run.py",
                "--flagfile=experiments/flags/howdy_olmo2_7b.flags",
                f"--workdir={workdir}",
                "--dry_run",
                "--stages=corpus,finetune",
                "--nocompile",
            )
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertFalse(workdir.exists())
        for text in ("8,388,608", "56,474", "14.8 GB", "128 to 1", "0 of 1", "operations and"):
            self.assertIn(text, done.stdout)
