"""Whether a run fits a device: its samples, the engine that it needs, the memory that it takes. Makes none of it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cbdsl.arrays import Samples
from cbdsl.deploy import wire
from cbdsl.deploy.budget import LONGEST_ROUND, Budget, half_of_the_machine, needs_of
from cbdsl.deploy.checkup import Finding, wrong
from cbdsl.deploy.particle import Assignment, understand
from cbdsl.deploy.samples import read_samples
from cbdsl.deploy.wire import Announcement, WireError
from cbdsl.engines import native
from cbdsl.errors import UserError
from cbdsl.models.saved import read_model
from cbdsl.spec import Spec
from cbdsl.text import one_line, size


@dataclass(frozen=True)
class Device:
    """What a device has for a run."""

    data: Path | None = None  # its samples
    threads: int = 1
    memory: int = 0  # bytes that its worker may take; 0: half of the machine's

    def fits(self, announcement: Announcement) -> Iterator[Finding]:
        """Every step in turn."""
        try:
            assignment = understand(announcement)
        except WireError as error:
            yield wrong("model", f"{one_line(str(error))}. Server and workers should be of one release.")
            return
        obstacle = (
            native.available() if assignment.architecture is not None else "the server sends no description of it"
        )
        if obstacle is not None and importlib.util.find_spec("torch") is None:
            yield wrong("engine", f"this model needs torch here ({obstacle}). Do: pip install 'cbdsl[torch]'")
            return
        own = self._samples(assignment)
        if isinstance(own, Finding):
            yield own
            return
        if self.data is not None:
            yield Finding("samples", f"{len(own):,} in {self.data}, as the run wants them.")
        yield self._memory(announcement, assignment, own)

    def _samples(self, assignment: Assignment) -> Samples | Finding:
        """Its own, or one in their place; or what is wrong with them."""
        shape, classes = assignment.layout.shape, assignment.classes
        if self.data is None:
            return Samples(np.broadcast_to(np.float32(0), (1, *shape)), np.zeros(1, np.int32))
        try:
            own = read_samples(self.data)
        except UserError as error:
            return wrong("samples", str(error))
        if own.features.shape[1:] != shape or int(own.labels.max()) >= classes:
            return wrong(
                "samples", f"{self.data} has samples of shape {own.features.shape[1:]} and labels up to "
                f"{own.labels.max()}; the run works on {shape} in {classes} classes. Give others with --data.",
            )  # fmt: skip
        return own

    def _memory(self, announcement: Announcement, assignment: Assignment, own: Samples) -> Finding:
        allowed = self.memory or half_of_the_machine()
        needed = size(needs_of(assignment, own, self.threads, 1e9).memory)
        try:
            Budget(own, self.threads, allowed, LONGEST_ROUND).understand(announcement)
        except (WireError, UserError) as error:
            return wrong("memory", f"{one_line(str(error)).rstrip('.')}.")
        least = "" if self.data is not None else " and more for its own samples (--data)"
        return Finding(
            "memory", f"{assignment.size:,} parameters take about {needed} at work{least}; {size(allowed)} are allowed."
        )


def announced(payload: bytes) -> Announcement | Finding:
    """The announcement that a broker retains; or why it is none."""
    try:
        return wire.decode(payload, Announcement)
    except WireError as error:
        return wrong("model", f"the announcement is {error}. Server and workers should be of one release.")


def as_announced(model: Path) -> Announcement:
    """What a server would announce that has this trained model's network, and shares no samples."""
    saved = read_model(model)
    graph, nothing = saved.graph, wire.NO_DIGEST
    return Announcement(
        bytes(wire.RUN_BYTES), Spec().to_toml(), json.dumps(graph.to_dict()), graph.size, 1, json.dumps(graph.shape),
        graph.classes, 0, 0, nothing, 0,
    )  # fmt: skip
