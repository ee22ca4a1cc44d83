/* int8 rows by an int8 matrix, the quantization of those rows, and the packing of matrices. */
#include "int8.h"
#include "quantize.h"

typedef struct {
    int64_t width, stride;
    const elem_t *x, *factors, *shifts; /* static: one of each, or one for each column */
    int8_t *q;
    float *scales;
} quantized_t;

static void quantize_by_row(const void *context, int64_t first, int64_t last) {
    const quantized_t *c = context;
    for (int64_t row = first; row < last; row++)
        c->scales[row] = quantize_row(c->x + row * c->stride, c->width, c->q + row * c->width);
}

int KERNEL(dynamic_quant)(int64_t rows, int64_t width, int64_t stride, const elem_t *x, int8_t *q,
                          float *scales) {
    quantized_t c = {.width = width, .stride = stride, .x = x, .q = q, .scales = scales};
    over_rows(rows, width, quantize_by_row, &c);
    return OK;
}

#if GLM_AVX512
/* To the nearest whole number, half to even, within int8; NaN gives the lowest. */
ALWAYS_INLINE void shift_to_int8(__mmask16 mask, __m512 x, __m512 factor, __m512 shift, int8_t *q) {
    const __m512 least = _mm512_set1_ps(-128.0f), most = _mm512_set1_ps(127.0f);
    x = _mm512_max_ps(_mm512_fmadd_ps(x, factor, shift), least); /* the second one for a NaN */
    store_int8(mask, _mm512_min_ps(x, most), q);
}

ALWAYS_INLINE void quantize_static(const quantized_t *c, const elem_t *x, int is_one, int8_t *q) {
    __m512 factor = _mm512_set1_ps(to_float(*c->factors)), shift = _mm512_set1_ps(to_float(*c->shifts));
    for (int64_t i = 0; i < c->width; i += VECTOR) {
        const __mmask16 mask = lanes_before(i, c->width);
        if (!is_one) factor = load_floats(mask, c->factors + i), shift = load_floats(mask, c->shifts + i);
        shift_to_int8(mask, load_floats(mask, x + i), factor, shift, q + i);
    }
}
#else
ALWAYS_INLINE int8_t to_int8(float value) {
    value = value > -128.0f ? value : -128.0f;
    value = value < 127.0f ? value : 127.0f;
    return (int8_t)(int32_t)((value + 12582912.0f) - 12582912.0f); /* as fast_exp rounds */
}

ALWAYS_INLINE void quantize_static(const quantized_t *c, const elem_t *x, int is_one, int8_t *q) {
    const float factor = to_float(*c->factors), shift = to_float(*c->shifts);
    if (is_one) {
#pragma omp simd
        for (int64_t i = 0; i < c->width; i++) q[i] = to_int8(to_float(x[i]) * factor + shift);
        return;
    }
#pragma omp simd
    for (int64_t i = 0; i < c->width; i++)
        q[i] = to_int8(to_float(x[i]) * to_float(c->factors[i]) + to_float(c->shifts[i]));
}
#endif

static void quantize_by_one(const void *context, int64_t first, int64_t last) {
    const quantized_t *c = context;
    for (int64_t row = first; row < last; row++)
        quantize_static(c, c->x + row * c->stride, 1, c->q + row * c->width);
}

static void quantize_by_column(const void *context, int64_t first, int64_t last) {
    const quantized_t *c = context;
    for (int64_t row = first; row < last; row++)
        quantize_static(c, c->x + row * c->stride, 0, c->q + row * c->width);
}

int KERNEL(quantize)(int64_t rows, int64_t width, int64_t stride, int64_t is_one, const elem_t *x,
                     const elem_t *factors, const elem_t *shifts, int8_t *q) {
    quantized_t c = {width, stride, x, factors, shifts, q, NULL};
    over_rows(rows, width, is_one ? quantize_by_one : quantize_by_column, &c);
    return OK;
}

/* What a product's numbers are, as bits of one argument. */
enum {
    Q_PACKED = 1,
    Q_ONE_SCALE = 2,
    Q_BF16_SCALE = 4,
    Q_ROW_SCALES = 8,
    Q_INT32_BIAS = 16,
    Q_F32_BIAS = 32,
    Q_BF16_BIAS = 64,
    Q_SUMS = 128, /* the result is the int32 sums */
};
/* A product in int8 takes half the time of one in bf16 (matmul.c). */
enum { PARALLEL_QUANT = 3 << 19 };

enum { ITEM_COLUMNS = I8_WIDE * I8_COLUMNS };

typedef struct {
    int64_t tokens, stride, flags, chunks, per_item; /* per_item: columns of an item */
    const int8_t *x;
    i8_matrix_t matrix;
    const void *scale, *bias;
    const float *row_scales;
    int32_t *offsets;
    void *y;
} quant_t;

/* Numbers of an item's columns, where they are not in float32 in memory. */
typedef struct {
    float factor[ITEM_COLUMNS], shift[ITEM_COLUMNS];
} numbers_t;

/* `count` numbers in float32, in place or from bf16 in `space`. */
static const float *load_numbers(const void *numbers, int64_t first, int64_t count, int is_bf16,
                                 float *space) {
    if (!is_bf16) return (const float *)numbers + first;
    const uint16_t *halves = (const uint16_t *)numbers + first;
    for (int64_t c = 0; c < count; c++) {
        union { uint32_t bits; float value; } number = {.bits = (uint32_t)halves[c] << 16};
        space[c] = number.value;
    }
    return space;
}

/* What becomes of the sums from a row and a column on. */
static i8_finish_t open_finish(const quant_t *p, int64_t row, int64_t column, int64_t columns,
                               numbers_t *space) {
    const int64_t at = row * p->matrix.outer + column;
    const int is_bf16 = p->flags & Q_BF16_SCALE, has_sums = p->flags & Q_SUMS;
    i8_finish_t f = {.columns = columns, .y_stride = p->matrix.outer};
    f.y = has_sums ? (void *)((int32_t *)p->y + at) : (void *)((elem_t *)p->y + at);
    if (p->flags & Q_INT32_BIAS) f.addend = (const int32_t *)p->bias + column;
    if (has_sums) return f;
    if (p->flags & Q_ONE_SCALE) {
        const float one = *load_numbers(p->scale, 0, 1, is_bf16, space->factor);
        for (int c = 0; c < ITEM_COLUMNS; c++) space->factor[c] = one;
        f.factor = space->factor;
    } else {
        f.factor = load_numbers(p->scale, column, columns, is_bf16, space->factor);
    }
    if (p->flags & (Q_F32_BIAS | Q_BF16_BIAS))
        f.shift = load_numbers(p->bias, column, columns, p->flags & Q_BF16_BIAS, space->shift);
    if (p->flags & Q_ROW_SCALES) f.row_scale = p->row_scales + row;
    return f;
}

/* Items are (columns, chunk of rows): neighbours share their columns. */
static void multiply_quant(const void *context, int64_t first, int64_t last) {
    const quant_t *p = context;
    numbers_t space;
    for (int64_t item = first; item < last; item++) {
        const int64_t row = item % p->chunks * I8_CHUNK, left = p->tokens - row;
        const int64_t rows = left < I8_CHUNK ? left : I8_CHUNK;
        const int8_t *x = p->x + row * p->stride;
        int64_t column = item / p->chunks * p->per_item, end = column + p->per_item, done;
        for (end = end < p->matrix.outer ? end : p->matrix.outer; column < end; column += done) {
            const i8_finish_t f = open_finish(p, row, column, end - column, &space);
            done = rows > 1 ? 0 : i8_multiply_wide(&p->matrix, column, x, p->offsets[row], &f);
            if (done) continue;
            i8_multiply(&p->matrix, column, rows, x, p->stride, p->offsets + row, &f);
            done = I8_COLUMNS;
        }
    }
}

static void find_quant_offsets(const void *context, int64_t first, int64_t last) {
    const quant_t *p = context;
    for (int64_t row = first; row < last; row++)
        p->offsets[row] = i8_offset(p->x + row * p->stride, p->matrix.inner, 8);
}

int KERNEL(quant_matmul)(int64_t tokens, int64_t inner, int64_t outer, int64_t stride, int64_t flags,
                         const int8_t *x, const void *w, const void *scale, const float *row_scales,
                         const void *bias, void *y) {
    const int is_packed = flags & Q_PACKED;
    const int status = i8_check(w, 1, inner, outer, 8, is_packed);
    if (status) return status;
    quant_t p = {.tokens = tokens, .stride = stride, .flags = flags,
                 .chunks = (tokens + I8_CHUNK - 1) / I8_CHUNK, .x = x,
                 .matrix = i8_matrix(w, 0, inner, outer, 8, is_packed), .scale = scale,
                 .bias = bias, .row_scales = row_scales, .y = y,
                 .per_item = tokens > 1 ? I8_COLUMNS : ITEM_COLUMNS};
    p.offsets = malloc((size_t)(tokens + 1) * sizeof(int32_t));
    if (!p.offsets) return NO_MEMORY;
    over_rows(tokens, inner, find_quant_offsets, &p);
    int64_t items = (outer + p.per_item - 1) / p.per_item * p.chunks;
    glm_run(items, tokens * inner * outer > PARALLEL_QUANT ? 1 : items, multiply_quant, &p);
    free(p.offsets);
    return OK;
}

#ifndef ELEM_BF16 /* bytes have no float type */
typedef struct {
    int64_t rows, row_bytes, strips;
    const uint8_t *plain;
    uint8_t *packed;
} packing_t;

static void pack_columns(const void *context, int64_t first, int64_t last) {
    const packing_t *p = context;
    for (int64_t item = first; item < last; item++) {
        const int64_t matrix = item / p->strips, column = item % p->strips * I8_STRIP;
        const int64_t left = p->row_bytes - column;
        nz_pack(p->plain + matrix * p->rows * p->row_bytes, p->row_bytes, column,
                left < I8_STRIP ? left : I8_STRIP, 0, p->rows,
                p->packed + matrix * nz_bytes(p->rows, p->row_bytes) + nz_bytes(p->rows, column));
    }
}

int KERNEL(pack_weights)(int64_t matrices, int64_t rows, int64_t row_bytes, const uint8_t *plain,
                         uint8_t *packed) {
    packing_t p = {rows, row_bytes, (row_bytes + I8_STRIP - 1) / I8_STRIP, plain, packed};
    over_rows(matrices * p.strips, rows * I8_STRIP, pack_columns, &p);
    return OK;
}
#endif
