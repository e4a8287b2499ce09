"""Trains a generator, writes a synthetic shared set, and measures what the generated samples reveal.

The measures prove no privacy, see docs/generate.md.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot

from cbdsl import register
from cbdsl.algorithm.ledger import payload
from cbdsl.algorithm.messages import ServerState, WorkerId
from cbdsl.algorithm.methods import FedAvgM
from cbdsl.algorithm.round import Combination, Server, ServerPolicy
from cbdsl.algorithm.verification import trust_uploads
from cbdsl.algorithm.worker_round import LocalWorkers, TrainingSet, WorkerData
from cbdsl.arrays import PADDING, Bools, Doubles, Floats, Indices, NamedArrays, Samples, Seeds
from cbdsl.codecs.envelope import make_codecs
from cbdsl.data.dataset import Dataset, Scaling, load, load_data
from cbdsl.data.partition import alter_features, split
from cbdsl.data.shared import SharedSet, check_source, unscale_to_floats, write_shared
from cbdsl.engines.engine import ExtraLoss, Sgd, check_one_model
from cbdsl.engines.native_engine import default_threads
from cbdsl.engines.torch_engine import TorchEngine
from cbdsl.errors import UserError
from cbdsl.models.to_torch import module_weights
from cbdsl.rng import seed_of, stream
from cbdsl.runs.folder import Checkpoint, RunFolder
from cbdsl.spec import LocalSpec, Spec
from cbdsl.swarms.local import LocalSwarm
from cbdsl.util.files import is_free, read_json, read_text, write_atomically, write_json
from cbdsl.util.formatting import format_bytes
from cbdsl.util.serialize import Bounds, check_value

_BLOCK = 500  # rows or samples per step


@dataclass(frozen=True)
class Distances:
    """Quantiles of distances to the nearest neighbour, as root mean square differences."""

    lowest: float
    hundredth: float
    median: float

    @staticmethod
    def of(found: Doubles) -> Distances:
        """Return the quantiles of these distances, (N,)."""
        return Distances(*(round(float(value), 4) for value in np.quantile(found, (0, 0.01, 0.5))))


@dataclass(frozen=True)
class Membership:
    """The success of a membership test on equally many members and unseen samples; guessing: area 0.5, advantage 0."""

    area: float  # under the ROC curve: probability that a member scores higher than an unseen sample
    area_error: float  # standard error
    advantage: float  # share of members recognised minus share of others mistaken for members, at the best threshold
    advantage_error: float


@dataclass(frozen=True)
class Privacy:
    """Measures on N members and N unseen samples."""

    compared: int  # N
    generated: int
    generated_to_members: Distances
    generated_to_unseen: Distances
    unseen_to_members: Distances  # the distances of samples that are not copies
    closer_to_members: float  # share of generated samples that are nearer to a member than to any unseen sample
    closer_error: float
    by_samples: Membership  # the attacker has the generated samples, and takes samples near one for members
    by_generator: Membership  # the attacker has the generator, and takes samples with a low loss for members


def measure_privacy(made: Floats, members: Floats, unseen: Floats, losses: tuple[Doubles, Doubles]) -> Privacy:
    """Compare generated samples (M, d) with members and unseen ones, (N, d) each, whose losses are (N,)."""
    to_members, to_unseen = nearest(made, members), nearest(made, unseen)
    closer = float((to_members < to_unseen).mean() + (to_members == to_unseen).mean() / 2)
    return Privacy(
        compared=len(members),
        generated=len(made),
        generated_to_members=Distances.of(to_members),
        generated_to_unseen=Distances.of(to_unseen),
        unseen_to_members=Distances.of(nearest(unseen, members)),
        closer_to_members=round(closer, 4),
        closer_error=round(math.sqrt(max(closer * (1 - closer), 1e-9) / len(made)), 4),
        by_samples=membership(-nearest(members, made), -nearest(unseen, made)),
        by_generator=membership(-losses[0], -losses[1]),
    )


def nearest(rows: Floats, others: Floats) -> Doubles:
    """Return the distance of each row to the nearest of the others, per feature: (N, d), (M, d) -> (N,)."""
    centre = others.mean(0, dtype=np.float64)  # centred: features far from 0 would cost precision
    return np.concatenate(
        [
            np.min([_nearest_in(part - centre, few - centre) for few in _split_rows(others)], axis=0)
            for part in _split_rows(rows)
        ]
    )


def _split_rows(rows: Floats) -> list[Floats]:
    """Split rows so that neither their distances nor the rows as doubles are all in memory."""
    return np.array_split(rows, -(-len(rows) // _BLOCK))


def _nearest_in(rows: Doubles, others: Doubles) -> Doubles:
    """Find the nearest by |b|^2 - 2ab, and its distance by the difference itself: a copy is at 0."""
    found = (np.square(others).sum(1) - 2 * (rows @ others.T)).argmin(1)
    distances: Doubles = np.sqrt(np.square(rows - others[found]).mean(1))
    return distances


def membership(members: Doubles, unseen: Doubles) -> Membership:
    """Test membership by a threshold on scores, (N,) each.

    The threshold is chosen on one half of the samples and evaluated on the other, both ways round.
    """
    area = _area(members, unseen)
    tried = [
        _evaluate_threshold(_find_threshold(members[one], unseen[one]), members[other], unseen[other])
        for one, other in _split_halves(len(members))
    ]
    return Membership(
        area=round(area, 4),
        area_error=round(_area_error(area, len(members)), 4),
        advantage=round(float(np.mean([advantage for advantage, _ in tried])), 4),
        advantage_error=round(math.hypot(*(error for _, error in tried)) / len(tried), 4),
    )


def _split_halves(count: int) -> tuple[tuple[Bools, Bools], tuple[Bools, Bools]]:
    even = np.arange(count) % 2 == 0
    return (even, ~even), (~even, even)


def _area(members: Doubles, unseen: Doubles) -> float:
    """Return the probability that a member scores higher than another sample; ties count half."""
    ordered = np.sort(unseen)
    below = np.searchsorted(ordered, members, "left") + np.searchsorted(ordered, members, "right")
    return float(below.mean() / 2 / len(unseen))


def _area_error(area: float, count: int) -> float:
    """Return one standard error (Hanley and McNeil 1982) for equal numbers of both kinds."""
    first, second = area / (2 - area), 2 * area**2 / (1 + area)
    spread = area * (1 - area) + (count - 1) * (first + second - 2 * area**2)
    return math.sqrt(max(spread, 0.0)) / count


def _find_threshold(members: Doubles, unseen: Doubles) -> float:
    """Return the threshold with the largest difference between the shares of members and of others above it."""
    scores = np.sort(np.concatenate([members, unseen]))
    above = [1 - np.searchsorted(np.sort(part), scores, "left") / len(part) for part in (members, unseen)]
    return float(scores[np.argmax(above[0] - above[1])])


def _evaluate_threshold(threshold: float, members: Doubles, unseen: Doubles) -> tuple[float, float]:
    """Return the advantage of a threshold and its standard error."""
    shares = [float((part >= threshold).mean()) for part in (members, unseen)]
    errors = [share * (1 - share) / len(part) for share, part in zip(shares, (members, unseen), strict=True)]
    return shares[0] - shares[1], math.sqrt(sum(errors))


HIDDEN, LATENT = 128, 10
_DECAYS, _EPSILON = (0.9, 0.999), 1e-8  # of Adam


class SampleKind(NamedTuple):
    """The shape and classes of the samples that a generator makes."""

    shape: tuple[int, ...]
    classes: int
    shades: bool  # numbers from 0 to 1, as in images; otherwise any, with deviations near 1

    @property
    def numbers(self) -> int:
        """The size of a sample."""
        return math.prod(self.shape)


class Generator(nn.Module):
    """A conditional variational autoencoder: a class and LATENT random numbers give a sample."""

    def __init__(self, kind: SampleKind) -> None:
        super().__init__()
        self.kind = kind
        self.encode = nn.Sequential(
            nn.Linear(kind.numbers + kind.classes, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 2 * LATENT)
        )
        self.decode = nn.Sequential(
            nn.Linear((LATENT + 1) * kind.classes, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, kind.numbers)
        )
        self.log_variance = nn.Parameter(torch.zeros(1), requires_grad=True)  # of numbers that are not shades

    def losses(self, features: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
        """Return the negative evidence lower bounds, (N,). features: (N, numbers); noise: (N, LATENT)."""
        classes = one_hot(labels, self.kind.classes).float()
        mean, log_variance = self.encode(torch.cat([features, classes], 1)).chunk(2, 1)
        made = self._decode(mean + noise * (log_variance / 2).exp(), classes)
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1) / 2
        if self.kind.shades:
            error = binary_cross_entropy_with_logits(made, features, reduction="none")
        else:
            error = ((made - features).square() / self.log_variance.exp() + self.log_variance) / 2
        losses: Tensor = error.sum(1) + divergence
        return losses

    def _decode(self, latent: Tensor, classes: Tensor) -> Tensor:
        """Decode with weights per class: shared ones would let latent numbers encode a class with few samples."""
        own = torch.cat([latent, torch.ones(len(latent), 1)], 1)[:, None] * classes[:, :, None]  # (N, C, LATENT + 1)
        made: Tensor = self.decode(own.flatten(1))
        return made

    def samples(self, labels: Tensor, random: torch.Generator) -> Tensor:
        """Return one sample of each class given, (N, numbers)."""
        latent = torch.randn(len(labels), LATENT, generator=random)
        made = self._decode(latent, one_hot(labels, self.kind.classes).float())
        if self.kind.shades:
            return made.sigmoid()
        return made + torch.randn(made.shape, generator=random) * (self.log_variance / 2).exp()


class GeneratorEngine(TorchEngine):
    """Trains and scores stacks of generators; samples are rows of numbers, (N, numbers)."""

    def __init__(self, kind: SampleKind, threads: int = 1) -> None:
        super().__init__(Generator(kind), threads)

    def train(
        self,
        weights: Floats,
        samples: Samples,
        batches: Indices,
        sgd: Sgd,
        seeds: Seeds | None = None,
        corrections: Floats | None = None,
        extra: ExtraLoss | None = None,
    ) -> Floats:
        """See `Engine.train`; uses Adam, which starts anew on every call, and of `sgd` only the learning rate."""
        assert seeds is not None
        assert corrections is None
        assert extra is None
        features, labels, batches = self._tensors(samples, batches)
        result, own_seeds = np.empty_like(weights), seeds

        def train_worker(worker: int) -> None:
            random = torch.Generator().manual_seed(int(own_seeds[worker]) % 2**63)
            model = self._load(weights[worker])
            mean, square = torch.zeros_like(model.flat), torch.zeros_like(model.flat)
            steps = 0
            for row in batches[worker]:
                chosen = torch.from_numpy(row[row != PADDING])
                if not len(chosen):
                    continue
                steps += 1
                noise = torch.randn(len(chosen), LATENT, generator=random)
                model.gradient.zero_()
                losses = _as_generator(model.module).losses(features[chosen], labels[chosen], noise)
                losses.mean().backward()  # type: ignore[no-untyped-call]
                with torch.no_grad():
                    mean.lerp_(model.gradient, 1 - _DECAYS[0])
                    square.mul_(_DECAYS[1]).addcmul_(model.gradient, model.gradient, value=1 - _DECAYS[1])
                    shrunk = (square / (1 - _DECAYS[1] ** steps)).sqrt_().add_(_EPSILON)
                    model.flat.addcdiv_(mean, shrunk, value=-sgd.learning_rate / (1 - _DECAYS[0] ** steps))
            result[worker] = model.flat.numpy()

        self._for_each(len(weights), train_worker)
        return result

    def sample_losses(self, weights: Floats, samples: Samples, indices: Indices) -> Doubles:
        """See `Engine.sample_losses`; the bound at the mean of a sample's encoding."""
        features, labels, indices = self._tensors(samples, indices)
        module = _as_generator(self._load(check_one_model(weights, self.size)).module)
        chosen = torch.from_numpy(indices)

        def losses(chunk: int) -> Doubles:
            part = chosen[chunk * _BLOCK : (chunk + 1) * _BLOCK]
            with torch.inference_mode():
                found: Doubles = module.losses(features[part], labels[part], torch.zeros(1, LATENT)).double().numpy()
            return found

        return np.concatenate([np.empty(0), *self._for_each(-(-len(chosen) // _BLOCK), losses)])

    def make_samples(self, weights: Floats, count: int, seed: int) -> Samples:
        """Return samples of a model, equally many of all classes and shuffled, (count, *shape)."""
        generator = _as_generator(self._load(check_one_model(weights, self.size)).module)
        random, kind = torch.Generator().manual_seed(seed), generator.kind
        labels = (torch.arange(count) % kind.classes)[torch.randperm(count, generator=random)]

        def make(_: int) -> Floats:
            with torch.inference_mode():
                found: Floats = generator.samples(labels, random).reshape(count, *kind.shape).numpy()
            return found

        [features] = self._for_each(1, make)  # sets one thread per operation
        return Samples(features, labels.numpy().astype(np.int32))


def _as_generator(module: nn.Module) -> Generator:
    assert isinstance(module, Generator)
    return module


SERVER, WORKERS = "server", "workers"
_FIRST_RATE, _LAST_RATE = 2e-3, 2e-4  # of Adam, in the first and in the last pass
_BATCH = 32
_MOMENTUM = 0.8  # of the server
_LOOKED_AT = 500  # samples whose loss is reported


@dataclass(frozen=True, eq=False)
class GeneratorData:
    """The samples of a generator and unseen ones, as rows of numbers."""

    kind: SampleKind
    scaling: Scaling | None
    samples: Samples
    holders: tuple[Indices, ...]  # the samples of each holder
    unseen: Samples  # of the same kind, for comparison
    unseen_are: str  # where those are from

    @property
    def digest(self) -> str:
        """A hash of all samples and of how many each worker holds."""
        shape, classes, shades = self.kind.shape, self.kind.classes, self.kind.shades
        kind = f"Kind(shape={shape!r}, classes={classes!r}, shades={shades!r})"  # this text is in the keys of folders
        content = hashlib.sha256(f"({kind}, {self.scaling!r}, {[*map(len, self.holders)]!r})".encode())
        for array in (self.samples.features, self.samples.labels):
            content.update(np.ascontiguousarray(array).data)
        return content.hexdigest()

    def rescale(self, made: Samples) -> Samples:
        """Return generated samples (N, *shape) in the scaling of a network's input."""
        if not self.kind.shades:
            return made
        assert self.scaling is not None
        return Samples(self.scaling.apply(np.rint(255 * made.features).astype(np.uint8)), made.labels)


def gather_generator_data(spec: Spec, source: str) -> GeneratorData:
    """Return the data of a spec. source: `server`, `workers`, or data that the server may use."""
    own = source in {SERVER, WORKERS}
    data = load_data(spec.data, spec.options)
    if data.task != "classification":
        raise UserError(
            f"A generator makes samples of classes; the task of {data.name} is {data.task}. D_G is then drawn from the "
            "training samples.",
            code="not-supported",
        )
    if not own:
        given = load(source)
        check_source(source, given, data)
        data = given
    unseen, whose = data.test, "the test set"
    if own:
        partition = register.partition.make(spec.data.partition, spec.options.of(spec.data.partition))
        parts = split(
            data.train.labels, spec.data, spec.workers, spec.seed, data.clients, partition, features=data.train.features
        )
        data = replace(data, train=alter_features(data.train, parts, partition, spec.seed))
        shared = np.concatenate([parts.shared_training, parts.shared_scoring])
        holders = parts.workers if source == WORKERS else (shared,)
        if len(parts.holdout):
            unseen, whose = data.train.taken(parts.holdout), "the server's hold-out"
    else:
        holders = (np.arange(len(data.train), dtype=np.int32),)
    _check_classes(np.concatenate([data.train.labels[rows] for rows in holders]), data, source)
    kind = SampleKind(data.shape, data.classes, data.scaling is not None and data.scaling.shades)
    used = data.train.taken(np.concatenate(holders))
    ends = np.cumsum([0, *map(len, holders)])
    places = tuple(np.arange(first, last, dtype=np.int32) for first, last in pairwise(ends))
    return GeneratorData(kind, data.scaling, _rows(used, data), places, _rows(unseen, data), whose)


_ADVICE = {
    SERVER: "Learn from more samples: set data.shared_training or data.shared_scoring higher, or learn from the "
    "workers (--from workers).",
    WORKERS: "Learn from more samples: set workers or data.samples_per_worker higher, or data.partition to another.",
}
_OTHER_ADVICE = "Give samples of every class, numbered from 0 without gaps."


def _check_classes(labels: Indices, data: Dataset, source: str) -> None:
    empty = np.flatnonzero(np.bincount(labels, minlength=data.classes) == 0).tolist()
    if empty:
        raise UserError(
            f"Among the {len(labels):,} samples to learn from ({source}) there is none of class "
            f"{', '.join(map(str, empty[:10]))}; a generator makes only classes that it learned from. "
            f"{_ADVICE.get(source, _OTHER_ADVICE)}",
            code="out-of-range",
        )


def _rows(samples: Samples, data: Dataset) -> Samples:
    """Return samples as a generator takes them: rows of numbers, shades from 0 to 1."""
    features, scaling = samples.features, data.scaling
    if scaling is not None and scaling.shades:
        features = unscale_to_floats(features, scaling).clip(0, 1)
    return Samples(np.ascontiguousarray(features.reshape(len(samples), -1)), samples.labels)


def average_changed_weights(sizes: Mapping[WorkerId, int]) -> Combination:
    """Return FedAvg's mean, but of each weight over only those workers that changed it.

    A class has its own weights in the generator. If few workers hold it, the mean of all would hardly move them.
    """

    def combine(
        state: ServerState, workers: Sequence[WorkerId], models: Sequence[Floats], counts: Doubles
    ) -> tuple[Floats, NamedArrays]:
        del workers
        total, shares = np.zeros(len(state.global_best)), np.zeros(len(state.global_best))
        for count, model in zip(counts, models, strict=True):
            step = model.astype(np.float64) - state.global_best
            total += count * step
            shares += count * (step != 0)
        return np.asarray(state.global_best + total / np.maximum(shares, 1.0), np.float32), {}

    return Combination(sizes.__getitem__, rule=combine)


@dataclass(frozen=True)
class TrainingPass:
    """One round of training: the loss on unseen samples after it, and the bytes sent."""

    number: int
    loss: float
    uplink_bytes: int
    downlink_bytes: int


class GeneratorTraining:
    """The training of a generator; it can be saved between any two rounds."""

    def __init__(self, data: GeneratorData, spec: Spec, passes: int, threads: int = 1) -> None:
        rows = data.holders
        decay = (_LAST_RATE / _FIRST_RATE) ** (1 / max(1, passes - 1))
        local = LocalSpec(batch_size=_BATCH, learning_rate=_FIRST_RATE, decay=decay)
        alone = len(rows) == 1
        method = FedAvgM(beta=0.0 if alone else _MOMENTUM)
        spec = replace(
            spec,
            workers=len(rows),
            rounds=passes,
            local=local,
            shared="none",
            participation=1.0 if alone else spec.participation,
        )
        self.engine = GeneratorEngine(data.kind, threads)
        self._data, self._passes = data, passes
        codecs = make_codecs(spec)
        sizes = {worker: len(own) for worker, own in enumerate(rows)}
        self._server = Server(
            spec, method, trust_uploads(self.engine.size), ServerPolicy(codecs=codecs), average_changed_weights(sizes)
        )
        training_sets = tuple(TrainingSet(data.samples, own) for own in rows)
        initial = module_weights(lambda: Generator(data.kind), seed_of(spec.seed, "initial-weights"))
        workers = LocalWorkers(
            self.engine, WorkerData(training_sets, data.samples, rows[0][:1]), local, spec.swarm, spec.seed,
            range(len(rows)), codec=codecs.up,
        )  # fmt: skip
        self._swarm = LocalSwarm(method, workers, initial[None])
        self._keeps_swarm = codecs.up.feedback
        self.state: ServerState = self._server.first_state(initial)

    @property
    def kept(self) -> Mapping[str, Any] | None:
        """The workers' arrays by name; with `state` all that is needed to resume."""
        return self._swarm.kept if self._keeps_swarm else None

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint."""
        self.state = checkpoint.state
        self._swarm.restore(checkpoint.rows, self.state.round, self.state.global_best)

    def train_passes(self) -> Iterator[TrainingPass]:
        """Run the remaining passes."""
        unseen = self._data.unseen
        looked_at = np.arange(min(_LOOKED_AT, len(unseen)), dtype=np.int32)
        while self.state.round < self._passes:
            self.state, log = self._server.play(self.state, self._server.order(self.state), self._swarm)
            loss = float(self.engine.sample_losses(self.state.global_best, unseen, looked_at).mean())
            yield TrainingPass(
                self.state.round, round(loss, 4), payload(log.traffic, "up"), payload(log.traffic, "down")
            )

    @property
    def weights(self) -> Floats:
        """The present generator, (D,)."""
        return self.state.global_best


PASSES = {SERVER: 60, WORKERS: 120}
_COMPARED = 2000  # members and unseen samples at most, in the measures of privacy
_CHECKPOINT_EVERY = 5  # passes

OnPass = Callable[[int, int, float], None]
"""Called with the number of a pass, how many there are, and the generator's loss on unseen samples."""

README = """This folder was made by `cbdsl generate`.

shared.npz       D_tr and D_sc, and a hold-out if one was asked for: --set data.shared_source=.../shared.npz
privacy.json     distances between generated and real samples, and tests for membership; docs/generate.md explains them
generated.html   the same as a page, with a picture of samples (samples.png)
generate.json    what was asked for
passes.jsonl     a line for every pass: the generator's loss on unseen samples, and bytes sent
checkpoint.npz   the generator; the same command goes on from it

The generator's weights (checkpoint.npz) tell more of the samples that it learned from than shared.npz does. Give the
latter away, not the former; and a hold-out is of use only while workers do not have it.
"""


@dataclass(frozen=True)
class GenerationPlan:
    """The source and sizes of a generated set."""

    spec: Spec  # resolved: data, who holds what, seed; and for workers who takes part, and the codecs
    source: str  # `server`, `workers`, or data that the server may use
    training: int  # samples of D_tr
    scoring: int  # samples of D_sc
    holdout: int = 0  # samples of a hold-out for the guard
    passes: int = 0  # over all samples (rounds, for workers); 0: the source's default

    def __post_init__(self) -> None:
        check_value(self.training, Bounds(1, 1_000_000), "--samples")
        check_value(self.scoring, Bounds(1, 1_000_000), "--scoring")
        check_value(self.holdout, Bounds(0, 1_000_000), "--holdout")
        check_value(self.passes, Bounds(0, 10_000), "--passes")
        if not self.source.strip():
            raise UserError(
                "--from is empty. Give server, workers, a data set, a folder or an .npz file.", code="unknown-name"
            )
        if self.holdout and self.source == WORKERS:
            raise UserError(
                f"--holdout {self.holdout:,} is given, and the generator learns from the workers: each of them has the "
                "generator and the seed and could make the same hold-out, which must be secret. Leave --holdout out, "
                "and a run uses the server's own samples (data.holdout); or use --from server.",
                code="conflict",
            )
        if self.spec.attack.byzantine:
            raise UserError(
                f"{self.spec.attack.byzantine} workers are attackers; a generator is trained by "
                "plain averages of honest workers. Leave --byzantine out.",
                code="no-effect",
            )
        codecs = make_codecs(self.spec)
        if codecs.up.measures or codecs.down.measures:
            raise UserError(
                "The codec 'adaptive' measures on D_sc, which is made here. Use q4, or none.", code="not-supported"
            )
        if self.spec.data.shared_source:
            raise UserError("data.shared_source names D_G, which is made here. Leave it out.", code="conflict")

    @property
    def pass_count(self) -> int:
        """The number of passes."""
        return self.passes or PASSES.get(self.source, PASSES[SERVER])

    def key(self, data: GeneratorData) -> str:
        """Return a hash of what the generator's weights depend on, the samples included; not of how many it makes."""
        asked = f"{self.spec.key()}/{self.source}/{self.pass_count}/{data.digest}"
        return hashlib.sha256(asked.encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class GeneratedSet:
    """The result of a generation."""

    plan: GenerationPlan
    data: GeneratorData
    shared: SharedSet  # scaled as a network's input
    passes: tuple[TrainingPass, ...]
    privacy: Privacy
    folder: Path

    @property
    def whose(self) -> str:
        """The owner of the samples that it learned from."""
        named = {WORKERS: f"{len(self.data.holders)} workers", SERVER: "the server"}
        return named.get(self.plan.source, self.plan.source)

    @property
    def file(self) -> Path:
        """The file for `data.shared_source`."""
        return self.folder / "shared.npz"


def load_generator_data(plan: GenerationPlan) -> GeneratorData:
    """Return the data of a plan; raise UserError before a folder is made if they do not fit."""
    data = gather_generator_data(plan.spec, plan.source)
    if max(plan.training, plan.scoring) < data.kind.classes:
        raise UserError(
            f"--samples {plan.training} and --scoring {plan.scoring} cannot have all {data.kind.classes} classes, "
            "and a run needs all of them. Ask for more.",
            code="out-of-range",
        )
    return data


def run_generation(
    plan: GenerationPlan,
    out: Path,
    threads: int | None = None,
    on_pass: OnPass | None = None,
    data: GeneratorData | None = None,
) -> GeneratedSet:
    """Start or continue training in a folder, make samples and measure them; the same plan gives the same file.

    data: that of the plan, if it was loaded before.
    """
    if threads is not None:
        check_value(threads, Bounds(1), "threads")
    data = data or load_generator_data(plan)
    key = plan.key(data)
    folder = _open_folder(out)
    try:
        _write_plan(plan, key, out)
        return _train_and_write(plan, key, data, folder, threads or default_threads(), on_pass)
    finally:
        folder.close()


def _train_and_write(
    plan: GenerationPlan, key: str, data: GeneratorData, folder: RunFolder, threads: int, on_pass: OnPass | None
) -> GeneratedSet:
    out = folder.path
    learning = GeneratorTraining(data, plan.spec, plan.pass_count, threads)
    passes: list[TrainingPass] = []
    checkpoint = folder.load_checkpoint(key)
    if checkpoint is not None:
        learning.restore(checkpoint)
        passes = _read_passes(out / "passes.jsonl", checkpoint.state.round)
    for one in learning.train_passes():
        passes.append(one)
        if one.number % _CHECKPOINT_EVERY == 0 or one.number == plan.pass_count:
            lines = "".join(json.dumps(asdict(each)) + "\n" for each in passes)
            write_atomically(out / "passes.jsonl", lines.encode())
            folder.save_checkpoint(learning.state, learning.kept, key)
        if on_pass is not None:
            on_pass(one.number, plan.pass_count, one.loss)
    if not np.isfinite(learning.weights).all() or not np.isfinite(passes[-1].loss):
        raise UserError(
            "The generator diverged: its weights are not finite. Features should have deviations near 1.",
            code="out-of-range",
        )
    sizes = {"training": plan.training, "scoring": plan.scoring, "holdout": plan.holdout}
    made = {
        part: learning.engine.make_samples(learning.weights, count, seed_of(plan.spec.seed, "generator", place))
        for place, (part, count) in enumerate(sizes.items())
        if count
    }
    shared = SharedSet(**{part: data.rescale(samples) for part, samples in made.items()})
    write_shared(out / "shared.npz", shared, data.scaling)
    privacy = _measure(plan, data, learning, Samples.joined([made["training"], made["scoring"]]))
    write_json(out / "privacy.json", asdict(privacy))
    return GeneratedSet(plan, data, shared, tuple(passes), privacy, out)


def _measure(plan: GenerationPlan, data: GeneratorData, learning: GeneratorTraining, made: Samples) -> Privacy:
    count = min(_COMPARED, len(data.samples), len(data.unseen))
    rng = stream(plan.spec.seed, "generator", 3)
    members, unseen = (
        part.taken(rng.permutation(len(part))[:count].astype(np.int32)) for part in (data.samples, data.unseen)
    )
    everything = np.arange(count, dtype=np.int32)
    losses = [learning.engine.sample_losses(learning.weights, part, everything) for part in (members, unseen)]
    rows = made.features.reshape(len(made), -1)
    return measure_privacy(rows, members.features, unseen.features, (losses[0], losses[1]))


def _open_folder(out: Path) -> RunFolder:
    """Open a new folder, or one with a plan, locked."""
    if not (out / "generate.json").exists() and not is_free(out):
        raise UserError(
            f"{out} exists and is not an empty folder; nothing was overwritten. Give another --out.",
            code="exists-already",
        )
    return RunFolder.open_or_create(out)


def _write_plan(plan: GenerationPlan, key: str, out: Path) -> None:
    """Write a plan to its folder; one that is there must have the same key, but may make other numbers of samples."""
    path = out / "generate.json"
    if path.exists():
        _check_key(key, path)
    try:
        write_json(path, {**asdict(plan), "spec": plan.spec.to_tree(), "passes": plan.pass_count, "key": key})
        write_atomically(out / "README.txt", README.encode())
    except OSError as error:
        raise UserError(
            f"The folder {out} cannot be written: {error.strerror}. Give another --out.", code="unwritable-file"
        ) from error


def _check_key(key: str, path: Path) -> None:
    """Raise if a folder was made by another plan or from other samples."""
    try:
        stored = read_json(read_text(path))["key"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}). Give another --out.", code="damaged-file") from error
    if stored != key:
        raise UserError(
            f"{path.parent} holds another generator, or one that learned from other samples: see {path}. Nothing was "
            "changed. Give another --out.",
            code="exists-already",
        )


def _read_passes(path: Path, count: int) -> list[TrainingPass]:
    try:
        passes = [TrainingPass(**read_json(line)) for line in read_text(path).splitlines()][:count]
        if len(passes) < count:
            raise ValueError(f"{count} passes were made, {len(passes)} are in the file")
        return passes
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{path} is damaged ({error}). Remove {path.parent} and start again.", code="damaged-file"
        ) from error


def describe_result(made: GeneratedSet) -> list[str]:
    """Describe the measures in words."""
    found, last = made.privacy, made.passes[-1]
    sent = sum(one.uplink_bytes for one in made.passes), sum(one.downlink_bytes for one in made.passes)
    federated = made.plan.source == WORKERS
    traffic = (
        f"; sent up {format_bytes(sent[0])}, down {format_bytes(sent[1])}, no sample among it" if federated else ""
    )
    near = found.generated_to_members, found.generated_to_unseen, found.unseen_to_members
    medians, hundredths = [f"{one.median:.3f}" for one in near], [f"{one.hundredth:.3f}" for one in near]
    return [
        f"learned from {len(made.data.samples):,} samples of {made.whose} in {last.number} passes{traffic}",
        f"nearest neighbours of {found.generated:,} generated samples among {found.compared:,} learned from and as "
        f"many unseen ({made.data.unseen_are}):",
        f"  generated to learned-from {medians[0]} (nearest hundredth {hundredths[0]}), generated to unseen "
        f"{medians[1]} ({hundredths[1]}), unseen to learned-from {medians[2]} ({hundredths[2]})",
        f"  nearer to a learned-from sample than to an unseen one: {found.closer_to_members:.1%} "
        f"± {found.closer_error:.1%} of the generated (chance: 50 %)",
        "membership tests (area 0.5 and advantage 0 are guessing):",
        f"  with the generated samples: {_describe_membership(found.by_samples)}",
        f"  with the generator itself: {_describe_membership(found.by_generator)}",
        "These measure two simple attacks on average; they prove no privacy (docs/generate.md).",
    ]


def _describe_membership(found: Membership) -> str:
    return (
        f"area {found.area:.3f} ± {found.area_error:.3f}, advantage {100 * found.advantage:.1f} "
        f"± {100 * found.advantage_error:.1f} points"
    )
