// Dense layers, forwards and backwards.
//
// Forwards and towards the inputs, samples lie in the lanes as everywhere. The weight gradient is taken
// the other way round, inputs in the lanes and a loop over the real samples, so a batch of 10 wastes nothing.
#pragma once

#include "activation.hpp"
#include "plan.hpp"

namespace cbdsl {

constexpr int DENSE_OUTPUTS = MANY_REGISTERS ? 14 : 11;        // one lane group
constexpr int DENSE_GROUP_OUTPUTS = MANY_REGISTERS ? 6 : 2;    // GROUPS lane groups at once

// Every result is one chain of additions in the order of the inputs, so blocks never change a number.
template <int OUTPUTS, int TOGETHER>
CBDSL_INLINE void dense_block(const Stage &stage, const float *weights, int first, const lanes *input, lanes *output) {
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
        for (int g = 0; g < TOGETHER; g++) value[g] = input[g * stage.input_step + i];
#pragma GCC unroll 16
        for (int o = 0; o < OUTPUTS; o++) {
            const float weight = row[size_t(o) * inputs + i];
#pragma GCC unroll 4
            for (int g = 0; g < TOGETHER; g++) accumulator[o][g] += weight * value[g];
        }
    }
    for (int o = 0; o < OUTPUTS; o++)
        for (int g = 0; g < TOGETHER; g++)
            output[g * stage.output_step + first + o] = activate(stage.activation, accumulator[o][g]);
}

inline void dense(const Stage &stage, const float *weights, const lanes *input, lanes *output, int groups) {
    if (groups == GROUPS) {
        in_blocks<DENSE_GROUP_OUTPUTS>(stage.channels, [&](auto size, int first) {
            dense_block<decltype(size)::value, GROUPS>(stage, weights, first, input, output);
        });
        return;
    }
    for (int group = 0; group < groups; group++)
        in_blocks<DENSE_OUTPUTS>(stage.channels, [&](auto size, int first) {
            dense_block<decltype(size)::value, 1>(stage, weights, first, input + group * stage.input_step,
                                                  output + group * stage.output_step);
        });
}

template <int INPUTS>
CBDSL_INLINE void dense_input_block(const Stage &stage, const float *weights, int first, const lanes *gradient, lanes *out) {
    const int inputs = stage.input.channels;
    const float *column = weights + stage.weight + first;
    lanes accumulator[INPUTS]{};
    for (int o = 0; o < stage.channels; o++, column += inputs) {
        const lanes g = gradient[o];
#pragma GCC unroll 16
        for (int i = 0; i < INPUTS; i++) accumulator[i] += column[i] * g;
    }
#pragma GCC unroll 16
    for (int i = 0; i < INPUTS; i++) out[first + i] = accumulator[i];
}

// gradient: before the activation, (outputs,).
inline void dense_input_gradient(const Stage &stage, const float *weights, const lanes *gradient, lanes *out) {
    in_blocks<DENSE_OUTPUTS>(stage.input.channels, [&](auto size, int first) {
        dense_input_block<decltype(size)::value>(stage, weights, first, gradient, out);
    });
}

// accumulator[o][b] = sum over samples of gradient[o][sample] * row[sample][LANES * b ...].
template <int OUTPUTS, int BLOCKS>
CBDSL_INLINE void dense_weight_block(const float *gradient, const float *const *rows, size_t offset, int samples,
                                     lanes (&accumulator)[OUTPUTS][BLOCKS]) {
    for (int s = 0; s < samples; s++) {
        lanes value[BLOCKS];
#pragma GCC unroll 4
        for (int b = 0; b < BLOCKS; b++) value[b] = *(const loose *)(rows[s] + offset + b * LANES);
#pragma GCC unroll 8
        for (int o = 0; o < OUTPUTS; o++) {
            const float g = gradient[o * LANES + s];
#pragma GCC unroll 4
            for (int b = 0; b < BLOCKS; b++) accumulator[o][b] += g * value[b];
        }
    }
}

// rows: a pointer to the inputs of every real sample. gradient: before the activation, (outputs,) in lanes.
inline void dense_weight_gradient(const Stage &stage, const lanes *gradient, const float *const *rows, int samples,
                                  const Sink &sink) {
    constexpr int OUTPUTS = MANY_REGISTERS ? 6 : 2;
    const size_t inputs = stage.input.channels;
    const auto blocks_at = [&](auto blocks, size_t i) {
        constexpr int BLOCKS = decltype(blocks)::value;
        in_blocks<OUTPUTS>(stage.channels, [&](auto size, int first) {
            lanes accumulator[decltype(size)::value][BLOCKS]{};
            dense_weight_block(reinterpret_cast<const float *>(gradient + first), rows, i, samples, accumulator);
#pragma GCC unroll 8
            for (int o = 0; o < decltype(size)::value; o++)
#pragma GCC unroll 4
                for (int b = 0; b < BLOCKS; b++) sink.add(stage.weight + (first + o) * inputs + i + b * LANES, accumulator[o][b]);
        });
    };
    size_t i = 0;
    for (; i + 4 * LANES <= inputs; i += 4 * LANES) blocks_at(Size<4>{}, i);
    for (; i + LANES <= inputs; i += LANES) blocks_at(Size<1>{}, i);
    if (i < inputs) {
        // The rest of a row, copied out so that no vector reads beyond it.
        const size_t rest = inputs - i;
        alignas(64) float ends[LANES][LANES]{};
        const float *end_rows[LANES];
        for (int s = 0; s < samples; s++) {
            std::memcpy(ends[s], rows[s] + i, rest * sizeof(float));
            end_rows[s] = ends[s];
        }
        in_blocks<OUTPUTS>(stage.channels, [&](auto size, int first) {
            lanes accumulator[decltype(size)::value][1]{};
            dense_weight_block(reinterpret_cast<const float *>(gradient + first), end_rows, 0, samples, accumulator);
            for (int o = 0; o < decltype(size)::value; o++)
                for (size_t r = 0; r < rest; r++) sink.add(stage.weight + (first + o) * inputs + i + r, accumulator[o][0][r]);
        });
    }
    if (stage.bias != NOWHERE)
        for (int o = 0; o < stage.channels; o++) sink.add(stage.bias + o, sum(gradient[o]));
}

}  // namespace cbdsl
