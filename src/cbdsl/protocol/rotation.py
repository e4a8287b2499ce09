"""Verified rotation: K workers in turn, each upload checked as any other, averaged with momentum at the server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cbdsl import register
from cbdsl.arrays import Bools, Doubles, Floats
from cbdsl.protocol.aggregators import trimmed
from cbdsl.protocol.messages import WorkerId
from cbdsl.protocol.selection import (
    COPIED,
    EQUAL,
    FAR,
    HARMFUL,
    OPPOSED,
    Believed,
    Candidate,
    Combined,
    Selection,
    View,
    doubt,
)

_IDLE = 0.1  # of the usual length: nobody has worked for so short a step
_SAME = 0.25  # of the usual length: nobody has worked for so small a difference
_JUMP = 2.0  # the usual length changes by this factor at most from round to round
_HARM = 0.01  # leaving an upload out lowers the private loss by this share: it does harm
_NOISE = 0.05  # a step whose cosine with the others is smaller is noise; or 3 / sqrt(D), if that is less
_MANY = 30.0  # of the server's own steps: honest ones had up to 11
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

    def invite(self, waiting: Sequence[Candidate], believed: Sequence[Believed], view: View) -> WorkerId | None:
        """The next in turn, until K are believed."""
        if not waiting or len(believed) >= self.k:
            return None
        able = [one.worker for one in waiting]
        known = [*able, *view.state.last_uploaded, *(one.worker for one in believed)]
        first, places = (view.round - 1) * self.k, max(known) + 1
        return min(able, key=lambda worker: (worker - first) % places)

    def objection(self, upload: Believed, believed: Sequence[Believed], view: View) -> str:
        """What the guard doubts, what goes against the server's own step, and what is far from w^g."""
        del believed
        agreement = view.verifier.agreement
        opposed = agreement is not None and agreement(view.state.global_best, upload.model, view.round) < _AGAINST
        return doubt(upload, view) or (OPPOSED if opposed else FAR if is_far(upload.model, view) else "")

    def combine(self, believed: Sequence[Believed], view: View) -> Combined:
        """The new w^g; the server remembers the momentum and, last, the usual length."""
        current = view.state.global_best.astype(np.float64)
        memory = view.state.memory.astype(np.float64)
        steps = np.stack([one.model for one in believed]) - current
        lengths = np.linalg.norm(steps, axis=1)
        noise = is_noise(steps)
        usual, long = usual_lengths(lengths if noise.all() else lengths[~noise], memory[-1] if len(memory) else 0.0)
        directions = steps / np.maximum(lengths, 1e-30)[:, None]
        before = self.momentum * memory[:-1] if len(memory) else np.zeros_like(current)

        def momentum(used: Sequence[int], length: float) -> Doubles:
            chosen = directions[used]
            return before + length * (trimmed(chosen, self.trim) if self.trim else chosen.mean(0))

        def private(used: Sequence[int], length: float) -> float:
            return loss((current + momentum(used, length)).astype(np.float32), view.round) if loss else np.inf

        working = [place for place in range(len(steps)) if not noise[place] and lengths[place] >= _IDLE * usual]
        used = distinct(directions, working, _SAME)
        reasons = dict.fromkeys(range(len(believed)), COPIED) | dict.fromkeys(working, EQUAL)
        loss = view.verifier.loss
        if loss is not None and used:
            reasons |= dict.fromkeys(used, HARMFUL)
            used = harmless(used, lambda some: private(some, usual), least=max(1, self.k // 4))
        declined = {believed[place].worker: reason for place, reason in reasons.items() if place not in used}
        if not used:
            return Combined(declined=declined)
        length = min((usual, long), key=lambda one: private(used, one))  # usual, if they are equal
        step = momentum(used, length)
        made = view.packed((current + step).astype(np.float32))
        score = view.verifier.score(made.model) if view.verifier.score else np.inf
        remembered = np.append(step, length).astype(np.float32)
        return Combined(made.model, float(score), declined, remembered, made)


def is_far(model: Floats, view: View) -> bool:
    """Whether an upload's step is longer than w^g itself, and than many of the server's own steps on D_tr.

    So is a model with other weights for the same function, permuted or rescaled. Half of a round's uploads may be
    attackers', by chance, so the others' lengths do not tell.
    """
    stretch, current = view.verifier.stretch, view.state.global_best
    if stretch is None or stretch(current, model, view.round) <= _MANY:
        return False
    return bool(np.linalg.norm(model - current.astype(np.float64)) > np.linalg.norm(current.astype(np.float64)))


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


def usual_lengths(lengths: Doubles, last: float) -> Doubles:
    """The median and the upper quartile, (2,), within a factor of the last length that was used.

    Half of a round's uploads may be attackers', by chance: short steps among them shrink the median.
    """
    found = np.quantile(lengths, (0.5, 0.75))
    return np.clip(found, last / _JUMP, last * _JUMP) if last > 0 else found


def distinct(steps: Doubles, working: Sequence[int], near: float) -> list[int]:
    """Those among the working that are not near an earlier one: no one knows who copied whom, so they share a place."""
    kept: list[int] = []
    for place in working:
        if all(np.linalg.norm(steps[place] - steps[other]) >= near for other in kept):
            kept.append(place)
    return kept


def harmless(everyone: Sequence[int], loss: Callable[[Sequence[int]], float], least: int) -> list[int]:
    """Those that do no harm: as long as a loss falls by a share when one is left out, the worst one is.

    loss: of a group; NaN is the worst of all. At least so many stay.
    """

    def found(some: Sequence[int]) -> float:
        value = loss(some)
        return np.inf if np.isnan(value) else value

    left, now = list(everyone), found(everyone)
    while len(left) > least:
        without = {one: found([other for other in left if other != one]) for one in left}
        worst = min(without, key=without.__getitem__)
        if now <= without[worst] / (1 - _HARM):
            break
        left.remove(worst)
        now = without[worst]
    return left
