"""A stateful attack: turns its step round, and makes it longer as long as w^g goes on moving that way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

import cbdsl
from cbdsl.arrays import Floats


@cbdsl.register.attack("oscillator")
@dataclass(frozen=True)
class Oscillator(cbdsl.Attack):
    """Sends w^g - s (w - w^g); s grows by `growth` if w^g moved along the attacker's last step, and else halves."""

    growth: float = 1.5

    def remember(self, seen: cbdsl.AttackContext) -> Mapping[str, np.ndarray]:
        """The last w^g, its last step, and s."""
        scale, before = seen.memory.get("scale", np.array(1.0)), seen.memory.get("before")
        if before is not None:
            moved = seen.global_best - before
            scale = scale * (self.growth if float(moved @ seen.memory["step"]) > 0 else 0.5)
        return {"before": seen.global_best, "step": seen.global_best - seen.model, "scale": np.asarray(scale)}

    def upload(self, seen: cbdsl.AttackContext) -> Floats:
        """The step that it remembers, s times as long."""
        return np.asarray(seen.global_best + np.float32(seen.memory["scale"]) * seen.memory["step"])
