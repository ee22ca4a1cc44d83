/* Kernels that treat each row alone: norms, rotation, cache writes, gated activation. */
#include "elem.h"

enum { ROPE = 64, HALF = ROPE / 2 };

ALWAYS_INLINE float rms_factor(const elem_t *x, int64_t width, double epsilon) {
    float total = 0.0f;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < width; i++) total += to_float(x[i]) * to_float(x[i]);
    return 1.0f / sqrtf(total / (float)width + (float)epsilon);
}

ALWAYS_INLINE void scale_row(const elem_t *x, const elem_t *gamma, float factor, int64_t width,
                             elem_t *y) {
#pragma omp simd
    for (int64_t i = 0; i < width; i++) y[i] = from_float(to_float(x[i]) * factor * to_float(gamma[i]));
}

int KERNEL(rms_norm)(int64_t rows, int64_t width, int64_t stride, double epsilon, const elem_t *x,
                     const elem_t *gamma, elem_t *y, float *factors) {
#pragma omp parallel for if (rows * width > PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < rows; row++) {
        const elem_t *source = x + row * stride;
        factors[row] = rms_factor(source, width, epsilon);
        scale_row(source, gamma, factors[row], width, y + row * width);
    }
    return OK;
}

int KERNEL(add_rms_norm)(int64_t rows, int64_t width, double epsilon, const elem_t *x1,
                         const elem_t *x2, const elem_t *gamma, elem_t *y, float *factors,
                         elem_t *sum) {
#pragma omp parallel for if (rows * width > PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < rows; row++) {
        const elem_t *a = x1 + row * width, *b = x2 + row * width;
        elem_t *total = sum + row * width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) total[i] = from_float(to_float(a[i]) + to_float(b[i]));
        factors[row] = rms_factor(total, width, epsilon);
        scale_row(total, gamma, factors[row], width, y + row * width);
    }
    return OK;
}

/* Pairs (2i, 2i + 1) in, first members then second members out. */
ALWAYS_INLINE void rotate(const elem_t *x, const elem_t *cosines, const elem_t *sines, elem_t *y) {
    float first[HALF], second[HALF];
    for (int i = 0; i < HALF; i++) {
        first[i] = to_float(x[2 * i]);
        second[i] = to_float(x[2 * i + 1]);
    }
    for (int i = 0; i < HALF; i++) {
        float c = to_float(cosines[i]), s = to_float(sines[i]);
        y[i] = from_float(first[i] * c - second[i] * s);
        y[HALF + i] = from_float(second[i] * c + first[i] * s);
    }
}

int KERNEL(interleave_rope)(int64_t tokens, int64_t heads, int64_t token_stride,
                            int64_t head_stride, const elem_t *x, const elem_t *cosines,
                            const elem_t *sines, elem_t *y) {
#pragma omp parallel for if (tokens * heads * ROPE > PARALLEL_ELEMENTS)
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t head = 0; head < heads; head++)
            rotate(x + token * token_stride + head * head_stride, cosines + token * ROPE,
                   sines + token * ROPE, y + (token * heads + head) * ROPE);
    return OK;
}

int KERNEL(kv_rmsnorm_rope_cache)(int64_t tokens, int64_t width, int64_t stride, int64_t num_slots,
                                  double epsilon, const elem_t *kv, const elem_t *gamma,
                                  const elem_t *cosines, const elem_t *sines, const int64_t *slots,
                                  elem_t *rope_cache, elem_t *latent_cache) {
    for (int64_t token = 0; token < tokens; token++)
        if (slots[token] >= num_slots) return OUT_OF_RANGE;
#pragma omp parallel for if (tokens * width > PARALLEL_ELEMENTS)
    for (int64_t token = 0; token < tokens; token++) {
        int64_t slot = slots[token];
        if (slot < 0) continue;
        const elem_t *source = kv + token * stride;
        scale_row(source, gamma, rms_factor(source, width, epsilon), width,
                  latent_cache + slot * width);
        rotate(source + width, cosines + token * ROPE, sines + token * ROPE,
               rope_cache + slot * ROPE);
    }
    return OK;
}

int KERNEL(scatter_rows)(int64_t tokens, int64_t width, int64_t stride, int64_t num_slots,
                         const int64_t *slots, const elem_t *updates, elem_t *cache) {
    for (int64_t token = 0; token < tokens; token++)
        if (slots[token] >= num_slots) return OUT_OF_RANGE;
    for (int64_t token = 0; token < tokens; token++)
        if (slots[token] >= 0)
            memcpy(cache + slots[token] * width, updates + token * stride,
                   (size_t)width * sizeof(elem_t));
    return OK;
}

int KERNEL(swiglu)(int64_t rows, int64_t width, const elem_t *x, elem_t *y) {
#pragma omp parallel for if (rows * width > PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < rows; row++) {
        const elem_t *gate = x + row * 2 * width, *up = gate + width;
        elem_t *out = y + row * width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
            float g = to_float(gate[i]);
            out[i] = from_float(g / (1.0f + fast_exp(-g)) * to_float(up[i]));
        }
    }
    return OK;
}
