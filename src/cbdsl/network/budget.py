"""What a worker gives to a run: what an announcement asks for is reckoned, and refused where it is too much.

The server is another machine's affair, perhaps a hostile one. Everything a worker allocates by a number that a server
sent is counted here, before anything is made; and beyond that the system is asked to give no more.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from cbdsl.algorithm.worker import steps_of
from cbdsl.arrays import Samples
from cbdsl.codecs.envelope import KEPT_VERSIONS, longest_update
from cbdsl.engines import native_engine
from cbdsl.engines.native_engine import NativeEngine
from cbdsl.errors import UserError
from cbdsl.network.wire import Announcement, WireError
from cbdsl.network.worker_state import Assignment, understand
from cbdsl.util.formatting import format_bytes, format_duration, single_line

LONGEST_ROUND = 3600.0  # seconds that one order may take, unless told otherwise

_SLACK = 24 * 2**20  # bytes: what an interpreter, its threads and its connection take while they work
_TORCH = 500 * 2**20  # bytes that torch takes for itself
_BLOCK = 1024  # samples that the native engine brings into its vectors at once
_MODELS = 26  # arrays of D numbers at once: a particle, its move, its files, what travels; see tests/hostile
_SHARED = 3  # times the shared samples: unpacked, as numbers, checked, beside a worker's own
_RESULTS = 8  # numbers that torch takes for each that a described network makes
_MODULE = 30  # numbers that a network without a description takes for each of a sample's; a guess
_EFFICIENCY = 0.1  # of the machine's peak, which small networks do not reach
_EPOCH_SECONDS, _SAMPLE_SECONDS = 2e-5, 1e-6  # what an epoch and a sample take however small the network is
_MOST_REASONS = 20  # that are said in full: a server must not fill a log
_RUNS_AT_ONCE, _RUN_SECONDS = 20, 1.0  # runs taken up in a row; then one every so many seconds


def resident(key: str = "VmRSS") -> int:
    """Bytes of this process in memory now; 0 where nobody says."""
    try:
        text = Path("/proc/self/status").read_text(encoding="ascii")
        return 1024 * int(next(line for line in text.splitlines() if line.startswith(key)).split()[1])
    except (OSError, StopIteration, ValueError):
        return 0


def half_of_the_machine() -> int:
    """Half of this machine's memory in bytes; 0 where nobody says."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return 0


@dataclass(frozen=True)
class ResourceNeeds:
    """What an announcement asks of a worker."""

    parts: dict[str, int]  # bytes by what they are for
    seconds: float  # that a round takes, roughly

    @property
    def memory(self) -> int:
        """Bytes in all."""
        return sum(self.parts.values())


def needs_of(assignment: Assignment, own: Samples, threads: int, speed: float) -> ResourceNeeds:
    """What a run takes here; speed: multiply-adds a second."""
    local, layout, network = assignment.spec.local, assignment.layout, assignment.architecture
    width = math.prod(layout.shape)
    held = len(own) + layout.training
    passes = steps_of(held, local) * min(local.batch_size, held)  # samples trained on in a round
    update = longest_update(assignment.codecs, assignment.size) if assignment.codecs.down.relative else 0
    parts = {
        "the model": 4 * _MODELS * assignment.size * assignment.vectors + 3 * (KEPT_VERSIONS + 1) * update,
        "shared samples": 3 * assignment.shared_size + 4 * (_SHARED * layout.count + len(own)) * (width + 2),
        "batches": 10 * steps_of(held, local) * local.batch_size + 16 * held,
    }
    scored = 5 * (layout.scoring if assignment.spec.shares_scoring else len(own))
    if network is None or native_engine.available() is not None:
        together = min(max(local.batch_size, 250), held + layout.scoring)
        room = _RESULTS * network.numbers() if network is not None else _MODULE * (width + assignment.classes)
        parts["torch"] = _TORCH + 4 * together * room
        work = 3 * assignment.size * (passes + scored)
    else:
        parts["the engine"] = threads * NativeEngine(network, 1).workspace + 8 * _BLOCK * network.entrance()
        work = network.training_multiply_adds() * (passes + scored)
    epochs = local.epochs if not local.steps else local.steps * local.batch_size // held
    seconds = work / (_EFFICIENCY * speed) + _EPOCH_SECONDS * epochs + _SAMPLE_SECONDS * passes
    return ResourceNeeds(parts, seconds)


@dataclass
class ResourceLimits:
    """What one worker's process may take, and a voice that a server cannot wear out."""

    own: Samples
    threads: int = 1
    memory: int = 0  # bytes of the whole process; 0: as many as there are
    longest_round: float = 0.0  # seconds; 0: any
    _before: int = field(default_factory=resident)  # bytes it has without any run
    _speed: float = 1e9
    _said: set[str] = field(default_factory=set)
    _runs: list[float] = field(default_factory=list)  # when the last ones were taken up

    def __post_init__(self) -> None:
        if self.longest_round and native_engine.available() is None:
            self._speed = native_engine.peak_multiply_adds(self.threads, 0.05)
        if self.memory and self.memory < self._before + _SLACK:
            raise UserError(
                f"--memory {format_bytes(self.memory)} is too little: this process has {format_bytes(self._before)} "
                f"before any run. Give at least {format_bytes(self._before + 2 * _SLACK)}."
            )

    def understand(self, announcement: Announcement) -> Assignment:
        """An announcement that makes sense and asks for no more than there is; WireError for any other."""
        try:
            assignment = understand(announcement)
            self._check(needs_of(assignment, self.own, self.threads, self._speed))
        except WireError as error:
            reason = single_line(str(error))
            if len(self._said) == _MOST_REASONS and reason not in self._said:
                raise WireError("one more announcement that cannot be played here") from error
            self._said.add(reason)
            raise WireError(reason) from error
        return assignment

    def may_begin(self) -> bool:
        """Whether one more run may be taken up now: a server that announces run after run is not followed at once."""
        now = time.monotonic()
        self._runs = [one for one in self._runs if now - one < _RUNS_AT_ONCE * _RUN_SECONDS]
        if len(self._runs) < _RUNS_AT_ONCE:
            self._runs.append(now)
            return True
        return False

    def enforce(self) -> None:
        """Ask the system to give no more memory, where it can be asked: the second line, should the reckoning fail."""
        data = resident("VmData")
        if self.memory and sys.platform == "linux" and data:
            import resource  # noqa: PLC0415 - not on every platform

            limit = data + self.memory - self._before
            with contextlib.suppress(ValueError, OSError):  # somebody set a lower limit before
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
