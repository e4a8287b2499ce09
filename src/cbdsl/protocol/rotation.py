"""Verified rotation: K workers in turn, each upload checked as any other, averaged with momentum at the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cbdsl import register
from cbdsl.protocol.messages import WorkerId
from cbdsl.protocol.selection import COPIED, Believed, Candidate, Combined, Selection, View


@register.selection("rotation")
@dataclass(frozen=True)
class Rotation(Selection):
    """K workers in turn, whatever they claim: m <- momentum m + mean of (w_i - w^g), w^g <- w^g + m."""

    k: int = 12
    momentum: float = 0.5
    trim: int = 0
    clip: bool = False

    @property
    def most(self) -> int:  # type: ignore[override]
        """K."""
        return self.k

    def invite(self, waiting: Sequence[Candidate], believed: Sequence[Believed], view: View) -> WorkerId | None:
        """The next in turn, until K are believed."""
        if not waiting or len(believed) >= self.k:
            return None
        first, places = (view.round - 1) * self.k, max(one.worker for one in waiting) + 1
        return min((one.worker for one in waiting), key=lambda worker: (worker - first) % places)

    def objection(self, upload: Believed, believed: Sequence[Believed], view: View) -> str:
        """Copies of w^g, or of another upload, take no place in it."""
        copies, others = view.verifier.copies, [one.model for one in believed]
        return COPIED if copies and copies(view.state.global_best, others, upload.model, view.round) else ""

    def combine(self, believed: Sequence[Believed], view: View) -> Combined:
        """The new w^g."""
        current = view.state.global_best.astype(np.float64)
        steps = np.stack([one.model for one in believed]) - current
        if self.clip:
            lengths = np.linalg.norm(steps, axis=1)
            steps *= np.minimum(1, np.median(lengths) / lengths)[:, None]
        if self.trim:
            cut = min(self.trim, (len(steps) - 1) // 2)
            steps = np.sort(steps, axis=0)[cut : len(steps) - cut]
        memory = view.state.memory if len(view.state.memory) else np.zeros(len(current), np.float32)
        momentum = self.momentum * memory + steps.mean(0)
        made = view.packed((current + momentum).astype(np.float32))
        score = view.verifier.score(made.model) if view.verifier.score else np.inf
        return Combined(made.model, float(score), memory=momentum.astype(np.float32), packed=made)
