/* Rows of logits under a mask of their ids, 32 to a word: what it does not have is impossible. */
#include "elem.h"

#ifndef ELEM_BF16 /* logits are float32 */
typedef struct {
    int64_t width, stride, words;
    float *x;
    const int64_t *places;
    const uint32_t *masks;
} allow_only_t;

static void allow_in_row(float *x, int64_t width, const uint32_t *mask, int64_t words) {
    for (int64_t start = 0, word = 0; start < width; start += 32, word++) {
        uint32_t bits = word < words ? mask[word] : 0;
        if (bits == UINT32_MAX) continue;
        int64_t count = width - start < 32 ? width - start : 32;
        float *y = x + start;
#pragma omp simd
        for (int64_t i = 0; i < count; i++) y[i] = bits >> i & 1 ? y[i] : -INFINITY;
    }
}

static void allow_rows(const void *context, int64_t first, int64_t last) {
    const allow_only_t *a = context;
    for (int64_t row = first; row < last; row++)
        allow_in_row(a->x + a->places[row] * a->stride, a->width, a->masks + row * a->words, a->words);
}

int glm_allow_only_f32(int64_t rows, int64_t width, int64_t stride, int64_t words, float *x,
                       const int64_t *places, const uint32_t *masks) {
    if (width < 1 || words < 0) return OUT_OF_RANGE;
    allow_only_t a = {width, stride, words, x, places, masks};
    over_rows(rows, width, allow_rows, &a);
    return OK;
}
#endif
