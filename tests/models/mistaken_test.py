"""Checkpoints that other programs quantized are refused by their config.json or their tensors."""

import json

import numpy as np
from absl.testing import parameterized
from checkpoint_cases import load, write_model
from folders import FolderTest

from raslik_jax.models import checkpoint, mistaken

_LINEAR = "gpt_neox.layers.0.attention.dense."
_BYTES = np.zeros((512, 1), np.uint8)


class QuantizedTest(FolderTest):
    @parameterized.parameters(
        ({"load_in_4bit": True, "quant_method": "bitsandbytes"},),
        ({"load_in_8bit": True, "load_in_4bit": False},),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128},),
        ({"quant_method": "awq", "w_bit": 4},),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]},),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"},),
        ({"group_size": 64, "bits": 4},),
        ("int8",),
    )
    def test_a_config_that_says_so_is_refused_with_the_way_out(self, given):
        for field in ("quantization_config", "compression_config", "quantization"):
            folder = write_model(self.folder / field, "gpt_neox", changes={field: given})
            for work in (checkpoint.read_config, checkpoint.check_weights):
                self.assert_refused(work, folder)

    @parameterized.parameters(
        (None,),
        ({},),
        ({"load_in_4bit": False, "load_in_8bit": False, "quant_method": "bitsandbytes"},),
    )
    def test_a_quantization_that_is_off_says_nothing(self, given):
        plain = checkpoint.read_config(write_model(self.folder / "plain", "gpt_neox"))
        changes = {"quantization_config": given}
        folder = write_model(self.folder / "model", "gpt_neox", changes=changes)
        self.assertEqual(checkpoint.read_config(folder), plain)

    @parameterized.parameters("quantize_config.json", "quant_config.json")
    def test_the_file_of_an_older_program_says_so_too(self, name):
        folder = write_model(self.folder / "model", "gpt_neox")
        (folder / name).write_text(json.dumps({"bits": 4}))
        self.assert_refused(checkpoint.read_config, folder)

    @parameterized.parameters(
        ({"weight": _BYTES, "weight.absmax": np.ones(8, np.float32)},),
        ({"weight": _BYTES, "weight.quant_state.bitsandbytes__nf4": _BYTES},),
        ({"weight": np.zeros((32, 32), np.int8), "SCB": np.ones(32, np.float32)},),
        ({"weight": None, "qweight": np.zeros((4, 32), np.int32)},),
        ({"weight": None, "weight_packed": np.zeros((32, 4), np.int32)},),
        ({"weight_scale_inv": np.ones((1, 1), np.float32)},),
        ({"scales": np.ones((32, 1), np.float32)},),
        ({"weight": np.zeros((32, 32), np.int8)},),
    )
    def test_tensors_that_show_it_are_refused_before_any_is_read(self, tensors):
        tensors = {_LINEAR + name: value for name, value in tensors.items()}
        folder = write_model(self.folder / "model", "gpt_neox", tensors=tensors)
        for work in (checkpoint.check_weights, load):
            self.assert_refused(work, folder)


class BaseTest(FolderTest):
    @parameterized.parameters(
        (None, "", False),
        ("main", "", False),
        ("step1000", "step1000", False),
        ("step1000", "", True),
        ("step1000", "step2000", True),
    )
    def test_an_adapter_of_another_revision_is_told(self, asked, revision, is_told):
        named = {"base_model_name_or_path": "owner/base", "revision": asked}
        (self.folder / "adapter_config.json").write_text(json.dumps(named))
        folder = write_model(self.folder / "model", "gpt_neox")
        for name, is_said in (("owner/base", is_told), (str(self.folder), False)):
            (self.folder / "model" / "config.json").write_text('{"_name_or_path": "owner/base"}')
            said = mistaken.describe_base(self.folder, folder, name, revision)
            self.assertEqual("trained on revision 'step1000'" in said, is_said)
            self.assertEqual(said != "", is_said)
