// A vector register full of samples, and the few operations on it that the kernels share.
//
// Every activation is stored as [channel][y][x][sample]: the innermost axis is one vector `lanes`, one
// sample a lane. A layer is then "broadcast a weight, multiply, add" with no shuffle anywhere.
// GCC/Clang vector extensions express that for every instruction set; LANES follows the register width.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors never cross a library boundary
#endif

namespace cbdsl {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;  // SSE, NEON and whatever the compiler lowers for other machines
#endif

// Register blocking is sized by how many vector registers hold accumulators without spilling.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr bool MANY_REGISTERS = true;  // 32
#else
constexpr bool MANY_REGISTERS = false;  // 16
#endif

typedef float lanes __attribute__((vector_size(LANES * 4)));
typedef int32_t whole __attribute__((vector_size(LANES * 4)));  // also the type of a comparison
// The same vector where memory is only aligned to a float: rows of weights and of samples.
typedef float loose __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef float quad __attribute__((vector_size(16)));
typedef float loose_quad __attribute__((vector_size(16), aligned(4), may_alias));

#define CBDSL_INLINE inline __attribute__((always_inline))

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define CBDSL_SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#endif
#endif
#ifndef CBDSL_SHUFFLE
typedef int32_t quad_index __attribute__((vector_size(16)));
#define CBDSL_SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, quad_index{i, j, k, l})
#endif

CBDSL_INLINE lanes splat(float value) { return lanes{} + value; }

// The order of operands makes a NaN in `v` survive: a comparison with NaN is false.
CBDSL_INLINE lanes relu(lanes v) { return lanes{} > v ? lanes{} : v; }

CBDSL_INLINE lanes larger(lanes a, lanes b) { return a > b ? a : b; }

// Sums over the lanes are trees, in an order that is fixed for one instruction set.
CBDSL_INLINE quad fold(lanes v) {
    quad parts[LANES / 4];
    std::memcpy(parts, &v, sizeof v);
    for (int width = LANES / 8; width > 0; width /= 2)
        for (int i = 0; i < width; i++) parts[i] += parts[i + width];
    return parts[0];
}

CBDSL_INLINE float sum(lanes v) {
    const quad four = fold(v), two = four + CBDSL_SHUFFLE(four, four, 2, 3, 0, 1);
    return two[0] + two[1];
}

CBDSL_INLINE void transpose_quad(quad &a, quad &b, quad &c, quad &d) {
    const quad ab_low = CBDSL_SHUFFLE(a, b, 0, 4, 1, 5), ab_high = CBDSL_SHUFFLE(a, b, 2, 6, 3, 7);
    const quad cd_low = CBDSL_SHUFFLE(c, d, 0, 4, 1, 5), cd_high = CBDSL_SHUFFLE(c, d, 2, 6, 3, 7);
    a = CBDSL_SHUFFLE(ab_low, cd_low, 0, 1, 4, 5);
    b = CBDSL_SHUFFLE(ab_low, cd_low, 2, 3, 6, 7);
    c = CBDSL_SHUFFLE(ab_high, cd_high, 0, 1, 4, 5);
    d = CBDSL_SHUFFLE(ab_high, cd_high, 2, 3, 6, 7);
}

// Four sums at once, for less than four times the work of one.
CBDSL_INLINE quad sum_each(lanes a, lanes b, lanes c, lanes d) {
    quad p = fold(a), q = fold(b), r = fold(c), s = fold(d);
    transpose_quad(p, q, r, s);
    return (p + r) + (q + s);
}

// e^v, at most 2 units in the last place off between -87 and 88; smaller arguments give 0, larger ones
// infinity, NaN stays NaN. exp(0) is exactly 1, so a log-sum-exp can never come out negative.
CBDSL_INLINE lanes exponential(lanes v) {
    const lanes low = splat(-87.3f), high = splat(88.7f);
    lanes x = v < low ? low : v;
    x = x > high ? high : x;
    // Adding and taking away 1.5 * 2^23 rounds to the nearest whole number.
    const lanes shift = splat(12582912.0f);
    const lanes n = (x * 1.44269504f + shift) - shift;
    lanes r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    lanes p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * r) * r + r + 1.0f;
    // A NaN has no whole number; it is put back by the last line.
    const lanes safe = n == n ? n : lanes{};
    const whole exponent = __builtin_convertvector(safe, whole);
    // Two steps of half the exponent each: 2^128 alone is not a float.
    const whole half = exponent >> 1;
    const lanes scale_one = (lanes)((half + 127) << 23), scale_two = (lanes)((exponent - half + 127) << 23);
    p = p * scale_one * scale_two;
    p = v < low ? lanes{} : p;
    p = v > high ? splat(__builtin_inff()) : p;
    return v == v ? p : v;
}

CBDSL_INLINE lanes hyperbolic_tangent(lanes v) {
    const lanes size = v < 0.0f ? -v : v;
    const lanes square = v * v;
    // Near zero 1 - 2 / (e^2x + 1) would cancel; there a polynomial keeps every digit.
    lanes p = splat(-5.70498872745e-3f);
    p = p * square + 2.06390887954e-2f;
    p = p * square - 5.37397155531e-2f;
    p = p * square + 1.33314422036e-1f;
    p = p * square - 3.33332819422e-1f;
    p = p * square * v + v;
    lanes q = 1.0f - 2.0f / (exponential(size + size) + 1.0f);
    q = v < 0.0f ? -q : q;
    return size < 0.625f ? p : q;
}

CBDSL_INLINE lanes logistic(lanes v) { return 1.0f / (1.0f + exponential(-v)); }

// rows[lane][0..count) -> target[0..count), the samples of one lane group side by side.
inline void rows_to_lanes(const float *const rows[LANES], size_t offset, size_t count, lanes *target) {
    float *out = reinterpret_cast<float *>(target);
    const size_t whole_quads = count / 4 * 4;
    // Lanes innermost: a line of the target is filled at once, not once for every four lanes.
    for (size_t i = 0; i < whole_quads; i += 4)
#pragma GCC unroll 4
        for (int lane = 0; lane < LANES; lane += 4) {
            const size_t at = offset + i;
            quad a = *(const loose_quad *)(rows[lane] + at), b = *(const loose_quad *)(rows[lane + 1] + at);
            quad c = *(const loose_quad *)(rows[lane + 2] + at), d = *(const loose_quad *)(rows[lane + 3] + at);
            transpose_quad(a, b, c, d);
            float *to = out + i * LANES + lane;
            *(quad *)to = a;
            *(quad *)(to + LANES) = b;
            *(quad *)(to + 2 * LANES) = c;
            *(quad *)(to + 3 * LANES) = d;
        }
    for (size_t i = whole_quads; i < count; i++)
        for (int lane = 0; lane < LANES; lane++) out[i * LANES + lane] = rows[lane][offset + i];
}

// The way back: source[0..count) -> rows[lane * stride + i], for the first `used` lanes rounded up to 4.
// Rows must have room for `count` rounded up to 4.
inline void lanes_to_rows(const lanes *source, size_t count, int used, float *rows, size_t stride) {
    const float *in = reinterpret_cast<const float *>(source);
    const size_t whole_quads = count / 4 * 4;
    for (int lane = 0; lane < used; lane += 4) {
        float *r0 = rows + lane * stride, *r1 = r0 + stride, *r2 = r1 + stride, *r3 = r2 + stride;
        for (size_t i = 0; i < whole_quads; i += 4) {
            const float *from = in + i * LANES + lane;
            quad a = *(const quad *)from, b = *(const quad *)(from + LANES);
            quad c = *(const quad *)(from + 2 * LANES), d = *(const quad *)(from + 3 * LANES);
            transpose_quad(a, b, c, d);
            *(loose_quad *)(r0 + i) = a;
            *(loose_quad *)(r1 + i) = b;
            *(loose_quad *)(r2 + i) = c;
            *(loose_quad *)(r3 + i) = d;
        }
        for (size_t i = whole_quads; i < count; i++) {
            const float *from = in + i * LANES + lane;
            r0[i] = from[0], r1[i] = from[1], r2[i] = from[2], r3[i] = from[3];
        }
    }
}

// Where a gradient goes: target = keep * target + scale * gradient.
// One rule serves a gradient (keep 1, scale 1), momentum (keep mu for the first lane group of a batch)
// and plain SGD, which needs no buffer at all (target = the weights, keep 1, scale -rate).
struct Sink {
    float *target;
    float keep;
    float scale;

    CBDSL_INLINE void add(size_t at, float gradient) const { target[at] = keep * target[at] + scale * gradient; }
    CBDSL_INLINE void add(size_t at, lanes gradient) const {
        loose *to = (loose *)(target + at);
        *to = keep * *to + scale * gradient;
    }
    CBDSL_INLINE void add(size_t at, lanes gradient, lanes keep_each) const {
        loose *to = (loose *)(target + at);
        *to = keep_each * *to + scale * gradient;
    }
};

// Calls body(integral constant SIZE, start) for blocks of at most LARGEST that cover 0..total evenly.
template <int SIZE> struct Size { static constexpr int value = SIZE; };

template <int LARGEST, class Body> CBDSL_INLINE void dispatch_block(int size, int start, const Body &body) {
    if constexpr (LARGEST > 0) {
        if (size == LARGEST)
            body(Size<LARGEST>{}, start);
        else
            dispatch_block<LARGEST - 1>(size, start, body);
    }
}

template <int LARGEST, class Body> CBDSL_INLINE void in_blocks(int total, const Body &body) {
    const int blocks = (total + LARGEST - 1) / LARGEST;
    for (int block = 0, start = 0; block < blocks; block++) {
        const int size = total / blocks + (block < total % blocks);
        dispatch_block<LARGEST>(size, start, body);
        start += size;
    }
}

}  // namespace cbdsl
