/* float16 as storage, and rounding to its precision. */
#ifndef GLM_HALF_H
#define GLM_HALF_H

#include "elem.h"

typedef uint16_t half_t;

ALWAYS_INLINE float half_to_float(half_t x) {
    uint32_t sign = (uint32_t)(x & 0x8000u) << 16, rest = x & 0x7fffu;
    if (rest < 0x0400u) { /* a multiple of 2^-24 */
        float value = (float)rest * 0x1p-24f;
        return sign ? -value : value;
    }
    uint32_t exponent = rest >= 0x7c00u ? 0x38000000u * 2 : 0x38000000u;
    union { uint32_t bits; float value; } wide = {.bits = sign | ((rest << 13) + exponent)};
    return wide.value;
}

/* Nearest even float16 of a number that is zero or at least 2^-14 in size, and below 65520. */
ALWAYS_INLINE float round_normal_half(float x) {
    union { float value; uint32_t bits; } wide = {.value = x};
    wide.bits = (wide.bits + 0xfffu + ((wide.bits >> 13) & 1u)) & ~0x1fffu;
    return wide.value;
}

/* Nearest even float16 of any number. */
ALWAYS_INLINE float round_half(float x) {
    float size = fabsf(x);
    if (size >= 65520.0f) return copysignf(INFINITY, x);
    /* Below 2^-14 the steps are 2^-24, which is a float's step between 0.5 and 1. */
    return size < 0x1p-14f ? (x + 0.75f) - 0.75f : round_normal_half(x);
}

#endif
