"""Makes the checkpoint of the study from downloaded weights: a folder as on the hub.

  python experiments/studies/own_model/checkpoint.py --data=DATA --out=FOLDER/smollm2

SmolLM2-135M-Instruct in bfloat16, of its GGUF file and tokenizer, with a chat template.
"""

import argparse
import json
import pathlib
import subprocess
import sys

# ChatML, which SmolLM2 was tuned on, without its default system prompt: rows are half as long.
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def main() -> None:
    """Writes the folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, type=pathlib.Path)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    given = parser.parse_args()
    source = given.data / "models" / "smollm2-135m-instruct"
    (weights,) = source.glob("*.gguf")
    tokenizer = given.data / "tokenizers" / "smollm2" / "tokenizer.json"
    command = [sys.executable, given.data / "tools" / "gguf_to_hf.py", weights, source, given.out]
    subprocess.run([*command, "--tokenizer", tokenizer], check=True, capture_output=True)
    fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "chat_template": _CHATML,
    }
    (given.out / "tokenizer_config.json").write_text(json.dumps(fields, indent=2))


if __name__ == "__main__":
    main()
