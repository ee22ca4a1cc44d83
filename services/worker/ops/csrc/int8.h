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
 * Use: `i8_check` a weight once per call; `i8_offset` once per row; `i8_multiply` for each I8_COLUMNS
 * columns and up to I8_CHUNK rows of one matrix, which says what becomes of the sums (int8_finish.h).
 */
#ifndef GLM_INT8_H
#define GLM_INT8_H

#include "int8_finish.h"
#include "nz.h"
#include "repeat.h"

enum {
    I8_STRIP = NZ_STRIP, /* byte columns of a packed strip */
    I8_ROWS = 12,        /* rows whose sums fit the registers */
    I8_CHUNK = 48,       /* rows that share a strip while it is in the cache */
    I8_BLOCK = 256,      /* rows of a plain matrix that are packed at a time */
    I8_WIDE = 4,         /* strips that one row is multiplied with at a time */
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
#ifdef I8_VNNI
    const __m512i ones = _mm512_set1_epi8(1);
    __m512i totals = _mm512_setzero_si512();
    for (int64_t k = 0; k < inner; k += 64) {
        const __mmask64 mask = inner - k < 64 ? (1ull << (inner - k)) - 1ull : ~0ull;
        totals = _mm512_dpbusd_epi32(totals, ones, _mm512_maskz_loadu_epi8(mask, x + k));
    }
    const int32_t total = _mm512_reduce_add_epi32(totals);
#else
    int32_t total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t k = 0; k < inner; k++) total += x[k];
#endif
    return -total * (bits == 8 ? 128 : 8);
}

/* 4 values of a row. */
ALWAYS_INLINE int32_t i8_quad(const int8_t *x) {
    int32_t quad;
    memcpy(&quad, x, sizeof quad);
    return quad;
}

/* Some rows and where their sums come from and go to. */
typedef struct {
    int64_t row, stride, columns;
    const int8_t *x;          /* row `row` */
    const int32_t *offsets;   /* of all rows, where the sums start; NULL: they go on from `sums` */
    int32_t *sums;            /* [all rows][I8_COLUMNS] */
    const i8_finish_t *finish; /* NULL: sums go to `sums` */
} i8_rows_t;

/* x[row] . w[c] for up to I8_COLUMNS columns c of a packed strip, of which 4 rows are `step` bytes
 * apart. */
#define I8_ARGUMENTS const i8_rows_t *rows, const uint8_t *w, int64_t step, int64_t inner

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

/* `inner` rows of a packed strip for all rows of `r`, in tiles of about the same number of them. */
static void i8_strip(int64_t count, i8_rows_t r, const uint8_t *w, int64_t step, int64_t inner,
                     int bits) {
    const int64_t tiles = (count + I8_ROWS - 1) / I8_ROWS;
    const int8_t *x = r.x;
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t part = (count - r.row + tiles - tile - 1) / (tiles - tile);
        r.x = x + r.row * r.stride;
        i8_tile(part, &r, w, step, inner, bits);
        r.row += part;
    }
}

/* The same where `inner` may not be a multiple of 4. */
static void i8_any_strip(int64_t count, i8_rows_t r, const uint8_t *w, int64_t step, int64_t inner,
                         int bits) {
    const int64_t whole = inner / 4 * 4, left = inner - whole;
    i8_rows_t last = r;
    if (left > 0) r.finish = NULL;
    if (whole > 0 || left == 0) i8_strip(count, r, w, step, whole, bits);
    if (left == 0) return;
    int8_t rest[I8_CHUNK * 4] = {0};
    for (int64_t row = 0; row < count; row++)
        memcpy(rest + 4 * row, r.x + row * r.stride + whole, (size_t)left);
    last.x = rest;
    last.stride = 4;
    if (whole > 0) last.offsets = NULL;
    i8_strip(count, last, w + whole / 4 * step, step, 4, bits);
}

/* Products of up to I8_CHUNK rows with up to I8_COLUMNS columns from `column` on, a multiple of
 * I8_COLUMNS.
 *
 * offsets: of each row. finish: of these rows and columns. */
static void i8_multiply(const i8_matrix_t *m, int64_t column, int64_t count, const int8_t *x,
                        int64_t stride, const int32_t *offsets, const i8_finish_t *finish) {
    const int64_t row_bytes = m->outer * m->bits / 8, byte = column * m->bits / 8;
    int32_t sums[I8_CHUNK * I8_COLUMNS];
    i8_rows_t r = {.stride = stride, .x = x, .offsets = offsets, .sums = sums, .finish = finish};
    r.columns = m->outer - column < I8_COLUMNS ? m->outer - column : I8_COLUMNS;
    if (m->is_packed) {
        int64_t strip = byte / I8_STRIP * I8_STRIP;
        int64_t step = 4 * (row_bytes - strip < I8_STRIP ? row_bytes - strip : I8_STRIP);
        const uint8_t *w = m->bytes + nz_bytes(m->inner, strip) + 4 * (byte - strip);
        i8_any_strip(count, r, w, step, m->inner, m->bits);
        return;
    }
    uint8_t packed[I8_BLOCK * I8_STRIP];
    const int64_t width = r.columns * m->bits / 8;
    int64_t k = 0;
    do {
        const int64_t left = m->inner - k, rows = left < I8_BLOCK ? left : I8_BLOCK;
        r.finish = left > I8_BLOCK ? NULL : finish;
        nz_pack(m->bytes, row_bytes, byte, width, k, rows, packed);
        i8_any_strip(count, r, packed, 4 * width, rows, m->bits);
        k += rows;
        r.x += rows;
        r.offsets = NULL;
    } while (k < m->inner);
}

/* The columns from `column` on that one row is multiplied with at once, I8_WIDE strips of them or
 * none; returns how many. */
ALWAYS_INLINE int64_t i8_multiply_wide(const i8_matrix_t *m, int64_t column, const int8_t *x,
                                       int32_t offset, const i8_finish_t *finish) {
#ifdef I8_VNNI
    const int64_t columns = I8_WIDE * I8_COLUMNS;
    if (m->is_packed && m->bits == 8 && m->inner % 4 == 0 && column + columns <= m->outer) {
        const int64_t strip = nz_bytes(m->inner, I8_STRIP);
        i8_wide(x, m->bytes + nz_bytes(m->inner, column), strip, m->inner, offset, finish);
        return columns;
    }
#else
    (void)m, (void)column, (void)x, (void)offset, (void)finish;
#endif
    return 0;
}
#endif
