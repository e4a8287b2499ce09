"""A multi-worker selection: everybody whose claim is below the mean of all claims uploads, and w^g is their mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import cbdsl


@cbdsl.register.selection("below-mean")
@dataclass(frozen=True)
class BelowMean(cbdsl.Selection):
    """The best claimants, at most `k`, that claim less than the mean of the claims left; weights 1 / (1 + rank)."""

    k: int = 5

    @property
    def most(self) -> int:  # type: ignore[override]
        """How many models the mean may have."""
        return self.k

    def invite(
        self, waiting: Sequence[cbdsl.Candidate], believed: Sequence[cbdsl.VerifiedUpload], view: cbdsl.RoundContext
    ) -> int | None:
        """Return the best claimant left while it is below the mean."""
        del view
        good = waiting and len(believed) < self.k and waiting[0].score <= np.mean([one.score for one in waiting])
        return waiting[0].worker if good else None

    def combine(self, believed: Sequence[cbdsl.VerifiedUpload], view: cbdsl.RoundContext) -> cbdsl.SelectionResult:
        """Return the weighted mean with its score on D_sc."""
        weights = 1 / np.arange(1, len(believed) + 1)
        mean = np.einsum("i,ij->j", weights / weights.sum(), np.stack([one.model for one in believed]))
        made = view.encode(mean.astype(np.float32))
        score = view.verifier.score(made.model) if view.verifier.score else believed[0].claimed
        return cbdsl.SelectionResult(made.model, score, packed=made)
