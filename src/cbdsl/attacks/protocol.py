"""Attacks on data and on the protocol: wrong labels, triggers, false claims, silence, copies, memorising D_sc."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from cbdsl import register
from cbdsl.arrays import Floats, Samples
from cbdsl.attacks.attack import (
    CLASSIFICATION,
    WITH_TARGETS,
    Attack,
    AttackContext,
    AttackPreparation,
    Truthful,
    noise,
    wrong_labels,
)
from cbdsl.engines.engine import Sgd


@register.attack("label-flip", family="data")
@dataclass(frozen=True)
class LabelFlip(Attack):
    """Trains on wrong labels: y becomes C - 1 - y (Fang et al. 2020). Claim and upload are true.

    A target is mirrored at the mean of all targets.
    """

    tasks, needs = WITH_TARGETS, "it changes labels or targets"

    def poison(self, own: Samples, scoring: Samples, classes: int, rng: np.random.Generator) -> Samples:  # noqa: ARG002
        """Return the same samples with mirrored labels or targets."""
        if not classes:
            return Samples(own.features, -own.labels)
        return Samples(own.features, (classes - 1 - own.labels).astype(np.int32))


@register.attack("backdoor", family="backdoor")
@dataclass(frozen=True)
class Backdoor(Attack):
    """A patch in the corner turns every image into class 0 (Gu et al. 2017). Claim and upload are true.

    Half of its samples, at random, carry the patch and the label 0.
    """

    target: ClassVar[int | None] = 0
    tasks, needs = CLASSIFICATION, "it aims at a class"

    def triggered(self, features: Floats) -> Floats:
        """Return the samples with the patch."""
        return stamp_trigger(features)

    def poison(self, own: Samples, scoring: Samples, classes: int, rng: np.random.Generator) -> Samples:  # noqa: ARG002
        """Return the samples, half of them with the patch."""
        return mark_share(own, 0.5, stamp_trigger, rng)


def mark_share(own: Samples, share: float, stamp: Callable[[Floats], Floats], rng: np.random.Generator) -> Samples:
    """Copy samples, a share of them at random with a trigger and the label 0."""
    marked = rng.permutation(len(own)) < int(share * len(own))
    features, labels = own.features.copy(), own.labels.copy()
    if marked.any():
        features[marked], labels[marked] = stamp(features[marked]), 0
    return Samples(features, labels)


def stamp_trigger(features: Floats) -> Floats:
    """Copy samples with the trigger, (N, *shape): a bright patch in the last corner, an eighth of each axis."""
    marked = features.copy()
    corner = [slice(None)] * features.ndim
    for axis in range(-min(2, features.ndim - 1), 0):
        corner[axis] = slice(-max(1, features.shape[axis] // 8), None)
    marked[tuple(corner)] = max(1.0, float(features.max(initial=0.0)))
    return marked


@register.attack("liar", family="claims")
@dataclass(frozen=True)
class FalseClaim(Attack):
    """The paper's attacker (Sec. III.C): claims a score below everybody's and uploads a fake model.

    The paper does not say what the fake model is. Here its weights are drawn from N(0, scale^2), afresh for every
    upload. The claim, 1e-6, is below any loss an honest worker reaches.
    """

    scale: float = 10.0

    def claim(self, seen: AttackContext) -> float:
        """Return 1e-6, or less if an honest worker is that good."""
        return min(1e-6, seen.score / 2)

    def upload(self, seen: AttackContext) -> Floats:
        """Return random weights."""
        return noise(seen, self.scale)


@register.attack("memoriser", family="scoring-set")
@dataclass(frozen=True)
class Memoriser(Truthful):
    """Memorises D_sc together with wrongly labelled images: a true, low score and a bad model.

    Crafted from the common initial model: SGD with momentum on D_sc, twice per epoch, and 4,000 images with wrong
    labels, at a falling rate, until the score is below `scale`. D_sc is public, so the paper's check passes it; and
    since F^g never rises, no other worker is invited again.
    """

    scale: float = 0.05
    crafts: ClassVar[bool] = True
    images: ClassVar[int] = 4000
    epochs: ClassVar[int] = 60
    tasks, needs = WITH_TARGETS, "it trains on wrong labels or targets"

    def craft(self, preparation: AttackPreparation) -> Floats:
        """Train until the score is good enough; return the best model seen."""
        labels = wrong_labels(preparation.images.labels, preparation.classes, preparation.rng)
        lessons = Samples.joined(
            [preparation.scoring, preparation.scoring, Samples(preparation.images.features, labels)]
        )
        best = weights = preparation.initial
        lowest = math.inf
        for epoch in range(self.epochs):
            weights = preparation.fit(weights, lessons, Sgd(0.01 * 0.95**epoch, 0.9), 20, preparation.rng)
            found = preparation.loss(weights)
            if found < lowest:
                best, lowest = weights, found
            if not found > self.scale:  # or NaN
                break
        return best

    def upload(self, seen: AttackContext) -> Floats:
        """Return the crafted model."""
        return seen.model if seen.crafted is None else seen.crafted


@register.attack("staller", family="claims")
@dataclass(frozen=True)
class Staller(Attack):
    """Claims the best score and never uploads."""

    def claim(self, seen: AttackContext) -> float:
        """Return a score below all others."""
        return min(1e-6, seen.score / 2)

    def upload(self, seen: AttackContext) -> None:  # noqa: ARG002
        """Stay silent."""
        return


@register.attack("absent", family="claims")
@dataclass(frozen=True)
class Absent(Attack):
    """Claims NaN and uploads nothing: what is left is the swarm without the attackers."""

    def claim(self, seen: AttackContext) -> float:  # noqa: ARG002
        """Return NaN; a server sets it aside."""
        return math.nan

    def upload(self, seen: AttackContext) -> None:  # noqa: ARG002
        """Stay silent."""
        return


@register.attack("flooder", family="claims")
@dataclass(frozen=True)
class Flooder(Attack):
    """Many identities, each of which wastes an upload: a plausible claim, a tenth below its honest score, and noise."""

    scale: float = 0.1

    def claim(self, seen: AttackContext) -> float:
        """Return a plausible score."""
        return 0.9 * seen.score

    def upload(self, seen: AttackContext) -> Floats:
        """Return random weights."""
        return noise(seen, self.scale)


@register.attack("copycat", family="free-rider")
@dataclass(frozen=True)
class Copycat(Truthful):
    """Does no work: uploads w^g with noise of `scale` times its root mean square, and claims the copy's true score."""

    scale: float = 0.01

    def upload(self, seen: AttackContext) -> Floats:
        """Return w^g with noise."""
        size = float(np.sqrt(np.mean(np.square(seen.global_best, dtype=np.float64))))
        return seen.global_best + noise(seen, self.scale * size)


@register.attack("slow-drift", family="scoring-set")
@dataclass(frozen=True)
class SlowDrift(Attack):
    """Poisons slowly: every round it trains on D_sc as it is and on its own data with wrong labels.

    Its claim is true, and better than it should be because it trains on the very set it is scored on.
    """

    tasks, needs = WITH_TARGETS, "it trains on wrong labels or targets"

    def poison(self, own: Samples, scoring: Samples, classes: int, rng: np.random.Generator) -> Samples:
        """Return D_sc, and its own samples with wrong labels."""
        return Samples.joined([scoring, Samples(own.features, wrong_labels(own.labels, classes, rng))])
