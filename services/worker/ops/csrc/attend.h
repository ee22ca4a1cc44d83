/* Attention over listed positions, a tile of keys at a time: scores, running softmax, weighted sum.
 *
 * Heads are taken DOT at a time. What a key is made of is the caller's: it fills in `keys_t`.
 */
#ifndef GLM_ATTEND_H
#define GLM_ATTEND_H

#include "dot.h"
#include "pairs.h"
#include "paged.h"

enum { LATENT = 512, ROTARY = 64, TILE = 32, PARALLEL_ROWS = 512 };

typedef struct {
    const elem_t *latent[TILE], *rope[TILE];
    int count; /* valid rows; the rest repeat one of them and weigh nothing */
} keys_t;

/* The first bytes of a latent row are asked for while a tile before it is scored, the others while
 * that tile is summed up: memory must have work all the time. */
enum {
    LINE = 64,
    LATENT_BYTES = LATENT * sizeof(elem_t),
#if GLM_AVX512 && defined(ELEM_BF16)
    FIRST_BYTES = LATENT_BYTES / 2,
#else
    FIRST_BYTES = LATENT_BYTES,
#endif
    PARTS = 4, /* of a row, while it is scored */
};

ALWAYS_INLINE void fetch(const elem_t *row, int from, int bytes) {
    const char *start = (const char *)row + from;
    for (int at = 0; at < bytes; at += LINE) __builtin_prefetch(start + at, 0, 2);
}

/* Running state of DOT heads. */
typedef struct {
    float largest[DOT], total[DOT];
    float sum[DOT][LATENT] __attribute__((aligned(64))); /* in the order of accumulate() */
} state_t;

ALWAYS_INLINE void begin(state_t *state) {
    memset(state, 0, sizeof *state);
    for (int i = 0; i < DOT; i++) state->largest[i] = -INFINITY;
}

/* scores[i][k] for DOT heads and the DOT keys from `k`. `next`: rows to ask for, or NULL. */
ALWAYS_INLINE void score_keys_of_tile(const elem_t *const query[DOT], const elem_t *const rope[DOT],
                                      const keys_t *keys, int k, float scale, const keys_t *next,
                                      float scores[DOT][TILE]) {
    lanes_t sums[16];
    float totals[16];
    dot_clear(sums);
    for (int part = 0; part < PARTS; part++) {
        const elem_t *queries[DOT], *rows[DOT];
        for (int i = 0; i < DOT; i++) {
            queries[i] = query[i] + part * (LATENT / PARTS);
            rows[i] = keys->latent[k + i] + part * (LATENT / PARTS);
            if (next)
                fetch(next->latent[k + i], part * (FIRST_BYTES / PARTS), FIRST_BYTES / PARTS);
        }
        dot_add(sums, queries, rows, LATENT / PARTS);
    }
    for (int i = 0; next && i < DOT; i++) fetch(next->rope[k + i], 0, ROTARY * sizeof(elem_t));
    dot_add(sums, rope, keys->rope + k, ROTARY);
    dot_total(sums, totals);
    for (int i = 0; i < DOT; i++)
        for (int j = 0; j < DOT; j++) scores[i][k + j] = totals[i * DOT + j] * scale;
}

#if GLM_AVX512 && defined(ELEM_BF16)
/* Weights are rounded to bf16 (the totals use the rounded values) and two rows are taken at once.
 * `sum` keeps the order of interleave(). `next`: rows to ask for, or NULL. */
ALWAYS_INLINE void accumulate(state_t *state, const keys_t *keys, const keys_t *next,
                              float weights[DOT][TILE]) {
    enum { BEHIND = (LATENT_BYTES - FIRST_BYTES) / (LATENT / 64) };
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
            for (int i = 0; next && i < 2; i++)
                fetch(next->latent[2 * k + i], FIRST_BYTES + at / 64 * BEHIND, BEHIND);
            const elem_t *first = keys->latent[2 * k] + at, *second = keys->latent[2 * k + 1] + at;
            __m512i a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(second);
            __m512i c = _mm512_loadu_si512(first + 32), d = _mm512_loadu_si512(second + 32);
            __m512bh value[4];
            interleave(a, b, value);
            interleave(c, d, value + 2);
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

ALWAYS_INLINE void finish(const float *sum, float factor, elem_t *out) {
    __m512 factors = _mm512_set1_ps(factor);
    for (int at = 0; at < LATENT; at += 32)
        store_pair(_mm512_mul_ps(_mm512_load_ps(sum + at), factors),
                   _mm512_mul_ps(_mm512_load_ps(sum + at + 16), factors), out + at, ~0u);
}
#else
ALWAYS_INLINE void accumulate(state_t *state, const keys_t *keys, const keys_t *next,
                              float weights[DOT][TILE]) {
    (void)next; /* asked for already */
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

ALWAYS_INLINE void finish(const float *sum, float factor, elem_t *out) {
    for (int at = 0; at < LATENT; at++) out[at] = from_float(sum[at] * factor);
}
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

/* The position lists of a step: what each token attends to. */
typedef struct {
    paged_t paged;
    const int32_t *positions; /* [tokens, width] */
    int64_t heads, width, is_causal;
    float scale;
} lists_t;

/* A walk along the position list of one token. */
typedef struct {
    const int32_t *table, *positions;
    int64_t at, end, limit;
} walk_t;

static walk_t walk_of(const lists_t *l, int64_t token) {
    const paged_t *p = &l->paged;
    walk_t walk = {0};
    int64_t sequence = token < p->tokens ? sequence_of(p, token) : -1;
    if (sequence < 0) return walk;
    walk.table = p->blocks + sequence * p->max_blocks;
    walk.positions = l->positions + token * l->width;
    walk.limit = l->is_causal ? causal_limit(p, sequence, token) : p->lens[sequence];
    walk.end = l->width < walk.limit ? l->width : walk.limit;
    return walk;
}

/* Cache rows of the next TILE positions of a walk at most; returns how many, 0 at the list's end. */
ALWAYS_INLINE int next_rows(walk_t *walk, int64_t rows[TILE]) {
    int count = 0;
    while (walk->at < walk->end && count < TILE) {
        int32_t position = walk->positions[walk->at++];
        if (position < 0) walk->end = 0;
        if (position < 0 || position >= walk->limit) continue;
        rows[count++] = row_of(walk->table, (uint32_t)position);
    }
    return count;
}

/* Where to begin with several threads: rows of cache that the whole step reads. */
static int64_t count_rows_read(const lists_t *l) {
    const paged_t *p = &l->paged;
    int64_t total = 0;
    for (int64_t s = 0, start = 0; s < p->sequences; start = p->ends[s++])
        total += (p->lens[s] < l->width ? p->lens[s] : l->width) * (p->ends[s] - start);
    return total;
}

/* Write DOT heads, or as many as there are. */
ALWAYS_INLINE void write_heads(const state_t *state, int64_t heads, elem_t *out) {
    for (int64_t i = 0; i < heads && i < DOT; i++) {
        float factor = state->total[i] > 0.0f ? 1.0f / state->total[i] : 0.0f;
        finish(state->sum[i], factor, out + i * LATENT);
    }
}

#endif
