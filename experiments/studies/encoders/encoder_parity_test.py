"""The encoders beside transformers' own: saved checkpoints, real weights, the golden file."""

import numpy as np
import pytest
from support import shared_data

from experiments.studies.encoders import checkpoint, encoder_cases, make_encoders


@pytest.mark.heavy
def test_minilm_pools_by_mean_and_gives_the_vectors_that_torch_gives():
    folder = make_encoders.minilm_folder()
    vectors_BE, config = encoder_cases.real_vectors(folder, folder / "tokenizer.json")
    assert config.pooling == "mean"
    np.testing.assert_allclose(vectors_BE, encoder_cases.GOLDEN["minilm"], atol=2e-5)


@pytest.mark.heavy
def test_the_golden_file_is_what_torch_gives_today():
    today = make_encoders.make(shared_data())
    assert set(today) == set(encoder_cases.GOLDEN)
    for key, value in today.items():
        np.testing.assert_allclose(value, encoder_cases.GOLDEN[key], atol=1e-5, err_msg=key)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ("bert_classifier", "roberta_classifier", "bert_plain"))
def test_transformers_loads_what_is_saved(name, tmp_path):
    import torch
    import transformers

    bound, weights = encoder_cases.load(name)
    checkpoint.save_encoder(tmp_path / "saved", bound.config, weights)
    family, settings = make_encoders.CASES[name]
    kind = "ForSequenceClassification" if "num_labels" in settings else "Model"
    model = getattr(transformers, family + kind).from_pretrained(tmp_path / "saved").eval()
    rows = make_encoders.rows(name)
    options = {"token_type_ids": rows["types"]} if name.startswith("bert") else {}
    given = {"input_ids": rows["tokens"], "attention_mask": rows["mask"], **options}
    with torch.no_grad():
        output = model(
            **{key: torch.from_numpy(value).long() for key, value in given.items()},
            output_hidden_states=True,
        )
    np.testing.assert_allclose(
        output.hidden_states[-1].numpy()[rows["mask"]],
        encoder_cases.GOLDEN[f"{name}/hidden"][rows["mask"]],
        atol=1e-5,
    )
