"""The attackers of a swarm: gives an attack what it may know, and keeps what it makes.

Answers for Byzantine workers only; how honest workers move, train and score is the swarm's affair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real

import numpy as np

from cbdsl.algorithm.messages import commitment_of
from cbdsl.algorithm.worker import TrainingSet, batches_of, encode_content, make_scorer
from cbdsl.arrays import Doubles, Floats, Indices, Samples
from cbdsl.attacks.base import Attack, AttackContext, AttackPreparation
from cbdsl.codecs.base import Codec
from cbdsl.engines.base import Engine, Sgd
from cbdsl.errors import UserError, shown
from cbdsl.models.architecture import Architecture
from cbdsl.rng import stream
from cbdsl.spec import LocalSpec

_CRAFTED: dict[object, tuple[Floats, Floats | None]] = {}
"""The last model made at home, for runs on the same data one after the other; the features keep their identity."""


@dataclass(frozen=True, eq=False)
class PublicData:
    """What any worker can get hold of."""

    samples: Samples
    scoring: Indices  # D_sc
    others: Indices  # samples that are neither in D_sc nor in the server's hold-out
    classes: int


class Adversary:
    """All Byzantine workers of a run, and the attack they carry out."""

    def __init__(  # noqa: PLR0913 - all but the first three by name
        self,
        attack: Attack,
        workers: Sequence[int],
        public: PublicData,
        *,
        held: Mapping[int, Indices],
        engine: Engine,
        initial: Floats,
        seed: int,
        swarm_size: int,
        vectors: int = 1,
        codec: Codec,
        network: Architecture | None = None,
        craft_key: object = None,
    ) -> None:
        """Initial weights: (D,). vectors: how many of them a message carries. codec: how workers send models.

        held: what attackers would train on if they were honest, worker -> indices. network: none if it is unknown.

        craft_key: equal for runs whose network is the same, so that a model made at home serves them all; none: it is
        made anew.
        """
        self.workers = frozenset(workers)
        self._attack, self._public, self._engine, self._initial = attack, public, engine, initial
        self._held = {worker: own for worker, own in held.items() if worker in self.workers}
        self._network = network
        self._seed, self._swarm_size, self._vectors, self._craft_key = seed, swarm_size, vectors, craft_key
        self._codec = codec
        self._score = make_scorer(engine, public.samples, public.scoring)
        self._together: tuple[int, Floats | None] | None = None  # of which round, and what

    @property
    def omniscient(self) -> bool:
        """Whether the attack needs the honest workers' models."""
        return self._attack.omniscient

    def poisoned(self) -> dict[int, TrainingSet]:
        """What attackers train on instead of what they hold; nobody else is in the answer."""
        parts: dict[int, Samples] = {}
        for worker, own in self._held.items():
            rng = stream(self._seed, "attack", worker=worker)
            data = self._public.samples.taken(own)
            poison = self._attack.poison(data, self._scoring, self._public.classes, rng)
            if poison is not None:
                parts[worker] = poison
        if not parts:
            return {}
        pool, ends = Samples.joined(list(parts.values())), np.cumsum([0, *map(len, parts.values())])
        return {
            worker: TrainingSet(pool, np.arange(first, last, dtype=np.int32))
            for worker, first, last in zip(parts, ends, ends[1:], strict=False)
        }

    def claim(self, seen: AttackContext) -> float:
        """The score that an attacker claims; an error if it is no number."""
        claimed = self._attack.claim(seen)
        if not _are_numbers(claimed, ()):
            raise self._nonsense("claims", claimed, "A claim is one number, finite or not, such as seen.score")
        return claimed

    def upload(self, seen: AttackContext, round_number: int) -> Floats | None:
        """What an attacker sends in a round; an omniscient attack sends one for all. An error if it is no model."""
        if not self._attack.omniscient:
            return self._uploaded(seen)
        if self._together is None or self._together[0] != round_number:
            self._together = round_number, self._uploaded(seen)
        return self._together[1]

    def _uploaded(self, seen: AttackContext) -> Floats | None:
        """A server leaves out what is no model, so that a mistake in an attack would pass for its harmlessness."""
        sent = self._attack.upload(seen)
        if sent is not None and not _are_numbers(sent, seen.model.shape):
            shape = seen.model.shape
            allowed = f"An upload is a model, here an array of shape {shape}, finite or not, or None to stay silent"
            raise self._nonsense("uploads", sent, allowed)
        return sent

    def _nonsense(self, does: str, given: object, allowed: str) -> UserError:
        name = type(self._attack).__qualname__
        what = f"{given.dtype} of shape {given.shape}" if isinstance(given, np.ndarray) else shown(given)
        return UserError(
            f"The attack {name} {does} {what}. {allowed}. Mend it, and try it with cbdsl.testing.check_attack."
        )

    def situation(
        self, worker: int, round_number: int, model: Floats, score: float, received: Floats,
        honest: Floats | None, honest_scores: Doubles | None,
    ) -> AttackContext:  # fmt: skip
        """What one attacker knows in a round."""
        size = self._engine.size

        def score_of(weights: Floats) -> float:
            if not (_are_numbers(weights, (size,)) or _are_numbers(weights, received.shape)):
                raise self._nonsense("wants the score of", weights, f"A model is an array of shape ({size},)")
            return self._score(encode_content(self._codec, weights, received, 0)[1][:size])

        return AttackContext(
            model=model,
            score=score,
            global_best=received,
            workers=self._swarm_size,
            attackers=len(self.workers),
            rng=stream(self._seed, "attack", round_number, worker),
            score_of=score_of,
            honest=honest,
            honest_scores=honest_scores,
            crafted=self._crafted,
            network=self._network,
            losses_of=lambda weights: self._losses(worker, weights[:size]),
        )

    def _losses(self, worker: int, weights: Floats) -> tuple[Doubles, Doubles]:
        """Of a model (D,), on every sample of D_sc and on every one that a worker holds."""
        samples, own = self._public.samples, self._held[worker]
        found = self._engine.sample_losses(weights, samples, np.concatenate([self._public.scoring, own]))
        return found[: len(self._public.scoring)], found[len(self._public.scoring) :]

    @cached_property
    def _scoring(self) -> Samples:
        """D_sc, which every worker has."""
        return self._public.samples.taken(self._public.scoring)

    @cached_property
    def _crafted(self) -> Floats | None:
        """Made when it is first needed; a resumed run makes the same again. (V D,), zeros behind the model."""
        if not self._attack.crafts:
            return None
        features = self._public.samples.features
        key = (id(features), commitment_of(self._initial), self._engine.name, self._craft_key, self._attack)
        if self._craft_key is None or not _hashable(self._attack):
            made = self._craft()
        else:
            if key not in _CRAFTED:
                _CRAFTED.clear()
                _CRAFTED[key] = features, self._craft()
            made = _CRAFTED[key][1]
        if made is None or self._vectors == 1:
            return made
        return np.concatenate([made, np.zeros((self._vectors - 1) * len(made), np.float32)])

    def _craft(self) -> Floats | None:
        rng = stream(self._seed, "attack")
        images = rng.permutation(self._public.others)[: self._attack.images]
        home = AttackPreparation(
            self._scoring,
            self._public.samples.taken(images),
            self._public.classes,
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


def _are_numbers(value: object, shape: tuple[int, ...]) -> bool:
    """Whether a value is numbers of a shape, finite or not: () is one number."""
    if not isinstance(value, (Real, np.ndarray)):
        return False
    found = np.asarray(value)
    return found.shape == shape and found.dtype.kind in "fiu"


def _hashable(attack: Attack) -> bool:
    try:
        hash(attack)
    except TypeError:
        return False
    return True
