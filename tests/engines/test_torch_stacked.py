"""Models stacked on a torch device give what the loop over workers gives; the CPU is a device as any other here."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

import cbdsl
from cbdsl.arrays import PADDING, Floats, Samples
from cbdsl.engines import torch_engine
from cbdsl.engines.choose import Choice
from cbdsl.engines.engine import Sgd
from cbdsl.engines.torch_engine import StackedTorchEngine, TorchEngine, accelerators, workers_together
from cbdsl.models.to_torch import to_flat
from support.helpers import blobs, module_named, perceptron, small_spec
from support.refusals import refused_as

RNG = np.random.default_rng(5)
IMAGES = Samples(RNG.normal(size=(80, 1, 16, 16)).astype(np.float32), RNG.integers(0, 4, 80).astype(np.int32))
EVERY = np.arange(80, dtype=np.int32)
DEVICES = ["cpu", *accelerators()]  # a GPU is tried wherever there is one
WORKERS = 9
WHOLE = Sgd(0.05, momentum=0.9, weight_decay=0.01, proximal=0.3)


def network() -> nn.Module:
    return module_named("cnn", (1, 16, 16), 4)


def stacked(module: nn.Module | None = None, block: int | None = None, device: str = "cpu") -> StackedTorchEngine:
    return StackedTorchEngine(module or network(), torch.device(device), block)


def stack(workers: int = WORKERS, build: Callable[[], nn.Module] = network) -> Floats:
    torch.manual_seed(0)
    return np.stack([to_flat(build()) for _ in range(workers)])


def batches(workers: int = WORKERS, steps: int = 4, size: int = 5) -> np.ndarray:
    """Batches of every length: short ones, other lengths for other workers, none in the middle, none at all."""
    chosen = np.random.default_rng(1).integers(0, 80, (workers, steps, size)).astype(np.int32)
    for worker in range(workers):
        chosen[worker, -1, 1 + worker % size :] = PADDING
    chosen[0, 1] = PADDING
    chosen[workers // 2] = PADDING
    return chosen


def close(found: Floats, expected: Floats) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


class Through(nn.Module):
    """A function of a row of features, and a layer behind it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.last = nn.Linear(256, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(x.flatten(1)))  # type: ignore[no-any-return]


class Shifted(nn.Module):
    """A constant table, and weights that are used twice."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(-1, 1, 256))
        self.first, self.last = nn.Linear(256, 4), nn.Linear(4, 4)
        self.again = self.last

    def forward(self, x: Tensor) -> Tensor:
        return self.again(torch.tanh(self.last(self.first(x.flatten(1) + self.table))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "sgd", [Sgd(0.1), Sgd(0.1, momentum=0.9), Sgd(0.1, weight_decay=0.1), Sgd(0.1, proximal=0.5), WHOLE]
)
def test_training_is_that_of_the_loop_over_workers(sgd: Sgd, device: str) -> None:
    engine = stacked(device=device)
    close(engine.train(stack(), IMAGES, batches(), sgd), TorchEngine(network()).train(stack(), IMAGES, batches(), sgd))
    assert engine.stacks


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block", [1, 2, 7, WORKERS, 100])
def test_blocks_of_any_size_train_alike(block: int, device: str) -> None:
    corrections = np.random.default_rng(3).normal(0, 0.1, stack().shape).astype(np.float32)
    expected = TorchEngine(network()).train(stack(), IMAGES, batches(), WHOLE, None, corrections)
    engine = stacked(block=block, device=device)
    found = engine.train(stack(), IMAGES, batches(), WHOLE, None, corrections)
    close(found, expected)
    assert engine.stacks
    np.testing.assert_array_equal(engine.train(stack(), IMAGES, batches(), WHOLE, None, corrections), found)


def test_no_more_models_than_a_block_are_on_the_device_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sizes = stacked(block=4), []
    inner = StackedTorchEngine._gradients

    def watched(self: StackedTorchEngine, flat: Tensor, *more: Tensor) -> Tensor:
        sizes.append(len(flat))
        return inner(self, flat, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(StackedTorchEngine, "_gradients", watched)
    engine.train(stack(), IMAGES, batches(), Sgd(0.1))
    assert sizes[1:] == [4] * 4 + [4] * 4 + [1] * 4  # the first one was to try


def test_the_size_of_a_block_follows_from_model_and_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert workers_together(44_426, 10, 784) > 100
    assert workers_together(10**6, 10, 784) > workers_together(2 * 10**6, 10, 784) > 1
    assert workers_together(44_426, 10, 784) > workers_together(44_426, 1000, 784)
    assert workers_together(10**10, 10, 784) == 1
    seen: list[tuple[int, ...]] = []

    def reckoned(*sizes: int) -> int:
        seen.append(sizes)
        return 3

    monkeypatch.setattr(torch_engine, "workers_together", reckoned)
    engine = stacked()
    engine.train(stack(), IMAGES, batches(), Sgd(0.1))
    assert seen == [(engine.size, 5, 256)]


def test_empty_batches_are_no_step_and_keep_their_momentum() -> None:
    weights, chosen = stack(3), batches(3, steps=5)
    chosen[:] = np.abs(chosen)
    holes = chosen.copy()
    holes[1, 2] = PADDING
    engine = stacked()
    trained = engine.train(weights, IMAGES, holes, WHOLE)
    without = np.delete(chosen[1:2], 2, axis=1)
    close(trained[1:2], TorchEngine(network()).train(weights[1:2], IMAGES, without, WHOLE))
    nothing = np.full_like(chosen, PADDING)
    np.testing.assert_array_equal(engine.train(weights, IMAGES, nothing, WHOLE), weights)
    np.testing.assert_array_equal(engine.train(weights, IMAGES, chosen[:, :0], WHOLE), weights)
    assert engine.stacks


def test_training_leaves_its_input_alone() -> None:
    weights = stack(2)
    before = weights.copy()
    assert not np.array_equal(stacked().train(weights, IMAGES, batches(2), Sgd(0.1)), before)
    np.testing.assert_array_equal(weights, before)


@pytest.mark.parametrize("spoiled", ["weights", "samples", "corrections"])
def test_what_is_not_finite_spoils_its_own_row_alone(spoiled: str) -> None:
    weights, features, chosen = stack(4), IMAGES.features.copy(), batches(4) % 79
    chosen[batches(4) == PADDING] = PADDING
    corrections = np.zeros_like(weights)
    if spoiled == "weights":
        weights[1, 3] = np.nan
    elif spoiled == "samples":
        features[79] = np.nan
        chosen[1, 0, 0] = 79
    else:
        corrections[1, 3] = np.inf
    found = stacked(block=4).train(weights, Samples(features, IMAGES.labels), chosen, WHOLE, None, corrections)
    assert not np.isfinite(found[1]).all()
    others = [0, 2, 3]
    assert np.isfinite(found[others]).all()
    close(found[others], TorchEngine(network()).train(stack(4)[others], IMAGES, chosen[others], WHOLE))


@pytest.mark.parametrize("device", DEVICES)
def test_scores_and_gradients_are_those_of_the_loop(device: str) -> None:
    weights, engine, loop = stack(), stacked(device=device), TorchEngine(network())
    own = np.random.default_rng(2).integers(0, 80, (WORKERS, 6)).astype(np.int32)
    own[2, 3:] = PADDING
    own[4] = PADDING
    for indices in (EVERY[20:50], own):
        np.testing.assert_allclose(engine.losses(weights, IMAGES, indices), loop.losses(weights, IMAGES, indices), 1e-5)
        np.testing.assert_array_equal(
            engine.accuracies(weights, IMAGES, indices), loop.accuracies(weights, IMAGES, indices)
        )
        close(engine.gradients(weights, IMAGES, indices), loop.gradients(weights, IMAGES, indices))
    np.testing.assert_allclose(
        engine.sample_losses(weights[0], IMAGES, EVERY[::-1]), loop.sample_losses(weights[0], IMAGES, EVERY[::-1]), 1e-5
    )


@pytest.mark.parametrize("device", DEVICES)
def test_a_score_is_the_same_to_the_bit_whoever_else_is_scored(device: str) -> None:
    weights, engine = stack(), stacked(device=device)
    together = engine.losses(weights, IMAGES, EVERY)
    alone = np.concatenate([engine.losses(one[None], IMAGES, EVERY) for one in weights[::-1]])
    np.testing.assert_array_equal(together, alone[::-1])


def test_constant_tables_and_weights_used_twice_are_stacked() -> None:
    engine, weights = stacked(Shifted()), stack(5, Shifted)
    close(
        engine.train(weights, IMAGES, batches(5), WHOLE),
        TorchEngine(Shifted()).train(weights, IMAGES, batches(5), WHOLE),
    )
    assert engine.stacks


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(256, 4)),
        lambda: Through(lambda x: dropout(x, 0.5)),
        lambda: nn.Sequential(nn.Flatten(), nn.RReLU(), nn.Linear(256, 4)),
        lambda: Through(lambda x: x + torch.randn(256)),
    ],
    ids=["layer", "function", "rrelu", "noise"],
)
@pytest.mark.parametrize("block", [1, 2, None])
def test_random_numbers_come_from_the_seeds_whatever_the_block(
    build: Callable[[], nn.Module], block: int | None
) -> None:
    weights, chosen = stack(5, build), batches(5)
    weights[1], chosen[1] = weights[0], chosen[0]
    seeds = np.array([7, 7, 8, 9, 10], dtype=np.uint64)
    engine = stacked(build(), block)
    found = engine.train(weights, IMAGES, chosen, Sgd(0.1), seeds)
    assert engine.stacks is False
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found, TorchEngine(build()).train(weights, IMAGES, chosen, Sgd(0.1), seeds))
    other = engine.train(weights, IMAGES, chosen, Sgd(0.1), seeds + np.uint64(1))
    assert not np.array_equal(found[0], other[0])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x * float(x.abs().max()),
        lambda x: x - x.mean(0),
        lambda x: x - x.detach().mean(0),
        lambda x: torch.zeros(x.shape).copy_(x),
        lambda x: x[(x[:, 0] > 0).nonzero().flatten()].sum() * 0.01 + x,
    ],
    ids=["decision", "number", "batch mean", "hidden batch mean", "in place", "selection"],
)
def test_what_cannot_be_stacked_is_trained_one_by_one(function: Callable[[Tensor], Tensor]) -> None:
    engine, weights = stacked(Through(function), block=3), stack(5, lambda: Through(function))
    found = engine.train(weights, IMAGES, batches(5), WHOLE)
    assert engine.stacks is False
    np.testing.assert_array_equal(found, TorchEngine(Through(function)).train(weights, IMAGES, batches(5), WHOLE))


def test_batch_statistics_of_a_short_batch_are_those_of_its_samples() -> None:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(256, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 4)
        )

    chosen = batches(6)
    chosen[chosen == PADDING] = 3
    chosen[2:, :, 3:] = PADDING
    engine, weights = stacked(build()), stack(6, build)
    close(engine.train(weights, IMAGES, chosen, WHOLE), TorchEngine(build()).train(weights, IMAGES, chosen, WHOLE))
    assert engine.stacks is False


class Moody(nn.Module):
    """Can be stacked in a good mood; in a bad one it draws random numbers, or decides by a value."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.draws = draws
        self.last = nn.Linear(256, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(x.flatten(1))
        if MOOD["bad"] and self.draws:
            torch.rand(3, generator=torch.default_generator)
        elif MOOD["bad"] and float(x.detach().sum()) > 1e9:
            return -x
        return x


MOOD = {"bad": False}


@pytest.mark.parametrize("draws", [True, False])
def test_a_block_that_turns_out_to_be_impossible_is_trained_one_by_one(
    draws: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, weights = stacked(Moody(draws)), stack(3, lambda: Moody(draws))
    engine.train(weights, IMAGES, batches(3), WHOLE)
    assert engine.stacks
    monkeypatch.setitem(MOOD, "bad", True)
    expected = TorchEngine(Moody(draws)).train(weights, IMAGES, batches(3), WHOLE)
    np.testing.assert_array_equal(engine.train(weights, IMAGES, batches(3), WHOLE), expected)


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("value", [1.0, np.nan])
def test_samples_that_tell_nothing_decide_nothing(size: int, value: float) -> None:
    equal = Samples(np.full((3, 1, 16, 16), value, np.float32), np.array([0, 1, 2], np.int32))
    chosen = np.zeros((2, 2, size), np.int32)
    engine = stacked()
    close(
        engine.train(stack(2), equal, chosen, Sgd(0.1)), TorchEngine(network()).train(stack(2), equal, chosen, Sgd(0.1))
    )
    assert engine.stacks is None
    engine.train(stack(2), IMAGES, batches(2), Sgd(0.1))
    assert engine.stacks


def test_samples_that_are_not_finite_do_not_decide_how_a_module_is_trained() -> None:
    features = IMAGES.features.copy()
    features[[0, 1, 79]] = np.nan
    engine = stacked()
    engine.train(stack(2), Samples(features, IMAGES.labels), batches(2), Sgd(0.1))
    assert engine.stacks


class Counting(nn.Module):
    """Keeps count in a buffer while it trains."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.last = nn.Linear(256, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.last(x.flatten(1))  # type: ignore[no-any-return]


def test_a_module_that_keeps_state_is_refused_as_by_the_loop() -> None:
    with refused_as("not-supported"):
        stacked(Counting()).train(stack(2, Counting), IMAGES, batches(2), Sgd(0.1))
    with refused_as("not-supported", "running_mean"):
        stacked(nn.Sequential(nn.Linear(2, 2), nn.InstanceNorm1d(2, track_running_stats=True)))


def test_a_module_that_fails_says_so_itself() -> None:
    def fail(_: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        stacked(Through(fail)).train(stack(2, lambda: Through(fail)), IMAGES, batches(2), Sgd(0.1))


def test_a_device_without_memory_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = stacked()

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nAnd more.")

    monkeypatch.setattr(engine, "_gradients", full)
    with refused_as("too-large", "2 GiB", "--device cpu"):
        engine.train(stack(2), IMAGES, batches(2), Sgd(0.1))


@pytest.mark.parametrize("build", [network, lambda: Through(dropout), lambda: Through(lambda x: x + torch.randn(256))])
def test_generators_settings_and_environment_are_put_back(
    build: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    torch.manual_seed(99)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    engine = stacked(build())
    engine.train(stack(2, build), IMAGES, batches(2), Sgd(0.1), np.array([1, 2], np.uint64))
    torch.set_rng_state(before)  # `stack` drew
    engine.train(stack_zero(engine), IMAGES, batches(2), Sgd(0.1), np.array([1, 2], np.uint64))
    engine.losses(stack_zero(engine), IMAGES, EVERY)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.deterministic
    assert torch.get_num_threads() == threads
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def stack_zero(engine: StackedTorchEngine) -> Floats:
    return np.zeros((2, engine.size), np.float32)


def test_torch_is_told_to_repeat_itself_while_it_works() -> None:
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append((torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.allow_tf32))
        return x

    engine, weights = stacked(Through(look)), stack(2, lambda: Through(look))
    for work in (engine.losses, engine.accuracies, engine.gradients):
        work(weights, IMAGES, EVERY)
    engine.sample_losses(weights[0], IMAGES, EVERY)
    engine.train(weights, IMAGES, batches(2), Sgd(0.1))
    assert len(seen) > 8
    assert set(seen) == {(True, False)}


def test_everything_is_computed_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On torch's device without numbers: what mixes it with the CPU fails, and zeros come back."""
    monkeypatch.setattr(Tensor, "cpu", lambda self: torch.zeros(self.shape, dtype=self.dtype))
    state = torch.zeros(1)
    own = SimpleNamespace(get_rng_state=lambda: state, set_rng_state=lambda _: None, manual_seed=lambda _: None)
    monkeypatch.setattr(torch_engine, "_backend", lambda _: own)
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(x.device.type)
        return x

    engine, weights = stacked(Through(look), 2, "meta"), np.ones((3, 1028), np.float32)
    trained = engine.train(weights, IMAGES, batches(3), WHOLE, np.arange(3, dtype=np.uint64), weights)
    assert engine.stacks
    assert len(seen) > 2 * 4  # both ways were tried, and two blocks trained
    np.testing.assert_array_equal(trained, 0)
    np.testing.assert_array_equal(engine.losses(weights, IMAGES, EVERY), 0)
    np.testing.assert_array_equal(engine.gradients(weights, IMAGES, EVERY), 0)
    np.testing.assert_array_equal(engine.sample_losses(weights[0], IMAGES, EVERY), 0)
    assert set(seen) == {"meta"}


def test_a_whole_run_repeats_itself_and_no_honest_claim_fails_at_tolerance_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def choose(*_: object) -> Choice:
        return Choice(stacked(perceptron(), block=4))

    spec = small_spec(engine="torch", verification__tolerance=0.0, defence__commitment=True)
    loop = cbdsl.run(spec, model=perceptron, data=blobs(), threads=1)
    monkeypatch.setattr("cbdsl.runs.build.choose_engine", choose)
    first, second = (cbdsl.run(spec, model=perceptron, data=blobs(), threads=1) for _ in range(2))
    assert first.summary.engine == "torch-cpu"
    assert (first.summary.banned, first.summary.uploads > 0) == ([], True)
    np.testing.assert_array_equal(first.weights, second.weights)
    close(first.weights, loop.weights)
