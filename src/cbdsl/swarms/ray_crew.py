"""The actors behind a swarm on Ray: hired, asked, and after a death brought back to where they were.

Ray starts an actor again whose process or machine ended, and repeats what it was asked. The new one knows nothing and
says so (`Behind`); here it gets the rows of the last checkpoint and the orders since, and then it is where it was, to
the bit. What the orders mean is the swarm's affair.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbdsl.arrays import Floats
from cbdsl.errors import UserError
from cbdsl.protocol.messages import Order
from cbdsl.swarms.ray_cluster import cannot_import, described, machines, room_for, share_of
from cbdsl.swarms.shard import Behind, Plot, Shard, code_digest
from cbdsl.text import size
from cbdsl.workers.swarm import Particles

PATIENCE = 600.0  # seconds to wait for a cluster that has become too small
_LOOK = 5.0  # seconds between looks at a cluster that does not answer
_LOOKS = 4  # looks without any answer until those are mentioned who may use it
_TRIES = 5  # times that a shard is started again before it answers once
_BLOCK = 32 * 2**20  # bytes of rows in one message
_PROCESS = 200 * 2**20  # bytes of an actor without workers: Python, numpy, Ray, blocks of rows that are worked on

_log = logging.getLogger("cbdsl")


@dataclass(eq=False)
class Actor:
    """One shard, as it is seen from here."""

    handle: Any
    names: range  # of its workers
    plot: Any  # a reference to what they hold, for a shard that is started again
    first: list[Any]  # references to the answers to its first calls; it lives when there is the first of them
    tries: int = 0  # since it last answered

    def __str__(self) -> str:
        return f"The shard of workers {self.names.start} to {self.names.stop - 1}"

    def own(self, order: Order) -> Order:
        """An order as this shard gets it: to its own workers; w^g comes beside it, through the object store."""
        chosen = tuple(worker for worker in order.participants if worker in self.names)
        return replace(order, participants=chosen, global_best=None, updates=())


@dataclass(eq=False)
class Past:
    """From what a shard that lost its rows gets them back."""

    round: int = 0
    rows: Particles | None = None  # (U, ...), in a checkpoint's file; none: as at the start
    received: Floats | None = None  # (V D,), with those rows; none: the initial model
    orders: list[Order] = field(default_factory=list)  # since then, the present one included


class Crew:
    """All actors of a swarm."""

    def __init__(self, ray: Any, recipe: object) -> None:  # noqa: ANN401 - Ray's module
        """Recipe: see `Shard`; put where every machine gets it once."""
        self._ray, self.past, self.actors = ray, Past(), list[Actor]()
        self._recipe = ray.put(recipe)
        self._cpus = self._memory = 0.0
        self._tokens = count(1)

    def hire(self, plots: Iterable[Plot], number: int, bytes_each: int) -> None:
        """An actor for each plot; together they must fit. bytes_each: what the workers of the largest one take."""
        have = machines(self._ray)
        self._cpus, self._memory = share_of([one.cpus for one in have], number), float(_PROCESS + bytes_each)
        if room_for(have, self._cpus, self._memory) < number:
            raise UserError(f"The cluster is too small: {self._wants(number)} Use fewer workers or other --shards.")
        options = {"num_cpus": self._cpus, "memory": int(self._memory), "max_restarts": -1, "max_task_retries": 1}
        hired = self._ray.remote(**options, scheduling_strategy="SPREAD")(Shard)
        for plot in plots:
            handle = hired.remote(code_digest(), max(1, int(self._cpus)))
            actor = Actor(handle, plot.names, self._ray.put(plot), [handle.facts.remote(0)])
            self.actors.append(actor)
            token = next(self._tokens)  # all at once; who fails to will be behind
            actor.first += handle.prepare.remote(token, self._recipe, actor.plot), handle.settle.remote(token, 0, None)

    def end(self) -> None:
        """End the actors."""
        for actor in self.actors:
            for call in actor.first:  # what went wrong was said already; Ray prints errors that nobody looked at
                with contextlib.suppress(self._ray.exceptions.RayError):
                    self._ray.get(call, timeout=0)
            self._ray.kill(actor.handle)
        self.actors = []

    def ask(self, calls: Mapping[Actor, tuple[Any, ...]]) -> dict[Actor, Any]:
        """Ask actors all at once, each a method and its arguments; one that was started again is first brought up."""
        answers: dict[Actor, Any] = {}
        while left := {actor: call for actor, call in calls.items() if actor not in answers}:
            sent = {actor: getattr(actor.handle, name).remote(*rest) for actor, (name, *rest) in left.items()}
            for actor, answer in self._gather(sent).items():
                if isinstance(answer, Behind):
                    repeated = self.bring_up(actor, without_last=left[actor][0] == "report")
                    _log.warning(f"{actor} was started again, from round {self.past.round} on: {repeated} repeated.")
                else:
                    answers[actor], actor.tries = answer, 0
        return {actor: answers[actor] for actor in calls}

    def bring_up(self, actor: Actor, without_last: bool = False) -> int:
        """To where an actor should be; how many orders it repeated for that.

        without_last: before the present order, with which it will be asked again.
        """
        orders = self.past.orders[: len(self.past.orders) - without_last]
        while True:
            actor.tries += 1
            if actor.tries > _TRIES:
                raise UserError(
                    f"{actor} was started {_TRIES} times without an answer, most likely for want of memory: Ray's logs "
                    "on its machine say more. Go on with cbdsl resume."
                )
            if self._given(actor, orders):
                return len(orders)

    def _given(self, actor: Actor, orders: list[Order]) -> bool:
        """Give an actor rows and orders; false if it ended meanwhile."""
        past, token, put = self.past, next(self._tokens), self._ray.put
        steps = chain(
            [("prepare", token, self._recipe, actor.plot)],
            (("put", token, *block) for block in _blocks(past.rows, actor.names)),
            [("settle", token, past.round, past.received)],
        )
        for step in steps:
            if isinstance(self._one(actor, step), Behind):
                return False
        at = past.round
        for order in orders:
            model = None if order.global_best is None else put(order.global_best)
            if isinstance(self._one(actor, ("report", at, actor.own(order), model, ())), Behind):
                return False
            at = order.round
        return True

    def _one(self, actor: Actor, call: tuple[Any, ...]) -> Any:  # noqa: ANN401
        name, *rest = call
        return self._gather({actor: getattr(actor.handle, name).remote(*rest)})[actor]

    def _gather(self, calls: Mapping[Actor, Any]) -> dict[Actor, Any]:
        """The answers to calls; it waits for as long as the cluster can give them."""
        waiting, since, idle = list(calls.values()), None, 0
        while waiting:
            done, waiting = self._ray.wait(waiting, num_returns=len(waiting), timeout=_LOOK)
            idle = 0 if done else idle + 1
            if done or room_for(machines(self._ray), self._cpus, self._memory) >= len(self.actors):
                since = None
                if idle == _LOOKS:
                    self._mention_others()
            elif waiting:
                since = self._complain(since)
        return {actor: self._answer(call) for actor, call in calls.items()}

    def _answer(self, call: Any) -> Any:  # noqa: ANN401
        """What was answered; Behind where that was lost with the machine that had it."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(call)
        except (errors.ObjectLostError, errors.ActorUnavailableError):
            return Behind()
        except errors.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise UserError(str(error.cause)) from error
            raise cannot_import(error, "run") or error from None
        except errors.RayActorError as error:
            words = str(error)
            _, found, mine = words.partition(f"{UserError.__name__}: ")
            raise UserError(
                mine.strip()
                if found
                else f"A shard cannot be started on its machine: {' '.join(words.split())} See "
                "`cbdsl doctor --on ...`: every machine needs the same cbdsl and what the run's own parts import."
            ) from error

    def _mention_others(self) -> None:
        """Say it where shards have room and are not started all the same; others may compute for long."""
        births = [actor.first[0] for actor in self.actors]
        _, unborn = self._ray.wait(births, num_returns=len(births), timeout=0)
        if unborn:
            _log.warning(
                f"{len(unborn)} of {len(births)} shards have not started yet, although the cluster is large enough: "
                "others seem to use its processors or its memory. Waiting until there is room."
            )

    def _complain(self, since: float | None) -> float:
        now = time.monotonic()
        small = f"The cluster has become too small: {self._wants(len(self.actors))}"
        if since is None:
            _log.warning(f"{small} Waiting {PATIENCE / 60:g} minutes for machines.")
        elif now - since > PATIENCE:
            raise UserError(f"{small} Add machines, and go on with cbdsl resume and the same --on, or here without it.")
        return now if since is None else since

    def _wants(self, number: int) -> str:
        each = f"{self._cpus:g} processors and {size(int(self._memory))} of memory"
        return f"{number} shards want {each} each, and it has {described(machines(self._ray))}."


def spans(rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """First and last of so many rows, a message's worth at a time."""
    step = max(1, _BLOCK // max(1, row_bytes))
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


def _blocks(rows: Particles | None, names: range) -> Iterator[tuple[str, int, NDArray[Any]]]:
    """The rows of some workers: name of an array, first row, rows."""
    for name, array in (vars(rows) if rows is not None else {}).items():
        own = array[names.start : names.stop]
        for first, last in spans(len(own), own[:1].nbytes):
            yield name, first, np.array(own[first:last])
