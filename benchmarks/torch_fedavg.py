"""FedAvg as one would write it in torch, for `startup.py`: two processes, each training half of the workers.

torch and the data are loaded once, then the processes are forked, so neither is paid for twice. The loop over batches
is that of `cbdsl bench` with the settings that are fastest on this network: one thread a process, oneDNN off, a model's
weights in one flat tensor. Prints the test accuracy after the last round.
"""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.connection import Connection

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cbdsl.arrays import Floats, Indices
from cbdsl.data.dataset import Dataset, load
from cbdsl.data.partition import split
from cbdsl.presets import preset
from cbdsl.rng import seed_of

PROCESSES = 2
SCORE_CHUNK = 500  # samples scored at once
SPEC = preset("paper-iid")


def cnn() -> nn.Sequential:
    """The network of the paper's Table I."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


class Half:
    """Some of the workers and a share of the test set, in a process of its own."""

    def __init__(self, data: Dataset, workers: list[Indices], tested: slice) -> None:
        self.features, self.labels = tensors(data.train.features, data.train.labels)
        self.test_features, self.test_labels = tensors(data.test.features[tested], data.test.labels[tested])
        self.workers = [torch.from_numpy(own).long() for own in workers]
        self.module = cnn()
        self.parameters: list[Tensor] = list(self.module.parameters())
        self.flat = torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters])  # (D,)
        offset = 0
        for parameter in self.parameters:
            parameter.data = self.flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()

    def serve(self, pipe: Connection) -> None:
        """Answer until there is nothing more to do: a task and the global weights (D,) come in, a result goes out."""
        while message := pipe.recv():
            task, weights = message
            pipe.send(self.train(weights) if task == "train" else self.test(weights))

    def train(self, weights: Floats) -> Floats:
        """The sum of all workers' models after one epoch each, (D,)."""
        start, total = torch.from_numpy(weights), torch.zeros_like(self.flat)
        for own in self.workers:
            self.flat.copy_(start)
            for batch in torch.split(own[torch.randperm(len(own))], SPEC.local.batch_size):
                loss = cross_entropy(self.module(self.features[batch]), self.labels[batch])
                gradients = torch.autograd.grad(loss, self.parameters)
                with torch.no_grad():
                    torch._foreach_add_(self.parameters, gradients, alpha=-SPEC.local.learning_rate)
            total += self.flat
        return total.numpy()

    def test(self, weights: Floats) -> int:
        """How many of its test samples a model classifies correctly."""
        self.flat.copy_(torch.from_numpy(weights))
        with torch.inference_mode():
            outputs = torch.cat([self.module(features) for features in torch.split(self.test_features, SCORE_CHUNK)])
            return int((outputs.argmax(1) == self.test_labels).sum())


def tensors(features: Floats, labels: Indices) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(features), torch.from_numpy(labels).long()


def share(number: int, count: int) -> slice:
    """What one of the processes takes of so many."""
    return slice(number * count // PROCESSES, (number + 1) * count // PROCESSES)


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    torch._C._set_mkldnn_enabled(False)
    torch.manual_seed(seed_of(SPEC.seed, "initial-weights"))  # the same start as that of `cbdsl run`
    data = load(SPEC.data.source)
    workers = list(split(data.train.labels, SPEC.data, SPEC.workers, SPEC.seed).workers)
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in cnn().parameters()]).numpy()  # (D,)
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for number in range(PROCESSES):
        mine, theirs = context.Pipe()
        half = Half(data, workers[share(number, len(workers))], share(number, len(data.test)))
        processes.append(context.Process(target=half.serve, args=(theirs,)))
        processes[-1].start()
        pipes.append(mine)
    accuracy = 0.0
    for _ in range(rounds):
        for pipe in pipes:
            pipe.send(("train", weights))
        weights = np.sum([pipe.recv() for pipe in pipes], axis=0) / np.float32(len(workers))
        for pipe in pipes:
            pipe.send(("test", weights))
        accuracy = sum(pipe.recv() for pipe in pipes) / len(data.test)
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join()
    print(accuracy)


if __name__ == "__main__":
    main(int(sys.argv[1]))
