"""What bfloat16 rows cost on real LoRA gradients: a real language model on rows of Alpaca.

RASLIK_REAL_ROWS=10000 is the measurement of docs/notes/index.md; by default fewer rows, for time.
"""

import functools
import os
import pathlib
import shutil
import struct
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import absltest
from support import shared_data

from raslik_jax.data import batches
from raslik_jax.data.read.formats import read_examples
from raslik_jax.data.tokens import prompts
from raslik_jax.index import build, search
from raslik_jax.index.store import SketchStore
from raslik_jax.models import checkpoint, decoder
from raslik_jax.models.lora import LoRAConfig
from raslik_jax.sketch import gradients, projections
from raslik_jax.sketch.loss import example_loss
from raslik_jax.train import loop, steps

NUM_ROWS, NUM_QUERIES, NUM_TUNE = int(os.environ.get("RASLIK_REAL_ROWS", "2000")), 8, 2_000
ENDS = NUM_ROWS // 10
MAX_LEN, SIZE, RANK = 128, 16_384, 16
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BOS, EOS = 1, 2


def pieces_of(path: pathlib.Path) -> dict[bytes, int]:
    """The vocabulary of stories260k: a piece's bytes and its id."""
    raw = path.read_bytes()
    found, offset, number = {}, 4, 0
    while offset < len(raw):
        _, length = struct.unpack_from("fi", raw, offset)
        piece = raw[offset + 8 : offset + 8 + length]
        if 3 <= number < 259:  # <0x00> to <0xFF>
            piece = bytes([number - 3])
        found.setdefault(piece, number)
        offset, number = offset + 8 + length, number + 1
    return found


def encode_text(text: str, pieces: dict[bytes, int]) -> list[int]:
    """Ids of a text by longest match: not the merges' order, but the model's own pieces."""
    raw, ids, start = text.encode(), [], 0
    while start < len(raw):
        length = next(n for n in range(12, 0, -1) if raw[start : start + n] in pieces)
        ids.append(pieces[raw[start : start + length]])
        start += length
    return ids


def encode(rows, pieces) -> batches.Encoded:
    tokens, starts = [], []
    for row in rows:
        prompt = [BOS, *encode_text(prompts.fill_form(row, prompts.TEMPLATES["brief"]), pieces)][
            : MAX_LEN // 2
        ]
        answer = [*encode_text(row.output or ".", pieces), EOS][: MAX_LEN - len(prompt)]
        tokens.append(np.array(prompt + answer, np.int32))
        starts.append(len(prompt))
    ids = tuple(row.example_id for row in rows)
    return batches.Encoded(ids, tuple(tokens), np.array(starts), pad_id=0)


@pytest.mark.study
class RealGradientsTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        data = shared_data()
        cls.root = tempfile.mkdtemp()
        cls.addClassCleanup(shutil.rmtree, cls.root)
        rows = read_examples(data / "alpaca" / "alpaca_data.json.xz")
        chosen = np.random.default_rng(0).permutation(len(rows))[: NUM_ROWS + NUM_QUERIES]
        encoded = encode(
            [rows[n] for n in chosen], pieces_of(data / "models" / "stories260k" / "tok512.bin")
        )
        model = checkpoint.load_model(
            data / "models" / "stories260k",
            dtype=jnp.float32,
            lora_config=LoRAConfig(rank=RANK, alpha=2.0 * RANK, targets=TARGETS),
            key=jax.random.key(0),
        )
        bound = decoder.bind(model.graphdef)
        train = encoded._replace(
            ids=encoded.ids[:NUM_ROWS], tokens=encoded.tokens[:NUM_ROWS],
            start_N=encoded.start_N[:NUM_ROWS],
        )  # fmt: skip
        queries = encoded._replace(
            ids=encoded.ids[NUM_ROWS:], tokens=encoded.tokens[NUM_ROWS:],
            start_N=encoded.start_N[NUM_ROWS:],
        )  # fmt: skip

        plans = batches.plan_batches(
            train.lengths_N, train.num_targets_N, ids=train.ids, num_buckets=2, batch_tokens=4096
        )
        order = np.random.default_rng(1).permutation(len(plans))[: NUM_TUNE // 32]
        # A few steps, so that factor B is no longer zero and both factors have gradients.
        tx = optax.adamw(1e-3)
        with jax.numpy_dtype_promotion("standard"):
            lora = loop.fit(
                steps.supervised(bound, tx),
                model.lora,
                model.base,
                lambda start: (batches.make_batch(train, plans[n]) for n in order),
                num_steps=len(order),
            ).state.params
        projection = projections.init_projection(0, "binned", projections.count_params(lora), SIZE)

        @functools.partial(jax.jit, static_argnames="num_targets")
        def sketch(projection, lora, base, tokens_BL, target_mask_BL, *, num_targets):
            of_example = functools.partial(
                example_loss, bound, num_targets=num_targets, loss="unshifted"
            )
            return gradients.sketch_gradients(
                of_example, projection, lora, base, tokens_BL, target_mask_BL
            )

        def sketch_batch(batch):
            return sketch(
                projection, lora, model.base, batch.tokens_BL, batch.target_mask_BL,
                num_targets=batch.num_targets,
            )  # fmt: skip

        rows_in_order = batches.sketching_order(plans)
        cls.fine = SketchStore.create(
            f"{cls.root}/float32",
            identity={"of": "stories260k"},
            ids=[train.ids[row] for row in rows_in_order],
            size=SIZE,
        )
        chunks = cls.fine.missing_chunks()
        build.fill_store(cls.fine, train, plans, sketch_batch, chunks=chunks)
        cls.fine.finish()
        cls.coarse = SketchStore.create(
            f"{cls.root}/bfloat16", identity={}, ids=cls.fine.ids, size=SIZE, dtype="bfloat16"
        )
        for chunk in chunks:
            span = cls.coarse.chunk_positions(chunk)
            rows = cls.fine.rows(np.arange(span.start, span.stop))
            cls.coarse.write_chunk(chunk, rows, cls.fine.column("norms")[span])
        plan = batches.plan_rows(queries, np.arange(NUM_QUERIES))
        cls.query_QK = np.asarray(sketch_batch(batches.make_batch(queries, plan)).unit_BK)
        print(
            f"\n{NUM_ROWS} rows of Alpaca, stories260k, P = {projection.spec.num_params}, {SIZE=}"
        )

    def test_ends_of_the_ranking_agree_with_float32(self):
        for center in (True, False):
            self.compare(center, "mean of 8", self.query_QK)
            self.compare(center, "one", self.query_QK[:1])

    def compare(self, center: bool, name: str, query_QK: np.ndarray) -> None:
        scores = search.score_store(self.fine, query_QK, center=center)
        estimate = search.score_store(self.coarse, query_QK, center=center)
        agree = [
            len({*np.argsort(sign * scores)[:ENDS]} & {*np.argsort(sign * estimate)[:ENDS]}) / ENDS
            for sign in (-1, 1)
        ]
        error = float(np.sqrt(np.mean((estimate - scores) ** 2)))
        print(f"{center=} query={name}: ends of {ENDS} agree {agree}; error {error:.2e}")
        self.assertGreaterEqual(min(agree), 0.99, msg=f"{center=} {name}")


if __name__ == "__main__":
    absltest.main()
