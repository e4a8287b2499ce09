// Activations of whole tensors, and their gradients.
#pragma once

#include "plan.hpp"

namespace cbdsl {

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
