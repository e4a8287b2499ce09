"""Measure rounds on a Ray cluster against one process: `python benchmarks/ray_rounds.py ray --workers 50`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from cbdsl.presets import preset
from cbdsl.runs.build import Experiment
from cbdsl.runs.loop import play_rounds
from cbdsl.runs.resolve import resolve
from cbdsl.spec import numbers, words
from cbdsl.swarms.ray_swarm import RaySwarm, build_ray_swarm, connect_ray, list_nodes

SAMPLES = 40_000  # divided among the workers: many workers have few samples each
EMPTY_ROUNDS = 20


@dataclass(frozen=True)
class RayRow:
    """The fastest rounds of one model with one number of workers."""

    model: str
    workers: int
    shards: int
    threads: int  # of the one process
    local_seconds: float  # per round in one process
    ray_seconds: float  # per round on the cluster
    overhead_seconds: float  # per round without participants: w^g to every shard, an answer back
    speed: float  # of the cluster relative to the one process


def measure(ray: Any, model: str, workers: int, given: argparse.Namespace) -> RayRow:  # noqa: ANN401 - the module
    threads = given.threads or max(1, sum(int(machine.cpus) for machine in list_nodes(ray)))
    settings = {
        "workers": workers,
        "rounds": given.repeats + 1,
        "model": model,
        "data.samples_per_worker": max(1, min(300, SAMPLES // workers)),
    }
    experiment = Experiment.prepare(resolve(preset("paper-iid").with_settings(settings)), threads=threads)
    swarm = build_ray_swarm(experiment, ray, given.shards)
    try:
        local_rounds = play_rounds(experiment, experiment.first_state(), experiment.memory_swarm, measured=False)
        ray_rounds = play_rounds(experiment, experiment.first_state(), swarm, measured=False)
        turns = [
            (local.record.seconds, remote.record.seconds)
            for local, remote in zip(local_rounds, ray_rounds, strict=True)
        ]
        local, remote = (min(times) for times in zip(*turns[1:], strict=True))  # the first round warms up
        overhead = measure_empty_rounds(experiment, swarm)
        return RayRow(model, workers, len(swarm.facts), threads, local, remote, overhead, local / remote)
    finally:
        swarm.close()


def measure_empty_rounds(experiment: Experiment, swarm: RaySwarm) -> float:
    """Return the seconds of the fastest round without participants; each round has a new w^g."""
    first, times = experiment.server.order(experiment.first_state()), []
    for number in range(EMPTY_ROUNDS):
        order = replace(first, round=experiment.spec.rounds + 1 + number, participants=())
        started = time.perf_counter()
        swarm.report(order)
        times.append(time.perf_counter() - started)
    return min(times)


def table_of(rows: Sequence[RayRow]) -> Table:
    table = Table("model", "workers", "shards", "one process", "on Ray", "speed", "empty round")
    for row in rows:
        table.add_row(
            row.model,
            f"{row.workers:,}",
            str(row.shards),
            f"{row.local_seconds:.3f} s, {row.threads} threads",
            f"{row.ray_seconds:.3f} s",
            f"{row.speed:.0%}",
            f"{1e3 * row.overhead_seconds:.1f} ms",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("on", help="ray (start a cluster here), auto, HOST:PORT or ray://HOST:PORT")
    parser.add_argument("--models", type=words, default=("cnn",), help="models, separated by commas")
    parser.add_argument("--workers", default="50", help="numbers of workers, separated by commas")
    parser.add_argument("--threads", type=int, help="threads to use; all cores if not given")
    parser.add_argument("--shards", type=int, help="parts of the swarm; one per processor if not given")
    parser.add_argument("--repeats", type=int, default=5, help="rounds, of which the fastest counts")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    given = parser.parse_args()
    counts = numbers(given.workers, "--workers")
    with connect_ray(given.on, given.threads) as ray:
        rows = [measure(ray, model, count, given) for model in given.models for count in counts]
    if given.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        Console().print(table_of(rows))


if __name__ == "__main__":
    main()
