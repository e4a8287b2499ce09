"""Verified rotation: K workers in turn, each upload checked as any other, averaged with momentum at the server."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cbdsl import register
from cbdsl.algorithm.aggregators import trimmed
from cbdsl.algorithm.messages import WorkerId
from cbdsl.algorithm.selection import (
    COPIED,
    EQUAL,
    FAR,
    HARMFUL,
    LEFT_OUT,
    OPPOSED,
    Candidate,
    RoundContext,
    Selection,
    SelectionResult,
    VerifiedUpload,
    doubt,
)
from cbdsl.arrays import Bools, Doubles

_IDLE = 0.1  # of the usual length: nobody has worked for so short a step; nor for half of the server's own
_SAME = 0.25  # of the usual length: nobody has worked for so small a difference
_JUMP = 2.0  # the usual length changes by this factor at most from round to round
_FIRST = 12.0  # of the server's own steps: the usual length of the first round is no longer; honest ones had up to 11
_HARM = 0.01  # leaving an upload out lowers the private loss by this share: it does harm
_NOISE = 0.05  # a step whose cosine with the others is smaller is noise; or 3 / sqrt(D), if that is less
_MANY = 30.0  # of the server's own steps: a model that is farther away than this, and than w^g is from 0, is far
_BETTER = 0.1  # a group whose private loss is lower by this share gets farther than all together
_TOGETHER = 0.2  # a quarter of the steps have this cosine with the others or more: there is a common direction
_FEW = 4  # fewer steps than this have no common direction
_AGAINST = -0.05  # a step with this cosine to the server's own goes against it


@register.selection("rotation")
@dataclass(frozen=True)
class Rotation(Selection):
    """K workers in turn, whatever they claim: m <- momentum m + mean of (w_i - w^g), w^g <- w^g + m.

    All start at w^g, so their steps are comparable: each is brought to the usual length, the median, so that nobody
    outweighs another and a short step is as good as a long one; noise does not count, and equal ones share a place.
    The mean is trimmed weight by weight. With a guard, steps against the server's own on D_tr do not take part,
    those without whom the new w^g does better on the private hold-out are left out, and where the upper quartile of
    lengths does better there than the median, it is taken instead: short steps cannot slow everybody down.
    """

    k: int = 12
    momentum: float = 0.5
    trim: int = 1  # how many of the highest and of the lowest values of each weight do not count

    @property
    def most(self) -> int:  # type: ignore[override]
        """K."""
        return self.k

    def invite(
        self, waiting: Sequence[Candidate], believed: Sequence[VerifiedUpload], view: RoundContext
    ) -> WorkerId | None:
        """The next in turn, until K are believed."""
        if not waiting or len(believed) >= self.k:
            return None
        able = [one.worker for one in waiting]
        known = [*able, *view.state.last_uploaded, *(one.worker for one in believed)]
        first, places = (view.round - 1) * self.k, max(known) + 1
        return min(able, key=lambda worker: (worker - first) % places)

    def objection(self, upload: VerifiedUpload, believed: Sequence[VerifiedUpload], view: RoundContext) -> str:
        """What the guard doubts, what goes against the server's own step, and what is far from w^g."""
        del believed
        found = doubt(upload, view)
        if found or view.verifier.own_step is None:
            return found
        current = view.state.global_best.astype(np.float64)
        step, own = upload.model - current, view.verifier.own_step(view.state.global_best, view.round)
        if cosine(step, own) < _AGAINST:
            return OPPOSED
        length, far = np.linalg.norm(step), _MANY * np.linalg.norm(own)
        return FAR if own.any() and length > far and length > np.linalg.norm(current) else ""

    def combine(self, believed: Sequence[VerifiedUpload], view: RoundContext) -> SelectionResult:
        """The new w^g; the server remembers the momentum and, last, the usual length."""
        current = view.state.global_best.astype(np.float64)
        memory = view.state.memory.astype(np.float64)
        steps = np.stack([one.model for one in believed]) - current
        lengths = np.linalg.norm(steps, axis=1)
        noise = is_noise(steps)
        last = float(memory[-1]) if len(memory) else 0.0
        own_step = view.verifier.own_step
        own = float(np.linalg.norm(own_step(view.state.global_best, view.round))) if own_step else np.inf
        usual, long = usual_lengths(lengths if noise.all() else lengths[~noise], last, _FIRST * own)
        idle = min(_IDLE * usual, own / 2)
        directions = steps / np.maximum(lengths, 1e-30)[:, None]
        before = self.momentum * memory[:-1] if len(memory) else np.zeros_like(current)

        def momentum(used: Sequence[int], length: float) -> Doubles:
            chosen = directions[used]
            return before + length * trimmed(chosen, self.trim) if used else before

        def private(used: Sequence[int], length: float = usual) -> float:
            return loss((current + momentum(used, length)).astype(np.float32), view.round) if loss else np.inf

        working = [place for place in range(len(steps)) if not noise[place] and lengths[place] >= idle]
        used = distinct(directions, working, _SAME)
        reasons = dict.fromkeys(range(len(believed)), COPIED) | dict.fromkeys(working, EQUAL)
        loss = view.verifier.loss
        if loss is not None and used:
            used, others = chosen(used, private, least=max(1, self.k // 4))
            reasons |= others
        declined = {believed[place].worker: reason for place, reason in reasons.items() if place not in used}
        if not used:
            return SelectionResult(declined=declined)
        length = min((usual, long), key=lambda one: private(used, one))  # usual, if they are equal
        step = momentum(used, length)
        made = view.packed((current + step).astype(np.float32))
        score = view.verifier.score(made.model) if view.verifier.score else np.inf
        remembered = np.append(step, length).astype(np.float32)
        return SelectionResult(made.model, float(score), declined, remembered, made)


def cosine(step: Doubles, other: Doubles) -> float:
    """Of the angle between two steps; 0 where either stays where it is."""
    return float(step @ other) / max(math.sqrt((step @ step) * (other @ other)), 1e-300)


def is_noise(steps: Doubles) -> Bools:
    """Which steps have nothing in common with the others, (K,): the cosine with their mean direction is near 0.

    That of noise deviates from 0 by 1 / sqrt(D). Only where the others do have a direction: late in training, on data
    that differ, honest steps have hardly more in common than noise.
    """
    if len(steps) < _FEW:
        return np.zeros(len(steps), bool)
    directions = steps / np.maximum(np.linalg.norm(steps, axis=1, keepdims=True), 1e-30)
    others = directions.sum(0) - directions
    cosines = (directions * others).sum(1) / np.maximum(np.linalg.norm(others, axis=1), 1e-30)
    if np.quantile(cosines, 0.75) < _TOGETHER:
        return np.zeros(len(steps), bool)
    return np.asarray(np.abs(cosines) < min(_NOISE, 3 / np.sqrt(steps.shape[1])))


def usual_lengths(lengths: Doubles, last: float, most: float = np.inf) -> Doubles:
    """The median and the upper quartile, (2,), within a factor of the last length used. most: in the first round.

    Half of a round's uploads may be attackers', by chance: short steps among them shrink the median, long ones stretch
    it.
    """
    found = np.quantile(lengths, (0.5, 0.75))
    return np.clip(found, last / _JUMP, last * _JUMP) if last > 0 else np.minimum(found, most)


def distinct(steps: Doubles, working: Sequence[int], near: float) -> list[int]:
    """Those among the working that are not near an earlier one: no one knows who copied whom, so they share a place."""
    kept: list[int] = []
    for place in working:
        if all(np.linalg.norm(steps[place] - steps[other]) >= near for other in kept):
            kept.append(place)
    return kept


def chosen(
    everyone: Sequence[int], loss: Callable[[Sequence[int]], float], least: int
) -> tuple[list[int], dict[int, str]]:
    """Who makes the new w^g, and why others do not. loss: of a group, nobody is one too; at least so many stay.

    Those that do no harm; or some of them, where these get less than half as far together as they would alone.
    """
    stay, found = harmless(everyone, loss, least)
    reasons = {one: HARMFUL for one in everyone if one not in stay}
    better, best = joined(stay, loss)
    start = loss([])
    if best < (1 - _BETTER) * found and start - found < (start - best) / 2:
        return better, reasons | {one: LEFT_OUT for one in stay if one not in better}
    return stay, reasons


def harmless(everyone: Sequence[int], loss: Callable[[Sequence[int]], float], least: int) -> tuple[list[int], float]:
    """Those that do no harm, and their loss: as long as it falls by a share when one is left out, the worst one is.

    loss: of a group; NaN is the worst of all. At least so many stay.
    """
    left, now = list(everyone), known(loss(everyone))
    while len(left) > least:
        without = {one: known(loss([other for other in left if other != one])) for one in left}
        worst = min(without, key=without.__getitem__)
        if now <= without[worst] / (1 - _HARM):
            break
        left.remove(worst)
        now = without[worst]
    return left, now


def joined(everyone: Sequence[int], loss: Callable[[Sequence[int]], float]) -> tuple[list[int], float]:
    """A group that grows from nobody, and its loss: the best next one joins as long as the loss falls.

    Attackers who hold each other in balance cannot be left out one by one; but neither can they join one by one.
    """
    group, now = list[int](), np.inf
    while len(group) < len(everyone):
        with_one = {one: known(loss([*group, one])) for one in everyone if one not in group}
        best = min(with_one, key=with_one.__getitem__)
        if not with_one[best] < now:
            break
        group.append(best)
        now = with_one[best]
    return group, now


def known(loss: float) -> float:
    """A loss; infinite where it is not a number."""
    return np.inf if np.isnan(loss) else loss
