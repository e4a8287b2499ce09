"""CB-DSL: communication-efficient and Byzantine-robust distributed swarm learning (arXiv 2208.05578)."""

from __future__ import annotations

import os
from importlib import import_module

__version__ = "0.2.0"

if os.name != "posix":
    raise ImportError("cbdsl needs a POSIX system, such as Linux or macOS: it locks files. On Windows use WSL.")

TYPE_CHECKING = False  # as `typing.TYPE_CHECKING`, without loading `typing` on the way to the command line
if TYPE_CHECKING:
    from typing import Any

    from cbdsl import callbacks, register, testing
    from cbdsl.algorithm.aggregators import AggregationRule, TrustedReference
    from cbdsl.algorithm.messages import Claim, Order, Swarm
    from cbdsl.algorithm.methods import AveragingMethod, Method, SwarmMethod
    from cbdsl.algorithm.particles import Particles
    from cbdsl.algorithm.selection import Candidate, RoundContext, Selection, SelectionResult, VerifiedUpload
    from cbdsl.algorithm.verification import Verifier
    from cbdsl.algorithm.worker_round import WorkerRound
    from cbdsl.arrays import Samples
    from cbdsl.attacks.attack import Attack, AttackContext, AttackPreparation
    from cbdsl.codecs.codec import Codec, CodecError
    from cbdsl.data.dataset import Dataset
    from cbdsl.data.partition import Partition, Pool
    from cbdsl.engines.engine import Engine
    from cbdsl.errors import UserError
    from cbdsl.models.architecture import Architecture
    from cbdsl.models.saved_model import load
    from cbdsl.presets import preset
    from cbdsl.runs.callbacks import Callback
    from cbdsl.runs.loop import resume, run
    from cbdsl.runs.records import RoundRecord, Summary
    from cbdsl.runs.result import Result
    from cbdsl.spec import Spec

_HOMES = {
    "AggregationRule": "algorithm.aggregators",
    "Architecture": "models.architecture",
    "Attack": "attacks.attack",
    "AttackContext": "attacks.attack",
    "AttackPreparation": "attacks.attack",
    "AveragingMethod": "algorithm.methods",
    "Callback": "runs.callbacks",
    "Candidate": "algorithm.selection",
    "Claim": "algorithm.messages",
    "Codec": "codecs.codec",
    "CodecError": "codecs.codec",
    "Dataset": "data.dataset",
    "Engine": "engines.engine",
    "Method": "algorithm.methods",
    "Order": "algorithm.messages",
    "Particles": "algorithm.particles",
    "Partition": "data.partition",
    "Pool": "data.partition",
    "Result": "runs.result",
    "RoundContext": "algorithm.selection",
    "RoundRecord": "runs.records",
    "Samples": "arrays",
    "Selection": "algorithm.selection",
    "SelectionResult": "algorithm.selection",
    "Spec": "spec",
    "Summary": "runs.records",
    "Swarm": "algorithm.messages",
    "SwarmMethod": "algorithm.methods",
    "TrustedReference": "algorithm.aggregators",
    "UserError": "errors",
    "VerifiedUpload": "algorithm.selection",
    "Verifier": "algorithm.verification",
    "WorkerRound": "algorithm.worker_round",
    "load": "models.saved_model",
    "preset": "presets",
    "resume": "runs.loop",
    "run": "runs.loop",
}
_MODULES = ("callbacks", "register", "testing")
_RENAMED = {  # old public names, until 1.0
    "Believed": "VerifiedUpload",
    "Combined": "SelectionResult",
    "HomeTraining": "AttackPreparation",
    "Rule": "AggregationRule",
    "Situation": "AttackContext",
    "Trust": "TrustedReference",
    "View": "RoundContext",
    "Work": "WorkerRound",
    "plugins": "register",
}

__all__ = [
    "AggregationRule",
    "Architecture",
    "Attack",
    "AttackContext",
    "AttackPreparation",
    "AveragingMethod",
    "Callback",
    "Candidate",
    "Claim",
    "Codec",
    "CodecError",
    "Dataset",
    "Engine",
    "Method",
    "Order",
    "Particles",
    "Partition",
    "Pool",
    "Result",
    "RoundContext",
    "RoundRecord",
    "Samples",
    "Selection",
    "SelectionResult",
    "Spec",
    "Summary",
    "Swarm",
    "SwarmMethod",
    "TrustedReference",
    "UserError",
    "VerifiedUpload",
    "Verifier",
    "WorkerRound",
    "__version__",
    "callbacks",
    "load",
    "preset",
    "register",
    "resume",
    "run",
    "testing",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a module's attribute
    """Import a public name on first use, so that the command line and small devices load only what they need."""
    if name in _HOMES:
        return getattr(import_module(f"cbdsl.{_HOMES[name]}"), name)
    if name in _MODULES:
        return import_module(f"cbdsl.{name}")
    if name in _RENAMED:
        import warnings  # noqa: PLC0415

        new = _RENAMED[name]
        warnings.warn(f"cbdsl.{name} is now cbdsl.{new}; the old name goes in 1.0", DeprecationWarning, stacklevel=2)
        return __getattr__(new)
    raise AttributeError(f"module 'cbdsl' has no attribute '{name}'")
