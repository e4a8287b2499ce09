"""Measure steps of Adam against steps of SGD, in processor time: `python benchmarks/optimisers.py --model cnn`."""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from cbdsl.arrays import Samples
from cbdsl.engines.engine import Sgd
from cbdsl.engines.native_engine import NativeEngine
from cbdsl.models.network import initial_weights
from cbdsl.models.zoo import cnn, har_cnn, mlp

MODELS = {"cnn": (cnn, (1, 28, 28), 10), "mlp": (mlp, (1, 28, 28), 10), "har-cnn": (har_cnn, (6, 128), 6)}
KINDS = {
    "sgd": Sgd(1e-3),
    "sgd, momentum": Sgd(1e-3, momentum=0.9),
    "sgd, clipped": Sgd(1e-3, clip=1.0),
    "adam": Sgd(1e-3, optimiser="adam"),
    "adamw, cosine, clipped": Sgd(1e-3, weight_decay=0.01, optimiser="adamw", schedule="cosine", clip=1.0),
}


def main() -> None:
    """Print the processor time per step of each optimiser, and its ratio to that of SGD. They take turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="cnn")
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args()
    build, shape, classes = MODELS[given.model]
    network, rng = build(shape, classes), np.random.default_rng(0)
    labels = rng.integers(0, classes, 300).astype(np.int32)
    samples = Samples(rng.standard_normal((300, *shape), dtype=np.float32), labels)
    weights = np.stack([initial_weights(network, seed) for seed in range(4)])
    batches = rng.integers(0, 300, (4, 30, given.batch)).astype(np.int32)
    engine, seconds = NativeEngine(network, 1), dict[str, list[float]]()
    for _ in range(given.repeats):
        for name, sgd in KINDS.items():
            start = time.process_time()
            engine.train(weights, samples, batches, sgd)
            seconds.setdefault(name, []).append(time.process_time() - start)
    plain = statistics.median(seconds["sgd"])
    for name, own in seconds.items():
        middle = statistics.median(own)
        print(f"{name:24} {1e6 * middle / batches[..., 0].size:8.1f} us per step  {middle / plain:.3f} times SGD's")


if __name__ == "__main__":
    main()
