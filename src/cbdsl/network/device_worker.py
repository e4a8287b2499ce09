"""The worker of a device: `parse_announcement` validates a run, `DeviceWorker` carries out its orders."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np

from cbdsl import register, spec as specs
from cbdsl.algorithm.messages import Order
from cbdsl.algorithm.methods import Method
from cbdsl.algorithm.worker_round import LocalWorkers, TrainingSet, WorkerData
from cbdsl.algorithm.worker_table import KeptRows
from cbdsl.arrays import Doubles, Floats, Indices, Samples
from cbdsl.codecs.envelope import Codecs, make_codecs
from cbdsl.data.dataset import Dataset, Scaling
from cbdsl.engines import native_engine
from cbdsl.engines.engine import Engine
from cbdsl.engines.loss import Loss, make_loss
from cbdsl.engines.native_engine import NativeEngine
from cbdsl.errors import UserError
from cbdsl.models.architecture import Architecture, fits_outputs
from cbdsl.network.samples import SharedLayout, empty_labels, fit_samples, unpack_shared
from cbdsl.network.wire import (
    Announcement,
    OrderMessage,
    WireError,
    weights_from_bytes,
    weights_to_bytes,
)
from cbdsl.network.worker_state import WorkerState
from cbdsl.spec import Spec, Task
from cbdsl.swarms.local import LocalSwarm
from cbdsl.util.files import read_json
from cbdsl.util.serialize import Bounds, from_plain

if TYPE_CHECKING:
    from cbdsl.attacks.adversary import Adversary
    from cbdsl.models.network import Network


_SEEDS = 2**64
_Shape = Annotated[tuple[Annotated[int, Bounds(1, 2**20 - 1)], ...], Bounds(1, 4)]
_Range = Annotated[tuple[Annotated[int, Bounds(0, 2**31 - 1)], Annotated[int, Bounds(1, 2**31 - 1)]], Bounds(2, 2)]
_Ranges = tuple[_Range, ...]
_LARGEST = float(np.finfo(np.float32).max)
_LONGEST_NAME = 100  # characters of the name of a class or of a weight


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
    class_names: tuple[str, ...] = ()  # of a regression, the names of its targets
    tensors: tuple[str, ...] = ()  # names of the weights in a model's file; empty: the layers' own
    frozen: Indices | None = None  # (k, 2), ranges of the architecture's weights that do not train; None: all train
    target_scaling: Scaling | None = None  # of a regression

    @property
    def task(self) -> Task:
        """What is learned."""
        return self.layout.task

    @property
    def loss(self) -> Loss:
        """What the model is trained for, and what a claim is about."""
        return make_loss(self.spec, self.task)

    @property
    def data(self) -> Dataset:
        """The run's data set without its samples."""
        none = Samples(np.empty((0, *self.layout.shape), np.float32), empty_labels(self.task, self.classes))
        is_classifier = self.task == "classification"
        names = specs.words(self.spec.data.target) if is_classifier else self.class_names
        return Dataset(
            none, none, self.classes if is_classifier else 0, task=self.task, scaling=self.scaling,
            class_names=self.class_names if is_classifier else (), target_scaling=self.target_scaling,
            target_names=names,
        )  # fmt: skip

    @property
    def frozen_bytes(self) -> int:
        """The number of bytes of the frozen weights, which are the end of what is shared."""
        return 0 if self.frozen is None else 4 * int(self.frozen[:, 1].sum())

    def network(self, shared: bytes) -> Network:
        """Return the network with its frozen weights. shared: the shared content as it was received."""
        from cbdsl.models.frozen_weights import FrozenWeights  # noqa: PLC0415 - not needed before there is a run
        from cbdsl.models.network import Network, network_of  # noqa: PLC0415

        if self.architecture is None:
            averages = self.method.conversation != "swarm"
            return network_of(self.spec, self.layout.shape, self.classes, task=self.task, statistics=averages)
        constants = None
        if self.frozen is not None:
            values = weights_from_bytes(shared[len(shared) - self.frozen_bytes :])
            if 4 * len(values) != self.frozen_bytes or not np.isfinite(values).all():
                raise WireError("frozen weights that are not those announced")
            constants = FrozenWeights.of_runs(self.frozen, values, self.architecture.size)
        return Network(self.layout.shape, self.classes, self.architecture, constants=constants)


def parse_announcement(announcement: Announcement) -> Assignment:
    """Validate an announcement; raise WireError if it is invalid."""
    try:
        spec = specs.from_toml(announcement.spec)
        method: Method = register.method.make(spec.method, spec.options.of(spec.method))
        codecs = make_codecs(spec)
        shape = from_plain(_Shape, read_json(announcement.shape), "the shape of samples")
        names, tensors = _names(announcement.class_names), _names(announcement.tensors)
        task: Task = "classification" if spec.data.task == "auto" else spec.data.task
        make_loss(spec, task)
        scaling, target_scaling = _scalings(announcement, task)
        architecture, frozen = _architecture(announcement) if announcement.architecture else (None, None)
    except (ValueError, TypeError, KeyError, OverflowError) as error:  # UserError and ArchitectureError among them
        raise WireError(f"an invalid announcement: {error}") from error
    if spec.plugins or spec.init:
        raise WireError("an announcement that names files")
    if method.vectors != announcement.vectors or (method.vectors > 1 and (codecs.up.relative or codecs.down.relative)):
        raise WireError("an announcement whose method or codec is another one here: versions differ")
    if spec.seed >= _SEEDS:
        raise WireError(f"an announcement with a seed of {spec.seed.bit_length()} bits; 64 are allowed")
    if math.prod(shape) >= 2**31:
        raise WireError("an announcement with an impossible shape of samples")
    fits = architecture is None or (
        architecture.shape == shape
        and architecture.size - (0 if frozen is None else int(frozen[:, 1].sum())) == announcement.size
        and fits_outputs(architecture.classes, announcement.classes, task)
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
    if task == "reconstruction" and math.prod(shape) != announcement.classes:
        raise WireError("an announcement of a reconstruction whose network does not make samples")
    layout = SharedLayout(announcement.shared_training, announcement.shared_scoring, shape, task, announcement.classes)
    return Assignment(
        announcement.run, spec, architecture, announcement.size, announcement.vectors, method, codecs,
        announcement.classes, layout, announcement.shared_digest, announcement.shared_size, scaling, names,
        tensors, frozen, target_scaling,
    )  # fmt: skip


def _architecture(announcement: Announcement) -> tuple[Architecture, Indices | None]:
    """Read a network, and the ranges of its weights that do not train."""
    tree = read_json(announcement.architecture)
    ranges = tree.pop("frozen", None) if isinstance(tree, dict) else None
    architecture = Architecture.from_dict(tree)
    if ranges is None:
        return architecture, None
    frozen = np.array(from_plain(_Ranges, ranges, "frozen weights"), np.int64).reshape(-1, 2)
    starts, ends = frozen[:, 0], frozen.sum(1)
    most = min(architecture.size, announcement.shared_size // 4)
    if (
        not len(frozen)
        or (starts[1:] <= ends[:-1]).any()
        or ends[-1] > architecture.size
        or (ends - starts).sum() > most
    ):
        raise ValueError("frozen weights that are not in the network")
    return architecture, frozen.astype(np.int32)


def _names(text: str) -> tuple[str, ...]:
    names = from_plain(tuple[Annotated[str, Bounds(0, _LONGEST_NAME)], ...], read_json(text), "names")
    if not all(name.isprintable() for name in names):
        raise ValueError("names of classes or weights that cannot be printed")
    return names


def _scalings(announcement: Announcement, task: Task) -> tuple[Scaling | None, Scaling | None]:
    """Return the scaling of features, and that of a regression's targets, whose numbers come last."""
    numbers = np.frombuffer(announcement.scaling, "<f8")
    targets = 2 * announcement.classes if task == "regression" else 0
    if len(numbers) < targets:
        raise ValueError("the scaling of targets is missing")
    first, last = numbers[: len(numbers) - targets], numbers[len(numbers) - targets :]
    return _scaling(first, announcement.shades), _scaling(last, False)


def _scaling(numbers: Doubles, shades: bool) -> Scaling | None:
    if not len(numbers):
        return None
    mean, deviation = numbers.reshape(2, -1).tolist()
    return Scaling(tuple(mean), tuple(deviation), shades)


def make_engine(assignment: Assignment, threads: int, shared: bytes = b"") -> Engine:
    """Build the native engine, or torch's where only that can run the model. shared: as it was received.

    Torch runs on the CPU whatever device the server names: its owner decides what is used of this machine.
    """
    augment = assignment.spec.local.augment
    if augment and augment not in register.augmentation:
        raise UserError(
            f"This run's augmentation '{augment}' is not known here. Give this worker its file: --plugin FILE.",
            code="missing-part",
        )
    obstacle = native_engine.available() if assignment.architecture else "the native engine cannot run this model"
    if assignment.method.adds_loss:
        obstacle = f"the method '{assignment.spec.method}' adds a term to the loss"
    if augment:
        obstacle = f"its augmentation '{augment}' changes tensors of torch"
    if assignment.architecture is not None and obstacle is None:
        return NativeEngine(assignment.architecture, threads, assignment.loss, assignment.network(shared).frozen)
    try:
        from cbdsl.engines.augmentations import build_augmentation  # noqa: PLC0415
        from cbdsl.engines.torch_engine import TorchEngine  # noqa: PLC0415 - a device may not have torch
    except ImportError as error:
        raise UserError(
            f"This run needs torch here, because {obstacle}; and torch is not installed ({error}).",
            code="missing-package",
        ) from error
    if assignment.architecture is None and assignment.spec.model not in register.model:
        raise UserError(
            f"This run's model '{assignment.spec.model}' was given to the server in Python and {obstacle}; a worker "
            f"cannot build it. Run one of {', '.join(register.model.names())}, or a network of layers that the native "
            "engine knows.",
            code="not-supported",
        )
    network = assignment.network(shared)
    if network.size != assignment.size:  # compared before it is built: its size follows from what the server announces
        raise UserError(
            f"The model here has {network.size:,} parameters, the server's {assignment.size:,}: versions differ.",
            code="conflict",
        )
    augmentation = build_augmentation(assignment.spec, assignment.layout.shape)
    return TorchEngine(network.build(), threads, loss=assignment.loss, augmentation=augmentation)


class DeviceWorker:
    """The worker of a device: a `LocalSwarm` of one row under the worker's own number."""

    def __init__(
        self, assignment: Assignment, number: int, own: Samples, shared: bytes, threads: int, attack: str = ""
    ) -> None:
        """attack: for tests, the attack that this worker carries out; `cbdsl list attacks` prints the names."""
        own = fit_samples(own, assignment.data)
        spec, layout = assignment.spec, assignment.layout
        self.number, self.size, self.assignment = number, assignment.size, assignment
        engine = make_engine(assignment, threads, shared)
        public_bytes = shared[: len(shared) - assignment.frozen_bytes]
        samples = Samples.joined([own, unpack_shared(public_bytes, layout, assignment.classes)])
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

    def start(self, position: Floats) -> None:
        """Start at a model, (D,), without a personal best."""
        self._start(position)

    def restore(self, state: WorkerState) -> None:
        """Continue from a saved state."""
        initial, received = state.initial, state.received
        swarm = self._start(state.particles.positions[0] if initial is None else initial)
        rows = KeptRows(np.array([self.number], np.int32), vars(state.particles))
        swarm.restore(rows, state.round, state.particles.positions[0] if received is None else received)
        if self._adversary is not None:
            self._adversary.memory = state.memory
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
            memory=self._adversary.memory if self._adversary else {},
        )

    def upload(self) -> bytes | None:
        """Return what it uploads if it is invited, or None if it stays silent."""
        content = self._swarm.upload([self.number]).get(self.number) if self._swarm else None
        return weights_to_bytes(content) if isinstance(content, np.ndarray) else content

    def _start(self, position: Floats) -> LocalSwarm:
        if self._adversary is not None:
            self._adversary.initial, self._adversary.memory = position.copy(), {}
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
    made.check_task(assignment.task, attack)
    if made.omniscient:
        raise UserError(
            f"The attack '{attack}' needs all workers' models; only the simulator has them.", code="not-supported"
        )
    others = np.setdiff1d(np.arange(len(samples), dtype=np.int32), scoring)
    return Adversary(
        made,
        (number,),
        PublicData(samples, scoring, others, assignment.data.classes),
        held={number: honest.indices},
        engine=engine,
        initial=np.zeros(engine.size, np.float32),
        seed=spec.seed,
        swarm_size=spec.workers,
        vectors=assignment.vectors,
        codec=assignment.codecs.up,
        network=assignment.architecture if assignment.frozen is None else None,
        local=spec.local,
    )
