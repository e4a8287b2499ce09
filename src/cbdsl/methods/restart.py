"""Everybody starts again at w^g, trains and claims: the method behind verified rotation.

FedAvg's local training inside CB-DSL's conversation: a number from everybody, a model from whom the server invites.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cbdsl import register
from cbdsl.arrays import Floats
from cbdsl.methods.base import SwarmMethod
from cbdsl.workers.local import Work
from cbdsl.workers.swarm import Particles


@register.method("restart")
class Restart(SwarmMethod):
    """Everybody trains from w^g and claims what came out, not the best it ever had; made for --select rotation."""

    title = "restart from w^g"
    verifies = True
    remembers = False

    def move(self, work: Work, rows: Particles, received: Floats) -> Particles:
        """Train from w^g, whatever the worker had before, and score that."""
        trained = work.train(work.from_server(received))
        forgetful = replace(rows, personal_score=np.full(len(trained), np.inf))
        return work.remembered(forgetful, trained, rows.velocities, received)
