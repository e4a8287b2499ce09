"""SCAFFOLD (Karimireddy et al. 2020): control variates c and c_i correct the drift of workers whose data differ."""

from __future__ import annotations

import numpy as np

from cbdsl import register
from cbdsl.arrays import Floats
from cbdsl.methods.base import AveragingMethod
from cbdsl.workers.local import Work
from cbdsl.workers.swarm import Particles


@register.method("scaffold")
class Scaffold(AveragingMethod):
    """FedAvg whose gradients are corrected by c - c_i; messages are twice as long, for c goes with every model.

    A worker keeps c_i where a swarm keeps velocities, and its change where a swarm keeps w^p. c_i is estimated from the
    steps taken (option II). Momentum lengthens steps, so they are counted with it. Models and changes of c_i are
    averaged by samples, as in FedAvg; the share that scales c is that of workers, as published.
    """

    title = "SCAFFOLD (Karimireddy et al. 2020)"
    remembers = True
    vectors = 2

    def memory(self, size: int) -> Floats:
        """c, (D,)."""
        return np.zeros(size, np.float32)

    def broadcast(self, current: Floats, memory: Floats) -> Floats:
        """w and c, (2 D,)."""
        return np.concatenate([current, memory])

    def move(self, work: Work, rows: Particles, received: Floats) -> Particles:
        """y_i = SGD with gradients g + c - c_i; c_i <- c_i - c + (w - y_i) / (steps * rate).

        Whoever diverged starts again from c_i = 0.
        """
        model, control = np.split(received, 2)
        start, own = work.from_server(model), _finite(rows.velocities)
        trained = work.train(start, corrections=_finite(control - own))
        length = np.maximum(work.steps() * work.learning_rate / (1 - work.momentum), 1e-30)[:, None]  # (k, 1)
        change = ((start - trained.astype(np.float64)) / length - control).astype(np.float32)
        return Particles(trained, own + change, change, rows.personal_score)

    def upload(self, rows: Particles) -> Floats:
        """y_i, and by how much c_i changed."""
        return np.concatenate([rows.positions, rows.personal_best], axis=1)

    def step(self, current: Floats, memory: Floats, combined: Floats, share: float) -> tuple[Floats, Floats]:
        """w <- mean of y_i; c <- c + (participants / workers) * mean change of c_i."""
        del current
        model, change = np.split(combined, 2)
        return model, memory + np.float32(share) * change


def _finite(values: Floats) -> Floats:
    """Zeros where there is no number."""
    return np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
