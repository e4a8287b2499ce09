"""CB-DSL: communication-efficient and Byzantine-robust distributed swarm learning (arXiv 2208.05578)."""

from __future__ import annotations

from importlib import import_module

__version__ = "0.2.0"

TYPE_CHECKING = False  # as `typing.TYPE_CHECKING`, without loading that on the way to the command line
if TYPE_CHECKING:
    from typing import Any

    from cbdsl import callbacks, register, testing
    from cbdsl.arrays import Samples
    from cbdsl.byzantine.attack import Attack, HomeTraining, Situation
    from cbdsl.callbacks import Callback
    from cbdsl.codecs.base import Codec, CodecError
    from cbdsl.data.partition import Partition, Pool
    from cbdsl.data.sources import Dataset
    from cbdsl.engines.architecture import Architecture
    from cbdsl.engines.base import Engine
    from cbdsl.errors import UserError
    from cbdsl.methods.base import AveragingMethod, Method, SwarmMethod
    from cbdsl.presets import preset
    from cbdsl.protocol.aggregators import Rule, Trust
    from cbdsl.protocol.messages import Claim, Order, Swarm
    from cbdsl.protocol.selection import Believed, Candidate, Combined, Selection, View
    from cbdsl.protocol.verification import Verifier
    from cbdsl.runs.play import resume, run
    from cbdsl.runs.records import RoundRecord, Summary
    from cbdsl.runs.result import Result
    from cbdsl.spec import Spec
    from cbdsl.workers.local import Work
    from cbdsl.workers.swarm import Particles

_HOMES = {
    "Architecture": "cbdsl.engines.architecture",
    "Attack": "cbdsl.byzantine.attack",
    "AveragingMethod": "cbdsl.methods.base",
    "Believed": "cbdsl.protocol.selection",
    "Callback": "cbdsl.callbacks",
    "Candidate": "cbdsl.protocol.selection",
    "Claim": "cbdsl.protocol.messages",
    "Codec": "cbdsl.codecs.base",
    "CodecError": "cbdsl.codecs.base",
    "Combined": "cbdsl.protocol.selection",
    "Dataset": "cbdsl.data.sources",
    "Engine": "cbdsl.engines.base",
    "HomeTraining": "cbdsl.byzantine.attack",
    "Method": "cbdsl.methods.base",
    "Order": "cbdsl.protocol.messages",
    "Particles": "cbdsl.workers.swarm",
    "Partition": "cbdsl.data.partition",
    "Pool": "cbdsl.data.partition",
    "Result": "cbdsl.runs.result",
    "RoundRecord": "cbdsl.runs.records",
    "Rule": "cbdsl.protocol.aggregators",
    "Samples": "cbdsl.arrays",
    "Selection": "cbdsl.protocol.selection",
    "Situation": "cbdsl.byzantine.attack",
    "Spec": "cbdsl.spec",
    "Summary": "cbdsl.runs.records",
    "Swarm": "cbdsl.protocol.messages",
    "SwarmMethod": "cbdsl.methods.base",
    "Trust": "cbdsl.protocol.aggregators",
    "UserError": "cbdsl.errors",
    "Verifier": "cbdsl.protocol.verification",
    "View": "cbdsl.protocol.selection",
    "Work": "cbdsl.workers.local",
    "preset": "cbdsl.presets",
    "resume": "cbdsl.runs.play",
    "run": "cbdsl.runs.play",
}
_MODULES = ("callbacks", "register", "testing")

__all__ = [
    "Architecture",
    "Attack",
    "AveragingMethod",
    "Believed",
    "Callback",
    "Candidate",
    "Claim",
    "Codec",
    "CodecError",
    "Combined",
    "Dataset",
    "Engine",
    "HomeTraining",
    "Method",
    "Order",
    "Particles",
    "Partition",
    "Pool",
    "Result",
    "RoundRecord",
    "Rule",
    "Samples",
    "Selection",
    "Situation",
    "Spec",
    "Summary",
    "Swarm",
    "SwarmMethod",
    "Trust",
    "UserError",
    "Verifier",
    "View",
    "Work",
    "__version__",
    "callbacks",
    "preset",
    "register",
    "resume",
    "run",
    "testing",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a module's attribute
    """Load on first use: the command line answers and small devices start without loading what they do not need."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _MODULES:
        return import_module(f"cbdsl.{name}")
    raise AttributeError(f"module 'cbdsl' has no attribute '{name}'")
