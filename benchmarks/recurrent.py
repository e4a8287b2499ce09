"""Measure training of recurrent networks on both engines, in turns: `python benchmarks/recurrent.py --model gru`."""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from cbdsl.arrays import Samples
from cbdsl.engines.engine import Engine, Sgd
from cbdsl.engines.native_engine import NativeEngine
from cbdsl.engines.torch_engine import TorchEngine
from cbdsl.models.architecture import Architecture
from cbdsl.models.layers import Gru, Layer, Linear, Lstm, Transpose
from cbdsl.models.network import initial_weights
from cbdsl.models.to_torch import module_of
from cbdsl.models.zoo import usual


def series(*layers: Layer) -> Architecture:
    """Return a classifier of windows of 128 readings of six sensors."""
    return Architecture((6, 128), (Transpose(), *layers, Linear(64, 6)))


MODELS = {
    "har-gru": lambda: usual("har-gru"),
    "gru": lambda: series(Gru(6, 64)),
    "gru of two layers": lambda: series(Gru(6, 64, last=False), Gru(64, 64)),
    "lstm": lambda: series(Lstm(6, 64)),
}


def main() -> None:
    """Print the time per step of both engines and its ratio, the median over repeats in which they take turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    for name in given.model or MODELS:
        network = MODELS[name]()
        labels = rng.integers(0, network.classes, 200).astype(np.int32)
        samples = Samples(rng.standard_normal((200, *network.shape), dtype=np.float32), labels)
        weights = np.stack([initial_weights(network, seed) for seed in range(given.workers)])
        batches = rng.integers(0, 200, (given.workers, 5, given.batch)).astype(np.int32)
        engines: dict[str, Engine] = {
            "native": NativeEngine(network, given.threads), "torch": TorchEngine(module_of(network), given.threads)
        }  # fmt: skip
        seconds: dict[str, list[float]] = {engine: [] for engine in engines}
        for repeat in range(given.repeats + 1):
            for engine_name, engine in engines.items():
                start = time.perf_counter()
                engine.train(weights, samples, batches, Sgd(0.01))
                if repeat:  # the first call warms up
                    seconds[engine_name].append(time.perf_counter() - start)
        native, other = (1e6 * statistics.median(own) / batches[..., 0].size for own in seconds.values())
        print(f"{name:20} native {native:9.0f} us per step, torch {other:9.0f}: {other / native:5.1f} times as fast")


if __name__ == "__main__":
    main()
