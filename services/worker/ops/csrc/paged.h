/* Addressing of a flattened step over paged caches. */
#ifndef GLM_PAGED_H
#define GLM_PAGED_H

#include "elem.h"

enum { BLOCK = 128 }; /* slots; the caller checks that caches are cut this way */

typedef struct {
    int64_t tokens, sequences, max_blocks, num_blocks;
    const int32_t *ends;   /* inclusive prefix sum of tokens per sequence */
    const int32_t *lens;   /* KV length per sequence */
    const int32_t *blocks; /* [sequences, max_blocks] */
} paged_t;

/* Sequence of a token: the first whose end lies past it; -1 for rows behind the last sequence. */
ALWAYS_INLINE int64_t sequence_of(const paged_t *p, int64_t token) {
    int64_t low = 0, high = p->sequences;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (p->ends[middle] > token) high = middle;
        else low = middle + 1;
    }
    return low < p->sequences ? low : -1;
}

/* Keys a token may see: every key up to itself, the last query of a sequence seeing all. */
ALWAYS_INLINE int64_t causal_limit(const paged_t *p, int64_t sequence, int64_t token) {
    int64_t limit = p->lens[sequence] - p->ends[sequence] + token + 1;
    return limit < 0 ? 0 : limit;
}

ALWAYS_INLINE int64_t row_of(const int32_t *table, uint32_t position) {
    return (int64_t)table[position / BLOCK] * BLOCK + position % BLOCK;
}

/* Whether every block that the lengths reach exists: a bad table must not read foreign memory. */
static inline int is_in_range(const paged_t *p) {
    for (int64_t s = 0; s < p->sequences; s++) {
        int64_t used = (p->lens[s] + BLOCK - 1) / BLOCK;
        if (used > p->max_blocks) return 0;
        for (int64_t b = 0; b < used; b++) {
            int32_t block = p->blocks[s * p->max_blocks + b];
            if (block < 0 || block >= p->num_blocks) return 0;
        }
    }
    return 1;
}

#endif
