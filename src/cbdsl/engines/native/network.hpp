// One model on one lane group (or a few): forwards, the loss, backwards. Knows nothing of threads or batches.
#pragma once

#include <cmath>
#include <cstdlib>
#include <new>

#include "convolution.hpp"
#include "dense.hpp"

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

template <bool TRAINING>
void forward_stage(const Stage &stage, Workspace &space, const float *weights, const lanes *input, int group, int groups) {
    lanes *output = space.at(stage.output_at) + stage.output.origin + group * stage.output_step;
    const lanes *from = input ? input : space.at(stage.input_at) + group * stage.input_step;
    lanes *kept = space.at(stage.chosen_at);
    switch (stage.kind) {
        case StageKind::convolution: convolve<TRAINING>(stage, weights, from, output, kept); break;
        case StageKind::dense: dense(stage, weights, from, output, groups); break;
        case StageKind::pool: pool(stage, from, output, (whole *)kept); break;
        case StageKind::activation: activate_all(stage, from, output); break;
    }
}

// input: lane groups one after the other, each plan.input.size vectors.
template <bool TRAINING>
void forward(const Plan &plan, Workspace &space, const float *weights, const lanes *input, int groups) {
    for (int group = 0; group < groups; group++)
        for (size_t i = 0; i < plan.first_dense; i++)
            forward_stage<TRAINING>(plan.stages[i], space, weights, i ? nullptr : input + group * plan.input.size, group, 1);
    for (size_t i = plan.first_dense; i < plan.stages.size(); i++) {
        const lanes *from = i ? nullptr : input;
        if (plan.stages[i].kind == StageKind::dense)
            forward_stage<TRAINING>(plan.stages[i], space, weights, from, 0, groups);
        else
            for (int group = 0; group < groups; group++)
                forward_stage<TRAINING>(plan.stages[i], space, weights, from, group, 1);
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

// Sends the gradient of every parameter into the sink. Within a stage the input gradient comes first,
// because the sink may be the weights themselves.
inline void backward(const Plan &plan, Workspace &space, const float *weights, const Group &group, const Sink &sink) {
    for (size_t i = plan.stages.size(); i-- > 0;) {
        const Stage &stage = plan.stages[i];
        if (!stage.wants_input_gradient && stage.weight == NOWHERE) return;
        const lanes *input = space.at(stage.input_at);
        const lanes *output = space.at(stage.output_at) + stage.output.origin;
        lanes *output_gradient = space.at(stage.output_gradient_at) + stage.output_gradient.origin;
        lanes *input_gradient = space.at(stage.input_gradient_at), *kept = space.at(stage.chosen_at);
        switch (stage.kind) {
            case StageKind::convolution: {
                lanes *full = space.at(stage.full_at);
                convolve_unfuse(stage, output, output_gradient, kept, full, sink);
                if (stage.wants_input_gradient) convolve_input_gradient(stage, weights, full, input_gradient);
                convolve_kernel_gradient(stage, input, full, sink);
                break;
            }
            case StageKind::dense: {
                for (int o = 0; o < stage.channels; o++)
                    output_gradient[o] = slope(stage.activation, output[o], output_gradient[o]);
                if (stage.wants_input_gradient) dense_input_gradient(stage, weights, output_gradient, input_gradient);
                // The first layer finds its inputs as rows already: they are the samples.
                const float *rows[LANES];
                float *scratch = reinterpret_cast<float *>(space.at(plan.rows_at));
                if (i > 0) lanes_to_rows(input, stage.input.size, group.count, scratch, plan.row_stride);
                for (int s = 0; s < LANES; s++) rows[s] = i > 0 ? scratch + s * plan.row_stride : group.rows[s];
                dense_weight_gradient(stage, output_gradient, rows, group.count, sink);
                break;
            }
            case StageKind::pool: pool_gradient(stage, output_gradient, (const whole *)kept, input_gradient); break;
            case StageKind::activation: activate_all_gradient(stage, output, output_gradient, input_gradient); break;
        }
    }
}

}  // namespace cbdsl
