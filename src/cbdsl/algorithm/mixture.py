"""One rule for making one model of several verified uploads: the mixture that does best on the server's own samples.

Each upload's step is scaled to length 1, so none outweighs another. With q, the number of uploads that are honest at
least, the new model is

    w^g + m + r sum_i a_i u_i,    0 <= a_i <= 1/q,    sum_i a_i <= 1,    u_i = (w_i - w^g) / |w_i - w^g|

where m is the momentum. The weights a and the length r are those with the lowest loss found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cbdsl.arrays import Doubles, norm

PASSES = 3  # of Frank-Wolfe
_TOWARDS = (0.25, 0.5, 0.75, 1.0)  # how far a pass goes towards its corner
_LENGTHS = (0.25, 0.5, 0.75)  # quantiles of the steps' lengths: attackers in the minority cannot set all of them


@dataclass(frozen=True, eq=False)
class Mixture:
    """The weights of the uploads and the step they make together."""

    weights: Doubles  # (K,)
    step: Doubles  # (D,)


def mix_steps(steps: Doubles, q: int, loss: Callable[[Doubles], float] | None) -> Mixture:
    """Return the mixture of steps (K, D) with the lowest loss found. loss: of a step (D,); None: all count equally.

    Frank-Wolfe from the mean: a pass goes towards the q steps that lower the loss most, as far as the loss falls most.
    """
    lengths = np.array([norm(step) for step in steps])
    units = steps / np.maximum(lengths, 1e-30)[:, None]
    equal, quantiles = np.full(len(steps), 1 / len(steps)), np.quantile(lengths, _LENGTHS)

    def step_of(weights: Doubles, length: float) -> Doubles:
        return np.asarray((length * weights[:, None] * units).sum(0))  # not by BLAS: its last digits are its threads'

    if loss is None:
        return Mixture(equal, step_of(equal, float(quantiles[1])))

    def find_loss(weights: Doubles, length: float) -> float:
        return _finite(loss(step_of(weights, length)))

    def find_length(weights: Doubles) -> float:
        return min(map(float, quantiles), key=lambda one: find_loss(weights, one))

    weights, length = equal, find_length(equal)
    now = find_loss(weights, length)
    for _ in range(PASSES):
        more = np.array([find_loss(weights + one / q, length) for one in np.eye(len(steps))])
        corner = np.where((more < np.inf) & (more.argsort(kind="stable").argsort() < q), 1 / q, 0.0)
        tried = [(1 - share) * weights + share * corner for share in _TOWARDS]
        losses = [find_loss(one, length) for one in tried]
        if not min(losses) < now:
            break
        weights, now = tried[int(np.argmin(losses))], min(losses)
    return Mixture(weights, step_of(weights, find_length(weights)))


def turn_disputed(steps: Doubles, share: float) -> Doubles:
    """Return steps (K, D), reversed in the weights on whose sign they disagree: |mean sign| < share.

    The robust learning rate of Ozdayi et al. (2021): a weight that only the attackers want to move goes back.
    """
    agreed = np.abs(np.sign(steps).mean(0)) >= share
    return np.where(agreed, steps, -steps)


def go_towards(start: Doubles, end: Doubles, loss: Callable[[Doubles], float]) -> Doubles:
    """Return the point between two models, in quarters of the way, with the lowest loss."""
    tried = [start + share * (end - start) for share in (0.0, *_TOWARDS)]
    return tried[int(np.argmin([_finite(loss(one)) for one in tried]))]


def _finite(loss: float) -> float:
    """Return a loss, or infinity for one that is not a number."""
    return loss if np.isfinite(loss) else np.inf
