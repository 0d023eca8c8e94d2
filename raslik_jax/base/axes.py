"""The axis letters and shared array types of the whole package.

An array's name ends in the letters of its axes (`sketch_NK`). Its jaxtyping string has the same
letters. Scalars and trees have no suffix.

| letter | axis |
|---|---|
| N | corpus: training examples |
| Q | queries: undesired generations |
| B | batch |
| L | tokens of one example, padding included |
| T | target positions of one example: the tokens whose loss counts |
| V | vocabulary |
| E | embedding width |
| P | LoRA parameters, the paper's d |
| K | sketch coordinates, the paper's k |
| H, G, D | attention heads, key-value heads, head width |
| R | LoRA rank |
| S | slots of the key-value cache, steps of a training |
| M | methods under comparison, batches of a plan |
"""

from typing import Any

import jax
import numpy as np

Array = jax.Array | np.ndarray
# A nested dict of arrays: LoRA parameters, base weights, optimizer states.
Tree = Any
