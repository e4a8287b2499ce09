"""The worker of a device: what the server announced, its `LocalSwarm` of one row, and the state it saves."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbdsl import register
from cbdsl import spec as specs
from cbdsl.algorithm.messages import Claim, Order
from cbdsl.algorithm.methods import Method
from cbdsl.algorithm.particles import Particles
from cbdsl.algorithm.worker_round import LocalWorkers, TrainingSet, WorkerData
from cbdsl.arrays import Floats, Indices, Samples
from cbdsl.codecs.envelope import Codecs, make_codecs
from cbdsl.data.dataset import Scaling
from cbdsl.engines import native_engine
from cbdsl.engines.engine import Engine
from cbdsl.engines.native_engine import NativeEngine
from cbdsl.errors import UserError
from cbdsl.models.architecture import Architecture
from cbdsl.network.samples import SharedLayout, unpack_shared
from cbdsl.network.wire import (
    MAX_ROUND,
    NO_DIGEST,
    RUN_BYTES,
    Announcement,
    OrderMessage,
    WireError,
    digest_of,
    weights_to_bytes,
)
from cbdsl.spec import Spec
from cbdsl.swarms.local import LocalSwarm
from cbdsl.util.files import private_folder, write_atomically
from cbdsl.util.formatting import single_line
from cbdsl.util.npz import load_arrays
from cbdsl.util.serialize import Bounds, from_plain, to_plain

if TYPE_CHECKING:
    from cbdsl.attacks.adversary import Adversary


_SEEDS = 2**64
_LARGEST = float(np.finfo(np.float32).max)
_LONGEST_NAME = 100  # letters of the name of a class or of a weight


@dataclass(frozen=True, eq=False)
class Assignment:
    """A validated announcement: the run, and everything that a worker has to build for it."""

    run: bytes
    spec: Spec
    architecture: Architecture | None  # None: only torch can run the model
    size: int  # D
    vectors: int  # V
    method: Method
    codecs: Codecs
    classes: int
    layout: SharedLayout
    shared_digest: bytes
    shared_size: int
    scaling: Scaling | None = None  # of the server's features; a device's own are scaled already
    class_names: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()  # names of the weights in a model's file; empty: the layers' own


def understand(announcement: Announcement) -> Assignment:
    """Validate an announcement; raise WireError if it is invalid."""
    try:
        spec = specs.from_toml(announcement.spec)
        method: Method = register.method.make(spec.method, spec.options.of(spec.method))
        codecs = make_codecs(spec)
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
    """Build the native engine, or torch's where only that can run the model.

    Torch runs on the CPU whatever device the server names: its owner decides what is used of this machine.
    """
    obstacle = native_engine.available() if assignment.architecture else "the native engine cannot run this model"
    if assignment.architecture is not None and obstacle is None:
        return NativeEngine(assignment.architecture, threads)
    try:
        from cbdsl.engines.torch_engine import TorchEngine  # noqa: PLC0415 - a device may not have torch
        from cbdsl.models.network import network_of  # noqa: PLC0415
        from cbdsl.models.to_torch import module_of  # noqa: PLC0415
    except ImportError as error:
        raise UserError(
            f"This run needs torch here, because {obstacle}; and torch is not installed ({error}).",
            code="missing-package",
        ) from error
    if assignment.architecture is not None:
        return TorchEngine(module_of(assignment.architecture), threads)
    if assignment.spec.model not in register.model:
        raise UserError(
            f"This run's model '{assignment.spec.model}' was given to the server in Python and {obstacle}; a worker "
            f"cannot build it. Run one of {', '.join(register.model.names())}, or a network of layers that the native "
            "engine knows.",
            code="not-supported",
        )
    network = network_of(assignment.spec, assignment.layout.shape, assignment.classes)
    if network.size != assignment.size:  # compared before it is built: its size follows from what the server announces
        raise UserError(
            f"The model here has {network.size:,} parameters, the server's {assignment.size:,}: versions differ.",
            code="conflict",
        )
    return TorchEngine(network.build(), threads)


class DeviceWorker:
    """The worker of a device: a `LocalSwarm` of one row under the worker's own number."""

    def __init__(
        self, assignment: Assignment, number: int, own: Samples, shared: bytes, threads: int, attack: str = ""
    ) -> None:
        """attack: for tests, the attack that this worker carries out; `cbdsl list attacks` prints the names."""
        if own.features.shape[1:] != assignment.layout.shape or int(own.labels.max()) >= assignment.classes:
            raise UserError(
                f"This run works on samples of shape {assignment.layout.shape} in {assignment.classes} classes; the "
                f"samples here have shape {own.features.shape[1:]} and labels up to {own.labels.max()}.",
                code="wrong-shape",
            )
        spec, layout = assignment.spec, assignment.layout
        self.number, self.size, self.assignment = number, assignment.size, assignment
        engine = make_engine(assignment, threads)
        samples = Samples.joined([own, unpack_shared(shared, layout, assignment.classes)])
        training = np.arange(len(own) + layout.training, dtype=np.int32)
        public = np.arange(len(own) + layout.training, len(own) + layout.count, dtype=np.int32)
        scoring = public if spec.shares_scoring else np.arange(len(own), dtype=np.int32)[None]
        lesson = TrainingSet(samples, training)
        self._adversary: Adversary | None = None
        if attack:
            self._adversary = _make_adversary(attack, number, assignment, engine, lesson, public)
            lesson = self._adversary.poisoned().get(number, lesson)
        self._workers = LocalWorkers(
            engine,
            WorkerData((lesson,), samples, scoring),
            spec.local,
            spec.swarm,
            spec.seed,
            (number,),
            assignment.method.gradients,
            assignment.codecs.up,
        )
        self._swarm: LocalSwarm | None = None

    @property
    def started(self) -> bool:
        """Whether it has a position."""
        return self._swarm is not None

    def start(self, position: Floats) -> None:
        """Start at a model, (D,), without a personal best."""
        self._start(position)

    def restore(self, state: WorkerState) -> None:
        """Continue from a saved state."""
        initial, received = state.initial, state.received
        swarm = self._start(state.particles.positions[0] if initial is None else initial)
        swarm.restore(state.particles, state.round, state.particles.positions[0] if received is None else received)
        swarm.begin_round(Order(state.round, "swarm", (self.number,), 0.0, 0.0, None, version=state.version))

    def carry_out(self, order: OrderMessage, received: Floats) -> WorkerState:
        """Play one round with what the server sent, (V D,); return the state after it, with the claim."""
        if not max(abs(order.inertia), abs(order.learning_rate)) <= _LARGEST:
            raise WireError("an order with a learning rate or inertia that is not a float32")
        swarm = self._swarm or self._start(received[: self.size])
        task: Literal["swarm", "average"] = "average" if order.task == "average" else "swarm"
        own = Order(
            order.round, task, (self.number,), order.inertia, order.learning_rate, received, version=order.version
        )
        with np.errstate(over="ignore", invalid="ignore"):  # a model that diverged has no score; nothing to print
            claims = swarm.report(own)
        return WorkerState(
            self.assignment.run,
            self.number,
            order.round,
            swarm.particles,
            claims.get(self.number),
            order.version,
            order.model_digest,
            received=received if self._adversary else None,
            initial=self._adversary.initial if self._adversary else None,
        )

    def upload(self) -> bytes | None:
        """Return what it uploads if it is invited, or None if it stays silent."""
        content = self._swarm.upload([self.number]).get(self.number) if self._swarm else None
        return weights_to_bytes(content) if isinstance(content, np.ndarray) else content

    def _start(self, position: Floats) -> LocalSwarm:
        if self._adversary is not None:
            self._adversary.initial = position.copy()
        commits = self.assignment.spec.defence.commitment
        self._swarm = LocalSwarm(self.assignment.method, self._workers, position[None], self._adversary, commits)
        return self._swarm


def _make_adversary(
    attack: str, number: int, assignment: Assignment, engine: Engine, honest: TrainingSet, scoring: Indices
) -> Adversary:
    """Build the one attacker of a device. honest: its training set without the attack. scoring: D_sc, same pool."""
    from cbdsl.attacks.adversary import Adversary, PublicData  # noqa: PLC0415 - only devices of a test attack
    from cbdsl.attacks.attack import make_attack  # noqa: PLC0415

    spec, samples = assignment.spec, honest.samples
    made = make_attack(replace(spec, attack=replace(spec.attack, name=attack)))
    if made.omniscient:
        raise UserError(
            f"The attack '{attack}' needs all workers' models; only the simulator has them.", code="not-supported"
        )
    others = np.setdiff1d(np.arange(len(samples), dtype=np.int32), scoring)
    return Adversary(
        made,
        (number,),
        PublicData(samples, scoring, others, assignment.classes),
        held={number: honest.indices},
        engine=engine,
        initial=np.zeros(engine.size, np.float32),
        seed=spec.seed,
        swarm_size=spec.workers,
        vectors=assignment.vectors,
        codec=assignment.codecs.up,
        network=assignment.architecture,
    )


_log = logging.getLogger("cbdsl.network")

README = """\
The state of a worker (`cbdsl work --state`), from which it continues after a stop. Nothing here is ever sent whole.

README.txt         this page
state.npz          position, velocity and best model after the last round, and what was claimed; without it the worker
                   starts from the global model
shared.bin         the shared samples as the server sent them, so that they are fetched once
model.safetensors  the trained model of the last run; `cbdsl predict` and `cbdsl export` use it
wire.json          bytes on this worker's connection, by direction and kind of message
samples.npz        its own samples, and worker.log its messages, where `cbdsl swarm` put them here
.NAME.partial      a file that was being written when the process was killed; it may be removed
"""

_MOST_META = 16384  # bytes of what is not a model
_MOST_VECTORS = 8  # of a message that an attacker received


@dataclass(frozen=True, eq=False)
class WorkerState:
    """A worker after a round."""

    run: bytes
    worker: int
    round: int
    particles: Particles  # one row
    claim: Claim | None  # what it claimed; None where everybody uploads
    version: int  # of the w^g that it had
    model_digest: bytes  # of that one's numbers
    received: Floats | None = None  # what the server sent, (V D,); attackers alone need it
    initial: Floats | None = None  # the model that it started from, (D,); attackers alone need it


@dataclass(frozen=True)
class _StateMeta:
    """What the file of a state holds beside arrays."""

    run: Annotated[bytes, Bounds(RUN_BYTES, RUN_BYTES)]
    worker: int
    round: Annotated[int, Bounds(0, MAX_ROUND)]
    claim: tuple[str, bytes] | None  # the score as a hexadecimal float, and the commitment
    version: int
    model: bytes  # digest


class StateSummary(NamedTuple):
    """Run, round and model version of a saved state."""

    run: bytes
    round: int
    version: int
    model_digest: bytes


_NEVER = StateSummary(bytes(RUN_BYTES), 0, 0, NO_DIGEST)


class WorkerStateFolder:
    """The folder of one worker."""

    def __init__(self, folder: Path) -> None:
        private_folder(folder)
        self._state, self._shared = folder / "state.npz", folder / "shared.bin"
        self._shared_digest: bytes | None = None  # of the file's content; None: not read yet
        self.ledger = folder / "wire.json"
        with contextlib.suppress(OSError):  # no state is lost without it
            write_atomically(folder / "README.txt", README.encode(), private=True)

    def save(self, state: WorkerState) -> None:
        """Write the state atomically."""
        claim = state.claim
        made = None if claim is None else (float(claim.score).hex(), claim.commitment)
        meta = to_plain(_StateMeta(state.run, state.worker, state.round, made, state.version, state.model_digest))
        arrays = {**vars(state.particles), "received": state.received, "initial": state.initial}
        there = {name: array for name, array in arrays.items() if array is not None}
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, meta=np.array(json.dumps(meta)), **there)
        write_atomically(self._state, buffer.getbuffer(), private=True)

    def load(self, run: bytes, worker: int, size: int, pack: int) -> WorkerState | None:
        """Return the state of this run, or None if there is none that can be used. pack: bytes of a packed model."""
        if not self._state.exists():
            return None
        try:
            meta = self._meta()
            if (meta.run, meta.worker) != (run, worker):
                return None
            claim = None if meta.claim is None else Claim(float.fromhex(meta.claim[0]), meta.claim[1])
            arrays = self._arrays(size, pack)
            received, initial = arrays.pop("received", None), arrays.pop("initial", None)
            particles = Particles(**arrays)
            return WorkerState(run, worker, meta.round, particles, claim, meta.version, meta.model, received, initial)
        except Exception as error:  # damaged content fails in many ways, and none may stop the worker
            text = single_line(str(error)) or type(error).__name__
            _log.warning("%s cannot be used (%s); starting from the global model", self._state, text)
            return None

    def last(self) -> StateSummary:
        """Return run, round and model version of the saved state, whichever run it is of; zeros if there is none."""
        try:
            meta = self._meta()
            return StateSummary(meta.run, meta.round, meta.version, meta.model)
        except Exception:  # as above; `load` logs what is wrong with it
            return _NEVER

    def forget(self) -> None:
        """Delete the saved state."""
        self._state.unlink(missing_ok=True)

    def save_shared(self, content: bytes) -> None:
        """Write the shared samples as they were received."""
        write_atomically(self._shared, content, private=True)
        self._shared_digest = digest_of(content)

    def load_shared(self, digest: bytes, size: int) -> bytes | None:
        """Return the shared samples with this hash and size in bytes, or None."""
        if not self._shared.exists() or self._shared.stat().st_size != size:
            return None
        if self._shared_digest not in {None, digest}:
            return None
        content = self._shared.read_bytes()
        self._shared_digest = digest_of(content)
        return content if self._shared_digest == digest else None

    def _meta(self) -> _StateMeta:
        return from_plain(_StateMeta, json.loads(str(load_arrays(self._state, ["meta"], most=_MOST_META)["meta"])))

    def _arrays(self, size: int, pack: int) -> dict[str, NDArray[Any]]:
        """Read one worker's particles and, of an attacker, what the server sent and the initial model."""
        most = 4 * size * (4 + _MOST_VECTORS) + pack + 12
        optional = ("received", "initial")
        arrays = load_arrays(self._state, [each.name for each in fields(Particles)], optional, most=most)
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(arrays, (1, size))
        shapes |= {"personal_score": (1,), "versions": (1,), "packs": (1, pack), "initial": (size,)}
        if "received" in arrays:
            shapes["received"] = (arrays["received"].size,)
        kinds = {"personal_score": np.float64, "versions": np.int32, "packs": np.uint8}
        for name, array in arrays.items():
            if array.shape != shapes[name] or array.dtype != kinds.get(name, np.float32):
                raise ValueError("a model of the wrong size")
        return arrays
