/* Sixteen elements at a time as float32, where the machine has instructions for it. */
#ifndef GLM_VECTOR_H
#define GLM_VECTOR_H

#include "elem.h"

#if GLM_AVX512
enum { VECTOR = 16 };

/* Lanes of the vector at `at` that lie before `end`. */
ALWAYS_INLINE __mmask16 lanes_before(int64_t at, int64_t end) {
    return end - at < VECTOR ? (__mmask16)((1u << (end - at)) - 1u) : (__mmask16)~0u;
}

/* Elements of a mask, zeros in the other lanes. */
ALWAYS_INLINE __m512 load_floats(__mmask16 mask, const elem_t *x) {
#ifdef ELEM_BF16
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
#else
    return _mm512_maskz_loadu_ps(mask, x);
#endif
}

ALWAYS_INLINE void store_floats(__mmask16 mask, __m512 values, elem_t *y) {
#ifdef ELEM_BF16
    _mm256_mask_storeu_epi16(y, mask, (__m256i)_mm512_cvtneps_pbh(values));
#else
    _mm512_mask_storeu_ps(y, mask, values);
#endif
}

/* fast_exp() of 16 numbers. */
ALWAYS_INLINE __m512 fast_exps(__m512 x) {
    /* The second operand is the result where one is no number. */
    x = _mm512_min_ps(_mm512_set1_ps(88.0f), _mm512_max_ps(_mm512_set1_ps(-87.0f), x));
    const __m512 big = _mm512_set1_ps(12582912.0f);
    __m512 shifted = _mm512_fmadd_ps(x, _mm512_set1_ps(1.44269504f), big);
    __m512 n = _mm512_sub_ps(shifted, big);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
    __m512i scale = _mm512_add_epi32(_mm512_slli_epi32(_mm512_castps_si512(shifted), 23),
                                     _mm512_set1_epi32(0x3f800000));
    return _mm512_mul_ps(p, _mm512_castsi512_ps(scale));
}
#endif

#endif
