"""A node's side: carries orders out for one worker, answers one number, uploads when it is asked. For a ClientApp.

Stateless: all that a worker remembers is at its `desk`. A message that came before is answered from there as it was
then. What goes wrong is told to the server in a sentence, and nothing is made up.
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

from cbdsl import __version__, register
from cbdsl import spec as specs
from cbdsl.arrays import Floats, Samples
from cbdsl.codecs.base import CodecError
from cbdsl.codecs.envelope import updated
from cbdsl.data import download
from cbdsl.data.dataset import load
from cbdsl.data.partition import Split, as_seen, split
from cbdsl.errors import UserError
from cbdsl.flower import messages
from cbdsl.flower.messages import FlowerMessage, make_flower_message
from cbdsl.network import wire
from cbdsl.network.samples import read_samples, write_samples
from cbdsl.network.wire import Announcement, ClaimMessage, Hello, Invitation, OrderMessage, WireError
from cbdsl.network.worker_state import Assignment, DeviceWorker, WorkerState, WorkerStateFolder, understand
from cbdsl.runs.build import byzantine_workers
from cbdsl.util.files import private_folder, write_atomically
from cbdsl.util.formatting import single_line

if TYPE_CHECKING:
    from flwr.app import Message


class WorkerFiles:
    """The folder of one worker in one run."""

    def __init__(self, state: str, run: bytes, worker: int) -> None:
        """state: the folder that the node's owner gives to all runs; empty: in the user's cache folder."""
        self._run = (Path(state).expanduser() if state else download.cache_folder() / "flower") / run.hex()
        self.folder = self._run / f"worker-{worker}"

    @property
    def samples(self) -> Path:
        """The samples that were dealt to it."""
        return self.folder / "samples.npz"

    @property
    def keeper(self) -> WorkerStateFolder:
        """Its particle and the shared samples; the folder is made if need be."""
        private_folder(self._run)
        return WorkerStateFolder(self.folder)

    def take_up(self, announcement: Announcement, dealt: str, shared: bytes) -> bytes:
        """Keep what the server announces; gives the worker's token, by which it is known if its node is another one."""
        keeper = self.keeper
        if shared:
            keeper.save_shared(shared)
        write_atomically(self.folder / "dealt.toml", dealt.encode(), private=True)
        write_atomically(self.folder / "announcement", wire.encode(announcement), private=True)
        token = self._read("token")
        if len(token) != wire.SESSION_BYTES:
            token = os.urandom(wire.SESSION_BYTES)
            write_atomically(self.folder / "token", token, private=True)
        return token

    def announced(self) -> tuple[Announcement, str] | None:
        """What was announced, and the spec by which samples are dealt (empty: it has its own); none: nothing was."""
        content = self._read("announcement")
        return (wire.decode(content, Announcement), self._read("dealt.toml").decode()) if content else None

    def held(self) -> tuple[bytes, Floats]:
        """w^g as it came last, (V D,), and its hash; empty if there is none, or none that can be used."""
        content = self._read("global")
        return (wire.digest_of(content), wire.weights_from_bytes(content)) if content else (b"", np.empty(0, "f4"))

    def hold(self, model: Floats) -> None:
        """Keep w^g."""
        write_atomically(self.folder / "global", wire.weights_to_bytes(model), private=True)

    def lay_out(self, round_number: int, upload: bytes | None) -> None:
        """Keep what it uploads in a round if it is asked to; none: it stays silent."""
        for old in self.folder.glob("upload-*"):
            old.unlink(missing_ok=True)
        if upload is not None:
            content = wire.digest_of(upload) + upload
            write_atomically(self.folder / f"upload-{round_number}", content, private=True)

    def laid_out(self, round_number: int) -> bytes | None:
        """What it uploads in a round; none also if the file is damaged: a half of a model is not what was claimed."""
        content = self._read(f"upload-{round_number}")
        digest, upload = content[: wire.DIGEST_BYTES], content[wire.DIGEST_BYTES :]
        return upload if digest and digest == wire.digest_of(upload) else None

    def clear(self) -> None:
        """The run is over: keep nothing."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._run.is_dir() and not any(self._run.iterdir()):
            shutil.rmtree(self._run, ignore_errors=True)

    def _read(self, name: str) -> bytes:
        path = self.folder / name
        return path.read_bytes() if path.is_file() else b""


MOST_NODES = wire.MAX_WORKERS


@dataclass(frozen=True)
class Node:
    """Who this node is, by its own configuration."""

    worker: int
    partitions: int  # how many nodes there are, as far as it was told; 0: it was not
    state: str
    data: str  # a file of its own samples; empty: it is dealt some
    attack: str  # for tests: what to do instead of the truth

    @staticmethod
    def of(config: Mapping[str, Any]) -> Node:
        """Read a node's configuration."""
        worker = config.get("partition-id")
        if type(worker) is not int or not 0 <= worker < MOST_NODES:
            given = "no partition-id" if worker is None else f"partition-id={worker!r}"
            raise UserError(
                f"This node has {given}, so nobody knows which worker it is. Start its SuperNode with --node-config "
                "'partition-id=0 num-partitions=8', every node with a number of its own from 0 on."
            )
        total = config.get("num-partitions", 0)
        return Node(
            worker,
            total if type(total) is int else 0,
            *(str(config.get(key, "")) for key in ("state-path", "data-path", "attack")),
        )


def join(message: Message, context: messages.Context) -> Message:
    """Hear what is run, get everything ready for it, and say which worker this is."""
    return _answer(message, context, _join)


def train(message: Message, context: messages.Context) -> Message:
    """Carry an order out and claim a score; the model itself goes with it only where everybody uploads."""
    return _answer(message, context, _train)


def upload(message: Message, context: messages.Context) -> Message:
    """Send the model behind a claim."""
    return _answer(message, context, _upload)


def finish(message: Message, context: messages.Context) -> Message:
    """The run is over."""
    return _answer(message, context, _finish)


def _answer(
    message: Message, context: messages.Context, act: Callable[[FlowerMessage, Node], FlowerMessage]
) -> Message:
    try:
        said = act(messages.read(message.content), Node.of(context.node_config))
    except (UserError, WireError, OSError) as error:
        said = make_flower_message(refusal=single_line(str(error), 600))
    return messages.reply(said, message)


def _join(heard: FlowerMessage, node: Node) -> FlowerMessage:
    announcement, dealt = heard.form(Announcement), heard.text("dealt")
    shared = heard.large.get("shared", b"")
    if len(shared) != announcement.shared_size or (shared and wire.digest_of(shared) != announcement.shared_digest):
        raise WireError("shared samples that are not those announced")
    assignment = understand(announcement)
    workers = assignment.spec.workers
    if node.worker >= workers:
        raise UserError(
            f"This node has partition-id={node.worker}, and the run has {workers} workers: 0 to {workers - 1}."
        )
    desk = WorkerFiles(node.state, announcement.run, node.worker)
    token = desk.take_up(announcement, dealt, shared)
    own = _own(desk, node, dealt)
    DeviceWorker(assignment, node.worker, own, shared, 1, _attack(node, dealt))  # whatever cannot be played is said now
    last = desk.keeper.last()
    hello = Hello(token, len(own), last.round, last.run, last.version, last.model_digest, __version__)
    return make_flower_message([hello], worker=node.worker, partitions=node.partitions)


def _train(heard: FlowerMessage, node: Node) -> FlowerMessage:
    order = heard.form(OrderMessage)
    desk = WorkerFiles(node.state, order.run, node.worker)
    found = desk.announced()
    if found is None:
        return make_flower_message(stranger=True)
    announcement, dealt = found
    assignment, keeper = understand(announcement), desk.keeper
    received = _received(desk, assignment, heard, order)
    if received is None:
        return make_flower_message(lacks=True)
    pack = assignment.codecs.up.longest(assignment.size) if assignment.codecs.up.relative else 0
    memory = None
    if not heard.values.get("forget"):
        memory = _known(keeper.load(order.run, node.worker, assignment.size, pack), order)
    if memory is None or memory.round < order.round:
        shared = keeper.load_shared(announcement.shared_digest, announcement.shared_size) or b""
        if len(shared) != announcement.shared_size:
            return make_flower_message(stranger=True)
        attack = _attack(node, dealt)
        particle = DeviceWorker(assignment, node.worker, _own(desk, node, dealt), shared, 1, attack)
        if memory is not None:
            particle.restore(memory)
        elif start := heard.large.get("start"):
            particle.start(_numbers(start, assignment.size))
        memory = particle.carry_out(order, received)
        desk.lay_out(order.round, particle.upload())
        keeper.save(memory)
    claim = memory.claim
    form = ClaimMessage(order.run, order.round, claim.score if claim else 0.0, claim.commitment if claim else b"")
    model = desk.laid_out(order.round) if order.task == "average" else None
    return make_flower_message([form], {} if model is None else {"upload": model})


def _known(memory: WorkerState | None, order: OrderMessage) -> WorkerState | None:
    """The state here, unless the server is back in time: a state that is ahead of it is of no use to anybody."""
    if memory is None or memory.round < order.round:
        return memory
    return memory if (memory.round, memory.model_digest) == (order.round, order.model_digest) else None


def _upload(heard: FlowerMessage, node: Node) -> FlowerMessage:
    invitation = heard.form(Invitation)
    desk = WorkerFiles(node.state, invitation.run, node.worker)
    found = desk.announced()
    if found is None:
        return make_flower_message(stranger=True)
    codec, size = understand(found[0]).codecs.up, found[0].size
    memory = desk.keeper.load(invitation.run, node.worker, size, codec.longest(size) if codec.relative else 0)
    model = desk.laid_out(invitation.round)
    if (
        memory is None
        or memory.round != invitation.round
        or model is None
        or wire.pack_claim(memory.claim) != invitation.claim
    ):
        return make_flower_message(
            silent=True
        )  # a claim that it has not made: its state was lost since, or it has a double
    claim = memory.claim
    form = ClaimMessage(invitation.run, memory.round, claim.score if claim else 0.0, claim.commitment if claim else b"")
    return make_flower_message([form], {"upload": model})


def _finish(heard: FlowerMessage, node: Node) -> FlowerMessage:
    WorkerFiles(node.state, heard.form(Invitation).run, node.worker).clear()
    return make_flower_message()


def _received(desk: WorkerFiles, assignment: Assignment, heard: FlowerMessage, order: OrderMessage) -> Floats | None:
    """The w^g that an order is about, (V D,): the one here, or what the letter makes of it; none: it is lacking."""
    digest, model = desk.held()
    if digest == order.model_digest:
        return model
    if "model" in heard.large:
        model = _numbers(heard.large["model"], assignment.size * assignment.vectors)
    elif digest and heard.values.get("base") == digest:
        try:
            for number in range(heard.number("updates", 0)):
                model = updated(heard.large[f"update-{number}"], model, assignment.codecs)
        except (CodecError, KeyError):
            return None
    if wire.digest_of(wire.weights_to_bytes(model)) != order.model_digest:
        return None
    desk.hold(model)
    return model


def _numbers(content: bytes, size: int) -> Floats:
    if len(content) != 4 * size:
        raise WireError(f"a model of {len(content):,} bytes; {4 * size:,} are expected")
    return wire.weights_from_bytes(content)


def _own(desk: WorkerFiles, node: Node, dealt: str) -> Samples:
    """The samples of this worker: its owner's, or those that the simulator would deal to it."""
    if not dealt:
        if not node.data:
            raise UserError(
                "This run is on the nodes' own samples (own-data), and this node has none. Start its SuperNode with "
                "--node-config 'data-path=\"/where/samples.npz\"', an .npz file with features (N, ...) and labels (N,)."
            )
        return read_samples(Path(node.data).expanduser())
    if node.data:
        raise UserError(
            f"This node has samples of its own (data-path={node.data}), and this run deals samples of a data set. "
            "Run it with -c 'own-data=true', or start the SuperNode without data-path."
        )
    if not desk.samples.is_file():
        train, parts = _dealt(dealt)
        write_samples(desk.samples, train.taken(parts.workers[node.worker]))
    return read_samples(desk.samples)


@lru_cache(maxsize=1)  # in a simulation one process is many nodes
def _dealt(text: str) -> tuple[Samples, Split]:
    """The training set as workers see it, and who holds what: as the simulator deals."""
    spec = specs.from_toml(text)
    partition = register.partition.make(spec.data.partition, spec.options.of(spec.data.partition))
    dataset = load(spec.data.source, spec.options.of(spec.data.source))
    parts = split(dataset.train.labels, spec.data, spec.workers, spec.seed, dataset.clients, partition)
    return as_seen(dataset.train, parts, partition, spec.seed), parts


def _attack(node: Node, dealt: str) -> str:
    """What this worker does instead of the truth: its owner's word, or where samples are dealt the spec's."""
    if node.attack or not dealt:
        return node.attack
    spec = specs.from_toml(dealt)
    return spec.attack.name if node.worker in byzantine_workers(spec) else ""


def dealt_spec(spec: specs.Spec) -> str:
    """What nodes need to deal samples to themselves: the spec without files of the server's machine."""
    return replace(spec, init="", plugins=()).to_toml()
