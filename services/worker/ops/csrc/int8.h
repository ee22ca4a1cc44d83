/* Exact products of int8 rows with int8 or int4 matrices: the inner step of quantized products.
 *
 * A matrix lies plainly (ND: row by row; int4: two columns to a byte, the even one low) or packed
 * (nz.h), its columns being bytes. The top bit of each byte is flipped: an int8 weight is stored plus
 * 128 and thus unsigned, as the dot product instruction wants one factor. (For int4 that shifts odd
 * columns by 8; the tile does the same for even ones.) The layout does not depend on the bits, so a
 * weight may be packed as int8 bytes and viewed as int32 afterwards.
 *
 * Sums are exact integers, modulo 2^32 on the way: no result depends on the rows beside it, on
 * threads or on the instruction set.
 *
 * Use: `i8_check` a weight once per call; `i8_offset` once per row; `i8_sums` for each I8_COLUMNS
 * columns and up to I8_CHUNK rows of one matrix, then scale the sums.
 */
#ifndef GLM_INT8_H
#define GLM_INT8_H

#include "nz.h"
#include "repeat.h"

enum {
    I8_COLUMNS = 32, /* columns of a tile */
    I8_STRIP = NZ_STRIP, /* byte columns of a packed strip */
    I8_ROWS = 12,    /* rows whose sums fit the registers */
    I8_CHUNK = 48,   /* rows that share a strip while it is in the cache */
    I8_BLOCK = 256,  /* rows of a plain matrix that are packed at a time */
};

typedef struct {
    const uint8_t *bytes;
    int64_t inner, outer;
    int bits, is_packed;
} i8_matrix_t;

/* Bytes of a packed matrix, or of its first byte columns if they are whole strips. */
ALWAYS_INLINE int64_t nz_bytes(int64_t rows, int64_t row_bytes) {
    return (rows + 3) / 4 * 4 * row_bytes;
}

/* OK, or WRONG_LAYOUT for a part of a packed tensor or a copy of one. */
static int i8_check(const void *tensor, int64_t matrices, int64_t inner, int64_t outer, int bits,
                    int is_packed) {
    return nz_check(tensor, matrices, inner, outer * bits / 8, is_packed);
}

/* One matrix of a checked weight. */
ALWAYS_INLINE i8_matrix_t i8_matrix(const void *tensor, int64_t index, int64_t inner, int64_t outer,
                                    int bits, int is_packed) {
    const uint8_t *bytes = tensor;
    const int64_t row_bytes = outer * bits / 8;
    bytes += is_packed ? nz_first(row_bytes) + index * nz_bytes(inner, row_bytes)
                       : index * inner * row_bytes;
    return (i8_matrix_t){bytes, inner, outer, bits, is_packed};
}

/* Where the sums of a row start, so that the shift of the weights drops out. */
static int32_t i8_offset(const int8_t *x, int64_t inner, int bits) {
    int32_t total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t k = 0; k < inner; k++) total += x[k];
    return -total * (bits == 8 ? 128 : 8);
}

/* 4 values of a row. */
ALWAYS_INLINE int32_t i8_quad(const int8_t *x) {
    int32_t quad;
    memcpy(&quad, x, sizeof quad);
    return quad;
}

/* sums[row][c] += x[row] . w[c] for up to I8_COLUMNS columns c of a packed strip, of which 4 rows
 * are `step` bytes apart. */
#define I8_ARGUMENTS \
    const int8_t *x, int64_t stride, const uint8_t *w, int64_t step, int64_t columns, \
        int64_t inner, int32_t *sums

#include "int8_tile.h"

/* Pack up to I8_STRIP byte columns of `count` plain rows from row `k` on. */
static void nz_pack(const uint8_t *plain, int64_t row_bytes, int64_t column, int64_t width,
                    int64_t k, int64_t count, uint8_t *packed) {
    static const uint8_t zeros[I8_STRIP];
    const uint8_t *source = plain + k * row_bytes + column;
    for (int64_t first = 0; first < count; first += 4, packed += 4 * width) {
        const uint8_t *rows[4];
        for (int i = 0; i < 4; i++)
            rows[i] = first + i < count ? source + (first + i) * row_bytes : zeros;
        uint32_t quads[I8_STRIP];
        for (int64_t c = 0; c < width; c++)
            quads[c] = 0x80808080u ^ ((uint32_t)rows[0][c] | (uint32_t)rows[1][c] << 8 |
                                      (uint32_t)rows[2][c] << 16 | (uint32_t)rows[3][c] << 24);
        memcpy(packed, quads, (size_t)width * 4);
    }
}

static void i8_rows(int64_t rows, I8_ARGUMENTS, int bits) {
    const int64_t tiles = (rows + I8_ROWS - 1) / I8_ROWS, whole = inner / 4 * 4;
    for (int64_t tile = 0, row = 0; tile < tiles; tile++) {
        int64_t count = (rows - row + tiles - tile - 1) / (tiles - tile);
        i8_tile(count, x + row * stride, stride, w, step, columns, whole, sums + row * I8_COLUMNS,
                bits);
        if (inner > whole) {
            int8_t rest[I8_ROWS * 4] = {0};
            for (int64_t i = 0; i < count; i++)
                memcpy(rest + 4 * i, x + (row + i) * stride + whole, (size_t)(inner - whole));
            i8_tile(count, rest, 4, w + whole / 4 * step, step, columns, 4,
                    sums + row * I8_COLUMNS, bits);
        }
        row += count;
    }
}

/* Products of rows with up to I8_COLUMNS columns from `column` (a multiple of I8_COLUMNS) on.
 *
 * offsets: of each row. sums: [rows][I8_COLUMNS]; columns past the matrix hold nothing of use. */
static void i8_sums(const i8_matrix_t *m, int64_t column, int64_t rows, const int8_t *x,
                    int64_t stride, const int32_t *offsets, int32_t *sums) {
    const int64_t columns = m->outer - column < I8_COLUMNS ? m->outer - column : I8_COLUMNS;
    const int64_t row_bytes = m->outer * m->bits / 8, byte = column * m->bits / 8;
    for (int64_t row = 0; row < rows; row++)
        for (int c = 0; c < I8_COLUMNS; c++) sums[row * I8_COLUMNS + c] = offsets[row];
    if (m->is_packed) {
        int64_t strip = byte / I8_STRIP * I8_STRIP;
        int64_t step = 4 * (row_bytes - strip < I8_STRIP ? row_bytes - strip : I8_STRIP);
        i8_rows(rows, x, stride, m->bytes + nz_bytes(m->inner, strip) + 4 * (byte - strip), step,
                columns, m->inner, sums, m->bits);
        return;
    }
    uint8_t packed[I8_BLOCK * I8_STRIP];
    for (int64_t k = 0; k < m->inner; k += I8_BLOCK) {
        int64_t count = m->inner - k < I8_BLOCK ? m->inner - k : I8_BLOCK;
        int64_t width = columns * m->bits / 8;
        nz_pack(m->bytes, row_bytes, byte, width, k, count, packed);
        i8_rows(rows, x + k, stride, packed, 4 * width, columns, count, sums, m->bits);
    }
}
#endif
