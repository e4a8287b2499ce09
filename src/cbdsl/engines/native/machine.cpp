// What the library knows of itself and of the machine: vector width, instruction set, compiler, peak speed.
#include <chrono>

#include "lanes.hpp"
#include "threads.hpp"

#define CBDSL_EXPORT extern "C" __attribute__((visibility("default")))

using namespace cbdsl;

CBDSL_EXPORT int32_t cbdsl_lanes() { return LANES; }

CBDSL_EXPORT const char *cbdsl_compiler() {
#if defined(__clang__)
    return "clang " __clang_version__;
#else
    return "gcc " __VERSION__;
#endif
}

// A digest of the sources that this library was built from; setup.py gives it.
CBDSL_EXPORT const char *cbdsl_kernels() {
#if defined(CBDSL_KERNELS)
    return CBDSL_KERNELS;
#else
    return "unknown";
#endif
}

CBDSL_EXPORT const char *cbdsl_instructions() {
#if defined(__AVX512F__)
    return "AVX-512";
#elif defined(__AVX2__) && defined(__FMA__)
    return "AVX2 + FMA";
#elif defined(__AVX__)
    return "AVX";
#elif defined(__SSE2__)
    return "SSE2";
#elif defined(__ARM_NEON)
    return "NEON";
#else
    return "scalar";
#endif
}

// The best of the x86-64 levels that this processor runs: 4, 3 or 1; 0 on other machines.
CBDSL_EXPORT int32_t cbdsl_level() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return 4;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) return 3;
    return 1;
#else
    return 0;
#endif
}

// The level that this library was compiled for: below it, the processor would stop at the first kernel.
CBDSL_EXPORT int32_t cbdsl_needed_level() {
#if defined(__AVX512F__)
    return 4;
#elif defined(__AVX2__)
    return 3;
#else
    return 0;
#endif
}

// Multiply-adds per second that `threads` threads reach with everything in registers: the peak that kernels
// are held against. Chains are independent and long enough to hide the latency of an addition.
CBDSL_EXPORT double cbdsl_peak(int32_t threads, double seconds) {
    constexpr int CHAINS = MANY_REGISTERS ? 20 : 12, ROUNDS = 20000;
    const auto now = [] { return std::chrono::steady_clock::now(); };
    std::atomic<int64_t> rounds{0};
    std::atomic<float> keep{0.0f};
    const auto begin = now();
    for_each_item(size_t(std::max(threads, 1)), threads, [&](int, size_t) {
        lanes chain[CHAINS];
        for (int c = 0; c < CHAINS; c++) chain[c] = splat(float(c));
        lanes factor = splat(0.999f), term = splat(0.001f);
        __asm__("" : "+m"(factor), "+m"(term));  // unknown to the compiler
        while (std::chrono::duration<double>(now() - begin).count() < seconds) {
            for (int r = 0; r < ROUNDS; r++)
#pragma GCC unroll 20
                for (int c = 0; c < CHAINS; c++) chain[c] = chain[c] * factor + term;
            rounds += ROUNDS;
        }
        lanes total{};
        for (int c = 0; c < CHAINS; c++) total += chain[c];
        keep = sum(total);
    });
    const double spent = std::chrono::duration<double>(now() - begin).count();
    return double(rounds) * CHAINS * LANES / spent;
}
