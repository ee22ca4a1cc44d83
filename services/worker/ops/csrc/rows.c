/* Kernels that treat each row alone: norms, rotation, cache writes, gated activation. */
#include "vector.h"

enum { ROPE = 64, HALF = ROPE / 2 };

#if GLM_AVX512
ALWAYS_INLINE float sum_squares(const elem_t *x, int64_t width) {
    __m512 total = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += VECTOR) {
        __m512 values = load_floats(lanes_before(i, width), x + i);
        total = _mm512_fmadd_ps(values, values, total);
    }
    return _mm512_reduce_add_ps(total);
}

ALWAYS_INLINE void scale_row(const elem_t *x, const elem_t *gamma, float factor, int64_t width,
                             elem_t *y) {
    const __m512 factors = _mm512_set1_ps(factor);
    for (int64_t i = 0; i < width; i += VECTOR) {
        const __mmask16 mask = lanes_before(i, width);
        __m512 scaled = _mm512_mul_ps(load_floats(mask, x + i), factors);
        store_floats(mask, _mm512_mul_ps(scaled, load_floats(mask, gamma + i)), y + i);
    }
}

ALWAYS_INLINE void add_row(const elem_t *x, const elem_t *added, int64_t width, elem_t *y) {
    for (int64_t i = 0; i < width; i += VECTOR) {
        const __mmask16 mask = lanes_before(i, width);
        store_floats(mask, _mm512_add_ps(load_floats(mask, x + i), load_floats(mask, added + i)),
                     y + i);
    }
}

ALWAYS_INLINE void gate_row(const elem_t *gate, const elem_t *up, int64_t width, elem_t *y) {
    const __m512 one = _mm512_set1_ps(1.0f), zero = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += VECTOR) {
        const __mmask16 mask = lanes_before(i, width);
        __m512 g = load_floats(mask, gate + i);
        __m512 share = _mm512_div_ps(g, _mm512_add_ps(one, fast_exps(_mm512_sub_ps(zero, g))));
        store_floats(mask, _mm512_mul_ps(share, load_floats(mask, up + i)), y + i);
    }
}
#else
ALWAYS_INLINE float sum_squares(const elem_t *x, int64_t width) {
    float total = 0.0f;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < width; i++) total += to_float(x[i]) * to_float(x[i]);
    return total;
}

ALWAYS_INLINE void scale_row(const elem_t *x, const elem_t *gamma, float factor, int64_t width,
                             elem_t *y) {
#pragma omp simd
    for (int64_t i = 0; i < width; i++) y[i] = from_float(to_float(x[i]) * factor * to_float(gamma[i]));
}

ALWAYS_INLINE void add_row(const elem_t *x, const elem_t *added, int64_t width, elem_t *y) {
#pragma omp simd
    for (int64_t i = 0; i < width; i++) y[i] = from_float(to_float(x[i]) + to_float(added[i]));
}

ALWAYS_INLINE void gate_row(const elem_t *gate, const elem_t *up, int64_t width, elem_t *y) {
#pragma omp simd
    for (int64_t i = 0; i < width; i++) {
        float g = to_float(gate[i]);
        y[i] = from_float(g / (1.0f + fast_exp(-g)) * to_float(up[i]));
    }
}
#endif

ALWAYS_INLINE float rms_factor(const elem_t *x, int64_t width, float epsilon) {
    return 1.0f / sqrtf(sum_squares(x, width) / (float)width + epsilon);
}

typedef struct {
    int64_t width, stride;
    float epsilon;
    const elem_t *x, *added, *gamma;
    elem_t *y, *sum;
    float *factors;
} norm_t;

static void rms_norm_rows(const void *context, int64_t first, int64_t last) {
    const norm_t *n = context;
    for (int64_t row = first; row < last; row++) {
        const elem_t *source = n->x + row * n->stride;
        if (n->added) {
            add_row(source, n->added + row * n->width, n->width, n->sum + row * n->width);
            source = n->sum + row * n->width;
        }
        n->factors[row] = rms_factor(source, n->width, n->epsilon);
        scale_row(source, n->gamma, n->factors[row], n->width, n->y + row * n->width);
    }
}

int KERNEL(rms_norm)(int64_t rows, int64_t width, int64_t stride, double epsilon, const elem_t *x,
                     const elem_t *gamma, elem_t *y, float *factors) {
    norm_t n = {width, stride, (float)epsilon, x, NULL, gamma, y, NULL, factors};
    over_rows(rows, width, rms_norm_rows, &n);
    return OK;
}

int KERNEL(add_rms_norm)(int64_t rows, int64_t width, double epsilon, const elem_t *x1,
                         const elem_t *x2, const elem_t *gamma, elem_t *y, float *factors,
                         elem_t *sum) {
    norm_t n = {width, width, (float)epsilon, x1, x2, gamma, y, sum, factors};
    over_rows(rows, width, rms_norm_rows, &n);
    return OK;
}

typedef struct {
    int64_t width, stride;
    float epsilon;
    const elem_t *x, *gamma, *beta;
    elem_t *y;
} layer_norm_t;

static void layer_norm_rows(const void *context, int64_t first, int64_t last) {
    const layer_norm_t *n = context;
    for (int64_t row = first; row < last; row++) {
        const elem_t *x = n->x + row * n->stride;
        elem_t *y = n->y + row * n->width;
        float total = 0.0f, squares = 0.0f;
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < n->width; i++) total += to_float(x[i]);
        float mean = total / (float)n->width;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < n->width; i++)
            squares += (to_float(x[i]) - mean) * (to_float(x[i]) - mean);
        float factor = 1.0f / sqrtf(squares / (float)n->width + n->epsilon);
#pragma omp simd
        for (int64_t i = 0; i < n->width; i++)
            y[i] = from_float((to_float(x[i]) - mean) * factor * to_float(n->gamma[i]) +
                              to_float(n->beta[i]));
    }
}

int KERNEL(layer_norm)(int64_t rows, int64_t width, int64_t stride, double epsilon, const elem_t *x,
                       const elem_t *gamma, const elem_t *beta, elem_t *y) {
    layer_norm_t n = {width, stride, (float)epsilon, x, gamma, beta, y};
    over_rows(rows, width, layer_norm_rows, &n);
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

typedef struct {
    int64_t heads, token_stride, head_stride;
    const elem_t *x, *cosines, *sines;
    elem_t *y;
} rope_t;

static void rotate_tokens(const void *context, int64_t first, int64_t last) {
    const rope_t *r = context;
    for (int64_t token = first; token < last; token++)
        for (int64_t head = 0; head < r->heads; head++)
            rotate(r->x + token * r->token_stride + head * r->head_stride,
                   r->cosines + token * ROPE, r->sines + token * ROPE,
                   r->y + (token * r->heads + head) * ROPE);
}

int KERNEL(interleave_rope)(int64_t tokens, int64_t heads, int64_t token_stride,
                            int64_t head_stride, const elem_t *x, const elem_t *cosines,
                            const elem_t *sines, elem_t *y) {
    rope_t r = {heads, token_stride, head_stride, x, cosines, sines, y};
    over_rows(tokens, heads * ROPE, rotate_tokens, &r);
    return OK;
}

typedef struct {
    int64_t width, stride;
    float epsilon;
    const elem_t *kv, *gamma, *cosines, *sines;
    const int64_t *slots;
    elem_t *rope_cache, *latent_cache;
} write_t;

static void write_tokens(const void *context, int64_t first, int64_t last) {
    const write_t *w = context;
    for (int64_t token = first; token < last; token++) {
        int64_t slot = w->slots[token];
        if (slot < 0) continue;
        const elem_t *source = w->kv + token * w->stride;
        float factor = rms_factor(source, w->width, w->epsilon);
        scale_row(source, w->gamma, factor, w->width, w->latent_cache + slot * w->width);
        rotate(source + w->width, w->cosines + token * ROPE, w->sines + token * ROPE,
               w->rope_cache + slot * ROPE);
    }
}

int KERNEL(kv_rmsnorm_rope_cache)(int64_t tokens, int64_t width, int64_t stride, int64_t num_slots,
                                  double epsilon, const elem_t *kv, const elem_t *gamma,
                                  const elem_t *cosines, const elem_t *sines, const int64_t *slots,
                                  elem_t *rope_cache, elem_t *latent_cache) {
    for (int64_t token = 0; token < tokens; token++)
        if (slots[token] >= num_slots) return OUT_OF_RANGE;
    write_t w = {width, stride, (float)epsilon, kv,         gamma,
                 cosines, sines, slots,         rope_cache, latent_cache};
    over_rows(tokens, width, write_tokens, &w);
    return OK;
}

#ifndef ELEM_BF16 /* rows of bytes: the same for every element type */
int KERNEL(scatter_rows)(int64_t tokens, int64_t row_bytes, int64_t stride_bytes, int64_t num_slots,
                         const int64_t *slots, const char *updates, char *cache) {
    for (int64_t token = 0; token < tokens; token++)
        if (slots[token] >= num_slots) return OUT_OF_RANGE;
    for (int64_t token = 0; token < tokens; token++)
        if (slots[token] >= 0)
            memcpy(cache + slots[token] * row_bytes, updates + token * stride_bytes,
                   (size_t)row_bytes);
    return OK;
}
#endif

typedef struct {
    int64_t width;
    const elem_t *x;
    elem_t *y;
} swiglu_t;

static void swiglu_rows(const void *context, int64_t first, int64_t last) {
    const swiglu_t *s = context;
    for (int64_t row = first; row < last; row++) {
        const elem_t *gate = s->x + row * 2 * s->width;
        gate_row(gate, gate + s->width, s->width, s->y + row * s->width);
    }
}

int KERNEL(swiglu)(int64_t rows, int64_t width, const elem_t *x, elem_t *y) {
    swiglu_t s = {width, x, y};
    over_rows(rows, width, swiglu_rows, &s);
    return OK;
}
