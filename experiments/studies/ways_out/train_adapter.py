"""Trains the adapter of the study as its users train theirs: with TRL and PEFT, in PyTorch.

  python experiments/studies/ways_out/train_adapter.py --checkpoint=FOLDER/smollm2 --out=OUT

FOLDER/smollm2 is made by own_model/checkpoint.py. Needs `pip install trl peft`. The adapter has
PEFT's default modules, rank 8 and three epochs; training_args.json next to it is TRL's own account
of the training. The stored adapter was made on one thread; other versions round differently.
"""

import dataclasses
import json
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command

HERE = pathlib.Path(__file__).resolve().parent
BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """What is trained, and where it goes."""

    checkpoint: str = setting("", "Checkpoint that own_model/checkpoint.py made.")
    out: str = setting("", "New folder of the adapter.")
    rows: str = setting(str(HERE / "train.jsonl"), "JSONL of rows with messages.")
    base: str = setting(BASE, "Name of the base on the hub, for adapter_config.json.")
    seed: int = setting(0, "Seed of the adapter and of the order of the rows.")
    epochs: int = setting(3, "Passes over the rows.", low=1)
    learning_rate: float = setting(2e-3, "Peak learning rate.", above=0)
    bf16: bool = setting(False, "Compute in bfloat16 where autocast does.")
    threads: int = setting(1, "Threads of PyTorch.", low=1)


def main(options: Options) -> None:
    """Trains, and stores the adapter in bfloat16."""
    if not options.checkpoint or not options.out:
        raise ValueError("--checkpoint and --out must name folders, got none: see --help")
    command.require("torch", "datasets", "peft", "trl")
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    out = pathlib.Path(options.out)
    torch.set_num_threads(options.threads)
    rows = [json.loads(line)["messages"] for line in pathlib.Path(options.rows).open()]
    data = Dataset.from_list([{"prompt": row[:1], "completion": row[1:]} for row in rows])
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32),
        args=SFTConfig(
            output_dir=str(out),
            bf16=options.bf16,
            use_cpu=True,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            completion_only_loss=True,  # the default, said for those who read the recipe
            logging_steps=10,
            seed=options.seed,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=4,
            learning_rate=options.learning_rate,
            warmup_steps=10,
        ),
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(options.checkpoint),
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16),
    )
    trainer.train()
    tuned: Any = trainer.model
    tuned.peft_config["default"].base_model_name_or_path = options.base
    tuned.save_pretrained(out)
    path = out / "adapter_model.safetensors"
    weights = {name: leaf.to(torch.bfloat16) for name, leaf in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    said = json.loads(trainer.args.to_json_string())
    said["output_dir"] = "out"
    (out / "training_args.json").write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    command.start(main, Options())
