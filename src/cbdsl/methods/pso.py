"""PSO (Kennedy and Eberhart 1995): no gradients, so particles must start apart, or they never part."""

from __future__ import annotations

from cbdsl import register
from cbdsl.methods.base import SwarmMethod


@register.method("pso")
class Pso(SwarmMethod):
    """A particle swarm without gradients; workers start apart."""

    title = "PSO (Kennedy and Eberhart 1995)"
    shared = "score"
    gradients = False
    verifies = True
    fixes = {"start": "apart"}  # noqa: RUF012 - a constant of the class
