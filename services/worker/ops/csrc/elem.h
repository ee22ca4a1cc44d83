/* The element type of a build, arithmetic on it, and the name of a kernel.
 *
 * Every source is compiled twice, with ELEM_BF16 and without (float32). Storage is elem_t,
 * arithmetic is float32; a result is rounded once, to nearest even.
 */
#ifndef GLM_ELEM_H
#define GLM_ELEM_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "pool.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512BF16__)
#define GLM_AVX512 1
#include <immintrin.h>
#endif

#define ALWAYS_INLINE static inline __attribute__((always_inline))

enum { OK = 0, NO_MEMORY = 1, OUT_OF_RANGE = 2, WRONG_LAYOUT = 3 };

/* Below this many elements (some 10 us) a kernel stays on one thread: two meet for a microsecond. */
enum { PARALLEL_ELEMENTS = 1 << 16 };

#ifdef ELEM_BF16
typedef uint16_t elem_t;
#define KERNEL(name) glm_##name##_bf16

ALWAYS_INLINE float to_float(elem_t x) {
    union { uint32_t bits; float value; } wide = {.bits = (uint32_t)x << 16};
    return wide.value;
}

ALWAYS_INLINE elem_t from_float(float x) {
    union { float value; uint32_t bits; } wide = {.value = x};
    uint32_t rounded = (wide.bits + 0x7fffu + ((wide.bits >> 16) & 1u)) >> 16;
    /* Rounding may carry a NaN into infinity; keep it a NaN. */
    uint32_t nan = (wide.bits >> 16) | 0x40u;
    return (elem_t)((wide.bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}
#else
typedef float elem_t;
#define KERNEL(name) glm_##name##_f32

ALWAYS_INLINE float to_float(elem_t x) { return x; }
ALWAYS_INLINE elem_t from_float(float x) { return x; }
#endif

/* exp(x) to about 2 ulp, without a library call so that loops over it vectorise.
 * Split as 2^n * exp(r) with |r| <= ln2/2; minimax polynomial of degree 6 for exp(r). */
ALWAYS_INLINE float fast_exp(float x) {
    x = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);
    float shifted = x * 1.44269504f + 12582912.0f; /* adding 1.5 * 2^23 rounds to an integer */
    union { float value; int32_t bits; } power = {.value = shifted};
    float n = shifted - 12582912.0f;
    float r = x - n * 0.693359375f; /* ln2 in two parts: the first has few bits */
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    union { int32_t bits; float value; } scale = {.bits = (power.bits << 23) + 0x3f800000};
    return p * scale.value;
}

/* Run `body` over rows, on several threads if the elements are worth it. */
ALWAYS_INLINE void over_rows(int64_t rows, int64_t elements_per_row, range_fn body,
                             const void *context) {
    int64_t chunk = PARALLEL_ELEMENTS / 4 / (elements_per_row > 0 ? elements_per_row : 1);
    int64_t total = rows * elements_per_row;
    glm_run(rows, total > PARALLEL_ELEMENTS ? (chunk > 0 ? chunk : 1) : rows, body, context);
}

#endif
