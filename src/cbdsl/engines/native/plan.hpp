// From a list of layers to stages: what follows what, where each number lives, what is fused.
//
// A plan is made once per network and never changes; threads share it and bring their own workspace.
#pragma once

#include <cstdint>
#include <vector>

#include "lanes.hpp"

namespace cbdsl {

enum class Activation { none, relu, tanh, sigmoid };
enum class StageKind { convolution, dense, pool, activation };
// Pooling that a convolution does itself while its results are still in registers (2x2, stride 2).
enum class Fused { none, max2, average2 };

#if defined(__SANITIZE_ADDRESS__)
constexpr bool WATCHED = true;
#else
constexpr bool WATCHED = false;
#endif

constexpr size_t NOWHERE = ~size_t(0);

// Lane groups that dense layers score together, so that a weight is loaded once for all of them.
constexpr int GROUPS = 4;

// Where the vectors of one tensor lie: index = channel * plane + y * row + x, counted from `origin`.
// The border around it belongs to the layer that reads it: zeros for a padded convolution.
struct Map {
    int channels = 0, height = 0, width = 0;
    size_t row = 0, plane = 0, origin = 0, size = 0;

    size_t count() const { return size_t(channels) * height * width; }
    size_t at(int channel, int y) const { return channel * plane + y * row; }
    bool dense() const { return size == count(); }
};

struct Stage {
    StageKind kind{};
    Activation activation = Activation::none;
    Fused fused = Fused::none;
    bool pool_is_max = false;
    int kernel_height = 1, kernel_width = 1, stride_height = 1, stride_width = 1;
    int channels = 0, height = 0, width = 0;  // of the result
    int full_height = 0, full_width = 0;      // of a convolution, before its fused pooling
    size_t weight = NOWHERE, bias = NOWHERE;  // offsets into the flat weights
    bool wants_input_gradient = false;
    Map input, output;                    // activations
    Map input_gradient, output_gradient;  // gradients with respect to them
    Map full;                             // of a convolution: gradient before activation and pooling
    // Offsets into the workspace, in vectors.
    size_t input_at = 0, output_at = 0, input_gradient_at = 0, output_gradient_at = 0;
    size_t full_at = 0, chosen_at = 0;
    // From the first dense stage on, training keeps rows of samples: (LANES, stride) floats each.
    size_t input_rows_at = 0, output_rows_at = 0, input_gradient_rows_at = 0, output_gradient_rows_at = 0;
    size_t input_stride = 0, output_stride = 0;  // floats
    // Distance between the lane groups of a tensor; 0 where one buffer serves them one after another.
    size_t input_step = 0, output_step = 0;
};

struct Plan {
    std::vector<Stage> stages;
    Map input;                    // as the first stage reads it
    size_t first_dense = 0;       // stages before it run group by group
    size_t parameters = 0;        // D
    int classes = 0;
    size_t workspace = 0;         // vectors
    std::vector<size_t> gaps;     // vectors between buffers that nobody may touch; only where a sanitizer watches
    size_t zeros_at = 0;          // as many zeros as the widest row of a dense stage
};

enum LayerCode : int32_t {
    CODE_CONVOLUTION = 1, CODE_RELU, CODE_TANH, CODE_SIGMOID, CODE_MAX_POOL, CODE_AVERAGE_POOL, CODE_FLATTEN, CODE_LINEAR
};
constexpr int LAYER_FIELDS = 8;  // code, then up to seven numbers

// Returns false if the layers do not fit together; the Python layer has explained why before that.
bool make_plan(const int32_t *layers, int count, const int32_t shape[3], Plan &plan);

}  // namespace cbdsl
