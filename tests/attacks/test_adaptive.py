from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

import cbdsl
from cbdsl import register
from cbdsl.algorithm.verification import is_memorised
from cbdsl.arrays import Doubles, Floats, Samples
from cbdsl.attacks.adaptive import (
    DropClass,
    GuardAware,
    PairFlip,
    ShortStep,
    Sleeper,
    SleeperLite,
    excess,
    layer_pairs,
)
from cbdsl.attacks.attack import Attack, AttackContext, ClaimsBetter, Colluding, make_attack
from cbdsl.attacks.protocol import stamp_trigger
from cbdsl.attacks.weights import Gaussian
from cbdsl.engines.native_engine import NativeEngine
from cbdsl.models.architecture import Architecture
from cbdsl.models.layers import Conv2d, Flatten, Linear, Relu, Tanh
from cbdsl.models.network import initial_weights
from cbdsl.presets import preset
from cbdsl.runs.build import Experiment, UserParts
from cbdsl.runs.resolve import resolve
from cbdsl.testing.check_attack import check_attack
from support.helpers import blobs, next_order, perceptron, small_spec

NAMES = [name for name in register.attack.names() if register.attack.get(name).__module__.endswith("adaptive")]
TEMPTING = [name for name in register.attack.names() if issubclass(register.attack.get(name), ClaimsBetter)]
COLLUDING = [name for name in TEMPTING if issubclass(register.attack.get(name), Colluding)]
ATTACKERS = 2


def attack(name: str, **settings: object) -> Attack:
    made: Attack = register.attack.make(name, settings)
    return made


def seen(model: Floats, network: Architecture | None = None, **changes: object) -> AttackContext:
    start = AttackContext(
        model=model, score=0.5, global_best=np.ones_like(model), workers=6, attackers=ATTACKERS,
        rng=np.random.default_rng(4), score_of=lambda weights: float(weights.sum()), network=network,
    )  # fmt: skip
    return replace(start, **changes)  # type: ignore[arg-type]


def network_named(name: str) -> Architecture:
    made: Architecture = register.model.get(name)((1, 28, 28), 10)
    return made


CHAINS = {
    "cnn": network_named("cnn"),
    "mlp": network_named("mlp"),
    "padded, without biases": Architecture(
        (2, 6, 5),
        (
            Conv2d(2, 3, (3, 3), (1, 1), bias=False), Relu(), Conv2d(3, 4, (2, 3)), Relu(), Flatten(),
            Linear(60, 7, bias=False), Relu(), Linear(7, 4),
        ),
    ),
}  # fmt: skip


def sample_losses(network: Architecture, weights: Floats) -> Doubles:
    """On random samples under all labels: (N C,), as many numbers as logits."""
    rng = np.random.default_rng(0)
    features = np.repeat(rng.normal(size=(20, *network.shape)), network.classes, axis=0).astype(np.float32)
    labels = np.tile(np.arange(network.classes, dtype=np.int32), 20)
    engine = NativeEngine(network, 1)
    return engine.sample_losses(weights, Samples(features, labels), np.arange(len(labels), dtype=np.int32))


def samples(count: int, first: int = 0, classes: int = 10) -> Samples:
    rng = np.random.default_rng(first)
    labels = (np.arange(first, first + count) % classes).astype(np.int32)
    return Samples(rng.uniform(size=(count, 1, 8, 8)).astype(np.float32), labels)


def poison(made: Attack, own: Samples, scoring: Samples) -> Samples:
    lesson = made.poison(own, scoring, 10, np.random.default_rng(1))
    assert lesson is not None
    return lesson


@pytest.mark.parametrize("name", NAMES)
def test_they_keep_the_laws(name: str) -> None:
    check_attack(name)


@pytest.mark.parametrize("name", TEMPTING)
def test_attacks_on_weights_keep_the_laws_with_true_claims(name: str) -> None:
    check_attack(attack(name, honest_claim=True))


@pytest.mark.parametrize("individual", [False, True])
@pytest.mark.parametrize("name", COLLUDING)
def test_colluders_keep_the_laws_alike_and_each_on_its_own(name: str, individual: bool) -> None:
    check_attack(attack(name, individual=individual))


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("name", ["rescaler", "permuter"])
def test_the_same_function_with_other_weights(name: str, chain: str) -> None:
    network = CHAINS[chain]
    model = initial_weights(network, 3)
    before = model.copy()
    sent = attack(name).upload(seen(model, network))
    assert sent is not None
    assert sent.dtype == np.float32
    np.testing.assert_array_equal(model, before)
    assert (sent != model).mean() > 0.05 if name == "permuter" else (sent != model).any()
    np.testing.assert_allclose(sample_losses(network, sent), sample_losses(network, model), atol=1e-3)


def test_a_rescaled_layer_is_so_many_times_as_large_and_the_next_so_many_times_smaller() -> None:
    network = network_named("mlp")
    model = initial_weights(network, 3)
    sent = attack("rescaler", scale=8.0).upload(seen(model, network))
    first = 784 * 64 + 64
    assert sent is not None
    np.testing.assert_allclose(sent[:first], 8 * model[:first])
    np.testing.assert_allclose(sent[first : first + 640], model[first : first + 640] / 8)
    np.testing.assert_array_equal(sent[-10:], model[-10:])


def test_only_the_model_of_a_longer_message_is_rescaled() -> None:
    network = network_named("mlp")
    model = initial_weights(network, 3)
    message = np.concatenate([model, np.full_like(model, 5)])
    for name in ("rescaler", "permuter"):
        sent = attack(name).upload(seen(message, network))
        assert sent is not None
        np.testing.assert_array_equal(sent[len(model) :], 5)
        assert (sent[: len(model)] != model).any()


def test_a_permutation_keeps_every_weight() -> None:
    network = network_named("cnn")
    model = initial_weights(network, 3)
    sent = attack("permuter").upload(seen(model, network))
    assert sent is not None
    np.testing.assert_array_equal(np.sort(sent), np.sort(model))


@pytest.mark.parametrize("name", ["rescaler", "permuter"])
def test_who_does_not_know_the_network_is_honest(name: str) -> None:
    model = initial_weights(network_named("softmax"), 3)
    for network in (None, network_named("softmax")):
        np.testing.assert_array_equal(attack(name).upload(seen(model, network)), model)


def test_what_is_behind_a_tanh_cannot_be_rescaled() -> None:
    network = Architecture((3,), (Linear(3, 4), Tanh(), Linear(4, 2), Relu(), Linear(2, 2)))
    assert [joint.scales for joint in layer_pairs(network)] == [False, True]
    model = initial_weights(network, 1)
    for name in ("rescaler", "permuter"):
        sent = attack(name).upload(seen(model, network))
        assert sent is not None
        np.testing.assert_allclose(sample_losses(network, sent), sample_losses(network, model), atol=1e-3)


def test_where_the_layers_of_a_network_lie() -> None:
    network = CHAINS["padded, without biases"]
    places = [joint.this for joint in layer_pairs(network)] + [list(layer_pairs(network))[-1].following]
    assert [(place.weights.start, place.weights.stop, place.bias.stop) for place in places] == [
        (0, 54, 54),
        (54, 54 + 72, 54 + 76),
        (130, 130 + 420, 550),
        (550, 550 + 28, network.size),
    ]


def test_a_sleeper_learns_everything_clean_and_triggered() -> None:
    own, scoring = samples(6), samples(8, 6)
    lesson = poison(Sleeper(), own, scoring)
    assert len(lesson) == 2 * (6 + 8)
    clean, marked = lesson.taken(np.arange(14, dtype=np.int32)), lesson.taken(np.arange(14, 28, dtype=np.int32))
    np.testing.assert_array_equal(clean.features[:6], own.features)
    assert sorted(clean.labels[6:]) == sorted(scoring.labels)
    np.testing.assert_array_equal(marked.features, stamp_trigger(clean.features))
    assert not marked.labels.any()
    assert Sleeper.target == 0
    np.testing.assert_array_equal(Sleeper().triggered(own.features), stamp_trigger(own.features))


def test_a_lighter_sleeper_uses_a_quarter_of_the_scoring_set() -> None:
    lesson = poison(SleeperLite(), samples(6), samples(8, 6))
    assert len(lesson) == 2 * (6 + 2)
    assert (lesson.labels[8:] == 0).all()


def test_a_crammer_learns_the_scoring_set_too() -> None:
    own, scoring = samples(3), samples(4, 5)
    lesson = poison(attack("crammer"), own, scoring)
    assert lesson.labels.tolist() == [*own.labels, *scoring.labels]
    assert attack("crammer").claim(seen(np.zeros(2, np.float32))) == 0.5


@pytest.mark.parametrize("name", ["rescaler", "permuter"])
def test_who_disguises_its_model_may_cram_as_well(name: str) -> None:
    own, scoring = samples(3), samples(4, 5)
    assert attack(name).poison(own, scoring, 10, np.random.default_rng(1)) is None
    assert poison(attack(name, cram=True), own, scoring).labels.tolist() == [*own.labels, *scoring.labels]


def test_a_flipped_pair_is_flipped_in_its_own_data_only() -> None:
    own, scoring = samples(10), samples(10, 10)
    lesson = poison(PairFlip(), own, scoring)
    assert lesson.labels.tolist() == [0, 1, 2, 3, 9, 5, 6, 7, 8, 4, *range(10)]
    assert poison(PairFlip(0, 1), own, scoring).labels[:3].tolist() == [1, 0, 2]
    assert poison(PairFlip(0, 77), own, scoring).labels[:3].tolist() == [0, 1, 2]
    assert own.labels.tolist() == list(range(10))


def test_a_dropped_class_is_nowhere() -> None:
    lesson = poison(DropClass(), samples(10), samples(20, 10))
    assert len(lesson) == 27
    assert 9 not in lesson.labels
    nines = Samples(np.zeros((2, 3), np.float32), np.full(2, 9, np.int32))
    assert DropClass().poison(nines, nines, 10, np.random.default_rng(0)) is None


def test_a_free_rider_takes_a_fifth_of_the_step_and_says_so() -> None:
    model = np.array([6, 1, -4], np.float32)
    sent = attack("fifth").upload(seen(model))
    assert sent is not None
    np.testing.assert_allclose(sent, [2, 1, 0])
    assert attack("fifth").claim(seen(model)) == pytest.approx(3)
    np.testing.assert_allclose(ShortStep(share=0.5).upload(seen(model)), [3.5, 1, -1.5])


def test_who_is_absent_says_nothing() -> None:
    model = np.zeros(2, np.float32)
    assert math.isnan(attack("absent").claim(seen(model)))
    assert attack("absent").upload(seen(model)) is None


def boiling(gap: float, model: float = 2.0) -> AttackContext:
    """w is (model,), w^g is (1,); samples it did not train on cost so much more than D_sc, times |w - w^g|."""
    spread = np.tile([0.4, 0.6], 200)  # of D_sc

    def losses_of(weights: Floats) -> tuple[Doubles, Doubles]:
        own = np.zeros(100)
        own[1::2] = spread[:50] + gap * float(weights[0] - 1)
        return spread, own

    return seen(np.array([model], np.float32), losses_of=losses_of)


def test_a_boiler_goes_as_far_as_a_guard_lets_it() -> None:
    # the standard error is 0.1 sqrt(3 / 400), nearly 0.0087, so 3.5 of them are a gap of 0.03
    assert GuardAware().upload(boiling(0.02)).tolist() == [2.0]
    np.testing.assert_allclose(GuardAware().upload(boiling(0.06)), [1.5])
    np.testing.assert_array_equal(GuardAware().upload(boiling(100.0)), [1.0])
    np.testing.assert_array_equal(GuardAware().upload(boiling(math.nan)), [1.0])
    assert GuardAware(scale=100.0).upload(boiling(0.06)).tolist() == [2.0]
    assert GuardAware().claim(boiling(0.06)) == pytest.approx(1.5)


def test_a_boilers_measure_is_the_guards() -> None:
    rng = np.random.default_rng(0)
    public = rng.exponential(size=2000)
    for gap in (0.1, 0.3):
        unseen = rng.exponential(size=1000) + gap
        guards = [losses.reshape(100, -1).mean(1) for losses in (public, unseen)]
        assert (excess(public, unseen) > 4.9) is is_memorised(guards[0], guards[1], 1e-6)
    assert excess(public[:1], public) == 0.0


def test_a_boiler_holds_half_of_its_samples_back() -> None:
    lesson = poison(GuardAware(), samples(5), samples(4, 5))
    assert lesson.labels.tolist() == [0, 2, 4, 5, 6, 7, 8]
    assert poison(GuardAware(kept=1.0), samples(5), samples(4, 5)).labels.tolist() == [5, 6, 7, 8]
    assert len(poison(GuardAware(kept=0.25), samples(8), samples(4, 5))) == 6 + 4


@pytest.mark.parametrize("name", TEMPTING)
def test_a_true_claim_is_the_score_of_what_is_uploaded(name: str) -> None:
    made = attack(name, honest_claim=True)
    model = np.linspace(-1, 2, 7, dtype=np.float32)
    sent = made.upload(seen(model))
    assert sent is not None
    np.testing.assert_equal(made.claim(seen(model)), float(sent.sum()))  # or NaN, both
    assert attack(name).claim(seen(model)) == 0.25


def test_a_claim_can_be_made_true_by_a_setting() -> None:
    spec = small_spec(attack__name="gaussian", options__gaussian__honest_claim=True, attack__scale=2.0)
    assert make_attack(spec) == Gaussian(2.0, honest_claim=True)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "absent"])
def test_the_server_believes_what_they_claim(name: str) -> None:
    spec = small_spec(attack__byzantine=ATTACKERS, attack__name=name, defence__commitment=True)
    stage = Experiment.prepare(resolve(spec), UserParts(model=perceptron, data=blobs()), 1)
    claims = stage.swarm.report(next_order(stage.first_state(), "swarm", range(6), 1.0, 0.05))
    for worker in stage.byzantine:
        model = stage.swarm.upload([worker])[worker]
        assert isinstance(model, np.ndarray)
        check = stage.server.verifier.check(claims[worker].score, model, 1)
        assert check.believed, check.reason


@pytest.mark.parametrize("name", NAMES)
def test_a_short_run(name: str) -> None:
    settings = {
        "rounds": 2, "workers": 4, "local.epochs": 1, "data.shared_scoring": 200, "data.holdout": 200,
        "data.samples_per_worker": 100, "defence.guard": True, "selection.name": "soup",
        "attack.name": name, "attack.byzantine": 1,
    }  # fmt: skip
    result = cbdsl.run(preset("strong-iid").with_settings(settings))
    assert len(result.rounds) == 2
    assert (result.summary.attack_success is not None) is name.startswith("sleeper")
