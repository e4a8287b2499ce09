"""A shard: a range of a swarm's workers in a process of its own, on any machine of a cluster.

It contains no state that cannot be sent to it again: a shard that died is replaced, and gets its rows and orders.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cbdsl
from cbdsl.algorithm.messages import Order, Upload, WorkerId
from cbdsl.algorithm.methods import Method
from cbdsl.algorithm.worker_round import LocalWorkers, TrainingSet, WorkerData
from cbdsl.algorithm.worker_table import KeptRows
from cbdsl.arrays import PADDING, Doubles, Floats, Indices, Samples
from cbdsl.codecs.codec import Codec
from cbdsl.engines import native_engine
from cbdsl.engines.augmentations import Augmentation
from cbdsl.engines.choose import choose_engine
from cbdsl.engines.loss import CROSS_ENTROPY, Loss
from cbdsl.errors import UserError
from cbdsl.models.network import Network
from cbdsl.spec import LocalSpec, SwarmSpec
from cbdsl.swarms.local import LocalSwarm
from cbdsl.util.computed import Computed


@dataclass(frozen=True, eq=False)
class ShardRecipe:
    """What all shards of a run have in common."""

    method: Method
    codec: Codec  # how workers send models
    network: Network
    engine: str  # the one that the server has
    local: LocalSpec
    swarm: SwarmSpec
    seed: int
    commits: bool  # whether claims come with a digest of their model
    loss: Loss = CROSS_ENTROPY
    augmentation: Augmentation | None = None
    held: WorkerData | None = None  # of all workers, where it is computed when it is needed


@dataclass(frozen=True, eq=False)
class ShardData:
    """What one shard alone needs."""

    workers: range
    initial: Floats  # (1, D) for all, or (k, D)
    held: WorkerData | None  # the samples of its workers and the shared ones, and no others; None: see `ShardRecipe`


@dataclass(frozen=True)
class ShardFacts:
    """Where a shard runs, and what its numbers depend on beside the run."""

    host: str
    build: str  # the native engine's instructions, compiler and sources, or torch's version
    layout: dict[str, tuple[tuple[int, ...], str]]  # of its arrays by name: shape of a row, and type


@dataclass(frozen=True, eq=False)
class ShardAnswer:
    """A shard's answer to an order."""

    scores: Floats  # (k,), what the participants claim
    commitments: tuple[bytes, ...]
    models: Floats  # (f, V D), what attackers would send if they were honest
    own_scores: Doubles  # (f,)


@dataclass(frozen=True)
class ShardRestarted:
    """The answer of a shard that was restarted and lost its rows."""


class Shard:
    """Some workers of a swarm. `at` in every call is the round after which the caller expects the rows to be."""

    _rows: LocalSwarm  # once it is prepared

    def __init__(self, code: str, threads: int) -> None:
        """code: the caller's `code_digest`. threads: of its engine. It has no workers until `prepare` is called."""
        if code != code_digest():
            raise UserError(
                f"{platform.node()} has another cbdsl ({cbdsl.__version__}, {code_digest()}) than the machine that "
                f"asks ({code}). Install the same one on every machine, and start Ray there again.",
                code="conflict",
            )
        self._threads, self._token, self._at = threads, 0, -1
        self._layout: dict[str, tuple[tuple[int, ...], str]] = {}

    def prepare(self, token: int, recipe: ShardRecipe, data: ShardData) -> None:
        """Build the rows as at the start. The caller with this token may fill them; `settle` makes them valid."""
        if self._token:
            del self._rows  # first: a machine has room for one set of rows
        self._token, self._at = 0, -1
        network = recipe.network
        engine = choose_engine(
            recipe.engine, network.subject, network.shape, self._threads, "cpu", recipe.loss, recipe.augmentation
        ).engine
        held = data.held
        if held is None:
            assert recipe.held is not None
            held = take_workers(recipe.held, data.workers.start, data.workers.stop)
        workers = LocalWorkers(
            engine, held, recipe.local, recipe.swarm, recipe.seed, data.workers, recipe.method.gradients,
            recipe.codec,
        )  # fmt: skip
        self._rows = LocalSwarm(recipe.method, workers, data.initial, commits=recipe.commits)
        self._layout = {name: (shape, kind.str) for name, (shape, kind) in self._rows.table.layout.items()}
        self._token, self._at, self._build = token, -1, describe_build(recipe.engine)

    def facts(self, at: int) -> ShardFacts | ShardRestarted:
        """Return what the caller should know of this shard."""
        return ShardFacts(platform.node(), self._build, self._layout) if at == self._at else ShardRestarted()

    def report(
        self, at: int, order: Order, model: Floats | None, attackers: Sequence[WorkerId]
    ) -> ShardAnswer | ShardRestarted:
        """Carry an order out. model: w^g, if it is new. attackers: those whose honest answers are returned, too."""
        if order.round == self._at != at:  # asked twice: the answer was lost
            claims = self._rows.claims(order)
        elif self._at != at:
            return ShardRestarted()
        else:
            self._at = -1  # if this is interrupted, the rows are those of no round
            claims = self._rows.report(replace(order, global_best=model))
            self._at = order.round
        return ShardAnswer(
            np.array([claim.score for claim in claims.values()], np.float32),
            tuple(claim.commitment for claim in claims.values()),
            *self._rows.models_and_scores(attackers),
        )

    def models_and_scores(self, at: int, workers: Sequence[WorkerId]) -> tuple[Floats, Doubles] | ShardRestarted:
        """Return what these workers would send, (k, V D), and claim, (k,)."""
        return self._rows.models_and_scores(workers) if at == self._at else ShardRestarted()

    def personal(self, at: int, workers: Sequence[WorkerId]) -> dict[WorkerId, Floats] | ShardRestarted:
        """Return these workers' own models, (D,); see `SwarmWithAttackers.personal`."""
        return self._rows.personal(workers) if at == self._at else ShardRestarted()

    def contents(self, at: int, workers: Sequence[WorkerId]) -> list[Upload] | ShardRestarted:
        """Return the uploads of these workers."""
        return self._rows.contents(workers) if at == self._at else ShardRestarted()

    def kept_workers(self, at: int) -> Indices | ShardRestarted:
        """Return the workers that have rows, (n,)."""
        return self._rows.table.workers if at == self._at else ShardRestarted()

    def block(self, at: int, name: str, workers: Indices) -> NDArray[Any] | ShardRestarted:
        """Return the rows of some workers of one array that is kept."""
        return self._rows.table.take(name, workers.tolist()) if at == self._at else ShardRestarted()

    def put(self, token: int, rows: KeptRows) -> ShardRestarted | None:
        """Add rows for workers that have none. A shard with another token was restarted."""
        if token != self._token:
            return ShardRestarted()
        self._rows.table.add(rows.workers.tolist(), rows.arrays)
        return None

    def settle(self, token: int, at: int, received: Floats | None) -> ShardRestarted | None:
        """Declare the rows to be those after a round. received: what the server last sent."""
        if token != self._token:
            return ShardRestarted()
        if received is not None:
            self._rows.restore(None, at, received)
        self._at = at
        return None


def take_workers(held: WorkerData, first: int, last: int) -> WorkerData:
    """Return the data of some workers, with the samples that they need and no others."""
    lessons = held.training[first:last]
    shared = isinstance(held.scoring, np.ndarray) and held.scoring.ndim == 1
    scoring = held.scoring if shared else held.scoring[first:last]
    if isinstance(lessons, Computed) or not isinstance(scoring, np.ndarray):
        return WorkerData(lessons, held.scored, scoring)  # any of the samples may be needed
    used: dict[int, tuple[Samples, list[Indices]]] = {id(held.scored): (held.scored, [scoring.ravel()])}
    for lesson in lessons:
        used.setdefault(id(lesson.samples), (lesson.samples, []))[1].append(lesson.indices)
    kept = {pool: np.unique(np.concatenate(lists)) for pool, (_, lists) in used.items()}
    kept = {pool: indices[indices != PADDING] for pool, indices in kept.items()}
    pools = {pool: samples.taken(kept[pool]) for pool, (samples, _) in used.items()}

    def moved(pool: int, indices: Indices) -> Indices:
        places = np.searchsorted(kept[pool], indices).astype(np.int32)
        return np.where(indices == PADDING, np.int32(PADDING), places)

    training = (TrainingSet(pools[id(one.samples)], moved(id(one.samples), one.indices)) for one in lessons)
    return WorkerData(tuple(training), pools[id(held.scored)], moved(id(held.scored), scoring))


def describe_build(engine: str) -> str:
    """Return what the last digits depend on beside the code: the native engine's build, or torch's version."""
    if engine == "native":
        info = native_engine.info()
        return f"{info.instructions}, {info.compiler}, kernels {info.kernels}"
    from importlib import metadata  # noqa: PLC0415

    return f"torch {metadata.version('torch')} on {platform.machine()}"


@cache
def code_digest() -> str:
    """Return a digest of the package's Python files; machines with the same one compute the same rounds."""
    home, digest = Path(cbdsl.__file__).parent, hashlib.sha256()
    for file in sorted(home.rglob("*.py")):
        digest.update(str(file.relative_to(home)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
