"""FedPSO (Park et al. 2021): move, then train; the lowest local loss is trusted, and its model fetched."""

from __future__ import annotations

from cbdsl import register
from cbdsl.methods.base import SwarmMethod


@register.method("fedpso")
class FedPso(SwarmMethod):
    """Workers move, then train; the best claimant is trusted and uploads."""

    title = "FedPSO (Park et al. 2021)"
    shared = "none"
    fixes = {"sgd_from": "moved", "velocity": "swarm"}  # noqa: RUF012 - a constant of the class
