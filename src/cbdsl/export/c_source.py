"""A network as one C99 file: no allocation, nothing but a few functions of math.h, memory planned beforehand."""

from __future__ import annotations

import math
import string
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cbdsl.export.int8 import Rounded, rounded
from cbdsl.export.steps import OUTPUT, BufferPlan, Program, Step, plan_buffers
from cbdsl.models.architecture import SAMPLES
from cbdsl.models.layers import (
    NAMES,
    Add,
    AvgPool1d,
    AvgPool2d,
    Concat,
    Conv1d,
    Conv2d,
    Flatten,
    Gelu,
    GroupNorm,
    Hardswish,
    LayerNorm,
    LeakyRelu,
    Linear,
    MaxPool1d,
    MaxPool2d,
    Relu,
    Relu6,
    Scale,
    Shape,
    Sigmoid,
    Silu,
    Tanh,
)

_TYPES = """\
typedef struct { int channels, height, width; } Size;
"""

_WINDOW = """\
typedef struct { int height, width, down, right, top, left; } Window; /* its size, its steps, the border before it */
"""

_CONVOLVE = """\
static void convolve(const float *in, Size from, float *out, Size to, Window w, int groups, const WEIGHT *weights,
                     SCALES_GIVENconst float *bias)
{
    const int inputs = from.channels / groups, outputs = to.channels / groups;
    for (int o = 0; o < to.channels; o++) {
        const float *part = in + (o / outputs) * inputs * from.height * from.width;
        for (int y = 0; y < to.height; y++) {
            const int top = y * w.down - w.top;
            const int v0 = top < 0 ? -top : 0, v1 = top + w.height > from.height ? from.height - top : w.height;
            for (int x = 0; x < to.width; x++) {
                const int left = x * w.right - w.left;
                const int u0 = left < 0 ? -left : 0, u1 = left + w.width > from.width ? from.width - left : w.width;
                float sum = 0.0f;
                for (int i = 0; i < inputs; i++)
                    for (int v = v0; v < v1; v++) {
                        const int row = (i * from.height + top + v) * from.width + left;
                        const WEIGHT *taps = weights + ((o * inputs + i) * w.height + v) * w.width;
                        for (int u = u0; u < u1; u++)
                            sum += part[row + u] * (float)taps[u];
                    }
                out[(o * to.height + y) * to.width + x] = SCALED(sum) + (bias ? bias[o] : 0.0f);
            }
        }
    }
}
"""

_DENSE = """\
static void dense(const float *in, int inputs, float *out, int outputs, const WEIGHT *weights,
                  SCALES_GIVENconst float *bias)
{
    for (int o = 0; o < outputs; o++) {
        float sum = 0.0f;
        for (int i = 0; i < inputs; i++)
            sum += in[i] * (float)weights[o * inputs + i];
        out[o] = SCALED(sum) + (bias ? bias[o] : 0.0f);
    }
}
"""

_POOL = """\
static void NAME(const float *in, Size from, float *out, Size to, Window w)
{
    for (int c = 0; c < to.channels; c++)
        for (int y = 0; y < to.height; y++)
            for (int x = 0; x < to.width; x++) {
                const int top = y * w.down - w.top, left = x * w.right - w.left;
                float found = START;
                for (int v = top < 0 ? 0 : top; v < top + w.height && v < from.height; v++)
                    for (int u = left < 0 ? 0 : left; u < left + w.width && u < from.width; u++) {
                        const float value = in[(c * from.height + v) * from.width + u];
                        TAKE
                    }
                out[(c * to.height + y) * to.width + x] = RESULT;
            }
}
"""
_MAX_POOL = (
    _POOL.replace("NAME", "max_pool").replace("START", "-FLT_MAX").replace("RESULT", "found")
    .replace("TAKE", "if (value > found)\n                            found = value;")
)  # fmt: skip
_AVG_POOL = (
    _POOL.replace("NAME", "avg_pool").replace("START", "0.0f").replace("TAKE", "found += value;")
    .replace("RESULT", "found / (float)(w.height * w.width)")
)  # fmt: skip

_NORMALISE = """\
static void normalise(const float *in, float *out, int parts, int count, float epsilon)
{
    for (int p = 0; p < parts; p++, in += count, out += count) {
        float mean = 0.0f, variance = 0.0f;
        for (int k = 0; k < count; k++)
            mean += in[k];
        mean /= (float)count;
        for (int k = 0; k < count; k++)
            variance += (in[k] - mean) * (in[k] - mean);
        const float factor = 1.0f / sqrtf(variance / (float)count + epsilon);
        for (int k = 0; k < count; k++)
            out[k] = (in[k] - mean) * factor;
    }
}
"""

_STRETCH = """\
static void stretch(const float *in, float *out, int times, int channels, int places, const float *factors,
                    const float *offsets)
{
    for (int t = 0; t < times; t++)
        for (int c = 0; c < channels; c++)
            for (int k = 0; k < places; k++)
                *out++ = *in++ * factors[c] + (offsets ? offsets[c] : 0.0f);
}
"""

_ADD = """\
static void add(const float *in, const float *other, float *out, int count)
{
    for (int k = 0; k < count; k++)
        out[k] = in[k] + other[k];
}
"""

_COPY = """\
static void copy(const float *in, float *out, int count)
{
    for (int k = 0; k < count; k++)
        out[k] = in[k];
}
"""

_CURVE = """\
static void NAME(const float *in, float *out, int count)
{
    for (int k = 0; k < count; k++) {
        const float x = in[k];
        out[k] = VALUE;
    }
}
"""
_CURVES = {
    "relu": "x > 0.0f ? x : 0.0f",
    "relu6": "x > 6.0f ? 6.0f : x > 0.0f ? x : 0.0f",
    "tanh_": "tanhf(x)",
    "sigmoid": "1.0f / (1.0f + expf(-x))",
    "silu": "x / (1.0f + expf(-x))",
    "hardswish": "x >= 3.0f ? x : x <= -3.0f ? 0.0f : x * (x + 3.0f) / 6.0f",
    "gelu": "0.5f * x * (1.0f + erff(x * 0.707106781f))",
    "gelu_by_tanh": "0.5f * x * (1.0f + tanhf(0.797884561f * (x + 0.044715f * x * x * x)))",
}
_LEAKY = """\
static void leaky_relu(const float *in, float *out, int count, float slope)
{
    for (int k = 0; k < count; k++)
        out[k] = in[k] > 0.0f ? in[k] : slope * in[k];
}
"""

_FUNCTIONS = {
    "convolve": _CONVOLVE,
    "dense": _DENSE,
    "max_pool": _MAX_POOL,
    "avg_pool": _AVG_POOL,
    "normalise": _NORMALISE,
    "stretch": _STRETCH,
    "add": _ADD,
    "copy": _COPY,
    "leaky_relu": _LEAKY,
} | {name: _CURVE.replace("NAME", name).replace("VALUE", value) for name, value in _CURVES.items()}


def functions(called: set[str], int8: bool) -> str:
    """What a file needs before its weights: headers, types, and these functions."""
    texts = [text for name, text in _FUNCTIONS.items() if name in called]
    if called & {"convolve", "max_pool", "avg_pool"}:
        texts = [_TYPES + _WINDOW, *texts]
    text = "\n".join(texts)
    headers = [name for name, sign in (("float", "FLT_MAX"), ("math", "f(")) if sign in text]
    text = (
        text.replace("WEIGHT", "signed char" if int8 else "float")
        .replace("SCALES_GIVEN", "const float *scales, " if int8 else "")
        .replace("SCALED(sum)", "sum * scales[o]" if int8 else "sum")
        .replace("(float)taps[u]", "(float)taps[u]" if int8 else "taps[u]")
        .replace("(float)weights[", "(float)weights[" if int8 else "weights[")
    )
    return "".join(f"#include <{name}.h>\n" for name in ["limits", *headers]) + f"\n{text}"


_CURVE_NAMES = {Relu: "relu", Relu6: "relu6", Tanh: "tanh_", Sigmoid: "sigmoid", Silu: "silu", Hardswish: "hardswish"}


@dataclass
class Code:
    """Calls, and the arrays that they name."""

    rounded: dict[int, Rounded]  # weights as whole numbers, by step; empty: all are floats
    calls: list[str] = field(default_factory=list)
    arrays: dict[str, NDArray[np.float32] | NDArray[np.int8]] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)

    def call(self, function: str, *arguments: object) -> None:
        """One call more."""
        self.called.add(function)
        self.calls.append(f"    {function}({', '.join(map(str, arguments))});")

    def constant(self, name: str, values: NDArray[np.float32] | NDArray[np.int8] | None) -> str:
        """The name of an array in the file; 0 where there is none."""
        if values is None:
            return "0"
        self.arrays[name] = values.reshape(-1)
        return name

    def weights(self, step: Step) -> tuple[str, ...]:
        """The weights of a convolution or a dense layer, the factors of whole numbers, the bias."""
        bias = self.constant(f"bias{step.number}", step.tensors.get("bias"))
        found = self.rounded.get(step.number)
        if found is None:
            return self.constant(f"weight{step.number}", step.tensors["weight"]), bias
        scales = self.constant(f"scale{step.number}", found.scales)
        return self.constant(f"weight{step.number}", found.numbers), scales, bias

    def step(self, step: Step, sources: Sequence[str], target: str) -> None:
        """The calls of one step. sources, target: where it reads and writes."""
        match step.layer:
            case Conv1d() | Conv2d():
                sizes = _size(step.given[0]), target, _size(step.shape), _window(step.layer)
                self.call("convolve", sources[0], *sizes, step.layer.groups, *self.weights(step))
            case Linear():
                self.call("dense", sources[0], step.layer.inputs, target, step.layer.outputs, *self.weights(step))
            case MaxPool1d() | MaxPool2d():
                sizes = _size(step.given[0]), target, _size(step.shape), _window(step.layer)
                self.call("max_pool", sources[0], *sizes)
            case AvgPool1d() | AvgPool2d():
                sizes = _size(step.given[0]), target, _size(step.shape), _window(step.layer)
                self.call("avg_pool", sources[0], *sizes)
            case GroupNorm() | LayerNorm() | Scale():
                self._norm(step, sources[0], target)
            case Add():
                self._add(sources, target, step.count)
            case Concat():
                self._join(step, sources, target)
            case Flatten():
                if sources[0] != target:
                    self.call("copy", sources[0], target, step.count)
            case LeakyRelu():
                self.call("leaky_relu", sources[0], target, step.count, number(step.layer.slope))
            case Gelu():
                self.call("gelu_by_tanh" if step.layer.approximate else "gelu", sources[0], target, step.count)
            case _:
                self.call(_CURVE_NAMES[type(step.layer)], sources[0], target, step.count)

    def _norm(self, step: Step, source: str, target: str) -> None:
        """Norms, then a factor and an offset for each channel or place; of a `Scale` these alone."""
        layer, places = step.layer, math.prod(step.shape[1:])
        factors, offsets = step.tensors.get("weight"), step.tensors.get("bias")
        times, channels = 1, step.shape[0]
        if isinstance(layer, Scale):
            length = max(len(layer.factors), len(layer.offsets))
            factors, offsets = (
                np.resize(np.array(values, np.float32), length) for values in (layer.factors, layer.offsets)
            )
            channels, places = length, step.count // length
        elif isinstance(layer, GroupNorm):
            count = step.count // layer.groups
            self.call("normalise", source, target, layer.groups, count, number(layer.epsilon))
            source = target
        elif isinstance(layer, LayerNorm):
            channels, places = math.prod(layer.shape), 1
            times = step.count // channels
            self.call("normalise", source, target, times, channels, number(layer.epsilon))
            source = target
        if factors is not None:
            names = self.constant(f"factor{step.number}", factors), self.constant(f"offset{step.number}", offsets)
            self.call("stretch", source, target, times, channels, places, *names)

    def _add(self, sources: Sequence[str], target: str, count: int) -> None:
        """One after the other, beginning with the one that is overwritten, if any is."""
        first, second, *others = sorted(sources, key=lambda source: source != target)
        self.call("add", first, second, target, count)
        for other in others:
            self.call("add", target, other, target, count)

    def _join(self, step: Step, sources: Sequence[str], target: str) -> None:
        start = 0
        for source, shape in zip(sources, step.given, strict=True):
            self.call("copy", source, f"{target} + {start}", math.prod(shape))
            start += math.prod(shape)


def number(value: float) -> str:
    """A float as C writes it, to the bit."""
    text = f"{np.float32(value):.9g}"
    return f"{text}f" if "." in text or "e" in text else f"{text}.0f"


def _image(shape: Shape) -> Shape:
    """(channels, height, width) of a series or an image."""
    return shape if len(shape) == 3 else (shape[0], 1, shape[1])


def _size(shape: Shape) -> str:
    return f"(Size){{{', '.join(map(str, _image(shape)))}}}"


def _window(layer: Conv1d | Conv2d | MaxPool1d | MaxPool2d | AvgPool1d | AvgPool2d) -> str:
    kernel, stride, padding = layer.kernel, layer.stride, layer.padding
    if len(kernel) == 1:
        kernel, stride, padding = (1, *kernel), (1, *stride), (0, *padding)
    return f"(Window){{{', '.join(map(str, (*kernel, *stride, *padding)))}}}"


_HEAD = """\
/* A classifier trained with cbdsl.

   void predict(const float *in, float *out);

   in   PREDICT_INPUTS floats: one sample, {shape}, the last axis side by side;
        {units}
   out  PREDICT_CLASSES floats: logits; the class is the place of the largest, its name in predict_names

   constants {constants} bytes (weights as {kind}), working memory {memory} bytes, static; so one call at a time.
   Compile with: cc -std=c99 -O2 -c FILE.c, and link with -lm. */
"""

_CHECK = """\
#if INT_MAX < 2147483647
#error "int must have 32 bits"
#endif

enum {{ PREDICT_INPUTS = {inputs}, PREDICT_CLASSES = {classes} }};

const char *const predict_names[PREDICT_CLASSES] = {{
{names}
}};

void predict(const float *in, float *out);

"""

_PLAIN = set(string.ascii_letters + string.digits + " _-.,+")


@dataclass(frozen=True)
class CFile:
    """The text, and what it takes on a device."""

    text: str
    constants: int  # bytes of weights and other numbers
    memory: int  # bytes of working memory


def c_file(program: Program, int8: bool = False) -> CFile:
    """The whole file."""
    steps = program.steps
    code = Code(rounded(steps) if int8 else {})
    places = plan_buffers(steps)
    for step in steps:
        code.calls.append(f"    /* {step.number}: {NAMES[type(step.layer)]} -> {' x '.join(map(str, step.shape))} */")
        sources = [_where(program, places, other) for other in step.reads]
        code.step(step, sources, _where(program, places, step.number))
    constants, memory = sum(values.nbytes for values in code.arrays.values()), 4 * places.size
    head = _HEAD.format(
        shape=" x ".join(map(str, program.card.shape)), units=textwrap.fill(program.units(), 100), constants=constants,
        kind="8-bit whole numbers" if int8 else "floats", memory=memory,
    )  # fmt: skip
    names = [_quoted(_name(program, label)) for label in range(program.classes)]
    check = _CHECK.format(inputs=program.inputs, classes=program.classes, names=_lines(names))
    includes, _, body = functions(code.called, int8).partition("\n\n")
    arrays = "\n".join(_array(name, values) for name, values in code.arrays.items())
    room = f"static float memory[{places.size}];\n\n" if places.size else ""
    calls = "\n".join(["void predict(const float *in, float *out)", "{", *code.calls, "}\n"])
    return CFile(f"{head}{includes}\n\n{check}{body}\n{arrays}\n{room}{calls}", constants, memory)


def _where(program: Program, places: BufferPlan, number_of_step: int) -> str:
    """What C calls the place of a result."""
    if number_of_step == SAMPLES:
        return "in"
    if number_of_step in places.offsets:
        offset = places.offsets[number_of_step]
        return "out" if offset == OUTPUT else f"memory + {offset}"
    step = program.steps[number_of_step]  # the samples under another shape
    assert isinstance(step.layer, Flatten)
    return _where(program, places, step.reads[0])


def _name(program: Program, label: int) -> str:
    names = program.card.class_names
    return names[label] if label < len(names) else str(label)


def _quoted(name: str) -> str:
    """A string of C. Whatever could end it, or mean something to C, is written as a number."""
    signs = (chr(byte) if chr(byte) in _PLAIN else f"\\{byte:03o}" for byte in name.encode())
    return f'"{"".join(signs)}"'


def _array(name: str, values: NDArray[np.float32] | NDArray[np.int8]) -> str:
    kind = "signed char" if values.dtype == np.int8 else "float"
    texts = map(str, values.tolist()) if values.dtype == np.int8 else map(number, values.tolist())
    return f"static const {kind} {name}[{len(values)}] = {{\n{_lines(texts)}\n}};\n"


def _lines(words: Iterable[str]) -> str:
    """Words with commas between them, as many to a line as fit."""
    lines, line = [], "   "
    for word in words:
        if len(line) + len(word) > 116:
            lines.append(line)
            line = "   "
        line += f" {word},"
    return "\n".join([*lines, line])
