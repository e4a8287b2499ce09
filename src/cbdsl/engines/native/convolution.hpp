// Convolution with its activation and 2x2 pooling, forwards and backwards, on one lane group.
//
// Every kernel keeps a block of results in vector registers through all its additions: four positions
// times several channels forwards, a row of positions times several channels backwards. Block sizes
// follow the number of registers; no kernel knows a network, and any kernel size runs through the same code.
#pragma once

#include <algorithm>

#include "activation.hpp"
#include "plan.hpp"

namespace cbdsl {

constexpr int FORWARD_CHANNELS = MANY_REGISTERS ? 6 : 2;

// accumulator[o][q] += sum over channels and kernel positions of weight * input, for four input positions.
template <int OUTPUTS>
CBDSL_INLINE void multiply(lanes (&accumulator)[OUTPUTS][4], const lanes *const (&from)[4], const Stage &stage,
                           const float *weights) {
    const int channels = stage.group_inputs, height = stage.kernel_height, width = stage.kernel_width;
    const size_t stride = size_t(channels) * height * width;
    for (int channel = 0; channel < channels; channel++)
        for (int y = 0; y < height; y++) {
            const size_t start = stage.input.at(channel, y);
            for (int x = 0; x < width; x++, weights++) {
                const lanes in0 = from[0][start + x], in1 = from[1][start + x];
                const lanes in2 = from[2][start + x], in3 = from[3][start + x];
#pragma GCC unroll 8
                for (int o = 0; o < OUTPUTS; o++) {
                    const float weight = weights[o * stride];
                    accumulator[o][0] += weight * in0;
                    accumulator[o][1] += weight * in1;
                    accumulator[o][2] += weight * in2;
                    accumulator[o][3] += weight * in3;
                }
            }
        }
}

// The largest of four, and which it was; the first of equals, as torch chooses. A NaN among them wins.
template <bool TRAINING> CBDSL_INLINE lanes largest(const lanes (&of)[4], whole *chosen) {
    lanes best = of[0];
    if constexpr (TRAINING) {
        whole which{};
#pragma GCC unroll 4
        for (int q = 1; q < 4; q++) {
            const whole better = of[q] > best;
            best = better ? of[q] : best;
            which = better ? whole{} + q : which;
        }
        *chosen = which;
    } else {
        best = larger(larger(best, of[1]), larger(of[2], of[3]));
    }
    // A comparison with NaN is false, so the maximum may have dropped one; the sum has not.
    const lanes all = (of[0] + of[1]) + (of[2] + of[3]);
    return all == all ? best : all;
}

// The results of a block of output channels at four positions, with bias, before activation.
template <int OUTPUTS> struct Tile {
    lanes at[OUTPUTS][4];

    CBDSL_INLINE Tile(const Stage &stage, const float *kernel, const float *bias, const lanes *const (&from)[4]) {
#pragma GCC unroll 8
        for (int o = 0; o < OUTPUTS; o++)
#pragma GCC unroll 4
            for (int q = 0; q < 4; q++) at[o][q] = splat(bias[o]);
        multiply(at, from, stage, kernel);
    }
};

// One block of output channels with 2x2 pooling: a tile is one pooling window.
template <int OUTPUTS, bool TRAINING, Fused FUSED>
void convolve_pooled(const Stage &stage, const float *kernel, const float *bias, int first, const lanes *corner, lanes *output,
                     lanes *kept) {
    const size_t row = stage.input.row, positions = size_t(stage.height) * stage.width;
    const Curve curve = stage.curve;
    for (int y = 0; y < stage.height; y++)
        for (int x = 0; x < stage.width; x++) {
            const lanes *top = corner + 2 * y * row + 2 * x, *const from[4] = {top, top + 1, top + row, top + row + 1};
            Tile<OUTPUTS> tile(stage, kernel, bias, from);
            lanes *out = output + stage.output.at(first, y) + x;
            if constexpr (FUSED == Fused::max2) {
                whole *chosen = (whole *)kept + first * positions + y * stage.width + x;
#pragma GCC unroll 8
                for (int o = 0; o < OUTPUTS; o++)
                    out[o * stage.output.plane] = activate(curve, largest<TRAINING>(tile.at[o], chosen + o * positions));
            } else {
                lanes *full = kept + stage.full.at(first, 2 * y) + 2 * x;
#pragma GCC unroll 8
                for (int o = 0; o < OUTPUTS; o++, full += stage.full.plane) {
#pragma GCC unroll 4
                    for (int q = 0; q < 4; q++) tile.at[o][q] = activate(curve, tile.at[o][q]);
                    if (TRAINING) {
                        full[0] = tile.at[o][0], full[1] = tile.at[o][1];
                        full[stage.full.row] = tile.at[o][2], full[stage.full.row + 1] = tile.at[o][3];
                    }
                    out[o * stage.output.plane] = 0.25f * ((tile.at[o][0] + tile.at[o][1]) + (tile.at[o][2] + tile.at[o][3]));
                }
            }
        }
}

// One block of output channels without pooling: a tile is four neighbours in reading order, and the last one
// repeats its last position as often as needed.
template <int OUTPUTS>
void convolve_plain(const Stage &stage, const float *kernel, const float *bias, int first, const lanes *corner, lanes *output) {
    const int positions = stage.height * stage.width;
    for (int p = 0; p < positions; p += 4) {
        const lanes *from[4];
        size_t to[4];
        for (int q = 0; q < 4; q++) {
            const int at = std::min(p + q, positions - 1), y = at / stage.width, x = at % stage.width;
            from[q] = corner + y * stage.stride_height * stage.input.row + x * stage.stride_width;
            to[q] = stage.output.at(first, y) + x;
        }
        Tile<OUTPUTS> tile(stage, kernel, bias, from);
#pragma GCC unroll 8
        for (int o = 0; o < OUTPUTS; o++)
#pragma GCC unroll 4
            for (int q = 0; q < 4; q++) output[o * stage.output.plane + to[q]] = activate(stage.curve, tile.at[o][q]);
    }
}

// Calls body(size, first, group) for blocks of output channels; no block has channels of two groups.
template <int LARGEST, class Body> CBDSL_INLINE void in_grouped_blocks(const Stage &stage, int channels, const Body &body) {
    for (int group = 0; group < stage.groups; group++)
        in_blocks<LARGEST>(channels, [&](auto size, int first) { body(size, group * channels + first, group); });
}

// corner is where the padded input begins, output the first element inside its own border.
// `kept` is what the way back needs of a fused pooling.
template <bool TRAINING>
void convolve(const Stage &stage, const float *weights, const lanes *input, lanes *output, lanes *kept) {
    const size_t taps = size_t(stage.group_inputs) * stage.kernel_height * stage.kernel_width;
    in_grouped_blocks<FORWARD_CHANNELS>(stage, stage.group_outputs, [&](auto size, int first, int group) {
        constexpr int OUTPUTS = decltype(size)::value;
        const lanes *corner = input + size_t(group) * stage.group_inputs * stage.input.plane;
        const float *kernel = weights + stage.weight + first * taps;
        float bias[OUTPUTS] = {};
        if (stage.bias != NOWHERE) std::copy_n(weights + stage.bias + first, OUTPUTS, bias);
        if (stage.fused == Fused::max2)
            convolve_pooled<OUTPUTS, TRAINING, Fused::max2>(stage, kernel, bias, first, corner, output, kept);
        else if (stage.fused == Fused::average2)
            convolve_pooled<OUTPUTS, TRAINING, Fused::average2>(stage, kernel, bias, first, corner, output, kept);
        else
            convolve_plain<OUTPUTS>(stage, kernel, bias, first, corner, output);
    });
}

// Gradient before activation and pooling, at full resolution; also the gradient of the bias.
// Positions that no pooling window covers stay zero from the start.
inline void convolve_unfuse(const Stage &stage, const lanes *output, const lanes *output_gradient, const lanes *kept,
                            lanes *full, const Sink &sink) {
    const whole *chosen = (const whole *)kept;
    for (int channel = 0; channel < stage.channels; channel++) {
        lanes total{};
        for (int y = 0; y < stage.height; y++) {
            const lanes *value = output + stage.output.at(channel, y);
            const lanes *gradient = output_gradient + stage.output_gradient.at(channel, y);
            if (stage.fused == Fused::none) {
                lanes *to = full + stage.full.at(channel, y);
                for (int x = 0; x < stage.width; x++) {
                    to[x] = slope(stage.curve, value[x], gradient[x]);
                    total += to[x];
                }
                continue;
            }
            lanes *above = full + stage.full.at(channel, 2 * y), *below = above + stage.full.row;
            if (stage.fused == Fused::max2) {
                const whole *which = chosen + (size_t(channel) * stage.height + y) * stage.width;
                for (int x = 0; x < stage.width; x++) {
                    const lanes one = slope(stage.curve, value[x], gradient[x]);
                    above[2 * x] = which[x] == 0 ? one : lanes{};
                    above[2 * x + 1] = which[x] == 1 ? one : lanes{};
                    below[2 * x] = which[x] == 2 ? one : lanes{};
                    below[2 * x + 1] = which[x] == 3 ? one : lanes{};
                    total += one;
                }
            } else {
                const lanes *value_above = kept + stage.full.at(channel, 2 * y), *value_below = value_above + stage.full.row;
                for (int x = 0; x < 2 * stage.width; x++) {
                    const lanes share = 0.25f * gradient[x / 2];
                    above[x] = slope(stage.curve, value_above[x], share);
                    below[x] = slope(stage.curve, value_below[x], share);
                    total += above[x] + below[x];
                }
            }
        }
        if (stage.bias != NOWHERE) sink.add(stage.bias + channel, sum(total));
    }
}

// Both gradients take the kernel's columns in slices of 5, 3, 2 or 1, each with its own register block.
template <class Body> CBDSL_INLINE void in_slices(int width, const Body &body) {
    for (int start = 0; start < width;) {
        const int left = width - start;
        if (left >= 5) body(Size<5>{}, start), start += 5;
        else if (left >= 3) body(Size<3>{}, start), start += 3;
        else if (left == 2) body(Size<2>{}, start), start += 2;
        else body(Size<1>{}, start), start += 1;
    }
}

// Kernel gradient of some output channels and one slice of columns: sums over positions in the lanes first.
template <int OUTPUTS, int COLUMNS, bool STRIDED>
void kernel_gradient_block(const Stage &stage, int first, int column, const lanes *corner, const lanes *full, const Sink &sink) {
    const int kernel_height = stage.kernel_height, kernel_width = stage.kernel_width, channels = stage.group_inputs;
    const int stride_height = STRIDED ? stage.stride_height : 1, stride_width = STRIDED ? stage.stride_width : 1;
    for (int channel = 0; channel < channels; channel++)
        for (int kernel_y = 0; kernel_y < kernel_height; kernel_y++) {
            lanes accumulator[OUTPUTS][COLUMNS]{};
            for (int y = 0; y < stage.full_height; y++) {
                const lanes *in = corner + stage.input.at(channel, y * stride_height + kernel_y) + column;
                const lanes *gradient = full + stage.full.at(first, y);
                for (int x = 0; x < stage.full_width; x++) {
                    lanes value[COLUMNS];
#pragma GCC unroll 8
                    for (int k = 0; k < COLUMNS; k++) value[k] = in[x * stride_width + k];
#pragma GCC unroll 8
                    for (int o = 0; o < OUTPUTS; o++) {
                        const lanes g = gradient[o * stage.full.plane + x];
#pragma GCC unroll 8
                        for (int k = 0; k < COLUMNS; k++) accumulator[o][k] += g * value[k];
                    }
                }
            }
            float sums[(OUTPUTS * COLUMNS + 3) / 4 * 4];
            const lanes *flat = &accumulator[0][0], none{};
#pragma GCC unroll 8
            for (int i = 0; i < OUTPUTS * COLUMNS; i += 4) {
                const auto one = [&](int j) { return i + j < OUTPUTS * COLUMNS ? flat[i + j] : none; };
                *(loose_quad *)(sums + i) = sum_each(one(0), one(1), one(2), one(3));
            }
            for (int o = 0; o < OUTPUTS; o++) {
                const size_t at = stage.weight + ((size_t(first + o) * channels + channel) * kernel_height + kernel_y) * kernel_width;
                for (int k = 0; k < COLUMNS; k++) sink.add(at + column + k, sums[o * COLUMNS + k]);
            }
        }
}

inline void convolve_kernel_gradient(const Stage &stage, const lanes *input, const lanes *full, const Sink &sink) {
    const bool strided = stage.stride_height != 1 || stage.stride_width != 1;
    in_slices(stage.kernel_width, [&](auto columns, int column) {
        constexpr int COLUMNS = decltype(columns)::value;
        constexpr int OUTPUTS = std::min(MANY_REGISTERS ? 20 / COLUMNS : 10 / COLUMNS, 8);
        in_grouped_blocks<OUTPUTS>(stage, stage.group_outputs, [&](auto size, int first, int group) {
            const lanes *corner = input + size_t(group) * stage.group_inputs * stage.input.plane;
            if (strided) kernel_gradient_block<decltype(size)::value, COLUMNS, true>(stage, first, column, corner, full, sink);
            else kernel_gradient_block<decltype(size)::value, COLUMNS, false>(stage, first, column, corner, full, sink);
        });
    });
}

// Input gradient of some input channels and one slice of columns. A tile of neighbouring output positions reaches
// COLUMNS - 1 input positions more than it has, which stay in registers over all output channels. With a stride a tile
// is one output position.
template <int INPUTS, int COLUMNS, int TILE>
void input_gradient_block(const Stage &stage, const float *weights, int first, int group, int column, const lanes *full,
                          lanes *gradient) {
    constexpr int REACH = TILE + COLUMNS - 1;
    const int kernel_height = stage.kernel_height, kernel_width = stage.kernel_width, channels = stage.group_inputs;
    const size_t channel_stride = size_t(kernel_height) * kernel_width;
    const int first_output = group * stage.group_outputs, stride = stage.stride_height;
    const float *kernels = weights + stage.weight + (size_t(first_output) * channels + (first - group * channels)) * channel_stride + column;
    for (int y = stage.above; y < stage.above + stage.input.height; y++) {
        // Kernel rows that meet this input row inside the output: those above it by a whole number of strides.
        const int from = std::max(y % stride, y - (stage.full_height - 1) * stride), until = std::min(kernel_height, y + 1);
        for (int x = 0; x < stage.full_width; x += TILE) {
            lanes accumulator[INPUTS][REACH]{};
            for (int output = 0; output < stage.group_outputs; output++)
                for (int kernel_y = from; kernel_y < until; kernel_y += stride) {
                    const lanes *in = full + stage.full.at(first_output + output, (y - kernel_y) / stride) + x;
                    const float *kernel = kernels + size_t(output) * channels * channel_stride + size_t(kernel_y) * kernel_width;
                    lanes value[TILE];
#pragma GCC unroll 4
                    for (int t = 0; t < TILE; t++) value[t] = in[t];
#pragma GCC unroll 8
                    for (int i = 0; i < INPUTS; i++)
#pragma GCC unroll 8
                        for (int k = 0; k < COLUMNS; k++) {
                            const float weight = kernel[i * channel_stride + k];
#pragma GCC unroll 4
                            for (int t = 0; t < TILE; t++) accumulator[i][t + k] += weight * value[t];
                        }
                }
#pragma GCC unroll 8
            for (int i = 0; i < INPUTS; i++) {
                lanes *to = gradient + stage.input_gradient.at(first + i, y) + column + x * stage.stride_width;
#pragma GCC unroll 8
                for (int r = 0; r < REACH; r++) to[r] += accumulator[i][r];
            }
        }
    }
}

template <int TILE> void input_gradient_in_tiles(const Stage &stage, const float *weights, const lanes *full, lanes *gradient) {
    in_slices(stage.kernel_width, [&](auto columns, int column) {
        constexpr int COLUMNS = decltype(columns)::value;
        constexpr int INPUTS = MANY_REGISTERS ? 24 / (COLUMNS + 3) : std::max(1, 12 / (COLUMNS + 1));
        in_grouped_blocks<INPUTS>(stage, stage.group_inputs, [&](auto size, int first, int group) {
            input_gradient_block<decltype(size)::value, COLUMNS, TILE>(stage, weights, first, group, column, full, gradient);
        });
    });
}

// gradient points at the corner of the padded input.
inline void convolve_input_gradient(const Stage &stage, const float *weights, const lanes *full, lanes *gradient) {
    if (stage.stride_width == 1) input_gradient_in_tiles<MANY_REGISTERS ? 4 : 2>(stage, weights, full, gradient);
    else input_gradient_in_tiles<1>(stage, weights, full, gradient);
}

}  // namespace cbdsl
