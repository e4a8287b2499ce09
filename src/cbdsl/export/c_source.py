"""Writes a network as one C99 file: no allocation, only math.h, memory planned beforehand."""

from __future__ import annotations

import math
import string
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbdsl.export.steps import (
    OUTPUT,
    BufferPlan,
    Program,
    RoundedWeights,
    Step,
    error_factors,
    plan_buffers,
    round_weights,
)
from cbdsl.models import layers
from cbdsl.models.architecture import SAMPLES
from cbdsl.models.layers import Layer, Shape
from cbdsl.spec import LOSSES_OF_TASKS

_HEAD = """\
/* {what} trained with cbdsl.

   void predict(const float *in, float *out);

   in   PREDICT_INPUTS floats: one sample, {shape}, the last axis side by side;
        {units}
   out  {result}

   constants {constants} bytes (weights as {kind}), working memory {memory} bytes, static; so one call at a time.
   Compile with: cc -std=c99 -O2 -c FILE.c, and link with -lm. */
"""

_CHECK = """\
#if INT_MAX < 2147483647
#error "int must have 32 bits"
#endif

enum {{ PREDICT_INPUTS = {inputs}, {outputs} = {classes} }};

{names}void predict(const float *in, float *out);

"""

_PLAIN = set(string.ascii_letters + string.digits + " _-.,+")


@dataclass(frozen=True)
class CFile:
    """The text of a file and the memory that it takes on a device, in bytes."""

    text: str
    header: str  # the text of the header file
    constants: int  # weights and other numbers
    memory: int  # working memory


def c_file(program: Program, int8: bool = False) -> CFile:
    """Return the whole file."""
    steps = program.steps
    code = _Code(round_weights(steps) if int8 else {})
    places = plan_buffers(steps)
    for step in steps:
        code.calls.append(f"    /* {step.number}: {step.layer.name} -> {' x '.join(map(str, step.shape))} */")
        sources = [_where(program, places, other) for other in step.reads]
        code.step(step, sources, _where(program, places, step.number))
    constants, size = sum(values.nbytes for values in code.arrays.values()), places.size + code.scratch
    memory = 4 * size
    head = _HEAD.format(
        shape=" x ".join(map(str, program.card.shape)), units=textwrap.fill(program.units(), 100), constants=constants,
        kind="8-bit whole numbers" if int8 else "floats", memory=memory, **_TEXTS[program.card.task],
    )  # fmt: skip
    outputs, given = _OUTPUTS[program.card.task], [_quoted(_name(program, one)) for one in range(program.classes)]
    names = f"const char *const predict_names[{outputs}] = {{\n{_lines(given)}\n}};\n\n"
    if program.card.task == "reconstruction":
        names = ""
    check = _CHECK.format(inputs=program.inputs, outputs=outputs, classes=program.classes, names=names)
    includes, body = code.preamble(int8)
    arrays = "\n".join(_array(name, values) for name, values in code.arrays.items())
    room = f"static float memory[{size}];\n\n" if size else ""
    code.calls = [line.replace("SCRATCH", f"memory + {places.size}") for line in code.calls]
    calls = "\n".join(["void predict(const float *in, float *out)", "{", *code.calls, "}\n"])
    calls += _score(program) if program.card.task == "reconstruction" else ""
    text = f"{head}{includes}\n{check}{body}\n{arrays}\n{room}{calls}"
    return CFile(text, _header(program, head), constants, memory)


_HEADER = """\
#ifndef PREDICT_H
#define PREDICT_H

#ifdef __cplusplus
extern "C" {{
#endif

enum {{ PREDICT_INPUTS = {inputs}, {outputs} = {classes} }};

void predict(const float *in, float *out);
{more}
#ifdef __cplusplus
}}
#endif

#endif
"""


def _header(program: Program, head: str) -> str:
    """Return the header file: sizes, names or threshold, and prototypes."""
    outputs, card = _OUTPUTS[program.card.task], program.card
    names = [_name(program, one) for one in range(program.classes)]
    more = f"extern const char *const predict_names[{outputs}]; /* {_comment(', '.join(names))} */\n"
    if card.task == "reconstruction":
        value = "none: nothing is above it" if card.threshold is None else _number(card.threshold)
        more = (
            "float predict_score(const float *in, const float *out);\n"
            "int predict_anomaly(const float *in, const float *out);\n"
            f"extern const float predict_threshold; /* {value} */\n"
        )
    return head + _HEADER.format(inputs=program.inputs, outputs=outputs, classes=program.classes, more=more)


def _comment(text: str) -> str:
    """Return the start of a text, safe inside a C comment."""
    plain = "".join(sign if sign in _PLAIN else "?" for sign in text)
    return plain if len(plain) <= _LONGEST_COMMENT else f"{plain[:_LONGEST_COMMENT]} ..."


_LONGEST_COMMENT = 200  # characters


_OUTPUTS = {task: "PREDICT_CLASSES" if task == "classification" else "PREDICT_OUTPUTS" for task in LOSSES_OF_TASKS}
_TEXTS = {
    "classification": {
        "what": "A classifier",
        "result": "PREDICT_CLASSES floats: logits; the class is the place of the largest, its name in predict_names",
    },
    "regression": {
        "what": "A regression",
        "result": "PREDICT_OUTPUTS floats: predictions in the unit of the targets, whose names are in predict_names",
    },
    "reconstruction": {
        "what": "An anomaly detector",
        "result": "PREDICT_OUTPUTS floats: the sample as it is reconstructed\n\n"
        "   float predict_score(const float *in, const float *out);\n\n"
        "   the anomaly score of a sample and its reconstruction: call predict(in, out) first;\n"
        "   above predict_threshold the sample is an anomaly\n\n"
        "   int predict_anomaly(const float *in, const float *out);\n\n"
        "   1 if that score is above predict_threshold, otherwise 0; also call predict first",
    },
}
_SCORE = """
float predict_score(const float *in, const float *out);
int predict_anomaly(const float *in, const float *out);
extern const float predict_threshold;
const float predict_threshold = {threshold};

{factors}
float predict_score(const float *in, const float *out)
{{
    float total = 0.0f;
    int i;
    for (i = 0; i < PREDICT_OUTPUTS; i++) {{
        float x = (in[i] - out[i]) * factor[i / {each}];
        x = x < 0.0f ? -x : x;
        total += {loss};
    }}
    return total / (float)PREDICT_OUTPUTS;
}}

int predict_anomaly(const float *in, const float *out)
{{
    return predict_score(in, out) > predict_threshold;
}}
"""


def _score(program: Program) -> str:
    """Return the function for anomaly scores; without a threshold nothing is above it."""
    card, factors = program.card, error_factors(program).astype(np.float32)
    channels = len(program.scaling.deviation) if program.scaling else 1
    delta = _number(card.loss_setting)
    huber = f"x > {delta} ? {delta} * (x - 0.5f * {delta}) : 0.5f * x * x"
    return _SCORE.format(
        threshold="3.4e38f" if card.threshold is None else _number(card.threshold),
        factors=_array("factor", factors[:: program.classes // channels]),
        each=program.classes // channels,
        loss={"mae": "x", "huber": huber}.get(card.loss, "x * x"),
    )


def _where(program: Program, places: BufferPlan, number_of_step: int) -> str:
    """Return the expression for the array of a result."""
    if number_of_step == SAMPLES:
        return "in"
    if number_of_step in places.offsets:
        offset = places.offsets[number_of_step]
        return "out" if offset == OUTPUT else f"memory + {offset}"
    step = program.steps[number_of_step]  # the samples under another shape
    assert isinstance(step.layer, layers.Flatten)
    return _where(program, places, step.reads[0])


def _name(program: Program, label: int) -> str:
    if program.card.task == "regression":
        return program.card.target_names[label] if program.card.target_names else f"target {label + 1}"
    names = program.card.class_names
    return names[label] if label < len(names) else str(label)


def _quoted(name: str) -> str:
    """Return a string of C. Characters that could end it or mean something to C become octal codes."""
    signs = (chr(byte) if chr(byte) in _PLAIN else f"\\{byte:03o}" for byte in name.encode())
    return f'"{"".join(signs)}"'


def _array(name: str, values: NDArray[np.float32] | NDArray[np.int8]) -> str:
    kind = "signed char" if values.dtype == np.int8 else "float"
    texts = map(str, values.tolist()) if values.dtype == np.int8 else map(_number, values.tolist())
    return f"static const {kind} {name}[{len(values)}] = {{\n{_lines(texts)}\n}};\n"


def _lines(words: Iterable[str]) -> str:
    """Join words with commas, as many per line as fit."""
    lines, line = [], "   "
    for word in words:
        if len(line) + len(word) > 116:
            lines.append(line)
            line = "   "
        line += f" {word},"
    return "\n".join([*lines, line])


@dataclass
class _Code:
    """The calls of `predict`, the functions that they need and the arrays that they name."""

    rounded: dict[tuple[int, str], RoundedWeights]  # by step and name; empty: all weights are floats
    scratch: int = 0  # floats that a step needs while it runs
    calls: list[str] = field(default_factory=list)
    arrays: dict[str, NDArray[np.float32] | NDArray[np.int8]] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)  # their texts by name

    def call(self, function: str, *arguments: object) -> None:
        """Add a call of one of the functions in _FUNCTIONS or `functions`."""
        self.functions.setdefault(function, _FUNCTIONS.get(function, ""))
        self.calls.append(f"    {function}({', '.join(map(str, arguments))});")

    def constant(self, name: str, values: NDArray[np.float32] | NDArray[np.int8] | None) -> str:
        """Add an array; return its name, or 0 for None."""
        if values is None:
            return "0"
        self.arrays[name] = values.reshape(-1)
        return name

    def weights(self, step: Step, weight: str = "weight", bias: str = "bias") -> tuple[str, ...]:
        """Add a matrix of weights and a bias of a step; return weights, scales of integers, and bias."""
        behind = weight.removeprefix("weight") + str(step.number)
        given = self.constant(f"bias{behind}", step.tensors.get(bias))
        found = self.rounded.get((step.number, weight))
        if found is None:
            return self.constant(f"weight{behind}", step.tensors[weight]), given
        scales = self.constant(f"scale{behind}", found.scales)
        return self.constant(f"weight{behind}", found.numbers), scales, given

    def step(self, step: Step, sources: Sequence[str], target: str) -> None:
        """Add the calls of one step. sources, target: the expressions of its input and output arrays."""
        if type(step.layer) in _ACTIVATIONS:
            self._activation(step, sources[0], target)
        else:
            _CALLS[type(step.layer)](self, step, sources, target)

    def _activation(self, step: Step, source: str, target: str) -> None:
        """Call the function of this activation with these settings, which are constants in its text."""
        value = _ACTIVATIONS[type(step.layer)](step.layer)
        body = _ACTIVATION.replace("VALUE", value)
        number, name = 1, f"apply_{step.layer.name}"
        while self.functions.get(name, body.replace("NAME", name)) != body.replace("NAME", name):
            number += 1
            name = f"apply_{step.layer.name}{number}"
        self.functions[name] = body.replace("NAME", name)
        self.call(name, source, target, step.count)

    def scale(self, step: Step, source: str, target: str, sizes: tuple[int, int, int], **arrays: Any) -> None:  # noqa: ANN401
        """Call `scale` with factors and offsets. sizes: repetitions, channels, numbers per channel."""
        names = [self.constant(f"{name}{step.number}", values) for name, values in arrays.items()]
        self.call("scale", source, target, *sizes, *names)

    def preamble(self, int8: bool) -> tuple[str, str]:
        """Return the includes, and the types and functions that the calls need."""
        texts = list(self.functions.values())
        if self.functions.keys() & {"convolve", "max_pool", "avg_pool"}:
            texts = [_TYPES, *texts]
        text = "\n".join(texts)
        headers = [name for name, sign in (("float", "FLT_MAX"), ("math", "f(")) if sign in text]
        text = (
            text.replace("WEIGHT", "signed char" if int8 else "float")
            .replace("SCALES_GIVEN", "const float *scales, " if int8 else "")
            .replace("SCALES_OF_INPUT", "const float *scales_in, " if int8 else "")
            .replace("SCALES_OF_STATE", "const float *scales_own, " if int8 else "")
            .replace("SCALES_IN", "scales_in, " if int8 else "")
            .replace("SCALES_OWN", "scales_own, " if int8 else "")
            .replace("SCALED(sum)", "sum * scales[o]" if int8 else "sum")
            .replace("(float)taps[u]", "(float)taps[u]" if int8 else "taps[u]")
            .replace("(float)weights[", "(float)weights[" if int8 else "weights[")
        )
        return "".join(f"#include <{name}.h>\n" for name in ["limits", *headers]), text


def _convolution(code: _Code, step: Step, sources: Sequence[str], target: str) -> None:
    layer: Any = step.layer
    sizes = _size(step.given[0]), target, _size(step.shape), _window(layer)
    code.call("convolve", sources[0], *sizes, layer.groups, *code.weights(step))


def _dense(code: _Code, step: Step, sources: Sequence[str], target: str) -> None:
    layer: Any = step.layer
    code.call("dense", sources[0], layer.inputs, target, layer.outputs, *code.weights(step))


def _recurrent(code: _Code, step: Step, sources: Sequence[str], target: str) -> None:
    """Call the function of a GRU or an LSTM. Scratch: its sums of inputs and of states, and the cells of an LSTM."""
    layer: Any = step.layer
    is_lstm = isinstance(layer, layers.Lstm)
    code.scratch = max(code.scratch, layer.hidden * (9 if is_lstm else 6))
    code.functions.setdefault("dense", _DENSE)
    weights = (*code.weights(step, "weight_ih_l0", "bias_ih_l0"), *code.weights(step, "weight_hh_l0", "bias_hh_l0"))
    sizes = step.given[0][0], layer.inputs, target, layer.hidden, 0 if layer.last else layer.hidden
    code.call(layer.name, sources[0], *sizes, "SCRATCH", *weights)


def _transpose(code: _Code, step: Step, sources: Sequence[str], target: str) -> None:
    code.call("transpose", sources[0], target, *step.shape)


def _pool(function: str) -> Callable[[_Code, Step, Sequence[str], str], None]:
    def add(code: _Code, step: Step, sources: Sequence[str], target: str) -> None:
        code.call(function, sources[0], _size(step.given[0]), target, _size(step.shape), _window(step.layer))

    return add


def _group_norm(code: _Code, step: Step, sources: Sequence[str], target: str) -> None:
    layer: Any = step.layer
    code.call("normalise", sources[0], target, layer.groups, step.count // layer.groups, _number(layer.epsilon))
    if layer.affine:
        sizes = 1, step.shape[0], math.prod(step.shape[1:])
        code.scale(step, target, target, sizes, factor=step.tensors["weight"], offset=step.tensors["bias"])


def _layer_norm(code: _Code, step: Step, sources: Sequence[str], target: str) -> None:
    layer: Any = step.layer
    together = math.prod(layer.shape)
    code.call("normalise", sources[0], target, step.count // together, together, _number(layer.epsilon))
    if layer.affine:
        sizes = step.count // together, together, 1
        code.scale(step, target, target, sizes, factor=step.tensors["weight"], offset=step.tensors.get("bias"))


def _scale(code: _Code, step: Step, sources: Sequence[str], target: str) -> None:
    layer: Any = step.layer
    length = max(len(layer.factors), len(layer.offsets))
    factors, offsets = (np.resize(np.array(values, np.float32), length) for values in (layer.factors, layer.offsets))
    code.scale(step, sources[0], target, (1, length, step.count // length), factor=factors, offset=offsets)


def _add(code: _Code, step: Step, sources: Sequence[str], target: str) -> None:
    """Add up one after the other, beginning with the one that is overwritten, if any is."""
    first, second, *others = sorted(sources, key=lambda source: source != target)
    code.call("add", first, second, target, step.count)
    for other in others:
        code.call("add", target, other, target, step.count)


def _concat(code: _Code, step: Step, sources: Sequence[str], target: str) -> None:
    start = 0
    for source, shape in zip(sources, step.given, strict=True):
        code.call("copy", source, f"{target} + {start}", math.prod(shape))
        start += math.prod(shape)


def _flatten(code: _Code, step: Step, sources: Sequence[str], target: str) -> None:
    if sources[0] != target:
        code.call("copy", sources[0], target, step.count)


_CALLS: dict[type[Layer], Callable[[_Code, Step, Sequence[str], str], None]] = {
    layers.Conv1d: _convolution,
    layers.Conv2d: _convolution,
    layers.Linear: _dense,
    layers.MaxPool1d: _pool("max_pool"),
    layers.MaxPool2d: _pool("max_pool"),
    layers.AvgPool1d: _pool("avg_pool"),
    layers.AvgPool2d: _pool("avg_pool"),
    layers.Flatten: _flatten,
    layers.GroupNorm: _group_norm,
    layers.LayerNorm: _layer_norm,
    layers.Gru: _recurrent,
    layers.Lstm: _recurrent,
    layers.Transpose: _transpose,
    layers.Scale: _scale,
    layers.Add: _add,
    layers.Concat: _concat,
}
"""How to write each layer kind but activations; dropout was left out before."""


def _gelu(layer: layers.Gelu) -> str:
    if layer.approximate:
        return "0.5f * x * (1.0f + tanhf(0.797884561f * (x + 0.044715f * x * x * x)))"
    return "0.5f * x * (1.0f + erff(x * 0.707106781f))"


_ACTIVATIONS: dict[type[Layer], Callable[[Any], str]] = {
    layers.Relu: lambda _: "x > 0.0f ? x : 0.0f",
    layers.Relu6: lambda _: "x > 6.0f ? 6.0f : x > 0.0f ? x : 0.0f",
    layers.LeakyRelu: lambda layer: f"x > 0.0f ? x : {_number(layer.slope)} * x",
    layers.Tanh: lambda _: "tanhf(x)",
    layers.Sigmoid: lambda _: "1.0f / (1.0f + expf(-x))",
    layers.Silu: lambda _: "x / (1.0f + expf(-x))",
    layers.Hardswish: lambda _: "x >= 3.0f ? x : x <= -3.0f ? 0.0f : x * (x + 3.0f) / 6.0f",
    layers.Softplus: lambda _: "x > 20.0f ? x : log1pf(expf(x))",
    layers.Gelu: _gelu,
}
"""The expression of each activation of x."""


def _number(value: float) -> str:
    """Return a float as C writes it, exact to the bit."""
    text = f"{np.float32(value):.9g}"
    return f"{text}f" if "." in text or "e" in text else f"{text}.0f"


def _size(shape: Shape) -> str:
    sizes = shape if len(shape) == 3 else (shape[0], 1, shape[1])
    return f"(Size){{{', '.join(map(str, sizes))}}}"


def _window(layer: Any) -> str:  # noqa: ANN401 - a convolution or a pooling
    kernel, stride, padding = layer.kernel, layer.stride, layer.padding
    if len(kernel) == 1:
        kernel, stride, padding = (1, *kernel), (1, *stride), (0, *padding)
    return f"(Window){{{', '.join(map(str, (*kernel, *stride, *padding)))}}}"


_TYPES = """\
typedef struct { int channels, height, width; } Size;
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

_SCALE = """\
static void scale(const float *in, float *out, int times, int channels, int places, const float *factors,
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

_TRANSPOSE = """\
static void transpose(const float *in, float *out, int rows, int columns)
{
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++)
            out[r * columns + c] = in[c * rows + r];
}
"""

_RECURRENT = """\
static void NAME(const float *in, int steps, int inputs, float *out, int hidden, int ahead, float *sums,
                 const WEIGHT *weights_in, SCALES_OF_INPUTconst float *bias_in, const WEIGHT *weights_own,
                 SCALES_OF_STATEconst float *bias_own)
{
    float *const own = sums + GATES * hidden;ROOM
    float *state = out;
    for (int k = 0; k < hidden; k++)
        START;
    for (int t = 0; t < steps; t++, in += inputs) {
        float *const next = out + t * ahead;
        dense(in, inputs, sums, GATES * hidden, weights_in, SCALES_INbias_in);
        dense(state, hidden, own, GATES * hidden, weights_own, SCALES_OWNbias_own);
        for (int k = 0; k < hidden; k++) {
STEP
        }
        state = next;
    }
}
"""
_GRU = (
    _RECURRENT.replace("NAME", "gru").replace("GATES", "3").replace("ROOM", "").replace("START", "state[k] = 0.0f")
    .replace("STEP", """\
            const float r = 1.0f / (1.0f + expf(-sums[k] - own[k]));
            const float z = 1.0f / (1.0f + expf(-sums[hidden + k] - own[hidden + k]));
            const float n = tanhf(sums[2 * hidden + k] + r * own[2 * hidden + k]);
            next[k] = (state[k] - n) * z + n;""")
)  # fmt: skip
_LSTM = (
    _RECURRENT.replace("NAME", "lstm").replace("GATES", "4").replace("START", "state[k] = cell[k] = 0.0f")
    .replace("ROOM", "\n    float *const cell = own + 4 * hidden;")
    .replace("STEP", """\
            const float i = 1.0f / (1.0f + expf(-sums[k] - own[k]));
            const float f = 1.0f / (1.0f + expf(-sums[hidden + k] - own[hidden + k]));
            const float g = tanhf(sums[2 * hidden + k] + own[2 * hidden + k]);
            const float o = 1.0f / (1.0f + expf(-sums[3 * hidden + k] - own[3 * hidden + k]));
            cell[k] = f * cell[k] + i * g;
            next[k] = o * tanhf(cell[k]);""")
)  # fmt: skip

_ACTIVATION = """\
static void NAME(const float *in, float *out, int count)
{
    for (int k = 0; k < count; k++) {
        const float x = in[k];
        out[k] = VALUE;
    }
}
"""

_FUNCTIONS = {
    "convolve": _CONVOLVE,
    "dense": _DENSE,
    "max_pool": _MAX_POOL,
    "avg_pool": _AVG_POOL,
    "normalise": _NORMALISE,
    "gru": _GRU,
    "lstm": _LSTM,
    "transpose": _TRANSPOSE,
    "scale": _SCALE,
    "add": _ADD,
    "copy": _COPY,
}
