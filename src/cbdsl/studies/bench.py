"""Measures the native engine against the same work in torch, for `cbdsl bench`.

Torch takes part in three forms: a loop over workers with all weights in one flat tensor and the fastest of torch's
settings, the same loop in several single-threaded processes, and one vectorised call over all workers. The time of a
loop is proportional to its workers, so a large swarm is measured on `measured_workers` of them and scaled up.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from typing import Self, TypeAlias

import numpy as np
import torch
from rich.table import Table
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from cbdsl import register
from cbdsl.arrays import Indices, Samples
from cbdsl.engines.engine import Sgd
from cbdsl.engines.native_engine import NativeEngine, available, default_threads, peak_multiply_adds
from cbdsl.models.to_torch import module_of
from cbdsl.models.zoo import usual
from cbdsl.studies.pool import deaf_children
from cbdsl.swarms.local import workers_at_once

ZOO = ("cnn", "mlp", "softmax", "har-cnn", "ds-cnn", "resnet8", "mobilenet-025")
TASKS = ("train", "score")
LOOP = "torch-loop"
RATE = 0.005
MOST_WORKERS, MOST_WORK = 100, 3e10  # workers and multiply-adds per turn: torch takes a second or two
FEW_WORKERS = 20  # time is proportional to the workers, so a large network is measured on fewer
SCORE_CHUNK = 500  # samples that torch scores at once: 100, 250 and 2,000 were no faster on the paper's network

Progress: TypeAlias = Callable[[int, int, str], None]
"""Called with the finished turns, all turns and what comes next. An exception that it raises ends the measurement."""


@dataclass(frozen=True)
class BenchRow:
    """One contender at one task. `ratio_to_torch_loop` is how many times faster than the tuned torch loop it is."""

    model: str
    task: str  # train: one batch for every worker; score: the loss of every worker on `batch` samples
    workers: int
    batch: int
    engine: str
    seconds: float
    ratio_to_torch_loop: float
    peak_share: float | None  # of the measured multiply-add peak; None without the native library

    def to_dict(self) -> dict[str, str | int | float | None]:
        """Return the row as plain data, for JSON."""
        return asdict(self)


def measure(  # noqa: PLR0913  # the options of the command
    models: Sequence[str] = ZOO,
    workers: Sequence[int] = (50,),
    batch: int = 10,
    threads: int | None = None,
    repeats: int = 5,
    *,
    scoring: int = 2000,
    quick: bool = False,
    progress: Progress = lambda _done, _total, _what: None,
) -> list[BenchRow]:
    """Measure every model and number of workers, training with `batch` samples and scoring with `scoring`.

    `quick` takes two turns, scores 500 samples and leaves out torch in several processes.
    """
    if unknown := [name for name in models if name not in register.model]:
        raise ValueError(f"models name {unknown}; known are {', '.join(register.model.names())}")
    if min([*workers, batch, repeats, scoring]) < 1:
        raise ValueError("workers, batch, repeats and scoring must all be at least 1")
    threads = threads or default_threads()
    if quick:
        repeats, scoring = min(repeats, 2), min(scoring, 500)
    cases = [(name, count, kind) for name in models for count in workers for kind in TASKS]
    turns, total = 0, len(cases) * (repeats + 1)
    rows: list[BenchRow] = []
    peak = 0.0
    for name, count, kind in cases:
        task = make_task(name, kind, count, batch if kind == "train" else scoring, threads)
        label = f"{name}, {count} workers, {kind}"
        with ExitStack() as stack:
            progress(turns, total, f"{label}: warming up")
            contenders = dict(_contenders(task, stack, with_processes=not quick))
            best = dict.fromkeys(contenders, float("inf"))
            for _ in range(repeats):
                turns += 1
                if available() is None:
                    peak = max(peak, peak_multiply_adds(threads, 0.1))
                for engine, run in contenders.items():
                    progress(turns, total, f"{label}: {engine}")
                    best[engine] = min(best[engine], run())
            turns += 1
        rows += _rows(task, best, peak)
    progress(total, total, "done")
    return rows


@dataclass(frozen=True)
class BenchTask:
    """Work to measure: `steps` batches for every worker, or one scoring of `batch` samples."""

    model: str
    kind: str
    workers: int
    batch: int
    steps: int
    threads: int
    samples: Samples
    indices: Indices  # (U, steps, batch)

    def part(self, first: int, last: int) -> BenchTask:
        """Return the task of some of the workers."""
        return replace(self, workers=last - first, indices=self.indices[first:last])


@dataclass(frozen=True)
class TorchSetting:
    """Torch's number of threads, and oneDNN or plain convolutions; which is faster depends on the model."""

    threads: int
    onednn: bool

    @classmethod
    def now(cls) -> TorchSetting:
        """Return torch's present setting."""
        return cls(torch.get_num_threads(), torch._C._get_mkldnn_enabled())

    def use(self) -> None:
        """Set torch to this."""
        torch.set_num_threads(self.threads)
        torch._C._set_mkldnn_enabled(self.onednn)


def measured_workers(task: BenchTask) -> int:
    """Return how many workers a turn is measured with: all of a small network, a few of a large one."""
    network = usual(task.model)
    each = (3 if task.kind == "train" else 1) * sum(network.multiply_adds()) * task.batch * task.steps
    return min(task.workers, MOST_WORKERS, max(2, int(MOST_WORK / each)))


class _TorchContender:
    """A task as tensors. Torch's global settings are restored at the end of the `with` block."""

    def __init__(self, task: BenchTask) -> None:
        self.scale = task.workers / measured_workers(task)
        self.task = task.part(0, measured_workers(task))
        self.features = torch.from_numpy(task.samples.features)
        self.labels = torch.from_numpy(task.samples.labels).long()
        self.batches = torch.from_numpy(self.task.indices).long()  # (U, steps, batch)
        self._before = TorchSetting.now()
        torch.set_num_threads(task.threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._before.use()

    def build(self) -> nn.Module:
        return module_of(usual(self.task.model))


class TorchLoop(_TorchContender):
    """A loop over workers, each a module whose parameters are views of one flat tensor."""

    def __init__(self, task: BenchTask, setting: TorchSetting | None = None) -> None:
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
        self.setting = self._find_fastest_setting() if setting is None else setting

    def _find_fastest_setting(self) -> TorchSetting:
        times = {}
        for threads in {self.task.threads, 1}:
            for onednn in (True, False):
                self.setting = TorchSetting(threads, onednn)
                self.run(workers=2)
                times[self.setting] = min(self.run(workers=4) for _ in range(3))
        return min(times, key=lambda setting: times[setting])

    def run(self, workers: int | None = None) -> float:
        """Return the seconds of one step, or of one scoring, of all workers."""
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


class TorchVmap(_TorchContender):
    """All workers in one vectorised call."""

    def __init__(self, task: BenchTask) -> None:
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
        """Return the seconds of one step, or of one scoring, of all workers."""
        TorchSetting(self.task.threads, onednn=True).use()
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


class TorchProcesses(_TorchContender):
    """The loop with its workers divided among single-threaded processes, one per thread."""

    def __init__(self, task: BenchTask, onednn: bool) -> None:
        super().__init__(task)
        context = multiprocessing.get_context("spawn")
        count, workers = task.threads, self.task.workers
        self.pipes: list[Connection] = []
        self.processes = []
        for number in range(count):
            part = self.task.part(number * workers // count, (number + 1) * workers // count)
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_run_process, args=(replace(part, threads=1), TorchSetting(1, onednn), theirs), daemon=True
            )
            with deaf_children():
                process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
            self.pipes.append(mine)
            self.processes.append(process)
        self._wait()  # until all have warmed up

    def _wait(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            try:
                pipe.recv()
            except EOFError:
                process.join()
                raise RuntimeError(f"a torch process ended with exit code {process.exitcode}; measure again") from None

    def run(self) -> float:
        """Return the seconds until the last process has finished."""
        start = time.perf_counter()
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError):  # _wait raises the reason
                pipe.send("run")
        self._wait()
        return (time.perf_counter() - start) / self.task.steps * self.scale

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        for process in self.processes:
            process.terminate()
            process.join()


def _run_process(task: BenchTask, setting: TorchSetting, pipe: Connection) -> None:
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


def make_task(name: str, kind: str, workers: int, batch: int, threads: int) -> BenchTask:
    """Return random samples and batches for one measurement, the same for every contender."""
    generator = np.random.default_rng(0)
    network = usual(name)
    count = max(batch, 500)
    samples = Samples(
        generator.standard_normal((count, *network.shape), dtype=np.float32),
        generator.integers(0, network.classes, count).astype(np.int32),
    )
    steps = 10 if kind == "train" else 1  # the same for every number of workers, so that times per worker compare
    indices = generator.integers(0, count, (workers, steps, batch)).astype(np.int32)
    return BenchTask(name, kind, workers, batch, steps, threads, samples, indices)


def _contenders(
    task: BenchTask, stack: ExitStack, *, with_processes: bool
) -> Iterable[tuple[str, Callable[[], float]]]:
    """Yield the engines for the task, warmed up: a name and a function that returns the seconds it took."""
    if available() is None:
        yield "native", _native_contender(task)
    loop = stack.enter_context(TorchLoop(task))
    yield LOOP, loop.run
    if with_processes and task.kind == "train" and task.threads > 1:
        processes = stack.enter_context(TorchProcesses(task, loop.setting.onednn))
        yield f"torch-{task.threads}-processes", processes.run
    if measured_workers(task) >= min(task.workers, FEW_WORKERS):  # else it takes ten times as long as the loop
        yield "torch-vmap", stack.enter_context(TorchVmap(task)).run


def _native_contender(task: BenchTask) -> Callable[[], float]:
    engine = NativeEngine(usual(task.model), task.threads)
    scale = 1.0
    if (few := measured_workers(task)) < FEW_WORKERS:  # a large network: as many workers as torch is measured on
        scale, task = task.workers / few, task.part(0, few)
    generator = np.random.default_rng(1)
    weights = 0.05 * generator.standard_normal((task.workers, engine.size), dtype=np.float32)  # (U, D)
    scored = np.arange(task.batch, dtype=np.int32)
    block_size = workers_at_once(engine.size)
    blocks = [slice(start, start + block_size) for start in range(0, task.workers, block_size)]

    def run() -> float:
        start = time.perf_counter()
        for block in blocks:  # as in the simulator
            if task.kind == "train":
                engine.train(weights[block], task.samples, task.indices[block], Sgd(RATE))
            else:
                engine.losses(weights[block], task.samples, scored)
        return (time.perf_counter() - start) / task.steps * scale

    run()
    return run


def _rows(task: BenchTask, best: dict[str, float], peak: float) -> list[BenchRow]:
    architecture = usual(task.model)
    one = architecture.training_multiply_adds() if task.kind == "train" else sum(architecture.multiply_adds())
    work = one * task.workers * task.batch
    return [
        BenchRow(
            model=task.model,
            task=task.kind,
            workers=task.workers,
            batch=task.batch,
            engine=engine,
            seconds=seconds,
            ratio_to_torch_loop=best[LOOP] / seconds,
            peak_share=work / seconds / peak if peak else None,
        )
        for engine, seconds in best.items()
    ]


def _format_duration(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:,.3g} {name}"
    return f"{seconds * 1e6:,.3g} us"


def make_table(rows: Sequence[BenchRow]) -> Table:
    """Return the rows as a table for a terminal."""
    result = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("model", "task", "workers", "batch", "engine", "time", "each", "x loop", "peak"):
        is_text = heading in {"model", "task", "engine"}
        result.add_column(heading, justify="left" if is_text else "right", no_wrap=True)
    before: tuple[str, str, int] | None = None
    for row in rows:
        group = (row.model, row.task, row.workers)
        if before not in {None, group}:
            result.add_row()
        before = group
        result.add_row(
            row.model,
            row.task,
            f"{row.workers:,}",
            f"{row.batch:,}",
            row.engine,
            _format_duration(row.seconds),
            _format_duration(row.seconds / row.workers),
            f"{row.ratio_to_torch_loop:.1f}",
            "-" if row.peak_share is None else f"{row.peak_share:.0%}",
        )
    return result
