"""One worker's part of the algorithm: the simulator's own arithmetic on one row, without torch where that can be.

Knows no broker. What it computes in a round depends on the spec, its number, its samples, its state and w^g alone, so a
swarm of such processes and the simulator reach the same numbers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from cbdsl import spec as specs
from cbdsl.arrays import Floats, Samples
from cbdsl.byzantine.adversary import Adversary
from cbdsl.byzantine.attacks import Attack, make_attack
from cbdsl.data import Dataset, Split
from cbdsl.deploy.memory import Memory
from cbdsl.deploy.samples import SharedLayout, unpack_shared
from cbdsl.deploy.wire import Announcement, OrderMessage, WireError
from cbdsl.engines import native
from cbdsl.engines.architecture import Architecture
from cbdsl.engines.base import Engine
from cbdsl.engines.native_engine import NativeEngine
from cbdsl.errors import UserError
from cbdsl.protocol.server import Order
from cbdsl.spec import Spec
from cbdsl.swarms.memory import Holdings, SimulatedSwarm


@dataclass(frozen=True, eq=False)
class Assignment:
    """An announcement, understood."""

    run: bytes
    spec: Spec
    architecture: Architecture | None  # none: only torch can run the model
    size: int
    classes: int
    layout: SharedLayout
    shared_digest: bytes
    shared_size: int


def understand(announcement: Announcement) -> Assignment:
    """Read what a server announces; WireError if it makes no sense."""
    try:
        spec = specs.from_toml(announcement.spec)
        shape = json.loads(announcement.shape)
        described = announcement.architecture
        architecture = Architecture.from_dict(json.loads(described)) if described else None
    except (ValueError, TypeError, KeyError, RecursionError) as error:  # UserError and ArchitectureError among them
        raise WireError(f"an announcement that makes no sense: {error}") from error
    if (
        not isinstance(shape, list)
        or not 1 <= len(shape) <= 4
        or not all(type(n) is int and 0 < n < 2**20 for n in shape)
    ):
        raise WireError("an announcement with an impossible shape of samples")
    fits = architecture is None or (
        architecture.shape == tuple(shape)
        and architecture.size == announcement.size
        and architecture.classes == announcement.classes
    )
    if not fits:
        raise WireError("an announcement whose network does not fit its sizes")
    layout = SharedLayout(announcement.shared_training, announcement.shared_scoring, tuple(shape))
    return Assignment(
        announcement.run, spec, architecture, announcement.size, announcement.classes, layout,
        announcement.shared_digest, announcement.shared_size,
    )  # fmt: skip


def make_engine(assignment: Assignment, threads: int) -> Engine:
    """The native engine where it can run the model; torch only where nothing else can."""
    obstacle = native.available() if assignment.architecture else "the native engine cannot run this model"
    if assignment.architecture is not None and obstacle is None:
        return NativeEngine(assignment.architecture, threads)
    try:
        from cbdsl.engines.torch_engine import TorchEngine  # noqa: PLC0415 - a device may not have torch
        from cbdsl.models.modules import MODELS  # noqa: PLC0415
    except ImportError as error:
        raise UserError(
            f"This run needs torch here, because {obstacle}; and torch is not installed ({error})."
        ) from error
    if assignment.spec.model not in MODELS:
        raise UserError(
            f"This run's model '{assignment.spec.model}' was given to the server in Python and {obstacle}; a worker "
            f"cannot build it. Run one of {', '.join(MODELS)}, or a network of layers that the native engine knows."
        )
    engine = TorchEngine(MODELS[assignment.spec.model](assignment.layout.shape, assignment.classes), threads)
    if engine.size != assignment.size:
        raise UserError(
            f"The model here has {engine.size:,} parameters, the server's {assignment.size:,}: versions differ."
        )
    return engine


class Particle:
    """One worker of a run: `SimulatedSwarm` with a single row that answers to the worker's own number."""

    def __init__(
        self, assignment: Assignment, number: int, own: Samples, shared: bytes, threads: int, attack: str = ""
    ) -> None:
        """attack: what to do instead of the truth, for tests; see `cbdsl.byzantine.attacks`."""
        if own.features.shape[1:] != assignment.layout.shape or int(own.labels.max()) >= assignment.classes:
            raise UserError(
                f"This run works on samples of shape {assignment.layout.shape} in {assignment.classes} classes; the "
                f"samples here have shape {own.features.shape[1:]} and labels up to {own.labels.max()}."
            )
        self.number, self.size, self._assignment = number, assignment.size, assignment
        self._engine = make_engine(assignment, threads)
        given = unpack_shared(shared, assignment.layout, assignment.classes)
        self._samples = Samples.joined([own, given])
        self._own, self._attack = len(own), attack
        self._swarm: SimulatedSwarm | None = None

    @property
    def started(self) -> bool:
        """Whether it stands somewhere already."""
        return self._swarm is not None

    def start(self, position: Floats) -> None:
        """Stand at a model, (D,), without any past."""
        spec = self._assignment.spec
        local = replace(
            spec, workers=1, attack=replace(spec.attack, byzantine=0), defence=replace(spec.defence, declared=-1)
        )
        layout, own = self._assignment.layout, self._own
        training = np.arange(own + layout.training, dtype=np.int32)
        scoring = np.arange(own + layout.training, own + layout.count, dtype=np.int32)
        held = Holdings((training,), scoring if spec.shares_scoring else np.arange(own, dtype=np.int32)[None])
        nobody = np.empty(0, np.int32)
        adversary = Adversary(
            spec,
            make_attack(replace(spec.attack, name=self._attack)) if self._attack else Attack(),
            (self.number,) if self._attack else (),
            self._engine,
            Dataset(self._samples, self._samples, self._assignment.classes),
            Split(training[own:], scoring, nobody, (training[:own],)),
            position,
        )
        if adversary.omniscient:
            raise UserError(f"The attack '{self._attack}' needs all workers' models; only the simulator has them.")
        self._swarm = SimulatedSwarm(
            local, self._engine, self._samples, held, position[None], adversary, names=(self.number,)
        )

    def restore(self, memory: Memory) -> None:
        """Go on from a saved state."""
        self.start(memory.particles.positions[0])
        assert self._swarm is not None
        self._swarm.restore(memory.particles, memory.round, memory.particles.positions[0])

    def carry_out(self, order_message: OrderMessage, global_best: Floats) -> Memory:
        """Play one round: the state after it, and the claim that rests on it."""
        if self._swarm is None:
            self.start(global_best)
        assert self._swarm is not None
        task: Literal["swarm", "average"] = "average" if order_message.task == "average" else "swarm"
        order = Order(order_message.round, task, (0,), order_message.inertia, order_message.learning_rate, global_best)
        claim = self._swarm.report(order).get(0)
        return Memory(self._assignment.run, self.number, order_message.round, self._swarm.particles, claim)

    def model(self) -> Floats | None:
        """What it uploads when it is asked; none if it stays silent."""
        return self._swarm.upload((0,)).get(0) if self._swarm is not None else None
