"""Modules written in any style: what is made of known layers runs natively as in torch; the rest is refused by line."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch.nn import functional

from cbdsl.engines.engine import Sgd
from cbdsl.engines.native_engine import NativeEngine
from cbdsl.engines.torch_engine import TorchEngine
from cbdsl.models.architecture import Architecture, from_module
from cbdsl.models.layers import (
    ArchitectureError,
    AvgPool2d,
    Conv2d,
    Layer,
    Linear,
    MaxPool2d,
    Relu,
    Sigmoid,
    Tanh,
)
from cbdsl.models.to_torch import to_flat
from support.networks import SMALL, architectures, distance, module_of, needs_native, samples_for

IMAGE = SMALL.shape


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Wrapped(nn.Module):
    """Sequentials inside of wrappers, called from forward."""

    def __init__(self, architecture: Architecture, cut: int) -> None:
        super().__init__()
        parts = list(module_of(architecture).children())
        self.front = nn.ModuleDict({"body": nn.Sequential(nn.Identity(), nn.Sequential(*parts[:cut]))})
        self.back = nn.ModuleList(parts[cut:])

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        if scale is not None:
            x = x * scale
        x = self.front["body"](x)
        for part in self.back:
            x = part(x)
        return x


class Written(nn.Module):
    """Only layers with weights are modules; the rest is calls."""

    def __init__(self, architecture: Architecture, calls: Callable[[Layer, Tensor], Tensor]) -> None:
        super().__init__()
        parts = zip(architecture.layers, module_of(architecture).children(), strict=True)
        self.weighted = nn.ModuleList(part for _, part in parts if list(part.parameters()))
        self.plan, self.calls = architecture.layers, calls

    def forward(self, x: Tensor) -> Tensor:
        weighted = iter(self.weighted)
        for layer in self.plan:
            x = next(weighted)(x) if isinstance(layer, Conv2d | Linear) else self.calls(layer, x)
        return x


def functions(layer: Layer, x: Tensor) -> Tensor:
    match layer:
        case Relu():
            return functional.relu(x, inplace=True)
        case Tanh():
            return torch.tanh(x)
        case Sigmoid():
            return torch.sigmoid(x)
        case MaxPool2d(kernel=kernel, stride=stride):
            return functional.max_pool2d(x, kernel, stride=stride)
        case AvgPool2d(kernel=kernel, stride=stride):
            return functional.avg_pool2d(x, kernel, stride)
    return functional.dropout(torch.flatten(x, 1), 0.0, training=True)


def methods(layer: Layer, x: Tensor) -> Tensor:
    match layer:
        case Relu():
            return x.relu()
        case Tanh():
            return x.tanh()
        case Sigmoid():
            return x.contiguous().sigmoid_()
        case MaxPool2d(kernel=kernel, stride=stride):
            return torch.max_pool2d(x, kernel, stride)
        case AvgPool2d(kernel=kernel, stride=stride):
            return functional.avg_pool2d(x, kernel_size=kernel, stride=stride)
    count, channels, height, width = x.shape
    assert x.ndim == 4
    return x.reshape(count, channels * height * width).view(x.size(0), -1)


STYLES: list[Callable[[Architecture], nn.Module]] = [
    lambda architecture: Wrapped(architecture, len(architecture.layers) // 2),
    lambda architecture: Written(architecture, functions),
    lambda architecture: Written(architecture, methods),
]


@needs_native
@given(architecture=architectures(), style=st.sampled_from(STYLES), momentum=st.sampled_from([0.0, 0.9]))
def test_a_chain_is_the_same_network_in_every_style_and_the_native_engine_trains_it_as_torch_does(
    architecture: Architecture, style: Callable[[Architecture], nn.Module], momentum: float
) -> None:
    torch.manual_seed(5)
    module = style(architecture)
    described = from_module(module, architecture.shape)
    assert described == architecture
    weights, samples = np.stack([to_flat(module), to_flat(style(architecture))]), samples_for(architecture, 60)
    batches = np.random.default_rng(1).integers(0, 60, (2, 12, 10)).astype(np.int32)
    native, torchs = NativeEngine(described, threads=1), TorchEngine(module)
    found, expected = (engine.train(weights, samples, batches, Sgd(0.005, momentum)) for engine in (native, torchs))
    assert distance(found, expected) < 1e-5
    indices = np.arange(60, dtype=np.int32)
    losses = [engine.losses(weights, samples, indices) for engine in (native, torchs)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def base() -> nn.Module:
    """The layers of SMALL that have weights."""
    module = nn.Module()
    module.conv, module.hidden, module.last = nn.Conv2d(1, 3, 3), nn.Linear(27, 8), nn.Linear(8, 4)
    return module


def rows(module: Any, x: Tensor) -> Tensor:  # noqa: ANN401
    return functional.max_pool2d(module.conv(x).relu(), 2).flatten(1)


def logits(module: Any, x: Tensor) -> Tensor:  # noqa: ANN401
    return module.last(torch.tanh(module.hidden(rows(module, x))))  # type: ignore[no-any-return]


def made(forward: Callable[[Any, Tensor], Any], make: Callable[[], nn.Module] = base) -> nn.Module:
    """A module of a class of its own with this forward."""
    module = make()
    module.__class__ = type("Net", (nn.Module,), {"forward": forward})
    return module


def by_shape(module: Any, x: Tensor) -> Tensor:  # noqa: ANN401
    assert x.dim() == 4
    assert x.shape[1:] == IMAGE, "wrong images"
    if x.size(dim=-1) > 8:
        x = x[:, :, :8, :8]
    module.seen = x.shape
    return logits(module, x.view(-1, 1, 8, 8).float())


def by_all_sizes(module: Any, x: Tensor) -> Tensor:  # noqa: ANN401
    count, *sizes = x.shape
    assert module.conv.weight.size(1) == sizes[0]
    assert math.prod(sizes) == 64
    return logits(module, x.reshape(count, *sizes))


def with_a_layer_made_on_the_way(module: Any, x: Tensor) -> Tensor:  # noqa: ANN401
    return module.last(nn.Tanh()(module.hidden(rows(module, x))))  # type: ignore[no-any-return]


def with_result_ignored(module: Any, x: Tensor) -> Tensor:  # noqa: ANN401
    x = module.hidden(rows(module, x))
    torch.tanh_(x)
    return module.last(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("forward", [logits, by_shape, by_all_sizes, with_a_layer_made_on_the_way, with_result_ignored])
def test_what_depends_on_the_shape_of_a_sample_alone_is_worked_out(forward: Callable[[Any, Tensor], Tensor]) -> None:
    assert from_module(made(forward), IMAGE) == SMALL


def without_gradients(module: Any, x: Tensor) -> Tensor:  # noqa: ANN401
    with torch.no_grad():
        x = rows(module, x)
    return module.last(module.hidden(x))  # type: ignore[no-any-return]


def without_gradients_in_training(module: Any, x: Tensor) -> Tensor:  # noqa: ANN401
    with torch.set_grad_enabled(not module.training):
        x = functional.dropout(rows(module, x), 0.5, module.training)
    return module.last(module.hidden(x))  # type: ignore[no-any-return]


def by_chance(module: Any, x: Tensor) -> Tensor:  # noqa: ANN401
    return logits(module, x) if random.random() < 2 else x


def otherwise_in_scoring(module: Any, x: Tensor) -> Tensor:  # noqa: ANN401
    return logits(module, x) if module.training else logits(module, x).relu()


def attentive(module: Any, x: Tensor) -> Tensor:  # noqa: ANN401
    x = module.hidden(rows(module, x))
    return module.last(x * torch.tanh(x))  # type: ignore[no-any-return]


def by_value(module: Any, x: Tensor) -> Tensor:  # noqa: ANN401
    return logits(module, x.relu()) if x.relu() > 0 else logits(module, x)


def by_number_of_samples(module: Any, x: Tensor) -> Tensor:  # noqa: ANN401
    return logits(module, x.relu()) if x.shape[0] == 1 else logits(module, x)


def tied() -> nn.Module:
    module: Any = base()
    module.hidden, module.last = nn.Linear(27, 27), nn.Linear(27, 27)
    module.last.weight = module.hidden.weight
    return module  # type: ignore[no-any-return]


def odd() -> nn.Module:
    module: Any = nn.Module()
    module.last, module.hidden, module.conv = nn.Linear(8, 4), nn.Linear(27, 8), nn.Conv2d(1, 3, 3)
    return module  # type: ignore[no-any-return]


def with_spare() -> nn.Module:
    module: Any = base()
    module.spare = nn.Linear(3, 3)
    return module  # type: ignore[no-any-return]


def normed() -> nn.Module:
    module: Any = base()
    module.norm = nn.BatchNorm2d(12, track_running_stats=False, affine=False)
    return module  # type: ignore[no-any-return]


REFUSED = [
    (
        made(attentive),
        r"line \d+ of test_from_torch.py \(return module.last\(x \* .*: mul is not known there",
    ),
    (made(lambda net, x: {"a": logits(net, x)}), "gives 1 outputs"),
    (made(by_value), r"line \d+ of test_from_torch.py .*x.relu\(\) > 0.*cannot branch"),
    (made(by_number_of_samples), r"x.shape\[0\] == 1.*number of samples"),
    (made(logits, tied), r"layer last \(Linear\) shares its weights with layer hidden \(Linear\)"),
    (made(lambda net, x: net.hidden(net.hidden(rows(net, x))), tied), r"layer hidden \(Linear\) is used twice \(line"),
    (made(logits, odd), "layer last .* defined before layer conv .* define layers in the order of their use"),
    (made(logits, with_spare), "spare.weight is never used"),
    (made(lambda net, x: net.norm(x), normed), r"layer norm \(BatchNorm2d\).*by nn.GroupNorm\(4, 12, affine=False\)"),
    (made(lambda net, x: net.last(rows(net, x))), r"layer last \(Linear\): takes 8 inputs but is given \(27,\)"),
    (made(lambda net, x: functional.elu(logits(net, x))), "line .*: elu is not one of"),
    (made(lambda net, x: functional.log_softmax(logits(net, x), 1)), "log_softmax is not native.*leave it out"),
    (made(lambda net, x: functional.linear(rows(net, x), net.hidden.weight)), "use nn.Linear"),
    (made(lambda net, x: logits(net, x**2)), "pow is not one of"),
    (made(lambda net, x: net.last(net.hidden(rows(net, x).detach()))), "detach is not one of"),
    (made(lambda _, x: x.flatten()), r"flatten\(\) of N samples"),
    (made(lambda net, x: net.last(x.view(2, -1))), r"reshape\(2, -1\) of N samples of shape \(1, 8, 8\).*x.flatten"),
    (made(lambda net, x: net.last(x.view(x.size(0), 4, -1))), r"reshape\(N, 4, -1\)"),
    (made(lambda _, x: x.view(len(x), -1)), r"x.size\(0\) for len\(x\)"),
    (made(lambda net, x: [logits(net, one) for one in x]), "torch.fx cannot follow it"),
    (made(lambda *_: 1 / 0), "torch.fx cannot follow it \\(ZeroDivisionError"),
    (made(lambda *_: None), "gives None"),
    (made(lambda net, x: (logits(net, x), x)[1]), r"the result of line \d+ of .* is never used; leave it out"),
    (made(without_gradients), "does more than torch.fx can see"),
    (made(without_gradients_in_training), "does more than torch.fx can see"),
    (made(by_chance), "draws random numbers"),
    (made(otherwise_in_scoring), "differ in training and evaluation"),
]


@pytest.mark.parametrize(("module", "words"), REFUSED, ids=[words[:40] for _, words in REFUSED])
def test_what_is_not_made_of_layers_is_refused_by_layer_or_line_on_one_line(module: nn.Module, words: str) -> None:
    with pytest.raises(ArchitectureError, match=words) as caught:
        from_module(module, IMAGE)
    assert "\n" not in str(caught.value)


def test_reading_a_module_changes_neither_it_nor_the_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    module, seeded = made(by_shape), list[int]()
    before, names = to_flat(module), set(vars(module))
    torch.manual_seed(3)
    state = torch.get_rng_state()
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    from_module(module, IMAGE)
    assert np.array_equal(to_flat(module), before)
    assert set(vars(module)) == names
    assert module.training
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert seeded == []


def test_modules_of_other_threads_run_while_one_is_read() -> None:
    other, x, stop = made(logits), torch.randn(2, *IMAGE), threading.Event()
    expected, wrong = other(x), list[object]()

    def use() -> None:
        try:
            while not stop.is_set():
                wrong.extend([] if torch.equal(other(x), expected) else ["another output"])
        except Exception as error:
            wrong.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    for _ in range(5):
        from_module(made(logits), IMAGE)
    stop.set()
    thread.join()
    assert not wrong
