"""Workers on a Ray cluster: connection and nodes, one actor per shard, recovery of lost actors, and `RaySwarm`.

Ray is imported only when a cluster is asked for.
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
from cbdsl.algorithm.worker_table import KeptRows
from cbdsl.arrays import Doubles, Floats, Indices
from cbdsl.attacks.adversary import Adversary
from cbdsl.engines.native_engine import default_threads
from cbdsl.errors import UserError, missing, shown
from cbdsl.swarms.local import SwarmWithAttackers, bytes_of_state
from cbdsl.swarms.shard import (
    Shard,
    ShardData,
    ShardFacts,
    ShardRecipe,
    ShardRestarted,
    code_digest,
    describe_build,
    take_workers,
)
from cbdsl.util.computed import Computed
from cbdsl.util.formatting import format_bytes
from cbdsl.util.npz import InBlocks

if TYPE_CHECKING:
    from cbdsl.runs.build import Experiment

START_HERE, FIND, CLIENT_PREFIX = "ray", "auto", "ray://"
WAIT_SECONDS = 600.0  # to wait for machines when the cluster has become too small
_STORE_BYTES = 500_000_000  # of the object store of a cluster that is started here
_CONNECT_SECONDS = 5.0
_DOCTOR_SECONDS = 60.0  # for a machine to answer `cbdsl doctor`
_POLL_SECONDS = 5.0  # between checks of a cluster that does not answer
_IDLE_POLLS = 4  # checks without an answer until other users of the cluster are mentioned
_MOST_STARTS = 5  # of a shard that never answers
_MESSAGE_BYTES = 32 * 2**20  # of rows in one message
_PROCESS_BYTES = 200 * 2**20  # of an actor without workers: Python, numpy, Ray, and the blocks of rows it works on
_ADVICE_HERE = "See `cbdsl doctor --on ray`, or run without --on."
_ADVICE_ELSEWHERE = (
    "Start a cluster on its first machine with `ray start --head`, with the same Ray and Python everywhere; --on auto "
    "finds one that this machine belongs to, --on ray://HOST:10001 one elsewhere, and --on ray starts one here."
)

_log = logging.getLogger("cbdsl")


@dataclass(frozen=True)
class ClusterNode:
    """A machine of a cluster."""

    name: str
    node: str  # Ray's identifier
    cpus: float
    memory: float  # bytes that Ray may assign


@contextlib.contextmanager
def connect_ray(on: str, threads: int | None = None) -> Iterator[Any]:
    """Connect to the cluster that a user names and yield Ray's module; disconnect afterwards.

    threads: processors of a cluster that is started here; all of this machine if not given.
    """
    host, port = parse_cluster_address(on)
    ray = _import_ray()
    if host:
        try:  # Ray itself would try for minutes
            socket.create_connection((host, port), _CONNECT_SECONDS).close()
        except OSError as error:
            raise UserError(
                f"No connection to {on} ({error}). {_ADVICE_ELSEWHERE}", code="connection-failed"
            ) from error
    if ray.is_initialized():  # by the user's own program, which also shuts it down
        yield ray
        return
    folder = tempfile.mkdtemp(prefix="ray-") if on == START_HERE else None
    try:
        _start_ray(ray, on, threads, folder)
        yield ray
    finally:
        ray.shutdown()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def parse_cluster_address(on: str) -> tuple[str, int]:
    """Return host and port of an address, or ("", 0) for the names `ray` and `auto`; refuse anything else."""
    if on in (START_HERE, FIND):
        return "", 0
    host, colon, port = on.removeprefix(CLIENT_PREFIX).rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port[:6]) < 2**16):
        raise UserError(
            f"--on is {shown(on)}; give ray (start a cluster here), auto (the one this machine belongs to), HOST:PORT "
            "or ray://HOST:PORT.",
            code="invalid-input",
        )
    return host.strip("[]"), int(port)


def _import_ray() -> Any:  # noqa: ANN401 - Ray's module
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # otherwise Ray warns
    try:
        import ray  # noqa: PLC0415
    except ImportError as error:
        if error.name != "ray":
            raise
        raise missing("ray", "ray", "--on names a Ray cluster") from error
    return ray


def _start_ray(ray: Any, on: str, threads: int | None, folder: str | None) -> None:  # noqa: ANN401
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    here = on == START_HERE
    try:
        if here:
            ray.init(  # local: whatever RAY_ADDRESS names
                address="local",
                num_cpus=threads or default_threads(),
                include_dashboard=False,
                object_store_memory=_STORE_BYTES,
                _node_ip_address="127.0.0.1",
                _temp_dir=folder,
                **quiet,
            )
        else:
            os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "2")  # attempts; Ray's usual twenty take minutes
            ray.init(address=on, **quiet)
    except (ConnectionError, RuntimeError, ValueError, OSError, AssertionError) as error:
        what = "be started here" if here else f"be reached at {shown(on)}"
        words, advice = " ".join(str(error).split()), _ADVICE_HERE if here else _ADVICE_ELSEWHERE
        raise UserError(f"Ray cannot {what} ({words}). {advice}", code="connection-failed") from error


def list_nodes(ray: Any) -> list[ClusterNode]:  # noqa: ANN401
    """Return the nodes that are alive."""
    found = []
    for node in ray.nodes():
        if node["Alive"]:
            cpus, memory = (node["Resources"].get(kind, 0.0) for kind in ("CPU", "memory"))
            found.append(ClusterNode(node["NodeManagerHostname"], node["NodeID"], cpus, memory))
    return found


def cpus_per_shard(cpus: Sequence[float], shards: int) -> float:
    """Return how many of the machines' processors each shard can have, a whole number or a fraction."""
    for each in range(int(max(cpus, default=0)), 0, -1):
        if sum(int(have // each) for have in cpus) >= shards:
            return float(each)
    whole = sum(map(int, cpus))
    return int(1e4 / -(-shards // whole)) / 1e4 if whole else 0.0  # Ray's resolution is 1e-4


def count_room(nodes: Sequence[ClusterNode], cpus: float, memory: float) -> int:
    """Return how many shards fit on the nodes. cpus, memory: per shard."""
    return sum(int(min(one.cpus / cpus, one.memory / memory) + 1e-6) for one in nodes) if cpus else 0


def describe_nodes(nodes: Sequence[ClusterNode]) -> str:
    """Return number, names and sizes of nodes as text."""
    each = [f"{one.name} ({one.cpus:g} processors, {format_bytes(int(one.memory))})" for one in nodes]
    return f"{len(nodes)} machine{'s' * (len(nodes) != 1)}: {', '.join(each[:8])}" if nodes else "no machine"


def explain_import_error(error: Any, what: str) -> UserError | None:  # noqa: ANN401 - Ray's error of a task
    """Return an error that says which module a machine lacks, or None if that is not what went wrong."""
    words = str(error.cause).strip()
    last = (words.splitlines() or [type(error.cause).__name__])[-1].strip()
    lacks = "failed to import" in words or last.startswith(("ImportError:", "ModuleNotFoundError:"))
    if not (lacks or isinstance(error.cause, ImportError)):
        return None
    return UserError(
        f"A machine of the cluster cannot import what this {what} needs ({last}). Every machine needs the same cbdsl "
        "and what your own parts import: see `cbdsl doctor --on ...`.",
        code="missing-package",
    )


def diagnose_cluster(on: str, numbers: int, model: str) -> list[tuple[str, str]]:
    """Return lines (name, text) about a cluster, its nodes, and how many workers of a model with D numbers fit."""
    with connect_ray(on) as ray:
        nodes = list_nodes(ray)
        cpus = sum(int(one.cpus) for one in nodes)
        lines = [("ray", f"{ray.__version__}, {len(nodes)} machines, {cpus} processors")]
        builds: Counter[str] = Counter()
        for one, facts in zip(nodes, _ask_nodes(ray, nodes), strict=True):
            lines.append((f"  {one.name}"[:12], _describe_node(one, facts)))
            builds[str(facts.get("build", ""))] += 1
        if len(set(builds) - {""}) > 1:
            lines.append(("numbers", "machines compute with different instructions: the last digits may differ"))
        each = 12 * numbers
        room = sum(int(one.memory // each) for one in nodes)
        size = f"{numbers:,} numbers, {format_bytes(each)} each"
        return [*lines, ("room", f"{room:,} workers of {model} ({size}), less their samples")]


def _ask_nodes(ray: Any, nodes: list[ClusterNode]) -> list[dict[str, Any]]:  # noqa: ANN401
    """Return code, build and free memory of each node, or {"fault": reason}."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: PLC0415

    def look() -> dict[str, Any]:  # sent as it is: the machine may not have this package
        try:
            from cbdsl.swarms import shard  # noqa: PLC0415
            from cbdsl.util.memory import free_memory  # noqa: PLC0415

            return {"code": shard.code_digest(), "build": shard.describe_build("native"), "free": free_memory()}
        except Exception as error:
            return {"fault": f"{type(error).__name__}: {error}"}

    def answer_of(call: Any) -> dict[str, Any]:  # noqa: ANN401
        if call not in done:
            return {"fault": f"no answer in {_DOCTOR_SECONDS:.0f} s"}
        try:
            return dict(ray.get(call))
        except ray.exceptions.RayError as error:  # such as a machine that ended since
            return {"fault": (str(error).strip().splitlines() or [type(error).__name__])[0]}

    there = [NodeAffinitySchedulingStrategy(one.node, soft=False) for one in nodes]
    calls = [ray.remote(num_cpus=0, max_retries=0)(look).options(scheduling_strategy=one).remote() for one in there]
    done, _ = ray.wait(calls, num_returns=len(calls), timeout=_DOCTOR_SECONDS)
    return [answer_of(call) for call in calls]


def _describe_node(one: ClusterNode, facts: dict[str, Any]) -> str:
    start = f"{one.cpus:g} processors, {format_bytes(int(one.memory))} for Ray"
    if "fault" in facts:
        advice = "Install the same cbdsl there, for the Python that runs Ray."
        return f"{start}; cannot take part: {facts['fault']}. {advice}"
    same = "the cbdsl of this machine" if facts["code"] == code_digest() else "a different cbdsl; install this one"
    return f"{start}, {format_bytes(facts['free'])} free; {facts['build']}; {same}"


@dataclass(eq=False)
class ShardActor:
    """The handle of one shard's actor."""

    handle: Any
    workers: range
    data: Any  # a reference to its `ShardData`, for a shard that was restarted
    first_calls: list[Any]  # references to the answers; once the first is ready, the actor runs
    starts: int = 0  # since it last answered

    def __str__(self) -> str:
        return f"The shard of workers {self.workers.start} to {self.workers.stop - 1}"

    def part_of(self, order: Order) -> Order:
        """Return an order to this shard's workers; w^g is sent beside it, through the object store."""
        chosen = tuple(worker for worker in order.participants if worker in self.workers)
        return replace(order, participants=chosen, global_best=None, updates=())


@dataclass(eq=False)
class ShardRecovery:
    """The data from which a restarted shard restores its rows."""

    round: int = 0
    rows: KeptRows | None = None  # mapped from a checkpoint; None: as at the start
    received: Floats | None = None  # (V D,), with those rows; None: the initial model
    orders: list[Order] = field(default_factory=list)  # since then, the current one included


class ShardActors:
    """The actors of a swarm: starts them, asks them, and recovers those that were restarted."""

    def __init__(self, ray: Any, recipe: ShardRecipe) -> None:  # noqa: ANN401 - Ray's module
        self._ray, self.recovery, self.actors = ray, ShardRecovery(), list[ShardActor]()
        self._recipe = ray.put(recipe)
        self._cpus = self._memory = 0.0
        self._tokens = count(1)

    def start(self, parts: Iterable[ShardData], shards: int, bytes_each: int) -> None:
        """Start an actor per part; all must fit. bytes_each: what the workers of the largest one take."""
        nodes = list_nodes(self._ray)
        self._cpus = cpus_per_shard([one.cpus for one in nodes], shards)
        self._memory = float(_PROCESS_BYTES + bytes_each)
        if count_room(nodes, self._cpus, self._memory) < shards:
            raise UserError(
                f"The cluster is too small: {self._describe_needs(shards)} Use fewer workers or other --shards.",
                code="too-large",
            )
        options = {"num_cpus": self._cpus, "memory": int(self._memory), "max_restarts": -1, "max_task_retries": 1}
        actor_class = self._ray.remote(**options, scheduling_strategy="SPREAD")(Shard)
        for part in parts:
            handle = actor_class.remote(code_digest(), max(1, int(self._cpus)))
            actor = ShardActor(handle, part.workers, self._ray.put(part), [handle.facts.remote(0)])
            self.actors.append(actor)
            token = next(self._tokens)  # all at once; a shard that fails to prepare is recovered when it is asked
            prepared = handle.prepare.remote(token, self._recipe, actor.data)
            actor.first_calls += [prepared, handle.settle.remote(token, 0, None)]

    def stop(self) -> None:
        """End the actors."""
        for actor in self.actors:
            for call in actor.first_calls:  # Ray prints errors that were never fetched
                with contextlib.suppress(self._ray.exceptions.RayError):
                    self._ray.get(call, timeout=0)
            self._ray.kill(actor.handle)
        self.actors = []

    def call_all(self, calls: Mapping[ShardActor, tuple[Any, ...]]) -> dict[ShardActor, Any]:
        """Call a method of each actor, (name, *arguments), all at once; recover those that were restarted."""
        answers: dict[ShardActor, Any] = {}
        while left := {actor: call for actor, call in calls.items() if actor not in answers}:
            for actor, answer in self._call(left).items():
                if isinstance(answer, ShardRestarted):
                    replayed = self.recover(actor, without_last=left[actor][0] == "report")
                    _log.warning(f"{actor} was restarted from round {self.recovery.round}: {replayed} replayed.")
                else:
                    answers[actor], actor.starts = answer, 0
        return {actor: answers[actor] for actor in calls}

    def recover(self, actor: ShardActor, without_last: bool = False) -> int:
        """Replay orders until an actor is current; return how many were replayed.

        without_last: leave out the current order, with which the actor is asked again.
        """
        orders = self.recovery.orders[: len(self.recovery.orders) - without_last]
        while True:
            actor.starts += 1
            if actor.starts > _MOST_STARTS:
                raise UserError(
                    f"{actor} was started {_MOST_STARTS} times without an answer, most likely for want of memory: "
                    "Ray's logs on its machine say more. Continue with cbdsl resume.",
                    code="too-large",
                )
            if not any(isinstance(answer, ShardRestarted) for answer in self._replay(actor, orders)):
                return len(orders)

    def _replay(self, actor: ShardActor, orders: list[Order]) -> Iterator[Any]:
        """Give an actor its rows and orders, step by step; yield its answers."""
        past, token = self.recovery, next(self._tokens)
        steps: Iterable[tuple[Any, ...]] = chain(
            [("prepare", token, self._recipe, actor.data)],
            (("put", token, block) for block in _blocks_of(past.rows, actor.workers)),
            [("settle", token, past.round, past.received)],
        )
        for step in steps:
            yield self._call({actor: step})[actor]
        at = past.round
        for order in orders:
            model = None if order.global_best is None else self._ray.put(order.global_best)
            yield self._call({actor: ("report", at, actor.part_of(order), model, ())})[actor]
            at = order.round

    def _call(self, calls: Mapping[ShardActor, tuple[Any, ...]]) -> dict[ShardActor, Any]:
        """Return the actors' answers; wait while the cluster is large enough."""
        sent = {actor: getattr(actor.handle, name).remote(*rest) for actor, (name, *rest) in calls.items()}
        waiting, since, idle = list(sent.values()), None, 0
        while waiting:
            done, waiting = self._ray.wait(waiting, num_returns=len(waiting), timeout=_POLL_SECONDS)
            idle = 0 if done else idle + 1
            if done or count_room(list_nodes(self._ray), self._cpus, self._memory) >= len(self.actors):
                since = None
                if idle == _IDLE_POLLS:
                    self._warn_of_waiting()
            elif waiting:
                since = self._wait_for_machines(since)
        return {actor: self._answer_of(call) for actor, call in sent.items()}

    def _answer_of(self, call: Any) -> Any:  # noqa: ANN401
        """Return the answer to a call; `ShardRestarted` if it was lost with the machine that had it."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(call)
        except (errors.ObjectLostError, errors.ActorUnavailableError):
            return ShardRestarted()
        except errors.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise UserError(str(error.cause), code=error.cause.code) from error
            raise explain_import_error(error, "run") or error from None
        except errors.RayActorError as error:
            words = str(error)
            _, found, own = words.partition(f"{UserError.__name__}: ")
            started = f"A shard cannot be started on its machine: {' '.join(words.split())} See"
            advice = "`cbdsl doctor --on ...`: every machine needs the same cbdsl and what the run's own parts import."
            raise UserError(own.strip() if found else f"{started} {advice}", code="connection-failed") from error

    def _warn_of_waiting(self) -> None:
        """Warn that shards have not started although they fit: others may use the cluster for long."""
        starts = [actor.first_calls[0] for actor in self.actors]
        _, missing_starts = self._ray.wait(starts, num_returns=len(starts), timeout=0)
        if missing_starts:
            _log.warning(
                f"{len(missing_starts)} of {len(starts)} shards have not started yet, although the cluster is large "
                "enough: others seem to use its processors or its memory. Waiting until there is room."
            )

    def _wait_for_machines(self, since: float | None) -> float:
        now = time.monotonic()
        small = f"The cluster has become too small: {self._describe_needs(len(self.actors))}"
        if since is None:
            _log.warning(f"{small} Waiting {WAIT_SECONDS / 60:g} minutes for machines.")
        elif now - since > WAIT_SECONDS:
            raise UserError(
                f"{small} Add machines, and continue with cbdsl resume and the same --on, or here without it.",
                code="too-large",
            )
        return now if since is None else since

    def _describe_needs(self, shards: int) -> str:
        each = f"{self._cpus:g} processors and {format_bytes(int(self._memory))} of memory"
        return f"{shards} shards need {each} each, and it has {describe_nodes(list_nodes(self._ray))}."


def row_spans(rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut rows into spans (first, end) that fit into one message each."""
    step = max(1, _MESSAGE_BYTES // max(1, row_bytes))
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


def _blocks_of(rows: KeptRows | None, workers: range) -> Iterator[KeptRows]:
    """Yield saved rows in blocks, those of some workers."""
    if rows is None:
        return
    own = np.flatnonzero((rows.workers >= workers.start) & (rows.workers < workers.stop))
    for first, end in row_spans(len(own), sum(array[:1].nbytes for array in rows.arrays.values())):
        chosen = own[first:end]
        yield KeptRows(rows.workers[chosen], {name: np.array(array[chosen]) for name, array in rows.arrays.items()})


class RaySwarm(SwarmWithAttackers):
    """Workers in shards on a Ray cluster; attackers answer in this process."""

    def __init__(
        self,
        ray: Any,  # noqa: ANN401 - Ray's module
        recipe: ShardRecipe,
        adversary: Adversary,
        received: Floats,
        remembers: bool,
    ) -> None:
        """received: the initial model, (V D,). remembers: whether workers keep anything between rounds."""
        super().__init__(received, adversary, recipe.commits)
        self._ray, self._remembers, self._round = ray, remembers, 0
        self.shards = ShardActors(ray, recipe)
        self._own: dict[WorkerId, tuple[Floats, float]] = {}  # attackers' honest model and score in this round
        self.facts: list[ShardFacts] = []

    def start(self, parts: Iterable[ShardData], shards: int, bytes_each: int) -> None:
        """Start the shards; see `ShardActors.start`."""
        try:
            self.shards.start(parts, shards, bytes_each)
            self.facts = list(self.shards.call_all(dict.fromkeys(self.shards.actors, ("facts", 0))).values())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the shards."""
        self.shards.stop()

    def compare_builds(self, build: str) -> None:
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
            self.shards.recovery = ShardRecovery(before, None, self._received)
        self.shards.recovery.orders.append(order)
        self._own = {}
        model = None if order.global_best is None else self._ray.put(order.global_best)
        parts = {actor: actor.part_of(order) for actor in self.shards.actors}
        attackers = {
            actor: tuple(worker for worker in part.participants if worker in self._attackers)
            for actor, part in parts.items()
        }
        calls = {actor: ("report", before, part, model, attackers[actor]) for actor, part in parts.items()}
        claims: dict[WorkerId, Claim] = {}
        for actor, answer in self.shards.call_all(calls).items():
            for worker, own, score in zip(attackers[actor], answer.models, answer.own_scores, strict=True):
                self._own[worker] = np.array(own), float(score)
            found = zip(parts[actor].participants, answer.scores, answer.commitments, strict=False)
            claims |= {worker: Claim(float(score), commitment) for worker, score, commitment in found}
        return claims

    def models_and_scores(self, workers: Sequence[WorkerId]) -> tuple[Floats, Doubles]:
        """See `SwarmWithAttackers.models_and_scores`: those of attackers came with the claims, others are fetched."""
        models, scores = np.empty((len(workers), len(self._received)), np.float32), np.empty(len(workers))
        if workers and all(worker in self._own for worker in workers):
            for place, worker in enumerate(workers):
                models[place], scores[place] = self._own[worker]
            return models, scores
        places = {worker: place for place, worker in enumerate(workers)}
        for chosen, (rows, own) in self._ask_in_parts("models_and_scores", workers):
            here = [places[worker] for worker in chosen]
            models[here], scores[here] = rows, own
        return models, scores

    def personal(self, workers: Sequence[WorkerId]) -> dict[WorkerId, Floats]:
        """See `SwarmWithAttackers.personal`."""
        found: dict[WorkerId, Floats] = {}
        for _, rows in self._ask_in_parts("personal", workers):
            found |= {worker: np.array(row) for worker, row in rows.items()}
        return {worker: found[worker] for worker in workers if worker in found}

    def contents(self, workers: Sequence[WorkerId]) -> Sequence[Upload]:
        """See `SwarmWithAttackers.contents`."""
        found: dict[WorkerId, Upload] = {}
        for chosen, sent in self._ask_in_parts("contents", workers):
            for worker, one in zip(chosen, sent, strict=True):  # copied: Ray's arrays stay in its store
                found[worker] = one.copy() if isinstance(one, np.ndarray) else one
        return [found[worker] for worker in workers]

    @property
    def kept(self) -> Mapping[str, Any]:
        """See `SwarmWithAttackers.kept`: fetched block by block while they are written."""
        own = self.shards.call_all(dict.fromkeys(self.shards.actors, ("kept_workers", self._round)))
        workers = np.concatenate(list(own.values()))
        arrays = {
            name: InBlocks((len(workers), *shape), np.dtype(kind), partial(self._fetch_blocks, name, own))
            for name, (shape, kind) in self.facts[0].layout.items()
        }
        return {"workers": workers, **arrays}

    def restore(self, rows: KeptRows | None, round_number: int, received: Floats) -> None:
        """See `SwarmWithAttackers.restore`."""
        self._round, self._received = round_number, received
        layout = self.facts[0].layout  # a checkpoint of an earlier version has more arrays than are kept
        kept = None if rows is None else KeptRows(rows.workers, {name: rows.arrays[name] for name in layout})
        self.shards.recovery = ShardRecovery(round_number, kept, received)
        for actor in self.shards.actors:
            self.shards.recover(actor)

    def saved(self, read: Callable[[], KeptRows | None], round_number: int) -> None:
        """See `SwarmWithAttackers.saved`: a shard that is restarted from now on begins there."""
        if (rows := read()) is not None:
            self.shards.recovery = ShardRecovery(round_number, rows, self._received)

    def _ask_in_parts(self, method: str, workers: Sequence[WorkerId]) -> Iterator[tuple[Sequence[WorkerId], Any]]:
        """Ask all shards about their workers at once, as many workers per message as fit; yield workers and answer."""
        row = 4 * len(self._received)
        left: dict[ShardActor, list[Sequence[WorkerId]]] = {}
        for actor in self.shards.actors:
            own = [worker for worker in workers if worker in actor.workers]
            left[actor] = [own[first:end] for first, end in row_spans(len(own), row)]
        while left := {actor: parts for actor, parts in left.items() if parts}:
            chosen = {actor: parts.pop(0) for actor, parts in left.items()}
            calls = {actor: (method, self._round, part) for actor, part in chosen.items()}
            for actor, answer in self.shards.call_all(calls).items():
                yield chosen[actor], answer

    def _fetch_blocks(self, name: str, workers: Mapping[ShardActor, Indices]) -> Iterator[NDArray[Any]]:
        """Yield the rows of one array, shard by shard."""
        shape, kind = self.facts[0].layout[name]
        row = int(np.prod(shape)) * np.dtype(kind).itemsize
        for actor, own in workers.items():
            for first, end in row_spans(len(own), row):
                yield self.shards.call_all({actor: ("block", self._round, name, own[first:end])})[actor]


@contextlib.contextmanager
def swarm_maker(
    on: str | None, shards: int | None, threads: int | None, own: Callable[[Experiment], Swarm] | None = None
) -> Iterator[Callable[[Experiment], Swarm] | None]:
    """Yield the function that makes a run's swarm: on a cluster if `on` names one, stopped afterwards; otherwise own.

    shards: the number of parts the workers are divided into; one per processor if None.
    """
    if on is None:
        if shards is not None:
            raise UserError(
                f"shards is {shards}, but the workers are in this process. Say where they should be: --on.",
                code="no-effect",
            )
        yield own
        return
    if own is not None:
        raise UserError(
            f"on={on!r} and swarm are given; each says where the workers are. Leave one out.", code="conflict"
        )
    if shards is not None and shards < 1:
        raise UserError(f"shards must be at least 1; given {shards}.", code="out-of-range")
    parse_cluster_address(on)
    with contextlib.ExitStack() as stack:

        def make(experiment: Experiment) -> Swarm:
            _check_engine(experiment.engine.name)
            ray = stack.enter_context(connect_ray(on, threads))
            swarm = build_ray_swarm(experiment, ray, shards)
            stack.callback(swarm.close)
            return swarm

        yield make


def build_ray_swarm(experiment: Experiment, ray: Any, shards: int | None = None) -> RaySwarm:  # noqa: ANN401 - Ray's module
    """Build the workers of an experiment on a cluster that Ray is connected to."""
    spec, server = experiment.spec, experiment.server
    for name in spec.plugins:  # a user's files are sent along; what else they import must be installed there
        for module in register.plugin_modules(name):
            ray.cloudpickle.register_pickle_by_value(sys.modules[module])
    shards = min(spec.workers, shards or max(1, sum(int(one.cpus) for one in list_nodes(ray))))
    codec = server.policy.codecs.up
    network = replace(experiment.network)  # without cached modules
    held, adversary = experiment.worker_data_and_adversary()
    computed = isinstance(held.training, Computed)
    recipe = ShardRecipe(
        server.worker_method, codec, network, experiment.engine.name, spec.local, spec.swarm, spec.seed,
        spec.defence.commitment, experiment.loss, experiment.augmentation, held if computed else None,
    )  # fmt: skip
    edges = [spec.workers * shard // shards for shard in range(shards + 1)]
    apart = len(experiment.initial) > 1

    def shard_data() -> Iterator[ShardData]:
        for first, last in pairwise(edges):
            initial = experiment.initial[first:last] if apart else experiment.initial
            own = None if computed else take_workers(held, first, last)
            yield ShardData(range(first, last), initial, own)

    swarm = RaySwarm(ray, recipe, adversary, experiment.initial[0], experiment.remembers)
    swarm.start(shard_data(), shards, bytes_of_shard(experiment, -(-spec.workers // shards)))
    swarm.compare_builds(describe_build(experiment.engine.name))
    return swarm


def bytes_of_shard(experiment: Experiment, workers: int) -> int:
    """Return the memory of a shard's state: its workers' rows, and samples."""
    spec, server = experiment.spec, experiment.server
    kept, moved = bytes_of_state(server.worker_method, spec, experiment.engine.size, server.policy.codecs.up, workers)
    train, parts = experiment.dataset.train, experiment.split
    sample = train.features[:1].nbytes + 4
    if isinstance(parts.workers, Computed):
        return kept + moved + len(train) * sample
    own = parts.most_samples * workers
    shared = len(parts.shared_training) + len(parts.shared_scoring)
    return kept + moved + min(own + shared, len(train)) * sample + 4 * own


def _check_engine(name: str) -> None:
    if name not in {"native", "torch"}:
        raise UserError(
            f"On a cluster workers compute on processors, and the engine of this run is {name}: on a GPU the last "
            "digits depend on which workers share it. Add --device cpu, or leave --on out.",
            code="conflict",
        )
