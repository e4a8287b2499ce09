// Activation functions and their derivatives. A new one is a name and a code in `Activation`, a case in `bend`, and one in
// `slope` or `slope_of_input`.
#pragma once

#include <cstdint>

#include "lanes.hpp"

namespace cbdsl {

// The codes are those of the layers' classes in models/layers.py; plan.hpp has the codes of all other layers.
enum class Activation : int32_t {
    none = 0, relu = 2, tanh = 3, sigmoid = 4, relu6 = 9, leaky_relu = 10, silu = 11, hardswish = 12, gelu = 13,
    gelu_by_tanh = 14, softplus = 21
};

inline Activation activation_of(int32_t code) {
    const bool known = (code >= 2 && code <= 4) || (code >= 9 && code <= 14) || code == 21;
    return known ? Activation(code) : Activation::none;
}

// Whether the slope is a function of the result, and the curve never falls: such a curve can be fused.
CBDSL_INLINE bool is_fusable(Activation kind) { return kind <= Activation::leaky_relu; }

struct Curve {
    Activation kind = Activation::none;
    float slope = 0.0f;  // of leaky_relu, below zero
};

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

// log(1 + e^v) = max(v, 0) + log(1 + y), y = e^-|v|. The logarithm is 2 artanh(y / (2 + y)), whose series needs 8 terms.
inline lanes softplus(lanes v) {
    const lanes y = exponential(v < 0.0f ? v : -v), z = y / (2.0f + y), square = z * z;
    lanes p = splat(2.0f / 15.0f);
    p = p * square + 2.0f / 13.0f;
    p = p * square + 2.0f / 11.0f;
    p = p * square + 2.0f / 9.0f;
    p = p * square + 2.0f / 7.0f;
    p = p * square + 2.0f / 5.0f;
    p = p * square + 2.0f / 3.0f;
    p = p * square + 2.0f;
    return relu(v) + p * z;
}

// Kept out of line: these functions are long, and a kernel's registers are better spent on accumulators.
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
        case Activation::softplus: *value = softplus(v); break;
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
        case Activation::softplus: return gradient * logistic(v);
        default: {
            const lanes tangent = gelu_tangent(v);
            const lanes inner = GELU_FACTOR * (1.0f + 3.0f * GELU_CUBE * v * v);
            return gradient * 0.5f * (1.0f + tangent + v * (1.0f - tangent * tangent) * inner);
        }
    }
}

CBDSL_INLINE lanes slope_at(Curve curve, lanes given, lanes result, lanes gradient) {
    return is_fusable(curve.kind) ? slope(curve, result, gradient) : slope_of_input(curve, given, gradient);
}

}  // namespace cbdsl
