"""Exported models as transformers and peft read them."""

import jax.numpy as jnp
import numpy as np
import pytest
import stored_run

from raslik_jax.incident.exporting import export_model
from raslik_jax.run.artifacts import Variant

pytestmark = pytest.mark.heavy

_TOKENS = np.array([[3, 17, 4, 4, 40, 21, 9]])


@pytest.mark.parametrize("merged", [False, True])
def test_another_library_gives_the_same_logits_and_the_same_ids(merged, tmp_path):
    import peft
    import torch
    import transformers

    run = stored_run.write_stored_run(tmp_path / "run")
    of, how = Variant("raslik", "ga_gdr"), {"epoch": "last", "merged": merged}
    folder = export_model(run.root, of, tmp_path / "out", **how)
    # An adapter of a model that this project trained names no base: whoever loads it has it.
    base = folder if merged else run.root / "backbone" / "model"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base)
    theirs = (theirs if merged else peft.PeftModel.from_pretrained(theirs, folder)).eval()
    with torch.no_grad():
        logits_LV = theirs(torch.from_numpy(_TOKENS)).logits[0].numpy()
    lora = run.adapters[-1]
    hidden_LE = run.decoder.hidden(lora, run.base, jnp.asarray(_TOKENS[0]))
    ours_LV = np.asarray(run.decoder.logits(lora, run.base, hidden_LE))
    np.testing.assert_allclose(ours_LV, logits_LV, atol=1e-4, rtol=1e-4)
    assert np.abs(ours_LV).max() > 0.5  # or the comparison says little
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "a kettle hums"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id is not None
    if merged:
        assert theirs.generation_config.eos_token_id == tokenizer.eos_token_id
