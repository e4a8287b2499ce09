"""The functions of a C file, one a kind of layer. Only those that a network calls are written.

`WEIGHT` stands for the type of weights, `SCALES` for their factors where they are whole numbers, `[o]` of which makes
the weights of output o what they were.
"""

from __future__ import annotations

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
