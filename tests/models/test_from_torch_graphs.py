"""Modules with branches, as people write them: described exactly, and the description computes what they do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn
from torch.nn import functional

from cbdsl.models.architecture import Architecture, from_module
from cbdsl.models.layers import Add, ArchitectureError, Dropout, Layer, Linear, Relu, Scale, Shape
from cbdsl.models.network import initial_weights
from cbdsl.models.to_torch import load_flat, to_flat
from support.networks import graphs, module_of
from support.written_modules import MODULES


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check_same(module: nn.Module, architecture: Architecture) -> None:
    """Outputs and gradients of a module and of its description, with the module's weights."""
    again = module_of(architecture)
    load_flat(again, to_flat(module))
    x = torch.randn(4, *architecture.shape)
    outputs = [each.eval()(x.clone()) for each in (again, module)]
    torch.testing.assert_close(outputs[0], outputs[1])
    module.zero_grad()
    for output in outputs:
        output.square().sum().backward()
    for one, other in zip(again.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_as_people_write_it_is_described_exactly(name: str) -> None:
    make, expected = MODULES[name]
    torch.manual_seed(4)
    module = make()
    described = from_module(module, expected().shape)
    assert described == expected()
    check_same(module, described)


@given(graphs(dropout=True))
def test_a_random_graph_survives_json_and_the_way_through_torch(architecture: Architecture) -> None:
    assert Architecture.from_dict(json.loads(json.dumps(architecture.to_dict()))) == architecture
    torch.manual_seed(11)
    module = module_of(architecture)
    assert from_module(module, architecture.shape) == architecture
    assert to_flat(module).tobytes() == initial_weights(architecture, 11).tobytes()


def made(forward: Callable[[Any, Tensor], Any], **parts: Any) -> nn.Module:  # noqa: ANN401
    """A module of a class of its own with this forward, and with these layers and constants."""
    module = nn.Module()
    for name, part in parts.items():
        if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
            module.register_buffer(name, part)
        else:
            setattr(module, name, part)
    module.__class__ = type("Net", (nn.Module,), {"forward": forward})
    return module


def layers_of(module: nn.Module, shape: Shape) -> list[tuple[Layer, tuple[int, ...]]]:
    architecture = from_module(module, shape)
    check_same(module, architecture)
    return list(zip(architecture.layers, architecture.reads, strict=True))


def changed_before_it_is_read_again(net: Any, x: Tensor) -> Tensor:  # noqa: ANN401
    x = net.first(x)
    return net.last(functional.relu(x, inplace=True) + x)  # type: ignore[no-any-return]


def changed_with_nobody_looking(net: Any, x: Tensor) -> Tensor:  # noqa: ANN401
    x = net.first(x)
    before, same = x, x.contiguous()
    same += before
    x.mul_(3.0)
    return net.last(before)  # type: ignore[no-any-return]


def changed_in_another_shape(net: Any, x: Tensor) -> Tensor:  # noqa: ANN401
    row = x.flatten(1)
    x.relu_()
    return net.last(row)  # type: ignore[no-any-return]


def new_each_time(net: Any, x: Tensor) -> Tensor:  # noqa: ANN401
    x = net.first(x)
    before = x
    x = x + 1
    return net.last(before - x)  # type: ignore[no-any-return]


def test_what_changes_a_tensor_in_place_is_seen_by_whoever_reads_it_later() -> None:
    first, last = nn.Linear(3, 4), nn.Linear(4, 2)
    ends = (Linear(3, 4), (-1,)), (Linear(4, 2), (2,))
    assert layers_of(made(changed_before_it_is_read_again, first=first, last=last), (3,)) == [
        ends[0], (Relu(), (0,)), (Add(), (1, 1)), ends[1],
    ]  # fmt: skip
    assert layers_of(made(changed_with_nobody_looking, first=first, last=last), (3,)) == [
        ends[0], (Add(), (0, 0)), (Scale((3.0,)), (1,)), ends[1],
    ]  # fmt: skip
    assert layers_of(made(new_each_time, first=first, last=last), (3,)) == [
        ends[0], (Scale(offsets=(1.0,)), (0,)), (Scale((-1.0,)), (1,)), (Add(), (0, 2)), (Linear(4, 2), (3,)),
    ]  # fmt: skip
    with pytest.raises(ArchitectureError, match=r"what it reads was changed in place in another shape by line \d+"):
        from_module(made(changed_in_another_shape, last=nn.Linear(6, 2)), (2, 3))


CONSTANTS: dict[str, tuple[Callable[[Any, Tensor], Tensor], Scale]] = {
    "added": (lambda net, x: net.table + x, Scale(offsets=(1.0, 2.0, 4.0))),
    "subtracted": (lambda net, x: x - net.table, Scale(offsets=(-1.0, -2.0, -4.0))),
    "subtracted from": (lambda net, x: net.table - x, Scale((-1.0,), (1.0, 2.0, 4.0))),
    "multiplied": (lambda net, x: torch.mul(x, net.table), Scale((1.0, 2.0, 4.0))),
    "divided": (lambda net, x: x / net.table[None], Scale((1.0, 0.5, 0.25))),
    "a third": (lambda _, x: x / 3, Scale((0.3333333432674408,))),
    "a tensor": (lambda _, x: x * torch.tensor([[0.1]]), Scale((0.10000000149011612,))),
    "negative": (lambda _, x: -x, Scale((-1.0,))),
    "a size": (lambda _, x: x * x.size(1), Scale((3.0,))),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_are_described_as_float32_holds_them(name: str) -> None:
    call, scale = CONSTANTS[name]
    module = made(lambda net, x: net.last(call(net, x)), table=torch.tensor([1.0, 2.0, 4.0]), last=nn.Linear(3, 2))
    assert layers_of(module, (3,)) == [(scale, (-1,)), (Linear(3, 2), (0,))]


def test_adding_nothing_is_nothing_and_a_list_is_summed() -> None:
    module = made(lambda net, x: net.last(sum((x, x.tanh()), 0.0)), last=nn.Linear(3, 2))
    assert [type(layer).__name__ for layer, _ in layers_of(module, (3,))] == ["Tanh", "Add", "Linear"]


def test_dropout_is_one_layer_however_it_is_written_and_in_both_modes() -> None:
    as_layer = made(lambda net, x: net.last(net.drop(x)), drop=nn.Dropout(0.25), last=nn.Linear(3, 2))
    as_call = made(lambda net, x: net.last(functional.dropout(x, 0.25, net.training)), last=nn.Linear(3, 2))
    for module in (as_layer, as_call):
        for mode in (True, False):
            assert layers_of(module.train(mode), (3,)) == [(Dropout(0.25), (-1,)), (Linear(3, 2), (0,))]


def test_dropout_in_branches_that_are_moved_is_described() -> None:
    """Whoever draws first may differ then, so only scoring is compared."""
    module = made(
        lambda net, x: net.drop(net.one(x)) + net.drop(net.two(x)), two=nn.Linear(3, 2), one=nn.Linear(3, 2),
        drop=nn.Dropout(0.5),
    )  # fmt: skip
    assert [read for _, read in layers_of(module, (3,))] == [(-1,), (-1,), (1,), (0,), (2, 3)]


W = torch.ones(3)
REFUSED: list[tuple[nn.Module, str]] = [
    (made(lambda net, x: net.a(x * net.w), w=nn.Parameter(W), a=nn.Linear(3, 2)), "line .* uses the weights w outside"),
    (made(lambda net, x: net.a(x * x), a=nn.Linear(3, 2)), "mul is not known there; tensors are added"),
    (made(lambda net, x: net.a(1 / x), a=nn.Linear(3, 2)), "div is not known there"),
    (made(lambda net, x: net.a(x.add(x, alpha=2)), a=nn.Linear(3, 2)), "add with alpha is not known; write it out"),
    (made(lambda net, x: net.a(x + net.w), w=torch.ones(5, 3), a=nn.Linear(3, 2)), r"table has shape \(5, 3\); one"),
    (made(lambda net, x: net.a(x + torch.ones(3).double()), a=nn.Linear(3, 2)), r"float64.*write .float\(\)"),
    (made(lambda net, x: net.a(x / 0), a=nn.Linear(3, 2)), "factors is inf; give a number from"),
    (made(lambda net, x: net.a(x + x.size(0)), a=nn.Linear(3, 2)), "computes with the number of samples"),
    (made(lambda net, x: net.a(net.w.add_(x)), w=torch.ones(1, 3), a=nn.Linear(3, 2)), "it changes a constant"),
    (made(lambda net, x: net.a(x) + net.b(x), a=nn.Linear(3, 2), b=nn.Linear(3, 1)), r"adds tensors of one shape but"),
    (made(lambda net, x: net.a(torch.cat([x, x])), a=nn.Linear(3, 2)), "joins along axis 0; only channels.*dim=1"),
    (made(lambda net, x: net.b(net.a(x)) + x, b=nn.Linear(2, 3), a=nn.Linear(3, 2)), "b .*defined before layer a"),
    (made(lambda net, x: (net.a(x), net.a(x)[:, 0])[0], a=nn.Linear(3, 2)), "layer a .* is used twice"),
    (made(lambda net, x: (x.relu(), net.a(x))[1], a=nn.Linear(3, 2)), r"the result of line \d+ of .* is never used"),
    (made(lambda net, x: (net.a(x), net.b(x)), a=nn.Linear(3, 2), b=nn.Linear(3, 2)), "gives 2 outputs"),
    (made(lambda net, x: net.a(x, x, x)[0], a=nn.MultiheadAttention(3, 1)), "attention multiplies tensors"),
    (made(lambda net, _: net.w, w=W), "which is not the result of a layer"),
    (made(lambda net, x: net.a(x, x), a=nn.Bilinear(3, 3, 2)), "Bilinear.* is not one of"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "words"), REFUSED, ids=[words[:40] for _, words in REFUSED])
def test_what_no_graph_of_layers_is_is_refused_by_layer_or_line(module: nn.Module, words: str) -> None:
    with pytest.raises(ArchitectureError, match=words) as caught:
        from_module(module, (3,))
    assert "\n" not in str(caught.value)


def test_a_module_that_fails_is_refused_with_its_own_words() -> None:
    module = made(lambda net, x: net.last(net.norm(x).flatten(1)), norm=nn.InstanceNorm1d(2), last=nn.Linear(2, 2))
    with pytest.raises(ArchitectureError, match=r"fails on three random samples .*more than 1 spatial element"):
        from_module(module, (2, 1))
