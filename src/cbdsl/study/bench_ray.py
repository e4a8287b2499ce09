"""What a cluster costs: the same rounds of CB-DSL in one process and on Ray, by turns; trust the ratios of one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.table import Table

from cbdsl.presets import preset
from cbdsl.runs.elsewhere import ray_swarm
from cbdsl.runs.play import rounds
from cbdsl.runs.resolve import resolve
from cbdsl.runs.stage import Stage
from cbdsl.swarms.ray import RaySwarm
from cbdsl.swarms.ray_cluster import connected, machines

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
        return [_row(ray, model, count, threads, shards, repeats, progress) for model in models for count in workers]


def _row(
    ray: Any, model: str, workers: int, threads: int | None, shards: int | None, repeats: int,  # noqa: ANN401
    progress: Callable[[str], None],
) -> RayRow:  # fmt: skip
    cpus = threads or max(1, sum(int(one.cpus) for one in machines(ray)))
    settings = {
        "workers": workers, "rounds": repeats + 1, "model": model,
        "data.samples_per_worker": max(1, min(300, _SAMPLES // workers)),
    }  # fmt: skip
    stage = Stage.prepare(resolve(preset("paper-iid").with_settings(settings)), threads=cpus)
    swarm = ray_swarm(stage, ray, shards)
    try:
        turns = []
        here = rounds(stage, stage.first_state(), stage.memory_swarm, measured=False)
        there = rounds(stage, stage.first_state(), swarm, measured=False)
        for number, (one, other) in enumerate(zip(here, there, strict=True)):
            turns.append((one.record.seconds, other.record.seconds))
            progress(f"{model}, {workers} workers: round {number} of {repeats}")
        local, remote = (min(times) for times in zip(*turns[1:], strict=True))  # the first one warms up
        return RayRow(model, workers, len(swarm.facts), cpus, local, remote, _empty(stage, swarm))
    finally:
        swarm.close()


def _empty(stage: Stage, swarm: RaySwarm) -> float:
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
