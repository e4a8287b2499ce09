"""What the native engine is measured against: the same work in torch, written as well as torch allows.

A loop over workers with all weights in one flat tensor and the fastest of torch's settings (see `TorchSetting`); the
same loop in several processes of one thread each; and one vectorised call over all workers. A loop's time grows
in proportion to its workers, so beyond as many as `measured` says it is measured on those and scaled up.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np
import torch
from rich.table import Table
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from cbdsl import register
from cbdsl.arrays import Doubles, Floats, Indices, Samples
from cbdsl.codecs.base import Codec, Packs, Scores, Sent
from cbdsl.codecs.envelope import Codecs
from cbdsl.engines.base import Sgd
from cbdsl.engines.native_engine import NativeEngine, available, default_threads, peak_multiply_adds
from cbdsl.models.architecture import Architecture
from cbdsl.models.to_torch import module_of
from cbdsl.models.zoo import usual
from cbdsl.presets import preset
from cbdsl.runs.build import Experiment, ray_swarm
from cbdsl.runs.loop import play_rounds
from cbdsl.runs.resolve import resolve
from cbdsl.studies.pool import deaf_children
from cbdsl.swarms.local import workers_at_once
from cbdsl.swarms.ray_swarm import RaySwarm, connected, machines

LIMIT, WORK = 100, 3e10  # workers, and multiply-adds of a turn: it takes torch a second or two
RATE = 0.005
SCORE_CHUNK = 500
"""Samples that torch scores at once: 100, 250 and 2,000 were no faster on the paper's network."""


@dataclass(frozen=True)
class BenchTask:
    """One thing to measure: `steps` batches for every worker, or one scoring of `batch` samples."""

    model: str
    kind: str
    workers: int
    batch: int
    steps: int
    threads: int
    samples: Samples
    indices: Indices  # (U, steps, batch)

    def part(self, first: int, last: int) -> BenchTask:
        """The task of some of the workers."""
        return replace(self, workers=last - first, indices=self.indices[first:last])


@dataclass(frozen=True)
class TorchSetting:
    """How torch runs: its own threads, and oneDNN or its plain convolutions; which is faster depends on the model."""

    threads: int
    onednn: bool

    @classmethod
    def now(cls) -> TorchSetting:
        """What torch uses at the moment."""
        return cls(torch.get_num_threads(), torch._C._get_mkldnn_enabled())

    def use(self) -> None:
        """Make torch use it."""
        torch.set_num_threads(self.threads)
        torch._C._set_mkldnn_enabled(self.onednn)


def measured(task: BenchTask) -> int:
    """Workers that a turn is taken with: all of a small network, a few of a large one."""
    network = usual(task.model)
    each = (3 if task.kind == "train" else 1) * sum(network.multiply_adds()) * task.batch * task.steps
    return min(task.workers, LIMIT, max(2, int(WORK / each)))


class _Contender:
    """Puts torch's global settings back when it is closed."""

    def __init__(self, task: BenchTask) -> None:
        self.scale = task.workers / measured(task)
        self.task = task.part(0, measured(task))
        self.features = torch.from_numpy(task.samples.features)
        self.labels = torch.from_numpy(task.samples.labels).long()
        self.batches = torch.from_numpy(self.task.indices).long()  # (U, steps, batch)
        self._before = TorchSetting.now()
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
        self.setting = self._fastest() if setting is None else setting

    def _fastest(self) -> TorchSetting:
        times = {}
        for threads in {self.task.threads, 1}:
            for onednn in (True, False):
                self.setting = TorchSetting(threads, onednn)
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
        """Seconds of one step, or of one scoring, of all workers."""
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


class TorchProcesses(_Contender):
    """The loop, its workers dealt out to as many processes of one thread as there are threads."""

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
                target=_serve, args=(replace(part, threads=1), TorchSetting(1, onednn), theirs), daemon=True
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


def _serve(task: BenchTask, setting: TorchSetting, pipe: Connection) -> None:
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


Progress: TypeAlias = Callable[[int, int, str], None]
"""Called with the turns taken, all turns and what comes next; an exception it raises ends the measurement."""

LOOP = "torch-loop"
ZOO = ("cnn", "mlp", "softmax", "har-cnn", "ds-cnn", "resnet8", "mobilenet-025")
TASKS = ("train", "score")
LARGE = 20  # workers of a turn; where a network's work allows fewer, time grows with their number and nothing else


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
    plan = [(name, count, task) for name in models for count in workers for task in TASKS]
    rows: list[BenchRow] = []
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


def make_task(name: str, kind: str, workers: int, batch: int, threads: int) -> BenchTask:
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
    return BenchTask(name, kind, workers, batch, steps, threads, samples, indices)


def _contenders(
    task: BenchTask, stack: ExitStack, *, with_processes: bool
) -> Iterable[tuple[str, Callable[[], float]]]:
    """Every engine that can do the task, warmed up: a name and a function that returns the seconds it took."""
    if available() is None:
        yield "native", _native(task, usual(task.model))
    loop = stack.enter_context(TorchLoop(task))
    yield LOOP, loop.run
    if with_processes and task.kind == "train" and task.threads > 1:
        processes = stack.enter_context(TorchProcesses(task, loop.setting.onednn))
        yield f"torch-{task.threads}-processes", processes.run
    if measured(task) >= min(task.workers, LARGE):  # a large one takes it ten times as long as the loop
        yield "torch-vmap", stack.enter_context(TorchVmap(task)).run


def _native(task: BenchTask, architecture: Architecture) -> Callable[[], float]:
    engine = NativeEngine(architecture, task.threads)
    scale = 1.0
    if (few := measured(task)) < LARGE:  # a large network: as many workers as torch is measured on
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


def _duration(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:,.3g} {name}"
    return f"{seconds * 1e6:,.3g} us"


def table(rows: Sequence[BenchRow]) -> Table:
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


_Made = TypeVar("_Made")
_ROUNDS = 4
_SAMPLES = 40_000  # dealt to the workers; the fewer each has, the less a round is worth


@dataclass(frozen=True)
class CodecRow:
    """One codec in rounds of so many workers."""

    codec: str
    workers: int
    seconds: float  # a round
    share: float  # of it that went into coding
    upload_bits: float  # a weight
    downlink_bytes: int  # a round, to all workers

    def to_dict(self) -> dict[str, str | int | float]:
        """Plain values."""
        return asdict(self)


class _Timed(Codec):
    """A codec that adds up the time it takes."""

    def __init__(self, inner: Codec) -> None:
        self._inner, self.seconds = inner, 0.0
        vars(self).update(relative=inner.relative, feedback=inner.feedback, measures=inner.measures)

    def longest(self, size: int) -> int:
        return self._inner.longest(size)

    def pack(self, model: Floats, reference: Floats) -> bytes:
        return self._watched(lambda: self._inner.pack(model, reference))

    def unpack(self, pack: bytes, reference: Floats) -> Floats:
        return self._watched(lambda: self._inner.unpack(pack, reference))

    def closed(self, pack: Packs, size: int) -> bytes:
        return self._watched(lambda: self._inner.closed(pack, size))

    def decode(self, content: bytes, reference: Floats) -> Floats:
        return self._watched(lambda: self._inner.decode(content, reference))

    def sent(self, models: Floats, reference: Floats, scores: Scores | None) -> Sent:
        scoring = 0.0

        def timed(rows: Floats) -> Doubles:
            nonlocal scoring
            started = time.perf_counter()
            found = scores(rows) if scores is not None else None
            scoring += time.perf_counter() - started
            assert found is not None
            return found

        result = self._watched(lambda: self._inner.sent(models, reference, None if scores is None else timed))
        self.seconds -= scoring
        return result

    def _watched(self, call: Callable[[], _Made]) -> _Made:
        started = time.perf_counter()
        try:
            return call()
        finally:
            self.seconds += time.perf_counter() - started


def measure_codecs(
    names: Sequence[str], workers: Sequence[int], threads: int | None, progress: Callable[[str], None]
) -> list[CodecRow]:
    """Every codec with every number of workers."""
    for name in names:
        register.codec.get(name)
    if min(workers) < 1 or max(workers) > _SAMPLES // 10:
        raise ValueError(f"numbers of workers go from 1 to {_SAMPLES // 10:,}")
    rows = []
    for count in workers:
        for name in names:
            progress(f"{name}, {count} workers")
            rows.append(_codec_row(name, count, threads))
    return rows


def _codec_row(name: str, workers: int, threads: int | None) -> CodecRow:
    settings = {
        "workers": workers, "rounds": _ROUNDS, "codec.up": name, "codec.down": name,
        "data.samples_per_worker": min(300, _SAMPLES // workers),
    }  # fmt: skip
    stage = Experiment.prepare(resolve(preset("paper-iid").with_settings(settings)), threads=threads)
    codecs = stage.server.policy.codecs
    up, down = _Timed(codecs.up), _Timed(codecs.down)
    policy = replace(stage.server.policy, codecs=Codecs(up, down))
    stage = replace(stage, server=replace(stage.server, policy=policy))
    played = []
    for one in play_rounds(stage, stage.first_state(), stage.memory_swarm, measured=False):
        played.append(one)
        if one.record.round == 1:  # the first round warms up, and sends the first model
            up.seconds = down.seconds = 0.0
    later = [one.record for one in played[1:]]
    seconds = sum(line.seconds for line in later)
    uploads = sum(line.traffic["upload"][0] for line in later)
    uploaded = sum(line.traffic["upload"][1] for line in later)
    return CodecRow(
        name, workers, seconds / len(later), (up.seconds + down.seconds) / seconds,
        8 * uploaded / max(1, uploads) / stage.engine.size,
        round(sum(line.traffic["broadcast"][1] for line in later) / len(later)),
    )  # fmt: skip


def codec_table(rows: Sequence[CodecRow]) -> Table:
    """The rows for people."""
    table = Table("codec", "workers", "a round", "of it coding", "bits a weight, up", "MB down a round")
    for row in rows:
        table.add_row(
            row.codec, f"{row.workers:,}", f"{row.seconds:.2f} s", f"{100 * row.share:.1f} %", f"{row.upload_bits:.2f}",
            f"{row.downlink_bytes / 1e6:.2f}",
        )  # fmt: skip
    return table


_SAMPLES = 40_000  # dealt to the workers; the fewer each has, the less a round is worth
_EMPTY = 20  # orders to nobody


@dataclass(frozen=True)
class RayRow:
    """Rounds of so many workers; of every time the fastest."""

    model: str
    workers: int
    shards: int
    threads: int  # of the one process
    local_seconds: float  # a round in one process
    ray_seconds: float  # on the cluster
    overhead_seconds: float  # what a round of nobody takes: w^g to every shard, an answer back

    @property
    def speed(self) -> float:
        """Of the cluster, in terms of the one process."""
        return self.local_seconds / self.ray_seconds

    def to_dict(self) -> dict[str, str | int | float]:
        """Plain values."""
        return {**asdict(self), "speed": self.speed}


def measure_ray(
    on: str, models: Sequence[str], workers: Sequence[int], threads: int | None, shards: int | None, repeats: int,
    progress: Callable[[str], None],
) -> list[RayRow]:  # fmt: skip
    """Every model with every number of workers."""
    progress("starting Ray")
    with connected(on, threads) as ray:
        return [
            _ray_row(ray, model, count, threads, shards, repeats, progress) for model in models for count in workers
        ]


def _ray_row(
    ray: Any, model: str, workers: int, threads: int | None, shards: int | None, repeats: int,  # noqa: ANN401
    progress: Callable[[str], None],
) -> RayRow:  # fmt: skip
    cpus = threads or max(1, sum(int(one.cpus) for one in machines(ray)))
    settings = {
        "workers": workers, "rounds": repeats + 1, "model": model,
        "data.samples_per_worker": max(1, min(300, _SAMPLES // workers)),
    }  # fmt: skip
    stage = Experiment.prepare(resolve(preset("paper-iid").with_settings(settings)), threads=cpus)
    swarm = ray_swarm(stage, ray, shards)
    try:
        turns = []
        here = play_rounds(stage, stage.first_state(), stage.memory_swarm, measured=False)
        there = play_rounds(stage, stage.first_state(), swarm, measured=False)
        for number, (one, other) in enumerate(zip(here, there, strict=True)):
            turns.append((one.record.seconds, other.record.seconds))
            progress(f"{model}, {workers} workers: round {number} of {repeats}")
        local, remote = (min(times) for times in zip(*turns[1:], strict=True))  # the first one warms up
        return RayRow(model, workers, len(swarm.facts), cpus, local, remote, _empty(stage, swarm))
    finally:
        swarm.close()


def _empty(stage: Experiment, swarm: RaySwarm) -> float:
    """The fastest of some rounds in which nobody takes part, with a new w^g each."""
    first, times = stage.server.order(stage.first_state()), []
    for number in range(_EMPTY):
        order = replace(first, round=stage.spec.rounds + 1 + number, participants=())
        started = time.perf_counter()
        swarm.report(order)
        times.append(time.perf_counter() - started)
    return min(times)


def ray_table(rows: Sequence[RayRow]) -> Table:
    """The rows for people."""
    table = Table("model", "workers", "shards", "one process", "on Ray", "speed", "nobody's round")
    for row in rows:
        table.add_row(
            row.model, f"{row.workers:,}", str(row.shards), f"{row.local_seconds:.3f} s, {row.threads} threads",
            f"{row.ray_seconds:.3f} s", f"{row.speed:.0%}", f"{1e3 * row.overhead_seconds:.1f} ms",
        )  # fmt: skip
    return table
