"""MOON (Li, He and Song 2021): hidden features stay near the global model's, away from the worker's last own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import cbdsl
from cbdsl.arrays import Floats

if TYPE_CHECKING:
    from torch import Tensor


@cbdsl.register.method("moon")
@dataclass(frozen=True)
class Moon(cbdsl.AveragingMethod):
    """FedAvg with mu times the contrastive loss -log(e^(s_g / tau) / (e^(s_g / tau) + e^(s_p / tau))).

    s_g and s_p are the cosines between the hidden features and those of w^g and of the worker's previous model.
    """

    mu: float = 1.0
    tau: float = 0.5

    title = "MOON (Li et al. 2021)"
    remembers = ("positions",)
    adds_loss = True

    def move(self, work: cbdsl.WorkerRound, rows: cbdsl.Particles, received: Floats) -> cbdsl.Particles:
        start = work.from_server(received)
        return work.place(rows, work.train(start, term=self.contrast, others={"w^g": start, "own": rows.positions}))

    def contrast(self, batch: cbdsl.TrainingBatch) -> Tensor:
        from torch.nn.functional import cosine_similarity, softplus  # noqa: PLC0415 - a server without torch lists it

        near, far = (cosine_similarity(batch.hidden, batch.others[one].hidden) for one in ("w^g", "own"))
        return self.mu * softplus((far - near) / self.tau).mean()
