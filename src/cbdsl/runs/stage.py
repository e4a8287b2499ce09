"""Everything a spec names, built: data and who holds it, the network and its engine, where learning starts.

The stage knows no rounds and no records. The server that plays on it is `Stage.server`; the workers in memory are
`Stage.swarm`, made when they are first needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cbdsl import register
from cbdsl.arrays import Floats, Indices, Samples
from cbdsl.byzantine.adversary import Adversary, PublicData
from cbdsl.byzantine.attack import Attack, make_attack
from cbdsl.data import Dataset, Split, load, split
from cbdsl.data.partition import Partition, as_seen
from cbdsl.data.shared import with_shared
from cbdsl.engines.architecture import Architecture, ArchitectureError
from cbdsl.engines.base import Engine
from cbdsl.engines.choose import choose_engine
from cbdsl.engines.native import default_threads
from cbdsl.errors import UserError
from cbdsl.machine import demand_memory
from cbdsl.models.network import Network, network_of, read_tensors
from cbdsl.protocol.messages import Swarm, WorkerId, commitment_of
from cbdsl.protocol.server import Server
from cbdsl.protocol.state import ServerState
from cbdsl.register import CUSTOM
from cbdsl.rng import seed_of, stream
from cbdsl.runs.defence import Parts, server_of
from cbdsl.runs.records import Finale
from cbdsl.spec import Spec, init_file
from cbdsl.swarms.memory import MemorySwarm
from cbdsl.swarms.rows import workers_at_once
from cbdsl.workers.batches import padded
from cbdsl.workers.local import Holdings, Lesson, LocalWorkers

if TYPE_CHECKING:
    from torch import nn

ModelBuilder = Callable[[], "nn.Module"]


@dataclass(frozen=True, eq=False)
class Given:
    """What a user gives in Python instead of by name."""

    model: ModelBuilder | None = None
    data: Dataset | None = None
    attack: Attack | None = None
    partition: Partition | None = None
    init: Floats | Path | None = None  # (D,), or a model's file
    parts: Parts = field(default_factory=Parts)
    make_swarm: Callable[[Stage], Swarm] | None = None


@dataclass(frozen=True, eq=False)
class Stage:
    """Data, engine and starting point of a run."""

    spec: Spec
    dataset: Dataset
    split: Split
    network: Network
    engine: Engine
    initial: Floats  # (1, D), or (U, D) if workers start apart
    server: Server
    attack: Attack
    byzantine: tuple[WorkerId, ...]
    note: str  # why the fastest engine is not used; empty if it is
    spec_key: str  # the spec's, with plugins as they were imported
    make_swarm: Callable[[Stage], Swarm] | None = None

    @staticmethod
    def prepare(
        spec: Spec, given: Given | None = None, threads: int | None = None, deal: bool = True, secret: int = 0
    ) -> Stage:
        """Build what a resolved spec names; everything that can be wrong with it is found here.

        deal: give workers their samples; not if they have their own, somewhere else. secret: a number that workers do
        not know, for what must not follow from the seed.
        """
        given = given or Given()
        if threads is not None and threads < 1:
            raise UserError(f"threads must be at least 1; given {threads}.")
        attack = given.attack or _attack(spec)
        dataset = given.data or load(spec.data.source, spec.options.of(spec.data.source))
        partition = given.partition or _partition(spec)
        parts = split(
            dataset.train.labels, spec.data, spec.workers if deal else 0, spec.seed, dataset.clients, partition, secret
        )
        dataset = replace(dataset, train=as_seen(dataset.train, parts, partition, spec.seed))
        dataset, parts = with_shared(dataset, parts, spec.data)
        network = network_of(spec, dataset.shape, dataset.classes, given.model)
        choice = choose_engine(spec.engine, network.subject, dataset.shape, threads or default_threads(), spec.device)
        engine = choice.engine
        server = server_of(spec, engine, dataset.train, parts, given.parts, secret)
        _demand_room(spec, parts, engine.size, deal and given.make_swarm is None)
        return Stage(
            spec, dataset, parts, network, engine, _initial(spec, network, given.init), server, attack,
            byzantine_workers(spec), choice.note, spec.key(), given.make_swarm,
        )  # fmt: skip

    @cached_property
    def swarm(self) -> Swarm:
        """The workers: in memory, or where the user has them."""
        return self.make_swarm(self) if self.make_swarm is not None else self.memory_swarm

    @cached_property
    def memory_swarm(self) -> MemorySwarm:
        """The workers in memory, made when they are first needed."""
        spec, method = self.spec, self.server.method
        held, adversary = self.cast
        workers = LocalWorkers(
            self.engine, held, spec.local, spec.swarm, spec.seed, range(spec.workers), method.gradients,
            self.server.policy.codecs.up,
        )  # fmt: skip
        return MemorySwarm(method, workers, self.initial, adversary, spec.defence.commitment)

    @property
    def cast(self) -> tuple[Holdings, Adversary]:
        """Who works with what, poison included, and who lies."""
        held = holdings(self.split, self.dataset.train, self.spec)
        adversary = self._adversary(held)
        poisoned = adversary.poisoned()
        training = tuple(poisoned.get(worker, lesson) for worker, lesson in enumerate(held.training))
        return Holdings(training, held.scored, held.scoring), adversary

    @property
    def remembers(self) -> bool:
        """Whether workers keep anything from one round to the next."""
        return self.server.method.remembers or self.server.policy.codecs.up.feedback

    @cached_property
    def key(self) -> str:
        """What the numbers of a run depend on: the spec, the engine that was chosen for it, a model it starts from.

        Of plugins the run's folder keeps copies, and compares them itself. Read once: files may go meanwhile.
        """
        start = f"-{commitment_of(self.initial[0]).hex()[:8]}" if self.spec.init else ""
        return f"{replace(self.spec, plugins=()).key()}-{self.engine.name}{start}"

    def first_state(self) -> ServerState:
        """The server before round 1."""
        return self.server.first_state(self.initial[0])

    def test_accuracy(self, state: ServerState) -> float:
        """Share of the test set that w^g classifies correctly."""
        everything = np.arange(len(self.dataset.test), dtype=np.int32)
        return float(self.engine.accuracies(state.global_best[None], self.dataset.test, everything)[0])

    def class_accuracy(self, state: ServerState) -> tuple[float | None, ...]:
        """The same by class, to four digits; none where the test set has no sample of it."""
        labels, weights = self.dataset.test.labels, state.global_best[None]
        members = [np.flatnonzero(labels == one).astype(np.int32) for one in range(self.dataset.classes)]
        return tuple(
            round(float(self.engine.accuracies(weights, self.dataset.test, rows)[0]), 4) if len(rows) else None
            for rows in members
        )

    def finale(self, state: ServerState) -> Finale:
        """What is measured once, at the end."""
        aims = self.attack.aims if self.byzantine else ()
        return Finale(self.class_accuracy(state), self.attack_success(state), aims)

    def attack_success(self, state: ServerState) -> float | None:
        """Share of test samples of other classes that a trigger turns into the attack's target, if it has one."""
        target, test = self.attack.target, self.dataset.test
        if target is None or not self.byzantine:
            return None
        others = np.flatnonzero(test.labels != target).astype(np.int32)
        marked = Samples(self.attack.triggered(test.features[others]), np.full(len(others), target, np.int32))
        return float(self.engine.accuracies(state.global_best[None], marked, np.arange(len(others), dtype=np.int32))[0])

    def _adversary(self, held: Holdings) -> Adversary:
        spec, train, parts = self.spec, self.dataset.train, self.split
        private = np.concatenate([parts.shared_scoring, parts.holdout])
        others = np.setdiff1d(np.arange(len(train), dtype=np.int32), private)
        known = spec.model != CUSTOM  # nothing here tells one custom network from another
        return Adversary(
            self.attack,
            self.byzantine,
            PublicData(train, parts.shared_scoring, others, self.dataset.classes),
            held={worker: held.training[worker].indices for worker in self.byzantine},
            engine=self.engine,
            initial=self.initial[0],
            seed=spec.seed,
            swarm_size=spec.workers,
            vectors=self.server.method.vectors,
            codec=self.server.policy.codecs.up,
            network=_described(self.network) if self.byzantine else None,
            craft_key=(spec.model, spec.seed, spec.data) if known else None,
        )


def _described(network: Network) -> Architecture | None:
    """The network as data; none if it cannot be described."""
    try:
        return network.description()
    except ArchitectureError:
        return None


def holdings(parts: Split, samples: Samples, spec: Spec) -> Holdings:
    """Who works with what (Sec. VI.C): without D_sc a worker scores on its own data."""
    extra = parts.shared_training if spec.shares_training else parts.shared_training[:0]
    training = tuple(Lesson(samples, np.concatenate([own, extra])) for own in parts.workers)
    return Holdings(training, samples, parts.shared_scoring if spec.shares_scoring else padded(parts.workers))


def byzantine_workers(spec: Spec) -> tuple[WorkerId, ...]:
    """Who the attackers are, drawn at random."""
    drawn = stream(spec.seed, "byzantine").permutation(spec.workers)[: spec.attack.byzantine]
    return tuple(sorted(int(worker) for worker in drawn))


def honest_workers(stage: Stage) -> Indices:
    """Everybody else."""
    return np.setdiff1d(np.arange(stage.spec.workers, dtype=np.int32), np.asarray(stage.byzantine, np.int32))


def _demand_room(spec: Spec, parts: Split, size: int, in_memory: bool) -> None:
    """Refuse a run whose arrays do not fit, before they are made."""
    starts = spec.workers if spec.swarm.start == "apart" else 1
    needed = 4 * starts * size
    if in_memory:
        longest = max(map(len, parts.workers)) + len(parts.shared_training)
        batch = spec.local.batch_size
        per_epoch = -(-longest // batch) * batch
        epochs = -(-spec.local.steps * batch // per_epoch) if spec.local.steps else spec.local.epochs
        at_once = min(spec.participants, workers_at_once(size))
        needed += 4 * (3 * spec.workers * size + 2 * at_once * epochs * per_epoch)
    demand_memory(
        needed,
        f"{spec.workers:,} workers with a model of {size:,} numbers, local.epochs={spec.local.epochs:,}, local.steps="
        f"{spec.local.steps:,} and local.batch_size={spec.local.batch_size:,} take",
        "Set some of them lower.",
    )


def _attack(spec: Spec) -> Attack:
    if not spec.attack.byzantine:
        return Attack()
    if spec.attack.name == CUSTOM:
        raise UserError("The attack of this run was given in Python; give it again with attack=...")
    return make_attack(spec)


def _partition(spec: Spec) -> Any:  # noqa: ANN401 - a Partition
    if spec.data.partition == CUSTOM:
        raise UserError("The partition of this run was given in Python; give it again with partition=...")
    return register.partition.make(spec.data.partition, spec.options.of(spec.data.partition))


def _initial(spec: Spec, network: Network, given: Floats | Path | None) -> Floats:
    """Where learning starts: given weights, or drawn ones; (1, D), or (U, D) if workers start apart.

    Apart from given weights only the first worker starts there: without gradients equal rows would never part.
    """
    starts = spec.workers if spec.swarm.start == "apart" else 1
    if given is None and spec.init == CUSTOM:
        raise UserError("The initial model of this run was given in Python; give it again with init=...")
    if given is None and spec.init:
        given = init_file(spec.init)
    seeds = [seed_of(spec.seed, "initial-weights", worker=number) for number in range(starts)]
    if given is None:
        return np.stack([network.initial_weights(seed) for seed in seeds])
    weights = network.flat(read_tensors(given), str(given)) if isinstance(given, Path) else given
    if weights.shape != (network.size,):
        raise UserError(
            f"init has {len(weights):,} numbers; the model '{spec.model}' has {network.size:,}. Start from a model of "
            "the same network."
        )
    if not np.isfinite(weights).all():
        raise UserError(f"The model to start from ({spec.init}) has weights that are not finite.")
    return np.stack([np.asarray(weights, np.float32), *(network.initial_weights(seed) for seed in seeds[1:])])
