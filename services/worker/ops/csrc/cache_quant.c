/* Quantization of latents on their way into the packed cache: a scale for each QUANT_TILE lanes. */
#include "quantize.h"

enum { QUANT_TILE = 128 };

typedef struct {
    int64_t tiles, stride;
    const elem_t *x;
    int8_t *y;
    float *scales;
} block_quant_t;

static void block_quant_rows(const void *context, int64_t first, int64_t last) {
    const block_quant_t *b = context;
    for (int64_t row = first; row < last; row++)
        for (int64_t tile = 0; tile < b->tiles; tile++) {
            int64_t at = row * b->tiles + tile;
            b->scales[at] = quantize_row(b->x + row * b->stride + tile * QUANT_TILE, QUANT_TILE,
                                         b->y + at * QUANT_TILE);
        }
}

int KERNEL(block_quant)(int64_t rows, int64_t width, int64_t stride, const elem_t *x, int8_t *y,
                        float *scales) {
    block_quant_t b = {width / QUANT_TILE, stride, x, y, scales};
    over_rows(rows, width, block_quant_rows, &b);
    return OK;
}
