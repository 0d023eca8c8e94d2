"""Every architecture against what torch said of it, as written by golden/make_decoders.py.

Its other settings are held to a live torch by tests/parity/decoder_parity_test.py.
"""

import pathlib
from typing import NamedTuple

import compiling
import decoder_cases
import decoder_parity
import numpy as np
from absl.testing import parameterized
from folders import FolderTest

_FIRST = [(f"_{family}_{name}", family, name) for family, name in decoder_cases.FIRST.items()]


class _Batch(NamedTuple):
    tokens_BL: np.ndarray
    mask_BL: np.ndarray
    target_mask_BL: np.ndarray
    positions_BL: np.ndarray


def _read(family: str, name: str) -> dict[str, dict[str, np.ndarray]]:
    """Returns the arrays of one case, by kind and then by name."""
    path = pathlib.Path(__file__).parents[1] / "golden" / f"{family}.npz"
    kinds: dict[str, dict[str, np.ndarray]] = {}
    with np.load(path) as file:
        for key in file.files:
            case, kind, rest = key.split("/", 2)
            if case == name:
                kinds.setdefault(kind, {})[rest] = file[key]
    return kinds


class DecoderGoldenTest(FolderTest):
    @parameterized.named_parameters(_FIRST)
    def test_weights_logits_and_lora_gradients_equal_torchs(self, family: str, name: str):
        case = decoder_cases.CASES[family][name]
        golden = _read(family, name)
        batch = _Batch(**golden["batch"])
        port = decoder_parity.load_port(case, golden["base"], golden["lora"], self.folder)
        decoder_parity.assert_same_weights(port, golden["base"])
        expected = []
        for row in range(len(batch.tokens_BL)):
            prefix = f"{row}/"
            gradient = {
                key.removeprefix(prefix): value
                for key, value in golden["gradient"].items()
                if key.startswith(prefix)
            }
            expected.append((golden["loss"][str(row)], golden["logits"][str(row)], gradient))
        # Compiling is all of the time here; the live comparison compiles with optimizations.
        decoder_parity.assert_same_behavior(
            port, batch, expected, compiler_options=compiling.OPTIONS
        )
