"""MPAF (Cao and Gong 2022): fake clients, which have no data, pull the global model to a base model of their choice."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import cbdsl
from cbdsl.arrays import Floats


@cbdsl.register.attack("mpaf")
@dataclass(frozen=True)
class Mpaf(cbdsl.Attack):
    """Every attacker sends w^g + lambda (w' - w^g), w' being the same random model for all of them in all rounds."""

    scale: float = 1e6  # lambda
    spread: float = 0.1  # deviation of the numbers of w', as a new model's

    def upload(self, seen: cbdsl.AttackContext) -> Floats:
        base = self.spread * seen.common(0).standard_normal(len(seen.global_best))
        return np.asarray(seen.global_best + self.scale * (base - seen.global_best), np.float32)
