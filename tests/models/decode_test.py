import functools
import json

import decoder_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from support import random_weights, shared_data

from raslik_jax.models import checkpoint, decode, decoder
from raslik_jax.models.lora import LoRAConfig

_FAMILIES = {
    "gpt_neox": "pythia",
    "llama": "grouped_tied",
    "olmo2": "grouped",
    # Windows of three and four tokens, in some layers or all; two rotations; caps.
    "qwen3": "windows_by_layer_biases",
    "gemma2": "caps_alternating_windows",
    "gemma3_text": "pattern_and_stretched_global_rotation",
    "phi3": "window",
}
_PROMPTS = ((3, 1, 4), tuple(range(18)), (1, 5, 9, 2, 6), (7,))
_NEW = 6


@functools.cache
def _model(family: str, dtype: str = "float32"):
    if family == "longrope":
        case = decoder_cases.CASES["phi3"]["longrope_short_partial_tied"]
    else:
        case = decoder_cases.CASES[family][_FAMILIES[family]]
    config = decoder.ARCHITECTURES[case.config["model_type"]].config.from_hf(case.config)
    lora_config = LoRAConfig(rank=2, alpha=4.0, dropout=0.5, targets=case.targets)
    graphdef, lora, base = random_weights(config, lora_config, dtype=dtype)
    return decoder.bind(graphdef), lora, base


def _generate(family: str = "llama", prompts=_PROMPTS, dtype: str = "float32", **options):
    settings = {"max_new_tokens": _NEW, "eos_id": None, "pad_id": 0, "batch_size": 4, **options}
    return decode.generate(*_model(family, dtype), prompts, **settings)


class GreedyTest(parameterized.TestCase):
    @parameterized.parameters(*_FAMILIES)
    def test_tokens_are_those_of_the_whole_row_without_a_cache(self, family: str):
        bound, lora, base = _model(family)

        @jax.jit
        def next_token(tokens_L, length):
            logits_LV = bound.logits(lora, base, bound.hidden(lora, base, tokens_L))
            return jnp.argmax(logits_LV[length - 1])

        for prompt, new in zip(_PROMPTS, _generate(family), strict=True):
            row, length = np.zeros(32, np.int32), len(prompt)
            row[:length] = prompt
            for token in new:
                self.assertEqual(int(next_token(row, length)), token)
                row[length] = token
                length += 1

    def test_a_prompt_continues_alone_as_in_any_batch(self):
        together = _generate()
        self.assertEqual([_generate(prompts=[p], batch_size=1)[0] for p in _PROMPTS], together)
        self.assertEqual(_generate(prompts=_PROMPTS[::-1])[::-1], together)

    def test_a_continuation_stops_before_its_end_token(self):
        free = _generate()
        end = free[1][2]
        cut = [new[: new.index(end)] if end in new else new for new in free]
        self.assertEqual(_generate(eos_id=end), cut)
        self.assertEqual(_generate(eos_id=(end, 28)), _generate(eos_id=[28, end]))
        # The first token may already be the end.
        self.assertEqual(_generate(eos_id=free[0][0])[0], [])

    def test_shapes_are_compiled_once(self):
        decode.generate_batch.clear_cache()
        for prompts in (_PROMPTS[:1], _PROMPTS[:1] * 2, [(1,) * 16], [(2,) * 17]):
            _generate(prompts=prompts, max_new_tokens=2, batch_size=1)
        # 16 tokens for the first three, 24 for the last.
        self.assertEqual(decode.generate_batch._cache_size(), 2)

    def test_bfloat16_weights_decode(self):
        new = _generate(dtype="bfloat16", prompts=_PROMPTS[:1])
        self.assertEqual([len(tokens) for tokens in new], [_NEW])

    def test_no_prompts_give_no_continuations(self):
        self.assertEqual(_generate(prompts=[]), [])

    def test_a_real_model_writes_what_its_authors_code_writes(self):
        folder = shared_data() / "models" / "stories260k"
        expected = json.loads((folder / "expected.json").read_text())["greedy_from_bos_60"]
        model = checkpoint.load_model(folder, dtype=jnp.float32)
        bound, starts = decoder.bind(model.graphdef), [expected[:1], expected[:5]]
        how = {"max_new_tokens": 60, "eos_id": None, "pad_id": 0, "batch_size": 2}
        new = decode.generate(bound, model.lora, model.base, starts, **how)
        self.assertEqual(expected[:1] + new[0], expected)
        self.assertEqual(expected[:5] + new[1][:56], expected)


class DrawingTest(parameterized.TestCase):
    """Counts lie within 5 standard errors of what softmax says, with one seed."""

    @parameterized.parameters((1.0, 500), (1.0, 2000), (0.5, 2000))
    def test_first_and_second_tokens_are_drawn_from_the_softmax(self, temperature, draws):
        bound, lora, base = _model("llama")

        def chances(tokens):
            """Returns the chance of every next token, by NumPy in float64."""
            row_L = np.array(tokens, np.int32)
            hidden_LE = jax.jit(bound.hidden)(lora, base, row_L)
            logits_V = np.asarray(bound.logits(lora, base, hidden_LE[-1:])[0], np.float64)
            weight_V = np.exp((logits_V - logits_V.max()) / temperature)
            return weight_V / weight_V.sum()

        drawing = decode.Drawing(jax.random.key(1), jnp.float32(temperature))
        found = np.array(
            _generate(
                prompts=[_PROMPTS[0]] * draws, max_new_tokens=2, batch_size=500, drawing=drawing
            )
        )
        likeliest = int(chances(_PROMPTS[0]).argmax())
        parts = {(): found[:, 0], (likeliest,): found[found[:, 0] == likeliest, 1]}
        for before, drawn in parts.items():
            p_V = chances((*_PROMPTS[0], *before))
            share_V = np.bincount(drawn, minlength=len(p_V)) / len(drawn)
            error_V = np.sqrt(p_V * (1 - p_V) / len(drawn))
            # A token of which less than one is to be expected may come once.
            np.testing.assert_array_less(abs(share_V - p_V), 5 * error_V + 1 / len(drawn))
            self.assertGreater(len(set(drawn.tolist())), 3)

    def test_a_place_has_its_own_draws_whatever_its_batch(self):
        def drawn(seed, **options):
            return _generate(drawing=decode.Drawing(jax.random.key(seed)), **options)

        prompts = _PROMPTS * 2
        found = drawn(0, prompts=prompts)
        self.assertEqual(drawn(0, prompts=prompts, batch_size=8), found)
        self.assertNotEqual(found[:4], found[4:])
        self.assertNotEqual(drawn(1, prompts=prompts), found)

    def test_next_to_no_temperature_is_greedy(self):
        drawing = decode.Drawing(jax.random.key(0), jnp.float32(1e-4))
        self.assertEqual(_generate(drawing=drawing), _generate())


class EdgeTest(parameterized.TestCase):
    @parameterized.parameters(("llama", 61, 3), ("llama", 63, 1), ("longrope", 62, 3))
    def test_an_answer_ends_with_the_positions(self, family: str, size: int, left: int):
        # Positions of the llama end at 64, those of longrope change behind 64.
        prompts = [[1] * size, [2] * 5]
        found = _generate(family, prompts)
        self.assertEqual([*map(len, found)], [left, _NEW])
        self.assertEqual(found[:1], _generate(family, prompts[:1], max_new_tokens=left))

    @parameterized.named_parameters(
        ("empty_prompt", {"prompts": [[1], []]}, "prompt 1 must have 1 to .* got 0"),
        ("foreign_token", {"prompts": [[29]]}, r"tokens must be in \[0, 29\), got 29 to 29"),
        ("negative_token", {"prompts": [[-1, 2]]}, "got -1 to 2"),
        ("too_long", {"prompts": [[1] * 64]}, "prompt 0 must have .* got 64"),
        ("no_tokens", {"max_new_tokens": 0}, "must be at least 1"),
        ("no_rows", {"batch_size": 0}, "must be at least 1"),
    )
    def test_what_cannot_be_decoded_is_refused(self, change: dict, message: str):
        with pytest.raises(ValueError, match=message):
            _generate(**change)
