"""Assertions shared by the golden tests and the live comparison of decoders with torch."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import decoder_cases
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from raslik_jax.axes import Tree
from raslik_jax.models import checkpoint, decoder
from raslik_jax.models.lora import LoRAConfig

_TOP = {
    "embed_in": "embed",
    "embed_tokens": "embed",
    "final_layer_norm": "final_norm",
    "norm": "final_norm",
    "embed_out": "head",
    "lm_head": "head",
}


class Port(NamedTuple):
    """Our model with the weights of a torch model."""

    graphdef: decoder.GraphDef
    lora: Tree
    base: Tree


def find_leaf(tree: Tree, key: str) -> tuple[tuple[str, ...], Any]:
    """Returns our path and array for a Hugging Face key, in torch's orientation.

    The rule is written down here once more on purpose, apart from the one that loads checkpoints:
    the module's name is the last part of its path, a layer number indexes the leading axis, and
    matrices other than embeddings are transposed.
    """
    *path, kind = key.split(".")
    is_layer = "layers" in path
    module = path[-1] if is_layer else _TOP[path[-1]]
    leaves = tree["layers"][module] if is_layer else tree[module]
    name = {"lora_A": "a", "lora_B": "b", "bias": "bias"}.get(kind)
    if name is None:
        name = next(name for name in ("kernel", "embedding", "scale") if name in leaves)
    array = leaves[name]
    if is_layer:
        array = array[int(path[path.index("layers") + 1])]
    ours = ("layers", module, name) if is_layer else (module, name)
    return ours, array.T if name in ("kernel", "a", "b") else array


def stack_adapter(shapes: Tree, arrays: Mapping[str, np.ndarray]) -> Tree:
    """Returns the adapter tree filled from arrays under torch's names."""
    tree = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
    for key, value in arrays.items():
        _, view = find_leaf(tree, key)
        view[...] = value
    return jax.tree.map(jnp.asarray, tree)


def load_port(
    case: decoder_cases.Case,
    weights: Mapping[str, np.ndarray],
    adapter: Mapping[str, np.ndarray],
    folder: pathlib.Path,
) -> Port:
    """Returns our model, loaded through a Hugging Face checkpoint written to `folder`."""
    (folder / "config.json").write_text(json.dumps(case.config))
    contiguous = {k: np.ascontiguousarray(v, dtype=np.float32) for k, v in weights.items()}
    safetensors.numpy.save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    lora_config = LoRAConfig(
        rank=decoder_cases.RANK, alpha=decoder_cases.ALPHA, dropout=0.1, targets=case.targets
    )
    model = checkpoint.load_model(folder, dtype=jnp.float32, lora_config=lora_config)
    return Port(model.graphdef, stack_adapter(model.lora, adapter), model.base)


def assert_same_weights(port: Port, weights: Mapping[str, np.ndarray]) -> None:
    """Every tensor of the checkpoint is in our tree, exactly, and fills all of it."""
    seen = 0
    for key, value in weights.items():
        _, ours = find_leaf(port.base, key)
        np.testing.assert_array_equal(np.asarray(ours), value.astype(np.float32), err_msg=key)
        seen += value.size
    assert seen == decoder.count_parameters(port.base)


def loss_fn(bound: decoder.Decoder) -> Any:
    """Returns the mean next-token loss of one row and its logits."""

    def loss(lora: Tree, base: Tree, tokens_L, mask_L, target_mask_L, positions_L):
        hidden_LE = bound.hidden(lora, base, tokens_L, mask_L=mask_L, positions_L=positions_L)
        logits_LV = bound.logits(lora, base, hidden_LE)
        log_probability_LV = jax.nn.log_softmax(logits_LV[:-1])
        picked_L = jnp.take_along_axis(log_probability_LV, tokens_L[1:, None], axis=1)[:, 0]
        counted_L = target_mask_L[1:]
        return -jnp.sum(jnp.where(counted_L, picked_L, 0.0)) / jnp.sum(
            counted_L.astype(jnp.float32)
        ), logits_LV

    return loss


def assert_same_behaviour(
    port: Port,
    batch: Any,
    expected: list[tuple[float, np.ndarray, Mapping[str, np.ndarray]]],
    *,
    compiler_options: dict[str, Any] | None = None,
    **bind_options: Any,
) -> dict[str, float]:
    """Logits agree to 1e-4, LoRA gradients to 1e-4 relative norm per leaf; returns the worst."""
    bound = decoder.bind(port.graphdef, **bind_options)
    gradient_fn = jax.value_and_grad(loss_fn(bound), has_aux=True)
    (loss_B, logits_BLV), gradient = jax.jit(
        jax.vmap(gradient_fn, in_axes=(None, None, 0, 0, 0, 0)), compiler_options=compiler_options
    )(port.lora, port.base, *(jnp.asarray(array) for array in batch))
    worst = {"logits": 0.0, "gradient": 0.0}
    for row, (loss, logits_LV, torch_gradient) in enumerate(expected):
        real_L = np.asarray(batch.mask_BL[row])
        error = np.abs(np.asarray(logits_BLV[row]) - logits_LV)[real_L].max()
        np.testing.assert_allclose(loss_B[row], loss, rtol=1e-4, atol=1e-5)
        assert error < 1e-4, f"logits of row {row} differ by {error}"
        worst["logits"] = max(worst["logits"], float(error))
        # A stacked leaf's norm over its layers would hide a wrong layer with a small gradient.
        one = jax.tree.map(lambda leaf, row=row: np.asarray(leaf[row]), gradient)
        counted = 0
        for key, value in torch_gradient.items():
            _, ours = find_leaf(one, key)
            norm = np.linalg.norm(value)
            assert norm > 1e-6, f"{key}: torch's gradient is zero, the comparison says nothing"
            relative = float(np.linalg.norm(ours - value) / norm)
            assert relative < 1e-4, f"gradient of {key} in row {row} differs by {relative}"
            worst["gradient"] = max(worst["gradient"], relative)
            counted += value.size
        assert counted == decoder.count_parameters(one)
    return worst
