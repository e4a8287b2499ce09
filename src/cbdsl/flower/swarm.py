"""The workers as nodes of a Flower federation: `report` and `upload` as messages on a Grid.

Knows who is which worker, sends, waits and reads; it never judges a claim. Replies are pulled as they come, several
times a second: Flower's own blocking call looks every three seconds. Whatever a node answers is one claim or one
model for the round that was asked about, or nothing at all; nothing is silence, for which nobody is banned.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from cbdsl.arrays import Floats
from cbdsl.deploy import wire
from cbdsl.deploy.deadlines import Deadlines
from cbdsl.deploy.patience import Standing, everybodys_limit
from cbdsl.deploy.wire import Announcement, ClaimMessage, Hello, Invitation, OrderMessage, WireError
from cbdsl.errors import UserError
from cbdsl.flower import letters
from cbdsl.flower.letters import Grid, Letter, letter
from cbdsl.flower.members import LEAST, Members
from cbdsl.flower.post import Post, Question
from cbdsl.protocol.messages import Claim, Order, Upload, WorkerId
from cbdsl.text import one_line

if TYPE_CHECKING:
    from flwr.app import Message

_log = logging.getLogger("flwr.cbdsl")  # beside Flower's own lines

_QUICKEST, _SLOWEST = 0.01, 0.2  # seconds between two looks for replies: a tenth of the wait so far, within these
_MOST_TIMES = 2  # that a worker gets in a round what it says it lacks

_A = TypeVar("_A")
_Take = Callable[[WorkerId, int, Letter | None], None]
"""Takes a worker, the node that was asked, and what it says; none: nothing that is of use."""


class NobodyError(UserError):
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
        self._grid, self._post = grid, Post(grid)
        self._run, self._members = announcement.run, Members(workers)
        self._deadlines, self._starts = deadlines or Deadlines(), starts
        self._invitation = letter([announcement], {"shared": shared} if shared else {}, dealt=dealt)
        self._standing: dict[WorkerId, Standing] = {}
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
                order.participants, letters.ORDER, lambda worker: self._order(form, worker), self._claim_in
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

        def invite(worker: WorkerId) -> Letter:
            return letter([Invitation(self._run, self._round, wire.said(self._claims[worker]))])

        asked = [worker for worker in workers if worker in self._claims]
        return dict(self._converse(asked, letters.UPLOAD, invite, self._upload_in, self._deadlines.upload_seconds))

    def finish(self) -> None:
        """Tell everybody that the run is over: they clear their desks. Who does not hear it keeps some files."""
        form = letter([Invitation(self._run, self._round, b"")])
        self._converse(list(self._members.of), letters.FINISH, lambda _: form, lambda said: said, 2 * LEAST)

    # --- what is said

    def _order(self, form: OrderMessage, worker: WorkerId) -> Letter:
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
        return letter([form], large, forget=member.forget, **values)

    def _adopt(self, model: Floats, version: int, updates: Sequence[bytes]) -> None:
        self._model, self._version, self._updates = wire.weights_to_bytes(model), version, tuple(updates)
        self._digests[version] = wire.digest_of(self._model)

    # --- what is heard

    def _claim_in(self, reply: Letter) -> tuple[Claim, bytes | None]:
        """What a worker claims, and its model where everybody sends one; a model that nobody asked for is not kept."""
        said = self._of_this_round(reply)
        return Claim(said.score, said.commitment), reply.large.get("upload") if self._task == "average" else None

    def _upload_in(self, reply: Letter) -> bytes:
        self._of_this_round(reply)
        if "upload" not in reply.large:
            raise WireError("no model")
        return reply.large["upload"]

    def _of_this_round(self, reply: Letter) -> ClaimMessage:
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
            raise NobodyError(
                f"Round {self._round}: none of {len(workers)} workers answered, nor did waiting for nodes for another "
                f"{self._deadlines.join_seconds:g} seconds (join-seconds) help. Are the SuperNodes running?"
            )

    # --- sending and waiting

    def _converse(
        self,
        workers: Sequence[WorkerId],
        kind: str,
        write: Callable[[WorkerId], Letter],
        read: Callable[[Letter], _A],
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

        def take(worker: WorkerId, node: int, reply: Letter | None) -> None:
            if worker in heard:  # on another node
                return
            member = self._members.of.get(worker)
            is_its_node = member is not None and member.node == node
            lacks, stranger = (bool(reply and reply.values.get(key)) for key in ("lacks", "stranger"))
            answer = None if reply is None or lacks or stranger else self._read(worker, reply, read)
            if answer is not None:
                heard[worker] = answer
                times.append(time.monotonic() - started)
                if is_its_node and kind == letters.ORDER:
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
        if kind == letters.ORDER and heard:  # where nobody answers, nobody in particular is late
            self._keep_standings(waited, heard)
        return heard

    def _keep_standings(self, waited: Iterable[WorkerId], heard: Collection[WorkerId]) -> None:
        for worker in heard:
            self._standing_of(worker).answered()
        for worker in waited:
            if worker not in heard:
                self._standing_of(worker).lapsed(self._round)
                _log.warning("round %d closes without worker %d", self._round, worker)

    def _standing_of(self, worker: WorkerId) -> Standing:
        return self._standing.setdefault(worker, Standing(0.0))

    def _read(self, worker: WorkerId, reply: Letter, read: Callable[[Letter], _A]) -> _A | None:
        try:
            return read(reply)
        except WireError as error:
            _log.warning("worker %d answers what is no answer (%s); nobody listens", worker, error)
            return None

    def _ask(
        self, whom: Sequence[tuple[int, WorkerId]], kind: str, write: Callable[[WorkerId], Letter], seconds: float
    ) -> None:
        self._post.send([Question(node, worker, write(worker), kind, self._round, seconds) for node, worker in whom])

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

    def _hear(self, reply: Message | None, asked: Question, take: _Take | None) -> None:
        said, refusal = Letter(), "its reply cannot be read"
        if reply is not None and reply.has_error():
            refusal = str(reply.error.reason)
        elif reply is not None:
            said = letters.read(reply.content)
            refusal = said.text("refusal")
        if refusal:
            _log.warning("node %d cannot go on: %s", asked.node, one_line(refusal, 600))
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
        self._post.send([Question(node, None, self._invitation, letters.JOIN, self._round, seconds) for node in nodes])

    def _is_lost(self, hello: Hello) -> bool:
        """Whether a worker's state is of a w^g that this run has not had: its differences would be to another model."""
        played = hello.run == self._run and hello.round > 0
        return self._relative and played and self._digests.get(hello.model_version) != hello.model_digest
