"""What the native engine is measured against: the same work in torch, written as well as torch allows.

A loop over workers with all weights in one flat tensor and the fastest of torch's settings (see `Setting`); the
same loop in several processes of one thread each; and one vectorised call over all workers. A loop's time grows
in proportion to its workers, so beyond as many as `measured` says it is measured on those and scaled up.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from cbdsl.arrays import Indices, Samples
from cbdsl.engines.torch_modules import module_of
from cbdsl.models.zoo import usual
from cbdsl.study.processes import deaf_children

LIMIT, WORK = 100, 3e10  # workers, and multiply-adds of a turn: it takes torch a second or two
RATE = 0.005
SCORE_CHUNK = 500
"""Samples that torch scores at once: 100, 250 and 2,000 were no faster on the paper's network."""


@dataclass(frozen=True)
class Task:
    """One thing to measure: `steps` batches for every worker, or one scoring of `batch` samples."""

    model: str
    kind: str
    workers: int
    batch: int
    steps: int
    threads: int
    samples: Samples
    indices: Indices  # (U, steps, batch)

    def part(self, first: int, last: int) -> Task:
        """The task of some of the workers."""
        return replace(self, workers=last - first, indices=self.indices[first:last])


@dataclass(frozen=True)
class Setting:
    """How torch runs: its own threads, and oneDNN or its plain convolutions; which is faster depends on the model."""

    threads: int
    onednn: bool

    @classmethod
    def now(cls) -> Setting:
        """What torch uses at the moment."""
        return cls(torch.get_num_threads(), torch._C._get_mkldnn_enabled())

    def use(self) -> None:
        """Make torch use it."""
        torch.set_num_threads(self.threads)
        torch._C._set_mkldnn_enabled(self.onednn)


def measured(task: Task) -> int:
    """Workers that a turn is taken with: all of a small network, a few of a large one."""
    network = usual(task.model)
    each = (3 if task.kind == "train" else 1) * sum(network.multiply_adds()) * task.batch * task.steps
    return min(task.workers, LIMIT, max(2, int(WORK / each)))


class _Contender:
    """Puts torch's global settings back when it is closed."""

    def __init__(self, task: Task) -> None:
        self.scale = task.workers / measured(task)
        self.task = task.part(0, measured(task))
        self.features = torch.from_numpy(task.samples.features)
        self.labels = torch.from_numpy(task.samples.labels).long()
        self.batches = torch.from_numpy(self.task.indices).long()  # (U, steps, batch)
        self._before = Setting.now()
        torch.set_num_threads(task.threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._before.use()

    def build(self) -> nn.Module:
        return module_of(usual(self.task.model))


class TorchLoop(_Contender):
    """One worker after the other, each a module whose parameters are views of one flat tensor."""

    def __init__(self, task: Task, setting: Setting | None = None) -> None:
        super().__init__(task)
        self.modules = [self.build() for _ in range(self.task.workers)]
        size = sum(parameter.numel() for parameter in self.modules[0].parameters())
        self.stack = torch.empty(self.task.workers, size)  # (U, D)
        self.parameters: list[list[Tensor]] = []
        for row, module in zip(self.stack, self.modules, strict=True):
            offset = 0
            for parameter in module.parameters():
                view = row[offset : offset + parameter.numel()].view_as(parameter)
                view.copy_(parameter.detach())
                parameter.data = view
                offset += parameter.numel()
            self.parameters.append(list(module.parameters()))
        self.setting = self._fastest() if setting is None else setting

    def _fastest(self) -> Setting:
        times = {}
        for threads in {self.task.threads, 1}:
            for onednn in (True, False):
                self.setting = Setting(threads, onednn)
                self.run(workers=2)
                times[self.setting] = min(self.run(workers=4) for _ in range(3))
        return min(times, key=lambda setting: times[setting])

    def run(self, workers: int | None = None) -> float:
        """Seconds of one step, or of one scoring, of all workers."""
        body = self._train if self.task.kind == "train" else self._score
        count = min(workers or self.task.workers, self.task.workers)
        self.setting.use()
        start = time.perf_counter()
        for worker in range(count):
            body(worker)
        return (time.perf_counter() - start) / self.task.steps * self.scale

    def _train(self, worker: int) -> None:
        module, parameters = self.modules[worker], self.parameters[worker]
        for batch in self.batches[worker]:
            loss = cross_entropy(module(self.features[batch]), self.labels[batch])
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                torch._foreach_add_(parameters, gradients, alpha=-RATE)

    def _score(self, worker: int) -> None:
        with torch.inference_mode():
            features, labels = self.features[: self.task.batch], self.labels[: self.task.batch]
            total = torch.zeros(())
            for part, answers in zip(torch.split(features, SCORE_CHUNK), torch.split(labels, SCORE_CHUNK), strict=True):
                total += cross_entropy(self.modules[worker](part), answers, reduction="sum")
            float(total / len(labels))


class TorchVmap(_Contender):
    """All workers in one vectorised call."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.module = self.build().to("meta")
        modules = [dict(self.build().named_parameters()) for _ in range(self.task.workers)]
        self.stacked = {
            name: torch.stack([module[name].detach() for module in modules]) for name in modules[0]
        }  # (U, ...) each
        self.run()

    def _loss(self, parameters: dict[str, Tensor], features: Tensor, labels: Tensor) -> Tensor:
        logits: Tensor = functional_call(self.module, parameters, (features,))
        return cross_entropy(logits, labels)

    def run(self) -> float:
        """Seconds of one step, or of one scoring, of all workers."""
        Setting(self.task.threads, onednn=True).use()
        start = time.perf_counter()
        if self.task.kind == "train":
            step: Callable[..., dict[str, Tensor]] = vmap(grad(self._loss))
            for batch in self.batches.unbind(1):  # (U, batch)
                gradients = step(self.stacked, self.features[batch], self.labels[batch])
                for name, parameter in self.stacked.items():
                    parameter.sub_(gradients[name], alpha=RATE)
        else:
            score: Callable[..., Tensor] = vmap(self._loss, in_dims=(0, None, None), chunk_size=10)
            features, labels = self.features[: self.task.batch], self.labels[: self.task.batch]
            with torch.inference_mode():
                for part, answers in zip(
                    torch.split(features, SCORE_CHUNK), torch.split(labels, SCORE_CHUNK), strict=True
                ):
                    score(self.stacked, part, answers)
        return (time.perf_counter() - start) / self.task.steps * self.scale


class TorchProcesses(_Contender):
    """The loop, its workers dealt out to as many processes of one thread as there are threads."""

    def __init__(self, task: Task, onednn: bool) -> None:
        super().__init__(task)
        context = multiprocessing.get_context("spawn")
        count, workers = task.threads, self.task.workers
        self.pipes: list[Connection] = []
        self.processes = []
        for number in range(count):
            part = self.task.part(number * workers // count, (number + 1) * workers // count)
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(replace(part, threads=1), Setting(1, onednn), theirs), daemon=True
            )
            with deaf_children():
                process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
            self.pipes.append(mine)
            self.processes.append(process)
        self._wait()  # until all are ready and warm

    def _wait(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            try:
                pipe.recv()
            except EOFError:
                process.join()
                raise RuntimeError(f"a torch process ended with exit code {process.exitcode}; measure again") from None

    def run(self) -> float:
        """Seconds from the word to start until the last process is done."""
        start = time.perf_counter()
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError):  # _wait says why
                pipe.send("run")
        self._wait()
        return (time.perf_counter() - start) / self.task.steps * self.scale

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        for process in self.processes:
            process.terminate()
            process.join()


def _serve(task: Task, setting: Setting, pipe: Connection) -> None:
    try:
        with TorchLoop(task, setting) as loop:
            loop.run()
            pipe.send("ready")
            while True:
                pipe.recv()
                loop.run()
                pipe.send("done")
    except (EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        pass
