/* The packed layout of weights (NZ).
 *
 * A matrix [rows, columns] is cut into strips of NZ_STRIP columns, one strip after the other. In a
 * strip, as many rows of a column as fill a word of 4 bytes are neighbours, then comes the next
 * column, then the next rows: 4 rows of int8, 2 of bf16, 1 of float32. Rows that the matrix lacks to
 * fill the last word are zero.
 */
#ifndef GLM_NZ_H
#define GLM_NZ_H

#include "elem.h"

enum {
    NZ_STRIP = 32,
    NZ_WORD = 4,
    NZ_HEADER = 64,
    NZ_OPAQUE = 0x93,
};

/* A packed tensor begins with one row of NZ_OPAQUE, up to a multiple of NZ_HEADER bytes, then has
 * this, then at NZ_HEADER bytes from it the matrices. Only the tensor's last stride is not 0, so
 * whoever reads it as a plain one sees the opaque row everywhere: a view is refused as not flat, a
 * copy by its content. */
typedef struct {
    int64_t matrices, rows, row_bytes;
} nz_header_t;

/* Where the header of a packed tensor is. */
ALWAYS_INLINE int64_t nz_header(int64_t row_bytes) {
    return (row_bytes + NZ_HEADER - 1) / NZ_HEADER * NZ_HEADER;
}

/* Where the matrices of a packed tensor are. */
ALWAYS_INLINE int64_t nz_first(int64_t row_bytes) { return nz_header(row_bytes) + NZ_HEADER; }

/* OK, or WRONG_LAYOUT for a part of a packed tensor or a copy of one. */
static int nz_check(const void *tensor, int64_t matrices, int64_t rows, int64_t row_bytes,
                    int is_packed) {
    const uint8_t *bytes = tensor;
    if (is_packed) {
        nz_header_t h;
        memcpy(&h, bytes + nz_header(row_bytes), sizeof h);
        int is_whole = h.matrices == matrices && h.rows == rows && h.row_bytes == row_bytes;
        return is_whole ? OK : WRONG_LAYOUT;
    }
    int64_t at = 0, size = matrices * rows * row_bytes;
    while (at < size && bytes[at] == NZ_OPAQUE) at++;
    return at < size || size == 0 ? OK : WRONG_LAYOUT;
}
#endif
