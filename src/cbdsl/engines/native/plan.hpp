// From a graph of layers to stages: what follows what, where each number lives, what is fused.
//
// A plan is made once per network and never changes; threads share it and bring their own workspace.
#pragma once

#include <cstdint>
#include <vector>

#include "curves.hpp"

namespace cbdsl {

enum class StageKind { convolution, dense, pool, activation, norm, add, concat, scale, dropout, flatten, transpose, recurrent };
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
// The border around it is there for the convolutions that read it: zeros, as wide as the widest padding.
struct Map {
    int channels = 0, height = 0, width = 0;
    size_t row = 0, plane = 0, origin = 0, size = 0;

    size_t count() const { return size_t(channels) * height * width; }
    size_t at(int channel, int y) const { return channel * plane + y * row; }
    bool dense() const { return size == count(); }
};

inline Map plain(int channels, int height, int width) {
    Map map;
    map.channels = channels, map.height = height, map.width = width;
    map.row = width, map.plane = size_t(width) * height, map.size = map.plane * channels;
    return map;
}

inline size_t rounded_to_lanes(size_t count) { return (count + LANES - 1) / LANES * LANES; }

// Where the numbers of one sample lie: index = y * row + x * depth + channel, counted from `origin`.
struct Pixels {
    int channels = 0, height = 0, width = 0, depth = 0;
    size_t row = 0, origin = 0, size = 0;

    Pixels() = default;
    Pixels(int channels, int height, int width, int above = 0, int left = 0)
        : channels(channels), height(height), width(width), depth(int(rounded_to_lanes(channels))),
          row(size_t(width + 2 * left) * depth), origin(above * row + size_t(left) * depth), size(row * (height + 2 * above)) {}
    size_t at(size_t y, size_t x) const { return y * row + x * size_t(depth); }
};

// What one layer makes and others read. Images are always in lanes. Rows of numbers are, too, but training keeps
// what dense layers read and make with the samples as rows, (LANES, stride) floats, in the other order or in both.
struct Tensor {
    Map value, gradient;
    size_t value_at = 0, gradient_at = 0;  // offsets into the workspace, in vectors
    size_t step = 0;                       // between lane groups; 0 where one buffer serves them one after another
    bool learned = false;                  // there are weights before it, so its gradient is wanted
    bool made_in_rows = false;
    int read_in_lanes = 0, read_in_rows = 0;  // by how many
    size_t rows_at = 0, gradient_rows_at = 0, stride = 0;
    Pixels wide_value, wide_gradient;  // of an image in a wide plan
    size_t wide_value_at = 0, wide_gradient_at = 0;
};

struct Stage {
    StageKind kind{};
    Curve curve;
    Fused fused = Fused::none;
    bool flat = false;     // on rows of numbers: all lane groups are scored together
    bool in_rows = false;  // training has its samples as rows
    bool pool_is_max = false;
    int kernel_height = 1, kernel_width = 1, stride_height = 1, stride_width = 1, above = 0, left = 0;
    int groups = 1, group_inputs = 0, group_outputs = 0;  // of a convolution: channels of one group
    int channels = 0, height = 0, width = 0;              // of the result
    int full_height = 0, full_width = 0;                  // of a convolution, before its fused pooling
    size_t weight = NOWHERE, bias = NOWHERE;              // offsets into the flat weights
    bool weight_per_place = false;                        // of a norm: not one a channel
    size_t together = 0;                                  // of a norm: numbers that share a mean
    float setting = 0.0f;                                 // of a norm: epsilon; of a dropout: the chance
    size_t constants = 0;                                 // of a scale: where its factors begin, then its offsets
    bool one_factor = false, one_offset = false;          // for all channels
    bool is_lstm = false, last = false;                   // of a recurrent stage: which one; whether it makes its last state alone
    int hidden = 0;                                       // numbers of its state
    size_t state_weight = NOWHERE;                        // and its weights of the state; those of its bias follow each other
    int number = 0;                                       // of the layer, for random numbers
    std::vector<int> reads;                               // tensors
    std::vector<uint8_t> adds;                            // for each of them: another stage has begun its gradient
    int makes = 0;                                        // tensor
    Map input, output, input_gradient, output_gradient;   // of the first tensor it reads, and of its result
    Map full;                     // of a convolution: gradient before activation and pooling
    size_t corner = 0;            // where a convolution's own padding begins in its input
    size_t gradient_corner = 0;   // and in the gradient of its input
    size_t full_at = 0, kept_at = 0;  // offsets into the workspace: `full`, and what the way back needs

    // In a wide plan: a convolution's weights for the way there and back, its bias and the gradients of its weights; its
    // result before the pooling that it does itself.
    size_t forward_at = 0, backward_at = 0, bias_at = 0, packed_at = 0, packed = 0;
    Pixels wide_full, wide_full_gradient;
    size_t wide_full_at = 0, wide_full_gradient_at = 0, wide_kept_at = 0;

    // A tensor as this stage looks at it: a row of numbers may have been an image without a border.
    Map map(const Map &of) const { return flat ? plain(int(of.count()), 1, 1) : of; }
};

// Weights one after the other that train: where they begin among all weights and among those that train.
struct Run {
    size_t at, from, count;
};

// What a network is trained for. Cross-entropy takes a class per sample, the others as many targets as there are outputs.
enum class LossKind : int32_t { cross_entropy = 0, squared = 1, absolute = 2, huber = 3 };

struct Loss {
    LossKind kind = LossKind::cross_entropy;
    float setting = 0.0f;  // of cross-entropy: label smoothing; of huber: where it becomes linear
};

struct Plan {
    std::vector<Tensor> tensors;   // the first one holds the samples, the last stage makes the logits
    std::vector<Stage> stages;     // those on images come first
    size_t images = 0;             // how many these are; they run group by group
    std::vector<float> constants;
    size_t parameters = 0;         // P, with those that are frozen
    int classes = 0;               // outputs
    Loss loss;
    size_t workspace = 0;          // vectors
    std::vector<size_t> gaps;      // vectors between buffers that nobody may touch; only where a sanitizer watches
    size_t zeros_at = 0;           // as many zeros as the widest row
    size_t mixed_at = 0;           // room for a gradient that comes in rows and in lanes
    bool draws = false;            // there is a dropout
    bool wide = false;             // training has channels in the lanes where there are images; see wide.hpp
    std::vector<Run> runs;         // what trains, in the order of the weights; all of them where nothing is frozen
    size_t trained = 0;            // D, the length of all runs
    std::vector<float> frozen;     // all weights (P,), of which those that train do not count; empty: all train

    bool all_train() const { return frozen.empty(); }

    const Map &input() const { return tensors[0].value; }
    const Tensor &logits() const { return tensors[stages.back().makes]; }
};

enum LayerCode : int32_t {
    CODE_CONVOLUTION = 1, CODE_MAX_POOL = 5, CODE_AVERAGE_POOL = 6, CODE_FLATTEN = 7, CODE_LINEAR = 8, CODE_GROUP_NORM = 15,
    CODE_LAYER_NORM = 16, CODE_DROPOUT = 17, CODE_SCALE = 18, CODE_ADD = 19, CODE_CONCAT = 20, CODE_GRU = 22, CODE_LSTM = 23,
    CODE_TRANSPOSE = 24
};  // those of activations are in curves.hpp
constexpr int LAYER_FIELDS = 12;  // code, how many tensors it reads, then up to ten numbers

// layers: (count, LAYER_FIELDS). reads: for each layer, in a row, the numbers of those it reads, -1 for the samples.
// constants: for each layer, in a row, its numbers that are not whole. shape: channels, height, width, and how many of
// them are axes of a sample. Returns false if the layers do not fit together; the Python layer has explained why before.
bool make_plan(const int32_t *layers, int count, const int32_t *reads, const float *constants, const int32_t shape[4],
               Plan &plan);

// Declares weights constant. trains: (P,), 0 or 1. values: (P,).
void freeze(Plan &plan, const uint8_t *trains, const float *values);

}  // namespace cbdsl
