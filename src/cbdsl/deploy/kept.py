"""The trained model on a device: model.safetensors in its folder, as `cbdsl predict` and `cbdsl export` take it.

Written whole, for its owner alone, and without torch where the network is described. Never sent anywhere, and read here
only for what it says of itself.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from cbdsl.deploy.held import Held
from cbdsl.deploy.particle import Assignment
from cbdsl.deploy.wire import OrderMessage
from cbdsl.files import write_atomically
from cbdsl.text import one_line

_log = logging.getLogger("cbdsl.deploy")

NAME = "model.safetensors"


class Kept:
    """The one model that a device keeps."""

    def __init__(self, folder: Path, worker: str) -> None:
        self.path, self._worker = folder / NAME, worker
        self._known: Mapping[str, str] | None = None  # what the file says; none: not looked at yet

    def is_final(self, order: OrderMessage) -> bool:
        """Whether the file has what this order, the last one of a run, says is the trained model."""
        return self._has(_notes(order, order.model_digest, order.version))

    def _has(self, notes: Mapping[str, str]) -> bool:
        if self._known is None:
            from cbdsl.models.saved import notes_of  # noqa: PLC0415 - a device that hears of no run does without

            self._known = notes_of(self.path)
        return notes.items() <= self._known.items()

    def keep_last(self, assignment: Assignment, held: Held, order: OrderMessage) -> None:
        """Keep what a run came to, or if that did not come the last w^g that did; say which it is."""
        if not held.digest:
            _log.warning(
                "worker %s: the trained model did not come, and none before it; %s is as it was",
                self._worker,
                self.path,
            )
        elif not self.keep(assignment, held, order):
            return
        elif held.digest == order.model_digest:
            _log.info("worker %s: the trained model is in %s", self._worker, self.path)
        else:
            _log.warning(
                "worker %s: the trained model did not come. In %s is the last one that did: version %d of %d",
                self._worker, self.path, held.version, order.version,
            )  # fmt: skip

    def keep(self, assignment: Assignment, held: Held, order: OrderMessage) -> bool:
        """Keep w^g as this device has it after an order; whether it could. A full disk is no reason to leave a run."""
        notes = _notes(order, held.digest, held.version)
        try:
            if not self._has(notes):
                self._write(assignment, held, notes)
            return True
        except (OSError, ValueError, RuntimeError, MemoryError) as error:
            why = one_line(str(error)) or type(error).__name__
            _log.warning("worker %s: %s cannot be written: %s", self._worker, self.path, why)
            return False

    def _write(self, assignment: Assignment, held: Held, notes: Mapping[str, str]) -> None:
        from cbdsl.models.network import Network, network_of  # noqa: PLC0415 - as above
        from cbdsl.models.saved import Card, file_of  # noqa: PLC0415

        shape, classes = assignment.layout.shape, assignment.classes
        network = Network(shape, classes, assignment.architecture)
        if assignment.architecture is None:
            network = network_of(assignment.spec, shape, classes)
        card = Card.of(network, assignment.scaling, assignment.class_names)
        tensors = network.tensors(held.model[: assignment.size])
        if assignment.tensors:  # as the server's own file calls them
            card = replace(card, tensors=assignment.tensors)
            tensors = dict(zip(assignment.tensors, tensors.values(), strict=True))
        content = file_of(card, tensors, notes)
        write_atomically(self.path, content, private=True)
        self._known = notes


def _notes(order: OrderMessage, digest: bytes, version: int) -> dict[str, str]:
    """What the file says beside the card: which run and which w^g it is of, and whether the run ended with it."""
    final = order.task == "finish" and digest == order.model_digest
    return {
        "run": order.run.hex(),
        "version": str(version),
        "digest": digest.hex(),
        "final": "yes" if final else "no",
    }
