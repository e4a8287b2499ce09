"""Every torch layer and function that is known, as what it is described; and those that are not, with what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from cbdsl.models import layers as kinds
from cbdsl.models.architecture import Architecture, from_module
from cbdsl.models.layers import ArchitectureError, Layer, Shape

ROWS, SERIES, IMAGES = (6,), (4, 9), (4, 8, 6)

LAYERS: list[tuple[nn.Module, Shape, Layer | None]] = [
    (nn.Conv1d(4, 6, 3), SERIES, kinds.Conv1d(4, 6, (3,))),
    (nn.Conv1d(4, 6, 3, 2, 1, groups=2, bias=False), SERIES, kinds.Conv1d(4, 6, (3,), (1,), False, (2,), 2)),
    (nn.Conv1d(4, 6, 5, padding="same"), SERIES, kinds.Conv1d(4, 6, (5,), (2,))),
    (nn.Conv2d(4, 6, (3, 5), (2, 1), padding=(1, 2)), IMAGES, kinds.Conv2d(4, 6, (3, 5), (1, 2), True, (2, 1))),
    (nn.Conv2d(4, 8, 3, groups=4, padding="valid"), IMAGES, kinds.Conv2d(4, 8, (3, 3), groups=4)),
    (nn.Conv2d(4, 2, (1, 3), padding="same"), IMAGES, kinds.Conv2d(4, 2, (1, 3), (0, 1))),
    (nn.Linear(6, 3, bias=False), ROWS, kinds.Linear(6, 3, bias=False)),
    (nn.GroupNorm(2, 4), IMAGES, kinds.GroupNorm(2, 4)),
    (nn.GroupNorm(3, 6, eps=1e-3, affine=False), ROWS, kinds.GroupNorm(3, 6, affine=False, epsilon=1e-3)),
    (nn.InstanceNorm1d(4), SERIES, kinds.GroupNorm(4, 4, affine=False)),
    (nn.InstanceNorm2d(4, affine=True), IMAGES, kinds.GroupNorm(4, 4)),
    (nn.LayerNorm(6), ROWS, kinds.LayerNorm((6,))),
    (nn.LayerNorm([8, 6], bias=False), IMAGES, kinds.LayerNorm((8, 6), bias=False)),
    (
        nn.LayerNorm([4, 9], elementwise_affine=False, eps=1e-4),
        SERIES,
        kinds.LayerNorm((4, 9), affine=False, epsilon=1e-4),
    ),
    (nn.ReLU(inplace=True), ROWS, kinds.Relu()),
    (nn.ReLU6(), IMAGES, kinds.Relu6()),
    (nn.LeakyReLU(0.2), SERIES, kinds.LeakyRelu(0.2)),
    (nn.GELU(), ROWS, kinds.Gelu()),
    (nn.GELU("tanh"), ROWS, kinds.Gelu(approximate=True)),
    (nn.SiLU(), ROWS, kinds.Silu()),
    (nn.Hardswish(), ROWS, kinds.Hardswish()),
    (nn.Softplus(), SERIES, kinds.Softplus()),
    (nn.Tanh(), ROWS, kinds.Tanh()),
    (nn.Sigmoid(), ROWS, kinds.Sigmoid()),
    (nn.MaxPool1d(3, 2, 1), SERIES, kinds.MaxPool1d((3,), (2,), (1,))),
    (nn.MaxPool2d((3, 2), padding=(1, 0)), IMAGES, kinds.MaxPool2d((3, 2), (3, 2), (1, 0))),
    (nn.AvgPool1d(2, padding=1), SERIES, kinds.AvgPool1d((2,), (2,), (1,))),
    (nn.AvgPool2d(2, 1, count_include_pad=False), IMAGES, kinds.AvgPool2d((2, 2), (1, 1))),
    (nn.AdaptiveAvgPool1d(3), SERIES, kinds.AvgPool1d((3,), (3,))),
    (nn.AdaptiveAvgPool2d((None, 2)), IMAGES, kinds.AvgPool2d((1, 3), (1, 3))),
    (nn.AdaptiveAvgPool2d(1), IMAGES, kinds.AvgPool2d((8, 6), (8, 6))),
    (nn.AdaptiveMaxPool1d(1), SERIES, kinds.MaxPool1d((9,), (9,))),
    (nn.AdaptiveMaxPool2d(2), IMAGES, kinds.MaxPool2d((4, 3), (4, 3))),
    (nn.Dropout(0.25), IMAGES, kinds.Dropout(0.25)),
    (nn.Dropout(0.0), ROWS, None),
    (nn.Identity(), ROWS, None),
]


def ended(part: nn.Module, shape: Shape, layer: Layer | None) -> tuple[nn.Module, Architecture]:
    """A network that begins with one layer, and what it is described as."""
    after = shape if layer is None else layer.output_shape(shape)
    numbers = torch.zeros(after).numel()
    module = nn.Sequential(part, nn.Flatten(), nn.Linear(numbers, 2))
    return module, Architecture(shape, (*([] if layer is None else [layer]), kinds.Flatten(), kinds.Linear(numbers, 2)))


@pytest.mark.parametrize(("part", "shape", "layer"), LAYERS, ids=[str(part) for part, _, _ in LAYERS])
def test_a_layer_is_described(part: nn.Module, shape: Shape, layer: Layer | None) -> None:
    module, expected = ended(part, shape, layer)
    assert from_module(module, shape) == expected


class Called(nn.Module):
    """A function in a module."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


F = functional
FUNCTIONS: list[tuple[str, Callable[[Tensor], Tensor], Shape, Layer]] = [
    ("relu6", F.relu6, ROWS, kinds.Relu6()),
    ("leaky_relu", lambda x: F.leaky_relu(x, 0.3), ROWS, kinds.LeakyRelu(0.3)),
    ("leaky_relu_", lambda x: F.leaky_relu_(x, 0.3), ROWS, kinds.LeakyRelu(0.3)),
    ("gelu", F.gelu, ROWS, kinds.Gelu()),
    ("gelu tanh", lambda x: F.gelu(x, approximate="tanh"), ROWS, kinds.Gelu(approximate=True)),
    ("silu", lambda x: F.silu(x, inplace=True), ROWS, kinds.Silu()),
    ("hardswish", F.hardswish, ROWS, kinds.Hardswish()),
    ("softplus", F.softplus, ROWS, kinds.Softplus()),
    ("tanh", F.tanh, ROWS, kinds.Tanh()),
    ("sigmoid_", lambda x: x.sigmoid_(), ROWS, kinds.Sigmoid()),
    ("max_pool1d", lambda x: F.max_pool1d(x, 3, padding=1), SERIES, kinds.MaxPool1d((3,), (3,), (1,))),
    ("max_pool2d", lambda x: F.max_pool2d(input=x, kernel_size=3, stride=1), IMAGES, kinds.MaxPool2d((3, 3), (1, 1))),
    ("avg_pool1d", lambda x: F.avg_pool1d(x, 2), SERIES, kinds.AvgPool1d((2,), (2,))),
    ("avg_pool2d of all", lambda x: F.avg_pool2d(x, x.shape[2:]), IMAGES, kinds.AvgPool2d((8, 6), (8, 6))),
    ("adaptive_avg_pool1d", lambda x: F.adaptive_avg_pool1d(x, 1), SERIES, kinds.AvgPool1d((9,), (9,))),
    ("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, (2, 1)), IMAGES, kinds.AvgPool2d((4, 6), (4, 6))),
    ("adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, 1), IMAGES, kinds.MaxPool2d((8, 6), (8, 6))),
    ("layer_norm", lambda x: F.layer_norm(x, (6,)), ROWS, kinds.LayerNorm((6,), affine=False)),
    ("group_norm", lambda x: F.group_norm(x, 2), IMAGES, kinds.GroupNorm(2, 4, affine=False)),
    ("mean, axes kept", lambda x: x.mean(dim=(2, 3), keepdim=True), IMAGES, kinds.AvgPool2d((8, 6), (8, 6))),
    ("mean of one axis", lambda x: torch.mean(x, -1, keepdim=True), IMAGES, kinds.AvgPool2d((1, 6), (1, 6))),
]


TURNED = kinds.Transpose()
SERIES_TO_ROWS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[Layer, ...]]] = {
    "turned": (lambda x: x.transpose(1, 2).flatten(1), (TURNED,)),
    "turned back": (lambda x: x.permute(0, 2, 1).transpose(-2, -1).flatten(1), (TURNED, TURNED)),
    "turned once": (lambda x: torch.swapaxes(x, 2, 1).permute((0, 1, 2)).flatten(1), (TURNED,)),
    "mean of steps": (lambda x: x.transpose(1, 2).mean(1), (TURNED, TURNED, kinds.AvgPool1d((9,), (9,)))),
}


@pytest.mark.parametrize("name", SERIES_TO_ROWS)
def test_the_channels_and_steps_of_a_series_change_places(name: str) -> None:
    call, layers = SERIES_TO_ROWS[name]
    inputs = 4 if "mean" in name else 36
    module = nn.Sequential(Called(call), nn.Linear(inputs, 2))
    assert from_module(module, SERIES) == Architecture(SERIES, (*layers, kinds.Flatten(), kinds.Linear(inputs, 2)))


@pytest.mark.parametrize(("name", "call", "shape", "layer"), FUNCTIONS, ids=[name for name, *_ in FUNCTIONS])
def test_a_function_is_described(name: str, call: Callable[[Tensor], Tensor], shape: Shape, layer: Layer) -> None:
    del name
    module, expected = ended(Called(call), shape, layer)
    assert from_module(module, shape) == expected


POOLED = kinds.AvgPool2d((8, 6), (8, 6))
TO_ROWS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[Layer, ...]]] = {
    "mean": (lambda x: x.mean((2, 3)), (POOLED, kinds.Flatten())),
    "mean of a list": (lambda x: x.mean([-1, -2]), (POOLED, kinds.Flatten())),
    "mean of means": (
        lambda x: x.mean(3).mean(2),
        (kinds.AvgPool2d((1, 6), (1, 6)), kinds.AvgPool2d((8, 1), (8, 1)), kinds.Flatten()),
    ),
    "mean of places": (lambda x: x.flatten(2).mean(-1), (POOLED, kinds.Flatten())),
    "mean of a view": (lambda x: x.view(x.size(0), x.size(1), -1).mean(2), (POOLED, kinds.Flatten())),
    "squeezed": (lambda x: F.adaptive_avg_pool2d(x, 1).squeeze(-1).squeeze(-1), (POOLED, kinds.Flatten())),
    "squeezed at once": (lambda x: torch.squeeze(F.adaptive_avg_pool2d(x, 1), (2, 3)), (POOLED, kinds.Flatten())),
    "seen and unseen": (
        lambda x: x.unsqueeze(1).squeeze(1).mean((2, 3)).unsqueeze(2).squeeze(2),
        (POOLED, kinds.Flatten()),
    ),
    "two flattens": (lambda x: x.mean((2, 3), True).flatten(2).flatten(1), (POOLED, kinds.Flatten())),
}


@pytest.mark.parametrize("name", TO_ROWS)
def test_an_image_becomes_a_row_of_its_channels(name: str) -> None:
    call, layers = TO_ROWS[name]
    module = nn.Sequential(Called(call), nn.Linear(4, 2))
    assert from_module(module, IMAGES) == Architecture(IMAGES, (*layers, kinds.Linear(4, 2)))


class _Subclass(nn.Linear):
    pass


def hooked() -> nn.Module:
    module = nn.Linear(6, 3)
    module.register_forward_hook(lambda *_: None)
    return module


REFUSED: list[tuple[nn.Module, Shape, str]] = [
    (nn.Conv2d(4, 2, 3, dilation=2), IMAGES, r"layer 0 \(Conv2d\) has dilation .*only dilation 1"),
    (nn.Conv2d(4, 2, 3, padding=1, padding_mode="reflect"), IMAGES, "pads with reflect.*padding_mode='zeros'"),
    (nn.Conv2d(4, 2, 4, padding="same"), IMAGES, "even kernel.*use an odd kernel"),
    (nn.Conv2d(4, 2, 9), IMAGES, r"layer 0 \(Conv2d\): its kernel \(9, 9\) does not fit.*use padding"),
    (nn.MaxPool2d(2, ceil_mode=True), IMAGES, "has dilation, ceil_mode or return_indices; leave them out"),
    (nn.MaxPool1d(2, dilation=2), SERIES, r"layer 0 \(MaxPool1d\) has dilation"),
    (nn.AvgPool2d(2, padding=1, count_include_pad=False), IMAGES, "use count_include_pad=True"),
    (nn.AvgPool2d(2, divisor_override=3), IMAGES, "divisor_override"),
    (nn.AvgPool1d(2, ceil_mode=True), SERIES, "ceil_mode"),
    (nn.AdaptiveAvgPool2d(5), IMAGES, r"layer 0 \(AdaptiveAvgPool2d\) makes \(5, 5\) of \(8, 6\).*divide"),
    (nn.AdaptiveAvgPool1d(1), IMAGES, "pools 1 axes beside the channels but is given"),
    (nn.AdaptiveMaxPool1d(1, return_indices=True), SERIES, "return_indices; leave it out"),
    (nn.BatchNorm2d(4), IMAGES, r"mixes the samples of a batch. Replace nn.BatchNorm2d\(4\) by nn.GroupNorm\(4, 4\)"),
    (nn.InstanceNorm2d(4, track_running_stats=True), IMAGES, "track_running_stats=False"),
    (nn.InstanceNorm1d(6), ROWS, "takes 1 axes beside the channels"),
    (nn.LayerNorm(5), ROWS, r"layer 0 \(LayerNorm\): normalises \(5,\) but is given \(6,\)"),
    (nn.GroupNorm(1, 3), ROWS, r"layer 0 \(GroupNorm\): takes 3 channels but is given"),
    (nn.LeakyReLU(-0.1), ROWS, r"layer 0 \(LeakyReLU\): slope is -0.1; give a number from 0 to 1"),
    (nn.Softplus(beta=2.0), ROWS, r"layer 0 \(Softplus\) has beta 2.0 and threshold 20"),
    (Called(lambda x: F.softplus(x, 1, 5)), ROWS, "has beta 1 and threshold 5"),
    (nn.Dropout(1.0), ROWS, r"layer 0 \(Dropout\): chance is 1.0; give a number from 0 to 0.999"),
    (nn.Dropout2d(0.2), IMAGES, r"layer 0 \(Dropout2d\) is not native: it drops whole channels.*use nn.Dropout"),
    (nn.AlphaDropout(0.2), ROWS, "use nn.Dropout"),
    (nn.Flatten(0), IMAGES, r"layer 0 \(Flatten\): flatten\(0, -1\) of N samples of shape .*x.flatten\(1\)"),
    (nn.Softmax(1), ROWS, "the loss is taken of logits; leave it out"),
    (nn.RNN(9, 4), SERIES, r"layer 0 \(RNN\) is not native: it runs on torch; nn.GRU and nn.LSTM are native"),
    (nn.LSTM(9, 4), SERIES, r"layer 0 \(LSTM\) has batch_first=False: give it samples .*batch_first=True"),
    (nn.GRU(9, 4, batch_first=True, bidirectional=True), SERIES, r"layer 0 \(GRU\) has bidirectional=True"),
    (nn.LSTM(9, 4, batch_first=True, proj_size=2), SERIES, "has proj_size=2: projections run on torch"),
    (nn.GRU(9, 4, 2, batch_first=True, dropout=0.1), SERIES, "has dropout=0.1: put nn.Dropout between layers"),
    (nn.GRU(4, 4, batch_first=True), SERIES, r"layer 0 \(GRU\): takes series \(steps, 4\) but .* put a Transpose"),
    (nn.GRU(9, 4, batch_first=True), SERIES, r"reads the result of layer 0 .* as one tensor"),
    (Called(lambda x: x.permute(2, 0, 1)), SERIES, r"permute of N samples .*x.transpose\(1, 2\) of a series is"),
    (Called(lambda x: x.transpose(1, 2)), IMAGES, "transpose of N samples of shape"),
    (nn.TransformerEncoderLayer(9, 3), SERIES, "attention multiplies tensors with each other; it runs on torch"),
    (nn.Embedding(9, 3), ROWS, "table indices; it runs on torch"),
    (_Subclass(6, 3), ROWS, "_Subclass"),
    (hooked(), ROWS, r"layer 0 has hooks"),
    (nn.Sequential(nn.BatchNorm1d(6)), ROWS, r"layer 0\.0 \(BatchNorm1d\)"),
    (nn.PReLU(), ROWS, r"layer 0 \(PReLU\) is not one of Conv1d/2d, Linear, "),
    (Called(lambda x: F.dropout2d(x, 0.5)), IMAGES, "dropout2d is not native: use F.dropout"),
    (Called(lambda x: x @ x), ROWS, "matmul is not native: products of tensors run on torch"),
    (Called(lambda x: x.squeeze()), IMAGES, r"squeeze\(\) of N samples of shape"),
    (Called(lambda x: x.mean(1)), IMAGES, r"a mean over 1 of N samples .*such as x.mean\(\(2, 3\)\)"),
    (Called(lambda x: x.mean((2, 3), dtype=torch.float64)), IMAGES, "a mean over"),
    (Called(lambda x: x.mean(2).relu()), IMAGES, "a mean over some axes is known with keepdim=True alone"),
    (Called(lambda x: x.unsqueeze(1).relu()), SERIES, r"unsqueeze\(1\) of N samples .*or data of that shape"),
    (Called(lambda x: F.max_pool2d(x, 2, return_indices=True)[0]), IMAGES, "max_pool2d"),
]


@pytest.mark.parametrize(("part", "shape", "words"), REFUSED, ids=[words[:40] for _, _, words in REFUSED])
def test_a_layer_that_is_not_known_is_refused_with_what_to_do(part: nn.Module, shape: Shape, words: str) -> None:
    with pytest.raises(ArchitectureError, match=words) as caught:
        from_module(nn.Sequential(part, nn.Flatten(), nn.Linear(6, 2)), shape)
    assert "\n" not in str(caught.value)


def test_dropout_that_never_ends_is_refused() -> None:
    for call in (lambda x: F.dropout(x, 0.5), lambda x: F.dropout(x, 0.5, training=True)):
        with pytest.raises(ArchitectureError, match=r"line \d+ .* drops numbers while it is scored.*self.training"):
            from_module(nn.Sequential(nn.Linear(4, 4), Called(call)), (4,))


def test_one_activation_object_may_stand_in_several_places() -> None:
    relu = nn.ReLU()
    module = nn.Sequential(nn.Linear(4, 4), relu, nn.Linear(4, 3), relu)
    assert len(from_module(module, (4,)).layers) == 4
