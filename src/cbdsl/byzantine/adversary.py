"""The attackers of a simulation: gives an attack what it may know, and keeps what it makes.

Answers for Byzantine workers only; how honest workers move, train and score is the swarm's affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from cbdsl.arrays import Doubles, Floats, Indices, Samples
from cbdsl.byzantine.attacks import Attack, HomeTraining, Situation
from cbdsl.data import Dataset, Split
from cbdsl.data.sources import CUSTOM
from cbdsl.engines.base import Engine, Sgd
from cbdsl.protocol.verification import commitment_of
from cbdsl.rng import stream
from cbdsl.runs.defence import scorer
from cbdsl.spec import LocalSpec, Spec
from cbdsl.workers.batches import batches_of

_CRAFTED: dict[object, tuple[Floats, Floats | None]] = {}
"""The last model made at home, for runs on the same data one after the other; the features keep their identity."""


class Adversary:
    """All Byzantine workers of a run, and the attack they carry out."""

    def __init__(
        self,
        spec: Spec,
        attack: Attack,
        workers: Sequence[int],
        engine: Engine,
        dataset: Dataset,
        split: Split,
        initial: Floats,
    ) -> None:
        """Initial weights: (D,)."""
        self.workers = frozenset(workers)
        self._spec, self._attack, self._engine, self._dataset, self._split = spec, attack, engine, dataset, split
        self._initial = initial
        self._score = scorer(engine, dataset.train, split.shared_scoring)
        self._together: tuple[int, Floats | None] | None = None  # of which round, and what

    @property
    def omniscient(self) -> bool:
        """Whether the attack needs the honest workers' models."""
        return self._attack.omniscient

    def training(self, worker: int, own: Indices) -> Samples | None:
        """What an attacker trains on instead of the samples it holds; none: on those."""
        if worker not in self.workers:
            return None
        rng = stream(self._spec.seed, "attack", worker=worker)
        return self._attack.poison(self._dataset.train.taken(own), self._scoring, self._dataset.classes, rng)

    def claim(self, seen: Situation) -> float:
        """The score that an attacker claims."""
        return self._attack.claim(seen)

    def upload(self, seen: Situation, round_number: int) -> Floats | None:
        """The model that an attacker sends in a round; an omniscient attack sends one for all."""
        if not self._attack.omniscient:
            return self._attack.upload(seen)
        if self._together is None or self._together[0] != round_number:
            self._together = round_number, self._attack.upload(seen)
        return self._together[1]

    def situation(
        self, worker: int, round_number: int, model: Floats, score: float, global_best: Floats,
        honest: Floats | None, honest_scores: Doubles | None,
    ) -> Situation:  # fmt: skip
        """What one attacker knows in a round."""
        return Situation(
            model=model,
            score=score,
            global_best=global_best,
            workers=self._spec.workers,
            attackers=len(self.workers),
            rng=stream(self._spec.seed, "attack", round_number, worker),
            score_of=self._score,
            honest=honest,
            honest_scores=honest_scores,
            crafted=self._crafted,
        )

    @cached_property
    def _scoring(self) -> Samples:
        """D_sc, which every worker has."""
        return self._dataset.train.taken(self._split.shared_scoring)

    @cached_property
    def _crafted(self) -> Floats | None:
        """Made when it is first needed; a resumed run makes the same again."""
        if not self._attack.crafts:
            return None
        if self._spec.model == CUSTOM:  # nothing here tells one architecture from another
            return self._craft()
        features, spec = self._dataset.train.features, self._spec
        known = (id(features), commitment_of(self._initial), self._engine.name)
        key = (*known, spec.model, spec.seed, spec.data, self._attack)
        if key not in _CRAFTED:
            _CRAFTED.clear()
            _CRAFTED[key] = features, self._craft()
        return _CRAFTED[key][1]

    def _craft(self) -> Floats | None:
        rng = stream(self._spec.seed, "attack")
        private = np.concatenate([self._split.shared_scoring, self._split.holdout])
        others = np.setdiff1d(np.arange(len(self._dataset.train), dtype=np.int32), private)
        images = rng.permutation(others)[: self._attack.images]
        home = HomeTraining(
            self._scoring,
            self._dataset.train.taken(images),
            self._dataset.classes,
            self._initial,
            self._fit,
            self._score,
            rng,
        )
        return self._attack.craft(home)

    def _fit(self, weights: Floats, samples: Samples, sgd: Sgd, batch: int, rng: np.random.Generator) -> Floats:
        rows = batches_of(np.arange(len(samples), dtype=np.int32), LocalSpec(batch_size=batch), rng)
        seeds = rng.integers(2**63, size=1).astype(np.uint64)
        trained = self._engine.train(weights[None], samples, rows[None], sgd, seeds)
        return np.asarray(trained[0])
