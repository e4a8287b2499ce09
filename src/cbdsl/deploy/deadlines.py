"""How long a server waits, and for whom. The numbers of a run do not depend on it if everybody is waited for."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from cbdsl.errors import UserError


@dataclass(frozen=True)
class Deadlines:
    """Seconds, and the share of workers that ends a wait early."""

    quorum: float = 1.0  # a round closes when this share of the workers that are there has answered
    round_seconds: float = 600.0  # or after so long
    upload_seconds: float = 60.0  # an invited worker is passed over after so long
    join_seconds: float = 60.0  # how long the first round waits for workers that are not there yet
    grace_seconds: float = 3.0  # a worker that vanished is waited for so long: it may be restarting
    patience: int = 10  # deadlines without a single answer before the server gives up
    slack: float = 10.0  # everybody has so many times as long as most workers need
    least_seconds: float = 2.0  # and so much longer once in a while; an upload has so long at least

    def __post_init__(self) -> None:
        if not 0 < self.quorum <= 1:
            raise UserError(f"The quorum must be above 0 and at most 1; given {self.quorum}.")
        if not self.slack >= 1:
            raise UserError(f"The slack must be at least 1; given {self.slack}.")
        if self.patience < 1:
            raise UserError(f"The patience must be at least 1; given {self.patience}.")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_seconds") and not (math.isfinite(value) and value >= 0):
                raise UserError(f"{field.name} must be a number of seconds; given {value}.")

    def needed(self, expected: int) -> int:
        """How many answers close a wait for so many workers."""
        return max(1, math.ceil(self.quorum * expected - 1e-9))
