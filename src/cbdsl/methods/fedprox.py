"""FedProx (Li et al. 2020): FedAvg whose workers are held back to the server's model while they train."""

from __future__ import annotations

from dataclasses import dataclass

from cbdsl import register
from cbdsl.arrays import Floats
from cbdsl.errors import UserError
from cbdsl.methods.base import AveragingMethod
from cbdsl.workers.local import Work


@register.method("fedprox")
@dataclass(frozen=True)
class FedProx(AveragingMethod):
    """FedAvg with a proximal term: workers minimise F_i(w) + mu/2 |w - w_t|^2."""

    mu: float = 0.01

    title = "FedProx (Li et al. 2020)"

    def __post_init__(self) -> None:
        if not 0 <= self.mu < float("inf"):
            raise UserError(f"mu of fedprox must be at least 0; given {self.mu}.")

    def train(self, work: Work, start: Floats) -> Floats:
        """SGD whose every gradient has mu (w - w_t) added."""
        return work.train(start, proximal=self.mu)
