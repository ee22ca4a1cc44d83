/* Two bf16 rows as pairs of one column: what the dot product instruction multiplies. */
#ifndef GLM_PAIRS_H
#define GLM_PAIRS_H

#include "elem.h"

#if GLM_AVX512 && defined(ELEM_BF16)
/* 32 columns of rows a and b: pairs[0] holds columns 0-3, 8-11, 16-19, 24-27, pairs[1] the rest. */
ALWAYS_INLINE void interleave(__m512i a, __m512i b, __m512bh pairs[2]) {
    pairs[0] = (__m512bh)_mm512_unpacklo_epi16(a, b);
    pairs[1] = (__m512bh)_mm512_unpackhi_epi16(a, b);
}

/* Round and store sums that were built from interleaved rows, columns in order again. */
ALWAYS_INLINE void store_pair(__m512 low, __m512 high, elem_t *y, __mmask32 mask) {
    const __m512i front = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i back =
        _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    __m512 a = _mm512_permutex2var_ps(low, front, high);
    __m512 b = _mm512_permutex2var_ps(low, back, high);
    _mm512_mask_storeu_epi16(y, mask, (__m512i)_mm512_cvtne2ps_pbh(b, a));
}
#endif

#endif
