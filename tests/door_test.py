"""What `import raslik_jax` gives: a list that is frozen, and nothing that takes time."""

import subprocess
import sys

import raslik_jax

_NAMES = """
__version__ ARCHITECTURES AskOptions AskResult Config DATASETS ExportOptions ExportResult METRICS
OBJECTIVES PROJECTIONS ROBUSTNESS STRATEGIES SketchStore TraceOptions TraceResult Tracer
UnlearnOptions UnlearnResult ask bind centered_cosine count_params example_loss export find_cut
init_projection load_model project select_by_count select_by_threshold sketch_gradients trace
unlearn
"""


def test_the_public_names_are_these_and_are_all_there():
    assert raslik_jax.__all__ == _NAMES.split()
    assert set(raslik_jax.__all__) <= set(dir(raslik_jax))
    for name in raslik_jax.__all__:
        assert getattr(raslik_jax, name) is not None


def test_names_that_are_not_there_are_refused():
    assert not hasattr(raslik_jax, "nothing")


def test_importing_it_takes_no_time():
    code = "import sys, time; begin = time.perf_counter(); import raslik_jax; dir(raslik_jax);"
    code += "took = time.perf_counter() - begin; sys.exit('jax' in sys.modules or took > 0.1)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
