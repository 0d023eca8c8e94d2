"""Programs in PyTorch that make an index of gradients, to a folder.

  python experiments/studies/speed/torch_program.py loop --model=ADAPTER --rows=ids.jsonl --out=O \\
    --dtype=float32 --projection=P --size=65536

measure.py starts them and makes all of their files. They import neither jax nor raslik_jax, so
their time from the command line on is PyTorch's alone. `dtype` is that of the frozen base. The
rows have `input_ids` and `labels` (-100: no target).

loop: no library, one row after another, and the sketch of its gradient by our projection. The
  folder of the projection has `sign.npy`, `bin.npy` and `order.json`, the order of the parameters
  in the flat gradient. The sketches go to `sketches.npy`, [rows, size] of unit length.
bergson: its function `build` with the batches that it plans.
dattri: its LoGra on the layers of the adapter. Rows are sorted by length, 16 in a batch.

bergson and dattri make 16 x 16 coordinates for each layer of the adapter. With --gradients all
keep whole gradients: bergson in its own files, the others in `gradients.npz` with an array of rows
for each parameter.
"""

import argparse
import json
import pathlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

_WIDTH, _BATCH, _TOKENS = 16, 16, 2048


def load_model(options: argparse.Namespace) -> Any:
    """Returns the model with its adapter, whose parameters are trained."""
    import peft
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft's use of transformers
        base = peft.PeftConfig.from_pretrained(options.model).base_model_name_or_path
        dtype = getattr(torch, options.dtype)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
        return peft.PeftModel.from_pretrained(model, options.model, is_trainable=True).eval()


def read_rows(options: argparse.Namespace) -> list[dict[str, list[int]]]:
    """Returns the rows of ids and labels."""
    return [json.loads(line) for line in options.rows.read_text(encoding="utf-8").splitlines()]


def run_loop(options: argparse.Namespace) -> None:
    """Writes the sketches of all rows."""
    import torch

    model = load_model(options)
    named = dict((name, p) for name, p in model.named_parameters() if p.requires_grad)
    sign_P, bin_P = (
        torch.from_numpy(np.load(options.projection / f"{x}.npy")) for x in ("sign", "bin")
    )
    order = json.loads((options.projection / "order.json").read_text(encoding="utf-8"))
    sketches, kept = [], []
    for row in read_rows(options):
        logits_TV = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1].float()
        labels_T = torch.tensor(row["labels"])[1:]
        loss = torch.nn.functional.cross_entropy(logits_TV, labels_T, ignore_index=-100)
        found = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
        # Our factors are torch's transposed.
        flat_P = torch.cat([found[name].T.reshape(-1) for name in order]).float()
        sketch_K = torch.zeros(options.size).index_add_(0, bin_P, flat_P * sign_P)
        sketches.append((sketch_K / sketch_K.norm()).numpy())
        if options.gradients:
            kept.append({name: gradient.float().numpy() for name, gradient in found.items()})
    np.save(options.out / "sketches.npy", np.stack(sketches))
    if options.gradients:
        gradients: dict[str, Any] = {name: np.stack([row[name] for row in kept]) for name in named}
        np.savez(options.out / "gradients.npz", **gradients)


def run_bergson(options: argparse.Namespace) -> None:
    """Builds an index as `bergson build` does."""
    from bergson.build import build
    from bergson.config import DataConfig, IndexConfig, PreprocessConfig

    config = IndexConfig(
        run_path=str(options.out / "index"),
        model=str(options.model),
        data=DataConfig(dataset=str(options.rows)),
        projection_dim=0 if options.gradients else _WIDTH,
        token_batch_size=_TOKENS,
        loss_reduction="mean",
        precision={"float32": "fp32", "bfloat16": "bf16"}[options.dtype],
    )
    build(config, PreprocessConfig())


def run_dattri(options: argparse.Namespace) -> None:
    """Caches the projected gradients of the layers of the adapter."""
    import torch
    from dattri.algorithm.block_projected_if.block_projected_if import BlockProjectedIFAttributor
    from dattri.algorithm.logra import LoGraAttributor
    from dattri.task import AttributionTask

    model, rows = load_model(options), read_rows(options)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    layers = [name.removesuffix(".weight") for name in trained]
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]["input_ids"]))

    def collate(places: list[int]) -> dict[str, Any]:
        longest = max(len(rows[place]["input_ids"]) for place in places)
        found = {
            name: torch.tensor(
                [rows[p][name] + [pad] * (longest - len(rows[p][name])) for p in places]
            )
            for name, pad in (("input_ids", 0), ("labels", -100))
        }
        lengths = torch.tensor([[len(rows[place]["input_ids"])] for place in places])
        return found | {"attention_mask": (torch.arange(longest)[None] < lengths).long()}

    def mean_loss(model: Any, batch: Mapping[str, Any], device: str) -> Any:
        asked = {name: batch[name] for name in ("input_ids", "attention_mask")}
        logits_BLV = model(**asked).logits[:, :-1].float()
        labels_BL = batch["labels"][:, 1:]
        losses_BL = torch.nn.functional.cross_entropy(
            logits_BLV.transpose(1, 2), labels_BL, ignore_index=-100, reduction="none"
        )
        return (losses_BL.sum(dim=1) / (labels_BL != -100).sum(dim=1)).mean()

    task = AttributionTask(
        mean_loss, model, model.state_dict(), checkpoints_load_func=lambda model, _: model
    )
    batches: Any = torch.utils.data.DataLoader(order, batch_size=_BATCH, collate_fn=collate)
    given: dict[str, Any] = {"layer_names": layers, "hessian": "Identity", "device": "cpu"}
    given["cache_dir"] = str(options.out)
    given["offload"] = "cpu"  # its files need a GPU
    if options.gradients:
        none = {"device": "cpu", "proj_dim": -1, "proj_max_batch_size": 64, "proj_type": "identity"}
        made = BlockProjectedIFAttributor(
            task, **given, sparsifier_kwargs=none, projector_kwargs=none
        )
    else:
        made = LoGraAttributor(task, **given, proj_dim=_WIDTH**2)
    made.cache(batches)
    kept = made.offload_manager.cached_gradients
    flat_NP = np.concatenate([kept[place].float().numpy() for place in sorted(kept)])
    flat_NP = flat_NP[np.argsort(order)]
    if not options.gradients:
        np.save(options.out / "sketches.npy", flat_NP)
        return
    sizes = [model.get_submodule(name).weight.numel() for name in layers]
    parts = np.split(flat_NP, np.cumsum(sizes)[:-1], axis=1)
    np.savez(options.out / "gradients.npz", **dict(zip(trained, parts, strict=True)))


PROGRAMS: Mapping[str, Callable[[argparse.Namespace], None]] = {
    "loop": run_loop,
    "bergson": run_bergson,
    "dattri": run_dattri,
}


def main() -> None:
    """Reads the arguments and runs a program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", choices=PROGRAMS)
    for name in ("model", "rows", "projection", "out"):
        parser.add_argument(f"--{name}", required=True, type=pathlib.Path)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--size", required=True, type=int)
    parser.add_argument("--gradients", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True)
    PROGRAMS[options.program](options)


if __name__ == "__main__":
    main()
