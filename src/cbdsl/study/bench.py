"""Measures the engines against each other in one run: the native one, a tuned torch loop, torch vmap.

Only ratios of one run are worth reading: all contenders take turns, so that what else the machine does meets all
of them, and the fastest turn of each counts. Nothing here asserts anything or writes a file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TypeAlias

import numpy as np
from rich.table import Table

from cbdsl import register
from cbdsl.arrays import Samples
from cbdsl.engines.architecture import Architecture
from cbdsl.engines.base import Sgd
from cbdsl.engines.native_engine import NativeEngine, available, default_threads, peak_multiply_adds
from cbdsl.models.zoo import usual
from cbdsl.study import bench_torch
from cbdsl.study.bench_torch import Task
from cbdsl.swarms.rows import workers_at_once

Progress: TypeAlias = Callable[[int, int, str], None]
"""Called with the turns taken, all turns and what comes next; an exception it raises ends the measurement."""

LOOP = "torch-loop"
ZOO = ("cnn", "mlp", "softmax", "har-cnn", "ds-cnn", "resnet8", "mobilenet-025")
TASKS = ("train", "score")
LARGE = 20  # workers of a turn; where a network's work allows fewer, time grows with their number and nothing else


@dataclass(frozen=True)
class Row:
    """One contender at one task. `ratio_to_torch_loop` is how many times faster than the tuned torch loop it is."""

    model: str
    task: str  # train: one batch for every worker; score: the loss of every worker on `batch` samples
    workers: int
    batch: int
    engine: str
    seconds: float
    ratio_to_torch_loop: float
    peak_share: float | None  # of the measured multiply-add peak; None if the native library is missing

    def to_dict(self) -> dict[str, str | int | float | None]:
        """The row as plain data, for JSON."""
        return asdict(self)


def measure(  # noqa: PLR0913  # what a command line offers
    models: Sequence[str] = ZOO,
    workers: Sequence[int] = (50,),
    batch: int = 10,
    threads: int | None = None,
    repeats: int = 5,
    *,
    scoring: int = 2000,
    quick: bool = False,
    progress: Progress | None = None,
) -> list[Row]:
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
    plan = [(name, count, task) for name in models for count in workers for task in TASKS]
    rows: list[Row] = []
    peak = 0.0
    for number, (name, count, kind) in enumerate(plan):
        size = batch if kind == "train" else scoring
        task = make_task(name, kind, count, size, threads)

        def turn(done: int, what: str, number: int = number, label: str = f"{name}, {count} workers, {kind}") -> None:
            if progress is not None:
                progress(number * (repeats + 1) + done, len(plan) * (repeats + 1), f"{label}: {what}")

        with ExitStack() as stack:
            turn(0, "warming up")
            contenders = dict(_contenders(task, stack, with_processes=not quick))
            best = dict.fromkeys(contenders, float("inf"))
            for repeat in range(repeats):
                if available() is None:
                    peak = max(peak, peak_multiply_adds(threads, 0.1))
                for engine, run in contenders.items():
                    turn(1 + repeat, engine)
                    best[engine] = min(best[engine], run())
        rows += _rows(task, best, peak)
    if progress is not None:
        progress(len(plan) * (repeats + 1), len(plan) * (repeats + 1), "done")
    return rows


def make_task(name: str, kind: str, workers: int, batch: int, threads: int) -> Task:
    """Random models, samples and batches for one measurement; the same for every contender."""
    generator = np.random.default_rng(0)
    network = usual(name)
    count = max(batch, 500)
    samples = Samples(
        generator.standard_normal((count, *network.shape), dtype=np.float32),
        generator.integers(0, network.classes, count).astype(np.int32),
    )
    steps = 10 if kind == "train" else 1  # the same for every number of workers, so that times per worker compare
    indices = generator.integers(0, count, (workers, steps, batch)).astype(np.int32)
    return Task(name, kind, workers, batch, steps, threads, samples, indices)


def _contenders(task: Task, stack: ExitStack, *, with_processes: bool) -> Iterable[tuple[str, Callable[[], float]]]:
    """Every engine that can do the task, warmed up: a name and a function that returns the seconds it took."""
    if available() is None:
        yield "native", _native(task, usual(task.model))
    loop = stack.enter_context(bench_torch.TorchLoop(task))
    yield LOOP, loop.run
    if with_processes and task.kind == "train" and task.threads > 1:
        processes = stack.enter_context(bench_torch.TorchProcesses(task, loop.setting.onednn))
        yield f"torch-{task.threads}-processes", processes.run
    if bench_torch.measured(task) >= min(task.workers, LARGE):  # a large one takes it ten times as long as the loop
        yield "torch-vmap", stack.enter_context(bench_torch.TorchVmap(task)).run


def _native(task: Task, architecture: Architecture) -> Callable[[], float]:
    engine = NativeEngine(architecture, task.threads)
    scale = 1.0
    if (few := bench_torch.measured(task)) < LARGE:  # a large network: as many workers as torch is measured on
        scale, task = task.workers / few, task.part(0, few)
    generator = np.random.default_rng(1)
    weights = 0.05 * generator.standard_normal((task.workers, engine.size), dtype=np.float32)  # (U, D)
    scored = np.arange(task.batch, dtype=np.int32)

    blocks = [
        slice(at, at + workers_at_once(engine.size)) for at in range(0, task.workers, workers_at_once(engine.size))
    ]

    def run() -> float:
        start = time.perf_counter()
        for block in blocks:  # as the simulator does it
            if task.kind == "train":
                engine.train(weights[block], task.samples, task.indices[block], Sgd(0.005))
            else:
                engine.losses(weights[block], task.samples, scored)
        return (time.perf_counter() - start) / task.steps * scale

    run()
    return run


def _rows(task: Task, best: dict[str, float], peak: float) -> list[Row]:
    architecture = usual(task.model)
    one = architecture.training_multiply_adds() if task.kind == "train" else sum(architecture.multiply_adds())
    work = one * task.workers * task.batch
    return [
        Row(
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


def _duration(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:,.3g} {name}"
    return f"{seconds * 1e6:,.3g} us"


def table(rows: Sequence[Row]) -> Table:
    """The rows as a table for a terminal."""
    result = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("model", "task", "workers", "batch", "engine", "time", "each", "x loop", "peak"):
        words = heading in {"model", "task", "engine"}
        result.add_column(heading, justify="left" if words else "right", no_wrap=True)
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
            _duration(row.seconds),
            _duration(row.seconds / row.workers),
            f"{row.ratio_to_torch_loop:.1f}",
            "-" if row.peak_share is None else f"{row.peak_share:.0%}",
        )
    return result
