"""A worker that attacks, for tests of a deployment: the attacks of `cbdsl.byzantine` on one device."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from cbdsl.arrays import Floats, Indices
from cbdsl.byzantine.adversary import Adversary, PublicData
from cbdsl.byzantine.attack import Situation, make_attack
from cbdsl.codecs.travel import codecs_of
from cbdsl.engines.base import Engine
from cbdsl.errors import UserError
from cbdsl.methods.base import Method
from cbdsl.workers.local import Lesson

if TYPE_CHECKING:
    from cbdsl.deploy.particle import Assignment


class Liar:
    """What one attacker makes of what an honest worker in its place would say and send."""

    def __init__(
        self,
        attack: str,
        number: int,
        assignment: Assignment,
        method: Method,
        engine: Engine,
        honest: Lesson,
        scoring: Indices,
    ) -> None:
        """honest: what an honest worker in its place trains on. scoring: D_sc, from the same pool."""
        spec, samples = assignment.spec, honest.samples
        self._number, self._engine, self._spec, self._method = number, engine, spec, method
        self._honest, self._network = honest, assignment.architecture
        self._attack = make_attack(replace(spec, attack=replace(spec.attack, name=attack)))
        if self._attack.omniscient:
            raise UserError(f"The attack '{attack}' needs all workers' models; only the simulator has them.")
        others = np.setdiff1d(np.arange(len(samples), dtype=np.int32), scoring)
        self._public = PublicData(samples, scoring, others, assignment.classes)
        self._adversary = self._at(np.zeros(engine.size, np.float32))

    def lesson(self) -> Lesson:
        """What it trains on."""
        return self._adversary.poisoned().get(self._number, self._honest)

    def start(self, position: Floats) -> None:
        """Where learning starts, (D,): a model made at home is trained from there."""
        self._adversary = self._at(position)

    def claim(self, model: Floats, score: float, round_number: int, received: Floats) -> float:
        """The score it claims."""
        return self._adversary.claim(self._situation(model, score, round_number, received))

    def model(self, model: Floats, score: float, round_number: int, received: Floats) -> Floats | None:
        """What it uploads; none: it stays silent."""
        return self._adversary.upload(self._situation(model, score, round_number, received), round_number)

    def _situation(self, model: Floats, score: float, round_number: int, received: Floats) -> Situation:
        return self._adversary.situation(self._number, round_number, model, score, received, None, None)

    def _at(self, initial: Floats) -> Adversary:
        return Adversary(
            self._attack,
            (self._number,),
            self._public,
            held={self._number: self._honest.indices},
            engine=self._engine,
            initial=initial,
            seed=self._spec.seed,
            swarm_size=self._spec.workers,
            vectors=self._method.vectors,
            codec=codecs_of(self._spec).up,
            network=self._network,
        )
