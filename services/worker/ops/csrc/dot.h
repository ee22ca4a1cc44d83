/* Products of 4 query rows with 4 key rows: the inner step of attention scores and of indexing. */
#ifndef GLM_DOT_H
#define GLM_DOT_H

#include "elem.h"

enum { DOT = 4 };

#if GLM_AVX512
typedef __m512 lanes_t;

#ifdef ELEM_BF16
enum { LANES = 32 };
#define LOAD(p) ((__m512bh)_mm512_loadu_si512(p))
#define MULTIPLY_ADD(sum, a, b) _mm512_dpbf16_ps(sum, a, b)
typedef __m512bh packed_t;
#else
enum { LANES = 16 };
#define LOAD(p) _mm512_loadu_ps(p)
#define MULTIPLY_ADD(sum, a, b) _mm512_fmadd_ps(a, b, sum)
typedef __m512 packed_t;
#endif

/* sums[i * 4 + j] += queries[i] . keys[j], lane by lane; width is a multiple of LANES. */
ALWAYS_INLINE void dot_add(lanes_t sums[16], const elem_t *const queries[DOT],
                           const elem_t *const keys[DOT], int64_t width) {
    for (int64_t at = 0; at < width; at += LANES) {
        packed_t key0 = LOAD(keys[0] + at), key1 = LOAD(keys[1] + at);
        packed_t key2 = LOAD(keys[2] + at), key3 = LOAD(keys[3] + at);
        /* gcc would rather load and spill than keep all four. */
        __asm__("" : "+v"(key0), "+v"(key1), "+v"(key2), "+v"(key3));
        for (int i = 0; i < DOT; i++) {
            packed_t query = LOAD(queries[i] + at);
            sums[i * DOT] = MULTIPLY_ADD(sums[i * DOT], query, key0);
            sums[i * DOT + 1] = MULTIPLY_ADD(sums[i * DOT + 1], query, key1);
            sums[i * DOT + 2] = MULTIPLY_ADD(sums[i * DOT + 2], query, key2);
            sums[i * DOT + 3] = MULTIPLY_ADD(sums[i * DOT + 3], query, key3);
        }
    }
}

ALWAYS_INLINE void dot_clear(lanes_t sums[16]) {
    for (int i = 0; i < 16; i++) sums[i] = _mm512_setzero_ps();
}

/* The 16 totals, in order. */
ALWAYS_INLINE __m512 dot_reduce(lanes_t sums[16]) {
    __m512 pairs[8], fours[4], eights[2];
    for (int i = 0; i < 8; i++)
        pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(sums[2 * i], sums[2 * i + 1]),
                                 _mm512_unpackhi_ps(sums[2 * i], sums[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        __m512d a = (__m512d)pairs[2 * i], b = (__m512d)pairs[2 * i + 1];
        fours[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(a, b), (__m512)_mm512_unpackhi_pd(a, b));
    }
    for (int i = 0; i < 2; i++)
        eights[i] = _mm512_add_ps(_mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0x88),
                                  _mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(eights[0], eights[1], 0x88),
                         _mm512_shuffle_f32x4(eights[0], eights[1], 0xdd));
}

ALWAYS_INLINE void dot_total(lanes_t sums[16], float totals[16]) {
    _mm512_storeu_ps(totals, dot_reduce(sums));
}
#else
typedef float lanes_t;

ALWAYS_INLINE void dot_add(lanes_t sums[16], const elem_t *const queries[DOT],
                           const elem_t *const keys[DOT], int64_t width) {
    for (int j = 0; j < DOT; j++)
        for (int i = 0; i < DOT; i++) {
            const elem_t *query = queries[i], *key = keys[j];
            float total = 0.0f;
#pragma omp simd reduction(+ : total)
            for (int64_t at = 0; at < width; at++) total += to_float(query[at]) * to_float(key[at]);
            sums[i * DOT + j] += total;
        }
}

ALWAYS_INLINE void dot_clear(lanes_t sums[16]) { memset(sums, 0, 16 * sizeof(float)); }

ALWAYS_INLINE void dot_total(lanes_t sums[16], float totals[16]) {
    memcpy(totals, sums, 16 * sizeof(float));
}
#endif

#endif
