"""Finds the training examples behind a bad generation and unlearns them.

Names are loaded at their first use, so `import raslik_jax` loads no JAX.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

# Public names, by the module that has them.
_MODULES = {
    "config": ("Config", "MeshConfig"),
    "data.corpora": ("DATASETS",),
    "evaluate.metrics": ("METRICS",),
    "evaluate.robustness": ("ROBUSTNESS",),
    "incident.asking": ("AskOptions", "AskResult", "ask"),
    "incident.export": ("ExportOptions", "ExportResult", "export"),
    "incident.retrain": ("RetrainOptions", "retrain"),
    "incident.trace": ("TraceOptions", "TraceResult", "trace"),
    "incident.tracer": ("Tracer",),
    "incident.unlearn": ("UnlearnOptions", "UnlearnResult", "unlearn"),
    "incident.validate": ("ValidateOptions", "ValidateResult", "validate"),
    "index.search": ("centered_cosine",),
    "index.store": ("SketchStore",),
    "models.decoder": ("ARCHITECTURES", "bind"),
    "models.loading": ("load_model",),
    "retrieve.selectors": ("find_cut", "select_by_count", "select_by_threshold"),
    "retrieve.strategies": ("STRATEGIES",),
    "sketch.families": ("PROJECTIONS",),
    "sketch.gradients": ("sketch_gradients",),
    "sketch.loss": ("example_loss",),
    "sketch.projections": ("count_params", "init_projection", "project"),
    "train.objectives": ("OBJECTIVES",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__doc__", "__file__", "__name__", "__path__"]
