"""The one place where an example becomes a prompt: training, queries and decoding use it."""

import hashlib
import json
from typing import NamedTuple

from raslik_jax.data.examples import Example


class Template(NamedTuple):
    """Two forms of a prompt, for examples with and without an input."""

    with_input: str
    without_input: str


TEMPLATES: dict[str, Template] = {
    # Word for word the published ones, which end without a line feed: PROMPT_DICT in train.py of
    # github.com/tatsu-lab/stanford_alpaca at 15b51ae (Apache-2.0).
    "alpaca": Template(
        with_input=(
            "Below is an instruction that describes a task, paired with an input that provides "
            "further context. Write a response that appropriately completes the request.\n\n"
            "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
        ),
        without_input=(
            "Below is an instruction that describes a task. Write a response that appropriately "
            "completes the request.\n\n### Instruction:\n{instruction}\n\n### Response:"
        ),
    ),
    # A short frame for small models, whose time should go into the text that differs.
    "brief": Template(
        with_input="### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
        without_input="### Instruction:\n{instruction}\n\n### Response:\n",
    ),
}


def render_prompt(example: Example, template: str) -> str:
    """Returns the text after which the model writes; an input of whitespace counts as none."""
    forms = TEMPLATES[template]
    form = forms.with_input if example.input.strip() else forms.without_input
    return form.format(instruction=example.instruction, input=example.input)


def template_hash(template: str) -> str:
    """Returns 16 hex digits of the sha256 of both forms, for manifests."""
    return hashlib.sha256(json.dumps(TEMPLATES[template]).encode()).hexdigest()[:16]
