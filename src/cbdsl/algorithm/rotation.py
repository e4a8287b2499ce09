"""The selections that mix several uploads: `rotation`, K workers in turn, and `soup`, the K best claimants."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from cbdsl import register
from cbdsl.algorithm.messages import WorkerId
from cbdsl.algorithm.methods_more import clip_steps
from cbdsl.algorithm.mixture import go_towards, mix_steps, turn_disputed
from cbdsl.algorithm.selection import (
    COPIED,
    UNWEIGHTED,
    Candidate,
    RoundContext,
    Selection,
    SelectionResult,
    VerifiedUpload,
    find_doubt,
)
from cbdsl.arrays import Doubles, Floats
from cbdsl.errors import UserError


class MixedSelection(Selection):
    """Invites K workers and makes of their uploads the mixture that does best on the private hold-out.

    Without a guard D_sc takes the place of the hold-out; without D_sc all uploads count equally.
    """

    k: int
    momentum: float
    byzantine: float
    agreement: bool
    clip: float
    noise: float

    def __post_init__(self) -> None:
        if not (0 <= self.clip < np.inf and 0 <= self.noise < np.inf and bool(self.clip) >= bool(self.noise)):
            raise UserError(
                f"clip and noise must be at least 0, and noise needs a clip; given {self.clip:g} and {self.noise:g}.",
                code="out-of-range",
            )
        if not 0 <= self.byzantine < 1:
            raise UserError(
                f"byzantine is the share of a round's uploads that may be attackers', from 0 to less than 1; given "
                f"{self.byzantine:g}.",
                code="out-of-range",
            )

    @property
    def most(self) -> int:  # type: ignore[override]
        """K."""
        return self.k

    def invite(
        self, waiting: Sequence[Candidate], believed: Sequence[VerifiedUpload], view: RoundContext
    ) -> WorkerId | None:
        """Return the next worker, until K are verified, whatever they claim."""
        return self.next_of(waiting, believed, view) if waiting and len(believed) < self.k else None

    @abstractmethod
    def next_of(self, waiting: Sequence[Candidate], believed: Sequence[VerifiedUpload], view: RoundContext) -> WorkerId:
        """Return which of those waiting is next."""

    def objection(self, upload: VerifiedUpload, believed: Sequence[VerifiedUpload], view: RoundContext) -> str:
        """Object to what the guard doubts, and to copies of w^g or of another upload."""
        copies, others = view.verifier.copies, [one.model for one in believed]
        copied = copies is not None and copies(view.state.global_best, others, upload.model, view.round)
        return find_doubt(upload, view) or (COPIED if copied else "")

    def combine(self, believed: Sequence[VerifiedUpload], view: RoundContext) -> SelectionResult:
        """Return the best in private of w^g, the mixture, and what the server's own training makes of w^g.

        The server trains the mixture, too, and remembers the mixture's step as momentum. Otherwise it forgets it.
        """
        current, verifier = view.state.global_best.astype(np.float64), view.verifier
        measure = verifier.loss or verifier.score
        still = np.zeros_like(current)
        memory = view.state.memory if len(view.state.memory) == len(current) else still
        start = current + self.momentum * memory.astype(np.float64)

        def loss(model: Doubles) -> float:
            return measure(model.astype(np.float32)) if measure else -np.inf

        q = len(believed) - int(self.byzantine * len(believed))
        steps = np.stack([one.model for one in believed]) - current
        if self.clip:
            steps = clip_steps(steps, self.clip) + view.rng.normal(0.0, self.noise * self.clip, steps.shape)
        if self.agreement:
            steps = turn_disputed(steps, self.byzantine)
        mixture = mix_steps(steps, q, (lambda step: loss(start + step)) if measure else None)
        none = np.zeros(len(steps))
        candidates = [(start - current + mixture.step, mixture.weights)]
        if self.trains and verifier.train is not None:
            candidates.insert(0, (still, none))
        best, lowest = None, loss(current)
        for step, weights in candidates:
            made = view.encode(self._train(current + step, view, loss).astype(np.float32))
            found = loss(made.model.astype(np.float64))
            if found <= lowest and not np.array_equal(made.model, view.state.global_best):
                best, lowest = (made, step, weights), found
        if best is None:
            return SelectionResult(declined=_decline(believed, none), memory=still.astype(np.float32))
        made, step, weights = best
        score = float(verifier.score(made.model)) if verifier.score else np.inf
        return SelectionResult(made.model, score, _decline(believed, weights), step.astype(np.float32), made)

    def _train(self, model: Doubles, view: RoundContext, loss: Callable[[Doubles], float]) -> Doubles:
        """Return a model, (D,), after as much of the server's own training as does best in private."""
        train = view.verifier.train if self.trains else None
        if train is None:
            return model
        trained: Floats = train(model.astype(np.float32), view.round)
        return go_towards(model, trained.astype(np.float64), loss)


def _decline(believed: Sequence[VerifiedUpload], weights: Doubles) -> dict[WorkerId, str]:
    """Return who has no weight, and why. weights: (K,)."""
    return {one.worker: UNWEIGHTED for one, weight in zip(believed, weights, strict=True) if weight <= 0}


@register.selection("rotation", family="verified")
@dataclass(frozen=True)
class Rotation(MixedSelection):
    """K workers in turn, whatever they claim; all steps start at w^g and are mixed by what does best in private.

    No upload has more than 1/q of the weight, where q = (1 - `byzantine`) K. With a guard and D_tr the server then
    trains on D_tr and D_sc. A model that is worse on the private hold-out than w^g never replaces it. With `agreement`
    weights on whose sign the uploads disagree are reversed, against backdoors; it costs accuracy. With `clip` S and
    `noise` z every step is clipped to length S and gets noise N(0, (z S)^2) before it enters the mixture.
    """

    k: int = 12
    momentum: float = 0.5
    byzantine: float = 0.5  # share of a round's uploads that may be attackers'
    agreement: bool = False
    clip: float = 0.0  # the longest step of an upload; 0: any
    noise: float = 0.0  # deviation of the noise on a step, in units of `clip`
    trains: ClassVar[bool] = True

    def next_of(self, waiting: Sequence[Candidate], believed: Sequence[VerifiedUpload], view: RoundContext) -> WorkerId:
        """Return the next in turn."""
        able = [one.worker for one in waiting]
        known = [*able, *view.state.last_uploaded, *(one.worker for one in believed)]
        first, places = (view.round - 1) * self.k, max(known) + 1
        return min(able, key=lambda worker: (worker - first) % places)


@register.selection("soup", family="verified")
@dataclass(frozen=True)
class Soup(MixedSelection):
    """A verified average: the K best claimants, whether they beat F^g or not, mixed as in `rotation`."""

    k: int = 3
    byzantine: float = 0.5  # share of a round's uploads that may be attackers'
    momentum: ClassVar[float] = 0.0  # type: ignore[misc]
    agreement: ClassVar[bool] = False  # type: ignore[misc]
    clip: ClassVar[float] = 0.0  # type: ignore[misc]
    noise: ClassVar[float] = 0.0  # type: ignore[misc]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k < 2:
            raise UserError(
                f"A soup has at least 2 ingredients; given selection.k={self.k}. One is --select best.",
                code="out-of-range",
            )

    def next_of(self, waiting: Sequence[Candidate], believed: Sequence[VerifiedUpload], view: RoundContext) -> WorkerId:
        """Return the best claimant."""
        del believed, view
        return waiting[0].worker

    def combine(self, believed: Sequence[VerifiedUpload], view: RoundContext) -> SelectionResult:
        """Return a soup that is not worse than w^g, if there is one."""
        if view.verifier.score is None:
            raise UserError(
                "A soup needs a server that can score models on D_sc. Share it: --shared both or score.",
                code="conflict",
            )
        return super().combine(believed, view)
