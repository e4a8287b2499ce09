"""Attackers of a swarm: how often an attack is called, and what is kept between runs."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cbdsl.algorithm.messages import WorkerId
from cbdsl.arrays import Doubles, Floats
from cbdsl.attacks.attack import Attack, AttackContext, Truthful
from cbdsl.attacks.weights import Alie
from cbdsl.runs.build import Experiment, UserParts
from cbdsl.runs.resolve import resolve
from cbdsl.swarms.local import LocalSwarm
from support.helpers import blobs, next_order, perceptron, small_spec


class Counted(Truthful):
    """Uploads random weights with their true score."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.uploads: list[Floats] = []

    def claim(self, seen: AttackContext) -> float:
        self.calls["claim"] += 1
        return super().claim(seen)

    def upload(self, seen: AttackContext) -> Floats:
        self.calls["upload"] += 1
        self.uploads.append(seen.rng.standard_normal(len(seen.model)).astype(np.float32))
        return self.uploads[-1]


class CountedForAll(Counted):
    omniscient = True


def stage_of(attack: Attack, **settings: Any) -> Experiment:  # noqa: ANN401
    spec = resolve(small_spec(attack__byzantine=2, **settings))
    return Experiment.prepare(spec, UserParts(model=perceptron, data=blobs(), attack=attack), 1)


def order_to(stage: Experiment, participants: Sequence[int] = range(6)) -> Any:  # noqa: ANN401
    return next_order(stage.first_state(), stage.server.method.conversation, participants, 1.0, 0.05)


@pytest.mark.parametrize("settings", [{}, {"defence__commitment": True}, {"method": "fedavg"}, {"codec__up": "q4"}])
def test_an_attack_is_asked_for_its_upload_once_per_attacker_and_round(settings: dict[str, object]) -> None:
    attack = Counted()
    stage = stage_of(attack, **settings)
    claims = stage.swarm.report(order_to(stage))
    first, second = stage.swarm.upload(range(6)), stage.swarm.upload(range(6))
    assert attack.calls["upload"] == 2
    assert attack.calls["claim"] == (2 if claims else 0)
    for worker in stage.byzantine:
        assert np.array_equal(first[worker], second[worker])
    stage.swarm.report(order_to(stage))
    stage.swarm.upload(stage.byzantine)
    assert attack.calls["upload"] == 4


def test_an_upload_that_nobody_asks_for_is_not_made() -> None:
    class Silent(Counted):
        def claim(self, seen: AttackContext) -> float:
            return seen.score

    attack = Silent()
    stage = stage_of(attack)
    stage.swarm.report(order_to(stage))
    assert attack.calls["upload"] == 0


def test_an_omniscient_attack_is_asked_once_for_all_attackers_and_sees_the_others_once_per_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gathered: list[tuple[WorkerId, ...]] = []
    look = LocalSwarm.models_and_scores

    def counting(self: LocalSwarm, workers: Sequence[WorkerId]) -> tuple[Floats, Doubles]:
        gathered.append(tuple(workers))
        return look(self, workers)

    monkeypatch.setattr(LocalSwarm, "models_and_scores", counting)
    attack = CountedForAll()
    stage = stage_of(attack, defence__commitment=True)
    honest = tuple(worker for worker in range(6) if worker not in stage.byzantine)
    for _ in range(2):
        stage.swarm.report(order_to(stage))
        stage.swarm.upload(range(6))
    assert attack.calls == {"upload": 2, "claim": 4}
    assert gathered.count(honest) == 2


@pytest.mark.parametrize("individual", [False, True])
def test_colluders_send_the_same_model_or_each_one_of_its_own_and_claim_its_score(individual: bool) -> None:
    stage = stage_of(Alie(individual=individual, honest_claim=True), defence__commitment=True)
    claims, sent = stage.swarm.report(order_to(stage)), stage.swarm.upload(stage.byzantine)
    first, second = (np.asarray(sent[worker]) for worker in stage.byzantine)
    assert np.array_equal(first, second) is not individual
    for worker in stage.byzantine:
        scored = stage.split.shared_scoring
        measured = stage.engine.losses(np.asarray(sent[worker])[None], stage.dataset.train, scored)[0]
        assert claims[worker].score == pytest.approx(measured, rel=1e-5)


def test_the_claim_and_the_upload_of_a_round_draw_the_same_numbers() -> None:
    class Twice(Counted):
        def claim(self, seen: AttackContext) -> float:
            self.drawn = seen.rng.standard_normal(len(seen.model)).astype(np.float32)
            return seen.score

    attack = Twice()
    stage = stage_of(attack)
    stage.swarm.report(order_to(stage, stage.byzantine[:1]))
    stage.swarm.upload(stage.byzantine[:1])
    np.testing.assert_array_equal(attack.drawn, attack.uploads[0])


def test_a_crafted_model_does_not_keep_the_data_of_its_run_alive() -> None:
    spec = resolve(small_spec(attack__name="memoriser", attack__byzantine=1, model="softmax"))
    stage = Experiment.prepare(spec, UserParts(data=blobs()), 1)
    adversary = stage.memory_swarm.adversary
    assert adversary is not None
    made, again = adversary.crafted, stage.worker_data_and_adversary()[1].crafted
    assert made is not None
    assert made is again  # the same data, attack and initial model
    features = weakref.ref(stage.dataset.train.features)
    del stage, adversary
    gc.collect()
    assert features() is None
