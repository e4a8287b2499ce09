"""What generated samples give away of those they were learned from: distances, and tests for membership.

Measures alone: no number here proves that a sample cannot be found out, see docs/generate.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cbdsl.arrays import Bools, Doubles, Floats

_AT_ONCE = 500  # rows


@dataclass(frozen=True)
class Distances:
    """Quantiles of distances to the nearest neighbour, as root mean square differences."""

    lowest: float
    hundredth: float
    median: float

    @staticmethod
    def of(found: Doubles) -> Distances:
        """The quantiles of these distances, (N,)."""
        return Distances(*(round(float(value), 4) for value in np.quantile(found, (0, 0.01, 0.5))))


@dataclass(frozen=True)
class Membership:
    """How well members are told from samples that were never seen; as many of both. Guessing: area 0.5, advantage 0."""

    area: float  # under the ROC curve: the chance that a member looks more like one than a sample never seen
    area_error: float  # one standard error
    advantage: float  # share of members found less share of others taken for them, at the best threshold
    advantage_error: float


@dataclass(frozen=True)
class Privacy:
    """What was measured on N members and N samples that were never seen."""

    compared: int  # N
    generated: int
    generated_to_members: Distances
    generated_to_unseen: Distances
    unseen_to_members: Distances  # what samples have that are no copies for certain
    closer_to_members: float  # share of generated samples that are nearer to a member than to any unseen sample
    closer_error: float
    by_samples: Membership  # the attacker has the generated samples: who is near to one was learned from
    by_generator: Membership  # the attacker has the generator: whose loss is low was learned from


def measured(made: Floats, members: Floats, unseen: Floats, losses: tuple[Doubles, Doubles]) -> Privacy:
    """Compare generated samples (M, d) with members and unseen ones, (N, d) each, of which losses are (N,)."""
    to_members, to_unseen = nearest(made, members), nearest(made, unseen)
    closer = float((to_members < to_unseen).mean() + (to_members == to_unseen).mean() / 2)
    return Privacy(
        compared=len(members),
        generated=len(made),
        generated_to_members=Distances.of(to_members),
        generated_to_unseen=Distances.of(to_unseen),
        unseen_to_members=Distances.of(nearest(unseen, members)),
        closer_to_members=round(closer, 4),
        closer_error=round(math.sqrt(max(closer * (1 - closer), 1e-9) / len(made)), 4),
        by_samples=membership(-nearest(members, made), -nearest(unseen, made)),
        by_generator=membership(-losses[0], -losses[1]),
    )


def nearest(rows: Floats, others: Floats) -> Doubles:
    """The distance of each row to the nearest of the others, by number of features: (N, d), (M, d) -> (N,)."""
    centre = others.mean(0, dtype=np.float64)  # lengths of features far from 0 would leave no digits for distances
    return np.concatenate(
        [np.min([_nearest_in(part - centre, few - centre) for few in _parts(others)], axis=0) for part in _parts(rows)]
    )


def _parts(rows: Floats) -> list[Floats]:
    """A few rows at a time: their distances, and the rows themselves as doubles, are never all in memory."""
    return np.array_split(rows, -(-len(rows) // _AT_ONCE))


def _nearest_in(rows: Doubles, others: Doubles) -> Doubles:
    """See `nearest`. Who is nearest is found by |b|^2 - 2ab, how near by the difference itself: a copy is at 0."""
    found = (np.square(others).sum(1) - 2 * (rows @ others.T)).argmin(1)
    distances: Doubles = np.sqrt(np.square(rows - others[found]).mean(1))
    return distances


def membership(members: Doubles, unseen: Doubles) -> Membership:
    """A test that takes samples with high scores for members, (N,) each.

    The threshold is chosen on one half of the samples and tried on the other, both ways round.
    """
    area = _area(members, unseen)
    tried = [
        _tried(_threshold(members[one], unseen[one]), members[other], unseen[other])
        for one, other in _halves(len(members))
    ]
    return Membership(
        area=round(area, 4),
        area_error=round(_area_error(area, len(members)), 4),
        advantage=round(float(np.mean([advantage for advantage, _ in tried])), 4),
        advantage_error=round(math.hypot(*(error for _, error in tried)) / len(tried), 4),
    )


def _halves(count: int) -> tuple[tuple[Bools, Bools], tuple[Bools, Bools]]:
    even = np.arange(count) % 2 == 0
    return (even, ~even), (~even, even)


def _area(members: Doubles, unseen: Doubles) -> float:
    """The chance that a member scores higher than another sample; ties count half."""
    ordered = np.sort(unseen)
    below = np.searchsorted(ordered, members, "left") + np.searchsorted(ordered, members, "right")
    return float(below.mean() / 2 / len(unseen))


def _area_error(area: float, count: int) -> float:
    """One standard error (Hanley and McNeil 1982), with as many of either kind."""
    first, second = area / (2 - area), 2 * area**2 / (1 + area)
    spread = area * (1 - area) + (count - 1) * (first + second - 2 * area**2)
    return math.sqrt(max(spread, 0.0)) / count


def _threshold(members: Doubles, unseen: Doubles) -> float:
    """Where the share of members above exceeds the share of others above the most."""
    scores = np.sort(np.concatenate([members, unseen]))
    above = [1 - np.searchsorted(np.sort(part), scores, "left") / len(part) for part in (members, unseen)]
    return float(scores[np.argmax(above[0] - above[1])])


def _tried(threshold: float, members: Doubles, unseen: Doubles) -> tuple[float, float]:
    """The advantage of a threshold, and one standard error of it."""
    shares = [float((part >= threshold).mean()) for part in (members, unseen)]
    errors = [share * (1 - share) / len(part) for share, part in zip(shares, (members, unseen), strict=True)]
    return shares[0] - shares[1], math.sqrt(sum(errors))
