/* What becomes of the sums of int8 products.
 *
 * A value is ((sum + addend) * factor + constant) * the row's scale + shift, rounded to elem_t; or a
 * result is the sum plus the addend. Everything but the factor may be missing.
 */
#ifndef GLM_INT8_FINISH_H
#define GLM_INT8_FINISH_H

#include "vector.h"

#if GLM_AVX512 && defined(__AVX512VNNI__)
#define I8_VNNI
#endif

enum { I8_COLUMNS = 32 }; /* columns of a tile */

typedef struct {
    int64_t columns;       /* of `y` that are stored; past them the arrays are not read */
    const int32_t *addend; /* of each column */
    const float *factor;   /* of each column; NULL: results are sums */
    const float *constant; /* of each column */
    const float *shift;    /* of each column */
    const float *row_scale; /* of each row */
    void *y;               /* [rows] of columns */
    int64_t y_stride;      /* elements from row to row */
} i8_finish_t;

/* The same for the columns from `column` on. */
ALWAYS_INLINE i8_finish_t i8_from_column(i8_finish_t f, int64_t column) {
    f.columns -= column;
    f.addend = f.addend ? f.addend + column : NULL;
    f.constant = f.constant ? f.constant + column : NULL;
    f.shift = f.shift ? f.shift + column : NULL;
    f.y = f.factor ? (void *)((elem_t *)f.y + column) : (void *)((int32_t *)f.y + column);
    f.factor = f.factor ? f.factor + column : NULL;
    return f;
}

#ifdef I8_VNNI
ALWAYS_INLINE __mmask32 i8_mask(int64_t columns) {
    return columns < I8_COLUMNS ? (1u << columns) - 1u : ~0u;
}

ALWAYS_INLINE __m512 i8_value(const i8_finish_t *f, __m512i sums, int at, __mmask16 mask,
                              __m512 row_scale) {
    __m512 value = _mm512_cvtepi32_ps(sums), factor = _mm512_maskz_loadu_ps(mask, f->factor + at);
    if (f->constant)
        value = _mm512_fmadd_ps(value, factor, _mm512_maskz_loadu_ps(mask, f->constant + at));
    else
        value = _mm512_mul_ps(value, factor);
    if (f->shift)
        return _mm512_fmadd_ps(value, row_scale, _mm512_maskz_loadu_ps(mask, f->shift + at));
    return f->row_scale ? _mm512_mul_ps(value, row_scale) : value;
}

/* One row's first I8_COLUMNS. */
ALWAYS_INLINE void i8_finish(const i8_finish_t *f, int64_t row, __m512i low, __m512i high) {
    const __mmask32 mask = i8_mask(f->columns);
    const __mmask16 front = (__mmask16)mask, back = (__mmask16)(mask >> 16);
    if (f->addend) {
        low = _mm512_add_epi32(low, _mm512_maskz_loadu_epi32(front, f->addend));
        high = _mm512_add_epi32(high, _mm512_maskz_loadu_epi32(back, f->addend + 16));
    }
    if (!f->factor) {
        int32_t *sums = (int32_t *)f->y + row * f->y_stride;
        _mm512_mask_storeu_epi32(sums, front, low);
        _mm512_mask_storeu_epi32(sums + 16, back, high);
        return;
    }
    const __m512 scale = _mm512_set1_ps(f->row_scale ? f->row_scale[row] : 1.0f);
    __m512 left = i8_value(f, low, 0, front, scale), right = i8_value(f, high, 16, back, scale);
    elem_t *y = (elem_t *)f->y + row * f->y_stride;
#ifdef ELEM_BF16
    _mm512_mask_storeu_epi16(y, mask, (__m512i)_mm512_cvtne2ps_pbh(right, left));
#else
    _mm512_mask_storeu_ps(y, front, left);
    _mm512_mask_storeu_ps(y + 16, back, right);
#endif
}
#endif

#ifndef I8_VNNI
/* I8_COLUMNS numbers of 4 bytes: those of an array that may be missing, or end earlier. */
ALWAYS_INLINE const void *i8_whole(const void *numbers, int64_t columns, const void *missing,
                                   void *space) {
    if (!numbers || columns == I8_COLUMNS) return numbers ? numbers : missing;
    memcpy(space, missing, I8_COLUMNS * sizeof(float));
    return memcpy(space, numbers, (size_t)columns * sizeof(float));
}

/* Rows of I8_COLUMNS sums. */
static void i8_finish_rows(const i8_finish_t *f, int64_t row, int64_t rows, const int32_t *sums) {
    /* Adding -0 changes no number, not even its sign. */
    static const float nothing[I8_COLUMNS] = {[0 ... I8_COLUMNS - 1] = -0.0f};
    static const int32_t zeros[I8_COLUMNS];
    const int64_t columns = f->columns < I8_COLUMNS ? f->columns : I8_COLUMNS;
    float space[4][I8_COLUMNS], values[I8_COLUMNS];
    int32_t whole[I8_COLUMNS];
    const int32_t *addend = i8_whole(f->addend, columns, zeros, space[0]);
    const float *factor = i8_whole(f->factor, columns, nothing, space[1]);
    const float *constant = i8_whole(f->constant, columns, nothing, space[2]);
    const float *shift = i8_whole(f->shift, columns, nothing, space[3]);
    for (const int64_t end = row + rows; row < end; row++, sums += I8_COLUMNS) {
        for (int c = 0; c < I8_COLUMNS; c++)
            whole[c] = (int32_t)((uint32_t)sums[c] + (uint32_t)addend[c]);
        if (!f->factor) {
            memcpy((int32_t *)f->y + row * f->y_stride, whole, (size_t)columns * sizeof(int32_t));
            continue;
        }
        const float scale = f->row_scale ? f->row_scale[row] : 1.0f;
        for (int c = 0; c < I8_COLUMNS; c++)
            values[c] = ((float)whole[c] * factor[c] + constant[c]) * scale + shift[c];
        elem_t *y = (elem_t *)f->y + row * f->y_stride;
        if (columns == I8_COLUMNS)
            for (int c = 0; c < I8_COLUMNS; c++) y[c] = from_float(values[c]);
        else
            for (int64_t c = 0; c < columns; c++) y[c] = from_float(values[c]);
    }
}
#endif

#endif
