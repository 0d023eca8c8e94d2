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
from experiments.bench.workload import Compiled, Options, Plan, Subject, signs_and_bins
from raslik_jax.models import checkpoint
from raslik_jax.sketch import projections
from raslik_jax.sketch.families import PROJECTIONS

# sketch(tokens_L, target_mask_L) -> unit sketch_K of one example.
Peer = Callable[[np.ndarray, np.ndarray], np.ndarray]


class TorchLoop(NamedTuple):
    """The peer and the rows that it takes: unpadded, spread evenly over the sorted lengths."""

    peer: Peer
    rows: tuple[tuple[np.ndarray, np.ndarray], ...]
    tokens: int
    worst_cosine: float
    device: str
    threads: int

    def run(self, part: slice) -> None:
        """Sketches some of the rows."""
        for row in self.rows[part]:
            self.peer(*row)


def make_loop(options: Options, subject: Subject, plan: Plan, first: Compiled) -> TorchLoop:
    """Returns the peer with its rows, once its sketches agree with ours.

    Raises:
      ValueError: they do not, or the family has no bins.
    """
    say("loading the torch loop")
    device = "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu"
    peer = make_peer(subject, loss=options.loss, device=device)
    ours = np.asarray(first.sketch().unit_BK)
    cosines = []
    for row in first.shape.rows_with_targets(2):
        tokens_L, mask_L = (np.asarray(array_BL[row]) for array_BL in first.shape.rows)
        length = int(np.flatnonzero(mask_L)[-1]) + 1
        cosines.append(float(peer(tokens_L[:length], mask_L[:length]) @ ours[row]))
    # A quantized base is not copied, and a bfloat16 one rounds at other places.
    least = 0.9999 if options.quantize == "none" and subject.is_float32 else 0.9
    if not min(cosines) >= least:
        raise ValueError(
            f"the torch loop's sketch and ours must have a cosine of {least} or more, got "
            f"{min(cosines):.6f}: nothing was compared"
        )
    random = np.random.default_rng(options.seed)
    order = np.argsort(plan.length_N, kind="stable")
    count = min(options.torch_examples, len(order))
    # The middle of each of `count` equal slices of the sorted rows, in a mixed order.
    picks = random.permutation(order[(2 * np.arange(count) + 1) * len(order) // (2 * count)])
    rows = []
    for pick in picks:
        length, targets = int(plan.length_N[pick]), int(plan.target_N[pick])
        tokens_L = random.integers(1, subject.model.config.vocab_size, length, dtype=np.int32)
        rows.append((tokens_L, np.arange(length) >= length - targets))
    tokens = int(plan.length_N[picks].sum())
    return TorchLoop(peer, tuple(rows), tokens, min(cosines), device, torch.get_num_threads())


def make_peer(subject: Subject, *, loss: str, device: str) -> Peer:
    """Returns the function that sketches one example; dropout stays off."""
    config, _, lora, base = subject.model
    lora_config = subject.adapter
    project = torch_projection(subject.projection.spec, device)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft's use of transformers
        model_folder, adapter_folder = (pathlib.Path(folder) / x for x in ("model", "adapter"))
        checkpoint.save_model(model_folder, config, base)
        checkpoint.save_adapter(adapter_folder, lora, lora_config, config)
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
        labels_L = torch.from_numpy(labels).to(device)
        logits_LV = model(input_ids=tokens_1L).logits[0].float()
        if loss == "next_token":
            logits_LV, labels_L = logits_LV[:-1], labels_L[1:]
        value = torch.nn.functional.cross_entropy(logits_LV, labels_L, ignore_index=-100)
        gradients = torch.autograd.grad(value, parameters)
        # torch keeps the factors transposed.
        sketch_K = project(torch.cat([gradients[i].T.reshape(-1) for i in order]).float())
        return (sketch_K / sketch_K.norm()).cpu().numpy()

    return sketch


def manifest_order(names: list[str], lora: Any) -> list[int]:
    """Returns the parameters' positions in the order of the flat gradient.

    Ours stacks the layers of one factor: "layers/dense/a" is layer 0's, 1's, ... `dense.lora_A`.
    """
    order = []
    for segment in projections.gradient_manifest(lora):
        _, target, factor = segment.path.split("/")
        for layer in range(segment.shape[0]):
            inside, end = f".layers.{layer}.", f".{target}.lora_{factor.upper()}.default.weight"
            (match,) = (i for i, name in enumerate(names) if inside in name and name.endswith(end))
            order.append(match)
    return order


def torch_projection(spec: projections.ProjectionSpec, device: str) -> Callable[[Any], Any]:
    """Returns the function of a flat gradient in torch."""
    if not PROJECTIONS[spec.family].bins:
        binned = " or ".join(name for name, family in PROJECTIONS.items() if family.bins)
        raise ValueError(
            f"--family must be {binned} for --compare=torch_loop, got {spec.family}: choose another"
        )
    sign, bins = (torch.from_numpy(x_P).to(device) for x_P in signs_and_bins(spec))
    sign = sign.float()
    return lambda flat_P: torch.zeros(spec.size, device=device).index_add_(0, bins, flat_P * sign)
