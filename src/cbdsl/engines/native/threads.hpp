// Threads that live for one call: nothing is left behind that a fork could freeze or a caller must shut down.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace cbdsl {

// Numbers too small for a normal float are treated as zero while kernels run: on most processors each of
// them costs a hundred cycles, and a converged model is full of them. The caller's mode is put back.
class FlushTinyNumbers {
  public:
#if defined(__SSE2__)
    FlushTinyNumbers() : before_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(before_ | 0x8040u); }
    ~FlushTinyNumbers() { __builtin_ia32_ldmxcsr(before_); }

  private:
    unsigned before_;
#elif defined(__aarch64__)
    FlushTinyNumbers() {
        __asm__ volatile("mrs %0, fpcr" : "=r"(before_));
        __asm__ volatile("msr fpcr, %0" : : "r"(before_ | 1u << 24) : "memory");
    }
    ~FlushTinyNumbers() { __asm__ volatile("msr fpcr, %0" : : "r"(before_) : "memory"); }

  private:
    uint64_t before_;
#elif defined(__arm__) && defined(__ARM_FP)
    // NEON's vectors always do so; this is for the scalars between them.
    FlushTinyNumbers() {
        __asm__ volatile("vmrs %0, fpscr" : "=r"(before_));
        __asm__ volatile("vmsr fpscr, %0" : : "r"(before_ | 1u << 24) : "memory");
    }
    ~FlushTinyNumbers() { __asm__ volatile("vmsr fpscr, %0" : : "r"(before_) : "memory"); }

  private:
    unsigned before_;
#endif
};

// Calls body(thread, item) for every item, each by whichever thread is free; false if one of them threw.
template <class Body> bool for_each_item(size_t items, int threads, const Body &body) {
    std::atomic<size_t> next{0};
    std::atomic<bool> failed{false};
    const auto work = [&](int thread) {
        const FlushTinyNumbers mode;
        try {
            for (size_t item; !failed && (item = next.fetch_add(1)) < items;) body(thread, item);
        } catch (const std::exception &) {
            failed = true;
        }
    };
    const int helpers = int(std::min<size_t>(size_t(std::max(threads, 1)), std::max<size_t>(items, 1))) - 1;
    std::vector<std::thread> team;
    team.reserve(size_t(helpers));
    try {
        for (int thread = 1; thread <= helpers; thread++) team.emplace_back(work, thread);
    } catch (const std::exception &) {
        // The machine gives no more threads; those that started and this one do the work.
    }
    work(0);
    for (std::thread &member : team) member.join();
    return !failed;
}

}  // namespace cbdsl
