"""One attacker on a device: what it claims and uploads in place of an honest worker."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cbdsl.algorithm.methods import Method
from cbdsl.algorithm.worker import (
    TrainingSet,
)
from cbdsl.arrays import Floats, Indices
from cbdsl.attacks.adversary import Adversary, PublicData
from cbdsl.attacks.base import AttackContext, make_attack
from cbdsl.codecs.envelope import codecs_of
from cbdsl.engines.base import Engine
from cbdsl.errors import UserError
from cbdsl.network.worker_state import Assignment


class AttackerAdapter:
    """What one attacker makes of what an honest worker in its place would say and send."""

    def __init__(
        self,
        attack: str,
        number: int,
        assignment: Assignment,
        method: Method,
        engine: Engine,
        honest: TrainingSet,
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

    def lesson(self) -> TrainingSet:
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

    def _situation(self, model: Floats, score: float, round_number: int, received: Floats) -> AttackContext:
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
