"""What a codec costs: the share of a round that goes into encoding and decoding, and the bytes that are left.

Rounds of CB-DSL are played as any others, with codecs that look at the clock. What a codec takes to be chosen by its
score counts as scoring, not as coding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

from rich.table import Table

from cbdsl import register
from cbdsl.arrays import Doubles, Floats
from cbdsl.codecs.base import Codec, Packs, Scores, Sent
from cbdsl.codecs.travel import Codecs
from cbdsl.presets import preset
from cbdsl.runs.play import rounds
from cbdsl.runs.resolve import resolve
from cbdsl.runs.stage import Stage

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
            rows.append(_row(name, count, threads))
    return rows


def _row(name: str, workers: int, threads: int | None) -> CodecRow:
    settings = {
        "workers": workers, "rounds": _ROUNDS, "codec.up": name, "codec.down": name,
        "data.samples_per_worker": min(300, _SAMPLES // workers),
    }  # fmt: skip
    stage = Stage.prepare(resolve(preset("paper-iid").with_settings(settings)), threads=threads)
    codecs = stage.server.policy.codecs
    up, down = _Timed(codecs.up), _Timed(codecs.down)
    policy = replace(stage.server.policy, codecs=Codecs(up, down))
    stage = replace(stage, server=replace(stage.server, policy=policy))
    played = []
    for one in rounds(stage, stage.first_state(), stage.memory_swarm, measured=False):
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
