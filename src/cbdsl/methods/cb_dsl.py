"""CB-DSL (Fan et al. 2022): particle swarm and SGD, one number a worker and round, verified uploads (Algorithm 1)."""

from __future__ import annotations

from cbdsl import register
from cbdsl.methods.base import SwarmMethod


@register.method("cb-dsl")
class CbDsl(SwarmMethod):
    """The paper's: swarm and SGD move workers, claims are verified on D_sc, only the best claimant uploads."""

    title = "CB-DSL (Fan et al. 2022)"
    verifies = True
