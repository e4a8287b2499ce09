"""A server's view of uploads for tests of aggregators, and a rule's result as plain numbers."""

from __future__ import annotations

import numpy as np

from cbdsl.algorithm.aggregators import TrialSet, TrustedReference, aggregate
from cbdsl.arrays import Doubles, Floats, Indices


def trust(reference: Floats | None = None, root: Floats | None = None, size: int = 2) -> TrustedReference:
    """A server that stands at 0, would itself step to (1, 1, ...), and likes models near (1, 1, ...)."""
    start = np.zeros(size, np.float32) if reference is None else reference
    own = start + 1 if root is None else root

    def losses(rows: Floats) -> Doubles:
        return np.asarray(((rows - own) ** 2).sum(1), dtype=np.float64)

    def differentiate(model: Floats, samples: Indices) -> tuple[float, Floats]:  # noqa: ARG001 - all are alike
        return float(losses(model[None])[0]), 2 * (model - own)

    return TrustedReference(start, lambda: own, losses, trial=TrialSet(500, losses, differentiate))


def combine(name: str, rows: list[list[float]], attackers: int, known: TrustedReference | None = None) -> list[float]:
    models = list(np.array(rows, dtype=np.float32))
    return [float(value) for value in aggregate(name, models, attackers, known or trust(size=len(rows[0])))]


CROWD = [[1.0, 1.0], [1.0, 2.0], [2.0, 1.0], [2.0, 2.0], [100.0, -100.0]]
