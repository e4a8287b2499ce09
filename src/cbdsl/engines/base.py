"""What every engine can do with a stack of models: train it, score it, differentiate it.

An engine knows one network and nothing of swarms, servers or rounds. Workers are rows: a stack is a
``(U, D)`` float32 array of flat weights, and row ``u`` of a result depends on row ``u`` of the
inputs alone. So the number of threads, and the order or grouping of workers, never change a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cbdsl.arrays import Doubles, Floats, Indices, Samples, Seeds


@dataclass(frozen=True)
class Sgd:
    """Mini-batch SGD as torch.optim.SGD defines it; the momentum buffer starts at zero on every call.

    A step from w, of a model that a call began at w_0, with its own constant correction c:

        g = gradient + weight_decay * w + proximal * (w - w_0) + c
        v = momentum * v + g
        w = w - learning_rate * v
    """

    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    proximal: float = 0.0  # mu of FedProx (Li et al., 2020): how strongly a model is held where the call found it


class Engine(Protocol):
    """One network, many models of it. The loss is the mean cross-entropy."""

    @property
    def name(self) -> str:
        """How a user selects this engine and how reports call it."""
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
        """Take every model through its own batches, one SGD step a batch; return the new weights.

        weights: (U, D), left as it is. batches: (U, S, B) rows of `samples`; a short batch is padded
        with -1 at its end, a batch without samples is no step. seeds: (U,), for layers that draw
        random numbers while they train. corrections: (U, D), finite; row u is added to the gradient of
        every step of model u, as SCAFFOLD's c - c_u is (Karimireddy et al., 2020). See `Sgd` for a step.
        """
        ...

    def losses(self, weights: Floats, samples: Samples, indices: Indices, ceilings: Doubles | None = None) -> Doubles:
        """Mean loss of every model, (U,).

        indices: (N,), the same samples for all, or (U, N), a row a worker, padded with -1.
        ceilings: (U,); a worker whose loss is certain to exceed its ceiling may be given up and is
        then reported as +inf. Every other number is exact, so a minimum with the ceiling is too.
        """
        ...

    def sample_losses(self, weights: Floats, samples: Samples, indices: Indices) -> Doubles:
        """Loss of one model on every single sample, (N,), in the order of `indices`.

        weights: (D,), one model. indices: (N,), without padding. Their mean is what `losses` gives, up to rounding.
        """
        ...

    def accuracies(self, weights: Floats, samples: Samples, indices: Indices) -> Doubles:
        """Share of samples classified correctly, (U,); indices as in `losses`. Logits that hold a NaN are wrong."""
        ...

    def gradients(self, weights: Floats, samples: Samples, indices: Indices) -> Floats:
        """Gradient of the mean loss, (U, D); indices as in `losses`."""
        ...
