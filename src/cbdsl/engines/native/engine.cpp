// The plain C interface of the engine: train, score and differentiate a stack of models, workers over threads.
//
// Every worker is computed by itself, in an order that depends on nothing but its own samples, so neither
// the number of threads nor the company a worker keeps can change a bit of its result. Arguments are
// checked by the Python layer; here they are taken as they come.

#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "network.hpp"
#include "threads.hpp"

#define CBDSL_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace cbdsl;

enum Status { OK = 0, OUT_OF_MEMORY = 1 };

constexpr size_t CHUNK = size_t(GROUPS) * LANES;  // samples that one pass scores
constexpr size_t BLOCK = 1024;                    // samples brought into lanes once, for all workers

// A plan and the workspaces of past calls. Slots are taken and given back without a lock: a process that
// forks in the middle of a call finds nothing locked.
struct Network {
    static constexpr int SLOTS = 256;
    Plan plan;
    std::unique_ptr<float, void (*)(void *)> zeros{nullptr, std::free};  // as many as a sample or its targets have numbers
    std::atomic<Workspace *> spare[SLOTS]{};

    ~Network() {
        for (auto &slot : spare) delete slot.exchange(nullptr);
    }
};

class Borrowed {
  public:
    explicit Borrowed(Network &network) : network_(network) {
        for (auto &slot : network.spare)
            if ((space_ = slot.exchange(nullptr))) return;
        space_ = new Workspace(network.plan);
    }
    ~Borrowed() {
        for (auto &slot : network_.spare) {
            Workspace *expected = nullptr;
            if (slot.compare_exchange_strong(expected, space_)) return;
        }
        delete space_;
    }
    Borrowed(const Borrowed &) = delete;
    Workspace &operator*() { return *space_; }

  private:
    Network &network_;
    Workspace *space_ = nullptr;
};

// The samples of a call: targets are labels (N,) for cross-entropy, otherwise numbers (N, outputs); null where nothing is
// compared with them.
Data data_of(const Network &network, const float *features, const void *targets) {
    const Plan &plan = network.plan;
    const bool classes = plan.loss.kind == LossKind::cross_entropy;
    return Data{features, classes ? static_cast<const int32_t *>(targets) : nullptr,
                classes ? nullptr : static_cast<const float *>(targets), network.zeros.get(), plan.input().count(),
                size_t(plan.classes)};
}

// All weights of a model of which those that train are given, (D,) -> (P,).
const float *whole_model(const Plan &plan, Workspace &space, const float *weights) {
    if (plan.all_train()) return weights;
    for (const Run &run : plan.runs) std::copy_n(weights + run.from, run.count, space.weights + run.at);
    return space.weights;
}

// What trains of all weights, or of their gradient, (P,) -> (D,).
void take_trained(const Plan &plan, const float *whole, float *trained) {
    for (const Run &run : plan.runs) std::copy_n(whole + run.at, run.count, trained + run.from);
}

int real_count(const int32_t *indices, size_t room) {
    size_t count = 0;
    while (count < room && indices[count] >= 0) count++;
    return int(count);
}

// The gradient of the mean loss over `count` samples: the first lane group meets `keep`, the others add.
void batch_gradient(Network &network, Workspace &space, const float *weights, const Data &data, const int32_t *indices,
                    int count, Draw draw, Sink sink) {
    const Plan &plan = network.plan;
    const int together = plan.wide ? 1 : LANES;
    WidePass wide(plan, space, draw);
    const Sink whole_batch = sink;
    if (plan.wide) wide.begin(weights);
    for (int start = 0; start < count; start += together) {
        const Group group = collect(data, indices + start, std::min(together, count - start));
        draw.first = start;
        Pass(plan, space, weights, group, draw).run(1.0f / float(count), sink);
        sink.keep = 1.0f;
    }
    if (plan.wide) wide.end(whole_batch);
}

// As engine.py describes it.
struct Sgd {
    float rate, momentum, decay, proximal, clip;
    bool adam, decoupled;

    explicit Sgd(const float numbers[6])
        : rate(numbers[0]), momentum(numbers[1]), decay(numbers[2]), proximal(numbers[3]), clip(numbers[4]),
          adam(numbers[5] > 0.0f), decoupled(numbers[5] > 1.0f) {}
};

// What one worker's steps are bent by, besides its samples: where it started, and a constant.
struct Bend {
    const float *start;       // (D,)
    const float *correction;  // (D,) or null
};

// weights, velocity: of one run.
void add_bend(const Sgd &sgd, const Bend &bend, const Run &run, const float *weights, float *velocity) {
    for (size_t i = 0; i < run.count; i++) velocity[i] += sgd.proximal * (weights[i] - bend.start[run.from + i]);
    if (!bend.correction) return;
    for (size_t i = 0; i < run.count; i++) velocity[i] += bend.correction[run.from + i];
}

// Shortens the gradient of what trains, if its norm is larger. A NaN among its numbers makes all of them NaN.
void clip_gradient(const Plan &plan, float clip, float *gradient) {
    double square = 0.0;
    for (const Run &run : plan.runs)
        for (size_t start = 0; start < run.count; start += BLOCK) {
            const float *g = gradient + run.at + start;
            const size_t count = std::min(BLOCK, run.count - start);
            lanes total{};
            size_t i = 0;
            for (; i + LANES <= count; i += LANES) total += *(const loose *)(g + i) * *(const loose *)(g + i);
            square += double(sum(total));
            for (; i < count; i++) square += double(g[i]) * double(g[i]);
        }
    const float factor = float(double(clip) / (std::sqrt(square) + 1e-6));
    if (factor >= 1.0f) return;
    for (const Run &run : plan.runs)
        for (size_t i = 0; i < run.count; i++) gradient[run.at + i] *= factor;
}

// A step of Adam on one run. taken: how many steps there were, this one included.
void adam_step(const Sgd &sgd, float rate, int taken, size_t count, const float *__restrict gradient, float *__restrict weights,
               float *__restrict first, float *__restrict second) {
    constexpr float KEEP_FIRST = 0.9f, KEEP_SECOND = 0.999f, TAKE_FIRST = float(1 - 0.9), TAKE_SECOND = float(1 - 0.999);
    const float length = float(double(rate) / (1 - std::pow(0.9, taken)));
    const float root = float(1 / std::sqrt(1 - std::pow(0.999, taken)));
    const float decay = sgd.decoupled ? 0.0f : sgd.decay, shrink = sgd.decoupled ? rate * sgd.decay : 0.0f;
    for (size_t i = 0; i < count; i++) {
        const float g = gradient[i] + decay * weights[i];
        first[i] = KEEP_FIRST * first[i] + TAKE_FIRST * g;
        second[i] = KEEP_SECOND * second[i] + TAKE_SECOND * g * g;
        weights[i] = (weights[i] - shrink * weights[i]) - length * first[i] / (__builtin_sqrtf(second[i]) * root + 1e-8f);
    }
}

// Training that needs the gradient of a batch by itself: Adam, or SGD whose gradients are clipped. weights: (P,). rates:
// (steps,) or null.
void train_in_two(Network &network, Workspace &space, float *weights, const Data &data, const int32_t *batches, size_t steps,
                  size_t room, const Sgd &sgd, const float *rates, const Bend &bend, uint64_t seed) {
    const Plan &plan = network.plan;
    float *gradient = space.gradient, *first = space.moments(plan), *second = first + plan.parameters;
    int taken = 0;
    for (size_t step = 0; step < steps; step++) {
        const int32_t *indices = batches + step * room;
        const int count = real_count(indices, room);
        if (count == 0) continue;
        std::fill_n(gradient, plan.parameters, 0.0f);
        const Draw draw{plan.draws, mixed(seed + mixed(step)), 0};
        batch_gradient(network, space, weights, data, indices, count, draw, Sink{gradient, 1.0f, 1.0f});
        if (sgd.clip > 0.0f) clip_gradient(plan, sgd.clip, gradient);
        const float rate = rates ? rates[step] : sgd.rate;
        taken++;
        for (const Run &run : plan.runs) {
            float *own = weights + run.at, *g = gradient + run.at, *v = first + run.at;
            if (sgd.proximal != 0.0f || bend.correction) add_bend(sgd, bend, run, own, g);
            if (sgd.adam) {
                adam_step(sgd, rate, taken, run.count, g, own, v, second + run.at);
                continue;
            }
            for (size_t i = 0; i < run.count; i++) {
                v[i] = sgd.momentum * v[i] + (g[i] + sgd.decay * own[i]);
                own[i] -= rate * v[i];
            }
        }
    }
}

// weights: (P,). rates: (steps,) or null.
void train_worker(Network &network, Workspace &space, float *weights, const Data &data, const int32_t *batches, size_t steps,
                  size_t room, const Sgd &sgd, const float *rates, const Bend &bend, uint64_t seed) {
    if (sgd.adam || sgd.clip > 0.0f) return train_in_two(network, space, weights, data, batches, steps, room, sgd, rates, bend, seed);
    const size_t parameters = network.plan.parameters;
    float *velocity = space.gradient;
    const bool bent = sgd.proximal != 0.0f || bend.correction;
    const bool straight = !bent && network.plan.all_train() && !network.plan.wide && sgd.momentum == 0.0f && sgd.decay == 0.0f;
    bool cleared = false;
    for (size_t step = 0; step < steps; step++) {
        const int32_t *indices = batches + step * room;
        const int count = real_count(indices, room);
        if (count == 0) continue;
        const float rate = rates ? rates[step] : sgd.rate;
        const Draw draw{network.plan.draws, mixed(seed + mixed(step)), 0};
        if (straight && count <= LANES) {
            batch_gradient(network, space, weights, data, indices, count, draw, Sink{weights, 1.0f, -rate});
            continue;
        }
        if (!cleared) std::fill_n(velocity, parameters, 0.0f), cleared = true;
        batch_gradient(network, space, weights, data, indices, count, draw, Sink{velocity, sgd.momentum, 1.0f});
        for (const Run &run : network.plan.runs) {
            float *own = weights + run.at, *v = velocity + run.at;
            if (bent) add_bend(sgd, bend, run, own, v);
            for (size_t i = 0; i < run.count; i++) {
                v[i] += sgd.decay * own[i];
                own[i] -= rate * v[i];
            }
        }
    }
}

// Losses and answers of up to CHUNK samples. input: their lane groups, brought in before.
void score_chunk(const Network &network, Workspace &space, const float *weights, const Group *groups, int count,
                 const lanes *input, double *losses, uint8_t *correct) {
    const Plan &plan = network.plan;
    const Tensor &logits = plan.logits();
    forward(plan, space, weights, input, count);
    for (int g = 0; g < count; g++)
        judge(plan, space.at(logits.value_at) + g * logits.step, groups[g], losses + g * LANES, correct + g * LANES);
}

// Losses and answers of up to CHUNK samples that nobody else scores: they are brought into lanes here.
void score_collected(const Network &network, Workspace &space, const float *weights, const Data &data,
                     const int32_t *indices, size_t count, double *losses, uint8_t *correct) {
    const Plan &plan = network.plan;
    lanes *input = space.at(plan.tensors[0].value_at);
    Group groups[GROUPS];
    int used = 0;
    for (size_t at = 0; at < count; at += LANES, used++) {
        groups[used] = collect(data, indices + at, int(std::min<size_t>(LANES, count - at)));
        load(plan.input(), groups[used], input + used * plan.input().size);
    }
    score_chunk(network, space, weights, groups, used, input, losses, correct);
}

// Running result of one worker. Samples are always added in their order, one by one, in double.
struct Tally {
    double sum = 0.0;
    int64_t correct = 0;
    bool given_up = false;

    // Losses are not negative: once sum / samples exceeds the ceiling, the final mean does too. NaN exceeds nothing.
    void add(const double *losses, const uint8_t *right, size_t count, double samples, const double *ceiling) {
        for (size_t i = 0; i < count; i++) sum += losses[i], correct += right[i];
        if (ceiling && sum / samples > *ceiling) given_up = true;
    }
    double mean(double samples) const {
        return given_up ? std::numeric_limits<double>::infinity() : sum / samples;  // NaN without samples
    }
};

// A part of the scoring set in lanes, read by all workers.
struct Prepared {
    std::vector<Group> groups;
    std::unique_ptr<lanes, void (*)(void *)> inputs{nullptr, std::free};
};

}  // namespace

CBDSL_EXPORT void *cbdsl_create(const int32_t *layers, int32_t count, const int32_t *reads, const float *constants,
                                const int32_t *shape, int32_t loss, float setting) {
    try {
        auto network = std::make_unique<Network>();
        if (!make_plan(layers, count, reads, constants, shape, network->plan)) return nullptr;
        network->plan.loss = Loss{LossKind(loss), setting};
        const size_t most = std::max(network->plan.input().count(), size_t(network->plan.classes));
        network->zeros.reset(static_cast<float *>(std::calloc(most, sizeof(float))));
        if (!network->zeros) return nullptr;
        return network.release();
    } catch (const std::exception &) {
        return nullptr;
    }
}

// Declares weights constant, before anything else is done with the network. trains: (P,), 0 or 1. values: (P,). From then
// on every model and gradient is given as the D weights that train.
CBDSL_EXPORT void cbdsl_freeze(void *handle, const uint8_t *trains, const float *values) {
    freeze(static_cast<Network *>(handle)->plan, trains, values);
}

CBDSL_EXPORT void cbdsl_destroy(void *handle) { delete static_cast<Network *>(handle); }

CBDSL_EXPORT int64_t cbdsl_parameters(const void *handle) {
    return int64_t(static_cast<const Network *>(handle)->plan.parameters);
}

// Bytes that a thread takes while it works.
CBDSL_EXPORT int64_t cbdsl_workspace(const void *handle) {
    const Plan &plan = static_cast<const Network *>(handle)->plan;
    return int64_t(plan.workspace * sizeof(lanes) + (plan.parameters + plan.frozen.size()) * sizeof(float));
}

// Everywhere D weights are those that train. weights: (U, D). batches: (U, steps, room). sgd: learning rate, momentum,
// weight decay, proximal, clip, and 0, 1 or 2 for SGD, Adam or AdamW. rates: (U, steps) or null. seeds: (U,) or null. corrections: (U, D) or null. trained: (U, D), written
// whole; every worker's row is copied by the thread that trains it, when it is about to be used anyway.
CBDSL_EXPORT int cbdsl_train(void *handle, int64_t workers, const float *weights, const float *features,
                             const void *targets, const int32_t *batches, int64_t steps, int64_t room, const float *sgd,
                             const float *rates, const uint64_t *seeds, const float *corrections, float *trained,
                             int32_t threads) {
    Network &network = *static_cast<Network *>(handle);
    const Data data = data_of(network, features, targets);
    const bool done = for_each_item(size_t(workers), threads, [&](int, size_t worker) {
        Borrowed space(network);
        const Plan &plan = network.plan;
        const size_t size = plan.trained;
        const Bend bend{weights + worker * size, corrections ? corrections + worker * size : nullptr};
        float *own = plan.all_train() ? std::copy_n(bend.start, size, trained + worker * size) - size : (*space).weights;
        if (!plan.all_train()) whole_model(plan, *space, bend.start);
        train_worker(network, *space, own, data, batches + worker * size_t(steps * room), size_t(steps), size_t(room),
                     Sgd(sgd), rates ? rates + worker * size_t(steps) : nullptr, bend, seeds ? seeds[worker] : 0);
        if (!plan.all_train()) take_trained(plan, own, trained + worker * size);
    });
    return done ? OK : OUT_OF_MEMORY;
}

// indices: (samples,) for all, or (U, samples) if per_worker. gradients: (U, D), zeros before the call.
CBDSL_EXPORT int cbdsl_gradients(void *handle, int64_t workers, const float *weights, const float *features,
                                 const void *targets, const int32_t *indices, int64_t samples, int32_t per_worker,
                                 float *gradients, int32_t threads) {
    Network &network = *static_cast<Network *>(handle);
    const Data data = data_of(network, features, targets);
    const bool done = for_each_item(size_t(workers), threads, [&](int, size_t worker) {
        Borrowed space(network);
        const int32_t *own = indices + (per_worker ? worker * size_t(samples) : 0);
        const Plan &plan = network.plan;
        const size_t at = worker * plan.trained;
        const int count = real_count(own, size_t(samples));
        if (!count) {
            std::fill_n(gradients + at, plan.trained, std::numeric_limits<float>::quiet_NaN());
            return;
        }
        float *target = plan.all_train() ? gradients + at : (*space).gradient;
        if (!plan.all_train()) std::fill_n(target, plan.parameters, 0.0f);
        batch_gradient(network, *space, whole_model(plan, *space, weights + at), data, own, count, Draw{}, Sink{target, 1.0f, 1.0f});
        if (!plan.all_train()) take_trained(plan, target, gradients + at);
    });
    return done ? OK : OUT_OF_MEMORY;
}

namespace {

// Every worker has samples of its own: each brings its chunks into lanes by itself.
bool score_own(Network &network, size_t workers, const float *weights, const Data &data, const int32_t *indices, size_t room,
               const double *ceilings, double *losses, double *accuracies, int threads) {
    return for_each_item(workers, threads, [&](int, size_t worker) {
        Borrowed space(network);
        const int32_t *own = indices + worker * room;
        const size_t samples = size_t(real_count(own, room));
        const float *model = whole_model(network.plan, *space, weights + worker * network.plan.trained);
        Tally tally;
        for (size_t start = 0; start < samples && !tally.given_up; start += CHUNK) {
            const size_t count = std::min(CHUNK, samples - start);
            double chunk_losses[CHUNK];
            uint8_t chunk_correct[CHUNK];
            score_collected(network, *space, model, data, own + start, count, chunk_losses, chunk_correct);
            tally.add(chunk_losses, chunk_correct, count, double(samples), ceilings ? ceilings + worker : nullptr);
        }
        losses[worker] = tally.mean(double(samples));
        accuracies[worker] = double(tally.correct) / double(samples);
    });
}

// All workers score the same samples, block by block: each block is brought into lanes once. Few workers are
// not enough to keep the threads busy, so a work item is one worker's part of the block; parts are added in order.
bool score_shared(Network &network, size_t workers, const float *weights, const Data &data, const int32_t *indices,
                  size_t samples, const double *ceilings, double *losses, double *accuracies, int threads) {
    const Plan &plan = network.plan;
    const size_t block_groups = BLOCK / LANES;
    const size_t parts = workers < 4 * size_t(threads) ? BLOCK / CHUNK : 1, part = BLOCK / parts;
    Prepared prepared;
    prepared.groups.resize(block_groups);
    prepared.inputs.reset(static_cast<lanes *>(std::aligned_alloc(64, (block_groups * plan.input().size * sizeof(lanes) + 63) / 64 * 64)));
    if (!prepared.inputs) return false;
    lanes *inputs = prepared.inputs.get();
    std::memset(static_cast<void *>(inputs), 0, block_groups * plan.input().size * sizeof(lanes));
    std::vector<Tally> tallies(workers);
    std::vector<double> part_losses(parts > 1 ? workers * BLOCK : 0);
    std::vector<uint8_t> part_correct(part_losses.size());
    for (size_t start = 0; start < samples; start += BLOCK) {
        const size_t count = std::min(BLOCK, samples - start), groups = (count + LANES - 1) / LANES;
        bool done = for_each_item(groups, count * plan.input().size < 65536 ? 1 : threads, [&](int, size_t g) {
            const size_t at = g * LANES;
            prepared.groups[g] = collect(data, indices + start + at, int(std::min<size_t>(LANES, count - at)));
            load(plan.input(), prepared.groups[g], inputs + g * plan.input().size);
        });
        done = done && for_each_item(workers * parts, threads, [&](int, size_t item) {
            const size_t worker = item / parts;
            Tally &tally = tallies[worker];
            if (tally.given_up) return;
            Borrowed space(network);
            const size_t begin = item % parts * part, end = std::min(count, begin + part);
            const float *model = whole_model(plan, *space, weights + worker * plan.trained);
            for (size_t at = begin; at < end && !tally.given_up; at += CHUNK) {
                const size_t size = std::min(CHUNK, end - at), first = at / LANES;
                double own_losses[CHUNK];
                uint8_t own_correct[CHUNK];
                double *chunk_losses = parts > 1 ? &part_losses[worker * BLOCK + at] : own_losses;
                uint8_t *chunk_correct = parts > 1 ? &part_correct[worker * BLOCK + at] : own_correct;
                score_chunk(network, *space, model, &prepared.groups[first],
                            int((size + LANES - 1) / LANES), inputs + first * plan.input().size, chunk_losses, chunk_correct);
                if (parts == 1)
                    tally.add(chunk_losses, chunk_correct, size, double(samples), ceilings ? ceilings + worker : nullptr);
            }
        });
        if (!done) return false;
        for (size_t worker = 0; parts > 1 && worker < workers; worker++)
            for (size_t at = 0; at < count && !tallies[worker].given_up; at += CHUNK)
                tallies[worker].add(&part_losses[worker * BLOCK + at], &part_correct[worker * BLOCK + at],
                                    std::min(CHUNK, count - at), double(samples), ceilings ? ceilings + worker : nullptr);
    }
    for (size_t worker = 0; worker < workers; worker++) {
        losses[worker] = tallies[worker].mean(double(samples));
        accuracies[worker] = double(tallies[worker].correct) / double(samples);
    }
    return true;
}

}  // namespace

// indices as in cbdsl_gradients. ceilings: (U,) or null. losses, accuracies: (U,).
CBDSL_EXPORT int cbdsl_score(void *handle, int64_t workers, const float *weights, const float *features,
                             const void *targets, const int32_t *indices, int64_t samples, int32_t per_worker,
                             const double *ceilings, double *losses, double *accuracies, int32_t threads) {
    Network &network = *static_cast<Network *>(handle);
    const Data data = data_of(network, features, targets);
    try {
        const auto score = per_worker ? score_own : score_shared;
        return score(network, size_t(workers), weights, data, indices, size_t(samples), ceilings, losses, accuracies,
                     std::max(threads, 1)) ? OK : OUT_OF_MEMORY;
    } catch (const std::exception &) {
        return OUT_OF_MEMORY;
    }
}

// weights: (D,), one model. indices: (samples,). losses: (samples,), the terms that cbdsl_score adds up.
CBDSL_EXPORT int cbdsl_sample_losses(void *handle, const float *weights, const float *features, const void *targets,
                                     const int32_t *indices, int64_t samples, double *losses, int32_t threads) {
    Network &network = *static_cast<Network *>(handle);
    const Data data = data_of(network, features, targets);
    const size_t all = size_t(samples);
    const bool done = for_each_item((all + CHUNK - 1) / CHUNK, threads, [&](int, size_t item) {
        Borrowed space(network);
        const size_t start = item * CHUNK;
        uint8_t correct[CHUNK];
        score_collected(network, *space, whole_model(network.plan, *space, weights), data, indices + start,
                        std::min(CHUNK, all - start), losses + start, correct);
    });
    return done ? OK : OUT_OF_MEMORY;
}

// weights: (D,), one model. indices: (samples,). outputs: (samples, outputs), what the last layer makes.
CBDSL_EXPORT int cbdsl_outputs(void *handle, const float *weights, const float *features, const int32_t *indices,
                               int64_t samples, float *outputs, int32_t threads) {
    Network &network = *static_cast<Network *>(handle);
    const Plan &plan = network.plan;
    const Data data = data_of(network, features, nullptr);
    const bool done = for_each_item((size_t(samples) + LANES - 1) / LANES, threads, [&](int, size_t item) {
        Borrowed space(network);
        const size_t start = item * LANES;
        const Group group = collect(data, indices + start, int(std::min<size_t>(LANES, size_t(samples) - start)));
        lanes *input = (*space).at(plan.tensors[0].value_at);
        load(plan.input(), group, input);
        forward(plan, *space, whole_model(plan, *space, weights), input, 1);
        const lanes *made = (*space).at(plan.logits().value_at);
        for (int lane = 0; lane < group.count; lane++)
            for (int k = 0; k < plan.classes; k++) outputs[(start + lane) * plan.classes + k] = made[k][lane];
    });
    return done ? OK : OUT_OF_MEMORY;
}
