"""Attacks on weights: the upload is not what an honest worker would send."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import ClassVar

import numpy as np

from cbdsl import register
from cbdsl.algorithm.aggregators import TrustedReference, aggregate, parse_aggregator
from cbdsl.arrays import Doubles, Floats, NamedArrays, dot, norm
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
from cbdsl.errors import unknown

DIRECTIONS = ("std", "unit", "sign")
_SMALLEST_LAMBDA = 1e-5
_EVALUATIONS = 16  # of a rule, in the search for a factor


@register.attack("gaussian", family="weights")
@dataclass(frozen=True)
class Gaussian(ClaimsBetter):
    """w + N(0, scale^2)."""

    scale: float = 1.0

    def upload(self, seen: AttackContext) -> Floats:
        """Return its model with noise."""
        return seen.model + noise(seen, self.scale)


@register.attack("sign-flip", family="weights")
@dataclass(frozen=True)
class SignFlip(ClaimsBetter):
    """w^g - scale (w - w^g): its update reversed (Karimireddy et al. 2022)."""

    scale: float = 1.0

    def upload(self, seen: AttackContext) -> Floats:
        """Return the opposite step."""
        return as_floats(seen.global_best - self.scale * (seen.model - seen.global_best))


@register.attack("scaled", family="weights")
@dataclass(frozen=True)
class Scaled(ClaimsBetter):
    """w^g + scale (w - w^g): a step that outweighs all others (Bagdasaryan et al. 2020)."""

    scale: float = 10.0

    def upload(self, seen: AttackContext) -> Floats:
        """Return a much too long step."""
        return as_floats(seen.global_best + self.scale * (seen.model - seen.global_best))


@register.attack("zero", family="weights")
@dataclass(frozen=True)
class Zero(ClaimsBetter):
    """A model whose weights are all 0."""

    def upload(self, seen: AttackContext) -> Floats:
        """Return zeros."""
        return np.zeros_like(seen.model)


@register.attack("nan", family="weights")
@dataclass(frozen=True)
class NotANumber(ClaimsBetter):
    """Weights that are NaN, and infinity among them."""

    def upload(self, seen: AttackContext) -> Floats:
        """Return NaN, every other weight infinite."""
        poison = np.full_like(seen.model, np.nan)
        poison[::2] = np.inf
        return poison


@dataclass(frozen=True, eq=False)
class Perturbing(Colluding):
    """mean - gamma p: the mean of the honest models, moved along p as far as the attack's own rule allows.

    direction: what p is: `std`, the standard deviation of the honest models; `unit`, their mean step from w^g; `sign`,
    the signs of that step (Shejwalkar and Houmansadr 2021). All have the length of the standard deviation.
    against: an aggregation rule, such as `krum`. Then gamma is the one found to move that rule's result farthest from
    the mean (their attack tailored to a rule), instead of the attack's own.
    """

    direction: str = field(default="std", kw_only=True)
    against: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        if self.direction not in DIRECTIONS:
            raise unknown("direction", self.direction, DIRECTIONS)
        if self.against:
            parse_aggregator(self.against)

    def reach(self, seen: AttackContext, mean: Doubles, along: Doubles) -> float:
        """Return gamma. along: p, (D,)."""
        raise NotImplementedError

    def collude(self, seen: AttackContext) -> Floats:
        """Return the perturbed mean."""
        mean, spread = compute_honest_statistics(seen)
        along = spread if self.direction == "std" else _point(self.direction, mean - seen.global_best, norm(spread))
        gamma = self.reach(seen, mean, along)
        if self.against:
            gamma = search_gamma(lambda tried: self._measure_damage(seen, mean, mean - tried * along), gamma)
        return as_floats(mean - gamma * along)

    def _measure_damage(self, seen: AttackContext, mean: Doubles, sent: Doubles) -> float:
        """Return the distance of the rule's result from the honest mean if all attackers send a model."""
        trust = TrustedReference(
            seen.global_best,
            root=lambda: seen.model,  # an honest worker's model stands for the server's
            losses=lambda rows: np.array([seen.score_of(row) for row in rows]),
        )
        rows = [*honest_models(seen), *[as_floats(sent)] * seen.attackers]
        return norm(aggregate(self.against, rows, seen.attackers, trust) - mean)


def _point(direction: str, step: Doubles, length: float) -> Doubles:
    """Return a step, or its signs, scaled to a length; zeros if the step is zero."""
    along = np.sign(step) if direction == "sign" else step
    return np.asarray(length / max(norm(along), 1e-300) * along)


def search_gamma(damage: Callable[[float], float], first: float) -> float:
    """Return a gamma >= 0 with great damage: doubled from `first` on while that helps, then refined by halving."""
    best, highest, step, grows = 0.0, damage(0.0), first or 1.0, True
    for _ in range(_EVALUATIONS):
        tried = best + step
        found = damage(tried) if tried >= 0 else -1.0
        if found > highest:
            best, highest, step = tried, found, step * (2 if grows else 1)
        else:
            grows, step = False, -step if step > 0 and not grows else abs(step) / 2
    return best


@register.attack("alie", family="colluding", ranges={"scale": (0, math.inf)})
@dataclass(frozen=True)
class Alie(Perturbing):
    """A little is enough (Baruch et al. 2019): mean - z std of the honest models, coordinate by coordinate.

    z is the largest for which a majority still stands further out: Phi(z) = (n - f - s) / (n - f) with
    s = floor(n / 2 + 1) - f. A scale sets z itself.
    """

    scale: float = 0.0

    def reach(self, seen: AttackContext, mean: Doubles, along: Doubles) -> float:  # noqa: ARG002
        """Return z."""
        return self.scale or alie_z(seen.workers, seen.attackers)


def alie_z(workers: int, attackers: int) -> float:
    """Return how many standard deviations hide in a crowd of n workers with f attackers; 0 if none do."""
    supporters = workers // 2 + 1 - attackers
    share = (workers - attackers - supporters) / max(1, workers - attackers)
    return max(0.0, NormalDist().inv_cdf(min(max(share, 1e-9), 1 - 1e-9)))


@register.attack("ipm", family="colluding")
@dataclass(frozen=True)
class InnerProduct(Colluding):
    """Inner product manipulation (Xie et al. 2020): w^g - scale * mean(w_i - w^g)."""

    scale: float = 0.1

    def collude(self, seen: AttackContext) -> Floats:
        """Return a step against the average one."""
        mean, _ = compute_honest_statistics(seen)
        return as_floats(seen.global_best - self.scale * (mean - seen.global_best))


@register.attack("mimic", family="colluding")
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


@register.attack("min-max", family="colluding")
@dataclass(frozen=True)
class MinMax(Perturbing):
    """Min-Max (Shejwalkar and Houmansadr 2021): mean - gamma std, as far out as the honest are from each other.

    gamma is the largest with max_i |mean - gamma std - w_i| <= max_ij |w_i - w_j|; solved, not searched for.
    """

    def reach(self, seen: AttackContext, mean: Doubles, along: Doubles) -> float:
        """Return the largest gamma within the honest models' diameter."""
        return largest_gamma(honest_models(seen).astype(np.float64), mean, along)


@register.attack("min-sum", family="colluding")
@dataclass(frozen=True)
class MinSum(Perturbing):
    """Min-Sum (Shejwalkar and Houmansadr 2021): mean - gamma std, as near to all honest models as one of them is.

    gamma is the largest with sum_i |mean - gamma std - w_i|^2 <= min_i sum_j |w_i - w_j|^2. Because the w_i - mean sum
    to 0, that is gamma |std| = min_i |mean - w_i|. The authors' code searches gamma by bisection and takes the minimum
    as here; some copies take the maximum.
    """

    def reach(self, seen: AttackContext, mean: Doubles, along: Doubles) -> float:
        """Return the distance of the nearest honest model, in units of |p|."""
        return min(norm(row - mean) for row in honest_models(seen)) / max(norm(along), 1e-300)


@register.attack("fang-krum", family="colluding")
@dataclass(frozen=True)
class FangKrum(Colluding):
    """The attack on Krum (Fang et al. 2020, full knowledge): w^g - lambda s, with the largest lambda that Krum picks.

    s are the signs of the honest mean's step from w^g. lambda starts at an upper bound,
    min_i sum_j |w_i - w_j| / ((h - f - 1) sqrt(D)) + max_i |w_i - w^g| / sqrt(D) with h honest models and the sum over
    the h - f - 2 nearest to w_i, and is halved until Krum picks the model from the honest ones and f copies of it, or
    lambda is 1e-5 or less. All attackers send the same model; in the paper they differ slightly.
    """

    def collude(self, seen: AttackContext) -> Floats:
        """Return the model that Krum picks."""
        rows = honest_models(seen)
        signs = np.sign(rows.mean(0, dtype=np.float64) - seen.global_best)  # (D,)
        trust = TrustedReference(seen.global_best, root=lambda: seen.model, losses=lambda _: np.zeros(0))
        size = krum_bound(rows.astype(np.float64), seen.global_best.astype(np.float64), seen.attackers)
        while True:
            sent = as_floats(seen.global_best - size * signs)
            picked = aggregate("krum", [*rows, *[sent] * seen.attackers], seen.attackers, trust)
            if np.array_equal(picked, sent) or not size > _SMALLEST_LAMBDA:
                return sent
            size /= 2


def krum_bound(rows: Doubles, received: Doubles, attackers: int) -> float:
    """Return the first lambda of `fang-krum`. rows: the honest models, (h, D); received: w^g, (D,)."""
    near = max(1, len(rows) - attackers - 2)
    sums = [np.sort(np.sqrt(np.square(rows - row).sum(1)))[1 : 1 + near].sum() for row in rows]
    apart = max(norm(row - received) for row in rows)
    return float((min(sums) / max(1, len(rows) - attackers - 1) + apart) / np.sqrt(len(received)))


@register.attack("fang-trim", family="colluding", ranges={"scale": (1, math.inf)})
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


@register.attack("poisoned-fl", family="weights", ranges={"scale": (0, math.inf), "every": (1, math.inf)})
@dataclass(frozen=True)
class PoisonedFl(ClaimsBetter):
    """PoisonedFL (Xie et al. 2025): steps along the same signs in every round. It needs w^g alone, no honest model.

    s are random signs, one vector for all attackers and rounds. With g the last step of w^g and m the attacker's own
    last step, it sends w^g + lambda |g| d with d along |g - m |g| / |m|| * s and of length 1; w^g in its first round.
    lambda starts at `scale`. Every `every` rounds it is multiplied by 0.7, while at least 0.5 is left, unless more
    weights have moved along s since then than chance explains: the 99 % quantile of Binomial(D, 1/2).

    As in the authors' code, a weight that has not moved counts with its own sign. m is the step that was sent, since
    the attacker does not see whether the server clips. After missed rounds g is the step since it last took part.
    """

    scale: float = 8.0
    every: int = 50

    def remember(self, seen: AttackContext) -> NamedArrays:
        """Return w^g, its last step, the attacker's last step, lambda, and w^g and round of the last check."""
        now, before = seen.global_best, seen.memory
        if not before:
            start = {"received": now, "mark": now, "step": np.zeros_like(now), "sent": np.zeros_like(now)}
            return start | {"factor": np.array([self.scale]), "marked": np.array([seen.round])}
        after = before | {"received": now, "step": now - before["received"], "sent": self._step(seen)}
        if seen.round - int(before["marked"][0]) < self.every:
            return after
        moved = now - before["mark"]
        along = np.sign(np.where(moved == 0, now, moved)) == self._signs(seen)
        chance = len(now) / 2 + NormalDist().inv_cdf(0.99) * np.sqrt(len(now)) / 2
        lower = 0.7 * before["factor"]
        kept = before["factor"] if along.sum() >= chance or lower[0] < 0.5 else lower
        return after | {"mark": now, "marked": np.array([seen.round]), "factor": kept}

    def upload(self, seen: AttackContext) -> Floats:
        """Return w^g with a step along the signs."""
        return seen.global_best + self._step(seen) if seen.memory else seen.global_best

    def _signs(self, seen: AttackContext) -> Doubles:
        return np.asarray(2.0 * seen.common(0).integers(0, 2, len(seen.global_best)) - 1)

    def _step(self, seen: AttackContext) -> Floats:
        """Return the step for what is remembered, (D,)."""
        step, sent = (seen.memory[name].astype(np.float64) for name in ("step", "sent"))
        sizes = np.abs(step - sent * norm(step) / (norm(sent) + 1e-9))
        factor = float(seen.memory["factor"][0]) * norm(step) / (norm(sizes) + 1e-9)
        return as_floats(factor * sizes * self._signs(seen))
