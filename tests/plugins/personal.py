"""A personal method: what is sent is averaged, and a worker uses a mixture of the average and of its own model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

import cbdsl
from cbdsl.arrays import Floats


@cbdsl.register.method("mixed-own")
@dataclass(frozen=True)
class MixedOwn(cbdsl.AveragingMethod):
    """FedAvg beside models v_i of the workers' own that never leave them: v_i <- SGD(v_i); used is a v_i + (1 - a) w.

    The own model is the personal best, and the mixture the velocity.
    """

    share: float = 0.5  # a

    title = "own models, mixed with the average"
    remembers = ("personal_best", "velocities")

    def move(self, work: cbdsl.WorkerRound, rows: cbdsl.Particles, received: Floats) -> cbdsl.Particles:
        """Train both models."""
        trained = work.train(work.from_server(received))
        own = work.train(np.where(np.isfinite(rows.personal_best), rows.personal_best, received))
        mixed = np.float32(self.share) * own + np.float32(1 - self.share) * trained
        return replace(work.place(rows, trained), personal_best=own, velocities=mixed)

    def personal(self, rows: cbdsl.Particles) -> Floats:
        """Return the mixtures."""
        return rows.velocities
