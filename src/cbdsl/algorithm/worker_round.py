"""A worker's round: its samples and batches, training, scoring, random numbers, and what it remembers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cbdsl.algorithm.particles import Coefficients, Particles, remember, remember_sent
from cbdsl.arrays import PADDING, Bools, Doubles, Floats, Indices, Samples
from cbdsl.codecs.codec import Codec, Sent
from cbdsl.codecs.envelope import KEPT_VERSIONS
from cbdsl.codecs.quantize import Whole
from cbdsl.engines.engine import Engine, ExtraLoss, LossTerm, Sgd, engine_with_terms
from cbdsl.errors import renamed
from cbdsl.rng import seed_of, stream
from cbdsl.spec import LocalSpec, SwarmSpec


def pad_rows(rows: Sequence[Indices]) -> Indices:
    """Stack rows of different lengths, padded with -1."""
    table = np.full((len(rows), max(map(len, rows))), PADDING, dtype=np.int32)
    for worker, row in enumerate(rows):
        table[worker, : len(row)] = row
    return table


def draw_batches(samples: Indices, local: LocalSpec, rng: np.random.Generator) -> Indices:
    """Draw a worker's batches of one round, (S, B): epochs in random order, the last batch of an epoch padded."""
    per_epoch = -(-len(samples) // local.batch_size)
    epochs = -(-local.steps // per_epoch) if local.steps else local.epochs
    table = np.full((epochs, per_epoch * local.batch_size), PADDING, dtype=np.int32)
    for epoch in table:
        epoch[: len(samples)] = rng.permutation(samples)
    rows = table.reshape(epochs * per_epoch, local.batch_size)
    return rows[: local.steps] if local.steps else rows


def stack_batches(rows: Sequence[Indices]) -> Indices:
    """Stack the batches of several workers, (k, S, B), padded with empty batches."""
    batches = np.full((len(rows), max(map(len, rows)), rows[0].shape[1]), PADDING, dtype=np.int32)
    for row, own in zip(batches, rows, strict=True):
        row[: len(own)] = own
    return batches


@dataclass(frozen=True, eq=False)
class TrainingSet:
    """The samples that one worker trains on: some of a pool."""

    samples: Samples
    indices: Indices


@dataclass(frozen=True, eq=False)
class WorkerData:
    """The samples that each worker trains on and scores on."""

    training: Sequence[TrainingSet]  # D_i, and D_tr where it is shared; one per row
    scored: Samples  # the pool of `scoring`
    scoring: Indices | Sequence[Indices]  # (N,) D_sc, the same for all; or each worker's own D_i, (U, N) if padded

    def scoring_of(self, rows: Indices) -> Indices:
        """Return the samples on which the workers in some rows score: (N,) if the same for all, or (k, N), padded."""
        if isinstance(self.scoring, np.ndarray):
            return self.scoring if self.scoring.ndim == 1 else self.scoring[rows]
        return pad_rows([self.scoring[row] for row in rows.tolist()])


@dataclass(frozen=True, eq=False)
class LocalWorkers:
    """Workers in rows: their data and settings, and the number that names each one's random stream."""

    engine: Engine
    held: WorkerData
    local: LocalSpec
    swarm: SwarmSpec
    seed: int
    names: Sequence[int]  # the number of the worker in each row
    gradients: bool = True  # whether the method trains
    codec: Codec = field(default_factory=Whole)  # how they send models

    def at(
        self, rows: Indices, round_number: int, inertia: float, learning_rate: float, version: int = 0
    ) -> WorkerRound:
        """Return some of the workers in one round. version: of the w^g that they have."""
        return WorkerRound(self, rows, round_number, inertia, learning_rate, version)


@dataclass(frozen=True, eq=False)
class WorkerRound:
    """k workers in one round: what `Method.move` uses to train, score, draw and remember.

    >>> work = WorkerRound(None, np.arange(2), round=1, inertia=0.5, learning_rate=0.01)
    >>> work.from_server(np.zeros(3, np.float32)).shape
    (2, 3)
    """

    workers: LocalWorkers
    rows: Indices  # (k,)
    round: int
    inertia: float  # c0
    learning_rate: float  # alpha
    version: int = 0  # of w^g
    own: tuple[Bools, Floats] | None = None  # which weights stay on their worker, (D,), and where they are, (k, D)

    @property
    def swarm(self) -> SwarmSpec:
        """The settings of the update equation."""
        return self.workers.swarm

    @property
    def momentum(self) -> float:
        """Of local SGD; 0 for another optimiser."""
        return self.workers.local.momentum if self.workers.local.optimiser == "sgd" else 0.0

    def train(
        self,
        start: Floats,
        proximal: float = 0.0,
        corrections: Floats | None = None,
        term: LossTerm | None = None,
        others: Mapping[str, Floats] | None = None,
    ) -> Floats:
        """Run local SGD from given positions, (k, D); return a new array (k, D).

        proximal: pulls every step back to where the row started. corrections: (k, D), added to every gradient.
        term: returns one number that is added to the loss of a batch; it requires torch, see `Method.adds_loss`.
        others: models (k, D) by name; the term gets their outputs on each batch.
        """
        owner, local = self.workers, self.workers.local
        if not owner.gradients:
            return start.copy()
        sgd = Sgd.of(local, self.learning_rate, proximal)
        lessons = [owner.held.training[row] for row in self.rows]
        trained = np.empty((len(self.rows), owner.engine.size), np.float32)
        for pool in {id(lesson.samples): lesson.samples for lesson in lessons}.values():
            chosen = np.array([lesson.samples is pool for lesson in lessons])
            everybody = bool(chosen.all())
            names = [owner.names[row] for row in self.rows[chosen]]
            own = [lesson.indices for lesson in lessons if lesson.samples is pool]
            streams = [stream(owner.seed, "batches", self.round, name) for name in names]
            batches = stack_batches([draw_batches(held, local, rng) for held, rng in zip(own, streams, strict=True)])
            seeds = np.array([seed_of(owner.seed, "layers", self.round, name) for name in names], dtype=np.uint64)
            rows, corrected = start, corrections
            if not everybody:
                rows, corrected = start[chosen], None if corrections is None else corrections[chosen]
            rows = np.ascontiguousarray(rows)
            if term is None:
                result = owner.engine.train(rows, pool, batches, sgd, seeds, corrected)
            else:
                extra = ExtraLoss(term, {name: other[chosen] for name, other in (others or {}).items()})
                result = engine_with_terms(owner.engine).train(rows, pool, batches, sgd, seeds, corrected, extra)
            if everybody:
                return result
            trained[chosen] = result
        return trained

    def scores(self, positions: Floats, ceilings: Doubles | None = None) -> Doubles:
        """Return F of each position (k, D) on D_sc, or on the worker's own samples if D_sc is not shared, (k,)."""
        held = self.workers.held
        return self.workers.engine.losses(positions, held.scored, held.scoring_of(self.rows), ceilings)

    def coefficients(self) -> Coefficients:
        """Draw c1 ~ U(0, delta_1) and c2 ~ U(0, delta_2), for each worker from its own stream."""
        owner, settings = self.workers, self.workers.swarm
        width = owner.engine.size if settings.draw == "parameter" else 1
        drawn = np.empty((2, len(self.rows), width), np.float32)
        for place, row in enumerate(self.rows):
            source = stream(owner.seed, "coefficients", self.round, owner.names[row])
            drawn[:, place] = source.random((2, width), np.float32)
        drawn *= np.array([settings.cognitive, settings.social], np.float32)[:, None, None]
        return Coefficients(self.inertia, drawn[0], drawn[1])

    def steps(self) -> Doubles:
        """Return how many SGD steps each worker takes in the round, (k,)."""
        lessons = self.workers.held.training
        return np.array([float(count_steps(len(lessons[row].indices), self.workers.local)) for row in self.rows])

    def from_server(self, model: Floats) -> Floats:
        """Copy the server's model (D,) into every row, (k, D), except weights that stay on their worker."""
        rows = np.repeat(model[None], len(self.rows), axis=0)  # not a view: torch needs rows that can be written
        if self.own is not None:
            places, kept = self.own
            rows[:, places] = kept[:, places]
        return rows

    def with_newcomers(self, rows: Particles, model: Floats) -> Particles:
        """Initialise workers that take part for the first time (Algorithm 1): F^p_{i,0} = F_i(w_{i,0}).

        They start at the server's model (D,), in round 1 the common initial one; or where they are, if the swarm
        starts apart.
        """
        fresh = np.isinf(rows.personal_score)
        if not fresh.any():
            return rows
        positions = rows.positions
        if self.swarm.start == "together":
            positions = np.where(fresh[:, None], model, positions)
        return self.remember_best(replace(rows, positions=positions), positions, rows.velocities, model, fresh)

    def remember_best(
        self, rows: Particles, positions: Floats, velocities: Floats, received: Floats, which: Bools | None = None
    ) -> Particles:
        """Score new positions (k, D) and keep the better of them and w^p (Eq. 6); with a codec, as they are decoded.

        received: w^g (D,), against which the codec packs. which: (k,), the rows to score; all if not given.
        """
        chosen = np.flatnonzero(np.ones(len(self.rows), bool) if which is None else which).astype(np.int32)
        part = replace(self, rows=self.rows[chosen])
        moved = np.ascontiguousarray(positions if which is None else positions[chosen])

        def scores(models: Floats) -> Doubles:
            return part.scores(models, None if which is not None else rows.personal_score)

        if not self.workers.codec.relative:
            found = np.full(len(self.rows), np.inf)
            found[chosen] = scores(moved)
            return remember(rows, positions, velocities, found)
        sent = self.workers.codec.transmit(moved, received, scores)
        if which is not None:
            sent = _spread(sent, chosen, rows)
        return remember_sent(rows, positions, velocities, sent, self.version)

    def repack_old(self, rows: Particles, received: Floats) -> Particles:
        """Pack and score again the personal bests that were packed against a w^g that the server no longer keeps."""
        old = np.isfinite(rows.personal_score) & (rows.versions <= self.version - KEPT_VERSIONS)
        if not (self.workers.codec.relative and old.any()):
            return rows
        forgotten = replace(rows, personal_score=np.where(old, np.inf, rows.personal_score))
        again = self.remember_best(forgotten, rows.personal_best, rows.velocities, received, old)
        return replace(again, positions=rows.positions)

    def pack_uploads(self, rows: Particles, uploads: Floats, received: Floats) -> Particles:
        """Pack uploads that no worker scores, (k, D), against what the server sent.

        What a codec with feedback leaves out is stored in the velocities, and added to the next upload.
        """
        codec = self.workers.codec
        whole = uploads + rows.velocities if codec.feedback else uploads
        sent = codec.transmit(np.ascontiguousarray(whole), received, None)
        left = np.nan_to_num(whole - sent.models, nan=0.0, posinf=0.0, neginf=0.0)
        return replace(
            rows,
            velocities=left if codec.feedback else rows.velocities,
            packs=sent.packs,
            versions=np.full(len(uploads), self.version, np.int32),
        )

    def place(self, rows: Particles, positions: Floats, velocities: Floats | None = None) -> Particles:
        """Return the workers at other positions, and with other velocities if they are given."""
        return replace(rows, positions=positions, velocities=rows.velocities if velocities is None else velocities)

    remembered = renamed("remembered", remember_best)  # old names, until 1.0
    rebased = renamed("rebased", repack_old)
    packed = renamed("packed", pack_uploads)
    placed = renamed("placed", place)


def _spread(sent: Sent, chosen: Indices, rows: Particles) -> Sent:
    """Put the results of some rows at their places among all; scores elsewhere are infinite."""
    packs, models = rows.packs.copy(), rows.personal_best.copy()
    scores = np.full(len(rows.versions), np.inf)
    packs[chosen], models[chosen], scores[chosen] = sent.packs, sent.models, sent.scores
    return Sent(packs, models, scores)


def count_steps(samples: int, local: LocalSpec) -> int:
    """Return how many SGD steps a worker takes in a round. samples: how many it has."""
    return local.steps or local.epochs * -(-samples // local.batch_size)


def make_scorer(engine: Engine, samples: Samples, indices: Indices) -> Callable[[Floats], float]:
    """Return a function that computes a model's loss on some samples."""
    return lambda weights: float(engine.losses(weights[None], samples, indices)[0])


def bytes_of_rows(names: Iterable[str], size: int, codec: Codec) -> int:
    """Return the bytes of one worker's rows of some arrays of `Particles`. size: D, that of a model."""
    others = {"personal_score": 8, "packs": codec.longest_pack(size) if codec.relative else 0, "versions": 4}
    return sum(others.get(name, 4 * size) for name in names)


def initial_particles(initial: Floats, workers: int, codec: Codec | None = None) -> Particles:
    """Return particles at rest that have no personal best yet. initial: (1, D) for all, or (workers, D)."""
    shape = (workers, initial.shape[1])
    return Particles(
        positions=np.broadcast_to(initial, shape).copy(),
        velocities=np.zeros(shape, np.float32),
        personal_best=np.broadcast_to(initial, shape).copy(),
        personal_score=np.full(workers, np.inf),
        packs=np.zeros((workers, codec.longest_pack(shape[1]) if codec and codec.relative else 0), np.uint8),
        versions=np.zeros(workers, np.int32),
    )
