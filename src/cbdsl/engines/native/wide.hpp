// Training with channels in the lanes, one sample at a time: for networks that have many channels.
//
// A batch of 10 leaves 6 of 16 lanes idle where lanes are samples, and 16 samples of a large image fit into no cache.
// With channels in the lanes both are gone. A tensor is [y][x][channel], channels rounded up to whole vectors; those
// beyond the last are zero. Kernels take weights as [ky][kx][input][output], packed once a step.
#pragma once

#include <algorithm>

#include "convolution.hpp"
#include "joining.hpp"

namespace cbdsl {

constexpr int WIDE_VECTORS = MANY_REGISTERS ? 4 : 2;    // of output channels in one register tile
constexpr int WIDE_REGISTERS = MANY_REGISTERS ? 24 : 8;  // accumulators of one

CBDSL_INLINE lanes &vector_at(float *at) { return *reinterpret_cast<lanes *>(at); }
CBDSL_INLINE const lanes &vector_at(const float *at) { return *reinterpret_cast<const lanes *>(at); }

// A convolution seen as a sweep over positions: forwards over the input, backwards over the gradient of the result.
// All distances are in floats.
struct Sweep {
    const float *in;
    ptrdiff_t in_row, in_step;         // from one position to the next
    ptrdiff_t tap_row, tap_step;       // from one tap to the next
    int taps_high, taps_wide, inputs;  // taps, and the channels that are added up
    const float *weights;              // of the first tap: [input][output]
    size_t weight_row, weight_step;    // from one tap to the next
    const float *bias;                 // (depth,) or null
    float *out;
    ptrdiff_t out_row, out_step;
    int height, width, depth;          // positions, and the channels of the result, whole vectors
    bool adds;
};

template <int POSITIONS, int VECTORS>
CBDSL_INLINE void sweep_tile(const Sweep &sweep, const float *in, size_t channel, float *out) {
    lanes accumulator[POSITIONS][VECTORS];
#pragma GCC unroll 12
    for (int p = 0; p < POSITIONS; p++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            accumulator[p][v] = sweep.bias ? vector_at(sweep.bias + channel + v * LANES) : lanes{};
    const size_t depth = sweep.depth;
    const ptrdiff_t step = sweep.in_step;
    for (int ky = 0; ky < sweep.taps_high; ky++)
        for (int kx = 0; kx < sweep.taps_wide; kx++) {
            const float *from = in + ky * sweep.tap_row + kx * sweep.tap_step, *fourth = from + 4 * step, *eighth = from + 8 * step;
            const float *weight = sweep.weights + ky * sweep.weight_row + kx * sweep.weight_step + channel;
            for (int i = 0; i < sweep.inputs; i++, weight += depth, from++, fourth++, eighth++) {
                lanes taken[VECTORS];
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) taken[v] = vector_at(weight + v * LANES);
#pragma GCC unroll 12
                for (int p = 0; p < POSITIONS; p++) {
                    const float value = p < 4 ? from[p * step] : p < 8 ? fourth[(p - 4) * step] : eighth[(p - 8) * step];
#pragma GCC unroll 4
                    for (int v = 0; v < VECTORS; v++) accumulator[p][v] += value * taken[v];
                }
            }
        }
#pragma GCC unroll 12
    for (int p = 0; p < POSITIONS; p++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) put(vector_at(out + p * sweep.out_step + channel + v * LANES), accumulator[p][v], sweep.adds);
}

inline void run_sweep(const Sweep &sweep) {
    in_blocks<WIDE_VECTORS>(sweep.depth / LANES, [&](auto vectors, int vector) {
        constexpr int VECTORS = decltype(vectors)::value;
        for (int y = 0; y < sweep.height; y++)
            in_blocks<std::min(12, WIDE_REGISTERS / VECTORS)>(sweep.width, [&](auto size, int x) {
                sweep_tile<decltype(size)::value, VECTORS>(sweep, sweep.in + y * sweep.in_row + x * sweep.in_step,
                                                          size_t(vector) * LANES, sweep.out + y * sweep.out_row + x * sweep.out_step);
            });
    });
}

// The same where every channel has taps of its own: weights are [ky][kx][channel].
inline void run_sweep_by_channel(const Sweep &sweep) {
    for (int channel = 0; channel < sweep.depth; channel += LANES)
        for (int y = 0; y < sweep.height; y++)
            in_blocks<4>(sweep.width, [&](auto size, int x) {
                constexpr int POSITIONS = decltype(size)::value;
                const float *in = sweep.in + y * sweep.in_row + x * sweep.in_step + channel;
                float *out = sweep.out + y * sweep.out_row + x * sweep.out_step + channel;
                lanes accumulator[POSITIONS];
#pragma GCC unroll 4
                for (int p = 0; p < POSITIONS; p++) accumulator[p] = sweep.bias ? vector_at(sweep.bias + channel) : lanes{};
                for (int ky = 0; ky < sweep.taps_high; ky++)
                    for (int kx = 0; kx < sweep.taps_wide; kx++) {
                        const lanes weight = vector_at(sweep.weights + ky * sweep.weight_row + kx * sweep.weight_step + channel);
                        const float *from = in + ky * sweep.tap_row + kx * sweep.tap_step;
#pragma GCC unroll 4
                        for (int p = 0; p < POSITIONS; p++) accumulator[p] += weight * vector_at(from + p * sweep.in_step);
                    }
#pragma GCC unroll 4
                for (int p = 0; p < POSITIONS; p++) put(vector_at(out + p * sweep.out_step), accumulator[p], sweep.adds);
            });
}

CBDSL_INLINE bool by_channel(const Stage &stage) { return stage.groups > 1; }  // a wide plan has no other groups

// Taps of a stage's weights [output][input][ky][kx] -> [ky][kx][input][depth of outputs], or [ky][kx][output][depth of
// inputs] for the way back. Depths are whole vectors; what lies beyond the channels is zero and stays so.
inline void pack(const Stage &stage, const float *weights, float *forward, float *backward) {
    const int taps = stage.kernel_height * stage.kernel_width, inputs = stage.group_inputs;
    const size_t depth = rounded_to_lanes(stage.channels), depth_in = rounded_to_lanes(stage.input.channels);
    const float *from = weights + stage.weight;
    for (int output = 0; output < stage.channels; output++)
        for (int input = 0; input < inputs; input++)
            for (int tap = 0; tap < taps; tap++, from++) {
                forward[(size_t(tap) * inputs + input) * depth + output] = *from;
                if (backward && !by_channel(stage)) backward[(size_t(tap) * stage.channels + output) * depth_in + input] = *from;
            }
}

// packed: gradients as [ky][kx][input][depth of outputs].
inline void unpack(const Stage &stage, const float *packed, const Sink &sink) {
    const int taps = stage.kernel_height * stage.kernel_width, inputs = stage.group_inputs;
    const size_t depth = rounded_to_lanes(stage.channels);
    size_t at = stage.weight;
    for (int output = 0; output < stage.channels; output++)
        for (int input = 0; input < inputs; input++)
            for (int tap = 0; tap < taps; tap++, at++) sink.add(at, packed[(size_t(tap) * inputs + input) * depth + output]);
}

inline Sweep forward_sweep(const Stage &stage, const Pixels &from, const float *corner, const float *packed, const float *bias,
                           const Pixels &to, float *out) {
    const int inputs = stage.group_inputs;
    const size_t weights = size_t(inputs) * to.depth;
    return {corner, ptrdiff_t(from.row) * stage.stride_height, ptrdiff_t(from.depth) * stage.stride_width,
            ptrdiff_t(from.row), ptrdiff_t(from.depth), stage.kernel_height, stage.kernel_width, inputs,
            packed, weights * stage.kernel_width, weights, bias,
            out, ptrdiff_t(to.row), ptrdiff_t(to.depth), stage.full_height, stage.full_width, to.depth, false};
}

// The gradient of the input. With a stride, positions are taken in as many phases as it has: each meets its own taps.
// gradient: of the result, inside a border of zeros as wide as the kernel. out: the gradient of the input.
inline void wide_input_gradient(const Stage &stage, const Pixels &from, const float *gradient, const float *packed, const Pixels &to,
                                float *out, bool adds) {
    const size_t weights = by_channel(stage) ? size_t(to.depth) : size_t(stage.channels) * to.depth;
    for (int y = 0; y < std::min(stage.stride_height, to.height); y++)
        for (int x = 0; x < std::min(stage.stride_width, to.width); x++) {
            const int ky = (y + stage.above) % stage.stride_height, kx = (x + stage.left) % stage.stride_width;
            const int row = (y + stage.above - ky) / stage.stride_height, column = (x + stage.left - kx) / stage.stride_width;
            Sweep sweep{gradient + ptrdiff_t(row) * ptrdiff_t(from.row) + ptrdiff_t(column) * from.depth,
                        ptrdiff_t(from.row), from.depth, -ptrdiff_t(from.row), -ptrdiff_t(from.depth),
                        (stage.kernel_height - ky + stage.stride_height - 1) / stage.stride_height,
                        (stage.kernel_width - kx + stage.stride_width - 1) / stage.stride_width, stage.channels,
                        packed + (size_t(ky) * stage.kernel_width + kx) * weights,
                        weights * stage.kernel_width * stage.stride_height, weights * stage.stride_width, nullptr,
                        out + to.at(y, x), ptrdiff_t(to.row) * stage.stride_height, ptrdiff_t(to.depth) * stage.stride_width,
                        (to.height - y + stage.stride_height - 1) / stage.stride_height,
                        (to.width - x + stage.stride_width - 1) / stage.stride_width, to.depth, adds};
            // Phases without a tap get zeros.
            if (sweep.taps_high < 0) sweep.taps_high = 0;
            if (sweep.taps_wide < 0) sweep.taps_wide = 0;
            by_channel(stage) ? run_sweep_by_channel(sweep) : run_sweep(sweep);
        }
}

// Where every channel has taps of its own: a block of taps of one vector of channels stays in registers.
inline void wide_kernel_gradient_by_channel(const Stage &stage, const Pixels &from, const float *corner, const Pixels &to,
                                            const float *gradient, float *packed) {
    const size_t row = from.row, step = from.depth, depth = to.depth;
    for (size_t channel = 0; channel < depth; channel += LANES)
        in_blocks<3>(stage.kernel_height, [&](auto rows, int ky) {
            in_slices(stage.kernel_width, [&](auto columns, int kx) {
                constexpr int ROWS = decltype(rows)::value, COLUMNS = decltype(columns)::value;
                lanes accumulator[ROWS][COLUMNS]{};
                for (int y = 0; y < stage.full_height; y++) {
                    const float *in = corner + (size_t(y) * stage.stride_height + ky) * row + kx * step + channel;
                    const float *g = gradient + to.at(y, 0) + channel;
                    for (int x = 0; x < stage.full_width; x++, in += step * stage.stride_width, g += depth)
#pragma GCC unroll 3
                        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 5
                            for (int k = 0; k < COLUMNS; k++) accumulator[r][k] += vector_at(g) * vector_at(in + r * row + k * step);
                }
                for (int r = 0; r < ROWS; r++)
                    for (int k = 0; k < COLUMNS; k++)
                        vector_at(packed + (size_t(ky + r) * stage.kernel_width + kx + k) * depth + channel) += accumulator[r][k];
            });
        });
}

// packed += the gradient of the weights on this sample. corner: where the padded input begins.
inline void wide_kernel_gradient(const Stage &stage, const Pixels &from, const float *corner, const Pixels &to, const float *gradient,
                                 float *packed) {
    const int inputs = stage.group_inputs;
    const ptrdiff_t in_row = ptrdiff_t(from.row) * stage.stride_height, in_step = ptrdiff_t(from.depth) * stage.stride_width;
    for (int ky = 0; ky < stage.kernel_height; ky++)
        for (int kx = 0; kx < stage.kernel_width; kx++, packed += size_t(inputs) * to.depth) {
            const float *tap = corner + ky * ptrdiff_t(from.row) + kx * ptrdiff_t(from.depth);
            in_blocks<2>(to.depth / LANES, [&](auto vectors, int vector) {
                constexpr int VECTORS = decltype(vectors)::value;
                in_blocks<std::min(12, WIDE_REGISTERS / VECTORS)>(inputs, [&](auto size, int first) {
                    constexpr int INPUTS = decltype(size)::value;
                    lanes accumulator[INPUTS][VECTORS]{};
                    for (int y = 0; y < stage.full_height; y++) {
                        const float *in = tap + y * in_row + first, *g = gradient + to.at(y, 0) + vector * LANES;
                        for (int x = 0; x < stage.full_width; x++, in += in_step, g += to.depth) {
                            lanes taken[VECTORS];
#pragma GCC unroll 4
                            for (int v = 0; v < VECTORS; v++) taken[v] = vector_at(g + v * LANES);
#pragma GCC unroll 16
                            for (int i = 0; i < INPUTS; i++)
#pragma GCC unroll 4
                                for (int v = 0; v < VECTORS; v++) accumulator[i][v] += in[i] * taken[v];
                        }
                    }
#pragma GCC unroll 16
                    for (int i = 0; i < INPUTS; i++)
#pragma GCC unroll 4
                        for (int v = 0; v < VECTORS; v++)
                            vector_at(packed + size_t(first + i) * to.depth + (vector + v) * LANES) += accumulator[i][v];
                });
            });
        }
}

// Sums of all positions, channel by channel: total[depth].
template <class Value> CBDSL_INLINE void sum_positions(const Pixels &of, float *total, const Value &value) {
    const size_t height = of.height, depth = of.depth;
    for (size_t channel = 0; channel < depth; channel += LANES) {
        lanes sum{};
        for (size_t y = 0; y < height; y++) sum += sum_row(size_t(of.width), [&](size_t x) { return value(y, x, channel); });
        vector_at(total + channel) = sum;
    }
}

// What the channels of one group have in common: each gets the sum over its group, times a share.
inline void share_in_groups(float *values, int channels, int together, float share) {
    for (int first = 0; first < channels; first += together) {
        float total = 0.0f;
        for (int c = first; c < first + together; c++) total += values[c];
        std::fill_n(values + first, together, total * share);
    }
}

// Calls body(y, x, channel) for every vector of a sample.
template <class Body> CBDSL_INLINE void each_vector(const Pixels &of, const Body &body) {
    const size_t height = of.height, width = of.width, depth = of.depth;
    for (size_t y = 0; y < height; y++)
        for (size_t x = 0; x < width; x++)
            for (size_t channel = 0; channel < depth; channel += LANES) body(y, x, channel);
}

// One sample's numbers, and how they lie.
struct Sheet {
    const Pixels &map;
    float *at;  // the first number inside the border

    CBDSL_INLINE lanes &operator()(size_t y, size_t x, size_t channel) const { return vector_at(at + map.at(y, x) + channel); }
};

// A norm's factors and offsets, one a channel, and what it keeps: means, and one over the deviations; (depth,) each.
struct WideNorm {
    float *factors, *offsets, *means, *inverses, *first, *second;

    WideNorm(float *kept, int depth)
        : factors(kept), offsets(factors + depth), means(offsets + depth), inverses(means + depth), first(inverses + depth), second(first + depth) {}
};

inline void wide_norm(const Stage &stage, const float *weights, const Sheet &input, const Sheet &output, float *kept) {
    const Pixels &map = input.map;
    const WideNorm norm(kept, map.depth);
    const int together = int(stage.together / (size_t(map.height) * map.width));  // channels
    const float share = 1.0f / float(stage.together);
    std::fill_n(norm.factors, map.channels, 1.0f);
    std::fill_n(norm.offsets, map.channels, 0.0f);
    if (stage.weight != NOWHERE) std::copy_n(weights + stage.weight, map.channels, norm.factors);
    if (stage.bias != NOWHERE) std::copy_n(weights + stage.bias, map.channels, norm.offsets);
    sum_positions(map, norm.means, [&](size_t y, size_t x, size_t c) { return input(y, x, c); });
    share_in_groups(norm.means, map.channels, together, share);
    sum_positions(map, norm.inverses, [&](size_t y, size_t x, size_t c) {
        const lanes d = input(y, x, c) - vector_at(norm.means + c);
        return d * d;
    });
    share_in_groups(norm.inverses, map.channels, together, share);
    for (int c = 0; c < map.channels; c++) norm.inverses[c] = 1.0f / __builtin_sqrtf(norm.inverses[c] + stage.setting);
    each_vector(map, [&](size_t y, size_t x, size_t c) {
        const lanes value = (input(y, x, c) - vector_at(norm.means + c)) * vector_at(norm.inverses + c);
        output(y, x, c) = activate(stage.curve, value * vector_at(norm.factors + c) + vector_at(norm.offsets + c));
    });
}

// output_gradient: behind the activation; what it is before that takes its place.
inline void wide_norm_gradient(const Stage &stage, const Sheet &input, const Sheet &output, const Sheet &output_gradient, float *kept,
                               const Sheet *gradient, bool adds, const Sink &sink) {
    const Pixels &map = input.map;
    const WideNorm norm(kept, map.depth);
    const int together = int(stage.together / (size_t(map.height) * map.width));
    const float share = 1.0f / float(stage.together);
    const auto normal = [&](size_t y, size_t x, size_t c) { return (input(y, x, c) - vector_at(norm.means + c)) * vector_at(norm.inverses + c); };
    const size_t height = map.height, width = map.width;
    for (size_t c = 0; c < size_t(map.depth); c += LANES) {
        lanes first{}, second{}, other_first{}, other_second{};  // in two parts that do not wait for each other
        const auto take = [&](size_t y, size_t x, lanes &sum, lanes &turned) {
            lanes &g = output_gradient(y, x, c);
            g = slope(stage.curve, output(y, x, c), g);
            sum += g, turned += g * normal(y, x, c);
        };
        for (size_t y = 0; y < height; y++) {
            size_t x = 0;
            for (; x + 2 <= width; x += 2) take(y, x, first, second), take(y, x + 1, other_first, other_second);
            if (x < width) take(y, x, first, second);
        }
        vector_at(norm.first + c) = first + other_first, vector_at(norm.second + c) = second + other_second;
    }
    for (int c = 0; c < map.channels; c++) {
        if (stage.weight != NOWHERE) sink.add(stage.weight + c, norm.second[c]);
        if (stage.bias != NOWHERE) sink.add(stage.bias + c, norm.first[c]);
        norm.first[c] *= norm.factors[c], norm.second[c] *= norm.factors[c];
    }
    if (!gradient) return;
    share_in_groups(norm.first, map.channels, together, share);
    share_in_groups(norm.second, map.channels, together, share);
    each_vector(map, [&](size_t y, size_t x, size_t c) {
        const lanes own = vector_at(norm.factors + c) * output_gradient(y, x, c);
        const lanes common = vector_at(norm.first + c) + normal(y, x, c) * vector_at(norm.second + c);
        put((*gradient)(y, x, c), vector_at(norm.inverses + c) * (own - common), adds);
    });
}

}  // namespace cbdsl
