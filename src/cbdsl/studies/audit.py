"""Audits a trained model for backdoors: searches for the smallest patch that turns samples into each class.

The search is that of Neural Cleanse (Wang et al. 2019), on the server's hold-out. How small is too small is measured,
not chosen: references that the server trains alone, from fresh weights, are searched in the same way. No attacker
touched them, so their patches are as small as the classes themselves allow. A repair trains the model on the server's
own samples, with and without the patches. Half of the hold-out is kept for checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from cbdsl.algorithm.alone import ServerOnly
from cbdsl.algorithm.worker_round import draw_batches
from cbdsl.arrays import Doubles, Floats, Indices, Samples
from cbdsl.engines.engine import Sgd
from cbdsl.errors import UserError
from cbdsl.models.to_torch import to_flat
from cbdsl.rng import seed_of, stream
from cbdsl.runs.build import Experiment, build_alone_training

SMALL, TINY = 2 / 3, 1 / 3  # of the references' patch: suspicious in an outlier; suspicious in any class
DEVIATIONS = 3.5  # robust standard deviations below the median of all classes: an outlier
_HALF = 0.5  # the share of samples that a patch turns where sizes are compared: not every trigger always works
_MOST = 0.9  # where it is unlearned
_STEPS, _RATE = 200, 0.1  # of Adam in one search
_REFERENCES = 3  # of which the geometric mean counts
_SAMPLES, _FEWEST = 64, 20  # of other classes in one search: at most, at least
_IDLE = 0.6  # the share of units that are pruned (Fine-Pruning, Liu et al. 2018)
_ROUNDS, _EPOCHS = 5, 10  # of searching and unlearning in a repair; of training in each

OnProgress = Callable[[int, int, str], None]  # searches done, searches in all, which one


@dataclass(frozen=True, eq=False)
class Patch:
    """A patch that turns samples into a class."""

    label: int
    mask: Floats  # how far a place is covered, 0 to 1, (1, ...)
    values: Floats  # what covers it, (C, ...)

    @property
    def size(self) -> float:
        """How many places it covers: pixels of an image, times of a series."""
        return float(self.mask.sum(dtype=np.float64))

    def stamp(self, features: Floats) -> Floats:
        """Return samples with the patch, (N, ...)."""
        return np.asarray((1 - self.mask) * features + self.mask * self.values, np.float32)


@dataclass(frozen=True)
class ClassFinding:
    """What the audit found for one class."""

    label: int
    size: float  # of the model's patch, in places
    reference: float  # of the references' patches
    ratio: float
    deviations: float  # of log(ratio) below the median of all classes, in robust standard deviations
    success: float  # the share of kept samples of other classes that the patch turns
    suspicious: bool


@dataclass(frozen=True)
class Measurements:
    """A model before or after a repair, on samples that no search and no training used."""

    holdout_accuracy: float
    test_accuracy: float
    patch_success: dict[int, float]  # by class, of the patch that turned most samples before
    attack_success: float | None  # of the true trigger, where the run's spec has an attack with one


@dataclass(frozen=True)
class AuditReport:
    """The findings of an audit, and what a repair changed."""

    classes: tuple[ClassFinding, ...]
    suspicious: tuple[int, ...]
    before: Measurements
    after: Measurements | None  # the repair
    left: tuple[int, ...]  # classes that are suspicious in the end


def audit_model(
    experiment: Experiment,
    weights: Floats,
    repair: bool = False,
    prune: bool = False,
    on_progress: OnProgress = lambda *_: None,
) -> tuple[AuditReport, Floats | None]:
    """Audit a model with the server's samples; return the repaired one, too, if there is something to repair.

    repair: unlearn the patches of suspicious classes. prune: with it, remove idle units, whatever the search finds.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with more, sums and so the last digits would depend on the machine
    try:
        auditor = _Auditor(experiment, on_progress)
        start = auditor.prune(weights) if prune else weights
        classes = auditor.audit(weights)
        labels = left = tuple(one.label for one in classes if one.suspicious)
        bad = [auditor.find(weights, label, 0, len(labels), _MOST) for label in labels]
        before, after, repaired = auditor.measure(weights, bad), None, None
        if repair and (bad or prune):
            repaired, left = auditor.repair(start, bad, classes)
            after = auditor.measure(repaired, bad)
        return AuditReport(classes, labels, before, after, left), repaired
    finally:
        torch.set_num_threads(threads)


class _Auditor:
    """Audits models of one run."""

    def __init__(self, experiment: Experiment, on_progress: OnProgress) -> None:
        self._experiment, self._on_progress = experiment, on_progress
        spec, split, train = experiment.spec, experiment.split, experiment.dataset.train
        if experiment.dataset.task != "classification":
            raise UserError(
                f"The task is {experiment.dataset.task}. A backdoor turns samples into a class, and here are none: "
                "there is nothing to search for.",
                code="not-supported",
            )
        if len(experiment.dataset.shape) < 2:
            raise UserError(
                "The samples are vectors. Honest models, too, take their class from a few features, so a backdoor does "
                "not stand out, and none would be found. The audit is for images and series.",
                code="not-supported",
            )
        searched, checked = np.array_split(stream(spec.seed, "audit").permutation(split.holdout), 2)
        if len(checked) < _FEWEST:
            raise UserError(
                f"The hold-out has {len(split.holdout):,} samples; an audit needs {2 * _FEWEST}, half of them for "
                "checks. Set data.holdout higher, and run again.",
                code="out-of-range",
            )
        self._search, self._check = train.taken(searched), train.taken(checked)
        self._own = train.taken(np.concatenate([split.shared_training, split.shared_scoring, searched]))
        axes = (0, *range(2, self._own.features.ndim))
        self._low, self._high = (bound(self._own.features, axis=axes, keepdims=True)[0] for bound in (np.min, np.max))

    def audit(self, weights: Floats) -> tuple[ClassFinding, ...]:
        """Search a model and the references for the patch of every class, and compare them."""
        models = [weights, *map(self._train_reference, range(_REFERENCES))]
        classes = self._experiment.dataset.classes
        patches = [
            [self.find(model, label, number * classes + label, len(models) * classes) for label in range(classes)]
            for number, model in enumerate(models)
        ]
        sizes = np.array([[patch.size for patch in row] for row in patches])  # (models, C)
        references = np.exp(np.log(sizes[1:]).mean(0))
        ratios = sizes[0] / references
        below = deviations_below(ratios)
        return tuple(
            ClassFinding(
                patch.label, patch.size, float(references[label]), float(ratios[label]), float(below[label]),
                self._success(weights, patch), is_suspicious(ratios[label], below[label]),
            )
            for label, patch in enumerate(patches[0])
        )  # fmt: skip

    def prune(self, weights: Floats) -> Floats:
        """Return a model without the idle units of its last convolution, or of its last hidden layer."""
        network = self._experiment.network
        module = network.module(weights)
        parts = [part for part in module.modules() if all(tensor.requires_grad for tensor in part.parameters())]
        module.requires_grad_(requires_grad=False)
        dense = [part for part in parts if isinstance(part, nn.Linear)][:-1]
        units = [part for part in parts if isinstance(part, (nn.Conv1d, nn.Conv2d))] or dense
        if not units:
            raise UserError("The model has no hidden units to prune that train. Leave --prune out.", code="no-effect")
        seen: list[torch.Tensor] = []
        units[-1].register_forward_hook(lambda _module, _inputs, made: seen.append(made.clamp(min=0)))
        _classify(module, self._own.features)
        activity = torch.cat(seen).transpose(0, 1).flatten(1).mean(1)
        idle = activity.argsort()[: int(_IDLE * len(activity))]
        for tensor in units[-1].parameters():
            tensor[idle] = 0
        return network.trained(to_flat(module))

    def repair(
        self, weights: Floats, found: Sequence[Patch], classes: Sequence[ClassFinding]
    ) -> tuple[Floats, tuple[int, ...]]:
        """Return a model for which the patches mean nothing, and the classes for which others are as small.

        Patches are unlearned and searched again, because a trigger leaves others when the first one is gone.
        """
        known, left, ratios = list(found), list(found), np.array([one.ratio for one in classes])
        for number in range(_ROUNDS):
            stamped = [Samples(patch.stamp(self._own.features), self._own.labels) for patch in known]
            weights = self._train(weights, Samples.joined([self._own, *stamped]), number)
            again = [self.find(weights, patch.label, number + 1, _ROUNDS) for patch in left]
            for patch in again:
                ratios[patch.label] = patch.size / classes[patch.label].reference
            below = deviations_below(ratios)
            left = [patch for patch in again if is_suspicious(ratios[patch.label], below[patch.label])]
            if not left:
                break
            known += left
        return weights, tuple(patch.label for patch in left)

    def measure(self, weights: Floats, patches: Sequence[Patch]) -> Measurements:
        """Measure a model on the samples that were kept, and on the test set."""
        experiment, everything = self._experiment, np.arange(len(self._check), dtype=np.int32)
        state = replace(experiment.first_state(), global_best=weights)
        return Measurements(
            float(experiment.engine.accuracies(weights[None], self._check, everything)[0]),
            experiment.test_accuracy(state),
            {patch.label: self._success(weights, patch) for patch in patches},
            experiment.attack_success(state),
        )

    def _train_reference(self, number: int) -> Floats:
        """Train the server alone, from weights that nobody else has seen."""
        run = self._experiment
        alone = build_alone_training(run.spec, ServerOnly(), run.engine, run.dataset.train, run.split)
        return alone.train(run.network.initial_weights(seed_of(run.spec.seed, "audit", 0, number)))[0]

    def _train(self, weights: Floats, lessons: Samples, number: int) -> Floats:
        """Train a model as workers do, for some epochs."""
        spec, everything = self._experiment.spec, np.arange(len(lessons), dtype=np.int32)
        local = replace(spec.local, epochs=_EPOCHS, steps=0)
        batches = draw_batches(everything, local, stream(spec.seed, "audit", number + 1))
        seeds = np.array([seed_of(spec.seed, "audit", number + 1, worker=1)], np.uint64)
        sgd = Sgd.of(local, local.learning_rate)
        return np.asarray(
            self._experiment.engine.train(weights[None], lessons, batches[None], sgd, seeds)[0], np.float32
        )

    def find(self, weights: Floats, label: int, done: int, total: int, goal: float = _HALF) -> Patch:
        """Search one model for the patch of one class."""
        self._on_progress(done, total, f"class {label}")
        module = self._experiment.network.module(weights)
        others = self._others(module, self._search, label)
        if len(others) < _FEWEST:
            raise UserError(
                f"A model classifies {len(others)} of {len(self._search):,} samples right that are not of class "
                f"{label}; a search needs {_FEWEST}. Set data.holdout higher, or train longer, and run again.",
                code="out-of-range",
            )
        return find_patch(module, others[:_SAMPLES], label, self._low, self._high, goal)

    def _success(self, weights: Floats, patch: Patch) -> float:
        """Return the share of kept samples that a patch turns, of those of other classes that are classified right."""
        module = self._experiment.network.module(weights)
        others = self._others(module, self._check, patch.label)
        return float((_classify(module, patch.stamp(others)) == patch.label).mean()) if len(others) else 0.0

    @staticmethod
    def _others(module: nn.Module, samples: Samples, label: int) -> Floats:
        """Return the samples of other classes that a model classifies right."""
        kept = (_classify(module, samples.features) == samples.labels) & (samples.labels != label)
        return np.asarray(samples.features[kept], np.float32)


def find_patch(module: nn.Module, features: Floats, label: int, low: Floats, high: Floats, goal: float) -> Patch:
    """Search for the smallest patch that turns a share of the samples, `goal`, into a class.

    Adam minimises cross-entropy + price * size over mask and values. The price rises while the patch turns enough
    samples, and falls while it does not. low, high: the range of values, (C, 1, ...).
    """
    module.requires_grad_(requires_grad=False)
    samples, least, most = (torch.from_numpy(np.ascontiguousarray(one)) for one in (features, low, high))
    wanted = torch.full((len(samples),), label)
    places = (1, *features.shape[2:])
    cover, colour = torch.full(places, -2.0).requires_grad_(), torch.zeros(features.shape[1:]).requires_grad_()
    adam = torch.optim.Adam([cover, colour], lr=_RATE)
    price, smallest = 1e-3, np.inf
    best = (torch.ones(places), (least + most).expand(colour.shape) / 2)  # everything
    for _ in range(_STEPS):
        mask, values = torch.sigmoid(cover), least + (most - least) * torch.sigmoid(colour)
        logits = module((1 - mask) * samples + mask * values)
        enough, size = float((logits.argmax(1) == wanted).float().mean()) >= goal, mask.sum()
        if enough and size.item() < smallest:
            smallest, best = size.item(), (mask.detach(), values.detach())
        adam.zero_grad()
        (functional.cross_entropy(logits, wanted) + price * size).backward()  # type: ignore[no-untyped-call]
        adam.step()
        price *= 1.1 if enough else 1 / 1.15
    return Patch(label, best[0].numpy(), best[1].numpy())


def deviations_below(ratios: Doubles) -> Doubles:
    """Return by how many robust standard deviations each log(ratio) lies below the median, (C,).

    >>> deviations_below(np.array([1.0, 1.1, 0.9, 1.0, 0.1])).round() > DEVIATIONS
    array([False, False, False, False,  True])
    """
    logs = np.log(ratios)
    middle = np.median(logs)
    return np.asarray((middle - logs) / max(1.4826 * np.median(np.abs(logs - middle)), 0.05))


def is_suspicious(ratio: float, deviations: float) -> bool:
    """Return whether a class needs a much smaller patch than in the references, and than other classes do."""
    return bool(ratio < TINY or (ratio < SMALL and deviations > DEVIATIONS))


def _classify(module: nn.Module, features: Floats) -> Indices:
    """Return the class of each sample, (N,)."""
    with torch.no_grad():
        parts = [module(torch.from_numpy(part)).argmax(1).numpy() for part in np.array_split(features, 10)]
    return np.concatenate(parts).astype(np.int32)
