// Norms over channels or places of one sample: mean 0 and deviation 1, then a factor and an offset that are learned.
//
// Numbers that share a mean lie in whole rows one after the other; `together` says how many numbers they are. A factor
// belongs to a channel (GroupNorm) or to a place within what is taken together (LayerNorm).
#pragma once

#include "activation.hpp"

namespace cbdsl {

struct Norm {
    const Stage &stage;
    int rows, groups;  // rows that share a mean; and how many times that is
    float share;

    explicit Norm(const Stage &of)
        : stage(of), rows(int(of.together / of.width)), groups(of.channels * of.height / rows), share(1.0f / float(of.together)) {}

    // Calls body(channel, y, place): a row, and where it begins among those that are taken together.
    template <class Body> CBDSL_INLINE void each(int group, const Body &body) const {
        for (int r = 0; r < rows; r++) {
            const int row = group * rows + r;
            body(row / stage.height, row % stage.height, size_t(r) * stage.width);
        }
    }
    CBDSL_INLINE size_t place(int channel, size_t at) const { return stage.weight_per_place ? at : size_t(channel); }
};

CBDSL_INLINE lanes inverse_root(lanes v) {
    for (int lane = 0; lane < LANES; lane++) v[lane] = 1.0f / __builtin_sqrtf(v[lane]);
    return v;
}

// kept: for every group its mean and one over its deviation.
inline void normalise(const Stage &stage, const float *weights, const lanes *input, lanes *output, lanes *kept) {
    const Norm norm(stage);
    const int width = stage.width;
    for (int group = 0; group < norm.groups; group++) {
        lanes total{}, square{};
        norm.each(group, [&](int channel, int y, size_t) {
            const lanes *from = input + stage.input.at(channel, y);
            total += sum_row(size_t(width), [&](size_t x) { return from[x]; });
        });
        const lanes mean = total * norm.share;
        norm.each(group, [&](int channel, int y, size_t) {
            const lanes *from = input + stage.input.at(channel, y);
            square += sum_row(size_t(width), [&](size_t x) { const lanes d = from[x] - mean; return d * d; });
        });
        const lanes inverse = inverse_root(square * norm.share + stage.setting);
        kept[2 * group] = mean, kept[2 * group + 1] = inverse;
        norm.each(group, [&](int channel, int y, size_t place) {
            const lanes *from = input + stage.input.at(channel, y);
            lanes *to = output + stage.output.at(channel, y);
            for (int x = 0; x < width; x++) {
                const size_t at = norm.place(channel, place + x);
                lanes value = (from[x] - mean) * inverse;
                if (stage.weight != NOWHERE) value = value * weights[stage.weight + at];
                if (stage.bias != NOWHERE) value = value + weights[stage.bias + at];
                to[x] = activate(stage.curve, value);
            }
        });
    }
}

// output_gradient: before the activation. gradient: null if it is not wanted. The weights are read before the sink,
// which may be the weights themselves, is written to.
inline void normalise_gradient(const Stage &stage, const float *weights, const lanes *input, const lanes *output_gradient,
                               lanes *kept, lanes *gradient, bool adds, const Sink &sink) {
    const Norm norm(stage);
    const int width = stage.width;
    const size_t places = stage.weight_per_place ? stage.together : size_t(stage.channels);
    lanes *by_factor = kept + 2 * norm.groups, *by_offset = by_factor + places;  // gradients of both, before lanes are summed
    std::fill_n(by_factor, 2 * places, lanes{});
    for (int group = 0; group < norm.groups; group++) {
        const lanes mean = kept[2 * group], inverse = kept[2 * group + 1];
        lanes slopes{}, turns{};  // sums of the gradient of the normalised numbers, and of it times these
        norm.each(group, [&](int channel, int y, size_t place) {
            const lanes *from = input + stage.input.at(channel, y);
            const lanes *g = output_gradient + stage.output_gradient.at(channel, y);
            if (stage.weight_per_place) {
                for (int x = 0; x < width; x++) {
                    const lanes turned = g[x] * ((from[x] - mean) * inverse);
                    by_offset[place + x] += g[x], by_factor[place + x] += turned;
                    const float factor = stage.weight == NOWHERE ? 1.0f : weights[stage.weight + place + x];
                    slopes += factor * g[x], turns += factor * turned;
                }
                return;
            }
            const lanes offset = sum_row(size_t(width), [&](size_t x) { return g[x]; });
            const lanes turned = sum_row(size_t(width), [&](size_t x) { return g[x] * ((from[x] - mean) * inverse); });
            by_offset[channel] += offset, by_factor[channel] += turned;
            const float factor = stage.weight == NOWHERE ? 1.0f : weights[stage.weight + channel];
            slopes += factor * offset, turns += factor * turned;
        });
        if (!gradient) continue;
        slopes *= norm.share, turns *= norm.share;
        norm.each(group, [&](int channel, int y, size_t place) {
            const lanes *from = input + stage.input.at(channel, y);
            const lanes *g = output_gradient + stage.output_gradient.at(channel, y);
            lanes *to = gradient + stage.input_gradient.at(channel, y);
            for (int x = 0; x < width; x++) {
                const float factor = stage.weight == NOWHERE ? 1.0f : weights[stage.weight + norm.place(channel, place + x)];
                put(to[x], inverse * (factor * g[x] - slopes - ((from[x] - mean) * inverse) * turns), adds);
            }
        });
    }
    for (size_t at = 0; at < places; at++) {
        if (stage.weight != NOWHERE) sink.add(stage.weight + at, sum(by_factor[at]));
        if (stage.bias != NOWHERE) sink.add(stage.bias + at, sum(by_offset[at]));
    }
}

}  // namespace cbdsl
