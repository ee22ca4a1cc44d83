/* Exact products of int8 rows with int8 or int4 matrices: the inner step of quantized products.
 *
 * A matrix lies plainly (ND: row by row; int4: two columns to a byte, the even one low) or packed
 * (NZ). Packed, it is cut into strips of I8_COLUMNS columns, one strip after the other; in a strip, 4
 * rows (int4: 8) of one column are 4 neighbouring bytes, then comes the next column, then the next 4
 * (8) rows. A weight is stored plus 128 (int4: plus 8) and thus unsigned, as the dot product
 * instruction wants one factor; a byte of int4 holds rows k (low) and k + 4 of its 8.
 *
 * Sums are exact integers, modulo 2^32 on the way: no result depends on the rows beside it, on
 * threads or on the instruction set.
 *
 * Use: `i8_check` a weight once per call; `i8_offset` once per row; `i8_sums` for each strip and up
 * to I8_CHUNK rows of one matrix, then scale the sums.
 */
#ifndef GLM_INT8_H
#define GLM_INT8_H

#include "elem.h"
#include "repeat.h"

enum {
    I8_COLUMNS = 32, /* columns of a strip */
    I8_ROWS = 12,    /* rows whose sums fit the registers */
    I8_CHUNK = 48,   /* rows that share a strip while it is in the cache */
    I8_BLOCK = 256,  /* rows of a plain matrix that are packed at a time */
    NZ_HEADER = 64,
    NZ_OPAQUE = 0x93,
};

/* What a packed tensor begins with. The tensor's strides are all 0, so whoever reads it as a plain
 * one sees `opaque` everywhere: a view is refused as not flat, a copy by its content. */
typedef struct {
    uint8_t opaque[8];
    int64_t matrices, inner, outer, bits;
} nz_header_t;

typedef struct {
    const uint8_t *bytes;
    int64_t inner, outer;
    int bits, is_packed;
} i8_matrix_t;

/* Bytes of a packed matrix, or of its first `outer` columns if they are whole strips. */
ALWAYS_INLINE int64_t nz_bytes(int64_t inner, int64_t outer, int bits) {
    int64_t depth = bits == 8 ? 4 : 8;
    return (inner + depth - 1) / depth * 4 * outer;
}

/* OK, or WRONG_LAYOUT for a part of a packed tensor or a copy of one. */
static int i8_check(const void *tensor, int64_t matrices, int64_t inner, int64_t outer, int bits,
                    int is_packed) {
    if (is_packed) {
        const nz_header_t *h = tensor;
        int is_whole = h->matrices == matrices && h->inner == inner && h->outer == outer;
        return is_whole && h->bits == bits ? OK : WRONG_LAYOUT;
    }
    const uint8_t *bytes = tensor;
    int64_t at = 0, size = inner * outer * bits / 8;
    while (at < size && bytes[at] == NZ_OPAQUE) at++;
    return at < size ? OK : WRONG_LAYOUT;
}

/* One matrix of a checked weight. */
ALWAYS_INLINE i8_matrix_t i8_matrix(const void *tensor, int64_t index, int64_t inner, int64_t outer,
                                    int bits, int is_packed) {
    const uint8_t *bytes = tensor;
    bytes += is_packed ? NZ_HEADER + index * nz_bytes(inner, outer, bits)
                       : index * (inner * outer * bits / 8);
    return (i8_matrix_t){bytes, inner, outer, bits, is_packed};
}

/* Where the sums of a row start, so that the shift of the weights drops out. */
static int32_t i8_offset(const int8_t *x, int64_t inner, int bits) {
    int32_t total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t k = 0; k < inner; k++) total += x[k];
    return -total * (bits == 8 ? 128 : 8);
}

/* 4 values of a row; `i8_part`: the next `count` of them and zeros. */
ALWAYS_INLINE int32_t i8_quad(const int8_t *x) {
    int32_t quad;
    memcpy(&quad, x, sizeof quad);
    return quad;
}

static int32_t i8_part(const int8_t *x, int64_t count) {
    int32_t quad = 0;
    if (count > 0) memcpy(&quad, x, count < 4 ? (size_t)count : sizeof quad);
    return quad;
}

/* sums[row][column] += x[row] . w[column], for the `width` columns of a packed strip. */
#define I8_ARGUMENTS \
    const int8_t *x, int64_t stride, const uint8_t *w, int64_t width, int64_t inner, int32_t *sums

#include "int8_tile.h"

/* Pack up to I8_COLUMNS columns of `count` plain rows from row `k` on. */
static void i8_pack(const i8_matrix_t *m, int64_t column, int64_t width, int64_t k, int64_t count,
                    uint8_t *packed) {
    const int depth = m->bits == 8 ? 4 : 8;
    const int64_t row_bytes = m->outer * m->bits / 8;
    const uint8_t *source = m->bytes + k * row_bytes + column * m->bits / 8;
    for (int64_t first = 0; first < count; first += depth, packed += 4 * width) {
        const uint8_t *rows[8];
        /* Past the end any row will do: it is multiplied by zeros. */
        for (int i = 0; i < depth; i++)
            rows[i] = source + (first + i < count ? first + i : first) * row_bytes;
        uint32_t quads[I8_COLUMNS];
        if (m->bits == 8)
            for (int64_t c = 0; c < width; c++)
                quads[c] = 0x80808080u ^ ((uint32_t)rows[0][c] | (uint32_t)rows[1][c] << 8 |
                                          (uint32_t)rows[2][c] << 16 | (uint32_t)rows[3][c] << 24);
        else
            for (int64_t c = 0; c < width; c++) {
                uint32_t quad = 0;
                for (int i = 0; i < 8; i++)
                    quad |= (uint32_t)(rows[i][c / 2] >> (c % 2 * 4) & 15)
                            << (i % 4 * 8 + i / 4 * 4);
                quads[c] = quad ^ 0x88888888u;
            }
        memcpy(packed, quads, (size_t)width * 4);
    }
}

static void i8_rows(int64_t rows, I8_ARGUMENTS, int bits) {
    int64_t tiles = (rows + I8_ROWS - 1) / I8_ROWS;
    for (int64_t tile = 0, row = 0; tile < tiles; tile++) {
        int64_t count = (rows - row + tiles - tile - 1) / (tiles - tile);
        i8_tile(count, x + row * stride, stride, w, width, inner, sums + row * I8_COLUMNS, bits);
        row += count;
    }
}

/* Products of rows with up to I8_COLUMNS columns from `column` (a multiple of I8_COLUMNS) on.
 *
 * offsets: of each row. sums: [rows][I8_COLUMNS]; columns past the matrix hold nothing of use. */
static void i8_sums(const i8_matrix_t *m, int64_t column, int64_t rows, const int8_t *x,
                    int64_t stride, const int32_t *offsets, int32_t *sums) {
    int64_t width = m->outer - column < I8_COLUMNS ? m->outer - column : I8_COLUMNS;
    for (int64_t row = 0; row < rows; row++)
        for (int c = 0; c < I8_COLUMNS; c++) sums[row * I8_COLUMNS + c] = offsets[row];
    if (m->is_packed) {
        const uint8_t *strip = m->bytes + nz_bytes(m->inner, column, m->bits);
        i8_rows(rows, x, stride, strip, width, m->inner, sums, m->bits);
        return;
    }
    uint8_t packed[I8_BLOCK * I8_COLUMNS];
    for (int64_t k = 0; k < m->inner; k += I8_BLOCK) {
        int64_t count = m->inner - k < I8_BLOCK ? m->inner - k : I8_BLOCK;
        i8_pack(m, column, width, k, count, packed);
        i8_rows(rows, x + k, stride, packed, width, count, sums, m->bits);
    }
}
#endif
