// Activations: the curves, their slopes, and whole tensors bent by them.
#pragma once

#include "plan.hpp"

namespace cbdsl {

// The share of the normal distribution below v; at most 1.5e-7 off (Abramowitz and Stegun, 7.1.26).
inline lanes normal_share(lanes v) {
    const lanes size = (v < 0.0f ? -v : v) * 0.70710678f;
    const lanes t = 1.0f / (1.0f + 0.3275911f * size);
    lanes p = splat(1.061405429f);
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const lanes tail = 0.5f * p * t * exponential(-size * size);
    return v < 0.0f ? tail : 1.0f - tail;
}

constexpr float GELU_FACTOR = 0.79788456f, GELU_CUBE = 0.044715f;  // sqrt(2 / pi)

inline lanes gelu_tangent(lanes v) { return hyperbolic_tangent(GELU_FACTOR * (v + GELU_CUBE * v * v * v)); }

CBDSL_INLINE lanes hard_share(lanes v) {
    const lanes raised = relu(v + 3.0f);
    return (raised > 6.0f ? splat(6.0f) : raised) * (1.0f / 6.0f);
}

// Kept out of line: the curves are long, and a kernel's registers are better spent on accumulators.
__attribute__((noinline)) inline void bend(Curve curve, lanes *value) {
    const lanes v = *value;
    switch (curve.kind) {
        case Activation::relu6: *value = v > 6.0f ? splat(6.0f) : relu(v); break;
        case Activation::leaky_relu: *value = v < 0.0f ? curve.slope * v : v; break;
        case Activation::tanh: *value = hyperbolic_tangent(v); break;
        case Activation::sigmoid: *value = logistic(v); break;
        case Activation::silu: *value = v * logistic(v); break;
        case Activation::hardswish: *value = v * hard_share(v); break;
        case Activation::gelu: *value = v * normal_share(v); break;
        case Activation::gelu_by_tanh: *value = 0.5f * v * (1.0f + gelu_tangent(v)); break;
        default: break;
    }
}

CBDSL_INLINE lanes activate(Curve curve, lanes value) {
    if (curve.kind == Activation::none) return value;
    if (curve.kind == Activation::relu) return relu(value);
    bend(curve, &value);
    return value;
}

// gradient * derivative, where the derivative is a function of the result.
CBDSL_INLINE lanes slope(Curve curve, lanes result, lanes gradient) {
    switch (curve.kind) {
        case Activation::relu: return result <= lanes{} ? lanes{} : gradient;
        case Activation::relu6: return (result <= lanes{}) | (result >= 6.0f) ? lanes{} : gradient;
        case Activation::leaky_relu: return result < lanes{} ? curve.slope * gradient : gradient;
        case Activation::tanh: return gradient * (1.0f - result * result);
        case Activation::sigmoid: return gradient * (1.0f - result) * result;
        default: return gradient;
    }
}

// The same for the curves whose derivative is a function of what they are given.
inline lanes slope_of_input(Curve curve, lanes v, lanes gradient) {
    switch (curve.kind) {
        case Activation::silu: {
            const lanes share = logistic(v);
            return gradient * share * (1.0f + v * (1.0f - share));
        }
        case Activation::hardswish: {
            const lanes inside = v > 3.0f ? splat(1.0f) : v * (1.0f / 3.0f) + 0.5f;
            return gradient * (v < -3.0f ? lanes{} : inside);
        }
        case Activation::gelu: return gradient * (normal_share(v) + v * 0.39894228f * exponential(-0.5f * v * v));
        default: {
            const lanes tangent = gelu_tangent(v);
            const lanes inner = GELU_FACTOR * (1.0f + 3.0f * GELU_CUBE * v * v);
            return gradient * 0.5f * (1.0f + tangent + v * (1.0f - tangent * tangent) * inner);
        }
    }
}

CBDSL_INLINE lanes slope_at(Curve curve, lanes given, lanes result, lanes gradient) {
    return curve.kind <= Activation::sigmoid ? slope(curve, result, gradient) : slope_of_input(curve, given, gradient);
}

// Writes a gradient, or adds it to what another reader of the tensor has left there.
CBDSL_INLINE void put(lanes &to, lanes gradient, bool adds) { to = adds ? to + gradient : gradient; }

// A sum in four parts, for additions that do not wait for each other.
template <class Value> CBDSL_INLINE lanes sum_row(size_t count, const Value &value) {
    lanes parts[4]{};
    size_t x = 0;
    for (; x + 4 <= count; x += 4)
#pragma GCC unroll 4
        for (size_t q = 0; q < 4; q++) parts[q] += value(x + q);
    for (; x < count; x++) parts[0] += value(x);
    return (parts[0] + parts[1]) + (parts[2] + parts[3]);
}

// Calls body(channel, y) for every row of a stage's result.
template <class Body> CBDSL_INLINE void each_row(const Stage &stage, const Body &body) {
    for (int channel = 0; channel < stage.channels; channel++)
        for (int y = 0; y < stage.height; y++) body(channel, y);
}

// input, output and the gradients point at the first number inside their borders, here and below.
inline void activate_all(const Stage &stage, const lanes *input, lanes *output) {
    each_row(stage, [&](int channel, int y) {
        const lanes *from = input + stage.input.at(channel, y);
        lanes *to = output + stage.output.at(channel, y);
        for (int x = 0; x < stage.width; x++) to[x] = activate(stage.curve, from[x]);
    });
}

inline void activate_all_gradient(const Stage &stage, const lanes *input, const lanes *output, const lanes *output_gradient,
                                  lanes *gradient, bool adds) {
    each_row(stage, [&](int channel, int y) {
        const lanes *given = input + stage.input.at(channel, y), *value = output + stage.output.at(channel, y);
        const lanes *from = output_gradient + stage.output_gradient.at(channel, y);
        lanes *to = gradient + stage.input_gradient.at(channel, y);
        for (int x = 0; x < stage.width; x++) put(to[x], slope_at(stage.curve, given[x], value[x], from[x]), adds);
    });
}

// Where a stage bends its own result: the gradient before that, in place.
inline void unbend(const Stage &stage, const lanes *output, lanes *output_gradient) {
    if (stage.curve.kind == Activation::none) return;
    each_row(stage, [&](int channel, int y) {
        const lanes *value = output + stage.output.at(channel, y);
        lanes *to = output_gradient + stage.output_gradient.at(channel, y);
        for (int x = 0; x < stage.width; x++) to[x] = slope(stage.curve, value[x], to[x]);
    });
}

}  // namespace cbdsl
