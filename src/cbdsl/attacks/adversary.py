"""The attackers of a swarm: calls the hooks of an attack once per attacker and round, with what it may know."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from typing import Protocol

import numpy as np

from cbdsl.algorithm.messages import Order, Upload, WorkerId, commitment_of
from cbdsl.algorithm.worker_round import TrainingSet, draw_batches, make_scorer
from cbdsl.arrays import Doubles, Floats, Indices, NamedArrays, Samples, copy_memory
from cbdsl.attacks.attack import Attack, AttackContext, AttackPreparation, AttackTools
from cbdsl.codecs.codec import Codec
from cbdsl.codecs.envelope import encode_content
from cbdsl.engines.engine import Engine, Sgd
from cbdsl.errors import UserError, shown
from cbdsl.models.architecture import Architecture
from cbdsl.rng import stream
from cbdsl.spec import LocalSpec

_CRAFTED: dict[object, tuple[weakref.ref[Floats], Floats | None]] = {}
"""The last crafted model, for later runs on the same data; it does not keep the data alive."""


class HonestAnswers(Protocol):
    """What workers of a swarm would send and claim if all were honest."""

    def models_and_scores(self, workers: Sequence[WorkerId]) -> tuple[Floats, Doubles]:
        """Return their models, (k, V D), and scores, (k,)."""
        ...

    def contents(self, workers: Sequence[WorkerId]) -> Sequence[Upload]:
        """Return their uploads, encoded where there is a codec."""
        ...


@dataclass(frozen=True, eq=False)
class AttackerUpload:
    """What an attacker uploads."""

    content: Upload | None  # None: it stays silent
    model: Floats  # what the content decodes to, (V D,): the model that it commits itself to


@dataclass(frozen=True, eq=False)
class PublicData:
    """The data that any worker may have."""

    samples: Samples
    scoring: Indices  # D_sc
    others: Indices  # samples that are neither in D_sc nor in the server's hold-out
    classes: int

    @cached_property
    def scoring_samples(self) -> Samples:
        """The samples of D_sc."""
        return self.samples.taken(self.scoring)


@dataclass(frozen=True, eq=False)
class Poisoner:
    """The training data of attackers whose attack changes it."""

    attack: Attack
    workers: Indices  # the attackers, sorted
    public: PublicData
    seed: int

    def member(self, worker: WorkerId) -> Attack:
        """Return this attacker's own instance of the attack."""
        return self.attack.member(int(np.searchsorted(self.workers, worker)))

    def poison(self, worker: WorkerId, own: Indices) -> Samples | None:
        """Return an attacker's training samples; None if the attack does not change them."""
        rng, data = stream(self.seed, "attack", worker=worker), self.public.samples.taken(own)
        return self.member(worker).poison(data, self.public.scoring_samples, self.public.classes, rng)

    def lesson(self, worker: WorkerId, honest: TrainingSet) -> TrainingSet:
        """Return the training set of a worker, attacker or not."""
        place = int(np.searchsorted(self.workers, worker))
        attacks = place < len(self.workers) and self.workers[place] == worker
        poison = self.poison(worker, honest.indices) if attacks else None
        return honest if poison is None else TrainingSet(poison, np.arange(len(poison), dtype=np.int32))


class Adversary:
    """All Byzantine workers of a run, and their attack."""

    def __init__(  # noqa: PLR0913 - all but the first three by name
        self,
        attack: Attack,
        workers: Sequence[int],
        public: PublicData,
        *,
        held: Mapping[int, Indices] | Sequence[Indices],
        engine: Engine,
        initial: Floats,
        seed: int,
        swarm_size: int,
        vectors: int = 1,
        codec: Codec,
        network: Architecture | None = None,
        local: LocalSpec | None = None,
        craft_key: object = None,
    ) -> None:
        """held: what attackers would train on if they were honest, by worker. initial: weights, (D,).

        vectors: V, models per message. codec: how workers send models. network: None if it is unknown.
        local: how an honest worker trains.
        craft_key: equal for runs with the same network, which then share a crafted model; None: make one per run.
        """
        self.workers = frozenset(workers)
        self._attack, self._public, self._engine, self.initial = attack, public, engine, initial
        self.poisoner = Poisoner(attack, np.sort(np.asarray(workers, np.int32)), public, seed)
        self._known: dict[WorkerId, Attack] = {}  # attackers that have taken part
        self._held = held
        self._network, self._local = network, local or LocalSpec()
        self._seed, self._swarm_size, self._vectors, self._craft_key = seed, swarm_size, vectors, craft_key
        self._codec = codec
        self._score = make_scorer(engine, public.samples, public.scoring)
        self._order: Order
        self._received: Floats
        self._uploads: dict[WorkerId | None, Floats | None] = {}  # of this round, by attacker; None: one for all
        self._sent: dict[WorkerId, AttackerUpload] = {}
        self._honest: tuple[Floats, Doubles] | None = None
        self._shared: dict[str, Floats] = {}
        self._remembers = getattr(attack.remember, "__func__", None) is not Attack.remember
        self._memories: dict[WorkerId | None, NamedArrays] = {}  # by attacker; None: one for all

    @property
    def memory(self) -> NamedArrays:
        """The attackers' memories as saved: arrays NUMBER.NAME, or all.NAME if they share one memory."""
        return {
            f"{'all' if worker is None else worker}.{name}": array
            for worker, arrays in self._memories.items()
            for name, array in arrays.items()
        }

    @memory.setter
    def memory(self, saved: NamedArrays) -> None:
        self._memories = {}
        for key, array in saved.items():
            owner, _, name = key.partition(".")
            self._memories.setdefault(None if owner == "all" else int(owner), {})[name] = array
            array.flags.writeable = False

    def remember(self, swarm: HonestAnswers) -> None:
        """Update the memories of the attackers that take part in this round."""
        if not self._remembers:
            return
        taking_part = sorted(self.workers.intersection(self._order.participants), reverse=True)
        for sender, worker in {self._sender(worker): worker for worker in taking_part}.items():
            attack = self._member(worker)
            found = attack.remember(replace(self._context(worker, swarm), uploaded=None))  # no upload with the old one
            self._memories[sender] = copy_memory(found, f"The attack {type(attack).__qualname__}")

    def _member(self, worker: WorkerId) -> Attack:
        """Return one attacker's instance of the attack, always the same object."""
        if worker not in self._known:
            self._known[worker] = self.poisoner.member(worker)
        return self._known[worker]

    def _sender(self, worker: WorkerId) -> WorkerId | None:
        """Return the owner of an attacker's upload and memory: itself, or None if all attackers share them."""
        attack = self._member(worker)
        return None if attack.omniscient and not attack.individual else worker

    def poisoned(self) -> dict[int, TrainingSet]:
        """Return what attackers train on instead of their own data, where the attack changes it."""
        found = {worker: self.poisoner.poison(worker, self._held[worker]) for worker in sorted(self.workers)}
        parts = {worker: poison for worker, poison in found.items() if poison is not None}
        if not parts:
            return {}
        pool, ends = Samples.joined(list(parts.values())), np.cumsum([0, *map(len, parts.values())])
        return {
            worker: TrainingSet(pool, np.arange(first, last, dtype=np.int32))
            for worker, first, last in zip(parts, ends, ends[1:], strict=False)
        }

    def begin_round(self, order: Order, received: Floats) -> None:
        """Forget the answers of the last round. received: what the server last sent, (V D,)."""
        self._order, self._received = order, received
        self._uploads, self._sent, self._honest, self._shared = {}, {}, None, {}

    def claim(self, worker: WorkerId, swarm: HonestAnswers) -> float:
        """Return the score that an attacker claims; raise UserError if it is not a number."""
        claimed = self._member(worker).claim(self._context(worker, swarm))
        if not _are_numbers(claimed, ()):
            raise self._invalid("claims", claimed, "A claim is one number, finite or not, such as seen.score")
        return claimed

    def send(self, worker: WorkerId, swarm: HonestAnswers) -> AttackerUpload:
        """Return what an attacker uploads in this round, encoded once."""
        if worker not in self._sent:
            self._sent[worker] = self._encode(worker, swarm)
        return self._sent[worker]

    def _encode(self, worker: WorkerId, swarm: HonestAnswers) -> AttackerUpload:
        model, honest = self._upload(worker, swarm), swarm.models_and_scores([worker])[0][0]
        if model is None:
            return AttackerUpload(None, self._received)
        if np.array_equal(model, honest):
            return AttackerUpload(swarm.contents([worker])[0], honest)
        return AttackerUpload(*encode_content(self._codec, model, self._received, self._order.version))

    def _upload(self, worker: WorkerId, swarm: HonestAnswers) -> Floats | None:
        """Call `Attack.upload` once per attacker and round, or once per round if all attackers send the same.

        The output is validated: a server would drop an invalid upload, and the attack would look harmless.
        """
        attack, sender = self._member(worker), self._sender(worker)
        if sender not in self._uploads:
            context = self._context(worker, swarm)
            sent, shape = attack.upload(context), context.model.shape
            if sent is not None and not _are_numbers(sent, shape):
                allowed = f"An upload is a model, here an array of shape {shape}, finite or not, or None to stay silent"
                raise self._invalid("uploads", sent, allowed)
            self._uploads[sender] = sent
        return self._uploads[sender]

    def _invalid(self, does: str, given: object, allowed: str) -> UserError:
        name = type(self._attack).__qualname__
        what = f"{given.dtype} of shape {given.shape}" if isinstance(given, np.ndarray) else shown(given)
        return UserError(
            f"The attack {name} {does} {what}. {allowed}. Correct it, and try it with cbdsl.testing.check_attack.",
            code="invalid-part",
        )

    def _context(self, worker: WorkerId, swarm: HonestAnswers) -> AttackContext:
        """Return what an attacker may know; the honest models are gathered once per round, if the attack needs them."""
        size, received = self._engine.size, self._received
        models, scores = swarm.models_and_scores([worker])
        if self._attack.omniscient and self._honest is None:
            others = [one for one in self._order.participants if one not in self.workers]
            self._honest = swarm.models_and_scores(others)
        honest, honest_scores = self._honest or (None, None)

        def score_of(weights: Floats) -> float:
            if not (_are_numbers(weights, (size,)) or _are_numbers(weights, received.shape)):
                raise self._invalid("wants the score of", weights, f"A model is an array of shape ({size},)")
            return self._score(encode_content(self._codec, weights, received, 0)[1][:size])

        return AttackContext(
            model=models[0],
            score=float(scores[0]),
            global_best=received,
            workers=self._swarm_size,
            attackers=len(self.workers),
            rng=stream(self._seed, "attack", self._order.round, worker),
            score_of=score_of,
            honest=honest,
            honest_scores=honest_scores,
            crafted=self.crafted,
            network=self._network,
            losses_of=lambda weights: self._losses(worker, weights[:size]),
            uploaded=lambda: self._upload(worker, swarm),
            tools=lambda: self._tools(worker),
            round=self._order.round,
            worker=worker,
            memory=dict(self._memories.get(self._sender(worker), {})),
            common=lambda number: stream(self._seed, "attackers", number),
        )

    def _tools(self, worker: int) -> AttackTools:
        local = replace(self._local, learning_rate=self._order.learning_rate)
        own = self._public.samples.taken(self._held[worker])
        made = make_tools(self._engine, self._received[: self._engine.size], own, self._public.scoring_samples, local)
        return replace(made, shared=self._shared)

    def _losses(self, worker: int, weights: Floats) -> tuple[Doubles, Doubles]:
        """Return a model's loss (D,) on every sample of D_sc and on every sample that a worker holds."""
        samples, own = self._public.samples, self._held[worker]
        found = self._engine.sample_losses(weights, samples, np.concatenate([self._public.scoring, own]))
        return found[: len(self._public.scoring)], found[len(self._public.scoring) :]

    @cached_property
    def crafted(self) -> Floats | None:
        """The model that the attack prepares, (V D,), zeros behind the model; made when it is first needed."""
        if not self._attack.crafts:
            return None
        made = self._craft() if self._craft_key is None or not _hashable(self._attack) else self._craft_once()
        if made is None or self._vectors == 1:
            return made
        return np.concatenate([made, np.zeros((self._vectors - 1) * len(made), np.float32)])

    def _craft_once(self) -> Floats | None:
        """Return the last run's model if data, initial model, engine and attack are the same; make one otherwise."""
        features = self._public.samples.features
        key = (commitment_of(self.initial), self._engine.name, self._craft_key, self._attack)
        data, made = _CRAFTED.get(key, (None, None))
        if data is None or data() is not features:
            made = self._craft()
            _CRAFTED.clear()
            _CRAFTED[key] = weakref.ref(features), made
        return made

    def _craft(self) -> Floats | None:
        rng = stream(self._seed, "attack")
        images = rng.permutation(self._public.others)[: self._attack.images]
        preparation = AttackPreparation(
            self._public.scoring_samples,
            self._public.samples.taken(images),
            self._public.classes,
            self.initial,
            self._fit,
            self._score,
            rng,
        )
        return self._attack.craft(preparation)

    def _fit(self, weights: Floats, samples: Samples, sgd: Sgd, batch: int, rng: np.random.Generator) -> Floats:
        rows = draw_batches(np.arange(len(samples), dtype=np.int32), LocalSpec(batch_size=batch), rng)
        seeds = rng.integers(2**63, size=1).astype(np.uint64)
        trained = self._engine.train(weights[None], samples, rows[None], sgd, seeds)
        return np.asarray(trained[0])


def make_tools(engine: Engine, global_best: Floats, own: Samples, scoring: Samples, local: LocalSpec) -> AttackTools:
    """Return what an attacker works with at a global model, (D,)."""

    def gradient(weights: Floats, samples: Samples) -> Floats:
        return np.asarray(engine.gradients(weights[None], samples, np.arange(len(samples), dtype=np.int32))[0])

    def losses(weights: Floats, samples: Samples) -> Doubles:
        return engine.sample_losses(weights, samples, np.arange(len(samples), dtype=np.int32))

    return AttackTools(global_best, own, scoring, local, gradient, losses)


def _are_numbers(value: object, shape: tuple[int, ...]) -> bool:
    """Return whether a value is numbers of a shape, finite or not; () is one number."""
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
