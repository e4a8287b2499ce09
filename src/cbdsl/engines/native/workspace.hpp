// The memory that a thread works in.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include "plan.hpp"

namespace cbdsl {

// All memory a thread needs while it works on one model after another. Borders stay zero for ever.
class Workspace {
  public:
    explicit Workspace(const Plan &plan) {
        const size_t bytes = (plan.workspace * sizeof(lanes) + 63) / 64 * 64;
        vectors_ = static_cast<lanes *>(std::aligned_alloc(64, bytes));
        gradient = static_cast<float *>(std::calloc(plan.parameters, sizeof(float)));
        if (!plan.all_train()) weights = static_cast<float *>(std::malloc(plan.parameters * sizeof(float)));
        if (!vectors_ || !gradient || (!plan.all_train() && !weights)) {
            release();
            throw std::bad_alloc();
        }
        std::memset(static_cast<void *>(vectors_), 0, bytes);
        std::copy(plan.frozen.begin(), plan.frozen.end(), weights);
#if defined(__SANITIZE_ADDRESS__)
        for (const size_t gap : plan.gaps) __asan_poison_memory_region(vectors_ + gap, sizeof(lanes));
#endif
    }
    ~Workspace() { release(); }
    Workspace(const Workspace &) = delete;
    Workspace &operator=(const Workspace &) = delete;

    lanes *at(size_t offset) { return vectors_ + offset; }
    // Two times as many zeros as there are weights, for what an optimiser keeps; room for them only once they are asked for.
    float *moments(const Plan &plan) {
        if (!moments_ && !(moments_ = static_cast<float *>(std::malloc(2 * plan.parameters * sizeof(float))))) throw std::bad_alloc();
        return std::fill_n(moments_, 2 * plan.parameters, 0.0f) - 2 * plan.parameters;
    }

    float *gradient;           // (P,): the gradient of a batch, or its momentum
    float *weights = nullptr;  // (P,): a model with its frozen weights; only where some are frozen

  private:
    void release() {
        std::free(vectors_);
        std::free(gradient);
        std::free(weights);
        std::free(moments_);
    }
    lanes *vectors_;
    float *moments_ = nullptr;
};

}  // namespace cbdsl
