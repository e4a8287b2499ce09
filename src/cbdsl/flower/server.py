"""The server side of the Flower app: runs a spec's rounds on the nodes of a Grid and writes a run's folder.

A checkpoint follows every round before the next order is sent, so an interrupted run continues when the app is started
again with the same `out`.
"""

from __future__ import annotations

import logging
import math
import shlex
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

from cbdsl.algorithm.messages import Claim, Order, Upload, WorkerId
from cbdsl.arrays import Floats
from cbdsl.errors import UserError
from cbdsl.flower import flower_messages
from cbdsl.flower.client import spec_for_nodes
from cbdsl.flower.flower_messages import Context, FlowerMessage, Grid, make_flower_message
from cbdsl.network import wire
from cbdsl.network.session import announce, load_run_id, open_run, pack_shared_sets, read_secret, save_secret
from cbdsl.network.timeouts import Deadlines, WorkerAvailability
from cbdsl.network.wire import Announcement, ClaimMessage, Hello, Invitation, OrderMessage, WireError
from cbdsl.presets import preset_or_file
from cbdsl.runs.build import Experiment
from cbdsl.runs.folder import free_folder
from cbdsl.runs.loop import OpenRun, finish_run, play_rounds
from cbdsl.runs.resolve import refuse_idle, resolve
from cbdsl.runs.result import Result
from cbdsl.spec import Spec, parse_setting
from cbdsl.util.formatting import single_line
from cbdsl.util.serialize import Bounds, from_plain, setting

if TYPE_CHECKING:
    from flwr.app import Message

_log = logging.getLogger("flwr.cbdsl")  # beside Flower's own lines

LEAST_SECONDS = 10.0  # shortest timeout of any node: nodes poll every 3 s
_NODE_POLL_SECONDS = 1.0  # between two queries for connected nodes
_REJOIN_SECONDS = 5.0  # before a node that claimed a taken worker number is asked again
_QUICKEST, _SLOWEST = 0.01, 0.2  # seconds between two looks for replies: a tenth of the wait so far, within these
_MOST_REPEATS = 2  # how often per round missing data is sent again to a worker

_Answer = TypeVar("_Answer")
_TakeReply = Callable[[WorkerId, int, FlowerMessage | None], None]
"""Takes a worker, the node that was asked, and its reply; None: a reply of no use."""


@dataclass(frozen=True)
class AppConfig:
    """The configuration of a run, by the keys of `[tool.flwr.app.config]`."""

    spec: str = setting("paper-iid", "a preset, or a spec's TOML file on the server's machine")
    rounds: Annotated[int, Bounds(0)] = setting(0, "0: as many as the spec says")
    settings: str = setting("", "any settings of a spec: 'workers=8 attack.byzantine=1'")
    runs: str = setting("runs", "where runs go")
    out: str = setting("", "the run's folder, there or elsewhere; empty: a new one")
    own_data: bool = setting(False, "use the nodes' own samples instead of parts of the spec's data set", "own-data")
    round_seconds: float = setting(600.0, "time for a round", "round-seconds")
    upload_seconds: float = setting(60.0, "time for an upload", "upload-seconds")
    join_seconds: float = setting(300.0, "time for nodes to join", "join-seconds")

    @staticmethod
    def of(config: Mapping[str, Any]) -> AppConfig:
        """Read a run's configuration; unknown keys are ignored: they may belong to other parts of the app."""
        try:
            return from_plain(AppConfig, config, defaults=True)
        except UserError as error:
            raise UserError(f"The run's configuration cannot be used: {error}", code=error.code) from error

    def resolve_spec(self) -> Spec:
        """Return the spec that the configuration describes."""
        try:
            words = shlex.split(self.settings)
        except ValueError as error:
            raise UserError(
                f"The run's configuration has settings={self.settings!r}, which cannot be read ({error}). Give "
                "settings with spaces between them, such as 'workers=8 attack.byzantine=1', and close every quote.",
                code="wrong-type",
            ) from error
        options = dict(parse_setting(text) for text in words)
        if self.rounds:
            options["rounds"] = self.rounds
        spec = resolve(preset_or_file(self.spec).with_settings(options))
        if spec.plugins:
            raise UserError(
                f"The spec names plugins ({', '.join(spec.plugins)}), which nodes do not have. Register such parts in "
                "client_app.py and server_app.py instead, and leave plugins out.",
                code="not-supported",
            )
        refuse_idle([spec], options)
        return spec

    def folder(self, spec: Spec) -> Path:
        """Return the folder of the run."""
        runs = Path(self.runs).expanduser()
        return (runs / self.out).resolve() if self.out else free_folder(f"flower-{spec.method}", runs.resolve())


def play(grid: Grid, context: Context) -> Result:
    """Run the spec that a context describes on the nodes of a grid."""
    try:
        return _play(grid, AppConfig.of(context.run_config))
    except UserError as error:
        _log.error("cbdsl: %s", error)
        raise


def _play(grid: Grid, config: AppConfig) -> Result:
    spec = config.resolve_spec()
    out = config.folder(spec)
    secret = read_secret(out) if config.own_data else 0
    experiment = Experiment.prepare(spec, deal=not config.own_data, secret=secret)
    if experiment.note:
        _log.warning("%s", experiment.note)
    opened = open_run(experiment, out)
    try:
        if secret:
            save_secret(out, secret)
        return _play_in(opened, experiment, grid, config)
    except NoWorkersError as error:
        raise UserError(
            f"{error} Completed rounds are kept: `flwr run` with the same configuration and "
            f"-c 'out=\"{out}\"' continues, to the same numbers.",
            code=error.code,
        ) from error
    finally:
        opened.close()


def _play_in(opened: OpenRun, experiment: Experiment, grid: Grid, config: AppConfig) -> Result:
    assert opened.path is not None
    spec, out = experiment.spec, opened.path
    shared = pack_shared_sets(experiment)
    swarm = FlowerSwarm(
        grid,
        spec.workers,
        announce(experiment, load_run_id(out / "flower.json"), shared),
        shared,
        "" if config.own_data else spec_for_nodes(spec),
        Deadlines(
            round_seconds=config.round_seconds,
            upload_seconds=config.upload_seconds,
            join_seconds=config.join_seconds,
        ),
        list(experiment.initial) if len(experiment.initial) > 1 else [],
    )
    state = opened.state_of(experiment)
    if state.round < spec.rounds:
        message = experiment.server.method.broadcast(state.global_best, state.memory)
        swarm.restore(message, state.version, state.updates, state.references)
        swarm.gather([worker for worker in range(spec.workers) if worker not in state.banned], state.round > 0)
        if config.own_data:
            combine = replace(experiment.server.combine, size_of=swarm.samples.__getitem__, stated=True)
            experiment = replace(experiment, server=replace(experiment.server, combine=combine))
        _log.info("cbdsl: %s, %d workers, %d rounds; %s", spec.method, spec.workers, spec.rounds, out)
    swarm.exclude(state.banned)
    for completed in play_rounds(experiment, state, swarm, opened=opened):
        swarm.exclude(completed.state.banned)
        line = completed.record
        _log.info(
            "round %d of %d: %s %.4f, %d bytes up, refuted %s, declined %s, silent %s, %.2f s",
            line.round,
            spec.rounds,
            line.metric,
            line.value,
            line.uplink_bytes,
            line.refuted,
            line.declined,
            line.silent,
            line.seconds,
        )
    swarm.finish()
    return finish_run(experiment, opened, swarm)


class NoWorkersError(UserError):
    """Raised if no worker answers; the run can be continued."""


class FlowerSwarm:
    """The workers of a run as nodes of a Flower federation. Implements `Swarm`."""

    def __init__(
        self,
        grid: Grid,
        workers: int,
        announcement: Announcement,
        shared: bytes = b"",
        dealt: str = "",
        deadlines: Deadlines | None = None,
        starts: Sequence[Floats] = (),
    ) -> None:
        """dealt: the spec by which nodes choose their samples; empty: they have their own. starts: (D,) each, where
        workers start from different models."""
        self._grid, self._run = grid, announcement.run
        self._deadlines, self._starts = deadlines or Deadlines(), starts
        self._nodes, self._pending = NodeTable(workers, self._deadlines), PendingMessages(grid)
        self._join_message = make_flower_message([announcement], {"shared": shared} if shared else {}, dealt=dealt)
        self._round, self._version, self._model = 0, 0, b""
        self._digests: dict[int, bytes] = {}  # of w^g, by version
        self._updates: tuple[bytes, ...] = ()
        self._relative = False  # whether uploads are differences to a version of w^g
        self._task = ""  # of the round
        self._claims: dict[WorkerId, Claim] = {}
        self._models: dict[WorkerId, bytes] = {}  # that came with a report
        self._banned: frozenset[WorkerId] = frozenset()

    @property
    def samples(self) -> Mapping[WorkerId, int]:
        """The number of samples that each worker states; workers that join later are added."""
        return self._nodes.samples

    def restore(self, model: Floats, version: int, updates: Sequence[bytes], references: Sequence[Floats]) -> None:
        """Set the global model before the next round; model: as it is sent, (V D,).

        references: where uploads are differences, the versions of w^g that they may be differences to, (D,) each.
        """
        self._relative = bool(references)
        first = version + 1 - len(references)
        self._digests |= {
            first + place: wire.digest_of(wire.weights_to_bytes(one)) for place, one in enumerate(references)
        }
        self._adopt(model, version, updates)

    def gather(self, wanted: Collection[WorkerId], has_begun: bool = False) -> None:
        """Wait until all of these workers have joined; raise UserError that says which are missing, and why.

        has_begun: the run has begun, so a node that stays away does not stop it: its worker is silent.
        """
        limit = time.monotonic() + self._deadlines.join_seconds
        self._wait(lambda: self._nodes.is_settled(wanted, has_begun), limit)
        self._nodes.require(wanted, has_begun)

    def exclude(self, banned: Collection[WorkerId]) -> None:
        """Send nothing more to these workers."""
        self._banned = frozenset(banned)

    def report(self, order: Order) -> Mapping[WorkerId, Claim]:
        """See `Swarm.report`. Waits for at least one answer; raises NoWorkersError if there is none."""
        if order.global_best is not None:
            self._adopt(order.global_best, order.version, order.updates)
        self._round, self._task, self._claims, self._models = order.round, order.task, {}, {}
        wire_order = OrderMessage(
            self._run,
            order.round,
            order.task,
            b"",
            order.inertia,
            order.learning_rate,
            self._version,
            self._digests[self._version],
        )
        limit = math.inf
        while order.participants:
            answers = self._ask_workers(
                order.participants,
                flower_messages.ORDER,
                lambda worker: self._order(wire_order, worker),
                self._read_claim,
            )
            self._claims = {worker: claim for worker, (claim, _) in answers.items()}
            self._models = {worker: model for worker, (_, model) in answers.items() if model is not None}
            usable = self._models if order.task == "average" else self._claims
            others = self._nodes.availability.online - self._banned - set(order.participants)
            if usable or others:  # if other nodes are online, the participants are silent, and nothing is wrong
                break
            limit = min(limit, time.monotonic() + self._deadlines.join_seconds)
            self._wait_for_nodes(order.participants, limit)
        return {} if order.task == "average" else dict(self._claims)

    def upload(self, workers: Sequence[WorkerId]) -> Mapping[WorkerId, Upload]:
        """See `Swarm.upload`."""
        if self._task == "average":  # all participants upload: the models came with the reports
            return {worker: self._models[worker] for worker in workers if worker in self._models}

        def invite(worker: WorkerId) -> FlowerMessage:
            return make_flower_message([Invitation(self._run, self._round, wire.pack_claim(self._claims[worker]))])

        invited = [worker for worker in workers if worker in self._claims]
        seconds = self._deadlines.upload_seconds
        return dict(self._ask_workers(invited, flower_messages.UPLOAD, invite, self._read_upload, seconds))

    def finish(self) -> None:
        """Send the end of the run to all nodes: they delete their files."""
        # The kind FINISH carries the meaning; an invitation has run and round.
        message = make_flower_message([Invitation(self._run, self._round, b"")])
        workers = list(self._nodes.by_worker)
        self._ask_workers(workers, flower_messages.FINISH, lambda _: message, lambda reply: reply, 2 * LEAST_SECONDS)

    # --- content of messages

    def _order(self, wire_order: OrderMessage, worker: WorkerId) -> FlowerMessage:
        """Return an order for one worker, with as much of w^g as it needs."""
        node, large, values = self._nodes.by_worker[worker], {}, {}
        behind = self._version - node.version
        if node.version < 0 or behind > len(self._updates):
            large["model"] = self._model
        elif behind:
            values = {"base": self._digests[node.version], "updates": behind}
            large = {f"update-{place}": one for place, one in enumerate(self._updates[-behind:])}
        if node.version < 0 and self._starts:
            large["start"] = wire.weights_to_bytes(self._starts[worker])
        return make_flower_message([wire_order], large, forget=node.forget, **values)

    def _adopt(self, model: Floats, version: int, updates: Sequence[bytes]) -> None:
        self._model, self._version, self._updates = wire.weights_to_bytes(model), version, tuple(updates)
        self._digests[version] = wire.digest_of(self._model)

    def _read_claim(self, reply: FlowerMessage) -> tuple[Claim, bytes | None]:
        """Return what a worker claims, and its model in rounds where all participants upload."""
        claim = self._check_round(reply)
        model = reply.large.get("upload") if self._task == "average" else None
        return Claim(claim.score, claim.commitment), model

    def _read_upload(self, reply: FlowerMessage) -> bytes:
        self._check_round(reply)
        if "upload" not in reply.large:
            raise WireError("no model")
        return reply.large["upload"]

    def _check_round(self, reply: FlowerMessage) -> ClaimMessage:
        claim = reply.form(ClaimMessage)
        if (claim.run, claim.round) != (self._run, self._round):
            raise WireError("for another round")
        return claim

    def _has_foreign_state(self, hello: Hello) -> bool:
        """Return whether a worker's uploads cannot be decoded: its state refers to a w^g that this run never had."""
        played = hello.run == self._run and hello.round > 0
        return self._relative and played and self._digests.get(hello.model_version) != hello.model_digest

    # --- sending and waiting

    def _ask_workers(
        self,
        workers: Sequence[WorkerId],
        kind: str,
        write: Callable[[WorkerId], FlowerMessage],
        read: Callable[[FlowerMessage], _Answer],
        seconds: float = 0.0,
    ) -> dict[WorkerId, _Answer]:
        """Send each worker a message and return their answers, by worker.

        read: returns the answer in a reply, or raises WireError. seconds: how long to wait; 0: as long as a round may.
        """
        # Replies to earlier messages are dropped. A node that was asked to join may still do so unless it left; then it
        # is asked again when it comes back, so that nodes that come and go do not accumulate messages.
        self._pending.keep(lambda one: one.worker is None and self._nodes.is_connected(one.node))
        most = seconds or self._deadlines.round_seconds

        def request(worker: WorkerId, node: int) -> FlowerRequest:
            return FlowerRequest(node, worker, write(worker), kind, self._round, most)

        requests = _Requests(workers, self._nodes, self._round, request, read, seconds)
        self._wait(lambda: requests.is_over(self._pending), time.monotonic() + most, requests.take)
        if kind == flower_messages.ORDER:
            for worker, node in requests.answered_by.items():
                if self._nodes.is_at(worker, node):
                    self._nodes.note_model(worker, self._version)
            requests.note_attendance()
        return requests.answers

    def _wait(self, is_enough: Callable[[], bool], limit: float, take: _TakeReply | None = None) -> None:
        """Poll replies and nodes until `is_enough()` or the limit; if it is not enough at the start, at least once."""
        started = time.monotonic()
        while not is_enough():
            self._ask_to_join(self._nodes.poll_nodes(self._grid.get_node_ids))
            replies = self._pending.replies()
            for request, reply in replies:
                self._take(reply, request, take)
            now = time.monotonic()
            if now > limit:
                return
            if not replies:
                time.sleep(min(_SLOWEST, max(_QUICKEST, (now - started) / 10)))

    def _ask_to_join(self, nodes: Sequence[int]) -> None:
        message, kind, seconds = (
            self._join_message,
            flower_messages.JOIN,
            max(self._deadlines.join_seconds, LEAST_SECONDS),
        )
        self._pending.send([FlowerRequest(node, None, message, kind, self._round, seconds) for node in nodes])

    def _wait_for_nodes(self, workers: Collection[WorkerId], limit: float) -> None:
        """Wait for nodes after a round without answers; raise NoWorkersError at the limit."""
        _log.warning("round %d: no worker answered; still waiting", self._round)
        again = time.monotonic() + LEAST_SECONDS
        online = self._nodes.availability.online
        self._wait(lambda: time.monotonic() > again and not online.isdisjoint(workers), limit)
        if time.monotonic() > limit:
            raise NoWorkersError(
                f"Round {self._round}: none of {len(workers)} workers answered, nor did waiting for nodes for another "
                f"{self._deadlines.join_seconds:g} seconds (join-seconds) help. Are the SuperNodes running?",
                code="connection-failed",
            )

    def _take(self, reply: Message | None, request: FlowerRequest, take: _TakeReply | None) -> None:
        message, refusal = FlowerMessage(), "its reply cannot be read"
        if reply is not None and reply.has_error():
            refusal = str(reply.error.reason)
        elif reply is not None:
            message = flower_messages.read(reply.content)
            refusal = message.text("refusal")
        if refusal:
            _log.warning("node %d cannot continue: %s", request.node, single_line(refusal, 600))
        if request.worker is not None:
            if take is not None:
                take(request.worker, request.node, None if refusal else message)
        elif refusal:
            self._nodes.refuse(request.node, refusal)
        else:
            self._nodes.admit(request.node, message, self._has_foreign_state)


class _Requests(Generic[_Answer]):
    """One message to each of several workers, and their answers so far."""

    def __init__(
        self,
        workers: Sequence[WorkerId],
        nodes: NodeTable,
        round_number: int,
        request: Callable[[WorkerId, int], FlowerRequest],
        read: Callable[[FlowerMessage], _Answer],
        seconds: float,
    ) -> None:
        """request: builds the message to a worker at a node. read, seconds: see `FlowerSwarm._ask_workers`."""
        self._workers, self._nodes, self._round = workers, nodes, round_number
        self._request, self._read_answer, self._seconds = request, read, seconds
        self._started, self._looked = time.monotonic(), False
        self.answers: dict[WorkerId, _Answer] = {}
        self.answered_by: dict[WorkerId, int] = {}  # the node
        self._times: dict[WorkerId, float] = {}  # seconds after which each answered
        self._asked: dict[WorkerId, int] = {}  # the node that was asked
        self._repeats: Counter[WorkerId] = Counter()  # how often a worker lacked something
        self._given_up: set[WorkerId] = set()
        self._any_punctual = any(nodes.availability.is_waited_for(worker, round_number) for worker in workers)

    def is_over(self, pending: PendingMessages) -> bool:
        """Send what is to be sent, and return whether no more answers are waited for."""
        requests = []
        for worker in self._missing():
            known = self._nodes.by_worker.get(worker)
            # At first, and after the worker moved to another node.
            if known is not None and self._asked.get(worker) != known.node:
                self._asked[worker] = known.node
                self._given_up.discard(worker)
                requests.append(self._request(worker, known.node))
        pending.send(requests)
        availability, missing = self._nodes.availability, self._missing()
        waiting = [worker for worker in missing if worker not in self._given_up and availability.is_here(worker)]
        if self._any_punctual:
            waiting = [worker for worker in waiting if availability.is_waited_for(worker, self._round)]
        _, limit = availability.expect(self._round, list(self._times.values()), missing)
        is_late = self._looked and time.monotonic() - self._started > (self._seconds or max(LEAST_SECONDS, limit))
        self._looked = True  # time is up only after a first look for replies
        return is_late or not waiting

    def take(self, worker: WorkerId, node: int, reply: FlowerMessage | None) -> None:
        """Take the reply of a node; None: one of no use."""
        if worker in self.answers:  # from another node
            return
        lacks_model, lacks_files = (bool(reply and reply.values.get(key)) for key in ("lacks", "stranger"))
        answer = None if reply is None or lacks_model or lacks_files else self._read(worker, reply)
        if answer is not None:
            self.answers[worker], self.answered_by[worker] = answer, node
            self._times[worker] = time.monotonic() - self._started
        elif self._nodes.is_at(worker, node):  # a failure at a node that the worker has left does not matter
            self._repeats[worker] += lacks_model or lacks_files
            if self._repeats[worker] > _MOST_REPEATS or not (lacks_model or lacks_files):
                self._given_up.add(worker)
                return
            if lacks_files:
                self._nodes.remove(worker)
            else:
                self._nodes.note_model(worker, -1)
            self._asked.pop(worker, None)

    def note_attendance(self) -> None:
        """Record which workers answered in time; if none did, none is late."""
        if not self.answers:
            return
        availability, missing = self._nodes.availability, self._missing()
        for worker in missing:
            if availability.is_waited_for(worker, self._round):
                _log.warning("round %d closes without worker %d", self._round, worker)
        availability.close_round(self._round, self._times, missing, time.monotonic() - self._started, in_time=False)

    def _missing(self) -> list[WorkerId]:
        return [worker for worker in self._workers if worker not in self.answers]

    def _read(self, worker: WorkerId, reply: FlowerMessage) -> _Answer | None:
        try:
            return self._read_answer(reply)
        except WireError as error:
            _log.warning("invalid reply of worker %d ignored: %s", worker, error)
            return None


@dataclass(frozen=True, eq=False)
class WorkerNode:
    """The node that runs a worker."""

    node: int
    token: bytes  # from the worker's files: it identifies the worker on any node
    version: int = -1  # of the w^g that it has; -1: unknown
    forget: bool = False  # its state is not of this run's history


class NodeTable:
    """The nodes of a federation, and which worker each of them is."""

    def __init__(self, workers: int, deadlines: Deadlines) -> None:
        """workers: how many there can be."""
        self.by_worker: dict[WorkerId, WorkerNode] = {}
        self.samples: dict[WorkerId, int] = {}  # that each states, also of workers that left
        own = replace(deadlines, grace_seconds=LEAST_SECONDS, least_seconds=0.0)
        self.availability: WorkerAvailability[WorkerId] = WorkerAvailability(own)
        self._workers = workers
        self._totals: set[int] = set()  # number of nodes as each node states it
        self._connected: set[int] = set()  # nodes, all of which were asked to join
        self._refusals: dict[int, str] = {}
        self._later: dict[int, float] = {}  # nodes that claimed to be another's worker: when they are asked again
        self._last_new, self._poll_at = time.monotonic(), 0.0

    def is_connected(self, node: int) -> bool:
        """Return whether a node is connected and was asked to join."""
        return node in self._connected

    def is_at(self, worker: WorkerId, node: int) -> bool:
        """Return whether a node is this worker now."""
        return worker in self.by_worker and self.by_worker[worker].node == node

    def poll_nodes(self, list_nodes: Callable[[], Iterable[int]]) -> list[int]:
        """List the connected nodes, unless that was a moment ago, and return those that are to be asked to join."""
        now = time.monotonic()
        if now < self._poll_at:
            return []
        self._poll_at = now + _NODE_POLL_SECONDS
        connected = set(list_nodes())
        new = connected - self._connected
        again = {node for node, at in self._later.items() if node in connected and at <= now}
        self._last_new = now if new else self._last_new
        self._connected = connected
        self._refusals = {node: reason for node, reason in self._refusals.items() if node in connected}
        self._later = {node: at for node, at in self._later.items() if node in connected and at > now}
        for worker, known in self.by_worker.items():
            if known.node in connected:
                self.availability.connect(worker)
            else:
                self.availability.disconnect(worker)
        return sorted(new | again)

    def refuse(self, node: int, reason: str) -> None:
        """Note that a node cannot take part."""
        self._refusals[node] = single_line(reason, 600)

    def admit(self, node: int, reply: FlowerMessage, has_foreign_state: Callable[[Hello], bool]) -> None:
        """Note a node as the worker that it states, unless another connected node is that worker."""
        try:
            hello = reply.form(Hello)
        except WireError as error:
            self.refuse(node, f"invalid join message ({error})")
            return
        worker = reply.number("worker", -1)
        if not 0 <= worker < self._workers:
            self.refuse(node, f"it states that it is worker number {worker}; numbers are 0 to {self._workers - 1}")
            return
        if any(known.node == node and other != worker for other, known in self.by_worker.items()):
            _log.warning("node %d states that it is worker %d, too; a node is one worker", node, worker)
            return
        before = self.by_worker.get(worker)
        is_taken = before is not None and before.node != node and before.node in self._connected
        if before is not None and is_taken and before.token != hello.session:
            _log.warning("node %d states that it is worker %d, which is another node; ignored", node, worker)
            self._later[node] = time.monotonic() + _REJOIN_SECONDS  # the other node may leave
            return
        self._totals.add(reply.number("partitions", 0))
        self.by_worker[worker] = WorkerNode(node, hello.session, forget=has_foreign_state(hello))
        self.samples[worker] = hello.samples
        self.availability.connect(worker)
        self.availability.note_answer(worker)

    def note_model(self, worker: WorkerId, version: int) -> None:
        """Note which version of w^g a worker has; -1: none that it can use."""
        known = self.by_worker[worker]
        self.by_worker[worker] = replace(known, version=version, forget=known.forget and version < 0)

    def remove(self, worker: WorkerId) -> None:
        """Remove a worker that has no files of this run; its node is asked to join again."""
        self._connected.discard(self.by_worker.pop(worker).node)
        self.availability.disconnect(worker)
        self._poll_at = 0.0

    def is_settled(self, wanted: Collection[WorkerId], has_begun: bool = False) -> bool:
        """Return whether all of these workers have joined, or the missing ones will not.

        has_begun: the run has begun; a node that cannot take part is then not a reason to stop waiting for the others.
        """
        if set(wanted) <= set(self.by_worker):
            return True
        answered = len(self.by_worker) + len(self._refusals) + len(self._later)
        if time.monotonic() - self._last_new < LEAST_SECONDS or answered < len(self._connected):
            return False
        return (bool(self._refusals) and not has_begun) or self._is_federation_complete()

    def _is_federation_complete(self) -> bool:
        """Return whether all nodes, by their own statement, have joined."""
        return self._totals == {len(self.by_worker)}

    def require(self, wanted: Collection[WorkerId], has_begun: bool = False) -> None:
        """Raise UserError if a worker is missing; in a run that has begun, if all are."""
        missing = sorted(set(wanted) - set(self.by_worker))
        if not missing:
            return
        if has_begun and len(missing) < len(wanted) and not self._is_federation_complete():
            _log.warning("cbdsl: the run continues without workers %s, which may still join", missing[:10])
            return
        if self._refusals:
            node, reason = next(iter(self._refusals.items()))
            raise UserError(f"Node {node} cannot take part: {reason}", code="not-allowed")
        many = ", ".join(map(str, missing[:10])) + (" ..." if len(missing) > 10 else "")
        total = len(self._connected)
        raise UserError(
            f"The run has {len(wanted)} workers and the federation {total} node{'s' * (total != 1)}; missing: {many}. "
            f"Every worker is a node: give --federation-config 'num-supernodes={max(wanted) + 1}' in a simulation or "
            "start more SuperNodes, or ask for fewer workers: -c 'settings=\"workers=...\"'.",
            code="connection-failed",
        )


@dataclass(frozen=True, eq=False)
class FlowerRequest:
    """A message to a node that expects a reply."""

    node: int
    worker: WorkerId | None  # None: the node is asked to join
    message: FlowerMessage
    kind: str
    round: int
    seconds: float  # after which it expires


class PendingMessages:
    """The messages that have no reply yet."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._open: dict[str, FlowerRequest] = {}  # by the message's id
        self._one_by_one = False  # whether replies are fetched one by one

    def send(self, requests: Sequence[FlowerRequest]) -> None:
        """Send messages."""
        if requests:
            sent = [
                flower_messages.make_request(one.message, one.node, one.kind, one.round, one.seconds)
                for one in requests
            ]
            self._grid.push_messages(sent)  # sets an id for each, also if it could not be sent
            self._open |= {message.metadata.message_id: one for message, one in zip(sent, requests, strict=True)}

    def keep(self, is_wanted: Callable[[FlowerRequest], bool]) -> None:
        """Drop all requests but these; replies to the others are ignored."""
        self._open = {key: one for key, one in self._open.items() if is_wanted(one)}

    def replies(self) -> list[tuple[FlowerRequest, Message | None]]:
        """Return the replies that have come; None: one that cannot be read."""
        found: list[tuple[FlowerRequest, Message | None]] = []
        for key, reply in self._pull():
            request = self._open.get(key)
            if request is None:
                continue  # a second reply
            if reply is not None and not reply.has_error() and reply.metadata.src_node_id != request.node:
                _log.warning("reply of another node instead of node %d ignored", request.node)
                continue
            del self._open[key]
            found.append((request, reply))
        return found

    def _pull(self) -> list[tuple[str, Message | None]]:
        """Return replies by the id of the message that they answer.

        If one reply cannot be read, Flower discards all fetched with it. All messages are then sent again, which nodes
        answer as before, and from then on each reply is fetched by itself.
        """
        if not self._open:
            return []
        if not self._one_by_one:
            try:
                replies = list(self._grid.pull_messages(list(self._open)))
                return [(reply.metadata.reply_to_message_id, reply) for reply in replies]
            except Exception as error:  # Flower raises many kinds
                _log.warning("a reply cannot be read (%s); all messages are sent again", single_line(repr(error)))
            self._one_by_one, requests, self._open = True, list(self._open.values()), {}
            self.send(requests)
        return [(key, reply) for key, request in self._open.items() for reply in self._pull_one(key, request)]

    def _pull_one(self, key: str, request: FlowerRequest) -> Sequence[Message | None]:
        try:
            return list(self._grid.pull_messages([key]))
        except Exception as error:  # see above
            _log.warning("the reply of node %d cannot be read (%s)", request.node, single_line(repr(error)))
            return [None]
