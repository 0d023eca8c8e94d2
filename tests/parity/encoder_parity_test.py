"""The encoders beside transformers' own: gradients, saved checkpoints, real weights."""

import encoder_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import make_encoders
from support import shared_data

from raslik_jax.models import checkpoint, key_map


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
@pytest.mark.parametrize("name", ("bert_classifier", "roberta_classifier", "roberta_odd_heads"))
def test_gradients_of_every_weight_equal_torch(name):
    import torch

    bound, weights = encoder_cases.load(name)
    rows = make_encoders.rows(name)
    labels_B = np.arange(3) % bound.config.num_labels

    def loss(weights):
        logits_BC = jax.vmap(bound.classify, in_axes=(None, 0, 0))(
            weights, rows["tokens"], rows["mask"]
        )
        return -jax.nn.log_softmax(logits_BC)[jnp.arange(3), labels_B].mean()

    ours = key_map.flatten(jax.grad(loss)(weights))
    model = make_encoders.torch_model(name)
    model(
        input_ids=torch.from_numpy(rows["tokens"]).long(),
        attention_mask=torch.from_numpy(rows["mask"]).long(),
        labels=torch.from_numpy(labels_B),
    ).loss.backward()
    theirs = {key: value.grad.numpy() for key, value in model.named_parameters()}
    slots = key_map.plan(bound.config.model_type, weights)
    assert set(slots) == set(theirs)
    for key, slot in slots.items():
        gradient = np.asarray(
            ours[slot.path] if slot.layer is None else ours[slot.path][slot.layer]
        )
        gradient = gradient.T if slot.is_transposed else gradient
        if slot.path[-2] == "key" and slot.path[-1] == "bias":
            # A key bias shifts every score of a query alike: its gradient is rounding noise.
            assert np.abs(gradient).max() < 1e-6
            continue
        error = np.linalg.norm(gradient - theirs[key]) / np.linalg.norm(theirs[key])
        assert error < 1e-4, (key, error)


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
