"""FedAdam (Reddi et al. 2021): the mean step of a round is a gradient for Adam at the server."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cbdsl import register
from cbdsl.arrays import Floats
from cbdsl.errors import UserError
from cbdsl.methods.base import AveragingMethod


@register.method("fedadam")
@dataclass(frozen=True)
class FedAdam(AveragingMethod):
    """FedAvg with Adam at the server, on the mean step of a round; no bias correction, as published."""

    rate: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 0.001

    title = "FedAdam (Reddi et al. 2021)"

    def __post_init__(self) -> None:
        positive = 0 < self.rate < float("inf") and 0 < self.tau < float("inf")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and positive):
            raise UserError(f"fedadam takes 0 <= beta1, beta2 < 1, and a finite rate and tau above 0; given {self}.")

    def memory(self, size: int) -> Floats:
        """m and v, (2, D); v starts at tau^2, as published."""
        return np.stack([np.zeros(size, np.float32), np.full(size, self.tau**2, np.float32)])

    def step(self, current: Floats, memory: Floats, combined: Floats, share: float) -> tuple[Floats, Floats]:
        """m <- b1 m + (1 - b1) d, v <- b2 v + (1 - b2) d^2, w <- w + rate m / (sqrt(v) + tau)."""
        del share
        step = combined.astype(np.float64) - current
        mean = self.beta1 * memory[0].astype(np.float64) + (1 - self.beta1) * step
        square = self.beta2 * memory[1].astype(np.float64) + (1 - self.beta2) * step**2
        after = current + self.rate * mean / (np.sqrt(square) + self.tau)
        return after.astype(np.float32), np.stack([mean, square]).astype(np.float32)
