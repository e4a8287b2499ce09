"""An optimiser's steps in numpy, for what trains in its own way: on any gradient, one model at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cbdsl.arrays import Floats, norm
from cbdsl.engines.engine import BETAS, CLIP_EPSILON, EPSILON, Sgd


def _floats(values: NDArray[np.floating]) -> Floats:
    return np.asarray(values, np.float32)


@dataclass(frozen=True, eq=False)
class OptimiserState:
    """What an optimiser keeps from one step of a model to the next; `Sgd` has the formulas.

    >>> state = OptimiserState.start(2)
    >>> state.step(np.ones(2, np.float32), np.array([1, 0], np.float32), Sgd(0.5), 0.5)[0]
    array([0.5, 1. ], dtype=float32)
    """

    first: Floats  # v or m, (D,)
    second: Floats  # s, (D,)
    taken: int = 0  # t

    @staticmethod
    def start(size: int) -> OptimiserState:
        """Return the state before the first step. size: D."""
        return OptimiserState(np.zeros(size, np.float32), np.zeros(size, np.float32))

    def step(
        self, weights: Floats, gradient: Floats, sgd: Sgd, rate: float, mask: Floats | float = 1.0
    ) -> tuple[Floats, OptimiserState]:
        """Return the weights after a step, (D,), and the new state. mask: a factor of g, that of weight decay included.

        A proximal term and corrections are left to the caller.
        """
        if sgd.clip:
            gradient = _floats(min(1.0, sgd.clip / (norm(gradient) + CLIP_EPSILON)) * gradient)
        decoupled = sgd.optimiser == "adamw"
        g = mask * (gradient if decoupled else gradient + sgd.weight_decay * weights)
        if sgd.optimiser == "sgd":
            first = _floats(sgd.momentum * self.first + g)
            return _floats(weights - rate * first), replace(self, first=first)
        taken = self.taken + 1
        first = _floats(BETAS[0] * self.first + (1 - BETAS[0]) * g)
        second = _floats(BETAS[1] * self.second + (1 - BETAS[1]) * g**2)
        deviation = np.sqrt(second / (1 - BETAS[1] ** taken)) + EPSILON
        left = weights - mask * (rate * sgd.weight_decay) * weights if decoupled else weights
        return _floats(left - rate / (1 - BETAS[0] ** taken) * first / deviation), OptimiserState(first, second, taken)
