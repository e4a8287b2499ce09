"""Real workers as threads of this process, on an in-memory bus."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import cbdsl
from cbdsl.arrays import Samples
from cbdsl.network.mqtt import Address
from cbdsl.network.server import ServerConfig
from cbdsl.network.session import ServedRun, open_run, serve
from cbdsl.network.timeouts import Deadlines
from cbdsl.network.worker import Worker
from cbdsl.runs.build import Experiment, UserParts
from cbdsl.runs.resolve import resolve
from cbdsl.spec import Spec
from support.bus import Bus
from support.helpers import blobs, perceptron

# No deadline is met by chance on a loaded machine: only a worker that never answers is passed over.
PACE = Deadlines(round_seconds=60, upload_seconds=60, join_seconds=60, least_seconds=60)
PASSED_OVER = replace(PACE, upload_seconds=1.0)  # where one that is invited never sends its model


def prepared(spec: Spec) -> Experiment:
    return Experiment.prepare(resolve(spec), UserParts(model=perceptron, data=blobs()), 1)


class Crew:
    """The workers of a stage, each in a thread."""

    def __init__(self, bus: Bus, stage: Experiment, folder: Path) -> None:
        self.bus, self.stage, self.folder = bus, stage, folder
        self.names = tuple(f"w{number}" for number in range(stage.spec.workers))
        self.workers: dict[int, Worker] = {}
        self.threads: dict[int, threading.Thread] = {}

    def own(self, number: int) -> Samples:
        rows, train = self.stage.split.workers[number], self.stage.dataset.train
        return Samples(train.features[rows], train.labels[rows])

    def start(self, number: int) -> None:
        attack = self.stage.spec.attack.name if number in self.stage.byzantine else ""
        worker = Worker(
            "s", self.names[number], self.own(number), self.folder / self.names[number],
            lambda handle, greet, will, meter: self.bus.link(handle, greet, will), attack=attack,  # noqa: ARG005
        )  # fmt: skip
        self.workers[number] = worker
        self.threads[number] = threading.Thread(target=worker.run, daemon=True)
        self.threads[number].start()

    def stop(self, number: int) -> None:
        self.workers[number].stop()
        with self.workers[number]._inbox.changed:
            self.workers[number]._inbox.changed.notify_all()
        self.threads[number].join(10)


@contextmanager
def crew(bus: Bus, stage: Experiment, folder: Path) -> Iterator[Crew]:
    made = Crew(bus, stage, folder)
    for number in range(stage.spec.workers):
        made.start(number)
    yield made
    for number in made.workers:
        made.stop(number)


def play(
    bus: Bus,
    stage: Experiment,
    folder: Path,
    names: tuple[str, ...],
    pace: Deadlines | None = None,
    **callbacks: Any,  # noqa: ANN401
) -> ServedRun:
    pace = pace or (PASSED_OVER if stage.spec.attack.name == "staller" else PACE)
    config = ServerConfig("s", Address("127.0.0.1", 1), pace, names)
    return serve(stage, open_run(stage, folder / "run"), config, make_link=bus.link, **callbacks)


def without_time(result: cbdsl.Result) -> list[Any]:
    return [replace(line, seconds=0.0) for line in result.rounds]
