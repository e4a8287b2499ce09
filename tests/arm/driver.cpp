// The native engine as a process of its own, so that an emulator can run it: a network and requests come in on stdin,
// results go out on stdout. Numbers are little-endian. It checks nothing; emulated.py writes what it reads.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

extern "C" {
void *cbdsl_create(const int32_t *, int32_t, const int32_t *, const float *, const int32_t *, int32_t, float);
void cbdsl_destroy(void *);
int64_t cbdsl_parameters(const void *);
int cbdsl_train(void *, int64_t, const float *, const float *, const void *, const int32_t *, int64_t, int64_t, const float *,
                const float *, const uint64_t *, const float *, float *, int32_t);
int cbdsl_gradients(void *, int64_t, const float *, const float *, const void *, const int32_t *, int64_t, int32_t, float *,
                    int32_t);
int cbdsl_score(void *, int64_t, const float *, const float *, const void *, const int32_t *, int64_t, int32_t, const double *,
                double *, double *, int32_t);
int cbdsl_sample_losses(void *, const float *, const float *, const void *, const int32_t *, int64_t, double *, int32_t);
int cbdsl_outputs(void *, const float *, const float *, const int32_t *, int64_t, float *, int32_t);
int32_t cbdsl_lanes();
const char *cbdsl_instructions();
}

namespace {

void take(void *to, size_t bytes) {
    if (bytes && std::fread(to, 1, bytes, stdin) != bytes) std::exit(3);
}

void give(const void *from, size_t bytes) { std::fwrite(from, 1, bytes, stdout); }

// As many numbers as come next, aligned to one of them and to no more: a caller may hold them like that.
template <class T> struct Array {
    std::vector<T> room;
    explicit Array(bool filled = true, int64_t empty = 0) {
        int64_t count = empty;
        if (filled) take(&count, sizeof count);
        room.resize(size_t(count) + 1);
        if (filled) take(data(), size_t(count) * sizeof(T));
    }
    T *data() { return room.data() + 1; }
    T *or_null() { return size() ? data() : nullptr; }
    size_t size() const { return room.size() - 1; }
    void send() { give(data(), size() * sizeof(T)); }
};

struct Request {
    int64_t what, workers, steps, room, per_worker, threads;
    float sgd[6];
};

}  // namespace

int main() {
    Array<int32_t> layers, reads, shape;
    Array<float> constants;
    void *network = cbdsl_create(layers.data(), int32_t(layers.size() / 12), reads.data(), constants.data(), shape.data(), 0, 0.0f);
    if (!network) return 4;
    const int64_t parameters = cbdsl_parameters(network), lanes = cbdsl_lanes();
    char instructions[32] = {};
    std::strncpy(instructions, cbdsl_instructions(), sizeof instructions - 1);
    give(&parameters, sizeof parameters), give(&lanes, sizeof lanes), give(instructions, sizeof instructions);
    std::fflush(stdout);
    for (Request r; std::fread(&r, sizeof r, 1, stdin) == 1; std::fflush(stdout)) {
        Array<float> weights, features, corrections, rates;
        Array<int32_t> labels, indices;
        Array<uint64_t> seeds;
        Array<double> ceilings;
        const int64_t made = r.what < 2 ? r.workers * parameters : r.what == 4 ? int64_t(indices.size()) * r.room : 0;
        Array<float> models(false, made);
        Array<double> losses(false, r.what == 2 ? r.workers : r.what == 3 ? int64_t(indices.size()) : 0);
        Array<double> accuracies(false, r.what == 2 ? r.workers : 0);
        const int64_t each = int64_t(indices.size()) / (r.per_worker ? r.workers : 1);
        const int32_t threads = int32_t(r.threads), own = int32_t(r.per_worker);
        int failed = 0;
        if (r.what == 0)
            failed = cbdsl_train(network, r.workers, weights.data(), features.data(), labels.data(), indices.data(), r.steps, r.room,
                                 r.sgd, rates.or_null(), seeds.or_null(), corrections.or_null(), models.data(), threads);
        else if (r.what == 1)
            failed = cbdsl_gradients(network, r.workers, weights.data(), features.data(), labels.data(), indices.data(), each, own,
                                     models.data(), threads);
        else if (r.what == 2)
            failed = cbdsl_score(network, r.workers, weights.data(), features.data(), labels.data(), indices.data(), each, own,
                                 ceilings.or_null(), losses.data(), accuracies.data(), threads);
        else if (r.what == 4)
            failed = cbdsl_outputs(network, weights.data(), features.data(), indices.data(), each, models.data(), threads);
        else
            failed = cbdsl_sample_losses(network, weights.data(), features.data(), labels.data(), indices.data(), each, losses.data(),
                                         threads);
        if (failed) return 5;
        models.send(), losses.send(), accuracies.send();
    }
    cbdsl_destroy(network);
    return 0;
}
