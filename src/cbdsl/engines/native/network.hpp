// One model on one lane group (or a few): forwards, the loss, backwards. Knows nothing of threads or batches.
#pragma once

#include <cmath>
#include <cstdlib>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include "convolution.hpp"
#include "dense.hpp"
#include "dense_rows.hpp"

namespace cbdsl {

// All memory a thread needs while it works on one model after another. Borders stay zero for ever.
class Workspace {
  public:
    explicit Workspace(const Plan &plan) {
        const size_t bytes = (plan.workspace * sizeof(lanes) + 63) / 64 * 64;
        vectors_ = static_cast<lanes *>(std::aligned_alloc(64, bytes));
        gradient = static_cast<float *>(std::calloc(plan.parameters, sizeof(float)));
        if (!vectors_ || !gradient) {
            release();
            throw std::bad_alloc();
        }
        std::memset(static_cast<void *>(vectors_), 0, bytes);
#if defined(__SANITIZE_ADDRESS__)
        for (const size_t gap : plan.gaps) __asan_poison_memory_region(vectors_ + gap, sizeof(lanes));
#endif
    }
    ~Workspace() { release(); }
    Workspace(const Workspace &) = delete;
    Workspace &operator=(const Workspace &) = delete;

    lanes *at(size_t offset) { return vectors_ + offset; }
    float *gradient;  // (D,): the gradient of a batch, or its momentum

  private:
    void release() {
        std::free(vectors_);
        std::free(gradient);
    }
    lanes *vectors_;
};

// Up to LANES samples: where their features begin, and their labels. Lanes beyond `count` read zeros.
struct Group {
    const float *rows[LANES];
    whole labels;
    int count;
};

// features: (N, F); zeros: (F,).
inline Group collect(const float *features, const int32_t *labels, size_t width, const int32_t *indices, int count,
                     const float *zeros) {
    Group group;
    group.count = count;
    for (int lane = 0; lane < LANES; lane++) {
        group.rows[lane] = lane < count ? features + size_t(indices[lane]) * width : zeros;
        group.labels[lane] = lane < count ? labels[indices[lane]] : -1;
    }
    return group;
}

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

// One stage before the first dense one, on one lane group.
template <bool TRAINING>
void forward_image_stage(const Stage &stage, Workspace &space, const float *weights, const lanes *input, int group) {
    lanes *output = space.at(stage.output_at) + stage.output.origin + group * stage.output_step;
    lanes *kept = space.at(stage.chosen_at);
    if (stage.kind == StageKind::convolution) convolve<TRAINING>(stage, weights, input, output, kept);
    else if (stage.kind == StageKind::pool) pool(stage, input, output, (whole *)kept);
    else activate_all(stage, input, output);
}

// Logits of a few lane groups. input: lane groups one after the other, each plan.input.size vectors.
inline void forward(const Plan &plan, Workspace &space, const float *weights, const lanes *input, int groups) {
    for (int group = 0; group < groups; group++)
        for (size_t i = 0; i < plan.first_dense; i++) {
            const Stage &stage = plan.stages[i];
            forward_image_stage<false>(stage, space, weights, i ? space.at(stage.input_at) : input + group * plan.input.size, group);
        }
    for (size_t i = plan.first_dense; i < plan.stages.size(); i++) {
        const Stage &stage = plan.stages[i];
        const lanes *from = i ? space.at(stage.input_at) : input;
        lanes *to = space.at(stage.output_at);
        if (stage.kind == StageKind::dense) dense(stage, weights, from, to, groups);
        else
            for (int group = 0; group < groups; group++)
                activate_all(stage, from + group * stage.input_step, to + group * stage.output_step);
    }
}

// Cross-entropy of every real sample and whether the model's answer is right. A NaN among the logits makes
// the loss NaN and the answer wrong.
inline void judge(const Plan &plan, const lanes *logits, const Group &group, double *losses, uint8_t *correct) {
    lanes largest = logits[0];
    whole answer{};
    for (int k = 1; k < plan.classes; k++) {
        const whole better = logits[k] > largest;
        largest = better ? logits[k] : largest;
        answer = better ? whole{} + k : answer;
    }
    lanes total{}, own{};
    for (int k = 0; k < plan.classes; k++) {
        total += exponential(logits[k] - largest);
        own = group.labels == k ? logits[k] : own;
    }
    for (int lane = 0; lane < group.count; lane++) {
        // total >= 1 and largest >= own, so a loss is never negative: an early stop rests on that.
        losses[lane] = std::log(double(total[lane])) + (double(largest[lane]) - double(own[lane]));
        correct[lane] = answer[lane] == group.labels[lane] && total[lane] == total[lane];
    }
}

// Gradient of scale * (sum of losses) with respect to the logits; zero in lanes without a sample.
inline void logit_gradient(const Plan &plan, const lanes *logits, const Group &group, float scale, lanes *gradient) {
    lanes largest = logits[0];
    for (int k = 1; k < plan.classes; k++) largest = larger(logits[k], largest);
    lanes total{};
    for (int k = 0; k < plan.classes; k++) {
        gradient[k] = exponential(logits[k] - largest);
        total += gradient[k];
    }
    const lanes per_total = scale / total;
    for (int k = 0; k < plan.classes; k++) {
        const lanes share = gradient[k] * per_total - (group.labels == k ? splat(scale) : lanes{});
        gradient[k] = group.labels >= 0 ? share : lanes{};
    }
}

// Training takes one lane group through the network and back. Images stay in lanes; from the first dense stage
// on every sample is a row (see dense_rows.hpp).
class Pass {
  public:
    Pass(const Plan &plan, Workspace &space, const float *weights, const Group &group)
        : plan_(plan), space_(space), weights_(weights), group_(group) {}

    // Gradient of scale * (sum of losses) with respect to every parameter, into the sink.
    void run(float scale, const Sink &sink) {
        const Stage &last = plan_.stages.back();
        const bool rows = plan_.first_dense < plan_.stages.size();
        forward_images();
        forward_rows();
        lanes *logits = space_.at(last.output_at), *gradient = space_.at(last.output_gradient_at);
        if (rows) gather(last.output_rows_at, last.output_stride, last.output.size, logits);
        logit_gradient(plan_, logits, group_, scale, gradient);
        if (rows) lanes_to_rows(gradient, last.output.size, group_.count, floats(last.output_gradient_rows_at), last.output_stride);
        backward_rows(sink);
        backward_images(sink);
    }

  private:
    float *floats(size_t at) { return reinterpret_cast<float *>(space_.at(at)); }

    // Rows of real samples -> lanes; zeros where there is no sample.
    void gather(size_t rows_at, size_t stride, size_t count, lanes *target) {
        const float *rows[LANES];
        for (int s = 0; s < LANES; s++) rows[s] = s < group_.count ? floats(rows_at) + s * stride : floats(plan_.zeros_at);
        rows_to_lanes(rows, 0, count, target);
    }

    // The first layer finds its inputs as rows already: they are the samples.
    void input_rows(size_t i, const float *(&rows)[LANES]) {
        const Stage &stage = plan_.stages[i];
        for (int s = 0; s < LANES; s++) rows[s] = i ? floats(stage.input_rows_at) + s * stage.input_stride : group_.rows[s];
    }

    void forward_images() {
        if (plan_.first_dense == 0) return;
        load(plan_.input, group_, space_.at(plan_.stages[0].input_at));
        for (size_t i = 0; i < plan_.first_dense; i++)
            forward_image_stage<true>(plan_.stages[i], space_, weights_, space_.at(plan_.stages[i].input_at), 0);
    }

    void forward_rows() {
        for (size_t i = plan_.first_dense; i < plan_.stages.size(); i++) {
            const Stage &stage = plan_.stages[i];
            float *output = floats(stage.output_rows_at);
            if (i == plan_.first_dense && i > 0)
                lanes_to_rows(space_.at(stage.input_at), stage.input.size, group_.count, floats(stage.input_rows_at), stage.input_stride);
            if (stage.kind == StageKind::dense) {
                const float *rows[LANES];
                input_rows(i, rows);
                rows_forward(stage, weights_, rows, group_.count, output, stage.output_stride);
                rows_activate(stage, output, output, group_.count, stage.output_stride);
            } else {
                rows_activate(stage, floats(stage.input_rows_at), output, group_.count, stage.output_stride);
            }
        }
    }

    // Within a stage the input gradient comes first, because the sink may be the weights themselves.
    void backward_rows(const Sink &sink) {
        for (size_t i = plan_.stages.size(); i-- > plan_.first_dense;) {
            const Stage &stage = plan_.stages[i];
            float *gradient = floats(stage.output_gradient_rows_at), *output = floats(stage.output_rows_at);
            float *input_gradient = floats(stage.input_gradient_rows_at);
            if (stage.kind == StageKind::activation) {
                rows_slope(stage, output, gradient, input_gradient, group_.count, stage.output_stride);
                continue;
            }
            rows_slope(stage, output, gradient, gradient, group_.count, stage.output_stride);
            if (stage.wants_input_gradient)
                rows_input_gradient(stage, weights_, gradient, stage.output_stride, group_.count, input_gradient, stage.input_stride);
            const float *rows[LANES];
            input_rows(i, rows);
            rows_weight_gradient(stage, gradient, stage.output_stride, rows, group_.count, sink);
            if (i == plan_.first_dense && stage.wants_input_gradient)
                gather(stage.input_gradient_rows_at, stage.input_stride, stage.input.size, space_.at(stage.input_gradient_at));
        }
    }

    void backward_images(const Sink &sink) {
        for (size_t i = plan_.first_dense; i-- > 0;) {
            const Stage &stage = plan_.stages[i];
            if (!stage.wants_input_gradient && stage.weight == NOWHERE) return;  // no parameter from here on
            const lanes *output = space_.at(stage.output_at) + stage.output.origin;
            const lanes *output_gradient = space_.at(stage.output_gradient_at) + stage.output_gradient.origin;
            lanes *input_gradient = space_.at(stage.input_gradient_at), *kept = space_.at(stage.chosen_at);
            if (stage.kind == StageKind::convolution) {
                lanes *full = space_.at(stage.full_at);
                convolve_unfuse(stage, output, output_gradient, kept, full, sink);
                if (stage.wants_input_gradient) convolve_input_gradient(stage, weights_, full, input_gradient);
                convolve_kernel_gradient(stage, space_.at(stage.input_at), full, sink);
            } else if (stage.kind == StageKind::pool) {
                pool_gradient(stage, output_gradient, (const whole *)kept, input_gradient);
            } else {
                activate_all_gradient(stage, output, output_gradient, input_gradient);
            }
        }
    }

    const Plan &plan_;
    Workspace &space_;
    const float *weights_;
    const Group &group_;
};

}  // namespace cbdsl
