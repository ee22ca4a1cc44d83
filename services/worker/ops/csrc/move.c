/* What a step does between its operators: rows looked up, copied, converted, added, cleared.
 *
 * These stand for torch's own in a recorded step, so they are exact as those are: a number is moved
 * as it is, or rounded once to the nearest even.
 */
#include "elem.h"
#include "half.h"

typedef struct {
    const elem_t *x;
    elem_t *y;
} add_t;

static void add_range(const void *context, int64_t first, int64_t last) {
    const add_t *a = context;
    for (int64_t i = first; i < last; i++) a->y[i] = from_float(to_float(a->y[i]) + to_float(a->x[i]));
}

int KERNEL(add)(int64_t count, const elem_t *x, elem_t *y) {
    add_t a = {x, y};
    over_rows(count, 1, add_range, &a);
    return OK;
}

#ifndef ELEM_BF16 /* types are arguments of the others */
typedef struct {
    int64_t row_bytes;
    const int64_t *index;
    const char *table;
    char *out;
} take_t;

static void take_range(const void *context, int64_t first, int64_t last) {
    const take_t *t = context;
    for (int64_t row = first; row < last; row++)
        memcpy(t->out + row * t->row_bytes, t->table + t->index[row] * t->row_bytes,
               (size_t)t->row_bytes);
}

int glm_take_rows_f32(int64_t rows, int64_t row_bytes, int64_t num_rows, const int64_t *index,
                      const char *table, char *out) {
    for (int64_t row = 0; row < rows; row++)
        if (index[row] < 0 || index[row] >= num_rows) return OUT_OF_RANGE;
    take_t t = {row_bytes, index, table, out};
    over_rows(rows, row_bytes / 2, take_range, &t);
    return OK;
}

/* Element types, as the caller numbers them. */
enum { T_F32, T_BF16, T_F16, T_I32, T_I64, T_BYTE, NUM_TYPES };

static const int64_t type_bytes[NUM_TYPES] = {4, 2, 2, 4, 8, 1};

typedef struct {
    int64_t width, from_stride, to_stride, from, to;
    const char *x;
    char *y;
} convert_t;

ALWAYS_INLINE float widened(uint16_t bf16) {
    union { uint32_t bits; float value; } wide = {.bits = (uint32_t)bf16 << 16};
    return wide.value;
}

ALWAYS_INLINE uint16_t narrowed(float x) {
    union { float value; uint32_t bits; } wide = {.value = x};
    uint32_t rounded = (wide.bits + 0x7fffu + ((wide.bits >> 16) & 1u)) >> 16;
    return x != x ? 0x7fc0u : (uint16_t)rounded;
}

ALWAYS_INLINE uint16_t halved(float x) {
    union { float value; uint32_t bits; } wide = {.value = x};
    uint32_t sign = wide.bits >> 16 & 0x8000u;
    if (x != x) return (uint16_t)(sign | 0x7e00u);
    wide.value = fabsf(round_half(x));
    if (wide.value < 0x1p-14f) return (uint16_t)(sign | (uint32_t)(wide.value * 0x1p24f));
    return (uint16_t)(sign | (wide.value > 65504.0f ? 0x7c00u : (wide.bits - 0x38000000u) >> 13));
}

/* from, to, their types in C, and the value of x[i] */
#define CONVERSIONS(with) \
    with(BF16, F32, uint16_t, float, widened(x[i])) \
    with(F32, BF16, float, uint16_t, narrowed(x[i])) \
    with(F32, F16, float, uint16_t, halved(x[i])) \
    with(BF16, F16, uint16_t, uint16_t, halved(widened(x[i]))) \
    with(F16, F32, uint16_t, float, half_to_float(x[i])) \
    with(I32, I64, int32_t, int64_t, x[i])

#define CONVERT(from, to, from_t, to_t, value) \
    case T_##from * NUM_TYPES + T_##to: { \
        const from_t *x = (const from_t *)source; \
        to_t *y = (to_t *)target; \
        for (int64_t i = 0; i < c->width; i++) y[i] = value; \
        break; \
    }
#define IS_KNOWN(from, to, from_t, to_t, value) case T_##from * NUM_TYPES + T_##to:

static void convert_range(const void *context, int64_t first, int64_t last) {
    const convert_t *c = context;
    for (int64_t row = first; row < last; row++) {
        const char *source = c->x + row * c->from_stride * type_bytes[c->from];
        char *target = c->y + row * c->to_stride * type_bytes[c->to];
        switch (c->from * NUM_TYPES + c->to) {
            CONVERSIONS(CONVERT)
        default: memcpy(target, source, (size_t)(c->width * type_bytes[c->to]));
        }
    }
}

static int is_convertible(int64_t from, int64_t to) {
    if (from < 0 || from >= NUM_TYPES || to < 0 || to >= NUM_TYPES) return 0;
    switch (from * NUM_TYPES + to) {
        CONVERSIONS(IS_KNOWN) return 1;
    default: return from == to;
    }
}

/* Rows of `width` numbers, rows apart by the strides; a copy where the types are the same. */
int glm_convert_f32(int64_t rows, int64_t width, int64_t from_stride, int64_t to_stride, int64_t from,
                    int64_t to, const void *x, void *y) {
    if (!is_convertible(from, to)) return OUT_OF_RANGE;
    convert_t c = {width, from_stride, to_stride, from, to, x, y};
    over_rows(rows, width, convert_range, &c);
    return OK;
}

int glm_clear_f32(int64_t bytes, void *y) {
    memset(y, 0, (size_t)bytes);
    return OK;
}

int glm_cumsum_f32(int64_t count, const int64_t *x, int64_t *y) {
    for (int64_t i = 0, total = 0; i < count; i++) y[i] = total += x[i];
    return OK;
}

/* What masks are made of and used for: only zeros are filled in. */

enum { EQUALS, LESS, NO_LESS };

/* Whether int32 or int64 numbers stand so to `value`, a byte each. */
int glm_compare_f32(int64_t count, int64_t is_wide, int64_t kind, int64_t value, const void *x,
                    uint8_t *y) {
    for (int64_t i = 0; i < count; i++) {
        int64_t number = is_wide ? ((const int64_t *)x)[i] : ((const int32_t *)x)[i];
        y[i] = kind == EQUALS ? number == value : (number < value) == (kind == LESS);
    }
    return OK;
}

int glm_either_f32(int64_t count, const uint8_t *x, const uint8_t *z, uint8_t *y) {
    for (int64_t i = 0; i < count; i++) y[i] = x[i] | z[i];
    return OK;
}

int glm_subtract_f32(int64_t count, int64_t value, const int64_t *x, int64_t *y) {
    for (int64_t i = 0; i < count; i++) y[i] = x[i] - value;
    return OK;
}

/* Rows of bytes copied, those whose mask is set as zeros; `mask_stride` 0: one mask for all. */
int glm_mask_rows_f32(int64_t rows, int64_t row_bytes, int64_t mask_stride, const char *x,
                      const uint8_t *mask, char *y) {
    for (int64_t row = 0; row < rows; row++) {
        if (mask[row * mask_stride])
            memset(y + row * row_bytes, 0, (size_t)row_bytes);
        else
            memmove(y + row * row_bytes, x + row * row_bytes, (size_t)row_bytes);
    }
    return OK;
}

int glm_at_least_f32(int64_t count, int64_t least, const int32_t *x, int32_t *y) {
    for (int64_t i = 0; i < count; i++) y[i] = x[i] < least ? (int32_t)least : x[i];
    return OK;
}

int glm_all_f32(int64_t count, const uint8_t *x, uint8_t *y) {
    *y = 1;
    for (int64_t i = 0; i < count; i++) *y &= x[i] != 0;
    return OK;
}

/* Rows first to first + count of a step of sequences: where each ends among them, and its keys as
 * its last row there sees them. The last entry is padding, with what rows are left. */
int glm_cut_lengths_f32(int64_t num_seqs, int64_t first, int64_t count, const int32_t *cum,
                        const int32_t *lens, int32_t *ends, int32_t *keys) {
    int64_t before = 0;
    for (int64_t i = 0; i < num_seqs; i++) {
        int64_t end = cum[i] - first, beyond = end > count ? end - count : 0;
        end = end < 0 ? 0 : end > count ? count : end;
        int64_t seen = lens[i] > beyond ? lens[i] - beyond : 0;
        ends[i] = (int32_t)end;
        keys[i] = end == before ? 0 : (int32_t)seen;
        before = end;
    }
    ends[num_seqs] = (int32_t)count;
    keys[num_seqs] = 0;
    return OK;
}
#endif
