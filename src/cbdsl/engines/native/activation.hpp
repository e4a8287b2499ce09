// Activations and poolings that stand alone, and the slope of an activation seen from its result.
#pragma once

#include "plan.hpp"

namespace cbdsl {

// Kept out of line: the curves are long, and a kernel's registers are better spent on accumulators.
__attribute__((noinline)) inline void bend(Activation activation, lanes *value) {
    *value = activation == Activation::tanh ? hyperbolic_tangent(*value) : logistic(*value);
}

CBDSL_INLINE lanes activate(Activation activation, lanes value) {
    if (activation == Activation::none) return value;
    if (activation == Activation::relu) return relu(value);
    bend(activation, &value);
    return value;
}

// gradient * derivative, where the derivative is a function of the result.
CBDSL_INLINE lanes slope(Activation activation, lanes result, lanes gradient) {
    switch (activation) {
        case Activation::relu: return result <= lanes{} ? lanes{} : gradient;
        case Activation::tanh: return gradient * (1.0f - result * result);
        case Activation::sigmoid: return gradient * (1.0f - result) * result;
        default: return gradient;
    }
}

inline void activate_all(const Stage &stage, const lanes *input, lanes *output) {
    size_t i = 0;
    for (int channel = 0; channel < stage.channels; channel++)
        for (int y = 0; y < stage.height; y++)
            for (int x = 0; x < stage.width; x++)
                output[stage.output.at(channel, y) + x] = activate(stage.activation, input[i++]);
}

inline void activate_all_gradient(const Stage &stage, const lanes *output, const lanes *output_gradient, lanes *gradient) {
    size_t i = 0;
    for (int channel = 0; channel < stage.channels; channel++)
        for (int y = 0; y < stage.height; y++) {
            const lanes *value = output + stage.output.at(channel, y);
            const lanes *from = output_gradient + stage.output_gradient.at(channel, y);
            for (int x = 0; x < stage.width; x++) gradient[i++] = slope(stage.activation, value[x], from[x]);
        }
}

// Pooling of any window and stride. For the maximum, `chosen` keeps the place of the winner in its plane.
inline void pool(const Stage &stage, const lanes *input, lanes *output, whole *chosen) {
    const float share = 1.0f / float(stage.kernel_height * stage.kernel_width);
    for (int channel = 0; channel < stage.channels; channel++)
        for (int y = 0; y < stage.height; y++)
            for (int x = 0; x < stage.width; x++) {
                const size_t corner = y * stage.stride_height * stage.input.row + x * stage.stride_width;
                const lanes *in = input + channel * stage.input.plane;
                lanes best = in[corner], total{};
                whole which = whole{} + int(corner);
                for (int ky = 0; ky < stage.kernel_height; ky++)
                    for (int kx = 0; kx < stage.kernel_width; kx++) {
                        const size_t at = corner + ky * stage.input.row + kx;
                        const lanes value = in[at];
                        total += value;
                        // As torch chooses: the first of equals, and a NaN wins.
                        const whole better = (value > best) | (value != value);
                        best = better ? value : best;
                        which = better ? whole{} + int(at) : which;
                    }
                output[stage.output.at(channel, y) + x] = stage.pool_is_max ? best : total * share;
                if (stage.pool_is_max) chosen[(size_t(channel) * stage.height + y) * stage.width + x] = which;
            }
}

inline void pool_gradient(const Stage &stage, const lanes *output_gradient, const whole *chosen, lanes *gradient) {
    const float share = 1.0f / float(stage.kernel_height * stage.kernel_width);
    for (size_t i = 0; i < stage.input_gradient.size; i++) gradient[i] = lanes{};
    for (int channel = 0; channel < stage.channels; channel++)
        for (int y = 0; y < stage.height; y++)
            for (int x = 0; x < stage.width; x++) {
                const lanes from = output_gradient[stage.output_gradient.at(channel, y) + x];
                const size_t corner = y * stage.stride_height * stage.input.row + x * stage.stride_width;
                lanes *to = gradient + channel * stage.input_gradient.plane;
                whole which{};
                if (stage.pool_is_max) which = chosen[(size_t(channel) * stage.height + y) * stage.width + x];
                for (int ky = 0; ky < stage.kernel_height; ky++)
                    for (int kx = 0; kx < stage.kernel_width; kx++) {
                        const size_t at = corner + ky * stage.input.row + kx;
                        to[at] += stage.pool_is_max ? (which == int(at) ? from : lanes{}) : from * share;
                    }
            }
}

}  // namespace cbdsl
