"""FedAvgM (Hsu et al. 2019): FedAvg with momentum at the server."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cbdsl import register
from cbdsl.arrays import Floats
from cbdsl.errors import UserError
from cbdsl.methods.base import AveragingMethod


@register.method("fedavgm")
@dataclass(frozen=True)
class FedAvgM(AveragingMethod):
    """FedAvg with server momentum: m <- beta m + (mean w_i - w_t), w_{t+1} = w_t + rate m."""

    beta: float = 0.9
    rate: float = 1.0

    title = "FedAvgM (Hsu et al. 2019)"

    def __post_init__(self) -> None:
        if not (0 <= self.beta < 1 and 0 < self.rate < float("inf")):
            raise UserError(f"fedavgm takes 0 <= beta < 1 and a rate above 0; given {self.beta} and {self.rate}.")

    def memory(self, size: int) -> Floats:
        """m, (D,)."""
        return np.zeros(size, np.float32)

    def step(self, current: Floats, memory: Floats, combined: Floats, share: float) -> tuple[Floats, Floats]:
        """Add the mean step to the momentum, and the momentum to the model."""
        del share
        momentum = (self.beta * memory.astype(np.float64) + (combined - current.astype(np.float64))).astype(np.float32)
        return (current + self.rate * momentum.astype(np.float64)).astype(np.float32), momentum
