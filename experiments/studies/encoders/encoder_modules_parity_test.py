"""Every part of the encoders beside transformers' own, and PEFT's adapters on them.

Each case is a tiny random model that transformers writes and `load_encoder` reads, run on four
rows: unpadded, padded on the right, on the left and on both sides.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import compiling
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.studies.encoders import checkpoint, encoder
from raslik_jax.models import key_map

pytestmark = pytest.mark.heavy
_TINY = {"vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
_TINY |= {"intermediate_size": 36, "max_position_embeddings": 32}


def _case(family: str, **settings: Any) -> tuple[str, dict[str, Any]]:
    return family, settings


# What breaks ports: head counts, activations, epsilons, token types, where positions start, rows up
# to the end of the position table, poolers that a head needs and poolers that nothing needs.
_CASES = {
    "bert_as_published": _case("Bert", num_labels=2),
    "bert_odd_heads_three_types": _case(
        "Bert", num_labels=4, num_attention_heads=3, type_vocab_size=3, hidden_act="gelu_new"
    ),
    "bert_one_head_one_type_wide_epsilon": _case(
        "Bert",
        **{"num_labels": 3, "num_attention_heads": 1, "type_vocab_size": 1},
        **{"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-3},
    ),
    "bert_whole_position_table": _case(
        "Bert", num_labels=2, max_position_embeddings=12, num_attention_heads=12
    ),
    "bert_long_positions_unused_pooler": _case(
        "Bert", max_position_embeddings=200, num_hidden_layers=3, hidden_act="relu"
    ),
    "roberta_as_published": _case(
        "Roberta", num_labels=2, type_vocab_size=1, pad_token_id=1, layer_norm_eps=1e-5
    ),
    "roberta_padding_is_0_odd_heads": _case(
        "Roberta", num_labels=5, pad_token_id=0, num_attention_heads=3, hidden_act="gelu_new"
    ),
    "roberta_padding_is_7_three_types": _case(
        "Roberta", num_labels=3, pad_token_id=7, type_vocab_size=3, num_attention_heads=1
    ),
    "roberta_whole_position_table": _case(
        "Roberta", num_labels=2, pad_token_id=2, max_position_embeddings=15, hidden_act="relu"
    ),
    "roberta_long_positions_no_pooler": _case(
        "Roberta", max_position_embeddings=152, pad_token_id=1, num_attention_heads=8
    ),
}
_RANK, _ALPHA = 2, 7.0
# Compiling is what costs here.
_COMPILER_OPTIONS = compiling.OPTIONS
_TARGETS = ("query", "key", "value", "attention_output", "up", "down")


class _Side(NamedTuple):
    """One case: torch's model, our functions and weights, the rows and what a loss weighs."""

    model: Any
    bound: encoder.Encoder
    weights: Any
    tokens_BL: np.ndarray
    mask_BL: np.ndarray
    types_BL: np.ndarray
    weight_BLE: np.ndarray


@functools.cache
def _load(name: str, folder: str) -> _Side:
    import torch
    import transformers

    family, settings = _CASES[name]
    rng = np.random.default_rng(len(name))
    config = getattr(transformers, f"{family}Config")(**{**_TINY, **settings})
    config._attn_implementation = "eager"
    is_classifier = "num_labels" in settings
    kind = "ForSequenceClassification" if is_classifier else "Model"
    options = {} if is_classifier else {"add_pooling_layer": "unused_pooler" in name}
    model = getattr(transformers, family + kind)(config, **options).eval()
    with torch.no_grad():
        for key, parameter in sorted(model.named_parameters()):
            value = rng.normal(size=tuple(parameter.shape))
            if "LayerNorm.weight" in key:
                value = 1 + 0.2 * value
            elif "embeddings" in key or parameter.ndim == 1:
                value = 0.5 * value
            else:
                value = value / np.sqrt(parameter.shape[-1])
            parameter.copy_(torch.from_numpy(value.astype(np.float32)))
    model.save_pretrained(f"{folder}/{name}")
    loaded = checkpoint.load_encoder(f"{folder}/{name}", dtype=jnp.float32)
    length = 150 if "long_positions" in name else 12
    pad = config.pad_token_id
    tokens_BL = rng.choice([i for i in range(40) if i != pad], (4, length)).astype(np.int32)
    mask_BL = np.ones((4, length), bool)
    mask_BL[1, length - 4 :] = mask_BL[2, :5] = mask_BL[3, :2] = mask_BL[3, length - 3 :] = False
    types_BL = rng.integers(0, config.type_vocab_size, (4, length)).astype(np.int32)
    if is_classifier:
        types_BL[:] = 0  # a classifier here takes one text
    weight_BLE = rng.normal(size=(4, length, 24)).astype(np.float32) * mask_BL[..., None]
    return _Side(
        model,
        encoder.bind_encoder(loaded.config),
        loaded.weights,
        np.where(mask_BL, tokens_BL, pad),
        mask_BL,
        types_BL * mask_BL,
        weight_BLE,
    )


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("encoders"))
    return lambda name: _load(name, folder)


def _forward(model: Any, side: _Side) -> Any:
    import torch

    if side.bound.config.num_labels:
        # transformers' heads read the first column, padding or not; ours the first real token. So
        # torch gets the same rows with all padding on the right.
        shift_B = side.mask_BL.argmax(1)
        side = side._replace(
            **{
                name: np.stack([np.roll(row, -n) for row, n in zip(rows, shift_B, strict=True)])
                for name in ("tokens_BL", "mask_BL", "types_BL")
                for rows in [getattr(side, name)]
            }
        )
    positions = {}
    if side.bound.config.model_type == "bert":
        # transformers' BERT counts padding too; ours, as its RoBERTa, counts real tokens.
        counted_BL = np.maximum(np.cumsum(side.mask_BL, axis=1) - 1, 0)
        positions = {"position_ids": torch.from_numpy(counted_BL)}
    return model(
        input_ids=torch.from_numpy(side.tokens_BL).long(),
        attention_mask=torch.from_numpy(side.mask_BL).long(),
        token_type_ids=torch.from_numpy(side.types_BL).long(),
        **positions,
    )


def _record(side: _Side) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns input and output of every module of one forward pass, by its name."""
    import torch

    calls: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def hook(name: str):
        def keep(_, args, kwargs, output):
            given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            output = output[0] if isinstance(output, tuple) else output
            if given and isinstance(output, torch.Tensor):
                calls[name] = given[0].numpy(), output.numpy()

        return keep

    # The body takes the rows as they are: only a head cares where the first token stands.
    body = getattr(side.model, side.bound.config.model_type, side.model)
    config = dataclasses.replace(side.bound.config, num_labels=0)
    handles = [
        module.register_forward_hook(hook(name), with_kwargs=True)
        for name, module in body.named_modules()
    ]
    with torch.no_grad():
        _forward(body, side._replace(bound=side.bound._replace(config=config)))
    for handle in handles:
        handle.remove()
    return calls


@pytest.mark.parametrize("name", _CASES)
def test_embeddings_norms_attention_mlp_and_blocks_equal_torch(name, load):
    side = load(name)
    config, calls = side.bound.config, _record(side)
    pairs: dict[str, tuple[np.ndarray, np.ndarray]] = {
        "embed": (side.tokens_BL, calls["embeddings"][1]),
        "embed_norm": calls["embeddings.LayerNorm"],
    }
    for i in range(config.num_hidden_layers):
        path = f"encoder.layer.{i}"
        pairs[f"attention/{i}"] = (
            calls[f"{path}.attention.self"][0],
            calls[f"{path}.attention.output.dense"][1],
        )
        pairs[f"mlp/{i}"] = calls[f"{path}.intermediate"][0], calls[f"{path}.output.dense"][1]
        pairs[f"attention_norm/{i}"] = calls[f"{path}.attention.output.LayerNorm"]
        pairs[f"mlp_norm/{i}"] = calls[f"{path}.output.LayerNorm"]
        pairs[f"block/{i}"] = calls[path]

    @functools.partial(jax.jit, compiler_options=_COMPILER_OPTIONS)
    def run(weights, given):
        def one(kind: str, x, mask_L, types_L):
            kind, _, layer = kind.partition("/")
            own = jax.tree.map(lambda leaf: leaf[int(layer or 0)], weights["layers"])
            match kind:
                case "embed":
                    return encoder.embed_tokens(weights, x, mask_L, types_L, config=config)
                case "embed_norm":
                    return encoder.normalize(weights["embed_norm"], x, config.layer_norm_eps)
                case "attention":
                    return encoder.attend(own, x, mask_L, config=config)
                case "mlp":
                    return encoder.apply_mlp(own, x, config=config)
                case "block":
                    return encoder.apply_block(own, x, mask_L, None, config=config)
            return encoder.normalize(own[kind], x, config.layer_norm_eps)

        return {
            kind: jax.vmap(functools.partial(one, kind))(x, side.mask_BL, side.types_BL)
            for kind, x in given.items()
        }

    ours = run(side.weights, {kind: given for kind, (given, _) in pairs.items()})
    for kind, (_, output) in pairs.items():
        np.testing.assert_allclose(
            np.asarray(ours[kind])[side.mask_BL],
            output[side.mask_BL],
            rtol=1e-5,
            atol=1e-5,
            err_msg=kind,
        )


@pytest.mark.parametrize("name", _CASES)
def test_logits_and_gradients_of_weights_and_of_adapters_equal_torch(name, load):
    import peft
    import torch

    side = load(name)
    config = side.bound.config
    modules = encoder.ENCODERS[config.model_type].key_map
    paths = [modules[f"layers/{target}"] for target in _TARGETS]
    model = peft.get_peft_model(
        side.model,
        peft.LoraConfig(r=_RANK, lora_alpha=_ALPHA, lora_dropout=0.1, target_modules=paths),
    ).eval()
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(True)
            if "lora_" in key:  # both factors random: with B = 0 the gradient of A vanishes
                gain = (1.0 if "lora_A" in key else 0.3) / np.sqrt(parameter.shape[-1])
                parameter.copy_(torch.from_numpy(gain * rng.normal(size=tuple(parameter.shape))))
    output = _forward(model, side)
    labels_B = np.arange(4) % max(config.num_labels, 1)
    if config.num_labels:
        values = output.logits
        loss = torch.nn.functional.cross_entropy(values, torch.from_numpy(labels_B))
    else:
        values = output.last_hidden_state
        loss = (values * torch.from_numpy(side.weight_BLE)).sum()
    loss.backward()
    theirs: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    prefix = "" if config.num_labels else f"{config.model_type}."
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:  # a pooler that nothing reads has none
            key = key.removeprefix("base_model.model.").replace(".base_layer", "")
            theirs[prefix + key.replace(".default", "")] = (
                parameter.detach().numpy(),
                parameter.grad.numpy(),
            )
    # An adapter on an encoder is kernel + alpha / rank * A B, so its gradients are the kernel's.
    depth = config.num_hidden_layers
    factors = {
        target: {
            "a": np.zeros((depth, side.weights["layers"][target]["kernel"].shape[1], _RANK)),
            "b": np.zeros((depth, _RANK, side.weights["layers"][target]["kernel"].shape[2])),
        }
        for target in _TARGETS
    }
    slots = key_map.plan(modules, side.weights)
    slots |= key_map.plan(modules, {"layers": factors})
    assert set(slots) == set(theirs)
    for key, slot in slots.items():
        if slot.path[-1] in ("a", "b"):
            factors[slot.path[1]][slot.path[2]][slot.layer] = theirs[key][0].T

    def loss_fn(weights, factors):
        stacked = dict(weights["layers"])
        for target, factor in factors.items():
            share = _ALPHA / _RANK * (factor["a"] @ factor["b"])
            stacked[target] = {**stacked[target], "kernel": stacked[target]["kernel"] + share}
        weights = {**weights, "layers": stacked}
        if config.num_labels:
            values = jax.vmap(side.bound.classify, in_axes=(None, 0, 0))(
                weights, side.tokens_BL, side.mask_BL
            )
            picked_B = jax.nn.log_softmax(values)[jnp.arange(4), labels_B]
            return -picked_B.mean(), values
        values = jax.vmap(side.bound.hidden, in_axes=(None, 0, 0, 0))(
            weights, side.tokens_BL, side.mask_BL, side.types_BL
        )
        return (values * side.weight_BLE).sum(), values

    factors = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), factors)
    gradient_fn = jax.jit(
        jax.grad(loss_fn, argnums=(0, 1), has_aux=True), compiler_options=_COMPILER_OPTIONS
    )
    (of_weights, of_factors), ours = gradient_fn(side.weights, factors)
    expected, real = values.detach().numpy(), slice(None) if config.num_labels else side.mask_BL
    np.testing.assert_allclose(np.asarray(ours)[real], expected[real], rtol=0, atol=1e-4)
    gradients = key_map.flatten(of_weights) | key_map.flatten({"layers": of_factors})
    worst = 0.0
    for key, slot in slots.items():
        gradient = np.asarray(
            gradients[slot.path] if slot.layer is None else gradients[slot.path][slot.layer]
        )
        gradient = gradient.T if slot.is_transposed else gradient
        norm = np.linalg.norm(theirs[key][1])
        if slot.path[-2:] == ("key", "bias"):
            # A key bias shifts every score of a query alike: its gradient is rounding noise.
            kernel = np.linalg.norm(theirs[key.replace("bias", "weight")][1])
            assert max(norm, np.linalg.norm(gradient)) < 1e-5 * kernel
            continue
        error = float(np.linalg.norm(gradient - theirs[key][1]) / norm)
        assert error < 1e-4, (key, error)
        worst = max(worst, error)
    print(
        name,
        f"gradient {worst:.1e}",
        f"output {np.abs(np.asarray(ours) - expected)[real].max():.1e}",
    )
