/* Products of a few rows with packed columns of a float matrix.
 *
 * A tile is two vectors of columns wide. Each sum takes its products in the order of the inner
 * dimension, in pairs where an instruction multiplies pairs: what a row gives does not depend on the
 * rows beside it, nor on how a product is cut into tiles.
 */
#ifndef GLM_TILE_H
#define GLM_TILE_H

#include "nz.h"
#include "repeat.h"

/* Bytes of a vector, rows whose sums fit the registers, and the kind of register. */
#if defined(__AVX512F__)
#define TILE_BYTES 64
#define TILE_ROWS 12
#define REGISTER "+v"
#elif defined(__AVX2__)
#define TILE_BYTES 32
#ifdef ELEM_BF16
#define TILE_ROWS 4
#else
#define TILE_ROWS 6
#endif
#define REGISTER "+x"
#elif defined(__aarch64__)
#define TILE_BYTES 16
#define TILE_ROWS 8
#define REGISTER "+w"
#else
#define TILE_BYTES 16
#define TILE_ROWS 4
#endif

/* gcc would rather load words again for every row than keep them in a register. */
#ifdef REGISTER
#define KEEP(words) __asm__("" : REGISTER(words))
#else
#define KEEP(words)
#endif

enum {
    TILE_LANES = TILE_BYTES / NZ_WORD,
    TILE_COLUMNS = 2 * TILE_LANES,
    STRIP_TILES = NZ_STRIP / TILE_COLUMNS,
    WIDE_TILES = 4,
    WIDE_STRIPS = (WIDE_TILES + STRIP_TILES - 1) / STRIP_TILES,
    PER_WORD = NZ_WORD / sizeof(elem_t),
    VECTOR_STEP = TILE_LANES * PER_WORD, /* elements of a vector of words */
    STRIP_STEP = NZ_STRIP * PER_WORD,    /* elements from words to those of the next rows */
    AHEAD = 4096 / sizeof(elem_t),       /* elements between what is multiplied and asked for */
};

typedef float lanes_f __attribute__((vector_size(TILE_BYTES), aligned(4), may_alias));
typedef uint32_t lanes_u __attribute__((vector_size(TILE_BYTES), aligned(4), may_alias));

/* A word of a row, its last one if that is not full, words of a vector of columns, and the sums with
 * their products added. */
#if GLM_AVX512 && defined(ELEM_BF16)
typedef __m512bh value_t, words_t;

ALWAYS_INLINE value_t value_of(const elem_t *x) {
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return (value_t)_mm512_set1_epi32(pair);
}
ALWAYS_INLINE value_t last_value_of(const elem_t *x) { return (value_t)_mm512_set1_epi32(*x); }
ALWAYS_INLINE words_t words_at(const elem_t *w) { return (words_t)_mm512_loadu_si512(w); }
#define KEEP_WORDS(words) KEEP(words)
ALWAYS_INLINE lanes_f add_products(lanes_f sums, value_t value, words_t words) {
    return (lanes_f)_mm512_dpbf16_ps((__m512)sums, value, words);
}
#elif defined(ELEM_BF16)
typedef struct {
    float first, second;
} value_t;
typedef struct {
    lanes_f first, second;
} words_t;

ALWAYS_INLINE value_t value_of(const elem_t *x) {
    return (value_t){to_float(x[0]), to_float(x[1])};
}
ALWAYS_INLINE value_t last_value_of(const elem_t *x) { return (value_t){to_float(*x), 0.0f}; }
ALWAYS_INLINE words_t words_at(const elem_t *w) {
    lanes_u words = *(const lanes_u *)w;
    return (words_t){(lanes_f)(words << 16), (lanes_f)(words & 0xffff0000u)};
}
#define KEEP_WORDS(words) \
    KEEP(words.first); \
    KEEP(words.second)
ALWAYS_INLINE lanes_f add_products(lanes_f sums, value_t value, words_t words) {
    sums += words.first * value.first;
    return sums + words.second * value.second;
}
#else
typedef float value_t;
typedef lanes_f words_t;

ALWAYS_INLINE value_t value_of(const elem_t *x) { return *x; }
ALWAYS_INLINE value_t last_value_of(const elem_t *x) { return *x; }
ALWAYS_INLINE words_t words_at(const elem_t *w) { return *(const lanes_f *)w; }
#define KEEP_WORDS(words) KEEP(words)
ALWAYS_INLINE lanes_f add_products(lanes_f sums, value_t value, words_t words) {
    return sums + words * value;
}
#endif

#if GLM_AVX512 && defined(ELEM_BF16)
ALWAYS_INLINE void store_tile(lanes_f low, lanes_f high, elem_t *y) {
    _mm512_storeu_si512(y, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
}
#else
typedef elem_t lanes_e
    __attribute__((vector_size(TILE_LANES * sizeof(elem_t)), aligned(sizeof(elem_t)), may_alias));

ALWAYS_INLINE void store_lanes(lanes_f sums, elem_t *y) {
#ifdef ELEM_BF16 /* as from_float() does */
    lanes_u bits = (lanes_u)sums, is_nan = (lanes_u)(sums != sums);
    lanes_u rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, nan = (bits >> 16) | 0x40u;
    *(lanes_e *)y = __builtin_convertvector((nan & is_nan) | (rounded & ~is_nan), lanes_e);
#else
    *(lanes_e *)y = sums;
#endif
}
ALWAYS_INLINE void store_tile(lanes_f low, lanes_f high, elem_t *y) {
    store_lanes(low, y);
    store_lanes(high, y + TILE_LANES);
}
#endif

/* Words of a tile's first column are at `w`, those of the next rows `step` elements further. */
#define TILE_ARGUMENTS \
    const elem_t *x, int64_t stride, const elem_t *w, int64_t step, int64_t inner, elem_t *y, \
        int64_t y_stride

#define TILE_OPEN(r) lanes_f low##r = {0}, high##r = {0};
#define TILE_TURN(r, value) \
    low##r = add_products(low##r, value, low_words); \
    high##r = add_products(high##r, value, high_words);
#define TILE_ADD(r) TILE_TURN(r, value_of(x + (r) * stride))
#define TILE_ADD_LAST(r) TILE_TURN(r, last_value_of(x + (r) * stride))
#define TILE_CLOSE(r) store_tile(low##r, high##r, y + (r) * y_stride);

#define TILE(n) \
    static void tile_##n(TILE_ARGUMENTS) { \
        REPEAT_##n(TILE_OPEN) \
        int64_t k = 0; \
        for (; k + PER_WORD <= inner; k += PER_WORD, x += PER_WORD, w += step) { \
            words_t low_words = words_at(w), high_words = words_at(w + VECTOR_STEP); \
            KEEP_WORDS(low_words); \
            KEEP_WORDS(high_words); \
            __builtin_prefetch(w + AHEAD); \
            __builtin_prefetch(w + AHEAD + VECTOR_STEP); \
            REPEAT_##n(TILE_ADD) \
        } \
        if (k < inner) { \
            words_t low_words = words_at(w), high_words = words_at(w + VECTOR_STEP); \
            REPEAT_##n(TILE_ADD_LAST) \
        } \
        REPEAT_##n(TILE_CLOSE) \
    }

TILE(1)
TILE(2)
TILE(3)
TILE(4)
#if TILE_ROWS > 4
TILE(5)
TILE(6)
#endif
#if TILE_ROWS > 6
TILE(7)
TILE(8)
#endif
#if TILE_ROWS > 8
TILE(9)
TILE(10)
TILE(11)
TILE(12)
#endif

static void (*const tiles[TILE_ROWS + 1])(TILE_ARGUMENTS) = {
    NULL, tile_1, tile_2, tile_3, tile_4,
#if TILE_ROWS > 4
    tile_5, tile_6,
#endif
#if TILE_ROWS > 6
    tile_7, tile_8,
#endif
#if TILE_ROWS > 8
    tile_9, tile_10, tile_11, tile_12,
#endif
};

/* The same for sums that go on: float32 rows that are multiplied by a factor each before, or that
 * begin here where factors are NULL. Rows come by fours. */
#define SUM_TILE_ARGUMENTS \
    const elem_t *x, int64_t stride, const elem_t *w, int64_t step, int64_t inner, \
        const float *factors, float *sums, int64_t sums_stride

#define SUM_OPEN(r) \
    lanes_f low##r = {0}, high##r = {0}; \
    if (factors) { \
        low##r = *(const lanes_f *)(sums + (r) * sums_stride) * factors[r]; \
        high##r = *(const lanes_f *)(sums + (r) * sums_stride + TILE_LANES) * factors[r]; \
    } \
    KEEP(low##r); /* or the first product might be fused with this one */ \
    KEEP(high##r);
#define SUM_CLOSE(r) \
    *(lanes_f *)(sums + (r) * sums_stride) = low##r; \
    *(lanes_f *)(sums + (r) * sums_stride + TILE_LANES) = high##r;

#define SUM_TILE(n) \
    static void sum_tile_##n(SUM_TILE_ARGUMENTS) { \
        REPEAT_##n(SUM_OPEN) \
        int64_t k = 0; \
        for (; k + PER_WORD <= inner; k += PER_WORD, x += PER_WORD, w += step) { \
            words_t low_words = words_at(w), high_words = words_at(w + VECTOR_STEP); \
            KEEP_WORDS(low_words); \
            KEEP_WORDS(high_words); \
            REPEAT_##n(TILE_ADD) \
        } \
        if (k < inner) { \
            words_t low_words = words_at(w), high_words = words_at(w + VECTOR_STEP); \
            REPEAT_##n(TILE_ADD_LAST) \
        } \
        REPEAT_##n(SUM_CLOSE) \
    }

SUM_TILE(4)
#if TILE_ROWS >= 8
SUM_TILE(8)
#endif
#if TILE_ROWS >= 12
SUM_TILE(12)
#endif

/* Some rows, as many as a tile takes of them; returns how many. */
ALWAYS_INLINE int64_t sum_tile(int64_t rows, SUM_TILE_ARGUMENTS) {
    (void)rows;
#if TILE_ROWS >= 12
    if (rows >= 12) {
        sum_tile_12(x, stride, w, step, inner, factors, sums, sums_stride);
        return 12;
    }
#endif
#if TILE_ROWS >= 8
    if (rows >= 8) {
        sum_tile_8(x, stride, w, step, inner, factors, sums, sums_stride);
        return 8;
    }
#endif
    sum_tile_4(x, stride, w, step, inner, factors, sums, sums_stride);
    return 4;
}

/* One row by WIDE_STRIPS whole strips, `strip` elements apart: one tile's sums of a single row are
 * too few to hide the latency of adding to them. */
#define WIDE_AT(t) (w + (t) / STRIP_TILES * strip + (t) % STRIP_TILES * 2 * VECTOR_STEP)
#define WIDE_ADD(t) \
    { \
        words_t low_words = words_at(WIDE_AT(t)), high_words = words_at(WIDE_AT(t) + VECTOR_STEP); \
        TILE_TURN(t, value) \
    }
#define WIDE_CLOSE(t) store_tile(low##t, high##t, y + (t) * TILE_COLUMNS);

static void tile_wide(const elem_t *x, const elem_t *w, int64_t strip, int64_t inner, elem_t *y) {
    REPEAT_4(TILE_OPEN)
    int64_t k = 0;
    for (; k + PER_WORD <= inner; k += PER_WORD, x += PER_WORD, w += STRIP_STEP) {
        value_t value = value_of(x);
        REPEAT_4(WIDE_ADD)
    }
    if (k < inner) {
        value_t value = last_value_of(x);
        REPEAT_4(WIDE_ADD)
    }
    REPEAT_4(WIDE_CLOSE)
}

/* Words of `columns` columns from PER_WORD rows. */
ALWAYS_INLINE void pack_words(const elem_t *row, const elem_t *next, int64_t columns,
                              elem_t *packed) {
#if GLM_AVX512 && defined(ELEM_BF16)
    if (columns == NZ_STRIP) {
        const __m512i front = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
        const __m512i back = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
        __m512i a = _mm512_loadu_si512(row), b = _mm512_loadu_si512(next);
        __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
        _mm512_storeu_si512(packed, _mm512_permutex2var_epi64(low, front, high));
        _mm512_storeu_si512(packed + NZ_STRIP, _mm512_permutex2var_epi64(low, back, high));
        return;
    }
#endif
#ifdef ELEM_BF16
    for (int64_t c = 0; c < columns; c++) {
        packed[2 * c] = row[c];
        packed[2 * c + 1] = next[c];
    }
#else
    (void)next;
    memcpy(packed, row, (size_t)columns * sizeof(elem_t));
#endif
}

#endif
