"""Every decoder against Hugging Face's torch model and PEFT's adapters, run side by side."""

import functools
import pathlib
import tempfile
from typing import Any

import compiling
import decoder_cases
import decoder_parity
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch_reference
from absl.testing import parameterized
from flax import nnx

from raslik_jax.models import checkpoint, decode, decoder

_CASES = [
    (f"_{family}_{name}", family, name)
    for family, cases in decoder_cases.CASES.items()
    for name in cases
]
# Names of cases that decode greedily; of each architecture one at least.
_DECODED = {
    *("pythia", "sequential_full_rotary", "grouped_tied", "llama3_scaling_long_positions"),
    *("grouped", "odd_heads_tied_long_positions", "windows_in_the_last_layer_yarn", "window"),
    *("windows_by_layer_biases", "longrope_short_partial_tied", "caps_alternating_windows"),
    "pattern_and_stretched_global_rotation",
}
pytestmark = pytest.mark.heavy


def _load(family: str, name: str, seed: int) -> tuple[Any, decoder_parity.Port]:
    """Returns the torch model and ours with its weights."""
    case = decoder_cases.CASES[family][name]
    model = torch_reference.make_model(case, seed=seed)
    weights = torch_reference.base_weights(model)
    with tempfile.TemporaryDirectory() as folder:
        port = decoder_parity.load_port(
            case,
            weights,
            torch_reference.adapter_leaves(model, gradient=False),
            pathlib.Path(folder),
        )
    decoder_parity.assert_same_weights(port, weights)
    return model, port


def _record(model: Any, batch: torch_reference.Batch, row: int) -> dict[str, tuple[Any, Any]]:
    """Returns input and output of every module of one forward pass, by its name."""
    import torch

    calls: dict[str, tuple[Any, Any]] = {}

    def hook(name: str):
        def keep(_, args, kwargs, output):
            given = args[0] if args else kwargs.get("hidden_states")
            output = output[0] if isinstance(output, tuple) else output
            if isinstance(given, torch.Tensor) and isinstance(output, torch.Tensor):
                calls[name] = given.detach().numpy(), output.detach().numpy()

        return keep

    inner = model.base_model.model
    handles = [
        module.register_forward_hook(hook(name), with_kwargs=True)
        for name, module in inner.named_modules()
    ]
    with torch.no_grad():
        torch_reference.forward(model, batch, row)
    for handle in handles:
        handle.remove()
    return calls


def _kind(path: str) -> tuple[str | None, int]:
    """Returns what of ours a torch module is compared with, and its layer."""
    *parents, leaf = path.split(".")
    if "layers" in parents:
        layer = int((parents + [leaf])[parents.index("layers") + 1])
        if parents[-1] == "layers":
            return "block", layer
        kind = {"attention": "attention", "self_attn": "attention", "mlp": "mlp"}.get(leaf)
        return kind or (leaf if "norm" in leaf else None), layer
    top = {"norm": "final_norm", "final_layer_norm": "final_norm"}
    return {**top, "embed_tokens": "embed", "embed_in": "embed"}.get(leaf), 0


class DecoderParityTest(parameterized.TestCase):
    @parameterized.named_parameters(_CASES)
    def test_weights_logits_and_lora_gradients(self, family: str, name: str):
        model, port = _load(family, name, seed=1000)
        batch = torch_reference.make_batch(decoder_cases.CASES[family][name], seed=2000, length=24)
        expected = [
            torch_reference.loss_and_gradient(model, batch, row)
            for row in range(len(batch.tokens_BL))
        ]
        # Of every architecture one is held as users compile it, which takes three times as long.
        optimized = name == decoder_cases.FIRST[family]
        options = compiling.OPTIMIZED if optimized else compiling.OPTIONS
        worst = decoder_parity.assert_same_behavior(port, batch, expected, compiler_options=options)
        print(family, name, worst)

    @parameterized.named_parameters(_CASES)
    def test_embeddings_norms_attention_mlp_and_blocks(self, family: str, name: str):
        torch_model, port = _load(family, name, seed=1001)
        batch = torch_reference.make_batch(decoder_cases.CASES[family][name], seed=2002)
        model = nnx.merge(port.graphdef.definition, port.lora, port.base)
        graph, stacked = nnx.split(model.layers)

        @functools.partial(jax.jit, static_argnames="kind")
        def run(given, layer, context, *, kind):
            if kind in ("embed", "final_norm"):
                return getattr(model, kind)(given)
            block = nnx.merge(graph, jax.tree.map(lambda x: x[layer], stacked))
            match kind:
                case "block":
                    return block(given, context)[0]
                case "attention":
                    return block.attention(given, context)[0]
                case "mlp":
                    return block.mlp(given, context)
            return getattr(block, kind)(given)

        seen = set()
        for row in (0, 2):
            real_L = batch.mask_BL[row]
            shared, kinds = model.context(jnp.asarray(batch.positions_BL[row]), jnp.asarray(real_L))
            for path, (given, output) in _record(torch_model, batch, row).items():
                kind, layer = _kind(path)
                if kind is not None:
                    seen.add(kind)
                    own = jax.tree.map(lambda x, layer=layer: x[layer], kinds)
                    given, output, rows_M = given[0], output[0], real_L
                    if given.ndim == 3:  # a norm of heads: each is a row
                        width = given.shape[-1]
                        given, output = given.reshape(-1, width), output.reshape(-1, width)
                        rows_M = np.ones(len(given), bool)
                    ours = run(jnp.asarray(given), layer, shared.of_layer(own), kind=kind)
                    np.testing.assert_allclose(
                        np.asarray(ours)[rows_M], output[rows_M], rtol=1e-5, atol=1e-5, err_msg=path
                    )
        self.assertContainsSubset({"embed", "final_norm", "attention", "mlp", "block"}, seen)
        norms = {name for name in port.base["layers"] if name.endswith("norm")}
        self.assertContainsSubset(norms, seen)

    @parameterized.named_parameters(case for case in _CASES if case[2] in _DECODED)
    def test_greedy_decoding_is_transformers_generate(self, family: str, name: str):
        import torch

        model, port = _load(family, name, seed=1002)
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, 29, n).tolist() for n in (3, 9, 1, 17, 20)]
        end, num_new = 2, 16
        expected = []
        for prompt in prompts:
            row = torch.tensor([prompt])
            how = {"do_sample": False, "eos_token_id": end, "pad_token_id": 0}
            output = model.generate(
                input_ids=row, attention_mask=torch.ones_like(row), max_new_tokens=num_new, **how
            )
            new = output[0, len(prompt) :].tolist()
            expected.append(new[: new.index(end)] if end in new else new)
        self.assertGreater(max(map(len, expected)), 5)
        bound = decoder.bind(port.graphdef)
        # Together, and the first three (of one bucket) alone.
        for count, batch_size in ((5, 8), (3, 1)):
            how = {"eos_id": end, "pad_id": 0, "batch_size": batch_size}
            ours = decode.generate(
                bound, port.lora, port.base, prompts[:count], max_new_tokens=num_new, **how
            )
            self.assertEqual(ours, expected[:count])

    @parameterized.named_parameters(_CASES)
    def test_transformers_reads_what_is_saved(self, family: str, name: str):
        import torch
        import transformers

        model, port = _load(family, name, seed=1003)
        tokens_L = np.random.default_rng(1).integers(0, 29, 24)
        with tempfile.TemporaryDirectory() as folder:
            checkpoint.save_model(pathlib.Path(folder, "saved"), port.graphdef.config, port.base)
            saved, report = transformers.AutoModelForCausalLM.from_pretrained(
                pathlib.Path(folder, "saved"), output_loading_info=True, attn_implementation="eager"
            )
        self.assertFalse(any(report.values()), report)
        row = torch.from_numpy(tokens_L[None])
        with model.disable_adapter(), torch.no_grad():
            expected, found = model(row).logits, saved.eval()(row).logits
        np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=1e-6)
