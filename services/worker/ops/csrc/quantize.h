/* Quantization of a row to int8 with a scale of its own. */
#ifndef GLM_QUANTIZE_H
#define GLM_QUANTIZE_H

#include "vector.h"

#if GLM_AVX512
/* Whole numbers next to 16 of int8's range, half to even. */
ALWAYS_INLINE void store_int8(__mmask16 mask, __m512 values, int8_t *q) {
    _mm_mask_storeu_epi8(q, mask, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(values)));
}
#endif

/* The largest size in a row; NaN if one is NaN, since as bits a NaN is the largest of all. */
ALWAYS_INLINE float largest_size(const elem_t *x, int64_t width) {
    union { int32_t bits; float value; } largest = {.bits = 0};
#if GLM_AVX512
    const __m512i size = _mm512_set1_epi32(0x7fffffff);
    __m512i most = _mm512_setzero_si512();
    for (int64_t i = 0; i < width; i += VECTOR) {
        __m512i bits = _mm512_castps_si512(load_floats(lanes_before(i, width), x + i));
        most = _mm512_max_epi32(most, _mm512_and_si512(bits, size));
    }
    largest.bits = _mm512_reduce_max_epi32(most);
#else
    int32_t most = 0;
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < width; i++) {
        union { float value; int32_t bits; } size = {.value = fabsf(to_float(x[i]))};
        most = size.bits > most ? size.bits : most;
    }
    largest.bits = most;
#endif
    return largest.value;
}

/* q = x / scale to the nearest (half to even), with the scale that makes the largest 127. Zeros
 * have scale 0; a row with a NaN or an infinity is zeros under a scale that says so. */
static float quantize_row(const elem_t *x, int64_t width, int8_t *q) {
    float scale = largest_size(x, width) / 127.0f;
    if (!(scale > 0.0f && scale < INFINITY)) {
        memset(q, 0, (size_t)width);
        return scale;
    }
#if GLM_AVX512
    const __m512 divisor = _mm512_set1_ps(scale);
    for (int64_t i = 0; i < width; i += VECTOR) {
        const __mmask16 mask = lanes_before(i, width);
        store_int8(mask, _mm512_div_ps(load_floats(mask, x + i), divisor), q + i);
    }
#else
#pragma omp simd
    for (int64_t i = 0; i < width; i++) {
        float rounded = (to_float(x[i]) / scale + 12582912.0f) - 12582912.0f; /* as fast_exp does */
        q[i] = (int8_t)(int32_t)rounded;
    }
#endif
    return scale;
}

#endif
