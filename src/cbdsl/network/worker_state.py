"""What a worker keeps: its particle, its saved state, the received global model and the trained model."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbdsl import register
from cbdsl import spec as specs
from cbdsl.algorithm.messages import Claim, Upload, commitment_of
from cbdsl.algorithm.methods import Method, play_part
from cbdsl.algorithm.particles import Particles
from cbdsl.algorithm.worker import (
    LocalWorkers,
    TrainingSet,
    WorkerData,
    content_of,
    encode_content,
    initial_particles,
)
from cbdsl.arrays import Floats, Samples
from cbdsl.codecs.envelope import Codecs, codecs_of
from cbdsl.data.dataset import Scaling
from cbdsl.engines import native_engine
from cbdsl.engines.base import Engine
from cbdsl.engines.native_engine import NativeEngine
from cbdsl.errors import UserError
from cbdsl.models.architecture import Architecture
from cbdsl.network.samples import SharedLayout, unpack_shared
from cbdsl.network.wire import NO_DIGEST, RUN_BYTES, Announcement, OrderMessage, WireError, digest_of, weights_to_bytes
from cbdsl.spec import Spec
from cbdsl.util.files import private_folder, write_atomically
from cbdsl.util.formatting import single_line

if TYPE_CHECKING:
    from cbdsl.network.attacker import AttackerAdapter


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
    obstacle = native_engine.available() if assignment.architecture else "the native engine cannot run this model"
    if assignment.architecture is not None and obstacle is None:
        return NativeEngine(assignment.architecture, threads)
    try:
        from cbdsl.engines.torch_engine import TorchEngine  # noqa: PLC0415 - a device may not have torch
        from cbdsl.models.network import network_of  # noqa: PLC0415
        from cbdsl.models.to_torch import module_of  # noqa: PLC0415
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


class DeviceWorker:
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
        lesson = TrainingSet(samples, training)
        self._liar: AttackerAdapter | None = None
        if attack:
            from cbdsl.network.attacker import AttackerAdapter  # noqa: PLC0415 - only devices of a test attack

            self._liar = AttackerAdapter(attack, number, assignment, self.method, engine, lesson, public)
            lesson = self._liar.lesson()
        held = WorkerData((lesson,), samples, scoring)
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
        self._particles = initial_particles(position[None], 1, self._codec)
        if self._liar is not None:
            self._liar.start(position)

    def restore(self, memory: WorkerState) -> None:
        """Go on from a saved state."""
        self.start(memory.particles.positions[0])
        self._particles, self._round, self._received = memory.particles, memory.round, memory.particles.positions[0]

    def carry_out(self, order: OrderMessage, received: Floats) -> WorkerState:
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
        return WorkerState(
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
        return encode_content(self._codec, model, self._received, self._version)

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


_log = logging.getLogger("cbdsl.deploy")

README = """\
The state of a worker (`cbdsl work --state`); with it the worker goes on after a stop. Nothing here is ever sent whole.

README.txt         this page
state.npz          position, velocity and best model after the last round, and what was claimed; without it the worker
                   starts from the global model
shared.bin         the shared samples as the server sent them, so that they are fetched once
model.safetensors  the trained model of the last run; `cbdsl predict` and `cbdsl export` use it
wire.json          bytes on this worker's connection, by direction and kind of message
samples.npz        its own samples, and worker.log what it said, where `cbdsl swarm` put them here
.NAME.partial      a file that was being written when the process was killed; it may be removed
"""

_MOST_META = 4096  # bytes of what is not a model
_HEADER = 4096  # bytes that describe an array, at most


@dataclass(frozen=True, eq=False)
class WorkerState:
    """A worker after a round."""

    run: bytes
    worker: int
    round: int
    particles: Particles  # one row
    claim: Claim | None  # what it said; none in FedAvg
    version: int  # of the w^g that it had
    model_digest: bytes  # of that one's numbers


class StateSummary(NamedTuple):
    """The state on disk, in a few words."""

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
        self._shared_digest: bytes | None = None  # of what is in the file; none: not looked at yet
        self.ledger = folder / "wire.json"
        with contextlib.suppress(OSError):  # no state is lost without it
            write_atomically(folder / "README.txt", README.encode(), private=True)

    def save(self, memory: WorkerState) -> None:
        """Write the state whole, or leave the old one."""
        claim = memory.claim
        meta = {
            "run": memory.run.hex(),
            "worker": memory.worker,
            "round": memory.round,
            "claim": None if claim is None else [float(claim.score).hex(), claim.commitment.hex()],
            "version": memory.version,
            "model": memory.model_digest.hex(),
        }
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, meta=np.array(json.dumps(meta)), **vars(memory.particles))
        write_atomically(self._state, buffer.getbuffer(), private=True)

    def load(self, run: bytes, worker: int, size: int, pack: int) -> WorkerState | None:
        """The state of this run; none if there is none, or none that can be used. pack: bytes of a packed model."""
        if not self._state.exists():
            return None
        try:
            with zipfile.ZipFile(self._state) as stored:
                meta = _meta(stored)
                if meta["run"] != run.hex() or meta["worker"] != worker:
                    return None
                claim = meta["claim"] and Claim(float.fromhex(meta["claim"][0]), bytes.fromhex(meta["claim"][1]))
                models = ("positions", "velocities", "personal_best")
                arrays = {name: _array(stored, name, (1, size), np.float32) for name in models}
                particles = Particles(
                    **arrays,
                    personal_score=_array(stored, "personal_score", (1,), np.float64),
                    packs=_array(stored, "packs", (1, pack), np.uint8),
                    versions=_array(stored, "versions", (1,), np.int32),
                )
                digest = bytes.fromhex(meta["model"])
                return WorkerState(run, worker, int(meta["round"]), particles, claim, int(meta["version"]), digest)
        except Exception as error:  # a damaged archive fails in many ways; no state is worth any of them
            text = single_line(str(error)) or type(error).__name__
            _log.warning("%s cannot be used (%s); starting from the global model", self._state, text)
            return None

    def last(self) -> StateSummary:
        """What the state is of, whichever run that is; zeros if there is none."""
        try:
            with zipfile.ZipFile(self._state) as stored:
                meta = _meta(stored)
            run, digest = bytes.fromhex(meta["run"]), bytes.fromhex(meta["model"])
            return StateSummary(run, int(meta["round"]), int(meta["version"]), digest)
        except Exception:  # as above; whoever wants to use the state says what is wrong with it
            return _NEVER

    def forget(self) -> None:
        """Have no state any more."""
        self._state.unlink(missing_ok=True)

    def save_shared(self, content: bytes) -> None:
        """Keep the shared samples as they came."""
        write_atomically(self._shared, content, private=True)
        self._shared_digest = digest_of(content)

    def load_shared(self, digest: bytes, size: int) -> bytes | None:
        """The shared samples with this hash and of so many bytes, if they are here."""
        if not self._shared.exists() or self._shared.stat().st_size != size:
            return None
        if self._shared_digest not in {None, digest}:
            return None
        content = self._shared.read_bytes()
        self._shared_digest = digest_of(content)
        return content if self._shared_digest == digest else None


def _meta(stored: zipfile.ZipFile) -> dict[str, Any]:
    meta = json.loads(str(_read(stored, "meta", _MOST_META)))
    if not isinstance(meta, dict) or not 0 <= int(meta["round"]) < 2**31 or len(bytes.fromhex(meta["run"])) != 8:
        raise ValueError("a state that makes no sense")
    return meta


def _array(stored: zipfile.ZipFile, name: str, shape: tuple[int, ...], kind: type[Any]) -> NDArray[Any]:
    array = _read(stored, name, int(np.prod(shape)) * np.dtype(kind).itemsize)
    if array.shape != shape or array.dtype != kind:
        raise ValueError("a model of the wrong size")
    return array


def _read(stored: zipfile.ZipFile, name: str, most: int) -> NDArray[Any]:
    """An array of at most so many bytes, by what the archive says of it and by what its header says."""
    entry = stored.getinfo(f"{name}.npy")
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > most + _HEADER:
        raise ValueError("an array of the wrong size")
    content = io.BytesIO(stored.read(entry))
    if np.lib.format.read_magic(content) != (1, 0):
        raise ValueError("an array of another format")
    shape, _, kind = np.lib.format.read_array_header_1_0(content, max_header_size=_HEADER)
    if kind.hasobject or entry.file_size - content.tell() != int(np.prod(shape, dtype=object)) * kind.itemsize:
        raise ValueError("an array of the wrong size")
    return np.frombuffer(content.getbuffer(), kind, offset=content.tell()).reshape(shape).copy()
