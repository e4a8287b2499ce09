"""A node's side: carries orders out for one worker, answers one number, uploads when it is asked. For a ClientApp.

Stateless: all that a worker remembers is at its `desk`. A message that came before is answered from there as it was
then. What goes wrong is told to the server in a sentence, and nothing is made up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbdsl import __version__, register
from cbdsl import spec as specs
from cbdsl.arrays import Floats, Samples
from cbdsl.codecs.base import CodecError
from cbdsl.codecs.travel import updated
from cbdsl.data import Split, load, split
from cbdsl.data.partition import as_seen
from cbdsl.deploy import wire
from cbdsl.deploy.memory import Memory
from cbdsl.deploy.particle import Assignment, Particle, understand
from cbdsl.deploy.samples import read_samples, write_samples
from cbdsl.deploy.wire import Announcement, ClaimMessage, Hello, Invitation, OrderMessage, WireError
from cbdsl.errors import UserError
from cbdsl.flower import letters
from cbdsl.flower.desk import Desk
from cbdsl.flower.letters import Letter, letter
from cbdsl.runs.stage import byzantine_workers
from cbdsl.text import one_line

if TYPE_CHECKING:
    from flwr.app import Message

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


def join(message: Message, context: letters.Context) -> Message:
    """Hear what is run, get everything ready for it, and say which worker this is."""
    return _answer(message, context, _join)


def train(message: Message, context: letters.Context) -> Message:
    """Carry an order out and claim a score; the model itself goes with it only where everybody uploads."""
    return _answer(message, context, _train)


def upload(message: Message, context: letters.Context) -> Message:
    """Send the model behind a claim."""
    return _answer(message, context, _upload)


def finish(message: Message, context: letters.Context) -> Message:
    """The run is over."""
    return _answer(message, context, _finish)


def _answer(message: Message, context: letters.Context, act: Callable[[Letter, Node], Letter]) -> Message:
    try:
        said = act(letters.read(message.content), Node.of(context.node_config))
    except (UserError, WireError, OSError) as error:
        said = letter(refusal=one_line(str(error), 600))
    return letters.reply(said, message)


def _join(heard: Letter, node: Node) -> Letter:
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
    desk = Desk(node.state, announcement.run, node.worker)
    token = desk.take_up(announcement, dealt, shared)
    own = _own(desk, node, dealt)
    Particle(assignment, node.worker, own, shared, 1, _attack(node, dealt))  # whatever cannot be played is said now
    last = desk.keeper.last()
    hello = Hello(token, len(own), last.round, last.run, last.version, last.model_digest, __version__)
    return letter([hello], worker=node.worker, partitions=node.partitions)


def _train(heard: Letter, node: Node) -> Letter:
    order = heard.form(OrderMessage)
    desk = Desk(node.state, order.run, node.worker)
    found = desk.announced()
    if found is None:
        return letter(stranger=True)
    announcement, dealt = found
    assignment, keeper = understand(announcement), desk.keeper
    received = _received(desk, assignment, heard, order)
    if received is None:
        return letter(lacks=True)
    pack = assignment.codecs.up.longest(assignment.size) if assignment.codecs.up.relative else 0
    memory = None
    if not heard.values.get("forget"):
        memory = _known(keeper.load(order.run, node.worker, assignment.size, pack), order)
    if memory is None or memory.round < order.round:
        shared = keeper.load_shared(announcement.shared_digest, announcement.shared_size) or b""
        if len(shared) != announcement.shared_size:
            return letter(stranger=True)
        attack = _attack(node, dealt)
        particle = Particle(assignment, node.worker, _own(desk, node, dealt), shared, 1, attack)
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
    return letter([form], {} if model is None else {"upload": model})


def _known(memory: Memory | None, order: OrderMessage) -> Memory | None:
    """The state here, unless the server is back in time: a state that is ahead of it is of no use to anybody."""
    if memory is None or memory.round < order.round:
        return memory
    return memory if (memory.round, memory.model_digest) == (order.round, order.model_digest) else None


def _upload(heard: Letter, node: Node) -> Letter:
    invitation = heard.form(Invitation)
    desk = Desk(node.state, invitation.run, node.worker)
    found = desk.announced()
    if found is None:
        return letter(stranger=True)
    codec, size = understand(found[0]).codecs.up, found[0].size
    memory = desk.keeper.load(invitation.run, node.worker, size, codec.longest(size) if codec.relative else 0)
    model = desk.laid_out(invitation.round)
    if (
        memory is None
        or memory.round != invitation.round
        or model is None
        or wire.said(memory.claim) != invitation.claim
    ):
        return letter(silent=True)  # a claim that it has not made: its state was lost since, or it has a double
    claim = memory.claim
    form = ClaimMessage(invitation.run, memory.round, claim.score if claim else 0.0, claim.commitment if claim else b"")
    return letter([form], {"upload": model})


def _finish(heard: Letter, node: Node) -> Letter:
    Desk(node.state, heard.form(Invitation).run, node.worker).clear()
    return letter()


def _received(desk: Desk, assignment: Assignment, heard: Letter, order: OrderMessage) -> Floats | None:
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


def _own(desk: Desk, node: Node, dealt: str) -> Samples:
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
