"""The native engine against torch, and against itself: any model, any batch, any grouping of workers."""

from __future__ import annotations

import multiprocessing
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from cbdsl.arrays import Floats, Indices, Samples
from cbdsl.engines import native_engine
from cbdsl.engines.engine import Sgd, as_float32
from cbdsl.engines.native_engine import NativeEngine, available, info, peak_multiply_adds
from cbdsl.models.architecture import Architecture
from cbdsl.models.layers import Conv2d, Flatten, Layer, Linear, MaxPool2d, Relu, Sigmoid, Tanh
from support.networks import (
    SMALL,
    architectures,
    distance,
    initial,
    reference,
    reference_loss,
    reference_training,
    samples_for,
)

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """Models this small run faster in torch without its own threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@given(architecture=architectures(), count=st.integers(1, 90))
def test_losses_accuracies_and_gradients_are_those_of_torch(architecture: Architecture, count: int) -> None:
    engine = NativeEngine(architecture, threads=2)
    samples, weights = samples_for(architecture, 100), initial(architecture, 2)
    indices = np.random.default_rng(2).integers(0, 100, count).astype(np.int32)
    losses, accuracies = engine.losses(weights, samples, indices), engine.accuracies(weights, samples, indices)
    gradients = engine.gradients(weights, samples, indices)
    for worker in range(2):
        module = reference(architecture, weights[worker])
        loss = reference_loss(module, samples, indices)
        loss.backward()  # type: ignore[no-untyped-call]
        gradient = torch.cat(
            [parameter.grad.flatten() for parameter in module.parameters() if parameter.grad is not None]
        )
        assert losses[worker] == pytest.approx(loss.item(), rel=1e-5)
        assert distance(gradients[worker], gradient.numpy()) < 1e-4
        answers = module(torch.from_numpy(samples.features[indices]).double()).argmax(1).numpy()
        assert accuracies[worker] == np.mean(answers == samples.labels[indices])


def test_short_batches_count_their_real_samples_and_empty_ones_are_no_step() -> None:
    engine, samples, weights = NativeEngine(SMALL), samples_for(SMALL, 30), initial(SMALL, 3)
    batches = np.full((3, 4, 20), -1, np.int32)
    batches[0, 0, :20], batches[0, 1, :5], batches[0, 3, :17] = np.arange(20), np.arange(5), np.arange(17)
    batches[1, 2, :1] = 7
    sgd = Sgd(0.1, 0.9, 0.01)
    trained = engine.train(weights, samples, batches, sgd)
    for worker in range(3):
        expected = reference_training(SMALL, weights[worker], samples, batches[worker], sgd)
        assert distance(trained[worker], expected) < 1e-5
    assert np.array_equal(trained[2], weights[2])


def test_no_worker_no_step_and_no_sample_are_fine() -> None:
    engine, samples, weights = NativeEngine(SMALL), samples_for(SMALL, 30), initial(SMALL, 2)
    assert engine.train(weights[:0], samples, np.zeros((0, 3, 2), np.int32), Sgd(0.1)).shape == (0, SMALL.size)
    assert np.array_equal(engine.train(weights, samples, np.zeros((2, 0, 2), np.int32), Sgd(0.1)), weights)
    assert np.array_equal(engine.train(weights, samples, np.zeros((2, 2, 0), np.int32), Sgd(0.1)), weights)
    nothing = np.zeros(0, np.int32)
    assert engine.losses(weights[:0], samples, nothing).shape == (0,)
    for empty in (nothing, np.full(3, -1, np.int32), np.full((2, 3), -1, np.int32)):
        assert np.isnan(engine.losses(weights, samples, empty)).all()
        assert np.isnan(engine.accuracies(weights, samples, empty)).all()
        assert np.isnan(engine.gradients(weights, samples, empty)).all()


def test_threads_company_and_order_of_workers_never_change_a_bit() -> None:
    samples, weights = samples_for(SMALL, 1500), initial(SMALL, 9)
    generator = np.random.default_rng(3)
    batches = generator.integers(0, 1500, (9, 5, 21)).astype(np.int32)
    shared = generator.integers(0, 1500, 1300).astype(np.int32)
    tasks: list[Callable[[NativeEngine, Floats, Indices, Indices], np.ndarray]] = [
        lambda engine, rows, own, _: engine.train(rows, samples, own, Sgd(0.1, 0.9)),
        lambda engine, rows, own, _: engine.train(rows, samples, own[:, :, :9], Sgd(0.1)),
        lambda engine, rows, own, _: engine.train(rows, samples, own, Sgd(0.1, 0.9, 0.01, 0.5), corrections=rows),
        lambda engine, rows, _, all_: engine.losses(rows, samples, all_),
        lambda engine, rows, _, all_: engine.losses(rows, samples, np.tile(all_, (len(rows), 1))),
        lambda engine, rows, _, all_: np.stack([engine.sample_losses(row, samples, all_) for row in rows]),
        lambda engine, rows, _, all_: engine.accuracies(rows, samples, all_),
        lambda engine, rows, _, all_: engine.gradients(rows, samples, all_),
    ]
    order = generator.permutation(9)
    for task in tasks:
        expected = task(NativeEngine(SMALL, threads=1), weights, batches, shared)
        for threads in (1, 2, 3, 7):
            engine = NativeEngine(SMALL, threads=threads)
            assert np.array_equal(task(engine, weights, batches, shared), expected)
            assert np.array_equal(task(engine, weights[order], batches[order], shared), expected[order])
            alone = [task(engine, weights[u : u + 1], batches[u : u + 1], shared)[0] for u in range(9)]
            assert np.array_equal(np.stack(alone), expected)


def test_the_same_samples_score_the_same_whether_shared_or_own() -> None:
    engine, samples, weights = NativeEngine(SMALL), samples_for(SMALL, 1500), initial(SMALL, 3)
    shared = np.random.default_rng(4).integers(0, 1500, 1111).astype(np.int32)
    own = np.full((3, 1200), -1, np.int32)
    own[:, :1111] = shared
    assert np.array_equal(engine.losses(weights, samples, shared), engine.losses(weights, samples, own))
    assert np.array_equal(engine.accuracies(weights, samples, shared), engine.accuracies(weights, samples, own))
    assert np.array_equal(engine.gradients(weights, samples, shared), engine.gradients(weights, samples, own))


@pytest.mark.parametrize("workers", [3, 40])
@pytest.mark.parametrize("own", [False, True])
def test_an_early_stop_reports_infinity_and_every_other_number_is_exact(workers: int, own: bool) -> None:
    engine, samples = NativeEngine(SMALL, threads=2), samples_for(SMALL, 1500)
    weights = initial(SMALL, workers)
    indices = np.arange(1500, dtype=np.int32)
    given_indices = np.tile(indices, (workers, 1)) if own else indices
    exact = engine.losses(weights, samples, given_indices)
    ceilings = exact.copy()
    ceilings[0] = exact[0] / 3
    ceilings[1] = np.nextafter(exact[1], 0)
    found = engine.losses(weights, samples, given_indices, ceilings)
    assert np.isposinf(found[:2]).all()
    assert np.array_equal(found[2:], exact[2:])
    assert np.array_equal(np.minimum(found, ceilings), np.minimum(exact, ceilings))
    assert np.array_equal(engine.losses(weights, samples, given_indices, np.full(workers, np.inf)), exact)
    assert np.array_equal(engine.losses(weights, samples, given_indices, np.full(workers, np.nan)), exact)


ANY_POOL = Architecture(
    (1, 8, 8),
    (Conv2d(1, 3, (3, 3)), MaxPool2d((3, 3), (1, 1)), Relu(), Flatten(), Linear(48, 8), Sigmoid(), Linear(8, 4)),
)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("architecture", [SMALL, ANY_POOL])
def test_a_weight_that_is_no_number_never_gives_a_loss_that_could_win(architecture: Architecture, bad: float) -> None:
    engine, samples, weights = NativeEngine(architecture), samples_for(architecture, 100), initial(architecture, 1)
    indices = np.arange(100, dtype=np.int32)
    broken = np.repeat(weights, architecture.size, axis=0)
    np.fill_diagonal(broken, bad)  # worker u has one bad weight: number u
    losses = engine.losses(broken, samples, indices)
    ceilings = np.full(len(broken), engine.losses(weights, samples, indices)[0])
    stopped = engine.losses(broken, samples, indices, ceilings)
    for worker, row in enumerate(broken):
        expected = np.nan if np.isnan(bad) else reference_loss(reference(architecture, row), samples, indices).item()
        if not np.isfinite(expected):
            assert not np.isfinite(losses[worker])
            assert not np.isfinite(stopped[worker])
        else:
            assert losses[worker] == pytest.approx(expected, rel=1e-4)


def test_a_sample_that_is_no_number_makes_its_loss_none() -> None:
    engine, samples, weights = NativeEngine(SMALL), samples_for(SMALL, 100), initial(SMALL, 2)
    samples.features[50, 0, 3, 3] = np.nan
    indices = np.arange(100, dtype=np.int32)
    assert np.isnan(engine.losses(weights, samples, indices)).all()
    assert np.isnan(engine.losses(weights, samples, indices, np.full(2, 100.0))).all()
    assert np.isfinite(engine.losses(weights, samples, indices[:50])).all()
    assert np.all(engine.accuracies(weights, samples, indices[50:51]) == 0)


def test_extreme_logits_have_the_loss_that_torch_gives() -> None:
    architecture = Architecture((3,), (Linear(3, 3, bias=False),))
    engine, samples = NativeEngine(architecture), Samples(np.eye(3, dtype=np.float32), np.array([0, 1, 2], np.int32))
    weights = np.array([[500, 0, -500, 0, 90, -300, 88, 1e-30, 2]], np.float32)
    for sample in range(3):
        indices = np.array([sample], np.int32)
        expected = reference_loss(reference(architecture, weights[0]), samples, indices).item()
        assert engine.losses(weights, samples, indices)[0] == pytest.approx(expected, rel=1e-6, abs=1e-30)


@pytest.mark.parametrize(("layer", "exact"), [(Tanh(), torch.tanh), (Sigmoid(), torch.sigmoid)])
def test_curves_are_accurate_everywhere(layer: Layer, exact: Callable[[torch.Tensor], torch.Tensor]) -> None:
    # Two logits, the second always 0: the loss of class 1 is a function of the activation that can be turned back.
    architecture = Architecture((1,), (Linear(1, 1, bias=False), layer, Linear(1, 2, bias=False)))
    engine = NativeEngine(architecture)
    values = np.concatenate([np.linspace(-12, 12, 4001), [-200, 200]]).astype(np.float32)
    weights = np.stack([values, np.ones_like(values), np.zeros_like(values)], axis=1)
    samples = Samples(np.ones((1, 1), np.float32), np.array([1], np.int32))
    losses = engine.losses(weights, samples, np.zeros(1, np.int32))
    activation = exact(torch.from_numpy(values).double()).numpy()
    assert np.allclose(losses, np.log1p(np.exp(activation)), rtol=3e-7, atol=0)


def _child(engine: NativeEngine, weights: Floats, samples: Samples, queue: multiprocessing.Queue[Floats]) -> None:
    queue.put(engine.train(weights, samples, np.zeros((4, 2, 3), np.int32), Sgd(0.1)))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_process_that_forks_after_using_the_engine_does_not_hang() -> None:
    engine, samples, weights = NativeEngine(SMALL, threads=3), samples_for(SMALL, 30), initial(SMALL, 4)
    expected = engine.train(weights, samples, np.zeros((4, 2, 3), np.int32), Sgd(0.1))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_child, args=(engine, weights, samples, queue))
    child.start()
    assert np.array_equal(queue.get(timeout=60), expected)
    child.join(60)
    assert child.exitcode == 0


def test_several_python_threads_may_share_an_engine() -> None:
    engine, samples, weights = NativeEngine(SMALL, threads=2), samples_for(SMALL, 300), initial(SMALL, 4)
    indices = np.arange(300, dtype=np.int32)
    expected, found = engine.losses(weights, samples, indices), []
    threads = [Thread(target=lambda: found.append(engine.losses(weights, samples, indices))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(np.array_equal(losses, expected) for losses in found)


def test_arrays_at_odd_addresses_are_copied_first() -> None:
    weights, samples = initial(SMALL, 2), samples_for(SMALL, 9)
    odd = np.frombuffer(b"\0" + weights.tobytes(), np.float32, weights.size, 1).reshape(weights.shape)
    features = np.frombuffer(b"\0" + samples.features.tobytes(), np.float32, samples.features.size, 1)
    assert not (odd.flags.aligned or features.flags.aligned)
    assert as_float32("weights", odd).flags.aligned
    engine, indices = NativeEngine(SMALL), np.arange(9, dtype=np.int32)
    found = engine.losses(odd, Samples(features.reshape(samples.features.shape), samples.labels), indices)
    assert np.array_equal(found, engine.losses(weights, samples, indices))


def test_other_layouts_and_number_types_are_converted() -> None:
    engine, samples, weights = NativeEngine(SMALL), samples_for(SMALL, 40), initial(SMALL, 3)
    indices = np.arange(40, dtype=np.int32)
    expected = engine.losses(weights, samples, indices)
    wide = Samples(samples.features.astype(np.float64), samples.labels.astype(np.int64))
    strided = np.asfortranarray(np.repeat(weights, 2, axis=0))[::2]
    assert np.array_equal(engine.losses(strided, wide, np.repeat(indices, 2)[::2].astype(np.int64)), expected)


GOOD = np.zeros((2, 1, 4), np.int32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weights": np.zeros((2, 5), np.float32)}, "give \\(U, "),
        ({"weights": np.zeros(SMALL.size, np.float32)}, "give \\(U, "),
        ({"weights": np.zeros((2, SMALL.size), np.int64)}, "weights have type int64"),
        ({"features": np.zeros((30, 8, 8), np.float32)}, "features have shape"),
        ({"features": np.zeros((30, 1, 8, 8), np.uint8)}, "features have type uint8"),
        ({"labels": np.zeros(29, np.int32)}, "one label for each of 30"),
        ({"labels": np.full(30, 4, np.int32)}, "classes are 0 to 3"),
        ({"labels": np.full(30, -1, np.int32)}, "classes are 0 to 3"),
        ({"labels": np.zeros(30)}, "labels have type float64"),
        ({"indices": np.array([0, 30], np.int32)}, "sample 30 of 30"),
        ({"indices": np.array([0, -2], np.int32)}, "sample -2 of 30"),
        ({"indices": np.array([0, 2**40])}, "fit into int32"),
        ({"indices": np.array([0, -1, 3], np.int32)}, "padding .* before a sample"),
        ({"indices": np.zeros((3, 4), np.int32)}, "indices have shape"),
        ({"indices": np.int32(3)}, "indices have shape"),
        ({"indices": np.zeros(3)}, "indices have type float64"),
        ({"ceilings": np.zeros(3)}, "one number for each of 2"),
    ],
)
def test_wrong_input_to_scoring_is_an_error_with_a_reason(change: dict[str, np.ndarray], words: str) -> None:
    samples = samples_for(SMALL, 30)
    samples = Samples(change.get("features", samples.features), change.get("labels", samples.labels))
    weights, indices = change.get("weights", initial(SMALL, 2)), change.get("indices", np.arange(30, dtype=np.int32))
    with pytest.raises(ValueError, match=words):
        NativeEngine(SMALL).losses(weights, samples, indices, change.get("ceilings"))


@pytest.mark.parametrize(
    ("batches", "sgd", "words"),
    [
        (np.zeros((2, 4), np.int32), Sgd(0.1), "batches have shape"),
        (np.zeros((3, 1, 4), np.int32), Sgd(0.1), "batches have shape"),
        (np.full((2, 1, 4), 30, np.int32), Sgd(0.1), "sample 30 of 30"),
        (np.array([[[0, -1, 2]]] * 2, np.int32), Sgd(0.1), "padding .* before a sample"),
        (np.zeros((2, 1, 4), np.int32), Sgd(float("nan")), "learning_rate is nan"),
        (np.zeros((2, 1, 4), np.int32), Sgd(0.1, float("inf")), "momentum is inf"),
        (np.zeros((2, 1, 4), np.int32), Sgd(0.1, proximal=float("nan")), "proximal is nan"),
    ],
)
def test_wrong_input_to_training_is_an_error_with_a_reason(batches: Indices, sgd: Sgd, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        NativeEngine(SMALL).train(initial(SMALL, 2), samples_for(SMALL, 30), batches, sgd)


@pytest.mark.parametrize("threads", [0, -1, 1.5, True])
def test_a_wrong_number_of_threads_is_an_error(threads: int) -> None:
    with pytest.raises(ValueError, match="threads is"):
        NativeEngine(SMALL, threads)


def test_a_missing_library_is_said_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_engine, "HERE", tmp_path)
    native_engine.library.cache_clear()
    try:
        assert "was not built" in str(available())
        (tmp_path / "_lanes.so").write_text("no library")
        assert "does not load" in str(available())
    finally:
        monkeypatch.undo()
        native_engine.library.cache_clear()
    assert available() is None


def test_info_describes_the_library_that_runs() -> None:
    found = info()
    assert found.lanes in {4, 8, 16}
    assert found.threads >= 1
    assert found.instructions
    assert found.compiler
    assert peak_multiply_adds(1, 0.01) > 0


def test_the_library_was_built_from_the_sources_that_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    assert info().kernels == runpy.run_path("setup.py")["kernels"](), "install the package again: its kernels changed"
