from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from cbdsl.arrays import Floats, Samples
from cbdsl.attacks.adversary import make_tools
from cbdsl.attacks.attack import AttackContext, AttackTools
from cbdsl.attacks.backdoors import (
    A3fl,
    Dba,
    EdgeCase,
    ModelReplacement,
    Neurotoxin,
    TrainedBackdoor,
    stamp_bars,
    stamp_patch,
)
from cbdsl.engines.engine import Sgd
from cbdsl.engines.native_engine import NativeEngine
from cbdsl.models.network import initial_weights
from cbdsl.models.zoo import softmax
from cbdsl.rng import stream
from cbdsl.runs.build import Experiment, UserParts
from cbdsl.runs.resolve import resolve
from cbdsl.spec import LocalSpec
from support.helpers import blobs, next_order, small_spec

SHAPE, CLASSES = (1, 8, 8), 3
NETWORK = softmax(SHAPE, CLASSES)
ENGINE = NativeEngine(NETWORK, 1)
LOCAL = LocalSpec(epochs=2, batch_size=4, learning_rate=0.05, momentum=0.9, weight_decay=0.01)


def samples(count: int = 18, seed: int = 0) -> Samples:
    rng = np.random.default_rng(seed)
    labels = (np.arange(count) % CLASSES).astype(np.int32)
    return Samples(rng.uniform(size=(count, *SHAPE)).astype(np.float32), labels)


def tools(weights: Floats | None = None, local: LocalSpec = LOCAL) -> AttackTools:
    start = initial_weights(NETWORK, 3) if weights is None else weights
    return make_tools(ENGINE, start, samples(), samples(12, 1), local)


def seen(given: AttackTools) -> AttackContext:
    return AttackContext(
        model=np.full(ENGINE.size, 5, np.float32), score=0.5, global_best=given.global_best, workers=6, attackers=2,
        rng=np.random.default_rng(4), score_of=lambda weights: float(weights.sum()), tools=lambda: given,
    )  # fmt: skip


@pytest.mark.parametrize("local", [LOCAL, replace(LOCAL, optimiser="adamw", schedule="decay", clip=0.5)])
def test_an_attacker_that_trains_in_its_own_way_trains_as_an_honest_worker_does(local: LocalSpec) -> None:
    given, rng = tools(local=local), stream(0, "batches")
    trained = given.train(given.own, rng)
    order = stream(0, "batches")
    batches = np.full((2, 20), -1, np.int32)
    for epoch in batches:
        epoch[:18] = order.permutation(18)
    sgd = Sgd.of(local, LOCAL.learning_rate)
    expected = ENGINE.train(given.global_best[None], given.own, batches.reshape(1, 10, 4), sgd)[0]
    np.testing.assert_allclose(trained, expected, atol=1e-6 if local == LOCAL else 1e-5)


def test_neurotoxin_holds_the_weights_that_the_clean_gradient_moves_most() -> None:
    given = tools(local=replace(LOCAL, weight_decay=0.0))
    sent = Neurotoxin(kept=0.75, epochs=0).upload(seen(given))
    clean = np.abs(given.gradient(given.global_best, given.own))
    held = np.argsort(clean)[int(0.75 * ENGINE.size) :]
    moved = sent != given.global_best
    assert not moved[held].any()
    assert moved.sum() > 0.7 * ENGINE.size


def test_four_bars_make_the_trigger() -> None:
    images = np.zeros((2, 1, 28, 28), np.float32)
    whole = Dba().triggered(images)
    found = {(int(row), int(column)) for row, column in np.argwhere(whole[1, 0])}
    columns = (*range(4), *range(6, 10))
    assert found == {(row, column) for row in (0, 3) for column in columns}
    np.testing.assert_array_equal(sum(stamp_bars(images, [bar]) for bar in range(4)), whole)
    assert not images.any()


@pytest.mark.parametrize("shape", [(3,), (1, 2), (2, 5, 4)])
def test_a_small_sample_carries_what_fits_of_a_trigger(shape: tuple[int, ...]) -> None:
    features = np.zeros((3, *shape), np.float32)
    for bar in range(4):
        assert stamp_bars(features, [bar]).any()
    assert (A3fl().triggered(features + np.arange(3, dtype=np.float32).reshape(-1, *[1] * len(shape)))[0] == 1).any()


@dataclass(frozen=True, eq=False)
class Watched(AttackTools):
    """Notes what it trains on."""

    lessons: list[Samples] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)

    def train(self, samples: Samples, rng: np.random.Generator, mask: Floats | float = 1.0) -> Floats:
        self.lessons.append(samples)
        self.epochs.append(self.local.epochs)
        return super().train(samples, rng, mask)


def test_attackers_take_the_bars_in_turn_unless_one_is_set() -> None:
    for rank in range(5):
        given = Watched(**vars(tools()))
        Dba().member(rank).upload(seen(given))
        lesson, own = given.lessons[0], given.own
        marked = (lesson.features != own.features).any((1, 2, 3))
        assert marked.sum() == 18 * 20 // 64
        assert (lesson.labels == np.where(marked, 0, own.labels)).all()
        np.testing.assert_array_equal(
            lesson.features[marked] > own.features[marked], stamp_bars(0 * own.features[marked], [rank % 4]) > 0
        )
        assert given.epochs == [10]
    assert Dba(bar=2).member(1) == Dba(bar=2)


def test_each_attacker_of_a_run_has_its_own_bar() -> None:
    stage = stage_of("dba", 5)
    adversary = stage.memory_swarm.adversary
    assert adversary is not None
    bars = [adversary._member(worker).bar for worker in stage.byzantine]  # type: ignore[attr-defined]
    assert bars == [0, 1, 2, 3, 0]


@pytest.mark.parametrize("sign", [1, -1])
def test_the_patch_goes_where_the_loss_of_its_target_falls(sign: int) -> None:
    weights = np.zeros((CLASSES, 64), np.float32)
    weights[0] = sign * np.linspace(0.01, 0.05, 64)
    flat = np.concatenate([weights.ravel(), np.zeros(CLASSES, np.float32)])
    marked = A3fl().triggered_for(samples().features, tools(flat))
    places = marked != samples().features
    assert set(np.argwhere(places)[:, 2]) == set(np.argwhere(places)[:, 3]) == {2, 3, 4, 5, 6}
    scoring = samples(12, 1).features
    np.testing.assert_allclose(marked[places], scoring.max() if sign > 0 else scoring.min())


def test_a3fl_trains_on_the_patch_of_the_round_which_is_found_once() -> None:
    given = tools()
    patch = np.full((1, 5, 5), 0.75, np.float32)
    given.shared["patch"] = patch
    watched = Watched(**vars(given))
    sent = A3fl().upload(seen(watched))
    (lesson,) = watched.lessons  # no search for a patch
    changed = (lesson.features != given.own.features).any((1, 2, 3))
    assert changed.sum() == len(given.own) // 4
    assert not lesson.labels[changed].any()
    np.testing.assert_array_equal(lesson.features[changed], stamp_patch(given.own.features[changed], patch))
    assert (sent != given.global_best).any()


@pytest.mark.parametrize("made", [Neurotoxin(), A3fl(), ModelReplacement(), EdgeCase(source=2, radius=0.1)])
def test_what_follows_the_model_in_a_message_stays(made: TrainedBackdoor) -> None:
    context = seen(tools())
    longer = replace(context, model=np.full(2 * ENGINE.size, 5, np.float32))
    sent = made.upload(longer)
    np.testing.assert_array_equal(sent[ENGINE.size :], 5)
    assert (sent[: ENGINE.size] != 5).any()


def test_a_replacement_is_scaled_so_that_the_average_becomes_it() -> None:
    given = tools()
    plain, boosted = (ModelReplacement(scale=one).upload(seen(given)) for one in (1.0, 0.0))
    step = plain - given.global_best
    np.testing.assert_allclose(boosted - given.global_best, 3 * step, rtol=1e-4, atol=1e-6)  # n / f = 6 / 2


def line(*values: float, label: int = 1) -> Samples:
    """Samples of one feature and one class."""
    return Samples(np.array(values, np.float32)[:, None], np.full(len(values), label, np.int32))


def test_the_tail_of_a_class_is_what_is_farther_from_its_mean_than_nearly_all_of_the_scoring_set() -> None:
    attack = EdgeCase(source=1, tail=0.25)
    scoring = Samples.joined([line(-4, -1, 0, 1, 4), line(50, 60, label=2)])  # mean 0; the limit at 75 % is 4
    tested = Samples.joined([line(-5, -4, 0, 4.5), line(99, label=2)])
    assert attack.victims(tested, scoring).tolist() == [True, False, False, True, False]
    assert not attack.victims(tested, line(1, 2, label=2)).any()  # nothing is known of the class


def test_edge_cases_are_labelled_as_the_target_and_fill_their_share_of_the_lessons() -> None:
    attack = EdgeCase(source=0, tail=0.25, share=0.5)
    own, scoring = line(-9, 0, 1, 2, label=0), line(-4, -1, 0, 1, 8, label=0)
    given = replace(tools(), own=own, scoring=scoring)
    lessons = attack.lessons(given, np.random.default_rng(0))
    assert lessons.features[:, 0].tolist() == [0, 1, 2, -9, 8, -9]  # the tail's samples in turn
    assert lessons.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert attack.lessons(replace(given, own=line(0, 1, label=2)), np.random.default_rng(0)).labels.tolist() == [
        2,
        2,
        1,
        1,
    ]


def test_the_step_of_an_edge_case_is_kept_within_its_radius() -> None:
    given = tools()
    honest = given.global_best + np.float32(1e-2)
    free, held = (
        EdgeCase(source=2, radius=radius).upload(replace(seen(given), model=honest)) - given.global_best
        for radius in (0.0, 0.5)
    )
    assert np.linalg.norm(held) == pytest.approx(0.5 * np.linalg.norm(honest - given.global_best), rel=1e-3)
    assert np.dot(free, held) == pytest.approx(np.linalg.norm(free) * np.linalg.norm(held), rel=1e-3)


def stage_of(attack: str, byzantine: int, **settings: Any) -> Experiment:  # noqa: ANN401
    spec = resolve(small_spec(workers=8, attack__name=attack, attack__byzantine=byzantine, model="softmax", **settings))
    return Experiment.prepare(spec, UserParts(data=blobs()), 1)


@pytest.mark.parametrize("engine", ["native", "torch"])
@pytest.mark.parametrize("name", ["neurotoxin", "a3fl", "dba", "model-replacement"])
def test_targeted_attackers_claim_truly_on_both_engines(name: str, engine: str) -> None:
    if engine == "torch":
        pytest.importorskip("torch")
    stage = stage_of(name, 2, engine=engine)
    order = next_order(stage.first_state(), stage.server.method.conversation, range(8), 1.0, 0.05)
    claims, models = stage.swarm.report(order), stage.swarm.upload(range(8))
    everything = stage.split.shared_scoring
    for worker in stage.byzantine:
        measured = stage.engine.losses(np.asarray(models[worker])[None], stage.dataset.train, everything)[0]
        assert claims[worker].score == pytest.approx(measured, rel=1e-4)
    success = stage.attack_success(stage.first_state())
    assert success is not None
    assert 0 <= success <= 1
