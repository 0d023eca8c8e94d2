"""A real language model, loaded and decoded: the stories260k ids that its authors' code gives."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from support import shared_data

from raslik_jax.models import checkpoint, decode, decoder


def test_stories260k_is_told_as_expected():
    folder = shared_data() / "models" / "stories260k"
    expected = json.loads((folder / "expected.json").read_text())["greedy_from_bos_60"]
    model = checkpoint.load_model(folder, dtype=jnp.float32)
    told = decode.generate(
        decoder.bind(model.graphdef),
        model.lora,
        model.base,
        [expected[:1]],
        max_new_tokens=len(expected) - 1,
        eos_id=None,
        pad_id=0,
        batch_size=1,
    )
    assert told == [expected[1:]]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("format", "double", "least"),
    (("int8", False, 0.95), ("nf4", False, 0.75), ("nf4", True, 0.75)),
)
def test_a_quantized_stories260k_mostly_agrees_with_itself(format, double, least):
    folder = shared_data() / "models" / "stories260k"
    expected = json.loads((folder / "expected.json").read_text())["greedy_from_bos_60"]
    tokens_L = jnp.asarray(expected, jnp.int32)
    model = checkpoint.load_model(
        folder, dtype=jnp.float32, base_format=format, double_quant=double
    )
    bound = decoder.bind(model.graphdef)
    logits_LV = bound.logits({}, model.base, bound.hidden({}, model.base, tokens_L[:-1]))
    agreement = np.mean(np.argmax(logits_LV, axis=1) == np.asarray(expected[1:]))
    assert agreement >= least, agreement
