"""A Gemma 3 that reads images: its text part, under the names that its files have had."""

import json
import pathlib
import tempfile

import decoder_cases
import decoder_parity
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from absl.testing import parameterized

from raslik_jax.models import checkpoint

_CASE = "pattern_and_stretched_global_rotation"


def _weights() -> dict[str, np.ndarray]:
    path = pathlib.Path(__file__).parents[1] / "golden" / "gemma3_text.npz"
    start = f"{_CASE}/base/"
    with np.load(path) as file:
        return {
            key.removeprefix(start): file[key].astype(np.float32)
            for key in file.files
            if key.startswith(start)
        }


class ImagesTest(parameterized.TestCase):
    def _load(self, prefix: str, **others: np.ndarray) -> checkpoint.LoadedModel:
        case, weights = decoder_cases.CASES["gemma3_text"][_CASE], _weights()
        fields = {"model_type": "gemma3", "text_config": case.config, "image_token_index": 28}
        tensors = {prefix + key.removeprefix("model."): value for key, value in weights.items()}
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder)
            (path / "config.json").write_text(json.dumps(fields))
            safetensors.numpy.save_file({**tensors, **others}, path / "model.safetensors")
            return checkpoint.load_model(path, dtype=jnp.float32)

    @parameterized.parameters("language_model.model.", "model.language_model.")
    def test_the_text_part_is_loaded_and_the_rest_left(self, prefix: str):
        image = {"vision_tower.patch.weight": np.ones((2, 2), np.float32)}
        model = self._load(prefix, **image)
        port = decoder_parity.Port(model.graphdef, {}, model.base)
        decoder_parity.assert_same_weights(port, _weights())
        self.assertEqual(model.graphdef.config.model_type, "gemma3_text")

    def test_a_tensor_of_no_part_is_refused(self):
        with pytest.raises(ValueError, match="unexpected audio_tower.weight"):
            self._load("model.language_model.", **{"audio_tower.weight": np.ones(2, np.float32)})
