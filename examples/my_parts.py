"""Parts of my own, one of every kind: use them with --plugin my_parts.py, or Spec(plugins=("my_parts.py",))."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

import cbdsl
from cbdsl import (
    Architecture,
    Candidate,
    Particles,
    RoundContext,
    SelectionResult,
    VerifiedUpload,
    WorkerRound,
)
from cbdsl.arrays import Doubles, Floats, Indices
from cbdsl.models.layers import Flatten, Linear, Tanh
from cbdsl.spec import DataSpec

if TYPE_CHECKING:
    from torch import Tensor


@cbdsl.register.attack("shuffle")
@dataclass(frozen=True)
class Shuffle(cbdsl.Attack):
    """Sends an honest step with its coordinates shuffled: as long as an honest one, and it leads nowhere."""

    share: float = 1.0  # of the coordinates

    def claim(self, seen: cbdsl.AttackContext) -> float:
        """A little better than what it has, so that it is invited."""
        return 0.9 * seen.score

    def upload(self, seen: cbdsl.AttackContext) -> Floats:
        """w^g and the shuffled step."""
        step = seen.model - seen.global_best
        chosen = np.flatnonzero(seen.rng.random(len(step)) < self.share)
        step[chosen] = seen.rng.permutation(step[chosen])
        return seen.global_best + step


@cbdsl.register.attack("backtrack")
class Backtrack(cbdsl.Attack):
    """Steps back along the mean of all steps of w^g that it has seen."""

    def remember(self, seen: cbdsl.AttackContext) -> dict[str, np.ndarray]:
        """Return the first w^g received and the number of rounds in which it took part."""
        first = seen.memory.get("first", seen.global_best)
        return {"first": first, "rounds": np.array(1 + seen.memory.get("rounds", 0))}

    def upload(self, seen: cbdsl.AttackContext) -> Floats:
        """Return w^g minus the mean step."""
        step = (seen.global_best - seen.memory["first"]) / seen.memory["rounds"]
        return np.asarray(seen.global_best - step, np.float32)


@cbdsl.register.aggregator("winsorised")
def winsorised(rows: Doubles, attackers: int, trust: cbdsl.TrustedReference) -> Doubles:  # noqa: ARG001
    """Coordinate-wise mean, the f largest and f smallest values pulled in to the next one."""
    cut = min(attackers, (len(rows) - 1) // 2)
    ordered = np.sort(rows, axis=0)
    return np.asarray(np.clip(rows, ordered[cut], ordered[len(rows) - 1 - cut]).mean(0))


@cbdsl.register.aggregator("steady")
def steady(rows: Doubles, attackers: int, trust: cbdsl.TrustedReference, *, beta: float = 0.8) -> Doubles:  # noqa: ARG001
    """The mean of the rows by size, with less weight for workers that were far from the result in earlier rounds."""
    known = dict(zip(trust.memory.get("who", ()), trust.memory.get("far", ()), strict=True))
    weights = trust.sizes / (1e-9 + np.array([known.get(worker, 1.0) for worker in trust.workers]))
    combined = np.asarray(np.einsum("i,ij->j", weights / weights.sum(), rows))
    for worker, distance in zip(trust.workers, np.linalg.norm(rows - combined, axis=1), strict=True):
        known[worker] = beta * known.get(worker, 1.0) + (1 - beta) * distance
    trust.memory.update(who=np.array(list(known)), far=np.array(list(known.values())))
    return combined


@cbdsl.register.preaggregation("shortened")
def shortened(rows: Doubles, attackers: int, trust: cbdsl.TrustedReference) -> Doubles:  # noqa: ARG001
    """Shorten steps that are longer than the median to its length."""
    steps = rows - trust.reference
    lengths = np.linalg.norm(steps, axis=1, keepdims=True)
    return np.asarray(trust.reference + steps * np.minimum(1, np.median(lengths) / np.maximum(lengths, 1e-30)))


@cbdsl.register.selection("patient")
@dataclass(frozen=True)
class Patient(cbdsl.Selection):
    """Invites the best claimant only if it is worth an upload: better than F^g by a margin."""

    margin: float = 0.02  # of F^g

    def invite(
        self, waiting: Sequence[Candidate], believed: Sequence[VerifiedUpload], view: RoundContext
    ) -> int | None:
        """The best claim left, if it is good enough and nobody was believed yet."""
        enough = (1 - self.margin) * view.state.global_score
        return waiting[0].worker if waiting and not believed and waiting[0].score < enough else None

    def combine(self, believed: Sequence[VerifiedUpload], view: RoundContext) -> SelectionResult:
        """The one model that was believed becomes w^g."""
        del view
        return SelectionResult(believed[0].model, believed[0].claimed)


@cbdsl.register.method("elastic")
@dataclass(frozen=True)
class Elastic(cbdsl.AveragingMethod):
    """Workers keep models of their own, on a spring that ties them to the server's (Zhang et al. 2015)."""

    pull: float = 0.5  # how far a worker goes to the server's model before it trains
    rate: float = 0.9  # how far the server goes to the workers' mean

    title = "Elastic averaging (Zhang et al. 2015)"
    remembers = ("positions",)  # kept between rounds

    def move(self, work: WorkerRound, rows: Particles, received: Floats) -> Particles:
        """Go towards the server's model, then train."""
        start = rows.positions + np.float32(self.pull) * (received - rows.positions)
        return work.place(rows, work.train(start))

    def update(self, seen: cbdsl.ServerStep) -> tuple[Floats, Floats]:
        """Go towards the mean of those who took part."""
        return seen.current + np.float32(self.rate) * (seen.combined - seen.current), seen.memory


@cbdsl.register.partition("unequal")
def unequal(
    pool: cbdsl.Pool, spec: DataSpec, workers: int, rng: np.random.Generator, *, skew: float = 1.0
) -> list[Indices]:
    """Everybody's samples are alike, but worker i has about (i + 1)^-skew times as many as the first."""
    total = min(len(pool), workers * spec.samples_per_worker)
    sizes = (np.arange(workers) + 1.0) ** -skew
    ends = np.round(np.cumsum(sizes) / sizes.sum() * (total - workers)).astype(int) + np.arange(1, workers + 1)
    return np.split(rng.permutation(pool.indices)[:total], ends[:-1])


@cbdsl.register.augmentation("scaled")
def scaled(batch: Tensor, *, most: float = 0.2) -> Tensor:
    """Every sample of a batch times a number of its own, from 1 - most to 1 + most."""
    factors = batch.new_empty(len(batch), *[1] * (batch.dim() - 1)).uniform_(1 - most, 1 + most)
    return batch * factors


@cbdsl.register.model("tanh-net")
def tanh_net(shape: tuple[int, ...], classes: int, *, width: int = 24) -> Architecture:
    """Two hidden layers with tanh."""
    inputs = math.prod(shape)
    layers = Flatten(), Linear(inputs, width), Tanh(), Linear(width, width), Tanh(), Linear(width, classes)
    return Architecture(shape, layers)


@cbdsl.register.dataset("spirals")
def spirals(*, noise: float = 0.08, arms: int = 3) -> cbdsl.Dataset:
    """Arms of a spiral in the plane, one a class: 1,800 training and 600 test samples."""
    rng = np.random.default_rng(2024)
    labels = rng.integers(0, arms, 2400)
    radius = np.sqrt(rng.random(2400))
    angle = 2 * np.pi * (labels / arms + 0.6 * radius)
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1) + noise * rng.normal(size=(2400, 2))
    return cbdsl.Dataset.from_arrays(points[:1800], labels[:1800], points[1800:], labels[1800:])


@cbdsl.register.codec("half")
class Half(cbdsl.Codec):
    """The difference to w^g in 16 bits a weight."""

    def longest_pack(self, size: int) -> int:
        """Two bytes a number."""
        return 2 * size

    def pack(self, model: Floats, reference: Floats) -> bytes:
        """The differences as float16."""
        with np.errstate(over="ignore"):
            return (model - reference).astype("<f2").tobytes()

    def unpack(self, pack: bytes, reference: Floats) -> Floats:
        """The reference, and the differences added."""
        if len(pack) != 2 * len(reference):
            raise cbdsl.CodecError("a pack of a wrong length")
        return reference + np.frombuffer(pack, "<f2").astype(np.float32)


@cbdsl.register.metric("worst-error")
class WorstError(cbdsl.Metric):
    """The largest absolute error of a regression, in the target's unit."""

    tasks, title, better = ("regression",), "worst error", "lower"

    def measure(self, seen: cbdsl.Evaluation) -> float:
        """The largest error over samples and targets."""
        return float(np.abs(seen.outputs - seen.targets).max())
