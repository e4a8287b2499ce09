"""Attacks on weights: the upload is not what an honest worker would send."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import NormalDist
from typing import ClassVar

import numpy as np

from cbdsl import register
from cbdsl.arrays import Doubles, Floats, dot, norm
from cbdsl.attacks.attack import (
    Attack,
    AttackContext,
    ClaimsBetter,
    Colluding,
    as_floats,
    compute_honest_statistics,
    honest_models,
    noise,
)


@register.attack("gaussian")
@dataclass(frozen=True)
class Gaussian(ClaimsBetter):
    """w + N(0, scale^2)."""

    scale: float = 1.0

    def upload(self, seen: AttackContext) -> Floats:
        """Return its model with noise."""
        return seen.model + noise(seen, self.scale)


@register.attack("sign-flip")
@dataclass(frozen=True)
class SignFlip(ClaimsBetter):
    """w^g - scale (w - w^g): its update turned round (Karimireddy et al. 2022)."""

    scale: float = 1.0

    def upload(self, seen: AttackContext) -> Floats:
        """Return the opposite step."""
        return as_floats(seen.global_best - self.scale * (seen.model - seen.global_best))


@register.attack("scaled")
@dataclass(frozen=True)
class Scaled(ClaimsBetter):
    """w^g + scale (w - w^g): a step that outweighs all others (Bagdasaryan et al. 2020)."""

    scale: float = 10.0

    def upload(self, seen: AttackContext) -> Floats:
        """Return a much too long step."""
        return as_floats(seen.global_best + self.scale * (seen.model - seen.global_best))


@register.attack("zero")
@dataclass(frozen=True)
class Zero(ClaimsBetter):
    """A model whose weights are all 0."""

    def upload(self, seen: AttackContext) -> Floats:
        """Return zeros."""
        return np.zeros_like(seen.model)


@register.attack("nan")
@dataclass(frozen=True)
class NotANumber(ClaimsBetter):
    """Weights that are NaN, and infinity among them."""

    def upload(self, seen: AttackContext) -> Floats:
        """Return NaN, every other weight infinite."""
        poison = np.full_like(seen.model, np.nan)
        poison[::2] = np.inf
        return poison


@register.attack("alie")
@dataclass(frozen=True)
class Alie(Colluding):
    """A little is enough (Baruch et al. 2019): mean - z std of the honest models, coordinate by coordinate.

    z is the largest for which a majority still stands further out: Phi(z) = (n - f - s) / (n - f) with
    s = floor(n / 2 + 1) - f. A scale sets z itself.
    """

    scale: float = 0.0

    def collude(self, seen: AttackContext) -> Floats:
        """Return a model just inside the crowd."""
        mean, spread = compute_honest_statistics(seen)
        return as_floats(mean - (self.scale or alie_z(seen.workers, seen.attackers)) * spread)


def alie_z(workers: int, attackers: int) -> float:
    """Return how many standard deviations hide in a crowd of n workers with f attackers; 0 if none do."""
    supporters = workers // 2 + 1 - attackers
    share = (workers - attackers - supporters) / max(1, workers - attackers)
    return max(0.0, NormalDist().inv_cdf(min(max(share, 1e-9), 1 - 1e-9)))


@register.attack("ipm")
@dataclass(frozen=True)
class InnerProduct(Colluding):
    """Inner product manipulation (Xie et al. 2020): w^g - scale * mean(w_i - w^g)."""

    scale: float = 0.1

    def collude(self, seen: AttackContext) -> Floats:
        """Return a step against the average one."""
        mean, _ = compute_honest_statistics(seen)
        return as_floats(seen.global_best - self.scale * (mean - seen.global_best))


@register.attack("mimic")
@dataclass(frozen=True)
class Mimic(Attack):
    """All attackers send the first honest worker's model, and claim its score (Karimireddy et al. 2022)."""

    omniscient: ClassVar[bool] = True

    def claim(self, seen: AttackContext) -> float:
        """Return what that worker claims."""
        scores = seen.honest_scores
        return seen.score if scores is None or not len(scores) else float(scores[0])

    def upload(self, seen: AttackContext) -> Floats:
        """Return that worker's model."""
        return np.asarray(honest_models(seen)[0])


@register.attack("min-max")
@dataclass(frozen=True)
class MinMax(Colluding):
    """Min-Max (Shejwalkar and Houmansadr 2021): mean - gamma std, as far out as the honest are from each other.

    gamma is the largest with max_i |mean - gamma std - w_i| <= max_ij |w_i - w_j|.
    """

    def collude(self, seen: AttackContext) -> Floats:
        """Return a model at the rim of the crowd."""
        mean, spread = compute_honest_statistics(seen)
        rows = honest_models(seen).astype(np.float64)
        return as_floats(mean - largest_gamma(rows, mean, spread) * spread)


@register.attack("min-sum")
@dataclass(frozen=True)
class MinSum(Colluding):
    """Min-Sum (Shejwalkar and Houmansadr 2021): mean - gamma std, as near to all honest models as one of them is.

    gamma is the largest with sum_i |mean - gamma std - w_i|^2 <= min_i sum_j |w_i - w_j|^2. Because the w_i - mean sum
    to 0, that is gamma |std| = min_i |mean - w_i|. The authors' code searches gamma by bisection and takes the minimum
    as here; some copies take the maximum. It has two more directions than the standard deviation.
    """

    def collude(self, seen: AttackContext) -> Floats:
        """Return a model as far from the mean as the nearest honest one."""
        mean, spread = compute_honest_statistics(seen)
        nearest = min(norm(row - mean) for row in honest_models(seen))
        return as_floats(mean - nearest / max(norm(spread), 1e-300) * spread)


@register.attack("fang-trim")
@dataclass(frozen=True)
class FangTrim(Colluding):
    """The attack on the trimmed mean (Fang et al. 2020, full knowledge): weights just beyond all honest ones.

    Where the honest mean is above w^g, a weight is drawn between the lowest honest one and that divided by `scale`, or
    times `scale` if it is negative; where it is below, likewise beyond the highest. The paper's b is `scale`, 2. A
    weight that no honest worker moves stays. Every attacker draws its own, as in the paper; without `individual` one
    draws for all. The authors' code takes the upper limit instead of drawing.
    """

    scale: float = 2.0
    individual: bool = field(default=True, kw_only=True)

    def upload(self, seen: AttackContext) -> Floats:
        """Return weights beyond the honest ones, against their common step."""
        rows = honest_models(seen)
        away = np.sign(seen.global_best - rows.mean(0, dtype=np.float64))  # (D,)
        edge = np.where(away > 0, rows.max(0), rows.min(0))
        limits = np.where(edge * away > 0, self.scale, 1 / self.scale)
        drawn = seen.rng.uniform(size=len(edge))
        return as_floats(np.where(away == 0, seen.global_best, edge * (1 + drawn * (limits - 1))))


def largest_gamma(rows: Doubles, mean: Doubles, spread: Doubles) -> float:
    """Return the largest gamma for which mean - gamma * spread is as near to all rows as rows are to each other."""
    squares = (rows * rows).sum(1)
    apart = squares[:, None] + squares - 2 * rows @ rows.T
    one, other = np.unravel_index(apart.argmax(), apart.shape)
    widest = dot(rows[one] - rows[other], rows[one] - rows[other])  # BLAS rounds by its number of threads
    # |mean - gamma s - w|^2 = |mean - w|^2 - 2 gamma s.(mean - w) + gamma^2 |s|^2 <= widest, for every row
    steps, length = mean - rows, dot(spread, spread)
    if length == 0:
        return 0.0
    across = np.einsum("ij,j->i", steps, spread)
    room = np.maximum(across**2 - length * ((steps**2).sum(1) - widest), 0.0)
    return float(max(((across + np.sqrt(room)) / length).min(), 0.0))
