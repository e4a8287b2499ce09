// One model on one lane group (or a few): forwards, the loss, backwards. Knows nothing of threads or batches.
#pragma once

#include <cmath>

#include "convolution.hpp"
#include "dense.hpp"
#include "dense_rows.hpp"
#include "joining.hpp"
#include "losses.hpp"
#include "norm.hpp"
#include "pooling.hpp"
#include "recurrent.hpp"
#include "wide_pass.hpp"

namespace cbdsl {

inline void load(const Map &map, const Group &group, lanes *target) {
    if (map.dense()) {
        rows_to_lanes(group.rows, 0, map.size, target);
        return;
    }
    for (int channel = 0; channel < map.channels; channel++)
        for (int y = 0; y < map.height; y++)
            rows_to_lanes(group.rows, (size_t(channel) * map.height + y) * map.width, map.width,
                          target + map.origin + map.at(channel, y));
}

// The tensors of one lane group: in the workspace, but for the samples, which may lie elsewhere.
struct View {
    const Plan &plan;
    Workspace &space;
    const lanes *samples;
    int group;

    const lanes *corner(int tensor) const {
        const Tensor &of = plan.tensors[tensor];
        return tensor ? space.at(of.value_at) + group * of.step : samples + group * of.value.size;
    }
    const lanes *read(int tensor) const { return corner(tensor) + plan.tensors[tensor].value.origin; }
    lanes *made(const Stage &stage) const {
        const Tensor &of = plan.tensors[stage.makes];
        return space.at(of.value_at) + group * of.step + of.value.origin;
    }
    lanes *gradient_corner(int tensor) const { return space.at(plan.tensors[tensor].gradient_at); }
    lanes *gradient(int tensor) const { return gradient_corner(tensor) + plan.tensors[tensor].gradient.origin; }
};

// One stage forwards, on one lane group, in lanes.
template <bool TRAINING>
void forward_stage(const Stage &stage, const View &view, const float *weights, const Draw &draw) {
    const lanes *input = view.read(stage.reads[0]);
    lanes *output = view.made(stage), *kept = view.space.at(stage.kept_at);
    switch (stage.kind) {
        case StageKind::convolution:
            convolve<TRAINING>(stage, weights, view.corner(stage.reads[0]) + stage.corner, output, kept);
            break;
        case StageKind::dense: break;  // scored for all groups at once in `forward`, trained in rows
        case StageKind::pool: pool(stage, input, output, (whole *)kept); break;
        case StageKind::activation: activate_all(stage, input, output); break;
        case StageKind::norm: normalise(stage, weights, input, output, kept); break;
        case StageKind::scale: scale(stage, view.plan.constants.data(), input, output); break;
        case StageKind::dropout: drop(stage, draw, input, output, kept); break;
        case StageKind::flatten: copy(stage.input, input, plain(stage.input.channels, stage.input.height, stage.input.width), output, false); break;
        case StageKind::transpose: turn(stage.input, input, stage.output, output, false); break;
        case StageKind::recurrent: Recurrence(stage, weights, kept).forward(TRAINING, input, output); break;
        case StageKind::add:
            for (size_t k = 0; k < stage.reads.size(); k++)
                add_one(stage, stage.map(view.plan.tensors[stage.reads[k]].value), view.read(stage.reads[k]), output, k == 0,
                        k + 1 == stage.reads.size());
            break;
        case StageKind::concat:
            for (const int read : stage.reads) {
                const Map map = stage.map(view.plan.tensors[read].value);
                copy(map, view.read(read), stage.output, output, false);
                output += map.channels * stage.output.plane;
            }
            break;
    }
}

// One stage backwards, on one lane group, in lanes. Within a stage the input gradient comes first, because the sink may
// be the weights themselves.
inline void backward_stage(const Stage &stage, const View &view, const float *weights, const Draw &draw, const Sink &sink) {
    const int read = stage.reads[0];
    const bool wanted = view.plan.tensors[read].learned, adds = stage.adds[0];
    const lanes *input = view.read(read), *output = view.made(stage);
    lanes *output_gradient = view.gradient(stage.makes), *kept = view.space.at(stage.kept_at);
    lanes *gradient = wanted ? view.gradient(read) : nullptr;
    const float *constants = view.plan.constants.data();
    switch (stage.kind) {
        case StageKind::convolution: {
            lanes *full = view.space.at(stage.full_at);
            convolve_unfuse(stage, output, output_gradient, kept, full, sink);
            if (wanted && !adds) std::fill_n(view.gradient_corner(read), stage.input_gradient.size, lanes{});
            if (wanted) convolve_input_gradient(stage, weights, full, view.gradient_corner(read) + stage.gradient_corner);
            convolve_kernel_gradient(stage, view.corner(read) + stage.corner, full, sink);
            return;
        }
        case StageKind::norm:
            unbend(stage, output, output_gradient);
            normalise_gradient(stage, weights, input, output_gradient, kept, gradient, adds, sink);
            return;
        case StageKind::recurrent: Recurrence(stage, weights, kept).backward(output_gradient, gradient, adds, sink); return;
        case StageKind::add:
        case StageKind::concat: {
            unbend(stage, output, output_gradient);
            for (size_t k = 0; k < stage.reads.size(); k++) {
                const Tensor &of = view.plan.tensors[stage.reads[k]];
                const Map map = stage.map(of.gradient);
                Map part = stage.output_gradient;
                part.channels = map.channels;
                if (of.learned) copy(part, output_gradient, map, view.gradient(stage.reads[k]), stage.adds[k]);
                if (stage.kind == StageKind::concat) output_gradient += map.channels * stage.output_gradient.plane;
            }
            return;
        }
        default: break;
    }
    if (!wanted) return;
    switch (stage.kind) {
        case StageKind::pool: pool_gradient(stage, output_gradient, (const whole *)kept, gradient, adds); break;
        case StageKind::activation: activate_all_gradient(stage, input, output, output_gradient, gradient, adds); break;
        case StageKind::scale: scale_gradient(stage, constants, output_gradient, gradient, adds); break;
        case StageKind::dropout: drop_gradient(stage, draw, output_gradient, kept, gradient, adds); break;
        case StageKind::transpose: turn(stage.output_gradient, output_gradient, stage.input_gradient, gradient, adds); break;
        case StageKind::flatten:
            copy(plain(stage.input.channels, stage.input.height, stage.input.width), output_gradient, stage.input_gradient, gradient, adds);
            break;
        default: break;
    }
}

// Logits of a few lane groups. samples: lane groups one after the other, each plan.input().size vectors.
inline void forward(const Plan &plan, Workspace &space, const float *weights, const lanes *samples, int groups) {
    for (int group = 0; group < groups; group++)
        for (size_t i = 0; i < plan.images; i++)
            forward_stage<false>(plan.stages[i], View{plan, space, samples, group}, weights, Draw{});
    for (size_t i = plan.images; i < plan.stages.size(); i++) {
        const Stage &stage = plan.stages[i];
        const View first{plan, space, samples, 0};
        if (stage.kind == StageKind::dense) {
            const Tensor &from = plan.tensors[stage.reads[0]], &to = plan.tensors[stage.makes];
            dense(stage, weights, first.read(stage.reads[0]), stage.reads[0] ? from.step : from.value.size, first.made(stage), to.step, groups);
            continue;
        }
        for (int group = 0; group < groups; group++) forward_stage<false>(stage, View{plan, space, samples, group}, weights, Draw{});
    }
}

// Training takes one lane group through the network and back, or one sample if the plan is wide. Images stay in lanes;
// dense layers, and activations between them, take every sample as a row (see dense_rows.hpp).
class Pass {
  public:
    Pass(const Plan &plan, Workspace &space, const float *weights, const Group &group, const Draw &draw)
        : plan_(plan), space_(space), weights_(weights), group_(group), draw_(draw),
          view_{plan, space, space.at(plan.tensors[0].value_at), 0}, wide_(plan, space, draw) {}

    // Gradient of scale * (sum of losses) with respect to every parameter, into the sink.
    void run(float scale, const Sink &sink) {
        if (plan_.wide) wide_.load(group_.rows[0]);
        else if (plan_.tensors[0].read_in_lanes) load(plan_.input(), group_, space_.at(plan_.tensors[0].value_at));
        for (const Stage &stage : plan_.stages) {
            if (stage.in_rows) forward_rows(stage);
            else if (plan_.wide && !stage.flat) wide_.forward(stage, weights_);
            else forward_stage<true>(stage, view_, weights_, draw_);
            if (!plan_.wide || stage.flat || stage.kind == StageKind::flatten) hand_on(plan_.tensors[stage.makes]);
        }
        const int last = plan_.stages.back().makes;
        logit_gradient(plan_, view_.read(last), group_, scale, view_.gradient(last));
        for (size_t i = plan_.stages.size(); i-- > 0;) {
            const Stage &stage = plan_.stages[i];
            if (!plan_.tensors[stage.makes].learned) continue;  // no parameter from here on
            if (!plan_.wide || stage.flat || stage.kind == StageKind::flatten) collect_gradient(plan_.tensors[stage.makes]);
            if (stage.in_rows) backward_rows(stage, sink);
            else if (plan_.wide && !stage.flat) wide_.backward(stage, sink);
            else backward_stage(stage, view_, weights_, draw_, sink);
        }
    }

  private:
    float *floats(size_t at) { return reinterpret_cast<float *>(space_.at(at)); }

    // Rows of real samples -> lanes; zeros where there is no sample.
    void gather(size_t rows_at, const Tensor &tensor, lanes *target) {
        const float *rows[LANES];
        for (int s = 0; s < LANES; s++) rows[s] = s < group_.count ? floats(rows_at) + s * tensor.stride : floats(plan_.zeros_at);
        rows_to_lanes(rows, 0, tensor.value.count(), target);
    }

    // What was made in one order is brought into the other, if somebody reads it there.
    void hand_on(const Tensor &made) {
        if (made.made_in_rows && made.read_in_lanes) gather(made.rows_at, made, space_.at(made.value_at));
        else if (!made.made_in_rows && made.read_in_rows)
            lanes_to_rows(space_.at(made.value_at), made.value.count(), group_.count, floats(made.rows_at), made.stride);
    }

    // The way back: gradients that readers left in the other order come to the one in which the tensor was made.
    void collect_gradient(const Tensor &made) {
        const size_t count = made.value.count();
        if (made.made_in_rows && made.read_in_lanes) {
            const bool adds = made.read_in_rows;
            float *rows = floats(adds ? plan_.mixed_at : made.gradient_rows_at);
            lanes_to_rows(space_.at(made.gradient_at), count, group_.count, rows, made.stride);
            if (adds) rows_add(rows, floats(made.gradient_rows_at), group_.count, made.stride);
        } else if (!made.made_in_rows && made.read_in_rows) {
            const bool adds = made.read_in_lanes;
            lanes *to = space_.at(made.gradient_at), *from = adds ? space_.at(plan_.mixed_at) : to;
            gather(made.gradient_rows_at, made, from);
            if (adds)
                for (size_t i = 0; i < count; i++) to[i] += from[i];
        }
    }

    // The samples themselves are rows already.
    void input_rows(const Stage &stage, const float *(&rows)[LANES]) {
        const Tensor &from = plan_.tensors[stage.reads[0]];
        for (int s = 0; s < LANES; s++) rows[s] = stage.reads[0] ? floats(from.rows_at) + s * from.stride : group_.rows[s];
    }

    void forward_rows(const Stage &stage) {
        const Tensor &to = plan_.tensors[stage.makes];
        float *output = floats(to.rows_at);
        if (stage.kind == StageKind::activation) {
            rows_activate(stage.curve, floats(plan_.tensors[stage.reads[0]].rows_at), output, group_.count, to.stride);
            return;
        }
        const float *rows[LANES];
        input_rows(stage, rows);
        rows_forward(stage, weights_, rows, group_.count, output, to.stride);
        rows_activate(stage.curve, output, output, group_.count, to.stride);
    }

    void backward_rows(const Stage &stage, const Sink &sink) {
        const Tensor &from = plan_.tensors[stage.reads[0]], &made = plan_.tensors[stage.makes];
        float *gradient = floats(made.gradient_rows_at), *output = floats(made.rows_at);
        const bool adds = stage.adds[0];
        float *input_gradient = floats(adds ? plan_.mixed_at : from.gradient_rows_at);
        if (stage.kind == StageKind::activation) {
            rows_slope(stage.curve, floats(from.rows_at), output, gradient, input_gradient, group_.count, made.stride);
        } else {
            rows_slope(stage.curve, output, output, gradient, gradient, group_.count, made.stride);
            if (from.learned)
                rows_input_gradient(stage, weights_, gradient, made.stride, group_.count, input_gradient, from.stride);
            const float *rows[LANES];
            input_rows(stage, rows);
            rows_weight_gradient(stage, gradient, made.stride, rows, group_.count, sink);
        }
        if (adds && from.learned) rows_add(input_gradient, floats(from.gradient_rows_at), group_.count, from.stride);
    }

    const Plan &plan_;
    Workspace &space_;
    const float *weights_;
    const Group &group_;
    const Draw draw_;
    const View view_;
    WidePass wide_;
};

}  // namespace cbdsl
