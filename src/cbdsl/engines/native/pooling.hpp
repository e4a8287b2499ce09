// Pooling of any window, stride and padding, where no convolution does it itself.
#pragma once

#include <algorithm>

#include "activation.hpp"

namespace cbdsl {

// The part of a window that lies inside the image.
struct Window {
    int top, bottom, first, last;

    CBDSL_INLINE Window(const Stage &stage, int y, int x) {
        const int up = y * stage.stride_height - stage.above, back = x * stage.stride_width - stage.left;
        top = std::max(up, 0), bottom = std::min(up + stage.kernel_height, stage.input.height);
        first = std::max(back, 0), last = std::min(back + stage.kernel_width, stage.input.width);
    }
};

// For the maximum, `chosen` keeps the place of the winner: its row times the width, plus its column.
inline void pool(const Stage &stage, const lanes *input, lanes *output, whole *chosen) {
    const float share = 1.0f / (float(stage.kernel_height) * float(stage.kernel_width));
    each_row(stage, [&](int channel, int y) {
        const lanes *in = input + channel * stage.input.plane;
        lanes *out = output + stage.output.at(channel, y);
        for (int x = 0; x < stage.width; x++) {
            const Window window(stage, y, x);
            if (!stage.pool_is_max) {
                lanes total{};
                for (int wy = window.top; wy < window.bottom; wy++)
                    for (int wx = window.first; wx < window.last; wx++) total += in[wy * stage.input.row + wx];
                out[x] = total * share;
                continue;
            }
            lanes best = in[window.top * stage.input.row + window.first];
            whole which = whole{} + (window.top * stage.input.width + window.first);
            for (int wy = window.top; wy < window.bottom; wy++)
                for (int wx = window.first; wx < window.last; wx++) {
                    const lanes value = in[wy * stage.input.row + wx];
                    // As torch chooses: the first of equals, and a NaN wins.
                    const whole better = (value > best) | (value != value);
                    best = better ? value : best;
                    which = better ? whole{} + (wy * stage.input.width + wx) : which;
                }
            out[x] = best;
            *chosen++ = which;
        }
    });
}

inline void pool_gradient(const Stage &stage, const lanes *output_gradient, const whole *chosen, lanes *gradient, bool adds) {
    const float share = 1.0f / (float(stage.kernel_height) * float(stage.kernel_width));
    const Map &map = stage.input_gradient;
    if (!adds)
        for (int channel = 0; channel < map.channels; channel++)
            for (int y = 0; y < map.height; y++) std::fill_n(gradient + map.at(channel, y), map.width, lanes{});
    each_row(stage, [&](int channel, int y) {
        const lanes *from = output_gradient + stage.output_gradient.at(channel, y);
        lanes *plane = gradient + channel * map.plane;
        for (int x = 0; x < stage.width; x++) {
            const Window window(stage, y, x);
            const whole which = stage.pool_is_max ? *chosen++ : whole{};
            for (int wy = window.top; wy < window.bottom; wy++)
                for (int wx = window.first; wx < window.last; wx++) {
                    lanes &to = plane[wy * map.row + wx];
                    to += !stage.pool_is_max ? from[x] * share : which == (wy * stage.input.width + wx) ? from[x] : lanes{};
                }
        }
    });
}

}  // namespace cbdsl
