/* Choice of the best positions from their scores. Ties go to the lower position. */
#ifndef GLM_SELECT_H
#define GLM_SELECT_H

#include "elem.h"

/* Map floats to integers of the same order. */
ALWAYS_INLINE uint32_t sortable(float x) {
    union { float value; uint32_t bits; } wide = {.value = x + 0.0f}; /* -0 becomes 0: they tie */
    uint32_t is_negative = wide.bits >> 31;
    return wide.bits ^ ((0u - is_negative) | 0x80000000u);
}

/* Of `n` keys, the bits above `shift` of the `*wanted`-th largest; `*wanted` becomes its rank among
 * the keys that share them. */
static uint32_t find_digit(const uint32_t *keys, int64_t n, int shift, int64_t *wanted) {
    enum { BINS = 1 << 11 };
    int32_t bins[BINS] = {0};
    for (int64_t i = 0; i < n; i++) bins[(keys[i] >> shift) & (BINS - 1)]++;
    uint32_t bin = BINS - 1;
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

/* Write the positions of the `count` largest of `n` keys in ascending order (count < n). The digits
 * of the smallest of them are found from above; few keys are left after the first digit. */
static void select_best(const uint32_t *keys, int64_t n, int64_t count, uint32_t *kept,
                        int32_t *positions) {
    int64_t wanted = count, left = n;
    uint32_t least = 0;
    const uint32_t *among = keys;
    static const int shifts[] = {21, 10, 0};
    for (int i = 0; i < 3; i++) {
        /* The last digit has 10 bits; its upper neighbour bit is the same in every key left. */
        uint32_t digit = find_digit(among, left, shifts[i], &wanted);
        least |= digit << shifts[i];
        left = keep_digit(among, left, shifts[i], digit, kept);
        among = kept;
    }
    int64_t written = 0;
    for (int64_t i = 0; i < n; i++) {
        int is_tied = keys[i] == least;
        positions[written] = (int32_t)i;
        written += keys[i] > least || (is_tied && wanted > 0);
        wanted -= is_tied;
        if (written == count) return;
    }
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
