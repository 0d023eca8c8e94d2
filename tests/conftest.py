"""Settings of every test: no network, strict promotion, highest matmul precision, quick compiling.

Compiling is most of the time of these tests. Programs are therefore compiled without optimizations
(but for studies, and where a test asks for compiling.OPTIMIZED to hold what users run to torch),
and once: the processes of a session, those that tests start among them, share a new folder with the
compiled programs and the finished tiny run.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("MPLBACKEND", "Agg")
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers have the environment of the first process
    _session = tempfile.TemporaryDirectory(prefix="raslik-tests-", ignore_cleanup_errors=True)
    os.environ["RASLIK_TEST_SESSION"] = _session.name  # see fixtures/tiny.py
    os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{_session.name}/compiled"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE / name) for name in ("fixtures", ".")]
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import compiling  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")

# The same examples every time, and none fails for taking long: by default more than .2 s does.
settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    """Sets XLA's flags, which are read when the first program is compiled."""
    compiling.collect_rarely()
    if config.option.markexpr != "study":
        os.environ.update(compiling.ENVIRONMENT)


@pytest.fixture(scope="module")
def paper_corpora() -> Iterator[None]:
    """The package with what experiments/run.py registers, such as the corpora of the paper."""
    from experiments.studies.corpora import paper

    with paper.registered():
        yield
