"""What `import raslik_jax` gives: a list that is frozen, and no JAX."""

import subprocess
import sys

import raslik_jax

_NAMES = """
__version__ ARCHITECTURES AskOptions AskResult Config DATASETS ExportOptions ExportResult METRICS
MeshConfig OBJECTIVES PROJECTIONS ROBUSTNESS RetrainOptions STRATEGIES SketchStore TraceOptions
TraceResult Tracer UnlearnOptions UnlearnResult ValidateOptions ValidateResult ask bind
centered_cosine count_params example_loss export find_cut init_projection load_model project retrain
select_by_count select_by_threshold sketch_gradients trace unlearn validate
"""


def test_the_public_names_are_these_and_are_all_there():
    assert raslik_jax.__all__ == _NAMES.split()
    assert set(raslik_jax.__all__) <= set(dir(raslik_jax))
    for name in raslik_jax.__all__:
        assert getattr(raslik_jax, name) is not None


def test_names_that_are_not_there_are_refused():
    assert not hasattr(raslik_jax, "nothing")


def test_importing_it_loads_nothing_that_is_slow():
    code = "import sys, raslik_jax; dir(raslik_jax); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
