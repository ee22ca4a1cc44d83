/* Products of rows with per-group matrices [inner, outer]: experts, and heads.
 *
 * Each output element sums over the inner dimension in order, whatever the number of rows beside
 * it: results do not depend on the batch.
 */
#include "elem.h"

enum { ROWS = 8, COLUMNS = 32 };

#if GLM_AVX512 && defined(ELEM_BF16)
/* Columns per pass are 32; a pair of weight rows is interleaved in registers, which leaves the
 * columns as (0-3, 8-11, ...) and (4-7, 12-15, ...); the store puts them back in order. */
ALWAYS_INLINE void store_columns(__m512 low, __m512 high, elem_t *y, __mmask32 mask) {
    const __m512i front = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i back =
        _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    __m512 a = _mm512_permutex2var_ps(low, front, high);
    __m512 b = _mm512_permutex2var_ps(low, back, high);
    _mm512_mask_storeu_epi16(y, mask, (__m512i)_mm512_cvtne2ps_pbh(b, a));
}

ALWAYS_INLINE void tile(int rows, const elem_t *x, int64_t x_stride, const elem_t *w,
                        int64_t w_stride, int64_t inner, int64_t columns, elem_t *y,
                        int64_t y_stride) {
    __mmask32 mask = columns >= COLUMNS ? ~0u : (1u << columns) - 1u;
    __m512 low[ROWS], high[ROWS];
    for (int r = 0; r < rows; r++) low[r] = high[r] = _mm512_setzero_ps();
    int64_t k = 0;
    for (; k + 1 < inner; k += 2) {
        __m512i a = _mm512_maskz_loadu_epi16(mask, w + k * w_stride);
        __m512i b = _mm512_maskz_loadu_epi16(mask, w + (k + 1) * w_stride);
        __m512bh pair_low = (__m512bh)_mm512_unpacklo_epi16(a, b);
        __m512bh pair_high = (__m512bh)_mm512_unpackhi_epi16(a, b);
        for (int r = 0; r < rows; r++) {
            int32_t pair;
            memcpy(&pair, x + r * x_stride + k, sizeof pair);
            __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            low[r] = _mm512_dpbf16_ps(low[r], both, pair_low);
            high[r] = _mm512_dpbf16_ps(high[r], both, pair_high);
        }
    }
    if (k < inner) {
        __m512i a = _mm512_maskz_loadu_epi16(mask, w + k * w_stride);
        __m512i none = _mm512_setzero_si512();
        __m512bh pair_low = (__m512bh)_mm512_unpacklo_epi16(a, none);
        __m512bh pair_high = (__m512bh)_mm512_unpackhi_epi16(a, none);
        for (int r = 0; r < rows; r++) {
            __m512bh both = (__m512bh)_mm512_set1_epi32(x[r * x_stride + k]);
            low[r] = _mm512_dpbf16_ps(low[r], both, pair_low);
            high[r] = _mm512_dpbf16_ps(high[r], both, pair_high);
        }
    }
    for (int r = 0; r < rows; r++) store_columns(low[r], high[r], y + r * y_stride, mask);
}
#else
ALWAYS_INLINE void tile(int rows, const elem_t *x, int64_t x_stride, const elem_t *w,
                        int64_t w_stride, int64_t inner, int64_t columns, elem_t *y,
                        int64_t y_stride) {
    float total[ROWS][COLUMNS] = {{0}};
    for (int64_t k = 0; k < inner; k++) {
        float row[COLUMNS];
        for (int64_t c = 0; c < columns; c++) row[c] = to_float(w[k * w_stride + c]);
        for (int r = 0; r < rows; r++) {
            float factor = to_float(x[r * x_stride + k]);
#pragma omp simd
            for (int64_t c = 0; c < columns; c++) total[r][c] += factor * row[c];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) y[r * y_stride + c] = from_float(total[r][c]);
}
#endif

/* A tile of any number of rows; constant sizes let the compiler keep the sums in registers. */
static void tile_rows(int64_t rows, const elem_t *x, int64_t x_stride, const elem_t *w,
                      int64_t w_stride, int64_t inner, int64_t columns, elem_t *y,
                      int64_t y_stride) {
#define FIXED(n) \
    case n: \
        if (columns == COLUMNS) \
            tile(n, x, x_stride, w, w_stride, inner, COLUMNS, y, y_stride); \
        else \
            tile(n, x, x_stride, w, w_stride, inner, columns, y, y_stride); \
        break
    switch (rows) {
        FIXED(1);
        FIXED(2);
        FIXED(3);
        FIXED(4);
        FIXED(5);
        FIXED(6);
        FIXED(7);
        FIXED(8);
    }
#undef FIXED
}

/* One strip of COLUMNS columns for every row of a group. */
static void strip(int64_t rows, const elem_t *x, int64_t x_stride, const elem_t *w,
                  int64_t w_stride, int64_t inner, int64_t columns, elem_t *y, int64_t y_stride) {
    for (int64_t row = 0; row < rows; row += ROWS) {
        int64_t count = rows - row < ROWS ? rows - row : ROWS;
        tile_rows(count, x + row * x_stride, x_stride, w, w_stride, inner, columns,
                  y + row * y_stride, y_stride);
    }
}

int KERNEL(grouped_matmul)(int64_t total_rows, int64_t groups, int64_t inner, int64_t outer,
                           int64_t is_counts, const elem_t *x, const elem_t *w,
                           const int64_t *group_list, elem_t *y) {
    int64_t *starts = malloc((size_t)(groups + 1) * sizeof(int64_t));
    if (!starts) return NO_MEMORY;
    starts[0] = 0;
    for (int64_t group = 0; group < groups; group++)
        starts[group + 1] = is_counts ? starts[group] + group_list[group] : group_list[group];
    if (starts[groups] > total_rows) {
        free(starts);
        return OUT_OF_RANGE;
    }
    int64_t strips = (outer + COLUMNS - 1) / COLUMNS;
#pragma omp parallel for schedule(dynamic, 4) if (total_rows * inner * outer > 1 << 17)
    for (int64_t item = 0; item < groups * strips; item++) {
        int64_t group = item / strips, column = item % strips * COLUMNS;
        int64_t first = starts[group], rows = starts[group + 1] - first;
        if (rows <= 0) continue;
        int64_t columns = outer - column < COLUMNS ? outer - column : COLUMNS;
        strip(rows, x + first * inner, inner, w + group * inner * outer + column, outer, inner,
              columns, y + first * outer + column, outer);
    }
    free(starts);
    return OK;
}

/* [tokens, heads, inner] (any token and head stride) by [heads, inner, outer]. */
int KERNEL(head_matmul)(int64_t tokens, int64_t heads, int64_t inner, int64_t outer,
                        int64_t token_stride, int64_t head_stride, const elem_t *x, const elem_t *w,
                        elem_t *y) {
    enum { CHUNK = 64 };
    int64_t strips = (outer + COLUMNS - 1) / COLUMNS, chunks = (tokens + CHUNK - 1) / CHUNK;
#pragma omp parallel for schedule(dynamic, 4) if (tokens * heads * inner * outer > 1 << 17)
    for (int64_t item = 0; item < heads * chunks * strips; item++) {
        int64_t head = item / (chunks * strips), token = item / strips % chunks * CHUNK;
        int64_t column = item % strips * COLUMNS;
        int64_t rows = tokens - token < CHUNK ? tokens - token : CHUNK;
        int64_t columns = outer - column < COLUMNS ? outer - column : COLUMNS;
        strip(rows, x + token * token_stride + head * head_stride, token_stride,
              w + head * inner * outer + column, outer, inner, columns,
              y + (token * heads + head) * outer + column, heads * outer);
    }
    return OK;
}
