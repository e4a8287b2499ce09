"""What a method is: which conversation it holds, how its workers move, what its server does with what it got.

A method is a small object whose arguments are its settings. The worker's half (`move`, `upload`) works on rows of
workers, in memory or on a device; the server's half (`broadcast`, `step`) on one model and what the server remembers.
Neither knows who carries the messages, how uploads are judged or how many bytes they take.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np

from cbdsl.arrays import Floats
from cbdsl.errors import UserError
from cbdsl.spec_groups import Shared
from cbdsl.workers.local import Work
from cbdsl.workers.storage import opened, stored
from cbdsl.workers.swarm import Particles, move, recovered

Conversation = Literal["swarm", "average"]
"""Claims, and uploads from whom the server invites (Algorithm 1); or an upload from everybody (FedAvg)."""


class Method(ABC):
    """One way of learning together. D is the size of a model, V D that of a message; V is `vectors`."""

    title: ClassVar[str] = ""  # for people: its name and where it was published
    conversation: ClassVar[Conversation]
    shared: ClassVar[Shared] = "both"  # what it uses of D_G unless told otherwise
    gradients: ClassVar[bool] = True  # whether workers train
    verifies: ClassVar[bool] = False  # whether uploads are measured on D_sc, where D_sc is shared
    remembers: ClassVar[bool] = True  # whether workers keep anything from one round to the next
    vectors: ClassVar[int] = 1  # V: how many vectors of D numbers a worker receives and uploads; 1 in a swarm
    fixes: ClassVar[Mapping[str, Any]] = {}  # settings of `swarm` that define the method

    @abstractmethod
    def move(self, work: Work, rows: Particles, received: Floats) -> Particles:
        """One round of k workers: rows (k, ...) and what the server last sent, (V D,); the rows after it.

        Row i of the result depends on row i alone, so that grouping changes no number. `work` trains, scores and draws.
        """

    @abstractmethod
    def upload(self, rows: Particles) -> Floats:
        """What k workers send when they are asked, (k, V D)."""

    def memory(self, size: int) -> Floats:
        """What the server remembers before round 1, beside the model of `size` numbers; any shape."""
        del size
        return np.zeros(0, np.float32)

    def broadcast(self, current: Floats, memory: Floats) -> Floats:
        """What the server sends down: the model (D,), or with what it remembers (V D,)."""
        del memory
        return current

    def step(self, current: Floats, memory: Floats, combined: Floats, share: float) -> tuple[Floats, Floats]:
        """The new model (D,) and memory, from the combined uploads (V D,) of a share of all workers.

        Called in the conversation "average" alone; in "swarm" the selection decides what becomes w^g.
        """
        del current, share
        return combined, memory


class SwarmMethod(Method):
    """Particles that move by Eq. (5), claim the score of the best model they ever had, and upload it if invited."""

    conversation = "swarm"

    def move(self, work: Work, rows: Particles, received: Floats) -> Particles:
        """Move, score and remember (Algorithm 1, lines 3 to 5)."""
        rows = work.rebased(work.with_newcomers(recovered(rows, received), received), received)
        positions, velocities = move(
            rows, received, work.coefficients(), work.train, work.swarm.sgd_from, work.swarm.velocity
        )
        return work.remembered(rows, positions, velocities, received)

    def upload(self, rows: Particles) -> Floats:
        """w^p, the best model so far."""
        return rows.personal_best


def play_part(method: Method, work: Work, rows: Particles, received: Floats) -> Particles:
    """A worker's round with what a codec needs: `move`, and where everybody uploads, what is sent.

    Rows are what was kept of them; see `storage`.
    """
    rows = opened(stored(rows, work.swarm))
    after = method.move(work, rows, received)
    if not work.workers.codec.relative:
        return after
    if method.conversation == "average":
        return work.packed(after, method.upload(after), received)
    new = ((after.personal_best != rows.personal_best) & ~np.isnan(rows.personal_best)).any(1)  # NaN differs from NaN
    if (after.versions[new] != work.version).any():
        raise UserError(
            f"The method {type(method).__qualname__} scores models that are not sent as they are. To be used with a "
            "codec, it has to score and remember positions with work.remembered(...), as cbdsl.SwarmMethod does."
        )
    return after


class AveragingMethod(Method):
    """Everybody trains from the server's model and uploads; the server combines (McMahan et al. 2017)."""

    conversation = "average"
    shared: ClassVar[Shared] = "none"
    remembers = False

    def move(self, work: Work, rows: Particles, received: Floats) -> Particles:
        """Train from the server's model, whatever the worker had before."""
        return work.placed(rows, self.train(work, work.from_server(received)))

    def train(self, work: Work, start: Floats) -> Floats:
        """Local training from the server's model, (k, D) -> (k, D)."""
        return work.train(start)

    def upload(self, rows: Particles) -> Floats:
        """The trained model."""
        return rows.positions
