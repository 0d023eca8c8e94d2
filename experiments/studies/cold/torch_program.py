"""A loop in PyTorch without a library: the gradient of every row, sketched, to a file.

  python experiments/studies/cold/torch_program.py --model=ADAPTER --rows=rows.jsonl --projection=P --out=O

measure.py starts this program and makes all of its files. The program imports neither jax nor
raslik_jax, so its time from the command line on is PyTorch's alone.

The rows have `input_ids` and `labels` (-100: no target). The folder of the projection has
`sign.npy`, `bin.npy` and `order.json`. The order lists the parameters as in the flat gradient. The
sketches go to `sketches.npy`, [rows, size] of unit length. With --gradients the gradients go to
`gradients.npz` too. It has one array of rows for each parameter, in torch's layout.
"""

import argparse
import json
import pathlib
import warnings
from typing import Any

import numpy as np
import peft
import torch
import transformers


def main() -> None:
    """Reads the arguments and writes the sketches."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "rows", "projection", "out"):
        parser.add_argument(f"--{name}", required=True, type=pathlib.Path)
    parser.add_argument("--size", required=True, type=int)
    parser.add_argument("--gradients", action="store_true")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft's use of transformers
        base = peft.PeftConfig.from_pretrained(options.model).base_model_name_or_path
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="auto")
        model = peft.PeftModel.from_pretrained(model, options.model, is_trainable=True).eval()
    named = dict((name, p) for name, p in model.named_parameters() if p.requires_grad)
    sign_P, bin_P = (
        torch.from_numpy(np.load(options.projection / f"{x}.npy")) for x in ("sign", "bin")
    )
    order = json.loads((options.projection / "order.json").read_text(encoding="utf-8"))
    sketches, kept = [], []
    for line in options.rows.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        logits_TV = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1].float()
        labels_T = torch.tensor(row["labels"])[1:]
        loss = torch.nn.functional.cross_entropy(logits_TV, labels_T, ignore_index=-100)
        found = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
        # Our factors are torch's transposed.
        flat_P = torch.cat([found[name].T.reshape(-1) for name in order]).float()
        sketch_K = torch.zeros(options.size).index_add_(0, bin_P, flat_P * sign_P)
        sketches.append((sketch_K / sketch_K.norm()).numpy())
        if options.gradients:
            kept.append({name: gradient.numpy() for name, gradient in found.items()})
    options.out.mkdir(parents=True)
    np.save(options.out / "sketches.npy", np.stack(sketches))
    if options.gradients:
        gradients: dict[str, Any] = {name: np.stack([row[name] for row in kept]) for name in named}
        np.savez(options.out / "gradients.npz", **gradients)


if __name__ == "__main__":
    main()
