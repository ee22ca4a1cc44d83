/* The gated unit on products in int8, and the quantization of its result: no element type. */
#include "quantize.h"

enum { MAX_GATED = 16384 };

/* gated = silu(gate) * up */
ALWAYS_INLINE void gate_values(const float *gate, const float *up, int64_t width, float *gated) {
#if GLM_AVX512
    const __m512 one = _mm512_set1_ps(1.0f), zero = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += VECTOR) {
        const __mmask16 mask = lanes_before(i, width);
        __m512 g = load_floats(mask, gate + i), u = load_floats(mask, up + i);
        __m512 share = _mm512_div_ps(g, _mm512_add_ps(one, fast_exps(_mm512_sub_ps(zero, g))));
        store_floats(mask, _mm512_mul_ps(share, u), gated + i);
    }
#else
#pragma omp simd
    for (int64_t i = 0; i < width; i++) gated[i] = gate[i] / (1.0f + fast_exp(-gate[i])) * up[i];
#endif
}

enum { GATE_STRIDE = 2 * I8_COLUMNS }; /* values of a row: columns that begin inside a strip */

/* Values of a group's rows in some columns, up to I8_COLUMNS; returns where the first one is. */
static const float *find_values(const experts_t *e, int64_t group, int64_t column, int64_t columns,
                                int64_t row, int64_t rows, float *values) {
    const int64_t shift = column % I8_COLUMNS, end = column + columns;
    i8_matrix_t matrix = i8_matrix(e->w, group, e->inner, e->outer, (int)e->bits, 1);
    columns_t space;
    for (int64_t first = column - shift, at = 0; first < end; first += I8_COLUMNS, at += I8_COLUMNS) {
        i8_finish_t f =
            open_columns(e, group, first, up_to(e->outer - first, I8_COLUMNS), &space);
        f.row_scale = e->row_scale + row;
        f.y = values + at;
        f.y_stride = GATE_STRIDE;
        i8_multiply(&matrix, first, rows, e->x + row * e->inner, e->inner, e->offsets + row, &f);
    }
    return values + shift;
}

/* A strip's gate columns and the up columns beside them, scaled and joined. */
static void gate_strips(const void *context, int64_t first, int64_t last) {
    const experts_t *e = context;
    const int64_t half = e->outer / 2;
    float space[2][I8_CHUNK * GATE_STRIDE];
    for (int64_t item = first; item < last; item++) {
        int64_t group = item / e->strips, column = item % e->strips * I8_COLUMNS;
        int64_t columns = up_to(half - column, I8_COLUMNS), end = e->starts[group + 1];
        for (int64_t row = e->starts[group]; row < end; row += I8_CHUNK) {
            const int64_t rows = up_to(end - row, I8_CHUNK);
            const float *gate = find_values(e, group, column, columns, row, rows, space[0]);
            const float *up = find_values(e, group, half + column, columns, row, rows, space[1]);
            for (int64_t r = 0; r < rows; r++, gate += GATE_STRIDE, up += GATE_STRIDE)
                gate_values(gate, up, columns, e->gated + (row + r) * half + column);
        }
    }
}

typedef struct {
    int64_t width;
    const float *values;
    int8_t *q;
    float *scales;
} quantize_t;

static void quantize_rows(const void *context, int64_t first, int64_t last) {
    const quantize_t *t = context;
    for (int64_t row = first; row < last; row++)
        t->scales[row] = quantize_row(t->values + row * t->width, t->width, t->q + row * t->width);
}

int glm_grouped_swiglu_f32(int64_t total_rows, int64_t groups, int64_t inner, int64_t outer,
                           int64_t is_counts, int64_t bits, int64_t scale_type, const int8_t *x,
                           const void *w, const int64_t *group_list, const void *scale,
                           const float *row_scale, const float *bias, const int32_t *w_sums,
                           int8_t *q, float *q_scale) {
    experts_t e = {.total_rows = total_rows, .groups = groups, .inner = inner, .outer = outer,
                   .bits = bits, .is_packed = 1, .scale_type = scale_type, .x = x, .w = w,
                   .scale = scale, .row_scale = row_scale, .bias = bias, .w_sums = w_sums};
    int status = open_experts(&e, is_counts, group_list, outer / 2);
    if (status) return status;
    run_strips(&e, outer / 2, gate_strips);
    quantize_t t = {outer / 2, e.gated, q, q_scale};
    over_rows(e.starts[groups], outer / 2, quantize_rows, &t);
    free(e.starts);
    return OK;
}

typedef struct {
    int64_t width, groups, is_left;
    const int32_t *x;
    const float *column_scale, *row_scale; /* column_scale: of each group */
    const int64_t *counts;
    int8_t *q;
    float *scales;
} dequant_t;

ALWAYS_INLINE void scale_products(const int32_t *x, const float *factors, float scale, int64_t width,
                                  float *values) {
#pragma omp simd
    for (int64_t i = 0; i < width; i++) values[i] = (float)x[i] * factors[i] * scale;
}

static void gate_rows(const void *context, int64_t first, int64_t last) {
    const dequant_t *d = context;
    float values[2][MAX_GATED], *gate = values[!d->is_left], *up = values[d->is_left];
    int64_t group = 0, end = d->groups ? d->counts[0] : last;
    for (int64_t row = first; row < last; row++) {
        while (row >= end && group + 1 < d->groups) end += d->counts[++group];
        if (row >= end) return;
        for (int side = 0; side < 2; side++)
            scale_products(d->x + (2 * row + side) * d->width,
                           d->column_scale + (2 * group + side) * d->width, d->row_scale[row],
                           d->width, values[side]);
        gate_values(gate, up, d->width, gate);
        d->scales[row] = quantize_row(gate, d->width, d->q + row * d->width);
    }
}

/* Rows of products [rows, 2 * width], in `groups` groups by `counts`, or one group if that is 0. */
int glm_dequant_swiglu_f32(int64_t rows, int64_t width, int64_t groups, int64_t is_left,
                           const int32_t *x, const float *column_scale, const float *row_scale,
                           const int64_t *counts, int8_t *q, float *scales) {
    int64_t total = 0;
    for (int64_t group = 0; group < groups; group++) {
        if (counts[group] < 0) return OUT_OF_RANGE;
        total += counts[group];
    }
    if (total > rows || width > MAX_GATED) return OUT_OF_RANGE;
    dequant_t d = {width, groups, is_left, x, column_scale, row_scale, counts, q, scales};
    over_rows(groups ? total : rows, 2 * width, gate_rows, &d);
    return OK;
}
