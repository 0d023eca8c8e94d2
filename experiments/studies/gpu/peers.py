"""Measures programs in PyTorch on one GPU, as the benchmarks here measure this package.

  python experiments/studies/gpu/peers.py
  python experiments/studies/gpu/peers.py --stages=loop,bergson --rows=32 --batched_rows=128
  python experiments/studies/gpu/peers.py --model=olmo2-tiny --rows=4 --batched_rows=4 --prompts=2

The model has the preset's shapes and random weights, drawn on the device in `--dtype`. The program
imports neither jax nor raslik_jax, so its memory and time are PyTorch's alone. Prompts and rows are
those of bench/decode.py and of bench/sketch.py with --length=128 --batch_tokens=8192.

The adapter is on the four projections of attention. Both factors are not zero. A row has `--length`
tokens and its second half is the target. Each line of stdout is one object. Its key "stage" says
which:

setup: every option; device, torch, packages (the versions of the others, null: not installed),
  alloc (PYTORCH_ALLOC_CONF; if the environment has none, torch's memory grows in place).
decode: transformers' `generate`, greedy, with a cache. Prompts are padded on the left and there is
  no end token. prompts, seconds, tokens_per_s (new tokens).
loop: no library, one row after another. The flat float32 gradient is added with random signs into
  `--size` random bins.
bergson: the collector of bergson with the batches that it plans, as `bergson build` after it has
  loaded a model. Its adapter has the base's dtype, as bergson loads it.
dattri: LoGra of dattri on the layers of the adapter, kept in the memory of the host.
dattri_llm: the hooks of dattri-llm with the same projection, to files.

The last four have rows, seconds, rows_per_s, tokens_per_s and nonzero, the share of the output that
is not zero (dattri_llm: of the last batch). The libraries make `--width` x `--width` coordinates
for each layer of the adapter. Each is measured with every number of `--batch_tokens`, and its line
has batch_tokens. All stages have peak_bytes, the most GPU memory of tensors (0 on a CPU).

One call warms up and one is timed. seconds include what the program writes. They leave out drawing
the model.

A stage that fails prints its name and error. The others go on, and the exit status is 1. bergson
2.5.1, dattri 0.3.0 and dattri-llm 0.1.0 are needed for their stages only.

The stage dattri and more tokens in a batch were tried on a CPU only.
"""

import argparse
import contextlib
import gc
import importlib.metadata
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

_PRESETS = pathlib.Path(__file__).resolve().parents[3] / "raslik_jax" / "models" / "presets.json"
_TINY: dict[str, Any] = {
    "model_type": "olmo2",
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
}
_TINY |= {"num_attention_heads": 4, "intermediate_size": 128, "pad_token_id": 0}
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
_PACKAGES = ("transformers", "peft", "bergson", "datasets", "dattri", "dattri-llm")
_STARTED = time.perf_counter()
Line = dict[str, Any]


class Subject(NamedTuple):
    """A model with its adapter, and the rows."""

    options: argparse.Namespace
    model: Any
    ids_NL: Any
    labels_NL: Any  # -100: no target

    def trained(self) -> dict[str, Any]:
        """Returns the parameters of the adapter by name."""
        return {name: p for name, p in self.model.named_parameters() if ".lora_" in name}

    def layers(self) -> list[str]:
        """Returns the names of the layers of the adapter."""
        return [name.removesuffix(".weight") for name in self.trained()]

    def batches(self, count: int, batch_tokens: int) -> Iterator[Mapping[str, Any]]:
        """Yields ids and labels of the first rows."""
        size = max(batch_tokens // self.options.length, 1)
        for start in range(0, count, size):
            part = slice(start, min(start + size, count))
            yield {"input_ids": self.ids_NL[part], "labels": self.labels_NL[part]}


def say(text: str) -> None:
    """Prints a line of progress on stderr."""
    print(f"[{time.perf_counter() - _STARTED:6.1f} s] {text}", file=sys.stderr, flush=True)


def draw_base(options: argparse.Namespace) -> Any:
    """Returns a model of the preset's shapes."""
    import torch
    import transformers

    say(f"drawing the weights of {options.model}")
    fields = _TINY
    if options.model != "olmo2-tiny":
        fields = json.loads(_PRESETS.read_text(encoding="utf-8"))["configs"][options.model]
    config: Any = transformers.AutoConfig.for_model(**fields)
    torch.manual_seed(options.seed)
    with torch.device(options.device):
        model: Any = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, options.dtype), attn_implementation="sdpa"
        )
    return model.eval()


def draw_subject(options: argparse.Namespace, *, cast: bool) -> Subject:
    """Returns a model with an adapter, which is float32 with `cast`, else of the base's dtype."""
    import peft
    import torch

    base = draw_base(options)
    base.config.use_cache = False
    config = peft.LoraConfig(r=options.rank, lora_alpha=32, target_modules=list(_TARGETS))
    model: Any = peft.get_peft_model(base, config, autocast_adapter_dtype=cast)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                # B = 0 would leave half of the gradient zero.
                parameter.add_(0.02 * torch.randn_like(parameter))
    random = np.random.default_rng(options.seed)
    count = max(options.rows, options.batched_rows)
    flat = random.integers(1, base.config.vocab_size, count * options.length, dtype=np.int32)
    ids_NL = torch.from_numpy(flat.reshape(count, -1).astype(np.int64)).to(options.device)
    labels_NL = ids_NL.clone()
    labels_NL[:, : options.length - options.length // 2] = -100
    return Subject(options, model.eval(), ids_NL, labels_NL)


def row_losses(model: Any, ids_BL: Any, labels_BL: Any) -> Any:
    """Returns the mean negative log-likelihood of each row's targets."""
    from torch.nn import functional

    logits_BLV = model(input_ids=ids_BL).logits[:, :-1].float()
    labels_BL = labels_BL[:, 1:]
    losses_M = functional.cross_entropy(
        logits_BLV.flatten(0, 1), labels_BL.flatten(), ignore_index=-100, reduction="none"
    )
    return losses_M.view(labels_BL.shape).sum(dim=1) / (labels_BL != -100).sum(dim=1)


def sketch_in_loop(subject: Subject, count: int, batch_tokens: int) -> float:
    """Sketches the gradients of the first rows; returns the share that is not zero."""
    import torch

    del batch_tokens
    options, parameters = subject.options, list(subject.trained().values())
    generator = torch.Generator(options.device).manual_seed(options.seed)
    given: Any = {"generator": generator, "device": options.device}
    num_params = sum(parameter.numel() for parameter in parameters)
    sign_P = torch.randint(0, 2, (num_params,), **given).float() * 2 - 1
    bin_P = torch.randint(0, options.size, (num_params,), **given)
    sketches = []
    for batch in subject.batches(count, 1):
        loss = row_losses(subject.model, batch["input_ids"], batch["labels"])[0]
        found = torch.autograd.grad(loss, parameters)
        flat_P = torch.cat([gradient.reshape(-1).float() for gradient in found])
        sketch_K = torch.zeros(options.size, device=options.device)
        sketch_K.index_add_(0, bin_P, flat_P * sign_P)
        sketches.append(sketch_K / sketch_K.norm())
    return _nonzero(torch.stack(sketches))


def build_with_bergson(subject: Subject, count: int, batch_tokens: int) -> float:
    """Builds an index of the first rows; returns the share that is not zero."""
    import datasets
    from bergson.collection import collect_gradients
    from bergson.config import DataConfig, IndexConfig, PreprocessConfig
    from bergson.data import allocate_batches, load_gradients
    from bergson.utils.worker_utils import create_processor, extract_peft_target_modules

    model, options = subject.model, subject.options
    # As bergson does after it has loaded a model.
    model.requires_grad_(False)
    model.get_input_embeddings().requires_grad_(True)
    targets = extract_peft_target_modules(model)
    columns = {
        "input_ids": subject.ids_NL[:count].tolist(),
        "labels": subject.labels_NL[:count].tolist(),
        "length": [options.length] * count,
    }
    rows = datasets.Dataset.from_dict(columns)
    with tempfile.TemporaryDirectory() as folder:
        config = IndexConfig(
            run_path=f"{folder}/index",
            data=DataConfig(dataset=""),
            projection_dim=options.width,
            token_batch_size=batch_tokens,
            loss_reduction="mean",
        )
        config.partial_run_path.mkdir(parents=True)
        collect_gradients(
            model=model,
            data=rows,
            processor=create_processor(model, config, targets),
            cfg=config,
            batches=allocate_batches(rows["length"][:], batch_tokens),
            target_modules=targets,
            attention_cfgs={},
            preprocess_cfg=PreprocessConfig(),
        )
        gradients_NK = load_gradients(config.partial_run_path)
        return float((gradients_NK != 0).mean())


def cache_with_dattri(subject: Subject, count: int, batch_tokens: int) -> float:
    """Caches projected gradients of the first rows; returns the share that is not zero."""
    import torch
    from dattri.algorithm.logra import LoGraAttributor
    from dattri.task import AttributionTask

    def loss(model: Any, batch: Mapping[str, Any], device: str) -> Any:
        return row_losses(model, batch["input_ids"].to(device), batch["labels"].to(device)).mean()

    def collate(places: list[int]) -> dict[str, Any]:
        return {
            "input_ids": subject.ids_NL[places].cpu(),
            "labels": subject.labels_NL[places].cpu(),
        }

    model, options = subject.model, subject.options
    task = AttributionTask(
        loss, model, model.state_dict(), checkpoints_load_func=lambda model, _: model
    )
    size = max(batch_tokens // options.length, 1)
    places: Any = range(count)
    loader: Any = torch.utils.data.DataLoader(places, batch_size=size, collate_fn=collate)
    given: Any = {"layer_names": subject.layers(), "hessian": "Identity", "offload": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        made = LoGraAttributor(
            task, **given, device=options.device, proj_dim=options.width**2, cache_dir=folder
        )
        made.cache(loader)
    kept = made.offload_manager.cached_gradients
    return _nonzero(torch.cat([kept[place] for place in sorted(kept)]))


def capture_with_dattri_llm(subject: Subject, count: int, batch_tokens: int) -> float:
    """Writes projected gradients of the first rows; returns the share that is not zero."""
    import torch
    from dattri_llm import GradientStorageManager, HookManager, HookManagerConfig, OffloadCallback

    model, options = subject.model, subject.options
    projection = {"style": "logra", "proj_dim": options.width, "proj_max_batch_size": 64}
    config = HookManagerConfig(
        hook_types=dict.fromkeys(subject.layers(), "linear_io"),
        projection_kwargs={"__default__": projection},
        capture_style="materialized",
    )
    with tempfile.TemporaryDirectory() as folder:
        store = GradientStorageManager(folder)
        hooks = HookManager(model, config, [OffloadCallback(1, store)])
        with hooks.collect(deregister_on_exit=True):
            for batch in subject.batches(count, batch_tokens):
                row_losses(model, batch["input_ids"], batch["labels"]).mean().backward()
                model.zero_grad(set_to_none=True)
        blocks = hooks.get_gradient().data.values()
        return _nonzero(torch.cat([block.reshape(-1) for block in blocks]))


def _nonzero(values: Any) -> float:
    """Returns the share of numbers that are not zero."""
    return float((values != 0).float().mean())


class Program(NamedTuple):
    """A program that makes gradients of rows: its call, and how it takes them."""

    call: Callable[[Subject, int, int], float]
    batched: bool = True
    cast: bool = True  # a float32 adapter, as PEFT makes it


PROGRAMS: Mapping[str, Program] = {
    "loop": Program(sketch_in_loop, batched=False),
    "bergson": Program(build_with_bergson, cast=False),
    "dattri": Program(cache_with_dattri),
    "dattri_llm": Program(capture_with_dattri_llm),
}


def timed(options: argparse.Namespace, call: Callable[[], Any]) -> tuple[Any, float]:
    """Returns the result of a call and its seconds, all work of the GPU included."""
    import torch

    wait = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    result = call()
    wait()
    return result, time.perf_counter() - start


def peak_bytes(options: argparse.Namespace) -> int:
    """Returns the most GPU memory of tensors since the last reset."""
    import torch

    return torch.cuda.max_memory_allocated() if options.device == "cuda" else 0


def measure_decode(options: argparse.Namespace) -> Line:
    """Returns the line of decoding."""
    import torch
    import transformers

    random = np.random.default_rng(options.seed)
    length_N = np.sort(random.integers(33, 65, options.prompts))
    model = draw_base(options)
    vocab_size = model.config.vocab_size
    prompts = [random.integers(0, vocab_size, n).tolist() for n in length_N]
    model.generation_config.eos_token_id = None
    kind = {} if options.cache == "dynamic" else {"cache_implementation": options.cache}

    def decode(rows: list[list[int]], new_tokens: int) -> None:
        longest = max(map(len, rows))
        ids_BL = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
        mask_BL = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        config = transformers.GenerationConfig(
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            pad_token_id=0,
            use_cache=True,
            **kind,
        )
        with torch.inference_mode():
            made_BL = model.generate(
                input_ids=ids_BL.to(options.device),
                attention_mask=mask_BL.to(options.device),
                generation_config=config,
            )
        if made_BL.shape[1] != longest + new_tokens:
            raise ValueError(
                f"every prompt must get {new_tokens} new tokens, got {made_BL.shape[1] - longest}"
            )

    def decode_all() -> None:
        for start in range(0, len(prompts), options.batch_size):
            decode(prompts[start : start + options.batch_size], options.new_tokens)

    say("decode: warming up")
    # A static cache has the size of all tokens and is compiled for it.
    few = options.new_tokens if kind else min(4, options.new_tokens)
    decode(prompts[-options.batch_size :], few)
    say("decode")
    _, seconds = timed(options, decode_all)
    return {
        "stage": "decode",
        "prompts": options.prompts,
        "seconds": seconds,
        "tokens_per_s": options.prompts * options.new_tokens / seconds,
        "peak_bytes": peak_bytes(options),
    }


def measure_program(options: argparse.Namespace, name: str, batch_tokens: int) -> Line:
    """Returns the line of a program that makes gradients."""
    program = PROGRAMS[name]
    subject = draw_subject(options, cast=program.cast)
    count, few = options.rows, 2
    if program.batched:
        # Two batches: dattri compiles a first one and a later one.
        count, few = options.batched_rows, 2 * max(batch_tokens // options.length, 1)
    say(f"{name}: warming up")
    program.call(subject, min(few, count), batch_tokens)
    say(f"{name}: {count} rows")
    share, seconds = timed(options, lambda: program.call(subject, count, batch_tokens))
    return {
        "stage": name,
        "rows": count,
        "seconds": seconds,
        "rows_per_s": count / seconds,
        "tokens_per_s": count * options.length / seconds,
        "nonzero": share,
        "peak_bytes": peak_bytes(options),
    } | ({"batch_tokens": batch_tokens} if program.batched else {})


def measure(options: argparse.Namespace) -> Iterator[Line]:
    """Yields the lines of the module's docstring."""
    import torch

    versions: dict[str, str | None] = dict.fromkeys(_PACKAGES)
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    on_gpu = options.device == "cuda"
    yield {
        "stage": "setup",
        **vars(options),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "packages": versions,
        "alloc": os.environ.get("PYTORCH_ALLOC_CONF"),
    }
    for name in options.stages:
        batched = name in PROGRAMS and PROGRAMS[name].batched
        for batch_tokens in options.batch_tokens if batched else (0,):
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            try:
                if name == "decode":
                    line = measure_decode(options)
                else:
                    line = measure_program(options, name, batch_tokens)
            except Exception as error:
                line = {"stage": name, "error": f"{type(error).__name__}: {error}"}
                line |= {"batch_tokens": batch_tokens} if batched else {}
            yield line
            gc.collect()
            if on_gpu:
                torch.cuda.empty_cache()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the options; device and dtype are those of the machine."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = {"seed": 0, "prompts": 256, "batch_size": 256, "new_tokens": 128, "rows": 64}
    numbers |= {"batched_rows": 256, "length": 128, "size": 65536, "rank": 8, "width": 16}
    parser.add_argument("--model", default="olmo2-7b", help="a preset's name, or olmo2-tiny")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--cache", choices=("dynamic", "static"), default="dynamic")
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    stages = "decode", *PROGRAMS
    parser.add_argument("--stages", default=",".join(stages))
    parser.add_argument("--batch_tokens", default="2048,4096")
    options = parser.parse_args(arguments)
    options.stages = options.stages.split(",")
    if unknown := set(options.stages) - set(stages):
        parser.error(f"stages must be of {', '.join(stages)}, got {', '.join(sorted(unknown))}")
    options.batch_tokens = [int(number) for number in options.batch_tokens.split(",")]
    # The cache of decoding grows by a little in each step, which cuts up plain memory.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    import torch

    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.dtype == "auto":
        options.dtype = "bfloat16" if options.device == "cuda" else "float32"
    return options


def main() -> int:
    """Prints the lines; returns 1 if a stage failed."""
    options, failed, lines = parse(), 0, sys.stdout
    # The libraries print on stdout too.
    with contextlib.redirect_stdout(sys.stderr):
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        for line in measure(options):
            print(json.dumps(line), file=lines, flush=True)
            if "error" in line:
                say(f"{line['stage']} failed: {line['error']}")
                failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
