"""One worker's part of the algorithm: the same arithmetic as in memory on one row, without torch where that can be.

Knows no broker. What it computes in a round depends on the spec, its number, its samples, its state and w^g alone, so a
swarm of such processes and the simulator reach the same numbers.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cbdsl import register
from cbdsl import spec as specs
from cbdsl.arrays import Floats, Samples
from cbdsl.codecs.travel import Codecs, codecs_of
from cbdsl.data.scaling import Scaling
from cbdsl.deploy.memory import Memory
from cbdsl.deploy.samples import SharedLayout, unpack_shared
from cbdsl.deploy.wire import Announcement, OrderMessage, WireError, weights_to_bytes
from cbdsl.engines import native
from cbdsl.engines.architecture import Architecture
from cbdsl.engines.base import Engine
from cbdsl.engines.native_engine import NativeEngine
from cbdsl.errors import UserError
from cbdsl.methods.base import Method, play_part
from cbdsl.protocol.messages import Claim, Upload, commitment_of
from cbdsl.spec import Spec
from cbdsl.workers.local import Holdings, Lesson, LocalWorkers, at_rest, content_of, made_content
from cbdsl.workers.swarm import Particles

if TYPE_CHECKING:
    from cbdsl.deploy.liar import Liar

_ROW = np.zeros(1, np.int32)  # there is one
_SEEDS = 2**64
_LARGEST = float(np.finfo(np.float32).max)
_LONGEST_NAME = 100  # letters of the name of a class, as in a model's file, or of a weight


@dataclass(frozen=True, eq=False)
class Assignment:
    """An announcement, understood."""

    run: bytes
    spec: Spec
    architecture: Architecture | None  # none: only torch can run the model
    size: int  # D
    vectors: int  # V
    method: Method
    codecs: Codecs
    classes: int
    layout: SharedLayout
    shared_digest: bytes
    shared_size: int
    scaling: Scaling | None = None  # what the server did to features; a device's own are scaled already
    class_names: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()  # names of the weights in a model's file; none: the layers' own


def understand(announcement: Announcement) -> Assignment:
    """Read what a server announces; WireError if it makes no sense."""
    try:
        spec = specs.from_toml(announcement.spec)
        method: Method = register.method.make(spec.method, spec.options.of(spec.method))
        codecs = codecs_of(spec)
        shape = json.loads(announcement.shape)
        names, tensors = _names(announcement.class_names), _names(announcement.tensors)
        scaling = _scaling(announcement)
        described = announcement.architecture
        architecture = Architecture.from_dict(json.loads(described)) if described else None
    except (
        ValueError,
        TypeError,
        KeyError,
        OverflowError,
        RecursionError,
    ) as error:  # UserError and ArchitectureError among them
        raise WireError(f"an invalid announcement: {error}") from error
    if spec.plugins or spec.init:
        raise WireError("an announcement that names files")
    if method.vectors != announcement.vectors or (method.vectors > 1 and (codecs.up.relative or codecs.down.relative)):
        raise WireError("an announcement whose method or codec is another one here: versions differ")
    if spec.seed >= _SEEDS:
        raise WireError(f"an announcement with a seed of {spec.seed.bit_length()} bits; 64 are allowed")
    if (
        not isinstance(shape, list)
        or not 1 <= len(shape) <= 4
        or not all(type(n) is int and 0 < n < 2**20 for n in shape)
        or math.prod(shape) >= 2**31
    ):
        raise WireError("an announcement with an impossible shape of samples")
    fits = architecture is None or (
        architecture.shape == tuple(shape)
        and architecture.size == announcement.size
        and architecture.classes >= announcement.classes
    )
    if not fits:
        raise WireError("an announcement whose network does not fit its sizes")
    if scaling is not None and len(scaling.mean) != shape[0]:
        raise WireError("an announcement whose scaling does not fit its samples")
    if len(names) > announcement.classes:
        raise WireError("an announcement that names more classes than there are")
    distinct = len(set(tensors) - {"__metadata__"})  # a word of safetensors' own
    if tensors and (architecture is None or not distinct == len(tensors) == len(architecture.tensors())):
        raise WireError("an announcement whose names of weights do not fit its network")
    layout = SharedLayout(announcement.shared_training, announcement.shared_scoring, tuple(shape))
    return Assignment(
        announcement.run, spec, architecture, announcement.size, announcement.vectors, method, codecs,
        announcement.classes, layout, announcement.shared_digest, announcement.shared_size, scaling, names,
        tensors,
    )  # fmt: skip


def _names(text: str) -> tuple[str, ...]:
    names = json.loads(text)
    if not isinstance(names, list) or not all(
        isinstance(name, str) and len(name) <= _LONGEST_NAME and name.isprintable() for name in names
    ):
        raise ValueError("impossible names of classes or weights")
    return tuple(names)


def _scaling(announcement: Announcement) -> Scaling | None:
    if not announcement.scaling:
        return None
    mean, deviation = np.frombuffer(announcement.scaling, "<f8").reshape(2, -1).tolist()
    return Scaling(tuple(mean), tuple(deviation), announcement.shades)


def make_engine(assignment: Assignment, threads: int) -> Engine:
    """The native engine where it can run the model; torch only where nothing else can, and on the CPU alone.

    Whatever device a server names: what is used of this machine is not for a server to say.
    """
    obstacle = native.available() if assignment.architecture else "the native engine cannot run this model"
    if assignment.architecture is not None and obstacle is None:
        return NativeEngine(assignment.architecture, threads)
    try:
        from cbdsl.engines.torch_engine import TorchEngine  # noqa: PLC0415 - a device may not have torch
        from cbdsl.engines.torch_modules import module_of  # noqa: PLC0415
        from cbdsl.models.network import network_of  # noqa: PLC0415
    except ImportError as error:
        raise UserError(
            f"This run needs torch here, because {obstacle}; and torch is not installed ({error})."
        ) from error
    if assignment.architecture is not None:
        return TorchEngine(module_of(assignment.architecture), threads)
    if assignment.spec.model not in register.model:
        raise UserError(
            f"This run's model '{assignment.spec.model}' was given to the server in Python and {obstacle}; a worker "
            f"cannot build it. Run one of {', '.join(register.model.names())}, or a network of layers that the native "
            "engine knows."
        )
    network = network_of(assignment.spec, assignment.layout.shape, assignment.classes)
    if network.size != assignment.size:  # asked before it is built: its size follows from what the server announces
        raise UserError(
            f"The model here has {network.size:,} parameters, the server's {assignment.size:,}: versions differ."
        )
    return TorchEngine(network.build(), threads)


class Particle:
    """One worker of a run: one row that answers to the worker's own number, and what the server last sent it."""

    def __init__(
        self, assignment: Assignment, number: int, own: Samples, shared: bytes, threads: int, attack: str = ""
    ) -> None:
        """attack: what to do instead of the truth, for tests; `cbdsl list attacks` has the names."""
        if own.features.shape[1:] != assignment.layout.shape or int(own.labels.max()) >= assignment.classes:
            raise UserError(
                f"This run works on samples of shape {assignment.layout.shape} in {assignment.classes} classes; the "
                f"samples here have shape {own.features.shape[1:]} and labels up to {own.labels.max()}."
            )
        spec, layout = assignment.spec, assignment.layout
        self.number, self.size, self.assignment = number, assignment.size, assignment
        self.method = assignment.method
        engine = make_engine(assignment, threads)
        samples = Samples.joined([own, unpack_shared(shared, layout, assignment.classes)])
        training = np.arange(len(own) + layout.training, dtype=np.int32)
        public = np.arange(len(own) + layout.training, len(own) + layout.count, dtype=np.int32)
        scoring = public if spec.shares_scoring else np.arange(len(own), dtype=np.int32)[None]
        lesson = Lesson(samples, training)
        self._liar: Liar | None = None
        if attack:
            from cbdsl.deploy.liar import Liar  # noqa: PLC0415 - honest devices do without

            self._liar = Liar(attack, number, assignment, self.method, engine, lesson, public)
            lesson = self._liar.lesson()
        held = Holdings((lesson,), samples, scoring)
        self._worker = LocalWorkers(
            engine, held, spec.local, spec.swarm, spec.seed, (number,), self.method.gradients, assignment.codecs.up
        )  # fmt: skip
        self._particles: Particles | None = None
        self._codec = assignment.codecs.up
        self._round, self._version, self._received = 0, 0, np.empty(0, np.float32)

    @property
    def started(self) -> bool:
        """Whether it stands somewhere already."""
        return self._particles is not None

    def start(self, position: Floats) -> None:
        """Stand at a model, (D,), without any past."""
        self._particles = at_rest(position[None], 1, self._codec)
        if self._liar is not None:
            self._liar.start(position)

    def restore(self, memory: Memory) -> None:
        """Go on from a saved state."""
        self.start(memory.particles.positions[0])
        self._particles, self._round, self._received = memory.particles, memory.round, memory.particles.positions[0]

    def carry_out(self, order: OrderMessage, received: Floats) -> Memory:
        """Play one round with what the server sent, (V D,): the state after it, and the claim that rests on it."""
        if not max(abs(order.inertia), abs(order.learning_rate)) <= _LARGEST:
            raise WireError("an order with a learning rate or inertia that is no float32")
        if self._particles is None:
            self.start(received[: self.size])
        assert self._particles is not None
        work = self._worker.at(_ROW, order.round, order.inertia, order.learning_rate, order.version)
        with np.errstate(over="ignore", invalid="ignore"):  # a model that is no number scores none; nothing to print
            self._particles = play_part(self.method, work, self._particles, received)
        self._round, self._version, self._received = order.round, order.version, received
        claim = None if order.task == "average" else self._claim(self._particles)
        return Memory(
            self.assignment.run, self.number, order.round, self._particles, claim, order.version, order.model_digest
        )

    def upload(self) -> bytes | None:
        """What it uploads when it is asked; none if it stays silent."""
        sent = self._sent()
        content = None if sent is None else sent[0]
        return weights_to_bytes(content) if isinstance(content, np.ndarray) else content

    def _sent(self) -> tuple[Upload, Floats] | None:
        """What it uploads, and the model that is in it, (V D,); none if it stays silent."""
        if self._particles is None:
            return None
        honest: Floats = self.method.upload(self._particles)[0]
        model: Floats | None = honest
        if self._liar is not None:
            model = self._liar.model(honest, float(self._particles.personal_score[0]), self._round, self._received)
        if model is None:
            return None
        if np.array_equal(model, honest):
            return content_of(self._codec, self._particles, 0, honest), honest
        return made_content(self._codec, model, self._received, self._version)

    def _claim(self, particles: Particles) -> Claim:
        """What a worker says: its best score as a float32, and a digest of its model where the server wants one."""
        score = float(particles.personal_score[0])
        if self._liar is not None:
            score = self._liar.claim(self.method.upload(particles)[0], score, self._round, self._received)
        commitment = b""
        if self.assignment.spec.defence.commitment:
            sent = self._sent()
            commitment = commitment_of(self._received if sent is None else sent[1])
        return Claim(float(np.float32(score)), commitment)
