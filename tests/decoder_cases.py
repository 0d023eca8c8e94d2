"""Tiny decoder configs that differ in what breaks ports, as a config.json would give them.

The golden files, the tests that read them and the live comparison with torch share this list.
"""

from typing import Any, NamedTuple

NEOX_TARGETS = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
GATED_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Case(NamedTuple):
    """One config and one adapter.

    Attributes:
      config: The fields of config.json.
      targets: Names of the layers with an adapter.
      first_position: Rotary position of the first real token.
      vocab_used: Tokens are drawn below this; rows above are vocabulary padding.
    """

    config: dict[str, Any]
    targets: tuple[str, ...]
    first_position: int = 0
    vocab_used: int = 29


_NEOX = {
    "model_type": "gpt_neox",
    "vocab_size": 29,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "hidden_act": "gelu",
    "tie_word_embeddings": False,
}
_LLAMA = {
    "model_type": "llama",
    "vocab_size": 29,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_OLMO2 = {**_LLAMA, "model_type": "olmo2", "rms_norm_eps": 1e-6, "rope_theta": 500000}

CASES: dict[str, dict[str, Case]] = {
    "gpt_neox": {
        # As Pythia: a quarter of each head rotated, parallel residual, rows beyond the tokenizer.
        "pythia": Case(
            {**_NEOX, "rotary_pct": 0.25, "rotary_emb_base": 10000, "vocab_size": 40}, NEOX_TARGETS
        ),
        "sequential_full_rotary": Case(
            {
                **_NEOX,
                "rotary_pct": 1.0,
                "use_parallel_residual": False,
                "hidden_size": 24,
                "num_attention_heads": 3,
            },
            ("query_key_value",),
        ),
        # A rotated width of int(0.25 * 20) = 5, which Hugging Face rounds up to three pairs.
        "odd_rotary_width": Case(
            {
                **_NEOX,
                "rotary_pct": 0.25,
                "hidden_size": 20,
                "num_attention_heads": 1,
                "layer_norm_eps": 1e-3,
            },
            ("dense", "dense_4h_to_h"),
        ),
        "no_attention_bias_tied_new_spelling": Case(
            {
                **_NEOX,
                "attention_bias": False,
                "tie_word_embeddings": True,
                "hidden_act": "gelu_new",
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 500.0,
                    "partial_rotary_factor": 0.5,
                },
            },
            NEOX_TARGETS,
        ),
        "linear_scaling_long_positions": Case(
            {
                **_NEOX,
                "rotary_pct": 1.0,
                "num_attention_heads": 4,
                "max_position_embeddings": 4096,
                "rope_scaling": {"type": "linear", "factor": 2.0},
            },
            ("query_key_value", "dense"),
            first_position=3000,
        ),
    },
    "llama": {
        # As SmolLM2: nine heads on three key-value heads, a tied head.
        "grouped_tied": Case(
            {
                **_LLAMA,
                "hidden_size": 36,
                "intermediate_size": 12,
                "num_attention_heads": 9,
                "num_key_value_heads": 3,
                "tie_word_embeddings": True,
                "rope_theta": 100000.0,
            },
            ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj"),
        ),
        "llama3_scaling_long_positions": Case(
            {
                **_LLAMA,
                "num_key_value_heads": 2,
                "head_dim": 12,
                "rope_theta": 500000.0,
                "max_position_embeddings": 8192,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 256,
                },
            },
            ("q_proj", "v_proj"),
            first_position=5000,
        ),
        "biases_linear_scaling": Case(
            {
                **_LLAMA,
                "attention_bias": True,
                "mlp_bias": True,
                "rope_scaling": {"type": "linear", "factor": 4.0},
            },
            ("k_proj", "o_proj", "down_proj"),
        ),
        "one_key_value_head_padded_vocabulary": Case(
            {
                **_LLAMA,
                "num_key_value_heads": 1,
                "vocab_size": 40,
                "hidden_act": "gelu",
                "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
            },
            GATED_TARGETS,
        ),
    },
    "olmo2": {
        "as_published": Case(dict(_OLMO2), ("q_proj", "k_proj", "v_proj", "o_proj")),
        "grouped": Case(
            {
                **_OLMO2,
                "hidden_size": 24,
                "num_attention_heads": 6,
                "num_key_value_heads": 2,
                "vocab_size": 40,
            },
            GATED_TARGETS,
        ),
        "odd_heads_tied_long_positions": Case(
            {
                **_OLMO2,
                "hidden_size": 24,
                "num_attention_heads": 3,
                "num_key_value_heads": 3,
                "tie_word_embeddings": True,
                "max_position_embeddings": 4096,
            },
            ("q_proj", "k_proj"),
            first_position=3000,
        ),
        "biases_linear_scaling_one_key_value_head": Case(
            {
                **_OLMO2,
                "rope_theta": None,
                "attention_bias": True,
                "num_key_value_heads": 1,
                "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
            },
            ("v_proj", "up_proj"),
        ),
    },
}
RANK, ALPHA = 2, 7.0
