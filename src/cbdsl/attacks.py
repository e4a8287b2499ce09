"""What a Byzantine worker changes: its claim and its upload.

An attack is a small frozen description. It never sees the server's defence, and honest workers never pass through it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cbdsl.engines.base import Floats
from cbdsl.errors import unknown
from cbdsl.spec import AttackSpec


class Attack(Protocol):
    """What is sent instead of the truth."""

    def claim(self, honest: float) -> float:
        """The score that is claimed instead of the honest one."""
        ...

    def upload(self, honest: Floats, rng: np.random.Generator) -> Floats:
        """The model that is uploaded instead of the honest one, (D,)."""
        ...


@dataclass(frozen=True)
class Liar:
    """The paper's attacker (Sec. III.C): claims a score below everybody's and uploads a fake model.

    The paper does not say what the fake model is. Here its weights are drawn from N(0, scale^2), afresh for every
    upload. The claim, 1e-6, is below any loss an honest worker reaches.
    """

    scale: float

    def claim(self, honest: float) -> float:
        """1e-6, or less if an honest worker were that good."""
        return min(1e-6, honest / 2)

    def upload(self, honest: Floats, rng: np.random.Generator) -> Floats:
        """Random weights, nothing to do with the honest ones."""
        return (self.scale * rng.standard_normal(honest.shape, dtype=np.float32)).astype(np.float32)


ATTACKS: dict[str, type[Liar]] = {"liar": Liar}


def make_attack(spec: AttackSpec) -> Attack:
    """The attack that a spec names."""
    if spec.name not in ATTACKS:
        raise unknown("attack", spec.name, ATTACKS)
    return ATTACKS[spec.name](spec.scale)
