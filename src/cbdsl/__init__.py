"""CB-DSL: communication-efficient and Byzantine-robust distributed swarm learning (arXiv 2208.05578)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from cbdsl.data.sources import Dataset
    from cbdsl.presets import preset
    from cbdsl.runs.experiment import Result, resume, run
    from cbdsl.runs.records import RoundRecord, Summary
    from cbdsl.spec import Spec

__all__ = ["Dataset", "Result", "RoundRecord", "Spec", "Summary", "__version__", "preset", "resume", "run"]

_HOMES = {
    "Dataset": "cbdsl.data.sources",
    "Result": "cbdsl.runs.experiment",
    "RoundRecord": "cbdsl.runs.records",
    "Spec": "cbdsl.spec",
    "Summary": "cbdsl.runs.records",
    "preset": "cbdsl.presets",
    "resume": "cbdsl.runs.experiment",
    "run": "cbdsl.runs.experiment",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a module's attribute
    """Load on first use: the command line answers and small devices start without importing torch."""
    from importlib import import_module  # noqa: PLC0415

    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'cbdsl' has no attribute '{name}'")
