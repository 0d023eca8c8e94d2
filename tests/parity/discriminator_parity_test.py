"""The discriminator's training beside torch's, as transformers' Trainer sets it up."""

import encoder_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import make_encoders

from raslik_jax.data.batches import training_batches
from raslik_jax.evaluation import discriminator
from raslik_jax.models import encoder


@pytest.mark.heavy
def test_losses_and_outputs_after_training_equal_torch():
    import dataclasses

    import torch
    import transformers

    name, batch_size, num_epochs, rate, seed = "roberta_classifier", 4, 3, 1e-3, 5
    bound, weights = encoder_cases.load(name)
    silent = dataclasses.replace(bound.config, hidden_dropout_prob=0.0)
    bound = encoder.bind_encoder(silent)
    rng = np.random.default_rng(0)
    tokens = [rng.integers(3, 50, rng.integers(2, 14)).tolist() for _ in range(10)]
    labels = rng.integers(0, 2, 10).tolist()
    passes = {"batch_size": batch_size, "num_epochs": num_epochs}
    tx = discriminator.make_optimizer(rate, num_texts=10, **passes)
    with jax.numpy_dtype_promotion("standard"):
        fitted = discriminator.fit(
            bound, discriminator.start_fit(weights, tx), tokens, labels, tx=tx, seed=seed, **passes
        )
    model = make_encoders.torch_model(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 0, 3 * num_epochs)
    losses = []
    for epoch in range(num_epochs):
        for rows in training_batches(10, batch_size, seed=seed, epoch=epoch):
            chosen = [row for row in rows if row >= 0]
            width = max(len(tokens[row]) for row in chosen)
            ids = [tokens[row] + [1] * (width - len(tokens[row])) for row in chosen]
            loss = model(
                input_ids=torch.tensor(ids),
                attention_mask=(torch.tensor(ids) != 1).long(),
                labels=torch.tensor([labels[row] for row in chosen]),
            ).loss
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
    assert norm > 0
    np.testing.assert_allclose(fitted.losses, losses, rtol=1e-3, atol=1e-5)
    with torch.no_grad():
        expected_NC = [model(input_ids=torch.tensor([ids])).logits[0].numpy() for ids in tokens]
    classify = jax.jit(bound.classify)
    for ids, logits_C in zip(tokens, expected_NC, strict=True):
        padded_L = jnp.asarray(ids + [1] * (16 - len(ids)))
        np.testing.assert_allclose(
            classify(fitted.state.weights, padded_L, padded_L != 1), logits_C, atol=1e-3
        )
