// The stages on images of a wide plan, forwards and backwards, on one sample; see wide.hpp.
#pragma once

#include "pooling.hpp"
#include "wide.hpp"
#include "workspace.hpp"

namespace cbdsl {

class WidePass {
  public:
    WidePass(const Plan &plan, Workspace &space, const Draw &draw) : plan_(plan), space_(space), draw_(draw) {}

    // A batch begins: weights are packed, once for all of its samples, and their gradients are zero.
    void begin(const float *weights) {
        for (const Stage &stage : plan_.stages) {
            if (stage.kind != StageKind::convolution) continue;
            pack(stage, weights, floats(stage.forward_at), plan_.tensors[stage.reads[0]].learned ? floats(stage.backward_at) : nullptr);
            std::fill_n(floats(stage.packed_at), stage.packed, 0.0f);
            if (stage.bias != NOWHERE) std::copy_n(weights + stage.bias, stage.channels, floats(stage.bias_at));
        }
    }

    // A batch ends.
    void end(const Sink &sink) {
        for (const Stage &stage : plan_.stages)
            if (stage.kind == StageKind::convolution) unpack(stage, floats(stage.packed_at), sink);
    }

    // sample: [channel][y][x].
    void load(const float *sample) {
        const Sheet to = value(0);
        each_channel(to.map, [&](size_t y, size_t x, size_t c) { number(to, y, x, c) = *sample++; });
    }

    void forward(const Stage &stage, const float *weights) {
        const int read = stage.reads[0];
        float *kept = floats(stage.wide_kept_at);
        const float *constants = plan_.constants.data();
        if (stage.kind == StageKind::flatten) {
            const Sheet from = value(read);
            float *to = floats(plan_.tensors[stage.makes].rows_at);
            each_channel(from.map, [&](size_t y, size_t x, size_t c) { *to++ = number(from, y, x, c); });
            return;
        }
        const Sheet from = value(read), to = value(stage.makes);
        switch (stage.kind) {
            case StageKind::convolution: convolve(stage, from, to); break;
            case StageKind::norm: wide_norm(stage, weights, from, to, kept); break;
            case StageKind::pool: pool(stage, from, to, (whole *)kept); break;
            case StageKind::activation: each_vector(to.map, [&](size_t y, size_t x, size_t c) { to(y, x, c) = activate(stage.curve, from(y, x, c)); }); break;
            case StageKind::dropout: drop(stage, from, to, kept); break;
            case StageKind::scale:
                each_channel(to.map, [&](size_t y, size_t x, size_t c) {
                    number(to, y, x, c) = factor_of(stage, constants, c) * number(from, y, x, c) + offset_of(stage, constants, c);
                });
                break;
            case StageKind::add:
                each_vector(to.map, [&](size_t y, size_t x, size_t c) {
                    lanes total = from(y, x, c);
                    for (size_t k = 1; k < stage.reads.size(); k++) total += value(stage.reads[k])(y, x, c);
                    to(y, x, c) = activate(stage.curve, total);
                });
                break;
            case StageKind::concat: {
                int first = 0;
                for (const int each : stage.reads) first += join(value(each), to, first, false, false);
                break;
            }
            default: break;
        }
    }

    // Gradients of weights go to the sink, those of a convolution's taps to where they are packed.
    void backward(const Stage &stage, const Sink &sink) {
        const int read = stage.reads[0];
        const bool wanted = plan_.tensors[read].learned, adds = stage.adds[0];
        float *kept = floats(stage.wide_kept_at);
        const float *constants = plan_.constants.data();
        if (stage.kind == StageKind::flatten) {
            const Sheet to = gradient(read);
            const float *from = floats(plan_.tensors[stage.makes].gradient_rows_at);
            if (wanted)
                each_channel(to.map, [&](size_t y, size_t x, size_t c) {
                    const float g = *from++;
                    number(to, y, x, c) = adds ? number(to, y, x, c) + g : g;
                });
            return;
        }
        const Sheet given = value(read), made = value(stage.makes), from = gradient(stage.makes), to = gradient(read);
        const bool itself = stage.kind == StageKind::activation || stage.kind == StageKind::norm || stage.fused != Fused::none;
        if (stage.curve.kind != Activation::none && !itself)
            each_vector(made.map, [&](size_t y, size_t x, size_t c) { from(y, x, c) = slope(stage.curve, made(y, x, c), from(y, x, c)); });
        switch (stage.kind) {
            case StageKind::convolution: convolve_back(stage, given, made, from, sink); return;
            case StageKind::norm: wide_norm_gradient(stage, given, made, from, kept, wanted ? &to : nullptr, adds, sink); return;
            case StageKind::add:
                for (size_t k = 0; k < stage.reads.size(); k++) {
                    if (!plan_.tensors[stage.reads[k]].learned) continue;
                    const Sheet each = gradient(stage.reads[k]);
                    each_vector(made.map, [&](size_t y, size_t x, size_t c) { put(each(y, x, c), from(y, x, c), stage.adds[k]); });
                }
                return;
            case StageKind::concat: {
                int first = 0;
                for (size_t k = 0; k < stage.reads.size(); k++) {
                    const Sheet each = gradient(stage.reads[k]);
                    if (plan_.tensors[stage.reads[k]].learned) join(from, each, first, true, stage.adds[k]);
                    first += each.map.channels;
                }
                return;
            }
            default: break;
        }
        if (!wanted) return;
        switch (stage.kind) {
            case StageKind::pool: pool_back(stage, from, (const whole *)kept, to, adds); break;
            case StageKind::activation:
                each_vector(to.map, [&](size_t y, size_t x, size_t c) { put(to(y, x, c), slope_at(stage.curve, given(y, x, c), made(y, x, c), from(y, x, c)), adds); });
                break;
            case StageKind::dropout:
                each_vector(to.map, [&](size_t y, size_t x, size_t c) {
                    const lanes factor = draw_.on ? vector_at(kept) : splat(1.0f);
                    put(to(y, x, c), from(y, x, c) * factor, adds);
                    kept += LANES;
                });
                break;
            case StageKind::scale:
                each_channel(to.map, [&](size_t y, size_t x, size_t c) {
                    const float g = factor_of(stage, constants, c) * number(from, y, x, c);
                    number(to, y, x, c) = adds ? number(to, y, x, c) + g : g;
                });
                break;
            default: break;
        }
    }

  private:
    float *floats(size_t at) { return reinterpret_cast<float *>(space_.at(at)); }

    Sheet value(int tensor) {
        const Tensor &of = plan_.tensors[tensor];
        return {of.wide_value, floats(of.wide_value_at) + of.wide_value.origin};
    }
    Sheet gradient(int tensor) {
        const Tensor &of = plan_.tensors[tensor];
        return {of.wide_gradient, floats(of.wide_gradient_at) + of.wide_gradient.origin};
    }

    static float &number(const Sheet &sheet, int y, int x, int channel) { return sheet.at[sheet.map.at(y, x) + channel]; }

    // Calls body(y, x, channel) for every number, in the order [channel][y][x].
    template <class Body> static void each_channel(const Pixels &map, const Body &body) {
        for (int channel = 0; channel < map.channels; channel++)
            for (int y = 0; y < map.height; y++)
                for (int x = 0; x < map.width; x++) body(y, x, channel);
    }

    // Channels of one tensor that begin elsewhere in another; how many they are.
    static int join(const Sheet &from, const Sheet &to, int first, bool apart, bool adds) {
        const Pixels &small = apart ? to.map : from.map;
        for (int y = 0; y < small.height; y++)
            for (int x = 0; x < small.width; x++) {
                const float *source = from.at + from.map.at(y, x) + (apart ? first : 0);
                float *target = to.at + to.map.at(y, x) + (apart ? 0 : first);
                for (int c = 0; c < small.channels; c++) target[c] = adds ? target[c] + source[c] : source[c];
            }
        return small.channels;
    }

    void convolve(const Stage &stage, const Sheet &from, const Sheet &to) {
        const bool fused = stage.fused != Fused::none;
        const Sheet out{fused ? stage.wide_full : to.map, fused ? floats(stage.wide_full_at) : to.at};
        const float *corner = from.at - stage.above * from.map.row - size_t(stage.left) * from.map.depth;
        const float *bias = stage.bias == NOWHERE ? nullptr : floats(stage.bias_at);
        const Sweep sweep = forward_sweep(stage, from.map, corner, floats(stage.forward_at), bias, out.map, out.at);
        by_channel(stage) ? run_sweep_by_channel(sweep) : run_sweep(sweep);
        if (stage.fused != Fused::max2 && stage.curve.kind != Activation::none)
            each_vector(out.map, [&](size_t y, size_t x, size_t c) { out(y, x, c) = activate(stage.curve, out(y, x, c)); });
        if (stage.fused == Fused::max2) {
            whole *chosen = (whole *)floats(stage.wide_kept_at);
            each_vector(to.map, [&](size_t y, size_t x, size_t c) {
                const lanes of[4] = {out(2 * y, 2 * x, c), out(2 * y, 2 * x + 1, c), out(2 * y + 1, 2 * x, c), out(2 * y + 1, 2 * x + 1, c)};
                to(y, x, c) = activate(stage.curve, largest<true>(of, chosen++));
            });
        } else if (fused) {
            each_vector(to.map, [&](size_t y, size_t x, size_t c) {
                to(y, x, c) = 0.25f * ((out(2 * y, 2 * x, c) + out(2 * y, 2 * x + 1, c)) + (out(2 * y + 1, 2 * x, c) + out(2 * y + 1, 2 * x + 1, c)));
            });
        }
    }

    void convolve_back(const Stage &stage, const Sheet &given, const Sheet &made, const Sheet &from, const Sink &sink) {
        const bool fused = stage.fused != Fused::none;
        const Pixels &map = stage.wide_full_gradient;
        const Sheet full{fused ? map : from.map, fused ? floats(stage.wide_full_gradient_at) + map.origin : from.at};
        if (fused) unpool(stage, made, from, full);
        float totals[LANES];
        if (stage.bias != NOWHERE)
            for (int channel = 0; channel < full.map.depth; channel += LANES) {
                lanes total{};
                for (int y = 0; y < stage.full_height; y++) total += sum_row(size_t(stage.full_width), [&](size_t x) { return full(y, x, channel); });
                std::memcpy(totals, &total, sizeof total);
                for (int c = 0; c < LANES && channel + c < stage.channels; c++) sink.add(stage.bias + channel + c, totals[c]);
            }
        const int read = stage.reads[0];
        if (plan_.tensors[read].learned) {
            const Sheet to = gradient(read);
            wide_input_gradient(stage, full.map, full.at, floats(stage.backward_at), to.map, to.at, stage.adds[0]);
        }
        const float *corner = given.at - stage.above * given.map.row - size_t(stage.left) * given.map.depth;
        const auto add = by_channel(stage) ? wide_kernel_gradient_by_channel : wide_kernel_gradient;
        add(stage, given.map, corner, full.map, full.at, floats(stage.packed_at));
    }

    // The gradient before a convolution's own pooling and activation. Positions that no window covers stay zero.
    void unpool(const Stage &stage, const Sheet &made, const Sheet &from, const Sheet &full) {
        const whole *chosen = (const whole *)floats(stage.wide_kept_at);
        const Sheet value{stage.wide_full, floats(stage.wide_full_at)};
        each_vector(made.map, [&](size_t y, size_t x, size_t c) {
            const lanes one = stage.fused == Fused::max2 ? slope(stage.curve, made(y, x, c), from(y, x, c)) : 0.25f * from(y, x, c);
            const whole which = stage.fused == Fused::max2 ? *chosen++ : whole{};
            for (int q = 0; q < 4; q++) {
                const int fy = 2 * y + q / 2, fx = 2 * x + q % 2;
                full(fy, fx, c) = stage.fused == Fused::max2 ? (which == q ? one : lanes{}) : slope(stage.curve, value(fy, fx, c), one);
            }
        });
    }

    static void pool(const Stage &stage, const Sheet &from, const Sheet &to, whole *chosen) {
        const float share = 1.0f / (float(stage.kernel_height) * float(stage.kernel_width));
        each_vector(to.map, [&](size_t y, size_t x, size_t c) {
            const Window window(stage, y, x);
            lanes best = from(window.top, window.first, c), total{};
            whole which = whole{} + (window.top * stage.input.width + window.first);
            for (int wy = window.top; wy < window.bottom; wy++)
                for (int wx = window.first; wx < window.last; wx++) {
                    const lanes value = from(wy, wx, c);
                    total += value;
                    const whole better = (value > best) | (value != value);  // as torch chooses
                    best = better ? value : best;
                    which = better ? whole{} + (wy * stage.input.width + wx) : which;
                }
            to(y, x, c) = stage.pool_is_max ? best : total * share;
            if (stage.pool_is_max) *chosen++ = which;
        });
    }

    static void pool_back(const Stage &stage, const Sheet &from, const whole *chosen, const Sheet &to, bool adds) {
        const float share = 1.0f / (float(stage.kernel_height) * float(stage.kernel_width));
        if (!adds) each_vector(to.map, [&](size_t y, size_t x, size_t c) { to(y, x, c) = lanes{}; });
        for (int y = 0; y < stage.height; y++)
            for (int x = 0; x < stage.width; x++) {
                const Window window(stage, y, x);
                for (int c = 0; c < from.map.depth; c += LANES) {
                    const lanes g = from(y, x, c);
                    const whole which = stage.pool_is_max ? *chosen++ : whole{};
                    for (int wy = window.top; wy < window.bottom; wy++)
                        for (int wx = window.first; wx < window.last; wx++)
                            to(wy, wx, c) += !stage.pool_is_max ? g * share : which == (wy * stage.input.width + wx) ? g : lanes{};
                }
            }
    }

    // The same random numbers as where lanes are samples.
    void drop(const Stage &stage, const Sheet &from, const Sheet &to, float *kept) {
        const Mask mask(stage, draw_);
        natural own{};
        for (int lane = 0; lane < LANES; lane++) own[lane] = uint32_t(lane) * uint32_t(stage.height * stage.width);
        const natural sample = mask.of_samples(natural{} + uint32_t(draw_.first));
        each_vector(to.map, [&](size_t y, size_t x, size_t c) {
            if (!draw_.on) {
                to(y, x, c) = from(y, x, c);
                return;
            }
            const uint32_t place = uint32_t((c * stage.height + y) * stage.width + x);
            vector_at(kept) = mask.factors(sample, own + place);
            to(y, x, c) = from(y, x, c) * vector_at(kept);
            kept += LANES;
        });
    }

    const Plan &plan_;
    Workspace &space_;
    const Draw draw_;
};

}  // namespace cbdsl
