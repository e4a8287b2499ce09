"""The public module of callbacks; `cbdsl.runs.callbacks` defines them."""

import warnings

from cbdsl.runs import callbacks as _defined
from cbdsl.runs.callbacks import (
    Bar,
    Callback,
    CallbackList,
    MLflow,
    RunStart,
    TensorBoard,
    WandB,
    default_callbacks,
    drawn,
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
    "drawn",
    "flat",
    "in_notebook",
]
_RENAMED = {"Many": "CallbackList", "Start": "RunStart"}  # old names, until 1.0


def __getattr__(name: str) -> object:
    """Return a class by its old name, with a warning."""
    if name not in _RENAMED:
        raise AttributeError(f"module 'cbdsl.callbacks' has no attribute '{name}'")
    new = _RENAMED[name]
    warnings.warn(f"cbdsl.callbacks.{name} is now {new}; the old name goes in 1.0", DeprecationWarning, stacklevel=2)
    return getattr(_defined, new)
