"""A Gemma 3 that reads images: its text part, under the names that its files have had."""

import json
import pathlib

import decoder_cases
import decoder_parity
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from absl.testing import parameterized
from folders import FolderTest

from raslik_jax.models import adapters, checkpoint

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


class ImagesTest(FolderTest):
    def _load(self, prefix: str, **others: np.ndarray) -> checkpoint.LoadedModel:
        case, weights = decoder_cases.CASES["gemma3_text"][_CASE], _weights()
        fields = {"model_type": "gemma3", "text_config": case.config, "image_token_index": 28}
        tensors = {prefix + key.removeprefix("model."): value for key, value in weights.items()}
        self.write_file("config.json", json.dumps(fields))
        safetensors.numpy.save_file({**tensors, **others}, self.folder / "model.safetensors")
        return checkpoint.load_model(self.folder, dtype=jnp.float32)

    @parameterized.parameters("language_model.model.", "model.language_model.")
    def test_the_text_part_is_loaded_and_the_rest_left(self, prefix: str):
        image = {"vision_tower.patch.weight": np.ones((2, 2), np.float32)}
        model = self._load(prefix, **image)
        port = decoder_parity.Port(model.graphdef, {}, model.base)
        decoder_parity.assert_same_weights(port, _weights())
        config = model.graphdef.config
        self.assertEqual(config.model_type, "gemma3")
        # Written as a whole it is a text model.
        checkpoint.save_model(self.folder / "whole", config, model.base)
        again = checkpoint.load_model(self.folder / "whole", dtype=jnp.float32)
        self.assertEqual(again.graphdef.config, config.text_part)
        self.assertEqual(again.graphdef.config.model_type, "gemma3_text")
        port = decoder_parity.Port(again.graphdef, {}, again.base)
        decoder_parity.assert_same_weights(port, _weights())

    @parameterized.parameters(
        ("base_model.model.model.language_model.layers.", ["q_proj", "up_proj"]),
        ("base_model.model.language_model.model.layers.", ["q_proj", "up_proj"]),
        ("base_model.model.model.layers.", ["q_proj", "up_proj"]),
        (
            "base_model.model.model.language_model.layers.",
            r"model\.language_model\.layers\.\d+\.(self_attn\.q_proj|mlp\.up_proj)",
        ),
    )
    def test_an_adapter_is_of_the_model_with_its_other_parts(self, stem, targets):
        """As peft finds modules: by what their names end in, or a pattern of the whole name."""
        config = self._load("model.language_model.").graphdef.config
        modules = decoder_cases.CASES["gemma3_text"][_CASE].config
        hidden, heads = modules["hidden_size"], modules["num_attention_heads"]
        shapes = {
            "self_attn.q_proj": (heads * config.head_width, hidden),
            "mlp.up_proj": (modules["intermediate_size"], hidden),
        }
        tensors = {}
        for layer in range(config.num_hidden_layers):
            for name, (out, inner) in shapes.items():
                for side, shape in (("A", (2, inner)), ("B", (out, 2))):
                    value = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + layer
                    tensors[f"{stem}{layer}.{name}.lora_{side}.weight"] = value
        folder = self.folder / "adapter"
        folder.mkdir()
        fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": targets}
        (folder / "adapter_config.json").write_text(json.dumps(fields))
        safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors")
        settings = adapters.read_adapter_config(folder, config)
        lora = adapters.load_adapter(folder, config, lora_config=settings)
        # Training on text gives the other parts no gradient: B stays 0.
        image = (
            "base_model.model.model.vision_tower.encoder.layers.0.self_attn.q_proj.lora_{}.weight"
        )
        others = {image.format(side): np.ones((2, 2), np.float32) for side in "AB"}
        weights = folder / "adapter_model.safetensors"
        safetensors.numpy.save_file({**tensors, **others}, weights)
        with pytest.raises(ValueError, match="unexpected .*vision_tower.*: merge"):
            adapters.load_adapter(folder, config)
        others[image.format("B")][:] = 0
        safetensors.numpy.save_file({**tensors, **others}, weights)
        jax.tree.map(np.testing.assert_array_equal, adapters.load_adapter(folder, config), lora)
        adapters.save_adapter(folder / "out", lora, settings, config)
        found = safetensors.numpy.load_file(folder / "out" / "adapter_model.safetensors")
        written = json.loads((folder / "out" / "adapter_config.json").read_text())
        self.assertEqual(adapters.read_adapter_config(folder / "out", config), settings)
        start = "base_model.model.model.language_model.layers."
        self.assertEqual({key.replace(stem, start) for key in tensors}, set(found))
        for key, value in tensors.items():
            np.testing.assert_array_equal(found[key.replace(stem, start)], value)
        # Whole names, for the part that reads images has a q_proj too.
        depth = range(config.num_hidden_layers)
        names = [f"model.language_model.layers.{n}.{name}" for n in depth for name in shapes]
        self.assertEqual(written["target_modules"], sorted(names))

    def test_a_tensor_of_no_part_is_refused(self):
        with pytest.raises(ValueError, match="unexpected audio_tower.weight"):
            self._load("model.language_model.", **{"audio_tower.weight": np.ones(2, np.float32)})
