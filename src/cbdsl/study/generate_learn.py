"""How a generator learns: from whose samples, and round by round.

Its rounds are FedAvgM's (`protocol.fedavg`) over the swarm in memory, with a generator's engine where a classifier's
would be: workers send weights, never a sample. A server that learns from its own samples is a swarm of one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from cbdsl import register
from cbdsl.arrays import Floats, Indices, Samples
from cbdsl.byzantine.adversary import Adversary, PublicData
from cbdsl.byzantine.attack import Attack
from cbdsl.codecs.travel import codecs_of
from cbdsl.data import Dataset, load, split
from cbdsl.data.partition import as_seen
from cbdsl.data.scaling import Scaling
from cbdsl.data.shared import check_source, raw_of
from cbdsl.errors import UserError
from cbdsl.methods.fedavgm import FedAvgM
from cbdsl.models.modules import initial_weights
from cbdsl.protocol.fedavg import Combination
from cbdsl.protocol.ledger import payload
from cbdsl.protocol.messages import WorkerId
from cbdsl.protocol.rounds import Policy
from cbdsl.protocol.server import Server
from cbdsl.protocol.state import ServerState
from cbdsl.protocol.verification import trusting
from cbdsl.rng import seed_of
from cbdsl.runs.folder import Checkpoint
from cbdsl.spec import Spec
from cbdsl.spec_groups import LocalSpec
from cbdsl.study.generator import Generator, GeneratorEngine, Kind
from cbdsl.swarms.memory import MemorySwarm
from cbdsl.workers.local import Holdings, Lesson, LocalWorkers

SERVER, WORKERS = "server", "workers"
_FIRST_RATE, _LAST_RATE = 2e-3, 2e-4  # of Adam, in the first and in the last pass
_BATCH = 32
_MOMENTUM = 0.8  # of the server
_LOOKED_AT = 500  # samples that show how far learning is


@dataclass(frozen=True, eq=False)
class Material:
    """What a generator learns from, and what it never sees. Samples are rows of numbers, as a generator takes them."""

    kind: Kind
    scaling: Scaling | None
    samples: Samples
    holders: tuple[Indices, ...]  # whose each of the samples is
    unseen: Samples  # of the same kind, for comparison
    unseen_are: str  # where those are from

    @property
    def digest(self) -> str:
        """Of all that is learned from, and of who has how much of it."""
        content = hashlib.sha256(repr((self.kind, self.scaling, [*map(len, self.holders)])).encode())
        for array in (self.samples.features, self.samples.labels):
            content.update(np.ascontiguousarray(array).data)
        return content.hexdigest()

    def rescaled(self, made: Samples) -> Samples:
        """Made samples (N, *shape) as a network is given them."""
        if not self.kind.shades:
            return made
        assert self.scaling is not None
        return Samples(self.scaling.apply(np.rint(255 * made.features).astype(np.uint8)), made.labels)


def gather(spec: Spec, source: str) -> Material:
    """The material of a spec. source: `server`, `workers`, or data that the server may use."""
    own = source in {SERVER, WORKERS}
    data = load(spec.data.source, spec.options.of(spec.data.source))
    if not own:
        given = load(source)
        check_source(source, given, data)
        data = given
    unseen, whose = data.test, "the test set"
    if own:
        deal = register.partition.make(spec.data.partition, spec.options.of(spec.data.partition))
        parts = split(data.train.labels, spec.data, spec.workers, spec.seed, data.clients, deal)
        data = replace(data, train=as_seen(data.train, parts, deal, spec.seed))
        shared = np.concatenate([parts.shared_training, parts.shared_scoring])
        holders = parts.workers if source == WORKERS else (shared,)
        if len(parts.holdout):
            unseen, whose = data.train.taken(parts.holdout), "the server's hold-out"
    else:
        holders = (np.arange(len(data.train), dtype=np.int32),)
    _check_classes(np.concatenate([data.train.labels[rows] for rows in holders]), data, source)
    kind = Kind(data.shape, data.classes, data.scaling is not None and data.scaling.shades)
    used = data.train.taken(np.concatenate(holders))
    ends = np.cumsum([0, *map(len, holders)])
    places = tuple(np.arange(first, last, dtype=np.int32) for first, last in pairwise(ends))
    return Material(kind, data.scaling, _rows(used, data), places, _rows(unseen, data), whose)


_MORE = {
    SERVER: "Learn from more samples: set data.shared_training or data.shared_scoring higher, or learn from the "
    "workers (--from workers).",
    WORKERS: "Learn from more samples: set workers or data.samples_per_worker higher, or data.partition to another.",
}
_OTHER = "Give samples of every class, numbered from 0 without gaps."


def _check_classes(labels: Indices, data: Dataset, source: str) -> None:
    empty = np.flatnonzero(np.bincount(labels, minlength=data.classes) == 0).tolist()
    if empty:
        raise UserError(
            f"Among the {len(labels):,} samples to learn from ({source}) there is none of class "
            f"{', '.join(map(str, empty[:10]))}; a generator makes only what it has seen. {_MORE.get(source, _OTHER)}"
        )


def _rows(samples: Samples, data: Dataset) -> Samples:
    """Samples as a generator takes them: rows of numbers, shades from 0 to 1."""
    features, scaling = samples.features, data.scaling
    if scaling is not None and scaling.shades:
        features = raw_of(features, scaling).clip(0, 1)
    return Samples(np.ascontiguousarray(features.reshape(len(samples), -1)), samples.labels)


def mean_of_movers(sizes: Mapping[WorkerId, int]) -> Combination:
    """FedAvg's mean, but of each weight over those alone who moved it.

    A class has weights of its own in the generator. Where few workers hold the class, the mean of all would hardly move
    them.
    """

    def combine(state: ServerState, workers: Sequence[WorkerId], models: Sequence[Floats]) -> Floats:
        total, shares = np.zeros(len(state.global_best)), np.zeros(len(state.global_best))
        for worker, model in zip(workers, models, strict=True):
            step = model.astype(np.float64) - state.global_best
            total += sizes[worker] * step
            shares += sizes[worker] * (step != 0)
        return np.asarray(state.global_best + total / np.maximum(shares, 1.0), np.float32)

    return combine


@dataclass(frozen=True)
class Pass:
    """One round of learning: the loss on some unseen samples after it, and what was sent."""

    number: int
    loss: float
    uplink_bytes: int
    downlink_bytes: int


class Learning:
    """A generator that learns: plays the rounds that are left, and can be saved between any two."""

    def __init__(self, material: Material, spec: Spec, passes: int, threads: int = 1) -> None:
        rows = material.holders
        decay = (_LAST_RATE / _FIRST_RATE) ** (1 / max(1, passes - 1))
        local = LocalSpec(batch_size=_BATCH, learning_rate=_FIRST_RATE, decay=decay)
        alone = len(rows) == 1
        method = FedAvgM(beta=0.0 if alone else _MOMENTUM)
        spec = replace(
            spec,
            workers=len(rows),
            rounds=passes,
            local=local,
            shared="none",
            participation=1.0 if alone else spec.participation,
        )
        self.engine = GeneratorEngine(material.kind, threads)
        self._material, self._passes = material, passes
        codecs = codecs_of(spec)
        sizes = {worker: len(own) for worker, own in enumerate(rows)}
        self._server = Server(spec, method, trusting(self.engine.size), Policy(codecs=codecs), mean_of_movers(sizes))
        lessons = tuple(Lesson(material.samples, own) for own in rows)
        initial = initial_weights(lambda: Generator(material.kind), seed_of(spec.seed, "initial-weights"))
        workers = LocalWorkers(
            self.engine, Holdings(lessons, material.samples, rows[0][:1]), local, spec.swarm, spec.seed,
            range(len(rows)), codec=codecs.up,
        )  # fmt: skip
        nobody = Adversary(
            Attack(), (), PublicData(material.samples, rows[0][:1], rows[0], material.kind.classes),
            held={}, engine=self.engine, initial=initial, seed=spec.seed, swarm_size=len(rows), codec=codecs.up,
        )  # fmt: skip
        self._swarm = MemorySwarm(method, workers, initial[None], nobody)
        self._keeps_swarm = codecs.up.feedback
        self.state: ServerState = self._server.first_state(initial)

    @property
    def kept(self) -> Mapping[str, Any] | None:
        """The workers' arrays by name; with `state` all that is needed to go on."""
        return self._swarm.kept if self._keeps_swarm else None

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from there."""
        self.state = checkpoint.state
        self._swarm.restore(checkpoint.particles, self.state.round, self.state.global_best)

    def rounds(self) -> Iterator[Pass]:
        """Play what is left, round by round."""
        unseen = self._material.unseen
        looked_at = np.arange(min(_LOOKED_AT, len(unseen)), dtype=np.int32)
        while self.state.round < self._passes:
            self.state, log = self._server.play(self.state, self._server.order(self.state), self._swarm)
            loss = float(self.engine.sample_losses(self.state.global_best, unseen, looked_at).mean())
            yield Pass(self.state.round, round(loss, 4), payload(log.traffic, "up"), payload(log.traffic, "down"))

    @property
    def weights(self) -> Floats:
        """The generator as it is now, (D,)."""
        return self.state.global_best
