from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from cbdsl import register
from cbdsl.algorithm.aggregators import TrustedReference, aggregate
from cbdsl.arrays import Doubles, Floats, NamedArrays, Samples
from cbdsl.attacks.attack import Attack, AttackContext, AttackPreparation, Colluding, make_attack
from cbdsl.attacks.protocol import stamp_trigger
from cbdsl.attacks.weights import PoisonedFl, alie_z, krum_bound, largest_gamma, search_gamma
from cbdsl.engines.engine import Sgd
from cbdsl.spec import AttackSpec, Spec
from support.refusals import refused_as


def vector(*values: float) -> Floats:
    return np.array(values, dtype=np.float32)


HONEST = np.array([[1, 0], [3, 0], [2, 0], [2, 2]], dtype=np.float32)


def seen(**changes: object) -> AttackContext:
    """An attacker at (1, 2) with score 0.5, while w^g is (1, 1); the honest models have mean (2, 0.5)."""
    start = AttackContext(
        model=vector(1, 2),
        score=0.5,
        global_best=vector(1, 1),
        workers=6,
        attackers=2,
        rng=np.random.default_rng(4),
        score_of=lambda weights: float(weights.sum()),
        honest=HONEST,
        honest_scores=np.array([0.25, 0.5, 0.75, 1.0]),
        crafted=vector(7, 7),
    )
    return replace(start, **changes)  # type: ignore[arg-type]


def attack(name: str, scale: float = 0.0) -> Attack:
    return make_attack(Spec(attack=AttackSpec(name, scale=scale)))


def upload(name: str, scale: float = 0.0) -> Floats:
    sent = attack(name, scale).upload(seen())
    assert sent is not None
    assert sent.dtype == np.float32
    return sent


COLLUDERS = [name for name in register.attack.names() if issubclass(register.attack.get(name), Colluding)]


@pytest.mark.parametrize("honest", [1e-9, 0.3, 2.3, 1e6])
def test_a_liar_claims_less_than_the_truth_but_nothing_impossible(honest: float) -> None:
    for name in ("liar", "staller", "flooder", "gaussian"):
        assert 0 < attack(name).claim(seen(score=honest)) < honest


def test_a_liar_uploads_random_weights_of_the_stated_scale() -> None:
    honest = np.ones(20_000, dtype=np.float32)
    fake = attack("liar", 3.0).upload(seen(model=honest))
    assert fake is not None
    assert fake.std() == pytest.approx(3.0, rel=0.03)
    assert abs(fake.mean()) < 0.1
    np.testing.assert_array_equal(honest, 1)


def test_attacks_on_weights_by_hand() -> None:
    np.testing.assert_allclose(upload("sign-flip"), [1, 0])  # (1, 1) - (0, 1)
    np.testing.assert_allclose(upload("scaled", 5), [1, 6])  # (1, 1) + 5 (0, 1)
    np.testing.assert_array_equal(upload("zero"), [0, 0])
    np.testing.assert_allclose(upload("ipm", 2), [-1, 2])  # (1, 1) - 2 ((2, 0.5) - (1, 1))
    np.testing.assert_array_equal(upload("mimic"), [1, 0])
    deviation = HONEST.std(0)
    np.testing.assert_allclose(upload("alie", 1.5), [2, 0.5] - 1.5 * deviation, rtol=1e-6)
    assert not np.isfinite(upload("nan")).any()


def test_who_mimics_claims_what_is_true_of_the_copy() -> None:
    assert attack("mimic").claim(seen()) == 0.25


def test_the_crowd_that_hides_an_attacker() -> None:
    # n = 50, f = 20: s = 26 - 20 = 6, Phi(z) = 24 / 30 = 0.8
    assert alie_z(50, 20) == pytest.approx(0.8416, abs=1e-4)
    assert alie_z(50, 0) == 0.0


@given(st.integers(0, 999), st.integers(2, 6))
def test_min_max_stands_as_far_out_as_the_honest_do_and_no_further(seed: int, count: int) -> None:
    rows = np.random.default_rng(seed).normal(size=(count, 3))
    mean, spread = rows.mean(0), rows.std(0)
    gamma = largest_gamma(rows, mean, spread)
    widest = max(np.linalg.norm(one - other) for one in rows for other in rows)

    def reach(factor: float) -> float:
        return max(float(np.linalg.norm(mean - factor * spread - row)) for row in rows)

    assert reach(gamma) == pytest.approx(widest, rel=1e-6)
    assert reach(gamma * 1.01 + 1e-3) > widest


def test_min_sum_by_hand() -> None:
    # |w_i - mean| is sqrt(1.25) twice, 0.5 and 1.5; |std| = sqrt(1.25)
    np.testing.assert_allclose(upload("min-sum"), [2, 0.5] - 0.5 / np.sqrt(1.25) * HONEST.std(0), rtol=1e-6)


@given(st.integers(0, 999), st.integers(2, 6))
def test_min_sum_is_as_near_to_all_honest_models_as_the_nearest_of_them(seed: int, count: int) -> None:
    rows = np.random.default_rng(seed).normal(size=(count, 3)).astype(np.float32)
    sent = attack("min-sum").upload(seen(model=rows[0], global_best=rows[0], honest=rows))
    assert sent is not None
    sums = [float(np.square(rows - one).sum()) for one in rows]
    assert float(np.square(rows - sent).sum()) == pytest.approx(min(sums), rel=1e-4)


@pytest.mark.parametrize(("direction", "along"), [("unit", [2, -1]), ("sign", [np.sqrt(2.5), -np.sqrt(2.5)])])
def test_a_direction_has_the_length_of_the_deviation(direction: str, along: list[float]) -> None:
    # the honest mean (2, 0.5) is (1, -0.5) from w^g, whose length is sqrt(1.25), as is that of the deviation
    point = np.array(along) / 2
    sent = register.attack.make("alie", {"scale": 2.0, "direction": direction}).upload(seen())
    np.testing.assert_allclose(sent, [2, 0.5] - 2 * point, rtol=1e-6)
    sent = register.attack.make("min-sum", {"direction": direction}).upload(seen())
    np.testing.assert_allclose(sent, [2, 0.5] - 0.5 / np.sqrt(1.25) * point, rtol=1e-6)
    sent = register.attack.make("min-max", {"direction": direction}).upload(seen())
    farthest = max(np.linalg.norm(sent - row) for row in HONEST)
    assert farthest == pytest.approx(np.sqrt(5), rel=1e-6)  # (1, 0) and (2, 2) are the farthest apart of the honest


@pytest.mark.parametrize("rule", ["krum", "trimmed-mean", "median"])
@pytest.mark.parametrize("name", ["alie", "min-max", "min-sum"])
def test_a_factor_against_a_rule_moves_it_at_least_as_far_as_the_attacks_own(name: str, rule: str) -> None:
    rng = np.random.default_rng(5)
    context = seen(
        honest=rng.normal(size=(9, 20)).astype(np.float32), global_best=np.full(20, -1, np.float32),
        model=np.zeros(20, np.float32), workers=13, attackers=4,
    )  # fmt: skip
    honest = context.honest
    assert honest is not None
    moved, trust = (
        [],
        TrustedReference(context.global_best, lambda: context.model, lambda rows: rows[:, 0].astype(np.float64)),
    )
    for options in ({}, {"against": rule}):
        sent = register.attack.make(name, options).upload(context)
        result = aggregate(rule, [*honest, *[sent] * 4], 4, trust)
        moved.append(np.linalg.norm(result - honest.mean(0)))
    assert moved[1] >= moved[0] - 1e-6
    assert moved[1] > 1.01 * moved[0] or name != "alie"


def test_the_search_for_a_factor_finds_the_peak_of_a_hill() -> None:
    assert search_gamma(lambda gamma: -((gamma - 5.3) ** 2), 1.0) == pytest.approx(5.3, abs=0.05)
    assert search_gamma(lambda gamma: -gamma, 1.0) == 0


def test_directions_and_rules_that_do_not_exist_are_refused() -> None:
    with refused_as("unknown-name", "'sgn'", "'sign'"):
        register.attack.make("min-max", {"direction": "sgn"})
    with refused_as("unknown-name", "'krumm'"):
        register.attack.make("alie", {"against": "krumm"})


def test_fang_krum_by_hand() -> None:
    # Three honest models in one dimension, w^g = 0, one attacker. Neighbours: max(1, 3 - 1 - 2) = 1; the nearest are
    # 1 away; h - f - 1 = 1; the farthest from w^g is 4: lambda starts at 5. Krum (k = 4, f = 1, one neighbour) takes a
    # model 1 from another unless the attacker's is nearer to one of them, which it is at none of -5, -2.5, -1.25 ...
    rows = np.array([[1], [2], [4]], np.float64)
    assert krum_bound(rows, np.zeros(1), 1) == 5
    context = seen(
        model=vector(1), global_best=vector(0), honest=rows.astype(np.float32), workers=4, attackers=1,
        score_of=lambda _: 0.0,
    )  # fmt: skip
    sent = attack("fang-krum").upload(context)
    assert sent is not None
    assert -1e-5 <= float(sent[0]) < 0
    # With three attackers their copies are 0 apart, and Krum picks the first one tried.
    crowd = replace(context, workers=6, attackers=3)
    assert krum_bound(rows, np.zeros(1), 3) == 5
    np.testing.assert_array_equal(attack("fang-krum").upload(crowd), [-5])


def test_fang_trim_draws_beyond_the_honest_weights_against_their_step() -> None:
    # the honest mean (2, 0.5) is above w^g = (1, 1) in the first weight, below it in the second
    drawn = np.array([attack("fang-trim").upload(seen(rng=np.random.default_rng(one))) for one in range(200)])
    assert 0.5 <= drawn[:, 0].min() < 0.53
    assert 0.97 < drawn[:, 0].max() <= 1
    assert 2 <= drawn[:, 1].min() < 2.1
    assert 3.9 < drawn[:, 1].max() <= 4
    below = seen(honest=-HONEST - 1, global_best=vector(-4, 0.5), rng=np.random.default_rng(1))
    sent = attack("fang-trim").upload(below)
    assert sent is not None
    first, second = sent  # the honest mean is (-3, -1.5)
    assert -8 <= first <= -4  # below the lowest, -4
    assert -1 <= second <= -0.5  # above the highest, -1


def test_fang_trim_leaves_alone_what_no_honest_worker_moves() -> None:
    still = np.column_stack([HONEST[:, 0], np.ones(4, np.float32)])
    sent = attack("fang-trim").upload(seen(honest=still))
    assert sent is not None
    assert sent[1] == 1


def remembered(made: Attack, memory: NamedArrays, model: Floats, number: int) -> AttackContext:
    """What an attacker sees of a round, after it has remembered it."""
    context = seen(global_best=model, model=model, memory=memory, round=number)
    return replace(context, memory=dict(made.remember(context)))


def test_poisoned_fl_by_hand() -> None:
    made: PoisonedFl = register.attack.make("poisoned-fl", {})
    signs = 2 * np.random.default_rng(0).integers(0, 2, 2) - 1
    first = remembered(made, {}, vector(1, 1), 1)
    assert made.upload(first).tolist() == [1, 1]
    second = remembered(made, first.memory, vector(4, 5), 2)  # g = (3, 4), and it has sent no step
    np.testing.assert_allclose(made.upload(second), np.array([4, 5]) + signs * [24, 32], rtol=1e-6)  # lambda 8, |g| 5
    third = remembered(made, second.memory, vector(4, 10), 3)  # g = (0, 5); m brought to its length is s (3, 4)
    sizes = np.abs([0, 5] - signs * [3, 4])
    expected = np.array([4, 10]) + 40 * signs * sizes / np.linalg.norm(sizes)
    np.testing.assert_allclose(made.upload(third), expected, rtol=1e-6)


@pytest.mark.parametrize(("along", "factor"), [(1.0, 8.0), (-1.0, 5.6)])
def test_poisoned_fl_takes_shorter_steps_when_the_model_does_not_follow_it(along: float, factor: float) -> None:
    made = register.attack.make("poisoned-fl", {"every": 2})
    start = np.zeros(10_000, np.float32)
    way = (2.0 * np.random.default_rng(0).integers(0, 2, len(start)) - 1).astype(np.float32)
    way[:4000] *= -1  # six in ten go along; the quantile is 5,116
    memory = remembered(made, {}, start, 1).memory
    for number in (2, 3):
        assert memory["factor"] == 8
        memory = remembered(made, memory, start + np.float32(number * along) * way, number).memory
    assert memory["factor"] == pytest.approx(factor)
    held = remembered(made, memory | {"factor": np.array([0.6])}, -way, 5).memory
    assert held["factor"] == 0.6  # 0.42 would be less than a half


@pytest.mark.parametrize("name", COLLUDERS)
def test_colluders_send_one_model_or_one_each(name: str) -> None:
    rng = np.random.default_rng(0)
    context = seen(honest=rng.normal(size=(4, 1000)).astype(np.float32), global_best=np.zeros(1000, np.float32))
    known = replace(context, model=np.zeros(1000, np.float32))
    each = register.attack.make(name, {"individual": True})
    sent = [each.upload(replace(known, rng=np.random.default_rng(one))).astype(np.float64) for one in range(3)]
    directions = [one / np.linalg.norm(one) for one in sent]
    for one, other in itertools.combinations(directions, 2):
        assert np.linalg.norm(one - other) > 0.25
    if name != "fang-trim":
        common = register.attack.make(name, {}).upload(known).astype(np.float64)
        for one in sent:
            assert np.dot(one - common, common) == pytest.approx(0, abs=1e-3)
            assert np.linalg.norm(one - common) == pytest.approx(0.3 * np.linalg.norm(common), rel=1e-4)


def test_flipped_labels() -> None:
    own = Samples(np.zeros((3, 2), np.float32), np.array([0, 3, 9], dtype=np.int32))
    poison = attack("label-flip").poison(own, own, 10, np.random.default_rng(0))
    assert poison is not None
    assert poison.labels.tolist() == [9, 6, 0]


@pytest.mark.parametrize("shape", [(8,), (8, 8), (1, 8, 16)])
def test_a_trigger_is_a_bright_corner_and_nothing_else(shape: tuple[int, ...]) -> None:
    images = np.random.default_rng(0).uniform(-1, 2, (5, *shape)).astype(np.float32)
    marked = stamp_trigger(images)
    changed = marked != images
    expected = max(1, shape[-1] // 8) * (max(1, shape[-2] // 8) if len(shape) > 1 else 1)
    assert (changed.reshape(5, -1).sum(1) == expected).all()
    assert changed[..., -1].reshape(5, -1)[:, -1].all()
    assert (marked[changed] == images.max()).all()


def test_half_of_a_backdoored_workers_samples_carry_the_trigger_and_its_label() -> None:
    own = Samples(np.zeros((10, 8), np.float32), np.full(10, 3, np.int32))
    poison = attack("backdoor").poison(own, own, 10, np.random.default_rng(0))
    assert poison is not None
    marked = poison.features[:, -1] == 1
    assert marked.sum() == 5
    assert (poison.labels == np.where(marked, 0, 3)).all()
    assert not own.features.any()


def test_slow_drift_learns_the_scoring_set_and_wrong_labels() -> None:
    own = Samples(np.ones((50, 2), np.float32), np.full(50, 3, np.int32))
    scoring = Samples(np.zeros((4, 2), np.float32), np.arange(4, dtype=np.int32))
    poison = attack("slow-drift").poison(own, scoring, 10, np.random.default_rng(0))
    assert poison is not None
    assert poison.labels[:4].tolist() == [0, 1, 2, 3]
    assert (poison.labels[4:] != 3).all()
    assert ((poison.labels >= 0) & (poison.labels < 10)).all()


def home(losses: list[float]) -> AttackPreparation:
    """One in which epoch e leads to weights (e, e) and the loss that the list says."""
    samples = Samples(np.zeros((6, 2), np.float32), np.arange(6, dtype=np.int32))

    def fit(weights: Floats, lessons: Samples, _rate: Sgd, _batch: int, _rng: np.random.Generator) -> Floats:
        assert len(lessons) == 18  # D_sc twice, and wrongly labelled images
        assert (lessons.labels[:12] == [*range(6), *range(6)]).all()
        assert (lessons.labels[12:] != samples.labels).all()
        return weights + 1

    return AttackPreparation(
        samples, samples, 10, vector(0, 0), fit, lambda weights: losses[int(weights[0]) - 1], np.random.default_rng(0)
    )


def test_a_memoriser_trains_until_its_score_is_good_enough() -> None:
    np.testing.assert_array_equal(attack("memoriser").craft(home([0.9, 0.2, 0.04, 0.01])), [3, 3])


def test_a_memoriser_keeps_its_best_model_when_training_breaks_down() -> None:
    np.testing.assert_array_equal(attack("memoriser").craft(home([0.9, 0.2, float("nan")])), [2, 2])


def test_who_made_a_model_at_home_sends_it_and_claims_its_true_score() -> None:
    np.testing.assert_array_equal(upload("memoriser"), [7, 7])
    assert attack("memoriser").claim(seen()) == 14.0


def test_a_copycat_claims_what_its_copy_is_worth() -> None:
    copy = upload("copycat")
    assert 0 < np.abs(copy - [1, 1]).max() < 0.1
    assert attack("copycat").claim(seen()) == float(copy.sum())


def test_a_staller_stays_silent() -> None:
    assert attack("staller").upload(seen()) is None


def test_who_is_absent_claims_no_number_and_sends_nothing() -> None:
    assert np.isnan(attack("absent").claim(seen()))
    assert attack("absent").upload(seen()) is None


@pytest.mark.parametrize("name", register.attack.names())
def test_an_attack_is_the_same_for_the_same_stream(name: str) -> None:
    claims = [attack(name).claim(seen(rng=np.random.default_rng(4))) for _ in range(2)]
    uploads = [attack(name).upload(seen(rng=np.random.default_rng(4))) for _ in range(2)]
    np.testing.assert_array_equal(claims[0], claims[1])  # NaN is the same as NaN
    np.testing.assert_array_equal(uploads[0], uploads[1])


@pytest.mark.parametrize("name", register.attack.names())
def test_only_those_that_say_so_need_the_honest_models(name: str) -> None:
    blind: dict[str, Doubles | None] = {"honest": None, "honest_scores": None}
    full, without = attack(name).upload(seen()), attack(name).upload(seen(**blind))
    same = (full is None and without is None) or np.array_equal(full, without, equal_nan=True)  # type: ignore[arg-type]
    assert same is not register.attack.get(name).omniscient


@pytest.mark.parametrize("name", register.attack.names())
def test_every_attack_says_what_it_is(name: str) -> None:
    assert len((register.attack.get(name).__doc__ or "").split()) > 3


def test_an_unknown_attack_is_named_with_the_ones_there_are() -> None:
    with refused_as("unknown-name", "'lair'", "Did you mean 'liar'?"):
        make_attack(Spec(attack=AttackSpec("lair")))


def test_a_scale_that_means_nothing_is_refused() -> None:
    with refused_as("no-effect", "'zero'", "'scale'"):
        make_attack(Spec(attack=AttackSpec("zero", scale=2.0)))
