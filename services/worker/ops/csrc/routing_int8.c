/* Sorting of token copies by expert for products in int8. */
#include "quantize.h"

typedef struct {
    int64_t k, width;
    const elem_t *x;         /* rows to quantize, or */
    const int8_t *quantized; /* rows that are int8, */
    const float *scales;     /* with their scales */
    const int32_t *order;
    int8_t *rows;
    float *row_scales;
} copies_int8_t;

static void spread_tokens(const void *context, int64_t first, int64_t last) {
    const copies_int8_t *c = context;
    for (int64_t token = first; token < last; token++) {
        const int8_t *source = c->quantized ? c->quantized + token * c->width : NULL;
        float scale = c->quantized ? c->scales[token] : 0.0f;
        for (int64_t j = 0; j < c->k; j++) {
            int64_t row = c->order[token * c->k + j];
            if (row < 0) continue;
            int8_t *target = c->rows + row * c->width;
            if (source) {
                memcpy(target, source, (size_t)c->width);
            } else {
                scale = quantize_row(c->x + token * c->width, c->width, target);
                source = target;
            }
            c->row_scales[row] = scale;
        }
    }
}

int KERNEL(init_routing_int8)(int64_t tokens, int64_t k, int64_t width, int64_t first, int64_t last,
                              int64_t is_int8, const void *x, const float *scales,
                              const int32_t *experts, int8_t *rows, int32_t *order, int64_t *counts,
                              float *row_scales) {
    int status = sort_copies(tokens * k, first, last, experts, order, counts);
    if (status) return status;
    copies_int8_t c = {.k = k, .width = width, .x = x, .quantized = is_int8 ? x : NULL,
                       .scales = scales, .order = order, .rows = rows, .row_scales = row_scales};
    over_rows(tokens, k * width, spread_tokens, &c);
    return OK;
}
