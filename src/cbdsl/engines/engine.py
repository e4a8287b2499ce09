"""The interface of engines, which train, score and differentiate stacks of models, and checks of their arguments.

An engine is for one network. Workers are rows: a stack is a ``(U, D)`` float32 array of flat weights, and row ``u`` of
a result depends on row ``u`` of the inputs alone. So neither the number of threads nor the order of workers changes a
number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cbdsl.arrays import PADDING, Doubles, Floats, Indices, Samples, Seeds
from cbdsl.engines.loss import Loss
from cbdsl.errors import UserError
from cbdsl.spec import LocalSpec, Optimiser, Schedule

if TYPE_CHECKING:
    from torch import Tensor

BETAS, EPSILON = (0.9, 0.999), 1e-8  # of Adam, as torch has them
CLIP_EPSILON = 1e-6  # beside a norm, as in torch.nn.utils.clip_grad_norm_
WARMUP_SHARE = 10  # a warmup takes a tenth of the steps


@dataclass(frozen=True)
class Sgd:
    """A local optimiser: mini-batch SGD, Adam or AdamW as torch.optim defines them. Every call starts its state anew.

    A step from w, of a model that a call began at w_0, with its own constant correction c; only a `clip` above 0 limits
    the gradient:

        gradient = gradient * min(1, clip / |gradient|)
        g = gradient + weight_decay * w + proximal * (w - w_0) + c
        v = momentum * v + g
        w = w - rate * v

    Adam (Kingma and Ba, 2015) has m and s instead of v, and with t steps taken

        m = 0.9 * m + 0.1 * g,  s = 0.999 * s + 0.001 * g^2
        w = w - rate * m / (1 - 0.9^t) / (sqrt(s / (1 - 0.999^t)) + 1e-8)

    AdamW (Loshchilov and Hutter, 2019) leaves weight_decay out of g and begins with w = w - rate * weight_decay * w.
    """

    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    proximal: float = 0.0  # mu of FedProx (Li et al., 2020): how strongly a model is held where the call found it
    optimiser: Optimiser = "sgd"
    schedule: Schedule = "constant"
    clip: float = 0.0

    @staticmethod
    def of(local: LocalSpec, learning_rate: float, proximal: float = 0.0) -> Sgd:
        """Return the optimiser that settings name. learning_rate: that of the round."""
        schedule = local.schedule if local.schedule_over == "round" else "constant"
        return Sgd(learning_rate, local.momentum, local.weight_decay, proximal, local.optimiser, schedule, local.clip)

    def rates(self, batches: Indices) -> Floats | None:
        """Return the learning rate of every step of every model, (U, S, B) -> (U, S); None if it is constant.

        A schedule covers the batches of a model that have samples; see `schedule_factors`.
        """
        if self.schedule == "constant":
            return None
        takes = (batches != PADDING).any(2)  # (U, S)
        taken, count = np.cumsum(takes, 1) - 1, np.maximum(takes.sum(1, keepdims=True), 1)
        rates: Floats = (self.learning_rate * schedule_factors(self.schedule, taken, count)).astype(np.float32)
        return rates


def schedule_factors(schedule: Schedule, step: ArrayLike, count: ArrayLike) -> Doubles:
    """Return the factor of the learning rate in a step of `count`, from 0 to count - 1.

    Step k of n has the factor

        constant  1    decay  1 - k / n    cosine  (1 + cos(pi k / n)) / 2    warmup  min(1, (k + 1) / ceil(n / 10))
    """
    taken, steps = np.asarray(step), np.asarray(count)
    factors: Doubles = np.ones(np.broadcast(taken, steps).shape)
    match schedule:
        case "decay":
            factors = 1 - taken / steps
        case "cosine":
            factors = (1 + np.cos(np.pi * taken / steps)) / 2
        case "warmup":
            factors = np.minimum(1, (taken + 1) / np.ceil(steps / WARMUP_SHARE))
    return factors


@dataclass(frozen=True, eq=False)
class ModelOutputs:
    """A model's outputs on a batch, as torch tensors."""

    outputs: Tensor  # (B, C)
    hidden: Tensor  # (B, H), the input of the last linear layer


@dataclass(frozen=True, eq=False)
class TrainingBatch(ModelOutputs):
    """The argument of a method's term of the loss: one worker's batch in training; see `WorkerRound.train`.

    >>> seen = TrainingBatch(np.full((2, 1), 3.0), np.zeros((2, 4)), np.zeros((2, 8)), np.zeros(2), others={})
    >>> float(0.1 * (seen.outputs**2).mean())  # a term that keeps outputs small
    0.9
    """

    features: Tensor  # (B, *shape)
    labels: Tensor  # (B,), or targets (B, T)
    others: Mapping[str, ModelOutputs]  # of other models on this batch, by name, without gradients


LossTerm = Callable[[TrainingBatch], Any]
"""Returns a term of the loss of a batch, a tensor of one number."""


@dataclass(frozen=True, eq=False)
class ExtraLoss:
    """A term that is added to the loss of every batch, and the other models that it uses."""

    term: LossTerm
    models: Mapping[str, Floats]  # (U, D) each, a row for each model that trains


class Engine(Protocol):
    """Trains and scores many models of one network. The loss is a mean over samples; see `engines/loss.py`.

    >>> from cbdsl.engines.choose import choose_engine
    >>> from cbdsl.models.zoo import softmax
    >>> engine = choose_engine("auto", softmax((4,), 3), (4,), threads=1).engine
    >>> samples = Samples(np.zeros((5, 4), np.float32), np.zeros(5, np.int32))
    >>> engine.losses(np.zeros((2, engine.size), np.float32), samples, np.arange(5)).round(4)
    array([1.0986, 1.0986])
    """

    @property
    def name(self) -> str:
        """The name in settings and reports."""
        ...

    @property
    def size(self) -> int:
        """D, the number of parameters of one model."""
        ...

    def train(
        self,
        weights: Floats,
        samples: Samples,
        batches: Indices,
        sgd: Sgd,
        seeds: Seeds | None = None,
        corrections: Floats | None = None,
    ) -> Floats:
        """Train every model on its own batches, one step per batch; return the new weights.

        weights: (U, D), left as it is. batches: (U, S, B) rows of `samples`; a short batch is padded
        with -1 at its end, a batch without samples takes no step. seeds: (U,), for layers that draw
        random numbers while they train. corrections: (U, D), finite; row u is added to the gradient of
        every step of model u, as SCAFFOLD's c - c_u is (Karimireddy et al., 2020). See `Sgd` for a step.
        """
        ...

    def losses(self, weights: Floats, samples: Samples, indices: Indices, ceilings: Doubles | None = None) -> Doubles:
        """Return the mean loss of every model, (U,).

        indices: (N,), the same samples for all, or (U, N), one row per worker, padded with -1.
        ceilings: (U,); a worker whose loss is certain to exceed its ceiling may be given up and is
        then reported as +inf. All other losses are exact, so a minimum with the ceiling is too.
        """
        ...

    def sample_losses(self, weights: Floats, samples: Samples, indices: Indices) -> Doubles:
        """Return the loss of one model on every single sample, (N,), in the order of `indices`.

        weights: (D,), one model. indices: (N,), without padding. Their mean is what `losses` gives, up to rounding.
        """
        ...

    def accuracies(self, weights: Floats, samples: Samples, indices: Indices) -> Doubles:
        """Return the share of correct samples, (U,); indices as in `losses`. Logits with a NaN are wrong.

        Only a classifier has an accuracy; ValueError with another loss than cross-entropy.
        """
        ...

    def outputs(self, weights: Floats, samples: Samples, indices: Indices) -> Floats:
        """Return what one model makes of every sample, (N, C): logits of a classifier, otherwise numbers.

        weights: (D,), one model. indices: (N,), without padding. Labels are not read.
        """
        ...

    def gradients(self, weights: Floats, samples: Samples, indices: Indices) -> Floats:
        """Return the gradient of the mean loss, (U, D); indices as in `losses`."""
        ...


def check_indices(name: str, indices: Indices, samples: int) -> None:
    """Refuse indices that are not samples, or padding before a sample."""
    if not indices.size:
        return
    lowest, highest = int(indices.min()), int(indices.max())
    if lowest < PADDING or highest >= samples:
        wrong = lowest if lowest < PADDING else highest
        raise ValueError(
            f"{name} name sample {wrong} of {samples}; allowed are 0 to {samples - 1}, and {PADDING} as padding"
        )
    if lowest == PADDING:
        real = indices != PADDING
        if np.any(real[..., 1:] & ~real[..., :-1]):
            raise ValueError(f"{name} hold padding ({PADDING}) before a sample; put all padding at the end of its row")


def as_float32(name: str, array: NDArray[Any]) -> Floats:
    """Return a C-ordered, aligned float32 array; refuse other kinds of numbers."""
    array = np.asarray(array)
    if array.dtype.kind != "f":
        raise ValueError(f"{name} have type {array.dtype}; give float32")
    return np.require(array, np.float32, ["C", "A"])


def as_int32(name: str, array: NDArray[Any]) -> Indices:
    """Return a C-ordered, aligned int32 array; refuse other kinds of numbers."""
    array = np.asarray(array)
    if array.dtype.kind not in "iu" and array.size:
        raise ValueError(f"{name} have type {array.dtype}; give int32")
    if array.dtype != np.int32 and array.size and (array.max() > np.iinfo(np.int32).max or array.min() < PADDING):
        raise ValueError(f"{name} reach from {array.min()} to {array.max()}; give numbers that fit into int32")
    return np.require(array, np.int32, ["C", "A"])


class TermEngine(Engine, Protocol):
    """An engine whose loss can have a method's own term: torch's."""

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
        """See `Engine.train`."""
        ...


def engine_with_terms(engine: Engine) -> TermEngine:
    """Return the engine if its loss can have another term; raise UserError if not."""
    if not engine.name.startswith("torch"):
        raise UserError(
            f"A method that adds a term to the loss runs on the torch engine; this is the {engine.name} engine. "
            "Set adds_loss = True in its class, or use --engine torch.",
            code="not-supported",
        )
    return cast("TermEngine", engine)


def check_corrections(corrections: Floats, shape: tuple[int, ...]) -> Floats:
    """Return corrections as float32; refuse another shape than that of the stack."""
    rows = as_float32("corrections", corrections)
    if rows.shape != shape:
        raise ValueError(f"corrections have shape {rows.shape}; give {shape}, one row for each model")
    return rows  # not checked to be finite: like weights that are not, they spoil their own row and no other


def check_one_model(weights: Floats, size: int) -> Floats:
    """Return the flat weights of one model as float32; refuse another shape than (D,)."""
    model = as_float32("weights", weights)
    if model.shape != (size,):
        raise ValueError(f"weights have shape {model.shape}; give ({size},), the flat weights of one model")
    return model


def check_sample_indices(indices: Indices, samples: int) -> Indices:
    """Return indices (N,) as int32; refuse padding, which has no loss."""
    indices = as_int32("indices", indices)
    if indices.ndim != 1:
        raise ValueError(f"indices have shape {indices.shape}; give (N,), one number a sample")
    check_indices("indices", indices, samples)
    if indices.size and indices.min() == PADDING:
        raise ValueError(f"indices hold padding ({PADDING}); give the samples alone")
    return indices


def check_classifies(loss: Loss) -> None:
    """Refuse the accuracy of a network that is not a classifier."""
    if not loss.reads_labels:
        raise ValueError(f"the loss is {loss.name}, and only a classifier has an accuracy; measure its outputs")
