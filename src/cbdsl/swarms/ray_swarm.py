"""Ray, started on this machine or found: connects, says what there is, and leaves nothing running that it started.

Ray is imported here and where an actor lives, and only when a cluster is asked for. Knows no swarm and no run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cbdsl import register
from cbdsl.algorithm.messages import Claim, Order, Swarm, Upload, WorkerId
from cbdsl.algorithm.particles import Particles
from cbdsl.arrays import Doubles, Floats
from cbdsl.attacks.adversary import Adversary
from cbdsl.engines.native_engine import default_threads
from cbdsl.errors import UserError, missing, shown
from cbdsl.swarms.local import SwarmWithAttackers
from cbdsl.swarms.shard import (
    Shard,
    ShardData,
    ShardFacts,
    ShardRecipe,
    ShardRestarted,
    build_of,
    code_digest,
    part_of,
)
from cbdsl.util.files import InBlocks
from cbdsl.util.formatting import format_bytes

if TYPE_CHECKING:
    from cbdsl.runs.build import Experiment

HERE, FOUND, CLIENT = "ray", "auto", "ray://"
_STORE = 500_000_000  # bytes of the object store of a cluster that is started here
_REACH = 5.0  # seconds to reach an address


@dataclass(frozen=True)
class ClusterNode:
    """One node of a cluster, as Ray sees it."""

    name: str
    node: str  # Ray's own name for it
    cpus: float
    memory: float  # bytes that Ray may give away


@contextlib.contextmanager
def connected(on: str, threads: int | None = None) -> Iterator[Any]:
    """Ray's module, connected to the cluster that a user names; afterwards everything is as it was before.

    threads: processors of a cluster that is started here, all that there are if not given.
    """
    check_place(on)
    ray = _module()
    if on not in (HERE, FOUND):
        _reach(on)
    if ray.is_initialized():  # by the user's own program, who will also end it
        yield ray
        return
    place = tempfile.mkdtemp(prefix="ray-") if on == HERE else None
    try:
        _start(ray, on, threads, place)
        yield ray
    finally:
        ray.shutdown()
        if place is not None:
            shutil.rmtree(place, ignore_errors=True)


def machines(ray: Any) -> list[ClusterNode]:  # noqa: ANN401 - Ray's module
    """The nodes that are alive."""
    return [
        ClusterNode(
            each["NodeManagerHostname"], each["NodeID"], each["Resources"].get("CPU", 0.0),
            each["Resources"].get("memory", 0.0),
        )
        for each in ray.nodes()
        if each["Alive"]
    ]  # fmt: skip


def share_of(cpus: Sequence[float], shards: int) -> float:
    """Processors for each of so many shards on machines with so many: as many as all can have, whole or a fraction."""
    for each in range(int(max(cpus, default=0)), 0, -1):
        if sum(int(have // each) for have in cpus) >= shards:
            return float(each)
    whole = sum(map(int, cpus))
    return int(1e4 / -(-shards // whole)) / 1e4 if whole else 0.0


def room_for(have: Sequence[ClusterNode], cpus: float, memory: float) -> int:
    """How many shards of so many processors and bytes each have room on some machines."""
    return sum(int(min(one.cpus / cpus, one.memory / memory) + 1e-6) for one in have) if cpus else 0


def described(have: Sequence[ClusterNode]) -> str:
    """Machines in words."""
    each = [f"{one.name} ({one.cpus:g} processors, {format_bytes(int(one.memory))})" for one in have]
    return f"{len(have)} machine{'s' * (len(have) != 1)}: {', '.join(each[:8])}" if have else "no machine"


def cannot_import(error: Any, what: str) -> UserError | None:  # noqa: ANN401 - Ray's
    """The sentence for a task's error that is a machine's lack of some module; none for other errors."""
    words = str(error.cause).strip()
    last = (words.splitlines() or [type(error.cause).__name__])[-1].strip()
    lacks = "failed to import" in words or last.startswith(("ImportError:", "ModuleNotFoundError:"))
    if not (lacks or isinstance(error.cause, ImportError)):
        return None
    return UserError(
        f"A machine of the cluster cannot import what this {what} needs ({last}). Every machine needs the same cbdsl "
        "and what your own parts import: see `cbdsl doctor --on ...`."
    )


def _module() -> Any:  # noqa: ANN401
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # what Ray would otherwise warn of
    try:
        import ray  # noqa: PLC0415
    except ImportError as error:
        if error.name != "ray":
            raise
        raise missing("ray", "ray", "--on names a Ray cluster") from error
    return ray


def _start(ray: Any, on: str, threads: int | None, place: str | None) -> None:  # noqa: ANN401
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if on == HERE:
            ray.init(  # local: whatever RAY_ADDRESS names
                address="local", num_cpus=threads or default_threads(), include_dashboard=False,
                object_store_memory=_STORE, _node_ip_address="127.0.0.1", _temp_dir=place, **quiet,
            )  # fmt: skip
        else:
            os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "2")  # attempts; Ray's usual twenty take minutes
            ray.init(address=on, **quiet)
    except (ConnectionError, RuntimeError, ValueError, OSError, AssertionError) as error:
        words = " ".join(str(error).split())
        raise UserError(
            f"Ray cannot be {'started here' if on == HERE else f'had at {shown(on)}'} ({words}). {_ADVICE[on == HERE]}"
        ) from error


_ADVICE = {
    True: "See `cbdsl doctor --on ray`, or play the run without --on.",
    False: "Start a cluster on its first machine with `ray start --head`, with the same Ray and Python everywhere; "
    "--on auto finds one that this machine belongs to, --on ray://HOST:10001 one elsewhere, and --on ray starts one "
    "here.",
}


def check_place(on: str) -> tuple[str, int]:
    """Refuse what names no place; the host and the port, if it is an address."""
    host, colon, port = on.removeprefix(CLIENT).rpartition(":")
    if on in (HERE, FOUND):
        return "", 0
    if not (colon and host and port.isdecimal() and 0 < int(port[:6]) < 2**16):
        raise UserError(
            f"--on is {shown(on)}; give ray (start a cluster here), auto (the one this machine belongs to), HOST:PORT "
            "or ray://HOST:PORT."
        )
    return host.strip("[]"), int(port)


def _reach(on: str) -> None:
    """Refuse an address that nobody answers at: Ray itself would try for minutes."""
    try:
        socket.create_connection(check_place(on), _REACH).close()
    except OSError as error:
        raise UserError(f"Nobody answers at {on} ({error}). {_ADVICE[False]}") from error


_WAIT = 60.0  # seconds for a machine to answer


def findings(on: str, numbers: int, model: str) -> list[tuple[str, str]]:
    """Pairs of a name and a sentence: of the cluster, of each machine, and of room for workers of so many numbers."""
    with connected(on) as ray:
        have = machines(ray)
        cpus = sum(int(one.cpus) for one in have)
        lines = [("ray", f"{ray.__version__}, {len(have)} machines, {cpus} processors")]
        builds: Counter[str] = Counter()
        for one, told in zip(have, _asked(ray, have), strict=True):
            lines.append((f"  {one.name}"[:12], _machine(one, told)))
            builds[str(told.get("build", ""))] += 1
        if len(set(builds) - {""}) > 1:
            lines.append(("numbers", "machines compute with different instructions: the last digits may differ"))
        each = 12 * numbers
        room = sum(int(one.memory // each) for one in have)
        lines.append(
            (
                "room",
                f"{room:,} workers of {model} ({numbers:,} numbers, {format_bytes(each)} each), less their samples",
            )
        )
        return lines


def _asked(ray: Any, have: list[ClusterNode]) -> list[dict[str, Any]]:  # noqa: ANN401
    """What each machine says of itself; empty where it did not answer."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: PLC0415

    def look() -> dict[str, Any]:  # travels as it is: the machine may not have this package
        try:
            from cbdsl.swarms import shard  # noqa: PLC0415
            from cbdsl.util.memory import free_memory  # noqa: PLC0415

            return {"code": shard.code_digest(), "build": shard.build_of("native"), "free": free_memory()}
        except Exception as error:
            return {"fault": f"{type(error).__name__}: {error}"}

    there = [NodeAffinitySchedulingStrategy(one.node, soft=False) for one in have]
    calls = [ray.remote(num_cpus=0, max_retries=0)(look).options(scheduling_strategy=one).remote() for one in there]
    done, _ = ray.wait(calls, num_returns=len(calls), timeout=_WAIT)
    return [_answer(ray, call) if call in done else {"fault": f"no answer in {_WAIT:.0f} s"} for call in calls]


def _answer(ray: Any, call: Any) -> dict[str, Any]:  # noqa: ANN401
    try:
        return dict(ray.get(call))
    except ray.exceptions.RayError as error:  # such as a machine that ended since
        return {"fault": (str(error).strip().splitlines() or [type(error).__name__])[0]}


def _machine(one: ClusterNode, told: dict[str, Any]) -> str:
    start = f"{one.cpus:g} processors, {format_bytes(int(one.memory))} for Ray"
    if "fault" in told:
        return (
            f"{start}; cannot take part: {told['fault']}. Install the same cbdsl there, for the Python that runs Ray."
        )
    same = "the cbdsl of this machine" if told["code"] == code_digest() else "ANOTHER cbdsl than this machine: install"
    return f"{start}, {format_bytes(told['free'])} free; {told['build']}; {same}"


PATIENCE = 600.0  # seconds to wait for a cluster that has become too small
_LOOK = 5.0  # seconds between looks at a cluster that does not answer
_LOOKS = 4  # looks without any answer until those are mentioned who may use it
_TRIES = 5  # times that a shard is started again before it answers once
_BLOCK = 32 * 2**20  # bytes of rows in one message
_PROCESS = 200 * 2**20  # bytes of an actor without workers: Python, numpy, Ray, blocks of rows that are worked on

_log = logging.getLogger("cbdsl")


@dataclass(eq=False)
class ShardActor:
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
class ShardRecovery:
    """From what a shard that lost its rows gets them back."""

    round: int = 0
    rows: Particles | None = None  # (U, ...), in a checkpoint's file; none: as at the start
    received: Floats | None = None  # (V D,), with those rows; none: the initial model
    orders: list[Order] = field(default_factory=list)  # since then, the present one included


class ShardActors:
    """All actors of a swarm."""

    def __init__(self, ray: Any, recipe: object) -> None:  # noqa: ANN401 - Ray's module
        """Recipe: see `Shard`; put where every machine gets it once."""
        self._ray, self.past, self.actors = ray, ShardRecovery(), list[ShardActor]()
        self._recipe = ray.put(recipe)
        self._cpus = self._memory = 0.0
        self._tokens = count(1)

    def hire(self, plots: Iterable[ShardData], number: int, bytes_each: int) -> None:
        """An actor for each plot; together they must fit. bytes_each: what the workers of the largest one take."""
        have = machines(self._ray)
        self._cpus, self._memory = share_of([one.cpus for one in have], number), float(_PROCESS + bytes_each)
        if room_for(have, self._cpus, self._memory) < number:
            raise UserError(f"The cluster is too small: {self._wants(number)} Use fewer workers or other --shards.")
        options = {"num_cpus": self._cpus, "memory": int(self._memory), "max_restarts": -1, "max_task_retries": 1}
        hired = self._ray.remote(**options, scheduling_strategy="SPREAD")(Shard)
        for plot in plots:
            handle = hired.remote(code_digest(), max(1, int(self._cpus)))
            actor = ShardActor(handle, plot.names, self._ray.put(plot), [handle.facts.remote(0)])
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

    def ask(self, calls: Mapping[ShardActor, tuple[Any, ...]]) -> dict[ShardActor, Any]:
        """Ask actors all at once, each a method and its arguments; one that was started again is first brought up."""
        answers: dict[ShardActor, Any] = {}
        while left := {actor: call for actor, call in calls.items() if actor not in answers}:
            sent = {actor: getattr(actor.handle, name).remote(*rest) for actor, (name, *rest) in left.items()}
            for actor, answer in self._gather(sent).items():
                if isinstance(answer, ShardRestarted):
                    repeated = self.bring_up(actor, without_last=left[actor][0] == "report")
                    _log.warning(f"{actor} was started again, from round {self.past.round} on: {repeated} repeated.")
                else:
                    answers[actor], actor.tries = answer, 0
        return {actor: answers[actor] for actor in calls}

    def bring_up(self, actor: ShardActor, without_last: bool = False) -> int:
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

    def _given(self, actor: ShardActor, orders: list[Order]) -> bool:
        """Give an actor rows and orders; false if it ended meanwhile."""
        past, token, put = self.past, next(self._tokens), self._ray.put
        steps = chain(
            [("prepare", token, self._recipe, actor.plot)],
            (("put", token, *block) for block in _blocks(past.rows, actor.names)),
            [("settle", token, past.round, past.received)],
        )
        for step in steps:
            if isinstance(self._one(actor, step), ShardRestarted):
                return False
        at = past.round
        for order in orders:
            model = None if order.global_best is None else put(order.global_best)
            if isinstance(self._one(actor, ("report", at, actor.own(order), model, ())), ShardRestarted):
                return False
            at = order.round
        return True

    def _one(self, actor: ShardActor, call: tuple[Any, ...]) -> Any:  # noqa: ANN401
        name, *rest = call
        return self._gather({actor: getattr(actor.handle, name).remote(*rest)})[actor]

    def _gather(self, calls: Mapping[ShardActor, Any]) -> dict[ShardActor, Any]:
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
            return ShardRestarted()
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
        each = f"{self._cpus:g} processors and {format_bytes(int(self._memory))} of memory"
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


class RaySwarm(SwarmWithAttackers):
    """U workers in actors of a cluster that Ray is connected to."""

    def __init__(
        self, ray: Any, recipe: ShardRecipe, adversary: Adversary, received: Floats, remembers: bool  # noqa: ANN401
    ) -> None:  # fmt: skip
        """Ray: its module. received: the initial model, (V D,). remembers: whether workers keep anything."""
        super().__init__(received, adversary, recipe.commits)
        self._ray, self._remembers, self._round = ray, remembers, 0
        self._crew = ShardActors(ray, recipe)
        self._known: dict[WorkerId, tuple[Floats, float]] = {}  # what attackers' places would send in this round
        self.facts: list[ShardFacts] = []
        self.note = ""

    def start(self, plots: Iterable[ShardData], number: int, bytes_each: int) -> None:
        """Hire the shards; see `Crew.hire`."""
        try:
            self._crew.hire(plots, number, bytes_each)
            self.facts = list(self._crew.ask(dict.fromkeys(self._crew.actors, ("facts", 0))).values())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the shards."""
        self._crew.end()

    def compare(self, build: str) -> None:
        """Note which machines compute with another build or other instructions than the server's."""
        others = sorted({f"{one.host} ({one.build})" for one in self.facts if one.build != build})
        if others:
            self.note = (
                f"The last digits may differ from those of a run on one machine: the server computes with {build}, "
                f"but {', '.join(others[:5])}{' and others' * (len(others) > 5)} with something else."
            )

    def carry_out(self, order: Order) -> Mapping[WorkerId, Claim]:
        """See `SwarmWithAttackers.carry_out`."""
        before, self._round = self._round, order.round
        if not self._remembers:
            self._crew.past = ShardRecovery(before, None, self._received)
        self._crew.past.orders.append(order)
        self._known = {}
        model = None if order.global_best is None else self._ray.put(order.global_best)
        parts = {actor: actor.own(order) for actor in self._crew.actors}
        told = {actor: self._liars(part.participants) for actor, part in parts.items()}
        calls = {actor: ("report", before, part, model, told[actor]) for actor, part in parts.items()}
        claims: dict[WorkerId, Claim] = {}
        for actor, answer in self._crew.ask(calls).items():
            for worker, lied, score in zip(told[actor], answer.models, answer.own_scores, strict=True):
                self._known[worker] = np.array(lied), float(score)
            said = zip(answer.scores, answer.commitments, strict=True)
            claims |= {
                worker: Claim(float(score), promise)
                for worker, (score, promise) in zip(parts[actor].participants, said, strict=False)
            }
        return claims

    def models_and_scores(self, workers: Sequence[WorkerId]) -> tuple[Floats, Doubles]:
        """See `SwarmWithAttackers.models_and_scores`: those of attackers came with the claims, others are fetched."""
        if workers and all(worker in self._known for worker in workers):
            known = [self._known[worker] for worker in workers]
            return np.stack([model for model, _ in known]), np.array([score for _, score in known])
        models, scores = np.empty((len(workers), len(self._received)), np.float32), np.empty(len(workers))
        places = {worker: place for place, worker in enumerate(workers)}
        for chosen, (rows, own) in self._in_parts("models_and_scores", workers):
            here = [places[worker] for worker in chosen]
            models[here], scores[here] = rows, own
        return models, scores

    def contents(self, workers: Sequence[WorkerId]) -> Sequence[Upload]:
        """See `SwarmWithAttackers.contents`."""
        found: dict[WorkerId, Upload] = {}
        for chosen, sent in self._in_parts("contents", workers):
            for worker, one in zip(chosen, sent, strict=True):  # copied: what Ray gives stays in its store
                found[worker] = one.copy() if isinstance(one, np.ndarray) else one
        return [found[worker] for worker in workers]

    @property
    def kept(self) -> Mapping[str, Any]:
        """See `SwarmWithAttackers.kept`: fetched block by block while they are written."""
        workers = self._crew.actors[-1].names.stop
        return {
            name: InBlocks((workers, *shape), np.dtype(kind), partial(self._blocks, name))
            for name, (shape, kind) in self.facts[0].layout.items()
        }

    def restore(self, particles: Particles | None, round_number: int, received: Floats) -> None:
        """See `SwarmWithAttackers.restore`."""
        self._round, self._received = round_number, received
        self._crew.past = ShardRecovery(round_number, particles, received)
        for actor in self._crew.actors:
            self._crew.bring_up(actor)

    def saved(self, read: Callable[[], Particles | None], round_number: int) -> None:
        """See `SwarmWithAttackers.saved`: a shard that dies from now on begins there."""
        if (particles := read()) is not None:
            self._crew.past = ShardRecovery(round_number, particles, self._received)

    def _liars(self, workers: Iterable[WorkerId]) -> tuple[WorkerId, ...]:
        return tuple(worker for worker in workers if worker in self._attackers)

    def _in_parts(self, method: str, workers: Sequence[WorkerId]) -> Iterator[tuple[Sequence[WorkerId], Any]]:
        """Ask for something of each worker, from all shards at once, a message's worth at a time."""
        row = 4 * len(self._received)
        parts: dict[ShardActor, list[Sequence[WorkerId]]] = {}
        for actor in self._crew.actors:
            own = [worker for worker in workers if worker in actor.names]
            if own:
                parts[actor] = [own[first:last] for first, last in spans(len(own), row)]
        while parts:
            chosen = {actor: left.pop(0) for actor, left in parts.items()}
            calls = {actor: (method, self._round, part) for actor, part in chosen.items()}
            for actor, answer in self._crew.ask(calls).items():
                yield chosen[actor], answer
            parts = {actor: left for actor, left in parts.items() if left}

    def _blocks(self, name: str) -> Iterator[NDArray[Any]]:
        """The rows of one array, of one shard after the other."""
        shape, kind = self.facts[0].layout[name]
        row = int(np.prod(shape)) * np.dtype(kind).itemsize
        for actor in self._crew.actors:
            for first, last in spans(len(actor.names), row):
                yield self._crew.ask({actor: ("block", self._round, name, first, last)})[actor]


@contextlib.contextmanager
def swarm_maker(
    place: str | None, shards: int | None, threads: int | None, own: Callable[[Experiment], Swarm] | None = None
) -> Iterator[Callable[[Experiment], Swarm] | None]:
    """Yield the function that makes a run's swarm: on a cluster if a place is given, stopped afterwards; otherwise own.

    shards: the number of parts the workers are divided into; one per processor if None.
    """
    if place is None:
        if shards is not None:
            raise UserError(
                f"shards is {shards}, but the workers are in this process. Say where they should be: --on.",
                code="no-effect",
            )
        yield own
        return
    if own is not None:
        raise UserError(
            f"on={place!r} and swarm are given; each says where the workers are. Leave one out.", code="conflict"
        )
    if shards is not None and shards < 1:
        raise UserError(f"shards must be at least 1; given {shards}.", code="out-of-range")
    check_place(place)
    with contextlib.ExitStack() as stack:

        def make(experiment: Experiment) -> Swarm:
            _check_engine(experiment.engine.name)
            ray = stack.enter_context(connected(place, threads))
            swarm = build_ray_swarm(experiment, ray, shards)
            stack.callback(swarm.close)
            return swarm

        yield make


def build_ray_swarm(experiment: Experiment, ray: Any, shards: int | None = None) -> RaySwarm:  # noqa: ANN401 - Ray's module
    """Build the workers of an experiment on a cluster that Ray is connected to."""
    spec, server = experiment.spec, experiment.server
    for name in spec.plugins:  # the code in a user's file is sent along; what it imports must be installed there
        module = register.plugin_module(name)
        if module.startswith("cbdsl_plugin_"):
            ray.cloudpickle.register_pickle_by_value(sys.modules[module])
    number = min(spec.workers, shards or max(1, sum(int(one.cpus) for one in machines(ray))))
    codec = server.policy.codecs.up
    recipe = ShardRecipe(
        server.method, codec, replace(experiment.network), experiment.engine.name, spec.local, spec.swarm, spec.seed,
        spec.defence.commitment,
    )  # fmt: skip
    held, adversary = experiment.worker_data_and_adversary()
    edges = [spec.workers * shard // number for shard in range(number + 1)]
    apart = len(experiment.initial) > 1

    def shard_data() -> Iterator[ShardData]:
        for first, last in pairwise(edges):
            initial = experiment.initial[first:last] if apart else experiment.initial
            yield ShardData(range(first, last), initial, part_of(held, first, last))

    swarm = RaySwarm(ray, recipe, adversary, experiment.initial[0], experiment.remembers)
    swarm.start(shard_data(), number, bytes_of_shard(experiment, -(-spec.workers // number)))
    swarm.compare(build_of(experiment.engine.name))
    return swarm


def bytes_of_shard(experiment: Experiment, workers: int) -> int:
    """Return the memory of a shard's state: three rows per worker, their packs, and samples."""
    codec, size = experiment.server.policy.codecs.up, experiment.engine.size
    row = 12 * size + 12 + (codec.longest(size) if codec.relative else 0)
    train, parts = experiment.dataset.train, experiment.split
    own = max(map(len, parts.workers)) * workers
    shared = len(parts.shared_training) + len(parts.shared_scoring)
    sample = train.features[:1].nbytes + 4
    return workers * row + min(own + shared, len(train)) * sample + 4 * own


def _check_engine(name: str) -> None:
    if name not in {"native", "torch"}:
        raise UserError(
            f"On a cluster workers compute on processors, and the engine of this run is {name}: on a GPU the last "
            "digits depend on which workers share it. Add --device cpu, or leave --on out.",
            code="conflict",
        )
