"""The public module of callbacks; `cbdsl.runs.callbacks` defines them."""

import warnings
from importlib import import_module

from cbdsl.runs.callbacks import (
    Bar,
    Callback,
    CallbackList,
    MLflow,
    RunStart,
    TensorBoard,
    WandB,
    default_callbacks,
    flat,
    in_notebook,
)

__all__ = [
    "Bar",
    "Callback",
    "CallbackList",
    "MLflow",
    "RunStart",
    "TensorBoard",
    "WandB",
    "default_callbacks",
    "flat",
    "in_notebook",
]
_RENAMED = {  # old names, until 1.0
    "Many": "cbdsl.runs.callbacks.CallbackList",
    "Start": "cbdsl.runs.callbacks.RunStart",
    "drawn": "cbdsl.util.console.progress_html",
}


def __getattr__(name: str) -> object:
    """Return a class or function by its old name, with a warning."""
    if name not in _RENAMED:
        raise AttributeError(f"module 'cbdsl.callbacks' has no attribute '{name}'")
    module, _, new = _RENAMED[name].rpartition(".")
    warnings.warn(f"cbdsl.callbacks.{name} is now {new}; the old name goes in 1.0", DeprecationWarning, stacklevel=2)
    return getattr(import_module(module), new)
