/* Selection of the best positions per token. Ties go to the lower position. */
#include "dot.h"
#include "paged.h"

enum { HEAD = 128 };

/* Scores of every visible key of one token. */
static void score_keys(const paged_t *p, const int32_t *table, const elem_t *query,
                       const elem_t *keys, const float *weights, int64_t heads, int64_t limit,
                       float *scores) {
    for (int64_t key = 0; key < limit; key += DOT) {
        const elem_t *rows[DOT];
        for (int j = 0; j < DOT; j++) {
            int64_t position = key + j < limit ? key + j : limit - 1;
            rows[j] = keys + row_of(p, table, position) * HEAD;
        }
        float total[DOT] = {0};
        for (int64_t head = 0; head < heads; head += DOT) {
            const elem_t *queries[DOT];
            for (int i = 0; i < DOT; i++)
                queries[i] = query + (head + i < heads ? head + i : heads - 1) * HEAD;
            lanes_t sums[16];
            float products[16];
            dot_clear(sums);
            dot_add(sums, queries, rows, HEAD);
            dot_total(sums, products);
            for (int i = 0; i < DOT; i++)
                for (int j = 0; j < DOT; j++) {
                    float product = products[i * DOT + j];
                    total[j] += weights[head + i] * (product > 0.0f ? product : 0.0f);
                }
        }
        for (int j = 0; j < DOT && key + j < limit; j++) scores[key + j] = total[j];
    }
}

/* Map floats to integers of the same order. */
ALWAYS_INLINE uint32_t sortable(float x) {
    union { float value; uint32_t bits; } wide = {.value = x};
    return wide.bits & 0x80000000u ? ~wide.bits : wide.bits | 0x80000000u;
}

/* Write the positions of the `count` largest scores in ascending order (count < n). */
static void select_best(const float *scores, int64_t n, int64_t count, int32_t *positions) {
    uint32_t prefix = 0, mask = 0;
    int64_t wanted = count; /* still to be found among keys that match the prefix */
    for (int shift = 24; shift >= 0; shift -= 8) {
        int64_t bins[256] = {0};
        for (int64_t i = 0; i < n; i++) {
            uint32_t key = sortable(scores[i]);
            if ((key & mask) == prefix) bins[(key >> shift) & 255u]++;
        }
        uint32_t bin = 255;
        while (bins[bin] < wanted) wanted -= bins[bin--];
        prefix |= bin << shift;
        mask |= 255u << shift;
    }
    int64_t written = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t key = sortable(scores[i]);
        if (key > prefix || (key == prefix && wanted-- > 0)) positions[written++] = (int32_t)i;
    }
}

static void select_for_token(const paged_t *p, int64_t token, const elem_t *query,
                             const elem_t *keys, const elem_t *weights, int64_t heads,
                             int64_t count, float *scores, int32_t *positions) {
    int64_t sequence = sequence_of(p, token);
    int64_t limit = sequence < 0 ? 0 : causal_limit(p, sequence, token);
    if (limit <= count) {
        for (int64_t i = 0; i < limit; i++) positions[i] = (int32_t)i;
        memset(positions + limit, 0xff, (size_t)(count - limit) * sizeof(int32_t));
        return;
    }
    float wide[64 + DOT] = {0}; /* heads are at most 64; the rest weighs nothing */
    for (int64_t head = 0; head < heads; head++) wide[head] = to_float(weights[head]);
    score_keys(p, p->blocks + sequence * p->max_blocks, query, keys, wide, heads, limit, scores);
    select_best(scores, limit, count, positions);
}

int KERNEL(lightning_indexer)(int64_t tokens, int64_t heads, int64_t weight_stride,
                              int64_t sequences, int64_t max_blocks, int64_t num_blocks,
                              int64_t block_size, int64_t count, const elem_t *query,
                              const elem_t *keys, const elem_t *weights, const int32_t *ends,
                              const int32_t *lens, const int32_t *blocks, int32_t *positions) {
    paged_t p = {tokens, sequences, max_blocks, num_blocks, block_size, ends, lens, blocks};
    if (heads > 64 || !is_in_range(&p)) return OUT_OF_RANGE;
    int64_t longest = 0;
    for (int64_t s = 0; s < sequences; s++) longest = lens[s] > longest ? lens[s] : longest;
    int is_scored = longest > count, status = OK;
#pragma omp parallel if (is_scored || tokens * count > PARALLEL_ELEMENTS)
    {
        float *scores = is_scored ? malloc((size_t)longest * sizeof(float)) : NULL;
        if (is_scored && !scores) {
#pragma omp atomic write
            status = NO_MEMORY;
        }
#pragma omp barrier
        if (status == OK) {
#pragma omp for schedule(dynamic, 4)
            for (int64_t token = 0; token < tokens; token++)
                select_for_token(&p, token, query + token * heads * HEAD, keys,
                                 weights + token * weight_stride, heads, count, scores,
                                 positions + token * count);
        }
        free(scores);
    }
    return status;
}
