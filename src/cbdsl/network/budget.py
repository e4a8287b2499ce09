"""Resource limits of a worker: memory and time that a run needs are estimated, and too expensive runs are refused.

The server may be hostile. Everything that a worker allocates by a number from a server is estimated here before it is
allocated; in addition the operating system enforces the limit.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from cbdsl.algorithm.worker_round import count_steps
from cbdsl.arrays import Samples
from cbdsl.codecs.envelope import KEPT_VERSIONS, longest_update
from cbdsl.engines import native_engine
from cbdsl.engines.native_engine import NativeEngine
from cbdsl.errors import UserError
from cbdsl.network.device_worker import Assignment, parse_announcement
from cbdsl.network.wire import Announcement, WireError
from cbdsl.util.formatting import format_bytes, format_duration, single_line

LONGEST_ROUND = 3600.0  # default limit in seconds for one order

_SLACK = 24 * 2**20  # bytes of interpreter, threads and connection at work
_TORCH = 500 * 2**20  # bytes of torch itself
_BLOCK = 1024  # samples that the native engine converts at once
_MODELS = 26  # arrays of D numbers at the same time: particle, update, files, messages; see tests/hostile
_SHARED = 3  # copies of the shared samples: unpacked, as numbers, joined with the worker's own
_RESULTS = 8  # numbers of torch per output of a layer
_MODULE = 30  # numbers per number of a sample, for a network without a description; a guess
_EFFICIENCY = 0.1  # share of the machine's peak that small networks reach
_EPOCH_SECONDS, _SAMPLE_SECONDS = 2e-5, 1e-6  # fixed cost of an epoch and of a sample
_MOST_REASONS = 20  # reasons that are logged in full: a server must not fill a log
_RUNS_AT_ONCE, _RUN_SECONDS = 20, 1.0  # runs begun without a pause; then one per _RUN_SECONDS


def process_memory(key: str = "VmRSS") -> int:
    """Return the bytes of this process in memory; 0 if not known."""
    try:
        text = Path("/proc/self/status").read_text(encoding="ascii")
        return 1024 * int(next(line for line in text.splitlines() if line.startswith(key)).split()[1])
    except (OSError, StopIteration, ValueError):
        return 0


def get_half_of_memory() -> int:
    """Return half of this machine's memory in bytes; 0 if not known."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return 0


@dataclass(frozen=True)
class ResourceNeeds:
    """The resources that a run needs."""

    parts: dict[str, int]  # bytes by purpose
    seconds: float  # per round, roughly

    @property
    def memory(self) -> int:
        """The sum in bytes."""
        return sum(self.parts.values())


def needs_of(assignment: Assignment, own: Samples, threads: int, speed: float) -> ResourceNeeds:
    """Estimate what a run needs. speed: multiply-adds per second."""
    local, layout, network = assignment.spec.local, assignment.layout, assignment.architecture
    width = math.prod(layout.shape)
    held = len(own) + layout.training
    passes = count_steps(held, local) * min(local.batch_size, held)  # samples per round
    update = longest_update(assignment.codecs, assignment.size) if assignment.codecs.down.relative else 0
    parts = {
        "the model": 4 * _MODELS * assignment.size * assignment.vectors
        + 3 * (KEPT_VERSIONS + 1) * update
        + (2 + threads) * assignment.frozen_bytes,
        "shared samples": 3 * assignment.shared_size + 4 * (_SHARED * layout.count + len(own)) * (width + 2),
        "batches": 10 * count_steps(held, local) * local.batch_size + 16 * held,
    }
    scored = 5 * (layout.scoring if assignment.spec.shares_scoring else len(own))
    if network is None or local.augment or native_engine.available() is not None:
        together = min(max(local.batch_size, 250), held + layout.scoring)
        room = _RESULTS * network.numbers() if network is not None else _MODULE * (width + assignment.classes)
        parts["torch"] = _TORCH + 4 * together * room
        work = 3 * assignment.size * (passes + scored)
    else:
        kept = 8 * network.size if local.optimiser != "sgd" or local.clip else 0
        workspace = NativeEngine(network, 1, assignment.loss).workspace
        parts["the engine"] = threads * (workspace + kept) + 8 * _BLOCK * network.entrance()
        work = network.training_multiply_adds() * (passes + scored)
    epochs = local.epochs if not local.steps else local.steps * local.batch_size // held
    seconds = work / (_EFFICIENCY * speed) + _EPOCH_SECONDS * epochs + _SAMPLE_SECONDS * passes
    return ResourceNeeds(parts, seconds)


@cache
def _measure_speed(threads: int) -> float:
    """Return the multiply-adds per second of this machine, measured once per process."""
    return native_engine.peak_multiply_adds(threads, 0.05)


@dataclass
class ResourceLimits:
    """Resource limits of one worker; also limits how many refusals are logged."""

    own: Samples
    threads: int = 1
    memory: int = 0  # bytes of the whole process; 0: no limit
    longest_round: float = 0.0  # seconds; 0: no limit
    _before: int = field(default_factory=process_memory)  # bytes without a run
    _speed: float = 1e9
    _said: set[str] = field(default_factory=set)
    _runs: list[float] = field(default_factory=list)  # when the last ones began

    def __post_init__(self) -> None:
        if self.longest_round and native_engine.available() is None:
            self._speed = _measure_speed(self.threads)
        if self.memory and self.memory < self._before + _SLACK:
            raise UserError(
                f"--memory {format_bytes(self.memory)} is too little: this process has {format_bytes(self._before)} "
                f"before any run. Give at least {format_bytes(self._before + 2 * _SLACK)}.",
                code="out-of-range",
            )

    def parse_announcement(self, announcement: Announcement) -> Assignment:
        """Return the assignment of an announcement; WireError if it is invalid or exceeds the limits."""
        try:
            assignment = parse_announcement(announcement)
            self._check(needs_of(assignment, self.own, self.threads, self._speed))
        except WireError as error:
            reason = single_line(str(error))
            if len(self._said) == _MOST_REASONS and reason not in self._said:
                raise WireError("one more announcement that cannot be used here") from error
            self._said.add(reason)
            raise WireError(reason) from error
        return assignment

    def may_begin(self) -> bool:
        """Return whether another run may begin now; limits a server that announces run after run."""
        now = time.monotonic()
        self._runs = [one for one in self._runs if now - one < _RUNS_AT_ONCE * _RUN_SECONDS]
        if len(self._runs) < _RUNS_AT_ONCE:
            self._runs.append(now)
            return True
        return False

    def enforce(self) -> None:
        """Let the operating system limit the memory, in case the estimate is too low."""
        data = process_memory("VmData")
        if self.memory and sys.platform == "linux" and data:
            import resource  # noqa: PLC0415 - not on every platform

            limit = data + self.memory - self._before
            with contextlib.suppress(ValueError, OSError):  # there is a lower limit already
                resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    def _check(self, needs: ResourceNeeds) -> None:
        asked = self._before + _SLACK + needs.memory
        if self.memory and asked > self.memory:
            largest = max(needs.parts, key=lambda part: needs.parts[part])
            raise WireError(
                f"an announcement that needs about {format_bytes(asked)} here, "
                f"{format_bytes(needs.parts[largest])} of it for {largest}; {format_bytes(self.memory)} are allowed. "
                "Give more with --memory, or let the server ask for less"
            )
        if self.longest_round and needs.seconds > self.longest_round:
            raise WireError(
                f"an announcement whose rounds take about {format_duration(needs.seconds)} here; the longest allowed "
                f"is {format_duration(self.longest_round)}. "
                "Give more with --longest-round, or let the server ask for less"
            )
