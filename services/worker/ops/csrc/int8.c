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

/* To the nearest whole number, half to even, within int8; NaN gives the lowest. */
ALWAYS_INLINE int8_t to_int8(float value) {
    value = value > -128.0f ? value : -128.0f;
    value = value < 127.0f ? value : 127.0f;
    return (int8_t)(int32_t)((value + 12582912.0f) - 12582912.0f); /* as fast_exp rounds */
}

static void quantize_by_one(const void *context, int64_t first, int64_t last) {
    const quantized_t *c = context;
    const float factor = to_float(*c->factors), shift = to_float(*c->shifts);
    for (int64_t row = first; row < last; row++) {
        const elem_t *x = c->x + row * c->stride;
        int8_t *q = c->q + row * c->width;
#pragma omp simd
        for (int64_t i = 0; i < c->width; i++) q[i] = to_int8(to_float(x[i]) * factor + shift);
    }
}

static void quantize_by_column(const void *context, int64_t first, int64_t last) {
    const quantized_t *c = context;
    for (int64_t row = first; row < last; row++) {
        const elem_t *x = c->x + row * c->stride;
        int8_t *q = c->q + row * c->width;
#pragma omp simd
        for (int64_t i = 0; i < c->width; i++)
            q[i] = to_int8(to_float(x[i]) * to_float(c->factors[i]) + to_float(c->shifts[i]));
    }
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

typedef struct {
    int64_t tokens, stride, flags, chunks;
    const int8_t *x;
    i8_matrix_t matrix;
    const void *scale, *bias;
    const float *row_scales;
    int32_t *offsets;
    void *y;
} quant_t;

/* A value is (sum + addend) * factor * the row's scale + shift. */
typedef struct {
    float factor[I8_COLUMNS], shift[I8_COLUMNS];
    int32_t addend[I8_COLUMNS];
} finish_t;

/* `count` numbers in float32. */
static void load_numbers(const void *numbers, int64_t first, int64_t count, int is_bf16,
                         float *out) {
    if (!is_bf16) {
        memcpy(out, (const float *)numbers + first, (size_t)count * sizeof(float));
        return;
    }
    const uint16_t *halves = (const uint16_t *)numbers + first;
    for (int64_t c = 0; c < count; c++) {
        union { uint32_t bits; float value; } number = {.bits = (uint32_t)halves[c] << 16};
        out[c] = number.value;
    }
}

static void load_finish(const quant_t *p, int64_t column, int64_t columns, finish_t *f) {
    if (p->flags & Q_ONE_SCALE) {
        load_numbers(p->scale, 0, 1, p->flags & Q_BF16_SCALE, f->factor);
        for (int c = 1; c < I8_COLUMNS; c++) f->factor[c] = f->factor[0];
    } else {
        load_numbers(p->scale, column, columns, p->flags & Q_BF16_SCALE, f->factor);
    }
    if (p->flags & Q_INT32_BIAS)
        memcpy(f->addend, (const int32_t *)p->bias + column, (size_t)columns * sizeof(int32_t));
    if (p->flags & (Q_F32_BIAS | Q_BF16_BIAS))
        load_numbers(p->bias, column, columns, p->flags & Q_BF16_BIAS, f->shift);
}

ALWAYS_INLINE int32_t added(int32_t a, int32_t b) { return (int32_t)((uint32_t)a + (uint32_t)b); }

ALWAYS_INLINE void narrow(const float values[I8_COLUMNS], elem_t *y) {
#if GLM_AVX512 && defined(ELEM_BF16)
    __m512 low = _mm512_loadu_ps(values), high = _mm512_loadu_ps(values + 16);
    _mm512_storeu_si512(y, (__m512i)_mm512_cvtne2ps_pbh(high, low));
#else
    for (int c = 0; c < I8_COLUMNS; c++) y[c] = from_float(values[c]);
#endif
}

static void store_row(const quant_t *p, const finish_t *f, int64_t row, int64_t column,
                      int64_t columns, const int32_t *sums) {
    const int64_t at = row * p->matrix.outer + column;
    if (p->flags & Q_SUMS) {
        for (int64_t c = 0; c < columns; c++) ((int32_t *)p->y)[at + c] = added(sums[c], f->addend[c]);
        return;
    }
    const float scale = p->flags & Q_ROW_SCALES ? p->row_scales[row] : 1.0f;
    float values[I8_COLUMNS];
    for (int c = 0; c < I8_COLUMNS; c++)
        values[c] = (float)added(sums[c], f->addend[c]) * f->factor[c] * scale + f->shift[c];
    elem_t *y = (elem_t *)p->y + at;
    if (columns == I8_COLUMNS)
        narrow(values, y);
    else
        for (int64_t c = 0; c < columns; c++) y[c] = from_float(values[c]);
}

/* Items are (strip, chunk of rows): neighbours share a strip. */
static void multiply_quant(const void *context, int64_t first, int64_t last) {
    const quant_t *p = context;
    int32_t sums[I8_CHUNK * I8_COLUMNS];
    finish_t finish = {.addend = {0}};
    /* Adding -0 changes no number, not even its sign. */
    for (int c = 0; c < I8_COLUMNS; c++) finish.shift[c] = -0.0f;
    for (int64_t item = first; item < last; item++) {
        const int64_t column = item / p->chunks * I8_COLUMNS, row = item % p->chunks * I8_CHUNK;
        const int64_t rows = p->tokens - row < I8_CHUNK ? p->tokens - row : I8_CHUNK;
        const int64_t left = p->matrix.outer - column;
        const int64_t columns = left < I8_COLUMNS ? left : I8_COLUMNS;
        load_finish(p, column, columns, &finish);
        i8_sums(&p->matrix, column, rows, p->x + row * p->stride, p->stride, p->offsets + row, sums);
        for (int64_t r = 0; r < rows; r++)
            store_row(p, &finish, row + r, column, columns, sums + r * I8_COLUMNS);
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
                 .bias = bias, .row_scales = row_scales, .y = y};
    p.offsets = malloc((size_t)(tokens + 1) * sizeof(int32_t));
    if (!p.offsets) return NO_MEMORY;
    over_rows(tokens, inner, find_quant_offsets, &p);
    int64_t items = (outer + I8_COLUMNS - 1) / I8_COLUMNS * p.chunks;
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
