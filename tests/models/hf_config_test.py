import dataclasses
import json
import pathlib

import pytest
from absl.testing import parameterized

from raslik_jax.models import decoder, hf_config, presets
from raslik_jax.models.gemma2 import Gemma2Config
from raslik_jax.models.gemma3 import Gemma3Config, Gemma3TextConfig
from raslik_jax.models.gpt_neox import GPTNeoXConfig
from raslik_jax.models.llama import LlamaConfig
from raslik_jax.models.mistral import MistralConfig
from raslik_jax.models.olmo2 import Olmo2Config
from raslik_jax.models.phi3 import Phi3Config
from raslik_jax.models.qwen2 import Qwen2Config
from raslik_jax.models.qwen3 import Qwen3Config

_STORED = json.loads((pathlib.Path(__file__).parents[1] / "fixtures/hf_configs.json").read_text())
# Pythia as EleutherAI publishes it, and as transformers 5 writes the same model.
_PYTHIA_OLD, _PYTHIA_NEW = _STORED["pythia_old"], _STORED["pythia_new"]
_LLAMA, _LLAMA3, _YARN = (_STORED[name] for name in ("llama", "llama3_rotation", "yarn"))
_GEMMA, _PHI3, _LONG = (_STORED[name] for name in ("gemma", "phi3", "longrope"))


class ReadTest(parameterized.TestCase):
    def test_old_and_new_spellings_give_one_config(self):
        old, new = GPTNeoXConfig.from_hf(_PYTHIA_OLD), GPTNeoXConfig.from_hf(_PYTHIA_NEW)
        self.assertEqual(old, new)
        self.assertEqual(old.rope_parameters.partial_rotary_factor, 0.25)
        self.assertIsInstance(old.rope_parameters.rope_theta, float)

    def test_rope_scaling_reads_llama_3s_file(self):
        config = LlamaConfig.from_hf(
            {**_LLAMA, "rope_theta": 500000.0, "rope_scaling": _LLAMA3, "num_key_value_heads": 8}
            | {"eos_token_id": [128001, 128008], "pretraining_tp": 1, "mlp_bias": False}
        )
        self.assertEqual(config.rope_parameters.to_hf() | _LLAMA3, config.rope_parameters.to_hf())
        self.assertEqual(config.rope_parameters.rope_theta, 500000.0)
        self.assertEqual(config.eos_token_id, (128001, 128008))
        self.assertEqual((config.num_cached_heads, config.head_width), (8, 128))

    def test_fields_left_out_or_null_stand_for_hugging_faces_defaults(self):
        config = LlamaConfig.from_hf({**_LLAMA, "num_key_value_heads": None, "rope_scaling": None})
        self.assertEqual(config.num_cached_heads, 32)
        self.assertEqual(config.rope_parameters, hf_config.RopeParameters())
        self.assertEqual(config.rms_norm_eps, 1e-6)
        for base in (3580165449, 45.2e9):  # of Llama 3 for a million tokens
            far = LlamaConfig.from_hf({**_LLAMA, "rope_theta": base})
            self.assertEqual(far.rope_parameters.rope_theta, base)
        neox = GPTNeoXConfig.from_hf({k: _PYTHIA_OLD[k] for k in _LLAMA})
        self.assertEqual(neox.rope_parameters.partial_rotary_factor, 0.25)
        self.assertTrue(neox.use_parallel_residual)
        self.assertTrue(neox.attention_bias)

    @parameterized.parameters(
        GPTNeoXConfig.from_hf(_PYTHIA_NEW),
        LlamaConfig.from_hf({**_LLAMA, "eos_token_id": [1, 2], "head_dim": 64}),
        LlamaConfig.from_hf({**_LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}}),
        Olmo2Config.from_hf({**_LLAMA, "model_type": "olmo2", "rope_theta": 500000}),
        MistralConfig.from_hf({**_LLAMA, "model_type": "mistral"}),
        Qwen2Config.from_hf({**_LLAMA, "model_type": "qwen2", "rope_scaling": _YARN}),
        Qwen3Config.from_hf(
            {**_LLAMA, "layer_types": ["sliding_attention", "full_attention"]}
            | {"use_sliding_window": True}
        ),
        *presets.MODEL_PRESETS.values(),
    )
    def test_what_is_written_reads_back_as_the_same(self, config):
        self.assertEqual(type(config).from_hf(config.to_hf()), config)
        self.assertIs(decoder.ARCHITECTURES[config.to_hf()["model_type"]].config, type(config))


_SLIDING, _FULL = "sliding_attention", "full_attention"


class WindowTest(parameterized.TestCase):
    def test_a_window_that_is_switched_off_is_none(self):
        # As Qwen publishes it; Mistral has no switch.
        fields = {**_LLAMA, "sliding_window": 32768, "max_window_layers": 1, "use_mrope": False}
        config = Qwen2Config.from_hf({**fields, "model_type": "qwen2", "use_sliding_window": False})
        self.assertEqual(config.layer_windows, (None, None))
        self.assertEqual(
            MistralConfig.from_hf({**_LLAMA, "sliding_window": 7}).layer_windows, (7, 7)
        )
        self.assertEqual(
            MistralConfig.from_hf({**_LLAMA, "sliding_window": None}).layer_windows, (None, None)
        )

    def test_layer_types_outdo_the_count_of_full_layers(self):
        fields = {**_LLAMA, "sliding_window": 9, "max_window_layers": 1, "use_sliding_window": True}
        self.assertEqual(Qwen3Config.from_hf(fields).layer_windows, (None, 9))
        fields["layer_types"] = [_SLIDING, _FULL]
        self.assertEqual(Qwen3Config.from_hf(fields).layer_windows, (9, None))

    @parameterized.named_parameters(
        ("kinds", {"layer_types": [_FULL, "chunked"]}, "layer_types must name 2 layers.*chunked"),
        ("count", {"layer_types": [_FULL]}, "layer_types must name 2 layers"),
        ("no_window", {"layer_types": [_FULL, _SLIDING]}, "must have sliding_window"),
        ("ill_typed", {"layer_types": [1, 2]}, "layer_types .* must be str, got 1"),
        ("zero", {"sliding_window": 0, "use_sliding_window": True}, "sliding_window must be at"),
    )
    def test_windows_that_cannot_be(self, change: dict, message: str):
        with pytest.raises(ValueError, match=message):
            Qwen2Config.from_hf({**_LLAMA, **change})


class SpellingTest(parameterized.TestCase):
    def test_gemma_2_has_names_of_its_own(self):
        # As Google publishes it: two names for the activation, and for the window.
        fields = {**_GEMMA, "hidden_act": "gelu_pytorch_tanh", "sliding_window": 9}
        config = Gemma2Config.from_hf({**fields, "sliding_window_size": 9})
        self.assertEqual(config.hidden_act, "gelu_pytorch_tanh")
        self.assertEqual(config.layer_windows, (9, None))
        self.assertEqual(
            (config.attention_cap, config.logit_cap, config.attention_scale), (50.0, 30.0, 1 / 16)
        )
        self.assertEqual(config.to_hf()["hidden_activation"], "gelu_pytorch_tanh")
        with pytest.raises(ValueError, match="hidden_act as 'gelu' and, as hidden_activation"):
            Gemma2Config.from_hf({**fields, "hidden_act": "gelu"})
        with pytest.raises(ValueError, match="soft caps must be positive"):
            Gemma2Config.from_hf({**_GEMMA, "attn_logit_softcapping": 0.0})

    def test_gemma_3_has_a_rotation_for_each_kind_of_layer_in_either_spelling(self):
        linear = {"rope_type": "linear", "factor": 8.0}
        stretched = {"rope_theta": 1000000, "rope_local_base_freq": 20000, "rope_scaling": linear}
        old = Gemma3TextConfig.from_hf({**_GEMMA, **stretched, "sliding_window_pattern": 2})
        new = {
            "full_attention": {**linear, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
        }
        fields = {**_GEMMA, "rope_parameters": new, "_sliding_window_pattern": 2}
        self.assertEqual(Gemma3TextConfig.from_hf(fields), old)
        self.assertEqual(Gemma3TextConfig.from_hf(old.to_hf()), old)
        local, full = old.layer_ropes
        self.assertEqual((local.rope_theta, local.factor), (20000.0, None))
        self.assertEqual((full.rope_theta, full.factor), (1000000.0, 8.0))
        plain = Gemma3TextConfig.from_hf(_GEMMA)
        self.assertEqual([rope.rope_theta for rope in plain.layer_ropes], [1e4, 1e4])
        self.assertEqual(plain.rope_parameters.rope_theta, 1e6)
        with pytest.raises(ValueError, match="an object for full_attention and one for sliding"):
            Gemma3TextConfig.from_hf({**_GEMMA, "rope_parameters": {"rope_theta": 2.0}})
        # Refused because the model has no such cap: transformers reads it and does nothing.
        with pytest.raises(ValueError, match="attn_logit_softcapping=50.0"):
            Gemma3TextConfig.from_hf({**_GEMMA, "attn_logit_softcapping": 50.0})

    def test_of_a_gemma_3_that_reads_images_the_text_part_is_taken(self):
        # What the file leaves out are the defaults of Hugging Face's class.
        text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
        fields = {"model_type": "gemma3", "text_config": {**text, "model_type": "gemma3_text"}}
        config = Gemma3Config.from_hf({**fields, "eos_token_id": [1, 106], "vision_config": {}})
        self.assertEqual((config.vocab_size, config.num_attention_heads), (262208, 8))
        self.assertEqual((config.eos_token_id, config.model_type), ((1, 106), "gemma3"))
        self.assertEqual(config.text_part.model_type, "gemma3_text")
        with pytest.raises(ValueError, match="text_config must be an object, got None"):
            Gemma3Config.from_hf({"model_type": "gemma3"})

    def test_phi_3_keeps_its_original_length_beside_the_rotation(self):
        config = Phi3Config.from_hf({**_PHI3, "rope_scaling": _LONG, "auto_map": {"x": "y"}})
        rope = config.rope_parameters
        self.assertEqual((rope.rope_type, rope.original_max_position_embeddings), ("longrope", 64))
        self.assertEqual(rope.long_factor, (2.0, 3.5))
        written = config.to_hf()
        self.assertEqual(written["original_max_position_embeddings"], 64)
        self.assertEqual(set(written["rope_scaling"]), {"type", "short_factor", "long_factor"})
        self.assertEqual(Phi3Config.from_hf(written), config)
        plain = dataclasses.replace(config, rope_parameters=hf_config.RopeParameters())
        self.assertEqual(plain.to_hf()["rope_parameters"]["rope_type"], "default")
        with pytest.raises(ValueError, match="a factor for each of 2 rotated pairs, got 1"):
            Phi3Config.from_hf({**_PHI3, "rope_scaling": {**_LONG, "long_factor": [1.0]}})


class HarmlessTest(parameterized.TestCase):
    @parameterized.parameters(
        {"max_length": 4096, "temperature": 0.9, "top_p": 0.6, "do_sample": True},
        {"num_beams": 4, "no_repeat_ngram_size": 3, "bad_words_ids": [[1]], "stop_strings": ["x"]},
        {"_name_or_path": "a/b", "_model_name_or_path": "/tmp/x", "tokenizer_class": "T"},
        {"attn_implementation": "sdpa", "_attn_implementation": "flash_attention_2"},
        {"torch_dtype": "float16", "dtype": "float16", "transformers_version": "4.33.0"},
        {"pruned_heads": {}, "use_flash_attn": True, "model_max_length": 4096, "prefix": "x"},
        {"mod": None, "quantization_config": None, "pretraining_tp": None, "clip_qkv": None},
    )
    def test_fields_that_change_no_arithmetic_are_left_out(self, **fields):
        self.assertEqual(LlamaConfig.from_hf({**_LLAMA, **fields}), LlamaConfig.from_hf(_LLAMA))

    def test_no_field_that_an_architecture_reads_is_in_the_list(self):
        for record in decoder.ARCHITECTURES.values():
            read = {field.name for field in dataclasses.fields(record.config)}
            self.assertEmpty((read | set(record.config.spellings)) & hf_config.IGNORED)


class RefusalTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("unknown", {"sliding_window": 4096}, r"unknown fields .*sliding_window=4096"),
        ("dropout", {"attention_dropout": 0.1}, r"unknown fields .*attention_dropout=0.1"),
        ("two_values", {"rope_parameters": {"rope_theta": 2.0}, "rope_theta": 1.0}, "rope_theta"),
        ("rope_type", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ("rope_field", {"rope_parameters": {"mscale": 0.7}}, "mscale=0.7"),
        ("rope_missing", {"rope_scaling": {"type": "linear"}}, r"needs \['factor'\]"),
        ("rope_object", {"rope_scaling": 2.0}, "must be an object"),
        ("ill_typed", {"hidden_size": "4096"}, "hidden_size .* must be int, got '4096'"),
        ("beyond", {"rope_theta": 10**400}, "rope_theta .* must be float, got 1000"),
        ("boolean", {"tie_word_embeddings": 1}, "tie_word_embeddings .* must be bool, got 1"),
        ("heads", {"num_attention_heads": 30}, "multiple of num_attention_heads"),
        ("groups", {"num_key_value_heads": 5}, "multiple of num_key_value_heads"),
        ("activation", {"hidden_act": "swish2"}, "hidden_act must be of"),
        ("size", {"intermediate_size": 0}, "must be positive, got {'intermediate_size': 0}"),
        ("odd_head", {"head_dim": 7}, "even head width"),
        ("part_rotated", {"partial_rotary_factor": 0.5}, "must have partial_rotary_factor=1"),
        ("missing", {"vocab_size": None}, r"missing fields \(vocab_size\)"),
    )
    def test_a_config_that_may_mean_something_else_is_refused(self, change: dict, message: str):
        with pytest.raises(ValueError, match=message):
            LlamaConfig.from_hf({**_LLAMA, **change})

    def test_unknown_and_missing_fields_are_named_together(self):
        values = {k: v for k, v in _LLAMA.items() if k != "hidden_size"}
        with pytest.raises(ValueError, match="unknown fields.*clip.*missing fields.*hidden_size"):
            LlamaConfig.from_hf({**values, "clip": 1})
