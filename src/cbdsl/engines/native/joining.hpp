// Stages without weights that take numbers one by one: sums and rows of tensors, constants, numbers left out at random.
#pragma once

#include "activation.hpp"

namespace cbdsl {

// What a training step's random numbers depend on: nothing but the worker's seed, the step, the layer, the sample's
// place in the batch and the number's place in the sample. So neither lanes nor threads change them.
struct Draw {
    bool on = false;
    uint64_t key = 0;  // of the worker and the step
    int first = 0;     // place in the batch of the sample in the first lane
};

inline uint64_t mixed(uint64_t v) {  // the last steps of splitmix64
    v += 0x9e3779b97f4a7c15ull;
    v = (v ^ (v >> 30)) * 0xbf58476d1ce4e5b9ull;
    v = (v ^ (v >> 27)) * 0x94d049bb133111ebull;
    return v ^ (v >> 31);
}

typedef uint32_t natural __attribute__((vector_size(LANES * 4)));

CBDSL_INLINE natural mixed(natural v) {  // a 32-bit mixer of full period
    v = (v ^ (v >> 16)) * 0x7feb352du;
    v = (v ^ (v >> 15)) * 0x846ca68bu;
    return v ^ (v >> 16);
}

// Which numbers a dropout leaves out.
struct Mask {
    uint32_t sample_key, place_key, limit;  // below the limit, a number is left out
    float grown;                            // what the others are multiplied by

    Mask(const Stage &stage, const Draw &draw) {
        const uint64_t key = mixed(draw.key + uint64_t(stage.number));
        sample_key = uint32_t(key), place_key = uint32_t(key >> 32);
        limit = uint32_t(double(stage.setting) * 4294967296.0);
        grown = 1.0f / (1.0f - stage.setting);
    }
    CBDSL_INLINE natural of_samples(natural places_in_batch) const { return mixed(places_in_batch + sample_key); }
    CBDSL_INLINE lanes factors(natural samples, natural places) const {
        const natural drawn = mixed(samples ^ mixed(places + place_key));
        return (whole)(drawn < limit) ? lanes{} : splat(grown);
    }
};

// kept: for every number 0, or what the ones that stay are multiplied by.
inline void drop(const Stage &stage, const Draw &draw, const lanes *input, lanes *output, lanes *kept) {
    const Mask mask(stage, draw);
    natural samples{};
    for (int lane = 0; lane < LANES; lane++) samples[lane] = uint32_t(draw.first + lane);
    samples = mask.of_samples(samples);
    uint32_t place = 0;
    each_row(stage, [&](int channel, int y) {
        const lanes *from = input + stage.input.at(channel, y);
        lanes *to = output + stage.output.at(channel, y);
        for (int x = 0; x < stage.width; x++, kept++) {
            if (draw.on) *kept = mask.factors(samples, natural{} + place++);
            to[x] = draw.on ? from[x] * *kept : from[x];
        }
    });
}

inline void drop_gradient(const Stage &stage, const Draw &draw, const lanes *output_gradient, const lanes *kept, lanes *gradient,
                          bool adds) {
    each_row(stage, [&](int channel, int y) {
        const lanes *from = output_gradient + stage.output_gradient.at(channel, y);
        lanes *to = gradient + stage.input_gradient.at(channel, y);
        for (int x = 0; x < stage.width; x++, kept++) put(to[x], draw.on ? from[x] * *kept : from[x], adds);
    });
}

// The constants of a scale; constants: those of the plan.
CBDSL_INLINE float factor_of(const Stage &stage, const float *constants, int channel) {
    return constants[stage.constants + (stage.one_factor ? 0 : channel)];
}

CBDSL_INLINE float offset_of(const Stage &stage, const float *constants, int channel) {
    return constants[stage.constants + (stage.one_factor ? 1 : stage.channels) + (stage.one_offset ? 0 : channel)];
}

inline void scale(const Stage &stage, const float *constants, const lanes *input, lanes *output) {
    each_row(stage, [&](int channel, int y) {
        const lanes *from = input + stage.input.at(channel, y);
        lanes *to = output + stage.output.at(channel, y);
        const float factor = factor_of(stage, constants, channel), offset = offset_of(stage, constants, channel);
        for (int x = 0; x < stage.width; x++) to[x] = factor * from[x] + offset;
    });
}

inline void scale_gradient(const Stage &stage, const float *constants, const lanes *output_gradient, lanes *gradient, bool adds) {
    each_row(stage, [&](int channel, int y) {
        const lanes *from = output_gradient + stage.output_gradient.at(channel, y);
        lanes *to = gradient + stage.input_gradient.at(channel, y);
        const float factor = factor_of(stage, constants, channel);
        for (int x = 0; x < stage.width; x++) put(to[x], factor * from[x], adds);
    });
}

// One of the tensors that are added: written, or added to those before it; the last one bends the sum.
inline void add_one(const Stage &stage, const Map &map, const lanes *input, lanes *output, bool first, bool last) {
    each_row(stage, [&](int channel, int y) {
        const lanes *from = input + map.at(channel, y);
        lanes *to = output + stage.output.at(channel, y);
        for (int x = 0; x < stage.width; x++) {
            const lanes total = first ? from[x] : to[x] + from[x];
            to[x] = last ? activate(stage.curve, total) : total;
        }
    });
}

// Copies numbers, or adds them, from one layout to another, row by row.
inline void copy(const Map &from_map, const lanes *from, const Map &to_map, lanes *to, bool adds) {
    for (int channel = 0; channel < from_map.channels; channel++)
        for (int y = 0; y < from_map.height; y++) {
            const lanes *source = from + from_map.at(channel, y);
            lanes *target = to + to_map.at(channel, y);
            for (int x = 0; x < from_map.width; x++) put(target[x], source[x], adds);
        }
}

// The same for a series whose channels become its places.
inline void turn(const Map &from_map, const lanes *from, const Map &to_map, lanes *to, bool adds) {
    for (int channel = 0; channel < from_map.channels; channel++)
        for (int x = 0; x < from_map.width; x++) put(to[to_map.at(x, 0) + channel], from[from_map.at(channel, 0) + x], adds);
}

}  // namespace cbdsl
