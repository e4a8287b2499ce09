"""What an attack is: the small contract, and what an attacker may know.

An attack changes a worker's data, its claim or its upload. It never sees the server's defence, and honest workers never
pass through it. What it may know is in `AttackContext`; attacks that need the honest workers' models are
`omniscient`. Below, w is the model that an honest worker in the attacker's place would send, w^g the global model,
w_1 ... w_h the honest models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from cbdsl import register
from cbdsl.arrays import Doubles, Floats, Indices, Samples
from cbdsl.engines.base import Sgd
from cbdsl.errors import UserError
from cbdsl.models.architecture import Architecture
from cbdsl.spec import Spec


@dataclass(frozen=True, eq=False)
class AttackContext:
    """What an attacker knows when it acts."""

    model: Floats  # w, (D,)
    score: float  # and the score an honest worker would claim for it
    global_best: Floats  # w^g as it was last received, (D,)
    workers: int  # n
    attackers: int  # f
    rng: np.random.Generator  # the same for the claim and the upload of one round
    score_of: Callable[[Floats], float]  # any model's true score, as the server will measure it
    honest: Floats | None = None  # (h, D), for omniscient attacks alone
    honest_scores: Doubles | None = None  # (h,)
    crafted: Floats | None = None  # what `craft` made, (D,)
    network: Architecture | None = None  # what lies where in a model; none: it cannot be described
    losses_of: Callable[[Floats], tuple[Doubles, Doubles]] | None = None
    """Any model's loss on every sample of D_sc, (N,), and on every one of those `poison` was given, (K,)."""
    uploaded: Callable[[], Floats | None] | None = None  # what `upload` returns in this round; see `true_score`


@dataclass(frozen=True, eq=False)
class AttackPreparation:
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
    aims: ClassVar[tuple[int, ...]] = ()  # the classes that it wants to be got wrong, where it is after some alone

    def poison(self, own: Samples, scoring: Samples, classes: int, rng: np.random.Generator) -> Samples | None:  # noqa: ARG002
        """What it trains on instead of its own data and D_tr; none: no change."""
        return None

    def craft(self, home: AttackPreparation) -> Floats | None:  # noqa: ARG002
        """A model made at home, (D,)."""
        return None

    def triggered(self, features: Floats) -> Floats:
        """Samples with the trigger on them, (N, *shape), for an attack that has a target."""
        return features

    def claim(self, seen: AttackContext) -> float:
        """The score it claims."""
        return seen.score

    def upload(self, seen: AttackContext) -> Floats | None:
        """Return the model it uploads, (D,), or None to stay silent.

        Called at most once per attacker and round, before or after `claim`, and if the attack is omniscient once per
        round for all attackers. Both get a context of their own with `rng` at its start. A claim about the upload is
        `true_score(self, seen)`, as `Truthful` makes it: that does not call `upload` again.
        """
        return seen.model


class Truthful(Attack):
    """Claims the true score of what it uploads."""

    def claim(self, seen: AttackContext) -> float:
        """What the server will measure, finite or not."""
        return true_score(self, seen)


@dataclass(frozen=True, eq=False)
class ClaimsBetter(Attack):
    """Claims half its honest score, so as to be invited: a bad model with its true score never would be.

    Where everybody is invited in turn a true claim serves better, because nobody is banned for one: `honest_claim`.
    """

    honest_claim: bool = field(default=False, kw_only=True)

    def claim(self, seen: AttackContext) -> float:
        """Half of what is true, or what is true of the upload."""
        return true_score(self, seen) if self.honest_claim else seen.score / 2


def make_attack(spec: Spec) -> Attack:
    """The attack that a spec names, with its settings; `attack.scale` is a short way to `options.NAME.scale`."""
    name, options = spec.attack.name, dict(spec.options.of(spec.attack.name))
    if spec.attack.scale:
        if "scale" not in register.attack.settings(name):
            raise UserError(
                f"The attack '{name}' has no setting 'scale'; given attack.scale={spec.attack.scale:g}. Leave it out."
            )
        options["scale"] = spec.attack.scale
    made = register.attack.make(name, options)
    if not isinstance(made, Attack):
        raise UserError(f"The attack '{name}' is a {type(made).__name__}; register a class that extends cbdsl.Attack.")
    return made


def true_score(attack: Attack, seen: AttackContext) -> float:
    """Return the score of what an attack uploads in this round, finite or not; its honest score if it is silent."""
    sent = seen.uploaded() if seen.uploaded else attack.upload(seen)
    return seen.score if sent is None else float(seen.score_of(sent))


def noise(seen: AttackContext, scale: float) -> Floats:
    """N(0, scale^2) in the shape of a model, from the attacker's own stream."""
    return as_floats(scale * seen.rng.standard_normal(seen.model.shape, dtype=np.float32))


def as_floats(weights: Floats | Doubles) -> Floats:
    """As a model is sent."""
    return weights.astype(np.float32)


def honest_models(seen: AttackContext) -> Floats:
    """The honest workers' models, (h, D); its own where there are none."""
    return seen.model[None] if seen.honest is None or not len(seen.honest) else seen.honest


def crowd(seen: AttackContext) -> tuple[Doubles, Doubles]:
    """Mean and standard deviation of the honest models, coordinate by coordinate."""
    rows = honest_models(seen)
    return rows.mean(0, dtype=np.float64), rows.std(0, dtype=np.float64)


def wrong_labels(labels: Indices, classes: int, rng: np.random.Generator) -> Indices:
    """Other labels, each wrong one as likely as the next."""
    return ((labels + rng.integers(1, max(2, classes), len(labels))) % classes).astype(np.int32)
