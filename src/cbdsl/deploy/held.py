"""The global model that a worker holds, and how it gets to the next: by updates, or from a whole one after a pause."""

from __future__ import annotations

import numpy as np

from cbdsl.arrays import Floats
from cbdsl.codecs.base import CodecError
from cbdsl.codecs.travel import updated
from cbdsl.deploy import wire
from cbdsl.deploy.mail import Mail
from cbdsl.deploy.particle import Assignment
from cbdsl.deploy.wire import OrderMessage


class Held:
    """w^g as this worker has it. Before the first update that is version 0, all zeros, where differences are sent."""

    def __init__(self, assignment: Assignment | None = None) -> None:
        self.relative = assignment is not None and assignment.codecs.down.relative
        self._assignment = assignment
        self.model = np.zeros(assignment.size if assignment is not None and self.relative else 0, np.float32)
        self.digest, self.version = b"", 0

    def reach(self, mail: Mail, order: OrderMessage) -> bool:
        """Whether the model that an order is about is here, or can be made of what came; then it is `model`."""
        if self.digest == order.model_digest:
            return True
        if not self.relative:
            if mail.model.digest == order.model_digest:
                self._take(wire.weights_from_bytes(mail.model.content), order.version, order.model_digest)
            return self.digest == order.model_digest
        starts = [(self.version, self.model)]
        if mail.model.content:
            starts.append((mail.model.filled, wire.weights_from_bytes(mail.model.content)))
        return any(self._follow(mail, version, model, order) for version, model in starts)

    def _follow(self, mail: Mail, version: int, model: Floats, order: OrderMessage) -> bool:
        assert self._assignment is not None
        while version < order.version:
            version += 1
            update = mail.updates.get(version)
            if update is None or not update.content:
                return False
            try:
                model = updated(update.content, model, self._assignment.codecs)
            except CodecError:
                return False
        digest = wire.digest_of(wire.weights_to_bytes(model))
        if digest != order.model_digest:
            return False
        self._take(model, order.version, digest)
        return True

    def _take(self, model: Floats, version: int, digest: bytes) -> None:
        self.model, self.version, self.digest = model, version, digest
