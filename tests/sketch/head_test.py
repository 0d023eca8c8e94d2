"""The fused head against all logits: values, slopes, packing, tiles, and what it refuses."""

import functools
from unittest import mock

import compiling
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from raslik_jax.sketch import head

BATCH, ROWS, WIDTH, VOCAB = 5, 30, 16, 333


def make_inputs(vocab_axis, *, dtype=jnp.float32, share=0.6):
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (WIDTH, VOCAB) if vocab_axis == 1 else (VOCAB, WIDTH)
    return (
        (jax.random.normal(keys[0], shape) * 0.5).astype(dtype),
        jax.random.normal(keys[1], (BATCH, ROWS, WIDTH)).astype(dtype),
        jax.random.randint(keys[2], (BATCH, ROWS), 0, VOCAB),
        jax.random.bernoulli(keys[3], share, (BATCH, ROWS)),
    )


def slow_nll_and_slope(table, hidden, label, counted, vocab_axis, cap=None):
    """Returns both in float64, row by row."""
    table, hidden = np.asarray(table, np.float64), np.asarray(hidden, np.float64)
    rows_VE = table.T if vocab_axis == 1 else table
    nll, slope = np.zeros(label.shape), np.zeros(hidden.shape)
    for place in zip(*np.nonzero(counted), strict=True):
        logits = rows_VE @ hidden[place]
        bend = np.ones(len(logits)) if cap is None else 1 / np.cosh(logits / cap) ** 2
        logits = logits if cap is None else cap * np.tanh(logits / cap)
        shares = np.exp(logits - logits.max())
        nll[place] = np.log(shares.sum()) + logits.max() - logits[label[place]]
        wrong = shares / shares.sum() - np.eye(len(logits))[label[place]]
        slope[place] = (wrong * bend) @ rows_VE
    return nll, slope


def with_tile(rows, columns):
    return mock.patch.object(head, "tile_shape", lambda: (rows, columns))


class TargetNllTest(parameterized.TestCase):
    # 333 columns: one tile, three that fit, nine that fit where seven would do, four of which the
    # last one overlaps.
    # A cap of 2 bends most logits, whose deviation is 2.
    @parameterized.product(
        (
            {"vocab_axis": 0, "cap": None},
            {"vocab_axis": 1, "cap": None},
            {"vocab_axis": 0, "cap": 2.0},
        ),
        tile=((512, 2048), (64, 111), (16, 50), (7, 90)),
    )
    def test_value_and_slope_are_those_of_all_logits(self, vocab_axis, cap, tile):
        inputs = make_inputs(vocab_axis)
        nll, slope = slow_nll_and_slope(*inputs, vocab_axis, cap)
        table, *rows = inputs

        def total(hidden, label, counted):
            nll_T = head.target_nll(table, hidden, label, counted, vocab_axis, cap)
            return jnp.sum(nll_T), nll_T

        with with_tile(*tile):
            run = jax.jit(jax.vmap(jax.value_and_grad(total, has_aux=True)))
            (_, got_nll), got_slope = run(*rows)
        np.testing.assert_allclose(got_nll, nll, atol=2e-6)
        np.testing.assert_allclose(got_slope, slope, atol=2e-6)

    def test_vmap_and_loop_and_no_grad_agree(self):
        table, *rows = make_inputs(1)
        run = jax.jit(lambda *row: head.target_nll(table, *row, 1, None))
        batched = jax.jit(jax.vmap(run))(*rows)
        loop = jnp.stack([run(*row) for row in zip(*rows, strict=True)])
        np.testing.assert_allclose(batched, loop, atol=1e-6)
        nested = jax.vmap(jax.vmap(run))(*(x.reshape(1, *x.shape) for x in rows))
        np.testing.assert_allclose(nested[0], loop, atol=1e-6)

    def test_an_argument_that_is_the_same_for_all_examples(self):
        table, hidden, label, counted = make_inputs(0)
        run = jax.vmap(
            functools.partial(head.target_nll, table), in_axes=(0, None, None, None, None)
        )
        got = run(hidden, label[0], counted[0], 0, None)
        nll, _ = slow_nll_and_slope(
            table, hidden, np.tile(label[0], (BATCH, 1)), np.tile(counted[0], (BATCH, 1)), 0
        )
        np.testing.assert_allclose(got, nll, atol=2e-6)

    @parameterized.parameters(0.0, 1.0)
    def test_no_target_and_nothing_but_targets(self, share):
        inputs = make_inputs(1, share=share)
        nll, slope = slow_nll_and_slope(*inputs, 1)
        table, *rows = inputs
        with with_tile(8, 100):
            got = jax.vmap(
                jax.grad(
                    lambda hidden, *rest: jnp.sum(head.target_nll(table, hidden, *rest, 1, None))
                )
            )(*rows)
        np.testing.assert_allclose(got, slope, atol=2e-6)

    def test_large_logits_neither_overflow_nor_lose_the_label(self):
        table = jnp.eye(4) * 1000.0
        hidden = jnp.eye(4)
        with with_tile(2, 3):
            right = head.target_nll(table, hidden, jnp.arange(4), jnp.ones(4, bool), 0, None)
            wrong = head.target_nll(
                table, hidden, (jnp.arange(4) + 1) % 4, jnp.ones(4, bool), 0, None
            )
        np.testing.assert_array_equal(right, 0.0)
        np.testing.assert_array_equal(wrong, 1000.0)

    def test_bfloat16_products_are_summed_in_float32(self):
        table, *rows = make_inputs(1, dtype=jnp.bfloat16)
        nll, slope = slow_nll_and_slope(table, *rows, 1)

        def total(hidden, label, counted):
            return jnp.sum(head.target_nll(table, hidden, label, counted, 1, None))

        got = jax.jit(jax.vmap(lambda *row: head.target_nll(table, *row, 1, None)))(*rows)
        np.testing.assert_allclose(got, nll, atol=1e-5)
        got_slope = jax.jit(jax.vmap(jax.grad(total)))(*rows)
        self.assertEqual(got_slope.dtype, jnp.bfloat16)
        # Shares and the result are rounded to 8 bits.
        np.testing.assert_allclose(
            np.asarray(got_slope, np.float64), slope, atol=2**-8 * np.abs(slope).max()
        )

    def test_work_follows_the_number_of_targets(self):
        """No logits of the batch are made, and rows that are no targets are not in the loop."""
        table = jax.ShapeDtypeStruct((WIDTH, 50_000), jnp.float32)
        rows = [jax.ShapeDtypeStruct((64, 128, WIDTH), jnp.float32)]
        rows += [jax.ShapeDtypeStruct((64, 128), dtype) for dtype in (jnp.int32, jnp.bool_)]

        def slope(table, *rows):
            def total(hidden, *rest):
                return jnp.sum(head.target_nll(table, hidden, *rest, 1, None))

            return jax.vmap(jax.grad(total))(*rows)

        compiled = jax.jit(slope).lower(table, *rows).compile(compiler_options=compiling.ANALYZED)
        logits_bytes = 64 * 128 * 50_000 * 4
        self.assertLess(compiled.memory_analysis().temp_size_in_bytes, logits_bytes / 50)

    def test_refuses_a_gradient_of_the_head_and_a_batch_of_heads(self):
        table, hidden, label, counted = make_inputs(1)
        row = hidden[0], label[0], counted[0]
        with self.assertRaisesRegex(ValueError, "head is frozen"):
            jax.grad(lambda table: jnp.sum(head.target_nll(table, *row, 1, None)))(table)
        with self.assertRaisesRegex(ValueError, "not over heads"):
            jax.vmap(lambda table: head.target_nll(table, *row, 1, None))(table[None])
