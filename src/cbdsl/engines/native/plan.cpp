#include "plan.hpp"

#include <algorithm>

namespace cbdsl {

namespace {

// In the gradient of a convolution's output, rows are rounded up to this many positions; see convolution.hpp.
constexpr int POSITIONS = 4;

Map plain(int channels, int height, int width) {
    Map map;
    map.channels = channels, map.height = height, map.width = width;
    map.row = width, map.plane = size_t(width) * height, map.size = map.plane * channels;
    return map;
}

Map padded(int channels, int height, int width, int above, int left, size_t row) {
    Map map = plain(channels, height, width);
    map.row = row;
    map.plane = map.row * (height + 2 * above);
    map.size = map.plane * channels;
    map.origin = above * map.row + left;
    return map;
}

size_t rounded_to_lanes(size_t count) { return (count + LANES - 1) / LANES * LANES; }

Activation activation_of(int32_t code) {
    switch (code) {
        case CODE_RELU: return Activation::relu;
        case CODE_TANH: return Activation::tanh;
        case CODE_SIGMOID: return Activation::sigmoid;
        default: return Activation::none;
    }
}

bool is_pool(int32_t code) { return code == CODE_MAX_POOL || code == CODE_AVERAGE_POOL; }

// Walks the layers and keeps the shape between them.
class Reader {
  public:
    Reader(const int32_t *layers, int count, const int32_t shape[3], Plan &plan)
        : layers_(layers), count_(count), channels_(shape[0]), height_(shape[1]), width_(shape[2]), plan_(plan) {}

    bool read() {
        if (channels_ < 1 || height_ < 1 || width_ < 1) return false;
        for (next_ = 0; next_ < count_;) {
            const int32_t *layer = layers_ + next_++ * LAYER_FIELDS;
            bool known = true;
            if (layer[0] == CODE_CONVOLUTION) known = convolution(layer);
            else if (layer[0] == CODE_LINEAR) known = dense(layer);
            else if (is_pool(layer[0])) known = pool(layer);
            else if (layer[0] == CODE_FLATTEN) channels_ *= height_ * width_, height_ = width_ = 1, flat_ = true;
            else if (activation_of(layer[0]) != Activation::none) standalone(layer);
            else known = false;
            if (!known) return false;
        }
        plan_.parameters = parameters_;
        plan_.classes = channels_ * height_ * width_;
        return !plan_.stages.empty() && parameters_ > 0;
    }

  private:
    int32_t peek(int ahead = 0) const { return next_ + ahead < count_ ? layers_[(next_ + ahead) * LAYER_FIELDS] : 0; }

    size_t take(size_t count) {
        const size_t at = parameters_;
        parameters_ += count;
        return at;
    }

    Activation take_activation() {
        const Activation found = activation_of(peek());
        if (found != Activation::none) next_++;
        return found;
    }

    bool is_pool2(int ahead) const {
        const int32_t *layer = layers_ + (next_ + ahead) * LAYER_FIELDS;
        return is_pool(peek(ahead)) && layer[1] == 2 && layer[2] == 2 && layer[3] == 2 && layer[4] == 2;
    }

    void add(Stage stage, int channels, int height, int width) {
        stage.channels = channels_ = channels, stage.height = height_ = height, stage.width = width_ = width;
        plan_.stages.push_back(stage);
    }

    bool convolution(const int32_t *layer) {
        const int outputs = layer[2], kernel_height = layer[3], kernel_width = layer[4], above = layer[5], left = layer[6];
        Stage stage;
        stage.kind = StageKind::convolution;
        stage.kernel_height = kernel_height, stage.kernel_width = kernel_width;
        stage.full_height = height_ + 2 * above - kernel_height + 1;
        stage.full_width = width_ + 2 * left - kernel_width + 1;
        if (flat_ || layer[1] != channels_ || outputs < 1 || kernel_height < 1 || kernel_width < 1 || above < 0 || left < 0) return false;
        if (stage.full_height < 1 || stage.full_width < 1) return false;
        stage.input = padded(channels_, height_, width_, above, left, width_ + 2 * left);
        const int rounded = (stage.full_width + POSITIONS - 1) / POSITIONS * POSITIONS;
        stage.input_gradient = padded(channels_, height_, width_, above, left, rounded + kernel_width - 1);
        stage.full = padded(outputs, stage.full_height, stage.full_width, 0, 0, rounded);
        stage.weight = take(size_t(outputs) * channels_ * kernel_height * kernel_width);
        if (layer[7]) stage.bias = take(outputs);
        stage.activation = take_activation();
        int height = stage.full_height, width = stage.full_width;
        if (height >= 2 && width >= 2 && is_pool2(0)) {
            stage.fused = peek() == CODE_MAX_POOL ? Fused::max2 : Fused::average2;
            next_++;
            height /= 2, width /= 2;
            // All activations here are monotone, so pooling by maximum may come before or after them.
            if (stage.fused == Fused::max2 && stage.activation == Activation::none) stage.activation = take_activation();
        }
        add(stage, outputs, height, width);
        return true;
    }

    bool dense(const int32_t *layer) {
        flat_ = true;
        if (layer[1] != channels_ * height_ * width_ || layer[2] < 1) return false;
        Stage stage;
        stage.kind = StageKind::dense;
        stage.input = stage.input_gradient = plain(layer[1], 1, 1);
        stage.weight = take(size_t(layer[1]) * layer[2]);
        if (layer[3]) stage.bias = take(layer[2]);
        stage.activation = take_activation();
        add(stage, layer[2], 1, 1);
        return true;
    }

    bool pool(const int32_t *layer) {
        if (flat_ || layer[1] < 1 || layer[2] < 1 || layer[3] < 1 || layer[4] < 1 || layer[1] > height_ || layer[2] > width_) return false;
        Stage stage;
        stage.kind = StageKind::pool;
        stage.pool_is_max = layer[0] == CODE_MAX_POOL;
        stage.kernel_height = layer[1], stage.kernel_width = layer[2];
        stage.stride_height = layer[3], stage.stride_width = layer[4];
        stage.input = stage.input_gradient = plain(channels_, height_, width_);
        add(stage, channels_, (height_ - layer[1]) / layer[3] + 1, (width_ - layer[2]) / layer[4] + 1);
        return true;
    }

    void standalone(const int32_t *layer) {
        Stage stage;
        stage.kind = StageKind::activation;
        stage.activation = activation_of(layer[0]);
        stage.input = stage.input_gradient = plain(channels_, height_, width_);
        add(stage, channels_, height_, width_);
    }

    const int32_t *layers_;
    int count_, channels_, height_, width_;
    Plan &plan_;
    int next_ = 0;
    bool flat_ = false;
    size_t parameters_ = 0;
};

// Gives every tensor its place in the workspace. The layout of a tensor is the choice of the stage that reads it.
void place(Plan &plan) {
    std::vector<Stage> &stages = plan.stages;
    size_t used = 0;
    const auto reserve = [&](size_t vectors) {
        const size_t at = used;
        used += vectors;
        if (WATCHED) plan.gaps.push_back(used++);
        return at;
    };
    plan.first_dense = 0;
    while (plan.first_dense < stages.size() && stages[plan.first_dense].kind != StageKind::dense) plan.first_dense++;
    size_t widest = 0;
    bool parameters_before = false;
    for (size_t i = 0; i < stages.size(); i++) {
        Stage &stage = stages[i];
        // Tensor i is read by stage i. From the first dense stage on, all lane groups are kept side by side.
        stage.input_step = i >= plan.first_dense || i == 0 ? stage.input.size : 0;
        stage.input_at = reserve(stage.input.size * (stage.input_step ? GROUPS : 1));
        stage.wants_input_gradient = parameters_before;
        stage.input_gradient_at = reserve(parameters_before ? stage.input_gradient.size : 0);
        parameters_before = parameters_before || stage.weight != NOWHERE;
        if (i < plan.first_dense) continue;
        stage.input_stride = rounded_to_lanes(stage.input.size);
        stage.input_rows_at = reserve(stage.input_stride);
        stage.input_gradient_rows_at = reserve(stage.input_stride);
        widest = std::max(widest, stage.input_stride);
    }
    for (size_t i = 0; i < stages.size(); i++) {
        Stage &stage = stages[i];
        stage.output = stage.output_gradient = plain(stage.channels, stage.height, stage.width);
        if (i + 1 < stages.size()) {
            const Stage &reader = stages[i + 1];
            // Other readers take a tensor without a border, flat or not.
            if (reader.kind == StageKind::convolution)
                stage.output = reader.input, stage.output_gradient = reader.input_gradient;
            stage.output_at = reader.input_at, stage.output_gradient_at = reader.input_gradient_at;
            stage.output_step = reader.input_step;
            stage.output_rows_at = reader.input_rows_at, stage.output_gradient_rows_at = reader.input_gradient_rows_at;
            stage.output_stride = reader.input_stride;
        } else {
            stage.output_step = stage.output.size;
            stage.output_at = reserve(stage.output.size * GROUPS);
            stage.output_gradient_at = reserve(stage.output.size);
            stage.output_stride = rounded_to_lanes(stage.output.size);
            stage.output_rows_at = reserve(stage.output_stride);
            stage.output_gradient_rows_at = reserve(stage.output_stride);
            widest = std::max(widest, stage.output_stride);
        }
        if (stage.kind == StageKind::convolution) stage.full_at = reserve(stage.full.size);
        if (stage.fused != Fused::none || stage.kind == StageKind::pool)
            stage.chosen_at = reserve(stage.fused == Fused::average2 ? stage.full.size : stage.output.count());
    }
    plan.input = stages[0].input;
    plan.zeros_at = reserve(widest / LANES);
    plan.workspace = used;
}

}  // namespace

bool make_plan(const int32_t *layers, int count, const int32_t shape[3], Plan &plan) {
    if (!Reader(layers, count, shape, plan).read()) return false;
    place(plan);
    return true;
}

}  // namespace cbdsl
