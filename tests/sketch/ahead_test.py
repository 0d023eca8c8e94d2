"""Programs that are compiled ahead: the step's own results, each shape once, the next one begun."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raslik_jax.sketch.ahead import Ahead

_WEIGHTS = {"scale": np.arange(3.0, dtype=np.float32)}
_ROWS = [np.ones((2, 3), np.float32), np.full((2, 3), 2, np.float32), np.ones((5, 3), np.float32)]


class Traces:
    """A jitted step that notes what it is traced for, and by which thread."""

    def __init__(self):
        self.shapes, self.threads, self.is_traced = [], set(), threading.Event()
        self.step = jax.jit(self._step)

    def _step(self, weights, rows):
        self.shapes.append(rows.shape)
        self.threads.add(threading.current_thread().name)
        self.is_traced.set()
        return rows * weights["scale"][None]


def test_results_are_those_of_the_step_and_each_shape_is_traced_once():
    traces = Traces()
    with Ahead(traces.step, _WEIGHTS, rows=_ROWS) as ahead:
        for rows in (*_ROWS, _ROWS[0]):
            np.testing.assert_array_equal(ahead(_WEIGHTS, rows), rows * _WEIGHTS["scale"])
    assert traces.shapes == [(2, 3), (5, 3)]
    assert len(traces.threads) == 2  # nobody had begun with the first one


def test_start_needs_no_arrays_and_begins_with_the_first_program_alone():
    traces = Traces()
    abstract = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, _WEIGHTS))
    with Ahead(traces.step, abstract, rows=_ROWS) as ahead:
        assert not traces.shapes
        ahead.start()
        assert traces.is_traced.wait(60)
        assert traces.shapes == [(2, 3)]
        ahead(_WEIGHTS, _ROWS[0])
        assert threading.current_thread().name not in traces.threads
        np.testing.assert_array_equal(ahead(_WEIGHTS, _ROWS[2]), _ROWS[2] * _WEIGHTS["scale"])


def test_the_next_program_is_begun_while_one_runs():
    traces = Traces()
    with Ahead(traces.step, _WEIGHTS, rows=_ROWS) as ahead:
        ahead(_WEIGHTS, _ROWS[0])
        traces.is_traced.clear()
        if len(traces.shapes) < 2:  # no call has asked for the second
            assert traces.is_traced.wait(60)
        assert traces.shapes == [(2, 3), (5, 3)]


def test_a_call_does_not_wait_for_a_program_that_it_does_not_need():
    may_go_on = threading.Event()

    def step(weights, rows):
        if rows.shape[0] == 2:
            assert may_go_on.wait(60)
        return rows * weights["scale"][None]

    with Ahead(jax.jit(step), _WEIGHTS, rows=_ROWS) as ahead:
        ahead.start()
        np.testing.assert_array_equal(ahead(_WEIGHTS, _ROWS[2]), _ROWS[2] * _WEIGHTS["scale"])
        may_go_on.set()
        np.testing.assert_array_equal(ahead(_WEIGHTS, _ROWS[0]), _ROWS[0] * _WEIGHTS["scale"])


def test_a_weak_type_stays_weak():
    step = jax.jit(lambda share, rows: share * rows)
    share, rows = jnp.asarray(0.5), np.ones(3, jnp.bfloat16)
    assert share.weak_type
    with Ahead(step, share, rows=[rows]) as ahead:
        ahead.start()
        assert ahead(share, rows).dtype == jnp.bfloat16


def test_a_shape_that_was_not_named_is_compiled_when_it_is_called():
    traces = Traces()
    with Ahead(traces.step, _WEIGHTS, rows=_ROWS[:1]) as ahead:
        np.testing.assert_array_equal(ahead(_WEIGHTS, _ROWS[2]), _ROWS[2] * _WEIGHTS["scale"])


def test_an_error_of_the_thread_is_the_calls():
    def refuse(weights, rows):
        raise ValueError("rows must be few")

    with (
        Ahead(jax.jit(refuse), _WEIGHTS, rows=_ROWS) as ahead,
        pytest.raises(ValueError, match="must be few"),
    ):
        ahead.start()
        ahead(_WEIGHTS, _ROWS[0])
