// Dense layers while training: inputs or outputs in the lanes, one row a sample.
//
// A batch of 10 would leave 6 of 16 lanes idle, and a weight broadcast for one vector of samples costs a
// load per multiply-add. Turned round, only real samples are computed and a tile of weights times samples
// stays in registers. Rows end where the next array begins, so no vector ever reads past the end of one.
#pragma once

#include <algorithm>

#include "activation.hpp"
#include "plan.hpp"

namespace cbdsl {

constexpr int ROW_SAMPLES = MANY_REGISTERS ? 5 : 2;  // samples of one register tile

CBDSL_INLINE lanes load_loose(const float *from) { return *(const loose *)from; }

CBDSL_INLINE lanes load_partial(const float *from, size_t count) {
    float values[LANES] = {};
    std::memcpy(values, from, count * sizeof(float));
    return load_loose(values);
}

CBDSL_INLINE void store_partial(float *to, lanes value, size_t count) { std::memcpy(to, &value, count * sizeof(float)); }

// Where the last inputs of every row stand in a vector of their own: at its end, behind zeros, next to the
// last LANES weights of a row; or at its start if a whole row is shorter than a vector.
struct RowEnd {
    size_t whole, rest;  // inputs in whole vectors, and those after them
    bool shorter;        // than a vector
    lanes values[LANES];

    RowEnd(const float *const *rows, size_t inputs, int samples)
        : whole(inputs / LANES * LANES), rest(inputs % LANES), shorter(inputs < LANES) {
        if (!rest) return;
        for (int s = 0; s < samples; s++) {
            float row[LANES] = {};
            std::memcpy(row + (shorter ? 0 : LANES - rest), rows[s] + whole, rest * sizeof(float));
            values[s] = load_loose(row);
        }
    }
    CBDSL_INLINE lanes weights(const float *row) const {
        return shorter ? load_partial(row, rest) : load_loose(row + whole + rest - LANES);
    }
};

template <int OUTPUTS, int SAMPLES>
CBDSL_INLINE void rows_forward_block(const float *weights, size_t inputs, const float *const *rows, const RowEnd &end, int sample,
                                     lanes (&accumulator)[4][SAMPLES]) {
#pragma GCC unroll 8
    for (int o = 0; o < 4; o++)
#pragma GCC unroll 8
        for (int s = 0; s < SAMPLES; s++) accumulator[o][s] = lanes{};
    for (size_t i = 0; i < end.whole; i += LANES) {
        lanes value[SAMPLES];
#pragma GCC unroll 8
        for (int s = 0; s < SAMPLES; s++) value[s] = load_loose(rows[sample + s] + i);
#pragma GCC unroll 8
        for (int o = 0; o < OUTPUTS; o++) {
            const lanes weight = load_loose(weights + o * inputs + i);
#pragma GCC unroll 8
            for (int s = 0; s < SAMPLES; s++) accumulator[o][s] += weight * value[s];
        }
    }
    if (end.rest)
#pragma GCC unroll 8
        for (int o = 0; o < OUTPUTS; o++) {
            const lanes weight = end.weights(weights + o * inputs);
#pragma GCC unroll 8
            for (int s = 0; s < SAMPLES; s++) accumulator[o][s] += weight * end.values[sample + s];
        }
}

// rows: (samples, inputs). out: (samples, stride), before the activation.
inline void rows_forward(const Stage &stage, const float *weights, const float *const *rows, int samples, float *out,
                         size_t stride) {
    const size_t inputs = stage.input.channels;
    const RowEnd end(rows, inputs, samples);
    in_blocks<4>(stage.channels, [&](auto outputs, int first) {
        constexpr int OUTPUTS = decltype(outputs)::value;
        const float *kernel = weights + stage.weight + first * inputs;
        quad bias{};
        if (stage.bias != NOWHERE) std::memcpy(&bias, weights + stage.bias + first, OUTPUTS * sizeof(float));
        in_blocks<ROW_SAMPLES>(samples, [&](auto size, int sample) {
            constexpr int SAMPLES = decltype(size)::value;
            lanes accumulator[4][SAMPLES];
            rows_forward_block<OUTPUTS>(kernel, inputs, rows, end, sample, accumulator);
#pragma GCC unroll 8
            for (int s = 0; s < SAMPLES; s++) {
                const quad sums = bias + sum_each(accumulator[0][s], accumulator[1][s], accumulator[2][s], accumulator[3][s]);
                std::memcpy(out + (sample + s) * stride + first, &sums, OUTPUTS * sizeof(float));
            }
        });
    });
}

// gradient: (samples, gradient_stride), before the activation. out: (samples, out_stride).
inline void rows_input_gradient(const Stage &stage, const float *weights, const float *gradient, size_t gradient_stride,
                                int samples, float *out, size_t out_stride) {
    const size_t inputs = stage.input.channels;
    const float *kernel = weights + stage.weight;
    const auto columns = [&](auto blocks, size_t i, size_t count) {
        constexpr int BLOCKS = decltype(blocks)::value;
        in_blocks<ROW_SAMPLES>(samples, [&](auto size, int sample) {
            constexpr int SAMPLES = decltype(size)::value;
            lanes accumulator[SAMPLES][BLOCKS]{};
            const float *from = gradient + sample * gradient_stride;
            for (int o = 0; o < stage.channels; o++) {
                const float *row = kernel + o * inputs + i;
                lanes weight[BLOCKS];
#pragma GCC unroll 4
                for (int b = 0; b < BLOCKS; b++)
                    weight[b] = count < LANES ? load_partial(row, count) : load_loose(row + b * LANES);
#pragma GCC unroll 8
                for (int s = 0; s < SAMPLES; s++) {
                    const float g = from[s * gradient_stride + o];
#pragma GCC unroll 4
                    for (int b = 0; b < BLOCKS; b++) accumulator[s][b] += g * weight[b];
                }
            }
#pragma GCC unroll 8
            for (int s = 0; s < SAMPLES; s++)
#pragma GCC unroll 4
                for (int b = 0; b < BLOCKS; b++) {
                    float *to = out + (sample + s) * out_stride + i + b * LANES;
                    if (count < LANES) store_partial(to, accumulator[s][b], count);
                    else *(loose *)to = accumulator[s][b];
                }
        });
    };
    const size_t vectors = inputs / LANES;
    in_blocks<4>(int(vectors), [&](auto blocks, int block) { columns(blocks, size_t(block) * LANES, LANES); });
    // The rest overlaps the vector before it and writes the same numbers once more.
    if (vectors * LANES < inputs) columns(Size<1>{}, inputs < LANES ? 0 : inputs - LANES, std::min<size_t>(inputs, LANES));
}

template <int OUTPUTS, int BLOCKS>
CBDSL_INLINE void rows_weight_block(const float *gradient, size_t stride, const float *const *rows, size_t i, int samples,
                                    lanes (&accumulator)[OUTPUTS][BLOCKS]) {
    for (int s = 0; s < samples; s++) {
        lanes value[BLOCKS];
#pragma GCC unroll 4
        for (int b = 0; b < BLOCKS; b++) value[b] = load_loose(rows[s] + i + b * LANES);
#pragma GCC unroll 8
        for (int o = 0; o < OUTPUTS; o++) {
            const float g = gradient[s * stride + o];
#pragma GCC unroll 4
            for (int b = 0; b < BLOCKS; b++) accumulator[o][b] += g * value[b];
        }
    }
}

// The weights of some outputs are finished row by row, so that their memory is walked through once.
inline void rows_weight_gradient(const Stage &stage, const float *gradient, size_t stride, const float *const *rows,
                                 int samples, const Sink &sink) {
    // Copies that no store below could change, as far as the compiler knows: it keeps them in registers.
    const Sink own = sink;
    const size_t inputs = stage.input.channels, start = stage.weight;
    const RowEnd end(rows, inputs, samples);
    // The last vector of a row overlaps the one before it: lanes that are done already stay as they are.
    lanes keep_rest = splat(own.keep);
    for (size_t lane = 0; lane < LANES - end.rest; lane++) keep_rest[lane] = 1.0f;
    in_blocks<MANY_REGISTERS ? 6 : 2>(stage.channels, [&](auto size, int first) {
        constexpr int OUTPUTS = decltype(size)::value;
        const float *from = gradient + first;
        const auto columns = [&](auto blocks, size_t i) {
            constexpr int BLOCKS = decltype(blocks)::value;
            lanes accumulator[OUTPUTS][BLOCKS]{};
            rows_weight_block(from, stride, rows, i, samples, accumulator);
#pragma GCC unroll 8
            for (int o = 0; o < OUTPUTS; o++)
#pragma GCC unroll 4
                for (int b = 0; b < BLOCKS; b++) own.add(start + (first + o) * inputs + i + b * LANES, accumulator[o][b]);
        };
        in_blocks<4>(int(end.whole / LANES), [&](auto blocks, int block) { columns(blocks, size_t(block) * LANES); });
        if (!end.rest) return;
        lanes accumulator[OUTPUTS]{};
        for (int s = 0; s < samples; s++)
#pragma GCC unroll 8
            for (int o = 0; o < OUTPUTS; o++) accumulator[o] += from[s * stride + o] * end.values[s];
        for (int o = 0; o < OUTPUTS; o++) {
            const size_t at = start + (first + o) * inputs;
            if (end.shorter)
                for (size_t i = 0; i < inputs; i++) own.add(at + i, accumulator[o][i]);
            else
                own.add(at + inputs - LANES, accumulator[o], keep_rest);
        }
    });
    if (stage.bias == NOWHERE) return;
    for (int o = 0; o < stage.channels; o++) {
        float total = 0.0f;
        for (int s = 0; s < samples; s++) total += gradient[s * stride + o];
        sink.add(stage.bias + o, total);
    }
}

// Activation of whole rows. The room between the end of a row and its stride is computed too and never read.
inline void rows_activate(Curve curve, const float *input, float *output, int samples, size_t stride) {
    if (curve.kind == Activation::none) return;  // then input and output are one
    for (size_t i = 0; i < samples * stride; i += LANES)
        *(lanes *)(output + i) = activate(curve, *(const lanes *)(input + i));
}

inline void rows_slope(Curve curve, const float *input, const float *output, const float *gradient, float *out, int samples,
                       size_t stride) {
    if (curve.kind == Activation::none) return;
    for (size_t i = 0; i < samples * stride; i += LANES) {
        const lanes result = *(const lanes *)(output + i), from = *(const lanes *)(gradient + i);
        *(lanes *)(out + i) = slope_at(curve, *(const lanes *)(input + i), result, from);
    }
}

inline void rows_add(const float *from, float *to, int samples, size_t stride) {
    for (size_t i = 0; i < samples * stride; i += LANES) *(lanes *)(to + i) += *(const lanes *)(from + i);
}

}  // namespace cbdsl
