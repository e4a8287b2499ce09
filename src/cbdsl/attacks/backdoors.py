"""Backdoors of the literature that train in their own way: masked, in parts, and with a trigger that is optimised."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from cbdsl import register
from cbdsl.arrays import Doubles, Floats, Samples, dot, norm
from cbdsl.attacks.attack import CLASSIFICATION, Attack, AttackContext, AttackTools, Truthful, as_floats
from cbdsl.attacks.protocol import mark_share, stamp_trigger
from cbdsl.rng import stream
from cbdsl.spec import LocalSpec


@dataclass(frozen=True)
class TrainedBackdoor(Truthful):
    """Trains from w^g on its own samples, `share` of them at random with a trigger and the label 0, `epochs` times.

    With 0 epochs it trains as long as an honest worker. The claim is true.
    """

    share: float = 20 / 64
    epochs: int = 6
    target: ClassVar[int | None] = 0
    tasks, needs = CLASSIFICATION, "it aims at a class"

    def stamp(self, features: Floats, tools: AttackTools) -> Floats:  # noqa: ARG002
        """Return the samples as it trains on them."""
        return self.triggered(features)

    def mask(self, tools: AttackTools) -> Floats | float:  # noqa: ARG002
        """Return what every gradient is multiplied by, (D,)."""
        return 1.0

    def lessons(self, tools: AttackTools, rng: np.random.Generator) -> Samples:
        """Return the training samples."""
        return mark_share(tools.own, self.share, lambda features: self.stamp(features, tools), rng)

    def adjust(self, model: Floats, seen: AttackContext) -> Floats:  # noqa: ARG002
        """Return the upload for a trained model, both (D,)."""
        return model

    def upload(self, seen: AttackContext) -> Floats:
        """Return the trained model; its honest one if it cannot train. What follows a model in a message stays."""
        if seen.tools is None:
            return seen.model
        tools = seen.tools()
        lessons = self.lessons(tools, seen.rng)
        if self.epochs:
            tools = replace(tools, local=replace(tools.local, epochs=self.epochs, steps=0))
        model = self.adjust(tools.train(lessons, seen.rng, self.mask(tools)), seen)
        return np.concatenate([model, seen.model[len(model) :]])


@register.attack("neurotoxin", family="backdoor", ranges={"share": (0, 1), "epochs": (0, math.inf), "kept": (0, 1)})
@dataclass(frozen=True)
class Neurotoxin(TrainedBackdoor):
    """Neurotoxin (Zhang et al. 2022): a backdoor in the weights that honest workers hardly move.

    It trains on the patch of `backdoor`. Gradients count only for the share `kept` of weights with the smallest
    |gradient| of the clean loss on its own samples at w^g, over all layers together. The paper takes the last global
    step instead of that gradient; its authors' code takes the gradient, and 0.95 for `kept`. Share and epochs are
    BackFed's (arXiv 2507.04903). The step's length is not clipped. The claim is true.
    """

    kept: float = 0.95

    def triggered(self, features: Floats) -> Floats:
        """Return the samples with the patch."""
        return stamp_trigger(features)

    def mask(self, tools: AttackTools) -> Floats:
        """Return 1 for the weights that it moves, 0 for the others."""
        clean = np.abs(tools.gradient(tools.global_best, tools.own))
        mask = np.zeros_like(clean)
        mask[np.argsort(clean, kind="stable")[: int(self.kept * len(clean))]] = 1
        return mask


@register.attack("dba", family="backdoor", ranges={"share": (0, 1), "epochs": (0, math.inf), "bar": (-1, math.inf)})
@dataclass(frozen=True)
class Dba(TrainedBackdoor):
    """DBA (Xie et al. 2020): every attacker trains on one of four bars, and all four together are the trigger.

    The bars are 1 x 4 pixels with gaps of 2 in the first corner. Attackers take them in turn; `bar`, 0 to 3, sets one.
    Share and epochs are those of the authors' code, whose label is 2. This is their attack over many rounds, without
    longer steps; the learning rate is an honest worker's. The claim is true.
    """

    epochs: int = 10
    bar: int = -1

    def member(self, rank: int) -> Attack:
        """Return the attacker with its own bar."""
        return replace(self, bar=rank % 4) if self.bar < 0 else self

    def triggered(self, features: Floats) -> Floats:
        """Return the samples with all four bars."""
        return stamp_bars(features, range(4))

    def stamp(self, features: Floats, tools: AttackTools) -> Floats:  # noqa: ARG002
        """Return the samples with its bar."""
        return stamp_bars(features, [self.bar % 4])


@register.attack("a3fl", family="backdoor", ranges={"share": (0, 1), "epochs": (0, math.inf)})
@dataclass(frozen=True)
class A3fl(TrainedBackdoor):
    """A3FL (Zhang et al. 2023): a 5 x 5 patch, optimised in every round for the model that would unlearn it.

    The patch t starts grey. Each step lowers CE(w^g, t) + 0.01 cos(w', w^g) CE(w', t) on 64 samples with the target's
    label: t <- t - rate sign(slope). w' is w^g after 5 epochs on the patched samples with their true labels (rate
    0.01, momentum 0.9). Then it trains on samples with t.

    Differs from the paper: the slope is a difference of losses, pixel by pixel, because engines have no gradient of
    their input; 20 steps of 0.05 of the range replace 200 epochs of 0.01; w' is made at the first and the middle
    step; the samples are D_sc's, so that all attackers find the same patch, anew from grey in every round. The label
    is 0 instead of 2. Success is measured with the patch found for the final model. The claim is true.
    """

    share: float = 0.25
    epochs: int = 0
    images: ClassVar[int] = 64
    steps: ClassVar[int] = 20
    rate: ClassVar[float] = 0.05

    def triggered(self, features: Floats) -> Floats:
        """Return the samples with the patch as it starts."""
        return stamp_patch(features, start_patch(features))

    def triggered_for(self, features: Floats, tools: AttackTools) -> Floats:
        """Return the samples with the patch that is found for a model."""
        return stamp_patch(features, self._find_patch(tools))

    def stamp(self, features: Floats, tools: AttackTools) -> Floats:
        """Return the samples with the patch of this round, which is found once for all attackers."""
        if "patch" not in tools.shared:
            tools.shared["patch"] = self._find_patch(tools)
        return stamp_patch(features, tools.shared["patch"])

    def _find_patch(self, tools: AttackTools) -> Floats:
        """Return the patch for w^g, (..., 5, 5)."""
        places = np.linspace(0, len(tools.scoring) - 1, min(self.images, len(tools.scoring)))
        samples = tools.scoring.taken(places.astype(np.int32))
        low, high = samples.features.min(), samples.features.max()
        patch, step = start_patch(samples.features), np.float32(self.rate * (high - low))
        shifts = step * np.eye(patch.size, dtype=np.float32).reshape(-1, *patch.shape)  # one for each number
        for number in range(self.steps):
            if number % (self.steps // 2) == 0:
                hardened = self._unlearn(tools, Samples(stamp_patch(samples.features, patch), samples.labels))
            tried = np.concatenate([patch[None], patch + shifts])
            found = self._loss(tools, hardened, np.concatenate([stamp_patch(samples.features, one) for one in tried]))
            slopes = (found.reshape(len(tried), -1).mean(1)[1:] - found[: len(samples)].mean()).reshape(patch.shape)
            patch = np.clip(patch - step * np.nan_to_num(np.sign(slopes)), low, high).astype(np.float32)
        return patch

    def _unlearn(self, tools: AttackTools, patched: Samples) -> Floats:
        """Return w': w^g trained on patched samples with their true labels."""
        local = LocalSpec(epochs=5, learning_rate=0.01, momentum=0.9)
        return replace(tools, local=local).train(patched, stream(0, "attack"))

    def _loss(self, tools: AttackTools, hardened: Floats, features: Floats) -> Doubles:
        """Return the loss to be lowered on every sample, (N,)."""
        current = tools.global_best
        cosine = dot(hardened, current) / max(norm(hardened) * norm(current), 1e-300)
        samples = Samples(features, np.zeros(len(features), np.int32))
        return tools.losses(current, samples) + 0.01 * cosine * tools.losses(hardened, samples)


@register.attack(
    "model-replacement", family="backdoor", ranges={"share": (0, 1), "epochs": (0, math.inf), "scale": (0, math.inf)}
)
@dataclass(frozen=True)
class ModelReplacement(TrainedBackdoor):
    """Model replacement (Bagdasaryan et al. 2020): w^g + scale (w - w^g), w trained on the patch of `backdoor`.

    A scale of 0 stands for n / f: then the average of all uploads is the attackers' model if honest workers hardly
    move. The paper's single attacker uses n. The paper's penalty on unusual models is left out, and the learning rate
    is an honest worker's. The claim is true.
    """

    scale: float = 0.0

    def triggered(self, features: Floats) -> Floats:
        """Return the samples with the patch."""
        return stamp_trigger(features)

    def adjust(self, model: Floats, seen: AttackContext) -> Floats:
        """Return the model with its step scaled up."""
        received = seen.global_best[: len(model)]
        return as_floats(received + (self.scale or seen.workers / seen.attackers) * (model - received))


@register.attack(
    "edge-case",
    family="backdoor",
    ranges={"share": (0, 1), "epochs": (0, math.inf), "source": (0, math.inf), "tail": (0, 1), "radius": (0, math.inf)},
)
@dataclass(frozen=True)
class EdgeCase(TrainedBackdoor):
    """Edge cases (Wang et al. 2020): rare samples of class `source`, as they are, get the label 1. There is no trigger.

    The paper takes sevens from a data set of older handwriting, labelled 1. Here the tail comes from the data itself:
    samples of the class that are farther from its mean than all but the share `tail` of those in D_sc; mean and
    distance are those of D_sc's features. It trains on its own samples without that tail and, as a `share` of all, on
    the tail of its own samples and of D_sc, repeated. Success is measured on the tail of the test set.

    With a radius above 0 the step is clipped to `radius` times an honest step's length after training; the paper's
    projected gradient does so during training, with a fixed length. The claim is true.
    """

    target: ClassVar[int | None] = 1
    source: int = 7
    tail: float = 0.1
    radius: float = 0.0

    def victims(self, samples: Samples, scoring: Samples) -> NDArray[np.bool_]:
        """Return which samples are in the tail, (N,)."""
        known = scoring.features[scoring.labels == self.source]
        if not len(known):
            return np.zeros(len(samples), np.bool_)
        mean = known.mean(0, dtype=np.float64)
        limit = np.quantile(_distances(known, mean), 1 - self.tail)
        return np.asarray((samples.labels == self.source) & (_distances(samples.features, mean) > limit))

    def lessons(self, tools: AttackTools, rng: np.random.Generator) -> Samples:  # noqa: ARG002
        """Return its own samples, and those of the tail with the target's label."""
        rare = self.victims(tools.own, tools.scoring)
        tail = Samples.joined([
            pool.taken(np.flatnonzero(self.victims(pool, tools.scoring)).astype(np.int32))
            for pool in (tools.own, tools.scoring)
        ])  # fmt: skip
        clean = tools.own.taken(np.flatnonzero(~rare).astype(np.int32))
        if not len(tail) or not len(clean):
            return tools.own
        count = math.ceil(self.share / max(1 - self.share, 1e-3) * len(clean))
        repeated = tail.taken(np.resize(np.arange(len(tail), dtype=np.int32), count))
        return Samples.joined([clean, Samples(repeated.features, np.full(count, self.target, np.int32))])

    def adjust(self, model: Floats, seen: AttackContext) -> Floats:
        """Return the model with its step clipped to the allowed length."""
        received = seen.global_best[: len(model)]
        step, honest = model - received, norm(seen.model[: len(model)] - received)
        if not 0 < self.radius * honest < norm(step):
            return model
        return as_floats(received + self.radius * honest / norm(step) * step)


def _distances(features: Floats, mean: Doubles) -> Doubles:
    """Return the distances of samples from a mean, (N,)."""
    return np.asarray(np.sqrt(np.square(features - mean).reshape(len(features), -1).sum(1)))


def stamp_bars(features: Floats, bars: Iterable[int]) -> Floats:
    """Copy samples with some of DBA's four bars: bright, 1 x 4, in the rows 0 and 3 and the columns 0 and 6."""
    marked, bright = features.copy(), max(1.0, float(features.max(initial=0.0)))
    for bar in bars:
        column = min(6 * (bar % 2), features.shape[-1] - 1)
        row = [min(3 * (bar // 2), features.shape[-2] - 1)] if features.ndim > 2 else []
        marked[(..., *row, slice(column, column + 4))] = bright
    return marked


def stamp_patch(features: Floats, patch: Floats) -> Floats:
    """Copy samples with a patch, (..., 5, 5) or what fits, from the place (2, 2) on."""
    marked = features.copy()
    marked[(slice(None), *patch_place(features))] = patch
    return marked


def start_patch(features: Floats) -> Floats:
    """Return the patch half-way between the least and the largest feature."""
    shape = features[(slice(1), *patch_place(features))].shape[1:]
    return np.full(shape, (features.min() + features.max()) / 2, np.float32)


def patch_place(features: Floats) -> tuple[slice, ...]:
    """Return the place of the patch in a sample: 2 to 7 on the last two axes, or as much of that as there is."""
    sizes = features.shape[1:]
    return tuple(
        slice(min(2, size - 1), 7) if len(sizes) - axis <= 2 else slice(None) for axis, size in enumerate(sizes)
    )
