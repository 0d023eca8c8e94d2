"""Makes the checkpoint of the study from downloaded weights: a folder as on the hub.

  python experiments/studies/own_model/checkpoint.py --data=DATA --out=FOLDER/smollm2

SmolLM2-135M-Instruct in bfloat16, of its GGUF file and tokenizer, with a chat template.
"""

import dataclasses
import json
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from raslik_jax.base.messages import one_line
from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command

# ChatML, which SmolLM2 was tuned on, without its default system prompt: rows are half as long.
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """The source files of the checkpoint."""

    data: str = setting("", "Folder of the downloaded weights and tokenizers.")
    out: str = setting("", "New folder of the checkpoint.")


def main(options: Options) -> None:
    """Writes the folder."""
    if not options.data or not options.out:
        raise ValueError("--data and --out must name folders, got none: see --help")
    data, out = pathlib.Path(options.data), pathlib.Path(options.out)
    source = data / "models" / "smollm2-135m-instruct"
    found = sorted(source.glob("*.gguf"))
    if len(found) != 1:
        raise ValueError(f"{source} must hold one GGUF file, got {len(found)}: correct --data")
    tokenizer = data / "tokenizers" / "smollm2" / "tokenizer.json"
    convert = [data / "tools" / "gguf_to_hf.py", *found, source, out, "--tokenizer", tokenizer]
    done = subprocess.run([sys.executable, *map(str, convert)], capture_output=True, text=True)
    if done.returncode:
        said = one_line(done.stderr, 200)
        raise ValueError(f"{convert[0]} must convert {found[0].name}, got {said}: correct --data")
    fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "chat_template": _CHATML,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(fields, indent=2))


if __name__ == "__main__":
    command.start(main, Options())
