/* Selection of the best positions per token, on keys of the element type. */
#include "dot.h"
#include "paged.h"
#include "select.h"

enum { HEAD = 128, MAX_HEADS = 64 };

/* Scores of 4 keys: sum over heads of weight times the positive part of the product. `weights`
 * holds each head's weight DOT times; past the last head nothing weighs. */
#if GLM_AVX512
ALWAYS_INLINE void score_four(const elem_t *query, const elem_t *const rows[DOT],
                              const float *weights, int64_t heads, float scores[DOT]) {
    __m512 total = _mm512_setzero_ps();
    for (int64_t head = 0; head < heads; head += DOT) {
        const elem_t *queries[DOT], *keys[DOT];
        for (int i = 0; i < DOT; i++) {
            queries[i] = query + (head + i < heads ? head + i : heads - 1) * HEAD;
            keys[i] = rows[i];
            /* Or gcc would load the keys once, and spill what the registers do not hold. */
            __asm__("" : "+r"(keys[i]));
        }
        lanes_t sums[16];
        dot_clear(sums);
        dot_add(sums, queries, keys, HEAD);
        __m512 positive = _mm512_max_ps(dot_reduce(sums), _mm512_setzero_ps());
        total = _mm512_fmadd_ps(positive, _mm512_loadu_ps(weights + head * DOT), total);
    }
    __m256 pair = _mm256_add_ps(_mm512_castps512_ps256(total), _mm512_extractf32x8_ps(total, 1));
    _mm_storeu_ps(scores, _mm_add_ps(_mm256_castps256_ps128(pair), _mm256_extractf128_ps(pair, 1)));
}
#else
ALWAYS_INLINE void score_four(const elem_t *query, const elem_t *const rows[DOT],
                              const float *weights, int64_t heads, float scores[DOT]) {
    float total[DOT] = {0};
    for (int64_t head = 0; head < heads; head += DOT) {
        const elem_t *queries[DOT];
        for (int i = 0; i < DOT; i++)
            queries[i] = query + (head + i < heads ? head + i : heads - 1) * HEAD;
        lanes_t sums[16];
        dot_clear(sums);
        dot_add(sums, queries, rows, HEAD);
        for (int i = 0; i < DOT; i++)
            for (int j = 0; j < DOT; j++) {
                float product = sums[i * DOT + j];
                total[j] += weights[(head + i) * DOT] * (product > 0.0f ? product : 0.0f);
            }
    }
    memcpy(scores, total, sizeof total);
}
#endif

/* Ask memory for DOT keys, a little before their turn. */
ALWAYS_INLINE void ask_for(const elem_t *keys) {
    for (int64_t at = 0; at < DOT * HEAD; at += 64 / (int64_t)sizeof(elem_t))
        __builtin_prefetch(keys + at);
}

/* Scores of the first `limit` keys; `scores` has room for DOT more. `is_far`: no token before this
 * one brought them near. */
static void score_keys(const int32_t *table, const elem_t *query, const elem_t *keys,
                       const float *weights, int64_t heads, int64_t limit, int is_far,
                       float *scores) {
    enum { LEAD = 16 }; /* keys between those at work and those asked for */
    for (int64_t start = 0; start < limit; start += BLOCK) {
        const elem_t *block = keys + (int64_t)table[start / BLOCK] * BLOCK * HEAD;
        int64_t count = limit - start < BLOCK ? limit - start : BLOCK;
        for (int64_t key = 0; key < count; key += DOT) {
            const elem_t *rows[DOT];
            for (int j = 0; j < DOT; j++)
                rows[j] = block + (key + j < count ? key + j : count - 1) * HEAD;
            if (is_far && start + key + LEAD < limit)
                ask_for(keys + row_of(table, (uint32_t)(start + key + LEAD)) * HEAD);
            score_four(query, rows, weights, heads, scores + start + key);
        }
    }
}

typedef struct {
    paged_t paged;
    const elem_t *query, *keys, *weights;
    int64_t heads, weight_stride, count, longest;
    int32_t *positions;
    int *status;
} select_t;

static void select_for_token(const select_t *s, int64_t token, int64_t first, space_t *space) {
    const paged_t *p = &s->paged;
    int64_t sequence = sequence_of(p, token), heads = s->heads;
    int64_t limit = sequence < 0 ? 0 : causal_limit(p, sequence, token);
    int32_t *positions = s->positions + token * s->count;
    if (limit <= s->count) {
        select_all(limit, s->count, positions);
        return;
    }
    if (!get_space(s->longest, space, s->status)) return;
    float weights[(MAX_HEADS + DOT) * DOT] = {0};
    for (int64_t head = 0; head < heads; head++)
        for (int j = 0; j < DOT; j++)
            weights[head * DOT + j] = to_float(s->weights[token * s->weight_stride + head]);
    const int is_far = token == first || sequence_of(p, token - 1) != sequence;
    score_keys(p->blocks + sequence * p->max_blocks, s->query + token * heads * HEAD, s->keys,
               weights, heads, limit, is_far, space->scores);
    select_scored(space, limit, s->count, positions);
}

static void select_tokens(const void *context, int64_t first, int64_t last) {
    space_t space = {0};
    for (int64_t token = first; token < last; token++)
        select_for_token(context, token, first, &space);
    free(space.scores);
}

int KERNEL(lightning_indexer)(int64_t tokens, int64_t heads, int64_t weight_stride,
                              int64_t sequences, int64_t max_blocks, int64_t num_blocks,
                              int64_t count, const elem_t *query, const elem_t *keys,
                              const elem_t *weights, const int32_t *ends, const int32_t *lens,
                              const int32_t *blocks, int32_t *positions) {
    int status = OK;
    select_t s = {{tokens, sequences, max_blocks, num_blocks, ends, lens, blocks},
                  query, keys, weights, heads, weight_stride, count, 0, positions, &status};
    if (heads > MAX_HEADS || !is_in_range(&s.paged)) return OUT_OF_RANGE;
    for (int64_t i = 0; i < sequences; i++) s.longest = lens[i] > s.longest ? lens[i] : s.longest;
    if (s.longest > count)
        glm_run(tokens, tokens < 32 ? 1 : 4, select_tokens, &s);
    else
        over_rows(tokens, count / 8, select_tokens, &s); /* only filled, at several per cycle */
    return status;
}
