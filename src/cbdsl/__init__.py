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

    from cbdsl import callbacks as callbacks, register as register, testing as testing
    from cbdsl.algorithm.aggregators import AggregationRule as AggregationRule, TrustedReference as TrustedReference
    from cbdsl.algorithm.messages import Claim as Claim, Order as Order, Swarm as Swarm
    from cbdsl.algorithm.methods import (
        AveragingMethod as AveragingMethod,
        Method as Method,
        ServerStep as ServerStep,
        SwarmMethod as SwarmMethod,
    )
    from cbdsl.algorithm.particles import Particles as Particles
    from cbdsl.algorithm.selection import (
        Candidate as Candidate,
        RoundContext as RoundContext,
        Selection as Selection,
        SelectionResult as SelectionResult,
        VerifiedUpload as VerifiedUpload,
    )
    from cbdsl.algorithm.verification import Verifier as Verifier
    from cbdsl.algorithm.worker_round import WorkerRound as WorkerRound
    from cbdsl.arrays import Samples as Samples
    from cbdsl.attacks.attack import (
        Attack as Attack,
        AttackContext as AttackContext,
        AttackPreparation as AttackPreparation,
    )
    from cbdsl.codecs.codec import Codec as Codec, CodecError as CodecError
    from cbdsl.data.dataset import Dataset as Dataset
    from cbdsl.data.partition import Partition as Partition, Pool as Pool
    from cbdsl.engines.engine import Engine as Engine, TrainingBatch as TrainingBatch
    from cbdsl.errors import UserError as UserError
    from cbdsl.models.architecture import Architecture as Architecture
    from cbdsl.presets import preset as preset
    from cbdsl.runs.callbacks import Callback as Callback
    from cbdsl.runs.load import load as load
    from cbdsl.runs.loop import resume as resume, run as run
    from cbdsl.runs.metrics import Evaluation as Evaluation, Metric as Metric
    from cbdsl.runs.records import RoundRecord as RoundRecord, Summary as Summary
    from cbdsl.runs.result import Result as Result
    from cbdsl.spec import Spec as Spec
    from cbdsl.studies.explore import arena as arena, compare as compare, sweep as sweep

_PUBLIC = {  # the public names by the module that defines them; "" for modules
    "": "callbacks register testing",
    "algorithm.aggregators": "AggregationRule TrustedReference",
    "algorithm.messages": "Claim Order Swarm",
    "algorithm.methods": "AveragingMethod Method ServerStep SwarmMethod",
    "algorithm.particles": "Particles",
    "algorithm.selection": "Candidate RoundContext Selection SelectionResult VerifiedUpload",
    "algorithm.verification": "Verifier",
    "algorithm.worker_round": "WorkerRound",
    "arrays": "Samples",
    "attacks.attack": "Attack AttackContext AttackPreparation",
    "codecs.codec": "Codec CodecError",
    "data.dataset": "Dataset",
    "data.partition": "Partition Pool",
    "engines.augmentations": "Augmentation",
    "engines.engine": "Engine TrainingBatch",
    "errors": "UserError",
    "models.architecture": "Architecture",
    "presets": "preset",
    "runs.callbacks": "Callback",
    "runs.load": "load",
    "runs.loop": "resume run",
    "runs.metrics": "Evaluation Metric",
    "runs.records": "RoundRecord Summary",
    "runs.result": "Result",
    "spec": "Spec",
    "studies.explore": "arena compare sweep",
}
_HOMES = {name: home for home, names in _PUBLIC.items() for name in names.split()}
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

__all__ = ["__version__"]
__all__ += list(_HOMES)


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a module's attribute
    """Import a public name on first use, so that the command line and small devices load only what they need."""
    if name in _HOMES:
        home = _HOMES[name]
        return getattr(import_module(f"cbdsl.{home}"), name) if home else import_module(f"cbdsl.{name}")
    if name in _RENAMED:
        import warnings  # noqa: PLC0415

        new = _RENAMED[name]
        warnings.warn(f"cbdsl.{name} is now cbdsl.{new}; the old name goes in 1.0", DeprecationWarning, stacklevel=2)
        return __getattr__(new)
    raise AttributeError(f"module 'cbdsl' has no attribute '{name}'")


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
