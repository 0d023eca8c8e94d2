"""How long a run takes: programs are compiled once, rates are those of the run, unknowns named."""

import contextlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from raslik_jax.report import writing
from raslik_jax.run import estimate, forecast, programs
from raslik_jax.run.artifacts import Variant
from raslik_jax.run.estimate import Left, Spent
from raslik_jax.run.forecast import Step
from raslik_jax.run.plan import plan_units
from raslik_jax.run.stages import generate, sketch, unlearn
from raslik_jax.run.workspace import Workspace

_INDEX = Step("sketch", "sketch", ("sketch",), 2, 100.0)
_QUERIES = Step("retrieve/queries", "retrieve", ("sketch",), 1, 10.0)
_TRAINING = Step("unlearn/raslik-ga", "unlearn", ("ga",), 1, 1000.0, is_most=True)


def test_programs_are_compiled_once_and_operations_take_what_they_took():
    """40 s for 100 operations and 2 programs, 30 s of it compiling: .1 s each, 15 s a program."""
    spent = [Spent(_INDEX, 40.0, 30.0)]
    left = estimate.find_left([_QUERIES, _TRAINING], spent, unmeasured=lambda work: 7.0)
    assert left == Left(15 + 10 * 0.1 + 15 + 1000 * 0.1, 2, (), True)
    # Its own rate, once there is one: 2 s an operation.
    spent.append(Spent(_TRAINING._replace(operations=400.0, num_programs=0), 800.0))
    left = estimate.find_left([_QUERIES, _TRAINING], spent, unmeasured=lambda work: 7.0)
    assert left.seconds == 15 + 10 * 0.1 + 15 + 1000 * 2.0


def test_before_anything_was_measured_rates_are_forecasts():
    left = estimate.find_left([_INDEX, _QUERIES], [], unmeasured=lambda work: 0.5)
    assert left.seconds == 3 * forecast.COMPILE_SECONDS + 110 * 0.5


def test_what_a_short_unit_took_is_not_stretched_to_a_long_one():
    spent = [Spent(_INDEX._replace(operations=1.0, num_programs=0), 40.0)]
    left = estimate.find_left([_INDEX._replace(num_programs=0)], spent, unmeasured=lambda work: 0.5)
    assert left.seconds == 100 * 0.5


def test_a_rate_that_nobody_knows_is_not_guessed():
    left = estimate.find_left(
        [_INDEX, Step("evaluate", "evaluate", num_programs=1)], [], unmeasured=lambda work: None
    )
    assert left == Left(forecast.COMPILE_SECONDS, 1, ("sketch",), False)


def test_what_is_not_known_is_named_and_not_counted():
    hidden = _TRAINING._replace(is_known=False)
    left = estimate.find_left([_QUERIES, hidden], [], unmeasured=lambda work: 0.0)
    assert left == Left(forecast.COMPILE_SECONDS, 1, ("unlearn/raslik-ga",), False)


@pytest.mark.parametrize(
    ("left", "elapsed", "line"),
    [
        (Left(50.4, 3, (), False), 0.0, "whole run: about 50 s, compiling 3 programs included"),
        (
            Left(0.0, 0, tuple("abcd"), False),
            9.0,
            "whole run: not known yet (a, b, c and 1 more)",
        ),
        (Left(50.0, 0, (), True), 70.0, "whole run: at most about 2 min, 50 s left"),
        (
            Left(2e4, 1, ("evaluate", "unlearn/a", "unlearn/b"), False),
            1e4,
            "whole run: about 8.3 h, 5.6 h left, compiling 1 program included, without evaluate, "
            "unlearn/a, unlearn/b (not known yet)",
        ),
    ],
)
def test_a_line_says_all_of_it(left, elapsed, line):
    assert estimate.describe(left, elapsed) == line


def test_jax_tells_the_seconds_of_compiling(tmp_path):
    config = tiny.tiny_config()
    with estimate.watching(config, tmp_path) as watch:
        before = watch._compiling()
        jax.jit(lambda x: jnp.sin(x) @ x)(np.ones((3, 3), np.float32))
        assert watch._compiling() > before


def test_a_run_is_followed_by_its_clock():
    now, said, compiled = [100.0], [], [0.0]
    watch = estimate.Watch(
        lambda units: units,
        compiling=lambda: compiled[0],
        unmeasured=lambda work: 1e-12,
        clock=lambda: now[0],
        say=said.append,
    )
    large = _INDEX._replace(operations=1e13)
    parts = [large, _QUERIES._replace(operations=1e12), Step("report", "report", is_known=False)]
    with watch(parts):
        compiled[0] = 20.0
        now[0] += 40.0
    with watch(parts[1:]):
        now[0] += 11.0
    with watch(parts[2:]):  # the last line is no 15 seconds old
        pass
    assert said == [
        "    whole run: about 26 s, compiling 3 programs included, without report (not known yet)",
        "    whole run: about 52 s, 12 s left, compiling 1 program included, without report (not "
        "known yet)",
    ]


@pytest.fixture(scope="module")
def abstract_run():
    config = tiny.tiny_config("--unlearn.algorithms=ga_klr")
    root = pathlib.Path("/nowhere")
    return forecast.abstract_run(config, Workspace(root, config))


def test_units_are_counted_without_tracing_and_wait_for_the_sets(abstract_run, monkeypatch):
    run = abstract_run
    monkeypatch.setattr(programs.cost, "trace", None)
    units = plan_units(run.config, run.workspace, more=writing.UNITS)
    parts = {part.name: part for part in estimate.count_left(run, units)}
    assert (
        parts["sketch"].num_programs == 1
        and parts["sketch"].programs == parts["retrieve/queries"].programs
    )
    assert not parts["unlearn/raslik-ga_klr"].is_known  # its sets are made by units before it
    assert not parts["report"].is_known
    names = ("unlearn/raslik-ga_klr", "unlearn/random-ga_klr")
    later = [unit for unit in units if unit.name in names]
    first, second = estimate.count_left(run, later)
    assert first.is_known and first.num_programs > 0 and second.num_programs == 0
    assert first.operations == second.operations > 0


def test_the_rule_is_near_what_is_traced(abstract_run):
    run = abstract_run
    works = [
        unlearn.count_unlearning(run, Variant("raslik", "ga_klr")),
        generate.count_answers(run, 4, 1),
    ]
    works.append(sketch.count_sketches(run, 100))
    with contextlib.ExitStack() as stack:
        stack.enter_context(__import__("jax").numpy_dtype_promotion("standard"))
        for program in (program for one in works for program in one.programs):
            counted, _ = program.total(program.cost_of(program.mean))
            assert 0.4 < program.rule().operations / counted < 2.5, program.name
    twice = sketch.count_sketches(run, 200).programs[0].rule()
    np.testing.assert_allclose(twice[0], 2 * program.rule()[0], rtol=0.3)
