/* Quantization of a row to int8 with a scale of its own. */
#ifndef GLM_QUANTIZE_H
#define GLM_QUANTIZE_H

#include "elem.h"

/* The largest size in a row; NaN if one is NaN, since as bits a NaN is the largest of all. */
ALWAYS_INLINE float largest_size(const elem_t *x, int64_t width) {
    int32_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < width; i++) {
        union { float value; int32_t bits; } size = {.value = fabsf(to_float(x[i]))};
        largest = size.bits > largest ? size.bits : largest;
    }
    union { int32_t bits; float value; } wide = {.bits = largest};
    return wide.value;
}

/* q = x / scale to the nearest (half to even), with the scale that makes the largest 127. Zeros
 * have scale 0; a row with a NaN or an infinity is zeros under a scale that says so. */
static float quantize_row(const elem_t *x, int64_t width, int8_t *q) {
    float scale = largest_size(x, width) / 127.0f;
    if (!(scale > 0.0f && scale < INFINITY)) {
        memset(q, 0, (size_t)width);
        return scale;
    }
#pragma omp simd
    for (int64_t i = 0; i < width; i++) {
        float rounded = (to_float(x[i]) / scale + 12582912.0f) - 12582912.0f; /* as fast_exp does */
        q[i] = (int8_t)(int32_t)rounded;
    }
    return scale;
}

#endif
