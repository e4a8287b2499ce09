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

struct Sgd {
    float rate, momentum, decay, proximal;
};

// What one worker's steps are bent by, besides its samples: where it started, and a constant.
struct Bend {
    const float *start;       // (D,)
    const float *correction;  // (D,) or null
};

void add_bend(const Sgd &sgd, const Bend &bend, const float *weights, float *velocity, size_t parameters) {
    for (size_t i = 0; i < parameters; i++) velocity[i] += sgd.proximal * (weights[i] - bend.start[i]);
    if (!bend.correction) return;
    for (size_t i = 0; i < parameters; i++) velocity[i] += bend.correction[i];
}

void train_worker(Network &network, Workspace &space, float *weights, const Data &data, const int32_t *batches, size_t steps,
                  size_t room, const Sgd &sgd, const Bend &bend, uint64_t seed) {
    const size_t parameters = network.plan.parameters;
    float *velocity = space.gradient;
    const bool straight = sgd.proximal == 0.0f && !bend.correction;
    bool cleared = false;
    for (size_t step = 0; step < steps; step++) {
        const int32_t *indices = batches + step * room;
        const int count = real_count(indices, room);
        if (count == 0) continue;
        const Draw draw{network.plan.draws, mixed(seed + mixed(step)), 0};
        if (straight && !network.plan.wide && count <= LANES && sgd.momentum == 0.0f && sgd.decay == 0.0f) {
            batch_gradient(network, space, weights, data, indices, count, draw, Sink{weights, 1.0f, -sgd.rate});
            continue;
        }
        if (!cleared) std::fill_n(velocity, parameters, 0.0f), cleared = true;
        batch_gradient(network, space, weights, data, indices, count, draw, Sink{velocity, sgd.momentum, 1.0f});
        if (!straight) add_bend(sgd, bend, weights, velocity, parameters);
        for (size_t i = 0; i < parameters; i++) {
            velocity[i] += sgd.decay * weights[i];
            weights[i] -= sgd.rate * velocity[i];
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

CBDSL_EXPORT void cbdsl_destroy(void *handle) { delete static_cast<Network *>(handle); }

CBDSL_EXPORT int64_t cbdsl_parameters(const void *handle) {
    return int64_t(static_cast<const Network *>(handle)->plan.parameters);
}

// Bytes that a thread takes while it works.
CBDSL_EXPORT int64_t cbdsl_workspace(const void *handle) {
    const Plan &plan = static_cast<const Network *>(handle)->plan;
    return int64_t(plan.workspace * sizeof(lanes) + plan.parameters * sizeof(float));
}

// weights: (U, D). batches: (U, steps, room). seeds: (U,) or null. corrections: (U, D) or null. trained: (U, D), written
// whole; every worker's row is copied by the thread that trains it, when it is about to be used anyway.
CBDSL_EXPORT int cbdsl_train(void *handle, int64_t workers, const float *weights, const float *features,
                             const void *targets, const int32_t *batches, int64_t steps, int64_t room, float rate,
                             float momentum, float decay, float proximal, const uint64_t *seeds, const float *corrections,
                             float *trained, int32_t threads) {
    Network &network = *static_cast<Network *>(handle);
    const Data data = data_of(network, features, targets);
    const bool done = for_each_item(size_t(workers), threads, [&](int, size_t worker) {
        Borrowed space(network);
        const size_t size = network.plan.parameters;
        const Bend bend{weights + worker * size, corrections ? corrections + worker * size : nullptr};
        float *own = std::copy_n(bend.start, size, trained + worker * size) - size;
        train_worker(network, *space, own, data, batches + worker * size_t(steps * room), size_t(steps), size_t(room),
                     Sgd{rate, momentum, decay, proximal}, bend, seeds ? seeds[worker] : 0);
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
        const size_t at = worker * network.plan.parameters;
        const int count = real_count(own, size_t(samples));
        if (count) batch_gradient(network, *space, weights + at, data, own, count, Draw{}, Sink{gradients + at, 1.0f, 1.0f});
        else std::fill_n(gradients + at, network.plan.parameters, std::numeric_limits<float>::quiet_NaN());
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
        Tally tally;
        for (size_t start = 0; start < samples && !tally.given_up; start += CHUNK) {
            const size_t count = std::min(CHUNK, samples - start);
            double chunk_losses[CHUNK];
            uint8_t chunk_correct[CHUNK];
            score_collected(network, *space, weights + worker * network.plan.parameters, data, own + start, count,
                            chunk_losses, chunk_correct);
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
            for (size_t at = begin; at < end && !tally.given_up; at += CHUNK) {
                const size_t size = std::min(CHUNK, end - at), first = at / LANES;
                double own_losses[CHUNK];
                uint8_t own_correct[CHUNK];
                double *chunk_losses = parts > 1 ? &part_losses[worker * BLOCK + at] : own_losses;
                uint8_t *chunk_correct = parts > 1 ? &part_correct[worker * BLOCK + at] : own_correct;
                score_chunk(network, *space, weights + worker * plan.parameters, &prepared.groups[first],
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
        score_collected(network, *space, weights, data, indices + start, std::min(CHUNK, all - start), losses + start,
                        correct);
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
        forward(plan, *space, weights, input, 1);
        const lanes *made = (*space).at(plan.logits().value_at);
        for (int lane = 0; lane < group.count; lane++)
            for (int k = 0; k < plan.classes; k++) outputs[(start + lane) * plan.classes + k] = made[k][lane];
    });
    return done ? OK : OUT_OF_MEMORY;
}
