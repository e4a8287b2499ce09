"""Whom the server invites, and what it makes of the models it gets: the best one (the paper), or a verified soup.

Pure functions of claims and models; the conversation itself is `server`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cbdsl.arrays import Floats


@dataclass(frozen=True)
class Policy:
    """How far a server goes in one round."""

    soup: int = 1  # K: models that may be combined; 1 is the paper's single best
    invitations: int = 0  # at most so many; 0: no limit
    commitment: bool = False  # whether a claim without a digest of its model is set aside


@dataclass(frozen=True)
class BackOff:
    """A worker that was invited in vain: it did not deliver, or nothing but a copy of w^g."""

    times: int  # in a row
    until: int  # the last round in which it is passed over

    def again(self, round_number: int) -> BackOff:
        """One more time: it is passed over for 2, 4, 8 ... rounds."""
        return BackOff(self.times + 1, round_number + 2 ** (self.times + 1))


NO_BACK_OFF = BackOff(0, 0)


def queue(
    scores: Mapping[int, float], back_offs: Mapping[int, BackOff], last_uploaded: Mapping[int, float], round_number: int
) -> list[tuple[float, int]]:
    """Claims in the order of invitation: best score first, equal scores by number, once-silent workers last.

    Left out: workers that are passed over for their silence, and claims whose model was uploaded before.
    """
    waiting = [
        (back_offs.get(worker, NO_BACK_OFF).times, score, worker)
        for worker, score in scores.items()
        if back_offs.get(worker, NO_BACK_OFF).until < round_number and last_uploaded.get(worker) != score
    ]
    return [(score, worker) for _, score, worker in sorted(waiting)]


def soup(models: Sequence[Floats], score: Callable[[Floats], float]) -> tuple[Floats, float, list[int]]:
    """Average models greedily: one joins only if the average's score falls (a greedy soup, Wortsman et al. 2022).

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
