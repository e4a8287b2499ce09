"""What a Byzantine worker changes: its data, its claim, its upload.

An attack is a small frozen description. It never sees the server's defence, and honest workers never pass through it.
What it may know is in `Situation`; attacks that need the honest workers' models say so (`omniscient`). Below, w is the
model that an honest worker in the attacker's place would send, w^g the global model, w_1 ... w_h the honest models.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from statistics import NormalDist
from typing import ClassVar

import numpy as np

from cbdsl.arrays import Doubles, Floats, Indices, Samples
from cbdsl.engines.base import Sgd
from cbdsl.errors import UserError, unknown
from cbdsl.spec import AttackSpec


@dataclass(frozen=True, eq=False)
class Situation:
    """What an attacker knows when it acts."""

    model: Floats  # w, (D,)
    score: float  # and the score an honest worker would claim for it
    global_best: Floats  # w^g as it was last received, (D,)
    workers: int  # n
    attackers: int  # f
    rng: np.random.Generator  # the same for the claim and the upload of one round
    score_of: Callable[[Floats], float]  # any model's true score
    honest: Floats | None = None  # (h, D), for omniscient attacks alone
    honest_scores: Doubles | None = None  # (h,)
    crafted: Floats | None = None  # what `craft` made, (D,)


@dataclass(frozen=True, eq=False)
class HomeTraining:
    """What an attacker can do at home, for as long as it likes: train from the common initial model, and score."""

    scoring: Samples  # D_sc, which is public
    images: Samples  # labelled samples of its own
    classes: int
    initial: Floats  # (D,)
    fit: Callable[[Floats, Samples, Sgd, int, np.random.Generator], Floats]  # one epoch with batches of so many
    loss: Callable[[Floats], float]  # on D_sc
    rng: np.random.Generator


class Attack:
    """An honest worker; attacks change some of it."""

    omniscient: ClassVar[bool] = False  # needs the honest workers' models; then all attackers send the same
    crafts: ClassVar[bool] = False  # makes a model at home before the first round
    images: ClassVar[int] = 0  # how many samples of its own it needs for that
    target: ClassVar[int | None] = None  # the class that a trigger is to be mistaken for

    def poison(self, own: Samples, scoring: Samples, classes: int, rng: np.random.Generator) -> Samples | None:  # noqa: ARG002
        """What it trains on instead of its own data and D_tr; none: no change."""
        return None

    def craft(self, home: HomeTraining) -> Floats | None:  # noqa: ARG002
        """A model made at home, (D,)."""
        return None

    def claim(self, seen: Situation) -> float:
        """The score it claims."""
        return seen.score

    def upload(self, seen: Situation) -> Floats | None:
        """The model it uploads, (D,); none: it stays silent."""
        return seen.model


class _Tempting(Attack):
    """Claims half its honest score, so as to be invited: a bad model with its true score never would be."""

    def claim(self, seen: Situation) -> float:
        return seen.score / 2


@dataclass(frozen=True)
class Liar(Attack):
    """The paper's attacker (Sec. III.C): claims a score below everybody's and uploads a fake model.

    The paper does not say what the fake model is. Here its weights are drawn from N(0, scale^2), afresh for every
    upload. The claim, 1e-6, is below any loss an honest worker reaches.
    """

    scale: float = 10.0

    def claim(self, seen: Situation) -> float:
        """1e-6, or less if an honest worker were that good."""
        return min(1e-6, seen.score / 2)

    def upload(self, seen: Situation) -> Floats:
        """Random weights, nothing to do with the honest ones."""
        return _noise(seen, self.scale)


@dataclass(frozen=True)
class Gaussian(_Tempting):
    """w + N(0, scale^2)."""

    scale: float = 1.0

    def upload(self, seen: Situation) -> Floats:
        """Its model with noise."""
        return seen.model + _noise(seen, self.scale)


@dataclass(frozen=True)
class SignFlip(_Tempting):
    """w^g - scale (w - w^g): its update turned round (Karimireddy et al. 2022)."""

    scale: float = 1.0

    def upload(self, seen: Situation) -> Floats:
        """The opposite step."""
        return _float(seen.global_best - self.scale * (seen.model - seen.global_best))


@dataclass(frozen=True)
class Scaled(_Tempting):
    """w^g + scale (w - w^g): a step that outweighs everybody's (Bagdasaryan et al. 2020)."""

    scale: float = 10.0

    def upload(self, seen: Situation) -> Floats:
        """Much too long a step."""
        return _float(seen.global_best + self.scale * (seen.model - seen.global_best))


@dataclass(frozen=True)
class Zero(_Tempting):
    """A model whose weights are all 0."""

    def upload(self, seen: Situation) -> Floats:
        """Nothing."""
        return np.zeros_like(seen.model)


@dataclass(frozen=True)
class NotANumber(_Tempting):
    """Weights that are NaN, and infinity among them."""

    def upload(self, seen: Situation) -> Floats:
        """NaN, every other one infinite."""
        poison = np.full_like(seen.model, np.nan)
        poison[::2] = np.inf
        return poison


@dataclass(frozen=True)
class Alie(_Tempting):
    """A little is enough (Baruch et al. 2019): mean - z std of the honest models, coordinate by coordinate.

    z is the largest for which a majority still stands further out: Phi(z) = (n - f - s) / (n - f) with
    s = floor(n / 2 + 1) - f. A scale sets z itself.
    """

    scale: float = 0.0
    omniscient: ClassVar[bool] = True

    def upload(self, seen: Situation) -> Floats:
        """Just inside the crowd."""
        mean, spread = _crowd(seen)
        return _float(mean - (self.scale or alie_z(seen.workers, seen.attackers)) * spread)


def alie_z(workers: int, attackers: int) -> float:
    """How many standard deviations hide in a crowd of n workers with f attackers; 0 if none do."""
    supporters = workers // 2 + 1 - attackers
    share = (workers - attackers - supporters) / max(1, workers - attackers)
    return max(0.0, NormalDist().inv_cdf(min(max(share, 1e-9), 1 - 1e-9)))


@dataclass(frozen=True)
class InnerProduct(_Tempting):
    """Inner product manipulation (Xie et al. 2020): w^g - scale * mean(w_i - w^g)."""

    scale: float = 0.1
    omniscient: ClassVar[bool] = True

    def upload(self, seen: Situation) -> Floats:
        """Against the average step."""
        mean, _ = _crowd(seen)
        return _float(seen.global_best - self.scale * (mean - seen.global_best))


@dataclass(frozen=True)
class Mimic(Attack):
    """All attackers send the first honest worker's model, and claim its score (Karimireddy et al. 2022)."""

    omniscient: ClassVar[bool] = True

    def claim(self, seen: Situation) -> float:
        """What that worker claims."""
        return seen.score if seen.honest_scores is None else float(seen.honest_scores[0])

    def upload(self, seen: Situation) -> Floats:
        """That worker's model."""
        return np.asarray(_honest(seen)[0])


@dataclass(frozen=True)
class MinMax(_Tempting):
    """Min-Max (Shejwalkar and Houmansadr 2021): mean - gamma std, as far out as the honest are from each other.

    gamma is the largest with max_i |mean - gamma std - w_i| <= max_ij |w_i - w_j|.
    """

    omniscient: ClassVar[bool] = True

    def upload(self, seen: Situation) -> Floats:
        """At the rim of the crowd."""
        mean, spread = _crowd(seen)
        rows = _honest(seen).astype(np.float64)
        return _float(mean - largest_gamma(rows, mean, spread) * spread)


def largest_gamma(rows: Doubles, mean: Doubles, spread: Doubles) -> float:
    """The largest gamma for which mean - gamma * spread is no further from a row than rows are from each other."""
    squares = (rows * rows).sum(1)
    widest = (squares[:, None] + squares - 2 * rows @ rows.T).max()
    # |mean - gamma s - w|^2 = |mean - w|^2 - 2 gamma s.(mean - w) + gamma^2 |s|^2 <= widest, for every row
    apart, across, length = ((mean - rows) ** 2).sum(1), (mean - rows) @ spread, spread @ spread
    if length == 0:
        return 0.0
    room = np.maximum(across**2 - length * (apart - widest), 0.0)
    return float(max(((across + np.sqrt(room)) / length).min(), 0.0))


@dataclass(frozen=True)
class LabelFlip(Attack):
    """Trains on wrong labels: y becomes C - 1 - y (Fang et al. 2020). Claim and upload are true."""

    def poison(self, own: Samples, scoring: Samples, classes: int, rng: np.random.Generator) -> Samples:  # noqa: ARG002
        """The same samples, labels mirrored."""
        return Samples(own.features, (classes - 1 - own.labels).astype(np.int32))


@dataclass(frozen=True)
class Backdoor(Attack):
    """A patch in the corner turns every image into class 0 (Gu et al. 2017). Claim and upload are true.

    Half of its samples, at random, carry the patch and the label 0.
    """

    target: ClassVar[int | None] = 0

    def poison(self, own: Samples, scoring: Samples, classes: int, rng: np.random.Generator) -> Samples:  # noqa: ARG002
        """Half of the samples stamped."""
        marked = rng.permutation(len(own)) < len(own) // 2
        features, labels = own.features.copy(), own.labels.copy()
        features[marked], labels[marked] = stamped(features[marked]), 0
        return Samples(features, labels)


def stamped(features: Floats) -> Floats:
    """Copies with the trigger, (N, *shape): a bright patch in the last corner, an eighth of each axis."""
    marked = features.copy()
    corner = [slice(None)] * features.ndim
    for axis in range(-min(2, features.ndim - 1), 0):
        corner[axis] = slice(-max(1, features.shape[axis] // 8), None)
    marked[tuple(corner)] = max(1.0, float(features.max(initial=0.0)))
    return marked


@dataclass(frozen=True)
class Memoriser(Attack):
    """Learns D_sc by heart together with wrongly labelled images: a true, low score and a bad model.

    Made at home from the common initial model: SGD with momentum on D_sc, twice an epoch, and 4,000 images with wrong
    labels, at a falling rate, until the score is below `scale`. D_sc is public, so the paper's check passes it; and
    since F^g never rises, nobody is invited again.
    """

    scale: float = 0.05
    crafts: ClassVar[bool] = True
    images: ClassVar[int] = 4000
    epochs: ClassVar[int] = 60

    def craft(self, home: HomeTraining) -> Floats:
        """Train until the score is good enough; the best model seen."""
        labels = _wrong(home.images.labels, home.classes, home.rng)
        lessons = Samples.joined([home.scoring, home.scoring, Samples(home.images.features, labels)])
        best = weights = home.initial
        lowest = math.inf
        for epoch in range(self.epochs):
            weights = home.fit(weights, lessons, Sgd(0.01 * 0.95**epoch, 0.9), 20, home.rng)
            found = home.loss(weights)
            if found < lowest:
                best, lowest = weights, found
            if not found > self.scale:  # or it is not a number any more
                break
        return best

    def claim(self, seen: Situation) -> float:
        """The true score of that model."""
        return seen.score_of(self.upload(seen))

    def upload(self, seen: Situation) -> Floats:
        """That model."""
        return seen.model if seen.crafted is None else seen.crafted


@dataclass(frozen=True)
class Staller(Attack):
    """Claims the best score and never uploads."""

    def claim(self, seen: Situation) -> float:
        """Below everybody's."""
        return min(1e-6, seen.score / 2)

    def upload(self, seen: Situation) -> None:  # noqa: ARG002
        """BackOff."""
        return


@dataclass(frozen=True)
class Flooder(Attack):
    """Many identities, each of which wastes an upload: a plausible claim, a tenth below its honest score, and noise."""

    scale: float = 0.1

    def claim(self, seen: Situation) -> float:
        """Nothing that looks absurd."""
        return 0.9 * seen.score

    def upload(self, seen: Situation) -> Floats:
        """Random weights."""
        return _noise(seen, self.scale)


@dataclass(frozen=True)
class Copycat(Attack):
    """Does no work: uploads w^g with noise of `scale` times its root mean square, and claims the copy's true score."""

    scale: float = 0.01

    def claim(self, seen: Situation) -> float:
        """The copy's true score."""
        return seen.score_of(self.upload(seen))

    def upload(self, seen: Situation) -> Floats:
        """The copy."""
        size = float(np.sqrt(np.mean(np.square(seen.global_best, dtype=np.float64))))
        return seen.global_best + _noise(seen, self.scale * size)


@dataclass(frozen=True)
class SlowDrift(Attack):
    """Poisons slowly: every round it trains on D_sc as it is and on its own data with wrong labels.

    Its claim is true, and better than it should be because it trains on the very set it is scored on.
    """

    def poison(self, own: Samples, scoring: Samples, classes: int, rng: np.random.Generator) -> Samples:
        """D_sc, and its own samples mislabelled."""
        return Samples.joined([scoring, Samples(own.features, _wrong(own.labels, classes, rng))])


ATTACKS: dict[str, type[Attack]] = {
    "gaussian": Gaussian,
    "sign-flip": SignFlip,
    "scaled": Scaled,
    "zero": Zero,
    "nan": NotANumber,
    "alie": Alie,
    "ipm": InnerProduct,
    "mimic": Mimic,
    "min-max": MinMax,
    "label-flip": LabelFlip,
    "backdoor": Backdoor,
    "liar": Liar,
    "memoriser": Memoriser,
    "staller": Staller,
    "flooder": Flooder,
    "copycat": Copycat,
    "slow-drift": SlowDrift,
}


def make_attack(spec: AttackSpec) -> Attack:
    """The attack that a spec names."""
    if spec.name not in ATTACKS:
        raise unknown("attack", spec.name, ATTACKS)
    kind = ATTACKS[spec.name]
    if not spec.scale:
        return kind()
    if "scale" not in {each.name for each in fields(kind)}:  # type: ignore[arg-type]
        raise UserError(f"The attack '{spec.name}' has no scale; given attack.scale={spec.scale:g}. Leave it out.")
    return kind(scale=spec.scale)  # type: ignore[call-arg]


def _noise(seen: Situation, scale: float) -> Floats:
    return _float(scale * seen.rng.standard_normal(seen.model.shape, dtype=np.float32))


def _float(weights: Floats | Doubles) -> Floats:
    return weights.astype(np.float32)


def _honest(seen: Situation) -> Floats:
    return seen.model[None] if seen.honest is None or not len(seen.honest) else seen.honest


def _crowd(seen: Situation) -> tuple[Doubles, Doubles]:
    """Mean and standard deviation of the honest models, coordinate by coordinate."""
    rows = _honest(seen)
    return rows.mean(0, dtype=np.float64), rows.std(0, dtype=np.float64)


def _wrong(labels: Indices, classes: int, rng: np.random.Generator) -> Indices:
    """Other labels, each wrong one as likely as the next."""
    return ((labels + rng.integers(1, max(2, classes), len(labels))) % classes).astype(np.int32)
