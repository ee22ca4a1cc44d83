/* Selection of the best positions per token. Ties go to the lower position. */
#include "dot.h"
#include "paged.h"

enum { HEAD = 128, MAX_HEADS = 64 };

/* Scores of 4 keys: sum over heads of weight times the positive part of the product. `weights`
 * holds each head's weight DOT times; past the last head nothing weighs. */
#if GLM_AVX512
ALWAYS_INLINE void score_four(const elem_t *query, const elem_t *const rows[DOT],
                              const float *weights, int64_t heads, float scores[DOT]) {
    __m512 total = _mm512_setzero_ps();
    for (int64_t head = 0; head < heads; head += DOT) {
        const elem_t *queries[DOT];
        for (int i = 0; i < DOT; i++)
            queries[i] = query + (head + i < heads ? head + i : heads - 1) * HEAD;
        lanes_t sums[16];
        dot_clear(sums);
        dot_add(sums, queries, rows, HEAD);
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

/* Scores of the first `limit` keys; `scores` has room for DOT more. */
static void score_keys(const int32_t *table, const elem_t *query, const elem_t *keys,
                       const float *weights, int64_t heads, int64_t limit, float *scores) {
    for (int64_t start = 0; start < limit; start += BLOCK) {
        const elem_t *block = keys + (int64_t)table[start / BLOCK] * BLOCK * HEAD;
        int64_t count = limit - start < BLOCK ? limit - start : BLOCK;
        for (int64_t key = 0; key < count; key += DOT) {
            const elem_t *rows[DOT];
            for (int j = 0; j < DOT; j++)
                rows[j] = block + (key + j < count ? key + j : count - 1) * HEAD;
            score_four(query, rows, weights, heads, scores + start + key);
        }
    }
}

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

typedef struct {
    paged_t paged;
    const elem_t *query, *keys, *weights;
    int64_t heads, weight_stride, count, longest;
    int32_t *positions;
    int *status;
} select_t;

/* What one thread needs for the longest sequence; made when the first token needs it. */
typedef struct {
    float *scores;
    uint32_t *keys, *kept;
} space_t;

static int get_space(const select_t *s, space_t *space) {
    if (space->scores) return 1;
    size_t count = (size_t)s->longest + DOT;
    space->scores = malloc(3 * count * sizeof(float));
    if (!space->scores) {
        __atomic_store_n(s->status, NO_MEMORY, __ATOMIC_RELAXED);
        return 0;
    }
    space->keys = (uint32_t *)(space->scores + count);
    space->kept = space->keys + count;
    return 1;
}

static void select_for_token(const select_t *s, int64_t token, space_t *space) {
    const paged_t *p = &s->paged;
    int64_t sequence = sequence_of(p, token), heads = s->heads;
    int64_t limit = sequence < 0 ? 0 : causal_limit(p, sequence, token);
    int32_t *positions = s->positions + token * s->count;
    if (limit <= s->count) {
        for (int64_t i = 0; i < limit; i++) positions[i] = (int32_t)i;
        memset(positions + limit, 0xff, (size_t)(s->count - limit) * sizeof(int32_t));
        return;
    }
    if (!get_space(s, space)) return;
    float weights[(MAX_HEADS + DOT) * DOT] = {0};
    for (int64_t head = 0; head < heads; head++)
        for (int j = 0; j < DOT; j++)
            weights[head * DOT + j] = to_float(s->weights[token * s->weight_stride + head]);
    score_keys(p->blocks + sequence * p->max_blocks, s->query + token * heads * HEAD, s->keys,
               weights, heads, limit, space->scores);
    for (int64_t i = 0; i < limit; i++) space->keys[i] = sortable(space->scores[i]);
    select_best(space->keys, limit, s->count, space->kept, positions);
}

static void select_tokens(const void *context, int64_t first, int64_t last) {
    space_t space = {0};
    for (int64_t token = first; token < last; token++) select_for_token(context, token, &space);
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
