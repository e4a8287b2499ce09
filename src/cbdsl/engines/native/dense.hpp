// Dense layers with samples in the lanes: how many lane groups are scored. Training uses dense_rows.hpp.
#pragma once

#include "activation.hpp"
#include "plan.hpp"

namespace cbdsl {

// Every result is one chain of additions in the order of the inputs, so blocks never change a number.
template <int OUTPUTS, int TOGETHER>
CBDSL_INLINE void dense_block(const Stage &stage, const float *weights, int first, const lanes *input, size_t input_step,
                              lanes *output, size_t output_step) {
    const int inputs = stage.input.channels;
    const float *row = weights + stage.weight + size_t(first) * inputs;
    lanes accumulator[OUTPUTS][TOGETHER];
#pragma GCC unroll 16
    for (int o = 0; o < OUTPUTS; o++)
#pragma GCC unroll 4
        for (int g = 0; g < TOGETHER; g++)
            accumulator[o][g] = splat(stage.bias == NOWHERE ? 0.0f : weights[stage.bias + first + o]);
    for (int i = 0; i < inputs; i++) {
        lanes value[TOGETHER];
#pragma GCC unroll 4
        for (int g = 0; g < TOGETHER; g++) value[g] = input[g * input_step + i];
#pragma GCC unroll 16
        for (int o = 0; o < OUTPUTS; o++) {
            const float weight = row[size_t(o) * inputs + i];
#pragma GCC unroll 4
            for (int g = 0; g < TOGETHER; g++) accumulator[o][g] += weight * value[g];
        }
    }
    for (int o = 0; o < OUTPUTS; o++)
        for (int g = 0; g < TOGETHER; g++)
            output[g * output_step + first + o] = activate(stage.curve, accumulator[o][g]);
}

// The steps are the distances between lane groups.
inline void dense(const Stage &stage, const float *weights, const lanes *input, size_t input_step, lanes *output,
                  size_t output_step, int groups) {
    // GROUPS lane groups share one load of a weight; what is left over goes one by one.
    if (groups == GROUPS) {
        in_blocks<MANY_REGISTERS ? 6 : 2>(stage.channels, [&](auto size, int first) {
            dense_block<decltype(size)::value, GROUPS>(stage, weights, first, input, input_step, output, output_step);
        });
        return;
    }
    for (int group = 0; group < groups; group++)
        in_blocks<12>(stage.channels, [&](auto size, int first) {
            dense_block<decltype(size)::value, 1>(stage, weights, first, input + group * input_step, 0,
                                                  output + group * output_step, 0);
        });
}

}  // namespace cbdsl
