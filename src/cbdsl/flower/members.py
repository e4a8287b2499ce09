"""Which node is which worker: nodes come, say who they are, and go. Sends nothing; `swarm` does."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from cbdsl.deploy.wire import Hello, WireError
from cbdsl.errors import UserError
from cbdsl.flower.letters import Letter
from cbdsl.protocol.messages import WorkerId
from cbdsl.text import one_line

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
        self._refusals[node] = one_line(reason, 600)

    def admit(self, node: int, said: Letter, is_lost: Callable[[Hello], bool]) -> WorkerId | None:
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
