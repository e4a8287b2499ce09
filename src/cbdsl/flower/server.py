"""The server's side: plays a spec's rounds over the nodes of a Grid, and leaves a run's folder. For a ServerApp.

The folder is like any other's. A checkpoint follows every round before the next order is given, so a run that was
stopped goes on when the app is started again with the same `out`.
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
from typing import TYPE_CHECKING, Any, TypeVar

from cbdsl.algorithm.messages import Claim, Order, Upload, WorkerId
from cbdsl.algorithm.round import averaging
from cbdsl.arrays import Floats
from cbdsl.errors import UserError
from cbdsl.flower import messages
from cbdsl.flower.client import dealt_spec
from cbdsl.flower.messages import Context, FlowerMessage, Grid, make_flower_message
from cbdsl.network import wire
from cbdsl.network.session import announce, load_run_id, open_run, pack_shared_sets, read_secret, save_secret
from cbdsl.network.timeouts import Deadlines, Punctuality, everybodys_limit
from cbdsl.network.wire import Announcement, ClaimMessage, Hello, Invitation, OrderMessage, WireError
from cbdsl.presets import preset_or_file
from cbdsl.runs.build import Experiment
from cbdsl.runs.folder import free_folder
from cbdsl.runs.loop import OpenRun, finish_run, play_rounds
from cbdsl.runs.resolve import refuse_idle, resolve
from cbdsl.runs.result import Result
from cbdsl.spec import Spec, parse_setting
from cbdsl.util.formatting import single_line

if TYPE_CHECKING:
    from flwr.app import Message
if TYPE_CHECKING:
    from flwr.app import Message

_log = logging.getLogger("flwr.cbdsl")  # beside Flower's own lines

LEAST = 10.0  # seconds that everybody has for anything, however quick others are: nodes look for mail every 3 s
_LOOK_AROUND = 1.0  # seconds between two looks for nodes that came or went
_LOOK_AGAIN = 5.0  # the same after somebody said that it is who it is not


@dataclass(frozen=True, eq=False)
class Member:
    """The node that is a worker now."""

    node: int
    token: bytes  # what the worker keeps in its files: whoever shows it is that worker, on whatever node
    version: int = -1  # of the w^g that it has; -1: nobody knows
    forget: bool = False  # its state is of a history that is not this run's


class Members:
    """The nodes of a federation, and the workers they are."""

    def __init__(self, workers: int) -> None:
        """workers: how many there can be."""
        self.of: dict[WorkerId, Member] = {}
        self.samples: dict[WorkerId, int] = {}  # that each says it holds, also of those who left
        self._workers, self._totals = workers, set[int]()
        self._met: set[int] = set()  # nodes that were asked to join
        self._refusals: dict[int, str] = {}
        self._later: dict[int, float] = {}  # nodes that said they are who they are not: when they are asked again
        self._met_last, self._look_at = time.monotonic(), 0.0

    def is_here(self, worker: WorkerId) -> bool:
        """Whether the worker's node is there, as far as Flower knows."""
        return worker in self.of and self.of[worker].node in self._met

    def is_met(self, node: int) -> bool:
        """Whether a node is there, as far as Flower knows, and was asked to join."""
        return node in self._met

    def newcomers(self, look: Callable[[], Iterable[int]]) -> list[int]:
        """Nodes that are new, who are now to be asked to join; now and then `look` says who is there."""
        now = time.monotonic()
        if now < self._look_at:
            return []
        self._look_at = now + _LOOK_AROUND
        here = set(look())
        new = here - self._met
        again = {node for node, at in self._later.items() if node in here and at <= now}
        self._met_last = now if new else self._met_last
        self._met = here
        self._refusals = {node: reason for node, reason in self._refusals.items() if node in here}
        self._later = {node: at for node, at in self._later.items() if node in here and at > now}
        return sorted(new | again)

    def refuse(self, node: int, reason: str) -> None:
        """A node cannot take part."""
        self._refusals[node] = single_line(reason, 600)

    def admit(self, node: int, said: FlowerMessage, is_lost: Callable[[Hello], bool]) -> WorkerId | None:
        """Take a node as the worker that it says it is, unless that is somebody else, who is there."""
        try:
            hello = said.form(Hello)
        except WireError as error:
            self.refuse(node, f"it answers what is no greeting ({error})")
            return None
        worker = said.number("worker", -1)
        if not 0 <= worker < self._workers:
            self.refuse(node, f"it says that it is worker {worker} of {self._workers}")
            return None
        if any(member.node == node and other != worker for other, member in self.of.items()):
            _log.warning("node %d says that it is worker %d, too; a node is one worker", node, worker)
            return None
        before = self.of.get(worker)
        if before is not None and before.node != node and self.is_here(worker) and before.token != hello.session:
            _log.warning("node %d says that it is worker %d, who is another node; nobody listens", node, worker)
            self._later[node] = time.monotonic() + _LOOK_AGAIN  # whoever holds the place may leave it
            return None
        self._totals.add(said.number("partitions", 0))
        self.of[worker] = Member(node, hello.session, forget=is_lost(hello))
        self.samples[worker] = hello.samples
        return worker

    def has_model(self, worker: WorkerId, version: int) -> None:
        """A worker has answered an order, and so has this version of w^g."""
        self.of[worker] = replace(self.of[worker], version=version, forget=False)

    def lacks_model(self, worker: WorkerId) -> None:
        """A worker does not have the w^g that it was thought to have."""
        self.of[worker] = replace(self.of[worker], version=-1)

    def lacks_everything(self, worker: WorkerId) -> None:
        """A worker does not know what is run: its node is asked to join again."""
        self._met.discard(self.of.pop(worker).node)
        self._look_at = 0.0

    def settled(self, wanted: Collection[WorkerId], going_on: bool = False) -> bool:
        """Whether all of them are there, or those who are missing will not come.

        going_on: one that cannot take part is no reason not to wait for the others.
        """
        if set(wanted) <= set(self.of):
            return True
        answered = len(self.of) + len(self._refusals) + len(self._later)
        if time.monotonic() - self._met_last < LEAST or answered < len(self._met):
            return False
        return (bool(self._refusals) and not going_on) or self._are_too_few()

    def _are_too_few(self) -> bool:
        """Whether there are no more nodes than these, by the word of all of them."""
        return self._totals == {len(self.of)}

    def demand(self, wanted: Collection[WorkerId], going_on: bool = False) -> None:
        """An error that says who is missing, and why, if somebody is; in a run that goes on, if everybody is."""
        missing = sorted(set(wanted) - set(self.of))
        if not missing:
            return
        if going_on and len(missing) < len(wanted) and not self._are_too_few():
            _log.warning("cbdsl: the run goes on without workers %s, who may still come", missing[:10])
            return
        if self._refusals:
            node, reason = next(iter(self._refusals.items()))
            raise UserError(f"Node {node} cannot take part: {reason}")
        many = ", ".join(map(str, missing[:10])) + (" ..." if len(missing) > 10 else "")
        total = len(self._met)
        raise UserError(
            f"The run has {len(wanted)} workers and the federation {total} node{'s' * (total != 1)}; missing: {many}. "
            f"Every worker is a node: give --federation-config 'num-supernodes={max(wanted) + 1}' in a simulation or "
            "start more SuperNodes, or ask for fewer workers: -c 'settings=\"workers=...\"'."
        )


_log = logging.getLogger("flwr.cbdsl")  # beside Flower's own lines


@dataclass(frozen=True, eq=False)
class PendingQuestion:
    """A message to a node."""

    node: int
    worker: WorkerId | None  # none: it is asked to join
    said: FlowerMessage
    kind: str
    round: int
    seconds: float  # for which it is worth anything


class MessageQueue:
    """What was asked and is not answered yet."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._open: dict[str, PendingQuestion] = {}  # by the message's id
        self._singly = False  # whether replies are fetched one by one

    def send(self, questions: Sequence[PendingQuestion]) -> None:
        """Ask."""
        if questions:
            sent = [messages.message(one.said, one.node, one.kind, one.round, one.seconds) for one in questions]
            self._grid.push_messages(sent)  # an id of its own each, also for one that could not be sent
            self._open |= {message.metadata.message_id: one for message, one in zip(sent, questions, strict=True)}

    def keep(self, wanted: Callable[[PendingQuestion], bool]) -> None:
        """Listen to no answers but those to these questions."""
        self._open = {key: one for key, one in self._open.items() if wanted(one)}

    def replies(self) -> list[tuple[PendingQuestion, Message | None]]:
        """Answers that have come; none: one that cannot be read."""
        found: list[tuple[PendingQuestion, Message | None]] = []
        for key, reply in self._pull():
            question = self._open.get(key)
            if question is None:
                continue  # it was answered before
            if reply is not None and not reply.has_error() and reply.metadata.src_node_id != question.node:
                _log.warning("another node answers for node %d; nobody listens", question.node)
                continue
            del self._open[key]
            found.append((question, reply))
        return found

    def _pull(self) -> list[tuple[str, Message | None]]:
        """Replies by the id of what they reply to.

        One that cannot be read costs Flower all those that it fetched with it. So everybody is asked again, which
        nodes answer as before, and from then on each reply is fetched by itself.
        """
        if not self._open:
            return []
        if not self._singly:
            try:
                replies = list(self._grid.pull_messages(list(self._open)))
                return [(reply.metadata.reply_to_message_id, reply) for reply in replies]
            except Exception as error:  # whatever the readers of Flower raise
                _log.warning("a reply cannot be read (%s); everybody is asked again", single_line(repr(error)))
            self._singly, questions, self._open = True, list(self._open.values()), {}
            self.send(questions)
        return [(key, reply) for key, question in self._open.items() for reply in self._pull_one(key, question)]

    def _pull_one(self, key: str, question: PendingQuestion) -> Sequence[Message | None]:
        try:
            return list(self._grid.pull_messages([key]))
        except Exception as error:  # see above
            _log.warning("the reply of node %d cannot be read (%s)", question.node, single_line(repr(error)))
            return [None]


_log = logging.getLogger("flwr.cbdsl")  # beside Flower's own lines

_QUICKEST, _SLOWEST = 0.01, 0.2  # seconds between two looks for replies: a tenth of the wait so far, within these
_MOST_TIMES = 2  # that a worker gets in a round what it says it lacks

_A = TypeVar("_A")
_Take = Callable[[WorkerId, int, FlowerMessage | None], None]
"""Takes a worker, the node that was asked, and what it says; none: nothing that is of use."""


class NoWorkersError(UserError):
    """Nobody answers; nothing is lost, and the run can go on when somebody is there."""


class FlowerSwarm:
    """The workers of a run, wherever Flower has them."""

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
        """dealt: the spec by which nodes deal themselves samples; empty: they have their own. starts: (D,) each, where
        workers start apart."""
        self._grid, self._post = grid, MessageQueue(grid)
        self._run, self._members = announcement.run, Members(workers)
        self._deadlines, self._starts = deadlines or Deadlines(), starts
        self._invitation = make_flower_message([announcement], {"shared": shared} if shared else {}, dealt=dealt)
        self._standing: dict[WorkerId, Punctuality] = {}
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
        """How many samples each worker says it holds; whoever comes later is in it, too."""
        return self._members.samples

    def recall(self, model: Floats, version: int, updates: Sequence[bytes], references: Sequence[Floats]) -> None:
        """Where the server stands before its next round; model: as it is sent, (V D,).

        references: where uploads are differences, the versions of w^g that they may be differences to, (D,) each.
        """
        self._relative = bool(references)
        first = version + 1 - len(references)
        self._digests |= {
            first + place: wire.digest_of(wire.weights_to_bytes(one)) for place, one in enumerate(references)
        }
        self._adopt(model, version, updates)

    def gather(self, wanted: Collection[WorkerId], going_on: bool = False) -> None:
        """Wait until all of them are there; an error that says who is missing, and why, if they do not come.

        going_on: the run has begun, so that one node that stays away cannot keep the others from it: it is silent.
        """
        limit = time.monotonic() + self._deadlines.join_seconds
        self._wait(lambda: self._members.settled(wanted, going_on), limit)
        self._members.demand(wanted, going_on)

    def exclude(self, banned: Collection[WorkerId]) -> None:
        """These are asked nothing any more; that their nodes are there tells nothing of the others."""
        self._banned = frozenset(banned)

    def report(self, order: Order) -> Mapping[WorkerId, Claim]:
        """See `Swarm.report`. Waits for the first answer; NobodyError if there is none."""
        if order.global_best is not None:
            self._adopt(order.global_best, order.version, order.updates)
        self._round, self._task, self._claims, self._models = order.round, order.task, {}, {}
        form = OrderMessage(
            self._run, order.round, order.task, b"", order.inertia, order.learning_rate, self._version,
            self._digests[self._version],
        )  # fmt: skip
        limit = math.inf
        while order.participants:
            heard = self._converse(
                order.participants, messages.ORDER, lambda worker: self._order(form, worker), self._claim_in
            )
            self._claims = {worker: claim for worker, (claim, _) in heard.items()}
            self._models = {worker: model for worker, (_, model) in heard.items() if model is not None}
            answers = self._models if order.task == "average" else self._claims
            if answers or self._others_are_here(order.participants):
                break
            limit = min(limit, time.monotonic() + self._deadlines.join_seconds)
            self._wait_for_nodes(order.participants, limit)
        return {} if order.task == "average" else dict(self._claims)

    def upload(self, workers: Sequence[WorkerId]) -> Mapping[WorkerId, Upload]:
        """See `Swarm.upload`."""
        if self._task == "average":  # everybody uploads: the models came with the reports
            return {worker: self._models[worker] for worker in workers if worker in self._models}

        def invite(worker: WorkerId) -> FlowerMessage:
            return make_flower_message([Invitation(self._run, self._round, wire.pack_claim(self._claims[worker]))])

        asked = [worker for worker in workers if worker in self._claims]
        return dict(self._converse(asked, messages.UPLOAD, invite, self._upload_in, self._deadlines.upload_seconds))

    def finish(self) -> None:
        """Tell everybody that the run is over: they clear their desks. Who does not hear it keeps some files."""
        form = make_flower_message([Invitation(self._run, self._round, b"")])
        self._converse(list(self._members.of), messages.FINISH, lambda _: form, lambda said: said, 2 * LEAST)

    # --- what is said

    def _order(self, form: OrderMessage, worker: WorkerId) -> FlowerMessage:
        """An order for one worker, with as much of w^g as it needs."""
        member, large, values = self._members.of[worker], {}, {}
        behind = self._version - member.version
        if member.version < 0 or behind > len(self._updates):
            large["model"] = self._model
        elif behind:
            values = {"base": self._digests[member.version], "updates": behind}
            large = {f"update-{place}": one for place, one in enumerate(self._updates[-behind:])}
        if member.version < 0 and self._starts:
            large["start"] = wire.weights_to_bytes(self._starts[worker])
        return make_flower_message([form], large, forget=member.forget, **values)

    def _adopt(self, model: Floats, version: int, updates: Sequence[bytes]) -> None:
        self._model, self._version, self._updates = wire.weights_to_bytes(model), version, tuple(updates)
        self._digests[version] = wire.digest_of(self._model)

    # --- what is heard

    def _claim_in(self, reply: FlowerMessage) -> tuple[Claim, bytes | None]:
        """What a worker claims, and its model where everybody sends one; a model that nobody asked for is not kept."""
        said = self._of_this_round(reply)
        return Claim(said.score, said.commitment), reply.large.get("upload") if self._task == "average" else None

    def _upload_in(self, reply: FlowerMessage) -> bytes:
        self._of_this_round(reply)
        if "upload" not in reply.large:
            raise WireError("no model")
        return reply.large["upload"]

    def _of_this_round(self, reply: FlowerMessage) -> ClaimMessage:
        said = reply.form(ClaimMessage)
        if (said.run, said.round) != (self._run, self._round):
            raise WireError("for another round")
        return said

    def _others_are_here(self, asked: Collection[WorkerId]) -> bool:
        """Whether nodes are there that were not asked: then those who were are silent, and nothing is amiss."""
        others = self._members.of.keys() - self._banned - set(asked)
        return any(self._members.is_here(worker) for worker in others)

    def _wait_for_nodes(self, workers: Collection[WorkerId], limit: float) -> None:
        """Nobody answered: wait for nodes that may, a while at least; NobodyError when it is too late for that."""
        _log.warning("round %d: nobody answered; still waiting", self._round)
        again = time.monotonic() + LEAST
        self._wait(lambda: time.monotonic() > again and any(map(self._members.is_here, workers)), limit)
        if time.monotonic() > limit:
            raise NoWorkersError(
                f"Round {self._round}: none of {len(workers)} workers answered, nor did waiting for nodes for another "
                f"{self._deadlines.join_seconds:g} seconds (join-seconds) help. Are the SuperNodes running?"
            )

    # --- sending and waiting

    def _converse(
        self,
        workers: Sequence[WorkerId],
        kind: str,
        write: Callable[[WorkerId], FlowerMessage],
        read: Callable[[FlowerMessage], _A],
        seconds: float = 0.0,
    ) -> dict[WorkerId, _A]:
        """Ask workers something and wait for their answers, for so long, or in a round for as long as is due to it.

        read: the answer in a reply; WireError if it is none.
        """
        # Answers to earlier questions are not heard any more. Who was asked to join may still do so, unless its node
        # has left: when it comes back it is asked again, so that nodes that come and go leave no questions behind.
        self._post.keep(lambda one: one.worker is None and self._members.is_met(one.node))
        started, looked = time.monotonic(), False
        most = seconds or self._deadlines.round_seconds
        heard: dict[WorkerId, _A] = {}
        given_up: set[WorkerId] = set()
        addressed: dict[WorkerId, int] = {}  # which node was asked
        absent: dict[WorkerId, float] = {}  # when its node was last there: it may be starting again
        again: Counter[WorkerId] = Counter()  # how often it lacked something
        times: list[float] = []
        waited = [worker for worker in workers if self._standing_of(worker).is_waited_for(self._round)] or list(workers)

        def enough() -> bool:
            nonlocal looked
            for worker in workers:  # who came back on another node is asked again
                member = self._members.of.get(worker)
                if member is not None and addressed.get(worker) != member.node and worker not in heard:
                    addressed[worker] = member.node
                    given_up.discard(worker)
                    self._ask([(member.node, worker)], kind, write, most)
            now = time.monotonic()
            for worker in workers:
                absent[worker] = now if self._members.is_here(worker) else absent.get(worker, now)
            due = [
                worker
                for worker in waited
                if worker not in heard and worker not in given_up and now - absent[worker] <= LEAST
            ]
            limit = most if seconds else max(LEAST, everybodys_limit(times, len(waited), self._deadlines))
            late, looked = looked and now - started > limit, True  # time ends nothing before a first look for replies
            return not due or late

        def take(worker: WorkerId, node: int, reply: FlowerMessage | None) -> None:
            if worker in heard:  # on another node
                return
            member = self._members.of.get(worker)
            is_its_node = member is not None and member.node == node
            lacks, stranger = (bool(reply and reply.values.get(key)) for key in ("lacks", "stranger"))
            answer = None if reply is None or lacks or stranger else self._read(worker, reply, read)
            if answer is not None:
                heard[worker] = answer
                times.append(time.monotonic() - started)
                if is_its_node and kind == messages.ORDER:
                    self._members.has_model(worker, self._version)
            elif is_its_node:  # what fails at a node that it has left does not matter
                again[worker] += lacks or stranger
                if again[worker] > _MOST_TIMES or not (lacks or stranger):
                    given_up.add(worker)
                else:
                    (self._members.lacks_everything if stranger else self._members.lacks_model)(worker)
                    addressed.pop(worker, None)

        known = [(self._members.of[worker].node, worker) for worker in workers if worker in self._members.of]
        addressed.update({worker: node for node, worker in known})
        self._ask(known, kind, write, most)
        self._wait(enough, started + most, take)
        if kind == messages.ORDER and heard:  # where nobody answers, nobody in particular is late
            self._keep_standings(waited, heard)
        return heard

    def _keep_standings(self, waited: Iterable[WorkerId], heard: Collection[WorkerId]) -> None:
        for worker in heard:
            self._standing_of(worker).answered()
        for worker in waited:
            if worker not in heard:
                self._standing_of(worker).lapsed(self._round)
                _log.warning("round %d closes without worker %d", self._round, worker)

    def _standing_of(self, worker: WorkerId) -> Punctuality:
        return self._standing.setdefault(worker, Punctuality(0.0))

    def _read(self, worker: WorkerId, reply: FlowerMessage, read: Callable[[FlowerMessage], _A]) -> _A | None:
        try:
            return read(reply)
        except WireError as error:
            _log.warning("worker %d answers what is no answer (%s); nobody listens", worker, error)
            return None

    def _ask(
        self,
        whom: Sequence[tuple[int, WorkerId]],
        kind: str,
        write: Callable[[WorkerId], FlowerMessage],
        seconds: float,
    ) -> None:
        self._post.send(
            [PendingQuestion(node, worker, write(worker), kind, self._round, seconds) for node, worker in whom]
        )

    def _wait(self, enough: Callable[[], bool], limit: float, take: _Take | None = None) -> None:
        """Look for replies and for nodes until it is enough, or time is up: once at least, if it is not enough."""
        started = time.monotonic()
        while not enough():
            self._welcome(self._members.newcomers(self._grid.get_node_ids))
            replies = self._post.replies()
            for question, reply in replies:
                self._hear(reply, question, take)
            now = time.monotonic()
            if now > limit:
                return
            if not replies:
                time.sleep(min(_SLOWEST, max(_QUICKEST, (now - started) / 10)))

    def _hear(self, reply: Message | None, asked: PendingQuestion, take: _Take | None) -> None:
        said, refusal = FlowerMessage(), "its reply cannot be read"
        if reply is not None and reply.has_error():
            refusal = str(reply.error.reason)
        elif reply is not None:
            said = messages.read(reply.content)
            refusal = said.text("refusal")
        if refusal:
            _log.warning("node %d cannot go on: %s", asked.node, single_line(refusal, 600))
        if asked.worker is not None:
            if take is not None:
                take(asked.worker, asked.node, None if refusal else said)
        elif refusal:
            self._members.refuse(asked.node, refusal)
        else:
            worker = self._members.admit(asked.node, said, self._is_lost)
            if worker is not None:
                self._standing_of(worker).heard()

    def _welcome(self, nodes: Sequence[int]) -> None:
        """Ask nodes to join."""
        seconds = max(self._deadlines.join_seconds, LEAST)
        self._post.send(
            [PendingQuestion(node, None, self._invitation, messages.JOIN, self._round, seconds) for node in nodes]
        )

    def _is_lost(self, hello: Hello) -> bool:
        """Whether a worker's state is of a w^g that this run has not had: its differences would be to another model."""
        played = hello.run == self._run and hello.round > 0
        return self._relative and played and self._digests.get(hello.model_version) != hello.model_digest


@dataclass(frozen=True)
class AppConfig:
    """What a run's configuration asks for, by the keys of `[tool.flwr.app.config]`."""

    spec: str = "paper-iid"  # a preset, or a spec's TOML file on the server's machine
    rounds: int = 0  # 0: as many as the spec says
    settings: str = ""  # any settings of a spec: "workers=8 attack.byzantine=1"
    runs: str = "runs"  # where runs go
    out: str = ""  # the run's folder, there or elsewhere; empty: a new one
    own_data: bool = False  # the nodes' own samples, rather than the spec's data set dealt to them
    round_seconds: float = 600.0
    upload_seconds: float = 60.0
    join_seconds: float = 300.0

    @staticmethod
    def of(config: Mapping[str, Any]) -> AppConfig:
        """Read a run's configuration; keys that are not known here are somebody else's."""
        given: dict[str, Any] = {}
        for key, default in vars(AppConfig()).items():
            value = config.get(key.replace("_", "-"), default)
            value = float(value) if type(default) is float and type(value) is int else value
            if type(value) is not type(default):
                raise UserError(
                    f"The run's configuration has {key.replace('_', '-')}={value!r}; give a {type(default).__name__}, "
                    f"such as {default!r}."
                )
            given[key] = value
        return AppConfig(**given)

    def resolved(self) -> Spec:
        """The spec that is asked for."""
        try:
            words = shlex.split(self.settings)
        except ValueError as error:
            raise UserError(
                f"The run's configuration has settings={self.settings!r}, which cannot be read ({error}). Give "
                "settings with spaces between them, such as 'workers=8 attack.byzantine=1', and close every quote."
            ) from error
        options = dict(parse_setting(text) for text in words)
        if self.rounds:
            options["rounds"] = self.rounds
        spec = resolve(preset_or_file(self.spec).with_settings(options))
        if spec.plugins:
            raise UserError(
                f"The spec names plugins ({', '.join(spec.plugins)}), which nodes do not have. Register such parts in "
                "client_app.py and server_app.py instead, and leave plugins out."
            )
        refuse_idle([spec], options)
        return spec

    def folder(self, spec: Spec) -> Path:
        """Where the run goes."""
        runs = Path(self.runs).expanduser()
        return (runs / self.out).resolve() if self.out else free_folder(f"flower-{spec.method}", runs.resolve())


def play(grid: Grid, context: Context) -> Result:
    """Play the run that a context describes with the nodes of a grid."""
    try:
        return _play(grid, AppConfig.of(context.run_config))
    except UserError as error:
        _log.error("cbdsl: %s", error)
        raise


def _play(grid: Grid, wishes: AppConfig) -> Result:
    spec = wishes.resolved()
    out = wishes.folder(spec)
    secret = read_secret(out) if wishes.own_data else 0
    stage = Experiment.prepare(spec, deal=not wishes.own_data, secret=secret)
    if stage.note:
        _log.warning("%s", stage.note)
    opened = open_run(stage, out)
    try:
        if secret:
            save_secret(out, secret)
        return _play_in(opened, stage, grid, wishes)
    except NoWorkersError as error:
        raise UserError(
            f"{error} Rounds that were played are kept: `flwr run` with the same configuration and "
            f"-c 'out=\"{out}\"' goes on, to the same numbers."
        ) from error
    finally:
        opened.close()


def _play_in(opened: OpenRun, stage: Experiment, grid: Grid, wishes: AppConfig) -> Result:
    assert opened.path is not None
    spec, out = stage.spec, opened.path
    shared = pack_shared_sets(stage)
    swarm = FlowerSwarm(
        grid,
        spec.workers,
        announce(stage, load_run_id(out / "flower.json"), shared),
        shared,
        "" if wishes.own_data else dealt_spec(spec),
        Deadlines(
            round_seconds=wishes.round_seconds,
            upload_seconds=wishes.upload_seconds,
            join_seconds=wishes.join_seconds,
        ),
        list(stage.initial) if len(stage.initial) > 1 else [],
    )
    state = opened.state_of(stage)
    if state.round < spec.rounds:
        message = stage.server.method.broadcast(state.global_best, state.memory)
        swarm.recall(message, state.version, state.updates, state.references)
        swarm.gather([worker for worker in range(spec.workers) if worker not in state.banned], state.round > 0)
        if wishes.own_data and spec.defence.aggregator == "mean":
            stage = replace(stage, server=replace(stage.server, combine=averaging(swarm.samples, stated=True)))
        _log.info("cbdsl: %s, %d workers, %d rounds; %s", spec.method, spec.workers, spec.rounds, out)
    swarm.exclude(state.banned)
    for completed in play_rounds(stage, state, swarm, opened=opened):
        swarm.exclude(completed.state.banned)
        line = completed.record
        _log.info(
            "round %d of %d: accuracy %.4f, %d bytes up, refuted %s, declined %s, silent %s, %.2f s",
            line.round, spec.rounds, line.test_accuracy, line.uplink_bytes, line.refuted, line.declined,
            line.silent, line.seconds,
        )  # fmt: skip
    swarm.finish()
    return finish_run(stage, opened)
