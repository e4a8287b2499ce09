"""The interface of a method, and most of the built-in methods; `methods_more` and `alone` have the others.

A method is a small object whose arguments are its settings. The worker's half (`move`, `upload`) works on rows of
workers, in memory or on a device; the server's half (`broadcast`, `update`) on one model and what the server remembers.
Neither depends on the transport, on the verification of uploads or on codecs.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal

import numpy as np

from cbdsl import register
from cbdsl.algorithm.particles import Particles, move_particles, recover_lost
from cbdsl.algorithm.worker_round import WorkerRound
from cbdsl.arrays import Bools, Floats
from cbdsl.codecs.codec import Codec
from cbdsl.errors import UserError
from cbdsl.spec import Shared

Conversation = Literal["swarm", "average", "alone"]
"""Claims, and uploads from invited workers (Algorithm 1); an upload from everybody (FedAvg); no message at all."""


@dataclass(frozen=True, eq=False)
class ServerStep:
    """The arguments of `Method.update`: the server's half of a round in which all workers upload.

    >>> seen = ServerStep(np.zeros(2, np.float32), np.zeros(0), combined=np.ones(2, np.float32), share=0.5)
    >>> seen.combined - seen.current
    array([1., 1.], dtype=float32)
    """

    current: Floats  # w_t, (D,)
    memory: Floats  # the server's memory, as the last update or `Method.memory` returned it
    combined: Floats  # what the aggregator made of the uploads, (V D,)
    share: float  # share of all workers whose uploads are in `combined`
    round: int = 0
    workers: tuple[int, ...] = ()  # whose uploads are in `combined`
    asked: int = 0  # how many workers the order went to
    uploads: Sequence[Floats] = ()  # (V D,) each, in the order of `workers`
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))  # a stream of its own per round


class Method(ABC):
    """How workers learn together. D is the size of a model, V D that of a message; V is `vectors`.

    >>> class Frozen(Method):
    ...     conversation = "average"
    ...     def move(self, work, rows, received): return work.place(rows, work.from_server(received))
    ...     def upload(self, rows): return rows.positions
    >>> Frozen().broadcast(np.ones(3), memory=np.zeros(0))
    array([1., 1., 1.])
    """

    title: ClassVar[str] = ""  # its name and where it was published, as pages show it
    conversation: ClassVar[Conversation]
    shared: ClassVar[Shared] = "both"  # what it uses of D_G by default
    gradients: ClassVar[bool] = True  # whether workers train
    verifies: ClassVar[bool] = False  # whether uploads are measured on D_sc, where D_sc is shared
    remembers: ClassVar[bool | tuple[str, ...]] = True  # what a worker keeps between rounds; see `kept_arrays`
    vectors: ClassVar[int] = 1  # V: how many vectors of D numbers a worker receives and uploads; 1 in a swarm
    fixes: ClassVar[Mapping[str, Any]] = {}  # settings of `swarm` that define the method
    selects: ClassVar[str] = ""  # the selection that the method is defined with, used unless another is named
    combines: ClassVar[bool] = True  # whether `update` uses what an aggregator made of the uploads
    adds_loss: ClassVar[bool] = False  # whether it adds a term to the loss, which requires torch
    counts_steps: ClassVar[bool] = False  # whether it takes a step to be a gradient times the round's learning rate

    @abstractmethod
    def move(self, work: WorkerRound, rows: Particles, received: Floats) -> Particles:
        """Play one round of k workers: take rows (k, ...) and what the server last sent, (V D,); return the rows after.

        Row i of the result may depend on row i alone, so that grouping changes no number. `work` trains, scores and
        draws.
        """

    @abstractmethod
    def upload(self, rows: Particles) -> Floats:
        """Return what k workers send when they are asked, (k, V D)."""

    def personal(self, rows: Particles) -> Floats | None:
        """Return the workers' own models, (k, D); None if workers keep no model."""
        del rows
        return None

    def memory(self, size: int) -> Floats:
        """Return what the server remembers before round 1 beside the model of `size` numbers; any shape."""
        del size
        return np.zeros(0, np.float32)

    def broadcast(self, current: Floats, memory: Floats) -> Floats:
        """Return what the server sends: the model (D,), or the model and what it remembers (V D,)."""
        del memory
        return current

    def update(self, seen: ServerStep) -> tuple[Floats, Floats]:
        """Return the new model (D,) and the memory, of the shape that `memory` gives it.

        Only for the conversation "average"; in "swarm" the selection decides what becomes w^g.
        """
        return seen.combined, seen.memory

    def epsilon(self, rounds: int, share: float) -> float | None:
        """Return epsilon of differential privacy after `rounds` rounds with a share of all workers each, or None."""
        del rounds, share
        return None

    def step(self, current: Floats, memory: Floats, combined: Floats, share: float) -> tuple[Floats, Floats]:
        """Compute the update; the old form of `update`, until 1.0."""
        return self.update(ServerStep(current, memory, combined, share))


def update_server(method: Method, seen: ServerStep) -> tuple[Floats, Floats]:
    """Call `method.update`, or `step` if a user's class still overrides that; return the model and the memory."""
    kind = next(each for each in type(method).__mro__ if {"step", "update"} & vars(each).keys())
    if kind is Method or "update" in vars(kind):
        return method.update(seen)
    warnings.warn(
        f"{kind.__qualname__}.step is now update(self, seen), with seen.current, memory, combined and share; the old "
        "form goes in 1.0",
        DeprecationWarning,
        stacklevel=2,
    )
    return method.step(seen.current, seen.memory, seen.combined, seen.share)


class SwarmMethod(Method):
    """Particles that move by Eq. (5), claim the score of their personal best, and upload it if invited.

    >>> class Trusting(SwarmMethod):
    ...     verifies = False  # believe every claim
    >>> Trusting().conversation
    'swarm'
    """

    conversation = "swarm"

    def move(self, work: WorkerRound, rows: Particles, received: Floats) -> Particles:
        """Move, score and remember (Algorithm 1, lines 3 to 5)."""
        rows = work.repack_old(work.with_newcomers(recover_lost(rows, received), received), received)
        positions, velocities = move_particles(
            rows, received, work.coefficients(), work.train, work.swarm.sgd_from, work.swarm.velocity
        )
        return work.remember_best(rows, positions, velocities, received)

    def upload(self, rows: Particles) -> Floats:
        """Return w^p, the best model so far."""
        return rows.personal_best

    def personal(self, rows: Particles) -> Floats | None:
        """Return w^p."""
        return rows.personal_best


def kept_arrays(method: Method, codec: Codec) -> tuple[str, ...]:
    """Return the names of the arrays of `Particles` that a worker keeps between rounds; all others are reset.

    All if `method.remembers` is True, none if it is False, or those that it names. Memory and checkpoints contain a row
    of only these arrays for each worker that has taken part.

    >>> from cbdsl.codecs.quantize import Whole
    >>> kept_arrays(FedAvg(), Whole()), kept_arrays(Scaffold(), Whole())
    ((), ('velocities',))
    """
    known = tuple(each.name for each in fields(Particles))
    named = method.remembers
    chosen = {*known} if named is True else set(named or ())
    if not chosen <= {*known}:
        raise UserError(
            f"{type(method).__qualname__}.remembers is {named!r}; it must be True, False, or names of arrays: "
            f"{', '.join(known)}.",
            code="invalid-part",
        )
    if codec.feedback and method.conversation == "average" and named is not True and "velocities" in chosen:
        raise UserError(
            f"{type(method).__qualname__} keeps velocities, and a codec with feedback, such as topk, keeps there what "
            "it leaves out. Keep the vector as personal_best instead, or use another codec.",
            code="conflict",
        )
    if codec.feedback:
        chosen.add("velocities")  # where `WorkerRound.pack_uploads` stores what was left out
    return tuple(name for name in known if name in chosen)


def encode_moved(method: Method, work: WorkerRound, before: Particles, after: Particles, received: Floats) -> Particles:
    """Complete what `method.move` returned where a codec is used: pack uploads that everybody sends."""
    if not work.workers.codec.relative:
        return after
    if method.conversation == "average":
        return work.pack_uploads(after, method.upload(after), received)
    new = ((after.personal_best != before.personal_best) & ~np.isnan(before.personal_best)).any(1)  # NaN is not NaN
    if len(after.versions) != len(new) or (after.versions[new] != work.version).any():
        raise UserError(
            f"The method {type(method).__qualname__} scores models that are not sent as they are. To be used with a "
            "codec, it has to score and remember positions with work.remember_best(...), as cbdsl.SwarmMethod does.",
            code="invalid-part",
        )
    return after


class AveragingMethod(Method):
    """Everybody trains from the server's model and uploads; the server combines (McMahan et al. 2017).

    >>> class Careful(AveragingMethod):
    ...     def train(self, work, start): return work.train(start, proximal=0.1)
    >>> Careful().conversation
    'average'
    """

    conversation = "average"
    shared: ClassVar[Shared] = "none"
    remembers: ClassVar[bool | tuple[str, ...]] = False

    def move(self, work: WorkerRound, rows: Particles, received: Floats) -> Particles:
        """Train from the server's model, whatever the worker had before."""
        return work.place(rows, self.train(work, work.from_server(received)))

    def train(self, work: WorkerRound, start: Floats) -> Floats:
        """Train from the server's model, (k, D) -> (k, D)."""
        return work.train(start)

    def upload(self, rows: Particles) -> Floats:
        """Return the trained model."""
        return rows.positions


@dataclass(frozen=True, eq=False)
class OwnWeights(Method):
    """The workers' half of an averaging method in which some weights stay on each worker.

    With the weights of BatchNorm layers it is FedBN (Li et al. 2021). Messages contain the server's values for them. A
    worker keeps its whole model, in which the server's model replaces all other weights in the next round.
    """

    method: Method
    own: Bools  # (D,), the weights that stay

    conversation = "average"
    shared = "none"
    remembers = ("positions",)

    def move(self, work: WorkerRound, rows: Particles, received: Floats) -> Particles:
        """Train with the method from the server's model with the worker's own weights; return the rows."""
        after = self.method.move(replace(work, own=(self.own, rows.positions)), rows, received)
        return replace(after, personal_best=np.where(self.own, received, self.method.upload(after)))

    def upload(self, rows: Particles) -> Floats:
        """Return the method's uploads, with the server's values in place of a worker's own weights."""
        return rows.personal_best

    def personal(self, rows: Particles) -> Floats:
        """Return the models as last trained; only a worker's own weights in them are current."""
        return rows.positions


@register.method("cb-dsl")
class CbDsl(SwarmMethod):
    """The paper's: swarm and SGD move workers, claims are verified on D_sc, only the best claimant uploads."""

    title = "CB-DSL (Fan et al. 2022)"
    verifies = True


@register.method("restart")
class Restart(SwarmMethod):
    """Everybody trains from w^g and claims the result, not a personal best; made for --select rotation."""

    title = "restart from w^g"
    verifies = True
    remembers = False

    def move(self, work: WorkerRound, rows: Particles, received: Floats) -> Particles:
        """Train from w^g, whatever the worker had before, and score that."""
        trained = work.train(work.from_server(received))
        forgetful = replace(rows, personal_score=np.full(len(trained), np.inf))
        return work.remember_best(forgetful, trained, rows.velocities, received)

    def personal(self, rows: Particles) -> None:
        """Return None: workers do not keep what they trained."""
        del rows


@register.method("fedavg")
class FedAvg(AveragingMethod):
    """Everybody trains from the server's model and uploads; the server averages."""

    title = "FedAvg (McMahan et al. 2017)"


@register.method("fedpso")
class FedPso(SwarmMethod):
    """Workers move, then train; the best claimant is trusted and uploads."""

    title = "FedPSO (Park et al. 2021)"
    shared = "none"
    fixes = {"sgd_from": "moved", "velocity": "swarm"}  # noqa: RUF012 - a constant of the class


@register.method("pso")
class Pso(SwarmMethod):
    """A particle swarm without gradients; workers start apart."""

    title = "PSO (Kennedy and Eberhart 1995)"
    shared = "score"
    gradients = False
    verifies = True
    fixes = {"start": "apart"}  # noqa: RUF012 - a constant of the class


@register.method("fedprox")
@dataclass(frozen=True)
class FedProx(AveragingMethod):
    """FedAvg with a proximal term: workers minimise F_i(w) + mu/2 |w - w_t|^2."""

    mu: float = 0.01

    title = "FedProx (Li et al. 2020)"

    def __post_init__(self) -> None:
        if not 0 <= self.mu < float("inf"):
            raise UserError(f"mu of fedprox must be at least 0; given {self.mu}.", code="out-of-range")

    def train(self, work: WorkerRound, start: Floats) -> Floats:
        """Run SGD with mu (w - w_t) added to every gradient."""
        return work.train(start, proximal=self.mu)


@register.method("scaffold")
class Scaffold(AveragingMethod):
    """FedAvg whose gradients are corrected by c - c_i; c is sent with every model, so messages are twice as long.

    A worker keeps c_i as its velocity, and the change of c_i as its personal best. c_i is estimated from the steps
    taken (option II). Momentum lengthens steps, so they are counted with it. Models and changes of c_i are averaged by
    samples, as in FedAvg; the share that scales c is that of workers, as published.
    """

    title = "SCAFFOLD (Karimireddy et al. 2020)"
    remembers = ("velocities",)
    vectors = 2
    counts_steps = True

    def memory(self, size: int) -> Floats:
        """Return c, (D,)."""
        return np.zeros(size, np.float32)

    def broadcast(self, current: Floats, memory: Floats) -> Floats:
        """Return w and c, (2 D,)."""
        return np.concatenate([current, memory])

    def move(self, work: WorkerRound, rows: Particles, received: Floats) -> Particles:
        """Compute y_i by SGD with gradients g + c - c_i, and c_i <- c_i - c + (w - y_i) / (steps * rate).

        A worker that diverged starts again from c_i = 0.
        """
        model, control = np.split(received, 2)
        start, own = work.from_server(model), _finite(rows.velocities)
        trained = work.train(start, corrections=_finite(control - own))
        length = np.maximum(work.steps() * work.learning_rate / (1 - work.momentum), 1e-30)[:, None]  # (k, 1)
        change = ((start - trained.astype(np.float64)) / length - control).astype(np.float32)
        return Particles(trained, own + change, change, rows.personal_score)

    def upload(self, rows: Particles) -> Floats:
        """Return y_i and the change of c_i."""
        return np.concatenate([rows.positions, rows.personal_best], axis=1)

    def update(self, seen: ServerStep) -> tuple[Floats, Floats]:
        """Compute w <- mean of y_i, c <- c + (participants / workers) * mean change of c_i."""
        model, change = np.split(seen.combined, 2)
        return model, seen.memory + np.float32(seen.share) * change


def _finite(values: Floats) -> Floats:
    """Replace what is not finite by 0."""
    return np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)


@register.method("fedavgm")
@dataclass(frozen=True)
class FedAvgM(AveragingMethod):
    """FedAvg with server momentum: m <- beta m + (mean w_i - w_t), w_{t+1} = w_t + rate m."""

    beta: float = 0.9
    rate: float = 1.0

    title = "FedAvgM (Hsu et al. 2019)"

    def __post_init__(self) -> None:
        if not (0 <= self.beta < 1 and 0 < self.rate < float("inf")):
            raise UserError(
                f"fedavgm takes 0 <= beta < 1 and a rate above 0; given {self.beta} and {self.rate}.",
                code="out-of-range",
            )

    def memory(self, size: int) -> Floats:
        """Return m, (D,)."""
        return np.zeros(size, np.float32)

    def update(self, seen: ServerStep) -> tuple[Floats, Floats]:
        """Add the mean step to the momentum, and the momentum to the model."""
        step = seen.combined - seen.current.astype(np.float64)
        momentum = (self.beta * seen.memory.astype(np.float64) + step).astype(np.float32)
        return (seen.current + self.rate * momentum.astype(np.float64)).astype(np.float32), momentum


@register.method("fedadam")
@dataclass(frozen=True)
class FedAdam(AveragingMethod):
    """FedAvg with Adam at the server, on the mean step of a round; no bias correction, as published."""

    rate: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 0.001

    title = "FedAdam (Reddi et al. 2021)"

    def __post_init__(self) -> None:
        positive = 0 < self.rate < float("inf") and 0 < self.tau < float("inf")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and positive):
            raise UserError(
                f"fedadam takes 0 <= beta1, beta2 < 1, and a finite rate and tau above 0; given {self}.",
                code="out-of-range",
            )

    def memory(self, size: int) -> Floats:
        """Return m and v, (2, D); v starts at tau^2, as published."""
        return np.stack([np.zeros(size, np.float32), np.full(size, self.tau**2, np.float32)])

    def update(self, seen: ServerStep) -> tuple[Floats, Floats]:
        """Compute m <- b1 m + (1 - b1) d, v <- b2 v + (1 - b2) d^2, w <- w + rate m / (sqrt(v) + tau)."""
        step = seen.combined.astype(np.float64) - seen.current
        mean = self.beta1 * seen.memory[0].astype(np.float64) + (1 - self.beta1) * step
        square = self.beta2 * seen.memory[1].astype(np.float64) + (1 - self.beta2) * step**2
        after = seen.current + self.rate * mean / (np.sqrt(square) + self.tau)
        return after.astype(np.float32), np.stack([mean, square]).astype(np.float32)
