"""Parts with a memory: an attack and a rule whose numbers depend on all rounds before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest

import cbdsl
from cbdsl.arrays import Doubles, Floats
from cbdsl.attacks.attack import Truthful


class Momentum(Truthful):
    """Goes back along a decaying sum of all honest steps that it has seen, and a direction common to all attackers."""

    def remember(self, seen: cbdsl.AttackContext) -> Mapping[str, np.ndarray]:
        step = seen.model - seen.global_best
        before = seen.memory.get("sum", np.zeros_like(step))
        return {"sum": np.float32(0.5) * before + step, "rounds": np.array(seen.round)}

    def upload(self, seen: cbdsl.AttackContext) -> Floats:
        common = seen.common(0).standard_normal(len(seen.model)).astype(np.float32)
        return np.asarray(seen.global_best - seen.memory["sum"] + np.float32(0.01 * seen.memory["rounds"]) * common)


class SharedMomentum(Momentum):
    """The same with one memory for all attackers."""

    omniscient = True


@pytest.fixture
def momentum() -> Iterator[None]:
    """Register the attack as "momentum"."""
    cbdsl.register.attack("momentum")(Momentum)
    yield
    cbdsl.register.attack.drop("momentum")


def drifting(rows: Doubles, attackers: int, trust: cbdsl.TrustedReference) -> Doubles:  # noqa: ARG001
    """The mean, moved by what was drawn and remembered in all rounds."""
    before = trust.memory.get("drift", np.zeros(rows.shape[1]))
    trust.memory["drift"] = 0.9 * before + 0.01 * trust.rng.normal(size=rows.shape[1])
    trust.memory["seen"] = np.union1d(trust.memory.get("seen", np.zeros(0, np.int64)), trust.workers)
    return np.asarray(rows.mean(0) + trust.memory["drift"])
