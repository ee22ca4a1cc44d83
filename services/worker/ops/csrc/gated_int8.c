/* The gated unit on products in int8, and the quantization of its result: no element type. */
#include "quantize.h"

enum { MAX_GATED = 16384 };

ALWAYS_INLINE float gate(float left, float right) {
    return left / (1.0f + fast_exp(-left)) * right;
}

/* `i8_sums` for columns that may begin inside a strip. */
static void sum_columns(const i8_matrix_t *matrix, int64_t column, int64_t rows, const int8_t *x,
                        const int32_t *offsets, int32_t *sums) {
    int64_t shift = column % I8_COLUMNS, next = column - shift + I8_COLUMNS;
    i8_sums(matrix, column - shift, rows, x, matrix->inner, offsets, sums);
    if (shift == 0) return;
    int32_t others[I8_CHUNK * I8_COLUMNS] = {0};
    if (next < matrix->outer) i8_sums(matrix, next, rows, x, matrix->inner, offsets, others);
    for (int64_t row = 0; row < rows; row++) {
        int32_t *target = sums + row * I8_COLUMNS;
        memmove(target, target + shift, (size_t)(I8_COLUMNS - shift) * sizeof(int32_t));
        memcpy(target + I8_COLUMNS - shift, others + row * I8_COLUMNS,
               (size_t)shift * sizeof(int32_t));
    }
}

/* A strip's gate columns and the up columns beside them, scaled and joined. */
static void gate_strips(const void *context, int64_t first, int64_t last) {
    const experts_t *e = context;
    const int64_t half = e->outer / 2;
    int32_t sums[2][I8_CHUNK * I8_COLUMNS];
    columns_t scales[2] = {0};
    for (int64_t item = first; item < last; item++) {
        int64_t group = item / e->strips, column = item % e->strips * I8_COLUMNS;
        int64_t columns = up_to(half - column, I8_COLUMNS), end = e->starts[group + 1];
        if (e->starts[group] == end) continue;
        i8_matrix_t matrix =
            i8_matrix(e->w, group, e->inner, e->outer, (int)e->bits, (int)e->is_packed);
        for (int side = 0; side < 2; side++)
            load_columns(e, group, side * half + column, columns, &scales[side]);
        for (int64_t row = e->starts[group]; row < end; row += I8_CHUNK) {
            int64_t rows = up_to(end - row, I8_CHUNK);
            for (int side = 0; side < 2; side++)
                sum_columns(&matrix, side * half + column, rows, e->x + row * e->inner,
                            e->offsets + row, sums[side]);
            for (int64_t r = 0; r < rows; r++) {
                float left[I8_COLUMNS], right[I8_COLUMNS], scale = e->row_scale[row + r];
                scale_sums(sums[0] + r * I8_COLUMNS, &scales[0], scale, left);
                scale_sums(sums[1] + r * I8_COLUMNS, &scales[1], scale, right);
                for (int c = 0; c < I8_COLUMNS; c++) left[c] = gate(left[c], right[c]);
                memcpy(e->gated + (row + r) * half + column, left,
                       (size_t)columns * sizeof(float));
            }
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

static void gate_rows(const void *context, int64_t first, int64_t last) {
    const dequant_t *d = context;
    float gated[MAX_GATED];
    int64_t group = 0, end = d->groups ? d->counts[0] : last;
    for (int64_t row = first; row < last; row++) {
        while (row >= end && group + 1 < d->groups) end += d->counts[++group];
        if (row >= end) return;
        const int32_t *left = d->x + row * 2 * d->width, *right = left + d->width;
        const float *left_scale = d->column_scale + group * 2 * d->width;
        const float *right_scale = left_scale + d->width;
        float scale = d->row_scale[row];
#pragma omp simd
        for (int64_t i = 0; i < d->width; i++) {
            float a = (float)left[i] * left_scale[i] * scale;
            float b = (float)right[i] * right_scale[i] * scale;
            gated[i] = d->is_left ? gate(a, b) : gate(b, a);
        }
        d->scales[row] = quantize_row(gated, d->width, d->q + row * d->width);
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
