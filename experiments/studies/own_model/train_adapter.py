"""Trains an adapter of the study as its users train theirs: with TRL and PEFT, in PyTorch.

  python experiments/studies/own_model/train_adapter.py --checkpoint=FOLDER/smollm2 --out=OUT

checkpoint.py makes FOLDER/smollm2. The command needs `pip install trl peft` in addition to this
package. It trains three epochs at the rates of a schedule of four. TRL 1.16.0, PEFT 0.21.2,
transformers 5.23.0 and PyTorch 2.13.0 made the stored adapter on one thread. Other versions round
differently.
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
_EPOCHS, _PLANNED = 3, 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """What is trained, and where it goes."""

    checkpoint: str = setting("", "Checkpoint that checkpoint.py made.")
    out: str = setting("", "New folder of the adapter.")


def main(options: Options) -> None:
    """Trains, and stores the adapter in bfloat16."""
    if not options.checkpoint or not options.out:
        raise ValueError("--checkpoint and --out must name folders, got none: see --help")
    command.require("torch", "datasets", "peft", "trl")
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class Ends(TrainerCallback):
        """Ends the training after its epochs."""

        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.epoch >= _EPOCHS

    out = pathlib.Path(options.out)
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32)
    rows = [json.loads(line)["messages"] for line in (HERE / "train.jsonl").open()]
    # The loss is on the answer: of prompt and completion, TRL learns the completion.
    data = Dataset.from_list([{"prompt": row[:1], "completion": row[1:]} for row in rows])
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(out),
            warmup_steps=10,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            train_sampling_strategy="group_by_length",
            seed=0,
            num_train_epochs=_PLANNED,
            per_device_train_batch_size=4,
            learning_rate=2e-3,
        ),
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[Ends()],
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=16, target_modules=targets),
    )
    trainer.train()
    tuned: Any = trainer.model
    tuned.peft_config["default"].base_model_name_or_path = BASE
    tuned.save_pretrained(out)
    path = out / "adapter_model.safetensors"
    weights = {name: leaf.to(torch.bfloat16) for name, leaf in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})


if __name__ == "__main__":
    command.start(main, Options())
