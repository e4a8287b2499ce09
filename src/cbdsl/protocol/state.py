"""What the server knows between rounds. Frozen: a round makes a new one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from cbdsl.arrays import Floats
from cbdsl.protocol.messages import WorkerId


@dataclass(frozen=True)
class BackOff:
    """A worker that was invited in vain: it did not deliver, or nothing but a copy of w^g."""

    times: int  # in a row
    until: int  # the last round in which it is passed over

    def again(self, round_number: int) -> BackOff:
        """One more time: it is passed over for 2, 4, 8 ... rounds."""
        return BackOff(self.times + 1, round_number + 2 ** (self.times + 1))


NO_BACK_OFF = BackOff(0, 0)


@dataclass(frozen=True, eq=False)
class ServerState:
    """The server after a round."""

    round: int  # t, the last round played
    global_best: Floats  # w^g, (D,)
    global_score: float  # F^g; +inf while nothing was believed
    version: int = 0  # of w^g: how many there were
    told: Mapping[WorkerId, int] = field(default_factory=dict)  # the version that each worker has
    banned: frozenset[WorkerId] = frozenset()
    back_offs: Mapping[WorkerId, BackOff] = field(default_factory=dict)  # who was invited in vain
    last_uploaded: Mapping[WorkerId, float] = field(default_factory=dict)  # the claim behind each worker's last upload
    memory: Floats = field(default_factory=lambda: np.zeros(0, np.float32))  # the method's own, such as momentum
    references: tuple[Floats, ...] = ()  # the last versions of w^g, the present one last; only where a codec needs them
    updates: tuple[bytes, ...] = ()  # what led from the last version that was put out whole to this one
