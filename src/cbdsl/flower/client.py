"""The node side of the Flower app: handlers for the messages of a run, one worker per node.

Handlers are stateless: a worker's state is in its folder. A message that is received again gets the same reply as
before. Errors are sent to the server as a sentence.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cbdsl import __version__, register, spec as specs
from cbdsl.arrays import Floats, Samples
from cbdsl.codecs.codec import CodecError
from cbdsl.codecs.envelope import apply_update
from cbdsl.data import download
from cbdsl.data.dataset import load_data
from cbdsl.data.partition import Split, alter_features, split
from cbdsl.errors import UserError
from cbdsl.flower import flower_messages
from cbdsl.flower.flower_messages import Context, FlowerMessage, make_flower_message
from cbdsl.network import wire
from cbdsl.network.device_worker import Assignment, DeviceWorker, parse_announcement
from cbdsl.network.samples import read_samples, write_samples
from cbdsl.network.wire import Announcement, ClaimMessage, Hello, Invitation, OrderMessage, WireError
from cbdsl.network.worker_state import WorkerState, WorkerStateFolder
from cbdsl.runs.build import byzantine_workers
from cbdsl.spec import Task
from cbdsl.util.files import private_folder, write_atomically
from cbdsl.util.formatting import single_line

if TYPE_CHECKING:
    from flwr.app import Message


def join(message: Message, context: Context) -> Message:
    """Prepare for the announced run and answer which worker this node is."""
    return _answer(message, context, _join)


def train(message: Message, context: Context) -> Message:
    """Carry out an order and claim a score; in rounds where all participants upload, send the model with it."""
    return _answer(message, context, _train)


def upload(message: Message, context: Context) -> Message:
    """Send the model behind a claim."""
    return _answer(message, context, _upload)


def finish(message: Message, context: Context) -> Message:
    """Delete the files of a run that is over."""
    return _answer(message, context, _finish)


def spec_for_nodes(spec: specs.Spec) -> str:
    """Return the spec by which nodes choose their samples, without files of the server's machine."""
    return replace(spec, init="", plugins=()).to_toml()


@dataclass(frozen=True)
class NodeConfig:
    """The configuration of a node."""

    worker: int
    partitions: int  # how many nodes there are; 0: unknown
    state: str  # the folder for the files of all runs; empty: in the user's cache folder
    data: str  # a file of its own samples; empty: a part of the spec's data set
    attack: str  # for tests: an attack that this node carries out

    @staticmethod
    def of(config: Mapping[str, Any]) -> NodeConfig:
        """Read a node's configuration."""
        worker = config.get("partition-id")
        if type(worker) is not int or not 0 <= worker < wire.MAX_WORKERS:
            given = "no partition-id" if worker is None else f"partition-id={worker!r}"
            raise UserError(
                f"This node has {given}, so it is not known which worker it is. Start its SuperNode with --node-config "
                "'partition-id=0 num-partitions=8', every node with a number of its own from 0 on.",
                code="missing-setting",
            )
        total = config.get("num-partitions", 0)
        return NodeConfig(
            worker,
            total if type(total) is int else 0,
            *(str(config.get(key, "")) for key in ("state-path", "data-path", "attack")),
        )


def _answer(
    message: Message, context: Context, handle: Callable[[FlowerMessage, NodeConfig], FlowerMessage]
) -> Message:
    try:
        content = handle(flower_messages.read(message.content), NodeConfig.of(context.node_config))
    except (UserError, WireError, OSError) as error:
        content = make_flower_message(refusal=single_line(str(error), 600))
    return flower_messages.make_reply(content, message)


def _join(message: FlowerMessage, node: NodeConfig) -> FlowerMessage:
    announcement, dealt = message.form(Announcement), message.text("dealt")
    shared = message.large.get("shared", b"")
    if len(shared) != announcement.shared_size or (shared and wire.digest_of(shared) != announcement.shared_digest):
        raise WireError("shared samples that are not those announced")
    assignment = parse_announcement(announcement)
    workers = assignment.spec.workers
    if node.worker >= workers:
        raise UserError(
            f"This node has partition-id={node.worker}, and the run has {workers} workers: 0 to {workers - 1}.",
            code="out-of-range",
        )
    folder = WorkerFolder(node.state, announcement.run, node.worker)
    token = folder.begin(announcement, dealt, shared)
    own = _read_own_samples(folder, node, dealt)
    DeviceWorker(assignment, node.worker, own, shared, 1, _attack_of(node, dealt))  # raises if it cannot be run here
    last = folder.state.last()
    hello = Hello(token, len(own), last.round, last.run, last.version, last.model_digest, __version__)
    return make_flower_message([hello], worker=node.worker, partitions=node.partitions)


def _train(message: FlowerMessage, node: NodeConfig) -> FlowerMessage:
    order = message.form(OrderMessage)
    folder = WorkerFolder(node.state, order.run, node.worker)
    announced = folder.read_announcement()
    if announced is None:
        return make_flower_message(stranger=True)
    announcement, dealt = announced
    assignment = parse_announcement(announcement)
    received = _receive_model(folder, assignment, message, order)
    if received is None:
        return make_flower_message(lacks=True)
    state = None if message.values.get("forget") else _usable_state(folder.load_state(assignment), order)
    if state is None or state.round < order.round:
        shared = folder.state.load_shared(announcement.shared_digest, announcement.shared_size) or b""
        if len(shared) != announcement.shared_size:
            return make_flower_message(stranger=True)
        own = _read_own_samples(folder, node, dealt)
        worker = DeviceWorker(assignment, node.worker, own, shared, 1, _attack_of(node, dealt))
        if state is not None:
            worker.restore(state)
        elif start := message.large.get("start"):
            worker.start(_weights_of(start, assignment.size))
        state = worker.carry_out(order, received)
        folder.save_upload(order.round, worker.upload())
        folder.state.save(state)
    model = folder.load_upload(order.round) if order.task == "average" else None
    return make_flower_message([_claim_of(state)], {} if model is None else {"upload": model})


def _upload(message: FlowerMessage, node: NodeConfig) -> FlowerMessage:
    invitation = message.form(Invitation)
    folder = WorkerFolder(node.state, invitation.run, node.worker)
    announced = folder.read_announcement()
    if announced is None:
        return make_flower_message(stranger=True)
    state, model = folder.load_state(parse_announcement(announced[0])), folder.load_upload(invitation.round)
    if state is None or model is None:
        return make_flower_message(silent=True)
    if state.round != invitation.round or wire.pack_claim(state.claim) != invitation.claim:
        return make_flower_message(silent=True)  # not its claim: it lost its state, or another node is this worker
    return make_flower_message([_claim_of(state)], {"upload": model})


def _finish(message: FlowerMessage, node: NodeConfig) -> FlowerMessage:
    WorkerFolder(node.state, message.form(Invitation).run, node.worker).delete()
    return make_flower_message()


def _claim_of(state: WorkerState) -> ClaimMessage:
    claim = state.claim
    return ClaimMessage(state.run, state.round, claim.score if claim else 0.0, claim.commitment if claim else b"")


def _usable_state(state: WorkerState | None, order: OrderMessage) -> WorkerState | None:
    """Return a state that fits an order: of an earlier round, or of the same round and model; else None."""
    if state is None or state.round < order.round:
        return state
    return state if (state.round, state.model_digest) == (order.round, order.model_digest) else None


def _receive_model(
    folder: WorkerFolder, assignment: Assignment, message: FlowerMessage, order: OrderMessage
) -> Floats | None:
    """Return the w^g of an order, (V D,): the saved one, updated by the message if need be; None if that fails."""
    digest, model = folder.load_model()
    if digest == order.model_digest:
        return model
    if "model" in message.large:
        model = _weights_of(message.large["model"], assignment.size * assignment.vectors)
    elif digest and message.values.get("base") == digest:
        try:
            for number in range(message.number("updates", 0)):
                model = apply_update(message.large[f"update-{number}"], model, assignment.codecs)
        except (CodecError, KeyError):
            return None
    if wire.digest_of(wire.weights_to_bytes(model)) != order.model_digest:
        return None
    folder.save_model(model)
    return model


def _weights_of(content: bytes, size: int) -> Floats:
    if len(content) != 4 * size:
        raise WireError(f"a model of {len(content):,} bytes; {4 * size:,} are expected")
    return wire.weights_from_bytes(content)


def _read_own_samples(folder: WorkerFolder, node: NodeConfig, dealt: str) -> Samples:
    """Return the samples of this worker: its owner's, or the part of the data set that the simulator would give it."""
    if not dealt:
        if not node.data:
            raise UserError(
                "This run is on the nodes' own samples (own-data), and this node has none. Start its SuperNode with "
                "--node-config 'data-path=\"/where/samples.npz\"', an .npz file with features (N, ...) and labels.",
                code="missing-setting",
            )
        return read_samples(Path(node.data).expanduser())
    if node.data:
        raise UserError(
            f"This node has samples of its own (data-path={node.data}), and this run deals samples of a data set. "
            "Run it with -c 'own-data=true', or start the SuperNode without data-path.",
            code="conflict",
        )
    if not folder.samples.is_file():
        train, parts, task = _split_data_set(dealt)
        write_samples(folder.samples, train.taken(parts.workers[node.worker]), task)
    return read_samples(folder.samples)


@lru_cache(maxsize=1)  # in a simulation one process is many nodes
def _split_data_set(text: str) -> tuple[Samples, Split, Task]:
    """Return the training set as workers see it, the samples of each worker, as in the simulator, and the task."""
    spec = specs.from_toml(text)
    partition = register.partition.make(spec.data.partition, spec.options.of(spec.data.partition))
    dataset = load_data(spec.data, spec.options)
    parts = split(
        dataset.train.labels, spec.data, spec.workers, spec.seed, dataset.clients, partition,
        task=dataset.task, features=dataset.train.features,
    )  # fmt: skip
    return alter_features(dataset.train, parts, partition, spec.seed), parts, dataset.task


def _attack_of(node: NodeConfig, dealt: str) -> str:
    """Return the attack that this node carries out, by its configuration or the spec; empty if it is honest."""
    if node.attack or not dealt:
        return node.attack
    spec = specs.from_toml(dealt)
    return spec.attack.name if node.worker in byzantine_workers(spec) else ""


class WorkerFolder:
    """The folder of one worker in one run: a device's `WorkerStateFolder`, and what stateless handlers need besides."""

    def __init__(self, state: str, run: bytes, worker: int) -> None:
        """state: see `NodeConfig.state`."""
        self._run, self._worker = run, worker
        self._run_folder = (Path(state).expanduser() if state else download.cache_folder() / "flower") / run.hex()
        self.path = self._run_folder / f"worker-{worker}"

    @property
    def samples(self) -> Path:
        """The file of the samples that were dealt to it."""
        return self.path / "samples.npz"

    @property
    def state(self) -> WorkerStateFolder:
        """Its particle and the shared samples; the folder is created if need be."""
        private_folder(self._run_folder)
        return WorkerStateFolder(self.path)

    def load_state(self, assignment: Assignment) -> WorkerState | None:
        """Return the saved state, or None if there is none that can be used."""
        codec, size = assignment.codecs.up, assignment.size
        return self.state.load(self._run, self._worker, size, codec.longest_pack(size) if codec.relative else 0)

    def begin(self, announcement: Announcement, dealt: str, shared: bytes) -> bytes:
        """Save what the server announces and return the token that identifies the worker on any node."""
        state = self.state
        if shared:
            state.save_shared(shared)
        self._write("dealt.toml", dealt.encode())
        self._write("announcement", wire.encode(announcement))
        token = self._read("token")
        if len(token) != wire.SESSION_BYTES:
            token = os.urandom(wire.SESSION_BYTES)
            self._write("token", token)
        return token

    def read_announcement(self) -> tuple[Announcement, str] | None:
        """Return the announcement and the spec for dealing samples (empty: it has its own), or None."""
        content = self._read("announcement")
        return (wire.decode(content, Announcement), self._read("dealt.toml").decode()) if content else None

    def load_model(self) -> tuple[bytes, Floats]:
        """Return the hash of the last w^g and its weights, (V D,); both are empty if there is none."""
        content = self._read("global")
        return (wire.digest_of(content), wire.weights_from_bytes(content)) if content else (b"", np.empty(0, "f4"))

    def save_model(self, model: Floats) -> None:
        """Save w^g."""
        self._write("global", wire.weights_to_bytes(model))

    def save_upload(self, round_number: int, upload: bytes | None) -> None:
        """Save what the worker uploads in a round if it is invited; None: it stays silent."""
        for old in self.path.glob("upload-*"):
            old.unlink(missing_ok=True)
        if upload is not None:
            self._write(f"upload-{round_number}", wire.digest_of(upload) + upload)

    def load_upload(self, round_number: int) -> bytes | None:
        """Return what the worker uploads in a round, or None, also if the file is damaged."""
        content = self._read(f"upload-{round_number}")
        digest, upload = content[: wire.DIGEST_BYTES], content[wire.DIGEST_BYTES :]
        return upload if digest and digest == wire.digest_of(upload) else None

    def delete(self) -> None:
        """Delete all files."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._run_folder.is_dir() and not any(self._run_folder.iterdir()):
            shutil.rmtree(self._run_folder, ignore_errors=True)

    def _read(self, name: str) -> bytes:
        path = self.path / name
        return path.read_bytes() if path.is_file() else b""

    def _write(self, name: str, content: bytes) -> None:
        write_atomically(self.path / name, content, private=True)
