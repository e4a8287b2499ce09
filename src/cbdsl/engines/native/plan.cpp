#include "plan.hpp"

#include <algorithm>

#include "recurrent.hpp"

namespace cbdsl {

namespace {

// In the gradient of a convolution's output, rows are rounded up to this many positions; see convolution.hpp.
constexpr int POSITIONS = 4;

Map padded(int channels, int height, int width, int above, int left, size_t row) {
    Map map = plain(channels, height, width);
    map.row = row;
    map.plane = map.row * (height + 2 * above);
    map.size = map.plane * channels;
    map.origin = above * map.row + left;
    return map;
}

bool is_pool(int32_t code) { return code == CODE_MAX_POOL || code == CODE_AVERAGE_POOL; }

// A layer as it was given, and what is known of its result.
struct Layer {
    const int32_t *sizes = nullptr;  // code, count of reads, numbers
    const float *constants = nullptr;
    std::vector<int> reads, readers;  // layers; -1: the samples
    int channels = 0, height = 0, width = 0;
    bool flat = false;
    bool done = false;  // a stage before it does its work, too
    int tensor = -1;    // of its result

    int code() const { return sizes[0]; }
    int operator[](int field) const { return sizes[1 + field]; }  // numbers are counted from 1
};

// Walks the layers and makes stages of them.
class Reader {
  public:
    Reader(const int32_t *layers, int count, const int32_t *reads, const float *constants, const int32_t shape[4], Plan &plan)
        : layers_(size_t(count) + 1), plan_(plan) {
        Layer &samples = layers_[0];
        samples.channels = shape[0], samples.height = shape[1], samples.width = shape[2], samples.flat = shape[3] == 1;
        samples.done = true;
        for (int i = 0; i < count; i++) {
            Layer &layer = layers_[i + 1];
            layer.sizes = layers + i * LAYER_FIELDS;
            for (int r = 0; r < layer.sizes[1]; r++) layer.reads.push_back(*reads++ + 1);
            layer.constants = constants;
            constants += constants_of(layer);
        }
    }

    bool read() {
        const Layer &samples = layers_[0];
        if (samples.channels < 1 || samples.height < 1 || samples.width < 1) return false;
        for (int i = 1; i < int(layers_.size()); i++)
            for (const int other : layers_[i].reads) {
                if (other < 0 || other >= i) return false;
                layers_[other].readers.push_back(i);
            }
        make_tensor(0);
        for (int i = 1; i < int(layers_.size()); i++)
            if (layers_[i].reads.empty() || !make(i)) return false;
        const Layer &last = layers_.back();
        plan_.parameters = parameters_;
        plan_.classes = last.channels * last.height * last.width;
        std::stable_partition(plan_.stages.begin(), plan_.stages.end(), [](const Stage &stage) { return !stage.flat; });
        for (plan_.images = 0; plan_.images < plan_.stages.size() && !plan_.stages[plan_.images].flat;) plan_.images++;
        return !plan_.stages.empty() && parameters_ > 0 && plan_.stages.back().makes == last.tensor;
    }

  private:
    static int constants_of(const Layer &layer) {
        switch (layer.sizes[0]) {
            case CODE_GROUP_NORM: case CODE_LAYER_NORM: case CODE_DROPOUT: return 1;
            case CODE_SCALE: return layer[1] + layer[2];
            default: return activation_of(layer.sizes[0]) == Activation::leaky_relu;
        }
    }

    const Layer &input(const Layer &layer) const { return layers_[layer.reads[0]]; }

    bool make(int i) {
        Layer &layer = layers_[i];
        const Layer &from = input(layer);
        if (!layer.done) {
            layer.channels = from.channels, layer.height = from.height, layer.width = from.width, layer.flat = from.flat;
            if (layer.code() == CODE_CONVOLUTION) return convolution(i);
            if (layer.code() == CODE_LINEAR) return dense(i);
            if (is_pool(layer.code())) return pool(i);
            if (layer.code() == CODE_FLATTEN) return flatten(i);
            if (layer.code() == CODE_GROUP_NORM || layer.code() == CODE_LAYER_NORM) return norm(i);
            if (layer.code() == CODE_ADD || layer.code() == CODE_CONCAT) return join(i);
            if (layer.code() == CODE_SCALE || layer.code() == CODE_DROPOUT) return constant(i);
            if (layer.code() == CODE_GRU || layer.code() == CODE_LSTM) return recurrent(i);
            if (layer.code() == CODE_TRANSPOSE) return transpose(i);
            return activation(i);
        }
        return true;
    }

    size_t take(size_t count) {
        const size_t at = parameters_;
        parameters_ += count;
        return at;
    }

    static Curve curve_of(const Layer &layer) {
        Curve curve;
        curve.kind = activation_of(layer.code());
        if (curve.kind == Activation::leaky_relu) curve.slope = layer.constants[0];
        return curve;
    }

    bool activation(int i) {
        Stage stage;
        stage.kind = StageKind::activation;
        stage.curve = curve_of(layers_[i]);
        if (stage.curve.kind == Activation::none) return false;
        finish(stage, i, i);
        return true;
    }

    // The layer behind this one, if it is the only one that reads it and reads nothing else; 0 if there is none.
    int follower(int i) const {
        const Layer &layer = layers_[i];
        return layer.readers.size() == 1 && layers_[layer.readers[0]].reads.size() == 1 ? layer.readers[0] : 0;
    }

    // Takes over the activation behind layer i, if it can be fused; the number of the layer that then ends the stage.
    int take_activation(Stage &stage, int i) {
        const int next = follower(i);
        if (!next) return i;
        const Curve curve = curve_of(layers_[next]);
        if (curve.kind == Activation::none || !is_fusable(curve.kind)) return i;
        stage.curve = curve;
        return inherit(i, next);
    }

    // Layer `next` is done by the stage of layer i and makes the same shape.
    int inherit(int i, int next) {
        Layer &layer = layers_[next];
        layer.channels = layers_[i].channels, layer.height = layers_[i].height, layer.width = layers_[i].width;
        layer.flat = layers_[i].flat, layer.done = true;
        return next;
    }

    // Gives the result of layer i a tensor, laid out as those want it who read it.
    int make_tensor(int i) {
        Layer &layer = layers_[i];
        Tensor tensor;
        int above = 0, left = 0;
        for (const int reader : layer.readers)
            if (layers_[reader].code() == CODE_CONVOLUTION)
                above = std::max(above, layers_[reader][5]), left = std::max(left, layers_[reader][6]);
        const size_t row = size_t(layer.width) + 2 * left;
        tensor.value = padded(layer.channels, layer.height, layer.width, above, left, row);
        // The gradient's rows are as long as every convolution that writes into them reaches.
        size_t reach = row;
        for (const int reader : layer.readers)
            if (layers_[reader].code() == CODE_CONVOLUTION) {
                const Layer &taker = layers_[reader];
                const size_t full = size_t((layer.width + 2 * taker[6] - taker[4]) / taker[9] + 1);
                const size_t rounded = taker[9] == 1 ? (full + POSITIONS - 1) / POSITIONS * POSITIONS : (full - 1) * taker[9] + 1;
                reach = std::max(reach, size_t(left - taker[6]) + rounded + taker[4] - 1);
            }
        tensor.gradient = padded(layer.channels, layer.height, layer.width, above, left, reach);
        layer.tensor = int(plan_.tensors.size());
        plan_.tensors.push_back(tensor);
        return layer.tensor;
    }

    // Ends a stage that begins with layer i and does the layers up to `last`.
    void finish(Stage &stage, int i, int last) {
        const Layer &layer = layers_[last];
        stage.number = i;
        stage.flat = input(layers_[i]).flat;
        stage.channels = layer.channels, stage.height = layer.height, stage.width = layer.width;
        for (const int other : layers_[i].reads) stage.reads.push_back(layers_[other].tensor);
        stage.makes = make_tensor(last);
        plan_.stages.push_back(stage);
    }

    bool convolution(int i) {
        Layer &layer = layers_[i];
        const Layer &from = input(layer);
        Stage stage;
        stage.kind = StageKind::convolution;
        stage.kernel_height = layer[3], stage.kernel_width = layer[4], stage.above = layer[5], stage.left = layer[6];
        stage.stride_height = layer[8], stage.stride_width = layer[9], stage.groups = layer[10];
        if (from.flat || layer[1] != from.channels || layer[2] < 1 || layer[3] < 1 || layer[4] < 1 || layer[5] < 0 || layer[6] < 0 ||
            layer[8] < 1 || layer[9] < 1 || layer[10] < 1 || layer[1] % layer[10] || layer[2] % layer[10])
            return false;
        const int height = from.height + 2 * stage.above - stage.kernel_height, width = from.width + 2 * stage.left - stage.kernel_width;
        if (height < 0 || width < 0) return false;
        stage.group_inputs = layer[1] / stage.groups, stage.group_outputs = layer[2] / stage.groups;
        stage.full_height = height / stage.stride_height + 1, stage.full_width = width / stage.stride_width + 1;
        const int rounded = (stage.full_width + POSITIONS - 1) / POSITIONS * POSITIONS;
        stage.full = padded(layer[2], stage.full_height, stage.full_width, 0, 0, rounded);
        stage.weight = take(size_t(layer[2]) * stage.group_inputs * stage.kernel_height * stage.kernel_width);
        if (layer[7]) stage.bias = take(layer[2]);
        layer.channels = layer[2], layer.height = stage.full_height, layer.width = stage.full_width;
        int last = take_activation(stage, i);
        const int next = follower(last);
        if (next && fits_pool2(layers_[next]) && stage.stride_height == 1 && stage.stride_width == 1 && layer.height >= 2 && layer.width >= 2) {
            stage.fused = layers_[next].code() == CODE_MAX_POOL ? Fused::max2 : Fused::average2;
            last = inherit(last, next);
            layers_[last].height /= 2, layers_[last].width /= 2;
            // These activations never fall, so pooling by maximum may come before or after them.
            if (stage.fused == Fused::max2 && stage.curve.kind == Activation::none) last = take_activation(stage, last);
        }
        finish(stage, i, last);
        return true;
    }

    static bool fits_pool2(const Layer &layer) {
        return is_pool(layer.code()) && layer[1] == 2 && layer[2] == 2 && layer[3] == 2 && layer[4] == 2 && !layer[5] && !layer[6];
    }

    bool dense(int i) {
        Layer &layer = layers_[i];
        if (layer[1] != layer.channels * layer.height * layer.width || layer[2] < 1) return false;
        Stage stage;
        stage.kind = StageKind::dense;
        stage.weight = take(size_t(layer[1]) * layer[2]);
        if (layer[3]) stage.bias = take(layer[2]);
        layer.channels = layer[2], layer.height = layer.width = 1, layer.flat = true;
        finish(stage, i, take_activation(stage, i));
        plan_.stages.back().flat = true;
        return true;
    }

    bool pool(int i) {
        Layer &layer = layers_[i];
        const int above = layer[5], left = layer[6];
        if (layer.flat || layer[1] < 1 || layer[2] < 1 || layer[3] < 1 || layer[4] < 1 || above < 0 || left < 0 ||
            2 * above > layer[1] || 2 * left > layer[2] || layer[1] > layer.height + 2 * above || layer[2] > layer.width + 2 * left)
            return false;
        Stage stage;
        stage.kind = StageKind::pool;
        stage.pool_is_max = layer.code() == CODE_MAX_POOL;
        stage.kernel_height = layer[1], stage.kernel_width = layer[2];
        stage.stride_height = layer[3], stage.stride_width = layer[4];
        stage.above = above, stage.left = left;
        layer.height = (layer.height + 2 * above - layer[1]) / layer[3] + 1;
        layer.width = (layer.width + 2 * left - layer[2]) / layer[4] + 1;
        finish(stage, i, i);
        return true;
    }

    // Rows of numbers are images without a border, looked at in another way.
    bool flatten(int i) {
        Layer &layer = layers_[i];
        layer.channels *= layer.height * layer.width, layer.height = layer.width = 1, layer.flat = true;
        const int tensor = input(layer).tensor;
        if (!plan_.wide && plan_.tensors[tensor].value.dense() && plan_.tensors[tensor].gradient.dense()) {
            layer.tensor = tensor;
            return true;
        }
        Stage stage;
        stage.kind = StageKind::flatten;
        finish(stage, i, i);
        return true;
    }

    bool norm(int i) {
        const Layer &layer = layers_[i];
        const size_t count = size_t(layer.channels) * layer.height * layer.width;
        Stage stage;
        stage.kind = StageKind::norm;
        stage.setting = layer.constants[0];
        stage.weight_per_place = layer.code() == CODE_LAYER_NORM;
        if (layer[1] < 1) return false;
        stage.together = stage.weight_per_place ? size_t(layer[1]) : count / layer[1];
        if (count % stage.together || stage.together % layer.width) return false;
        const size_t weights = stage.weight_per_place ? stage.together : size_t(layer.channels);
        if (layer[2]) stage.weight = take(weights);
        if (layer[2] && layer[3]) stage.bias = take(weights);
        finish(stage, i, take_activation(stage, i));
        return true;
    }

    bool join(int i) {
        Layer &layer = layers_[i];
        Stage stage;
        stage.kind = layer.code() == CODE_ADD ? StageKind::add : StageKind::concat;
        int channels = 0;
        for (const int other : layer.reads) {
            const Layer &one = layers_[other];
            if (one.height != layer.height || one.width != layer.width || one.flat != layer.flat) return false;
            if (stage.kind == StageKind::add && one.channels != layer.channels) return false;
            channels += one.channels;
        }
        if (stage.kind == StageKind::concat) layer.channels = channels;
        finish(stage, i, stage.kind == StageKind::add ? take_activation(stage, i) : i);
        return true;
    }

    bool constant(int i) {
        const Layer &layer = layers_[i];
        Stage stage;
        stage.kind = layer.code() == CODE_SCALE ? StageKind::scale : StageKind::dropout;
        if (stage.kind == StageKind::dropout) {
            stage.setting = layer.constants[0];
            plan_.draws = true;
        } else {
            for (const int count : {layer[1], layer[2]})
                if (count != 1 && count != layer.channels) return false;
            stage.constants = plan_.constants.size();
            stage.one_factor = layer[1] == 1, stage.one_offset = layer[2] == 1;
            plan_.constants.insert(plan_.constants.end(), layer.constants, layer.constants + layer[1] + layer[2]);
        }
        finish(stage, i, i);
        return true;
    }

    // A series whose channels are the steps of time.
    bool recurrent(int i) {
        Layer &layer = layers_[i];
        if (layer.flat || layer.height != 1 || layer[1] != layer.width || layer[2] < 1) return false;
        Stage stage;
        stage.kind = StageKind::recurrent;
        stage.is_lstm = layer.code() == CODE_LSTM, stage.hidden = layer[2], stage.last = layer[4];
        const size_t rows = size_t(stage.is_lstm ? 4 : 3) * stage.hidden;
        stage.weight = take(rows * layer[1]), stage.state_weight = take(rows * stage.hidden);
        if (layer[3]) stage.bias = take(2 * rows);
        if (stage.last) layer.channels = stage.hidden, layer.width = 1, layer.flat = true;
        else layer.width = stage.hidden;
        finish(stage, i, i);
        return true;
    }

    bool transpose(int i) {
        Layer &layer = layers_[i];
        if (layer.flat || layer.height != 1) return false;
        Stage stage;
        stage.kind = StageKind::transpose;
        std::swap(layer.channels, layer.width);
        finish(stage, i, i);
        return true;
    }

    std::vector<Layer> layers_;  // the samples first
    Plan &plan_;
    size_t parameters_ = 0;
};

// Who reads what in which order, and which gradients are wanted, forwards and backwards.
void connect(Plan &plan) {
    for (Stage &stage : plan.stages) {
        Tensor &made = plan.tensors[stage.makes];
        const Tensor &first = plan.tensors[stage.reads[0]];
        stage.in_rows = stage.kind == StageKind::dense || (stage.kind == StageKind::activation && first.made_in_rows);
        made.made_in_rows = stage.in_rows || (plan.wide && stage.kind == StageKind::flatten);
        made.learned = stage.weight != NOWHERE;
        for (const int read : stage.reads) {
            Tensor &tensor = plan.tensors[read];
            made.learned = made.learned || tensor.learned;
            stage.in_rows ? tensor.read_in_rows++ : tensor.read_in_lanes++;
        }
        stage.input = stage.map(first.value), stage.input_gradient = stage.map(first.gradient);
        if (stage.kind == StageKind::convolution) {
            const auto corner = [&](const Map &map) { return map.origin - stage.above * map.row - stage.left; };
            stage.corner = corner(stage.input), stage.gradient_corner = corner(stage.input_gradient);
        }
        stage.output = made.value, stage.output_gradient = made.gradient;
    }
    plan.tensors[plan.stages.back().makes].read_in_lanes++;  // by the loss
    std::vector<uint8_t> begun_in_lanes(plan.tensors.size()), begun_in_rows(plan.tensors.size());
    for (size_t i = plan.stages.size(); i-- > 0;) {
        Stage &stage = plan.stages[i];
        for (const int read : stage.reads) {
            uint8_t &begun = (stage.in_rows ? begun_in_rows : begun_in_lanes)[read];
            stage.adds.push_back(begun);
            begun = 1;
        }
    }
}

// Numbers in lanes that a stage keeps for the way back.
size_t kept_by(const Stage &stage) {
    switch (stage.kind) {
        case StageKind::convolution:
            return stage.fused == Fused::none ? 0 : stage.fused == Fused::average2 ? stage.full.size : stage.output.count();
        case StageKind::pool: return stage.pool_is_max ? stage.output.count() : 0;
        case StageKind::norm:  // mean and deviation of every group, sums over them, or the gradients of all places
            return 2 * (stage.output.count() / stage.together) + 2 * (stage.weight_per_place ? stage.together : size_t(stage.channels));
        case StageKind::dropout: return stage.output.count();
        case StageKind::recurrent: return Recurrence::kept(stage);
        default: return 0;
    }
}

// Whether most of a network's work keeps most lanes busy where these are channels: a rule, and the same for every width
// of a vector, so that a network always runs alike. Lanes that are samples are idle where a batch has fewer, at 10
// samples 6 of 16.
bool wants_wide(const Plan &plan) {
    const auto used = [](int channels) { return double(channels) / ((channels + 15) / 16 * 16); };
    double busy = 0.0, all = 0.0;
    for (const Stage &stage : plan.stages) {
        if (stage.flat) continue;
        if (stage.kind == StageKind::norm && stage.weight_per_place) return false;
        if (stage.kind == StageKind::recurrent || stage.kind == StageKind::transpose) return false;
        if (stage.kind != StageKind::convolution) continue;
        if (stage.groups > 1 && (stage.group_inputs > 1 || stage.group_outputs > 1)) return false;
        const int inputs = plan.tensors[stage.reads[0]].value.channels;
        const double work = double(stage.full_height) * stage.full_width * stage.kernel_height * stage.kernel_width * stage.group_inputs * stage.channels;
        const bool first = stage.reads[0] == 0;  // the samples need no gradient
        busy += (first ? 2 : 3) * work, all += 2 * work / used(stage.channels) + (first ? 0 : work / used(inputs));
    }
    return busy > 0.7 * all && all > 0.0;
}

// Room for one sample with channels in the lanes.
template <class Reserve> void place_wide(Plan &plan, const std::vector<uint8_t> &is_image, const Reserve &reserve) {
    const auto room = [&](size_t floats) { return reserve(floats / LANES); };
    for (size_t t = 0; t < plan.tensors.size(); t++) {
        Tensor &tensor = plan.tensors[t];
        if (!is_image[t] || tensor.made_in_rows) continue;
        const Map &map = tensor.value;
        const int above = int(map.origin / map.row), left = int(map.origin % map.row);
        tensor.wide_value = Pixels(map.channels, map.height, map.width, above, left);
        tensor.wide_gradient = Pixels(map.channels, map.height, map.width);
    }
    for (Stage &stage : plan.stages) {
        if (stage.flat) continue;
        Tensor &made = plan.tensors[stage.makes];
        const int depth = int(rounded_to_lanes(stage.channels));
        if (stage.kind == StageKind::norm) stage.wide_kept_at = room(6 * size_t(depth));
        if (stage.kind == StageKind::dropout || (stage.kind == StageKind::pool && stage.pool_is_max) || stage.fused == Fused::max2)
            stage.wide_kept_at = room(Pixels(stage.channels, stage.height, stage.width).size);
        if (stage.kind != StageKind::convolution) continue;
        const Tensor &read = plan.tensors[stage.reads[0]];
        // The way back reads a border of zeros around the gradient, as wide as the kernel.
        const Pixels bordered(stage.channels, stage.full_height, stage.full_width, stage.kernel_height, stage.kernel_width);
        if (stage.fused == Fused::none) {
            made.wide_gradient = bordered;
        } else {
            stage.wide_full = Pixels(stage.channels, stage.full_height, stage.full_width), stage.wide_full_gradient = bordered;
            stage.wide_full_at = room(stage.wide_full.size), stage.wide_full_gradient_at = room(bordered.size);
        }
        const size_t taps = size_t(stage.kernel_height) * stage.kernel_width;
        stage.packed = taps * stage.group_inputs * depth;
        stage.forward_at = room(stage.packed), stage.packed_at = room(stage.packed), stage.bias_at = room(depth);
        stage.backward_at = stage.groups > 1 ? stage.forward_at
                            : room(read.learned ? taps * stage.channels * read.wide_value.depth : 0);
    }
    for (size_t t = 0; t < plan.tensors.size(); t++) {
        Tensor &tensor = plan.tensors[t];
        if (!is_image[t] || tensor.made_in_rows) continue;
        tensor.wide_value_at = room(tensor.wide_value.size);
        tensor.wide_gradient_at = room(tensor.learned ? tensor.wide_gradient.size : 0);
    }
}

// Gives every tensor its place in the workspace.
void place(Plan &plan) {
    size_t used = 0;
    const auto reserve = [&](size_t vectors) {
        const size_t at = used;
        used += vectors;
        if (WATCHED) plan.gaps.push_back(used++);
        return at;
    };
    std::vector<uint8_t> side_by_side(plan.tensors.size()), is_image(plan.tensors.size());
    side_by_side[0] = side_by_side[plan.stages.back().makes] = 1;
    for (const Stage &stage : plan.stages)
        if (stage.flat) {
            for (const int read : stage.reads) side_by_side[read] = 1;
            side_by_side[stage.makes] = 1;
        }
    is_image[0] = 1;
    for (const Stage &stage : plan.stages) is_image[stage.makes] = !stage.flat;
    size_t widest = 0, mixed = 0;
    for (size_t t = 0; t < plan.tensors.size(); t++) {
        Tensor &tensor = plan.tensors[t];
        tensor.step = side_by_side[t] ? tensor.value.size : 0;
        tensor.value_at = reserve(tensor.value.size * (side_by_side[t] ? GROUPS : 1));
        const bool only_wide = plan.wide && !tensor.made_in_rows && is_image[t];
        tensor.gradient_at = reserve(tensor.learned && !only_wide ? tensor.gradient.size : 0);
        if (t == 0 || (!tensor.made_in_rows && !tensor.read_in_rows)) continue;  // samples are rows to begin with
        tensor.stride = rounded_to_lanes(tensor.value.count());
        tensor.rows_at = reserve(tensor.stride);
        tensor.gradient_rows_at = reserve(tensor.stride);
        widest = std::max(widest, tensor.stride);
        if (tensor.learned && tensor.read_in_lanes + tensor.read_in_rows > 1) mixed = std::max(mixed, tensor.stride);
    }
    for (Stage &stage : plan.stages) {
        if (stage.kind == StageKind::convolution && !plan.wide) stage.full_at = reserve(stage.full.size);
        stage.kept_at = reserve(kept_by(stage));
    }
    if (plan.wide) place_wide(plan, is_image, reserve);
    plan.zeros_at = reserve(widest / LANES);
    plan.mixed_at = reserve(mixed);
    plan.workspace = used;
}

}  // namespace

bool make_plan(const int32_t *layers, int count, const int32_t *reads, const float *constants, const int32_t shape[4],
               Plan &plan) {
    if (!Reader(layers, count, reads, constants, shape, plan).read()) return false;
    if (wants_wide(plan)) {
        plan = Plan{};
        plan.wide = true;
        Reader(layers, count, reads, constants, shape, plan).read();
    }
    connect(plan);
    place(plan);
    plan.trained = plan.parameters;
    plan.runs = {Run{0, 0, plan.parameters}};
    return true;
}

// A tensor before which nothing trains gets no gradient any more; its room for one stays unused.
void freeze(Plan &plan, const uint8_t *trains, const float *values) {
    plan.frozen.assign(values, values + plan.parameters);
    plan.runs.clear();
    plan.trained = 0;
    for (size_t i = 0; i < plan.parameters; i++) {
        if (!trains[i]) continue;
        if (i == 0 || !trains[i - 1]) plan.runs.push_back(Run{i, plan.trained, 0});
        plan.runs.back().count++, plan.trained++;
    }
    for (const Stage &stage : plan.stages) {
        const size_t rows = size_t(stage.is_lstm ? 4 : 3) * stage.hidden;
        bool learned = false;
        for (const size_t part : {stage.weight, stage.state_weight, stage.bias, stage.bias == NOWHERE ? NOWHERE : stage.bias + rows})
            learned = learned || (part != NOWHERE && trains[part]);
        for (const int read : stage.reads) learned = learned || plan.tensors[read].learned;
        plan.tensors[stage.makes].learned = learned;
    }
}

}  // namespace cbdsl
