/* One tile of int8.h per instruction set: up to I8_ROWS rows by the columns of one packed strip. */
#ifndef GLM_INT8_TILE_H
#define GLM_INT8_TILE_H

#if defined(__AVX512VNNI__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define I8_OPEN(r) \
    __m512i low##r = _mm512_loadu_si512(sums + (r) * I8_COLUMNS); \
    __m512i high##r = _mm512_loadu_si512(sums + (r) * I8_COLUMNS + 16);
#define I8_ADD_QUAD(r, bits) \
    { \
        __m512i quad = _mm512_set1_epi32(bits); \
        low##r = _mm512_dpbusd_epi32(low##r, first, quad); \
        high##r = _mm512_dpbusd_epi32(high##r, second, quad); \
    }
#define I8_ADD(r) I8_ADD_QUAD(r, i8_quad(x + (r) * stride))
#define I8_ADD_PART(r) I8_ADD_QUAD(r, i8_part(x + (r) * stride, inner))
#define I8_CLOSE(r) \
    _mm512_storeu_si512(sums + (r) * I8_COLUMNS, low##r); \
    _mm512_storeu_si512(sums + (r) * I8_COLUMNS + 16, high##r);
#define I8_LOAD(a, b) \
    __m512i a = _mm512_maskz_loadu_epi32((__mmask16)mask, w); \
    __m512i b = _mm512_maskz_loadu_epi32((__mmask16)(mask >> 16), w + 64);
#define I8_HALF(a, b, shift) \
    __m512i a = _mm512_and_si512(_mm512_srli_epi16(two, shift), nibble); \
    __m512i b = _mm512_and_si512(_mm512_srli_epi16(more, shift), nibble);

/* The rows left over by the steps of 4 (8) are added last, in a loop of one turn. */
#define I8_TILE(n) \
    static void i8_tile8_##n(I8_ARGUMENTS) { \
        const uint32_t mask = width < I8_COLUMNS ? (1u << width) - 1u : ~0u; \
        REPEAT_##n(I8_OPEN) \
        for (; inner >= 4; inner -= 4, x += 4, w += 4 * width) { \
            I8_LOAD(first, second) \
            REPEAT_##n(I8_ADD) \
        } \
        if (inner > 0) { \
            I8_LOAD(first, second) \
            REPEAT_##n(I8_ADD_PART) \
        } \
        REPEAT_##n(I8_CLOSE) \
    } \
    static void i8_tile4_##n(I8_ARGUMENTS) { \
        const uint32_t mask = width < I8_COLUMNS ? (1u << width) - 1u : ~0u; \
        const __m512i nibble = _mm512_set1_epi8(15); \
        REPEAT_##n(I8_OPEN) \
        for (; inner >= 8; inner -= 8, x += 8, w += 4 * width) { \
            I8_LOAD(two, more) \
            { \
                I8_HALF(first, second, 0) \
                REPEAT_##n(I8_ADD) \
            } \
            x += 4; \
            I8_HALF(first, second, 4) \
            REPEAT_##n(I8_ADD) \
            x -= 4; \
        } \
        if (inner > 0) { \
            I8_LOAD(two, more) \
            { \
                I8_HALF(first, second, 0) \
                REPEAT_##n(I8_ADD_PART) \
            } \
            x += 4, inner -= 4; \
            I8_HALF(first, second, 4) \
            REPEAT_##n(I8_ADD_PART) \
        } \
        REPEAT_##n(I8_CLOSE) \
    }

I8_TILE(1)
I8_TILE(2)
I8_TILE(3)
I8_TILE(4)
I8_TILE(5)
I8_TILE(6)
I8_TILE(7)
I8_TILE(8)
I8_TILE(9)
I8_TILE(10)
I8_TILE(11)
I8_TILE(12)

#define I8_NAMES(name) \
    {NULL,    name##1, name##2, name##3, name##4,  name##5, name##6, \
     name##7, name##8, name##9, name##10, name##11, name##12}

static void i8_tile(int64_t rows, I8_ARGUMENTS, int bits) {
    static void (*const eight[I8_ROWS + 1])(I8_ARGUMENTS) = I8_NAMES(i8_tile8_);
    static void (*const four[I8_ROWS + 1])(I8_ARGUMENTS) = I8_NAMES(i8_tile4_);
    (bits == 8 ? eight : four)[rows](x, stride, w, width, inner, sums);
}
#else
/* Columns `column` to `width`: 4 weights of each as 16-bit numbers, which compilers multiply well. */
static void i8_plain(int64_t rows, I8_ARGUMENTS, int64_t column, int bits) {
    const int64_t columns = width - column;
    for (; inner > 0; w += 4 * width)
        for (int half = 0; half < (bits == 8 ? 1 : 2); half++, x += 4, inner -= 4) {
            int16_t planes[4][I8_COLUMNS] = {{0}};
            const uint8_t *quads = w + 4 * column;
            for (int64_t c = 0; c < columns; c++)
                for (int i = 0; i < 4; i++)
                    planes[i][c] = bits == 8 ? quads[4 * c + i] : quads[4 * c + i] >> 4 * half & 15;
            for (int64_t row = 0; row < rows; row++) {
                int32_t part = i8_part(x + row * stride, inner);
                int8_t q[4];
                memcpy(q, &part, sizeof q);
                uint32_t *y = (uint32_t *)sums + row * I8_COLUMNS + column;
                for (int64_t c = 0; c < columns; c++)
                    y[c] += (uint32_t)(q[0] * planes[0][c] + q[1] * planes[1][c] +
                                       q[2] * planes[2][c] + q[3] * planes[3][c]);
            }
        }
}

static void i8_tile(int64_t rows, I8_ARGUMENTS, int bits) {
    i8_plain(rows, x, stride, w, width, inner, sums, 0, bits);
}
#endif
#endif
