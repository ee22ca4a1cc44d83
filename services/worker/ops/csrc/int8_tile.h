/* One tile of int8.h per instruction set: up to I8_ROWS rows by I8_COLUMNS columns; `inner` is a
 * multiple of 4. */
#ifndef GLM_INT8_TILE_H
#define GLM_INT8_TILE_H

#ifdef I8_VNNI
/* Sums by the type of their lanes: gcc copies a __m512i back and forth in the loop of int4. */
typedef int32_t i8_lanes_t __attribute__((vector_size(64)));

ALWAYS_INLINE i8_lanes_t i8_open(const int32_t *sums) {
    return (i8_lanes_t)_mm512_loadu_si512(sums);
}

ALWAYS_INLINE i8_lanes_t i8_all(int32_t number) { return (i8_lanes_t)_mm512_set1_epi32(number); }

ALWAYS_INLINE i8_lanes_t i8_add(i8_lanes_t sums, __m512i weights, __m512i quad) {
    return (i8_lanes_t)_mm512_dpbusd_epi32((__m512i)sums, weights, quad);
}

ALWAYS_INLINE i8_lanes_t i8_pick(__m512i which, i8_lanes_t a, i8_lanes_t b) {
    return (i8_lanes_t)_mm512_permutex2var_epi32((__m512i)a, which, (__m512i)b);
}

enum { I8_AHEAD = 4096 }; /* bytes between what is multiplied and asked for */

/* Columns in order: a and b; as they are added up: low and high. */
#define I8_DECLARE(r) i8_lanes_t a##r, b##r, low##r, high##r;
#define I8_START(r) low##r = high##r = i8_all(offsets[r]);
#define I8_OPEN(r) \
    a##r = i8_open(sums + (r) * I8_COLUMNS); \
    b##r = i8_open(sums + (r) * I8_COLUMNS + 16);
#define I8_CLOSE(r) \
    _mm512_storeu_si512(sums + (r) * I8_COLUMNS, (__m512i)a##r); \
    _mm512_storeu_si512(sums + (r) * I8_COLUMNS + 16, (__m512i)b##r);
#define I8_FINISH(r) i8_finish(&finish, rows->row + (r), (__m512i)a##r, (__m512i)b##r);
#define I8_ADD(r) \
    { \
        __m512i quad = _mm512_set1_epi32(i8_quad(x + (r) * stride)); \
        low##r = i8_add(low##r, first, quad); \
        high##r = i8_add(high##r, second, quad); \
    }

/* int8: 16 columns and 16 more. */
#define I8_LOAD8 \
    __m512i first = _mm512_maskz_loadu_epi32((__mmask16)mask, w); \
    __m512i second = _mm512_maskz_loadu_epi32((__mmask16)(mask >> 16), w + 64);
#define I8_TAKE8(r) low##r = a##r, high##r = b##r;
#define I8_GIVE8(r) a##r = low##r, b##r = high##r;

/* int4: 16 even columns and 16 odd ones. */
#define I8_LOAD4 \
    __m512i both = _mm512_maskz_loadu_epi32((__mmask16)mask, w); \
    __m512i first = _mm512_and_si512(_mm512_xor_si512(both, shift), nibble); \
    __m512i second = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
#define I8_TAKE4(r) low##r = i8_pick(even, a##r, b##r), high##r = i8_pick(odd, a##r, b##r);
#define I8_GIVE4(r) a##r = i8_pick(front, low##r, high##r), b##r = i8_pick(back, low##r, high##r);

#define I8_BODY(n, bits) \
    const int64_t stride = rows->stride; \
    int32_t *const sums = rows->sums + rows->row * I8_COLUMNS; \
    REPEAT_##n(I8_DECLARE) \
    if (rows->offsets) { \
        const int32_t *const offsets = rows->offsets + rows->row; \
        REPEAT_##n(I8_START) \
    } else { \
        REPEAT_##n(I8_OPEN) \
        REPEAT_##n(I8_TAKE##bits) \
    } \
    for (const int8_t *x = rows->x, *end = x + inner; x < end; x += 4, w += step) { \
        I8_LOAD##bits \
        __builtin_prefetch(w + I8_AHEAD); \
        __builtin_prefetch(w + I8_AHEAD + 64); \
        REPEAT_##n(I8_ADD) \
    } \
    REPEAT_##n(I8_GIVE##bits) \
    if (rows->finish) { \
        const i8_finish_t finish = *rows->finish; \
        REPEAT_##n(I8_FINISH) \
    } else { \
        REPEAT_##n(I8_CLOSE) \
    }

#define I8_TILE(n) \
    static void i8_tile8_##n(I8_ARGUMENTS) { \
        const uint32_t mask = i8_mask(rows->columns); \
        I8_BODY(n, 8) \
    } \
    static void i8_tile4_##n(I8_ARGUMENTS) { \
        const uint32_t mask = (1u << rows->columns / 2) - 1u; \
        const __m512i nibble = _mm512_set1_epi8(15), shift = _mm512_set1_epi8(8); \
        const __m512i even = \
            _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30); \
        const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1)); \
        const __m512i front = \
            _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23); \
        const __m512i back = _mm512_add_epi32(front, _mm512_set1_epi32(8)); \
        I8_BODY(n, 4) \
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

static void i8_tile(int64_t count, I8_ARGUMENTS, int bits) {
    static void (*const eight[I8_ROWS + 1])(I8_ARGUMENTS) = I8_NAMES(i8_tile8_);
    static void (*const four[I8_ROWS + 1])(I8_ARGUMENTS) = I8_NAMES(i8_tile4_);
    (bits == 8 ? eight : four)[count](rows, w, step, inner);
}

/* One row by I8_WIDE strips of int8, `strip` bytes apart: one strip's sums of a single row are too few
 * to hide the latency of adding to them. */
#define I8_WIDE_ADD(t) \
    low##t = i8_add(low##t, _mm512_loadu_si512(w + (t) * strip), quad); \
    high##t = i8_add(high##t, _mm512_loadu_si512(w + (t) * strip + 64), quad);
#define I8_WIDE_START(t) i8_lanes_t low##t = i8_all(offset), high##t = low##t;
#define I8_WIDE_FINISH(t) \
    { \
        const i8_finish_t part = i8_from_column(*finish, (t) * I8_COLUMNS); \
        i8_finish(&part, 0, (__m512i)low##t, (__m512i)high##t); \
    }

static void i8_wide(const int8_t *x, const uint8_t *w, int64_t strip, int64_t inner, int32_t offset,
                    const i8_finish_t *finish) {
    REPEAT_4(I8_WIDE_START)
    for (const int8_t *end = x + inner; x < end; x += 4, w += 4 * I8_STRIP) {
        const __m512i quad = _mm512_set1_epi32(i8_quad(x));
        REPEAT_4(I8_WIDE_ADD)
    }
    REPEAT_4(I8_WIDE_FINISH)
}
#else
#ifdef __AVX2__
#include <immintrin.h>
#endif

enum { I8_STEPS = 16, I8_LIMIT = 4 * I8_STEPS };

/* 4 weights of every column as float32, one plane of columns after the other; int4: the even columns
 * of a plane first. */
static void i8_unpack(const uint8_t *w, int64_t columns, int bits, float *planes) {
    uint32_t quads[I8_COLUMNS] = {0};
    memcpy(quads, w, (size_t)(columns * bits / 2));
    for (int i = 0; i < 32; i += 8, planes += I8_COLUMNS)
        if (bits == 8) {
            for (int c = 0; c < I8_COLUMNS; c++) planes[c] = (float)(int32_t)(quads[c] >> i & 255);
        } else {
            float *odd = planes + I8_COLUMNS / 2;
            for (int c = 0; c < I8_COLUMNS / 2; c++) {
                planes[c] = (float)(int32_t)((quads[c] >> i & 15) ^ 8);
                odd[c] = (float)(int32_t)(quads[c] >> (i + 4) & 15);
            }
        }
}

/* At most I8_LIMIT values of a row in float32, which every compiler multiplies well: their sums of
 * products below 256 * 128 are whole numbers below 2^24, hence exact. */
static void i8_plain(int64_t rows, const int8_t *x, int64_t stride, const uint8_t *w, int64_t step,
                     int64_t columns, int64_t inner, int32_t *sums, int bits) {
    float planes[I8_LIMIT * I8_COLUMNS], values[I8_LIMIT];
    for (; inner > 0; inner -= I8_LIMIT, x += I8_LIMIT, w += I8_STEPS * step) {
        const int64_t count = inner < I8_LIMIT ? inner : I8_LIMIT;
        for (int64_t k = 0; k < count; k += 4)
            i8_unpack(w + k / 4 * step, columns, bits, planes + k * I8_COLUMNS);
        for (int64_t row = 0; row < rows; row++) {
            float total[I8_COLUMNS] = {0};
            for (int64_t k = 0; k < count; k++) values[k] = x[row * stride + k];
            for (int64_t k = 0; k < count; k++)
                for (int c = 0; c < I8_COLUMNS; c++)
                    total[c] += values[k] * planes[k * I8_COLUMNS + c];
            uint32_t *y = (uint32_t *)sums + row * I8_COLUMNS;
            for (int64_t c = 0; c < columns; c++) {
                const int64_t lane = bits == 8 ? c : c / 2 + c % 2 * (I8_COLUMNS / 2);
                y[c] += (uint32_t)(int32_t)total[lane];
            }
        }
    }
}

#ifdef __AVX2__
enum { I8_HALF = I8_COLUMNS / 2 };

/* 4 weights of 4 columns and 4 values of a row as 16-bit numbers give 2 sums of each column. */
#define I8_OPEN(r) \
    __m256i a##r = _mm256_setzero_si256(), b##r = _mm256_setzero_si256(); \
    __m256i c##r = _mm256_setzero_si256(), d##r = _mm256_setzero_si256();
#define I8_ADD(r) \
    { \
        __m256i quad = _mm256_cvtepi8_epi16(_mm_set1_epi32(i8_quad(x + (r) * stride))); \
        a##r = _mm256_add_epi32(a##r, _mm256_madd_epi16(quad, a)); \
        b##r = _mm256_add_epi32(b##r, _mm256_madd_epi16(quad, b)); \
        c##r = _mm256_add_epi32(c##r, _mm256_madd_epi16(quad, c)); \
        d##r = _mm256_add_epi32(d##r, _mm256_madd_epi16(quad, d)); \
    }
#define I8_CLOSE8(r) \
    i8_store(i8_join(a##r, b##r), sums + (r) * I8_COLUMNS); \
    i8_store(i8_join(c##r, d##r), sums + (r) * I8_COLUMNS + 8);
#define I8_CLOSE4(r) i8_merge(i8_join(a##r, b##r), i8_join(c##r, d##r), sums + (r) * I8_COLUMNS);

ALWAYS_INLINE __m256i i8_join(__m256i left, __m256i right) {
    return _mm256_permute4x64_epi64(_mm256_hadd_epi32(left, right), 0xd8);
}

ALWAYS_INLINE void i8_store(__m256i added, int32_t *sums) {
    __m256i *y = (__m256i *)sums;
    _mm256_storeu_si256(y, _mm256_add_epi32(_mm256_loadu_si256(y), added));
}

ALWAYS_INLINE void i8_merge(__m256i even, __m256i odd, int32_t *sums) {
    __m256i a = _mm256_unpacklo_epi32(even, odd), b = _mm256_unpackhi_epi32(even, odd);
    i8_store(_mm256_permute2x128_si256(a, b, 0x20), sums);
    i8_store(_mm256_permute2x128_si256(a, b, 0x31), sums + 8);
}

#define I8_LOAD(at) _mm_loadu_si128((const __m128i *)(w + (at)))
#define I8_WIDE8(n) \
    for (; inner > 0; inner -= 4, x += 4, w += step) { \
        __m256i a = _mm256_cvtepu8_epi16(I8_LOAD(0)), b = _mm256_cvtepu8_epi16(I8_LOAD(16)); \
        __m256i c = _mm256_cvtepu8_epi16(I8_LOAD(32)), d = _mm256_cvtepu8_epi16(I8_LOAD(48)); \
        REPEAT_##n(I8_ADD) \
    }
/* The even columns of 8 bytes, then the odd ones. */
#define I8_WIDE4(n) \
    for (; inner > 0; inner -= 4, x += 4, w += step) { \
        __m128i left = I8_LOAD(0), right = I8_LOAD(16); \
        __m256i a = _mm256_cvtepu8_epi16(_mm_and_si128(_mm_xor_si128(left, shift), nibble)); \
        __m256i b = _mm256_cvtepu8_epi16(_mm_and_si128(_mm_xor_si128(right, shift), nibble)); \
        __m256i c = _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16(left, 4), nibble)); \
        __m256i d = _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16(right, 4), nibble)); \
        REPEAT_##n(I8_ADD) \
    }
#define I8_TILE(n) \
    static void i8_wide_##n(const int8_t *x, int64_t stride, const uint8_t *w, int64_t step, \
                            int64_t inner, int32_t *sums, int bits) { \
        const __m128i nibble = _mm_set1_epi8(15), shift = _mm_set1_epi8(8); \
        REPEAT_##n(I8_OPEN) \
        if (bits == 8) { \
            I8_WIDE8(n) \
            REPEAT_##n(I8_CLOSE8) \
        } else { \
            I8_WIDE4(n) \
            REPEAT_##n(I8_CLOSE4) \
        } \
    }

I8_TILE(1)
I8_TILE(2)

/* I8_HALF columns of every row. */
static void i8_wide(int64_t rows, const int8_t *x, int64_t stride, const uint8_t *w, int64_t step,
                    int64_t inner, int32_t *sums, int bits) {
    int64_t row = 0;
    for (; row + 2 <= rows; row += 2)
        i8_wide_2(x + row * stride, stride, w, step, inner, sums + row * I8_COLUMNS, bits);
    if (row < rows)
        i8_wide_1(x + row * stride, stride, w, step, inner, sums + row * I8_COLUMNS, bits);
}

static void i8_add(int64_t rows, const int8_t *x, int64_t stride, const uint8_t *w, int64_t step,
                   int64_t columns, int64_t inner, int32_t *sums, int bits) {
    for (; columns >= I8_HALF; columns -= I8_HALF, sums += I8_HALF, w += I8_HALF * bits / 2)
        i8_wide(rows, x, stride, w, step, inner, sums, bits);
    if (columns > 0) i8_plain(rows, x, stride, w, step, columns, inner, sums, bits);
}
#else
#define i8_add i8_plain
#endif

static void i8_tile(int64_t count, I8_ARGUMENTS, int bits) {
    int32_t *const sums = rows->sums + rows->row * I8_COLUMNS;
    for (int64_t row = 0; rows->offsets && row < count; row++)
        for (int c = 0; c < I8_COLUMNS; c++)
            sums[row * I8_COLUMNS + c] = rows->offsets[rows->row + row];
    i8_add(count, rows->x, rows->stride, w, step, rows->columns, inner, sums, bits);
    if (rows->finish) i8_finish_rows(rows->finish, rows->row, count, sums);
}
#endif
#endif
