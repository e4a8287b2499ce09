"""The interface of an attack, and what an attacker may know.

An attack changes a worker's data, its claim or its upload; it does not see the server's defence. What it may know is in
`AttackContext`; attacks that need the honest workers' models are `omniscient`. Below, w is the model that an honest
worker in the attacker's place would send, w^g the global model, w_1 ... w_h the honest models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, get_args

import numpy as np
from numpy.typing import NDArray

from cbdsl import register
from cbdsl.algorithm.worker_round import draw_batches
from cbdsl.arrays import Doubles, Floats, Labels, NamedArrays, Samples, dot, norm
from cbdsl.engines.engine import Sgd
from cbdsl.engines.numpy_steps import OptimiserState
from cbdsl.errors import UserError
from cbdsl.models.architecture import Architecture
from cbdsl.spec import LocalSpec, Spec, Task

ALL_TASKS: tuple[Task, ...] = get_args(Task)
CLASSIFICATION: tuple[Task, ...] = ("classification",)
WITH_TARGETS: tuple[Task, ...] = ("classification", "regression")
SHIFT = 3.0  # deviations by which a wrong target is off
INDIVIDUAL_LENGTH = 0.3  # of the common step: the noise that makes a colluder's upload its own


@dataclass(frozen=True, eq=False)
class AttackTools:
    """What an attacker works with that trains in its own way: samples, losses and gradients at a global model."""

    global_best: Floats  # w^g as last received, (D,)
    own: Samples  # those that `poison` is given
    scoring: Samples  # D_sc, which is public
    local: LocalSpec  # how an honest worker trains in this round
    gradient: Callable[[Floats, Samples], Floats]  # of the mean loss of any model, (D,)
    losses: Callable[[Floats, Samples], Doubles]  # of any model on every sample, (N,)
    shared: dict[str, Floats] = field(default_factory=dict)  # of all attackers in this round, to compute once

    def train(self, samples: Samples, rng: np.random.Generator, mask: Floats | float = 1.0) -> Floats:
        """Train w^g on samples as an honest worker trains, with every gradient times `mask`, (D,)."""
        weights, state = self.global_best, OptimiserState.start(len(self.global_best))
        sgd = Sgd.of(self.local, self.local.learning_rate)
        batches = draw_batches(np.arange(len(samples), dtype=np.int32), self.local, rng)
        rates = sgd.rates(batches[None])
        for number, batch in enumerate(batches):
            gradient = self.gradient(weights, samples.taken(batch[batch >= 0]))
            rate = sgd.learning_rate if rates is None else float(rates[0, number])
            weights, state = state.step(weights, gradient, sgd, rate, mask)
        return weights


@dataclass(frozen=True, eq=False)
class AttackContext:
    """What an attacker may know when it claims or uploads.

    >>> w = np.ones(2, np.float32)
    >>> seen = AttackContext(w, 0.5, 0 * w, workers=10, attackers=2, rng=np.random.default_rng(0), score_of=np.sum)
    >>> seen.model - seen.global_best
    array([1., 1.], dtype=float32)
    """

    model: Floats  # w, (D,)
    score: float  # what an honest worker would claim for it
    global_best: Floats  # w^g as last received, (D,)
    workers: int  # n
    attackers: int  # f
    rng: np.random.Generator  # for this attacker and round, in its initial state in every call
    score_of: Callable[[Floats], float]  # any model's true score, as the server will measure it
    honest: Floats | None = None  # (h, D), for omniscient attacks only
    honest_scores: Doubles | None = None  # (h,)
    crafted: Floats | None = None  # what `craft` made, (D,)
    network: Architecture | None = None  # the layers of the model; None: they cannot be described
    losses_of: Callable[[Floats], tuple[Doubles, Doubles]] | None = None
    """Any model's loss on every sample of D_sc, (N,), and on every one of those `poison` was given, (K,)."""
    uploaded: Callable[[], Floats | None] | None = None  # what `upload` returns in this round; see `true_score`
    tools: Callable[[], AttackTools] | None = None  # own samples, losses, gradients, training in its own way
    round: int = 0
    worker: int = 0  # the attacker's number; if all send the same, that of the first one asked
    memory: NamedArrays = field(default_factory=dict)  # what `remember` returned last; read-only arrays
    common: Callable[[int], np.random.Generator] = np.random.default_rng
    """common(number): a generator that is the same for all attackers on all machines; common(seen.round): per round."""


@dataclass(frozen=True, eq=False)
class AttackPreparation:
    """What `Attack.craft` may use before the first round: samples, training from the initial model, and scoring.

    >>> class Zeros(Attack):
    ...     crafts = True
    ...     def craft(self, preparation: AttackPreparation): return np.zeros_like(preparation.initial)
    >>> Zeros().crafts
    True
    """

    scoring: Samples  # D_sc, which is public
    images: Samples  # labelled samples of its own
    classes: int
    initial: Floats  # (D,)
    fit: Callable[[Floats, Samples, Sgd, int, np.random.Generator], Floats]  # one epoch; the int is the batch size
    loss: Callable[[Floats], float]  # on D_sc
    rng: np.random.Generator


class Attack:
    """An honest worker; an attack overrides some of its methods.

    >>> class Negative(Attack):
    ...     def upload(self, seen): return -seen.model
    >>> Negative().omniscient
    False
    """

    omniscient: ClassVar[bool] = False  # needs the honest workers' models
    individual: bool = False  # whether omniscient attackers have an upload and a memory each; if not, they share both
    crafts: ClassVar[bool] = False  # makes a model before the first round
    images: ClassVar[int] = 0  # how many samples of its own it needs for that
    target: ClassVar[int | None] = None  # the class that a trigger is to be mistaken for
    aims: ClassVar[tuple[int, ...]] = ()  # the classes that it wants misclassified, if not all
    tasks: ClassVar[tuple[Task, ...]] = ALL_TASKS  # those in which it makes sense
    needs: ClassVar[str] = ""  # why it makes no sense in others

    def member(self, rank: int) -> Attack:  # noqa: ARG002
        """Return the attack as one of several attackers carries it out. rank: 0 to f - 1."""
        return self

    def check_task(self, task: Task, name: str) -> None:
        """Refuse a task in which the attack makes no sense. name: the attack's in the error."""
        if task not in self.tasks:
            raise UserError(
                f"The attack '{name}' makes no sense here: {self.needs}, and the task is {task}. See: cbdsl list "
                "attacks, and docs/tasks.md.",
                code="conflict",
            )

    def poison(self, own: Samples, scoring: Samples, classes: int, rng: np.random.Generator) -> Samples | None:  # noqa: ARG002
        """Return what it trains on instead of its own data and D_tr; None: no change.

        classes: 0 if the task is not classification; then labels are targets (N, T) of mean 0 and deviation 1, or 0.
        """
        return None

    def craft(self, preparation: AttackPreparation) -> Floats | None:  # noqa: ARG002
        """Return a model made before the first round, (D,)."""
        return None

    def triggered(self, features: Floats) -> Floats:
        """Return samples with the trigger, (N, *shape), for an attack that has a target."""
        return features

    def triggered_for(self, features: Floats, tools: AttackTools) -> Floats:  # noqa: ARG002
        """Return the same where the trigger depends on the global model, which `tools` has."""
        return self.triggered(features)

    def remember(self, seen: AttackContext) -> Mapping[str, np.ndarray]:
        """Return the new memory: arrays by name, saved with the run; `seen.memory` is the last one.

        Called before `claim` and `upload` in every round in which the attacker takes part, invited or not. If all
        attackers send the same upload, they share one memory, and it is called once per round. Keep no state on the
        object: a resumed run would not have it.
        """
        return seen.memory

    def victims(self, samples: Samples, scoring: Samples) -> NDArray[np.bool_]:  # noqa: ARG002
        """Return which samples the model should take for the target, (N,). scoring: D_sc."""
        return np.asarray(samples.labels != self.target)

    def claim(self, seen: AttackContext) -> float:
        """Return the score it claims."""
        return seen.score

    def upload(self, seen: AttackContext) -> Floats | None:
        """Return the model it uploads, (D,), or None to stay silent.

        Called at most once per attacker and round, before or after `claim`, and if the attack is omniscient and not
        individual once per round for all attackers. Both get a context of their own with `rng` at its start. A claim
        about the upload is `true_score(self, seen)`, as `Truthful` makes it: that does not call `upload` again.
        """
        return seen.model


class Truthful(Attack):
    """Claims the true score of what it uploads."""

    def claim(self, seen: AttackContext) -> float:
        """Return what the server will measure, finite or not."""
        return true_score(self, seen)


@dataclass(frozen=True, eq=False)
class ClaimsBetter(Attack):
    """Claims half its honest score to be invited: a bad model with its true score would not be.

    Where workers are invited in turn, a true claim serves better, because it leads to no ban: `honest_claim`.
    """

    honest_claim: bool = field(default=False, kw_only=True)

    def claim(self, seen: AttackContext) -> float:
        """Return half of its honest score, or the true score of the upload."""
        return true_score(self, seen) if self.honest_claim else seen.score / 2


@dataclass(frozen=True, eq=False)
class Colluding(ClaimsBetter):
    """Makes one model of all honest ones, which all attackers send; with `individual` each adds noise of its own.

    The noise is orthogonal to the common step and 0.3 times as long, from the attacker's own stream: a defence that
    counts equal or near uploads once counts these each.
    """

    individual: bool = field(default=False, kw_only=True)
    omniscient: ClassVar[bool] = True

    def collude(self, seen: AttackContext) -> Floats:
        """Return the common model, (D,)."""
        raise NotImplementedError

    def upload(self, seen: AttackContext) -> Floats:
        """Return the common model, or one near it."""
        common = self.collude(seen)
        return add_own_noise(seen, common) if self.individual else common


def add_own_noise(seen: AttackContext, common: Floats) -> Floats:
    """Add noise to a model that is orthogonal to its step from w^g and INDIVIDUAL_LENGTH times as long."""
    step = common.astype(np.float64) - seen.global_best
    drawn = seen.rng.standard_normal(len(step))
    drawn -= dot(drawn, step) / max(dot(step, step), 1e-300) * step
    return as_floats(common + INDIVIDUAL_LENGTH * norm(step) / max(norm(drawn), 1e-300) * drawn)


def make_attack(spec: Spec) -> Attack:
    """Build the attack that a spec names, with its settings; `attack.scale` is short for `options.NAME.scale`."""
    name, options = spec.attack.name, dict(spec.options.of(spec.attack.name))
    if spec.attack.scale:
        if "scale" not in register.attack.settings(name):
            raise UserError(
                f"The attack '{name}' has no setting 'scale'; given attack.scale={spec.attack.scale:g}. Leave it out.",
                code="no-effect",
            )
        options["scale"] = spec.attack.scale
    made = register.attack.make(name, options)
    if not isinstance(made, Attack):
        raise UserError(
            f"The attack '{name}' is a {type(made).__name__}; register a class that extends cbdsl.Attack.",
            code="invalid-part",
        )
    return made


def true_score(attack: Attack, seen: AttackContext) -> float:
    """Return the score of what an attack uploads in this round, finite or not; its honest score if it is silent."""
    sent = seen.uploaded() if seen.uploaded else attack.upload(seen)
    return seen.score if sent is None else float(seen.score_of(sent))


def noise(seen: AttackContext, scale: float) -> Floats:
    """Draw N(0, scale^2) in the shape of a model, from the attacker's own stream."""
    return as_floats(scale * seen.rng.standard_normal(seen.model.shape, dtype=np.float32))


def as_floats(weights: Floats | Doubles) -> Floats:
    """Convert to the type of a model."""
    return weights.astype(np.float32)


def honest_models(seen: AttackContext) -> Floats:
    """Return the honest workers' models, (h, D); its own if there are none."""
    return seen.model[None] if seen.honest is None or not len(seen.honest) else seen.honest


def compute_honest_statistics(seen: AttackContext) -> tuple[Doubles, Doubles]:
    """Return mean and standard deviation of the honest models, coordinate by coordinate."""
    rows = honest_models(seen)
    return rows.mean(0, dtype=np.float64), rows.std(0, dtype=np.float64)


def wrong_labels(labels: Labels, classes: int, rng: np.random.Generator) -> Labels:
    """Draw wrong labels, all equally likely; move targets (N, T) up or down by `SHIFT` deviations."""
    if labels.ndim == 2:
        return as_floats(labels + SHIFT * rng.choice((-1.0, 1.0), labels.shape))
    return ((labels + rng.integers(1, max(2, classes), len(labels))) % classes).astype(np.int32)
