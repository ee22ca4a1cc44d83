/* Choice of the best positions from their scores. Ties go to the lower position. */
#ifndef GLM_SELECT_H
#define GLM_SELECT_H

#include "vector.h"

/* Map floats to integers of the same order. */
ALWAYS_INLINE uint32_t sortable(float x) {
    union { float value; uint32_t bits; } wide = {.value = x + 0.0f}; /* -0 becomes 0: they tie */
    uint32_t is_negative = wide.bits >> 31;
    return wide.bits ^ ((0u - is_negative) | 0x80000000u);
}

/* Of `n` keys, how many are `least` or more. */
ALWAYS_INLINE int64_t count_from(const uint32_t *keys, int64_t n, uint32_t least) {
    int32_t count = 0;
#if GLM_AVX512
    const __m512i bound = _mm512_set1_epi32((int32_t)least);
    for (int64_t i = 0; i < n; i += VECTOR) {
        const __mmask16 mask = lanes_before(i, n);
        __m512i some = _mm512_maskz_loadu_epi32(mask, keys + i);
        count += __builtin_popcount(_mm512_mask_cmpge_epu32_mask(mask, some, bound));
    }
#else
#pragma omp simd reduction(+ : count)
    for (int64_t i = 0; i < n; i++) count += keys[i] >= least;
#endif
    return count;
}

/* The `wanted`-th largest of a few keys, bit by bit: counting them is quicker than bins are. */
static uint32_t find_among_few(const uint32_t *keys, int64_t n, int64_t wanted) {
    uint32_t least = 0;
    for (uint32_t bit = 1u << 31; bit; bit >>= 1)
        if (count_from(keys, n, least | bit) >= wanted) least |= bit;
    return least;
}

/* Of `n` keys, the bits above `shift` of the `*wanted`-th largest; `*wanted` becomes its rank among
 * the keys that share them. */
static uint32_t find_digit(const uint32_t *keys, int64_t n, int shift, int64_t *wanted) {
    enum { BINS = 1 << 11, STEP = 16 };
    int32_t bins[BINS] = {0};
    for (int64_t i = 0; i < n; i++) bins[(keys[i] >> shift) & (BINS - 1)]++;
    uint32_t bin = BINS - 1;
    for (;; bin -= STEP) {
        int32_t total = 0;
        for (uint32_t i = 0; i < STEP; i++) total += bins[bin - i];
        if (total >= *wanted) break;
        *wanted -= total;
    }
    while (bins[bin] < *wanted) *wanted -= bins[bin--];
    return bin;
}

/* Keep the keys whose bits above `shift` are `digit`; returns how many. */
static int64_t keep_digit(const uint32_t *keys, int64_t n, int shift, uint32_t digit,
                          uint32_t *kept) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {
        kept[count] = keys[i];
        count += ((keys[i] >> shift) & 2047u) == digit;
    }
    return count;
}

/* The `wanted`-th largest of many keys, by its digits from above; few keys are left after the first
 * one. */
static uint32_t find_among_many(const uint32_t *keys, int64_t n, int64_t wanted, uint32_t *kept) {
    uint32_t least = 0;
    static const int shifts[] = {21, 10, 0};
    for (int i = 0; i < 3; i++) {
        /* The last digit has 10 bits; its upper neighbour bit is the same in every key left. */
        uint32_t digit = find_digit(keys, n, shifts[i], &wanted);
        least |= digit << shifts[i];
        n = keep_digit(keys, n, shifts[i], digit, kept);
        keys = kept;
    }
    return least;
}

/* Write the positions of the keys above `least`, and of the first that equal it, in ascending order:
 * `count` in all. */
static void write_best(const uint32_t *keys, int64_t n, uint32_t least, int64_t count,
                       int32_t *positions) {
    int64_t written = 0, wanted = least < UINT32_MAX ? count - count_from(keys, n, least + 1) : count;
#if GLM_AVX512
    const __m512i bound = _mm512_set1_epi32((int32_t)least);
    __m512i places = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int64_t i = 0; written < count; i += VECTOR) {
        const __mmask16 mask = lanes_before(i, n);
        __m512i some = _mm512_maskz_loadu_epi32(mask, keys + i);
        const uint32_t first = wanted < VECTOR ? (1u << wanted) - 1u : 0xffffu;
        uint32_t tied = _pdep_u32(first, _mm512_mask_cmpeq_epu32_mask(mask, some, bound));
        uint32_t chosen = tied | _mm512_mask_cmpgt_epu32_mask(mask, some, bound);
        const int more = __builtin_popcount(chosen);
        _mm512_mask_storeu_epi32(positions + written, (__mmask16)((1u << more) - 1u),
                                 _mm512_maskz_compress_epi32((__mmask16)chosen, places));
        places = _mm512_add_epi32(places, _mm512_set1_epi32(VECTOR));
        wanted -= __builtin_popcount(tied);
        written += more;
    }
#else
    for (int64_t i = 0; i < n && written < count; i++) {
        int is_tied = keys[i] == least;
        positions[written] = (int32_t)i;
        written += keys[i] > least || (is_tied && wanted > 0);
        wanted -= is_tied;
    }
#endif
}

/* Write the positions of the `count` largest of `n` keys in ascending order (count < n). */
static void select_best(const uint32_t *keys, int64_t n, int64_t count, uint32_t *kept,
                        int32_t *positions) {
    enum { FEW = 4096 };
    uint32_t least = n <= FEW ? find_among_few(keys, n, count) : find_among_many(keys, n, count, kept);
    write_best(keys, n, least, count, positions);
}

/* What one thread needs for the longest sequence; made when the first token needs it. */
typedef struct {
    float *scores;
    uint32_t *keys, *kept;
} space_t;

/* Room for `longest` scores and PADDING more, which a kernel may write past the last key. */
enum { PADDING = 32 };

static int get_space(int64_t longest, space_t *space, int *status) {
    if (space->scores) return 1;
    size_t count = (size_t)longest + PADDING;
    space->scores = malloc(3 * count * sizeof(float));
    if (!space->scores) {
        __atomic_store_n(status, NO_MEMORY, __ATOMIC_RELAXED);
        return 0;
    }
    space->keys = (uint32_t *)(space->scores + count);
    space->kept = space->keys + count;
    return 1;
}

/* All of the first `limit` positions, for limit <= count, and -1 behind them. */
ALWAYS_INLINE void select_all(int64_t limit, int64_t count, int32_t *positions) {
    for (int64_t i = 0; i < limit; i++) positions[i] = (int32_t)i;
    memset(positions + limit, 0xff, (size_t)(count - limit) * sizeof(int32_t));
}

/* The best `count` of the `limit` positions that were scored. */
static void select_scored(const space_t *space, int64_t limit, int64_t count, int32_t *positions) {
    for (int64_t i = 0; i < limit; i++) space->keys[i] = sortable(space->scores[i]);
    select_best(space->keys, limit, count, space->kept, positions);
}

#endif
