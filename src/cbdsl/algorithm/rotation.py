"""The selection `rotation`: K workers in turn, each upload verified, averaged with momentum at the server."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cbdsl import register
from cbdsl.algorithm.aggregators import trimmed_mean_of
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
    find_doubt,
)
from cbdsl.arrays import Bools, Doubles, dot, norm

_IDLE_LENGTH = 0.1  # of the usual length: a shorter step took no work; nor did half of the server's own
_SAME_DISTANCE = 0.25  # of the usual length: a smaller difference to another step took no work
_LENGTH_FACTOR = 2.0  # the usual length changes by this factor at most from round to round
_FIRST_LENGTH = 12.0  # of the server's own steps: the most in the first round; honest workers had up to 11
_HARMFUL_SHARE = 0.01  # leaving an upload out lowers the private loss by this share: it does harm
_NOISE_COSINE = 0.05  # a step whose cosine with the others is smaller is noise; or 3 / sqrt(D), if that is less
_FAR_LENGTH = 30.0  # of the server's own steps: a model that is farther away than this, and than w^g is from 0, is far
_BETTER_SHARE = 0.1  # a group whose private loss is lower by this share gets farther than all together
_COMMON_COSINE = 0.2  # a quarter of the steps have this cosine with the others or more: there is a common direction
_FEWEST_STEPS = 4  # fewer steps than this have no common direction
_OPPOSED_COSINE = -0.05  # a step with this cosine to the server's own goes against it


@register.selection("rotation")
@dataclass(frozen=True)
class Rotation(Selection):
    """K workers in turn, whatever they claim: m <- momentum m + mean of (w_i - w^g), w^g <- w^g + m.

    All start at w^g, so their steps are comparable: each is scaled to the usual length, the median, so that no step
    outweighs another. Noise does not count, and equal steps count once. The mean is trimmed weight by weight. With a
    guard, steps against the server's own on D_tr do not take part, and steps without which the new w^g does better on
    the private hold-out are left out. Where the upper quartile of lengths does better there than the median, it is
    taken instead: short steps cannot slow the others down.
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
        """Return the next in turn, until K are verified."""
        if not waiting or len(believed) >= self.k:
            return None
        able = [one.worker for one in waiting]
        known = [*able, *view.state.last_uploaded, *(one.worker for one in believed)]
        first, places = (view.round - 1) * self.k, max(known) + 1
        return min(able, key=lambda worker: (worker - first) % places)

    def objection(self, upload: VerifiedUpload, believed: Sequence[VerifiedUpload], view: RoundContext) -> str:
        """Object to what the guard doubts, what goes against the server's own step, and what is far from w^g."""
        del believed
        found = find_doubt(upload, view)
        if found or view.verifier.own_step is None:
            return found
        current = view.state.global_best.astype(np.float64)
        step, own = upload.model - current, view.verifier.own_step(view.state.global_best, view.round)
        if cosine(step, own) < _OPPOSED_COSINE:
            return OPPOSED
        length, far = norm(step), _FAR_LENGTH * norm(own)
        return FAR if own.any() and length > far and length > norm(current) else ""

    def combine(self, believed: Sequence[VerifiedUpload], view: RoundContext) -> SelectionResult:
        """Return the new w^g; the server remembers the momentum and, as the last number, the usual length."""
        current = view.state.global_best.astype(np.float64)
        memory = view.state.memory.astype(np.float64)
        steps = np.stack([one.model for one in believed]) - current
        lengths = np.linalg.norm(steps, axis=1)
        noise = is_noise(steps)
        last = float(memory[-1]) if len(memory) else 0.0
        own_step = view.verifier.own_step
        own = norm(own_step(view.state.global_best, view.round)) if own_step else np.inf
        usual, long = usual_lengths(lengths if noise.all() else lengths[~noise], last, _FIRST_LENGTH * own)
        idle = min(_IDLE_LENGTH * usual, own / 2)
        directions = steps / np.maximum(lengths, 1e-30)[:, None]
        before = self.momentum * memory[:-1] if len(memory) else np.zeros_like(current)

        def momentum(used: Sequence[int], length: float) -> Doubles:
            return before + length * trimmed_mean_of(directions[used], self.trim) if used else before

        def private(used: Sequence[int], length: float = usual) -> float:
            return loss((current + momentum(used, length)).astype(np.float32), view.round) if loss else np.inf

        working = [place for place in range(len(steps)) if not noise[place] and lengths[place] >= idle]
        used = drop_near(directions, working, _SAME_DISTANCE)
        reasons = dict.fromkeys(range(len(believed)), COPIED) | dict.fromkeys(working, EQUAL)
        loss = view.verifier.loss
        if loss is not None and used:
            used, others = choose_group(used, private, least=max(1, self.k // 4))
            reasons |= others
        declined = {believed[place].worker: reason for place, reason in reasons.items() if place not in used}
        if not used:
            return SelectionResult(declined=declined)
        length = min((usual, long), key=lambda one: private(used, one))  # usual, if they are equal
        step = momentum(used, length)
        made = view.encode((current + step).astype(np.float32))
        score = view.verifier.score(made.model) if view.verifier.score else np.inf
        remembered = np.append(step, length).astype(np.float32)
        return SelectionResult(made.model, float(score), declined, remembered, made)


def cosine(step: Doubles, other: Doubles) -> float:
    """Return the cosine of the angle between two steps; 0 if either is 0."""
    return dot(step, other) / max(math.sqrt(dot(step, step) * dot(other, other)), 1e-300)


def is_noise(steps: Doubles) -> Bools:
    """Return which steps have nothing in common with the others, (K,): the cosine with their mean is near 0.

    That of noise deviates from 0 by 1 / sqrt(D). Only where the others have a direction: late in training, on data
    that differ, honest steps have hardly more in common than noise.
    """
    if len(steps) < _FEWEST_STEPS:
        return np.zeros(len(steps), bool)
    directions = steps / np.maximum(np.linalg.norm(steps, axis=1, keepdims=True), 1e-30)
    others = directions.sum(0) - directions
    cosines = (directions * others).sum(1) / np.maximum(np.linalg.norm(others, axis=1), 1e-30)
    if np.quantile(cosines, 0.75) < _COMMON_COSINE:
        return np.zeros(len(steps), bool)
    return np.asarray(np.abs(cosines) < min(_NOISE_COSINE, 3 / np.sqrt(steps.shape[1])))


def usual_lengths(lengths: Doubles, last: float, most: float = np.inf) -> Doubles:
    """Return median and upper quartile, (2,), within a factor of the last length used. most: in the first round.

    Half of a round's uploads may be attackers', by chance, and their short or long steps would move the median.
    """
    found = np.quantile(lengths, (0.5, 0.75))
    return np.clip(found, last / _LENGTH_FACTOR, last * _LENGTH_FACTOR) if last > 0 else np.minimum(found, most)


def drop_near(steps: Doubles, working: Sequence[int], near: float) -> list[int]:
    """Keep of steps that are near each other the first: who copied whom cannot be known, so they count once."""
    kept: list[int] = []
    for place in working:
        if all(norm(steps[place] - steps[other]) >= near for other in kept):
            kept.append(place)
    return kept


def choose_group(
    everyone: Sequence[int], loss: Callable[[Sequence[int]], float], least: int
) -> tuple[list[int], dict[int, str]]:
    """Return which uploads make the new w^g, and why others do not. loss: of a group, which may be empty.

    Those that do no harm, at least `least`; or some of them, if all together get less than half as far as these.
    """
    stay, found = drop_harmful(everyone, loss, least)
    reasons = {one: HARMFUL for one in everyone if one not in stay}
    better, best = grow_group(stay, loss)
    start = loss([])
    if best < (1 - _BETTER_SHARE) * found and start - found < (start - best) / 2:
        return better, reasons | {one: LEFT_OUT for one in stay if one not in better}
    return stay, reasons


def drop_harmful(
    everyone: Sequence[int], loss: Callable[[Sequence[int]], float], least: int
) -> tuple[list[int], float]:
    """Leave out the worst upload as long as the loss falls by a share; return the others, and their loss.

    loss: of a group; NaN is the worst of all. least: how many stay in any case.
    """
    left, now = list(everyone), finite_loss(loss(everyone))
    while len(left) > least:
        without = {one: finite_loss(loss([other for other in left if other != one])) for one in left}
        worst = min(without, key=without.__getitem__)
        if now <= without[worst] / (1 - _HARMFUL_SHARE):
            break
        left.remove(worst)
        now = without[worst]
    return left, now


def grow_group(everyone: Sequence[int], loss: Callable[[Sequence[int]], float]) -> tuple[list[int], float]:
    """Grow a group from none: the best next one joins as long as the loss falls; return it, and its loss.

    Attackers that balance each other cannot be left out one by one; but neither can they join one by one.
    """
    group, now = list[int](), np.inf
    while len(group) < len(everyone):
        with_one = {one: finite_loss(loss([*group, one])) for one in everyone if one not in group}
        best = min(with_one, key=with_one.__getitem__)
        if not with_one[best] < now:
            break
        group.append(best)
        now = with_one[best]
    return group, now


def finite_loss(loss: float) -> float:
    """Return a loss, infinite if it is NaN."""
    return np.inf if np.isnan(loss) else loss
