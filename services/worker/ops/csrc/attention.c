/* Attention of each token over its selected positions, on the cached latent rows themselves.
 *
 * Keys are taken TILE at a time: scores, running softmax, weighted sum; so a row is read from
 * memory once. Heads are taken DOT at a time.
 */
#include "dot.h"
#include "paged.h"

enum { LATENT = 512, ROTARY = 64, TILE = 32 };

typedef struct {
    const elem_t *latent[TILE], *rope[TILE];
    int count; /* valid rows; the rest repeat the last one and weigh nothing */
} keys_t;

/* Running state of DOT heads. */
typedef struct {
    float largest[DOT], total[DOT];
    float sum[DOT][LATENT] __attribute__((aligned(64))); /* in the order of accumulate() */
} state_t;

/* scores[i][k] for DOT heads and a tile. */
static void score_tile(const elem_t *const query[DOT], const elem_t *const rope[DOT],
                       const keys_t *keys, float scale, float scores[DOT][TILE]) {
    for (int k = 0; k < keys->count; k += DOT) {
        lanes_t sums[16];
        float totals[16];
        dot_clear(sums);
        dot_add(sums, query, keys->latent + k, LATENT);
        dot_add(sums, rope, keys->rope + k, ROTARY);
        dot_total(sums, totals);
        for (int i = 0; i < DOT; i++)
            for (int j = 0; j < DOT; j++) scores[i][k + j] = totals[i * DOT + j] * scale;
    }
}

#if GLM_AVX512 && defined(ELEM_BF16)
/* Weights are rounded to bf16 (the totals use the rounded values) and two rows are taken at once.
 * Interleaving them leaves columns as (0-3, 8-11, ..) and (4-7, 12-15, ..); `sum` keeps that order. */
ALWAYS_INLINE void accumulate(state_t *state, const keys_t *keys, float weights[DOT][TILE]) {
    int32_t pairs[DOT][TILE / 2];
    int count = (keys->count + 1) / 2;
    for (int i = 0; i < DOT; i++) {
        __m512 front = _mm512_loadu_ps(weights[i]), back = _mm512_loadu_ps(weights[i] + 16);
        _mm512_storeu_si512(pairs[i], (__m512i)_mm512_cvtne2ps_pbh(back, front));
    }
    for (int at = 0; at < LATENT; at += 64) {
        __m512 sums[DOT][4];
        for (int i = 0; i < DOT; i++)
            for (int c = 0; c < 4; c++) sums[i][c] = _mm512_load_ps(state->sum[i] + at + 16 * c);
        for (int k = 0; k < count; k++) {
            const elem_t *first = keys->latent[2 * k] + at, *second = keys->latent[2 * k + 1] + at;
            __m512i a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(second);
            __m512i c = _mm512_loadu_si512(first + 32), d = _mm512_loadu_si512(second + 32);
            __m512bh value[4] = {
                (__m512bh)_mm512_unpacklo_epi16(a, b), (__m512bh)_mm512_unpackhi_epi16(a, b),
                (__m512bh)_mm512_unpacklo_epi16(c, d), (__m512bh)_mm512_unpackhi_epi16(c, d)};
            for (int i = 0; i < DOT; i++) {
                __m512bh weight = (__m512bh)_mm512_set1_epi32(pairs[i][k]);
                for (int j = 0; j < 4; j++)
                    sums[i][j] = _mm512_dpbf16_ps(sums[i][j], weight, value[j]);
            }
        }
        for (int i = 0; i < DOT; i++)
            for (int c = 0; c < 4; c++) _mm512_store_ps(state->sum[i] + at + 16 * c, sums[i][c]);
    }
}

ALWAYS_INLINE float kept_weight(float weight) { return to_float(from_float(weight)); }

ALWAYS_INLINE int column_of(int at) {
    int block = at / 32 * 32, half = at % 32 / 16, lane = at % 16;
    return block + lane / 4 * 8 + half * 4 + lane % 4;
}
#else
ALWAYS_INLINE void accumulate(state_t *state, const keys_t *keys, float weights[DOT][TILE]) {
    for (int k = 0; k < keys->count; k++) {
        const elem_t *row = keys->latent[k];
        for (int i = 0; i < DOT; i++) {
            float weight = weights[i][k];
#pragma omp simd
            for (int at = 0; at < LATENT; at++) state->sum[i][at] += weight * to_float(row[at]);
        }
    }
}

ALWAYS_INLINE float kept_weight(float weight) { return weight; }
ALWAYS_INLINE int column_of(int at) { return at; }
#endif

/* Turn scores into weights relative to the largest score so far; rescale what was summed before. */
static void weigh_tile(state_t *state, int count, float scores[DOT][TILE]) {
    for (int i = 0; i < DOT; i++) {
        float largest = state->largest[i];
        for (int k = 0; k < count; k++) largest = scores[i][k] > largest ? scores[i][k] : largest;
        if (largest > state->largest[i]) {
            /* The first tile rescales zeros, so that the clamped exp(-inf) does no harm. */
            float factor = fast_exp(state->largest[i] - largest);
            state->total[i] *= factor;
            for (int at = 0; at < LATENT; at++) state->sum[i][at] *= factor;
            state->largest[i] = largest;
        }
        float total = 0.0f;
        for (int k = 0; k < TILE; k++) {
            float weight = k < count ? kept_weight(fast_exp(scores[i][k] - largest)) : 0.0f;
            scores[i][k] = weight;
            total += weight;
        }
        state->total[i] += total;
    }
}

/* Gather up to TILE positions from `*at` on; returns 0 when the list has ended. */
static int next_tile(const paged_t *p, const int32_t *table, const int32_t *positions,
                     int64_t width, int64_t limit, const elem_t *latent, const elem_t *rope,
                     int64_t *at, keys_t *keys) {
    keys->count = 0;
    while (*at < width && keys->count < TILE) {
        int32_t position = positions[*at];
        if (position < 0) {
            *at = width;
            break;
        }
        ++*at;
        if (position >= limit) continue;
        int64_t row = row_of(p, table, position);
        keys->latent[keys->count] = latent + row * LATENT;
        keys->rope[keys->count++] = rope + row * ROTARY;
    }
    if (keys->count == 0) return 0;
    for (int k = keys->count; k < (keys->count + DOT - 1) / DOT * DOT; k++) {
        keys->latent[k] = keys->latent[keys->count - 1];
        keys->rope[k] = keys->rope[keys->count - 1];
    }
    return 1;
}

typedef struct {
    const elem_t *query, *query_rope, *latent, *rope;
    const int32_t *positions;
    int64_t heads, width, is_causal;
    float scale;
    elem_t *out;
} attention_t;

/* One token, heads `head` to `head + DOT`. */
static void attend(const paged_t *p, const attention_t *a, int64_t token, int64_t head) {
    int64_t heads = a->heads - head < DOT ? a->heads - head : DOT;
    int64_t sequence = sequence_of(p, token);
    elem_t *out = a->out + (token * a->heads + head) * LATENT;
    int64_t limit = 0;
    if (sequence >= 0)
        limit = a->is_causal ? causal_limit(p, sequence, token) : p->lens[sequence];
    int64_t width = a->width < limit ? a->width : limit, at = 0;
    const elem_t *query[DOT], *rope[DOT];
    for (int i = 0; i < DOT; i++) {
        int64_t row = token * a->heads + head + (i < heads ? i : heads - 1);
        query[i] = a->query + row * LATENT;
        rope[i] = a->query_rope + row * ROTARY;
    }
    state_t state;
    memset(&state, 0, sizeof state);
    for (int i = 0; i < DOT; i++) state.largest[i] = -INFINITY;
    keys_t keys;
    while (next_tile(p, p->blocks + sequence * p->max_blocks, a->positions + token * a->width,
                     width, limit, a->latent, a->rope, &at, &keys)) {
        float scores[DOT][TILE] __attribute__((aligned(64)));
        score_tile(query, rope, &keys, a->scale, scores);
        weigh_tile(&state, keys.count, scores);
        accumulate(&state, &keys, scores);
    }
    for (int64_t i = 0; i < heads; i++) {
        float factor = state.total[i] > 0.0f ? 1.0f / state.total[i] : 0.0f;
        for (int c = 0; c < LATENT; c++)
            out[i * LATENT + column_of(c)] = from_float(state.sum[i][c] * factor);
    }
}

int KERNEL(sparse_attention)(int64_t tokens, int64_t heads, int64_t sequences, int64_t max_blocks,
                             int64_t num_blocks, int64_t block_size, int64_t width,
                             int64_t is_causal, double scale, const elem_t *query,
                             const elem_t *query_rope, const elem_t *latent, const elem_t *rope,
                             const int32_t *positions, const int32_t *ends, const int32_t *lens,
                             const int32_t *blocks, elem_t *out) {
    paged_t p = {tokens, sequences, max_blocks, num_blocks, block_size, ends, lens, blocks};
    if (!is_in_range(&p)) return OUT_OF_RANGE;
    attention_t a = {query, query_rope, latent, rope, positions, heads, width, is_causal,
                     (float)scale, out};
    int64_t groups = (heads + DOT - 1) / DOT;
#pragma omp parallel for schedule(dynamic, 1) if (tokens * groups > 1)
    for (int64_t item = 0; item < tokens * groups; item++)
        attend(&p, &a, item / groups, item % groups * DOT);
    return OK;
}
