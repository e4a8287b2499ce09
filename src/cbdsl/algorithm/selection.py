"""Selections: which workers the server invites, and what it makes of verified uploads. `best`, the paper's.

A selection sees claims and verified uploads. The server checks what it returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from cbdsl import register
from cbdsl.algorithm.broadcast import EncodedModel, encode_model, relay_upload
from cbdsl.algorithm.messages import NO_BACK_OFF, BackOff, ServerState, Upload, WorkerId
from cbdsl.algorithm.verification import IMPRECISE, MEMORISED, UNTRAINABLE, Verifier
from cbdsl.arrays import Floats
from cbdsl.codecs.envelope import Codecs
from cbdsl.errors import UserError, renamed

NO_GAIN = "it does not beat the global best"
WORSENS = "the global model would get worse on the private hold-out"
COPIED = "hardly more than a copy of the global model or of another upload"
UNWEIGHTED = "the mixture does better without it on the private hold-out"
CAUSES = frozenset({COPIED, IMPRECISE, MEMORISED, UNTRAINABLE})  # these lead to a back-off


@dataclass(frozen=True)
class Candidate:
    """A claim whose worker may be invited.

    >>> min([Candidate(3, 0.5), Candidate(1, 0.2)], key=lambda one: one.score).worker
    1
    """

    worker: WorkerId
    score: float


@dataclass(frozen=True, eq=False)
class VerifiedUpload:
    """An upload whose claim the server has verified.

    >>> VerifiedUpload(worker=3, claimed=0.2, model=np.zeros(2, np.float32)).worker
    3
    """

    worker: WorkerId
    claimed: float  # the score that the worker claimed, or the one that the server measured if that is higher
    model: Floats  # (D,)
    upload: Upload | None = None  # as it was received


@dataclass(frozen=True, eq=False)
class RoundContext:
    """What a selection may use: the server's state before the round, the round's number, and the verifier.

    >>> state = ServerState(0, np.zeros(2, np.float32), 1.5)
    >>> RoundContext(state, 1, Verifier(check=None)).state.global_score
    1.5
    """

    state: ServerState  # before the round: w^g is `state.global_best` (D,), F^g is `state.global_score`
    round: int
    verifier: Verifier  # `verifier.score(model)` is F of a model (D,) on D_sc; None where there is no D_sc
    codecs: Codecs = field(default_factory=Codecs)  # how models travel; `encode_model` uses them
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))  # a stream of its own per round

    def encode(self, model: Floats, sender: VerifiedUpload | None = None) -> EncodedModel:
        """Return a model (D,) as workers will have it (`.model`: score that), and its encoding (`.update`).

        sender: the upload that contains this model unchanged, if there is one.
        """
        relay = sender and sender.upload is not None and relay_upload(model, sender.upload, self.state, self.codecs)
        return relay or encode_model(model, self.state, self.codecs, self.verifier.score)

    packed = renamed("packed", encode)  # the old name, until 1.0

    def standing(self, model: Floats, score: float) -> float:
        """Return F^g of a new w^g: its score on D_sc or, with a guard, its private loss if that is higher.

        D_sc is public. If F^g were the score of a model that memorised it, no honest claim would ever beat it.
        """
        loss = self.verifier.loss
        return score if loss is None else max(score, loss(model))


@dataclass(frozen=True, eq=False)
class SelectionResult:
    """The new w^g and F^g, if there are any, and why verified uploads were not used.

    >>> SelectionResult(declined={3: "it does not beat the global best"}).model is None
    True
    """

    model: Floats | None = None  # (D,); None: w^g is kept
    score: float = np.inf  # the new F^g
    declined: Mapping[WorkerId, str] = field(default_factory=dict)  # by worker: why its model is not in it
    memory: Floats | None = None  # what the server remembers from now on, such as momentum; None: no change
    packed: EncodedModel | None = None  # from `RoundContext.encode`, if that model was scored


class Selection(ABC):
    """Which workers to invite, and what to make of the verified uploads.

    >>> class First(Selection):
    ...     def invite(self, waiting, believed, view):
    ...         return None if believed or not waiting else waiting[0].worker
    ...     def combine(self, believed, view):
    ...         return SelectionResult(believed[0].model, believed[0].claimed)
    >>> First().invite([Candidate(3, 0.5)], [], None)
    3
    """

    trains: ClassVar[bool] = False  # whether the server trains on D_tr and D_sc itself, with a guard
    most: int = 1  # how many models it may combine in a round; the limit on invitations allows for them

    @abstractmethod
    def invite(
        self, waiting: Sequence[Candidate], believed: Sequence[VerifiedUpload], view: RoundContext
    ) -> WorkerId | None:
        """Return the next worker to invite of those waiting (best first, backed-off ones last), or None to stop."""

    def objection(self, upload: VerifiedUpload, believed: Sequence[VerifiedUpload], view: RoundContext) -> str:
        """Return why a verified upload is of no use, or "". No worker is banned for it. Here: the guard's doubt."""
        del believed
        return find_doubt(upload, view)

    @abstractmethod
    def combine(self, believed: Sequence[VerifiedUpload], view: RoundContext) -> SelectionResult:
        """Return the new global model from at least one verified upload."""


@register.selection("best", family="verified")
class Best(Selection):
    """The paper's: the best claimant that beats F^g becomes w^g, once it is verified (Eq. 7)."""

    def invite(
        self, waiting: Sequence[Candidate], believed: Sequence[VerifiedUpload], view: RoundContext
    ) -> WorkerId | None:
        """Return the best claim left, if it beats F^g; if none does, w^g is kept (Algorithm 1, line 10)."""
        if believed:
            return None
        return next((one.worker for one in waiting if one.score < view.state.global_score), None)

    def objection(self, upload: VerifiedUpload, believed: Sequence[VerifiedUpload], view: RoundContext) -> str:
        """Object, with a guard, to a model that is worse than w^g on the private hold-out."""
        del believed
        worse = view.verifier.worsens(view.state.global_best, upload.model)
        return find_doubt(upload, view) or (WORSENS if worse else "")

    def combine(self, believed: Sequence[VerifiedUpload], view: RoundContext) -> SelectionResult:
        """Return the upload as w^g. F^g is the larger of claim and measurement: no claim can walk it down to 0.

        An upload that has to be packed again, because it belongs to an older w^g, becomes a different model.
        """
        best, score = believed[0], view.verifier.score
        made = view.encode(best.model, best)
        found = best.claimed if score is None or made.model is best.model else score(made.model)
        if found < view.state.global_score:
            return SelectionResult(made.model, view.standing(made.model, found), packed=made)
        return SelectionResult(declined={best.worker: NO_GAIN})


@register.selection("best-mean")
@dataclass(frozen=True)
class BestMean(Selection):
    """LB-DSL's: the mean of the k best claimants' models becomes w^g, if its score on D_sc is below F^g."""

    k: int = 3

    def __post_init__(self) -> None:
        if self.k < 1:
            raise UserError(f"k of best-mean must be at least 1; given {self.k}.", code="out-of-range")

    @property
    def most(self) -> int:  # type: ignore[override]
        """The number of models in the mean."""
        return self.k

    def invite(
        self, waiting: Sequence[Candidate], believed: Sequence[VerifiedUpload], view: RoundContext
    ) -> WorkerId | None:
        """Return the best claimant left, until k are verified, whether it beats F^g or not."""
        del view
        return waiting[0].worker if waiting and len(believed) < self.k else None

    def combine(self, believed: Sequence[VerifiedUpload], view: RoundContext) -> SelectionResult:
        """Return the mean, if it beats F^g; without D_sc its score is the mean of the claims."""
        made = view.encode(np.stack([one.model for one in believed]).mean(0, dtype=np.float64).astype(np.float32))
        score = view.verifier.score
        found = score(made.model) if score else float(np.mean([one.claimed for one in believed]))
        if found < view.state.global_score:
            return SelectionResult(made.model, view.standing(made.model, found), packed=made)
        return SelectionResult(declined={one.worker: NO_GAIN for one in believed})


def find_doubt(upload: VerifiedUpload, view: RoundContext) -> str:
    """Return why the guard distrusts an upload, or "" if it does not or there is no guard."""
    doubts = view.verifier.doubt
    return doubts(view.state.global_best, upload.model, view.round) if doubts else ""


def waiting_list(
    scores: Mapping[WorkerId, float],
    back_offs: Mapping[WorkerId, BackOff],
    last_uploaded: Mapping[WorkerId, float],
    round_number: int,
) -> list[Candidate]:
    """Sort claims for invitation: best score first, equal scores by number, workers that were silent last.

    Left out: workers that are backed off, and claims whose model was uploaded before.
    """
    waiting = [
        (back_offs.get(worker, NO_BACK_OFF).times, score, worker)
        for worker, score in scores.items()
        if back_offs.get(worker, NO_BACK_OFF).until < round_number and last_uploaded.get(worker) != score
    ]
    return [Candidate(worker, score) for _, score, worker in sorted(waiting)]
