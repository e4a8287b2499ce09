"""What a model says of samples: probabilities, by any engine."""

from __future__ import annotations

import numpy as np

from cbdsl.arrays import Doubles, Floats, Samples
from cbdsl.engines.base import Engine


def log_probabilities(engine: Engine, weights: Floats, features: Floats, classes: int) -> Doubles:
    """Logarithms of the probabilities of classes, (N, classes): logits, up to a number that a sample's have in common.

    An engine computes losses; the loss of a sample under a label is the negative of that label's.
    """
    everything = np.arange(len(features), dtype=np.int32)
    columns = [
        -engine.sample_losses(weights, Samples(features, np.full(len(features), label, np.int32)), everything)
        for label in range(classes)
    ]
    return np.stack(columns, axis=1)
