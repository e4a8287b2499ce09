"""Whom the server invites, and what it makes of the models it believes: the best one (the paper), or a verified soup.

A selection sees claims and believed models, never a worker or a transport. What it returns is checked by the server.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cbdsl import register
from cbdsl.algorithm.broadcast import EncodedModel, encode_model, relay_upload
from cbdsl.algorithm.messages import NO_BACK_OFF, BackOff, ServerState, Upload, WorkerId
from cbdsl.algorithm.verification import MEMORISED, UNTRAINABLE, Verifier
from cbdsl.arrays import Floats
from cbdsl.codecs.envelope import Codecs
from cbdsl.errors import UserError

NO_GAIN = "it does not beat the global best"
NOT_USED = "it is not in the soup"
WORSENS = "the global model would get worse on the private hold-out"
COPIED = "hardly more than a copy of the global model or of another upload"
HARMFUL = "the new global model is better without it on the private hold-out"
FAR = "its weights are far from everything that training makes of the global model"
OPPOSED = "it undoes what the shared training set teaches"
EQUAL = "another upload of the round says the same"
LEFT_OUT = "the others of the round do far better together on the private hold-out"
CAUSES = frozenset(
    {COPIED, FAR, HARMFUL, OPPOSED, MEMORISED, UNTRAINABLE}
)  # whoever is declined for one of these has to wait


@dataclass(frozen=True)
class Candidate:
    """A claim that may be invited."""

    worker: WorkerId
    score: float


@dataclass(frozen=True, eq=False)
class VerifiedUpload:
    """An upload that the server believes, in the order in which they came."""

    worker: WorkerId
    claimed: float
    model: Floats  # (D,)
    upload: Upload | None = None  # as it came


@dataclass(frozen=True, eq=False)
class RoundContext:
    """What a selection may look at: the server before the round, the round's number, how models are measured."""

    state: ServerState  # before the round: w^g is `state.global_best` (D,), F^g is `state.global_score`
    round: int
    verifier: Verifier  # `verifier.score(model)` is F of a model (D,) on D_sc; it is none where there is no D_sc
    codecs: Codecs = field(default_factory=Codecs)  # how models travel; `encode_model` uses them

    def packed(self, model: Floats, sender: VerifiedUpload | None = None) -> EncodedModel:
        """A model (D,) as workers will have it (`.model`: measure that), and the bytes that take it there (`.update`).

        sender: whose upload it is, if it is one as it came.
        """
        relay = sender and sender.upload is not None and relay_upload(model, sender.upload, self.state, self.codecs)
        return relay or encode_model(model, self.state, self.codecs, self.verifier.score)

    def standing(self, model: Floats, score: float) -> float:
        """F^g of a new w^g: its score on D_sc or, with a guard, its private loss if that is higher.

        D_sc is public: were F^g a score that was learned by heart, no honest claim would ever beat it.
        """
        loss = self.verifier.loss
        return score if loss is None else max(score, loss(model, self.round))


@dataclass(frozen=True, eq=False)
class SelectionResult:
    """The new w^g and F^g, if there are any, and why believed models are not in it."""

    model: Floats | None = None  # (D,); none: w^g is kept
    score: float = np.inf  # the new F^g
    declined: Mapping[WorkerId, str] = field(default_factory=dict)  # by worker: why its model is not in it
    memory: Floats | None = None  # what the server is to remember from now on, such as momentum; none: no change
    packed: EncodedModel | None = None  # the model as `View.packed` made it, if that is what was scored


class Selection(ABC):
    """Whom to invite, and what to make of what was believed."""

    most: int = 1  # how many models it may combine in a round; the cap on invitations leaves room for so many

    @abstractmethod
    def invite(
        self, waiting: Sequence[Candidate], believed: Sequence[VerifiedUpload], view: RoundContext
    ) -> WorkerId | None:
        """The next worker to invite, one of those waiting (best first, backed-off ones last); none: enough."""

    def objection(self, upload: VerifiedUpload, believed: Sequence[VerifiedUpload], view: RoundContext) -> str:
        """Why a true upload is of no use, or an empty string; nobody is banned for it. Here: what the guard doubts."""
        del believed
        return doubt(upload, view)

    @abstractmethod
    def combine(self, believed: Sequence[VerifiedUpload], view: RoundContext) -> SelectionResult:
        """The new global model from at least one believed upload."""


@register.selection("best")
class Best(Selection):
    """The paper's: the best claimant that beats F^g is w^g, as soon as it is believed (Eq. 7)."""

    def invite(
        self, waiting: Sequence[Candidate], believed: Sequence[VerifiedUpload], view: RoundContext
    ) -> WorkerId | None:
        """The best claim left, if it beats F^g; if nobody does, w^g is kept (Algorithm 1, line 10)."""
        if believed:
            return None
        return next((one.worker for one in waiting if one.score < view.state.global_score), None)

    def objection(self, upload: VerifiedUpload, believed: Sequence[VerifiedUpload], view: RoundContext) -> str:
        """With a guard, w^g may not get worse on the private hold-out."""
        del believed
        worsens = view.verifier.worsens
        worse = worsens is not None and worsens(view.state.global_best, upload.model, view.round)
        return doubt(upload, view) or (WORSENS if worse else "")

    def combine(self, believed: Sequence[VerifiedUpload], view: RoundContext) -> SelectionResult:
        """F^g is the claim, not the server's measurement, so that its holder does not beat it by rounding.

        An upload that has to be packed again, because it belongs to an older w^g, is another model afterwards.
        """
        best, score = believed[0], view.verifier.score
        made = view.packed(best.model, best)
        if score is None or made.model is best.model:
            return SelectionResult(made.model, view.standing(made.model, best.claimed), packed=made)
        found = score(made.model)
        if found < view.state.global_score:
            return SelectionResult(made.model, view.standing(made.model, found), packed=made)
        return SelectionResult(declined={best.worker: NO_GAIN})


@register.selection("soup")
@dataclass(frozen=True)
class Soup(Selection):
    """A verified average: the K best are invited whether they beat F^g or not; their average may beat it all the same.

    Models join greedily (Wortsman et al. 2022). An average that would make w^g worse on the private hold-out is tried
    again without the model that does worst there.
    """

    k: int = 3

    def __post_init__(self) -> None:
        if self.k < 2:
            raise UserError(f"A soup has at least 2 ingredients; given selection.k={self.k}. One is --select best.")

    @property
    def most(self) -> int:  # type: ignore[override]
        """K."""
        return self.k

    def invite(
        self, waiting: Sequence[Candidate], believed: Sequence[VerifiedUpload], view: RoundContext
    ) -> WorkerId | None:
        """The best claim left, until K are believed."""
        del view
        return waiting[0].worker if waiting and len(believed) < self.k else None

    def objection(self, upload: VerifiedUpload, believed: Sequence[VerifiedUpload], view: RoundContext) -> str:
        """Copies of w^g, or of another upload, take no place in it."""
        copies, others = view.verifier.copies, [one.model for one in believed]
        copied = copies is not None and copies(view.state.global_best, others, upload.model, view.round)
        return doubt(upload, view) or (COPIED if copied else "")

    def combine(self, believed: Sequence[VerifiedUpload], view: RoundContext) -> SelectionResult:
        """A soup that beats w^g, if there is one."""
        score, worsens, current = view.verifier.score, view.verifier.worsens, view.state.global_best
        if score is None:
            raise UserError("A soup needs a server that can score models on D_sc. Share it: --shared both or score.")
        left = {one.worker: one.model for one in believed}
        declined: dict[WorkerId, str] = {}
        while left:
            workers, models = list(left), list(left.values())
            average, found, used = greedy_soup(models, score)
            if not found < view.state.global_score:  # w^g costs no upload: what does not beat it may still improve it
                average, found, used = greedy_soup([current, *models], score)
                used = [index - 1 for index in used[1:]]
            alone = next((one for one in believed if one.model is average), None)
            made = view.packed(average, alone)
            if made.model is not average:
                found = score(made.model)
            if not (used and found < view.state.global_score):
                return SelectionResult(declined=declined | dict.fromkeys(workers, NO_GAIN))
            if worsens is None or not worsens(current, made.model, view.round):
                unused = set(workers) - {workers[index] for index in used}
                standing = view.standing(made.model, found)
                return SelectionResult(made.model, standing, declined | dict.fromkeys(unused, NOT_USED), packed=made)
            worst = workers[0]
            for worker in workers[1:]:
                worst = worker if worsens(left[worst], left[worker], view.round) else worst
            declined[worst] = WORSENS
            del left[worst]
        return SelectionResult(declined=declined)


def doubt(upload: VerifiedUpload, view: RoundContext) -> str:
    """What the guard, if there is one, has against an upload without a proof."""
    doubts = view.verifier.doubt
    return doubts(view.state.global_best, upload.model, view.round) if doubts else ""


def waiting_list(
    scores: Mapping[WorkerId, float],
    back_offs: Mapping[WorkerId, BackOff],
    last_uploaded: Mapping[WorkerId, float],
    round_number: int,
) -> list[Candidate]:
    """Claims in the order of invitation: best score first, equal scores by number, once-silent workers last.

    Left out: workers that are passed over for their silence, and claims whose model was uploaded before.
    """
    waiting = [
        (back_offs.get(worker, NO_BACK_OFF).times, score, worker)
        for worker, score in scores.items()
        if back_offs.get(worker, NO_BACK_OFF).until < round_number and last_uploaded.get(worker) != score
    ]
    return [Candidate(worker, score) for _, score, worker in sorted(waiting)]


def greedy_soup(models: Sequence[Floats], score: Callable[[Floats], float]) -> tuple[Floats, float, list[int]]:
    """Average models greedily: one joins only if the average's score falls.

    models: best first. Returns the average, its score and which models are in it.
    """
    total, used = models[0].astype(np.float64), [0]
    best, best_score = models[0], score(models[0])
    for index, model in enumerate(models[1:], 1):
        average = ((total + model) / (len(used) + 1)).astype(np.float32)
        found = score(average)
        if found < best_score:
            total, best, best_score = total + model, average, found
            used.append(index)
    return best, best_score, used
