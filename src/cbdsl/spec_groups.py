"""The groups of settings of a spec, such as `local` and `swarm`; `cbdsl.spec` puts them together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from cbdsl.errors import UserError, shown

Shared = Literal["default", "none", "score", "train", "both"]
Device = Literal["auto", "cpu", "cuda", "mps"]


@dataclass(frozen=True)
class DataSpec:
    """Which data, and who holds it (Sec. VI.A)."""

    source: str = "mnist"  # a data set's name (see `cbdsl list data`), a folder of IDX files, or an .npz file
    partition: str = "iid"  # who holds which sample: iid, shards, dirichlet, similarity, quantity, feature, by-client
    samples_per_worker: int = 300  # samples that each worker holds, K_i, not for shards and by-client
    shard_size: int = 300  # samples in a shard
    shards_per_worker: int = 2  # shards that each worker holds
    dirichlet_alpha: float = 0.5  # for dirichlet: the smaller, the fewer classes each worker knows
    similarity: float = 0.1  # gamma, the share of a worker's samples that is drawn i.i.d.
    shared_training: int = 150  # samples in the shared training set, |D_tr|
    shared_scoring: int = 2000  # samples in the shared scoring set, |D_sc|
    holdout: int = 2000  # samples in the server's private set
    shared_source: str = ""  # D_tr and D_sc from this file of `cbdsl generate`; empty: training samples of the source

    def __post_init__(self) -> None:
        for key in ("samples_per_worker", "shard_size", "shards_per_worker", "shared_scoring"):
            at_least(1, f"data.{key}", getattr(self, key))
        for key in ("shared_training", "holdout"):
            at_least(0, f"data.{key}", getattr(self, key))
        positive("data.dirichlet_alpha", self.dirichlet_alpha)
        within(0.0, 1.0, "data.similarity", self.similarity)


@dataclass(frozen=True)
class LocalSpec:
    """What a worker does with its data in one round: mini-batch SGD (Sec. VI.B)."""

    epochs: int = 1  # passes over D_i and D_tr
    steps: int = 0  # if not 0: this many batches instead of whole epochs
    batch_size: int = 10  # samples in a mini-batch
    learning_rate: float = 0.005  # of SGD, alpha
    momentum: float = 0.0  # of SGD; starts at zero in every round
    weight_decay: float = 0.0  # L2 penalty of SGD
    decay: float = 1.0  # the learning rate is multiplied by this after every round

    def __post_init__(self) -> None:
        at_least(0, "local.epochs", self.epochs, 100_000)
        at_least(0, "local.steps", self.steps, 100_000_000)
        at_least(1, "local.batch_size", self.batch_size, 10_000_000)
        positive("local.learning_rate", self.learning_rate)
        within(0.0, 0.9999, "local.momentum", self.momentum)
        within(0.0, 1e6, "local.weight_decay", self.weight_decay)
        positive("local.decay", self.decay)


@dataclass(frozen=True)
class SwarmSpec:
    """The coefficients and readings of the update equation (Sec. III.C)."""

    inertia: tuple[float, float] = (1.0, 0.0)  # c0 in the first and in the last round; one number means constant
    cognitive: float = 1.0  # delta_1: c1 ~ U(0, delta_1)
    social: float = 1.0  # delta_2: c2 ~ U(0, delta_2)
    draw: Literal["worker", "parameter"] = "worker"  # one c1 and c2 per worker and round, or one per parameter
    sgd_from: Literal["current", "moved"] = "current"  # SGD starts at w_t (as printed) or after the swarm move
    velocity: Literal["full", "swarm"] = "full"  # v = w_{t+1} - w_t (as printed) or the swarm terms alone
    start: Literal["together", "apart"] = "together"  # one initial model for all, or one per worker
    storage: Literal["float32", "bfloat16"] = "float32"  # of positions and velocities, from one round to the next

    def __post_init__(self) -> None:
        for value in self.inertia:
            within(0.0, 10.0, "swarm.inertia", value)
        within(0.0, 100.0, "swarm.cognitive", self.cognitive)
        within(0.0, 100.0, "swarm.social", self.social)


@dataclass(frozen=True)
class VerificationSpec:
    """How the server measures a claim (Algorithm 1, line 11)."""

    tolerance: float = 1e-4  # |measured - claimed| <= tolerance * max(1, claimed)

    def __post_init__(self) -> None:
        within(0.0, 1.0, "verification.tolerance", self.tolerance)


@dataclass(frozen=True)
class DefenceSpec:
    """What the server does beyond Algorithm 1; the defaults are the paper's server."""

    declared: int = -1  # how many attackers the server reckons with; -1: as many as there are
    aggregator: str = "mean"  # how averaging methods combine models, such as "median" or "nnm+krum"
    invitations: int = 10  # at most so many in a round, or the declared attackers and K more; 0: no limit
    guard: bool = False  # measure uploads on the private hold-out, too
    false_alarm: float = 1e-4  # chance that the guard takes one honest upload for memorised, and declines it
    commitment: bool = False  # a claim comes with a digest of its model

    def __post_init__(self) -> None:
        at_least(-1, "defence.declared", self.declared)
        at_least(0, "defence.invitations", self.invitations)
        within(1e-300, 0.5, "defence.false_alarm", self.false_alarm)


@dataclass(frozen=True)
class SelectionSpec:
    """Whom the server invites, and what it makes of the models it believes."""

    name: str = "best"  # "best" (the paper's), "soup" (an average of the K best), "rotation" (K in turn), or your own
    k: int = 0  # K: how many models may be combined; 0: the rule's own default

    def __post_init__(self) -> None:
        at_least(0, "selection.k", self.k)


@dataclass(frozen=True)
class ServerSpec:
    """What the server makes of an average of uploads."""

    momentum: float = 0.5  # m <- momentum m + mean step, w^g <- w^g + m; for selections that take an average's step

    def __post_init__(self) -> None:
        within(0.0, 0.9999, "server.momentum", self.momentum)


@dataclass(frozen=True)
class CodecSpec:
    """How models travel; `cbdsl list codecs` has all of them."""

    up: str = "none"  # from workers to the server, against the w^g that they have
    down: str = "none"  # from the server to workers, against the w^g that they had


@dataclass(frozen=True)
class AttackSpec:
    """Who lies, and how."""

    name: str = "liar"  # what the attackers do; `cbdsl list attacks` has all of them
    byzantine: int = 0  # how many of the workers are attackers
    scale: float = 0.0  # how strong, in the attack's own measure; 0: the attack's default

    def __post_init__(self) -> None:
        at_least(0, "attack.byzantine", self.byzantine)
        within(0.0, 1e9, "attack.scale", self.scale)


def at_least(least: int, key: str, value: int, most: int = 10**9) -> None:
    """Refuse a value below the least, or above what any sensible run asks for."""
    if value < least:
        raise UserError(f"{key} must be at least {least}; given {shown(value)}.")
    if value > most:
        raise UserError(f"{key} must be at most {most:,}; given {shown(value)}.")


def positive(key: str, value: float) -> None:
    """Refuse what is not a positive number."""
    if not (math.isfinite(value) and value > 0):
        raise UserError(f"{key} must be a positive number; given {value}.")


def within(low: float, high: float, key: str, value: float) -> None:
    """Refuse what is not between two numbers."""
    if not low <= value <= high:
        raise UserError(f"{key} must be between {low:g} and {high:g}; given {value}.")
