// Samples as lane groups with their labels or targets; losses and their gradients with respect to the outputs.
#pragma once

#include <cmath>

#include "plan.hpp"

namespace cbdsl {

// Samples of a call. Of labels and targets there is what the loss needs.
struct Data {
    const float *features;          // (N, width)
    const int32_t *labels;          // (N,)
    const float *targets;           // (N, outputs)
    const float *zeros;             // (width,) and (outputs,)
    size_t width, outputs;
};

// Up to LANES samples: where their features and targets begin, and their labels. Lanes beyond `count` read zeros, and
// their label is -1; with targets, that of all others is 0.
struct Group {
    const float *rows[LANES];
    const float *targets[LANES];
    whole labels;
    int count;
};

inline Group collect(const Data &data, const int32_t *indices, int count) {
    Group group;
    group.count = count;
    for (int lane = 0; lane < LANES; lane++) {
        group.rows[lane] = lane < count ? data.features + size_t(indices[lane]) * data.width : data.zeros;
        group.labels[lane] = lane >= count ? -1 : data.labels ? data.labels[indices[lane]] : 0;
    }
    if (data.targets)
        for (int lane = 0; lane < LANES; lane++)
            group.targets[lane] = lane < count ? data.targets + size_t(indices[lane]) * data.outputs : data.zeros;
    return group;
}

constexpr int AT_ONCE = 16;  // outputs whose targets are brought into lanes together

CBDSL_INLINE lanes size_of(lanes v) { return v < 0.0f ? -v : v; }

// The loss of one output. It is not negative, and NaN where the error is.
CBDSL_INLINE lanes error_loss(const Loss &loss, lanes error) {
    const lanes size = size_of(error);
    switch (loss.kind) {
        case LossKind::absolute: return size;
        case LossKind::huber:
            return size > loss.setting ? loss.setting * (size - 0.5f * loss.setting) : 0.5f * error * error;
        default: return error * error;
    }
}

// Its derivative.
CBDSL_INLINE lanes error_slope(const Loss &loss, lanes error) {
    switch (loss.kind) {
        case LossKind::absolute: {
            const lanes sign = error > 0.0f ? splat(1.0f) : error;  // zero and NaN stay
            return error < 0.0f ? splat(-1.0f) : sign;
        }
        case LossKind::huber: {
            const lanes low = error < -loss.setting ? splat(-loss.setting) : error;
            return low > loss.setting ? splat(loss.setting) : low;
        }
        default: return 2.0f * error;
    }
}

// The mean over all outputs of every real sample's losses.
inline void judge_errors(const Plan &plan, const lanes *outputs, const Group &group, double *losses) {
    double total[LANES] = {};
    lanes targets[AT_ONCE];
    for (int start = 0; start < plan.classes; start += AT_ONCE) {
        const int count = std::min(AT_ONCE, plan.classes - start);
        rows_to_lanes(group.targets, start, count, targets);
        lanes part{};
        for (int k = 0; k < count; k++) part += error_loss(plan.loss, outputs[start + k] - targets[k]);
        for (int lane = 0; lane < LANES; lane++) total[lane] += double(part[lane]);
    }
    for (int lane = 0; lane < group.count; lane++) losses[lane] = total[lane] / plan.classes;
}

// Cross-entropy of every real sample and whether the model's answer is right. A NaN among the logits makes
// the loss NaN and the answer wrong.
inline void judge(const Plan &plan, const lanes *logits, const Group &group, double *losses, uint8_t *correct) {
    if (plan.loss.kind != LossKind::cross_entropy) {
        judge_errors(plan, logits, group, losses);
        std::fill_n(correct, group.count, uint8_t(0));
        return;
    }
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
    if (plan.loss.setting > 0.0f) {  // the target is a mixture of the label and of all classes
        lanes sum{};
        for (int k = 0; k < plan.classes; k++) sum += logits[k];
        own = (1.0f - plan.loss.setting) * own + plan.loss.setting / float(plan.classes) * sum;
        for (int lane = 0; lane < LANES; lane++) own[lane] = std::fmin(own[lane], largest[lane]);
    }
    for (int lane = 0; lane < group.count; lane++) {
        // total >= 1 and largest >= own, so a loss is never negative: an early stop rests on that.
        losses[lane] = std::log(double(total[lane])) + (double(largest[lane]) - double(own[lane]));
        correct[lane] = answer[lane] == group.labels[lane] && total[lane] == total[lane];
    }
}

// Gradient of scale * (sum of losses) with respect to the outputs; zero in lanes without a sample.
inline void error_gradient(const Plan &plan, const lanes *outputs, const Group &group, float scale, lanes *gradient) {
    const float each = scale / float(plan.classes);
    lanes targets[AT_ONCE];
    for (int start = 0; start < plan.classes; start += AT_ONCE) {
        const int count = std::min(AT_ONCE, plan.classes - start);
        rows_to_lanes(group.targets, start, count, targets);
        for (int k = start; k < start + count; k++) {
            const lanes slope = each * error_slope(plan.loss, outputs[k] - targets[k - start]);
            gradient[k] = group.labels >= 0 ? slope : lanes{};
        }
    }
}

// Gradient of scale * (sum of losses) with respect to the logits; zero in lanes without a sample.
inline void logit_gradient(const Plan &plan, const lanes *logits, const Group &group, float scale, lanes *gradient) {
    if (plan.loss.kind != LossKind::cross_entropy) {
        error_gradient(plan, logits, group, scale, gradient);
        return;
    }
    const float smoothing = plan.loss.setting;
    lanes largest = logits[0];
    for (int k = 1; k < plan.classes; k++) largest = larger(logits[k], largest);
    lanes total{};
    for (int k = 0; k < plan.classes; k++) {
        gradient[k] = exponential(logits[k] - largest);
        total += gradient[k];
    }
    const lanes per_total = scale / total;
    for (int k = 0; k < plan.classes; k++) {
        lanes share = gradient[k] * per_total - (group.labels == k ? splat(scale * (1.0f - smoothing)) : lanes{});
        if (smoothing > 0.0f) share -= scale * smoothing / float(plan.classes);
        gradient[k] = group.labels >= 0 ? share : lanes{};
    }
}

}  // namespace cbdsl
