/* Quantization of a row to int8 with a scale of its own. */
#ifndef GLM_QUANTIZE_H
#define GLM_QUANTIZE_H

#include "elem.h"

/* q = x / scale to the nearest (half to even), with the scale that makes the largest 127. */
static float quantize_row(const elem_t *x, int64_t width, int8_t *q) {
    float largest = 0.0f;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < width; i++) {
        float size = fabsf(to_float(x[i]));
        largest = size > largest ? size : largest;
    }
    float scale = largest / 127.0f;
    float divisor = scale > 0.0f ? scale : 1.0f;
#pragma omp simd
    for (int64_t i = 0; i < width; i++) q[i] = (int8_t)(int32_t)rintf(to_float(x[i]) / divisor);
    return scale;
}

#endif
