"""Measure what codecs cost in rounds of CB-DSL: `python benchmarks/codecs.py none,q4,q3 --workers 50,1000`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from cbdsl.arrays import Doubles, Floats
from cbdsl.codecs.codec import Codec, Packs, Scores, Sent
from cbdsl.codecs.envelope import Codecs
from cbdsl.presets import preset
from cbdsl.runs.build import Experiment
from cbdsl.runs.loop import play_rounds
from cbdsl.runs.resolve import resolve
from cbdsl.spec import numbers, words

T = TypeVar("T")
ROUNDS = 4
SAMPLES = 40_000  # divided among the workers: many workers have few samples each


@dataclass(frozen=True)
class CodecRow:
    """The cost of one codec with one number of workers."""

    codec: str
    workers: int
    seconds: float  # per round
    share: float  # of the time, for encoding and decoding
    upload_bits: float  # per weight
    downlink_bytes: int  # per round, to all workers


class TimedCodec(Codec):
    """A codec that measures the time it takes."""

    def __init__(self, inner: Codec) -> None:
        self._inner, self.seconds = inner, 0.0
        vars(self).update(relative=inner.relative, feedback=inner.feedback, measures=inner.measures)

    def longest_pack(self, size: int) -> int:
        return self._inner.longest_pack(size)

    def pack(self, model: Floats, reference: Floats) -> bytes:
        return self._measure(lambda: self._inner.pack(model, reference))

    def unpack(self, pack: bytes, reference: Floats) -> Floats:
        return self._measure(lambda: self._inner.unpack(pack, reference))

    def encode_pack(self, pack: Packs, size: int) -> bytes:
        return self._measure(lambda: self._inner.encode_pack(pack, size))

    def decode(self, content: bytes, reference: Floats) -> Floats:
        return self._measure(lambda: self._inner.decode(content, reference))

    def transmit(self, models: Floats, reference: Floats, scores: Scores | None) -> Sent:
        if scores is None:
            return self._measure(lambda: self._inner.transmit(models, reference, None))
        scoring = 0.0  # not a cost of the codec

        def timed_scores(rows: Floats) -> Doubles:
            nonlocal scoring
            started = time.perf_counter()
            result = scores(rows)
            scoring += time.perf_counter() - started
            return result

        result = self._measure(lambda: self._inner.transmit(models, reference, timed_scores))
        self.seconds -= scoring
        return result

    def _measure(self, call: Callable[[], T]) -> T:
        started = time.perf_counter()
        try:
            return call()
        finally:
            self.seconds += time.perf_counter() - started


def measure(name: str, workers: int, threads: int | None) -> CodecRow:
    settings = {
        "workers": workers,
        "rounds": ROUNDS,
        "codec.up": name,
        "codec.down": name,
        "data.samples_per_worker": min(300, SAMPLES // workers),
    }
    experiment = Experiment.prepare(resolve(preset("paper-iid").with_settings(settings)), threads=threads)
    server = experiment.server
    up, down = TimedCodec(server.policy.codecs.up), TimedCodec(server.policy.codecs.down)
    policy = replace(server.policy, codecs=Codecs(up, down))
    experiment = replace(experiment, server=replace(server, policy=policy))
    records = []
    for played in play_rounds(experiment, experiment.first_state(), experiment.memory_swarm, measured=False):
        if played.record.round == 1:  # the first round warms up and sends the initial model
            up.seconds = down.seconds = 0.0
        else:
            records.append(played.record)
    seconds = sum(record.seconds for record in records)
    uploads = sum(record.traffic["upload"][0] for record in records)
    uploaded = sum(record.traffic["upload"][1] for record in records)
    return CodecRow(
        codec=name,
        workers=workers,
        seconds=seconds / len(records),
        share=(up.seconds + down.seconds) / seconds,
        upload_bits=8 * uploaded / max(1, uploads) / experiment.engine.size,
        downlink_bytes=round(sum(record.traffic["broadcast"][1] for record in records) / len(records)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("codecs", type=words, help="codecs, separated by commas")
    parser.add_argument("--workers", default="50", help="numbers of workers, separated by commas")
    parser.add_argument("--threads", type=int, help="threads to use; all cores if not given")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    given = parser.parse_args()
    counts = numbers(given.workers, "--workers")
    if min(counts) < 1 or max(counts) > SAMPLES // 10:
        parser.error(f"numbers of workers go from 1 to {SAMPLES // 10:,}")
    rows = [measure(name, count, given.threads) for count in counts for name in given.codecs]
    if given.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    table = Table("codec", "workers", "per round", "coding", "bits per weight, up", "MB down per round")
    for row in rows:
        table.add_row(
            row.codec,
            f"{row.workers:,}",
            f"{row.seconds:.2f} s",
            f"{row.share:.1%}",
            f"{row.upload_bits:.2f}",
            f"{row.downlink_bytes / 1e6:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
