"""Writes tests/golden/<architecture>.npz: what torch says of tiny random decoders.

    python tests/golden/make_decoders.py [architecture ...]     # without a name: all of them

Made with torch 2.13.0, transformers 5.23.0 and peft 0.21.2 on a CPU. Each file holds, of the first
case in tests/fixtures/decoder_cases.py: the checkpoint's weights and the adapter (float16, exact),
four rows of tokens with their masks, and of each row the logits, the loss and the gradient of every
LoRA factor.
"""

import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "fixtures"))

import decoder_cases  # noqa: E402
import torch_reference  # noqa: E402


def main() -> None:
    for family in sys.argv[1:] or decoder_cases.CASES:
        name, arrays = decoder_cases.FIRST[family], {}
        case = decoder_cases.CASES[family][name]
        model = torch_reference.make_model(case, seed=0)
        batch = torch_reference.make_batch(case, seed=100)
        for key, value in torch_reference.base_weights(model).items():
            arrays[f"{name}/base/{key}"] = value.astype(np.float16)
        for key, value in torch_reference.adapter_leaves(model, gradient=False).items():
            arrays[f"{name}/lora/{key}"] = value.astype(np.float16)
        for key, value in batch._asdict().items():
            arrays[f"{name}/batch/{key}"] = value
        for row in range(len(batch.tokens_BL)):
            loss, logits_LV, gradient = torch_reference.loss_and_gradient(model, batch, row)
            arrays[f"{name}/loss/{row}"] = np.float32(loss)
            arrays[f"{name}/logits/{row}"] = logits_LV
            for key, value in gradient.items():
                arrays[f"{name}/gradient/{row}/{key}"] = value
        path = pathlib.Path(__file__).with_name(f"{family}.npz")
        np.savez_compressed(path, **arrays)
        print(path, path.stat().st_size)


if __name__ == "__main__":
    main()
