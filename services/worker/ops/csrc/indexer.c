/* Selection of the best positions per token. Ties go to the lower position. */
#include "dot.h"
#include "paged.h"

enum { HEAD = 128, MAX_HEADS = 64 };

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

typedef struct {
    paged_t paged;
    const elem_t *query, *keys, *weights;
    int64_t heads, weight_stride, count, longest;
    int32_t *positions;
    int *status;
} select_t;

/* `scores` holds `longest` values; it is made when the first token needs it. */
static void select_for_token(const select_t *s, int64_t token, float **scores) {
    const paged_t *p = &s->paged;
    int64_t sequence = sequence_of(p, token), heads = s->heads;
    int64_t limit = sequence < 0 ? 0 : causal_limit(p, sequence, token);
    int32_t *positions = s->positions + token * s->count;
    if (limit <= s->count) {
        for (int64_t i = 0; i < limit; i++) positions[i] = (int32_t)i;
        memset(positions + limit, 0xff, (size_t)(s->count - limit) * sizeof(int32_t));
        return;
    }
    if (!*scores) *scores = malloc((size_t)s->longest * sizeof(float));
    if (!*scores) {
        __atomic_store_n(s->status, NO_MEMORY, __ATOMIC_RELAXED);
        return;
    }
    float weights[MAX_HEADS + DOT] = {0}; /* past the last head nothing weighs */
    for (int64_t head = 0; head < heads; head++)
        weights[head] = to_float(s->weights[token * s->weight_stride + head]);
    score_keys(p, p->blocks + sequence * p->max_blocks, s->query + token * heads * HEAD, s->keys,
               weights, heads, limit, *scores);
    select_best(*scores, limit, s->count, positions);
}

static void select_tokens(const void *context, int64_t first, int64_t last) {
    float *scores = NULL;
    for (int64_t token = first; token < last; token++) select_for_token(context, token, &scores);
    free(scores);
}

int KERNEL(lightning_indexer)(int64_t tokens, int64_t heads, int64_t weight_stride,
                              int64_t sequences, int64_t max_blocks, int64_t num_blocks,
                              int64_t block_size, int64_t count, const elem_t *query,
                              const elem_t *keys, const elem_t *weights, const int32_t *ends,
                              const int32_t *lens, const int32_t *blocks, int32_t *positions) {
    int status = OK;
    select_t s = {{tokens, sequences, max_blocks, num_blocks, block_size, ends, lens, blocks},
                  query, keys, weights, heads, weight_stride, count, 0, positions, &status};
    if (heads > MAX_HEADS || !is_in_range(&s.paged)) return OUT_OF_RANGE;
    for (int64_t i = 0; i < sequences; i++) s.longest = lens[i] > s.longest ? lens[i] : s.longest;
    if (s.longest > count)
        glm_run(tokens, 4, select_tokens, &s);
    else
        over_rows(tokens, count / 8, select_tokens, &s); /* only filled, at several per cycle */
    return status;
}
