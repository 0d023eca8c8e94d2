"""SmolLM2-135M-Instruct writes here what it writes under transformers."""

import json
import lzma
import subprocess
import sys

import compiling
import jax
import jax.numpy as jnp
import pytest
import tokenizers
from support import shared_data

from raslik_jax.data.examples import Example
from raslik_jax.data.tokens import prompts
from raslik_jax.models import checkpoint, decode, decoder

pytestmark = pytest.mark.heavy

_NUM_PROMPTS, _NEW_TOKENS = 8, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The real decoder as a Hugging Face directory."""
    data = shared_data()
    target = tmp_path_factory.mktemp("smollm2")
    source = data / "models" / "smollm2-135m-instruct"
    (weights,) = source.glob("*.gguf")
    command = [sys.executable, data / "tools" / "gguf_to_hf.py", weights, source, target]
    tokenizer = data / "tokenizers" / "smollm2" / "tokenizer.json"
    subprocess.run([*command, "--tokenizer", tokenizer], check=True, capture_output=True)
    return target


def test_alpaca_prompts_are_answered_as_under_transformers(folder, monkeypatch):
    import torch
    import transformers

    # As users compile it.
    optimized = jax.jit(
        decode.generate_batch.__wrapped__,
        static_argnames=("decoder", "max_new_tokens"),
        compiler_options=compiling.OPTIMIZED,
    )
    monkeypatch.setattr(decode, "generate_batch", optimized)

    rows = json.loads(lzma.open(shared_data() / "alpaca" / "alpaca_data.json.xz").read())
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    # Every 6,500th row: tasks of all kinds, with and without an input, short prompts first to last.
    examples = [
        Example("", row["instruction"], row["input"], row["output"])
        for row in rows[:: len(rows) // _NUM_PROMPTS][:_NUM_PROMPTS]
    ]
    encoded = [
        tokenizer.encode(prompts.fill_form(example, prompts.TEMPLATES["alpaca"])).ids
        for example in examples
    ]
    config = json.loads((folder / "config.json").read_text())
    model = checkpoint.load_model(folder, dtype=jnp.float32)
    end, bound = config["eos_token_id"], decoder.bind(model.graphdef)
    how = {"max_new_tokens": _NEW_TOKENS, "eos_id": end, "pad_id": end, "batch_size": 8}
    ours = decode.generate(bound, model.lora, model.base, encoded, **how)
    torch_model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    differing = []
    for number, (ids, new) in enumerate(zip(encoded, ours, strict=True)):
        with torch.no_grad():
            output = torch_model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=_NEW_TOKENS,
                do_sample=False,
                pad_token_id=end,
            )
        theirs = output[0, len(ids) :].tolist()
        theirs = theirs[: theirs.index(end)] if end in theirs else theirs
        if theirs != new:
            differing.append((number, tokenizer.decode(theirs), tokenizer.decode(new)))
    assert not differing, differing
    assert optimized._cache_size()
