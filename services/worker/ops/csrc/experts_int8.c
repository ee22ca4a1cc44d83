/* Expert products in int8: rows sorted by group, each group with an int8 or int4 matrix of its own.
 *
 * Sums are exact, so a result depends on neither the batch nor the threads. Rows past the last group
 * are left as they are.
 */
#include "int8.h"

enum { PARALLEL_INT8 = 1 << 21 };
enum { NO_SCALE, SCALE_F32, SCALE_BF16, SCALE_BITS }; /* BITS: float32 in the low half of an int64 */

typedef struct {
    int64_t total_rows, groups, inner, outer, bits, is_packed, scale_type;
    const int8_t *x;
    const void *w, *scale;        /* scale: of each group's columns */
    const float *row_scale, *bias; /* bias: int4 only, what undoes the device's shift of the rows */
    const int32_t *w_sums;        /* int4 only: sum of each column's weights */
    int64_t strips;
    int64_t *starts;              /* first row of each group */
    int32_t *offsets;             /* where each row's sums start */
    float *gated;
    void *y;
} experts_t;

static void find_offsets(const void *context, int64_t first, int64_t last) {
    const experts_t *e = context;
    for (int64_t row = first; row < last; row++)
        e->offsets[row] = i8_offset(e->x + row * e->inner, e->inner, (int)e->bits);
}

/* Check the weight and the groups, and get work space, `gated` values per row in it. The caller
 * frees `starts`. */
static int open_experts(experts_t *e, int64_t is_counts, const int64_t *group_list, int64_t gated) {
    int status = i8_check(e->w, e->groups, e->inner, e->outer, (int)e->bits, (int)e->is_packed);
    if (status) return status;
    e->starts = malloc((size_t)(e->groups + 1) * sizeof(int64_t) +
                       (size_t)e->total_rows * (sizeof(int32_t) + (size_t)gated * sizeof(float)));
    if (!e->starts) return NO_MEMORY;
    e->offsets = (int32_t *)(e->starts + e->groups + 1);
    e->gated = (float *)(e->offsets + e->total_rows);
    int is_rising = 1;
    e->starts[0] = 0;
    for (int64_t group = 0; group < e->groups; group++) {
        e->starts[group + 1] = is_counts ? e->starts[group] + group_list[group] : group_list[group];
        is_rising &= e->starts[group + 1] >= e->starts[group];
    }
    if (!is_rising || e->starts[e->groups] > e->total_rows) {
        free(e->starts);
        return OUT_OF_RANGE;
    }
    over_rows(e->starts[e->groups], e->inner, find_offsets, e);
    return OK;
}

/* Items are (group, strip): a weight strip is read once for all rows of its group. */
static void run_strips(experts_t *e, int64_t columns, range_fn body) {
    e->strips = (columns + I8_COLUMNS - 1) / I8_COLUMNS;
    int64_t items = e->groups * e->strips;
    int is_large = e->starts[e->groups] * e->inner * e->outer > PARALLEL_INT8;
    glm_run(items, is_large ? 1 : items, body, e);
}

/* Numbers of a strip's columns that have to be found first. */
typedef struct {
    float factor[I8_COLUMNS], constant[I8_COLUMNS];
} columns_t;

/* Factors of `columns` columns in float32, in place or in `space`; NULL where results are sums. */
static const float *find_factors(const experts_t *e, int64_t first, int64_t columns, float *space) {
    union { uint32_t bits; float value; } number;
    if (e->scale_type == NO_SCALE) return NULL;
    if (e->scale_type == SCALE_F32) return (const float *)e->scale + first;
    if (e->scale_type == SCALE_BF16)
        for (int64_t c = 0; c < columns; c++) {
            number.bits = (uint32_t)((const uint16_t *)e->scale)[first + c] << 16;
            space[c] = number.value;
        }
    else
        for (int64_t c = 0; c < columns; c++) {
            number.bits = (uint32_t)((const int64_t *)e->scale)[first + c];
            space[c] = number.value;
        }
    return space;
}

/* What becomes of the sums of a group's rows from a column on, but for where they go. */
static i8_finish_t open_columns(const experts_t *e, int64_t group, int64_t column, int64_t columns,
                                columns_t *space) {
    const int64_t at = group * e->outer + column;
    i8_finish_t f = {.columns = columns, .factor = find_factors(e, at, columns, space->factor)};
    if (e->bits == 8 || !f.factor) return f;
    for (int64_t c = 0; c < columns; c++)
        space->constant[c] = e->bias[at + c] - 8.0f * (float)e->w_sums[at + c] * f.factor[c];
    f.constant = space->constant;
    return f;
}

ALWAYS_INLINE int64_t up_to(int64_t left, int64_t limit) { return left < limit ? left : limit; }

static void multiply_strips(const void *context, int64_t first, int64_t last) {
    const experts_t *e = context;
    columns_t space;
    for (int64_t item = first; item < last; item++) {
        int64_t group = item / e->strips, column = item % e->strips * I8_COLUMNS;
        int64_t columns = up_to(e->outer - column, I8_COLUMNS), end = e->starts[group + 1];
        if (e->starts[group] == end) continue;
        i8_matrix_t matrix =
            i8_matrix(e->w, group, e->inner, e->outer, (int)e->bits, (int)e->is_packed);
        i8_finish_t f = open_columns(e, group, column, columns, &space);
        f.y_stride = e->outer;
        for (int64_t row = e->starts[group]; row < end; row += I8_CHUNK) {
            const int64_t rows = up_to(end - row, I8_CHUNK), at = row * e->outer + column;
            f.y = f.factor ? (void *)((elem_t *)e->y + at) : (void *)((int32_t *)e->y + at);
            f.row_scale = f.factor ? e->row_scale + row : NULL;
            i8_multiply(&matrix, column, rows, e->x + row * e->inner, e->inner, e->offsets + row, &f);
        }
    }
}

int KERNEL(grouped_int8)(int64_t total_rows, int64_t groups, int64_t inner, int64_t outer,
                         int64_t is_counts, int64_t bits, int64_t is_packed, int64_t scale_type,
                         const int8_t *x, const void *w, const int64_t *group_list,
                         const void *scale, const float *row_scale, const float *bias,
                         const int32_t *w_sums, void *y) {
    experts_t e = {.total_rows = total_rows, .groups = groups, .inner = inner, .outer = outer,
                   .bits = bits, .is_packed = is_packed, .scale_type = scale_type, .x = x, .w = w,
                   .scale = scale, .row_scale = row_scale, .bias = bias, .w_sums = w_sums, .y = y};
    int status = open_experts(&e, is_counts, group_list, 0);
    if (status) return status;
    run_strips(&e, outer, multiply_strips);
    free(e.starts);
    return OK;
}

#ifndef ELEM_BF16
#include "gated_int8.c"
#endif
