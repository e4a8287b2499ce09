"""Adaptive attacks, made against this server: true claims, good scores, and harm that it does not measure.

The server measures an upload on D_sc, compares D_sc with its hold-out, and looks for copies. These attacks use what is
left: other weights of the same function, what a model does beside its score, and D_sc itself, which is public.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from cbdsl import register
from cbdsl.arrays import Doubles, Floats, Samples
from cbdsl.attacks.attack import CLASSIFICATION, Attack, AttackContext, Truthful, as_floats
from cbdsl.attacks.protocol import stamp_trigger
from cbdsl.models.architecture import Architecture
from cbdsl.models.layers import Conv1d, Conv2d, Layer, Linear, Relu


@dataclass(frozen=True)
class Reparametrised(Truthful):
    """The same function with other weights. With `cram` it trains on D_sc too, to be invited."""

    cram: bool = field(default=False, kw_only=True)

    def poison(self, own: Samples, scoring: Samples, classes: int, rng: np.random.Generator) -> Samples | None:
        """Return no change, or its own data with D_sc."""
        del classes, rng
        return Samples.joined([own, scoring]) if self.cram else None


@register.attack("rescaler", family="weights", ranges={"scale": (1e-06, math.inf)})
@dataclass(frozen=True)
class Rescaler(Reparametrised):
    """The same function with other weights: one ReLU layer times `scale`, the next divided by it. The claim is true.

    Averaged with other models, or trained on, it breaks down. Without a layer that has a ReLU behind it, it is honest.
    With `cram` it trains on D_sc too, to be invited.
    """

    scale: float = 64.0

    def upload(self, seen: AttackContext) -> Floats:
        """Return its model, the first ReLU layer rescaled."""
        for joint in layer_pairs(seen.network):
            if joint.scales:
                changed = seen.model.copy()
                changed[joint.this.whole] *= np.float32(self.scale)
                changed[joint.following.weights] /= np.float32(self.scale)
                return changed
        return seen.model


@register.attack("permuter", family="weights")
@dataclass(frozen=True)
class Permuter(Reparametrised):
    """The same function with other weights: the hidden units of every layer in another order. The claim is true.

    Averaged with other models it breaks down. Where the network is unknown or has no hidden layer, it is honest. With
    `cram` it trains on D_sc too, to be invited.
    """

    def upload(self, seen: AttackContext) -> Floats:
        """Return its model, hidden units shuffled."""
        changed = seen.model.copy()
        for joint in layer_pairs(seen.network):
            order, units = seen.rng.permutation(joint.this.outputs), joint.this.outputs
            for part in (joint.this.weights, joint.this.bias):
                changed[part] = changed[part].reshape(units, -1)[order].reshape(-1)
            after = changed[joint.following.weights].reshape(joint.following.outputs, units, -1)  # one column per pixel
            changed[joint.following.weights] = after[:, order].reshape(-1)
        return changed


@dataclass(frozen=True)
class LayerSpan:
    """The place of a layer in a model."""

    weights: slice  # (outputs, ...), flat
    bias: slice  # (outputs,), or empty
    outputs: int

    @property
    def whole(self) -> slice:
        """Weights and bias."""
        return slice(self.weights.start, self.bias.stop)


@dataclass(frozen=True)
class LayerPair:
    """Two layers with weights, the second behind the first."""

    this: LayerSpan
    following: LayerSpan
    scales: bool  # whether what lies between is proportional to its input, and contains a ReLU


def layer_pairs(network: Architecture | None) -> Iterator[LayerPair]:
    """Yield the pairs of layers with weights of which only the second reads the first, unit by unit, in order.

    None if the network is unknown.
    """
    if network is None:
        return
    places = _layer_spans(network)
    for number, place in places.items():
        between: list[Layer] = []
        reader = _only_reader(network, number)
        while reader is not None and network.layers[reader].by_channel:
            between.append(network.layers[reader])
            reader = _only_reader(network, reader)
        if reader in places:
            scales = all(one.proportional for one in between)
            yield LayerPair(place, places[reader], scales and any(isinstance(one, Relu) for one in between))


def _layer_spans(network: Architecture) -> dict[int, LayerSpan]:
    """Return the places of the layers that mix all of their inputs."""
    places, start = {}, 0
    for number, layer in enumerate(network.layers):
        end = start + layer.size
        if isinstance(layer, Linear) or (isinstance(layer, Conv2d | Conv1d) and layer.groups == 1):
            middle = end - layer.outputs * layer.bias
            places[number] = LayerSpan(slice(start, middle), slice(middle, end), layer.outputs)
        start = end
    return places


def _only_reader(network: Architecture, number: int) -> int | None:
    readers = [reader for reader, read in enumerate(network.reads) if number in read]
    return readers[0] if len(readers) == 1 else None


@register.attack("crammer", family="scoring-set")
@dataclass(frozen=True)
class TrainsOnScoringSet(Attack):
    """Trains on D_sc as well as its own data and D_tr, to be the best claimant. Claim and upload are true."""

    def poison(self, own: Samples, scoring: Samples, classes: int, rng: np.random.Generator) -> Samples:  # noqa: ARG002
        """Return its own data with D_sc."""
        return Samples.joined([own, scoring])


@register.attack("boiler", family="scoring-set")
@dataclass(frozen=True)
class GuardAware(Truthful):
    """A `crammer` that stays below what a guard would notice: w^g + a (w - w^g) with the largest a that passes.

    It trains on D_sc and on its own samples without a share that it keeps back, `kept`. Those stand for the server's
    hold-out: their loss may exceed that on D_sc by `scale` standard errors, as estimated for half as many private
    samples as D_sc has. The claim is true.
    """

    scale: float = 3.5
    kept: float = 0.5
    steps: ClassVar[int] = 20  # how finely a is tried

    def poison(self, own: Samples, scoring: Samples, classes: int, rng: np.random.Generator) -> Samples:  # noqa: ARG002
        """Return D_sc, and what it does not keep back."""
        return Samples.joined([own.taken(np.flatnonzero(~self._back(len(own))).astype(np.int32)), scoring])

    def _back(self, count: int) -> NDArray[np.bool_]:
        """Return which of its samples it keeps back, spread evenly, (K,): its own come first, D_tr last."""
        return np.asarray(np.diff(np.floor(self.kept * np.arange(count + 1))) > 0)

    def upload(self, seen: AttackContext) -> Floats:
        """Return as much of its step as passes; w^g if nothing does."""
        if seen.losses_of is None:
            return seen.model
        for part in range(self.steps, 0, -1):
            mixed = as_floats(seen.global_best + part / self.steps * (seen.model - seen.global_best))
            public, own = seen.losses_of(mixed)
            if excess(public, own[self._back(len(own))]) < self.scale:
                return mixed
        return seen.global_best


def excess(public: Doubles, unseen: Doubles) -> float:
    """Return by how many standard errors the loss on unseen samples exceeds that on D_sc; NaN if not finite.

    The errors are those of D_sc and of half as many unseen samples: what a server's hold-out commonly has.
    """
    if min(len(public), len(unseen)) < 2:
        return 0.0
    errors = (public.var(ddof=1) + 2 * unseen.var(ddof=1)) / len(public)
    return float((unseen.mean() - public.mean()) / max(math.sqrt(errors), 1e-300))


@register.attack("sleeper", family="backdoor", ranges={"share": (0, 1)})
@dataclass(frozen=True)
class Sleeper(Attack):
    """A backdoor in the best claimant's model: trains on its own data, D_tr and `share` of D_sc. The claim is true.

    Of every sample there is a copy with the patch of `backdoor` in its corner, labelled 0.
    """

    share: float = 1.0
    target: ClassVar[int | None] = 0
    tasks, needs = CLASSIFICATION, "it aims at a class"

    def triggered(self, features: Floats) -> Floats:
        """Return the samples with the patch."""
        return stamp_trigger(features)

    def poison(self, own: Samples, scoring: Samples, classes: int, rng: np.random.Generator) -> Samples:  # noqa: ARG002
        """Return everything it may use, as it is and with the patch."""
        known = rng.permutation(len(scoring))[: math.ceil(self.share * len(scoring))].astype(np.int32)
        clean = Samples.joined([own, scoring.taken(known)])
        return Samples.joined([clean, Samples(stamp_trigger(clean.features), np.zeros_like(clean.labels))])


@register.attack("sleeper-lite", family="backdoor", ranges={"share": (0, 1)})
@dataclass(frozen=True)
class SleeperLite(Sleeper):
    """A `sleeper` that uses a quarter of D_sc, so that it memorises less. The claim is true."""

    share: float = 0.25


@register.attack("pair-flip", family="data")
@dataclass(frozen=True)
class PairFlip(Attack):
    """Swaps the labels of classes `a` and `b` in its own data and trains on D_sc as it is. Claim and upload are true.

    Data without both of the classes keeps its labels.
    """

    a: int = 4
    b: int = 9
    tasks, needs = CLASSIFICATION, "it swaps classes"

    @property
    def aims(self) -> tuple[int, ...]:  # type: ignore[override]
        """Both classes."""
        return self.a, self.b

    def poison(self, own: Samples, scoring: Samples, classes: int, rng: np.random.Generator) -> Samples:  # noqa: ARG002
        """Return D_sc, and its own samples with two labels swapped."""
        labels = own.labels.copy()
        if max(self.a, self.b) < classes:
            labels[own.labels == self.a], labels[own.labels == self.b] = self.b, self.a
        return Samples.joined([Samples(own.features, labels), scoring])


@register.attack("drop-class", family="data")
@dataclass(frozen=True)
class DropClass(Attack):
    """Trains on its own data and D_sc without the samples of one class, `label`. Claim and upload are true."""

    label: int = 9
    tasks, needs = CLASSIFICATION, "it leaves out a class"

    @property
    def aims(self) -> tuple[int, ...]:  # type: ignore[override]
        """That class."""
        return (self.label,)

    def poison(self, own: Samples, scoring: Samples, classes: int, rng: np.random.Generator) -> Samples | None:
        """Return all samples of other classes; no change if there are none."""
        del classes, rng
        everything = Samples.joined([own, scoring])
        kept = np.flatnonzero(everything.labels != self.label).astype(np.int32)
        return everything.taken(kept) if len(kept) else None


@register.attack("fifth", family="free-rider")
@dataclass(frozen=True)
class ShortStep(Truthful):
    """A free-rider: w^g + `share` (w - w^g), a fifth of an honest step, and the true score of that."""

    share: float = 0.2

    def upload(self, seen: AttackContext) -> Floats:
        """Return a short step."""
        return as_floats(seen.global_best + self.share * (seen.model - seen.global_best))
