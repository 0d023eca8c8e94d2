"""The peers' way to the same sketches: one example at a time, in PyTorch.

transformers' model and peft's adapter with the weights, the adapter, the loss and the projection of
the run that it is measured against: all logits, one backward pass an example, then the sketch. Used
by sketch.py; needs torch, transformers and peft.
"""

import pathlib
import tempfile
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import peft
import torch
import transformers

from experiments.bench.harness import say
from experiments.bench.workload import Options, Plan, Subject, manifest_order, signs_and_bins
from raslik_jax.models import adapters, checkpoint, products
from raslik_jax.sketch.families import PROJECTIONS

# sketch(tokens_L, target_mask_L) -> unit sketch_K of one example.
Peer = Callable[[np.ndarray, np.ndarray], np.ndarray]


class TorchLoop(NamedTuple):
    """What runs the peer's rows, how many rows and tokens they are, and what it runs on."""

    run: Callable[[], None]
    examples: int
    tokens: int
    about: dict[str, Any]


def make_loop(options: Options, subject: Subject, plan: Plan) -> TorchLoop:
    """Returns the peer with its rows, once its sketches agree with ours."""
    say("loading the torch loop")
    device = "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu"
    peer, first = make_peer(subject, device), plan.shapes[0]
    ours = np.asarray(first.sketch().unit_BK)
    cosines = []
    for row, tokens_L, mask_L in first.sample():
        length = int(np.flatnonzero(mask_L)[-1]) + 1
        cosines.append(float(peer(tokens_L[:length], mask_L[:length]) @ ours[row]))
    # A bfloat16 base rounds at other places.
    least = 0.9999 if subject.model.dtype == np.float32 else 0.9
    if not min(cosines) >= least:
        raise ValueError(
            f"the torch loop's sketch and ours must have a cosine of {least} or more, got "
            f"{min(cosines):.6f}: nothing was compared"
        )
    order = np.argsort(plan.rows.lengths_N, kind="stable")
    count = min(options.torch_examples, len(order))
    # The middle of each of `count` equal slices of the sorted rows, unpadded, in a mixed order.
    picks = order[(2 * np.arange(count) + 1) * len(order) // (2 * count)]
    sample = plan.rows.take(np.random.default_rng(options.seed).permutation(picks))

    def run() -> None:
        for tokens_L, start in zip(sample.tokens, sample.start_N, strict=True):
            peer(tokens_L, np.arange(len(tokens_L)) >= start)

    about = {"threads": torch.get_num_threads(), "device": device, "worst_cosine": min(cosines)}
    return TorchLoop(run, count, int(sample.lengths_N.sum()), about)


def make_peer(subject: Subject, device: str) -> Peer:
    """Returns the function that sketches one example; dropout stays off."""
    config, _, lora, base = subject.model
    spec = subject.projection.spec
    if not PROJECTIONS[spec.family].bins:
        raise ValueError(
            f"--family must have bins for --compare=torch_loop, got {spec.family}: choose another"
        )
    sign_P, bin_P = (torch.from_numpy(x_P).to(device) for x_P in signs_and_bins(spec))
    sign_P = sign_P.float()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft's use of transformers
        model_folder, adapter_folder = (pathlib.Path(folder) / x for x in ("model", "adapter"))
        checkpoint.save_model(model_folder, config, products.read(base))
        adapters.save_adapter(adapter_folder, lora, subject.adapter, config)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype="auto")
        model = peft.PeftModel.from_pretrained(model, adapter_folder, is_trainable=True)
    # Evaluation mode drops nothing out; gradients flow all the same.
    model = model.to(device).eval()
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    parameters = [p for _, p in named]
    order = manifest_order([name for name, _ in named], lora)

    def sketch(tokens_L: np.ndarray, target_mask_L: np.ndarray) -> np.ndarray:
        tokens_1L = torch.from_numpy(tokens_L.astype(np.int64))[None].to(device)
        labels = np.where(target_mask_L, tokens_L, -100).astype(np.int64)
        labels_T = torch.from_numpy(labels).to(device)[1:]
        logits_TV = model(input_ids=tokens_1L).logits[0, :-1].float()
        value = torch.nn.functional.cross_entropy(logits_TV, labels_T, ignore_index=-100)
        gradients = torch.autograd.grad(value, parameters)
        # torch keeps the factors transposed.
        flat_P = torch.cat([gradients[i].T.reshape(-1) for i in order]).float()
        sketch_K = torch.zeros(spec.size, device=device).index_add_(0, bin_P, flat_P * sign_P)
        return (sketch_K / sketch_K.norm()).cpu().numpy()

    return sketch
